"""The whole schedule, fixed in advance: from a target (epsilon, delta) to noise, and what it means; tickets too."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from langchain_dpicl.errors import AccountingError, InfeasiblePlan, InvalidParameter
from langchain_dpicl.privacy.accountant import PLDAccountant, Verification, verify
from langchain_dpicl.privacy.checks import FrozenMapping, open_unit, positive, real, whole
from langchain_dpicl.privacy.mechanisms import MECHANISMS, LineRequest, Mechanism, PlanLine, check_lines, solve
from langchain_dpicl.privacy.noise import FALSE_RATE, TOLD, flip_probability, told_probability
from langchain_dpicl.privacy.profile import MAX_COUNT, rung

VOTES = ("vote", "scores")
_FORMAT = 1

_PLACES = 1 << 19
"""Places of the grids for partial counts: a quarter of those that a plan is certified on, in less time."""


@dataclass(frozen=True)
class CallCosts:
    """One member's call: tokens in and out, and prices per million tokens in any currency."""

    prompt_tokens: float
    answer_tokens: float
    price_in: float
    price_out: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, real(name, value, at_least=0.0))

    def cost(self, members: int) -> float:
        """The price of one answer: `members` calls."""
        return members * (self.prompt_tokens * self.price_in + self.answer_tokens * self.price_out) / 1e6


