"""`store/vector_memory.py`: what a worker keeps of a collection is what the server has, at every reading's moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from langchain_dpicl.store.vector_memory import VectorMemory
from numpy.typing import NDArray
from pgvector_server import ask
from threads import raced

from langchain_dpicl import ExemplarStore, PostgresExemplarStore, StoreError
from langchain_dpicl.store import vector_memory

DIMENSION = 8
QUERY = np.full(DIMENSION, DIMENSION**-0.5, np.float32)
EVERYBODY, NEAR = -1.0, 0.2


def random_vectors(count: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, DIMENSION)).astype(np.float32)


def rows_of(names: list[str]) -> list[dict[str, str]]:
    return [{"input": f"text of {name}", "output": "x", "owner": name} for name in names]


def exact(view: Any, threshold: float) -> list[int]:
    """Who is eligible by a fresh reading of every row of the snapshot, by the same product as in memory."""
    rows, position = view.rows_of(view.numbers)
    fresh = vector_memory.inner_products(view.vectors(rows), np.arange(len(rows)), QUERY)
    return sorted({int(view.numbers[owner]) for owner in position[fresh >= threshold]})


def agrees(view: Any) -> None:
    """The gate, and the similarities bit by bit."""
    for threshold in (EVERYBODY, NEAR, 0.9):
        assert view.eligible(QUERY, threshold).tolist() == exact(view, threshold)
    rows, _ = view.rows_of(view.numbers)
    fresh = vector_memory.inner_products(view.vectors(rows), np.arange(len(rows)), QUERY)
    np.testing.assert_array_equal(view.similarity(rows, QUERY).view(np.int32), fresh.view(np.int32))


def held(memory: VectorMemory) -> NDArray[np.float32]:
    """Every vector in memory that is not zero."""
    found = np.concatenate([block for _, block in memory._blocks])
    return found[np.abs(found).max(axis=1) > 0]


# -- it is what the server has -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_two_workers_that_change_a_collection_at_random_see_every_change(
    seed: int, shared_store: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Additions (also under ids that were free, or used before), replacements, removals and forgettings. Blocks of few
    rows, read few at a time. A store in memory has the same owners, by name."""
    monkeypatch.setattr(vector_memory, "_BLOCK_BYTES", 4 * DIMENSION * 7)
    monkeypatch.setattr(vector_memory, "_READ_BYTES", 4 * DIMENSION * 3)
    draw = np.random.default_rng(seed)
    names = [f"owner-{i}" for i in range(12)]
    first = shared_store(rows_of(names), vectors=random_vectors(12, seed))
    stores = [first, worker()]
    numbered = 0
    for step in range(60):
        store = stores[draw.integers(2)]
        present = list(store.owners)
        kind = draw.integers(6)
        chosen = [f"owner-{i}" for i in draw.integers(0, 15, size=draw.integers(1, 6))]
        vectors = random_vectors(len(chosen), 1000 * seed + step)
        if kind == 0 and len(present) > 2:
            store.forget(present[draw.integers(len(present))])
        elif kind == 1:
            numbered += 1
            documents = [f"d{i}" for i in draw.integers(0, 4, size=2)]
            store.maintenance().add_texts(
                ["a text", "another"], [{"owner": name, "output": "x"} for name in chosen[:1] * 2], ids=documents
            )
        elif kind == 2:
            store.maintenance().delete([f"d{i}" for i in range(2)])
        elif kind == 3:  # under ids that were given before, as far as they are free
            with store.reading() as view:
                used = set(view.ids_of(view.rows_of(view.numbers)[0]))
            free = [i for i in range(40) if i not in used][: len(chosen)]
            store.add(rows_of(chosen[: len(free)]), ids=free, vectors=vectors[: len(free)])
        else:
            store.add(rows_of(chosen), vectors=vectors)
        if draw.integers(2):
            with stores[draw.integers(2)].reading() as view:
                agrees(view)
    for store in stores:
        with store.reading() as view:
            agrees(view)
            there = view.vectors(view.rows_of(view.numbers)[0])
        memory = store._memory
        assert sorted(map(tuple, held(memory).tolist())) == sorted(map(tuple, there.tolist())), "and nothing else"


