"""Stores on PostgreSQL alone: what the server keeps of an owner, its faults, its indexes, and addresses.

What holds of all stores is in `test_stores_on_postgresql.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests
from pgvector_server import ask
from stores.places import EMBEDDINGS, QUERY, Place, everything, place_at, row, rows, told_by, unit_vectors

from langchain_dpicl import (
    ExemplarStore,
    InvalidParameter,
    PostgresExemplarStore,
    StoreError,
    StoreFileChanged,
)
from langchain_dpicl.cli import main


@pytest.fixture
def place(pgvector_url: str) -> Iterator[Place]:
    """A database of its own."""
    with place_at(pgvector_url) as made:
        made.name = "exemplars"
        yield made


# -- what the server keeps ---------------------------------------------------------------------------------------------


def test_forgetting_leaves_no_row_and_no_copy_in_the_servers_tables(
    pgvector_url: str, shared_store: Any, records: Any, canary: str
) -> None:
    """Every column of every table, those of statistics too. Tried with the columns' statistics left on: it finds the
    name in ``pg_statistic``."""
    store = shared_store(records(40) + [{"input": canary, "output": "b", "owner": canary} for _ in range(5)])
    tables = ask(
        pgvector_url,
        "SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
        "WHERE relkind = 'r' AND (nspname = 'public' OR starts_with(relname, 'pg_statistic'))",
    )

    def holders() -> list[str]:
        shown = f"encode('{canary}', 'hex')", f"'{canary}'", f"encode(sha256('{canary}'), 'hex')"
        anywhere = " OR ".join(f"strpos(t::text, {each}) > 0" for each in shown)
        return [name for (name,) in tables if ask(pgvector_url, f"SELECT FROM {name} t WHERE {anywhere} LIMIT 1")]

    assert sorted(holders()) == ["dpicl_exemplars_exemplars", "dpicl_exemplars_owners"]
    assert store.forget(canary) == 5
    assert holders() == []
    assert (len(store), store.owner_count) == (40, 40)


def test_forgetting_gives_the_space_back_for_others_to_write_over(
    pgvector_url: str, shared_store: Any, records: Any
) -> None:
    """As often as an owner comes and goes, the table stays as it is. Tried without the vacuum: it grows with each."""
    store = shared_store(records(5))
    rows = [{"input": "x" * 500, "output": "b", "owner": "guest"}] * 20

    def pages() -> int:
        return int(ask(pgvector_url, "SELECT pg_relation_size('dpicl_exemplars_exemplars')")[0][0]) // 8192

    sizes = []
    for _ in range(8):
        store.add(rows)
        store.forget("guest")
        sizes.append(pages())
    assert max(sizes) <= 3


def test_a_collection_that_was_set_back_is_refused(pgvector_url: str, shared_store: Any, records: Any) -> None:
    """As a backup sets it back: owners may be in it that were forgotten since."""
    store = shared_store(records(3))
    kept = "dpicl_collections", "dpicl_exemplars_exemplars", "dpicl_exemplars_owners"
    ask(pgvector_url, *(f"CREATE TABLE kept_{i} AS SELECT * FROM {table}" for i, table in enumerate(kept)))
    store.forget("owner-1")
    ask(
        pgvector_url,
        "INSERT INTO dpicl_exemplars_owners SELECT * FROM kept_2 ON CONFLICT DO NOTHING",
        "INSERT INTO dpicl_exemplars_exemplars SELECT * FROM kept_1 ON CONFLICT DO NOTHING",
        "UPDATE dpicl_collections SET entry = k.entry FROM kept_0 k",
    )
    with pytest.raises(StoreFileChanged, match="older, than this process has read"):
        everything(store)
    ask(pgvector_url, "UPDATE dpicl_collections SET identity = 'another', entry = 100")
    with pytest.raises(StoreFileChanged, match="is another one"):
        len(store)
    with pytest.raises(StoreError, match="no collection 'exemplars' any more"):
        store.add(records(1))


def test_an_owner_is_forgotten_by_command(pgvector_url: str, shared_store: Any, records: Any, capsys: Any) -> None:
    store = shared_store(records(5))
    command = ["forget", "--store", pgvector_url, "--collection", "exemplars", "--owner", "owner-1", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["exemplars"] == 1
    assert store.owner_count == 4


# -- the gate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["hnsw", "ivfflat"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_no_approximate_index_has_a_part_in_the_gate(
    index: str, in_memory: bool, place: Place, pgvector_url: str
) -> None:
    """On a server that is told to prefer indexes: the same owners as without, and the plan goes row by row."""
    given, vectors = [row(f"o{i // 3}", f"t{i}") for i in range(900)], unit_vectors(900, 7)
    store = place(given, vectors=vectors)
    with store.reading() as view:
        expected = told_by(view)
    table = store._collection.exemplars
    options = {"hnsw": "(m = 2, ef_construction = 4)", "ivfflat": "(lists = 100)"}[index]
    prefer = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %%I SET enable_seqscan = off', current_database()); END $$"
    making = f"CREATE INDEX {table}_near ON {table} USING {index} (embedding vector_ip_ops) WITH {options}"
    ask(pgvector_url, making, prefer)
    nearest = f"EXPLAIN SELECT id FROM {table} ORDER BY embedding <#> '{vectors[0].tolist()}' LIMIT 5"
    assert f"{table}_near" in repr(ask(pgvector_url, nearest)), "the index would be used where one can be"
    again = place.open(vectors_in_memory=in_memory)
    with again.reading() as view:
        assert told_by(view) == expected
        schema = store._collection.schema
        gate = f"{schema}.inner_product(embedding, '{QUERY.tolist()}') >= 0.3"
        plan = repr(view.ask(f"EXPLAIN SELECT id, owner FROM {table} WHERE {gate}"))
    assert "Filter: (inner_product(embedding" in plan
    assert "_near" not in plan


# -- faults ------------------------------------------------------------------------------------------------------------


def test_an_addition_whose_connection_is_lost_is_made_again_and_once(
    pgvector_url: str, shared_store: Any, records: Any
) -> None:
    """It waits for another change, with its transaction open, when the server ends its connection."""
    store = shared_store(records(3))
    failures: list[Exception] = []

    def add() -> None:
        try:
            store.add(records(50))
        except StoreError as error:
            failures.append(error)

    def others() -> list[Any]:
        waiting = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return ask(pgvector_url, waiting)

    with store._database._engine.connect() as blocker:
        blocker.exec_driver_sql("BEGIN")
        blocker.exec_driver_sql("SELECT FROM dpicl_collections FOR UPDATE")
        thread = threading.Thread(target=add)
        thread.start()
        deadline = time.monotonic() + 20
        while not others():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ask(pgvector_url, f"SELECT pg_terminate_backend({others()[0][0]})") == [(True,)]
        blocker.exec_driver_sql("ROLLBACK")
    thread.join(20)
    assert failures == []
    assert sorted(everything(store)["ids"]) == list(range(53))


def test_a_commit_without_an_answer_is_said_to_be_unknown(shared_store: Any, records: Any, lose_a_commit: Any) -> None:
    store = shared_store(records(3))
    lose_a_commit()
    with pytest.raises(StoreError, match="whether the last transaction took place is not known"):
        store.add(rows("o"))
    assert everything(store)["ids"] == [0, 1, 2, 3]


def test_no_fault_of_the_database_shows_a_value(
    pgvector_url: str, shared_store: Any, records: Any, canary: str, canary_free: Any
) -> None:
    """A trigger quotes the text in its error, a statement that fails is given an owner's name."""
    store = shared_store(records(3))
    ask(
        pgvector_url,
        "CREATE FUNCTION shout() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'a bad row: %%', convert_from(NEW.content, 'UTF8'); END $$",
        "CREATE TRIGGER shout BEFORE INSERT ON dpicl_exemplars_exemplars FOR EACH ROW EXECUTE FUNCTION shout()",
    )
    with pytest.raises(StoreError, match=r"cannot be used: RaiseException \(P0001\)") as caught:
        store.add(records(1, secret=canary))
    canary_free(caught.value)
    ask(pgvector_url, "ALTER TABLE dpicl_exemplars_owners RENAME COLUMN name TO gone")
    with pytest.raises(StoreError, match=r"UndefinedColumn \(42703\)") as caught:
        store.forget(canary)
    canary_free(caught.value)


