"""`privacy/noise.py`: every choice has exactly the law that it states, at any size of weights.

Statistical tests state their false-alarm probability; all are below 1e-6.
"""

from __future__ import annotations

import decimal
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import SecureRandomness, noise
from langchain_dpicl.privacy.noise import choose_exponential, choose_weighted, random_below

random = SecureRandomness()
FALSE_ALARM = 1e-8  # of every statistical test below; there are fewer than twenty


class Scripted:
    """Hands out the numbers that it is given, and remembers the bounds that it was asked for."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)
        self.bounds: list[int] = []

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        self.bounds.append(high)
        drawn, self.numbers = self.numbers[:size], self.numbers[size:]
        assert len(drawn) == size, "the script is over"
        return np.array(drawn, np.int64)


class Digits:
    """One number in [0, 1), read as binary digits: in place of `_random_bits`."""

    def __init__(self, number: Fraction) -> None:
        self.number, self.rounds = number, 0

    def __call__(self, bits: int, randomness: object) -> int:
        self.rounds += 1
        shifted = self.number * 2**bits
        drawn = shifted.numerator // shifted.denominator
        self.number = shifted - drawn
        return drawn


def boundaries(multiplicities: Sequence[int], losses: Sequence[int], rate: float, digits: int) -> list[Fraction]:
    """The partial sums of the law, from separate powers at `digits` digits instead of a running product."""
    context = Context(digits, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)
    total, sums = Decimal(0), []
    for multiplicity, loss in zip(multiplicities, losses, strict=True):
        power = context.exp(context.multiply(Decimal.from_float(-rate), loss - min(losses)))
        total = context.add(total, context.multiply(Decimal(multiplicity), power))
        sums.append(total)
    return [Fraction(context.divide(part, total)) for part in sums]


# Uniform integers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 2, 7, 1 << 63, (1 << 63) + 1, 3 << 70, 10**500])
def test_numbers_lie_below_their_bound_and_reach_far(bound: int) -> None:
    """200 draws all below 9/10 of the bound, or all above 1/10 of it, have a probability of 0.9^200 = 7e-10 each."""
    draws = [random_below(bound, random) for _ in range(200)]
    assert all(0 <= draw < bound for draw in draws)
    if bound > 1000:
        assert max(draws) > 9 * bound // 10
        assert min(draws) < bound // 10


@pytest.mark.parametrize("bound", [7, 3 << 70, 5 << 62, (1 << 64) + (1 << 63)])
def test_numbers_are_uniform(bound: int) -> None:
    """Chi-square over equal parts of the range. False alarms: 1e-8."""
    parts = 7 if bound == 7 else 5 if bound == 5 << 62 else 3
    draws = Counter(random_below(bound, random) * parts // bound for _ in range(6000))
    assert chisquare([draws[part] for part in range(parts)]).pvalue > FALSE_ALARM


def test_a_number_beyond_the_bound_is_thrown_away() -> None:
    """A modulo would make the small numbers likelier. The bound 2^64 + 1 needs 65 bits: 3 words less 31 bits."""
    bound = (1 << 64) + 1
    beyond, exact = [0xFFFFFFFF] * 3, [0, 0, 1 << 31]
    script = Scripted(*beyond, *beyond, *exact)
    assert random_below(bound, script) == 1 << 64  # type: ignore[arg-type]
    assert not script.numbers
    assert set(script.bounds) == {1 << 32}


def test_every_bit_of_a_long_number_is_a_fair_coin() -> None:
    """Chi-square of 100 bits over 2000 numbers (100 tests, each at 1e-10)."""
    draws = [random_below(1 << 100, random) for _ in range(2000)]
    for bit in range(100):
        ones = sum(draw >> bit & 1 for draw in draws)
        assert chisquare([ones, 2000 - ones]).pvalue > 1e-10


@pytest.mark.parametrize("bound", [0, -1, 1.5, True])
def test_a_bound_is_a_positive_whole_number(bound: Any) -> None:
    with pytest.raises(InvalidParameter, match="bound"):
        random_below(bound, random)


# Integer weights ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any))
@settings(deadline=None)
def test_an_index_has_exactly_its_weight(weights: list[int]) -> None:
    """Every number below the sum, once: the indices come out as often as their weights say."""
    script = Scripted(*range(sum(weights)))
    seen = Counter(choose_weighted(weights, script) for _ in range(sum(weights)))  # type: ignore[arg-type]
    assert [seen[i] for i in range(len(weights))] == weights
    assert set(script.bounds) == {sum(weights)}


def test_weights_of_thousands_of_bits_keep_their_ratio() -> None:
    """Chi-square of 1 : 3 : 0 : 4 at 5000 bits. False alarms: 1e-8."""
    weights = [m << 5000 for m in (1, 3, 0, 4)]
    seen = Counter(choose_weighted(weights, random) for _ in range(4000))
    assert seen[2] == 0
    assert chisquare([seen[0], seen[1], seen[3]], [500, 1500, 2000]).pvalue > FALSE_ALARM


# Exponential weights --------------------------------------------------------------------------------------------------

HUGE = (10**5) ** 100
CASES: list[tuple[list[int], list[int], float]] = [
    ([1], [3], 2.0),
    ([1, 1], [0, 1], 0.5),
    ([5, 0, 3, 2], [4, 0, 2, 9], 0.3),
    ([1, HUGE, HUGE**2], [0, 1151, 2302], 1.0),
    ([7, HUGE // 3, HUGE], [10_000, 4, 0], 25.0),
    ([HUGE, 1, 3], [10_000, 9_950, 9_955], 25.0),
    ([1, 1 << 14_254], [0, 400], 24.7),
    ([3, 2, 1], [0, 5, 7], 0.0),
    ([3, 2, 1], [0, 5, 7], 5e-324),
    ([3, 2, 1], [7, 5, 0], 1e300),
    ([3, 2, 1], [0, 1, 2], 1e-6),
    (list(range(1, 100)), list(range(99)), 0.04),
]


@pytest.mark.parametrize(("multiplicities", "losses", "rate"), CASES, ids=map(str, range(len(CASES))))
@pytest.mark.parametrize("first_bits", [1, 5, 64, 256])
def test_the_index_is_the_one_that_the_uniform_number_points_at(
    multiplicities: list[int], losses: list[int], rate: float, first_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many digits are drawn first, the answer is the inverse of the law's distribution function at U."""
    monkeypatch.setattr(noise, "_FIRST_BITS", first_bits)
    kept = [i for i, multiplicity in enumerate(multiplicities) if multiplicity]
    sums = boundaries([multiplicities[i] for i in kept], [losses[i] for i in kept], rate, 800)
    generator = np.random.default_rng(first_bits)
    numbers = [Fraction(int.from_bytes(generator.bytes(200), "big"), 1 << 1600) for _ in range(40)]
    for edge in sums[:-1][:20]:
        near = round(edge * 2**400)
        numbers += [Fraction(near + step, 2**400) for step in (-(2**90), -4, 4, 2**90) if 0 < near + step < 2**400]
    for number in numbers:
        monkeypatch.setattr(noise, "_random_bits", Digits(number))
        expected = kept[next(i for i, edge in enumerate(sums) if number < edge or i == len(sums) - 1)]
        assert choose_exponential(multiplicities, losses, rate, random) == expected


