"""Randomness of the private side: the operating system's generator, exact samplers and exact choices; no seed anywhere.

How exact each draw is belongs to the guarantee:

- A coin of `coin_positions` shows heads with its probability within a relative 1e-10, conditionally on all the coins
  before it. A plan accounts for a rate of q * (1 + 1e-9), so it covers this.
- `uniforms` and the exponentials below have relative precision 2^-52 down to 2^-1074: their exponent comes from random
  bits, not from a grid of 2^-53.
- `discrete_gaussian` is exact: OpenDP's sampler (Canonne, Kamath, Steinke 2020) works in rational arithmetic, and takes
  a float sigma as the rational number that it is.
- Choices among weights, big integers or big integers times exp(-rate * loss), have exactly the law in their docstring,
  also if a weight is smaller or larger than any float: an error of the sampler would be an error of the privacy proof.
  `choose_exponential` meets irrational weights, and is exact all the same: it looks at as many binary digits of one
  uniform number, and of the weights, as it needs to be sure.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal, InvalidOperation, Overflow
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError
from langchain_dpicl.privacy.checks import positive, real, whole

_BLOCK = 1 << 14
"""Longest gap that one exponential may measure. A gap of k owners costs k * 2^-50 of relative precision in the last
coin's probability; starting afresh every 2^14 owners (the exponential has no memory) keeps that below 2e-11."""

_FIRST_BITS = 256
"""Binary digits of the uniform number that `choose_exponential` draws first."""

FALSE_RATE = 1e-6
"""How often a release may say that the members abstain although fewer than half do."""

TOLD = 0.9
"""How likely a release must say so, if all members abstain, for the budget to be protected by that alone."""

_EXACT = 1000.0
"""The largest sigma of a discrete Gaussian whose tail is summed exactly."""


class Randomness(Protocol):
    """The draws of selection and aggregators. A test may hand in another implementation; production uses one."""

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        """Sorted positions of the heads among n independent coins; the cost grows with the heads, not with n."""

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        """`size` independent numbers, exactly uniform on 0, ..., high - 1."""

    def uniforms(self, size: int) -> NDArray[np.float64]:
        """`size` independent numbers in (0, 1) with full floating precision near 0."""

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        """`size` independent integers x with probability proportional to exp(-x^2 / (2 sigma^2))."""


class SecureRandomness:
    """Draws from `os.urandom`, and for Gaussians from OpenDP (OpenSSL's generator, seeded by the operating system).

    It has no state and no seed: threads and forked processes may share one.
    """

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        """Skip from head to head: the gap before the next head is floor(E / -log(1 - p)) for an exponential E.

        P(gap >= k) = P(E >= -k log(1 - p)) = (1 - p)^k, so gaps are geometric and the coins independent.
        Expected cost: O(n * probability + n / 16384).
        """
        n = whole("n", n, at_least=0)
        probability = real("probability", probability, at_least=0.0, at_most=1.0)
        if n == 0 or probability == 0.0:
            return np.empty(0, np.int64)
        if probability == 1.0:
            return np.arange(n, dtype=np.int64)
        hazard = -np.log1p(-probability)
        found: list[NDArray[np.int64]] = []
        start = 0
        while start < n:
            left = (n - start) * (probability + 1.0 / _BLOCK)
            batch = min(1 << 16, int(left + 4.0 * left**0.5) + 8)
            with np.errstate(over="ignore"):
                gaps = np.minimum(self._exponentials(batch) / hazard, float(_BLOCK)).astype(np.int64)
            is_head = gaps < _BLOCK
            ends = start + np.cumsum(gaps + is_head)  # a head is a step of gap + 1, a block without one a step of it
            heads = ends[is_head] - 1
            found.append(heads[heads < n])
            start = int(ends[-1])
        return np.concatenate(found)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        """Random bits of just enough length; those at or above `high` are thrown away (no modulo): none is biased."""
        high = whole("high", high, at_most=1 << 63)
        size = whole("size", size, at_least=0)
        bits = (high - 1).bit_length()
        if bits == 0:
            return np.zeros(size, np.int64)
        kept = np.empty(0, np.uint64)
        while kept.size < size:
            need = size - kept.size
            drawn = _words(2 * need + 8) >> np.uint64(64 - bits)
            kept = np.concatenate([kept, drawn[drawn < np.uint64(high)]])
        return kept[:size].astype(np.int64)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        """52 random bits behind a leading one, times 2^-(1 + a geometric exponent)."""
        size = whole("size", size, at_least=0)
        mantissas = (_words(size) >> np.uint64(12)) | np.uint64(1 << 52)
        exponents = np.minimum(_geometric_halves(size), 1021)  # 2^-1022 of bias, to stay above the denormals
        return np.asarray(np.ldexp(mantissas.astype(np.float64), -53 - exponents), np.float64)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        """One vector release of OpenDP's integer Gaussian mechanism on a vector of zeros."""
        sigma = positive("sigma", sigma)
        size = whole("size", size, at_least=0)
        if size == 0:
            return np.empty(0, np.int64)
        return np.asarray(_gaussian_measurement(sigma)([0] * size), dtype=np.int64)

    def _exponentials(self, size: int) -> NDArray[np.float64]:
        """Exponential numbers with relative precision 2^-51 at every size, the tiny ones included.

        E = K ln 2 + E' with K geometric (so P(E >= k ln 2) = 2^-k) and E' in [0, ln 2) from the truncated
        law, P(E' <= x) = 2 (1 - e^-x), that is E' = -log(1 - V/2): no grid near 0 and none in the tail.
        """
        return np.asarray(_geometric_halves(size) * math.log(2.0) - np.log1p(-0.5 * self.uniforms(size)), np.float64)


