"""Privacy losses of a dominating pair, as atoms: all accounting here is made of them.

A pair (P, Q) of output distributions has the privacy loss L = log(P/Q), drawn under P. It determines

    delta(eps) = E[max(0, 1 - e^(eps - L))] = P(L > eps) - e^eps Q(L > eps).

Here a pair is a finite list of atoms (loss, mass under P), plus `infinity`, P's mass where Q has none. A pair
with a density becomes atoms by connecting the dots (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022): the
mass of a cell goes to the cell's two ends so that both the P-mass and the Q-mass of the cell are kept. Both
ends together are then at least as easy to tell apart as the cell was (merging the two ends gives the cell
back), so delta never shrinks: every discretisation here rounds towards more leakage accounted for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

UNDERFLOW = -600.0
"""Weights below e^-600 of the largest are lifted to it: denormal numbers would take a hundred times longer."""


@dataclass(frozen=True, eq=False)
class Losses:
    """A dominating pair as atoms: finite ``losses`` and their ``masses`` under P.

    Under Q they weigh `masses * exp(-losses)`. ``infinity`` is P's mass where Q has none.
    """

    losses: FloatArray
    masses: FloatArray
    infinity: float = 0.0

    def delta(self, epsilon: ArrayLike) -> FloatArray:
        """delta(eps) of these atoms, for every eps (negative ones too)."""
        eps = np.asarray(epsilon, np.float64)
        finite = [float((-np.expm1(np.minimum(e - self.losses, 0.0)) * self.masses).sum()) for e in eps.ravel()]
        return self.infinity + np.asarray(finite, np.float64).reshape(eps.shape)

    def removed(self, rate: float) -> Losses:
        """Amplified by a Poisson sample, direction REMOVE: the pair ((1-q) Q + q P, Q).

        The loss l becomes log(1 - q + q e^l); the mass becomes (1-q) Q + q P. Q's mass where P has none has the loss
        log(1 - q). Zhu, Dong, Wang 2022, theorem 11.
        """
        if rate == 1.0:
            return self
        under_q = np.exp(np.log(np.maximum(self.masses, 1e-320)) - self.losses)
        missing = max(0.0, 1.0 - float(under_q.sum()))
        return Losses(
            np.append(math.log1p(-rate), mixed(self.losses, rate)),
            np.append((1.0 - rate) * missing, rate * self.masses + (1.0 - rate) * under_q),
            rate * self.infinity,
        )

    def added(self, rate: float) -> Losses:
        """Amplified by a Poisson sample, direction ADD: the pair (P, (1-q) P + q Q), P being without the owner.

        The loss l becomes -log(1 - q + q e^-l) and keeps its mass; infinity becomes -log(1 - q).
        """
        if rate == 1.0:
            return self
        return Losses(
            np.append(-mixed(-self.losses, rate), -math.log1p(-rate)),
            np.append(self.masses, self.infinity),
        )

    def spread(self, step: float) -> GridLosses:
        """Move the atoms to multiples of `step`, keeping each one's mass under P and under Q: never below the truth.

        An atom that lies x above the multiple to its left gives its right neighbour the share

            (e^-x - 1) / (e^-step - 1),

        and its left neighbour the rest: the two keep the sum of masses, and of masses times e^-loss.
        """
        cells = np.floor(self.losses / step)
        inside = np.clip(self.losses - cells * step + 1e-15 * np.abs(self.losses), 0.0, step)  # rounded up
        right = np.expm1(-inside) / math.expm1(-step)
        index = cells.astype(np.int64)
        masses = np.concatenate([self.masses * (1.0 - right), self.masses * right])
        held = masses > 0.0
        places = np.concatenate([index, index + 1])[held]
        return GridLosses(np.asarray(places * step, np.float64), masses[held], self.infinity, places=places)

    def compose(self, other: Losses, points: int = 4096) -> Losses:
        """Compose both on the same sample: losses add up. Exact for few atoms, else on a common grid.

        The grid's masses are convolved directly, so there is no Fourier noise.
        """
        infinity = self.infinity + other.infinity - self.infinity * other.infinity
        if self.losses.size * other.losses.size <= 8 * points:
            losses = np.add.outer(self.losses, other.losses).ravel()
            return Losses(losses, np.multiply.outer(self.masses, other.masses).ravel(), infinity)
        step = max(float(np.ptp(self.losses) + np.ptp(other.losses)) / points, 1e-9)
        first = 0
        dense: list[FloatArray] = []
        for grid in (self.spread(step), other.spread(step)):
            low = int(grid.places.min())
            first += low
            dense.append(np.asarray(np.bincount(grid.places - low, grid.masses), np.float64))
        masses = np.convolve(dense[0], dense[1])
        losses = np.asarray((first + np.arange(masses.size)) * step, np.float64)
        held = masses > 0.0
        return Losses(losses[held], masses[held], infinity)

    def log_moment(self, order: float) -> float:
        """log E[exp(order * L); L finite]: the Rényi divergence of order 1 + `order` is this over `order`."""
        held = self.masses > 0.0
        exponents = order * self.losses[held] + np.log(self.masses[held])
        top = float(exponents.max())
        return top + math.log(float(np.exp(exponents - top).sum()))


def mixed(losses: FloatArray, rate: float) -> FloatArray:
    """log(1 - q + q e^l) with a relative error below 1e-15, for every q below 1.

    Let u be 2^-53, and r the answer. If x = q (e^l - 1) is at least -1/2, it is off by 3 u of itself, of which log1p
    passes on at most 1.5 times. Below, 1 + x would cancel, by any amount for q near 1. There |r| is at least log 2, and
    the two terms are added by their logarithms a and b, off by 2 u of themselves. In r these errors count by the terms'
    shares w: w |a| = w (|r| + log(1 / w)) <= w |r| + 1/e. So r is off by at most 2 u (|r| + 2/e), and its rounding.
    """
    x = rate * np.expm1(np.minimum(losses, 700.0))
    added = np.logaddexp(math.log1p(-rate), math.log(rate) + losses)
    return np.where((x >= -0.5) & (losses <= 700.0), np.log1p(np.maximum(x, -0.5)), added)


@dataclass(frozen=True, eq=False)
class GridLosses(Losses):
    """Atoms on the multiples of one step: `losses[i]` is `places[i]` steps (places may repeat)."""

    places: NDArray[np.int64] = field(kw_only=True)


def from_tails(edges: FloatArray, above: FloatArray, below: FloatArray) -> Losses:
    """Connect the dots for a pair that is its own mirror image (P and Q may swap), on edges symmetric about 0.

    `above[i]` = P(L > edges[i]) and `below[i]` = P(L <= edges[i]), each accurate if it is small. The mirror gives Q:
    Q(a < L <= b) = P(-b <= L < -a). A cell with the mass p under P and q under Q, between the edges a and b, gives its
    right edge

        (p - e^a q) / (1 - e^(a - b)),

    and its left edge the rest. The mass outside of the edges goes to infinity above (more leakage accounted for) and to
    the lowest edge below (its Q-mass becomes `missing`).
    """
    p_cell = np.where(
        edges[:-1] > 0.0,
        np.maximum(above[:-1] - above[1:], 0.0),
        np.maximum(below[1:] - below[:-1], 0.0),
    )
    with np.errstate(over="ignore", invalid="ignore"):
        right = (p_cell - np.exp(edges[:-1]) * p_cell[::-1]) / -np.expm1(-np.diff(edges))
    right = np.clip(np.nan_to_num(right, nan=np.inf), 0.0, p_cell)
    masses = np.append(p_cell - right, 0.0)
    masses[1:] += right
    masses[0] += below[0]
    return Losses(edges, masses, max(0.0, float(above[-1])))


class Moments(NamedTuple):
    """log M at one order, with the tilted mean and variance (its first two derivatives)."""

    log: float
    mean: float
    variance: float

    @property
    def deviation(self) -> float:
        """The tilted standard deviation, never quite 0."""
        return math.sqrt(max(self.variance, 1e-300))


class SummedLosses:
    """Exponential moments of a sum of independent finite losses: they steer `composition`, and are bounds of their own.

    All follows from log M(s) = log E[e^(s L); L finite], which adds up over releases. Its derivative at s is the mean
    of the losses after tilting (masses times e^(s L), normalised), and its second derivative their variance:

        w_i = m_i e^(s l_i),    mean = sum w_i l_i / sum w_i,    variance = sum w_i (l_i - mean)^2 / sum w_i.

    Chernoff's bound P(L > t) <= M(s) e^(-s t) holds for every s >= 0. ``parts`` are pairs of one release's losses and
    the number of such releases; ``least`` and ``largest`` are the ends of the sum.
    """

    def __init__(self, parts: Sequence[tuple[Losses, int]]) -> None:
        held = [(each, each.masses > 0.0, count) for each, count in parts]
        self._parts = [(each.losses[at], np.log(each.masses[at]), count) for each, at, count in held]
        self.least = sum(count * float(losses.min()) for losses, _, count in self._parts)
        self.largest = sum(count * float(losses.max()) for losses, _, count in self._parts)
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

        return self._order(tail, math.log(delta))

    def order_for_mean(self, mean: float) -> float:
        """The tilt that moves the mean to `mean`, as far as one can."""
        return self._order(lambda order: -self.moments(order).mean, -mean)

    def _order(self, decreasing: Callable[[float], float], target: float) -> float:
        """An order at which the function is close to `target`; an end of the range if the target lies outside.

        Close to the largest possible loss a tilt leaves a single place: then the largest order that still has a spread.
        """

        def gap(log_order: float) -> float:
            return decreasing(math.exp(log_order)) - target

        order, largest = 1e-7, 1e7
        low, high = math.log(order), math.log(largest)
        if gap(low) > 0.0:
            order = largest if gap(high) >= 0.0 else math.exp(crossing(gap, low, high, 1e-3))
        while order > 1e-3 and order * self.moments(order).deviation < 1.0:
            order *= 0.5
        return order

    def window(self, order: float, left_out: float) -> tuple[float, float]:
        """Losses beyond which the tilted sum weighs at most `left_out` on either side (Chernoff).

        Every shift s gives a bound, (log M(order + s) - log M(order) - log(left_out)) / s. On each side the search
        starts at the best shift for a normal sum and goes down: rare large losses want a smaller one.
        """
        room = -math.log(left_out)
        here = self.moments(order)
        ends = []
        for sign, end in ((-1.0, self.least), (1.0, self.largest)):
            shift = sign * math.sqrt(2.0 * room) / here.deviation
            smallest = 1e-6 * abs(shift)
            least = sign * end
            worse = 0
            while worse < 3 and abs(shift) > smallest:
                reach = sign * (self.moments(order + shift).log - here.log + room) / shift
                worse = worse + 1 if reach >= least else 0
                least = min(least, reach)
                shift /= 1.6
            ends.append(sign * least)
        return ends[0], ends[1]


def crossing(function: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """An x near which `function` changes its sign between `low` and `high` (it must have different signs there).

    A search, no certificate: inverse quadratic steps if they are safe, else halving (Chandrupatla 1997). The crossing
    lies between a, the last x, and b; c is the end that was given up last. The next x is a + share (b - a), with

        share = f_a f_c / ((f_b - f_a) (f_b - f_c)) + (c - a) / (b - a) f_a f_b / ((f_c - f_a) (f_c - f_b)).
    """
    b, a = low, high
    at_b, at_a = function(b), function(a)
    c, at_c = a, at_a
    share = 0.5
    for _ in range(200):
        x = a + share * (b - a)
        at_x = function(x)
        if (at_x > 0.0) == (at_a > 0.0):
            c, at_c = a, at_a
        else:
            c, at_c, b, at_b = b, at_b, a, at_a
        a, at_a = x, at_x
        if at_x == 0.0 or abs(b - a) <= tolerance:
            break
        where, height = (a - b) / (c - b), (at_a - at_b) / (at_c - at_b)
        share = 0.5
        if 1.0 - math.sqrt(max(0.0, 1.0 - where)) < height < math.sqrt(max(0.0, where)):
            share = at_a / (at_b - at_a) * at_c / (at_b - at_c)
            share += (c - a) / (b - a) * at_a / (at_c - at_a) * at_b / (at_c - at_b)
        least = min(0.5, 0.5 * tolerance / abs(b - a))
        share = min(max(share, least), 1.0 - least) if math.isfinite(share) else 0.5
    return a if abs(at_a) < abs(at_b) else b
