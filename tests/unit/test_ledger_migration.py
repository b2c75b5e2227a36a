"""`budget/schema.py`: an older ledger becomes a newer one, wholly or not at all."""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_files import adopt

from langchain_dpicl import LedgerError, PlanMismatch, PrivacyBudget, PrivacyBudgetExceeded
from langchain_dpicl.budget import recovery, schema
from langchain_dpicl.budget.ledger import UNWATCHED, Ledger

VERSION_1 = Path(__file__).parent.parent / "data" / "ledger_v1.sql"
"""A dump of a ledger that the first version of the package wrote: 3 of 10 votes charged, 2 of them recorded, under
"reviews:2025"; all 5 of "other"."""

VERSION_2 = VERSION_1.with_name("ledger_v2.sql")
"""A dump of a ledger that version 0.2 wrote: under "reviews:2025" three votes on x, y and z charged, the first two
recorded, the first with an answer; under "callers", per principal, 5 of ann and 2 of bob; 2 votes of a filtered one."""


def written(url: str, dump: Path) -> str:
    """A ledger from a dump; its address."""
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    connection.executescript(dump.read_text())
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    return url


@pytest.fixture
def old(ledger_url: str) -> str:
    """The address of a ledger of version 1."""
    return written(ledger_url, VERSION_1)


@pytest.fixture
def second(ledger_url: str) -> str:
    """The address of a ledger of version 2."""
    return written(ledger_url, VERSION_2)


def rows(url: str, statement: str) -> list[Any]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def test_an_old_ledger_has_no_witness_and_is_refused(old: str) -> None:
    """It may be an old copy. `recover` migrates it, and believes its counts if it is told to."""
    with pytest.raises(LedgerError, match=r"no witness .* `dpicl budget recover`"):
        PrivacyBudget(3.0, 1e-5, 10, old, "reviews:2025")
    assert rows(old, "SELECT value FROM dpicl_meta") == [("1",)]
    recovery.recover(old)
    assert PrivacyBudget.open("reviews:2025", old).remaining() == 0


