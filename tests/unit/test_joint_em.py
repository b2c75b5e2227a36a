"""`aggregators/keywords.py`, the joint exponential mechanism: the sampler has its law exactly, which keeps its range.

`exact_law` runs `sample_sequence` along every path of its random choices and adds up the paths' exact probabilities:
what it returns is the law of the code, not an estimate. `test_sampling.py` shows that each choice has its law.
Statistical tests state their false-alarm probability; all are below 1e-6.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joint_em_oracle import DIGITS, Algorithm5, enumerate_distribution
from numpy.typing import NDArray
from scipy.stats import chi2

from langchain_dpicl.aggregators import keywords
from langchain_dpicl.aggregators.keywords import (
    first_position_weights,
    loss_levels,
    neighbouring_reach,
    sample_sequence,
    sequence_counts,
)
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import SecureRandomness

random = SecureRandomness()
FALSE_ALARM = 1e-8  # of every statistical test below; there are fewer than twenty

Law = dict[tuple[int, ...], Decimal]
Mutant = dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]


def mutate(patch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    for name, change in mutant.items():
        patch.setattr(keywords, name, change(getattr(keywords, name)))


class Path:
    """One path through the random choices: the options taken so far, then the first option everywhere."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.options: list[int] = []
        self.probability: Decimal = Decimal(1)

    def restart(self) -> bool:
        """Move on to the next path; False when all have been walked."""
        taken = self.taken
        while taken and taken[-1] + 1 == self.options[len(taken) - 1]:
            taken.pop()
        if not taken:
            return False
        taken[-1] += 1
        return True

    def begin(self) -> None:
        self.step, self.options, self.probability = 0, [], Decimal(1)

    def choose(self, weights: Sequence[Decimal | int]) -> int:
        open_ones = [i for i, weight in enumerate(weights) if weight]
        if self.step == len(self.taken):
            self.taken.append(0)
        self.options.append(len(open_ones))
        i = open_ones[self.taken[self.step]]
        self.step += 1
        total = Decimal(0)
        for weight in weights:
            total = DIGITS.add(total, weight)
        self.probability = DIGITS.multiply(self.probability, DIGITS.divide(Decimal(weights[i]), total))
        return i

    def choose_weighted(self, weights: Sequence[int], randomness: object) -> int:
        return self.choose(weights)

    def random_below(self, bound: int, randomness: object) -> int:
        return self.choose([1] * bound)

    def choose_exponential(self, numbers: Sequence[int], losses: Sequence[int], rate: float, randomness: object) -> int:
        powers = [power(rate, loss - min(losses)) for loss in losses]
        return self.choose([DIGITS.multiply(Decimal(n), p) for n, p in zip(numbers, powers, strict=True)])


@lru_cache(maxsize=4096)
def power(rate: float, loss: int) -> Decimal:
    return DIGITS.exp(DIGITS.multiply(Decimal.from_float(-rate), loss))


def exact_law(counts: Sequence[int], k: int, eps0: float, mutant: Mutant | None = None) -> Law:
    """The law of `sample_sequence` to 50 digits, by walking every path."""
    law: dict[tuple[int, ...], Decimal] = defaultdict(Decimal)
    path, array = Path(), np.array(counts, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("choose_weighted", "random_below", "choose_exponential"):
            patch.setattr(keywords, name, getattr(path, name))
        mutate(patch, mutant or {})
        more = True
        while more:
            path.begin()
            sequence = tuple(sample_sequence(array, k, eps0, random).tolist())
            law[sequence] = DIGITS.add(law[sequence], path.probability)
            more = path.restart()
    return dict(law)


def difference(one: Law, other: Law) -> Decimal:
    """The largest relative difference between two laws; infinite if a sequence has a probability in one alone."""
    if set(one) != set(other):
        return Decimal("inf")
    return max(abs(DIGITS.divide(one[s], other[s]) - 1) for s in one)


def p_value(counts: Sequence[int], k: int, eps0: float, seed: Any, runs: int, mutant: Mutant | None = None) -> float:
    """Chi-square of whole sequences against enumeration; those expected fewer than eight times are put together."""
    law = enumerate_distribution(list(counts), k, eps0)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, mutant or {})
        array = np.array(counts)
        seen = Counter(tuple(sample_sequence(array, k, eps0, seed).tolist()) for _ in range(runs))
    if not set(seen) <= set(law):
        return 0.0
    cells = [s for s in law if law[s] * runs >= 8]
    observed = np.array([seen[s] for s in cells], float)
    expected = np.array([float(law[s]) * runs for s in cells])
    if runs - expected.sum() >= 8:
        observed, expected = np.append(observed, runs - observed.sum()), np.append(expected, runs - expected.sum())
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


