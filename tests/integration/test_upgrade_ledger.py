"""Upgrading a ledger: killed at any point, beside processes that use it, on PostgreSQL."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import by_hand  # noqa: F401
import pgvector_server
import pytest
import sqlalchemy as sa
from earlier_release import EXPECTED, FOLDER, READS_LISTS, ask, content, copied, made
from ledger_files import AFTER_A_KILL

from langchain_dpicl import LedgerError, PrivacyBudget
from langchain_dpicl.budget import schema, witness
from langchain_dpicl.budget import upgrade as ledgers
from langchain_dpicl.budget.upgrade import upgrade

KILLED = """
import json, os, random, signal, sys, time
import sqlalchemy as sa
from langchain_dpicl.budget import stored, upgrade
from langchain_dpicl import durable

urls, at, key_file = json.loads(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
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
commits = []
sa.event.listen(sa.engine.Engine, "commit", lambda _: commits.append(passed))
for name in ("open", "link", "replace", "unlink", "fsync", "close"):
    around(name)
for url, last in zip(urls, at):
    child = os.fork()
    if not child:
        end = last
        upgrade.upgrade(url, key_file=key_file)
        os._exit(0)
    if last is None:  # at a moment
        time.sleep(0.05 * random.random())
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    print(os.WTERMSIG(status), flush=True)
if not at:
    upgrade.upgrade(urls[0], key_file=key_file)
    print(passed, *commits)
"""
"""Upgrades ledgers in processes that are killed: at the point of this number, or at a moment. Without any: counts the
points, and says which were before a COMMIT."""


def killed(urls: list[str], at: list[int | None], key_file: Path | None = None) -> list[int]:
    values = (urls, at, key_file and str(key_file))
    command = [sys.executable, "-c", KILLED, *map(json.dumps, values)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.filterwarnings(AFTER_A_KILL)
@pytest.mark.parametrize(("name", "every"), [("ledger", 4), ("tickets", 6)])
def test_killed_at_any_point_both_files_are_old_or_both_new_or_the_witness_alone_is(
    name: str, every: int, tmp_path: Path
) -> None:
    """Before or after statements, and at files, at one in so many of these points: the same call ends it."""
    old = (content(FOLDER / f"{name}.sqlite"), content(FOLDER / f"{name}.sqlite.witness"))
    points, *commits = killed([f"sqlite:///{(whole := copied(tmp_path / 'whole', name))}"], [])
    new = both(whole)
    assert (new[0] != old[0], new[1] != old[1]) == (True, True)
    assert points > 100
    counted = sorted({*range(1, points + 1, every), *commits})
    at: list[int | None] = [*counted, *[None] * 12]
    paths = [copied(tmp_path / str(place), name) for place in range(len(at))]
    signals = killed([f"sqlite:///{path}" for path in paths], at)
    assert signals[: len(counted)] == [signal.SIGKILL] * len(counted)
    order = [old, (old[0], new[1]), new]
    found = [order.index(both(path)) for path in paths]
    assert found[: len(counted)] == sorted(found[: len(counted)]), "the witness at one moment, then the ledger"
    assert {0, 1, 2} == set(found)
    for path, stage in zip(paths, found, strict=True):  # the next call goes on
        if stage < 2:
            with pytest.raises(LedgerError, match=r"schema version 6; .* `dpicl upgrade PATH`"):
                PrivacyBudget.open("votes", f"sqlite:///{path}")
        if stage == 1:
            with pytest.raises(sqlite3.OperationalError, match="no such column"):
                ask(Path(f"{path}.witness"), EARLIER_MARKS)
        assert (upgrade(f"sqlite:///{path}") is None) == (stage == 2)
        assert both(path) == new
    if name == "ledger":
        budget = PrivacyBudget.open("votes", f"sqlite:///{path}")
        assert budget.spent() == EXPECTED["ledger"]["budgets"]["votes"]["spent"]["vote"]
        budget.close()
    else:
        assert [*made.probes(f"sqlite:///{path}")] == EXPECTED["tickets"]["probes"]


def both(path: Path) -> tuple[list[Any], list[Any]]:
    """A ledger and its witness."""
    return content(path), content(Path(f"{path}.witness"))


EARLIER_MARKS = "SELECT plan, line, principal, digest, allowed, low, reserved, ahead, before, state FROM dpicl_marks"
"""The statement with which the release of 2644f89 reads a witness, whatever it does with a ledger."""


def test_a_ledger_in_use_is_left_alone(tmp_path: Path) -> None:
    """A process of the release of 2644f89 that has it open shares the witness's lock."""
    path = copied(tmp_path)
    before = both(path)
    with open(f"{path}.witness.lock", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        for dry_run in (True, False):
            with pytest.raises(LedgerError, match="is in use: stop every process"):
                upgrade(f"sqlite:///{path}", dry_run=dry_run)
        assert both(path) == before
    upgrade(f"sqlite:///{path}")
    assert content(path) != before[0]


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
def database(pgvector: str) -> Iterator[Callable[[str], str]]:
    """Makes databases of their own, each with a ledger of 2644f89 and its witness."""
    names: list[str] = []

    def url_of(name: str) -> sa.URL:
        return sa.make_url(pgvector).set(database=name, drivername="postgresql+psycopg")

    def make(ledger: str) -> str:
        template = f"dpicl_upgrade_{ledger}"
        if template not in names:
            pgvector_server.ask(
                pgvector, f"DROP DATABASE IF EXISTS {template} WITH (FORCE)", f"CREATE DATABASE {template}"
            )
            names.append(template)
            engine = sa.create_engine(url_of(template))
            put(FOLDER / f"{ledger}.sqlite", engine)
            put(FOLDER / f"{ledger}.sqlite.witness", engine)
            engine.dispose()
        name = f"dpicl_upgrade_{len(names)}"
        pgvector_server.ask(
            pgvector, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)", f"CREATE DATABASE {name} TEMPLATE {template}"
        )
        names.append(name)
        return url_of(name).render_as_string(hide_password=False)

    yield make
    for name in names:
        pgvector_server.ask(pgvector, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def on_postgresql(database: Callable[[str], str]) -> str:
    """The ledger of 2644f89, with its witness, in a database of its own."""
    return database("ledger")


def state_of(url: str) -> dict[str, list[Any]]:
    """All tables of a database, with all their rows."""
    engine = sa.create_engine(url)
    tables = sa.MetaData()
    try:
        with engine.connect() as connection:
            tables.reflect(connection)
            return {
                name: [table.columns.keys(), *sorted(map(tuple, connection.execute(sa.select(table))), key=repr)]
                for name, table in tables.tables.items()
            }
    finally:
        engine.dispose()


def test_a_ledger_on_postgresql_is_upgraded(
    on_postgresql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not READS_LISTS:
        monkeypatch.setattr(ledgers, "with_lists", lambda text: text)
    before = state_of(on_postgresql)
    with pytest.raises(ValueError, match="key_file=None"):
        upgrade(on_postgresql)
    assert state_of(on_postgresql) == before
    key = tmp_path / "owners.key"
    found = upgrade(on_postgresql, key_file=key)
    assert found is not None
    assert found["key_file"] == str(key)
    after = state_of(on_postgresql)
    for name in ("dpicl_counters", "dpicl_charges", "dpicl_queries", "dpicl_steps"):
        assert after[name] == before[name]
    today = schema.metadata.tables | witness.metadata.tables
    assert {name: set(rows[0]) for name, rows in after.items()} == {
        name: {column.name for column in table.columns} for name, table in today.items()
    }
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


@pytest.mark.filterwarnings(AFTER_A_KILL)
def test_killed_on_postgresql_the_same_call_ends_it(database: Callable[[str], str], tmp_path: Path) -> None:
    upgrade(database("tickets"), key_file=tmp_path / "key")  # all others find the key there
    whole = database("tickets")
    old = state_of(whole)
    points, *commits = killed([whole], [], tmp_path / "key")
    new = state_of(whole)
    counted = sorted({*range(1, points + 1, 45), *commits})
    at: list[int | None] = [*counted, *[None] * 2]
    urls = [database("tickets") for _ in at]
    signals = killed(urls, at, tmp_path / "key")
    assert signals[: len(counted)] == [signal.SIGKILL] * len(counted)
    names = witness.metadata.tables.keys()
    order = [old, {**old, **{name: new[name] for name in names}}, new]
    found = [order.index(state_of(url)) for url in urls]
    assert found[: len(counted)] == sorted(found[: len(counted)])
    assert {0, 1, 2} == set(found)
    for url, stage in zip(urls, found, strict=True):
        assert (upgrade(url, key_file=tmp_path / "key") is None) == (stage == 2)
        assert state_of(url) == new
    assert [*made.probes(urls[0], key_file=tmp_path / "key")] == EXPECTED["tickets"]["probes"]


def test_a_ledger_on_postgresql_that_is_in_use_is_left_alone(on_postgresql: str, tmp_path: Path) -> None:
    before = state_of(on_postgresql)
    engine = sa.create_engine(on_postgresql)
    with engine.connect() as other:
        other.execute(sa.select(sa.func.pg_advisory_lock_shared(0x64706977)))
        with pytest.raises(LedgerError, match="is in use: stop every process"):
            upgrade(on_postgresql, key_file=tmp_path / "key")
    engine.dispose()
    assert state_of(on_postgresql) == before
    assert upgrade(on_postgresql, key_file=tmp_path / "key") is not None


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
    found = state_of(on_postgresql)
    assert ("schema_version", "8") in found["dpicl_meta"]
    assert (1, 1, "vote", "", 40, 3, 0, 0) in found["dpicl_counters"]


def test_copies_for_these_tests_are_complete(tmp_path: Path) -> None:
    """What the tests above compare is the whole file."""
    path = copied(tmp_path)
    assert content(path) == content(FOLDER / "ledger.sqlite")
    shutil.copy(FOLDER / "free.sqlite", path)
    assert content(path) != content(FOLDER / "ledger.sqlite")
    assert os.path.getsize(path) < 200_000
