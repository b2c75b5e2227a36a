"""PostgreSQL behind poolers, failovers and bad networks: it works again by itself, or there is one typed error.

Waits are shortened: `Database` says how long they are.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from conftest import on_server
from ledger_files import AFTER_A_KILL
from networks import Network, pooled

from langchain_dpicl import LedgerError, PostgresExemplarStore, PrivacyBudget, StoreError
from langchain_dpicl.budget import BudgetLine
from langchain_dpicl.budget.ledger import UNWATCHED
from langchain_dpicl.sql import Database

PARTS = pytest.mark.parametrize("part", ["ledger", "witness"])


def line_of(url: str, **options: Any) -> BudgetLine:
    return PrivacyBudget(1000.0, 1e-5, 60, url, **options).line("vote", 0.5)


def numbers(line: BudgetLine, times: int = 1) -> list[int]:
    return [line.charge()[0].number for _ in range(times)]


@pytest.fixture
def addresses(part: str, postgres_url: str, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """A budget's addresses: this part of it is on PostgreSQL, at the address that is given, too."""
    beside = f"sqlite:///{tmp_path / 'other.db'}"
    found = {"url": beside, "witness": postgres_url} if part == "witness" else {"url": postgres_url, "witness": beside}
    return found, postgres_url


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"lock": 0.3, "answer": 0.6, "idle": 1.5, "retry": 1}.items():
        monkeypatch.setattr(Database, f"{name}_seconds", seconds)


@pytest.fixture
def network(postgres_url: str) -> Iterator[Network]:
    with contextlib.closing(Network(postgres_url)) as found:
        yield found


def configure(url: str, setting: str) -> None:
    """What new sessions with a database have."""
    on_server(f"ALTER DATABASE {sa.make_url(url).database} SET {setting}")


# -- another primary ---------------------------------------------------------------------------------------------------


@PARTS
def test_a_server_that_is_read_only_is_left_as_soon_as_another_one_answers(
    addresses: tuple[dict[str, Any], str], short: None, terminate: Any
) -> None:
    """Sessions with a former primary can only read. They are not kept, or charges would fail for ever."""
    given, url = addresses
    line = line_of(**given)
    assert numbers(line) == [1]
    configure(url, "default_transaction_read_only = on")
    terminate(url)
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"cannot be used: ReadOnlySqlTransaction \(25006\)"):
            line.charge()
    configure(url, "default_transaction_read_only = off")
    assert numbers(line, 2) == [2, 3], "nothing was charged, and it works again"


def test_a_charge_waits_for_the_new_primary(postgres_url: str, terminate: Any) -> None:
    line = line_of(postgres_url)
    configure(postgres_url, "default_transaction_read_only = on")
    terminate(postgres_url)
    with ThreadPoolExecutor(1) as pool:
        charged = pool.submit(numbers, line)
        time.sleep(0.5)
        assert not charged.done()
        configure(postgres_url, "default_transaction_read_only = off")
        assert charged.result(30) == [1]