def _words(size: int) -> NDArray[np.uint64]:
    """64 random bits each, from the operating system."""
    return np.frombuffer(os.urandom(8 * size), dtype=np.uint64)


def _geometric_halves(size: int) -> NDArray[np.int64]:
    """Failures before the first success of fair coins: trailing zeros of random words (more words if all are zero)."""
    zeros = np.zeros(size, np.int64)
    waiting = np.arange(size)
    while waiting.size:
        words = _words(waiting.size)
        lowest = words & (~words + np.uint64(1))  # the lowest set bit: a power of two, exact as a float
        zeros[waiting] += np.where(words == 0, 64, np.frexp(lowest.astype(np.float64))[1] - 1)
        waiting = waiting[words == 0]
    return zeros


@lru_cache(maxsize=256)
def _gaussian_measurement(sigma: float) -> Any:
    """OpenDP's Gaussian mechanism on vectors of integers, built once per sigma."""
    from importlib.metadata import version

    found = version("opendp")
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < (0, 14, 2):
        raise UnsafeConfigurationError(f"OpenDP {found} draws biased Gaussian noise: install 0.14.2 or later")
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
    return space >> dp.m.then_gaussian(sigma)


def random_below(bound: int, randomness: Randomness) -> int:
    """One number, exactly uniform on 0, ..., bound - 1, for a bound of any length.

    Random words of just enough bits, thrown away while they are not below the bound: fewer than two tries on average.
    """
    bound = whole("bound", bound)
    if bound <= 1 << 63:
        return int(randomness.integers(bound, 1)[0])
    bits = (bound - 1).bit_length()
    while (drawn := _random_bits(bits, randomness)) >= bound:
        pass
    return drawn


def choose_weighted(weights: Sequence[int], randomness: Randomness) -> int:
    """An index i with probability exactly weights[i] / sum(weights). Weights are integers >= 0, not all of them 0."""
    _check_weights("weights", weights)
    sums = list(accumulate(weights))
    return bisect_right(sums, random_below(sums[-1], randomness))


