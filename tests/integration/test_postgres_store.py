"""`store/postgres.py`: the same store as on FAISS, for many workers: what goes in, and what a reading sees."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psycopg
import pytest
from ears import Same
from langchain_core.runnables import RunnableLambda
from pgvector_server import KEY, ask, everyone
from threads import raced

from langchain_dpicl import (
    ExemplarStore,
    InvalidRecords,
    ShutWithinCall,
    StoreError,
)
from langchain_dpicl.private.boundary import run_private

DIMENSION = 8
UNIT = np.full(DIMENSION, DIMENSION**-0.5, np.float32)


# -- the same as on FAISS ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner_key", ["owner", None])
def test_it_is_the_same_store_as_on_faiss(
    owner_key: str | None, shared_store: Any, records: Any, embeddings: Any
) -> None:
    """The same exemplars, ids, owners in order and marks, at the start and after changes."""
    rows = records(12, 3)
    np.random.default_rng(3).shuffle(rows)  # an owner's records need not lie together
    both: list[Any] = [
        shared_store(rows, owner_key=owner_key),
        ExemplarStore.from_records(rows, embeddings, owner_key=owner_key),
    ]
    more = [{"input": f"more {i}", "output": "b", "owner": f"owner-{i}"} for i in range(10, 15)]
    changes: list[Callable[[Any], Any]] = [
        lambda store: None,
        lambda store: store.add(more),
        lambda store: store.forget("owner-4" if owner_key else "#7"),
        lambda store: store.add(more[:2], ids=[1000, 900]),
        lambda store: store.add(more[2:4]),
    ]
    for change in changes:
        one, other = (change(store) for store in both)
        assert one == other
        assert everyone(both[0]) == everyone(both[1])
        assert list(both[0].owners) == list(both[1].owners)
        assert (len(both[0]), both[0].owner_count) == (len(both[1]), both[1].owner_count)


def test_no_call_of_a_chain_reads_it_or_writes_there(shared_store: Any, records: Any) -> None:
    store = shared_store(records(8))
    held: list[Any] = []
    store.maintenance()
    attacks: list[Callable[[], Any]] = [
        lambda: everyone(store),
        lambda: store.owners,
        lambda: len(store),
        lambda: store.load_vectors(),
        lambda: store.add(records(1)),
        lambda: store.forget("owner-3"),
        lambda: store.maintenance().get_by_ids(["#0"]),
        lambda: type(store).open(store._connections._url.render_as_string(hide_password=False), store.embeddings),
    ]

    def member(values: dict[str, Any]) -> str:
        for attack in attacks:
            try:
                held.append(attack())
            except ShutWithinCall:
                held.append("shut")
        return "Positive"

    before = everyone(store)
    assert run_private(Same(RunnableLambda(member)), [({}, [])], max_concurrency=1) == ["Positive"]
    assert held == ["shut"] * len(attacks)
    assert everyone(store) == before


def test_texts_and_names_of_any_kind_come_back_as_they_were(shared_store: Any) -> None:
    """Zero characters, halves of surrogate pairs, cases and lengths: no encoding or collation makes two owners one."""
    names = ["a", "A", "a ", "\u00e4", "a\u0308", "\0", "\udc80", "x" * 5000, "x" * 5001, "1", "'; DROP TABLE x; --"]
    rows: list[dict[str, Any]] = [
        {"input": f"text {name}", "output": "b\0\udfff", "owner": name, "extra": {"n": [1, None, "\0"]}}
        for name in names
    ]
    store = shared_store(rows, vectors=np.ones((len(rows), DIMENSION)))
    assert list(store.owners) == names
    assert everyone(store)["exemplars"] == [{key: row[key] for key in row if key != "owner"} for row in rows]
    for name in names:
        store.add([{"input": "more", "output": "b", "owner": name}])
    assert list(store.owners) == names, "each has grown by one"
    for name in names:
        assert store.forget(name) == 2
    assert len(store) == store.owner_count == 0


def test_vectors_come_in_scaled_and_a_zero_vector_stays_zero(shared_store: Any, records: Any) -> None:
    vectors = np.random.default_rng(1).normal(size=(6, DIMENSION)) * 10.0 ** np.arange(-3, 3)[:, None]
    vectors[2] = 0
    store = shared_store(records(6), vectors=vectors)
    query = np.eye(DIMENSION, dtype=np.float32)
    with store.reading() as view:
        found = np.stack([view.similarity(np.arange(6), unit) for unit in query], axis=1)
        again = view.vectors(np.array([4, 0, 2]))
        assert view.vectors(np.zeros(0, np.int64)).shape == (0, DIMENSION)
        with pytest.raises(StoreError, match="another"):
            view.vectors(np.array([6]))
    assert (again == found[[4, 0, 2]]).all()
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(found, vectors / np.where(norms > 0, norms, 1), atol=1e-6)
    assert found.dtype == np.float32


@pytest.mark.parametrize("dimension", [1, 1900, 2000, 16_000])
def test_vectors_of_every_size_are_stored(dimension: int, shared_store: Any, records: Any) -> None:
    """Up to 1,900 dimensions in their rows, beyond that beside them, with long texts too."""
    vectors = np.random.default_rng(2).normal(size=(3, dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    noise = np.random.default_rng(3).bytes(20_000).hex()
    store = shared_store(records(3, secret=noise), vectors=vectors)
    with store.reading() as view:
        np.testing.assert_allclose(view.similarity(np.arange(3), vectors[1]), vectors @ vectors[1], atol=1e-5)
        assert view.read(np.array([2]))[0]["input"].endswith(noise)


def test_vectors_of_more_dimensions_than_pgvector_holds_are_refused(shared_store: Any, records: Any) -> None:
    with pytest.raises(InvalidRecords, match="16001 dimensions, pgvector holds 16000"):
        shared_store(records(2), vectors=np.ones((2, 16_001), np.float32))


# -- additions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ([{"input": "x", "output": "y"}], {}),
        ([{"input": "", "output": "y", "owner": "o"}], {}),
        ([{"input": "x", "output": "y", "owner": "o", "bad": b"x"}], {}),
        ([{"input": "x", "output": "y", "owner": "o"}], {"ids": [2]}),
        ([{"input": "x", "output": "y", "owner": "o"}] * 2, {"ids": [50, 50]}),
        ([{"input": "x", "output": "y", "owner": "o"}] * 2, {"ids": [50]}),
        ([{"input": "x", "output": "y", "owner": "o"}], {"ids": [-1]}),
        ([{"input": "x", "output": "y", "owner": "o"}], {"ids": ["1"]}),
        ([{"input": "x", "output": "y", "owner": "o"}], {"vectors": np.ones((1, DIMENSION + 1))}),
        ([{"input": "x", "output": "y", "owner": "o"}], {"vectors": np.full((1, DIMENSION), np.nan)}),
    ],
)
def test_a_refused_addition_changes_nothing(more: Any, options: Any, shared_store: Any, records: Any) -> None:
    store = shared_store(records(4))
    before = everyone(store)
    good = [{"input": "good", "output": "y", "owner": "new"}] if not options else []
    with pytest.raises(InvalidRecords):
        store.add(good + more, **options)
    assert everyone(store) == before
    assert store.add([]) == []
    assert store.add([{"input": "x", "output": "y", "owner": "o"}]) == [4], "no id was used up"


def test_an_addition_whose_connection_is_lost_leaves_nothing(
    pgvector_url: str, shared_store: Any, records: Any
) -> None:
    """It waits for another change, with its transaction open, when the server ends its connection."""
    store = shared_store(records(3))
    before = everyone(store)
    failures: list[Exception] = []

    def add() -> None:
        try:
            store.add(records(50))
        except StoreError as error:
            failures.append(error)

    def others() -> list[Any]:
        waiting = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return ask(pgvector_url, waiting)

    with store._connections._engine.connect() as blocker:
        blocker.exec_driver_sql("BEGIN")
        blocker.exec_driver_sql("SELECT FROM dpicl_collections FOR UPDATE")
        thread = threading.Thread(target=add)
        thread.start()
        deadline = time.monotonic() + 20
        while not others():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ask(pgvector_url, f"SELECT pg_terminate_backend({others()[0][0]})") == [(True,)]
        thread.join(20)
        blocker.exec_driver_sql("ROLLBACK")
    assert len(failures) == 1
    assert "AdminShutdown" in str(failures[0])
    assert everyone(store) == before
    assert store.add(records(5)[3:]) == [3, 4]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (psycopg.OperationalError("server closed the connection unexpectedly"), "last change took place is not known"),
        (psycopg.errors.AdminShutdown("going"), "last change took place is not known"),
        (psycopg.errors.SerializationFailure("no"), r"cannot be used: SerializationFailure \(40001\)$"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_commit_without_an_answer_is_said_to_be_unknown(
    fault: Exception, says: str, shared_store: Any, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shared_store(records(3))
    execute = psycopg.Connection.execute

    def answers(self: Any, query: Any, *values: Any, **options: Any) -> Any:
        if query == "COMMIT":
            raise fault
        return execute(self, query, *values, **options)

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Connection, "execute", answers)
        with pytest.raises(StoreError, match=says) as caught:
            store.add([{"input": "x", "output": "y", "owner": "o"}])
        assert caught.value.__context__ is None
    assert len(store) == 3
    assert store.add([{"input": "x", "output": "y", "owner": "o"}]) == [3]


WORKER = """
import sys
import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import PostgresExemplarStore

