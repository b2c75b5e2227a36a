"""Privacy profiles: what one release gives away, as frozen objects that compose.

A profile is delta(eps), the least delta for which one release is (eps, delta)-DP, for a named neighbouring
relation. Base profiles here are valid when ONE MEMBER'S OUTPUT IS REPLACED; that relation is symmetric, so P
and Q may swap and

    delta(-eps) = 1 - e^-eps + e^-eps delta(eps).

`a.compose(b)` runs two mechanisms on the same sample, `.subsample(q)` lets each owner take part with
probability q (from then on neighbours differ by one owner, and the two directions differ). Do them in this
order: parts of one release share a sample, so amplifying each part would count q twice.

Every profile also turns into `Losses`, atoms of a dominating pair whose delta is at least its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from langchain_dpicl.privacy.checks import probability
from langchain_dpicl.privacy.losses import FloatArray, Losses

Direction = Literal["remove", "add"]
DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")

RATE_ERROR = 1e-9
"""The sampler's coins show heads with probability q (1 +- 1e-10); profiles account for q (1 + 1e-9)."""


class Profile(ABC):
    """What one release gives away."""

    @abstractmethod
    def direction_delta(self, epsilon: ArrayLike, direction: Direction) -> FloatArray:
        """delta(eps) of the pair (with the owner, without) for "remove", (without, with) for "add"."""

    @abstractmethod
    def losses(self, direction: Direction = "remove") -> Losses:
        """Atoms of a pair that dominates this direction: its delta is at least `direction_delta` everywhere."""

    def delta(self, epsilon: ArrayLike) -> FloatArray:
        """The worse of the two directions at eps."""
        return np.maximum(*(self.direction_delta(epsilon, direction) for direction in DIRECTIONS))

    def compose(self, *others: Profile) -> Profile:
        """This and the others on the SAME sample, as one release."""
        return Composed((self, *others)) if others else self

    def subsample(self, rate: float) -> Profile:
        """Each owner takes part with its own coin of probability `rate`: neighbours add or remove one owner."""
        return Subsampled(self, rate)


class SymmetricProfile(Profile):
    """A profile of a symmetric relation: both directions are the same pair up to a swap."""

    def direction_delta(self, epsilon: ArrayLike, direction: Direction) -> FloatArray:
        eps = np.asarray(epsilon, np.float64)
        size = np.abs(eps)
        upper = self._delta(size)
        with np.errstate(over="ignore"):
            mirrored = -np.expm1(-size) + np.exp(-size) * upper
        return np.clip(np.where(eps >= 0.0, upper, mirrored), 0.0, 1.0)

    @abstractmethod
    def _delta(self, epsilon: FloatArray) -> FloatArray:
        """delta at eps >= 0."""


@dataclass(frozen=True)
class Composed(Profile):
    """Several mechanisms on the same sample: their losses add up (adaptively too: each is worst-case)."""

    parts: tuple[Profile, ...]

    def direction_delta(self, epsilon: ArrayLike, direction: Direction) -> FloatArray:
        return self.losses(direction).delta(epsilon)

    def losses(self, direction: Direction = "remove") -> Losses:
        return self._both[direction]

    @cached_property
    def _both(self) -> dict[Direction, Losses]:
        answer: dict[Direction, Losses] = {}
        for direction in DIRECTIONS:
            total = self.parts[0].losses(direction)
            for part in self.parts[1:]:
                total = total.compose(part.losses(direction))
            answer[direction] = total
        return answer


@dataclass(frozen=True)
class Subsampled(Profile):
    """A release in which each owner takes part with its own coin of probability q. With a = e^eps:

    - remove: q delta(log(1 + (a - 1)/q)) if the logarithm exists, else 1 - a
    - add: (1 - a(1-q)) delta(log(a q / (1 - a(1-q)))) if a(1-q) < 1, else 0

    Proof: the owner's absence gives P0, its presence (1-q) P0 + q P1. Write out integral max(0, (1-q) P0 + q
    P1 - a P0) = q integral max(0, P1 - (1 + (a-1)/q) P0), and the same the other way round (Zhu, Dong, Wang
    2022, theorem 11). Neighbours: one owner added or removed.
    """

    base: Profile
    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", probability("rate", self.rate))

    @property
    def covered_rate(self) -> float:
        """The rate that is accounted for: rounded up to cover the sampler's error."""
        return min(1.0, self.rate * (1.0 + RATE_ERROR))

    def direction_delta(self, epsilon: ArrayLike, direction: Direction) -> FloatArray:
        eps = np.asarray(epsilon, np.float64)
        q = self.covered_rate
        if q == 1.0:
            return self.base.direction_delta(eps, direction)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if direction == "remove":
                large = np.maximum(eps, 1.0)  # log(e^eps - 1 + q) without overflow
                large = large + np.log1p((q - 1.0) * np.exp(-large))
                inner = np.where(eps < 1.0, np.log1p(np.expm1(np.minimum(eps, 1.0)) / q), large - math.log(q))
                exists = eps > math.log1p(-q)
                value = q * self.base.direction_delta(np.where(exists, inner, 0.0), direction)
                return np.where(exists, value, -np.expm1(np.minimum(eps, 0.0)))
            exists = eps < -math.log1p(-q)
            rest = np.where(exists, -np.expm1(np.minimum(eps, 1e3) + math.log1p(-q)), 1.0)
            inner = eps + math.log(q) - np.log(np.maximum(rest, 1e-300))
            value = rest * self.base.direction_delta(inner, direction)
            return np.where(exists, value, 0.0)

    def losses(self, direction: Direction = "remove") -> Losses:
        base = self.base.losses(direction)
        return base.removed(self.covered_rate) if direction == "remove" else base.added(self.covered_rate)
