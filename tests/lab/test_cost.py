"""The cost in `evaluation.evaluate`: tokens and price by hand and by counting samples; its noise at each rate."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.errors import InfeasiblePlan, InvalidParameter
from langchain_dpicl.lab.evaluation.evaluate import CostPoint, cost_curve, tokens_of
from langchain_dpicl.lab.evaluation.passes import EvaluationPlan
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.tasks import TASKS
from langchain_dpicl.privacy import LineRequest, PrivacyPlan

TREC, E2E = TASKS["trec"], TASKS["e2e"]
ROWS = [Row("Who is it ?", "Person", ("Person",)), Row("When ?", "Number", ("Number",))]
TOKENS = BARE, EXAMPLE, ANSWER = 30.0, 30.0, 2.0
OWNERS = 1000
PLAN = EvaluationPlan(owners=OWNERS, members=10, shots=4, releases=1000, delta=1e-5, epsilons=(0.5, 1.0))


def points(mechanism: str = "vote", public_calls: int = 0, **changed: int) -> list[CostPoint]:
    """Two points at each of the rates .01, .02, .04, .08 and .16."""
    asked: dict[str, Any] = {"price_in": 3.0, "price_out": 15.0, "mechanism": mechanism, "public_calls": public_calls}
    return cost_curve(TOKENS, PLAN.varied(**changed), **asked)


def at(rate: float, found: list[CostPoint]) -> list[CostPoint]:
    return [point for point in found if point.rate == rate]


def test_the_parts_of_a_prompt_add_up_to_the_prompt() -> None:
    bare, example, answer = tokens_of(TREC, ROWS, ROWS)
    shape = TREC.shape
    prompts = [
        shape.prefix([(a.input, a.output), (b.input, b.output), (c.input, c.output)]) + shape.ask(query.input)
        for a in ROWS
        for b in ROWS
        for c in ROWS
        for query in ROWS
    ]
    assert bare + 3 * example == pytest.approx(sum(map(len, prompts)) / len(prompts) / 4)
    assert answer == len(" Number") / 4


def test_an_example_counts_with_its_empty_line() -> None:
    bare, example, answer = tokens_of(TREC, ROWS[:1], ROWS[1:])
    shape = TREC.shape
    assert bare + example == len(shape.prefix([(ROWS[0].input, ROWS[0].output)]) + shape.ask(ROWS[1].input)) / 4
    assert answer == len(" Number") / 4


def test_a_generated_answer_is_never_longer_than_the_tasks() -> None:
    long, short = (Row("i", output, (output,)) for output in ("word " * 500, "word"))
    assert tokens_of(E2E, [short], [long, short])[2] == (E2E.max_tokens + 5 / 4) / 2  # type: ignore[union-attr]


def test_a_point_by_hand() -> None:
    """q = .08, so 80 owners: 20 members of 4, or 10 members of 8."""
    members, shots = at(0.08, points())
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
    (_, point) = at(0.04, points())
    sampled = np.random.default_rng(7).binomial(OWNERS, 0.04, size=20_000)
    read = point.members * BARE + sampled * EXAMPLE
    assert abs(read.mean() - point.prompt_tokens / 100) < 6 * read.std() / 20_000**0.5


def test_where_the_sizes_meet_both_points_are_one() -> None:
    members, shots = at(40 / OWNERS, points())
    assert (members.members, members.shots) == (shots.members, shots.shots) == (10, 4.0)
    assert (members.prompt_tokens, members.price) == (shots.prompt_tokens, shots.price)


def test_a_higher_rate_costs_more_tokens_and_more_noise() -> None:
    found = points()
    assert [point.rate for point in found] == [rate for rate in (0.01, 0.02, 0.04, 0.08, 0.16) for _ in range(2)]
    for grows in ("members", "shots"):
        curve = [point for point in found if point.grows == grows]
        for low, high in itertools.pairwise(curve):
            assert low.prompt_tokens < high.prompt_tokens
            assert low.price < high.price
            assert low.noise < high.noise


def test_a_sample_of_few_owners_has_one_member_at_least_and_no_rate_is_above_one() -> None:
    smallest = points(members=2, shots=1)[0]
    assert (smallest.owners, smallest.members, smallest.shots) == (0.5, 1, 0.5)
    assert [point.rate for point in points(members=100, shots=5)] == [0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0]


def test_the_plan_at_every_rate_keeps_its_promise() -> None:
    for point in points()[::4]:
        line = LineRequest("vote", point.rate, 1000)
        plan = PrivacyPlan.solve(epsilon=1.0, delta=1e-5, lines={"vote": line})
        assert plan.lines["vote"].parameter == point.noise
        assert plan.certified_epsilon <= 1.0


def test_public_calls_are_zero_shot_prompts_beside_the_members() -> None:
    without, beside = points()[0], points(public_calls=7)[0]
    assert beside.prompt_tokens - without.prompt_tokens == 100 * 7 * 30
    assert beside.answer_tokens - without.answer_tokens == 100 * 7 * 2
    assert beside.price - without.price == pytest.approx(100 * 7 * (30 * 3e-6 + 2 * 15e-6))


def test_the_noise_of_an_embedding_mean_grows_with_the_rate() -> None:
    low, *_, high = points("embedding")
    assert low.parameter == "sigma"
    assert low.noise < high.noise


def test_a_price_below_zero_is_refused() -> None:
    with pytest.raises(InvalidParameter) as caught:
        cost_curve(TOKENS, PLAN, price_in=-1.0, price_out=1.0)
    assert caught.value.parameter == "price_in"


def test_a_plan_that_cannot_be() -> None:
    plan = EvaluationPlan(owners=10, members=10, shots=1, releases=10**7, delta=1e-12, epsilons=(1e-9,))
    with pytest.raises(InfeasiblePlan):
        cost_curve(TOKENS, plan, price_in=0.0, price_out=0.0)
