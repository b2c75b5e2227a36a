"""A plan in words: the numbers of its lines' outputs, and the text for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from langchain_dpicl.privacy.checks import whole
from langchain_dpicl.privacy.choice import Crowd, compared
from langchain_dpicl.privacy.lines import PlanLine
from langchain_dpicl.privacy.votes import (
    BIT,
    EXPONENTIAL,
    FALSE_RATE,
    GAUSSIAN,
    LEAD,
    TOLD,
    VOTES,
    WINNER,
    VoteNoise,
    told_probability,
)

NAMES = {
    EXPONENTIAL: "the exponential mechanism",
    WINNER: "Gaussian noise",
    GAUSSIAN: "Gaussian noise",
    BIT: "Gaussian noise on the difference",
}


def said_of_outputs(
    line: PlanLine,
    share: tuple[float, float],
    crowd: Crowd | None,
    *,
    shots: int | None,
    margins: Sequence[int],
    labels: int,
    lead: float,
) -> dict[str, Any]:
    """Return the effect of noise on a line's outputs: see `PrivacyPlan.numbers`.

    ``share``: the line's own epsilon and delta.
    """
    found: dict[str, Any] = {}
    if crowd is not None:
        found |= vars(crowd)
        if line.mechanism in (*VOTES, "embedding"):
            found["abstention"] = _abstention(line, crowd, labels)
    if line.mechanism not in VOTES:
        return found
    noise = VoteNoise(line.mechanism, line.parameter, line.own_calls)
    if line.mechanism not in (EXPONENTIAL, BIT):
        found["noise_multiplier"] = line.parameter / (1.0 if line.own_calls else 2.0**0.5)
    if not margins and crowd is not None:
        margins = sorted({crowd.ahead_by(part) for part in (0.1, 0.3, 0.5, 1.0)})
    found["flips"] = flips = []
    for margin in margins:
        row = {"margin": margin, "flip_probability": noise.flip(margin, labels)}
        if crowd is not None:
            row |= {"members": crowd.members, "expected": crowd.expected}
            whole("margin", margin, at_least=0, at_most=crowd.members)
            if shots is not None and shots > 1 and not line.own_calls:
                wide = Crowd.of(crowd.members * shots, line.rate, line.owners)
                row |= {
                    "single_shot_members": wide.members,
                    "single_shot_flip_probability": noise.flip(
                        round(margin / crowd.expected * wide.expected),
                        labels,
                    ),
                }
        flips.append(row)
    if crowd is not None and line.mechanism in NAMES:
        found["choice"] = _choice(line, share, crowd, labels, lead)
    return found


def _abstention(line: PlanLine, crowd: Crowd, labels: int) -> dict[str, Any]:
    """The probability that a release says that the members fail, if all do whose outputs are expected to count."""
    counted = int(crowd.expected)
    if line.mechanism in VOTES:
        told = VoteNoise(line.mechanism, line.parameter, line.own_calls).told(crowd.members, labels, counted)
    else:
        told = told_probability(crowd.members, line.parameter, 0, round(1 / line.options["step"]), counted)
    return {
        "members": crowd.members,
        "told_probability": told,
        "false_rate": FALSE_RATE,
        "tells": told >= TOLD,
    }


def _choice(line: PlanLine, share: tuple[float, float], crowd: Crowd, labels: int, lead: float) -> dict[str, Any]:
    """Both mechanisms of a vote side by side, and of one with a call for every owner: noise, and chance of a flip."""
    margin = crowd.ahead_by(lead)
    mechanisms = _rows(line, share, line.rate, crowd, labels, lead)
    mechanisms[line.mechanism] = {
        "parameter": line.parameter,
        "flip_probability": VoteNoise(line.mechanism, line.parameter, line.own_calls).flip(margin, labels),
    }
    found = {
        "margin": margin,
        "expected": crowd.expected,
        "mechanisms": mechanisms,
        "best": _best(mechanisms),
    }
    if line.owners is not None:
        found |= one_per_call(line, share, crowd.members, line.owners, labels, lead)
    return found


def one_per_call(
    line: PlanLine, share: tuple[float, float], members: int, owners: int, labels: int, lead: float = LEAD
) -> dict[str, Any]:
    """``one_owner_per_call``: the vote of a line of shared buckets if owners had calls of their own, as many."""
    calls = min(members, owners)
    own = Crowd.of(0, calls / owners, owners, calls)
    if line.own_calls or not (rows := _rows(line, share, calls / owners, own, labels, lead)):
        return {}
    best = _best(rows)
    return {
        "one_owner_per_call": {
            "calls": calls,
            "members": own.members,
            "mechanism": best,
            **rows[best],
        }
    }


def _rows(
    line: PlanLine, share: tuple[float, float], rate: float, crowd: Crowd, labels: int, lead: float
) -> dict[str, dict[str, float]]:
    found = compared(*share, line.count, rate, crowd, labels, lead)
    return {name: {"parameter": noise, "flip_probability": flip} for name, (noise, flip) in found.items()}


def _best(rows: dict[str, dict[str, float]]) -> str:
    return min(rows, key=lambda name: rows[name]["flip_probability"])


def words(numbers: dict[str, Any]) -> str:
    """`PrivacyPlan.numbers` for people."""
    delta = numbers["delta"]
    text = [
        f"All releases of this plan together are (epsilon, delta)-differentially private with epsilon "
        f"{numbers['epsilon']:g} and delta {delta:.3g} when all exemplars of one owner are added or removed "
        f"(certified: {numbers['certified_epsilon']:.4g}).",
        replaced_words(numbers),
    ]
    for name, line in numbers["lines"].items():
        text += ["", f"{name}: {line['releases']:,} releases. Each gives out {line['what']}."]
        owners = line["owners"]
        chosen = ""
        if owners is not None:
            large = f"; delta is not below 1/owners = {1 / owners:.3g}" if delta >= 1 / owners else ""
            chosen = f", chosen for {owners:,} owners{large}"
        text.append(f"  An owner takes part in a release with probability {line['rate']:.4g}{chosen}.")
        text.append(
            f"  One release alone costs epsilon {line['epsilon_of_one_release']:.3g}; "
            f"all {line['releases']:,} together {line['epsilon_of_this_line']:.3g}."
        )
        spent = [f"{point['releases']:,}: {point['epsilon']:.3g}" for point in line.get("curve", ())[1:-1]]
        if spent:
            text.append(f"  Epsilon on the way, after so many releases: {', '.join(spent)}.")
        for row in line.get("flips", ()):
            text.append(f"  {flip_words(row)}")
            if "single_shot_members" in row:
                text.append(
                    f"    The same share of {row['single_shot_members']} members with one exemplar each, at the same "
                    f"privacy: {row['single_shot_flip_probability']:.3g}."
                )
        text += [f"  {each}" for each in choice_words(line)]
        if "abstention" in line:
            text.append(f"  {_abstention_words(line)}")
        if "cost_per_answer" in line:
            text.append(f"  An answer costs {line['cost_per_answer']:.4g}, all of them {line['cost_of_all']:.4g}.")
    return "\n".join(text)


def replaced_words(numbers: dict[str, Any]) -> str:
    """The epsilon for neighbours that replace one owner's exemplars by others, rounded up; "" if none is finite."""
    found = numbers["replaced"]
    bounds = []
    if found["epsilon"] is not None:
        bounds.append(f"{_raised(found['epsilon'])} at the same delta")
    if found["group_delta"] < 1.0:
        bounds.append(f"{found['group_epsilon']:g} at delta {_raised(found['group_delta'])}")
    if not bounds:
        return "Nothing is promised when all exemplars of one owner are replaced by others instead."
    return (
        f"When they are replaced by others instead (one owner removed, one added), epsilon is {', or '.join(bounds)}."
    )


