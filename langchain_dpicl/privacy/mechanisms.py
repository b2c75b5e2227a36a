"""The families of mechanisms that a plan may schedule, its lines (so many releases of a family), and their noise.

A family has one noise parameter, which gives a profile. `LineRequest` asks for releases, `solving.solve` finds the
least noise whose certified epsilon keeps a promise, and `PlanLine` adds it to the request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.checks import FrozenMapping, positive, probability, real, whole
from langchain_dpicl.privacy.profile import (
    MAX_COUNT,
    BoundedRange,
    BoundedRanges,
    DiscreteGaussian,
    Gaussian,
    Line,
    Profile,
    ProposeTestRelease,
    lattice_multiplier,
)
from langchain_dpicl.privacy.votes import EXPONENTIAL, VoteNoise, flip_probability


@dataclass(frozen=True)
class Option:
    """A fixed public number of a mechanism beside its noise parameter. It must be given if it has no default.

    A ``quiet`` option stands in a plan only with another value than its default: older plans keep their digest.
    """

    words: str
    low: float
    high: float
    default: float | None = None
    quiet: bool = False


Flip = Callable[[float, Mapping[str, float], int, int], float]
"""From a noise parameter, the options, and numbers of votes and outcomes."""


@dataclass(frozen=True)
class Mechanism:
    """A family of mechanisms with one noise ``parameter`` between ``low`` and ``high``.

    ``noisier`` is +1 if a larger parameter means more noise (a sigma), -1 if it means less (an eps0, a range bound).
    `profile` holds for ``neighbours``, before amplification; ``build`` makes it from the parameter and the ``options``,
    the other numbers that are public and fixed. ``words`` says what one release gives out: a format of the parameter
    ``p`` and the options.

    Further facts, for plans and for people:

    - ``unit``: of what a line counts so many.
    - ``all_take_part``: it is released once, and has a rate of 1.
    - ``outcomes``: between how many it chooses, unless told otherwise.
    - ``weight``: by what eps0 is divided in the logarithm of the odds of two outcomes, for each output between them.
    - ``flip``: how likely noise overturns what so many outputs agree on, among so many outcomes; 0 where that has no
      meaning.
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
    unit: str = field(default="releases", kw_only=True)
    all_take_part: bool = field(default=False, kw_only=True)
    outcomes: int = field(default=2, kw_only=True)
    weight: int = field(default=1, kw_only=True)
    flip: Flip = field(default=lambda parameter, fixed, votes, outcomes: 0.0, kw_only=True, repr=False)

    def profile(self, parameter: float, **fixed: float) -> Profile:
        """What one release gives away (before amplification) at this noise parameter."""
        checked = self.check_options(fixed)
        return self.build(real(self.parameter, parameter, at_least=self.low, at_most=self.high), checked)

    def describe(self, parameter: float, options: Mapping[str, float]) -> str:
        """What one release gives out and with how much noise, in words."""
        weight = parameter if alone(options) else parameter / 2.0
        return self.words.format(p=parameter, weight=weight, **options)

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
            value = real(name, value, at_least=option.low, at_most=option.high)
            if not (option.quiet and value == option.default):
                answer[name] = value
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
_COUNTS = "one member's output replaced: two counts move by 1 (own_calls: one output added or removed, one count)"
_NOISY_COUNTS = "the counts of every label plus discrete Gaussian noise of sigma {p:g} each"

OWN_CALLS = "own_calls"
"""The option of a mechanism whose outputs are of one owner each: an owner more or less adds or removes one output."""

_OWN = FrozenMapping({OWN_CALLS: Option("1 if every output is of one owner, else 0", 0.0, 1.0, 0.0, quiet=True)})


def alone(fixed: Mapping[str, float]) -> bool:
    """Whether an owner adds or removes one output and moves no other. Otherwise it replaces one."""
    return fixed.get(OWN_CALLS, 0.0) == 1.0


def _counts(sigma: float, fixed: Mapping[str, float]) -> Profile:
    return DiscreteGaussian(sigma, (1,) if alone(fixed) else (1, 1))


PARTS = 32
"""The most mechanisms of one structured answer."""