def choose_exponential(
    multiplicities: Sequence[int], losses: Sequence[int], rate: float, randomness: Randomness
) -> int:
    """An index i with probability exactly m_i exp(-rate l_i) / sum_j m_j exp(-rate l_j), at any rate >= 0.

    Multiplicities m_i are integers >= 0 (of thousands of bits, if need be), not all of them 0; losses l_i are integers.

    Proof. Let Z be that sum and T_i the i-th partial sum over Z. A uniform number U in [0, 1), with infinitely many
    binary digits, chooses the i with T_(i-1) <= U < T_i: this is the law. We draw only the first b digits, U in
    [u, u + 1) / 2^b, and know each inner T_i to within 2^-(b+2). With x = u / 2^b, the answer is certain when our T_i
    is at least x + 2 / 2^b and our T_(i-1) at most x - 2 / 2^b; otherwise b doubles, U keeps the digits that it has,
    and the weights are computed anew. What is answered is therefore what U with all its digits would choose. A further
    round has a probability of about 6 n / 2^256.

    How well we know T_i. With p decimal digits every operation errs by a factor within 1 ± r, r = 10^(1-p) / 2. Over n
    outcomes and X = rate * (max l - min l), the factors exp(-rate * gap) between neighbouring losses err by at most
    r X from their exponents and by n r from exp itself, their running product by n r, the product with m_i by 2 r and
    partial sums by n r; the quotient doubles this. To first order the error is at most 10^(1-p) (X + 3 n + 2), and p
    is chosen to make that at most 2^-(b+3), which leaves a factor of 2 for the higher orders and for underflow
    (below 10^-(10^17)). No decimal context but our own is read or changed.
    """
    rate = real("rate", rate, at_least=0.0)
    if len(losses) != len(multiplicities):
        raise InvalidParameter("losses", len(losses), "one for each multiplicity")
    _check_weights("multiplicities", multiplicities)
    kept = [i for i, multiplicity in enumerate(multiplicities) if multiplicity]
    multiplicities, losses = [multiplicities[i] for i in kept], [losses[i] for i in kept]
    last = len(kept) - 1
    exponent = math.ceil(Fraction(rate) * (max(losses) - min(losses)))

    drawn = bits = 0
    while True:
        fresh = max(bits, _FIRST_BITS)
        drawn, bits = drawn << fresh | _random_bits(fresh, randomness), bits + fresh
        context = _context(exponent, len(kept), bits)
        sums = _partial_sums(multiplicities, losses, rate, context)
        unit = context.divide(sums[-1], Decimal(1 << bits))
        place = context.multiply(unit, Decimal(drawn))
        margin = context.multiply(unit, Decimal(2))
        i = min(bisect_right(sums, place), last)
        is_below = i == last or context.subtract(sums[i], place) >= margin
        is_above = i == 0 or context.subtract(place, sums[i - 1]) >= margin
        if is_below and is_above:
            return kept[i]


def _partial_sums(multiplicities: Sequence[int], losses: Sequence[int], rate: float, context: Context) -> list[Decimal]:
    """Partial sums of m_i exp(-rate (l_i - min l)), from one running product over the sorted losses."""
    levels = sorted(set(losses))
    negative = Decimal.from_float(-rate)
    factors = {gap: context.exp(context.multiply(negative, gap)) for gap in {b - a for a, b in pairwise(levels)}}
    power = {levels[0]: Decimal(1)}
    for low, high in pairwise(levels):
        power[high] = context.multiply(power[low], factors[high - low])
    weights = (
        context.multiply(context.create_decimal(multiplicity), power[loss])
        for multiplicity, loss in zip(multiplicities, losses, strict=True)
    )
    return list(accumulate(weights, context.add))


def _context(exponent: int, outcomes: int, bits: int) -> Context:
    """A context of our own, with 10^(1-p) (X + 3 n + 2) <= 2^-(b+3)."""
    precision = (exponent + 3 * outcomes + 2) << (bits + 3)
    digits = precision.bit_length() * 31 // 100 + 2  # log10(2) < 0.31
    return Context(digits, ROUND_HALF_EVEN, MIN_EMIN, MAX_EMAX, 1, 0, [], [InvalidOperation, Overflow])


