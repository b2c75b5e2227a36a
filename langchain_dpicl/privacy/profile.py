"""Privacy profiles: the information that one release gives away, as frozen objects that compose.

A profile is delta(eps), the least delta for which one release is (eps, delta)-DP, for a named neighbouring relation.
Base profiles here are valid when ONE MEMBER'S OUTPUT IS REPLACED; that relation is symmetric, so P and Q may swap and

    delta(-eps) = 1 - e^-eps + e^-eps delta(eps).

`a.compose(b)` runs two mechanisms on the same sample, `.subsample(q)` lets each owner take part with
probability q (from then on neighbours differ by one owner, and the two directions differ). Do them in this
order: parts of one release share a sample, so amplifying each part would count q twice.

Every profile also turns into `Losses`, atoms of a dominating pair whose delta is at least its own: a density is cut
into cells and its dots are connected (`losses.from_tails`); a lattice keeps its own atoms.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr, ndtr, ndtri

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import adaptive
from langchain_dpicl.privacy.adaptive import PairFamily, RangePairs
from langchain_dpicl.privacy.adaptive import rung as rung
from langchain_dpicl.privacy.bits import BitPairs, ThresholdPairs
from langchain_dpicl.privacy.checks import open_unit, positive, probability, real, whole
from langchain_dpicl.privacy.losses import FloatArray, Losses, from_tails

Direction = Literal["remove", "add"]
DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")

MAX_COUNT = 10_000_000
"""The most releases of a line."""

RATE_ERROR = 1e-9
"""The sampler's coins show heads with probability q (1 +- 1e-10); profiles account for q (1 + 1e-9)."""

CELLS = 1000
"""Cells into which a density is cut. Connecting the dots errs by the square of a cell, about 1e-5 of epsilon here."""

_REACH = 13.0
"""Tails beyond this many standard deviations (1e-38 of the mass) count as an infinite loss."""

_EXACT = 200.0
"""The largest sigma of a discrete Gaussian whose atoms are listed."""

_ROUNDED_UP = 1.0 + 1e-12
"""Covers the relative error of a quantile in floating point."""

LEAST_BIT = 0.25
MOST_BIT = _EXACT
"""Between these sigma the pairs of one bit are listed."""


class Profile(ABC):
    """The information that one release gives away."""

    @abstractmethod
    def direction_delta(self, epsilon: ArrayLike, direction: Direction) -> FloatArray:
        """delta(eps) of the pair (with the owner, without) for "remove", (without, with) for "add"."""

    @abstractmethod
    def losses(self, direction: Direction = "remove") -> Losses:
        """Atoms of a pair that dominates this direction: its delta is at least `direction_delta` everywhere."""

    @property
    def pairs(self) -> PairFamily | None:
        """The pairs of one release among which an adversary chooses, if several are composed adaptively. None: one."""
        return None

    def typical(self, rate: float, direction: Direction) -> Losses:
        """One release's losses after amplification, or about these: a guess for searches, no bound."""
        return _losses(self, rate, direction)

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
        return reduce(Losses.compose, (part.losses(direction) for part in self.parts))


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
                small = np.log1p(np.expm1(np.minimum(eps, 1.0)) / q)
                large = np.maximum(eps, 1.0)  # log(e^eps - 1 + q) without overflow
                large = large + np.log1p((q - 1.0) * np.exp(-large))
                inner = np.where(eps < 1.0, small, large - math.log(q))
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


@dataclass(frozen=True)
class Line:
    """`count` releases, each on its own Poisson sample of `rate`. Neighbours of the schedule differ by one owner.

    `profile` is what one release gives away of ONE member's output.
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

    @property
    def is_adaptive(self) -> bool:
        """True if `parts` knows more than one release's losses: several releases of a family of pairs."""
        return self.profile.pairs is not None and self.count > 1

    def lower_bound(self, epsilon: float) -> float:
        """About the least delta that the releases of a family can cost at epsilon; 0 for another profile."""
        pairs = self.profile.pairs
        if pairs is None or not self.count:
            return 0.0
        return adaptive.at_least(pairs, Subsampled(self.profile, self.rate).covered_rate, self.count, epsilon)

    def parts(self, direction: Direction, shared: bool = False, most: float | None = None) -> adaptive.Parts:
        """Pairs that together dominate all releases, and how often each occurs.

        Of a family these are the pairs of `adaptive.blocks` (on a ``shared`` grid, by at ``most`` so many operations),
        else one release's losses.
        """
        parts: adaptive.Parts = []
        pairs = self.profile.pairs
        if pairs is not None and self.is_adaptive:
            parts = adaptive.blocks(
                pairs,
                Subsampled(self.profile, self.rate).covered_rate,
                self.count,
                direction,
                shared,
                most,
            )
        return parts or [(self.losses(direction), self.count)]


