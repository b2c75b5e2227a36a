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
from itertools import accumulate, compress, pairwise
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
            drawn = _words(2 * (size - kept.size) + 8) >> np.uint64(64 - bits)
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
        return np.asarray(
            _geometric_halves(size) * math.log(2.0) - np.log1p(-0.5 * self.uniforms(size)),
            np.float64,
        )


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

    The error of T_i. With p decimal digits every operation errs by a factor within 1 ± r, r = 10^(1-p) / 2. Over n
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
    kept = list(compress(range(len(losses)), multiplicities))
    losses = list(compress(losses, multiplicities))
    multiplicities = list(filter(None, multiplicities))
    last = len(kept) - 1
    exponent = math.ceil(Fraction(rate) * (max(losses) - min(losses)))

    drawn = bits = 0
    while True:
        fresh = max(bits, _FIRST_BITS)
        drawn = drawn << fresh | _random_bits(fresh, randomness)
        bits += fresh
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
    factors: dict[int, Decimal] = {}  # by the gap between two neighbours
    power = {levels[0]: Decimal(1)}
    for low, high in pairwise(levels):
        gap = high - low
        if gap not in factors:
            factors[gap] = context.exp(context.multiply(negative, gap))
        power[high] = context.multiply(power[low], factors[gap])
    weights: list[Decimal] = []
    for multiplicity, loss in zip(multiplicities, losses, strict=True):
        weights.append(context.multiply(context.create_decimal(multiplicity), power[loss]))
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
