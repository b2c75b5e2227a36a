"""Rényi accounting as in the papers, and the filter for parameters that are chosen adaptively.

It is looser than the PLD accountant, often by a factor of two in epsilon; it is here to compare with the papers, and
because Rényi divergences of one fixed order still add up when each step's parameters depend on earlier answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import gammaln, logsumexp

from langchain_dpicl.errors import AccountingError, InvalidParameter
from langchain_dpicl.privacy.accountant import MAX_COUNT, Line, Schedule
from langchain_dpicl.privacy.checks import open_unit, positive, real, whole
from langchain_dpicl.privacy.families import (
    ApproximateDP,
    BoundedRange,
    DiscreteGaussian,
    Gaussian,
    ProposeTestRelease,
)
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.profile import RATE_ERROR, Composed, Profile

ORDERS: tuple[int, ...] = (*range(2, 65), *range(72, 129, 8), 160, 192, 256, 384, 512, 768, 1024)


def renyi(profile: Profile, orders: FloatArray) -> tuple[FloatArray, float]:
    """Rényi divergence of a base profile (a member's output replaced) at each order, and its approximation delta.

    - Gaussian and discrete Gaussian: order * |move|^2 / (2 sigma^2) (Mironov 2017, proposition 7; Canonne, Kamath,
      Steinke 2020, theorem 4).
    - eps0-bounded range, that is the exponential mechanism: min(order eps0^2 / 2, log((sinh(order eps0) -
      sinh((order-1) eps0)) / sinh(eps0)) / (order-1)): the papers' theorem 8. It is that of pure eps0-DP.
    - PTR: the Gaussian's, after leaving out an event of probability delta0 (the papers' theorem 11).
    - composed on one sample: sums.
    """
    if isinstance(profile, Gaussian):
        return orders / (2.0 * profile.multiplier**2), 0.0
    if isinstance(profile, DiscreteGaussian):
        return orders / (2.0 * profile.multiplier**2), 0.0
    if isinstance(profile, BoundedRange):
        return np.minimum(orders * profile.eps0**2 / 2.0, _randomised_response(profile.eps0, orders)), 0.0
    if isinstance(profile, ProposeTestRelease):
        return orders / (2.0 * profile.sigma**2), profile.delta0
    if isinstance(profile, ApproximateDP):
        return _randomised_response(profile.eps0, orders), profile.delta0
    if isinstance(profile, Composed):
        parts = [renyi(part, orders) for part in profile.parts]
        return np.sum([curve for curve, _ in parts], axis=0), min(1.0, sum(delta for _, delta in parts))
    raise AccountingError(f"no Rényi divergence is known here for {type(profile).__name__}; the PLD accountant has it")


def _randomised_response(eps0: float, orders: FloatArray) -> FloatArray:
    """log((sinh(a e) - sinh((a-1) e)) / sinh(e)) / (a - 1), without overflow: the pair with losses +-e."""
    high = -np.logaddexp(0.0, -eps0)  # log of e^e / (1 + e^e)
    low = -np.logaddexp(0.0, eps0)
    both = np.logaddexp(orders * high + (1 - orders) * low, orders * low + (1 - orders) * high)
    return np.asarray(both / (orders - 1), np.float64)


def amplified(profile: Profile, rate: float, orders: Sequence[int] = ORDERS) -> tuple[FloatArray, float]:
    """Rényi divergence of one release with a Poisson sample, at integer orders, and its approximation delta.

    Zhu and Wang 2019, theorem 5: with q the rate, B_l = C(a, l) (1-q)^(a-l) q^l and E(l) the divergence at order l,

        1/(a-1) log{ (1-q)^(a-1) (aq - q + 1) + B_2 e^E(2) + 3 sum_{l>=3} B_l e^((l-1) E(l)) }

    and without the 3 for the Gaussian, where the sum is exact (their theorem 6; Mironov, Talwar, Zhang 2019). The
    approximation delta becomes q delta (the papers' theorem 12).
    """
    all_orders = np.arange(2.0, max(orders) + 1.0)
    divergence, delta = renyi(profile, all_orders)
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


@lru_cache(maxsize=512)
def _amplified(profile: Profile, rate: float) -> tuple[FloatArray, float]:
    return amplified(profile, rate)


def to_epsilon(order: FloatArray, divergence: FloatArray, delta: float) -> FloatArray:
    """epsilon of a Rényi divergence at delta: Balle, Barthe, Gaboardi, Hsu, Sato 2020, theorem 21."""
    return np.asarray(divergence + np.log1p(-1.0 / order) - (math.log(delta) + np.log(order)) / (order - 1.0))


def to_log_delta(order: FloatArray, divergence: FloatArray, epsilon: float) -> FloatArray:
    """The same, solved for log delta."""
    return np.asarray((order - 1.0) * (divergence - epsilon + np.log1p(-1.0 / order)) - np.log(order))


class RDPAccountant:
    """Rényi differential privacy at integer orders: the papers' own accounting."""

    def epsilon(self, schedule: Schedule, delta: float) -> float:
        """The least epsilon over the orders. The approximation deltas of PTR add up over releases and leave delta."""
        delta = open_unit("delta", delta)
        divergence, used = self._total(schedule)
        if used >= delta:
            return math.inf
        orders = np.asarray(ORDERS, np.float64)
        return max(0.0, float(np.min(to_epsilon(orders, divergence, delta - used)))) if any_left(schedule) else 0.0

    def delta(self, schedule: Schedule, epsilon: float) -> float:
        """The least delta over the orders."""
        epsilon = real("epsilon", epsilon, at_least=0.0)
        if not any_left(schedule):
            return 0.0
        divergence, used = self._total(schedule)
        best = float(np.min(to_log_delta(np.asarray(ORDERS, np.float64), divergence, epsilon)))
        return min(1.0, used + math.exp(min(0.0, best)))

    def _total(self, schedule: Schedule) -> tuple[FloatArray, float]:
        total, used = np.zeros(len(ORDERS)), 0.0
        for line in schedule:
            divergence, delta = _amplified(line.profile, line.rate)
            total = total + line.count * divergence
            used += line.count * delta
        return total, used


def any_left(schedule: Schedule) -> bool:
    """Whether the schedule has a release at all."""
    return any(line.count for line in schedule)


@dataclass
class RenyiFilter:
    """Stops before the budget is passed, although each step's parameters may depend on earlier answers.

    Feldman and Zrnic 2021, theorem 4.3: at one order fixed in advance, stopping before the divergences spent exceed
    a budget keeps the whole interaction within that budget. With several orders each gets its share of delta: let
    A_i be the transcripts whose least order still within budget at the end is order i. On A_i the run is the one that
    order i's own filter allows, so P(S and A_i) <= e^epsilon Q(S and A_i) + delta_i; add up over i.

    Parameters
    ----------
    epsilon, delta
        What the whole interaction may give away when one owner is added or removed.
    orders
        Integer orders, fixed in advance; few are best, near 1 + 2 log(1/delta) / epsilon.
    failures
        Part of delta set aside for the approximation deltas (PTR's delta0 times the rate, at every step).
    """

    epsilon: float
    delta: float
    orders: tuple[int, ...] = ()
    failures: float = 0.0

    def __post_init__(self) -> None:
        self.epsilon = positive("epsilon", self.epsilon)
        self.delta = open_unit("delta", self.delta)
        self.failures = real("failures", self.failures, at_least=0.0, below=self.delta)
        rest = self.delta - self.failures
        best = 1.0 + 2.0 * math.log(1.0 / rest) / self.epsilon
        self.orders = self.orders or (int(min(max(round(best), 2), 1024)),)
        if len(set(self.orders)) != len(self.orders):
            raise InvalidParameter("orders", self.orders, "different whole numbers")
        for order in self.orders:
            whole("orders", order, at_least=2, at_most=1024)
        orders = np.asarray(self.orders, np.float64)
        self._budget = self.epsilon - to_epsilon(orders, np.zeros(orders.size), rest / orders.size)
        self._spent = np.zeros(orders.size)
        self._failed = 0.0

    def admits(self, line: Line) -> bool:
        """Whether these releases still fit at an order that is still within its budget."""
        return self._after(line) is not None

    def spend(self, line: Line) -> bool:
        """Charge these releases if they fit: True, or False and nothing is charged. Ask before releasing."""
        after = self._after(line)
        if after is None:
            return False
        self._spent, self._failed = after
        return True

    def _after(self, line: Line) -> tuple[FloatArray, float] | None:
        """What is spent with these releases, rounded up; None if they do not fit."""
        divergence, delta = _cost(line.profile, line.rate, self.orders)
        spent = np.nextafter(self._spent + np.nextafter(line.count * divergence, np.inf), np.inf)
        failed = self._failed
        if line.count * delta > 0.0:
            failed = math.nextafter(failed + math.nextafter(line.count * delta, math.inf), math.inf)
        if not (spent <= self._budget).any() or failed > self.failures:
            return None
        return np.where(spent <= self._budget, spent, math.inf), failed  # an order once passed stays passed

    def left(self, line: Line) -> int:
        """How many further releases of this kind fit, at least (`line.count` is not used)."""
        divergence, delta = _cost(line.profile, line.rate, self.orders)
        room = np.maximum(self._budget - self._spent, 0.0) / np.maximum(divergence, 1e-300)
        fits = int(min(float(room.max()), MAX_COUNT))
        if delta > 0.0:
            fits = min(fits, int((self.failures - self._failed) / delta))
        while fits > 0 and not self.admits(Line(line.profile, line.rate, fits)):
            fits -= 1 + fits // 1000
        return max(fits, 0)

    @property
    def epsilon_spent(self) -> float:
        """What the divergence spent so far converts to, at the filter's delta: 0 before the first, at most epsilon.

        The guarantee is epsilon for the whole interaction; this says how much of it has been used.
        """
        if not self._spent.any():
            return 0.0
        orders = np.asarray(self.orders, np.float64)
        rest = self.delta - self.failures
        return float(max(0.0, min(self.epsilon, to_epsilon(orders, self._spent, rest / orders.size).min())))

    def state(self) -> dict[str, list[str] | str]:
        """What has been spent, exactly: hexadecimal floats, for each order and for the failures."""
        return {"spent": [float(value).hex() for value in self._spent], "failed": self._failed.hex()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, by a filter with the same parameters."""
        spent = np.array([float.fromhex(value) for value in state["spent"]])
        failed = float.fromhex(state["failed"])
        if spent.size != len(self.orders) or not (spent >= 0.0).all() or not failed >= 0.0:
            raise InvalidParameter(
                "state", f"{spent.size} orders", f"the state of a filter at {len(self.orders)} orders"
            )
        self._spent, self._failed = spent, failed


@lru_cache(maxsize=512)
def _cost(profile: Profile, rate: float, orders: tuple[int, ...]) -> tuple[FloatArray, float]:
    return amplified(profile, rate, orders)