def _raised(value: float) -> str:
    """Return a positive number in three digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0.0 else 1.0
    return f"{math.ceil(value / unit) * unit:.3g}"


def _abstention_words(line: dict[str, Any]) -> str:
    told = line["abstention"]["told_probability"]
    made = f"{line['expected']:.3g} expected calls" if line["own_calls"] else f"{line['members']} members"
    if line["abstention"]["tells"]:
        return f"If all {made} fail, a release says so with probability {told:.3g}."
    return (
        f"{made} are too few to tell failing members from noise (a release says so with "
        f"probability {told:.2g}), so a public question goes before a charge, once a minute for each caller."
    )


def flip_words(row: dict[str, Any]) -> str:
    """A row of ``flips``."""
    ahead = f"{row['margin']}"
    if "expected" in row:
        ahead += f" of {row['members']}" if row["expected"] == row["members"] else f" of {row['expected']:.3g} expected"
    return f"A winner ahead by {ahead} votes is overturned with probability {row['flip_probability']:.3g}."


def choice_words(line: dict[str, Any]) -> list[str]:
    """The mechanism of a vote, the reason, and the change that one owner per call would make."""
    if (found := line.get("choice")) is None:
        return []
    chosen = line["mechanism"]
    rows = found["mechanisms"]
    name = NAMES[chosen]
    why = "is chosen" if found["best"] == chosen else "was asked for"
    text = []
    for other in (each for each in rows if each != chosen):
        text.append(
            f"{name[0].upper()}{name[1:]} {why}: a winner ahead by {found['margin']} of {found['expected']:.3g} "
            f"expected votes is overturned with probability {rows[chosen]['flip_probability']:.2g}, by {NAMES[other]} "
            f"{rows[other]['flip_probability']:.2g}."
        )
    if own := found.get("one_owner_per_call"):
        text.append(
            f"With one owner per call and no cap (calls={own['calls']}, padded to {own['members']}), by "
            f"{NAMES[own['mechanism']]}, the same share of votes would be overturned with probability "
            f"{own['flip_probability']:.2g}."
        )
    return text
