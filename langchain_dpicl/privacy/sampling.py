"""Exact choices among weights: big integers, and big integers times exp(-rate * loss).

The law of every choice is exactly the one in its docstring, also if a weight is smaller or larger than any
float: an error of the sampler would be an error of the privacy proof. `choose_exponential` meets irrational
weights, and is exact all the same: it looks at as many binary digits of one uniform number, and of the weights,
as it needs to be sure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal, InvalidOperation, Overflow
from fractions import Fraction
from itertools import accumulate, pairwise

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.checks import real, whole
from langchain_dpicl.privacy.noise import Randomness

_WORD = 32
_FIRST_BITS = 256
"""Binary digits of the uniform number that `choose_exponential` draws first."""


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
        if (i == last or context.subtract(sums[i], place) >= margin) and (
            i == 0 or context.subtract(place, sums[i - 1]) >= margin
        ):
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
    words = randomness.integers(1 << _WORD, -(-bits // _WORD))
    return int.from_bytes(words.astype("<u4").tobytes(), "little") >> (-bits % _WORD)


def _check_weights(name: str, weights: Sequence[int]) -> None:
    """The weights count private things: no message shows one."""
    if not weights or min(weights) < 0 or max(weights) == 0:
        raise InvalidParameter(name, "(not shown)", "integers >= 0, not all of them 0")
