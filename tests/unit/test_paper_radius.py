"""The paper's mixing weights, which stand beside ours for comparison."""

from __future__ import annotations

import numpy as np
import pytest
from paper_radius import ball_terms, claimed_beta
from scipy.special import softmax

from langchain_dpicl.decoding.answer import STEP

NUMBERS = np.random.default_rng(1)


def renyi(p: np.ndarray, q: np.ndarray, order: int) -> float:
    return float(np.log((p**order * q ** (1 - order)).sum()) / (order - 1))


def test_a_row_is_mixed_as_far_as_the_ball_and_the_cap_allow() -> None:
    public, rows = NUMBERS.normal(size=30), NUMBERS.normal(size=(6, 30)) * np.array([[0.01], [0.2], [1], [2], [4], [8]])
    beta, order, cap = 0.1, 5, 1.5
    added, weights = ball_terms(public + rows, public, beta=beta, order=order, temperature=1.0, cap=cap)
    assert weights[0] == cap
    assert np.allclose(added * STEP, weights[:, None] * rows, atol=STEP)
    for row, weight in zip(rows, weights, strict=True):
        mixed, zero = softmax(public + weight * row), softmax(public)
        reach = max(renyi(mixed, zero, order), renyi(zero, mixed, order))
        assert reach <= beta * order * (1 + 1e-6)
        assert weight == cap or reach == pytest.approx(beta * order, rel=1e-4)


@pytest.mark.parametrize(("records", "max_tokens", "beta", "order"), [(14_732, 50, 0.081, 14), (42_061, 25, 0.115, 15)])
def test_the_claimed_ball_is_that_of_the_papers_table_5(records: int, max_tokens: int, beta: float, order: int) -> None:
    """SAMSum and E2E at epsilon 1: theorem A.4 with the divergence 4 * beta * order at every order, 100 answers."""
    found, at = claimed_beta(1.0, 1 / records, 4 / records, 100 * max_tokens)
    assert (at, found) == (order, pytest.approx(beta, abs=1e-3))


def test_the_claimed_ball_grows_with_epsilon_and_shrinks_with_tokens() -> None:
    claims = [claimed_beta(epsilon, 1e-5, 1e-3, 1000)[0] for epsilon in (0.5, 1, 2, 4)]
    assert claims == sorted(claims)
    assert claimed_beta(1, 1e-5, 1e-3, 100) > claimed_beta(1, 1e-5, 1e-3, 10_000)


def test_two_rows_in_one_ball_can_lie_further_apart_than_the_paper_accounts_for() -> None:
    """Its accounting takes 4 * beta * order = 6.84; the two laws below differ by more at one token."""
    beta, order = 0.342, 5
    public = np.log(np.array([0.5, 0.5 - 1e-4, 1e-4]))
    far = np.array([[0.0, 0.0, 30.0], [0.0, 0.0, -30.0]])
    added, _ = ball_terms(public + far, public, beta=beta, order=order, temperature=1.0, cap=1.5)
    high, low = (softmax(public + row * STEP) for row in added)
    assert np.abs(np.log(high / low)).max() > 4 * beta * order
