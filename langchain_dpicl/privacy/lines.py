"""The lines of a plan: so many releases of a mechanism. A request for them, and the request with its noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.checks import FrozenMapping, positive, probability, real, whole
from langchain_dpicl.privacy.mechanism import Mechanism, Options
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.profile import MAX_COUNT, Line


def family_of(mechanism: object) -> type[Mechanism]:
    """The family of this name. Raises `InvalidParameter` if there is none."""
    if not isinstance(mechanism, str) or mechanism not in MECHANISMS:
        raise InvalidParameter("mechanism", mechanism, f"one of {', '.join(MECHANISMS)}")
    return MECHANISMS[mechanism]


@lru_cache(maxsize=4096)
def _typed(mechanism: str, options: Options) -> Mechanism:
    return MECHANISMS[mechanism].of(options)


@dataclass(frozen=True)
class LineRequest:
    """A request for a number of releases of one kind.

    Parameters
    ----------
    mechanism, options
        A name in `MECHANISMS`, and the fixed public numbers of the mechanism (delta0 for
        `ptr`). ``family`` is the mechanism with them.
    rate, count
        Probability with which an owner takes part in one release; how many releases (for `tokens`: how many tokens).
    weight
        Share of the plan's privacy loss that this line may use, relative to the other lines' weights.
    owners
        The number of owners from which the rate was chosen; None if the rate came from
        elsewhere. This number is public from then on, and no other number of owners is. The
        noise does not depend on it.
    """

    mechanism: str
    rate: float
    count: int
    weight: float = 1.0
    options: Options = field(default_factory=FrozenMapping)
    owners: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        family = family_of(self.mechanism)
        object.__setattr__(self, "rate", probability("rate", self.rate))
        object.__setattr__(self, "count", whole("count", self.count, at_most=MAX_COUNT))
        object.__setattr__(self, "weight", positive("weight", self.weight))
        if not isinstance(self.options, Mapping):
            raise InvalidParameter("options", self.options, "a mapping of names to numbers")
        object.__setattr__(self, "options", family.of(self.options).options)
        if self.owners is not None:
            object.__setattr__(self, "owners", whole("owners", self.owners))

    @property
    def family(self) -> Mechanism:
        """The mechanism with its fixed numbers."""
        return _typed(self.mechanism, self.options)

    @property
    def own_calls(self) -> bool:
        """True if every output is of one owner."""
        return self.family.own_calls

    def line(self, parameter: float, count: int | None = None) -> Line:
        """This line with a noise parameter, for an accountant."""
        return Line(self.family.profile(parameter), self.rate, self.count if count is None else count)


@dataclass(frozen=True)
class PlanLine(LineRequest):
    """A frozen line: a request with its noise parameter (the family's `parameter`: sigma, eps0, range_bound)."""

    parameter: float = math.nan

    def __post_init__(self) -> None:
        super().__post_init__()
        family = self.family
        object.__setattr__(
            self,
            "parameter",
            real(family.parameter, self.parameter, at_least=family.low, at_most=family.high),
        )

    def describe(self) -> str:
        """Say in words what one release gives out and with how much noise."""
        return self.family.describe(self.parameter)

    def flip(self, votes: int, outcomes: int) -> float:
        """The chance that noise overturns what so many outputs agree on; 0 where that has no meaning."""
        return self.family.flip(self.parameter, votes, outcomes)


def check_lines(lines: object, kind: type[LineRequest]) -> None:
    """Raise `InvalidParameter` unless these are lines of this kind by their names."""
    if not isinstance(lines, Mapping) or not lines:
        raise InvalidParameter("lines", lines, "a mapping of at least one name to its line")
    for name, line in lines.items():
        if not isinstance(name, str) or not name:
            raise InvalidParameter("lines", name, "names that are non-empty strings")
        if not isinstance(line, kind):
            raise InvalidParameter(f"lines[{name!r}]", line, f"a {kind.__name__}")
