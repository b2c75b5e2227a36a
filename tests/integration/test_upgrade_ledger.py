"""Upgrading a ledger: killed at any point, beside processes that use it, on PostgreSQL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import by_hand  # noqa: F401
import pgvector_server
import pytest
import sqlalchemy as sa
from earlier_release import EXPECTED, FOLDER, READS_LISTS, content, copied, made

from langchain_dpicl import LedgerError, PrivacyBudget
from langchain_dpicl.budget import schema
from langchain_dpicl.budget import upgrade as ledgers
from langchain_dpicl.budget.upgrade import upgrade
from langchain_dpicl.budget.witness import Witness

KILLED = """
import json, os, random, signal, sys, time
import sqlalchemy as sa
from langchain_dpicl.budget import stored, upgrade
from langchain_dpicl import durable

urls, at = json.loads(sys.argv[1]), json.loads(sys.argv[2])
passed, end = 0, None

def point(*_, **__):
    global passed
    passed += 1
    if passed == end:
        os.kill(os.getpid(), signal.SIGKILL)

def around(name):
    honest = getattr(os, name)
    def call(*given, **named):
        point()
        answer = honest(*given, **named)
        point()
        return answer
    setattr(os, name, call)

for name in ("before_cursor_execute", "after_cursor_execute", "commit", "begin", "rollback"):
    sa.event.listen(sa.engine.Engine, name, point)
for name in ("open", "link", "replace", "unlink", "fsync", "close"):
    around(name)
for url, last in zip(urls, at):
    child = os.fork()
    if not child:
        end = last
        upgrade.upgrade(url)
        os._exit(0)
    if last is None:  # at a moment
        time.sleep(0.05 * random.random())
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    print(os.WTERMSIG(status), flush=True)
if not at:
    upgrade.upgrade(urls[0])
    print(passed)
"""
"""Upgrades ledgers in processes that are killed: at the point of this number, or at a moment. Without any: counts the
points."""


def killed(urls: list[str], at: list[int | None]) -> list[int]:
    command = [sys.executable, "-c", KILLED, json.dumps(urls), json.dumps(at)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return [int(line) for line in done.stdout.split()]


def test_killed_at_any_point_the_ledger_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """Before or after statements, and at files, one in three of these points; and the witness is never written."""
    old = content(FOLDER / "ledger.sqlite")
    witness = content(FOLDER / "ledger.sqlite.witness")
    (points,) = killed([f"sqlite:///{(whole := copied(tmp_path / 'whole'))}"], [])
    new = content(whole)
    assert new != old
    assert points > 100
    counted = range(1, points + 1, 3)
    at: list[int | None] = [*counted, *[None] * 12]
    paths = [copied(tmp_path / str(place)) for place in range(len(at))]
    signals = killed([f"sqlite:///{path}" for path in paths], at)
    assert signals[: len(counted)] == [signal.SIGKILL] * len(counted)
    found: list[bool] = []
    for path in paths:
        now = content(path)
        assert now in (old, new), path
        found.append(now == new)
        assert content(path.with_name(f"{path.name}.witness")) == witness
    assert {True, False} == set(found)
    assert found[: len(counted)] == sorted(found[: len(counted)]), "the old one until one moment, then the new one"
    for path, is_new in zip(paths, found, strict=True):  # the next call goes on
        assert (upgrade(f"sqlite:///{path}") is None) == is_new
        assert content(path) == new
        budget = PrivacyBudget.open("votes", f"sqlite:///{path}")
        assert budget.spent() == EXPECTED["ledger"]["budgets"]["votes"]["spent"]["vote"]
        budget.close()


def test_a_ledger_in_use_is_left_alone(tmp_path: Path) -> None:
    """Whoever has it open, in whatever release, shares the witness's lock."""
    path = copied(tmp_path)
    before = content(path)
    other = Witness(f"sqlite:///{path}.witness", live=True)
    assert other.enter()
    other.share()
    with pytest.raises(LedgerError, match="is in use: stop every process"):
        upgrade(f"sqlite:///{path}")
    assert content(path) == before
    other.close()
    upgrade(f"sqlite:///{path}")
    assert content(path) != before


def test_a_process_that_had_the_earlier_form_open_cannot_charge_the_new_one(tmp_path: Path) -> None:
    """The statements with which the release of 2644f89 joins a ledger again, and reads it, find their tables gone."""
    path = copied(tmp_path)
    joins = "SELECT plan_id, state FROM dpicl_filters JOIN dpicl_plans ON dpicl_plans.id = plan_id"
    reads = "SELECT id, name, content, digest, created, scope, fingerprint, generation, tickets FROM dpicl_plans"
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as open_before:
        for statement in (joins, reads):
            open_before.exec_driver_sql(statement).all()
        open_before.rollback()
        upgrade(f"sqlite:///{path}")
        for statement in (joins, reads):
            with pytest.raises(sa.exc.OperationalError, match="no such"):
                open_before.exec_driver_sql(statement)
    engine.dispose()


# -- PostgreSQL --------------------------------------------------------------------------------------------------------


