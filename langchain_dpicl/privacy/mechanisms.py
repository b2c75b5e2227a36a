"""The mechanisms that a plan may schedule, each with its statement: neighbours, sensitivity or range, profile.

Every mechanism reads outputs of members, or owners' terms, of which the owner under attack has one (or all, of a head).
Most have ``own_calls``: if every output is of one owner, an owner more or less adds or removes one output; otherwise it
replaces one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.bits import BitPairs
from langchain_dpicl.privacy.checks import FrozenMapping
from langchain_dpicl.privacy.mechanism import Mechanism, Options, count, flag, number, numbers, round_digits
from langchain_dpicl.privacy.profile import (
    LEAST_BIT,
    MOST_BIT,
    BoundedRange,
    BoundedRanges,
    DiscreteGaussian,
    Gaussian,
    GaussianOrAll,
    GaussianWinner,
    OneBit,
    Profile,
    ProposeTestRelease,
    lattice_multiplier,
    lattice_quantile,
    lattice_tail,
)
from langchain_dpicl.privacy.votes import BIT, EXPONENTIAL, GAUSSIAN, WINNER, VoteNoise, flip_probability

OWN_CALLS = "own_calls"
"""The option of a mechanism whose outputs may be of one owner each."""

PARTS = 32
"""The most mechanisms of one structured answer."""

_LEAST_MEAN = 0.11


def _lattice(step: float) -> Any:
    return number("the lattice of the noise", 1e-12, 1 / 64, step)


@dataclass(frozen=True)
class _OfOutputs(Mechanism):
    """A mechanism on outputs, each of which may be of one owner."""

    own_calls: bool = flag("1 if every output is of one owner, else 0")


@dataclass(frozen=True)
class _NoisySum(Mechanism):
    """Discrete Gaussian noise of standard deviation sigma."""

    parameter = "sigma"
    low = 0.05
    high = 1e6
    noisier = +1

    def flip(self, parameter: float, votes: int, outcomes: int) -> float:
        return flip_probability(parameter, votes, outcomes)


@dataclass(frozen=True)
class _Ranged(Mechanism):
    """A mechanism of bounded range: no two outcomes' log-ratios differ by more than its parameter."""

    low = 1e-6
    high = 100.0
    noisier = -1

    def build(self, parameter: float) -> Profile:
        return BoundedRange(parameter)


@dataclass(frozen=True)
class _Exponential(_Ranged, _OfOutputs):
    """An exponential mechanism of range eps0."""

    parameter = "eps0"

    def _flip(self, eps0: float, votes: int, outcomes: int) -> float:
        return VoteNoise(EXPONENTIAL, eps0, self.own_calls).flip(votes, outcomes)


# -- votes -------------------------------------------------------------------------------------------------------------

_COUNTS = "one member's output replaced: two counts move by 1 (own_calls: one output added or removed, one count)"
_NOISY_COUNTS = "the counts of every label plus discrete Gaussian noise of sigma {p:g} each"


@dataclass(frozen=True)
class NoisyCounts(_NoisySum, _OfOutputs):
    """The noisy counts of all labels.

    Discrete Gaussian noise on every count, of which two move by 1, or one with own calls.
    """

    name = "scores"
    neighbours = _COUNTS
    words = _NOISY_COUNTS

    def build(self, parameter: float) -> Profile:
        return DiscreteGaussian(parameter, (1,) if self.own_calls else (1, 1))


@dataclass(frozen=True)
class Vote(NoisyCounts):
    """The winner of the noisy counts: post-processing of `NoisyCounts`."""

    name = GAUSSIAN
    words = f"the winner of {_NOISY_COUNTS}"


@dataclass(frozen=True)
class VoteWinner(Vote):
    """The winner of the noisy counts with a prior, among which abstentions have theirs; nothing else leaves.

    With own calls one count moves, and one threshold on it decides the release: one bit (`bits.ThresholdPairs`).
    Otherwise two counts move, and it costs what they do.
    """

    name = WINNER

    def build(self, parameter: float) -> Profile:
        return GaussianWinner(parameter) if self.own_calls else super().build(parameter)


