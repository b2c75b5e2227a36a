"""One token from clipped terms: `langchain_dpicl.decoding.answer`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import chisquare

from langchain_dpicl.decoding.answer import STEP, base_scores, candidates, clipped_terms, draw, mixing_weights
from langchain_dpicl.privacy.noise import SecureRandomness

FALSE_ALARM = 1e-8

anything = st.floats(width=32, allow_nan=True, allow_infinity=True)
finite = st.floats(-(2.0**127), 2.0**127, width=32)


@st.composite
def rows(draw_from: st.DrawFn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """One-shot rows with anything in them, and finite zero-shot logits; often with ties."""
    width = draw_from(st.integers(1, 6))
    few = st.sampled_from([0.0, 1.0, -1.0, 50.0, -50.0, 3.4e38, -3.4e38, 1e-45, math.inf, -math.inf, math.nan])
    some = st.one_of(anything, few)
    one_shot = draw_from(hnp.arrays(np.float32, (draw_from(st.integers(1, 5)), width), elements=some))
    zero_shot = draw_from(hnp.arrays(np.float32, (width,), elements=finite))
    return one_shot.astype(np.float64), zero_shot.astype(np.float64)


bounds = st.floats(1e-6, 100.0)
temperatures = st.floats(0.01, 100.0)
caps = st.floats(0.0, 100.0)


# -- terms -------------------------------------------------------------------------------------------------------------


@given(rows(), bounds, temperatures, caps)
@settings(max_examples=300, deadline=None)
def test_the_range_of_every_term_is_at_most_the_bound_exactly(
    given_rows: Any, bound: float, temperature: float, cap: float
) -> None:
    """Whatever the model says: infinities, NaN, ties, numbers whose difference overflows, a single candidate."""
    one_shot, zero_shot = given_rows
    terms = clipped_terms(one_shot, zero_shot, bound=bound, temperature=temperature, cap=cap)
    assert terms.dtype == np.int64
    assert terms.shape == one_shot.shape
    assert np.all(terms.min(axis=1) == 0)
    assert all(int(reach) * STEP <= bound for reach in np.ptp(terms, axis=1)), "both sides are exact in floats"


def test_rounding_does_not_lift_a_term_above_the_bound() -> None:
    """At a bound just below a whole number of steps, weight times range rounds up to that number one time in ten."""
    bound = float(np.nextafter(1.0, 0.0))
    for reach in np.random.default_rng(0).uniform(1.0, 10.0, 500):
        terms = clipped_terms(np.array([[0.0, reach]]), np.zeros(2), bound=bound, temperature=1.0, cap=1.5)
        assert terms.tolist() == [[0, 2**20 - 1]]


@given(rows(), bounds, temperatures, caps)
@settings(max_examples=100, deadline=None)
def test_a_term_does_not_know_its_neighbours(given_rows: Any, bound: float, temperature: float, cap: float) -> None:
    one_shot, zero_shot = given_rows
    limits = {"bound": bound, "temperature": temperature, "cap": cap}
    together = clipped_terms(one_shot, zero_shot, **limits)
    alone = [clipped_terms(row[None], zero_shot, **limits)[0] for row in one_shot]
    assert np.array_equal(together, np.stack(alone))
    assert np.array_equal(clipped_terms(one_shot[::-1], zero_shot, **limits), together[::-1])


@pytest.mark.parametrize(
    ("reach", "bound", "cap", "weight"),
    [
        (4.0, 4.0, 1.5, 1.0),
        (8.0, 4.0, 1.5, 0.5),
        (2.0, 3.0, 1.5, 1.5),
        (1.0, 3.0, 1.5, 1.5),
        (0.0, 3.0, 1.5, 1.5),
        (1.0, 3.0, 0.0, 0.0),
        (math.inf, 3.0, 1.5, 0.0),
        (math.nan, 3.0, 1.5, 0.0),
        (1e-320, 3.0, 1.5, 1.5),
    ],
)
def test_the_weight_is_the_largest_that_the_bound_and_the_cap_allow(
    reach: float, bound: float, cap: float, weight: float
) -> None:
    difference = np.array([[0.0, reach, reach / 2]])
    assert mixing_weights(difference, bound, cap)[0] == weight
    terms = clipped_terms(difference, np.zeros(3), bound=bound, temperature=1.0, cap=cap)
    expected = weight * difference[0] if weight else np.zeros(3)
    assert np.allclose(terms[0] * STEP, expected, atol=STEP, rtol=0)


def test_a_row_that_says_something_impossible_has_no_part() -> None:
    one_shot = np.array([[0.0, math.nan, 1.0], [0.0, -math.inf, 1.0], [math.inf, 0.0, 0.0], [math.inf] * 3])
    assert not clipped_terms(one_shot, np.zeros(3), bound=2.0, temperature=1.0, cap=1.5).any()


def test_a_shift_of_a_row_changes_nothing() -> None:
    """Normalised or not: the model need not say."""
    row, zero_shot = np.array([[1.0, -2.0, 0.5]]), np.array([0.25, 0.5, -1.0])
    limits = {"bound": 2.0, "temperature": 1.0, "cap": 1.5}
    assert np.array_equal(clipped_terms(row, zero_shot, **limits), clipped_terms(row + 64.0, zero_shot - 8.0, **limits))


def test_the_temperature_is_inside_the_bound() -> None:
    """Half the temperature doubles the differences, and no term's range."""
    row, zero_shot = np.array([[3.0, 0.0, -3.0], [1.0, 0.0, 0.0]]), np.zeros(3)
    cool = clipped_terms(row, zero_shot, bound=2.0, temperature=0.5, cap=1.0)
    assert np.array_equal(cool, clipped_terms(2 * row, zero_shot, bound=2.0, temperature=1.0, cap=1.0))
    assert np.ptp(cool, axis=1).max() * STEP == 2.0
    assert np.array_equal(base_scores(zero_shot + row[0], 4.0, 0.5), base_scores(zero_shot + row[0], 8.0, 1.0))


