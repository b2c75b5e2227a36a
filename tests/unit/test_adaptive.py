"""`privacy/adaptive.py`: never below any adversary on tiny instances, and hardly above the best that is known.

From below: trees over every number of releases that is small enough, where each node takes the best of many pairs; and
for many releases one pair, repeated. Both are exact, so what they find is really possible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import log_moment
from scipy.optimize import linprog
from scipy.stats import binom

from langchain_dpicl.privacy import BoundedRange, Gaussian, Line, PLDAccountant, adaptive
from langchain_dpicl.privacy.accountant import compositions
from langchain_dpicl.privacy.adaptive import PairFamily, RangePairs
from langchain_dpicl.privacy.bits import ThresholdPairs
from langchain_dpicl.privacy.composition import Composition
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.profile import DIRECTIONS, BoundedRanges, Direction

Curve = Callable[[FloatArray], FloatArray]
"""V(a), the delta of log a."""

PLD = PLDAccountant()
JOINT_EM = 400 / 14732
CASES = [(0.5, 1.0), (1.5, 0.3), (3.0, 0.05), (5.0, 0.02)]
"""A range, and a rate."""


def start(a: FloatArray) -> FloatArray:
    return np.maximum(0.0, 1.0 - a)


def ratios(eps0: float, rate: float, tau: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The two ratios of a pair for each tau, and the weight of the larger one without the owner."""
    low = np.exp(-tau)
    high = low * math.exp(eps0)
    return 1 - rate + rate * high, 1 - rate + rate * low, (1 - low) / (high - low)


def after_one_more(value: Curve, eps0: float, rate: float, direction: Direction, pairs: int) -> Curve:
    """The best first release of these many pairs, before `value`."""
    u, v, of_u = ratios(eps0, rate, np.linspace(0.0, eps0, pairs))

    def better(a: FloatArray) -> FloatArray:
        a = np.asarray(a, np.float64)[..., None]
        if direction == "remove":
            mean = of_u * u * value(a / u) + (1 - of_u) * v * value(a / v)
        else:  # r is then the law without the owner over the one with it
            mean = of_u * value(a * u) + (1 - of_u) * value(a * v)
        return np.asarray(mean.max(axis=-1))

    return better


def one(eps0: float, rate: float, direction: Direction) -> Curve:
    """One release, in closed form."""
    sampled = BoundedRange(eps0).subsample(rate)
    return lambda a: sampled.direction_delta(np.log(a), direction)


def bound(eps0: float, rate: float, count: int, direction: Direction, a: FloatArray) -> FloatArray:
    composition = Composition(Line(BoundedRange(eps0), rate, count).parts(direction))
    return np.array([composition.delta(math.log(each)) for each in a])


# -- tiny instances ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("eps0", "rate"), CASES)
def test_trees_of_two_and_three_releases_stay_below(eps0: float, rate: float, direction: Direction) -> None:
    """At every epsilon of either sign; and the bound is at most two per cent above what the best tree finds."""
    top = math.log1p(rate * math.expm1(eps0)) if direction == "remove" else -math.log1p(rate * math.expm1(-eps0))
    a = np.exp(np.array([-0.5, -0.1, 0.0, 0.1, 0.3, 0.6, 1.0]) * 2 * top)
    two = after_one_more(one(eps0, rate, direction), eps0, rate, direction, 400)
    three = after_one_more(
        after_one_more(one(eps0, rate, direction), eps0, rate, direction, 90), eps0, rate, direction, 90
    )
    for count, tree in ((2, two), (3, three)):
        found, claimed = tree(a), bound(eps0, rate, count, direction, a)
        assert (found <= claimed + 1e-12).all()
        assert (claimed <= 1.02 * found + 2e-4 * (1 - math.exp(-top))).all()