def test_a_number_next_to_a_boundary_waits_for_more_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 2^-300 from a boundary 256 digits cannot tell; 512 can. Without the margin the first round would answer."""
    (edge, _) = boundaries([1, 1], [0, 1], 0.5, 800)
    for side, expected in ((-1, 0), (1, 1)):
        digits = Digits(edge + side * Fraction(1, 2**300))
        monkeypatch.setattr(noise, "_random_bits", digits)
        assert choose_exponential([1, 1], [0, 1], 0.5, random) == expected
        assert digits.rounds == 2


@pytest.mark.parametrize(("multiplicities", "losses", "rate"), CASES[3:], ids=map(str, range(3, len(CASES))))
@pytest.mark.parametrize("bits", [1, 8, 256, 1024])
def test_partial_sums_are_known_as_well_as_the_proof_says(
    multiplicities: list[int], losses: list[int], rate: float, bits: int
) -> None:
    exponent = int(Fraction(rate) * (max(losses) - min(losses))) + 1
    context = noise._context(exponent, len(losses), bits)
    sums = noise._partial_sums(multiplicities, losses, rate, context)
    exact = boundaries(multiplicities, losses, rate, 1000)
    for ours, edge in zip(sums, exact, strict=True):
        assert abs(Fraction(context.divide(ours, sums[-1])) - edge) < Fraction(1, 1 << (bits + 2))


@pytest.mark.parametrize(
    ("multiplicities", "losses", "rate"),
    [
        ([1, 1, 1], [0, 1, 2], 0.7),
        ([1, HUGE, HUGE**2], [0, 1151, 2302], 1.0),
        ([HUGE, 1, 0, 3 * HUGE], [10_000, 9_954, 3, 10_000], 25.0),
        (list(range(1, 40)), list(range(39, 0, -1)), 0.1),
    ],
    ids=["plain", "balanced", "extreme", "falling"],
)
def test_indices_come_with_their_probabilities(
    multiplicities: list[int], losses: list[int], rate: float, seeded: Callable[[int], Any]
) -> None:
    """Chi-square over 5000 draws; indices expected fewer than ten times are put together. False alarms: 1e-8."""
    kept = [i for i, multiplicity in enumerate(multiplicities) if multiplicity]
    sums = boundaries([multiplicities[i] for i in kept], [losses[i] for i in kept], rate, 300)
    law = dict(zip(kept, np.diff([0.0, *map(float, sums)]) * 5000, strict=True))
    randomness = seeded(4)
    seen = Counter(choose_exponential(multiplicities, losses, rate, randomness) for _ in range(5000))
    assert set(seen) <= set(kept)
    cells = [i for i in kept if law[i] >= 10]
    observed, expected = [seen[i] for i in cells], [law[i] for i in cells]
    observed.append(5000 - sum(observed))
    expected.append(5000 - sum(expected))
    if expected[-1] < 1e-6:
        assert observed.pop() == 0
        expected.pop()
    if len(cells) > 1:
        assert chisquare(observed, np.array(expected) * sum(observed) / sum(expected)).pvalue > FALSE_ALARM


def test_a_callers_decimal_context_is_neither_read_nor_changed(seeded: Callable[[int], Any]) -> None:
    plain = [choose_exponential([1, 10**60, 3], [0, 130, 1], 1.1, seeded(seed)) for seed in range(30)]
    with decimal.localcontext() as context:
        context.prec, context.Emax, context.Emin, context.rounding = 2, 3, -3, decimal.ROUND_UP
        for signal in context.traps:
            context.traps[signal] = True
        context.clear_flags()
        assert [choose_exponential([1, 10**60, 3], [0, 130, 1], 1.1, seeded(seed)) for seed in range(30)] == plain
        assert not any(context.flags.values())
        assert context.prec == 2


def test_an_applications_default_context_changes_nothing(
    seeded: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("prec", 2), ("Emax", 3), ("Emin", -3), ("rounding", decimal.ROUND_UP), ("clamp", 1)):
        monkeypatch.setattr(decimal.DefaultContext, name, value)
    monkeypatch.setitem(decimal.DefaultContext.traps, decimal.Inexact, True)
    seen = Counter(choose_exponential([1, 10**60], [0, 3], 0.1, seeded(seed)) for seed in range(20))
    assert seen == {1: 20}


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        (lambda: choose_weighted([], random), "weights"),
        (lambda: choose_weighted([0, 0], random), "weights"),
        (lambda: choose_weighted([31337, -31337], random), "weights"),
        (lambda: choose_exponential([], [], 1.0, random), "multiplicities"),
        (lambda: choose_exponential([0], [31337], 1.0, random), "multiplicities"),
        (lambda: choose_exponential([31337, -1], [31337, 0], 1.0, random), "multiplicities"),
        (lambda: choose_exponential([31337], [0, 31337], 1.0, random), "losses"),
        (lambda: choose_exponential([31337], [31337], -1.0, random), "rate"),
        (lambda: choose_exponential([31337], [31337], float("inf"), random), "rate"),
        (lambda: choose_exponential([31337], [31337], float("nan"), random), "rate"),
    ],
)
def test_bad_input_is_named_and_private_numbers_are_not_shown(call: Callable[[], int], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        call()
    assert caught.value.parameter == parameter
    assert "31337" not in str(caught.value)