def _random_bits(bits: int, randomness: Randomness) -> int:
    words = randomness.integers(1 << 32, -(-bits // 32))
    return int.from_bytes(words.astype("<u4").tobytes(), "little") >> (-bits % 32)


def _check_weights(name: str, weights: Sequence[int]) -> None:
    """The weights count private things: no message shows one."""
    if not weights or min(weights) < 0 or max(weights) == 0:
        raise InvalidParameter(name, "(not shown)", "integers >= 0, not all of them 0")


# -- the discrete Gaussian's law, and what it means for counts ---------------------------------------------------------


def discrete_gaussian(sigma: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The law: its support, but for less than 1e-30 on either side, and its probabilities.

    Scale 0 (a study's vote without noise) is all at 0, as every scale below .01 is. Beyond a million the support ends.
    """
    half = math.ceil(min(12.0 * sigma, 1e6)) + 2
    support = np.arange(-half, half + 1)
    weights = np.exp(-0.5 * (support / max(sigma, 0.01)) ** 2)
    return support, weights / weights.sum()


def abstention_threshold(members: int, sigma: float, unit: int = 1) -> int:
    """The noisy count t at which a release may say that the members abstain, in steps of 1 / ``unit`` members.

    Of N ``members`` A abstain. The release says so only if A + X >= t, X being discrete Gaussian noise of scale
    ``sigma``. It says so falsely if fewer than half abstained, A <= a = (N - 1) // 2 (rounded down). Then

        P(A + X >= t) = P(X >= t - A) <= P(X >= t - a),

    since the tail falls in its argument. Let u be the least whole number with P(X >= u) <= `FALSE_RATE`. Then t = a + u
    bounds the rate of false reports by `FALSE_RATE`, whatever A <= a is, for every division of the other votes, and for
    every further condition (such as "and no label has more"), which only makes the event smaller. t depends on N and
    sigma, never on the outputs: the release stays a function of the noisy counts.

    The price is that few members cannot be heard over much noise: if all N abstain, P(N + X >= t) is
    `told_probability`, and below `TOLD` a release does not count as telling. For sigma of 2 or more that takes about
    12 sigma members.
    """
    return (members - 1) // 2 * unit + tail_reach(sigma * unit)


@lru_cache(maxsize=256)
def tail_reach(sigma: float) -> int:
    """The least u with P(X >= u) <= `FALSE_RATE`; above sigma = 1000 at most two more.

    There P(X >= u) <= P(Gaussian >= u - 1) (Canonne, Kamath and Steinke 2020, proposition 25), which costs one count.
    """
    if sigma > _EXACT:
        return math.ceil(-NormalDist().inv_cdf(FALSE_RATE) * sigma * (1.0 + 1e-9)) + 1
    support, weights = discrete_gaussian(sigma)
    tails = np.cumsum(weights[::-1])[::-1]  # P(X >= support[i]); rounding errors are below one part in 1e9
    return int(support[np.flatnonzero(tails * (1.0 + 1e-9) <= FALSE_RATE)[0]])


@lru_cache(maxsize=256)
def told_probability(members: int, sigma: float, labels: int, unit: int = 1) -> float:
    """How likely a release says that the members abstain if all N of them do.

    The noisy count reaches t and beats the noise on every one of ``labels`` counts that are zero (0: no such counts).
    Noise of more than 1000 steps is taken in steps of a thousandth of its scale, which is exact to two digits.
    """
    scale = max(1.0, sigma * unit / _EXACT)
    support, weights = discrete_gaussian(sigma * unit / scale)
    below = np.concatenate([[0.0], np.cumsum(weights)])  # P(X < support[i])
    reached = support * scale >= abstention_threshold(members, sigma, unit) - members * unit
    at = np.clip(support - int(support[0]) + round(min(members * unit / scale, support.size)), 0, support.size)
    return float((weights * reached * below[at] ** labels).sum())


def tells_abstention(members: int, sigma: float, labels: int, unit: int = 1) -> bool:
    """Whether a release says with probability `TOLD` or more that all members abstain."""
    return told_probability(members, sigma, labels, unit) >= TOLD


def flip_probability(sigma: float, margin: int, labels: int = 2) -> float:
    """Chance that discrete Gaussian noise of `sigma` takes the win from a label that leads every other by `margin`.

    Ties are broken at random. Exact for two labels: the sum over the winner's noise x of P(x) times
    P(noise > x + margin) plus half of P(noise = x + margin). With more labels this is an upper bound for the worst
    case, in which all others are runners-up (and a tie among several rivals counts for each of them).
    """
    sigma = positive("sigma", sigma)
    margin = whole("margin", margin, at_least=0)
    labels = whole("labels", labels, at_least=2)
    _, weights = discrete_gaussian(sigma)
    tails = np.append(np.minimum(np.cumsum(weights[::-1])[::-1], 1.0), 0.0)  # sums from the right
    level = np.arange(weights.size) + margin  # a rival's noise draws level here with the winner's
    lost = 0.5 * (tails[np.minimum(level, tails.size - 1)] + tails[np.minimum(level + 1, tails.size - 1)])
    with np.errstate(divide="ignore"):
        any_lost = -np.expm1((labels - 1) * np.log1p(-lost))
    return float(min(1.0, (weights * any_lost).sum()))
