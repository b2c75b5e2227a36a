"""Lines that count tokens: an answer charges the most it may have, and tokens that were never sampled do not count."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from langchain_dpicl import InvalidParameter, LedgerError, PrivacyBudget, PrivacyBudgetExceeded
from langchain_dpicl.budget import BudgetLine, Charge, Replayed
from langchain_dpicl.budget.upkeep import LedgerReport

Make = Callable[..., PrivacyBudget]
COUNT = 200


@pytest.fixture
def budget(budget_of: Make, ledger_url: str) -> PrivacyBudget:
    return budget_of(8.0, releases=COUNT, name="t", ledger=ledger_url, replay=True)


@pytest.fixture
def line(budget: PrivacyBudget) -> BudgetLine:
    return budget.line("tokens", 0.05)


def rows(url: str, statement: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        return connection.execute(statement).fetchall()


def consistent(url: str) -> tuple[int, int]:
    """(spent, returned) of the one counter: what counts is what its rows add up to."""
    ((spent, returned, allowed),) = rows(url, "SELECT spent, returned, allowed FROM dpicl_counters")
    ((units, last),) = rows(url, "SELECT sum(units), max(number) FROM dpicl_charges")
    assert (spent - returned, spent) == (units, last)
    assert 0 <= spent - returned <= allowed
    return spent, returned


# -- charges -----------------------------------------------------------------------------------------------------------


def test_an_answer_charges_its_tokens_in_one_row(line: BudgetLine, ledger_url: str) -> None:
    first, second = line.charge(2, units=20)
    (third,) = line.charge(units=5)
    assert [(each.number, each.units, each.spent) for each in (first, second, third)] == [
        (20, 20, 20),
        (40, 20, 40),
        (45, 5, 45),
    ]
    assert rows(ledger_url, "SELECT number, units FROM dpicl_charges ORDER BY number") == [(20, 20), (40, 20), (45, 5)]
    assert (line.spent(), line.remaining()) == (45, COUNT - 45)
    assert line.charge()[0].number == 46, "one token, unless it is said"


def test_all_or_none(line: BudgetLine, ledger_url: str) -> None:
    line.charge(units=150)
    for asked in ({"count": 3, "units": 20}, {"units": 51}, {"queries": ["a", "b", None], "units": 17}):
        with pytest.raises(
            PrivacyBudgetExceeded, match=r"50 of 200 tokens left, and 5\d|50 of 200 tokens left, and 60"
        ):
            line.charge(**asked)
    assert consistent(ledger_url) == (150, 0)
    assert line.charge(2, units=25)[1].number == COUNT
    with pytest.raises(PrivacyBudgetExceeded, match="0 of 200 tokens left, and 1 are needed"):
        line.charge()


@pytest.mark.parametrize("units", [0, -1, True, 1.0, "3", None, 10**8])
def test_units_out_of_bounds_cost_nothing(units: Any, line: BudgetLine) -> None:
    with pytest.raises(InvalidParameter, match="units"):
        line.charge(units=units)
    with pytest.raises(InvalidParameter, match="units"):
        asyncio.run(line.acharge(units=units))
    assert line.spent() == 0


def test_other_lines_count_releases(budget_of: Make) -> None:
    vote = budget_of(3.0).line("vote", 0.2)
    with pytest.raises(InvalidParameter, match="this line counts releases"):
        vote.charge(units=2)
    assert vote.spent() == 0
    (charge,) = vote.charge(units=1)
    with pytest.raises(InvalidParameter, match="unused"):
        vote.record(charge, unused=1)
    assert vote.record(charge)["tokens"] is None
    assert vote.unreleased_receipt()["tokens"] is None


def test_tasks_charge_tokens(line: BudgetLine) -> None:
    first, second = asyncio.run(line.acharge(2, units=7))
    assert isinstance(first, Charge)
    assert isinstance(second, Charge)
    assert (first.number, second.number, second.units) == (7, 14, 7)


# -- tokens that were never sampled ------------------------------------------------------------------------------------


def test_tokens_that_were_never_sampled_do_not_count(budget: PrivacyBudget, line: BudgetLine, ledger_url: str) -> None:
    (charge,) = line.charge(units=50)
    before = budget.epsilon_spent()
    receipt = line.record(charge, answer='"x"', unused=38)
    assert (receipt["tokens"], receipt["remaining"], receipt["number"]) == (12, COUNT - 12, 50)
    assert receipt["epsilon_spent"] == budget.epsilon_spent() == line.plan.spent({"tokens": 12}) < before  # type: ignore[attr-defined]
    assert budget.receipt(receipt["id"]) == receipt
    assert (budget.spent(), budget.remaining(), line.spent(), line.remaining()) == (12, 188, 12, 188)
    assert budget.lines()["tokens"] == {"count": COUNT, "spent": 12, "remaining": 188, "mechanism": "tokens"}
    assert budget.preview(188)["fits"]
    assert not budget.preview(189)["fits"]
    assert budget.total()["plans"][0]["spent"] == {"tokens": 12}
    assert repr(budget).endswith("spent=12)")
    assert consistent(ledger_url) == (50, 38)


def test_receipts_add_up_to_what_counts(budget: PrivacyBudget, line: BudgetLine) -> None:
    draw, net, seen = random.Random(5), 0, []
    while net + 20 <= COUNT:
        (charge,) = line.charge(units=20)
        unused = draw.randrange(20)
        receipt = line.record(charge, unused=unused)
        net += 20 - unused
        assert (charge.spent - unused, receipt["remaining"], budget.spent()) == (net, COUNT - net, net)
        assert receipt["epsilon_spent"] == line.plan.spent({"tokens": net}) == budget.epsilon_spent()  # type: ignore[attr-defined]
        seen.append(receipt)
    assert len(seen) > COUNT // 20, "or nothing was given back"
    assert len({receipt["id"] for receipt in seen}) == len(seen), "numbers are given out once"
    assert seen[-1]["number"] == 20 * len(seen)
    for receipt in seen:
        assert budget.receipt(receipt["id"]) == receipt
    assert budget.epsilon_spent() <= 8.0


@pytest.mark.parametrize("unused", [-1, 20, 21, 1.0, True, "3", None])
def test_unused_tokens_out_of_bounds_change_nothing(unused: Any, line: BudgetLine, ledger_url: str) -> None:
    (charge,) = line.charge(units=20)
    with pytest.raises(InvalidParameter, match="unused"):
        line.record(charge, unused=unused)
    assert consistent(ledger_url) == (20, 0)
    assert rows(ledger_url, "SELECT outcome, receipt FROM dpicl_charges") == [(None, None)]
    assert line.record(charge)["tokens"] == 20


def test_nothing_is_given_back_where_the_answer_did_not_end_normally(line: BudgetLine, ledger_url: str) -> None:
    failed, given_up, pending = line.charge(3, units=10)
    with pytest.raises(InvalidParameter, match="unless the outcome is 'released'"):
        line.record(failed, "members abstained", unused=5)
    line.record(failed, "members abstained")
    line.give_up(given_up)
    for charge in (failed, given_up):
        with pytest.raises(LedgerError, match="nothing is given back"):
            line.record(charge, unused=5)
    assert consistent(ledger_url) == (30, 0)
    assert rows(ledger_url, "SELECT outcome, units FROM dpicl_charges ORDER BY number") == [
        ("members abstained", 10),
        ("given up", 10),
        (None, 10),
    ]
    for forged in (replace(pending, units=100), replace(pending, number=29)):
        with pytest.raises(LedgerError):
            line.record(forged, unused=9)
    assert consistent(ledger_url) == (30, 0)
    assert line.record(pending, unused=9)["tokens"] == 1


def test_tokens_are_given_back_once(line: BudgetLine, ledger_url: str) -> None:
    (charge,) = line.charge(units=10)
    receipt = line.record(charge, answer='"x"', unused=4)
    assert line.record(charge, answer='"x"', unused=4) == receipt, "the same again is no news"
    others: list[dict[str, Any]] = [{"unused": 5}, {"unused": 3}, {}, {"outcome": "failed"}]
    for other in others:
        with pytest.raises(LedgerError, match="nothing is given back"):
            line.record(charge, **{"answer": '"x"', **other})
    line.give_up(charge)
    assert consistent(ledger_url) == (10, 4)
    assert rows(ledger_url, "SELECT outcome, units FROM dpicl_charges") == [("released", 6)]
    (whole,) = line.charge(units=10)
    line.record(whole)
    with pytest.raises(LedgerError):
        line.record(whole, unused=1)
    assert consistent(ledger_url) == (20, 4)


def test_a_race_gives_back_once(line: BudgetLine, ledger_url: str) -> None:
    net = 0
    for turn in range(8):
        (charge,) = line.charge(units=10)
        barrier = threading.Barrier(6)

        def one(i: int, charge: Charge = charge, barrier: threading.Barrier = barrier, turn: int = turn) -> int | None:
            barrier.wait()
            if i == 5 and turn % 2:
                line.give_up(charge)
                return None
            try:
                return line.record(charge, unused=1 + i % 3)["tokens"]
            except LedgerError:
                return None

        with ThreadPoolExecutor(6) as pool:
            done = {counted for counted in pool.map(one, range(6)) if counted is not None}
        assert len(done) <= 1, "whoever was first decides"
        net += done.pop() if done else 10
        assert line.spent() == net
    consistent(ledger_url)


def test_a_failure_between_the_receipt_and_the_counter_leaves_neither(
    budget: PrivacyBudget, line: BudgetLine, ledger_url: str
) -> None:
    (charge,) = line.charge(units=10)
    rows(ledger_url, "CREATE TRIGGER t BEFORE UPDATE OF returned ON dpicl_counters BEGIN SELECT RAISE(ABORT, ''); END")
    with pytest.raises(LedgerError, match="do not add up"):
        line.record(charge, unused=3)
    rows(ledger_url, "DROP TRIGGER t")
    assert consistent(ledger_url) == (10, 0)
    assert rows(ledger_url, "SELECT outcome, receipt, units FROM dpicl_charges") == [(None, None, 10)]
    assert line.record(charge, unused=3)["tokens"] == 7
    assert budget.spent() == 7


def test_the_database_refuses_to_give_back_more_than_was_spent(line: BudgetLine, ledger_url: str) -> None:
    line.charge(units=10)
    for change in ("returned = 11", "returned = -1", f"spent = {COUNT + 1}"):
        with pytest.raises(sqlite3.IntegrityError):
            rows(ledger_url, f"UPDATE dpicl_counters SET {change}")
    assert rows(ledger_url, f"UPDATE dpicl_counters SET spent = {COUNT + 3}, returned = 3 RETURNING spent")


def test_threads_that_give_back_at_random_never_over_spend(line: BudgetLine, budget: PrivacyBudget) -> None:
    numbers: list[int] = []
    counted: list[int] = []
    seen: list[int] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        while True:
            units = draw.randrange(1, 30)
            try:
                charges = line.charge(draw.randrange(1, 3), units=units)
            except PrivacyBudgetExceeded:
                if units == 1:
                    return
                continue
            seen.append(budget.spent())
            for charge in charges:
                numbers.append(charge.number)
                if draw.random() < 0.2:
                    line.give_up(charge)
                    counted.append(units)
                else:
                    counted.append(line.record(charge, unused=draw.randrange(units))["tokens"] or 0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) > COUNT, "or nothing that was given back was used"
    assert sum(counted) == budget.spent() <= COUNT
    assert max(seen) <= COUNT
    assert budget.epsilon_spent() <= 8.0


# -- what else reads the counters --------------------------------------------------------------------------------------


def test_a_replayed_answer_gives_nothing_back(line: BudgetLine) -> None:
    query = line.query_id({"input": "x"})
    one, same = line.charge(queries=[query, query], units=10)
    assert one is same
    assert isinstance(one, Charge)
    receipt = line.record(one, answer='"x"', unused=6)
    (again,) = line.charge(queries=[query], units=10)
    assert isinstance(again, Replayed)
    assert again.receipt == {**receipt, "replayed": True}
    assert line.spent() == 4


def test_each_principal_has_tokens_of_its_own(budget_of: Make) -> None:
    budget = budget_of(8.0, releases=COUNT, scope="per_principal")
    line = budget.line("tokens", 0.05)
    (first,) = line.charge(principal="alice", units=100)
    line.charge(principal="bob", units=60)
    receipt = line.record(first, unused=90)
    assert budget.principals() == {"alice": {"tokens": 10}, "bob": {"tokens": 60}}
    assert line.charge(principal="alice", units=190)[0].number == 290
    with pytest.raises(PrivacyBudgetExceeded, match="for this principal"):
        line.charge(principal="alice")
    assert budget.receipt(receipt["id"], principal="alice") == receipt
    assert budget.receipt(receipt["id"], principal="bob") is None


def test_other_lines_of_the_plan_see_what_counts(budget_of: Make) -> None:
    budget = budget_of(8.0, releases={"write": COUNT, "sort": 10})
    budget.declare("sort", "vote", 0.05)
    write, sort = budget.line("tokens", 0.05, name="write"), budget.line("vote", 0.05, name="sort")
    (charge,) = write.charge(units=100)
    assert sort.charge()[0].others == {"write": 100}
    write.record(charge, unused=60)
    (vote,) = sort.charge()
    assert vote.others == {"write": 40}
    (more,) = write.charge(units=10)
    with pytest.raises(InvalidParameter, match="unused"):
        sort.record(more, unused=5)
    write.record(more, unused=9)
    expected = sort.plan.spent({"write": 40, "sort": 2})  # type: ignore[attr-defined]
    assert sort.record(vote)["epsilon_spent"] == expected < budget.epsilon_spent()


def test_the_soft_limit_looks_at_what_counts(budget_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    facts: list[Any] = []
    line = budget_of(8.0, releases=COUNT, soft_limit=0.5, on_soft_limit=facts.append).line("tokens", 0.05)
    with caplog.at_level(logging.WARNING, "langchain_dpicl.budget"):
        line.record(line.charge(units=90)[0], unused=80)
        line.charge(units=89)
        assert facts == []
        line.charge(units=1)
        assert [(each["spent"], each["remaining"]) for each in facts] == [(100, 100)]
        line.charge(units=20)
    assert len(facts) == 1


def test_what_is_exported_adds_up(line: BudgetLine, ledger_url: str) -> None:
    first, _ = line.charge(2, units=10)
    receipt = line.record(first, unused=7)
    report = LedgerReport(ledger_url)
    found = list(report.history("t"))
    assert [(row["number"], row["units"], row["spent"]) for row in found] == [(10, 3, 3), (20, 10, 13)]
    assert report.show("t")["budgets"][0]["lines"]["tokens"]["spent"] == 13
    assert report.receipt(receipt["id"]) == receipt
    report.close()


def test_one_release_takes_as_many_statements_as_before(budget_of: Make) -> None:
    """The counter and the row by the driver; everything else is the transaction."""
    line = budget_of(8.0, releases=COUNT).line("tokens", 0.05)
    line.charge(units=5)
    seen: list[str] = []

    @sa.event.listens_for(line._ledger._engine, "before_cursor_execute")
    def watch(_: Any, __: Any, statement: str, *___: Any) -> None:
        seen.append(statement)

    line.charge(units=5)
    line.charge()
    assert seen == [], json.dumps(seen)
