"""Optimal adaptive composition of equal releases of one family of pairs, certified.

The family here is that of a bounded range (`RangePairs`); `bits` has that of one-bit votes. Of a family the proofs need
that an adversary's choices are its pairs and their mixtures: E[r V(a / r)] is jointly convex in both laws.

One release. An owner takes part with probability q. Fix all other coins; if the owner takes part, let l be the ratio of
an output's probability with the owner to that without. Bounded range: l lies in an interval [L, e^eps0 L] that holds 1.
Without the owner the mean of l is 1. With the owner's coin, the ratio is r = 1 - q + q l.

The value. V_n(a) is the largest delta(log a) of n such releases, "present against absent", if an adversary chooses each
after seeing the ones before (and the other coins, which tell nothing of the owner). Expectations are without the owner:

    V_0(a) = max(0, 1 - a),    V_n(a) = max over L of E[r V_(n-1)(a / r)].

V is convex, so r V(a / r), a supremum of linear functions of r, is convex in r, and the extreme pair has two points:
l = L and l = e^eps0 L (Dong, Durfee, Rogers 2020 for one release). With L = e^-tau, tau in [0, eps0], its ratios are
u = 1 + q (e^(eps0 - tau) - 1) and v = 1 - q (1 - e^-tau). "Absent against present" is the mirror, 1 - a + a V_n(1 / a),
with its maxima: each direction is the optimum for itself.

Several lines. V_n, a maximum of pairs' curves, is convex and falls from 1 to 0 above max(0, 1 - a), so it is the curve
of a pair itself. Two pairs compose to (V * V')(a) = E[r' V(a / r')], r' being the ratio of the pair of V'; this is
symmetric. Let W(i, j) be the value of i releases of one line and j of another, in any order that the adversary likes.
Then W(i, j) <= (V_i * V'_j), by induction: if the next release is of the first line it gives at most max over L of
E[r (V_(i-1) * V'_j)(a / r)]; the maximum taken inside the expectation over r' makes it V_i * V'_j; the second line is
treated alike. So every line is replaced by ITS OWN pair (a fixed pair is its own), and these compose as fixed ones. (To
start the recursion of one line from another's curve is wrong: there the other line always comes last.) By the same
step the pairs of blocks that add up to n dominate n releases, whatever other lines come between. With tickets a line's
n is what an owner has left: a query without the owner changes no ratio, and V_(n-1) <= V_n.

What is computed is never below V:

1. On a grid a = e^(j step): the chord between two places, the last value beyond the ends. Kept is the part
   V(a) - max(0, 1 - a): linear functions between places stay linear (1 is a place), and nothing cancels at either end.
2. For the maximum over tau, see `RangeTrials.bounds`.
3. r V(a / r) grows with r, and r V(a / r) - r + a falls. The first serves for a >= 1 and the second for a < 1 (their
   means are what is kept), with ratios moved by their error that way. All terms are positive, and `_STEP_ERROR`
   covers the rounding of one step.
4. Pairs that are not tried are no further apart than b (`Trials.beyond`) in total variation. Such a pair, composed with
   a curve V, adds at most b to V(a), and by the mirror a b: so min(1, a) b is added to the others' maximum, which is at
   least V(a). This part of the curve becomes an infinite loss.

The curve becomes atoms at its corners (connect the dots), for `Composition`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Literal, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from langchain_dpicl.privacy.losses import FloatArray, Losses, mixed

OPERATIONS = 4e7
"""The most values (places times trials times releases) of one curve: less than half a second."""

ROUGHLY = 4e6
"""The same for curves of a search, which are bounds too, but looser."""

_INTERVALS = 32
"""Intervals between trials of tau. They cost about a quarter of a per cent of epsilon."""

_FINENESS = 0.1
"""A grid's step, in standard deviations of one release's loss. It costs about a tenth of a per cent of epsilon."""

_COARSEST = 0.3
"""The step where that takes too many places, since losses are rare and large."""

_WIDE = 1000
"""Places on either side of the grid of one release of several mechanisms."""

_WINDOW = 201
"""Places of a binomial law that `at_least` looks at."""

_TAIL = 55.0
"""A grid ends where delta is below e^-55. What lies above counts as an infinite loss."""

_LARGEST = 20.0
"""The largest eps0 of a curve: above, the composition of one release's profile is as good."""