SHARE, MEAN_SHARE = "share_", "mean_share_"
"""Options of a structured answer, with the number of a mechanism behind: its share of eps0, and that of a mean."""

_LEAST_MEAN = 0.11


def mean_sigma(eps0: float, own_calls: bool) -> float:
    """The sigma of a mean that weighs as much as an exponential mechanism of range eps0.

    That has rho = eps0^2 / 8 of zero-concentrated privacy, as a Gaussian of noise multiplier 2 / eps0 has.
    """
    return max(_LEAST_MEAN, 2.0 * _mean_moves(own_calls) / eps0)


def _mean_moves(own_calls: bool) -> float:
    return 1.0 if own_calls else math.sqrt(2.0)  # the float is above the root


def _mean(sigma: float, fixed: Mapping[str, float]) -> Profile:
    return Gaussian(lattice_multiplier(sigma / fixed["step"], _mean_moves(alone(fixed)) / fixed["step"]))


def _structured(eps0: float, fixed: Mapping[str, float]) -> Profile:
    own, parts = {OWN_CALLS: fixed.get(OWN_CALLS, 0.0), "step": 2.0**-16}, list[Profile]()
    ranges = tuple(eps0 * share for name, share in fixed.items() if name.startswith(SHARE))
    if ranges:
        parts.append(BoundedRanges(ranges) if len(ranges) > 1 else BoundedRange(*ranges))
    for share in (share for name, share in fixed.items() if name.startswith(MEAN_SHARE)):
        parts.append(_mean(mean_sigma(eps0 * share, alone(own)), own))
    if not parts:
        raise InvalidParameter("options", dict(fixed), f"at least one share, such as {SHARE}1")
    return parts[0].compose(*parts[1:])


def _flip_by_range(eps0: float, fixed: Mapping[str, float], votes: int, outcomes: int) -> float:
    return VoteNoise(EXPONENTIAL, eps0, alone(fixed)).flip(votes, outcomes)


def _flip_by_sigma(sigma: float, fixed: Mapping[str, float], votes: int, outcomes: int) -> float:
    return flip_probability(sigma, votes, outcomes)


