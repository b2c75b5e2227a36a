"""`budget/budget.py` and `budget/receipt.py`: a frozen plan, and what is spent and left of it."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import (
    DPICLError,
    InvalidParameter,
    LedgerError,
    PlanMismatch,
    PrivacyBudget,
    PrivacyBudgetExceeded,
    PrivacyWarning,
)

Make = Callable[..., PrivacyBudget]

BAD: list[tuple[str, Any]] = [
    *[("epsilon", value) for value in (0, -1, 0.0, float("nan"), float("inf"), True, "3", None)],
    *[("delta", value) for value in (0, 1, -1e-5, 1.5, float("nan"), True, "1e-5", None)],
    *[("releases", value) for value in (0, -1, 1.0, float("nan"), True, "10", None)],
    *[("name", value) for value in ("", None, 3, "n" * 256, "a\0", "a\ud83d")],
    *[("ledger", value) for value in ("", "no url", None, 3, Path("budget.db"))],
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:20])
def test_a_parameter_out_of_bounds_is_named(name: str, value: Any, ledger_url: str, tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-5, "releases": 10, "ledger": ledger_url, "name": "n"}
    with pytest.raises(InvalidParameter) as caught:
        PrivacyBudget(**parameters | {name: value})
    assert caught.value.parameter == name
    assert list(tmp_path.iterdir()) == [], "no ledger is made for a budget that cannot be"


def test_before_the_first_use_nothing_is_spent_or_frozen(budget_of: Make) -> None:
    budget = budget_of(3.0, releases=100)
    assert budget.plan is None
    assert budget.spent() == 0
    assert budget.remaining() == 100
    assert budget.epsilon_spent() == 0.0
    preview = budget.preview(40)
    assert preview == {"releases": 40, "fits": True, "epsilon_after": 3.0, "remaining_after": 60}


def test_the_first_use_solves_a_plan_that_keeps_its_promise(budget_of: Make) -> None:
    budget = budget_of(3.0, releases=100)
    line = budget.line("vote", 0.1)
    assert budget.plan is line.plan
    assert line.plan.certified_epsilon <= 3.0
    assert (line.rate, line.count, line.plan.delta) == (0.1, 100, 1e-5)
    assert line.parameter == line.plan.lines["vote"].parameter > 0
    assert budget.line("vote", 0.1) is line


def test_spending_counts_up_to_the_plan_and_no_further(budget_of: Make) -> None:
    budget = budget_of(3.0, releases=5)
    line = budget.line("vote", 0.2)
    assert [charge.number for charge in line.charge(2)] == [1, 2]
    assert (budget.spent(), budget.remaining()) == (2, 3)
    with pytest.raises(PrivacyBudgetExceeded, match="3 of 5"):
        line.charge(4)
    assert budget.spent() == 2, "a charge that does not fit charges nothing"
    assert [charge.number for charge in line.charge(3)] == [3, 4, 5]
    for _ in range(3):
        with pytest.raises(PrivacyBudgetExceeded, match="0 of 5"):
            line.charge()
    assert budget.epsilon_spent() == 3.0


@pytest.mark.parametrize(("n", "fits", "left"), [(1, True, 6), (7, True, 0), (8, False, 7), (1000, False, 7)])
def test_a_preview_charges_nothing(n: int, fits: bool, left: int, budget_of: Make) -> None:
    budget = budget_of(3.0, releases=10)
    budget.line("vote", 0.2).charge(3)
    preview = budget.preview(n)
    assert (preview["releases"], preview["fits"], preview["remaining_after"]) == (n, fits, left)
    assert budget.epsilon_spent() <= preview["epsilon_after"] <= 3.0
    assert budget.spent() == 3
    for bad in (0, -1, 1.5, True):
        with pytest.raises(InvalidParameter):
            budget.preview(bad)  # type: ignore[arg-type]


# -- plans are frozen --------------------------------------------------------------------------------------------------


def test_the_same_plan_reopens_and_counts_on(ledger_url: str) -> None:
    first = PrivacyBudget(3, 1e-5, 10, ledger_url, "n")
    first.line("vote", 0.2).charge(4)
    first.close()
    again = PrivacyBudget(3.0, 1e-5, 10, ledger_url, "n")
    assert again.plan == first.plan
    assert again.spent() == 4
    assert [charge.number for charge in again.line("vote", 0.2).charge()] == [5]


@pytest.mark.parametrize(
    "other",
    [{"epsilon": 3.1}, {"epsilon": 2.9}, {"delta": 1e-6}, {"releases": 11}, {"releases": 9}],
    ids=str,
)
def test_another_plan_under_this_name_is_refused_at_the_door(other: dict[str, Any], ledger_url: str) -> None:
    asked: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-5, "releases": 10, "ledger": ledger_url, "name": "n"}
    PrivacyBudget(**asked).line("vote", 0.2).charge(4)
    with pytest.raises(PlanMismatch, match=next(iter(other))):
        PrivacyBudget(**asked | other)
    assert PrivacyBudget(**asked).spent() == 4
    assert PrivacyBudget(**asked | other | {"name": "other"}).spent() == 0


def test_a_plan_frozen_by_another_worker_meanwhile_is_noticed_at_the_first_use(ledger_url: str) -> None:
    mine = PrivacyBudget(3.0, 1e-5, 10, ledger_url, "n")
    other = PrivacyBudget(2.0, 1e-5, 10, ledger_url, "n")
    other.line("vote", 0.2)
    with pytest.raises(PlanMismatch, match="epsilon"):
        mine.line("vote", 0.2)


def test_spent_counts_the_releases_of_other_workers_also_before_the_first_own_use(ledger_url: str) -> None:
    watcher = PrivacyBudget(3.0, 1e-5, 10, ledger_url, "n")
    worker = PrivacyBudget(3.0, 1e-5, 10, ledger_url, "n")
    worker.line("vote", 0.2).charge(4)
    assert watcher.spent() == 4
    assert watcher.remaining() == 6
    assert not watcher.preview(7)["fits"]
    assert watcher.epsilon_spent() > 0


def test_the_planned_rate_stands_unless_another_is_asked_for_by_name(ledger_url: str) -> None:
    PrivacyBudget(3.0, 1e-5, 10, ledger_url).line("vote", 0.2)
    again = PrivacyBudget(3.0, 1e-5, 10, ledger_url)
    assert again.line("vote", 0.1).rate == 0.2, "the store has grown: the plan's rate stays"
    with pytest.raises(PlanMismatch, match="rate"):
        again.line("vote", 0.1, rate_is_explicit=True)
    assert again.line("vote", 0.2, rate_is_explicit=True).rate == 0.2


def test_a_frozen_line_is_one_object_and_is_compared_with_what_is_asked(budget_of: Make) -> None:
    budget = budget_of(3.0)
    line = budget.line("vote", 0.2, owners=100)
    assert budget.line("vote", 0.2) is budget.line("vote", 0.2, name="vote", rate_is_explicit=True) is line
    for other in ({"rate_is_explicit": True, "owners": 99}, {"options": {"delta0": 1e-9}}):
        with pytest.raises(DPICLError):
            budget.line("vote", 0.2, **other)


def test_another_mechanism_is_another_plan(budget_of: Make) -> None:
    budget = budget_of(3.0)
    budget.line("vote", 0.2)
    with pytest.raises(PlanMismatch, match="mechanism"):
        budget.line("joint-em", 0.2)
    with pytest.raises(InvalidParameter):
        budget_of(3.0).line("no such mechanism", 0.2)


def test_a_plan_that_was_tampered_with_is_not_believed(ledger_url: str) -> None:
    import sqlite3

    budget = PrivacyBudget(3.0, 1e-5, 10, ledger_url)
    budget.line("vote", 0.2)
    budget.close()
    with sqlite3.connect(ledger_url.removeprefix("sqlite:///")) as connection:
        (content,) = connection.execute("SELECT content FROM dpicl_plans").fetchone()
        plan = json.loads(content)
        plan["lines"]["vote"]["parameter"] /= 3
        connection.execute("UPDATE dpicl_plans SET content = ?", (json.dumps(plan, sort_keys=True),))
    connection.close()
    with pytest.raises(DPICLError):
        PrivacyBudget(3.0, 1e-5, 10, ledger_url)


def test_threads_that_use_a_budget_for_the_first_time_freeze_one_plan(budget_of: Make) -> None:
    budget = budget_of(3.0)
    lines: list[Any] = []
    threads = [threading.Thread(target=lambda: lines.append(budget.line("vote", 0.2))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines) == 8
    assert len({id(line) for line in lines}) == 1


# -- receipts and what is shown ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reviews", "a:b", "ü☃", "'; DROP TABLE dpicl_plans; --"])
def test_a_receipt_is_kept_and_comes_back(name: str, budget_of: Make) -> None:
    budget = budget_of(3.0, name=name)
    line = budget.line("vote", 0.2)
    _, second = line.charge(2)
    receipt = line.record(second)
    assert receipt["id"] == f"{name}:vote:2"
    assert budget.receipt(receipt["id"]) == receipt
    assert budget.receipt(f"{name}:vote:1") is None, "charged, but never answered"
    for unknown in ("", ":", "::", "no such id", f"{name}:vote:3", f"{name}:other:2", f"{name}:vote:-2", "x:vote:2"):
        assert budget.receipt(unknown) is None
    assert receipt["budget"] == name
    assert (receipt["number"], receipt["remaining"], receipt["line"]) == (2, 8, "vote")
    assert f"{line.parameter:g}" in receipt["mechanism"]
    assert receipt["time"] == second.time
    assert json.loads(json.dumps(receipt)) == receipt


def test_receipts_hold_neither_query_nor_answer(sealed_of: Any) -> None:
    sealed = sealed_of(lambda _: "Positive", return_receipt=True)
    receipt = sealed.invoke({"input": "QUERY-TEXT"})["receipt"]
    assert "QUERY-TEXT" not in str(receipt)
    assert "Positive" not in str(receipt)
    url = sealed.budget._ledger._engine.url
    sealed.budget.close()
    content = b"".join(path.read_bytes() for path in Path(url.database).parent.glob(f"{Path(url.database).name}*"))
    assert b"QUERY-TEXT" not in content
    assert b"Positive" not in content


def test_what_a_budget_shows(budget_of: Make) -> None:
    budget = budget_of(3.0, releases=10, name="reviews")
    budget.line("vote", 0.2).charge()
    assert repr(budget) == "PrivacyBudget(epsilon=3, delta=1e-05, releases=10, name='reviews', spent=1)"


def test_showing_a_budget_never_fails(ledger_url: str) -> None:
    """Debuggers and error reporters call it, also on a budget whose plan another worker froze with other numbers."""
    mine = PrivacyBudget(3.0, 1e-5, 10, ledger_url)
    PrivacyBudget(2.0, 1e-5, 10, ledger_url).line("vote", 0.2)
    assert repr(mine).startswith("PrivacyBudget(epsilon=3")


def test_a_ledger_in_memory_warns_and_works() -> None:
    with pytest.warns(PrivacyWarning, match="forgotten when the process ends"):
        budget = PrivacyBudget(3.0, 1e-5, 3, "sqlite://")
    line = budget.line("vote", 0.2)
    outcomes: list[bool] = []

    def charge() -> None:
        for _ in range(2):
            try:
                line.charge()
                outcomes.append(True)
            except PrivacyBudgetExceeded:
                outcomes.append(False)

    threads = [threading.Thread(target=charge) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 5 + [True] * 3


@pytest.mark.parametrize("url", ["sqlite:///:memory:", "sqlite:///file:m1?mode=memory&cache=shared&uri=true"])
def test_every_way_to_keep_a_ledger_in_memory_warns(url: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PrivacyBudget(3.0, 1e-5, 3, url).close()
    assert [w for w in caught if issubclass(w.category, PrivacyWarning)]


def test_a_ledger_that_lost_the_plan_is_a_ledger_error(ledger_url: str) -> None:
    """Deleted and made anew by another worker: neither an answer, nor a bare KeyError."""
    budget = PrivacyBudget(3.0, 1e-5, 10, ledger_url)
    line = budget.line("vote", 0.2)
    line.charge()
    budget.close()
    for path in Path(ledger_url.removeprefix("sqlite:///")).parent.glob("ledger.db*"):
        path.unlink()
    PrivacyBudget(3.0, 1e-5, 10, ledger_url).close()
    with pytest.raises(LedgerError):
        line.charge()
    with pytest.raises(LedgerError):
        budget.spent()
