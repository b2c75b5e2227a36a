"""The whole schedule, fixed in advance: from a target (epsilon, delta) to noise, and what it means."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from langchain_dpicl.errors import AccountingError, InvalidParameter
from langchain_dpicl.privacy.accountant import PLDAccountant, Verification, verify
from langchain_dpicl.privacy.checks import FrozenMapping, open_unit, positive, real, whole
from langchain_dpicl.privacy.choice import crowd_of
from langchain_dpicl.privacy.lines import LineRequest, PlanLine, check_lines
from langchain_dpicl.privacy.profile import rung
from langchain_dpicl.privacy.solving import solve
from langchain_dpicl.privacy.votes import LEAD
from langchain_dpicl.privacy.words import said_of_outputs, words

_FORMAT = 1

_PLACES = 1 << 19
"""Places of the grids for partial counts: a quarter of those that a plan is certified on, in less time."""


_LARGEST = 500.0
"""From this epsilon on e^epsilon nears the end of the floating-point range."""


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

    Frozen: two plans are equal, and have the same digest, if and only if they promise and
    do the same.
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

        At most half a per cent of epsilon is wasted, unless even the least noise that a
        mechanism allows costs less, or owners take part so rarely that the accountant's
        finest grids are coarse: then two per cent or more. `InfeasiblePlan` names the line
        that is too expensive.
        """
        parameters = solve(epsilon, delta, lines)
        solved = {
            name: PlanLine(**{**vars(line), "parameter": parameter})
            for (name, line), parameter in zip(lines.items(), parameters, strict=True)
        }
        return cls(epsilon, delta, solved)

    @classmethod
    def alone(cls, request: LineRequest, *, epsilon: float, delta: float) -> PlanLine:
        """The line of a plan that has nothing else."""
        return cls.solve(epsilon=epsilon, delta=delta, lines={"only": request}).lines["only"]

    @cached_property
    def certified_epsilon(self) -> float:
        """The accountant's upper bound at full count: at most `epsilon` for a solved plan."""
        return PLDAccountant().epsilon([line.line(line.parameter) for line in self.lines.values()], self.delta)

    @cached_property
    def _replaced_epsilon(self) -> float:
        """The certified epsilon at `delta` when all exemplars of one owner are replaced by others.

        Let P, Q and R be the laws of all answers: with the owner's exemplars, without the owner, with the others in
        their place. P and Q are neighbours of the plan, and so are Q and R. If the plan is (a, d)-DP and (b, e)-DP,
        every event S has

            P(S) <= e^a Q(S) + d <= e^(a + b) R(S) + e^a e + d.

        So a + b holds at delta for d = delta / 2 and e = delta / 2 e^-a. With a = b = epsilon and d = e = the plan's
        delta it is epsilon 2 a at delta (1 + e^a) d. The two losses do NOT add up as those of two releases do: a
        Gaussian of multiplier z becomes one of z / 2, and two releases are one of z / sqrt(2).

        Infinite where infinite losses (PTR's delta0) alone weigh more than d or e.
        """
        accountant = PLDAccountant(_PLACES, shared=True)
        schedule = [line.line(line.parameter) for line in self.lines.values()]
        first = accountant.epsilon(schedule, self.delta / 2.0)
        if first > _LARGEST:
            return math.inf
        return first + accountant.epsilon(schedule, self.delta / 2.0 * math.exp(-first) * (1.0 - 1e-12))

    def verify(self) -> Verification:
        """Compute our epsilon, prv-accountant's and dp-accounting's, for each line and for all lines together.

        `str` of the answer is a table. Takes seconds to minutes; dp-accounting comes with
        ``langchain-dpicl[verify]``. Raises `AccountingError` if the noise does not give the
        plan's promise.
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

        0.0 for none, the plan's epsilon for all. Each count is rounded up to a ladder whose
        steps are at most a quarter. A step is computed at its first use (a fraction of a
        second), on coarser grids than `certified_epsilon`: a bound too, above the finest by
        less than 0.2 per cent or 1e-5. More releases never show less: with one line a step
        counts no more than the one above it.
        """
        for name in sorted(set(counts) - set(self.lines)):
            raise InvalidParameter("counts", name, f"a line of the plan: {', '.join(self.lines)}")
        rounded = []
        for name, line in self.lines.items():
            used = whole(f"counts[{name!r}]", counts.get(name, 0), at_least=0, at_most=line.count)
            rounded.append(self.step(name, used))
        if not any(rounded):
            return 0.0
        with _turn(self, tuple(rounded)):
            return _step(self, rounded[0]) if len(rounded) == 1 else _spent(self, tuple(rounded))

    def step(self, line: str, count: int) -> int:
        """The top of the ladder's step on which a line's count stands: `spent` is the same up to there."""
        return min(self.lines[line].count, rung(count))

    def at_most(self, counts: Mapping[str, int]) -> dict[str, int]:
        """These counts, none above its line's.

        With tickets this bounds any owner's releases: it pays for each query once at most,
        and never more than it has.
        """
        return {name: min(count, self.lines[name].count) for name, count in counts.items()}

    def numbers(
        self,
        *,
        members: int | None = None,
        expected: float | None = None,
        shots: int | None = None,
        margins: Sequence[int] = (),
        labels: int = 2,
        lead: float = LEAD,
        calls: CallCosts | None = None,
    ) -> dict[str, Any]:
        """Return the plan's promises as one dictionary that is ready for JSON.

        For votes, ``flips`` has for each margin the chance that noise overturns the winner,
        and the same share of votes with one exemplar per member instead; ``choice``
        compares the vote's two mechanisms, and a call for every owner, at a winner who is
        ahead by ``lead`` of the expected votes. ``abstention`` has the probability that a
        release says that the members abstain if all do, and a flag for one that is high
        enough to count.

        ``replaced`` is for the other common neighbours: all exemplars of one owner are
        replaced by others. ``epsilon`` holds at the plan's delta (None: no finite bound
        there), and ``group_epsilon`` = 2 epsilon at ``group_delta`` = (1 + e^epsilon) delta.

        ``members`` is N, or the number to which calls of one owner each are padded;
        ``expected`` is the average number of their outputs that count, by default as many
        as the line's rate and owners say. A member sees ``shots`` exemplars on average. A
        vote is between ``labels``, and its winner leads by one of ``margins`` votes.
        ``calls`` is the cost of one member's call.
        """
        members = None if members is None else whole("members", members)
        expected = None if expected is None else positive("expected", expected)
        about: dict[str, Any] = {
            "shots": None if shots is None else whole("shots", shots),
            "margins": margins,
            "labels": whole("labels", labels, at_least=2),
            "lead": real("lead", lead, above=0.0, below=1.0),
        }
        total_weight = sum(each.weight for each in self.lines.values())
        lines: dict[str, Any] = {}
        for name, line in self.lines.items():
            alone = self if len(self.lines) == 1 else PrivacyPlan(self.epsilon, self.delta, {name: line})
            crowd = crowd_of(line, members, expected)
            entry: dict[str, Any] = {
                "mechanism": line.mechanism,
                "releases": line.count,
                "rate": line.rate,
                "owners": line.owners,
                line.family.parameter: line.parameter,
                "options": dict(line.options),
                "what": line.describe(),
                "epsilon_of_one_release": PLDAccountant().epsilon([line.line(line.parameter, 1)], self.delta),
                "epsilon_of_this_line": min(self.epsilon, alone.certified_epsilon),
            }
            lines[name] = entry
            share = self.epsilon * math.sqrt(line.weight / total_weight)
            entry |= said_of_outputs(line, (share, self.delta), crowd, **about)
            if len(self.lines) == 1:
                counts = sorted({min(10**power, line.count) for power in range(9)})
                entry["curve"] = [{"releases": n, "epsilon": self.spent({name: n})} for n in counts]
            if calls is not None and crowd is not None:
                cost = calls.cost(crowd.members)
                entry |= {"cost_per_answer": cost, "cost_of_all": cost * line.count}
                for point in entry.get("curve", ()):
                    point["cost"] = cost * point["releases"]
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "certified_epsilon": self.certified_epsilon,
            "replaced": self._replaced(),
            "digest": self.digest,
            "lines": lines,
        }

    def _replaced(self) -> dict[str, float | None]:
        """Return the costs when one owner is replaced: see `numbers`."""
        found = self._replaced_epsilon
        group = math.exp(min(self.epsilon, _LARGEST))
        return {
            "epsilon": found if math.isfinite(found) else None,
            "group_epsilon": 2.0 * self.epsilon,
            "group_delta": min(1.0, (1.0 + group) * self.delta),
        }

    def explain(
        self,
        *,
        prompt_tokens: float | None = None,
        answer_tokens: float = 0.0,
        price_in: float = 0.0,
        price_out: float = 0.0,
        **shape: Any,
    ) -> str:
        """Say the plan's promises in words. `numbers` takes the same ``shape`` and gives a dictionary."""
        calls = None if prompt_tokens is None else CallCosts(prompt_tokens, answer_tokens, price_in, price_out)
        return words(self.numbers(calls=calls, **shape))

    def to_json(self) -> str:
        """The content, canonical: sorted keys, floats that read back as they were."""
        content = {
            "format": _FORMAT,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "lines": {name: _given(line) for name, line in self.lines.items()},
        }
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
            raise InvalidParameter(
                "text",
                f"{len(str(text))} characters",
                f"a plan's JSON, format {_FORMAT}",
            ) from None
        plan = cls(content["epsilon"], content["delta"], lines)
        plan._check_promise()
        return plan

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, as hex: the name by which a ledger knows the plan from then on."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _given(line: PlanLine) -> dict[str, Any]:
    """The fields of a line that are not None."""
    return {key: value for key, value in vars(line).items() if value is not None}


@lru_cache(maxsize=4096)
def _turn(plan: PrivacyPlan, counts: tuple[int, ...]) -> threading.Lock:
    """Threads that need a step which nobody has computed yet wait for the first of them."""
    return threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turn.cache_clear)  # a thread that the child lacks may have held one


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
    return min(plan.epsilon, PLDAccountant(_PLACES, shared=True).epsilon(schedule, plan.delta))
