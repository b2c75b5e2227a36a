"""Faults between a ledger and its witness, or between a store and its ledgers: nothing is lost, and work goes on."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from moments import numbers_of
from sqlalchemy.exc import OperationalError
from tickets_on_disk import marks_in

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.budget import opening
from langchain_dpicl.errors import LedgerError
from langchain_dpicl.sql import database

ROWS = [{"input": f"text {i}", "output": "Positive", "owner": f"owner {i}"} for i in range(6)]


def fill_the_disk(budget: Any, times: int = 1) -> None:
    """Let the next COMMIT of the budget's ledger fail, certainly rolled back."""
    left = [None] * times

    def fail(connection: Any) -> None:
        if left:
            left.pop()
            connection.connection.driver_connection.rollback()
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise OperationalError("COMMIT", {}, error)

    sa.event.listen(budget._ledger._engine, "commit", fail)


def with_tickets(ledger_url: str, store: ExemplarStore) -> tuple[Any, Callable[..., Any]]:
    budget = PrivacyBudget(3, 1e-5, 5, ledger=ledger_url, name="b", tickets=True)
    line: Any = budget.line("vote", 0.5, rate_is_explicit=True)

    def pay(before_charge: Callable[[], None] = lambda: None) -> Any:
        with store.reading() as view:
            owners = [line.ask(store, view.numbers)]
            before_charge()
            return line.charge(owners=owners)[0]

    return budget, pay


@pytest.mark.parametrize("before", [0, 1])
def test_a_commit_on_a_full_disk_can_be_tried_again(before: int, ledger_url: str, store_of: Any) -> None:
    """Also the very first one, before which the witness knows no state."""
    budget, charge = with_tickets(ledger_url, store_of(ROWS))
    for _ in range(before):
        charge()
    fill_the_disk(budget)
    with pytest.raises(LedgerError, match="disk is full"):
        charge()
    assert charge().number == before + 1
    budget.close()
    assert charge().number == before + 2


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interval_is_withdrawn_around_another_workers_repair(
    moment: str, ledger_url: str, store_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker's COMMIT is rolled back; another meets the mark that it left, and repairs the ledger."""
    store = store_of(ROWS)
    (first, mine), (second, others) = with_tickets(ledger_url, store), with_tickets(ledger_url, store)
    mine()
    others()
    rolled_back, go, done = threading.Event(), threading.Event(), threading.Event()
    withdraw, settle = first._ledger._witness.withdraw, opening.settle

    def late(*given: Any) -> None:
        rolled_back.set()
        go.wait(10)
        withdraw(*given)
        done.set()

    def repair(*given: Any) -> Any:
        if moment == "after":
            found = settle(*given)
        go.set()
        assert done.wait(10)
        return found if moment == "after" else settle(*given)

    monkeypatch.setattr(first._ledger._witness, "withdraw", late)
    monkeypatch.setattr(opening, "settle", repair)
    failed: list[str] = []

    def charge(pay: Callable[..., Any], *given: Any) -> None:
        try:
            pay(*given)
        except LedgerError as error:
            failed.append(str(error))

    worker = threading.Thread(target=charge, args=(mine, lambda: fill_the_disk(first)))
    worker.start()
    assert rolled_back.wait(10)
    charge(others)  # it may fail, once
    go.set()
    worker.join()
    monkeypatch.setattr(opening, "settle", settle)
    known = mine().number
    assert [others().number, mine().number] == [known + 1, known + 2]
    first.close()
    second.close()
    assert with_tickets(ledger_url, store)[1]().number == known + 3


def test_a_charge_waits_for_another_programs_transaction_and_not_for_ever(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line: Any = PrivacyBudget(3, 1e-5, 50, ledger=ledger_url, name="b").line("vote", 0.5, rate_is_explicit=True)
    line.charge()
    other = sqlite3.connect(ledger_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(line.charge()[0].number))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    other.execute("COMMIT")
    waiting.join(30)
    assert found == [2]
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.3)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="locked"):
        line.charge()
    other.execute("COMMIT")
    assert line.charge()[0].number == 3
    other.close()


