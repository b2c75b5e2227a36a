"""`NoisyMedian` and `NoisyMean`: their exact laws, what one output moves, and every output that is no number."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from exact import Law, added, check_profile, gaussian_masses, hockey_stick, law, log_range, mixture, replaced
from langchain_core.messages import AIMessage
from numpy.typing import NDArray

from langchain_dpicl import InvalidParameter, NoisyMean, NoisyMedian
from langchain_dpicl.aggregators import numbers
from langchain_dpicl.aggregators.numbers import STEPS
from langchain_dpicl.privacy import MECHANISMS, Gaussian, SecureRandomness, lattice_multiplier
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.mechanisms import mean_sigma
from langchain_dpicl.private.boundary import ABSTAIN

EPS0, POINTS = 1.3, 4
DOMAIN: tuple[object, ...] = (*range(POINTS), ABSTAIN)
NOTHING = None
"""An output that is not there."""

Outputs = tuple[object, ...]


@cache
def median_law(outputs: Outputs, own_calls: bool) -> Law:
    """The exact law of the median of these places, by the code itself."""
    median = NoisyMedian(0, POINTS - 1).under("median", Crowd(4, 3.0, own_calls))
    counted = [output for output in outputs if output is not NOTHING]
    return law(lambda randomness: median.aggregate(counted, EPS0, randomness))


@pytest.mark.parametrize("places", [(), (1,), (0, 3), (1, 1, 2), (0, 0, 0, 3), (2, 2, 2, 2, 2)])
@pytest.mark.parametrize("own_calls", [False, True])
def test_a_median_has_the_law_of_its_definition(places: tuple[int, ...], own_calls: bool) -> None:
    """exp(-r max(0, B - n/2, A - n/2)) at every grid point, whatever the code groups together."""
    rate, half = EPS0 if own_calls else EPS0 / 2, len(places) / 2
    losses = [
        max(0.0, sum(place < g for place in places) - half, sum(place > g for place in places) - half)
        for g in range(POINTS)
    ]
    weights = np.exp(-rate * np.array(losses))
    found = median_law(places, own_calls)
    assert [found[g] for g in range(POINTS)] == pytest.approx(weights / weights.sum(), rel=1e-9)
    assert median_law((*places, ABSTAIN), own_calls) == pytest.approx(found), "half below and half above"


@pytest.mark.parametrize(
    ("pairs", "own_calls"),
    [(list(replaced((*DOMAIN, NOTHING), 3)), False), (list(added(DOMAIN, 5)), True)],
    ids=["replaced", "added"],
)
def test_a_medians_range_is_eps0_for_its_neighbours_and_reached(
    pairs: list[tuple[Outputs, Outputs]], own_calls: bool
) -> None:
    """Brute force over all places, abstentions, and outputs that are not there; and the profile, both ways."""
    laws = [(median_law(one, own_calls), median_law(other, own_calls)) for one, other in pairs]
    assert max(log_range(p, q) for p, q in laws) == pytest.approx(EPS0, rel=1e-9)
    profile = MECHANISMS["median"].of({"own_calls": float(own_calls)}).profile(EPS0)
    check_profile([*laws, *((q, p) for p, q in laws)], profile)


def test_the_rate_for_an_output_more_would_double_a_medians_range_if_outputs_are_replaced() -> None:
    found = [
        log_range(median_law(one, True), median_law(other, True)) for one, other in replaced((*DOMAIN, NOTHING), 3)
    ]
    assert max(found) == pytest.approx(2 * EPS0, rel=1e-9)


def test_a_grid_of_a_trillion_points_is_drawn_at_once_and_inside_the_bounds() -> None:
    median = NoisyMedian(-(10**12), 10**12, points=2 * 10**12 + 1)
    places = [median.encode(value) for value in [5] * 20]
    bound = median.under("median", Crowd(20, 20.0, own_calls=True))
    assert {bound.aggregate(places, 50.0, SecureRandomness()) for _ in range(20)} == {5}  # e^-470 to miss it once
    far = {bound.aggregate([], 50.0, SecureRandomness()) for _ in range(20)}
    assert len(far) == 20, "nobody answers: uniform, and two of 20 alike with a probability below 1e-9"
    assert all(abs(number) <= 10**12 for number in far)


# -- means -------------------------------------------------------------------------------------------------------------


class Told:
    """Adds no noise, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, int]] = []

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        self.asked.append((sigma, size))
        return np.zeros(size, np.int64)