MUTANTS: dict[str, Mutant] = {
    "sensitivity 1": {"choose_exponential": lambda f: lambda numbers, losses, rate, r: f(numbers, losses, 2 * rate, r)},
    "ties broken by order": {"random_below": lambda f: lambda bound, r: 0},
    "first position ignored": {
        "first_position_weights": lambda f: lambda before, within: [int(w > 0) for w in f(before, within)]
    },
    "first position always the first that may be": {
        "choose_weighted": lambda f: lambda weights, r: next(i for i, weight in enumerate(weights) if weight)
    },
    "loss at most l": {"sequence_counts": lambda f: lambda reach: list(itertools.accumulate(f(reach)))},
    "number of sequences ignored": {"sequence_counts": lambda f: lambda reach: [1] * len(reach)},
}
SHAPES: list[tuple[list[int], int]] = [
    ([3, 1, 0, 0], 2),
    ([2, 2, 1, 0, 0], 3),
    ([4, 4, 4, 4], 3),
    ([6, 0, 0, 0, 0], 1),
    ([0, 5, 0, 7, 5, 2], 2),
    ([5, 4, 3, 2, 1, 0], 3),
]


# The law --------------------------------------------------------------------------------------------------------------


def small_shapes(d: int) -> list[tuple[int, ...]]:
    """Every multiset of d counts from 0, ..., 3, and some with gaps."""
    gaps = itertools.combinations_with_replacement((100, 5, 0), d)
    return [*itertools.combinations_with_replacement((3, 2, 1, 0), d), *gaps]


@pytest.mark.parametrize("d", [*range(1, 6), *(pytest.param(d, marks=pytest.mark.slow) for d in (6, 7))])
def test_the_law_is_the_mechanisms_for_every_small_shape(d: int) -> None:
    """Every multiset of counts, in a shuffled order, for every k up to 3: relative differences below 1e-40."""
    generator = np.random.default_rng(d)
    for shape in small_shapes(d):
        counts = generator.permutation(shape).tolist()
        for k in range(1, min(d, 3) + 1):
            assert difference(exact_law(counts, k, 1.3), enumerate_distribution(counts, k, 1.3)) < Decimal("1e-40")


@pytest.mark.parametrize("d", range(1, 8))
def test_the_numbers_of_sequences_are_exact_for_every_small_shape(d: int) -> None:
    """B(l) and the weights of the first position, against a list of all sequences."""
    for shape in small_shapes(d):
        ranked = sorted(shape, reverse=True)
        for k in range(1, min(d, 3) + 1):
            seen: Counter[tuple[int, int]] = Counter()
            for sequence in itertools.permutations(range(d), k):
                losses = [ranked[i] - ranked[token] for i, token in enumerate(sequence)]
                seen[max(losses), losses.index(max(losses))] += 1
            levels = loss_levels(np.array(shape), k)
            numbers = sequence_counts(levels.reach)
            assert set(levels.losses.tolist()) == {loss for loss, _ in seen}
            for level, loss in enumerate(levels.losses.tolist()):
                weights = first_position_weights(*neighbouring_reach(levels.reach, level))
                assert weights == [seen[loss, i] for i in range(k)]
                assert numbers[level] == sum(weights)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_the_numbers_of_sequences_add_up(data: st.DataObject) -> None:
    """Weights of the first position sum to B(l) > 0, and all B(l) to d! / (d - k)!, at sizes beyond enumeration."""
    counts = data.draw(
        st.lists(st.integers(0, data.draw(st.sampled_from([1, 5, 300, 70_000]))), min_size=1, max_size=60)
    )
    k = data.draw(st.integers(1, len(counts)))
    levels = loss_levels(np.array(counts), k)
    numbers = sequence_counts(levels.reach)
    assert sum(numbers) == math.perm(len(counts), k)
    for level, number in enumerate(numbers):
        assert sum(first_position_weights(*neighbouring_reach(levels.reach, level))) == number > 0
    assert levels.losses[0] == 0
    assert sorted(levels.order.tolist()) == list(range(len(counts)))
    assert np.all(np.diff(np.array(counts)[levels.order]) <= 0)


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "k"), SHAPES, ids=str)
def test_whole_sequences_come_with_their_probabilities(counts: list[int], k: int, seeded: Callable[[int], Any]) -> None:
    """Chi-square over 4000 sequences, nothing replaced. False alarms: 1e-8."""
    assert p_value(counts, k, 1.5, seeded(1), 4000) > FALSE_ALARM