@dataclass(frozen=True)
class PrivacyPlan:
    """All releases of the plan together are (epsilon, delta)-DP when one owner is added or removed.

    Frozen: two plans are equal, and have the same digest, if and only if they promise and do the same.
    """

    epsilon: float
    delta: float
    lines: Mapping[str, PlanLine]

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", open_unit("delta", self.delta))
        check_lines(self.lines, PlanLine)
        object.__setattr__(self, "lines", FrozenMapping(dict(sorted(self.lines.items()))))

    @classmethod
    def solve(cls, *, epsilon: float, delta: float, lines: Mapping[str, LineRequest]) -> PrivacyPlan:
        """The least noise for which the certified epsilon at full count is at most `epsilon`.

        At most half a per cent of epsilon is wasted, unless even the least noise that a mechanism allows costs less.
        `InfeasiblePlan` names the line that is too expensive.
        """
        found = zip(solve(epsilon, delta, lines), lines.items(), strict=True)
        return cls(epsilon, delta, {name: PlanLine(**{**vars(line), "parameter": n}) for n, (name, line) in found})

    @cached_property
    def certified_epsilon(self) -> float:
        """The accountant's upper bound at full count: at most `epsilon` for a solved plan."""
        return PLDAccountant().epsilon([line.line(line.parameter) for line in self.lines.values()], self.delta)

    def verify(self) -> Verification:
        """Compute our epsilon, prv-accountant's and dp-accounting's, for each line and for all lines together.

        `str` of the answer is a table. Takes seconds to minutes; dp-accounting comes with ``langchain-dpicl[verify]``.
        Raises `AccountingError` if the noise does not give the plan's promise.
        """
        self._check_promise()
        return verify({name: line.line(line.parameter) for name, line in self.lines.items()}, self.delta)

    def _check_promise(self) -> None:
        """Raise `AccountingError` unless the noise gives the promise (for plans that come from outside)."""
        if self.certified_epsilon > self.epsilon:
            raise AccountingError(
                f"the plan promises epsilon {self.epsilon:g} at delta {self.delta:g}, "
                f"its noise gives {self.certified_epsilon:g}"
            )

    def spent(self, counts: Mapping[str, int]) -> float:
        """Certified upper bound on epsilon, at the plan's delta, after so many releases of each line.

        0.0 for none, the plan's epsilon for all. Each count is rounded up to a ladder whose steps are at most a
        quarter. A step is computed at its first use (a fraction of a second), on coarser grids than
        `certified_epsilon`: a bound too, above the finest by less than 0.1 per cent or 1e-5. More releases never show
        less: with one line a step counts no more than the one above it.
        """
        for name in sorted(set(counts) - set(self.lines)):
            raise InvalidParameter("counts", name, f"a line of the plan: {', '.join(self.lines)}")
        rounded = []
        for name, line in self.lines.items():
            used = whole(f"counts[{name!r}]", counts.get(name, 0), at_least=0, at_most=line.count)
            rounded.append(min(line.count, rung(used)))
        if not any(rounded):
            return 0.0
        return _step(self, rounded[0]) if len(rounded) == 1 else _spent(self, tuple(rounded))

    def at_most(self, counts: Mapping[str, int]) -> dict[str, int]:
        """These counts, none above its line's.

        With tickets this bounds any owner's releases: it pays for each query once at most, and never more than it has.
        """
        return {name: min(count, self.lines[name].count) for name, count in counts.items()}

    def numbers(
        self,
        *,
        members: int | None = None,
        shots: int | None = None,
        margins: Sequence[int] = (),
        labels: int = 2,
        calls: CallCosts | None = None,
    ) -> dict[str, Any]:
        """What the plan promises, as one dictionary that is ready for JSON.

        For votes, ``flips`` has for each margin the chance that noise overturns the winner, and the same share of votes
        with one exemplar per member instead. ``abstention``: how likely a release says that the members abstain if all
        do, and whether that is likely enough to count.

        ``members`` is N, and a member sees ``shots`` exemplars on average. A vote is between ``labels``, and its winner
        leads by one of ``margins`` votes of the N. ``calls`` is what one member's call costs.
        """
        members = None if members is None else whole("members", members)
        shots = None if shots is None else whole("shots", shots)
        if not margins and members is not None:
            margins = sorted({max(1, round(members * share)) for share in (0.1, 0.3, 0.5, 1.0)})
        lines: dict[str, Any] = {}
        for name, line in self.lines.items():
            one, every = (PLDAccountant().epsilon([line.line(line.parameter, n)], self.delta) for n in (1, line.count))
            entry: dict[str, Any] = {
                "mechanism": line.mechanism,
                "releases": line.count,
                "rate": line.rate,
                "owners": line.owners,
                line.family.parameter: line.parameter,
                "options": dict(line.options),
                "what": line.describe(),
                "epsilon_of_one_release": one,
                "epsilon_of_this_line": min(self.epsilon, every),
            }
            lines[name] = entry
            if line.mechanism in VOTES:
                entry["noise_multiplier"] = line.parameter / math.sqrt(2.0)
                entry["flips"] = flips = []
                for margin in margins:
                    row = {"margin": margin, "flip_probability": flip_probability(line.parameter, margin, labels)}
                    if members is not None:
                        row["members"] = members
                        whole("margin", margin, at_least=0, at_most=members)
                        if shots is not None and shots > 1:
                            single = flip_probability(line.parameter, margin * shots, labels)
                            row |= {"single_shot_members": members * shots, "single_shot_flip_probability": single}
                    flips.append(row)
            if members is not None and line.mechanism in (*VOTES, "embedding"):
                rivals, unit = (labels, 1) if line.mechanism in VOTES else (0, round(1 / line.options["step"]))
                told = told_probability(members, line.parameter, rivals, unit)
                about = {"members": members, "told_probability": told, "false_rate": FALSE_RATE, "tells": told >= TOLD}
                entry["abstention"] = about
            if len(self.lines) == 1:
                counts = sorted({min(10**power, line.count) for power in range(9)})
                entry["curve"] = [{"releases": n, "epsilon": self.spent({name: n})} for n in counts]
            if calls is not None and members is not None:
                entry["cost_per_answer"] = calls.cost(members)
                entry["cost_of_all"] = calls.cost(members) * line.count
                for point in entry.get("curve", ()):
                    point["cost"] = calls.cost(members) * point["releases"]
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "certified_epsilon": self.certified_epsilon,
            "digest": self.digest,
            "lines": lines,
        }

    def explain(
        self,
        *,
        members: int | None = None,
        shots: int | None = None,
        margins: Sequence[int] = (),
        labels: int = 2,
        prompt_tokens: float | None = None,
        answer_tokens: float = 0.0,
        price_in: float = 0.0,
        price_out: float = 0.0,
    ) -> str:
        """What the plan promises, in words. `numbers` gives the same as a dictionary."""
        calls = None if prompt_tokens is None else CallCosts(prompt_tokens, answer_tokens, price_in, price_out)
        return words(self.numbers(members=members, shots=shots, margins=margins, labels=labels, calls=calls))

    def to_json(self) -> str:
        """The content, canonical: sorted keys, floats that read back as they were."""
        fields = {name: vars(line).items() for name, line in self.lines.items()}
        lines = {name: {key: value for key, value in items if value is not None} for name, items in fields.items()}
        content = {"format": _FORMAT, "epsilon": self.epsilon, "delta": self.delta, "lines": lines}
        return json.dumps(content, sort_keys=True, allow_nan=False, default=dict)

    @classmethod
    def from_json(cls, text: str) -> PrivacyPlan:
        """The plan that `to_json` wrote, checked: its form, its bounds, and that its noise keeps its promise."""
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT or set(content) != {"format", "epsilon", "delta", "lines"}:
                raise ValueError
            lines = {name: PlanLine(**line) for name, line in content["lines"].items()}
        except InvalidParameter:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            length = f"{len(str(text))} characters"
            raise InvalidParameter("text", length, f"a plan's JSON, format {_FORMAT}") from None
        plan = cls(content["epsilon"], content["delta"], lines)
        plan._check_promise()
        return plan

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, as hex. A ledger compares it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@dataclass(frozen=True)
class Gate:
    """The public numbers of a plan with tickets: how much noise it needs if only relevant owners take part.

    Size such a plan by the owners that a query finds eligible, E of them, a public estimate: the rate is
    q = min(1, members * shots / E). Its count T is not a number of queries but of each owner's tickets: every query
    that finds the owner eligible uses one. So the number of queries has no limit, and an owner that is eligible for a
    share s of them lasts T / s queries.

    If E is much below the number of owners, q is larger than without a gate, and amplifies less. That is the price of
    relevance. These numbers show it: noise against rate, members and tickets, beside the blind plan of the same
    epsilon, for T queries in all and for as many as an average owner's tickets last.

    ``epsilon`` and ``delta`` bound what all releases together reveal of an owner. ``mechanism`` and ``options`` are the
    family of the releases and its fixed numbers. Of ``owners`` a query finds ``eligible``, an estimate. ``members``,
    ``rate`` and ``tickets`` are N, q and T.
    """

    epsilon: float
    delta: float
    mechanism: str
    options: FrozenMapping[float]
    eligible: int
    owners: int
    members: int
    rate: float
    tickets: int

    @property
    def family(self) -> Mechanism:
        """The mechanism's family."""
        return MECHANISMS[self.mechanism]

    @property
    def lasting(self) -> int:
        """How many queries an average owner's tickets last."""
        return self.tickets * self.owners // self.eligible

    @property
    def blind_rate(self) -> float:
        """The rate that samples as many of all owners as the gate samples of the eligible ones."""
        return min(1.0, self.rate * self.eligible / self.owners)

    def rate_of(self, members: int) -> float:
        """The rate for another number of members, with as many exemplars for each."""
        return min(1.0, self.rate * members / self.members)

    def solve(self, rate: float, count: int) -> PrivacyPlan:
        """The plan of one line at this rate, for ``count`` tickets or queries."""
        request = LineRequest(self.mechanism, rate, count, options=self.options)
        return PrivacyPlan.solve(epsilon=self.epsilon, delta=self.delta, lines={self.mechanism: request})

    def noise(self, rate: float, count: int) -> float | None:
        """The noise of `solve`. None if no noise is enough, or if ``count`` is beyond the accountant."""
        try:
            return None if count > MAX_COUNT else self.solve(rate, count).lines[self.mechanism].parameter
        except InfeasiblePlan:
            return None

    @property
    def signal_name(self) -> str:
        """The formula of `signal`, in words."""
        if self.mechanism == "tokens":
            return "exemplars * range_bound"
        return f"members / {self.family.parameter}" if self.family.noisier > 0 else "members * eps0 / 4"

    def signal(self, members: int, parameter: float | None) -> float | None:
        """How much all members together can say, over the noise: more is better. None without a parameter.

        For a sigma, N / sigma. For joint-em, N eps0 / 4: the logarithm of the odds of a word that all members name
        against one that none names. For tokens, expected exemplars times range_bound: the furthest that they move two
        logits.
        """
        if parameter is None:
            return None
        if self.mechanism == "tokens":
            return self.rate_of(members) * self.eligible * parameter
        return members / parameter if self.family.noisier > 0 else members * parameter / 4.0

    def point(self, members: int, rate: float, **count: int) -> dict[str, Any]:
        """Noise and signal for these members at this rate; ``count`` is ``tickets=`` or ``queries=``."""
        (number,) = count.values()
        noise = self.noise(rate, number)
        return {"members": members, "rate": rate, **count, "noise": noise, "signal": self.signal(members, noise)}

    def trade_off(self) -> list[dict[str, Any]]:
        """A `point` for each of several numbers of members, with as many exemplars each, and of tickets."""
        crowds = sorted({max(1, round(self.members * factor)) for factor in (0.5, 1.0, 2.0, 4.0)})
        full = [members for members in crowds if self.rate_of(members) == 1.0]
        most = max(self.members, min(full, default=crowds[-1]))
        counts = sorted({max(1, round(self.tickets * factor)) for factor in (0.25, 1.0, 4.0, 16.0)})
        return [
            self.point(members, self.rate_of(members), tickets=count)
            for members in crowds
            for count in counts
            if members <= most and count <= MAX_COUNT
        ]