def test_an_old_ledger_counts_on_where_it_stopped(old: str) -> None:
    budget = PrivacyBudget(3.0, 1e-5, 10, adopt(old), "reviews:2025")
    line = budget.line("vote", 0.2)
    assert (budget.spent(), budget.remaining()) == (3, 7)
    assert [charge.number for charge in line.charge(2)] == [4, 5]
    with pytest.raises(PrivacyBudgetExceeded):
        PrivacyBudget.open("other", old).line("joint-em", 0.1).charge()
    assert rows(old, "SELECT value FROM dpicl_meta WHERE key = 'schema_version'") == [("4",)]
    assert rows(old, "PRAGMA integrity_check") == [("ok",)]
    names = {name for (name,) in rows(old, "SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert names == set(schema.metadata.tables)


def test_old_receipts_are_found_and_say_what_they_said(old: str) -> None:
    before = json.loads(rows(old, "SELECT receipt FROM dpicl_releases WHERE plan_id = 1 AND number = 3")[0][0])
    adopt(old)
    receipt = PrivacyBudget.open("reviews:2025", old).receipt("reviews:2025:vote:3")
    assert receipt is not None
    assert {key: receipt[key] for key in before} == before  # type: ignore[literal-required]
    assert (receipt["outcome"], receipt["replayed"], receipt["principal"]) == ("released", False, None)
    assert PrivacyBudget.open("reviews:2025", old).receipt("reviews:2025:vote:2") is None, "charged, never answered"


def test_a_migrated_ledger_replays(old: str) -> None:
    line = PrivacyBudget.open("reviews:2025", adopt(old)).line("vote", 0.2)
    query = line.query_id({"input": "x"})
    (charge,) = line.charge(queries=[query])
    line.record(charge, answer='"a"')  # type: ignore[arg-type]
    assert line.charge(queries=[query])[0].answer == '"a"'  # type: ignore[union-attr]


def test_workers_that_open_an_old_ledger_at_once_migrate_it_once(old: str) -> None:
    barrier, spent, errors = threading.Barrier(6), [], []

    def run() -> None:
        barrier.wait()
        try:
            spent.append(PrivacyBudget.open("reviews:2025", old, witness=UNWATCHED).spent())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (errors, spent) == ([], [3] * 6)


@pytest.mark.parametrize("step", range(len(schema._MIGRATION_1) + 1))
def test_a_migration_that_fails_at_any_step_leaves_the_old_ledger(
    step: int, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "\n".join(map(str, rows(old, "SELECT * FROM dpicl_lines") + rows(old, "SELECT * FROM dpicl_releases")))
    broken = list(schema._MIGRATION_1)
    broken.insert(step, "INSERT INTO no_such_table VALUES (1)")
    with monkeypatch.context() as patch:
        patch.setattr(schema, "_MIGRATION_1", broken)
        with pytest.raises(LedgerError):
            adopt(old)
    assert (
        "\n".join(map(str, rows(old, "SELECT * FROM dpicl_lines") + rows(old, "SELECT * FROM dpicl_releases")))
        == content
    )
    assert rows(old, "SELECT value FROM dpicl_meta") == [("1",)]
    assert PrivacyBudget.open("reviews:2025", adopt(old)).spent() == 3


@pytest.mark.parametrize("table", sorted(schema._VERSION_1))
def test_an_old_ledger_that_lost_a_table_is_not_made_anew(table: str, old: str) -> None:
    connection = sqlite3.connect(old.removeprefix("sqlite:///"))
    connection.execute(f"DROP TABLE {table}")
    connection.close()
    with pytest.raises(LedgerError, match="lost tables"):
        Ledger(old)


@pytest.mark.parametrize("table", sorted(schema.metadata.tables))
def test_a_ledger_that_lost_a_table_is_not_made_anew(table: str, ledger_url: str) -> None:
    Ledger(ledger_url).close()
    connection = sqlite3.connect(ledger_url.removeprefix("sqlite:///"))
    connection.execute(f"DROP TABLE {table}")
    connection.close()
    with pytest.raises(LedgerError, match="lost tables"):
        Ledger(ledger_url)


@pytest.mark.parametrize("version", ["0", "5", "", "two", "-1"])
def test_another_version_is_refused_and_left_as_it_is(version: str, ledger_url: str) -> None:
    Ledger(ledger_url).close()
    path = ledger_url.removeprefix("sqlite:///")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE dpicl_meta SET value = ? WHERE key = 'schema_version'", (version,))
    connection.close()
    with pytest.raises(LedgerError, match="reads versions 1 to 4"):
        Ledger(ledger_url)
    assert rows(ledger_url, "SELECT value FROM dpicl_meta WHERE key = 'schema_version'") == [(version,)]


# -- from version 2 ----------------------------------------------------------------------------------------------------


def old_rows(url: str) -> list[Any]:
    """All that a ledger of version 2 holds, but its version."""
    columns = "id, name, content, digest, created, scope, fingerprint, generation"
    counted = "id, plan_id, line, principal, allowed, spent, returned"
    tables = sorted(schema._VERSION_2 - {"dpicl_plans", "dpicl_counters"})
    found = [rows(url, f"SELECT {columns} FROM dpicl_plans"), rows(url, f"SELECT {counted} FROM dpicl_counters")]
    found += [rows(url, f"SELECT * FROM {t}") for t in tables]
    return [row for table in found for row in table if row[0] not in ("schema_version", schema.IDENTITY)]


def test_a_ledger_of_version_2_counts_on_and_replays(second: str) -> None:
    keys = rows(second, "SELECT key, value FROM dpicl_meta WHERE key LIKE '%_key' ORDER BY key")
    before = old_rows(second)
    budget = PrivacyBudget(3.0, 1e-5, 10, adopt(second), "reviews:2025", replay_patience=0.0)
    line = budget.line("vote", 0.2)
    assert (budget.spent(), budget.remaining(), budget.tickets) == (3, 7, False)
    assert old_rows(second) == before, "nothing that was there has changed"
    assert rows(second, "SELECT key, value FROM dpicl_meta WHERE key LIKE '%_key' ORDER BY key") == keys
    assert rows(second, "SELECT value FROM dpicl_meta WHERE key = 'schema_version'") == [("4",)]
    assert rows(second, "SELECT DISTINCT tickets FROM dpicl_plans") == [(0,)]
    known = [line.query_id({"input": text}) for text in "xyz"]
    first, *charged = line.charge(queries=known)
    assert first.answer == '"Positive"'  # type: ignore[union-attr]
    assert [charge.number for charge in charged] == [4, 5]  # type: ignore[union-attr]
    names = {name for (name,) in rows(second, "SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert names == set(schema.metadata.tables)
    assert rows(second, "PRAGMA integrity_check") == [("ok",)]


def test_principals_and_filters_of_version_2_stand(second: str) -> None:
    callers = PrivacyBudget.open("callers", adopt(second))
    assert callers.principals() == {"ann": {"joint-em": 5}, "bob": {"joint-em": 2}}
    line = callers.line("joint-em", 0.1)
    with pytest.raises(PrivacyBudgetExceeded):
        line.charge(principal="ann")
    assert [charge.number for charge in line.charge(principal="bob")] == [3]
    assert callers.receipt("callers:joint-em:4.2") is not None
    filtered = PrivacyBudget.open("filter", second)
    assert filtered.spent("vote") == 2
    assert filtered.epsilon_spent() > 0.0


@pytest.mark.parametrize("dump", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_a_migrated_ledger_takes_a_plan_with_tickets(dump: Path, ledger_url: str, store_of: Any, records: Any) -> None:
    """And a plan without them, frozen before, cannot be opened with them."""
    url = adopt(written(ledger_url, dump))
    with pytest.raises(PlanMismatch, match="tickets"):
        PrivacyBudget(3.0, 1e-5, 10, url, "reviews:2025", tickets=True)
    store = store_of(records(3))
    budget = PrivacyBudget(1000, 1e-5, 2, url, "with tickets", tickets=True)
    line = budget.line("vote", 0.5)
    for numbers in ([0, 1], [0], [0]):
        line.charge(owners=[line.ask(store, np.array(numbers))])
    budget.close()
    (report,) = PrivacyBudget.open("with tickets", url).private_ticket_report().values()
    assert report[""]["burnt"] == {"1": 1, "2": 1}


def test_a_migration_from_version_2_that_fails_leaves_it(second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, names = old_rows(second), rows(second, "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    with monkeypatch.context() as patch:
        patch.setattr(schema, "_MIGRATION_2", "INSERT INTO no_such_table VALUES (1)")
        with pytest.raises(LedgerError):
            adopt(second)
    assert old_rows(second) == before
    assert rows(second, "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name") == names
    assert rows(second, "SELECT value FROM dpicl_meta WHERE key = 'schema_version'") == [("2",)]
    assert PrivacyBudget.open("reviews:2025", adopt(second)).spent() == 3


@pytest.mark.parametrize("table", sorted(schema._VERSION_2))
def test_a_ledger_of_version_2_that_lost_a_table_is_not_made_anew(table: str, second: str) -> None:
    connection = sqlite3.connect(second.removeprefix("sqlite:///"))
    connection.execute(f"DROP TABLE {table}")
    connection.close()
    with pytest.raises(LedgerError, match="lost tables"):
        Ledger(second)


def test_keys_are_random_and_stay(ledger_url: str, tmp_path: Path) -> None:
    one, again, other = Ledger(ledger_url), Ledger(ledger_url), Ledger(f"sqlite:///{tmp_path / 'other.db'}")
    for name in ("query_key", "fingerprint_key"):
        assert one.key(name) == again.key(name) != other.key(name)
        assert len(one.key(name)) == 32
    assert one.key("query_key") != one.key("fingerprint_key")
    with pytest.raises(LedgerError):
        one.key("no such key")
