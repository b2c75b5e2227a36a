"""PrivacyPlan: the whole schedule, fixed in advance, from a target (epsilon, delta) to noise."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from langchain_dpicl.errors import AccountingError, InvalidParameter
from langchain_dpicl.privacy.accountant import MAX_COUNT, Line, PLDAccountant
from langchain_dpicl.privacy.cache import PlanCache
from langchain_dpicl.privacy.checks import open_unit, positive, probability, real, whole
from langchain_dpicl.privacy.mechanisms import MECHANISMS, FrozenMapping, Mechanism
from langchain_dpicl.privacy.solve import WASTE, solve

_FORMAT = 1

_PLACES = 1 << 19
"""Places of the grids for what is spent on the way: a quarter of those that a plan is certified on, in less time."""


@dataclass(frozen=True)
class LineRequest:
    """What one line item asks for.

    Parameters
    ----------
    mechanism
        A name in `MECHANISMS`.
    rate
        Probability with which an owner takes part in one release.
    count
        How many releases (for `tokens`: how many tokens).
    weight
        Share of the plan's privacy loss that this line may use, relative to the other lines' weights.
    options
        The mechanism's fixed public numbers (delta0 for `ptr`).
    owners
        From how many owners the rate was chosen. Public from then on, and the only number of owners that is; None if
        the rate came from elsewhere. The noise does not depend on it.
    """

    mechanism: str
    rate: float
    count: int
    weight: float = 1.0
    options: Mapping[str, float] = field(default_factory=FrozenMapping)
    owners: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise InvalidParameter("mechanism", self.mechanism, f"one of {', '.join(MECHANISMS)}")
        object.__setattr__(self, "rate", probability("rate", self.rate))
        object.__setattr__(self, "count", whole("count", self.count, at_most=MAX_COUNT))
        object.__setattr__(self, "weight", positive("weight", self.weight))
        if not isinstance(self.options, Mapping):
            raise InvalidParameter("options", self.options, "a mapping of names to numbers")
        object.__setattr__(self, "options", self.family.check_options(self.options))
        if self.owners is not None:
            object.__setattr__(self, "owners", whole("owners", self.owners))

    @property
    def family(self) -> Mechanism:
        """The mechanism's family."""
        return MECHANISMS[self.mechanism]

    def line(self, parameter: float, count: int | None = None) -> Line:
        """This line with a noise parameter, for an accountant."""
        profile = self.family.profile(parameter, **self.options)
        return Line(profile, self.rate, self.count if count is None else count)


@dataclass(frozen=True)
class PlanLine(LineRequest):
    """A line item with its noise parameter (the family's `parameter`: sigma, eps0, range_bound)."""

    parameter: float = math.nan

    def __post_init__(self) -> None:
        super().__post_init__()
        family = self.family
        value = real(family.parameter, self.parameter, at_least=family.low, at_most=family.high)
        object.__setattr__(self, "parameter", value)

    def describe(self) -> str:
        """What one release of this line is, in words."""
        return self.family.describe(self.parameter, **self.options)


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
        _check_names(self.lines)
        for name, line in self.lines.items():
            if not isinstance(line, PlanLine):
                raise InvalidParameter(f"lines[{name!r}]", line, "a PlanLine")
        object.__setattr__(self, "lines", FrozenMapping(dict(sorted(self.lines.items()))))

    @classmethod
    def solve(
        cls,
        *,
        epsilon: float,
        delta: float,
        lines: Mapping[str, LineRequest],
        cache: PlanCache | None = PlanCache(),  # noqa: B008 (frozen)
    ) -> PrivacyPlan:
        """The least noise for which the certified epsilon at full count is at most `epsilon`.

        At most half a per cent of epsilon is wasted, unless even the least noise that a mechanism allows costs less.
        `cache=None` neither reads nor writes a file. `InfeasiblePlan` says which line is too expensive.
        """
        epsilon = real("epsilon", epsilon, above=0.0, at_most=1000.0)
        delta = open_unit("delta", delta)
        _check_names(lines)
        _check_delta0(delta, lines)
        request = _canonical({"epsilon": epsilon, "delta": delta, "lines": {n: _content(x) for n, x in lines.items()}})
        known = None if cache is None else _from_cache(cache.load(request), epsilon, delta, lines)
        if known is not None:
            return known
        parameters = solve(epsilon, delta, list(lines.values()), list(lines))
        solved = {
            name: PlanLine(line.mechanism, line.rate, line.count, line.weight, line.options, parameter)
            for (name, line), parameter in zip(lines.items(), parameters, strict=True)
        }
        plan = cls(epsilon, delta, solved)
        if cache is not None:
            cache.store(request, plan.to_json())
        return plan._with_owners(lines)

    @cached_property
    def certified_epsilon(self) -> float:
        """The accountant's upper bound at full count: at most `epsilon` for a solved plan."""
        return PLDAccountant().epsilon([line.line(line.parameter) for line in self.lines.values()], self.delta)

    def verify(self) -> None:
        """Raise `AccountingError` unless the noise really gives the promise (for plans that come from outside)."""
        if self.certified_epsilon > self.epsilon:
            raise AccountingError(
                f"the plan promises epsilon {self.epsilon:g} at delta {self.delta:g}, "
                f"its noise gives {self.certified_epsilon:g}"
            )

    def spent(self, counts: Mapping[str, int]) -> float:
        """Certified upper bound on epsilon, at the plan's delta, after so many releases of each line.

        0.0 for none, the plan's epsilon for all. Each count is rounded up to a ladder whose steps are at most a
        quarter, and each step is computed when it is first asked for (a fraction of a second), on coarser grids than
        `certified_epsilon`: a bound too, above the finest by less than 0.1 per cent or 1e-5. More releases never show
        less: with one line a step counts no more than the one above it.
        """
        unknown = sorted(set(counts) - set(self.lines))
        if unknown:
            raise InvalidParameter("counts", unknown[0], f"a line of the plan: {', '.join(self.lines)}")
        used = []
        for name, line in self.lines.items():
            used.append(whole(f"counts[{name!r}]", counts.get(name, 0), at_least=0, at_most=line.count))
        if not any(used):
            return 0.0
        rounded = tuple(min(line.count, _rung(n)) for n, line in zip(used, self.lines.values(), strict=True))
        return _step(self, rounded[0]) if len(used) == 1 else _spent(self, rounded)

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
        """What the plan promises, in words: see `explain.explain`, which also gives the numbers as a dictionary."""
        from langchain_dpicl.privacy.explain import Calls, explain, words

        calls = None if prompt_tokens is None else Calls(prompt_tokens, answer_tokens, price_in, price_out)
        return words(explain(self, members=members, shots=shots, margins=margins, labels=labels, calls=calls))

    def to_json(self) -> str:
        """The content, canonical: sorted keys, floats that read back as they were."""
        lines = {
            name: {**_content(line), **_owners(line), "parameter": line.parameter} for name, line in self.lines.items()
        }
        return _canonical({"format": _FORMAT, "epsilon": self.epsilon, "delta": self.delta, "lines": lines})

    @classmethod
    def from_json(cls, text: str) -> PrivacyPlan:
        """The plan that `to_json` wrote, checked: its form, its bounds, and that its noise keeps its promise."""
        plan = cls._read(text)
        plan.verify()
        return plan

    @classmethod
    def _read(cls, text: str) -> PrivacyPlan:
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
        return cls(content["epsilon"], content["delta"], lines)

    def _with_owners(self, asked: Mapping[str, LineRequest]) -> PrivacyPlan:
        """This plan with the numbers of owners of those lines, which the solver and its cache do not look at."""
        if all(line.owners == asked[name].owners for name, line in self.lines.items()):
            return self
        lines = {name: replace(line, owners=asked[name].owners) for name, line in self.lines.items()}
        return replace(self, lines=lines)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, as hex: what a ledger compares."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, allow_nan=False)