# -- candidates and base -----------------------------------------------------------------------------------------------


@given(hnp.arrays(np.float32, st.integers(1, 12), elements=st.one_of(anything, st.sampled_from([0.0, 1.0]))), st.data())
@settings(max_examples=200, deadline=None)
def test_candidates_are_the_likeliest_tokens_ties_by_id(zero_shot: Any, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(zero_shot)))
    barred = data.draw(st.sets(st.integers(0, len(zero_shot) - 1)))
    allowed = [i for i in range(len(zero_shot)) if i not in barred and math.isfinite(zero_shot[i])]
    expected = sorted(sorted(allowed, key=lambda i: (-float(zero_shot[i]), i))[:top_k])
    assert candidates(zero_shot, top_k, barred).tolist() == expected


def test_the_base_is_on_the_lattice_and_below_its_best() -> None:
    scores = base_scores(np.array([0.0, -1.0, -3.4e38, 3.4e38]), 4.0, 2.0)
    assert scores.dtype == np.int64
    assert scores.max() == scores[3] == 0
    assert base_scores(np.array([0.0, -1.0]), 4.0, 2.0).tolist() == [0, -2 * 2**20]


# -- the draw ----------------------------------------------------------------------------------------------------------


def test_a_token_comes_as_often_as_its_score_says() -> None:
    """Chi-square of 4000 draws at weights 1 : e^-1 : e^-2.5. False alarms: 1e-8."""
    nats = np.array([-1.0, 0.0, -2.5])
    seen = np.bincount([draw((nats / STEP).astype(np.int64), SecureRandomness()) for _ in range(4000)], minlength=3)
    weights = np.exp(nats)
    assert chisquare(seen, 4000 * weights / weights.sum()).pvalue > FALSE_ALARM


def test_one_candidate_is_always_drawn() -> None:
    term = clipped_terms(np.array([[1e30]]), np.zeros(1), bound=1.0, temperature=1.0, cap=1.5)
    assert not term.any(), "with one candidate there is nothing to tell"
    assert draw(np.array([-5], np.int64), SecureRandomness()) == 0


# -- why not a Rényi ball ----------------------------------------------------------------------------------------------


def renyi(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any], order: float) -> float:
    return float(np.log((p**order * q ** (1 - order)).sum()) / (order - 1))


def test_the_papers_ball_does_not_bound_what_one_owner_changes() -> None:
    """At order 5, beta 0.342, its ball around the public output p0 is D(p || p0), D(p0 || p) <= order * beta = 1.71,
    and it claims D <= 4 * 1.71 = 6.84 between any two outputs in it. These two are 9.18 apart.

    The Rényi divergence obeys no triangle inequality at one order: a token of public probability 1e-10 can be raised
    to 2e-8 by one and lowered to 6e-14 by the other. A bound on the range has no such corner.
    """
    order, beta, rare = 5.0, 0.342, 1e-10
    radius = order * beta
    highest = math.exp((4 * radius + 4 * math.log(rare)) / 5) * 0.999
    lowest = math.exp((5 * math.log(rare) - 4 * radius) / 4) * 1.001
    public, high, low = (np.array([p, 1 - p]) for p in (rare, highest, lowest))
    for output in (high, low):
        assert renyi(output, public, order) <= radius
        assert renyi(public, output, order) <= radius
    assert renyi(high, low, order) == pytest.approx(9.18, abs=0.01)
    assert renyi(high, low, order) > 4 * radius == pytest.approx(6.84)
    terms = clipped_terms(np.log(np.stack([high, low])), np.log(public), bound=radius, temperature=1.0, cap=1.5)
    assert np.ptp(terms, axis=1).max() * STEP <= radius
