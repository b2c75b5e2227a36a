"""What a budget's policy says: principals, and the soft limit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl import InvalidParameter, PlanMismatch, PrivacyBudget, PrivacyBudgetExceeded

Make = Callable[..., PrivacyBudget]

# -- principals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def each(budget_of: Make) -> PrivacyBudget:
    budget = budget_of(3.0, releases=5, scope="per_principal", name="each")
    budget.line("vote", 0.2)
    return budget


def test_each_principal_has_the_whole_line(each: PrivacyBudget) -> None:
    line = each.line("vote", 0.2)
    assert [charge.number for charge in line.charge(5, principal="alice")] == [1, 2, 3, 4, 5]
    with pytest.raises(PrivacyBudgetExceeded, match="0 of 5 releases left for this principal"):
        line.charge(principal="alice")
    assert [charge.number for charge in line.charge(principal="bob")] == [1]
    with pytest.raises(PrivacyBudgetExceeded):
        line.charge(6, principal="carol")
    assert each.principals() == {"alice": {"vote": 5}, "bob": {"vote": 1}}, "what was refused made no counter"
    assert (each.spent(principal="bob"), each.remaining(principal="bob")) == (1, 4)
    assert each.spent(principal="nobody yet") == 0
    assert each.epsilon_spent("alice") == 3.0
    assert 0.0 < each.epsilon_spent("bob") < 2.0
    assert each.epsilon_spent("nobody yet") == 0.0
    assert not each.preview(5, principal="bob")["fits"]
    assert "2 principals" in repr(each)


@pytest.mark.parametrize("principal", [None, "", 3, "n" * 256, "a\0b", "\ud83d", b"alice"])
def test_no_principal_is_refused_and_costs_nothing(principal: Any, each: PrivacyBudget) -> None:
    line = each.line("vote", 0.2)
    asks: list[Callable[[], Any]] = [
        lambda: line.charge(principal=principal),
        lambda: line.charge(queries=[None], principal=principal),
        lambda: each.spent(principal=principal),
        lambda: each.remaining(principal=principal),
        lambda: each.preview(principal=principal),
        lambda: each.epsilon_spent(principal),
        lambda: each.lines(principal),
    ]
    for ask in asks:
        with pytest.raises(InvalidParameter) as caught:
            ask()
        assert caught.value.parameter == "principal"
    assert each.principals() == {}


def test_every_receipt_of_a_principal_states_the_assumption(each: PrivacyBudget) -> None:
    line = each.line("vote", 0.2)
    receipts = {}
    for who in ("alice", "bob:1", "alice"):
        receipts[who] = line.record(line.charge(principal=who)[0])
        assert receipts[who]["principal"] == who
        assert "callers do not collude" in receipts[who]["assumption"]
    assert (receipts["alice"]["number"], receipts["bob:1"]["number"]) == (2, 1)
    ids = {receipt["id"] for receipt in receipts.values()}
    assert len(ids) == 2
    for who, receipt in receipts.items():
        assert each.receipt(receipt["id"]) == receipt
        assert each.receipt(receipt["id"], principal=who) == receipt
        assert each.receipt(receipt["id"], principal="somebody else") is None
    assert each.receipt("each:vote:1") is None, "the shared counter has no releases"


def test_a_principal_is_neither_needed_nor_kept_where_all_share(budget_of: Make) -> None:
    budget = budget_of(3.0, releases=5)
    line = budget.line("vote", 0.2)
    line.charge(2, principal="alice")
    (charge,) = line.charge(principal="bob")
    receipt = line.record(charge)
    assert (charge.number, receipt["principal"]) == (3, None)
    assert "all callers may collude" in receipt["assumption"]
    assert budget.principals() == {}
    assert budget.spent() == budget.spent(principal="alice") == 3


def test_the_scope_is_frozen(ledger_url: str) -> None:
    PrivacyBudget(3.0, 1e-5, 10, ledger_url, scope="per_principal").line("vote", 0.2)
    with pytest.raises(PlanMismatch, match="scope"):
        PrivacyBudget(3.0, 1e-5, 10, ledger_url)


def test_lines_of_a_principal_add_up_for_that_principal_alone(budget_of: Make) -> None:
    budget = budget_of(3.0, releases={"a": 5, "b": 5}, scope="per_principal")
    budget.declare("b", "vote", 0.1)
    a, b = budget.line("vote", 0.2, name="a"), budget.line("vote", 0.1, name="b")
    b.charge(5, principal="bob")
    b.charge(2, principal="alice")
    (charge,) = a.charge(principal="alice")
    assert charge.others == {"b": 2}
    assert a.record(charge)["epsilon_spent"] == a.plan.spent({"a": 1, "b": 2}) == budget.epsilon_spent("alice")  # type: ignore[attr-defined]


# -- parameters of the policy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scope", "everybody"),
        ("scope", None),
        ("on_exhausted", "ignore"),
        ("replay", 1),
        ("keep_queries", "yes"),
        *[("replay_patience", value) for value in (-1, float("nan"), float("inf"), "3", None, True)],
        *[("soft_limit", value) for value in (0, -0.1, 1.1, "half", True, float("nan"))],
        ("on_soft_limit", "print"),
    ],
    ids=str,
)
def test_a_policy_out_of_bounds_is_named(name: str, value: Any, ledger_url: str, tmp_path: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        PrivacyBudget(3.0, 1e-5, 10, ledger_url, **{name: value})
    assert caught.value.parameter == name
    assert list(tmp_path.iterdir()) == []


def test_what_happens_when_it_is_spent_can_be_read(budget_of: Make) -> None:
    assert budget_of().on_exhausted == "raise"
    assert budget_of(on_exhausted="zero_shot").on_exhausted == "zero_shot"


@pytest.mark.parametrize(("sizes", "crossing"), [([1] * 10, 8), ([3, 3, 3, 1], 9), ([10], 10), ([7, 1, 1, 1], 8)])
def test_the_soft_limit_warns_once_at_the_charge_that_reaches_it(
    sizes: list[int], crossing: int, budget_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []
    line = budget_of(3.0, releases=10, soft_limit=0.8, on_soft_limit=calls.append, name="soft").line("vote", 0.2)
    with caplog.at_level(logging.WARNING, "langchain_dpicl.budget"):
        for size in sizes:
            line.charge(size)
    assert calls == [
        {
            "budget": "soft",
            "line": "vote",
            "principal": None,
            "spent": crossing,
            "count": 10,
            "remaining": 10 - crossing,
        }
    ]
    assert len(caplog.records) == 1
    assert f"spent {crossing} of 10" in caplog.text


def test_workers_and_principals_each_cross_the_soft_limit_once(ledger_url: str) -> None:
    calls: list[Any] = []
    make = lambda: PrivacyBudget(  # noqa: E731
        3.0, 1e-5, 4, ledger_url, scope="per_principal", soft_limit=0.5, on_soft_limit=calls.append
    ).line("vote", 0.2)
    one, two = make(), make()
    for line in (one, two, two, one):
        line.charge(principal="alice")
    two.charge(2, principal="bob")
    assert [(call["principal"], call["spent"]) for call in calls] == [("alice", 2), ("bob", 2)]


def test_a_callback_that_fails_does_not_lose_the_charge(budget_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no mail server")

    line = budget_of(3.0, releases=2, soft_limit=0.5, on_soft_limit=fail).line("vote", 0.2)
    assert [charge.number for charge in line.charge()] == [1]
    assert "on_soft_limit failed" in caplog.text
    assert [charge.number for charge in line.charge()] == [2]
