"""`budget/schema.py`: a ledger of another version, or one that lost tables, is refused and left as it is."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import LedgerError, PlanMismatch, PrivacyBudget
from langchain_dpicl.budget import schema
from langchain_dpicl.budget.ledger import Ledger


def rows(url: str, statement: str) -> list[Any]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


@pytest.mark.parametrize("table", sorted(schema.metadata.tables))
def test_a_ledger_that_lost_a_table_is_not_made_anew(table: str, ledger_url: str) -> None:
    Ledger(ledger_url).close()
    connection = sqlite3.connect(ledger_url.removeprefix("sqlite:///"))
    connection.execute(f"DROP TABLE {table}")
    connection.close()
    with pytest.raises(LedgerError, match="lost tables"):
        Ledger(ledger_url)


@pytest.mark.parametrize("version", ["0", "1", "2", "3", "6", "7", "9", "", "two", "-1"])
def test_another_version_is_refused_and_left_as_it_is(version: str, ledger_url: str) -> None:
    Ledger(ledger_url).close()
    path = ledger_url.removeprefix("sqlite:///")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE dpicl_meta SET value = ? WHERE key = 'schema_version'", (version,))
    connection.close()
    with pytest.raises(LedgerError, match=f"schema version {version}; this release reads version 8 alone"):
        Ledger(ledger_url)
    assert rows(ledger_url, "SELECT value FROM dpicl_meta WHERE key = 'schema_version'") == [(version,)]


def test_keys_are_random_and_stay(ledger_url: str, tmp_path: Path) -> None:
    one, again, other = Ledger(ledger_url), Ledger(ledger_url), Ledger(f"sqlite:///{tmp_path / 'other.db'}")
    assert one.key("query_key") == again.key("query_key") != other.key("query_key")
    assert len(one.key("query_key")) == 32
    assert one.identity == again.identity != other.identity
    with pytest.raises(LedgerError):
        one.key("no such key")


def test_an_earlier_versions_budget_without_a_plan_is_refused_and_stops_no_plan(ledger_url: str) -> None:
    """Its ledger has a table more, and its witness a mark for the whole of that budget."""
    budget = PrivacyBudget(3.0, 1e-5, 10, ledger_url, "plan")
    budget.line("vote", 0.2).charge()
    budget.close()
    path, digest = ledger_url.removeprefix("sqlite:///"), "0" * 64
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE dpicl_filters (plan_id INTEGER PRIMARY KEY, state TEXT NOT NULL)")
        plan = (
            "free",
            '{"delta": 1e-05, "epsilon": 2.0, "failures": 0.0, "format": "filter-1", "orders": [6]}',
            digest,
        )
        connection.execute("INSERT INTO dpicl_plans (id, name, content, digest, created) VALUES (1, ?, ?, ?, '')", plan)
        connection.execute("INSERT INTO dpicl_filters VALUES (1, 'state')")
        insert = "INSERT INTO dpicl_counters (id, plan_id, line, allowed, spent) VALUES (1, 1, 'vote', ?, 1)"
        connection.execute(insert, (schema.UNLIMITED,))
    connection.close()
    with sqlite3.connect(f"{path}.witness") as connection:
        connection.execute("INSERT INTO dpicl_marks VALUES ('free', '', '', ?, 0, 1)", (digest,))
    connection.close()
    for ask in (
        lambda: PrivacyBudget(2.0, 1e-5, 10, ledger_url, "free"),
        lambda: PrivacyBudget.open("free", ledger_url),
    ):
        with pytest.raises(PlanMismatch, match="'free' has no plan"):
            ask()
    assert rows(ledger_url, "SELECT spent FROM dpicl_counters ORDER BY id") == [(1,), (1,)]
    again = PrivacyBudget.open("plan", ledger_url)
    again.line("vote", 0.2).charge()
    assert again.spent() == 2
    with pytest.raises(PlanMismatch, match="'free'"):
        again.total()