def put(source: Path, engine: sa.Engine) -> None:
    """Copy a SQLite file's tables into a database."""
    tables = sa.MetaData()
    with sa.create_engine(f"sqlite:///{source}").connect() as old, engine.begin() as new:
        tables.reflect(old)
        for table in tables.tables.values():
            for column in table.columns:
                if isinstance(column.type, sa.BLOB):
                    column.type = sa.LargeBinary()
        tables.create_all(new)
        for table in tables.sorted_tables:
            rows = [dict(row) for row in old.execute(sa.select(table)).mappings()]
            if rows:
                new.execute(sa.insert(table), rows)
            if table.name in ("dpicl_plans", "dpicl_counters", "dpicl_acts"):
                new.exec_driver_sql(
                    f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), "
                    f"(SELECT coalesce(max(id), 1) FROM {table.name}))"
                )


@pytest.fixture
def on_postgresql(pgvector: str, tmp_path: Path) -> Iterator[str]:
    """The ledger of 2644f89, with its witness, in a database of its own."""
    name = "dpicl_upgrade"
    pgvector_server.ask(pgvector, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)", f"CREATE DATABASE {name}")
    url = sa.make_url(pgvector).set(database=name, drivername="postgresql+psycopg")
    engine = sa.create_engine(url)
    put(FOLDER / "ledger.sqlite", engine)
    put(FOLDER / "ledger.sqlite.witness", engine)
    engine.dispose()
    yield url.render_as_string(hide_password=False)
    pgvector_server.ask(pgvector, f"DROP DATABASE {name} WITH (FORCE)")


def state_of(url: str) -> tuple[str, list[Any], list[Any]]:
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            version = connection.exec_driver_sql("SELECT value FROM dpicl_meta WHERE key = 'schema_version'").scalar()
            counters = connection.exec_driver_sql("SELECT * FROM dpicl_counters ORDER BY id").all()
            return str(version), list(counters), sorted(sa.inspect(connection).get_table_names())
    finally:
        engine.dispose()


def test_a_ledger_on_postgresql_is_upgraded(
    on_postgresql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not READS_LISTS:
        monkeypatch.setattr(ledgers, "with_lists", lambda text: text)
    version, counters, tables = state_of(on_postgresql)
    assert version == "6"
    with pytest.raises(ValueError, match="key_file=None"):
        upgrade(on_postgresql)
    assert state_of(on_postgresql) == (version, counters, tables)
    key = tmp_path / "owners.key"
    found = upgrade(on_postgresql, key_file=key)
    assert found is not None
    assert found["key_file"] == str(key)
    version, after, tables = state_of(on_postgresql)
    assert (version, after) == ("7", counters)
    assert set(tables) == set(schema.metadata.tables) | {"dpicl_witness", "dpicl_marks"}
    engine = sa.create_engine(on_postgresql)
    for name, table in schema.metadata.tables.items():
        there = {column["name"] for column in sa.inspect(engine).get_columns(name)}
        assert there == {column.name for column in table.columns}
    engine.dispose()
    assert upgrade(on_postgresql) is None
    for name, expected in EXPECTED["ledger"]["budgets"].items():
        budget = PrivacyBudget.open(name, on_postgresql, key_file=key)
        assert made.state(budget)["spent"] == expected["spent"]
        budget.close()
    budget = PrivacyBudget.open("votes", on_postgresql)
    budget.line("vote", 0.5).charge()
    assert budget.spent() == 3
    assert len(budget.total()["plans"]) == 6
    budget.close()


def test_killed_on_postgresql_the_ledger_is_the_old_one_or_the_new_one(on_postgresql: str, tmp_path: Path) -> None:
    before = state_of(on_postgresql)
    script = KILLED.replace("upgrade.upgrade(url)", f"upgrade.upgrade(url, key_file={str(tmp_path / 'key')!r})")
    for at in range(5, 400, 40):
        command = [sys.executable, "-c", script, json.dumps([on_postgresql]), json.dumps([at])]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        version, counters, tables = state_of(on_postgresql)
        assert counters == before[1]
        assert (tables == before[2]) == (version == "6")
        if int(done.stdout) == 0:
            break
    assert version == "7"


def test_a_transaction_of_another_process_is_waited_for(on_postgresql: str, tmp_path: Path) -> None:
    """A charge that is under way when the upgrade begins is in the counts, or comes after it."""
    engine = sa.create_engine(on_postgresql)
    with engine.connect() as other:
        other.exec_driver_sql("UPDATE dpicl_counters SET spent = spent + 1 WHERE id = 1")
        script = (
            "import sys; from langchain_dpicl.budget.upgrade import upgrade; upgrade(sys.argv[1], key_file=sys.argv[2])"
        )
        child = subprocess.Popen([sys.executable, "-c", script, on_postgresql, str(tmp_path / "key")])
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(6)
        other.commit()
    assert child.wait(60) == 0
    engine.dispose()
    version, counters, _ = state_of(on_postgresql)
    assert (version, counters[0].spent) == ("7", 3)


def test_copies_for_these_tests_are_complete(tmp_path: Path) -> None:
    """What the tests above compare is the whole file."""
    path = copied(tmp_path)
    assert content(path) == content(FOLDER / "ledger.sqlite")
    shutil.copy(FOLDER / "free.sqlite", path)
    assert content(path) != content(FOLDER / "ledger.sqlite")
    assert os.path.getsize(path) < 200_000