@lru_cache(maxsize=256)
def _losses(profile: Profile, rate: float, direction: Direction) -> Losses:
    return profile.subsample(rate).losses(direction)


# -- base profiles: what each kind of mechanism gives away when ONE MEMBER'S OUTPUT IS REPLACED ------------------------


@dataclass(frozen=True)
class Gaussian(SymmetricProfile):
    """The Gaussian mechanism with noise multiplier z: standard deviation over L2 sensitivity.

    delta(eps) = Phi(1/(2z) - eps z) - e^eps Phi(-1/(2z) - eps z)   (Balle and Wang 2018, theorem 8).
    Its loss is normal with mean 1/(2 z^2) and standard deviation 1/z.
    """

    multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "multiplier", real("multiplier", self.multiplier, at_least=0.05))

    def _delta(self, epsilon: FloatArray) -> FloatArray:
        z = self.multiplier
        high = log_ndtr(0.5 / z - epsilon * z)
        low = epsilon + log_ndtr(-0.5 / z - epsilon * z)
        return np.asarray(np.exp(high) * -np.expm1(np.minimum(low - high, 0.0)))  # e^high - e^low

    def losses(self, direction: Direction = "remove") -> Losses:
        return self.losses_within(0.5 / self.multiplier**2 + _REACH * (1.0 / self.multiplier))

    def losses_within(self, reach: float) -> Losses:
        """Atoms of the losses between -reach and reach; those above count as infinite."""
        edges = np.linspace(-reach, reach, 2 * CELLS + 1)
        scaled = (edges - 0.5 / self.multiplier**2) / (1.0 / self.multiplier)
        return from_tails(edges, ndtr(-scaled), ndtr(scaled))


