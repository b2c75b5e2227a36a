"""The families of mechanisms that a plan may schedule, its lines (so many releases of a family), and their noise.

A family has one noise parameter, which gives a profile. `LineRequest` asks for releases, `solve` finds the least noise
whose certified epsilon keeps a promise, and `PlanLine` adds it to the request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from langchain_dpicl.errors import InfeasiblePlan, InvalidParameter
from langchain_dpicl.privacy.accountant import PLDAccountant, compositions
from langchain_dpicl.privacy.checks import FrozenMapping, open_unit, positive, probability, real, whole
from langchain_dpicl.privacy.losses import crossing
from langchain_dpicl.privacy.profile import (
    MAX_COUNT,
    BoundedRange,
    DiscreteGaussian,
    Gaussian,
    Line,
    Profile,
    ProposeTestRelease,
    lattice_multiplier,
)


@dataclass(frozen=True)
class Option:
    """A fixed public number of a mechanism beside its noise parameter. It must be given if it has no default."""

    words: str
    low: float
    high: float
    default: float | None = None


@dataclass(frozen=True)
class Mechanism:
    """A family of mechanisms with one noise ``parameter`` between ``low`` and ``high``.

    ``noisier`` is +1 if a larger parameter means more noise (a sigma), -1 if it means less (an eps0, a range bound).
    `profile` holds for ``neighbours``, before amplification; ``build`` makes it from the parameter and the ``options``,
    the other numbers that are public and fixed. ``words`` says what one release gives out: a format of the parameter
    ``p`` and the options.
    """

    name: str
    parameter: str
    low: float
    high: float
    noisier: int
    neighbours: str
    words: str
    build: Callable[[float, Mapping[str, float]], Profile] = field(repr=False)
    options: Mapping[str, Option] = field(default_factory=FrozenMapping)

    def profile(self, parameter: float, **fixed: float) -> Profile:
        """What one release gives away (before amplification) at this noise parameter."""
        checked = self.check_options(fixed)
        return self.build(real(self.parameter, parameter, at_least=self.low, at_most=self.high), checked)

    def check_options(self, options: Mapping[str, float]) -> FrozenMapping[float]:
        """The options with their defaults, each inside its bounds."""
        for name in sorted(set(options) - set(self.options)):
            known = ", ".join(self.options) or "none"
            raise InvalidParameter(f"options[{name!r}]", options[name], f"{self.name} has options: {known}")
        answer: dict[str, float] = {}
        for name, option in sorted(self.options.items()):
            value = options.get(name, option.default)
            if value is None:
                raise InvalidParameter(f"options[{name!r}]", None, f"{self.name} needs {option.words}")
            answer[name] = real(name, value, at_least=option.low, at_most=option.high)
        return FrozenMapping(answer)

    def coordinate(self, parameter: float) -> float:
        """A scale on which a larger value means less noise: the logarithm, with its sign."""
        return -self.noisier * math.log(parameter)

    def at_coordinate(self, coordinate: float) -> float:
        """The parameter at a coordinate, inside the bounds, six digits, rounded towards MORE noise."""
        value = math.exp(min(max(-self.noisier * coordinate, math.log(self.low)), math.log(self.high)))
        return min(self.high, max(self.low, _round_digits(value, 6, self.noisier)))

    @property
    def coordinates(self) -> tuple[float, float]:
        """The coordinates of most noise and of least noise."""
        least, most = sorted((self.coordinate(self.low), self.coordinate(self.high)))
        return least, most


def _round_digits(value: float, digits: int, direction: int) -> float:
    """`value` at so many significant digits, up for direction > 0 and down otherwise."""
    places = digits - 1 - math.floor(math.log10(value))
    for nudge in range(2):
        scaled = value * 10.0**places
        whole = (math.ceil(scaled) + nudge) if direction > 0 else (math.floor(scaled) - nudge)
        rounded = float(f"{whole}e{-places}")
        if (rounded - value) * direction >= 0.0:
            return rounded
    return value


def default_delta0(delta: float, rate: float, count: int, lines: int = 1) -> float:
    """PTR's delta0 if nobody chose one: half of delta for the failed tests of all `lines` PTR lines of a plan.

    A test that fails wrongly is paid at every release, amplified by the rate: rate * count * delta0 for a line. So each
    release gets delta / 2 / (rate * count * lines); never above delta / 2 nor 0.25. Three digits, rounded down.
    """
    expected = max(1.0, rate * count * lines)
    return max(1e-300, _round_digits(min(0.25, delta / 2.0 / expected), 3, -1))


def _ptr(sigma: float, options: Mapping[str, float]) -> Profile:
    test = ProposeTestRelease(sigma, options["delta0"])
    return test.compose(BoundedRange(min(200.0, options["select"] / sigma))) if options["select"] else test


_SIGMA = ("sigma", 0.05, 1e6, +1)
_EPS0 = ("eps0", 1e-6, 100.0, -1)
_STEP = Option("the lattice of the noise", 1e-12, 1 / 64, 2.0**-16)
_STEPS = Option("the number of steps, each of which gives out a noisy sum", 1, 1000, 20.0)
_COUNTS = "one member's output replaced: two counts move by 1"
_NOISY_COUNTS = "the counts of every label plus discrete Gaussian noise of sigma {p:g} each"

_ALL = (
    Mechanism("vote", *_SIGMA, _COUNTS, f"the winner of {_NOISY_COUNTS}", lambda sigma, _: DiscreteGaussian(sigma)),
    Mechanism("scores", *_SIGMA, _COUNTS, _NOISY_COUNTS, lambda sigma, _: DiscreteGaussian(sigma)),
    Mechanism(
        "embedding",
        *("sigma", 0.11, 1e6, +1),
        "one member's output replaced: the sum of unit vectors moves by 2",
        "the sum of embeddings of norm at most 1, rounded towards 0 to multiples of {step:g}, plus discrete "
        "Gaussian noise of standard deviation {p:g} on every coordinate",
        lambda sigma, fixed: Gaussian(lattice_multiplier(sigma / fixed["step"], 2.0 / fixed["step"])),
        FrozenMapping({"step": _STEP}),
    ),
    Mechanism(
        "joint-em",
        *_EPS0,
        "one member's output replaced: the utility moves by at most 2",
        "a sequence of keywords with probability proportional to exp({p:g} * utility / 4), a single one / 2",
        lambda eps0, _: BoundedRange(eps0),
    ),
    Mechanism(
        "ptr",
        *_SIGMA,
        "one member's output replaced: the gap moves by at most 2",
        "the top keywords if their gap passes a test with Gaussian noise of standard deviation 2 * {p:g} "
        "(delta0 {delta0:g} at every release)",
        _ptr,
        FrozenMapping(
            {
                "delta0": Option("delta0, the probability of releasing after a failed test", 1e-300, 0.5),
                "select": Option("select: k is chosen with eps0 = select / sigma (0: k is public)", 0.0, 10.0, 0.0),
            }
        ),
    ),
    Mechanism(
        "tokens",
        *("range_bound", 1e-6, 100.0, -1),
        "one owner's term added or removed",
        "one token from softmax(public logits + terms of range at most {p:g} each)",
        lambda range_bound, _: BoundedRange(range_bound),
    ),
    Mechanism(
        "threshold",
        *_EPS0,
        "one owner added or removed, at a rate of 1: the utility moves by at most 1",
        "a threshold of a public grid with probability proportional to exp({p:g} * utility / 2)",
        lambda eps0, _: BoundedRange(eps0),
    ),
    Mechanism(
        "head",
        *("sigma", 2.0, 1e6, +1),
        "one owner added or removed, at a rate of 1: each step's sum moves by at most 1",
        "in each of {steps:g} steps the sum of the owners' gradients, clipped to norm 1 on a lattice of {step:g}, "
        "plus discrete Gaussian noise of standard deviation {p:g} on every number",
        lambda sigma, fixed: Gaussian(lattice_multiplier(sigma / fixed["step"], fixed["steps"] ** 0.5 / fixed["step"])),
        FrozenMapping({"step": replace(_STEP, default=2.0**-36), "steps": _STEPS}),
    ),
)

MECHANISMS: Mapping[str, Mechanism] = FrozenMapping({each.name: each for each in _ALL})


@dataclass(frozen=True)
class LineRequest:
    """A request for a number of releases of one kind.

    Parameters
    ----------
    mechanism, options
        A name in `MECHANISMS`, and the mechanism's fixed public numbers (delta0 for `ptr`).
    rate, count
        Probability with which an owner takes part in one release; how many releases (for `tokens`: how many tokens).
    weight
        Share of the plan's privacy loss that this line may use, relative to the other lines' weights.
    owners
        The number of owners from which the rate was chosen; None if the rate came from elsewhere. This number is
        public from then on, and no other number of owners is. The noise does not depend on it.
    """

    mechanism: str
    rate: float
    count: int
    weight: float = 1.0
    options: Mapping[str, float] = field(default_factory=FrozenMapping)
    owners: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, str) or self.mechanism not in MECHANISMS:
            raise InvalidParameter("mechanism", self.mechanism, f"one of {', '.join(MECHANISMS)}")
        object.__setattr__(self, "rate", probability("rate", self.rate))
        object.__setattr__(self, "count", whole("count", self.count, at_most=MAX_COUNT))
        object.__setattr__(self, "weight", positive("weight", self.weight))
        if not isinstance(self.options, Mapping):
            raise InvalidParameter("options", self.options, "a mapping of names to numbers")
        object.__setattr__(self, "options", self.family.check_options(self.options))
        if self.owners is not None:
            object.__setattr__(self, "owners", whole("owners", self.owners))

    @property
    def family(self) -> Mechanism:
        """The mechanism's family."""
        return MECHANISMS[self.mechanism]

    def line(self, parameter: float, count: int | None = None) -> Line:
        """This line with a noise parameter, for an accountant."""
        profile = self.family.profile(parameter, **self.options)
        return Line(profile, self.rate, self.count if count is None else count)