def test_two_shares_of_an_output_lie_a_root_of_two_apart_at_most_and_have_norm_one_at_most() -> None:
    mean = NoisyMean(-3.0, 5.0)
    vectors = [np.array([p, STEPS - p]) for p in map(mean.encode, (-math.e, -3, -1e300, 0.1, 1 / 3, 2, 4.999, 5, 1e9))]
    assert max(int(v @ v) for v in vectors) == STEPS**2, "in whole numbers"
    moves = [int((v - w) @ (v - w)) for v, w in itertools.permutations(vectors, 2)]
    assert max(moves) == 2 * STEPS**2


@pytest.mark.parametrize("own_calls", [False, True])
def test_a_mean_is_accounted_with_what_an_output_moves(own_calls: bool) -> None:
    sigma = 0.8
    mean, told = NoisyMean(0, 10).under("mean", Crowd(4, 4.0, own_calls)), Told()
    randomness: Any = told
    assert mean.aggregate([STEPS, STEPS // 2, 0, ABSTAIN], sigma, randomness) == 5
    assert told.asked == [(sigma * STEPS, 2)]
    moved = 1.0 if own_calls else 2**0.5
    right = Gaussian(lattice_multiplier(sigma * STEPS, moved * STEPS))
    epsilons = np.array([-1.0, 0.0, 0.5, 1.0, 3.0])
    profile = MECHANISMS["mean"].of({"own_calls": own_calls, **mean.options}).profile(sigma)
    assert profile.delta(epsilons) == pytest.approx(right.delta(epsilons), rel=1e-12)
    assert profile.delta(epsilons) == pytest.approx(Gaussian(sigma / moved).delta(epsilons), rel=1e-3)


COARSE, SIGMA, RATE = 8, 0.5, 0.3
"""A lattice that can be enumerated, the least noise that a multiplier is proved for on it, and a rate."""
SAID: tuple[object, ...] = (0, COARSE, ABSTAIN)


class Given(SecureRandomness):
    """Draws this noise."""

    def __init__(self, noise: tuple[int, int]) -> None:
        self.noise = noise

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        assert (sigma, size) == (SIGMA * COARSE, 2)
        return np.array(self.noise)


@cache
def mean_law(outputs: Outputs, expected: float) -> Law:
    """The exact law of the mean of these places, by the code itself on a coarser lattice. Their order counts nothing.

    Of many ``expected`` outputs the release has all of the noisy sums' difference; of one it mostly has their ratio.
    """
    if outputs != (ordered := tuple(sorted(outputs, key=repr))):
        return mean_law(ordered, expected)
    found, masses = defaultdict[Hashable, float](float), gaussian_masses(SIGMA * COARSE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbers, "STEPS", COARSE)
        patch.setattr(NoisyMean, "steps", COARSE)
        mean = NoisyMean(0.0, 1.0).under("mean", Crowd(4, expected))
        for (i, p), (j, q) in itertools.product(enumerate(masses, -(len(masses) // 2)), repeat=2):
            found[mean.aggregate(outputs, SIGMA, Given((i, j)))] += p * q
    return found


def mean_profile(own_calls: bool) -> Gaussian:
    return Gaussian(lattice_multiplier(SIGMA * COARSE, (1.0 if own_calls else 2**0.5) * COARSE))


@pytest.mark.parametrize("own_calls", [False, True], ids=["replaced", "added"])
def test_a_mean_keeps_its_profile_before_and_after_amplification(own_calls: bool) -> None:
    """Brute force over values at both bounds, between which all others lie, and over abstentions."""
    pairs, expected = (added(SAID[:2], 2), 1.0) if own_calls else (replaced(SAID, 2), 100.0)
    laws = [(mean_law(one, expected), mean_law(other, expected)) for one, other in pairs]
    profile, epsilons = mean_profile(own_calls), (0.0, 0.5, 2.0, 4.0)
    check_profile([*laws, *((q, p) for p, q in laws)], profile, epsilons=epsilons)
    mixed = [(mixture([(1 - RATE, absent), (RATE, present)]), absent) for present, absent in laws]
    check_profile(mixed, profile.subsample(RATE), "remove", epsilons=epsilons)
    check_profile([(q, p) for p, q in mixed], profile.subsample(RATE), "add", epsilons=epsilons)


def test_a_means_profile_is_reached_and_that_of_an_output_more_is_broken_if_outputs_are_replaced() -> None:
    ends = mean_law((0,), 100.0), mean_law((COARSE,), 100.0)
    claimed = float(mean_profile(False).delta(np.array([2.0]))[0])
    assert claimed * 0.8 < hockey_stick(*ends, 2.0) <= claimed
    with pytest.raises(AssertionError, match="is claimed"):
        check_profile([ends], mean_profile(True))


def test_a_mean_that_weighs_as_much_as_a_range_never_has_less_noise() -> None:
    for eps0 in (1e-6, 0.3, 4.0, 100.0):
        for own in (False, True):
            assert mean_sigma(eps0, own) >= 2 * (1 if own else 2**0.5) / eps0 or mean_sigma(eps0, own) == 0.11


def test_the_number_of_values_divides_a_mean_and_few_lie_nearer_to_the_middle() -> None:
    mean, randomness = NoisyMean(0, 100).under("mean", Crowd(20, 20.0, True)), Told()
    quiet: Any = randomness
    assert [mean.aggregate([mean.encode(80)] * n, 0.5, quiet) for n in (0, 1, 5, 10, 20, 30)] == [
        50,
        53,
        65,
        80,
        80,
        80,
    ]


# -- reading -----------------------------------------------------------------------------------------------------------


class Hostile(int):
    def __int__(self) -> int:
        raise RuntimeError("private")


@pytest.mark.parametrize(
    ("output", "value"),
    [
        (7, 7), (7.4, 7), (np.int64(7), 7), (np.float32(7.0), 7), (Decimal("7.2"), 7), (Fraction(13, 2), 7),
        ("7", 7), ("about 7 mg", 7), (AIMessage("It is 7."), 7), ("7.0 or 7", 7), ("+7", 7),
        (-5, 0), (10**400, 10), ("1e300", 10), ("1,200", 10), (1e308, 10),
    ],
)  # fmt: skip
def test_numbers_are_read_and_clipped(output: object, value: int) -> None:
    assert NoisyMedian(0, 10).encode(output) == value


@pytest.mark.parametrize(
    "output",
    [
        True, False, np.bool_(True), math.nan, math.inf, -math.inf, Decimal("NaN"), None, "", "none", "3 or 4", "3-4",
        "2026-03-31", "9" * 5000, [7], {"n": 7}, b"7", 1j, Hostile(7), date(2026, 3, 31),
    ],
)  # fmt: skip
def test_what_is_no_number_raises_and_so_abstains(output: object) -> None:
    for reader in (NoisyMedian(0, 10), NoisyMedian(0.0, 10.0), NoisyMean(0, 10)):
        with pytest.raises((ValueError, TypeError, OverflowError, RuntimeError)):
            reader.encode(output)


def test_dates_are_read_as_days() -> None:
    first, last = date(2026, 3, 1), date(2026, 3, 31)
    median = NoisyMedian(first, last)
    said: Sequence[object] = (date(2026, 3, 5), datetime(2026, 3, 5, 23), "on 2026-03-05", "2026-03-05T10:00")
    assert [median.encode(each) for each in said] == [4] * 4
    assert [median.encode(each) for each in (date(1, 1, 1), "2030-01-01")] == [0, 30]
    for bad in ("2026-02-30", 5, "5", "2026-03-05 to 2026-03-06", True):
        with pytest.raises((ValueError, TypeError)):
            median.encode(bad)
    released = median.under("median", Crowd(9, 9.0, True)).aggregate([4] * 9, 60.0, SecureRandomness())
    assert (released, type(released), median.dump(released)) == (date(2026, 3, 5), date, "2026-03-05")
    assert median.load("2026-03-05", {}) == released


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.0, 1e-300), (-1.7e308, 1.7e308), (5e-324, 1e-323), (0, 10**30)])
def test_every_point_is_released_inside_the_bounds_and_read_as_itself(low: float, high: float) -> None:
    median = NoisyMedian(low, high, points=2)
    released = [median.at(Fraction(place, median.steps)) for place in (0, median.steps)]
    assert released == [low, high]
    assert [median.encode(each) for each in released] == [0, median.steps]
    assert low <= NoisyMean(low, high).at(Fraction(1, 3)) <= high


@pytest.mark.parametrize(
    ("low", "high", "named"),
    [
        (0, math.inf, "high"), (-math.inf, 0, "low"), (math.nan, 1, "low"), (1, 1, "high"), (2.0, 1.0, "high"),
        (True, 5, "low"), (None, 1, "low"), ("0", 1, "low"), (0, date(2026, 1, 1), "high"),
        (date(2026, 1, 1), 5, "high"),
        (datetime(2026, 1, 1), datetime(2026, 1, 2), "low"),
    ],
)  # fmt: skip
def test_bad_bounds_are_named(low: Any, high: Any, named: str) -> None:
    for kind in (NoisyMedian, NoisyMean):
        with pytest.raises(InvalidParameter) as caught:
            kind(low, high)
        assert caught.value.parameter == named


def test_a_grid_has_a_point_for_each_whole_number_at_most() -> None:
    assert [NoisyMedian(0, 10).points, NoisyMedian(0, 10**6).points, NoisyMedian(0.0, 1).points] == [11, 1001, 101]
    for points in (1, 12, 2.5, True):
        with pytest.raises(InvalidParameter, match="points"):
            NoisyMedian(0, 10, points=points)  # type: ignore[arg-type]
