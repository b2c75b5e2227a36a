"""`audit/bounds.py`: the bound is what the statement says, and holds as often as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl.lab.audit.bounds import Region, choose_region, clopper_pearson, expected_bounds, lower_bounds


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 50), (7, 50), (50, 50), (3, 100_000), (99_999, 100_000)])
def test_the_intervals_are_scipys_exact_ones(k: int, n: int) -> None:
    low, high = clopper_pearson(k, n, 0.025)
    exact = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    assert float(low) == pytest.approx(exact.low, rel=1e-7, abs=1e-15)
    assert float(high) == pytest.approx(exact.high, rel=1e-7)


def lower_bound(hits: int, hit_trials: int, misfires: int, misfire_trials: int, *, delta: float) -> float:
    return float(lower_bounds(hits, misfires, (hit_trials, misfire_trials), delta, 0.95))


def test_the_bound_is_the_ratio_of_the_two_intervals_without_delta() -> None:
    low = stats.binomtest(300, 1000).proportion_ci(0.95, method="exact").low
    high = stats.binomtest(20, 800).proportion_ci(0.95, method="exact").high
    assert lower_bound(300, 1000, 20, 800, delta=0.01) == pytest.approx(math.log((low - 0.01) / high))


def test_delta_lowers_the_bound_and_nothing_falls_below_zero() -> None:
    bounds = [lower_bound(300, 1000, 20, 1000, delta=delta) for delta in (0.0, 0.05, 0.2, 0.25, 0.3)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[1] > 0.0
    assert bounds[-1] == 0.0
    assert lower_bound(0, 10, 0, 10, delta=0.0) == 0.0
    assert lower_bound(1, 1, 0, 1, delta=0.0) == 0.0


def response(epsilon: float, delta: float) -> tuple[float, float]:
    """The chances of a 1 with the owner and without, in randomised response that shows the truth with delta."""
    lie = (1.0 - delta) / (1.0 + math.exp(epsilon))
    return 1.0 - lie, lie


@pytest.mark.parametrize(("epsilon", "delta", "trials"), [(1.0, 0.0, 400), (2.0, 0.0, 60), (1.0, 0.1, 400)])
def test_the_bound_exceeds_a_known_epsilon_as_seldom_as_it_says(epsilon: float, delta: float, trials: int) -> None:
    """Region chosen by trials of their own, as the audit does. 1,000 audits; the binomial test of "at most 5 % exceed
    the truth" has a false-alarm probability below 1e-7 for each setting. The generator is fixed.

    It fails for bounds without intervals, which exceed the truth in half of all audits.
    """
    generator = np.random.default_rng(7)
    yes, no = response(epsilon, delta)
    exceeded = 0
    for _ in range(1000):
        chosen, counted = ((generator.random(trials) < yes, generator.random(trials) < no) for _ in ("choose", "count"))
        region, _ = choose_region(chosen[0].astype(float), chosen[1].astype(float), delta, 0.95)
        bound, _, _ = region.lower_bound(counted[0].astype(float), counted[1].astype(float), delta, 0.95)
        exceeded += bound > epsilon
    assert stats.binom.sf(exceeded - 1, 1000, 0.05) > 1e-7


def test_the_bound_comes_near_to_a_known_epsilon() -> None:
    """Ten standard errors below the truth at most: missed with a probability below 1e-20."""
    generator = np.random.default_rng(8)
    yes, no = response(2.0, 0.0)
    n = 50_000
    hits, misfires = generator.binomial(n, yes), generator.binomial(n, no)
    error = math.sqrt((1 - yes) / (yes * n) + (1 - no) / (no * n))
    bound = lower_bound(int(hits), n, int(misfires), n, delta=0.0)
    assert 2.0 - 10 * error < bound < 2.0 + 10 * error


def test_a_telling_high_statistic_is_an_event_of_the_data_with_the_owner() -> None:
    with_owner = np.r_[np.zeros(700), np.ones(300)]
    without = np.r_[np.zeros(990), np.ones(10)]
    region, bound = choose_region(with_owner, without, 0.0, 0.95)
    assert region == Region("remove", 1.0)
    assert region.lower_bound(with_owner, without, 0.0, 0.95) == (bound, 300, 10)


def test_a_telling_low_statistic_is_an_event_of_the_data_without_the_owner() -> None:
    with_owner = np.r_[np.zeros(10), np.ones(990)]
    without = np.r_[np.zeros(300), np.ones(700)]
    region, bound = choose_region(with_owner, without, 0.0, 0.95)
    assert region == Region("add", 1.0)
    assert region.lower_bound(with_owner, without, 0.0, 0.95) == (bound, 300, 10)


def test_where_nothing_is_proved_the_event_still_tells_the_two_apart() -> None:
    region, bound = choose_region(np.array([0.0, 1.0, 1.0]), np.array([0.0, 0.0, 1.0]), 0.0, 0.95)
    assert bound == 0.0
    assert region.threshold == 1.0


def test_what_is_expected_of_a_design_is_what_its_expected_counts_give() -> None:
    expected = expected_bounds([0.3], [0.02], releases=1, trials=1000, delta=0.01, confidence=0.95)
    assert expected[0] == pytest.approx(lower_bound(300, 1000, 20, 1000, delta=0.01))