def test_the_secure_generator_draws_the_same_law() -> None:
    """Chi-square over 4000 sequences. False alarms: 1e-8."""
    assert p_value([2, 2, 1, 0, 0], 3, 1.5, random, 4000) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_sampler_would_be_seen(name: str, seeded: Callable[[int], Any]) -> None:
    """Both checks above reject every mutant on one shape at least, by a wide margin."""
    exact, sampled = [], []
    for counts, k in SHAPES[-2:]:
        exact.append(difference(exact_law(counts, k, 1.5, MUTANTS[name]), enumerate_distribution(counts, k, 1.5)))
        sampled.append(p_value(counts, k, 1.5, seeded(2), 3000, MUTANTS[name]))
    assert max(exact) > Decimal("0.01")
    assert min(sampled) < FALSE_ALARM / 1000


def test_tokens_have_no_names() -> None:
    """Relabelling the tokens relabels the law, exactly."""
    counts = [3, 0, 1, 3, 0]
    law = exact_law(counts, 2, 0.9)
    for relabelled in itertools.islice(itertools.permutations(range(5)), 0, None, 7):
        moved = [0] * 5
        for token, name in enumerate(relabelled):
            moved[name] = counts[token]
        expected = {tuple(relabelled[token] for token in s): p for s, p in law.items()}
        assert difference(exact_law(moved, 2, 0.9), expected) < Decimal("1e-45")


def test_equal_counts_give_every_sequence_the_same_chance() -> None:
    law = exact_law([7, 7, 7, 7, 7], 3, 2.0)
    assert len(law) == 60
    assert {abs(p * 60 - 1) < Decimal("1e-50") for p in law.values()} == {True}


@pytest.mark.parametrize("eps0", [1e-6, 1.0, 60.0])
@pytest.mark.parametrize(
    "counts",
    [[10_000, 9_999, 5_000, 0], [10_000, 0, 0, 0, 0], [0, 1, 256, 9_999], [0, 256, 1], [5, 0, 65_536]],
    ids=str,
)
def test_extreme_noise_and_extreme_counts_keep_the_law(eps0: float, counts: list[int]) -> None:
    """Probabilities down to 1e-853860, each to 40 digits."""
    for k in (1, 2, 3):
        assert difference(exact_law(counts, k, eps0), enumerate_distribution(counts, k, eps0)) < Decimal("1e-40")


@pytest.mark.parametrize("counts", [[4], [0], [3, 3], [1, 0, 2], [9, 0, 5, 5]], ids=str)
def test_all_tokens_may_be_ranked(counts: list[int]) -> None:
    k = len(counts)
    assert difference(exact_law(counts, k, 1.0), enumerate_distribution(counts, k, 1.0)) < Decimal("1e-40")
    assert sorted(sample_sequence(np.array(counts), k, 1.0, random).tolist()) == list(range(k))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64, np.int64])
def test_any_integers_are_counts(dtype: Any, seeded: Callable[[int], Any]) -> None:
    plain = np.array([200, 0, 255, 3, 3])
    same = [sample_sequence(c, 3, 0.01, seeded(5)).tolist() for c in (plain, plain.astype(dtype))]
    assert same[0] == same[1]
    assert plain.tolist() == [200, 0, 255, 3, 3]


# Against the papers' sampler ------------------------------------------------------------------------------------------


def many_counts(shape: str, d: int) -> NDArray[np.int64]:
    generator = np.random.default_rng(d)
    if shape == "zipf":
        return np.minimum(100, 130 / np.arange(1, d + 1) ** 0.7).astype(np.int64)
    if shape == "uniform":
        return generator.integers(0, 101, d)
    return np.where(np.arange(d) < 20, generator.integers(1, 101, d), 0)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize(("d", "k"), [(200, 10), (60, 60), (1000, 30)])
@pytest.mark.parametrize("shape", ["zipf", "uniform", "zeros"])
def test_losses_have_the_law_of_the_papers_sampler(shape: str, d: int, k: int, looped: bool) -> None:
    """The two laws of the loss, in floating point: equal to 1e-9."""
    counts = many_counts(shape, d)
    levels = loss_levels(counts, k)
    weights = [
        Fraction(number) * Fraction(math.exp(-1.59 / 4 * loss))
        for number, loss in zip(sequence_counts(levels.reach), levels.losses.tolist(), strict=True)
    ]
    theirs = Algorithm5(counts, k, 1.59, looped=looped).loss_law()
    ours = [float(weight / sum(weights)) for weight in weights]
    for loss, share in zip(levels.losses.tolist(), ours, strict=True):
        assert theirs.get(loss, 0.0) == pytest.approx(share, rel=1e-9, abs=1e-12)