def _flip_of_median(eps0: float, fixed: Mapping[str, float], votes: int, outcomes: int) -> float:
    """Each other point loses by half of the votes."""
    return _flip_by_range(eps0, fixed, votes // 2, outcomes)


def _flip_of_mean(sigma: float, fixed: Mapping[str, float], votes: int, outcomes: int) -> float:
    """Of one bound on which all agree: noise moves the mean beyond the middle."""
    return flip_probability(sigma, votes)


def _flip_of_fields(eps0: float, fixed: Mapping[str, float], votes: int, outcomes: int) -> float:
    """Of the field with the smallest share."""
    least = min(share for name, share in fixed.items() if SHARE in name)
    return _flip_by_range(eps0 * least, fixed, votes, outcomes)


_ALL = (
    Mechanism("vote", *_SIGMA, _COUNTS, f"the winner of {_NOISY_COUNTS}", _counts, _OWN, flip=_flip_by_sigma),
    Mechanism("scores", *_SIGMA, _COUNTS, _NOISY_COUNTS, _counts, _OWN, flip=_flip_by_sigma),
    Mechanism(
        "vote-em",
        *_EPS0,
        _COUNTS,
        "a label with probability proportional to exp({weight:g} * count)",
        lambda eps0, _: BoundedRange(eps0),
        _OWN,
        weight=2,
        flip=_flip_by_range,
    ),
    Mechanism(
        "embedding",
        *("sigma", 0.11, 1e6, +1),
        "one member's output replaced: the sum of unit vectors moves by 2 (own_calls: one added or removed, by 1)",
        "the sum of embeddings of norm at most 1, rounded towards 0 to multiples of {step:g}, plus discrete "
        "Gaussian noise of standard deviation {p:g} on every coordinate",
        lambda sigma, fixed: Gaussian(
            lattice_multiplier(sigma / fixed["step"], (1.0 if alone(fixed) else 2.0) / fixed["step"])
        ),
        FrozenMapping({"step": _STEP, **_OWN}),
        outcomes=100,
        flip=_flip_by_sigma,
    ),
    Mechanism(
        "joint-em",
        *_EPS0,
        "one member's output replaced: the utility moves by at most 2 (own_calls: one added or removed, by at most 1)",
        "keywords in order with probability proportional to exp({weight:g} * utility / 2), a single one without / 2",
        lambda eps0, _: BoundedRange(eps0),
        _OWN,
        weight=4,
    ),
    Mechanism(
        "median",
        *_EPS0,
        "one member's output replaced: a loss moves by at most 1 either way (own_calls: one added or removed, by 1/2)",
        "a point of a public grid with probability proportional to exp(-{weight:g} * its rank's distance from the "
        "middle)",
        lambda eps0, _: BoundedRange(eps0),
        _OWN,
        outcomes=101,
        weight=4,
        flip=_flip_of_median,
    ),
    Mechanism(
        "mean",
        *("sigma", _LEAST_MEAN, 1e6, +1),
        "one member's output replaced: two sums of shares move by sqrt 2 (own_calls: one added or removed, by 1)",
        "a function of two sums, of the values' shares and of the rest, on a lattice of {step:g}, plus discrete "
        "Gaussian noise of standard deviation {p:g} each",
        _mean,
        FrozenMapping({"step": _STEP, **_OWN}),
        flip=_flip_of_mean,
    ),
    Mechanism(
        "structured",
        *_EPS0,
        "one member's output replaced (own_calls: added or removed): the input of every field changes",
        "a value for each field of a model, by exponential mechanisms whose ranges add up to {p:g} at most (a mean by "
        "Gaussian noise of as much weight), composed before they are amplified",
        _structured,
        FrozenMapping(
            {
                f"{name}{number}": Option(f"the share of mechanism {number}", 0.0, 1.0, 0.0, quiet=True)
                for name in (SHARE, MEAN_SHARE)
                for number in range(1, PARTS + 1)
            }
            | {**_OWN}
        ),
        weight=2,
        flip=_flip_of_fields,
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
        unit="tokens",
    ),
    Mechanism(
        "head",
        *("sigma", 2.0, 1e6, +1),
        "one owner added or removed, at a rate of 1: each step's sum moves by at most 1",
        "in each of {steps:g} steps the sum of the owners' gradients, clipped to norm 1 on a lattice of {step:g}, "
        "plus discrete Gaussian noise of standard deviation {p:g} on every number",
        lambda sigma, fixed: Gaussian(lattice_multiplier(sigma / fixed["step"], fixed["steps"] ** 0.5 / fixed["step"])),
        FrozenMapping({"step": replace(_STEP, default=2.0**-36), "steps": _STEPS}),
        all_take_part=True,
    ),
)

MECHANISMS: Mapping[str, Mechanism] = FrozenMapping({each.name: each for each in _ALL})


def left_out(mechanism: object) -> dict[str, float]:
    """The quiet options of a mechanism of this name, which a plan leaves out at their defaults, with these."""
    options = (option for each in _ALL if each.name == mechanism for option in each.options.items())
    return {name: option.default for name, option in options if option.quiet and option.default is not None}


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

    @property
    def own_calls(self) -> bool:
        """Whether every output is of one owner."""
        return alone(self.options)

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
        return self.family.describe(self.parameter, self.options)

    def flip(self, votes: int, outcomes: int) -> float:
        """The chance that noise overturns what so many outputs agree on; 0 where that has no meaning."""
        return self.family.flip(self.parameter, self.options, votes, outcomes)


def check_lines(lines: object, kind: type[LineRequest]) -> None:
    """Raise `InvalidParameter` unless these are lines of this kind by their names."""
    if not isinstance(lines, Mapping) or not lines:
        raise InvalidParameter("lines", lines, "a mapping of at least one name to its line")
    for name, line in lines.items():
        if not isinstance(name, str) or not name:
            raise InvalidParameter("lines", name, "names that are non-empty strings")
        if not isinstance(line, kind):
            raise InvalidParameter(f"lines[{name!r}]", line, f"a {kind.__name__}")