_FURTHEST = 600.0
"""A grid ends here at the latest: e^loss has to be a float."""

_RATIO_ERROR = 1e-13
"""Bound on the relative error of the logarithm of a ratio log(1 - q + q e^l), at any q and |l| <= 200.

That of l is at most 2^-53 (eps0 - tau is exact if tau is above half of eps0). It reaches the logarithm at most
|l| / (1 - e^-|l|) times: 2.3e-14. `losses.mixed` adds 1e-15.
"""

_STEP_ERROR = 1e-12
"""Bound on the relative rounding error of one step of the recursion."""

_AT_ONCE = 1 << 16
"""A step works on about so many values at once: half a megabyte, which stays in a core's cache."""

_FEW = 4
"""Up to this number of releases a curve has a grid of its own: it takes little time, and a shared one costs more."""

Parts = list[tuple[Losses, int]]


def rung(count: int) -> int:
    """The least number >= count of the form m * 2^k with m <= 8: at most a quarter above."""
    shift = max(0, (count - 1).bit_length() - 3)
    return -(-count >> shift) << shift


class Trials:
    """The pairs of one release that are tried, each of two ratios r with and without the owner, the larger one first.

    Attributes
    ----------
    log_u, log_v
        The logarithms of the ratios, after amplification.
    of_u, of_v
        Their weights, without the owner.
    error
        A bound on the relative error of the logarithms.
    beyond
        The largest distance in total variation of the pairs that are not tried, after amplification.
    """

    def __init__(
        self,
        ratios: tuple[FloatArray, FloatArray],
        weights: tuple[FloatArray, FloatArray],
        error: float = _RATIO_ERROR,
        beyond: float = 0.0,
    ) -> None:
        self.log_u, self.log_v = ratios
        self.of_u, self.of_v = weights
        self.error = error
        self.beyond = beyond
        self.highest = float(self.log_u.max())
        self.lowest = float(self.log_v.min())

    def bounds(self, at_u: FloatArray, at_v: FloatArray) -> FloatArray:
        """Bounds on E[F(r)] whose maximum covers the family, for a convex F of these values at u and v.

        It may overwrite them.
        """
        column = (-1,) + (1,) * (at_u.ndim - 1)
        mean = self.of_u.reshape(column) * at_u
        mean += self.of_v.reshape(column) * at_v
        return mean

    def split(self, size: int) -> Iterator[Trials]:
        """Return parts of so many trials, in order. The largest of their bounds is the largest of all."""
        for start in range(0, self.of_u.size, size):
            yield self._part(slice(start, start + size))

    def _part(self, held: slice) -> Self:
        part = copy(self)
        part.log_u, part.log_v = self.log_u[held], self.log_v[held]
        part.of_u, part.of_v = self.of_u[held], self.of_v[held]
        return part


class PairFamily(ABC):
    """A family of pairs, one of which an adversary chooses at each release."""

    @property
    def composes(self) -> bool:
        """False if several releases are as well composed by the sum of their losses."""
        return True

    @abstractmethod
    def trials(self, rate: float) -> Trials:
        """The pairs to try at this rate."""

    @abstractmethod
    def deviation(self, rate: float) -> float:
        """About the standard deviation of one release's loss: it only says how fine a grid is."""


@dataclass(frozen=True)
class RangePairs(PairFamily):
    """Every pair of a bounded range."""

    eps0: float

    @property
    def composes(self) -> bool:
        return self.eps0 <= _LARGEST

    def trials(self, rate: float) -> Trials:
        return RangeTrials(self.eps0, rate, _tau(self.eps0))

    def deviation(self, rate: float) -> float:
        highest = math.log1p(rate * math.expm1(self.eps0))
        lowest = -math.log1p(rate * math.expm1(-self.eps0))
        return min(rate * math.sinh(0.5 * self.eps0), 0.5 * (highest + lowest))