@dataclass(frozen=True)
class DiscreteGaussian(SymmetricProfile):
    """Integer counts plus discrete Gaussian noise of parameter sigma, when the counts move by the vector `moves`.

    The noise has probability proportional to exp(-x^2 / (2 sigma^2)) on the integers, independent on every
    coordinate. The loss is (|moves|^2 / 2 - moves.x) / sigma^2. A vote that changes moves two counts by 1, in
    opposite directions; by symmetry moves = (1, 1), exactly the two-fold composition of a sensitivity-1
    mechanism. Exact on the lattice for sigma <= 200. Above, the noise is a post-processing of continuous
    noise of variance sigma^2 - 4 (see `lattice_multiplier`), which gives an upper bound within 5e-5 of epsilon.
    """

    sigma: float
    moves: tuple[int, ...] = (1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigma", real("sigma", self.sigma, at_least=0.05))
        if not self.moves or any(isinstance(m, bool) or not isinstance(m, int) or m == 0 for m in self.moves):
            raise InvalidParameter("moves", self.moves, "whole numbers other than 0")
        if self._squares > 10_000:
            raise InvalidParameter("moves", self.moves, "squares adding up to at most 10000")

    def _delta(self, epsilon: FloatArray) -> FloatArray:
        return self._continuous._delta(epsilon) if self.sigma > _EXACT else self._atoms.delta(epsilon)

    def losses(self, direction: Direction = "remove") -> Losses:
        return self._continuous.losses() if self.sigma > _EXACT else self._atoms

    @property
    def _squares(self) -> int:
        return sum(move * move for move in self.moves)

    @cached_property
    def _continuous(self) -> Gaussian:
        return Gaussian(lattice_multiplier(self.sigma, math.sqrt(self._squares)))

    @cached_property
    def _atoms(self) -> Losses:
        half = math.ceil(16.0 * self.sigma) + 1  # less than 1e-54 of the mass lies beyond: it counts as infinite
        places = np.arange(-half, half + 1)
        noise = np.exp(-0.5 * (places / self.sigma) ** 2)
        noise /= noise.sum()
        total = np.ones(1)
        for move in self.moves:
            step = np.zeros(2 * half * abs(move) + 1)
            step[:: abs(move)] = noise
            total = np.convolve(total, step)
        dot = np.arange(total.size) - (total.size - 1) // 2
        losses = np.asarray((0.5 * self._squares - dot) / self.sigma**2, np.float64)
        held = total[::-1] > 1e-290
        return Losses(losses[::-1][held], total[::-1][held], 1e-54)


@dataclass(frozen=True)
class GaussianWinner(DiscreteGaussian):
    """The winner of integer counts plus discrete Gaussian noise, of which one count moves by 1, and nothing else.

    One release is one bit of `bits.ThresholdPairs`. The best of these pairs has the delta(eps) of the noisy count,
    whose best test is a threshold; but of several releases one bit each shows less than so many noisy counts. Both
    bounds hold. Beyond the sigma whose pairs are listed there is the second alone.
    """

    moves: tuple[int, ...] = (1,)

    @property
    def pairs(self) -> ThresholdPairs | None:
        return ThresholdPairs(self.sigma) if LEAST_BIT <= self.sigma <= MOST_BIT else None

    def typical(self, rate: float, direction: Direction) -> Losses:
        """The losses of the pair in the middle, which decides if many releases do."""
        return super().typical(rate, direction) if self.pairs is None else _middle(self.pairs, rate, direction)


@dataclass(frozen=True)
class BoundedRange(SymmetricProfile):
    """An eps0-bounded-range mechanism: the losses of any pair lie in an interval of length eps0.

    delta(eps) = (1 - e^((eps - eps0)/2))^2 / (1 - e^-eps0) on [-eps0, eps0], 0 above, 1 - e^eps below: the
    supremum over two-point pairs with losses t and t - eps0, at t = (eps + eps0)/2 (Dong, Durfee, Rogers
    2020, lemma 3.4 and theorem 3). The exponential mechanism with weights exp(eps0 u / (2 s)) is one when u
    moves by at most s either way.

    The pair with this delta has P(L > t) = delta(t) - delta'(t), that is

        P(L > t)  = (1 - e^((t - eps0)/2)) / (1 - e^-eps0),
        P(L <= t) = e^-eps0 (e^((t + eps0)/2) - 1) / (1 - e^-eps0).
    """

    eps0: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps0", real("eps0", self.eps0, above=0.0, at_most=200.0))

    @property
    def pairs(self) -> PairFamily:
        return RangePairs(self.eps0)

    def typical(self, rate: float, direction: Direction) -> Losses:
        """The losses of the pair in the middle, which decides if many releases do."""
        if self.eps0 > 20.0:
            return super().typical(rate, direction)
        return _of_one(adaptive.RangeTrials(self.eps0, rate, np.array([0.5 * self.eps0])), 0, direction)

    def _delta(self, epsilon: FloatArray) -> FloatArray:
        inside = np.expm1(np.minimum(epsilon - self.eps0, 0.0) / 2.0)
        return np.asarray(inside**2 / -math.expm1(-self.eps0))

    def losses(self, direction: Direction = "remove") -> Losses:
        edges = np.linspace(-self.eps0, self.eps0, CELLS + 1)
        scale = -math.expm1(-self.eps0)
        above = -np.expm1(np.minimum(edges - self.eps0, 0.0) / 2.0) / scale
        below = math.exp(-self.eps0) * np.expm1(np.maximum(edges + self.eps0, 0.0) / 2.0) / scale
        return from_tails(edges, above, below)


@dataclass(frozen=True)
class BoundedRanges(Profile):
    """Several mechanisms of bounded ranges on the same outputs, as one release: optimal composition of unlike ranges.

    Below the composition of their `BoundedRange` profiles, which no mechanism attains at every eps (5 to 15 % of
    epsilon), and far below the range of their sum, which is valid too. `adaptive.together` has the proof. Neighbours as
    those of the ranges: one output replaced, or (own calls) added or removed.
    """

    ranges: tuple[float, ...]

    def direction_delta(self, epsilon: ArrayLike, direction: Direction) -> FloatArray:
        return np.clip(self.losses(direction).delta(epsilon), 0.0, 1.0)

    def losses(self, direction: Direction = "remove") -> Losses:
        return adaptive.together(self.ranges, direction)


@dataclass(frozen=True)
class OneBit(Profile):
    """One bit of a family: a vote of two labels (`bits`).

    delta(eps) is the largest of the family's pairs. Neighbours: ``pairs.moves`` says how far an owner moves a lead.
    """

    family: BitPairs

    @property
    def pairs(self) -> BitPairs:
        return self.family

    def direction_delta(self, epsilon: ArrayLike, direction: Direction) -> FloatArray:
        a = np.exp(np.minimum(np.asarray(epsilon, np.float64), 700.0))[..., None]
        trials = self.family.trials(1.0)
        found = []
        for log_r, weight in ((trials.log_u, trials.of_u), (trials.log_v, trials.of_v)):
            present, absent = weight * np.exp(log_r), weight
            if direction == "add":
                present, absent = absent, present
            found.append(np.maximum(present - a * absent, 0.0))
        return np.asarray(np.minimum((found[0] + found[1]).max(axis=-1), 1.0))

    def losses(self, direction: Direction = "remove") -> Losses:
        return adaptive.one_release(self.family, 1.0, direction)

    def typical(self, rate: float, direction: Direction) -> Losses:
        """The losses of the pair in the middle, which decides if many releases do."""
        return _middle(self.family, rate, direction)


def _middle(pairs: PairFamily, rate: float, direction: Direction) -> Losses:
    """The losses of the pair of coins that are nearest to fair ones."""
    trials = pairs.trials(rate)
    return _of_one(trials, int(np.abs(trials.of_u - trials.of_v).argmin()), direction)


def _of_one(trials: adaptive.Trials, place: int, direction: Direction) -> Losses:
    """The losses of one of these pairs."""
    losses = np.array([trials.log_v[place], trials.log_u[place]])
    absent = np.array([trials.of_v[place], trials.of_u[place]])
    if direction == "add":
        return Losses(-losses[::-1], absent[::-1], 0.0)
    return Losses(losses, absent * np.exp(losses), 0.0)


@dataclass(frozen=True)
class ProposeTestRelease(SymmetricProfile):
    """Release the top-k set if max(2, d_k) + N(0, 4 sigma^2) - Phi^-1(1 - delta0; 0, 2 sigma) > 2.

    The gap d_k moves by at most 2. Neighbours with the same top-k set are told apart by the noisy gap alone:
    a Gaussian of multiplier sigma. Neighbours with different sets have a gap of at most 2 both, so each
    releases with probability delta0 and says nothing otherwise. Hence delta(eps) = max(Gaussian(sigma),
    delta0) for eps >= 0, and delta0 is paid at EVERY release (Zhu and Wang 2022; Wu et al. 2024,
    theorem 11, add it up the same way). `mechanisms.Terms` proves the same curve for itself.
    """

    sigma: float
    delta0: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigma", real("sigma", self.sigma, at_least=0.05))
        object.__setattr__(self, "delta0", real("delta0", self.delta0, above=0.0, below=1.0))

    def _delta(self, epsilon: FloatArray) -> FloatArray:
        return np.maximum(Gaussian(self.sigma)._delta(epsilon), self.delta0)

    def losses(self, direction: Direction = "remove") -> Losses:
        gaussian = Gaussian(self.sigma)
        high = 0.5 / self.sigma**2 + max(0.0, -float(ndtri(self.delta0))) / self.sigma
        # The eps at which the Gaussian's delta falls to delta0, rounded up.
        bend = solve_decreasing(lambda e: float(gaussian._delta(np.asarray(e))), self.delta0, 0.0, high)
        if bend <= 0.0:  # delta0 rules everywhere: with probability delta0 everything is seen, else nothing
            return Losses(np.zeros(1), np.array([1.0 - self.delta0]), self.delta0)
        cut = gaussian.losses_within(bend)
        # Below the bend the pair is the Gaussian's; above it nothing but delta0 at infinity: the rest sits at the bend.
        cut.masses[-1] += max(0.0, cut.infinity - self.delta0)
        return Losses(cut.losses, cut.masses, self.delta0)


@dataclass(frozen=True)
class GaussianOrAll(SymmetricProfile):
    """A Gaussian mechanism of this multiplier, which with probability delta0 gives everything away.

    delta(eps) = delta0 + (1 - delta0) Gaussian(eps), at every eps and in both directions: the pair has the Gaussian's
    laws with probability 1 - delta0, and otherwise two laws that have no outcome in common.
    """

    multiplier: float
    delta0: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "multiplier", real("multiplier", self.multiplier, at_least=0.05))
        object.__setattr__(self, "delta0", real("delta0", self.delta0, above=0.0, below=1.0))

    def _delta(self, epsilon: FloatArray) -> FloatArray:
        return self.delta0 + (1.0 - self.delta0) * Gaussian(self.multiplier)._delta(epsilon)

    def losses(self, direction: Direction = "remove") -> Losses:
        gaussian = Gaussian(self.multiplier).losses(direction)
        rest = 1.0 - self.delta0
        return Losses(gaussian.losses, rest * gaussian.masses, self.delta0 + rest * gaussian.infinity)


