"""`budget/policy.py` and `budget/filtered.py`: principals, the soft limit, and parameters chosen as one goes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl import InvalidParameter, PlanMismatch, PrivacyBudget, PrivacyBudgetExceeded
from langchain_dpicl.privacy import MECHANISMS, Line, RenyiFilter

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


@pytest.mark.parametrize("principal", [None, "", 3, "n" * 256, b"alice"])
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


# -- the filter --------------------------------------------------------------------------------------------------------


def test_a_filters_public_answer_says_how_many_releases_would_still_fit(ledger_url: str) -> None:
    line = PrivacyBudget.filtered(2.0, 1e-5, ledger_url, "public").line("vote", 0.1, parameter=9.0)
    line.charge()
    assert line.unreleased_receipt()["remaining"] == line.remaining() > 0


def test_a_filter_admits_until_it_is_full_and_keeps_the_rest(ledger_url: str) -> None:
    budget = PrivacyBudget.filtered(2.0, 1e-5, ledger_url, "free")
    loud, quiet = budget.line("vote", 0.2, parameter=4.0), budget.line("vote", 0.2, parameter=40.0)
    fits = loud.remaining()  # type: ignore[attr-defined]
    assert fits > 5
    for left in range(fits - 1, -1, -1):
        receipt = loud.record(loud.charge()[0])
        assert abs(receipt["remaining"] - left) <= 1
    before = budget.epsilon_spent()
    assert receipt["epsilon_spent"] == before <= 2.0
    with pytest.raises(PrivacyBudgetExceeded, match="nothing charged"):
        loud.charge(2)
    assert budget.epsilon_spent() == before
    assert budget.spent() == fits
    assert quiet.charge()[0].number == fits + 1, "a noisier one still fits"
    assert before < budget.epsilon_spent() <= 2.0


def test_the_filter_in_the_ledger_is_the_filter(ledger_url: str) -> None:
    """The same requests, answered by a filter in memory; reopened before every one of them."""
    memory = RenyiFilter(1.0, 1e-5, orders=(8, 16, 32))
    profile = MECHANISMS["vote"].profile
    verdicts = []
    for sigma, count in [(3.0, 1), (2.0, 4), (8.0, 20), (1.0, 1), (20.0, 1000), (6.0, 5), (30.0, 50)] * 4:
        budget = PrivacyBudget.filtered(1.0, 1e-5, ledger_url, "free", orders=(8, 16, 32))
        try:
            verdict = len(budget.line("vote", 0.1, parameter=sigma).charge(count)) == count
        except PrivacyBudgetExceeded:
            verdict = False
        assert verdict == memory.spend(Line(profile(sigma), 0.1, count))
        stored = budget._now().state()
        assert stored == memory.state(), "exactly, to the last bit"
        budget.close()
        verdicts.append(verdict)
    assert set(verdicts) == {True, False}


def test_a_filter_sets_failures_aside_for_ptr(ledger_url: str) -> None:
    options = {"delta0": 1e-7}
    without = PrivacyBudget.filtered(5.0, 1e-5, ledger_url, "without").line("ptr", 0.1, parameter=9.0, options=options)
    with pytest.raises(PrivacyBudgetExceeded):
        without.charge()
    budget = PrivacyBudget.filtered(5.0, 1e-5, ledger_url, "with", failures=1e-7)
    line = budget.line("ptr", 0.1, parameter=9.0, options=options)
    assert 9 <= line.remaining() <= 10  # type: ignore[attr-defined]
    line.charge(9)
    assert line.remaining() <= 1  # type: ignore[attr-defined]


def test_a_filter_is_frozen_and_not_a_plan(ledger_url: str) -> None:
    PrivacyBudget.filtered(2.0, 1e-5, ledger_url, "free").line("vote", 0.2, parameter=9.0)
    for other in ({"epsilon": 3.0}, {"delta": 1e-6}, {"orders": (4, 8)}, {"failures": 1e-7}):
        with pytest.raises(PlanMismatch):
            PrivacyBudget.filtered(**{"epsilon": 2.0, "delta": 1e-5, "ledger": ledger_url, "name": "free", **other})  # type: ignore[arg-type]
    with pytest.raises(PlanMismatch, match="filtered"):
        PrivacyBudget(2.0, 1e-5, 10, ledger_url, "free")
    PrivacyBudget(2.0, 1e-5, 10, ledger_url, "plan").line("vote", 0.2)
    with pytest.raises(PlanMismatch, match="fixed in advance"):
        PrivacyBudget.filtered(2.0, 1e-5, ledger_url, "plan")


def test_the_first_line_of_a_filter_chooses_its_order_for_all(ledger_url: str) -> None:
    """The order that admits most of these releases; from then on it is the ledger's, whoever asks for what."""
    first, second = (PrivacyBudget.filtered(3.0, 1e-5, ledger_url, "free") for _ in range(2))
    line = first.line("joint-em", 400 / 14732, parameter=3.04)
    assert first.orders == (6,)
    assert line.remaining() >= 80
    line.charge()
    second.line("vote", 0.01, parameter=20.0).charge()
    assert second.orders == (6,)
    again = PrivacyBudget.filtered(3.0, 1e-5, ledger_url, "free")
    assert again.epsilon_spent() == first.epsilon_spent() > 0.0
    assert again.orders == (6,)
    with pytest.raises(PlanMismatch, match="orders"):
        PrivacyBudget.filtered(3.0, 1e-5, ledger_url, "free", orders=(9,))
    fixed = PrivacyBudget.filtered(3.0, 1e-5, ledger_url, "fixed", orders=(9,))
    assert fixed.line("joint-em", 400 / 14732, parameter=3.04).remaining() < 80
    assert PrivacyBudget.filtered(3.0, 1e-5, ledger_url, "fixed").is_frozen, "any default takes what is frozen"


