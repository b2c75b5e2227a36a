"""Base profiles: what each kind of mechanism gives away when ONE MEMBER'S OUTPUT IS REPLACED.

A density is cut into cells and its dots are connected (`losses.from_tails`); a lattice keeps its own atoms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.checks import positive, real
from langchain_dpicl.privacy.losses import FloatArray, Losses, from_tails
from langchain_dpicl.privacy.profile import Direction, SymmetricProfile
from langchain_dpicl.privacy.roots import solve_decreasing

CELLS = 1000
"""Cells into which a density is cut. Connecting the dots errs by the square of a cell, about 1e-5 of epsilon here."""

_REACH = 13.0
"""Tails beyond this many standard deviations (1e-38 of the mass) count as an infinite loss."""


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
        return np.asarray(np.exp(high) * -np.expm1(np.minimum(low - high, 0.0)))

    def losses(self, direction: Direction = "remove") -> Losses:
        mean, deviation = 0.5 / self.multiplier**2, 1.0 / self.multiplier
        reach = mean + _REACH * deviation
        edges = np.linspace(-reach, reach, 2 * CELLS + 1)
        scaled = (edges - mean) / deviation
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
        if sum(m * m for m in self.moves) > 10_000:
            raise InvalidParameter("moves", self.moves, "squares adding up to at most 10000")

    @property
    def multiplier(self) -> float:
        """sigma over the L2 length of the move: the Gaussian noise multiplier that it is close to."""
        return self.sigma / math.sqrt(sum(m * m for m in self.moves))

    def _delta(self, epsilon: FloatArray) -> FloatArray:
        if self.sigma > 200.0:
            return self._continuous._delta(epsilon)
        return self._atoms.delta(epsilon)

    def losses(self, direction: Direction = "remove") -> Losses:
        return self._continuous.losses() if self.sigma > 200.0 else self._atoms

    @cached_property
    def _continuous(self) -> Gaussian:
        return Gaussian(lattice_multiplier(self.sigma, math.sqrt(sum(m * m for m in self.moves))))

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
        middle = (total.size - 1) // 2
        dot = np.arange(total.size) - middle
        losses = np.asarray((0.5 * sum(m * m for m in self.moves) - dot) / self.sigma**2, np.float64)
        held = total[::-1] > 1e-290
        return Losses(losses[::-1][held], total[::-1][held], 1e-54)


@dataclass(frozen=True)
class BoundedRange(SymmetricProfile):
    """An eps0-bounded-range mechanism: the losses of any pair lie in an interval of length eps0.

    delta(eps) = (1 - e^((eps - eps0)/2))^2 / (1 - e^-eps0) on [-eps0, eps0], 0 above, 1 - e^eps below: the
    supremum over two-point pairs with losses t and t - eps0, at t = (eps + eps0)/2 (Dong, Durfee, Rogers
    2020, lemma 3.4 and theorem 3). The exponential mechanism with weights exp(eps0 u / (2 s)) is one when u
    moves by at most s either way.
    """

    eps0: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps0", real("eps0", self.eps0, above=0.0, at_most=200.0))

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
class ProposeTestRelease(SymmetricProfile):
    """Release the top-k set if max(2, d_k) + N(0, 4 sigma^2) - Phi^-1(1 - delta0; 0, 2 sigma) > 2.

    The gap d_k moves by at most 2. Neighbours with the same top-k set are told apart by the noisy gap alone:
    a Gaussian of multiplier sigma. Neighbours with different sets have a gap of at most 2 both, so each
    releases with probability delta0 and says nothing otherwise. Hence delta(eps) = max(Gaussian(sigma),
    delta0) for eps >= 0, and delta0 is paid at EVERY release (Zhu and Wang 2022; the papers' theorem 11 adds
    it up the same way).
    """

    sigma: float
    delta0: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigma", real("sigma", self.sigma, at_least=0.05))
        object.__setattr__(self, "delta0", real("delta0", self.delta0, above=0.0, below=1.0))

    def _delta(self, epsilon: FloatArray) -> FloatArray:
        return np.maximum(Gaussian(self.sigma)._delta(epsilon), self.delta0)

    def losses(self, direction: Direction = "remove") -> Losses:
        bend = self._bend
        if bend <= 0.0:  # delta0 rules everywhere: with probability delta0 everything is seen, else nothing
            return Losses(np.zeros(1), np.array([1.0 - self.delta0]), self.delta0)
        mean, deviation = 0.5 / self.sigma**2, 1.0 / self.sigma
        edges = np.linspace(-bend, bend, 2 * CELLS + 1)
        scaled = (edges - mean) / deviation
        cut = from_tails(edges, ndtr(-scaled), ndtr(scaled))
        masses = cut.masses.copy()
        # Below the bend the pair is the Gaussian's; above it nothing but delta0 at infinity: the rest sits at the bend.
        masses[-1] += max(0.0, cut.infinity - self.delta0)
        return Losses(edges, masses, self.delta0)

    @cached_property
    def _bend(self) -> float:
        """The eps at which the Gaussian's delta falls to delta0, rounded up."""
        gaussian = Gaussian(self.sigma)
        high = 0.5 / self.sigma**2 + max(0.0, -float(ndtri(self.delta0))) / self.sigma
        return solve_decreasing(lambda e: float(gaussian._delta(np.asarray(e))), self.delta0, 0.0, high)


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