def lattice_multiplier(sigma: float, sensitivity: float) -> float:
    """The Gaussian noise multiplier that covers discrete Gaussian noise in any number of dimensions.

    `sigma` and the L2 `sensitivity` are in steps of the lattice, and the data lie on it. Let y be a point
    plus continuous Gaussian noise of variance sigma^2 - 4, and round each coordinate y_j at random to the
    integer x with probability proportional to exp(-(x - y_j)^2 / 8). The result is proportional to exp(-(x -
    point)^2 / (2 sigma^2)) times the normaliser of the rounding, which by Poisson summation is constant up to
    a factor 1 +- 2 e^(-8 pi^2) = 1 +- 1e-34. So the discrete Gaussian is a post-processing of the continuous
    one, up to 1e-34 per coordinate.
    """
    sigma = real("sigma", sigma, at_least=4.0)
    return math.sqrt(sigma * sigma - 4.0) / positive("sensitivity", sensitivity)


def lattice_tail(at: int, sigma: float) -> float:
    """At least P(X >= at) for discrete Gaussian noise X on the whole numbers, of parameter sigma >= 4.

    Let f(x) = exp(-x^2 / (2 sigma^2)), I the integral of f over all x, sigma sqrt(2 pi), and Z the sum of f over the
    whole numbers. By Poisson summation I <= Z <= I (1 + 1e-136). Let Q(x) be the standard normal law's mass above x.

    - From sigma on f is convex: f(j) is at most its integral over [j - 1/2, j + 1/2] for j >= sigma + 1/2. So the tail
      is at most Q((at - 1/2) / sigma) there.
    - From 0 on f falls: f(j) is at most its integral over [j - 1, j] for j >= 1, so the tail is at most
      Q((at - 1) / sigma). It is at least that of [j, j + 1], which gives the same bound for at <= 0, by symmetry.
    """
    sigma = real("sigma", sigma, at_least=4.0)
    back = 0.5 if at >= sigma + 0.5 else 1.0
    return float(ndtr((back - at) / sigma))


def lattice_quantile(probability: float, sigma: float) -> int:
    """A whole number that discrete Gaussian noise reaches with this probability at most, rounded up.

    It is the least one that `lattice_tail` proves, beyond sigma.
    """
    reach = max(1.0, -float(ndtri(open_unit("probability", probability))))
    return math.ceil(real("sigma", sigma, at_least=4.0) * reach * _ROUNDED_UP + 0.5)


def solve_decreasing(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """The smallest x in [low, high] found with function(x) <= target; `high` if none: always the certified side."""
    if function(low) <= target:
        return low
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if function(middle) <= target:
            high = middle
        else:
            low = middle
    return high


def ladder(count: int) -> list[int]:
    """Every rung from 1 on, the last one lowered to ``count``."""
    steps = [1]
    while steps[-1] < count:
        steps.append(min(count, rung(steps[-1] + 1)))
    return steps
