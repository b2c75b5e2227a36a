"""`BudgetLine.reopen`: whoever comes back finds the very charge that was left open, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from by_hand import charge

from langchain_dpicl import InvalidParameter, LineRequest, PrivacyBudget
from langchain_dpicl.budget import BudgetLine, Charge

COUNT = 100


@pytest.fixture
def line_of(budget_of: Callable[..., PrivacyBudget]) -> Callable[..., BudgetLine]:
    def make(releases: Any = COUNT, **options: Any) -> BudgetLine:
        return budget_of(1000.0, releases=releases, **{"replay": True, **options}).line("tokens", 0.2)

    return make


def test_an_open_charge_is_found_again_as_it_was(line_of: Any) -> None:
    line = line_of()
    line.charge(units=4)
    (charge,) = line.charge(queries=["a"], units=6)
    assert line.reopen("a") == charge
    assert line.spent() == 10
    receipt = line.record(line.reopen("a"), answer='"x"', unused=2)
    assert (receipt["tokens"], receipt["remaining"], receipt["number"]) == (6, COUNT - 10, 10), "nothing is given back"
    assert line.replayed(["a"])[0].answer == '"x"'
    assert line.spent() == 10


def test_what_was_answered_given_up_or_never_asked_is_not_reopened(line_of: Any) -> None:
    line = line_of()
    answered, given_up = line.charge(queries=["a", "b"], units=5)
    line.record(answered, answer='"x"')
    line.give_up(given_up)
    assert [line.reopen(query) for query in ("a", "b", "c", None)] == [None] * 4
    assert line.spent() == 10


def test_without_replay_nothing_is_known_of_a_charge(line_of: Any) -> None:
    line = line_of(replay=False)
    line.charge(queries=["a"], units=5)
    assert line.reopen("a") is None


def test_a_principals_charge_is_its_own(line_of: Any) -> None:
    line = line_of(scope="per_principal")
    (entry,) = charge(line, 1, "alice", ["a"], units=5)
    assert line.reopen("a", "alice") == entry
    assert line.reopen("a", "bob") is None
    with pytest.raises(InvalidParameter, match="principal"):
        line.reopen("a")


def test_its_receipt_is_an_upper_bound_whatever_others_did_in_between(line_of: Any) -> None:
    line = line_of()
    line.charge(queries=["a"], units=6)
    (other,) = line.charge(units=20)
    line.record(other, unused=15)
    receipt = line.record(line.reopen("a"), answer='"x"', unused=1)
    assert receipt["remaining"] == line.remaining() == COUNT - 6 - 5, "a charge that was reopened gives nothing back"
    assert receipt["epsilon_spent"] == line.plan.spent({"tokens": 11})


def test_what_other_lines_spent_counts_in_its_receipt(line_of: Any, budget_of: Any) -> None:
    budget = budget_of(releases={"tokens": COUNT, "vote": LineRequest("vote", 0.2, 10, 0.5)}, replay=True)
    line, vote = budget.line("tokens", 0.2, name="tokens"), budget.line("vote", 0.2, name="vote")
    line.charge(queries=["a"], units=6)
    vote.charge(3)
    charge = line.reopen("a")
    assert isinstance(charge, Charge)
    assert charge.others == {"vote": 3}
    assert line.record(charge)["epsilon_spent"] == pytest.approx(budget.epsilon_spent())