url, me = sys.argv[1:]
store = PostgresExemplarStore.open(url, DeterministicFakeEmbedding(size=8))
print("ready", flush=True)
sys.stdin.readline()
for i in range(15):
    store.add([{"input": f"{me} {i} {j}", "output": "b", "owner": f"new-{i}-{j % 3}"} for j in range(6)],
              vectors=np.ones((6, 8), np.float32))
"""


def test_processes_that_add_to_the_same_owners_grow_one_owner_each(
    pgvector_url: str, shared_store: Any, records: Any
) -> None:
    store = shared_store(records(2))
    command = [sys.executable, "-c", WORKER, pgvector_url]
    workers = [
        subprocess.Popen([*command, str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for i in range(3)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            worker.wait(200)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert sorted(store.owners) == sorted(
        [f"new-{i}-{j}" for i in range(15) for j in range(3)] + ["owner-0", "owner-1"]
    )
    seen = everyone(store)
    assert sorted(seen["ids"]) == list(range(2 + 3 * 15 * 6))
    with store.reading() as view:
        assert len(view.numbers) == 47, "numbers have no gaps"
        _, position = view.rows_of(np.arange(2, 47))
    assert np.bincount(position).tolist() == [6] * 45


def test_a_forked_process_has_connections_of_its_own(shared_store: Any, records: Any) -> None:
    """Two processes on one connection would read each other's answers."""
    store = shared_store(records(7))
    who = "SELECT pg_backend_pid()"
    ((mine,),) = store._connections.look(who)
    answers = multiprocessing.get_context("fork").Queue()

    def child() -> None:
        answers.put((store._connections.look(who)[0][0], store.add(records(1))))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    theirs, ids = answers.get(timeout=30)
    process.join(30)
    assert theirs != mine
    assert ids == [7]
    assert store._connections.look(who) == [(mine,)], "the parent's is as it was"
    assert len(store) == 8


