"""The sum of many privacy losses, certified: an exponentially tilted Fourier transform.

Releases on fresh samples compose like the sum of their losses. That sum is computed on a grid by FFT; three
things could make the answer too small, and each is bounded and added:

1. Grid. Atoms are spread over their two neighbours keeping P- and Q-mass, so delta only grows. The step is
   chosen so that this costs about `GRID_ERROR` of epsilon.
2. Window. The transform is cyclic: what leaves the window comes back at its other end. That only adds mass
   there; what left at the upper end is counted once more, as an infinite loss (Chernoff).
3. Floating point. The transform's error is bounded, per place and in total, and the lesser is added; masses and
   losses are raised by their own rounding errors.

Tilting makes this work for a tail of 1e-12: instead of masses m_i it transforms m_i e^(s t_i) / M(s), whose
sum concentrates at the wanted epsilon, and undoes the tilt afterwards (times M^n e^(-s t)). Errors are then
relative to the tail itself and not to 1, and a window of a few standard deviations is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from langchain_dpicl.privacy.losses import UNDERFLOW, FloatArray, GridLosses, Losses, SummedLosses

GRID_ERROR = 2e-4
"""Share of epsilon that the grid may cost."""

_ULP = 2.0**-52
_TRANSFORM_ERROR = 4.0 * _ULP
"""Bound on a transform's error per stage: relative to the sum of its absolute inputs for each place, and relative to
its output in the root of the sum of squares (Higham 2002, theorem 24.2)."""

_MASS_ERROR = 1e-12
"""Bound on the relative rounding error of one release's masses."""

_LOSS_ERROR = 4e-15
"""Bound on the absolute rounding error of one release's loss (its relative one is covered by `Losses.spread`)."""

_LEFT_OUT = 1e-6
"""Share of delta that the window may leave out on either side."""

MAX_PLACES = 1 << 21
"""Places of the largest transform. If a sum wants more, its grid is coarser: still a bound, but less tight."""