def test_a_long_list_keeps_the_law_of_the_loss(seeded: Callable[[int], Any]) -> None:
    """d = 5000, k = 50: the losses of 800 sequences against B(l) exp(-eps0 l / 4). Chi-square, false alarms 1e-8."""
    counts = many_counts("zipf", 5000)
    levels = loss_levels(counts, 50)
    logs = np.array([math.log(n) for n in sequence_counts(levels.reach)]) - 0.75 * levels.losses
    law = np.exp(logs - logs.max())
    expected = 800 * law / law.sum()
    randomness, ranked = seeded(6), np.sort(counts)[::-1][:50]
    losses = [int((ranked - counts[sample_sequence(counts, 50, 3.0, randomness)]).max()) for _ in range(800)]
    observed = np.array([losses.count(loss) for loss in levels.losses.tolist()], float)
    small = expected < 8
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 8:
        observed = np.append(observed[:-2], observed[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    assert len(expected) > 3
    assert chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1) > FALSE_ALARM


# Privacy --------------------------------------------------------------------------------------------------------------


def widest_range(d: int, k: int, eps0: float, mutant: Mutant | None = None) -> float:
    """The widest range (max - min) of log P(s) - log P'(s) over sequences s, for any two neighbours with counts <= 3.

    Replacing one member's words, any set of words by any other, adds a vector of -1, 0, 1; and any such step between
    two vectors of counts is one member's, the others making up the smaller counts. The law of each vector is that of
    the code for its sorted version, relabelled.
    """
    sequences = list(itertools.permutations(range(d), k))
    logs: dict[tuple[int, ...], NDArray[np.float64]] = {}
    for shape in itertools.combinations_with_replacement((3, 2, 1, 0), d):
        law = {s: float(DIGITS.ln(p)) for s, p in exact_law(shape, k, eps0, mutant).items()}
        for counts in set(itertools.permutations(shape)):
            rank = np.argsort(np.argsort(-np.array(counts), kind="stable"))
            logs[counts] = np.array([law[tuple(rank[list(s)].tolist())] for s in sequences])
    widest = 0.0
    for counts, one in logs.items():
        for step in itertools.product((-1, 0, 1), repeat=d):
            other = logs.get(tuple(c + s for c, s in zip(counts, step, strict=True)))
            if other is not None:
                widest = max(widest, float(np.ptp(one - other)))
    return widest


@pytest.mark.parametrize(("d", "k"), [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3), (5, 1), (5, 2)])
def test_no_neighbours_lie_further_apart_than_the_range(d: int, k: int) -> None:
    """eps0-bounded range, by brute force over every pair of neighbours; a sensitivity of 1 would break it."""
    assert widest_range(d, k, 1.2) <= 1.2 + 1e-9


@pytest.mark.parametrize(("d", "k"), [(3, 2), (4, 2), (4, 3)])
def test_a_sensitivity_of_one_would_break_the_range(d: int, k: int) -> None:
    assert widest_range(d, k, 1.2, MUTANTS["sensitivity 1"]) > 1.2 + 0.1


@pytest.mark.parametrize("k", [1, 2])
def test_the_range_is_reached(k: int) -> None:
    """With one position the top count cancels against the normalisation, so the weights may be twice as sharp."""
    assert widest_range(4, k, 1.2) == pytest.approx(1.2, abs=1e-9)


# Preconditions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "k", "eps0", "parameter"),
    [
        (np.array([31337, 1]), 0, 1.0, "k"),
        (np.array([31337, 1]), 3, 1.0, "k"),
        (np.array([31337, 1]), 1.0, 1.0, "k"),
        (np.array([31337, 1]), 1, 0.0, "eps0"),
        (np.array([31337, 1]), 1, -1.0, "eps0"),
        (np.array([31337, 1]), 1, float("nan"), "eps0"),
        (np.array([31337, -1]), 1, 1.0, "counts"),
        (np.array([31337.0, 1.0]), 1, 1.0, "counts"),
        (np.array([[31337, 1]]), 1, 1.0, "counts"),
        (np.array([], np.int64), 1, 1.0, "counts"),
        (np.array([True, False]), 1, 1.0, "counts"),
    ],
)
def test_bad_input_is_named_and_counts_are_not_shown(counts: Any, k: Any, eps0: float, parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        sample_sequence(counts, k, eps0, random)
    assert caught.value.parameter == parameter
    assert "31337" not in str(caught.value)
