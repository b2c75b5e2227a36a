"""The paper's mixing weights, which stand beside ours for comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paper_radius import (
    BETA,
    ORDER,
    apart_in_ball,
    apart_in_product,
    ball_terms,
    claimed,
    claimed_beta,
    ends_of_ball,
    main,
)
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


def test_two_outputs_in_one_ball_lie_further_apart_than_the_paper_accounts_for() -> None:
    """The counterexample of the design: at order 5, beta .342 and a token of public probability 1e-10, 9.18 where the
    paper takes at most 6.84. The ends are inside the ball by exact arithmetic on the laws, both ways."""
    assert (radius := ORDER * BETA) == pytest.approx(1.71)
    assert claimed() == pytest.approx(6.84)
    public, high, low = np.exp(ends_of_ball(1e-10))
    for end in (high, low):
        assert 1.70 < max(renyi(end, public, ORDER), renyi(public, end, ORDER)) <= radius + 1e-5
    assert renyi(high, low, ORDER) == pytest.approx(9.18, abs=0.01)
    assert apart_in_ball(1e-10) == pytest.approx(9.18, abs=0.01)


def test_one_order_does_not_bound_all() -> None:
    """The rarer the token, the further apart, without end; and at twice the order an end leaves the ball."""
    found = [apart_in_ball(public) for public in (1e-4, 1e-10, 1e-20)]
    assert found == pytest.approx([5.72, 9.18, 14.93], abs=0.01)
    public, high, _ = np.exp(ends_of_ball(1e-10))
    assert renyi(high, public, 2 * ORDER) > 2 * ORDER * BETA


@pytest.mark.parametrize("experts", [2, 3, 4, 8])
def test_a_product_of_experts_does_not_add_up_for_more_than_one_shot(experts: int) -> None:
    """One expert is within 1.71 of the public law; in a product of them its owner makes 2.61."""
    assert apart_in_product(0.2, 1) == pytest.approx(ORDER * BETA, abs=0.01)
    assert apart_in_product(0.2, experts) == pytest.approx(2.61, abs=0.01)


@pytest.mark.parametrize(("experts", "apart"), [(2, 9.29), (3, 8.27), (4, 7.24)])
def test_an_expert_that_leaves_with_its_owner_passes_the_papers_bound(experts: int, apart: float) -> None:
    assert apart_in_product(1e-3, experts, leaves=True) == pytest.approx(apart, abs=0.01)
    assert apart > claimed()


def test_the_study_prints_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    printed = capsys.readouterr().out
    for words in ("claimed between two outputs 6.84", "1e-10: 9.18", "2: 2.61; 9.29"):
        assert words in printed


def test_nothing_of_the_package_knows_the_rule() -> None:
    import langchain_dpicl

    for path in Path(langchain_dpicl.__file__).parent.rglob("*.py"):
        assert "claimed_beta" not in (text := path.read_text("utf-8"))
        assert "ball_terms" not in text