class Composition:
    """Certified delta and epsilon of releases on fresh samples, in one direction.

    ``parts`` are pairs of one release's losses and how many such releases there are. The largest transform has
    ``places``: fewer take less time, and the bound may be less tight.
    """

    def __init__(self, parts: Sequence[tuple[Losses, int]], places: int = MAX_PLACES) -> None:
        self._places = places
        self._parts = [(losses, count) for losses, count in parts if count > 0]
        self._count = sum(count for _, count in self._parts)
        self.infinity = -math.expm1(
            sum(count * math.log1p(-min(losses.infinity, 1.0 - 1e-16)) for losses, count in self._parts)
        )
        self._sum = SummedLosses(self._parts)

    @property
    def distance(self) -> float:
        """An upper bound on delta(0), the total variation distance of the sum's pair: those of the releases add up.

        It stays below q for a release that an owner takes part in with probability q, whatever the mechanism.
        """
        return sum(count * float(losses.delta(0.0)) for losses, count in self._parts) * (1.0 + 1e-9)

    def epsilon(self, delta: float, enough: float = 0.0) -> float:
        """The least certified epsilon >= 0 at `delta`; infinite if infinite losses alone weigh at least delta.

        A bound that is at most ``enough`` is not made any finer.
        """
        if self.distance <= delta:
            return 0.0
        if self.infinity >= delta:
            return math.inf
        if self._count == 1:
            return max(0.0, self._single.epsilon(delta) + _LOSS_ERROR)
        rest = delta - self.infinity
        order = self._sum.order_for_tail(rest)
        # P(L > eps) <= M e^(-s eps), and no loss exceeds the largest: bounds without any grid.
        chernoff = (self._sum.moments(order).log - math.log(rest)) / order
        rounding = _LOSS_ERROR * self._count
        start = min(chernoff, self._sum.largest) + rounding
        if start <= enough:
            return max(0.0, start)
        return max(
            0.0,
            self._refined(lambda curve: curve.epsilon(delta) + rounding, order, None, rest, start, enough),
        )

    def delta(self, epsilon: float) -> float:
        """A certified upper bound on delta at `epsilon` (any sign), at most 1.

        The search starts at Chernoff's bound M(s) e^(-s epsilon), with the saddlepoint estimate of delta, that bound
        over 1 + s (1 + s) sqrt(2 pi) times the tilted deviation, for the part of the finite losses.
        """
        if not self._parts:
            return max(0.0, -math.expm1(epsilon))
        epsilon -= _LOSS_ERROR * self._count
        if self._count == 1:
            return min(1.0, self._single.delta(epsilon))
        if epsilon >= self._sum.largest * (1.0 + 1e-12):
            return self.infinity
        order = self._sum.order_for_mean(epsilon)
        at = self._sum.moments(order)
        chernoff = math.exp(min(0.0, at.log - order * epsilon))
        rest = chernoff / (1.0 + order * (1.0 + order) * math.sqrt(2.0 * math.pi) * at.deviation)
        start = min(1.0, self.infinity + chernoff)
        return self._refined(lambda curve: curve.delta(epsilon), order, epsilon, max(rest, 1e-290), start)

    def approximate_epsilon(self, delta: float) -> float:
        """The saddlepoint approximation: a guess for searches, often within a few per cent, no bound."""
        if not self._parts:
            return 0.0
        if self.infinity >= delta:
            return math.inf
        return max(0.0, self._sum.moments(self._sum.order_for_tail(delta - self.infinity)).mean)

    def _refined(
        self,
        value: Callable[[_Curve], float],
        order: float,
        epsilon: float | None,
        delta: float,
        start: float,
        enough: float = 0.0,
    ) -> float:
        """The least bound found: one curve if the saddlepoint holds, else finer and finer grids while they gain.

        It fails if few or rare large losses decide. Tilting then makes them common and the window wide, so tilt less.
        """
        at = self._sum.moments(order)
        guess = at.mean if epsilon is None else epsilon
        worth = 12.0 * GRID_ERROR if epsilon is None else 0.01
        attempts = 12 if epsilon is None else 8
        steepest = order
        step = None
        if self._count < 64 or at.variance > 4.0 * self._sum.moments(0.0).variance:  # large losses are few or rare
            order = self._narrow_order(steepest, guess, delta)
            step = 8.0 * self._step(order)
        settled = True
        best = start
        bound = math.inf
        for _ in range(attempts):
            curve = self._curve(order, guess, delta, step)
            coarser = bound
            bound = value(curve)
            best = min(best, bound)
            if step is None and (epsilon is not None or abs(bound - guess) <= 0.1 * abs(bound)):
                break
            # a grid four times finer gains a quarter to a sixteenth of what this one gained
            if best <= enough or curve.is_finest or (settled and coarser - bound <= worth * best):
                break
            if epsilon is None:
                guess = best
            else:
                delta = min(delta, max(best - self.infinity, 1e-290))
            last = order
            order = self._narrow_order(steepest, guess, delta)
            settled = 0.6 < order / last < 1.7
            step = curve.step / 4.0
        return best

    @cached_property
    def _single(self) -> _Curve:
        """One release needs no grid: its own atoms, in order."""
        losses = self._parts[0][0]
        order = np.argsort(losses.losses)
        return _Curve(
            losses=losses.losses[order],
            masses=losses.masses[order] * (1.0 + _MASS_ERROR),
            infinity=losses.infinity,
            noise=np.zeros(order.size),
            mean=0.0,
            step=0.0,
            is_finest=True,
        )

    def _left_out(self, order: float, epsilon: float, delta: float) -> float:
        """The tilted weight that the window may leave out on either side.

        It comes back at the other end, where untilting multiplies what lands above epsilon by at most
        M e^(-order * epsilon). So it must be `_LEFT_OUT` times delta over that.
        """
        excess = self._sum.moments(order).log - order * epsilon - math.log(delta)
        return _LEFT_OUT * math.exp(-min(max(0.0, excess), 600.0))

    def _narrow_order(self, order: float, epsilon: float, delta: float) -> float:
        """Among lesser tilts that keep floating-point errors far below delta, the one with the least window."""
        body = self._sum.moments(0.0).deviation
        widths: list[tuple[float, float]] = []
        for halvings in range(14):
            candidate = order / 2.0**halvings
            excess = self._sum.moments(candidate).log - candidate * epsilon - math.log(delta)
            low, high = self._sum.window(candidate, self._left_out(candidate, epsilon, delta))
            # about what `_transform` will bound: its total error, or its error per place times the places
            noise = self._count * max(1e-30, min(5e-12, 1.2e-14 * (high - low) / body))
            if halvings and excess > max(2.0, math.log(1e-2 / noise)):
                break
            widths.append((high - low, candidate))
        return min(widths)[1]

    def _step(self, order: float) -> float:
        """The widest step that costs less than `GRID_ERROR` of epsilon: d epsilon = d log M(order) / order."""
        order = max(order, 1e-3)
        at = self._sum.moments(order)
        allowed = GRID_ERROR * max(abs(at.mean), 1e-3 * at.deviation, 1e-9)
        floor = allowed / self._count  # an atom moves by less than a step, so this is always fine enough
        step = max(floor, at.deviation / 8.0)
        while step > floor:
            on_grid = SummedLosses([(losses.spread(step), count) for losses, count in self._parts])
            cost = (on_grid.moments(order).log - at.log) / order
            if cost <= allowed:
                break
            step = max(floor, step * min(0.7, max(0.2, 0.9 * math.sqrt(allowed / cost))))
        return step

    def _curve(self, order: float, epsilon: float, delta: float, step: float | None) -> _Curve:
        """The sum's masses in a window that is wide enough for delta(epsilon), if that is about `delta`.

        The transform gives the tilted masses w. At a place t the mass is w M(s) e^(-s t), s being the order.
        """
        from scipy.fft import next_fast_len  # 30 ms, and many processes never compose

        left_out = self._left_out(order, epsilon, delta)
        low, high = self._sum.window(order, left_out)
        step = step or self._step(order)
        while True:
            finest = (high - low) / self._places
            step = max(step, finest)
            grids = [(losses.spread(step), count) for losses, count in self._parts]
            tilted = SummedLosses(grids)
            low, high = tilted.window(order, left_out)
            if high - low <= 1.2 * step * self._places:
                break
        first = math.floor(low / step)
        last = math.ceil(max(high, epsilon) / step)
        size = next_fast_len(max(last - first + 2, 16), real=True)
        places, per_place, in_total = self._transform(grids, order, size)
        at = tilted.moments(order)
        losses = np.asarray((first + np.arange(size)) * step, np.float64)
        rounding = _MASS_ERROR * self._count + 8.0 * _ULP * (abs(at.log) + order * float(np.abs(losses).max()))
        untilt = np.exp(np.minimum(at.log - order * losses, 700.0)) * (1.0 + rounding)
        masses = untilt * np.maximum(np.roll(places, -first % size), 0.0)
        # P(L > top) <= M e^(-order * top) times the tilted weight above the top
        beyond = math.exp(min(0.0, at.log - order * float(losses[-1]) + math.log(left_out)))
        noise = np.minimum(_deltas(untilt * per_place, losses, at.mean)[0], untilt * in_total)
        return _Curve(
            losses,
            masses,
            infinity=self.infinity + beyond,
            noise=noise,
            mean=at.mean,
            step=step,
            is_finest=step <= finest,
        )

    def _transform(
        self, grids: list[tuple[GridLosses, int]], order: float, size: int
    ) -> tuple[FloatArray, float, float]:
        """The tilted sum's masses modulo `size`; bounds on the floating-point error of each, and of all together.

        The tilted masses of one release are w = m e^(s t) over their sum. The spectrum of the sum is the product of
        theirs, each to the power of its count n: it is the exponential of the sum of n log(spectrum of w).

        For each place: |computed^n - exact^n| <= (|computed| + error)^n - |computed|^n in every frequency. All
        together: the computed spectrum is that of masses w + d with |d|_2 <= error |w|_2, so the sum is off by at most
        n |d|_1.
        """
        error = _TRANSFORM_ERROR * (math.ceil(math.log2(size)) + 1)
        log_power = np.zeros(size // 2 + 1, np.complex128)
        log_bound = np.zeros(size // 2 + 1)
        in_total = 0.0
        for grid, count in grids:
            exponents = np.log(grid.masses) + order * grid.losses
            weights = np.exp(np.maximum(exponents - exponents.max(), UNDERFLOW))
            wrapped = np.bincount(grid.places % size, weights / weights.sum(), size)
            in_total += count * error * math.sqrt(size * float((wrapped**2).sum()))
            spectrum = np.fft.rfft(wrapped)
            modulus = np.abs(spectrum)
            log_power += count * np.log(np.where(modulus > 0.0, spectrum, 1e-300))
            log_bound += count * np.log(modulus + error)
        power = np.exp(np.maximum(log_power.real, UNDERFLOW) + 1j * log_power.imag)
        bound = np.exp(np.maximum(log_bound, UNDERFLOW))
        own = 16.0 * self._count * _ULP  # rounding of the power itself
        slack = bound - np.abs(power) + own * bound
        per_place = 2.0 * float(slack.sum() + error * bound.sum()) / size
        places = np.fft.irfft(power, size)
        in_total = math.expm1(min(in_total, 700.0)) + (own + error) * math.sqrt(size * float((places**2).sum()))
        return places, per_place, 1.01 * in_total


@dataclass(frozen=True)
class _Curve:
    """Upper bounds on the masses of the summed loss in a window, and on the mass above it (`infinity`).

    `noise` is what floating-point errors may add to delta at each place. `step` is 0 for the atoms of one release.
    """

    losses: FloatArray
    masses: FloatArray
    infinity: float
    noise: FloatArray
    mean: float
    step: float
    is_finest: bool

    def delta(self, epsilon: float) -> float:
        """delta(epsilon), rounded up: the sum of (1 - e^(epsilon - l)) m over the losses l above epsilon, and noise.

        Below the window delta grows by less than 1 - e^(epsilon - low).
        """
        low = float(self.losses[0])
        if epsilon < low and self.step:
            return min(1.0, self.delta(low) - math.expm1(epsilon - low))
        start = int(np.searchsorted(self.losses, epsilon, side="right"))
        tail = float((-np.expm1(epsilon - self.losses[start:]) * self.masses[start:]).sum())
        return self.infinity + (tail + float(self.noise[max(start - 1, 0)])) * (1.0 + 1e-12)

    def epsilon(self, delta: float) -> float:
        """The least epsilon in the window with delta(epsilon) <= delta (its lower end if that is enough).

        Between two places delta is linear in e^epsilon, P - e^(epsilon - high) Q with the P-mass above epsilon and the
        Q-mass there times e^high, and the noise no larger than at the lower one. So there epsilon is

            high + log((P - delta) / Q).
        """
        room = (delta - self.infinity) * (1.0 - 1e-12)
        if room <= 0.0:
            return math.inf
        deltas, above = _deltas(self.masses, self.losses, self.mean)
        too_much = np.flatnonzero(~(deltas + self.noise <= room))
        if too_much.size == 0:
            return float(self.losses[0])
        last = int(too_much[-1])
        if last + 1 == self.losses.size:  # errors alone are too much
            return math.inf
        low, high = float(self.losses[last]), float(self.losses[last + 1])
        q_mass = float((np.exp(high - self.losses[last + 1 :]) * self.masses[last + 1 :]).sum())
        p_mass = float(above[last]) * (1.0 + _ULP * above.size) + float(self.noise[last])
        epsilon = high + math.log(max(p_mass - room, 1e-300) / q_mass) if q_mass > 0.0 else high
        return min(high, max(low, epsilon)) + 1e-12 * (1.0 + abs(epsilon))


def _deltas(masses: FloatArray, losses: FloatArray, mean: float) -> tuple[FloatArray, FloatArray]:
    """delta at each place, rounded up: the P-mass above it (second answer) less e^loss times the Q-mass above it.

    Q-masses are taken times e^mean. A running sum of n terms is off by at most n ulp of itself. If the Q-mass overflows
    it is left out.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        shifted = np.exp(np.minimum(mean - losses, 700.0)) * masses
        above, below = (np.append(np.cumsum(each[:0:-1])[::-1], 0.0) for each in (masses, shifted))
        deltas = above - np.exp(np.minimum(losses - mean, 700.0)) * below
    deltas = np.where(np.isfinite(deltas), np.maximum(deltas, 0.0), above)
    return np.asarray(deltas + 2.0 * _ULP * above.size * above, np.float64), above