def test_a_server_that_cannot_be_reached_is_an_error_without_its_password(records: Any, embeddings: Any) -> None:
    url = "postgresql://someone:hunter2@127.0.0.1:1/nowhere?password=hunter2"
    for call in (
        lambda: PostgresExemplarStore.open(url, embeddings),
        lambda: PostgresExemplarStore.from_records(records(2), embeddings, url),
    ):
        with pytest.raises(StoreError) as caught:
            call()
        assert "hunter2" not in f"{caught.value} {caught.value.args}"
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None


def test_a_server_without_pgvector_says_so(postgres_url: str, records: Any, embeddings: Any) -> None:
    """On the ledger's server, unless that has it as well: then it works there."""
    available = ask(postgres_url, "SELECT FROM pg_available_extensions WHERE name = 'vector'")
    if available:
        PostgresExemplarStore.from_records(records(2), embeddings, postgres_url).close()
        return
    with pytest.raises(StoreError, match="no pgvector"):
        PostgresExemplarStore.from_records(records(2), embeddings, postgres_url)
    with pytest.raises(StoreError, match="no collection"):
        PostgresExemplarStore.open(postgres_url, embeddings)


def test_a_server_that_was_restarted_is_found_again(pgvector_url: str, shared_store: Any, records: Any) -> None:
    """Lost between two readings: nobody notices. Lost within one: that reading fails, and the next one does not."""
    end = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    store = shared_store(records(3))
    ask(pgvector_url, end)
    assert len(store) == 3

    def interrupted() -> None:
        with store.reading() as view:
            ask(pgvector_url, end)
            view.rows_of(view.numbers)

    with pytest.raises(StoreError, match="AdminShutdown"):
        interrupted()
    assert len(store) == 3