def blocks(
    pairs: PairFamily,
    rate: float,
    count: int,
    direction: Literal["remove", "add"],
    shared: bool = False,
    most: float | None = None,
) -> Parts:
    """Pairs whose composition dominates ``count`` adaptive releases of a family, and how often each occurs.

    One pair if its curve takes at most ``most`` operations (`OPERATIONS`), else blocks of
    powers of two. Empty if two are too many.
    ``shared``: the curves of all counts that are a `rung` come from one recursion, on the grid of the largest block.
    That takes a hundredth of the time, and costs about a tenth of a per cent of epsilon.
    """
    most = most or OPERATIONS
    size = count if pairs.composes else 1
    fits = size == 1 or operations(pairs, rate, count, most) <= most
    if shared and fits and _FEW < size == rung(size):
        return [(_pair(pairs, rate, max(size, _largest_block(pairs, rate, most)), most, size, direction), 1)]
    if not fits:
        size = _largest_block(pairs, rate, most)
    parts: Parts = []
    largest = size
    while largest > 1 and count:
        if count >= size:
            parts.append((_pair(pairs, rate, largest, most, size, direction), count // size))
            count %= size
        size //= 2
    return parts


def at_least(pairs: PairFamily, rate: float, count: int, epsilon: float) -> float:
    """About the largest delta of one pair at all of so many releases, which no bound can be below.

    With k of n outcomes above, the loss is k log u + (n - k) log v.
    """
    from scipy.special import gammaln

    trials = _trials(pairs, rate)
    held = (trials.of_u > 0.0) & (trials.of_v > 0.0)
    log_u, log_v, of_u, of_v = (each[held, None] for each in (trials.log_u, trials.log_v, trials.of_u, trials.of_v))
    found = 0.0
    for weight in (of_u, of_u * np.exp(log_u)):  # the outcomes that count without the owner, and with it
        middle = count * weight
        places = np.round(middle + np.linspace(-1.0, 1.0, _WINDOW) * (6.5 * np.sqrt(middle) + 25.0))
        places = np.clip(places, 0.0, count)
        apart = np.diff(places, append=places[:, -1:] + 1.0)  # 0 for a place that occurs again
        logs = gammaln(count + 1.0) - gammaln(places + 1.0) - gammaln(count - places + 1.0)
        logs += places * np.log(of_u) + (count - places) * np.log(of_v)
        loss = np.clip(places * log_u + (count - places) * log_v, -_FURTHEST, _FURTHEST)
        remove = apart * np.exp(logs + loss) * np.maximum(-np.expm1(np.minimum(epsilon - loss, 0.0)), 0.0)
        add = apart * np.exp(logs) * np.maximum(-np.expm1(np.minimum(epsilon + loss, 0.0)), 0.0)
        found = max(found, float(remove.sum(axis=1).max()), float(add.sum(axis=1).max()))
    return found


def one_release(pairs: PairFamily, rate: float, direction: Literal["remove", "add"]) -> Losses:
    """The pair of one release's curve."""
    return _pair(pairs, rate, 1, OPERATIONS, 1, direction)


@lru_cache(maxsize=256)
def _largest_block(pairs: PairFamily, rate: float, most: float) -> int:
    """The largest power of two of releases whose curve takes at most so many operations."""
    size = 1
    while operations(pairs, rate, 2 * size, most) <= most:
        size *= 2
    return size


def operations(pairs: PairFamily, rate: float, count: int, most: float) -> float:
    """Return the number of values that the curve of so many releases takes, if it aims at no more than ``most``."""
    below, above, _ = _grid(pairs, rate, count, most)
    return (below + above + 1.0) * _trials(pairs, rate).of_u.size * count


@lru_cache(maxsize=64)
def _trials(pairs: PairFamily, rate: float) -> Trials:
    return pairs.trials(rate)


class RangeTrials(Trials):
    """Of a bounded range, for several tau.

    For l = e^(eps0 - tau) and l = e^-tau the ratios are u and v, each 1 - q + q l. Their weights have sum 1 and give l
    the mean 1:

        w_u = (e^tau - 1) / (e^eps0 - 1),    w_v = e^tau (e^(eps0 - tau) - 1) / (e^eps0 - 1).
    """

    def __init__(self, eps0: float, rate: float, tau: FloatArray) -> None:
        ratios = eps0 - tau, -tau
        if rate < 1.0:
            ratios = mixed(ratios[0], rate), mixed(ratios[1], rate)
        of_u = np.expm1(tau) / math.expm1(eps0)
        of_v = np.exp(tau) * np.expm1(eps0 - tau) / math.expm1(eps0)
        super().__init__(ratios, (of_u, of_v))
        self._factor = math.exp(eps0)
        self._share = np.tanh(0.25 * np.diff(tau)) / math.expm1(eps0)

    def bounds(self, at_u: FloatArray, at_v: FloatArray) -> FloatArray:
        """Bounds on E[F(r)] between every two tau.

        u and v are linear in rho = e^-tau, so between two trials F is at most its chords A + B rho and A' + B' rho, and
        E[F] at most alpha + beta / rho + gamma rho with gamma = (e^eps0 B' - B) / (e^eps0 - 1). As a function of 1/rho
        that is at most its chord, plus -gamma (root - root')^2 if gamma < 0, with the roots of both rho.
        """
        mean = super().bounds(at_u, at_v)
        at_u -= self._factor * at_v
        bend = at_u[:-1] - at_u[1:]
        column = (-1,) + (1,) * (at_u.ndim - 1)
        bend *= self._share.reshape(column)  # (root - root')^2 / (rho - rho') is tanh of a quarter of the difference
        np.maximum(bend, 0.0, out=bend)
        bend += np.maximum(mean[1:], mean[:-1])
        return bend

    def split(self, size: int) -> Iterator[Trials]:
        """Return parts of so many intervals. Two neighbours share the trial between them."""
        for start in range(0, self._share.size, size):
            part = self._part(slice(start, start + size + 1))
            part._share = self._share[start : start + size]
            yield part


def _tau(eps0: float, intervals: int = _INTERVALS) -> FloatArray:
    """The trials of a curve: evenly spaced in e^(-tau / 2), which evens out what the intervals cost."""
    tau = -2.0 * np.log(np.linspace(1.0, math.exp(-0.5 * eps0), intervals + 1))
    tau[0], tau[-1] = 0.0, eps0
    return np.asarray(np.clip(tau, 0.0, eps0))


@lru_cache(maxsize=256)
def _moments(pairs: PairFamily, rate: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Orders, and about log E[r^(1 + order)] and log E[r^-order] of one release: they only say how wide a grid is."""
    trials = _trials(pairs, rate)
    orders = np.geomspace(0.05, 1e4, 40) / (trials.highest - trials.lowest)
    found = []
    for powers in (1.0 + orders, -orders):
        of_u = np.multiply.outer(trials.log_u, powers)
        of_v = np.multiply.outer(trials.log_v, powers)
        tops = np.maximum(of_u, of_v).max(axis=0)
        bounds = trials.bounds(np.exp(of_u - tops), np.exp(of_v - tops))
        found.append(tops + np.log(np.maximum(bounds.max(axis=0), 1e-300)))
    return orders, found[0], found[1]


def _grid(pairs: PairFamily, rate: float, count: int, most: float) -> tuple[int, int, float]:
    """Places below and above 0, and the step, of a grid for the losses of so many releases."""
    orders, above, below = _moments(pairs, rate)
    trials = _trials(pairs, rate)
    deviation = pairs.deviation(rate)

    # Chernoff's bound on a tail of e^-`_TAIL`, the least over the orders; no loss exceeds count * most
    def end(most: float, logs: FloatArray, step: float) -> float:
        spread = 0.125 * (orders * step) ** 2  # a chord adds at most about this to log E[r^order]
        chernoff = (count * (logs + spread) + _TAIL) / orders
        return min(count * (most + step), float(chernoff.min()), _FURTHEST)

    def ends(step: float) -> tuple[float, float]:
        return end(-trials.lowest, below, step), end(trials.highest, above, step)

    step = _FINENESS * deviation * min(1.0, count / 64.0)
    places = min(max(2500.0, most / trials.of_u.size / count), 10_000.0)
    step = max(step, min(sum(ends(step)) / places, _COARSEST * deviation))
    low, high = ends(step)
    return math.ceil(low / step) + 1, math.ceil(high / step) + 1, step


@lru_cache(maxsize=32)
def _curves(pairs: PairFamily, rate: float, count: int, most: float) -> dict[int, FloatArray]:
    """V_n - V_0 on the grid of ``count``, for n = count and every `rung` below it."""
    below, above, step = _grid(pairs, rate, count, most)
    one = _Step(_trials(pairs, rate), below, above, step)
    values = np.zeros(below + above + 1)
    kept = {}
    for n in range(1, count + 1):
        values = one(values)
        if n in (count, rung(n)):
            kept[n] = values
    return kept


class _Step:
    """One step of the recursion: from V_(n-1) - V_0 on a grid to an upper bound on V_n - V_0."""

    def __init__(self, trials: Trials, below: int, above: int, step: float) -> None:
        places = np.asarray(np.arange(-below, above + 1) * step, np.float64)
        self._beyond = trials.beyond * np.exp(np.minimum(places, 0.0))
        self._reach = math.ceil(max(trials.highest, -trials.lowest) / step * (1.0 + trials.error)) + 2
        self._padded = np.empty(places.size + 2 * self._reach)
        self._sides = [
            self._side(trials, 0, places[:below], step, -trials.error),
            self._side(trials, below, places[below:], step, trials.error),
        ]

    def _side(
        self, trials: Trials, first: int, places: FloatArray, step: float, error: float
    ) -> tuple[FloatArray, list[_Filter]]:
        """Stretches of V - V_0 as long as these places, and the filters that read them, for some trials each."""
        at_once = max(1, _AT_ONCE // (4 * places.size))
        return sliding_window_view(self._padded, places.size), [
            _Filter(part, places, step, self._reach + first, error) for part in trials.split(at_once)
        ]

    def __call__(self, values: FloatArray) -> FloatArray:
        reach = self._reach
        self._padded[:reach] = values[0]
        self._padded[reach:-reach] = values
        self._padded[-reach:] = values[-1]
        largest = [reduce(np.maximum, (bounds(windows) for bounds in filters)) for windows, filters in self._sides]
        values = np.concatenate(largest) * (1.0 + _STEP_ERROR)
        values += self._beyond
        return np.maximum(values, 1e-280, out=values)  # denormal numbers are slow


class _Filter:
    """The largest of some trials' bounds on E[F(r)], for each of some places a on one side of 1.

    The sign of ``error`` is + for a >= 1, where F(r) = r V(a / r) grows with r, and - for a < 1, where F(r) =
    r V(a / r) - r + a falls: r is rounded that way.

    With ``moves`` the whole steps in log r, and t its rest, log(a / r) lies t steps below the place that is ``moves``
    below a. The chord in a gives the place below it the share s, and the place above it 1 - s:

        t = log r / step - moves,    s = (e^(-t step) - 1) / (e^-step - 1).

    Both count times r. The corner is F(r) for V_0: r - a for 1 <= a < r, and a - r for r < a < 1. So it is one of the
    larger ratio for a >= 1, and of the smaller one for a < 1.
    """

    def __init__(self, trials: Trials, places: FloatArray, step: float, first: int, error: float) -> None:
        log_r = np.concatenate([trials.log_u, trials.log_v])
        log_r += error * np.abs(log_r)
        moves = np.floor(log_r / step)
        share = np.expm1((moves - log_r / step) * step) / math.expm1(-step)
        starts = first - moves.astype(np.int64)
        self._starts = np.concatenate([starts, starts - 1])
        self._factors = np.concatenate([np.exp(log_r) * each for each in (1.0 - share, share)])[:, None]
        self._trials = trials
        size = trials.of_u.size
        sign = math.copysign(1.0, error)
        self._cornered = slice(0, size) if sign > 0 else slice(size, 2 * size)
        log_r = log_r[self._cornered, None]
        held = int(np.count_nonzero(sign * places < (sign * log_r).max()))
        self._near = slice(0, held) if sign > 0 else slice(places.size - held, places.size)
        near = places[self._near]
        self._corner = np.exp(np.minimum(log_r, near)) * np.expm1(np.maximum(sign * (log_r - near), 0.0))

    def __call__(self, windows: FloatArray) -> FloatArray:
        """``windows`` are stretches of V - V_0 by their first place; that of ratio 1 begins at ``first``."""
        values = windows[self._starts]
        values *= self._factors
        size = self._trials.of_u.size
        at_r = values[: 2 * size]
        at_r += values[2 * size :]
        at_r[self._cornered, self._near] += self._corner
        largest: FloatArray = np.maximum.reduce(self._trials.bounds(at_r[:size], at_r[size:]))
        return largest


@lru_cache(maxsize=256)
def _pair(
    pairs: PairFamily,
    rate: float,
    count: int,
    most: float,
    size: int,
    direction: Literal["remove", "add"],
) -> Losses:
    """The pair of the curve of ``size`` releases, on the grid of ``count``."""
    below, above, step = _grid(pairs, rate, count, most)
    return _atoms(_curves(pairs, rate, count, most)[size], below, above, step, direction)


@lru_cache(maxsize=256)
def together(ranges: tuple[float, ...], direction: Literal["remove", "add"]) -> Losses:
    """The pair of ONE release of several mechanisms of these ranges on the same outputs, before amplification.

    V_j(a) = max over L of E[l V_(j-1)(a / l)], at rate 1, with the j-th range at the j-th step. All of the mechanisms
    are drawn at every release, so nobody chooses their order, and the step's range may change along a fixed one. (It
    may not in a plan of several lines, whose order callers choose: see above.) The induction over j is that of equal
    ranges: what the mechanisms before the j-th give away is at most V_(j-1) for every outcome of the j-th. No loss
    exceeds the sum of the ranges, where the grid ends.
    """
    total = math.fsum(ranges)
    step = total / _WIDE
    values = np.zeros(2 * _WIDE + 3)
    intervals = int(min(max(OPERATIONS / (8.0 * values.size * len(ranges)), _INTERVALS), 16 * _INTERVALS))
    trials = {each: RangeTrials(each, 1.0, _tau(each, intervals)) for each in ranges}
    steps = {each: _Step(trials[each], _WIDE + 1, _WIDE + 1, step) for each in trials}
    for each in ranges:
        values = steps[each](values)
    return _atoms(values, _WIDE + 1, _WIDE + 1, step, direction)


def _atoms(values: FloatArray, below: int, above: int, step: float, direction: Literal["remove", "add"]) -> Losses:
    """The pair of a curve, V - V_0 on a grid: its corners are the atoms.

    Between the places a and a e^step the slope in a is (V(a e^step) - V(a)) / (a (e^step - 1)). Without the owner an
    atom weighs the change of the slope there, rounded up. Beside the atoms is the mass of the ratio 0 (the slope at 0)
    and, with the owner, of an infinite one (the value at the grid's end).
    """
    losses = np.asarray(np.arange(-below, above + 1) * step, np.float64)
    a = np.exp(losses)
    slopes = np.concatenate(
        [
            values[:1] / a[:1],
            np.diff(values) / (a[:-1] * math.expm1(step)),
            np.zeros(1),
        ]
    )
    absent = np.diff(slopes) + 1e-15 * (np.abs(slopes[1:]) + np.abs(slopes[:-1]))
    absent[below] += 1.0  # the corner of max(0, 1 - a)
    absent = np.maximum(absent, 0.0)
    if direction == "remove":
        return Losses(losses, absent * a, float(values[-1]))
    return Losses(-losses[::-1], absent[::-1].copy(), float(slopes[0]))
