"""From a target (epsilon, delta) to the least noise of a plan's lines that keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from langchain_dpicl.errors import InfeasiblePlan, InvalidParameter
from langchain_dpicl.privacy.accountant import PLDAccountant, compositions
from langchain_dpicl.privacy.checks import open_unit, real
from langchain_dpicl.privacy.losses import crossing
from langchain_dpicl.privacy.mechanisms import LineRequest, check_lines
from langchain_dpicl.privacy.profile import Line

_WASTE = 3e-3
"""A search stops when at most this share of epsilon is unused."""


def solve(epsilon: float, delta: float, lines: Mapping[str, LineRequest]) -> list[float]:
    """Noise parameters of the lines whose certified epsilon together is at most `epsilon`, at `delta`.

    The search uses approximations and assumes nothing about monotonicity; the answer is always a parameter whose own
    certified epsilon was computed and is at most the target (a root is never rounded towards more leakage).
    `InfeasiblePlan` if the most noise that the mechanisms allow still costs too much.
    """
    epsilon = real("epsilon", epsilon, above=0.0, at_most=1000.0)
    delta = open_unit("delta", delta)
    check_lines(lines, LineRequest)
    delta0 = max(line.options.get("delta0", 0.0) for line in lines.values())
    if delta0 >= delta:
        raise InvalidParameter("delta0", delta0, f"a number < delta = {delta:g}")
    at, low, high = _path(epsilon, delta, list(lines.values()))

    def schedule(parameters: list[float]) -> list[Line]:
        return [line.line(parameter) for line, parameter in zip(lines.values(), parameters, strict=True)]

    def approximate(level: float) -> float:
        return max(each.approximate_epsilon(delta) for each in compositions(schedule(at(level))))

    found: dict[tuple[float, float], list[float]] = {}  # what keeps the promise, by its certified epsilon and level
    goal = math.log1p(-_WASTE / 3.0)
    safe, unsafe = (-math.inf, -math.inf), (math.inf, math.inf)  # (level, log of certified epsilon over the target)
    guess, aim, stride = 0.0, epsilon, 0.02
    for attempt in range(80):
        if attempt < 3:
            guess = _crossing(approximate, aim, guess, low, high)
        if attempt >= 3 or not safe[0] < guess < unsafe[0]:  # the approximation is no help: bracket, then close in
            stride *= 3.0
            (a, below), (b, above) = safe, unsafe
            if not math.isfinite(a):
                guess = b - stride
            elif not math.isfinite(b):
                guess = a + stride
            else:  # the secant or, every third time, the middle
                share = 0.5 if attempt % 3 == 2 else min(max((goal - below) / (above - below), 0.05), 0.95)
                guess = a + share * (b - a)
        guess = min(max(guess, low), high)
        parameters = at(guess)
        reached = PLDAccountant().epsilon(schedule(parameters), delta)
        excess = math.log(min(max(reached / epsilon, 1e-6), 1e6))
        if reached <= epsilon:
            found[reached, guess] = parameters
            safe = (guess, excess)
            if reached >= (1.0 - _WASTE) * epsilon or guess >= high:
                break
        else:
            unsafe = (guess, excess)
            if guess <= low:
                break
        if unsafe[0] - safe[0] < 1e-6:
            break
        aim *= math.exp(min(max(goal - excess, -0.7), 0.7))
    if not found:
        raise InfeasiblePlan(_why_infeasible(epsilon, delta, lines))
    return found[max(found)]


def about(epsilon: float, delta: float, line: LineRequest) -> float:
    """The noise parameter of a plan of this line alone, roughly: for comparisons, since nothing certifies it.

    Takes milliseconds, where `solve` may take a second. Knows nothing of optimal adaptive composition: the eps0 of a
    bounded range is up to 15 % too small.
    """
    family = line.family

    def approximate(level: float) -> float:
        schedule = [line.line(family.at_coordinate(level))]
        return max(each.approximate_epsilon(delta) for each in compositions(schedule))

    return family.at_coordinate(_crossing(approximate, epsilon, 0.0, *family.coordinates, width=0.2))


def _path(
    epsilon: float, delta: float, lines: Sequence[LineRequest]
) -> tuple[Callable[[float], list[float]], float, float]:
    """A curve through parameter space along which every line keeps its share of the loss, and the curve's ends.

    A higher level is less noise. A line's loss is its log moment at the order that binds an (epsilon, delta) target,
    2 log(1/delta) / epsilon; these add up over releases and lines, so shares are well defined. One line needs no
    shares: its own coordinate is the curve.
    """
    if len(lines) == 1:
        family = lines[0].family
        return lambda level: [family.at_coordinate(level)], *family.coordinates
    order = min(max(2.0 * math.log(1.0 / delta) / epsilon, 0.1), 1e4)
    total = sum(line.weight for line in lines)

    def one(line: LineRequest, level: float) -> float:
        def loss(coordinate: float) -> float:
            losses = line.line(line.family.at_coordinate(coordinate)).losses("remove")
            return math.log(max(line.count * losses.log_moment(order), 1e-300))

        target = math.log(line.weight / total) + level
        return line.family.at_coordinate(_crossing(loss, target, 0.0, *line.family.coordinates, width=0.4))

    return lambda level: [one(line, level) for line in lines], -60.0, 60.0


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
        a, at_a, b, width = b, at_b, min(high, b + width), 2.5 * width
        at_b = gap(b)
    if a == b:
        while at_a >= 0.0 and a > low:
            b, at_b, a, width = a, at_a, max(low, a - width), 2.5 * width
            at_a = gap(a)
    if at_a > 0.0:
        return a
    if at_b < 0.0 or a == b:
        return b
    return crossing(gap, a, b, 1e-4)


def _why_infeasible(epsilon: float, delta: float, lines: Mapping[str, LineRequest]) -> str:
    """The line that is too expensive, and the reason."""
    costs = []
    for name, line in lines.items():
        most = line.family.at_coordinate(line.family.coordinates[0])
        item = [line.line(most)]
        infinite = max(each.infinity for each in compositions(item))
        costs.append((infinite, PLDAccountant().epsilon(item, delta), name, line, most))
    infinite, cost, name, line, most = max(costs, key=lambda entry: entry[:2])
    start = (
        f"no noise reaches epsilon {epsilon:g} at delta {delta:g}: line {name!r} ({line.count} x {line.mechanism}, "
        f"rate {line.rate:g})"
    )
    if infinite <= 0.5 * delta:
        return f"{start} alone costs epsilon {cost:.3g} with the most noise allowed, {line.family.parameter} {most:g}"
    return (
        f"{start} pays delta0 {line.options.get('delta0', 0.0):g} at every release, "
        f"{infinite:.3g} of delta in all; delta0 below {0.1 * delta / (line.count * line.rate):.1g} leaves room"
    )