def test_readings_that_overlap_see_each_its_own_moment(shared_store: Any, worker: Any) -> None:
    """Each is exact until it ends, though others follow further, and what went is overwritten when the last one ends
    that may see it."""
    store, elsewhere = shared_store(rows_of([f"o{i}" for i in range(6)]), vectors=random_vectors(6, 1)), worker()
    store.load_vectors()
    with ExitStack() as stack:
        views, expected = [], []
        for step in range(5):
            views.append(stack.enter_context(store.reading()))
            expected.append(exact(views[-1], EVERYBODY))
            if step < 4:
                elsewhere.forget(f"o{step}")
                elsewhere.add(rows_of([f"n{step}"]), vectors=random_vectors(1, 50 + step))
        for view, wanted in zip(views, expected, strict=True):
            assert view.eligible(QUERY, EVERYBODY).tolist() == wanted
            agrees(view)
        assert len(held(store._memory)) == 10
    assert len(held(store._memory)) == 6


def test_a_reading_older_than_the_first_one_that_loads_has_vectors_of_its_own(shared_store: Any, worker: Any) -> None:
    store, elsewhere = shared_store(rows_of(["a", "b"]), vectors=random_vectors(2, 1)), worker()
    with store.reading() as older:
        elsewhere.forget("a")
        elsewhere.add(rows_of(["c"]), vectors=random_vectors(1, 2))
        with store.reading() as newer:
            agrees(newer)
        agrees(older)
        assert older.eligible(QUERY, EVERYBODY).tolist() == [0, 1]
    assert len(held(store._memory)) == 2


def test_threads_that_read_while_others_change_see_whole_moments(shared_store: Any, worker: Any) -> None:
    """Two threads change, three compare memory with a fresh reading in the same snapshot."""
    store, elsewhere = shared_store(rows_of([f"o{i}" for i in range(5)]), vectors=random_vectors(5, 1)), worker()

    def change(which: Any, name: str) -> Callable[[int], None]:
        def once(turn: int) -> None:
            which.add(rows_of([name] * 2), vectors=random_vectors(2, turn))
            which.forget(name)

        return once

    def read(turn: int) -> None:
        with store.reading() as view:
            agrees(view)

    assert raced([change(store, "x"), change(elsewhere, "y"), read, read, read], 3) == []
    store.refresh()  # the last change may have been another process's
    assert len(held(store._memory)) == 5


# -- its cost, and its end ---------------------------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows were read, each time."""
    counts: list[int] = []
    original = VectorMemory._taken

    def listen(self: VectorMemory, count: int) -> Any:
        counts.append(count)
        return original(self, count)

    monkeypatch.setattr(VectorMemory, "_taken", listen)
    return counts


def test_a_change_costs_its_own_rows(shared_store: Any, worker: Any, taken: list[int]) -> None:
    store, elsewhere = shared_store(rows_of([f"o{i}" for i in range(200)]), vectors=random_vectors(200, 1)), worker()
    with store.reading() as view:
        view.rows_of(view.numbers)
    assert taken == [], "without a threshold nothing is in memory"
    store.load_vectors()
    store.load_vectors()
    assert taken == [200]
    elsewhere.add(rows_of(["new"]), vectors=random_vectors(1, 2))
    elsewhere.forget("o7")
    elsewhere.add(rows_of(["late"]), ids=[7], vectors=random_vectors(1, 3))
    with store.reading() as view:
        agrees(view)
    assert taken == [200, 1, 1]
    assert store.refresh() is False


def test_a_forgotten_owners_vectors_are_overwritten(shared_store: Any, worker: Any) -> None:
    """Here at once, elsewhere at the next reading or `refresh`, which ``/ready`` does."""
    vectors = np.eye(DIMENSION, dtype=np.float32)
    store, elsewhere = shared_store(rows_of([f"o{i}" for i in range(DIMENSION)]), vectors=vectors), worker()
    for each in (store, elsewhere):
        each.load_vectors()
    blocks = [block for each in (store, elsewhere) for _, block in each._memory._blocks]
    store.forget("o3")
    assert [block[:, 3].any() for block in blocks] == [False, True]
    assert elsewhere.refresh() is True
    assert [block[:, 3].any() for block in blocks] == [False, False]
    store.close()
    assert not blocks[0].any()
    with store.reading() as view:
        agrees(view)