@dataclass(frozen=True)
class VoteBit(_OfOutputs):
    """The winner of two labels: whether c1 - c2 + X >= 0, with X discrete Gaussian on the half-integers.

    A lead moves by 2 if an output is replaced, and by 1 with own calls. Abstentions are no outcome.
    """

    name = BIT
    parameter = "sigma"
    low = LEAST_BIT
    high = MOST_BIT
    noisier = +1
    neighbours = "one member's output replaced: a lead moves by 2 (own_calls: one output added or removed, by 1)"
    words = "the winner of two labels by their counts' difference plus half-integer Gaussian noise of sigma {p:g}"

    def build(self, parameter: float) -> Profile:
        return OneBit(BitPairs(parameter, 1 if self.own_calls else 2))

    def flip(self, parameter: float, votes: int, outcomes: int) -> float:
        return VoteNoise(self.name, parameter, self.own_calls).flip(votes, outcomes)


@dataclass(frozen=True)
class VoteEM(_Exponential):
    """A label with probability proportional to exp(r count), r = eps0 / 2, or eps0 with own calls.

    Two counts move by 1 each, in opposite directions, or one count: log-ratios move within a range of eps0.
    """

    name = "vote-em"
    neighbours = _COUNTS
    words = "a label with probability proportional to exp({weight:g} * count)"
    weight = 2

    def flip(self, parameter: float, votes: int, outcomes: int) -> float:
        return self._flip(parameter, votes, outcomes)


# -- texts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Embedding(_NoisySum, _OfOutputs):
    """The noisy sum of embeddings.

    Vectors of norm at most 1 are exchanged, which moves the sum by 2; with own calls one comes or goes: 1.
    """

    name = "embedding"
    low = 0.11
    neighbours = (
        "one member's output replaced: the sum of unit vectors moves by 2 (own_calls: one added or removed, by 1)"
    )
    words = (
        "the sum of embeddings of norm at most 1, rounded towards 0 to multiples of {step:g}, plus discrete "
        "Gaussian noise of standard deviation {p:g} on every coordinate"
    )
    outcomes = 100

    step: float = _lattice(2.0**-16)

    def build(self, parameter: float) -> Profile:
        moves = 1.0 if self.own_calls else 2.0
        return Gaussian(lattice_multiplier(parameter / self.step, moves / self.step))


@dataclass(frozen=True)
class JointEM(_Exponential):
    """Ranked keywords by the joint exponential mechanism, whose utility moves by 2, or by 1 with own calls."""

    name = "joint-em"
    neighbours = (
        "one member's output replaced: the utility moves by at most 2 (own_calls: one added or removed, by at most 1)"
    )
    words = "keywords in order with probability proportional to exp({weight:g} * utility / 2), a single one without / 2"
    weight = 4


@dataclass(frozen=True)
class PTR(_NoisySum):
    """The top keywords if their gap, which moves by 2, passes a noisy test; ``delta0`` is paid at every release.

    ``select`` / sigma is the range of an exponential mechanism that chooses k on the same sample; 0: k is public.
    """

    name = "ptr"
    neighbours = "one member's output replaced: the gap moves by at most 2"
    words = (
        "the top keywords if their gap passes a test with Gaussian noise of standard deviation 2 * {p:g} "
        "(delta0 {delta0:g} at every release)"
    )

    delta0: float = number("delta0, the probability of releasing after a failed test", 1e-300, 0.5)
    select: float = number("select: k is chosen with eps0 = select / sigma (0: k is public)", 0.0, 10.0, 0.0)

    @property
    def release_delta(self) -> float:
        return self.delta0

    @classmethod
    def chosen(cls, delta: float, rate: float, count: int, lines: int) -> Options:
        return {"delta0": default_delta0(delta, rate, count, lines)}

    def build(self, parameter: float) -> Profile:
        test = ProposeTestRelease(parameter, self.delta0)
        if self.select == 0.0:
            return test
        return test.compose(BoundedRange(min(200.0, self.select / parameter)))

    flip = Mechanism.flip  # it has no meaning here


def default_delta0(delta: float, rate: float, count: int, lines: int = 1) -> float:
    """A delta0 that nobody chose: half of delta is for the delta0 of all releases of the `lines` lines that have one.

    It is paid at every release, amplified by the rate: rate * count * delta0 for a line. So each release gets
    delta / 2 / (rate * count * lines); never above delta / 2 nor 0.25. Three digits, rounded down.
    """
    expected = max(1.0, rate * count * lines)
    return max(1e-300, round_digits(min(0.25, delta / 2.0 / expected), 3, -1))


