"""A line of a plan: `LineRequest` asks for releases, `PlanLine` adds the noise that the solver found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.accountant import MAX_COUNT, Line
from langchain_dpicl.privacy.checks import positive, probability, real, whole
from langchain_dpicl.privacy.mechanisms import MECHANISMS, FrozenMapping, Mechanism


@dataclass(frozen=True)
class LineRequest:
    """A request for a number of releases of one kind.

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
        The number of owners from which the rate was chosen; None if the rate came from elsewhere. This number is
        public from then on, and no other number of owners is. The noise does not depend on it.
    """

    mechanism: str
    rate: float
    count: int
    weight: float = 1.0
    options: Mapping[str, float] = field(default_factory=FrozenMapping)
    owners: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, str) or self.mechanism not in MECHANISMS:
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

    def with_noise(self, parameter: float) -> PlanLine:
        """The frozen line."""
        return PlanLine(**{**vars(self), "parameter": parameter})


@dataclass(frozen=True)
class PlanLine(LineRequest):
    """A frozen line: a request with its noise parameter (the family's `parameter`: sigma, eps0, range_bound)."""

    parameter: float = math.nan

    def __post_init__(self) -> None:
        super().__post_init__()
        family = self.family
        value = real(family.parameter, self.parameter, at_least=family.low, at_most=family.high)
        object.__setattr__(self, "parameter", value)

    def describe(self) -> str:
        """One release of this line, in words."""
        return self.family.describe(self.parameter, **self.options)