@lru_cache(maxsize=4096)
def _step(plan: PrivacyPlan, count: int) -> float:
    """A step of the ladder of a plan with one line. Fewer releases never leak more: at most the step above it."""
    (line,) = plan.lines.values()
    return min(_spent(plan, (count,)), _spent(plan, (min(line.count, rung(count + 1)),)))


@lru_cache(maxsize=4096)
def _spent(plan: PrivacyPlan, counts: tuple[int, ...]) -> float:
    if counts == tuple(line.count for line in plan.lines.values()):
        return plan.epsilon
    schedule = [line.line(line.parameter, count) for line, count in zip(plan.lines.values(), counts, strict=True)]
    return min(plan.epsilon, PLDAccountant(_PLACES).epsilon(schedule, plan.delta))


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
            of = f" of {row['members']}" if "members" in row else ""
            chance = f"is overturned with probability {row['flip_probability']:.3g}"
            text.append(f"  A winner ahead by {row['margin']}{of} votes {chance}.")
            if "single_shot_members" in row:
                text.append(
                    f"    The same share of {row['single_shot_members']} members with one exemplar each, at the same "
                    f"privacy: {row['single_shot_flip_probability']:.3g}."
                )
        if "abstention" in line:
            found = line["abstention"]
            told, members = found["told_probability"], found["members"]
            text.append(
                f"  If all {members} members fail, a release says so with probability {told:.3g}."
                if found["tells"]
                else f"  {members} members are too few to tell failing members from noise (a release says so with "
                f"probability {told:.2g}), so a public question goes before a charge, once a minute for each caller."
            )
        if "cost_per_answer" in line:
            text.append(f"  An answer costs {line['cost_per_answer']:.4g}, all of them {line['cost_of_all']:.4g}.")
    return "\n".join(text)