# -- numbers, and several fields ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Median(_Exponential):
    """A point of a public grid, by its rank's distance from the middle.

    That loss moves by 1 either way, or by 1/2 with own calls.
    """

    name = "median"
    neighbours = (
        "one member's output replaced: a loss moves by at most 1 either way (own_calls: one added or removed, by 1/2)"
    )
    words = (
        "a point of a public grid with probability proportional to exp(-{weight:g} * its rank's distance from the "
        "middle)"
    )
    outcomes = 101
    weight = 4

    def flip(self, parameter: float, votes: int, outcomes: int) -> float:
        """Each other point loses by half of the votes."""
        return self._flip(parameter, votes // 2, outcomes)


@dataclass(frozen=True)
class Mean(_NoisySum, _OfOutputs):
    """A function of two noisy sums, which move by sqrt(2), or by 1 with own calls."""

    name = "mean"
    low = _LEAST_MEAN
    neighbours = (
        "one member's output replaced: two sums of shares move by sqrt 2 (own_calls: one added or removed, by 1)"
    )
    words = (
        "a function of two sums, of the values' shares and of the rest, on a lattice of {step:g}, plus discrete "
        "Gaussian noise of standard deviation {p:g} each"
    )

    step: float = _lattice(2.0**-16)

    def build(self, parameter: float) -> Profile:
        return Gaussian(lattice_multiplier(parameter / self.step, _mean_moves(self.own_calls) / self.step))

    def flip(self, parameter: float, votes: int, outcomes: int) -> float:
        """Of one bound on which all agree: noise moves the mean beyond the middle."""
        return flip_probability(parameter, votes)


def mean_sigma(eps0: float, own_calls: bool) -> float:
    """The sigma of a mean that weighs as much as an exponential mechanism of range eps0.

    That has rho = eps0^2 / 8 of zero-concentrated privacy, as a Gaussian of noise multiplier 2 / eps0 has.
    """
    return max(_LEAST_MEAN, 2.0 * _mean_moves(own_calls) / eps0)


def _mean_moves(own_calls: bool) -> float:
    return 1.0 if own_calls else math.sqrt(2.0)  # the float is above the root


@dataclass(frozen=True)
class FieldDraws(_Exponential):
    """Several draws on the same outputs: exponential mechanisms, and means by Gaussian noise of as much weight.

    One output replaced (own_calls: added or removed) changes the input of all draws. They are composed first, and then
    amplified once, by the owner's one coin. The composition holds

    - for draws that are independent given the outputs: the pair of laws is a product of one pair for each draw, and is
      dominated by the product of pairs that dominate these;
    - for exponential draws of EQUAL shares, each of which may depend on those before it: `BoundedRanges` is the optimum
      of adaptive composition. It is none for unequal shares in the order in which they are drawn: a range of .5, and
      then one of 2 that depends on the first, has a delta(1.25) of .1254, where `BoundedRanges((.5, 2))` says .1163.

    ``shares`` and ``mean_shares`` are the draws' shares of eps0.
    """

    name = "structured"
    neighbours = "one member's output replaced (own_calls: added or removed): the input of every draw changes"
    words = (
        "several draws, such as a value for each field of a model, by exponential mechanisms whose ranges add up to "
        "{p:g} at most (a mean by Gaussian noise of as much weight), composed before they are amplified"
    )
    weight = 2

    shares: tuple[float, ...] = numbers("the shares of eps0 of the exponential mechanisms", PARTS)
    mean_shares: tuple[float, ...] = numbers("the shares of eps0 of the clipped means", PARTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.shares + self.mean_shares
        if not 0.0 < math.fsum(shares) <= 1.0 + 1e-9:
            raise InvalidParameter("options", shares, "shares or mean_shares, whose sum is at most 1")

    def build(self, parameter: float) -> Profile:
        ranges = tuple(parameter * share for share in self.shares)
        parts: list[Profile] = []
        if len(ranges) == 1:
            parts = [BoundedRange(*ranges)]
        elif ranges:
            parts = [BoundedRanges(ranges)]
        mean = Mean(own_calls=self.own_calls)
        parts += [mean.build(mean_sigma(parameter * share, self.own_calls)) for share in self.mean_shares]
        return parts[0].compose(*parts[1:])

    def flip(self, parameter: float, votes: int, outcomes: int) -> float:
        """Of the draw with the smallest share."""
        return self._flip(parameter * min(self.shares + self.mean_shares), votes, outcomes)


# -- tokens, and what is released once ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens(_Ranged):
    """One token from mixed logits, of which an owner's term has a bounded range."""

    name = "tokens"
    parameter = "range_bound"
    neighbours = "one owner's term added or removed"
    words = "one token from softmax(public logits + terms of range at most {p:g} each)"
    unit = "tokens"


@dataclass(frozen=True)
class Head(Mechanism):
    """The noisy gradient sums of all ``steps``, of which an owner moves each by 1: one Gaussian of sqrt(steps).

    ``even`` says how weights follow from the sums: by the rule of today, or by that of a plan of an earlier release.
    """

    name = "head"
    parameter = "sigma"
    low = 2.0
    high = 1e6
    noisier = +1
    neighbours = "one owner added or removed, at a rate of 1: each step's sum moves by at most 1"
    words = (
        "in each of {steps:g} steps the sum of the owners' gradients, clipped to norm 1 on a lattice of {step:g}, "
        "plus discrete Gaussian noise of standard deviation {p:g} on every number"
    )
    all_take_part = True

    step: float = _lattice(2.0**-36)
    steps: int = count("the number of steps, each of which gives out a noisy sum", 1000, 20)
    even: bool = flag("1 if the weights after the last step are the head's, 0 if the mean of the second half is")

    @classmethod
    def chosen(cls, delta: float, rate: float, count: int, lines: int) -> Options:
        return {"even": 1.0}

    def build(self, parameter: float) -> Profile:
        return Gaussian(lattice_multiplier(parameter / self.step, self.steps**0.5 / self.step))


@dataclass(frozen=True)
class Sum(Mechanism):
    """The noisy sum of owners' vectors over a public finite domain, of which an owner moves one by 1: one Gaussian.

    Statement. An owner's vector is a function of its own records, its own coins and public values. It is clipped to
    norm 1 by owner and rounded towards 0 on the lattice, the vectors are added exactly, and every coordinate of the
    domain gets discrete Gaussian noise, also where the sum is 0. Every owner takes part, so adding or removing one
    moves the sum by its vector: by at most 1. The profile is that of a Gaussian of multiplier sqrt(sigma^2 - 4 step^2)
    (`lattice_multiplier`), whatever the number of coordinates.
    """

    name = "sum"
    parameter = "sigma"
    low = 0.11
    high = 1e6
    noisier = +1
    neighbours = "one owner added or removed, at a rate of 1: the sum moves by at most 1"
    words = (
        "the sum of the owners' vectors over a public domain, clipped to norm 1 by owner on a lattice of {step:g}, "
        "plus discrete Gaussian noise of standard deviation {p:g} on every coordinate"
    )
    all_take_part = True

    step: float = _lattice(2.0**-36)

    def build(self, parameter: float) -> Profile:
        return Gaussian(lattice_multiplier(parameter / self.step, 1.0 / self.step))


@dataclass(frozen=True)
class Terms(Mechanism):
    """Terms that enough owners give, of no listed domain, with their noisy counts: a Gaussian, or delta0.

    Statement. An owner gives a set of m <= ``at_most`` terms: a function of its own records, its own coins and public
    values. Each of them gets the weight w_m = floor(1 / (sqrt(m) step)) lattice steps at most. The counts of exactly
    the terms that somebody gave are the sums of their owners' weights, each gets discrete Gaussian noise X, and the
    terms whose noisy count is at least tau are released with it. Here tau (`threshold`) is a public number with

        1 - P(X < tau - w_m)^m <= delta0  for every m from 1 to at_most.

    Let z be the Gaussian's multiplier sqrt(sigma^2 - 4 step^2) (`lattice_multiplier`), G its delta(eps), and
    l = -log(1 - delta0). Adding or removing an owner, with all its records, costs in both directions

        max(l, G(eps))  at each eps >= 0, if 2 z l is at most the normal density at max(1, 1 / (2 z)),

    which holds for all that is of use, and delta0 + (1 - delta0) G(eps) in any case.

    Proof. Let t of the owner's m terms be given by nobody else, and s = t / m. Without the owner, let Q be the law of
    the release: it is a function of the Gaussian mechanism's noisy counts of the terms that others give. With the
    owner, let E be the event that none of the t terms reaches tau. Their counts are w_m at most and their noise is
    independent of all other noise, so E has probability 1 - p = P(X < tau - w_m)^t or more: p <= 1 - (1 - delta0)^s.
    Given E, the release has a law A: the same function of the same counts, moved by the owner's other m - t weights,
    of norm sqrt(1 - s) at most, with a delta(eps) of G_s. So the law with the owner is P = (1 - p) A + p B, with some
    B. For every event T and a = e^eps

    - remove: P(T) - a Q(T) <= p + (1 - p) (A(T) - a Q(T)) <= p + (1 - p) G_s(eps),
    - add: Q(T) - a P(T) <= p Q(T) + (1 - p) (Q(T) - a A(T)) <= p + (1 - p) G_s(eps).

    These grow with p, and G_s <= G: the second bound. For the first, p <= 1 - e^(-l s) <= l s, so that the cost is at
    most H(u) = (1 - u) l + G_(1-u)(eps), where u = 1 - s is the square of the norm. H(0) = l, H(1) = G(eps). By the
    closed form of G the derivative of G_(1-u) by u is g(u) = phi(sqrt(u) / (2 z) - eps z / sqrt(u)) / (2 z sqrt(u)),
    with the normal density phi. Its logarithm has one maximum: g rises to it, and falls from there on (at eps = 0 it
    falls). If it rises up to u = 1, which is so for eps^2 >= 1 / (4 z^4) + 1 / z^2, H is convex. Else the argument
    of phi at u = 1 is at most max(1, 1 / (2 z)) either way, so g(1) >= l by the condition, and once g is above l it
    stays there: H falls, and then rises. In both cases H is largest at an end.

    The owner's terms are fixed in this, by its own coins; mixing over these keeps the bounds, as Q does not depend on
    them. Each release pays delta0 again: nothing of E is shared between two.

    The maximum over m is needed below sigma 2 (at delta0 5e-6; below 5 at 1e-30), where a single term of weight 1
    passes tau more easily than one of many lighter ones. With "noise <= tau - w" in place of "<" delta0 is short by one
    atom.
    """

    name = "terms"
    parameter = "sigma"
    low = 0.11
    high = 1e6
    noisier = +1
    neighbours = "one owner added or removed, at a rate of 1: its terms' counts move by at most 1 together"
    words = (
        "the terms that enough owners give, at most {at_most:g} each, with their counts on a lattice of {step:g} plus "
        "discrete Gaussian noise of standard deviation {p:g} (delta0 {delta0:g} at every release)"
    )
    all_take_part = True

    delta0: float = number("delta0, the probability of releasing after a failed test", 1e-300, 0.5)
    at_most: int = count("the most terms that an owner gives", 1000, 8)
    step: float = _lattice(2.0**-36)

    @property
    def release_delta(self) -> float:
        return self.delta0

    @classmethod
    def chosen(cls, delta: float, rate: float, count: int, lines: int) -> Options:
        return {"delta0": default_delta0(delta, rate, count, lines)}

    def build(self, parameter: float) -> Profile:
        multiplier = lattice_multiplier(parameter / self.step, 1.0 / self.step)
        seen = math.nextafter(-math.log1p(-self.delta0), 1.0)
        density = math.exp(-0.5 * max(1.0, 0.5 / multiplier) ** 2) / math.sqrt(2.0 * math.pi)
        if 2.0 * multiplier * seen <= density:
            return ProposeTestRelease(multiplier, seen)
        return GaussianOrAll(multiplier, self.delta0)

    def largest_weight(self, terms: int) -> int:
        """The largest weight of each term of an owner who gives so many, in lattice steps."""
        return math.floor(1.0 / (self.step * math.sqrt(terms)))

    def threshold(self, parameter: float) -> int:
        """The noisy count from which a term is released, in lattice steps, rounded up."""
        sigma = parameter / self.step
        found = 0
        for terms in range(1, self.at_most + 1):
            each = -math.expm1(math.log1p(-self.delta0) / terms)
            found = max(found, self.largest_weight(terms) + lattice_quantile(each, sigma))
        return found

    def sharing_bound(self, parameter: float, owners: int, terms: int = 1) -> float:
        """At least the probability that a term of exactly so many owners is released, if each gives so many terms.

        For one owner it is at most delta0. It says nothing of a promise: the promise is the profile's.
        """
        return lattice_tail(self.threshold(parameter) - owners * self.largest_weight(terms), parameter / self.step)


_ALL: tuple[type[Mechanism], ...] = (
    Vote,
    VoteWinner,
    VoteBit,
    NoisyCounts,
    VoteEM,
    Embedding,
    JointEM,
    Median,
    Mean,
    FieldDraws,
    PTR,
    Tokens,
    Head,
    Sum,
    Terms,
)

MECHANISMS: Mapping[str, type[Mechanism]] = FrozenMapping({each.name: each for each in _ALL})
