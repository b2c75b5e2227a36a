"""Exponential moments of a sum of independent losses: they steer `composition`, and are bounds of their own.

Everything follows from log M(s) = log E[e^(s L); L finite], which adds up over releases. Its derivative at s
is the mean of the losses after tilting (masses times e^(s L), normalised); Chernoff's bound P(L > t) <= M(s)
e^(-s t) holds for every s >= 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.roots import crossing

LEAST_ORDER, LARGEST_ORDER = 1e-7, 1e7

UNDERFLOW = -600.0
"""Weights below e^-600 of the largest are lifted to it: denormal numbers would take a hundred times longer."""


@dataclass(frozen=True)
class Moments:
    """log M at one order, with the tilted mean and variance (its first two derivatives)."""

    log: float
    mean: float
    variance: float

    @property
    def deviation(self) -> float:
        """The tilted standard deviation, never quite 0."""
        return math.sqrt(max(self.variance, 1e-300))


class SummedLosses:
    """Finite losses of independent releases: triples of (losses, masses, how many such releases)."""

    def __init__(self, parts: Sequence[tuple[FloatArray, FloatArray, int]]) -> None:
        held = [(losses[masses > 0.0], masses[masses > 0.0], count) for losses, masses, count in parts]
        self._parts = [(losses, np.log(masses), count) for losses, masses, count in held]
        self._known: dict[float, Moments] = {}

    def moments(self, order: float) -> Moments:
        """log M and its derivatives at `order` (any sign)."""
        if order in self._known:
            return self._known[order]
        log = mean = variance = 0.0
        for losses, logs, count in self._parts:
            exponents = logs + order * losses
            top = float(exponents.max())
            weights = np.exp(np.maximum(exponents - top, UNDERFLOW))
            total = float(weights.sum())
            first = float((weights * losses).sum()) / total
            second = float((weights * (losses - first) ** 2).sum()) / total
            log += count * (top + math.log(total))
            mean += count * first
            variance += count * second
        self._known[order] = Moments(log, mean, variance)
        return self._known[order]

    def order_for_tail(self, delta: float) -> float:
        """The tilt whose saddlepoint estimate of delta(mean) is `delta`. Any tilt gives a bound; this is a good one."""

        def tail(order: float) -> float:
            at = self.moments(order)
            spread = order * (1.0 + order) * math.sqrt(2.0 * math.pi) * at.deviation
            return at.log - order * at.mean - math.log1p(spread)

        return self._with_spread(_solve_decreasing(tail, math.log(delta)))

    def order_for_mean(self, mean: float) -> float:
        """The tilt that moves the mean to `mean`, as far as one can."""
        return self._with_spread(_solve_decreasing(lambda order: -self.moments(order).mean, -mean))

    def _with_spread(self, order: float) -> float:
        """Close to the largest possible loss a tilt leaves a single place: the largest one that still has a spread."""
        while order > 1e-3 and order * self.moments(order).deviation < 1.0:
            order *= 0.5
        return order

    def window(self, order: float, left_out: float) -> tuple[float, float]:
        """Losses beyond which the tilted sum weighs at most `left_out` on either side (Chernoff)."""
        low = sum(count * float(losses.min()) for losses, _, count in self._parts)
        high = sum(count * float(losses.max()) for losses, _, count in self._parts)
        room = -math.log(left_out)
        best_if_normal = math.sqrt(2.0 * room) / self.moments(order).deviation
        return self._reach(order, room, -best_if_normal, low), self._reach(order, room, best_if_normal, high)

    def _reach(self, order: float, room: float, shift: float, bound: float) -> float:
        """The least (log M(order + s) - log M(order) + room)/s over shifts s of one sign; every s gives a bound.

        Starts at the best shift for a normal sum and goes down: rare large losses want a smaller one.
        """
        here = self.moments(order).log
        sign = math.copysign(1.0, shift)
        least, worse, smallest = sign * bound, 0, 1e-6 * abs(shift)
        while worse < 3 and abs(shift) > smallest:
            reach = sign * (self.moments(order + shift).log - here + room) / shift
            worse = worse + 1 if reach >= least else 0
            least = min(least, reach)
            shift /= 1.6
        return sign * least


def _solve_decreasing(function: Callable[[float], float], target: float) -> float:
    """An order with function(order) close to target; an end of the range if the target lies outside."""

    def gap(log_order: float) -> float:
        return function(math.exp(log_order)) - target

    low, high = math.log(LEAST_ORDER), math.log(LARGEST_ORDER)
    if gap(low) <= 0.0:
        return LEAST_ORDER
    if gap(high) >= 0.0:
        return LARGEST_ORDER
    return math.exp(crossing(gap, low, high, 1e-3))