def test_a_store_is_not_left_with_a_server_that_is_read_only(
    shared_store: Callable[..., PostgresExemplarStore], pgvector_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pgvector_server import ask

    monkeypatch.setattr(Database, "retry_seconds", 0.5)

    store = shared_store([{"input": f"text {i}", "output": "a", "owner": f"owner {i}"} for i in range(4)])
    name = sa.make_url(pgvector_url).database
    ask(pgvector_url, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    store._database._engine.dispose()
    with pytest.raises(StoreError, match="25006"):
        store.forget("owner 1")
    name_it = f"ALTER DATABASE {name} SET default_transaction_read_only = off"
    ask(pgvector_url, "SET default_transaction_read_only = off", name_it)
    store.forget("owner 1")
    assert store.owner_count == 3


@PARTS
def test_sessions_that_the_server_ends_when_they_are_idle_cost_nothing(
    addresses: tuple[dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a pool at once. One that is found closes the others: they are not tried one by one."""
    given, url = addresses
    configure(url, "idle_session_timeout = '300ms'")
    line = line_of(**given)
    with ThreadPoolExecutor(4) as pool:
        found = [number for each in pool.map(lambda _: numbers(line, 3), range(4)) for number in each]
    time.sleep(0.8)
    failed: list[object] = []
    drop: Any = Database._drop_if_ended
    monkeypatch.setattr(Database, "_drop_if_ended", lambda *given: failed.append(given[2]) or drop(*given))
    assert sorted([*found, *numbers(line)]) == list(range(1, 14))
    assert len(failed) == 1, "or none had ended, or each was tried"


# -- connections that are dropped without a word -----------------------------------------------------------------------


@PARTS
def test_a_connection_that_is_dropped_silently_is_replaced(
    part: str, network: Network, short: None, tmp_path: Path
) -> None:
    beside = f"sqlite:///{tmp_path / 'other.db'}"
    line = line_of(network.url, witness=beside) if part == "ledger" else line_of(beside, witness=network.url)
    assert numbers(line, 3) == [1, 2, 3]
    network.fall_silent()
    started = time.monotonic()
    assert numbers(line, 3) == [4, 5, 6], "charged once each"
    assert 0.5 < time.monotonic() - started < 10
    assert line.spent() == 6


def test_a_network_that_stays_silent_is_told(network: Network, short: None) -> None:
    line = line_of(f"{network.url}?connect_timeout=2")
    network.stays_silent = True
    network.fall_silent()
    started = time.monotonic()
    with pytest.raises(LedgerError, match=r"cannot be used: (the server has not answered for 0.6 s|.*timeout)"):
        line.charge()
    assert time.monotonic() - started < 15
    network.stays_silent = False
    assert numbers(line) == [1]


@pytest.mark.filterwarnings(AFTER_A_KILL)
@pytest.mark.parametrize("answers_alone", [True, False])
def test_a_commit_that_is_dropped_silently_never_runs_again(
    answers_alone: bool, network: Network, short: None, tmp_path: Path
) -> None:
    """The server has committed and its answer is lost; or the COMMIT is, and the server ends the session itself."""
    line = line_of(network.url, witness=tmp_path / "witness")
    numbers(line)
    tries = []

    @sa.event.listens_for(line._ledger._engine, "commit")
    def drop(_: Any) -> None:
        tries.append(None)
        if len(tries) == 1:
            network.fall_silent(answers_alone=answers_alone)

    with pytest.raises(LedgerError, match=r"has not answered for 0.6 s \(whether .* is not known; if so, it counts\)"):
        line.charge()
    assert len(tries) == 1
    with contextlib.suppress(LedgerError):  # the server still waits for the client that is gone
        line.charge()
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(LedgerError):
            found = numbers(line)
            break
        assert time.monotonic() < deadline
    assert line.spent() == found[0] >= (3 if answers_alone else 2)


def test_a_wait_for_another_workers_long_transaction_is_no_silence(postgres_url: str) -> None:
    line = line_of(postgres_url)
    engine = sa.create_engine(postgres_url)
    with engine.connect() as other, ThreadPoolExecutor(1) as pool:
        other.exec_driver_sql("SELECT * FROM dpicl_counters FOR UPDATE")
        charged = pool.submit(numbers, line)
        time.sleep(3)
        other.rollback()
        assert charged.result(30) == [1]
    engine.dispose()


def test_a_lock_that_is_never_let_go_is_told(postgres_url: str, short: None) -> None:
    line = line_of(postgres_url)
    engine = sa.create_engine(postgres_url)
    with engine.connect() as other:
        other.exec_driver_sql("SELECT * FROM dpicl_counters FOR UPDATE")
        with pytest.raises(LedgerError, match=r"LockNotAvailable \(55P03\)"):
            line.charge()
    engine.dispose()
    assert numbers(line) == [1]


def test_a_client_that_is_gone_within_a_transaction_holds_its_locks_for_a_while_only(
    network: Network, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_of(network.url)
    monkeypatch.setattr(Database, "retry_seconds", 15)
    with line._ledger._engine.connect() as gone:
        line._ledger._begin(gone, "charge")
        gone.exec_driver_sql("SELECT * FROM dpicl_counters FOR UPDATE")
        network.fall_silent()
        assert numbers(line) == [1]
        gone.invalidate()


def test_a_process_that_sleeps_within_a_transaction_charges_when_it_wakes(postgres_url: str, short: None) -> None:
    """The server has ended the session before it was told to commit, and says so: it certainly did not happen."""
    line = line_of(postgres_url)
    tries: list[None] = []

    @sa.event.listens_for(line._ledger._engine, "commit")
    def sleep(_: Any) -> None:
        tries.append(None)
        time.sleep(2 if len(tries) == 1 else 0)

    assert (numbers(line), len(tries)) == ([1], 2)


def test_a_large_answer_may_take_longer_than_a_silence(postgres_url: str, short: None) -> None:
    """What counts is when something came, not when all had come."""
    database = Database(postgres_url)
    rows = "SELECT repeat('x', 1000), pg_sleep(0.001) FROM generate_series(1, 1200)"
    started = time.monotonic()
    found = database.run(lambda connection: connection.exec_driver_sql(rows).all(), "read")
    assert (len(found), time.monotonic() - started > 1.2) == (1200, True)
    with pytest.raises(LedgerError, match=r"has not answered for 0.6 s"):
        database.run(lambda connection: connection.exec_driver_sql("SELECT pg_sleep(5)"), "read")
    database.close()


# -- a pooler ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_a_witness_works_through_a_pooler(mode: str, postgres_url: str, tmp_path: Path) -> None:
    """It needs no session: nobody has to know who else is there."""
    with pooled(postgres_url, mode) as url:
        line = line_of(f"sqlite:///{tmp_path / 'ledger.db'}", witness=url)
        assert numbers(line, 3) == [1, 2, 3]


def on_tables(url: str) -> int:
    engine = sa.create_engine(url, connect_args={"client_encoding": "utf8"})
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT count(*) FROM pg_tables WHERE tablename LIKE 'dpicl%%'").scalar()
    engine.dispose()
    return int(found or 0)


CHARGER = """
import sys, warnings
import by_hand
from langchain_dpicl import PrivacyBudget
warnings.simplefilter("error")
line = PrivacyBudget(1000.0, 1e-5, 400, sys.argv[1], "both", witness=sys.argv[2]).line("vote", 0.5)
print("open", flush=True)
sys.stdin.readline()
for _ in range(30):
    (entry,) = line.charge(queries=[line.query_id({"input": str(_) + sys.argv[3]})])
    line.record(entry, answer="1")
    print(entry.number, flush=True)
"""


def test_processes_share_a_ledger_and_its_witness_through_a_pooler(postgres_url: str) -> None:
    """More sessions than the pooler has. Nobody believes that it is alone, so nothing counts as lost."""
    with pooled(postgres_url, "transaction") as url:
        command = [sys.executable, "-c", CHARGER, url, url]
        workers = [
            subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for name in ("first", "second")
        ]
        opened = [worker.stdout.readline() for worker in workers if worker.stdout]
        answers = [worker.communicate("go\n", timeout=120)[0].split() for worker in workers]
        line = PrivacyBudget.open("both", url, witness=UNWATCHED)
        assert opened == ["open\n", "open\n"]
        assert sorted(int(number) for answer in answers for number in answer) == list(range(1, 61))
        assert line.spent() == 60


def test_threads_charge_through_a_pooler(postgres_url: str) -> None:
    with pooled(postgres_url, "transaction") as url:
        line = line_of(url, witness=postgres_url)
        with ThreadPoolExecutor(6) as pool:
            found = [number for each in pool.map(lambda _: numbers(line, 8), range(6)) for number in each]
        assert sorted(found) == list(range(1, 49))
        queries = [line.query_id({"input": i}) for i in range(3)]
        assert [charge.number for charge in line.charge(queries=queries)] == [49, 50, 51], "several rows at once"


# -- a database that cannot hold every text ----------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_of_another_encoding_is_refused(
    encoding: str, postgres_url: str, pgvector: str, tmp_path: Path, embeddings: Any
) -> None:
    name = f"{sa.make_url(postgres_url).database}_other"
    making = f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    on_server(making)
    url = sa.make_url(postgres_url).set(database=name).render_as_string(hide_password=False)
    try:
        for given in ({"url": url}, {"url": f"sqlite:///{tmp_path / 'l.db'}", "witness": url}):
            with pytest.raises(LedgerError, match=f"its encoding is {encoding}, which does not hold every text"):
                line_of(**given)
        with pytest.raises(StoreError, match=f"its encoding is {encoding}"):
            PostgresExemplarStore.open(url, embeddings)
        assert not on_tables(url)
    finally:
        on_server(f"DROP DATABASE {name} WITH (FORCE)")


def test_the_client_says_utf8_whatever_its_role_says(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(postgres_url, "client_encoding = 'LATIN1'")
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    line = line_of(postgres_url, name="Ωmega")
    assert numbers(line) == [1]


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_the_short_name_of_postgresql_is_known(postgres_url: str) -> None:
    short = postgres_url.replace("postgresql+psycopg://", "postgres://")
    assert short.startswith("postgres://")
    line = line_of(short, witness=short)
    assert numbers(line) == [1]
    assert PrivacyBudget.open("default", short).spent() == 1