def _owners(line: LineRequest) -> dict[str, int]:
    return {} if line.owners is None else {"owners": line.owners}


def _content(line: LineRequest) -> dict[str, Any]:
    """What decides a line's noise."""
    return {
        "mechanism": line.mechanism,
        "rate": line.rate,
        "count": line.count,
        "weight": line.weight,
        "options": dict(line.options),
    }


def _from_cache(text: str | None, epsilon: float, delta: float, lines: Mapping[str, LineRequest]) -> PrivacyPlan | None:
    """The cached plan if it is whole, asks for the same, and its noise is certified here and now."""
    if text is None:
        return None
    try:
        plan = PrivacyPlan._read(text)
    except InvalidParameter:
        return None
    if (plan.epsilon, plan.delta, list(plan.lines)) != (epsilon, delta, sorted(lines)):
        return None
    plan = plan._with_owners(lines)
    same = all(_content(plan.lines[name]) == _content(line) for name, line in lines.items())
    if not same or not (1.0 - 2.0 * WASTE) * epsilon <= plan.certified_epsilon <= epsilon:
        return None
    return plan


def _check_delta0(delta: float, lines: Mapping[str, LineRequest]) -> None:
    for line in lines.values():
        delta0 = line.options.get("delta0", 0.0)
        if delta0 >= delta:
            raise InvalidParameter("delta0", delta0, f"a number < delta = {delta:g}")


def _check_names(lines: object) -> None:
    if not isinstance(lines, Mapping) or not lines:
        raise InvalidParameter("lines", lines, "a mapping of at least one name to its line")
    for name, line in lines.items():
        if not isinstance(name, str) or not name:
            raise InvalidParameter("lines", name, "names that are non-empty strings")
        if not isinstance(line, LineRequest):
            raise InvalidParameter(f"lines[{name!r}]", line, "a LineRequest")


def _rung(count: int) -> int:
    """The least number >= count of the form m * 2^k with m <= 8: at most a quarter above."""
    shift = max(0, (count - 1).bit_length() - 3)
    return -(-count >> shift) << shift


@lru_cache(maxsize=4096)
def _step(plan: PrivacyPlan, count: int) -> float:
    """A step of the ladder of a plan with one line. Fewer releases never leak more: at most the step above it."""
    (line,) = plan.lines.values()
    return min(_spent(plan, (count,)), _spent(plan, (min(line.count, _rung(count + 1)),)))


@lru_cache(maxsize=4096)
def _spent(plan: PrivacyPlan, counts: tuple[int, ...]) -> float:
    if counts == tuple(line.count for line in plan.lines.values()):
        return plan.epsilon
    schedule = [line.line(line.parameter, count) for line, count in zip(plan.lines.values(), counts, strict=True)]
    return min(plan.epsilon, PLDAccountant(_PLACES).epsilon(schedule, plan.delta))