def test_threads_that_add_forget_and_read_see_whole_changes_only(shared_store: Any) -> None:
    """Owners come and go with three exemplars each, and every reading finds all three or none, with their texts."""
    store = shared_store([{"input": "first", "output": "b", "owner": "first"}])

    def change(number: int, turn: int) -> None:
        owner = 100 * number + turn % 5
        rows = [{"input": f"{owner} {i}", "output": "b", "owner": str(owner)} for i in range(3)]
        store.add(rows, vectors=np.ones((3, DIMENSION), np.float32))
        assert store.forget(owner) == 3

    def read(_: int) -> None:
        with store.reading() as view:
            numbers = view.numbers
            rows, position = view.rows_of(numbers)
            assert set(np.bincount(position).tolist()) <= {0, 1, 3}
            texts = [row["input"].split()[0] for row in view.read(rows)]
            assert all(len({texts[i] for i in np.flatnonzero(position == p)}) == 1 for p in np.unique(position))
            assert len(view.eligible(UNIT, -1.0)) == len(np.unique(position))

    assert raced([partial(change, 1), partial(change, 2), read, read], 2) == []
    assert len(store) == 1


# -- one moment --------------------------------------------------------------------------------------------------------


def test_a_reading_stays_at_its_moment(shared_store: Any, worker: Any, records: Any) -> None:
    store = shared_store(records(5, 2))
    elsewhere = worker()
    query = UNIT

    def seen(view: Any) -> list[Any]:
        rows, position = view.rows_of(np.arange(10))
        found = [
            len(view.numbers),
            view.eligible(query, -1.0).tolist(),
            position.tolist(),
            view.similarity(rows, query),
        ]
        return [*map(repr, found), view.read(rows), view.marks(np.arange(10), KEY)]

    with store.reading() as view:
        before = seen(view)
        elsewhere.forget("owner-1")
        elsewhere.add([{"input": "late", "output": "b", "owner": owner} for owner in ("owner-2", "late")])
        assert seen(view) == before
    with store.reading() as view:
        after = seen(view)
        assert view.eligible(query, -1.0).tolist() == [0, 2, 3, 4, 5]
        assert view.marks(np.array([1]), KEY) == [b""]
        assert view.rows_of(np.array([1, 99, 2]))[1].tolist() == [2, 2, 2]
    assert after != before
    with pytest.raises(StoreError, match="has ended"):
        view.eligible(query, 0.0)


def test_rows_come_by_position_then_id_for_owners_in_any_order(shared_store: Any, records: Any) -> None:
    store = shared_store(records(4, 2), ids=[7, 3, 5, 1, 6, 2, 4, 0])
    with store.reading() as view:
        rows, position = view.rows_of(np.array([2, 0, 9, 3]))
        assert rows.tolist() == view.ids_of(rows) == [2, 6, 3, 7, 0, 4]
        assert position.tolist() == [0, 0, 1, 1, 3, 3]
        assert [row["input"].strip() for row in view.read(rows[[5, 0, 0]])] == ["text 3.0", "text 2.1", "text 2.1"]
        assert (view.read(rows[:0]), view.rows_of(rows[:0])[0].tolist(), view.marks(rows[:0], KEY)) == ([], [], [])
        with pytest.raises(StoreError, match="rows of one reading"):
            view.read(np.array([99]))