def test_a_charge_that_finds_the_witness_busy_leaves_no_lock(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the witness or of the ledger; and one that only reads the witness keeps nobody waiting."""
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.3)
    line: Any = PrivacyBudget(3, 1e-5, 50, ledger=ledger_url, name="b").line("vote", 0.5, rate_is_explicit=True)
    line.charge()
    witness = f"{ledger_url.removeprefix('sqlite:///')}.witness"
    other = sqlite3.connect(witness, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="locked"):
        line.charge()
    other.execute("COMMIT")
    other.execute("BEGIN")
    assert other.execute("SELECT reserved FROM dpicl_marks").fetchone() == (1,)
    assert line.charge()[0].number == 2
    other.execute("COMMIT")
    other.execute("BEGIN IMMEDIATE")
    other.close()


# -- forgetting --------------------------------------------------------------------------------------------------------


def test_a_store_is_watched_if_the_ledger_fails_at_first(
    ledger_url: str, store_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, budget = store_of(ROWS), PrivacyBudget(3, 1e-5, 5, ledger=ledger_url, name="b", tickets=True)

    def down(*_: Any, **__: Any) -> Any:
        raise LedgerError("down for a moment")

    def use() -> None:
        budget.watch(store)
        budget.line("vote", 0.5, rate_is_explicit=True)

    for name in ("owner_key", "plans"):
        with monkeypatch.context() as patch:
            patch.setattr(budget._ledger, name, down)
            with pytest.raises(LedgerError, match="down"):
                use()
    use()
    assert [other.name for other in store.budgets] == ["b"]
    charge(budget, store)
    held = set(marks_in(ledger_url, "b"))
    store.forget("owner 1")
    assert len(held & set(marks_in(ledger_url, "b"))) == len(held) - 1


def charge(budget: PrivacyBudget, store: Any) -> None:
    """A question for which every owner pays."""
    budget.watch(store)
    line = budget.line("vote", 0.5, rate_is_explicit=True)
    line.charge(owners=[line.ask(store, numbers_of(store))])


def test_a_ledger_that_is_gone_keeps_no_other_one_from_hearing_of_a_forgotten_owner(
    tmp_path: Path, store_of: Any
) -> None:
    store = store_of(ROWS)
    charge(PrivacyBudget(3, 1e-5, 5, ledger=f"sqlite:///{tmp_path / 'a.db'}", name="a", tickets=True), store)
    url = f"sqlite:///{tmp_path / 'b.db'}"
    with pytest.warns(UserWarning, match="other budgets"):
        charge(PrivacyBudget(3, 1e-5, 5, ledger=url, name="b", tickets=True), store)
    held = set(marks_in(url, "b"))
    (tmp_path / "a.db").rename(tmp_path / "elsewhere.db")
    with pytest.raises(LedgerError):
        store.forget("owner 1")
    assert len(held & set(marks_in(url, "b"))) == len(held) - 1


def test_a_store_that_replaces_another_is_followed(ledger_url: str, tmp_path: Path, store_of: Any) -> None:
    store = store_of(ROWS)
    store.save(tmp_path / "store.db")
    budget = PrivacyBudget(1000, 1e-5, 5, ledger=ledger_url, name="b", tickets=True)
    selector = PoissonExampleSelector(store, members=2, rate=1.0, threshold=-1, max_exemplars=6)
    ensemble = PrivateEnsemble(selector, lambda _: "Positive")
    release = ensemble | DPAggregate(NoisyVote(["Positive", "Negative"]), budget)
    release.invoke({"input": "one"})
    selector.store = ExemplarStore.load(tmp_path / "store.db", store.embeddings)
    release.invoke({"input": "two"})
    assert release.store is selector.store
    held = set(marks_in(ledger_url, "b"))
    selector.store.forget("owner 1")
    assert len(held & set(marks_in(ledger_url, "b"))) == len(held) - 1
