"""From a target (epsilon, delta) to the least noise of a plan's lines that keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from langchain_dpicl.errors import InfeasiblePlan, InvalidParameter
from langchain_dpicl.privacy.accountant import PLDAccountant, approximate_epsilon, compositions
from langchain_dpicl.privacy.checks import open_unit, real
from langchain_dpicl.privacy.composition import MAX_PLACES
from langchain_dpicl.privacy.lines import LineRequest, check_lines
from langchain_dpicl.privacy.losses import crossing
from langchain_dpicl.privacy.profile import Line

_WASTE = 3e-3
"""A search stops when at most this share of epsilon is unused."""

_GOAL = math.log1p(-_WASTE / 3.0)
"""The aim of a search: the logarithm of the share of epsilon that is used."""

_CLOSE = 1e-4
"""A search stops at the latest when the noise is known within this share: a step at low rates may take all epsilon."""

_COARSE = 1 << 17
"""Places of the grids of a search, before the finest ones."""

_FINEST = 8
"""The number of levels that are tried on the finest grids, once one keeps the promise."""

_LOOSE = 0.004
"""The search on the finest grids stops when at most this share of epsilon is unused."""


def solve(epsilon: float, delta: float, lines: Mapping[str, LineRequest]) -> list[float]:
    """Noise parameters of the lines whose certified epsilon together is at most `epsilon`, at `delta`.

    The search uses approximations and assumes nothing about monotonicity; the answer is always a parameter whose own
    certified epsilon was computed and is at most the target (a root is never rounded towards more leakage).
    `InfeasiblePlan` if the most noise that the mechanisms allow still costs too much.
    """
    epsilon = real("epsilon", epsilon, above=0.0, at_most=1000.0)
    delta = open_unit("delta", delta)
    check_lines(lines, LineRequest)
    delta0 = max(line.family.release_delta for line in lines.values())
    if delta0 >= delta:
        raise InvalidParameter("delta0", delta0, f"a number < delta = {delta:g}")
    found = _least_noise(
        PLDAccountant,
        epsilon,
        delta,
        tuple(replace(line, owners=None) for line in lines.values()),
    )
    if found is None:
        raise InfeasiblePlan(_why_infeasible(epsilon, delta, lines))
    return list(found)


@lru_cache(maxsize=128)
def _least_noise(
    accountant: type[PLDAccountant], epsilon: float, delta: float, lines: tuple[LineRequest, ...]
) -> tuple[float, ...] | None:
    """The parameters of `solve`, or None.

    If owners take part rarely, a certificate on the finest grids takes seconds. So the level is found on coarse ones,
    whose certificates are bounds too, and looked for near there on the finest.
    """
    at, low, high = _path(epsilon, delta, lines)

    def certified(places: int, level: float) -> float:
        return _certified(accountant(places), tuple(_schedule(lines, at(level))), delta)

    def approximate(level: float) -> float:
        return approximate_epsilon(_schedule(lines, at(level)), delta)

    if sum(line.count * line.rate for line in lines) < delta and certified(MAX_PLACES, high) <= epsilon:
        return tuple(at(high))  # an owner takes part in any release with a probability below delta

    guess = 0.0
    aim = epsilon
    coarse = _Search(epsilon, low, high, 0.02, _WASTE)
    for _ in range(3):
        if len(lines) == 1:
            guess, _ = _about(aim, delta, lines[0])
        else:
            guess = _crossing(approximate, aim, guess, low, high)
        guess = guess if coarse.may_hold(guess) else coarse.guess()
        excess = coarse.tried(guess, certified(_COARSE, guess))
        if coarse.is_over:
            break
        aim *= math.exp(min(max(_GOAL - excess, -0.7), 0.7))
    while not coarse.is_over:
        guess = coarse.guess()
        coarse.tried(guess, certified(_COARSE, guess))
    finest = _Search(epsilon, low, high, 3e-4, _LOOSE)
    guess = low if coarse.best is None else coarse.best
    finest.tried(guess, certified(MAX_PLACES, guess))
    while not finest.is_over and (finest.best is None or finest.attempts < _FINEST):
        guess = finest.guess()
        finest.tried(guess, certified(MAX_PLACES, guess))
    return None if finest.best is None else tuple(at(finest.best))


@lru_cache(maxsize=256)
def _certified(accountant: PLDAccountant, schedule: tuple[Line, ...], delta: float) -> float:
    """The certified epsilon, remembered: mechanisms of one law have the same search."""
    return accountant.epsilon(schedule, delta)


def _schedule(lines: Sequence[LineRequest], parameters: Sequence[float]) -> list[Line]:
    return [line.line(parameter) for line, parameter in zip(lines, parameters, strict=True)]


@dataclass
class _Search:
    """The levels that were tried, and the next guess: brackets the highest level that keeps a promise, then closes in.

    ``best`` is the level that is known to keep it with the largest certified epsilon.
    """

    epsilon: float
    low: float
    high: float
    stride: float
    waste: float
    _safe: tuple[float, float] = (-math.inf, -math.inf)  # (level, log of epsilon over target)
    _unsafe: tuple[float, float] = (math.inf, math.inf)
    _kept: list[tuple[float, float]] = field(default_factory=list)  # (certified epsilon, level)
    attempts: int = 0
    is_over: bool = False

    @property
    def best(self) -> float | None:
        return max(self._kept)[1] if self._kept else None

    def may_hold(self, level: float) -> bool:
        """True if a level lies between those that are known to keep the promise and to break it."""
        return self._safe[0] < level < self._unsafe[0]

    def tried(self, level: float, reached: float) -> float:
        """Note the certified epsilon of a level. Returns the logarithm of what it exceeds the target by."""
        self.attempts += 1
        excess = math.log(min(max(reached / self.epsilon, 1e-6), 1e6))
        if reached <= self.epsilon:
            self._kept.append((reached, level))
            self._safe = (level, excess)
            is_end = reached >= (1.0 - self.waste) * self.epsilon or level >= self.high
        else:
            self._unsafe = (level, excess)
            is_end = level <= self.low
        self.is_over = is_end or self._unsafe[0] - self._safe[0] < _CLOSE or self.attempts >= 80
        return excess

    def guess(self) -> float:
        """Return the next level to try."""
        (a, below), (b, above) = self._safe, self._unsafe
        self.stride *= 3.0
        if not math.isfinite(a):
            guess = b - max(self.stride, above / 4.0)
        elif not math.isfinite(b):
            guess = a + max(self.stride, -below / 4.0)
        elif self.attempts % 3 == 2:  # every third time the middle
            guess = a + 0.5 * (b - a)
        else:  # the secant
            share = (_GOAL - below) / (above - below)
            guess = a + min(max(share, 0.05), 0.95) * (b - a)
        return min(max(guess, self.low), self.high)


def about(epsilon: float, delta: float, line: LineRequest) -> float | None:
    """The noise parameter of a plan of this line alone, within some per cent: for comparisons, nothing certifies it.

    Takes milliseconds, where `solve` may take a second. None if no noise is enough.
    """
    epsilon = real("epsilon", epsilon, above=0.0, at_most=1000.0)
    level, excess = _about(epsilon, open_unit("delta", delta), line)
    is_enough = excess <= 0.05 or level > line.family.coordinates()[0] + 0.01
    return line.family.at_coordinate(level) if is_enough else None


def _about(epsilon: float, delta: float, line: LineRequest) -> tuple[float, float]:
    """The level of `about`, and what is left of the difference from the promise there."""
    family = line.family

    def excess(level: float) -> float:
        one = line.line(family.at_coordinate(level))
        if one.profile.pairs is not None:
            return math.log(max(one.lower_bound(epsilon) / delta, 1e-30))
        return approximate_epsilon([one], delta) / epsilon - 1.0

    level = _crossing(excess, 0.0, 0.0, *family.coordinates(), width=0.2)
    return level, excess(level)


def _path(
    epsilon: float, delta: float, lines: Sequence[LineRequest]
) -> tuple[Callable[[float], list[float]], float, float]:
    """A curve through parameter space along which every line keeps its share of the loss, and the curve's ends.

    A higher level is less noise. A line's loss is its log moment at the order that binds an (epsilon, delta) target,
    2 log(1/delta) / epsilon; these add up over releases and lines, so shares are well defined. At a level a line keeps

        log(its loss) = log(its share) + level.

    One line needs no shares: its own coordinate is the curve.
    """
    if len(lines) == 1:
        family = lines[0].family
        return lambda level: [family.at_coordinate(level)], *family.coordinates()
    order = min(max(2.0 * math.log(1.0 / delta) / epsilon, 0.1), 1e4)
    total = sum(line.weight for line in lines)

    def one(line: LineRequest, level: float) -> float:
        def loss(coordinate: float) -> float:
            losses = line.family.profile(line.family.at_coordinate(coordinate)).typical(line.rate, "remove")
            return math.log(max(line.count * losses.log_moment(order), 1e-300))

        return line.family.at_coordinate(
            _crossing(
                loss,
                math.log(line.weight / total) + level,
                0.0,
                *line.family.coordinates(),
                width=0.4,
            )
        )

    return lru_cache(lambda level: [one(line, level) for line in lines]), -60.0, 60.0


def _crossing(
    increasing: Callable[[float], float], target: float, guess: float, low: float, high: float, width: float = 0.05
) -> float:
    """x in [low, high] with increasing(x) close to target (a search, no certificate); an end if there is none.

    It brackets x in growing steps from `guess`, the first of them `width`.
    """

    def gap(x: float) -> float:
        value = increasing(x) - target
        return value if math.isfinite(value) else math.copysign(1e6, value)

    a = b = min(max(guess, low), high)
    at_a = at_b = gap(a)
    while at_b < 0.0 and b < high:
        a, at_a = b, at_b
        b = min(high, b + width)
        at_b = gap(b)
        width *= 2.5
    if a == b:
        while at_a >= 0.0 and a > low:
            b, at_b = a, at_a
            a = max(low, a - width)
            at_a = gap(a)
            width *= 2.5
    if at_a > 0.0:
        return a
    if at_b < 0.0 or a == b:
        return b
    return crossing(gap, a, b, 1e-4)


def _why_infeasible(epsilon: float, delta: float, lines: Mapping[str, LineRequest]) -> str:
    """The line that is too expensive, and the reason."""
    costs = []
    for name, line in lines.items():
        parameter = line.family.at_coordinate(line.family.coordinates()[0])
        schedule = [line.line(parameter)]
        infinite = max(each.infinity for each in compositions(schedule))
        costs.append((infinite, PLDAccountant().epsilon(schedule, delta), name, line, parameter))
    infinite, cost, name, line, parameter = max(costs, key=lambda entry: entry[:2])
    start = (
        f"no noise reaches epsilon {epsilon:g} at delta {delta:g}: line {name!r} ({line.count} x {line.mechanism}, "
        f"rate {line.rate:g})"
    )
    if infinite <= 0.5 * delta:
        return (
            f"{start} alone costs epsilon {cost:.3g} with the most noise allowed, {line.family.parameter} {parameter:g}"
        )
    return (
        f"{start} pays delta0 {line.family.release_delta:g} at every release, "
        f"{infinite:.3g} of delta in all; delta0 below {0.1 * delta / (line.count * line.rate):.1g} leaves room"
    )