def test_a_load_that_fails_in_the_middle_leaves_nothing_and_is_made_again(
    shared_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_memory, "_READ_BYTES", 4 * DIMENSION * 3)
    store = shared_store(rows_of([f"o{i}" for i in range(8)]), vectors=random_vectors(8, 1))
    original, asked = VectorMemory._taken, []

    def fails(self: VectorMemory, count: int) -> Any:
        asked.append(count)
        if len(asked) == 2:
            raise MemoryError
        return original(self, count)

    monkeypatch.setattr(VectorMemory, "_taken", fails)
    with pytest.raises(MemoryError):
        store.load_vectors()
    assert len(held(store._memory)) == 0
    store.load_vectors()
    with store.reading() as view:
        agrees(view)


def test_a_collection_that_was_set_back_or_made_anew_is_read_anew(
    shared_store: Any, worker: Any, pgvector_url: str, embeddings: Any
) -> None:
    store = shared_store(rows_of(["a", "b"]), vectors=random_vectors(2, 1))
    store.load_vectors()
    copy = "dpicl_exemplars_exemplars", "dpicl_exemplars_owners", "dpicl_collections"
    ask(pgvector_url, *(f"CREATE TABLE kept_{i} AS SELECT * FROM {table}" for i, table in enumerate(copy)))
    store.add(rows_of(["c"]), vectors=random_vectors(1, 2))
    store.refresh()
    ask(
        pgvector_url,
        "DELETE FROM dpicl_exemplars_exemplars",
        "DELETE FROM dpicl_exemplars_owners",
        "INSERT INTO dpicl_exemplars_owners SELECT * FROM kept_1",
        "INSERT INTO dpicl_exemplars_exemplars SELECT * FROM kept_0",
        "UPDATE dpicl_collections SET next_id = k.next_id, next_number = k.next_number FROM kept_2 k",
    )
    for _ in range(2):
        with store.reading() as view:
            agrees(view)
            assert view.eligible(QUERY, EVERYBODY).tolist() == [0, 1]
    store.load_vectors()
    ask(pgvector_url, "DROP TABLE dpicl_exemplars_exemplars, dpicl_exemplars_forgotten, dpicl_exemplars_owners CASCADE")
    ask(pgvector_url, "DELETE FROM dpicl_collections")
    again = PostgresExemplarStore.from_records(
        rows_of(["x", "y"]), embeddings, pgvector_url, owner_key="owner", vectors=random_vectors(2, 9), progress=False
    )
    again.close()
    with store.reading() as view:
        agrees(view)


def test_a_forked_process_reads_for_itself(shared_store: Any) -> None:
    store = shared_store(rows_of(["a", "b"]), vectors=random_vectors(2, 1))
    with store.reading() as view:
        agrees(view)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with store.reading() as own:
                    agrees(own)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        agrees(view)


def test_a_reading_that_has_ended_answers_nothing(shared_store: Any) -> None:
    store = shared_store(rows_of(["a", "b"]), vectors=random_vectors(2, 1))
    with store.reading() as view:
        agrees(view)
    for use in (lambda: view.eligible(QUERY, NEAR), lambda: view.similarity(np.arange(2), QUERY)):
        with pytest.raises(StoreError, match="has ended"):
            use()
    with store.reading() as view:
        view.eligible(QUERY, NEAR)
        with pytest.raises(StoreError, match="another"):
            view.similarity(np.array([0, 9]), QUERY)


def test_it_answers_as_the_store_in_memory_to_the_last_bit(shared_store: Any, embeddings: Any) -> None:
    rows, vectors = rows_of([f"o{i // 2}" for i in range(300)]), random_vectors(300, 5)
    both: list[Any] = [
        shared_store(rows, vectors=vectors),
        ExemplarStore.from_records(rows, embeddings, owner_key="owner", vectors=vectors, progress=False),
    ]
    with both[0].reading() as one, both[1].reading() as other:
        everything = other.similarity(np.arange(300), QUERY)
        for threshold in everything[::10].tolist():
            for level in (threshold, float(np.nextafter(np.float32(threshold), np.float32(2)))):
                assert one.eligible(QUERY, level).tolist() == other.eligible(QUERY, level).tolist()
        found = one.similarity(np.arange(300), QUERY)
    np.testing.assert_array_equal(found.view(np.int32), everything.view(np.int32))
