"""The cost of a schedule of releases: epsilon at a delta, or delta at an epsilon.

A schedule is a list of `Line`s, fixed in advance. Callers may choose their questions after seeing answers;
the parameters may not change (for that see `rdp.RenyiFilter`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.checks import open_unit, probability, real, whole
from langchain_dpicl.privacy.composition import MAX_PLACES, Composition
from langchain_dpicl.privacy.losses import Losses
from langchain_dpicl.privacy.profile import DIRECTIONS, Direction, Profile

MAX_COUNT = 10_000_000


@dataclass(frozen=True)
class Line:
    """`count` releases, each with this profile on its own Poisson sample of `rate`.

    `profile` is what one release gives away of ONE member's output; neighbours of the schedule differ by one
    owner.
    """

    profile: Profile
    rate: float
    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.profile, Profile):
            raise InvalidParameter("profile", self.profile, "a Profile")
        object.__setattr__(self, "rate", probability("rate", self.rate))
        object.__setattr__(self, "count", whole("count", self.count, at_least=0, at_most=MAX_COUNT))

    def losses(self, direction: Direction) -> Losses:
        """One release's losses after amplification."""
        return _losses(self.profile, self.rate, direction)


@lru_cache(maxsize=256)
def _losses(profile: Profile, rate: float, direction: Direction) -> Losses:
    return profile.subsample(rate).losses(direction)


@dataclass(frozen=True)
class PLDAccountant:
    """Privacy loss distributions: pessimistic grids and a tilted FFT. Tight, fast, for every profile; an upper bound.

    ``places``: see `Composition`; a bound at any number of them.
    """

    places: int = MAX_PLACES

    def epsilon(self, schedule: Sequence[Line], delta: float) -> float:
        """The least certified epsilon at `delta`, in the worse direction.

        Infinite if infinite losses (PTR's delta0) alone weigh more than delta.
        """
        delta = open_unit("delta", delta)
        # The direction that is likely to be the worse goes first. The other one only has to be shown to be no worse.
        worse, other = sorted(compositions(schedule, self.places), key=lambda each: -each.approximate_epsilon(delta))
        found = worse.epsilon(delta)
        return max(found, other.epsilon(delta, enough=found))

    def delta(self, schedule: Sequence[Line], epsilon: float) -> float:
        """The least certified delta at `epsilon`, in the worse direction."""
        epsilon = real("epsilon", epsilon, at_least=0.0)
        return max(composition.delta(epsilon) for composition in compositions(schedule, self.places))


def compositions(schedule: Sequence[Line], places: int = MAX_PLACES) -> tuple[Composition, Composition]:
    """The schedule's losses when one owner is removed, and when one is added."""
    remove, add = (
        Composition([(line.losses(direction), line.count) for line in schedule], places) for direction in DIRECTIONS
    )
    return remove, add
