"""`evaluation.cost`: tokens and price by hand and by counting samples, and the noise of the plan at each rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from langchain_dpicl.errors import InfeasiblePlan, InvalidParameter
from langchain_dpicl.evaluation.cost import CostPoint, PromptTokens, cost_curve
from langchain_dpicl.evaluation.data import Row
from langchain_dpicl.evaluation.tasks import TASKS
from langchain_dpicl.privacy import LineRequest, PrivacyPlan

TREC, E2E = TASKS["trec"], TASKS["e2e"]
ROWS = [Row("Who is it ?", "Person", ("Person",)), Row("When ?", "Number", ("Number",))]
TOKENS = PromptTokens(instruction=20.0, example=30.0, query=10.0, answer=2.0)
OWNERS = 1000
PLAN: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "releases": 1000}
ASKED: dict[str, Any] = {"owners": OWNERS, "members": 10, "shots": 4, "price_in": 3.0, "price_out": 15.0, **PLAN}


def words(text: str) -> int:
    return len(text.split())


def test_the_parts_of_a_prompt_add_up_to_the_prompt() -> None:
    tokens = PromptTokens.measure(TREC, ROWS, ROWS, words)
    shape = TREC.shape
    prompts = [
        shape.prefix([(a.input, a.output), (b.input, b.output), (c.input, c.output)]) + shape.ask(query.input)
        for a in ROWS
        for b in ROWS
        for c in ROWS
        for query in ROWS
    ]
    assert tokens.prompt(3) == pytest.approx(sum(map(words, prompts)) / len(prompts))
    assert tokens.answer == 1.0


def test_an_example_counts_with_its_separator_and_an_answer_with_its_space() -> None:
    tokens = PromptTokens.measure(TREC, ROWS[:1], ROWS[1:], len)
    shape = TREC.shape
    assert tokens.prompt(1) == len(shape.prefix([(ROWS[0].input, ROWS[0].output)]) + shape.ask(ROWS[1].input))
    assert tokens.answer == len(" Number")


def test_a_generated_answer_is_never_longer_than_the_tasks() -> None:
    long, short = (Row("i", output, (output,)) for output in ("word " * 500, "word"))
    assert PromptTokens.measure(E2E, [short], [long, short], words).answer == (E2E.max_tokens + 1) / 2  # type: ignore[union-attr]


def test_nothing_to_measure_and_negative_counts_are_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"examples.*at least one row"):
        PromptTokens.measure(TREC, [], ROWS, words)
    with pytest.raises(InvalidParameter, match=r"queries.*at least one row"):
        PromptTokens.measure(TREC, ROWS, [], words)
    with pytest.raises(InvalidParameter, match="query=-1"):
        PromptTokens(1, 1, -1, 1)


def test_a_point_by_hand() -> None:
    """q = .08, so 80 owners: 20 members of 4, or 10 members of 8."""
    members, shots = cost_curve(TOKENS, [0.08], **ASKED)
    sigma = (
        PrivacyPlan.solve(epsilon=1.0, delta=1e-5, lines={"vote": LineRequest("vote", 0.08, 1000)})
        .lines["vote"]
        .parameter
    )
    assert members == CostPoint(
        rate=0.08,
        owners=80.0,
        grows="members",
        members=20,
        shots=4.0,
        prompt_tokens=100 * (20 * 30 + 80 * 30),
        answer_tokens=100 * 20 * 2,
        price=pytest.approx(100 * (20 * 30 + 80 * 30) * 3e-6 + 100 * 40 * 15e-6),
        parameter="sigma",
        noise=sigma,
    )
    assert shots == CostPoint(
        rate=0.08,
        owners=80.0,
        grows="shots",
        members=10,
        shots=8.0,
        prompt_tokens=100 * (10 * 30 + 80 * 30),
        answer_tokens=100 * 10 * 2,
        price=pytest.approx(100 * (10 * 30 + 80 * 30) * 3e-6 + 100 * 20 * 15e-6),
        parameter="sigma",
        noise=sigma,
    )


def test_the_expected_tokens_are_the_mean_of_samples() -> None:
    """Owners flip their own coins: over 20,000 releases the mean is within 6 standard errors (false alarm 2e-9)."""
    (_, point) = cost_curve(TOKENS, [0.04], **ASKED)
    sampled = np.random.default_rng(7).binomial(OWNERS, 0.04, size=20_000)
    read = point.members * (TOKENS.instruction + TOKENS.query) + sampled * TOKENS.example
    assert abs(read.mean() - point.prompt_tokens / 100) < 6 * read.std() / 20_000**0.5


def test_where_the_sizes_meet_both_points_are_one() -> None:
    members, shots = cost_curve(TOKENS, [40 / OWNERS], **ASKED)
    assert (members.members, members.shots) == (shots.members, shots.shots) == (10, 4.0)
    assert (members.prompt_tokens, members.price) == (shots.prompt_tokens, shots.price)


def test_a_higher_rate_costs_more_tokens_and_more_noise() -> None:
    points = cost_curve(TOKENS, [0.16, 0.001, 0.04, 0.04], **ASKED)
    assert [point.rate for point in points] == [0.001, 0.001, 0.04, 0.04, 0.16, 0.16]
    for grows in ("members", "shots"):
        curve = [point for point in points if point.grows == grows]
        assert curve[0].prompt_tokens < curve[1].prompt_tokens < curve[2].prompt_tokens
        assert curve[0].price < curve[1].price < curve[2].price
        assert curve[0].noise < curve[1].noise < curve[2].noise
    smallest = points[0]
    assert (smallest.members, smallest.shots) == (1, 1.0)  # one owner is sampled: one member with one shot


def test_the_plan_at_every_rate_keeps_its_promise() -> None:
    for point in cost_curve(TOKENS, [0.01, 0.1], **ASKED)[::2]:
        line = LineRequest("vote", point.rate, 1000)
        plan = PrivacyPlan.solve(epsilon=1.0, delta=1e-5, lines={"vote": line})
        assert plan.lines["vote"].parameter == point.noise
        assert plan.certified_epsilon <= 1.0


def test_public_calls_are_zero_shot_prompts_beside_the_members() -> None:
    without = cost_curve(TOKENS, [0.04], **ASKED)[0]
    beside = cost_curve(TOKENS, [0.04], **ASKED, public_calls=7)[0]
    assert beside.prompt_tokens - without.prompt_tokens == 100 * 7 * 30
    assert beside.answer_tokens - without.answer_tokens == 100 * 7 * 2
    assert beside.price - without.price == pytest.approx(100 * 7 * (30 * 3e-6 + 2 * 15e-6))


@pytest.mark.parametrize(("mechanism", "parameter"), [("joint-em", "eps0"), ("ptr", "sigma"), ("embedding", "sigma")])
def test_other_mechanisms(mechanism: str, parameter: str) -> None:
    low, _, high, _ = cost_curve(TOKENS, [0.01, 0.05], **{**ASKED, "releases": 100, "mechanism": mechanism})
    assert low.parameter == parameter
    assert (low.noise > high.noise) if parameter == "eps0" else (low.noise < high.noise)


@pytest.mark.parametrize(
    ("rates", "changed", "parameter"),
    [
        ([], {}, "rates"),
        ([0.0], {}, "rate"),
        ([1.5], {}, "rate"),
        ([0.1], {"owners": 0}, "owners"),
        ([0.1], {"members": 0}, "members"),
        ([0.1], {"shots": 0.5}, "shots"),
        ([0.1], {"price_in": -1.0}, "price_in"),
        ([0.1], {"public_calls": -1}, "public_calls"),
        ([0.1], {"mechanism": "tokens"}, "mechanism"),
        ([0.1], {"mechanism": "laplace"}, "mechanism"),
        ([0.1], {"releases": 0}, "releases"),
        ([0.1], {"delta": 0.0}, "delta"),
    ],
)
def test_numbers_outside_their_bounds(rates: list[float], changed: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        cost_curve(TOKENS, rates, **{**ASKED, **changed})
    assert caught.value.parameter == parameter


def test_a_plan_that_cannot_be() -> None:
    with pytest.raises(InfeasiblePlan):
        cost_curve(TOKENS, [1.0], **{**ASKED, "epsilon": 1e-9, "delta": 1e-12, "releases": 10**7})
