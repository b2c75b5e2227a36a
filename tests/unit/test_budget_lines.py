"""The lines of `budget/budget.py`: several kinds of releases on one promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl import InvalidParameter, PlanIncomplete, PlanMismatch, PrivacyBudget, PrivacyBudgetExceeded
from langchain_dpicl.privacy import LineRequest, PLDAccountant, default_delta0

Make = Callable[..., PrivacyBudget]
TWO = {"classify": 20, "keywords": 5}


def both(budget: PrivacyBudget) -> PrivacyBudget:
    budget.declare("classify", "vote", 0.2)
    budget.declare("keywords", "joint-em", 0.1)
    return budget


@pytest.fixture
def two(budget_of: Make) -> PrivacyBudget:
    return both(budget_of(3.0, releases=TWO, name="two:lines"))


@pytest.mark.parametrize(
    "releases",
    [
        {},
        {"": 1},
        {"a:b": 1},
        {3: 1},
        {"a": 0},
        {"a": True},
        {"a": 1.0},
        {"a": "3"},
        {"n" * 256: 1},
        {"a\0": 1},
        {"\udc80a": 1},
        {"a": None},
        [],
    ],
    ids=str,
)
def test_lines_that_cannot_be_are_refused(releases: Any, ledger_url: str, tmp_path: Any) -> None:
    with pytest.raises(InvalidParameter, match="releases"):
        PrivacyBudget(3.0, 1e-5, releases, ledger_url)
    assert list(tmp_path.iterdir()) == []


def test_the_plan_holds_every_line_and_keeps_its_promise(two: PrivacyBudget) -> None:
    line = two.line("vote", 0.2, name="classify")
    plan = line.plan
    assert {name: (item.mechanism, item.rate, item.count) for name, item in plan.lines.items()} == {
        "classify": ("vote", 0.2, 20),
        "keywords": ("joint-em", 0.1, 5),
    }
    assert plan.certified_epsilon <= 3.0
    other = two.line("joint-em", 0.1, name="keywords")
    assert other.plan is plan
    assert (line.mechanism, other.mechanism) == ("vote", "joint-em")
    assert other.parameter == plan.lines["keywords"].parameter


def test_a_line_that_nobody_declared_is_named_and_costs_nothing(budget_of: Make) -> None:
    budget = budget_of(3.0, releases=TWO)
    with pytest.raises(PlanIncomplete, match="declared keywords: build every chain") as caught:
        budget.line("vote", 0.2, name="classify")
    assert "declared classify" not in str(caught.value)
    assert budget.plan is None
    assert budget.lines()["classify"] == {"count": 20, "spent": 0, "remaining": 20, "mechanism": "vote"}
    assert budget.lines()["keywords"]["mechanism"] is None
    budget.declare("keywords", "joint-em", 0.1)
    assert budget.line("vote", 0.2, name="classify").charge()[0].number == 1


def test_a_line_may_be_requested_whole(budget_of: Make) -> None:
    whole = LineRequest("joint-em", 0.1, 5, weight=3.0)
    budget = budget_of(3.0, releases={"classify": 20, "keywords": whole})
    plan = budget.line("vote", 0.2, name="classify").plan
    assert plan.lines["keywords"].weight == 3.0
    even = both(budget_of(3.0, releases=TWO)).line("vote", 0.2, name="classify").plan
    assert plan.lines["keywords"].parameter > even.lines["keywords"].parameter, "three times the loss: less noise"


def test_a_process_that_builds_one_chain_works_where_the_ledger_has_the_plan(ledger_url: str) -> None:
    both(PrivacyBudget(3.0, 1e-5, TWO, ledger_url)).line("vote", 0.2, name="classify").charge(2)
    again = PrivacyBudget(3.0, 1e-5, TWO, ledger_url)
    assert again.line("joint-em", 0.1, name="keywords").charge()[0].number == 1
    assert {name: state["spent"] for name, state in again.lines().items()} == {"classify": 2, "keywords": 1}


def test_lines_are_spent_apart_and_epsilon_together(two: PrivacyBudget) -> None:
    classify, keywords = two.line("vote", 0.2, name="classify"), two.line("joint-em", 0.1, name="keywords")
    keywords.charge(5)
    with pytest.raises(PrivacyBudgetExceeded, match="0 of 5 releases left on the line 'keywords'"):
        keywords.charge()
    alone = two.epsilon_spent()
    assert [charge.number for charge in classify.charge(3)] == [1, 2, 3]
    assert (two.spent("classify"), two.remaining("classify"), two.remaining("keywords")) == (3, 17, 0)
    plan = classify.plan
    exact = PLDAccountant().epsilon(
        [plan.lines[name].line(plan.lines[name].parameter, n) for name, n in (("classify", 3), ("keywords", 5))], 1e-5
    )
    assert alone < exact <= two.epsilon_spent() < 3.0
    assert two.preview(17, "classify")["epsilon_after"] == 3.0
    assert not two.preview(18, "classify")["fits"]
    assert two.preview(1, "classify")["epsilon_after"] >= two.epsilon_spent()


def test_a_receipt_counts_every_line_as_it_was_when_it_was_charged(two: PrivacyBudget) -> None:
    classify, keywords = two.line("vote", 0.2, name="classify"), two.line("joint-em", 0.1, name="keywords")
    (first,) = keywords.charge()
    (second,) = classify.charge()
    keywords.charge(4)
    receipt = classify.record(second)
    assert receipt["id"] == "two:lines:classify:1"
    assert two.receipt(receipt["id"]) == receipt
    assert receipt["epsilon_spent"] == classify.plan.spent({"classify": 1, "keywords": 1})
    assert keywords.record(first)["epsilon_spent"] == classify.plan.spent({"keywords": 1}) < receipt["epsilon_spent"]
    assert (receipt["remaining"], receipt["outcome"]) == (19, "released")
    assert keywords.record(first, outcome="members abstained")["outcome"] == "members abstained"


def test_with_several_lines_one_must_say_which(two: PrivacyBudget) -> None:
    asks: list[Callable[..., Any]] = [two.spent, two.remaining, two.preview]
    for _ in range(2):  # before the plan is frozen, and after
        for ask in asks:
            with pytest.raises(InvalidParameter, match="classify, keywords"):
                ask()
        with pytest.raises(InvalidParameter, match="classify, keywords"):
            two.line("vote", 0.2)
        with pytest.raises(InvalidParameter, match="classify, keywords"):
            two.declare("nonsense", "vote", 0.2)
        with pytest.raises(InvalidParameter, match="classify, keywords"):
            two.spent("nonsense")
        two.line("vote", 0.2, name="classify")


def test_a_mapping_of_one_line_needs_no_name(budget_of: Make) -> None:
    budget = budget_of(3.0, releases={"reviews": 10})
    line = budget.line("vote", 0.2)
    assert (line.name, budget.spent(), budget.remaining("reviews")) == ("reviews", 0, 10)
    assert line.record(line.charge()[0])["id"] == "default:reviews:1"


def test_one_number_is_a_line_named_after_its_mechanism(budget_of: Make) -> None:
    budget = budget_of(3.0)
    assert budget.lines() == {}
    budget.declare(None, "vote", 0.2)
    assert budget.lines() == {"vote": {"count": 10, "spent": 0, "remaining": 10, "mechanism": "vote"}}
    with pytest.raises(PlanMismatch, match="mechanism"):
        budget.declare(None, "scores", 0.2)
    with pytest.raises(InvalidParameter, match="lines: vote"):
        budget.declare("other", "vote", 0.2)
    assert budget.line("vote", 0.3, name="vote").rate == 0.2


# -- declarations ------------------------------------------------------------------------------------------------------


def test_a_second_declaration_must_agree(budget_of: Make) -> None:
    budget = budget_of(3.0, releases={"a": 5, "b": 5})
    budget.declare("a", "ptr", 0.2, options={"delta0": 1e-8})
    budget.declare("a", "ptr", 0.3)
    budget.declare("a", "ptr", 0.2, options={"select": 1.0}, rate_is_explicit=True)
    for bad in (
        {"mechanism": "vote"},
        {"options": {"delta0": 1e-9}},
        {"options": {"select": 0.0}},
        {"rate": 0.3, "rate_is_explicit": True},
    ):
        with pytest.raises(PlanMismatch, match=next(iter(bad.get("options", bad)))):  # type: ignore[call-overload]
            budget.declare("a", **{"mechanism": "ptr", "rate": 0.2, **bad})  # type: ignore[arg-type]
    budget.declare("b", "vote", 0.2)
    line = budget.line("ptr", 0.2, name="a")
    assert dict(line.options) == {"delta0": 1e-8, "select": 1.0}
    with pytest.raises(PlanMismatch, match="options"):
        budget.declare("a", "ptr", 0.2, options={"select": 0.0})
    with pytest.raises(PlanMismatch, match="mechanism"):
        budget.declare("b", "scores", 0.2)


@pytest.mark.parametrize(
    "bad",
    [
        {"mechanism": "nonsense"},
        {"mechanism": None},
        {"rate": 0},
        {"rate": 1.5},
        {"options": {"delta0": 1e-9}},
        {"mechanism": "ptr", "options": {"delta0": 2.0}},
        {"mechanism": "ptr", "options": {"nonsense": 2.0}},
    ],
    ids=str,
)
def test_a_declaration_out_of_bounds_is_refused_and_forgotten(bad: dict[str, Any], budget_of: Make) -> None:
    budget = budget_of(3.0, releases=TWO)
    with pytest.raises(InvalidParameter):
        budget.declare("classify", **{"mechanism": "vote", "rate": 0.2, **bad})
    assert budget.lines()["classify"]["mechanism"] is None


def test_options_that_nobody_chose_are_filled_in_and_not_compared(ledger_url: str) -> None:
    budget = PrivacyBudget(3.0, 1e-5, {"a": 50, "b": 10, "c": 5}, ledger_url)
    budget.declare("a", "ptr", 0.2)
    budget.declare("b", "ptr", 0.1, options={"select": 1.0})
    budget.declare("c", "vote", 0.1)
    line = budget.line("ptr", 0.2, name="a")
    assert line.options["delta0"] == default_delta0(1e-5, 0.2, 50, 2) == 2.5e-7
    assert budget.line("ptr", 0.1, name="b", options={"select": 1.0}).options["delta0"] == 2.5e-6
    assert line.plan.certified_epsilon <= 3.0
    again = PrivacyBudget(3.0, 1e-5, {"a": 50, "b": 10, "c": 5}, ledger_url)
    assert again.line("ptr", 0.2, name="a").options == line.options
    with pytest.raises(PlanMismatch, match="options"):
        again.line("ptr", 0.2, name="a", options={"delta0": 1e-9})


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3, 0.9])
@pytest.mark.parametrize(
    ("rate", "count", "lines"), [(1e-6, 1, 1), (0.01, 10_000, 1), (1.0, 10_000_000, 3), (0.3, 7, 2)]
)
def test_default_delta0_never_uses_more_than_half_of_delta(delta: float, rate: float, count: int, lines: int) -> None:
    delta0 = default_delta0(delta, rate, count, lines)
    assert 0.0 < delta0 <= min(0.25, delta / 2)
    assert lines * rate * count * delta0 <= delta / 2
    assert float(f"{delta0:.2e}") == delta0, "three digits"
    whole = delta / 2 / max(1.0, rate * count * lines)
    assert delta0 >= min(0.25, whole) * 0.99 or math.isclose(delta0, min(0.25, whole), rel_tol=0.011)


def test_frozen_lines_are_compared(ledger_url: str) -> None:
    request = LineRequest("joint-em", 0.1, 5, weight=3.0)
    made = PrivacyBudget(3.0, 1e-5, {"classify": 20, "keywords": request}, ledger_url)
    made.line("vote", 0.2, name="classify")
    others: list[tuple[Any, str]] = [
        (20, "releases"),
        ({"classify": 20}, "releases"),
        ({"classify": 20, "keywords": 6}, "releases"),
        ({"classify": 20, "keyword": 5}, "releases"),
        ({"classify": 20, "keywords": LineRequest("joint-em", 0.1, 5)}, "weight"),
        ({"classify": 20, "keywords": LineRequest("joint-em", 0.2, 5, 3.0)}, "rate"),
        ({"classify": 20, "keywords": LineRequest("vote", 0.1, 5, 3.0)}, "mechanism"),
    ]
    for other, what in others:
        with pytest.raises(PlanMismatch, match=what):
            PrivacyBudget(3.0, 1e-5, other, ledger_url)
    assert PrivacyBudget(3.0, 1e-5, TWO, ledger_url).plan == made.plan


def test_what_a_budget_of_several_lines_shows(two: PrivacyBudget) -> None:
    two.line("vote", 0.2, name="classify").charge(2)
    assert "releases={'classify': 20, 'keywords': 5}" in repr(two)
    assert "spent={'classify': 2, 'keywords': 0}" in repr(two)