def test_pgvector_may_lie_in_any_schema(pgvector_url: str, shared_store: Any, records: Any) -> None:
    ask(pgvector_url, 'CREATE SCHEMA "Ex tensions"', 'CREATE EXTENSION vector SCHEMA "Ex tensions"')
    store = shared_store(records(5))
    with store.reading() as view:
        assert len(view.eligible(QUERY, -1.0)) == 5


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["postgresql+psycopg2://u:hunter2@h/d", "mysql://u:hunter2@h/d"])
def test_another_kind_of_database_is_refused(url: str) -> None:
    for call in (
        lambda: ExemplarStore.from_records(rows("a"), EMBEDDINGS, url),
        lambda: ExemplarStore.open(url, EMBEDDINGS),
    ):
        with pytest.raises(StoreError, match=r"is on sqlite:///FILE or postgresql\+psycopg://") as caught:
            call()
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", [5, "", "hunter2", "postgresql://u:hunter2@h:port/d", b"postgresql://h"])
def test_what_is_no_address_is_refused_without_being_shown(url: Any) -> None:
    for call in (
        lambda: ExemplarStore.from_records(rows("a"), EMBEDDINGS, url),
        lambda: ExemplarStore.open(url, EMBEDDINGS),
    ):
        with pytest.raises(InvalidParameter) as caught:
            call()
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_importing_it_loads_no_driver_and_no_index() -> None:
    code = "import sys; from langchain_dpicl import PostgresExemplarStore; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert {"psycopg", "faiss", "torch"}.isdisjoint(done.stdout.split())


# -- LangChain's own suite ---------------------------------------------------------------------------------------------


class TestMaintenanceInMemory(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return ExemplarStore.empty(self.get_embeddings()).maintenance()


class TestMaintenanceOnPostgres(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, pgvector_url: str) -> Iterator[VectorStore]:
        store = ExemplarStore.empty(self.get_embeddings(), pgvector_url)
        yield store.maintenance()
        store.close()
