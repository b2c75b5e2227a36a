"""Profiles and accounting that only tests need: pure differential privacy, repetition, and the papers' Rényi curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln, logsumexp

from langchain_dpicl.privacy import (
    BoundedRange,
    DiscreteGaussian,
    Gaussian,
    Line,
    Profile,
    ProposeTestRelease,
    adaptive,
)
from langchain_dpicl.privacy.composition import Composition
from langchain_dpicl.privacy.losses import FloatArray, Losses
from langchain_dpicl.privacy.profile import RATE_ERROR, Composed, Direction, Subsampled, SymmetricProfile

_ROUNDING = 2e-14
"""Bound on the rounding error of a log moment, relative to 1 + order * the largest loss; it is added."""

ORDERS: tuple[int, ...] = (*range(2, 65), *range(72, 129, 8), 160, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class ApproximateDP(SymmetricProfile):
    """The worst (eps0, delta0)-DP pair: randomised response, with a secret shown with probability delta0.

    Kairouz, Oh, Viswanath 2015: delta(eps) = delta0 + (1 - delta0) max(0, (e^eps0 - e^eps) / (1 + e^eps0)).
    """

    eps0: float
    delta0: float = 0.0

    def _delta(self, epsilon: FloatArray) -> FloatArray:
        above = -np.expm1(np.minimum(epsilon - self.eps0, 0.0)) / (1.0 + math.exp(-self.eps0))
        return np.asarray(self.delta0 + (1.0 - self.delta0) * above)

    def losses(self, direction: Direction = "remove") -> Losses:
        high = (1.0 - self.delta0) / (1.0 + math.exp(-self.eps0))
        low = (1.0 - self.delta0) / (1.0 + math.exp(self.eps0))
        return Losses(np.array([-self.eps0, self.eps0]), np.array([low, high]), self.delta0)


def PureDP(eps0: float) -> ApproximateDP:
    """Randomised response."""
    return ApproximateDP(eps0)


def repeated_delta(profile: Profile, count: int, epsilon: ArrayLike, direction: Direction) -> FloatArray:
    """delta(eps) of so many releases on fresh samples, in one direction."""
    composition = Composition([(profile.losses(direction), count)])
    eps = np.asarray(epsilon, np.float64)
    return np.asarray([composition.delta(float(e)) for e in eps.ravel()]).reshape(eps.shape)


def log_moment(eps0: float, rate: float, order: float) -> float:
    """An upper bound on log E[r^order] without the owner, over all pairs: order > 1 or < 0.

    r^order is convex, so the extreme pair has two points. Refined until what it adds to 1 is known within 1e-4.
    """
    tau = np.linspace(0.0, eps0, 17)
    while True:
        trials = adaptive.RangeTrials(eps0, rate, tau)
        logs = order * trials.log_u, order * trials.log_v
        top = float(np.maximum(*logs).max())
        ratios = np.exp(logs[0] - top), np.exp(logs[1] - top)
        mean = adaptive.Trials.bounds(trials, *ratios)
        bounds = trials.bounds(*ratios)
        reached, bound = float(mean.max()), float(bounds.max())
        if bound - reached <= 1e-4 * (reached - math.exp(-top)) + 1e-15 or tau.size > 10_000:
            return top + math.log(bound) + adaptive._RATIO_ERROR * (1.0 + top)
        wide = np.flatnonzero(bounds > reached)
        tau = np.sort(np.append(tau, 0.5 * (tau[wide] + tau[wide + 1])))


@lru_cache(maxsize=512)
def renyi(profile: Profile, rate: float, orders: tuple[int, ...]) -> tuple[FloatArray, float]:
    """Rényi divergences of one release at `orders`, in the worse direction, rounded up; and the delta they leave out.

    log E[(P/Q)^(order - 1)] / (order - 1) under P, over the finite atoms of a pair that dominates the amplified release
    (`Profile.losses`): never below the divergence of the release itself, by data processing. Of a bounded range it is
    the largest divergence of any pair, whereas those atoms cover all pairs at once.

    Infinite losses (PTR's delta0, the ends of a density) of mass d before amplification are left out and counted as
    delta, q d in both directions. If the owner is removed, q d is their mass. If it is added, P has mass d there and Q
    has (1 - q) d: of P, the part (1 - q) d has loss 0, and the part q d is left out.
    """
    q = Subsampled(profile, rate).covered_rate
    if isinstance(profile, BoundedRange):  # exact, up to one part in 1e4
        both = [[log_moment(profile.eps0, q, order) for order in (float(a), 1.0 - a)] for a in orders]
        return np.asarray(np.max(both, axis=1) / (np.array(orders) - 1.0)), 0.0
    present, absent = profile.losses("remove"), profile.losses("add")
    finite = Losses(absent.losses, absent.masses).added(q)
    shared = np.append(finite.masses, (1.0 - q) * absent.infinity)
    divergences = np.zeros(len(orders))
    for pair in (present.removed(q), Losses(np.append(finite.losses, 0.0), shared)):
        largest = float(np.abs(pair.losses[pair.masses > 0.0]).max())
        for i, order in enumerate(orders):
            log = pair.log_moment(order - 1.0) + _ROUNDING * (1.0 + order * largest)
            divergences[i] = max(divergences[i], log / (order - 1.0))
    return divergences, q * max(present.infinity, absent.infinity)


def to_epsilon(order: FloatArray, divergence: FloatArray, delta: float) -> FloatArray:
    """epsilon of a Rényi divergence at delta: Balle, Barthe, Gaboardi, Hsu, Sato 2020, theorem 21."""
    return np.asarray(divergence + np.log1p(-1.0 / order) - (math.log(delta) + np.log(order)) / (order - 1.0))


def renyi_epsilon(schedule: Sequence[Line], delta: float) -> float:
    """An upper bound on epsilon by another road than the PLD accountant's: Rényi divergences, the best of `ORDERS`."""
    found = [(renyi(line.profile, line.rate, ORDERS), line.count) for line in schedule if line.count]
    used = sum(count * left_out for (_, left_out), count in found)
    if used >= delta:
        return math.inf
    total = np.sum([count * divergences for (divergences, _), count in found], axis=0)
    return max(0.0, float(np.min(to_epsilon(np.asarray(ORDERS, np.float64), total, delta - used))))


# -- the papers' accounting --------------------------------------------------------------------------------------------


def papers_renyi(profile: Profile, rate: float, orders: Sequence[int] = ORDERS) -> tuple[FloatArray, float]:
    """Zhu and Wang 2019, theorem 5: with B_l = C(a, l) (1-q)^(a-l) q^l and E(l) the divergence at order l,

        1/(a-1) log{ (1-q)^(a-1) (aq - q + 1) + B_2 e^E(2) + 3 sum_{l>=3} B_l e^((l-1) E(l)) }

    and without the 3 for the Gaussian, where the sum is exact (Mironov, Talwar, Zhang 2019). delta becomes q delta.
    """
    divergence, delta = _papers_base(profile, np.arange(2.0, max(orders) + 1.0))
    q = min(1.0, rate * (1.0 + RATE_ERROR))
    chosen = np.asarray(orders, np.int64)
    if q == 1.0:
        return divergence[chosen - 2], delta
    factor = 0.0 if isinstance(profile, Gaussian) else math.log(3.0)
    answer = np.empty(len(orders))
    for index, order in enumerate(orders):
        picks = np.arange(order + 1.0)
        log_binomial = gammaln(order + 1.0) - gammaln(picks + 1.0) - gammaln(order - picks + 1.0)
        log_weights = log_binomial + picks * math.log(q) + (order - picks) * math.log1p(-q)
        first = (order - 1) * math.log1p(-q) + math.log1p((order - 1) * q)
        rest = log_weights[2:] + (picks[2:] - 1.0) * divergence[: order - 1]
        rest[1:] += factor
        answer[index] = logsumexp(np.append(rest, first)) / (order - 1)
    return np.maximum(np.minimum(answer, divergence[chosen - 2]), 0.0), q * delta


def _papers_base(profile: Profile, orders: FloatArray) -> tuple[FloatArray, float]:
    """The papers' divergences of one member's output replaced, and the delta that they leave out."""
    if isinstance(profile, Gaussian):
        return orders / (2.0 * profile.multiplier**2), 0.0
    if isinstance(profile, DiscreteGaussian):
        multiplier = profile.sigma / math.sqrt(sum(move * move for move in profile.moves))
        return orders / (2.0 * multiplier**2), 0.0
    if isinstance(profile, ProposeTestRelease):
        return orders / (2.0 * profile.sigma**2), profile.delta0
    if isinstance(profile, Composed):
        parts = [_papers_base(part, orders) for part in profile.parts]
        return np.sum([curve for curve, _ in parts], axis=0), sum(delta for _, delta in parts)
    assert isinstance(profile, (BoundedRange, ApproximateDP))
    high, low = -np.logaddexp(0.0, -profile.eps0), -np.logaddexp(0.0, profile.eps0)
    both = np.logaddexp(orders * high + (1 - orders) * low, orders * low + (1 - orders) * high) / (orders - 1)
    if isinstance(profile, BoundedRange):
        return np.minimum(orders * profile.eps0**2 / 2.0, both), 0.0
    return both, profile.delta0


def papers_epsilon(schedule: Sequence[Line], delta: float) -> float:
    """The papers' epsilon of a schedule without PTR."""
    total = np.sum([line.count * papers_renyi(line.profile, line.rate)[0] for line in schedule], axis=0)
    return float(np.min(to_epsilon(np.asarray(ORDERS, np.float64), total, delta)))
