"""A plan in words: the numbers of its lines' outputs, and the text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_dpicl.privacy.checks import whole
from langchain_dpicl.privacy.choice import Crowd, compared
from langchain_dpicl.privacy.lines import PlanLine
from langchain_dpicl.privacy.votes import (
    EXPONENTIAL,
    FALSE_RATE,
    GAUSSIAN,
    LEAD,
    TOLD,
    VOTES,
    VoteNoise,
    told_probability,
)

NAMES = {EXPONENTIAL: "the exponential mechanism", GAUSSIAN: "Gaussian noise"}


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
    """What noise does to a line's outputs: see `PrivacyPlan.numbers`. ``share``: the line's own epsilon and delta."""
    found: dict[str, Any] = {}
    if crowd is not None:
        found |= vars(crowd)
        if line.mechanism in (*VOTES, "embedding"):
            found["abstention"] = _abstention(line, crowd, labels)
    if line.mechanism not in VOTES:
        return found
    noise = VoteNoise(line.mechanism, line.parameter, line.own_calls)
    if line.mechanism != EXPONENTIAL:
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
                single = noise.flip(round(margin / crowd.expected * wide.expected), labels)
                row |= {"single_shot_members": wide.members, "single_shot_flip_probability": single}
        flips.append(row)
    if crowd is not None and line.mechanism in NAMES:
        found["choice"] = _choice(line, share, crowd, labels, lead)
    return found


def _abstention(line: PlanLine, crowd: Crowd, labels: int) -> dict[str, Any]:
    """How likely a release says that the members fail, if all do whose outputs are expected to count."""
    counted = int(crowd.expected)
    if line.mechanism in VOTES:
        told = VoteNoise(line.mechanism, line.parameter, line.own_calls).told(crowd.members, labels, counted)
    else:
        told = told_probability(crowd.members, line.parameter, 0, round(1 / line.options["step"]), counted)
    return {"members": crowd.members, "told_probability": told, "false_rate": FALSE_RATE, "tells": told >= TOLD}


def _choice(line: PlanLine, share: tuple[float, float], crowd: Crowd, labels: int, lead: float) -> dict[str, Any]:
    """Both mechanisms of a vote side by side, and of one with a call for every owner: noise, and chance of a flip."""
    margin = crowd.ahead_by(lead)
    mechanisms = _rows(line, share, line.rate, crowd, labels, lead)
    flip = VoteNoise(line.mechanism, line.parameter, line.own_calls).flip(margin, labels)
    mechanisms[line.mechanism] = {"parameter": line.parameter, "flip_probability": flip}
    best = min(mechanisms, key=lambda name: mechanisms[name]["flip_probability"])
    found = {"margin": margin, "expected": crowd.expected, "mechanisms": mechanisms, "best": best}
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
    best = min(rows, key=lambda name: rows[name]["flip_probability"])
    return {"one_owner_per_call": {"calls": calls, "members": own.members, "mechanism": best, **rows[best]}}


def _rows(
    line: PlanLine, share: tuple[float, float], rate: float, crowd: Crowd, labels: int, lead: float
) -> dict[str, dict[str, float]]:
    found = compared(*share, line.count, rate, crowd, labels, lead)
    return {name: {"parameter": noise, "flip_probability": flip} for name, (noise, flip) in found.items()}


def words(numbers: dict[str, Any]) -> str:
    """`PrivacyPlan.numbers` for people."""
    delta = numbers["delta"]
    text = [
        f"All releases of this plan together are (epsilon, delta)-differentially private with epsilon "
        f"{numbers['epsilon']:g} and delta {delta:.3g} when all exemplars of one owner are added or removed "
        f"(certified: {numbers['certified_epsilon']:.4g})."
    ]
    for name, line in numbers["lines"].items():
        text += ["", f"{name}: {line['releases']:,} releases. Each gives out {line['what']}."]
        owners, chosen = line["owners"], ""
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
            told, tells = line["abstention"]["told_probability"], line["abstention"]["tells"]
            made = "expected calls" if line["own_calls"] else "members"
            number = f"{line['expected']:.3g}" if line["own_calls"] else f"{line['members']}"
            text.append(
                f"  If all {number} {made} fail, a release says so with probability {told:.3g}."
                if tells
                else f"  {number} {made} are too few to tell failing members from noise (a release says so with "
                f"probability {told:.2g}), so a public question goes before a charge, once a minute for each caller."
            )
        if "cost_per_answer" in line:
            text.append(f"  An answer costs {line['cost_per_answer']:.4g}, all of them {line['cost_of_all']:.4g}.")
    return "\n".join(text)


def flip_words(row: dict[str, Any]) -> str:
    """A row of ``flips``."""
    of = ""
    if "expected" in row:
        of = f" of {row['members']}" if row["expected"] == row["members"] else f" of {row['expected']:.3g} expected"
    chance = f"is overturned with probability {row['flip_probability']:.3g}"
    return f"A winner ahead by {row['margin']}{of} votes {chance}."


def choice_words(line: dict[str, Any]) -> list[str]:
    """Which mechanism a vote has, why, and what one owner per call would change."""
    if (found := line.get("choice")) is None:
        return []
    chosen, rows = line["mechanism"], found["mechanisms"]
    text = []
    for other in (name for name in rows if name != chosen):
        name, why = NAMES[chosen], "is chosen" if found["best"] == chosen else "was asked for"
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