def test_a_filter_chooses_no_parameter(ledger_url: str) -> None:
    budget = PrivacyBudget.filtered(2.0, 1e-5, ledger_url)
    for bad in ({}, {"parameter": -1.0}, {"parameter": 9.0, "name": "a:b"}):
        with pytest.raises(InvalidParameter):
            budget.line("vote", 0.2, **bad)  # type: ignore[arg-type]
    for unknown in (budget.remaining, budget.preview):
        with pytest.raises(InvalidParameter, match="asked of a line"):
            unknown()  # type: ignore[operator]
    with pytest.raises(InvalidParameter, match="share one filter"):
        PrivacyBudget.filtered(2.0, 1e-5, ledger_url, scope="per_principal")
    assert budget.spent() == 0
    assert budget.epsilon_spent() == 0.0


def test_a_filter_replays_only_what_was_asked_with_the_same_parameters(ledger_url: str) -> None:
    budget = PrivacyBudget.filtered(2.0, 1e-5, ledger_url)
    one, same, other = (budget.line("vote", 0.2, parameter=sigma) for sigma in (9.0, 9.0, 10.0))
    (charge,) = one.charge(queries=[one.query_id({"input": "x"})])
    receipt = one.record(charge, answer="1")  # type: ignore[arg-type]
    assert receipt["epsilon"] == 2.0
    assert budget.receipt(receipt["id"]) == receipt
    assert same.charge(queries=[same.query_id({"input": "x"})])[0].receipt["replayed"]  # type: ignore[union-attr]
    assert other.charge(queries=[other.query_id({"input": "x"})])[0].number == 2  # type: ignore[union-attr]


def test_a_preview_of_a_filter_s_line_charges_nothing(ledger_url: str) -> None:
    budget = PrivacyBudget.filtered(2.0, 1e-5, ledger_url)
    line: Any = budget.line("vote", 0.2, parameter=9.0)
    preview = line.preview(5)
    assert preview["fits"]
    assert 0.0 < preview["epsilon_after"] < 2.0
    assert budget.spent() == 0
    line.charge(5)
    assert budget.epsilon_spent() == preview["epsilon_after"]
    assert not line.preview(10**6)["fits"]