@pytest.mark.parametrize("ranges", [(1.0, 0.3), (0.4, 2.5), (0.7, 0.7, 0.2), (3.0, 0.1, 1.0)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_mechanisms_on_one_sample_stay_below_their_curve_in_every_order(
    ranges: tuple[float, ...], direction: Direction
) -> None:
    """Trees over the fields of one release, before amplification; the curve is at most two per cent above the best."""
    a = np.exp(np.array([-0.5, -0.1, 0.0, 0.1, 0.3, 0.6, 0.9]) * sum(ranges))
    for order in set(itertools.permutations(ranges)):
        tree = one(order[0], 1.0, direction)
        for each in order[1:]:
            tree = after_one_more(tree, each, 1.0, direction, 400 if len(order) == 2 else 90)
        found, claimed = tree(a), BoundedRanges(order).direction_delta(np.log(a), direction)
        assert (found <= claimed + 1e-12).all()
        assert (claimed <= 1.02 * found + 1e-3).all()


def test_mechanisms_on_one_sample_cost_less_than_their_profiles_and_than_the_sum_of_their_ranges() -> None:
    ranges = (0.5, 0.5, 0.5)
    many = Line(BoundedRanges(ranges), 0.1, 100), Line(BoundedRange(0.5).compose(*[BoundedRange(0.5)] * 2), 0.1, 100)
    found = [PLDAccountant().epsilon([line], 1e-5) for line in (*many, Line(BoundedRange(1.5), 0.1, 100))]
    assert found == sorted(found)
    assert found[0] < 0.95 * found[1] < 0.8 * found[2]
    equal = BoundedRanges((1.0,) * 4).delta(np.array([0.0, 0.5, 2.0]))
    assert equal == pytest.approx(bound(1.0, 1.0, 4, "remove", np.exp([0.0, 0.5, 2.0])), rel=0.02)


@given(
    eps0=st.floats(0.2, 4.0),
    rate=st.floats(0.02, 1.0),
    lowest=st.floats(0.0, 1.0),
    log_a=st.floats(-1.0, 3.0),
    count=st.integers(2, 3),
)
@settings(max_examples=25, deadline=None)
def test_no_finite_pair_does_better(eps0: float, rate: float, lowest: float, log_a: float, count: int) -> None:
    """A linear programme over all laws of the likelihood ratio on thirty places of an interval: two places are enough,
    and their value is within the bound."""
    low, a = math.exp(-lowest * eps0), math.exp(log_a)
    places = np.unique(np.append(np.geomspace(low, low * math.exp(eps0), 30), 1.0))
    r = 1 - rate + rate * places
    value = one(eps0, rate, "remove")
    for _ in range(count - 2):
        value = after_one_more(value, eps0, rate, "remove", 60)
    gains = r * value(a / r)
    law = linprog(-gains, A_eq=np.stack([np.ones(r.size), places]), b_eq=[1.0, 1.0], bounds=(0, None))
    assert -law.fun <= bound(eps0, rate, count, "remove", np.array([a]))[0] + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_random_adaptive_mechanisms_stay_below(seed: int) -> None:
    """Three answers to each of three questions; the next pair depends on all answers so far. Summed over all outcomes,
    for both directions, with the owner's own coin at each question."""
    random = np.random.default_rng(seed)
    eps0, rate = float(random.uniform(0.5, 3.0)), float(random.uniform(0.1, 1.0))
    runs = [(1.0, 1.0)]
    for _ in range(3):
        longer = []
        for p, q in runs:
            absent = random.dirichlet(np.full(3, 0.7))
            exponents = random.choice([0.0, eps0, random.uniform(0, eps0)], 3)
            present = absent * np.exp(exponents)
            present /= present.sum()
            mixed = (1 - rate) * absent + rate * present
            longer += [(p * x, q * y) for x, y in zip(mixed, absent, strict=True)]
        runs = longer
    present, absent = np.array(runs).T
    for direction, (p, q) in zip(DIRECTIONS, ((present, absent), (absent, present)), strict=True):
        a = np.exp(np.array([-0.4, 0.0, 0.2, 0.5, 1.0, 2.0]))
        found = np.array([np.maximum(0.0, p - each * q).sum() for each in a])
        assert (found <= bound(eps0, rate, 3, direction, a) + 1e-12).all()


# -- many releases -----------------------------------------------------------------------------------------------------


def repeated(eps0: float, rate: float, count: int, epsilon: float) -> float:
    """delta of one pair for all releases, the best of eighty: a binomial sum."""
    u, v, of_u = ratios(eps0, rate, np.linspace(0.01, 0.6, 80) * eps0)
    heads = np.arange(count + 1)[:, None]
    losses = heads * np.log(u) + (count - heads) * np.log(v)
    law = binom.pmf(heads, count, of_u * u)
    return float((-np.expm1(np.minimum(epsilon - losses, 0.0)) * law).sum(axis=0).max())


@pytest.mark.parametrize(
    ("eps0", "rate", "count", "delta"),
    [(1.766, JOINT_EM, 100, 5e-5), (3.25, JOINT_EM, 100, 5e-5), (4.865, JOINT_EM, 100, 5e-5), (0.3, 1.0, 50, 1e-6)],
)
def test_one_pair_for_all_releases_costs_almost_as_much(eps0: float, rate: float, count: int, delta: float) -> None:
    """So the optimum is bracketed within one per cent."""
    epsilon = PLD.epsilon([Line(BoundedRange(eps0), rate, count)], delta)
    assert repeated(eps0, rate, count, epsilon) <= delta
    assert repeated(eps0, rate, count, 0.985 * epsilon) > delta


@pytest.mark.parametrize(("eps", "least", "optimum"), [(1, 1.75, 1.766), (3, 3.22, 3.25), (8, 4.83, 4.865)])
def test_joint_em_may_have_this_range(eps: float, least: float, optimum: float) -> None:
    assert PLD.epsilon([Line(BoundedRange(least), JOINT_EM, 100)], 5e-5) <= eps
    assert PLD.epsilon([Line(BoundedRange(1.01 * optimum), JOINT_EM, 100)], 5e-5) > eps


@pytest.mark.parametrize(
    ("eps0", "rate", "count"),
    [(1e-6, 0.01, 300), (0.1, 1e-6, 10_000_000), (0.1, 1.0, 2), (1.9, 40 / 6920, 10_000), (7.4, 4 / 14732, 5000),
     (12.0, 0.3, 3), (20.0, 1.0, 40), (150.0, 0.01, 7)],
)  # fmt: skip
@pytest.mark.parametrize("delta", [1e-4, pytest.param(1e-11, marks=pytest.mark.slow)])
def test_it_is_never_worse_than_the_sum_of_one_releases_losses(
    eps0: float, rate: float, count: int, delta: float
) -> None:
    schedule = [Line(BoundedRange(eps0), rate, count)]
    epsilon, sum_of_all = PLD.epsilon(schedule, delta), max(each.epsilon(delta) for each in compositions(schedule))
    assert 0.0 <= epsilon <= sum_of_all
    if count > 50 and eps0 < 3 and sum_of_all > 0.01:
        assert epsilon < 0.93 * sum_of_all


@pytest.mark.parametrize("pairs", [RangePairs(1.2), ThresholdPairs(3.0)])
def test_curves_do_not_depend_on_the_trials_that_are_worked_on_at_once(
    pairs: PairFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: a ledger knows a plan by its numbers."""

    def curve(at_once: int) -> FloatArray:
        monkeypatch.setattr(adaptive, "_AT_ONCE", at_once)
        found: FloatArray = adaptive._curves.__wrapped__(pairs, 0.2, 6, 1e5)[6]
        return found

    whole = curve(1 << 40)
    assert whole.max() > 0.01
    for at_once in (1, 20_000, 1 << 16):
        assert np.array_equal(curve(at_once), whole)


def test_ten_thousand_releases_take_blocks() -> None:
    """Their size follows from a count of operations: the same plan has the same parts on every machine."""
    pairs, rate = RangePairs(1.9), 40 / 6920
    adaptive._curves.cache_clear()
    adaptive._pair.cache_clear()
    parts = adaptive.blocks(pairs, rate, 10_000, "remove")
    size = max(
        n
        for n in (2**i for i in range(12))
        if adaptive.operations(pairs, rate, n, adaptive.OPERATIONS) <= adaptive.OPERATIONS
    )
    assert size >= 64
    blocks, rest = divmod(10_000, size)
    assert [count for _, count in parts] == [blocks] + [1] * rest.bit_count()


def test_blocks_are_bounds_too_and_lose_little(monkeypatch: pytest.MonkeyPatch) -> None:
    line, delta = Line(BoundedRange(1.766), JOINT_EM, 100), 5e-5
    found = []
    for limit in (1e7, 2e6, 2e5, 1e3):
        monkeypatch.setattr(adaptive, "OPERATIONS", limit)
        adaptive._largest_block.cache_clear()
        found.append(PLD.epsilon([line], delta))
    assert found == sorted(found)
    assert found[1] < 1.03 * found[0] < 0.9 * found[-1]
    assert found[-1] == pytest.approx(max(each.epsilon(delta) for each in compositions([line])), rel=1e-9)
    assert repeated(1.766, JOINT_EM, 100, found[1]) <= delta
    adaptive._largest_block.cache_clear()


@pytest.mark.parametrize(("eps0", "rate"), [(0.5, 0.1), (1.2, 0.3), (3.777, 0.004), (8.0, 0.001)])
def test_curves_of_one_grid_are_bounds_too_and_lose_little(eps0: float, rate: float) -> None:
    """Those of all counts of a line, as receipts show them, beside curves on grids of their own."""
    delta = 1e-6
    for count in (5, 6, 8, 14, 20, 32):
        line = Line(BoundedRange(eps0), rate, count)
        finest, shared = PLD.epsilon([line], delta), PLDAccountant(1 << 19, shared=True).epsilon([line], delta)
        assert finest * (1 - 5e-4) <= shared <= finest * (1 + 2e-3) + 1e-5
        if count < 15:
            assert repeated(eps0, rate, count, shared) <= delta
    wide = Line(BoundedRange(100.0), 1.0, 8)  # no curve
    shared = PLDAccountant(1 << 19, shared=True).epsilon([wide], delta)
    assert shared == pytest.approx(PLD.epsilon([wide], delta), rel=1e-3)


# -- several lines -----------------------------------------------------------------------------------------------------


def in_any_order(lines: list[tuple[float, float]], counts: tuple[int, ...], pairs: int) -> Curve:
    """The best adversary who also chooses, after every answer, which line comes next."""
    if sum(counts) == 1:
        eps0, rate = lines[counts.index(1)]
        return one(eps0, rate, "remove")
    options = []
    for i, count in enumerate(counts):
        if count:
            rest = in_any_order(lines, (*counts[:i], count - 1, *counts[i + 1 :]), pairs)
            options.append(after_one_more(rest, *lines[i], "remove", pairs))
    return lambda a: np.maximum.reduce([option(a) for option in options])


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_two_lines_in_any_order_stay_below_the_pairs_of_both(counts: tuple[int, int]) -> None:
    lines = [(2.0, 0.4), (0.8, 1.0)]
    schedule = [Line(BoundedRange(eps0), rate, n) for (eps0, rate), n in zip(lines, counts, strict=True)]
    both = Composition([part for line in schedule for part in line.parts("remove")])
    tree = in_any_order(lines, counts, 24 if sum(counts) > 3 else 60)
    for epsilon in (0.0, 0.4, 0.9, 1.6):
        true = float(tree(np.array(math.exp(epsilon))))
        assert true <= both.delta(epsilon) <= 1.25 * true + 1e-3


def test_a_line_beside_a_gaussian_costs_less_than_the_sum_of_losses() -> None:
    gaussian, ranges = Line(Gaussian(2.0), 0.1, 30), Line(BoundedRange(0.8), 0.1, 100)
    epsilon = PLD.epsilon([gaussian, ranges], 1e-5)
    assert epsilon < 0.95 * max(each.epsilon(1e-5) for each in compositions([gaussian, ranges]))
    assert epsilon > PLD.epsilon([gaussian], 1e-5)


def test_equal_lines_are_one_line() -> None:
    """Two plans of the same mechanism in one total: an owner's releases are of one kind."""
    whole, half = Line(BoundedRange(1.5), 0.1, 60), Line(BoundedRange(1.5), 0.1, 30)
    assert PLD.epsilon([half, half], 1e-5) == PLD.epsilon([whole], 1e-5)


# -- moments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("eps0", "rate"), [*CASES, (1e-3, 0.5), (20.0, 1e-3)])
@pytest.mark.parametrize("order", [1.5, 2.0, 9.0, 60.0, -0.5, -3.0, -40.0])
def test_moments_are_those_of_the_best_of_many_pairs(eps0: float, rate: float, order: float) -> None:
    u, v, of_u = ratios(eps0, rate, np.linspace(1e-9, eps0, 20_000))
    top = order * np.log(u[0] if order > 0 else v[-1])
    logs = np.logaddexp(np.log(of_u) + order * np.log(u), np.log1p(-np.minimum(of_u, 1 - 1e-16)) + order * np.log(v))
    best = float(logs.max())
    assert top > 0
    assert best - 1e-12 <= log_moment(eps0, rate, order) <= best * (1 + 3e-4) + 1e-13


# -- what the bound rests on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-9, 1e-3, 0.3, 0.5, 0.9, 1 - 1e-6, 1 - 1e-9, 1 - 1e-12, 1 - 2.0**-53])
def test_the_logarithm_of_a_ratio_is_as_exact_as_its_bound_says(rate: float) -> None:
    """Against 60 digits. For q near 1 the two terms of a ratio below 1 cancel in log1p(q (e^l - 1)), up to 5e-10."""
    eps0, tau = 20.0, np.linspace(0.0, 20.0, 161)
    trials = adaptive.RangeTrials(eps0, rate, tau)
    with localcontext(prec=60):
        for found, losses in ((trials.log_u, [Decimal(eps0) - Decimal(t) for t in tau]), (trials.log_v, tau)):
            sign = 1 if found is trials.log_u else -1
            for log_r, loss in zip(found, losses, strict=True):
                exact = (1 + Decimal(rate) * ((sign * Decimal(loss)).exp() - 1)).ln()
                assert abs(Decimal(float(log_r)) - exact) <= Decimal(adaptive._RATIO_ERROR) / 4 * abs(exact)


@pytest.mark.parametrize(("intervals", "fineness"), [(3, 0.01), (32, 0.8), (3, 0.8)])
def test_coarse_grids_and_few_trials_are_bounds_as_well(
    intervals: int, fineness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three intervals of tau miss the best pair by far, and the bound between trials covers that; chords cover a step
    as wide as a loss."""
    eps0, rate = 2.0, 0.3
    a = np.exp(np.array([-0.3, -0.1, 0.0, 0.1, 0.3, 0.6, 1.0, 1.5]))
    monkeypatch.setattr(adaptive, "_INTERVALS", intervals)
    monkeypatch.setattr(adaptive, "_FINENESS", 64 * fineness)  # it is less for few releases
    monkeypatch.setattr(adaptive, "_COARSEST", fineness)
    cached = (adaptive._curves, adaptive._pair, adaptive._moments)
    for each in cached:
        each.cache_clear()
    found = [bound(eps0, rate, 3, direction, a) for direction in DIRECTIONS]
    for each in cached:
        each.cache_clear()
    for direction, claimed in zip(DIRECTIONS, found, strict=True):
        tree = after_one_more(one(eps0, rate, direction), eps0, rate, direction, 90)
        assert (after_one_more(tree, eps0, rate, direction, 90)(a) <= claimed + 1e-12).all()


def test_what_lies_beyond_the_ends_of_a_grid_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid that ends where delta is about e^-1: its last value goes on, and counts as an infinite loss."""
    eps0, rate = 2.0, 0.3
    cached = (adaptive._curves, adaptive._pair, adaptive._moments)
    monkeypatch.setattr(adaptive, "_TAIL", 1.0)
    below, above, step = adaptive._grid(RangePairs(eps0), rate, 3, adaptive.OPERATIONS)
    a = np.exp(np.array([1.5 * above, *(above * np.linspace(0, 1, 9)), *(-below * np.linspace(0, 1, 9))]) * step)
    for each in cached:
        each.cache_clear()
    found = [bound(eps0, rate, 3, direction, a) for direction in DIRECTIONS]
    pair = adaptive._pair(RangePairs(eps0), rate, 3, adaptive.OPERATIONS, 3, "remove")
    for each in cached:
        each.cache_clear()
    assert pair.infinity > 1e-3
    for direction, claimed in zip(DIRECTIONS, found, strict=True):
        tree = after_one_more(one(eps0, rate, direction), eps0, rate, direction, 60)
        assert (after_one_more(tree, eps0, rate, direction, 60)(a) <= claimed + 1e-12).all()