@dataclass(frozen=True)
class PlanLine(LineRequest):
    """A frozen line: a request with its noise parameter (the family's `parameter`: sigma, eps0, range_bound)."""

    parameter: float = math.nan

    def __post_init__(self) -> None:
        super().__post_init__()
        family = self.family
        checked = real(family.parameter, self.parameter, at_least=family.low, at_most=family.high)
        object.__setattr__(self, "parameter", checked)

    def describe(self) -> str:
        """What one release gives out and with how much noise, in words."""
        return self.family.words.format(p=self.parameter, **self.options)


def check_lines(lines: object, kind: type[LineRequest]) -> None:
    """Raise `InvalidParameter` unless these are lines of this kind by their names."""
    if not isinstance(lines, Mapping) or not lines:
        raise InvalidParameter("lines", lines, "a mapping of at least one name to its line")
    for name, line in lines.items():
        if not isinstance(name, str) or not name:
            raise InvalidParameter("lines", name, "names that are non-empty strings")
        if not isinstance(line, kind):
            raise InvalidParameter(f"lines[{name!r}]", line, f"a {kind.__name__}")


# -- from a target to noise --------------------------------------------------------------------------------------------

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

    found: dict[float, list[float]] = {}  # what keeps the promise, by its certified epsilon
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
            found.setdefault(reached, parameters)
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
