"""What a reading tells: one moment, exact, and the same bit by bit wherever the rows lie."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from ears import Ears

from langchain_dpicl import PoissonExampleSelector, StoreError
from langchain_dpicl.selection import Sought
from langchain_dpicl.selection.rules import Rules
from langchain_dpicl.sql import direct
from langchain_dpicl.store.filters import MetadataFilter
from stores.places import (
    KEY,
    QUERY,
    Place,
    check_against_all_products,
    everything,
    forget_meanwhile,
    place_at,
    row,
    rows,
    texts,
    told_by,
    unit_vectors,
)

NO_RULES = Rules(None, None, None)


def three_each(owners: int) -> list[dict[str, Any]]:
    return [row(f"owner-{i}", f"text {i}.{j}") for i in range(owners) for j in range(3)]


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_all_products_and_with_a_store_in_memory_to_the_last_bit(seed: int, place: Place) -> None:
    given = three_each(100)
    np.random.default_rng(seed).shuffle(given)  # type: ignore[arg-type]
    vectors = unit_vectors(300, seed)
    store = place(given, vectors=vectors)
    with place_at(None) as elsewhere, store.reading() as view:
        twin = elsewhere(given, vectors=vectors)
        check_against_all_products(view)
        assert told_by(view) == everything(twin)
        with twin.reading() as other:
            values = other.similarity(np.arange(300), QUERY)
            for threshold in [*values[::10], *np.nextafter(values[::10], np.float32(2))]:
                assert (view.eligible(QUERY, threshold) == other.eligible(QUERY, threshold)).all()


def test_the_gate_and_the_similarity_agree_to_the_last_bit(place: Place) -> None:
    """At a threshold that is a row's own similarity the row is in, and one step above it is out."""
    vectors = unit_vectors(180, 9)
    store = place(three_each(60), vectors=vectors)
    query = vectors[10]
    with store.reading() as view:
        found, position = view.rows_of(view.numbers)
        values = view.similarity(found, query)
        for owner in range(0, 60, 7):
            best = values[position == owner].max()
            for threshold, is_in in ((best, True), (np.nextafter(best, np.float32(2)), False)):
                assert (owner in view.eligible(query, float(threshold))) is is_in
                shown, *_ = Sought(NO_RULES, query, float(threshold)).rows(view, view.numbers[[owner]])
                assert bool(len(shown)) is is_in, "an eligible owner has something to show"


def test_an_owners_similarity_does_not_change_with_the_others(place: Place) -> None:
    """Bit by bit, whoever else comes or goes, and wherever its rows lie."""
    given, vectors = three_each(50), unit_vectors(150, 11)
    store = place(given, vectors=vectors)
    query = vectors[100]

    def own() -> bytes:
        with store.reading() as view:
            found, _ = view.rows_of(np.array([20]))
            view.matrix()
            return view.similarity(found, query).tobytes()

    before = own()
    for i in (3, 19, 21, 49):
        store.forget(f"owner-{i}")
        assert own() == before
    store.add(given[:30], vectors=vectors[:30][::-1])
    assert own() == before


def test_rows_come_by_position_then_id_for_owners_in_any_order(place: Place) -> None:
    given = [row(f"owner-{i}", f"text {i}.{j}") for i in range(4) for j in range(2)]
    store = place(given, ids=[7, 3, 5, 1, 6, 2, 4, 0])
    with store.reading() as view:
        found, position = view.rows_of(np.array([2, 0, 9, 3]))
        assert found.tolist() == [2, 6, 3, 7, 0, 4]
        assert position.tolist() == [0, 0, 1, 1, 3, 3]
        assert [each["input"] for each in view.read(found[[5, 0, 0]])] == ["text 3.0", "text 2.1", "text 2.1"]
        none = found[:0]
        assert (view.read(none), view.rows_of(none)[0].tolist(), view.marks(none, KEY)) == ([], [], [])
        assert view.rows_with(["#6", "#5", "#99", "x", "#06"]).tolist() == [5, 6]
        for use in (view.read, view.vectors, lambda rows: view.similarity(rows, QUERY), view.records):
            with pytest.raises(StoreError, match="rows of one reading"):
                use(np.array([99]))


def test_filters_let_through_whom_they_let_through_one_by_one(place: Place) -> None:
    """Texts that PostgreSQL's JSON refuses included."""
    values = ["a", "b", "\x00", "\ud800", 1, 1.0, 2.5, True, None, float("nan"), 10**30, ["a"]]
    given = [row(f"o{i // 3}", f"t{i}", x=values[i % 12], **({} if i % 5 else {"y": i})) for i in range(120)]
    store = place(given)
    filters: list[Any] = [{"x": value} for value in ("a", "\x00", "\ud800", 1, 2.5, True)]
    filters += [{"x": {name: value}} for name in ("$ne", "$gt", "$lte") for value in ("a", 1)]
    filters += [{"$or": [{"x": {"$in": ["a", 1]}}, {"y": {"$gte": 50}}]}, {"x": {"$ne": "b"}, "y": {"$lt": 90}}]
    for asked in filters:
        wanted = MetadataFilter.parse(asked)
        with store.reading() as view:
            expected = np.array([wanted.passes(each) for each in view.read(np.arange(120))])
            assert view.passing(np.arange(120), wanted).tolist() == expected.tolist()
            assert view.passing(np.array([7, 3]), wanted).tolist() == expected[[7, 3]].tolist()
            similar = view.similarity(np.arange(120), QUERY) >= np.float32(0.1)
            for about, passed in (((None, -1.0), expected), ((QUERY, 0.1), expected & similar)):
                found = view.eligible(*about, wanted)
                assert found.tolist() == np.unique(np.flatnonzero(passed) // 3).tolist()
        selector = PoissonExampleSelector(store, calls=2, rate=1.0, exemplars_per_owner=9, filter=asked, eligible=9)
        buckets = selector.sample(query=selector.embed_query({}))
        assert all(wanted.passes(each) for bucket in buckets for each in bucket)


def test_a_filter_sees_what_has_changed_since_it_was_asked_before(place: Place) -> None:
    wanted = MetadataFilter.parse({"ward": "north"})
    store = place([row(f"o{i}", ward="north" if i % 2 else "south") for i in range(8)])
    store.load_vectors()

    def passing() -> list[int]:
        with store.reading() as view:
            return view.eligible(None, -1.0, wanted).tolist()

    assert passing() == [1, 3, 5, 7]
    store.forget("o3")
    assert passing() == [1, 5, 7]
    store.add([row("o0", ward="north"), row("new", ward="north")])
    assert passing() == [0, 1, 5, 7, 8]
    store.maintenance().add_texts(["moved"], [{"owner": "o5", "output": "x", "ward": "south"}], ids=["#5"])
    assert passing() == [0, 1, 7, 8]


# -- marks -------------------------------------------------------------------------------------------------------------


def test_a_named_owner_and_an_exemplar_of_equal_text_have_marks_of_their_own(place: Place) -> None:
    store = place([{"input": "same", "output": "b"}] * 2, owner_key=None)
    store.add([{"input": "same", "output": "b", "owner": name} for name in "AB"], owner_key="owner")
    with store.reading() as view:
        first, twin, a, b = view.marks(np.arange(4), KEY)
        assert first == twin
        assert len({first, a, b}) == 3
        assert view.read(np.arange(4)) == [{"input": "same", "output": "b"}] * 4, "nothing but the names differs"
        assert view.marks(np.array([3, 9, 0]), KEY) == [b, b"", first]
        assert set(view.marks(np.arange(4), b"other")).isdisjoint({first, a, b})


# -- one moment --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [True, False])
def test_a_reading_stays_at_its_moment(loaded: bool, shared: Place) -> None:
    store = shared(three_each(5), vectors=unit_vectors(15, 1))
    elsewhere = shared.open()
    if loaded:
        store.load_vectors()
    with store.reading() as view:
        before = told_by(view)
        forget_meanwhile(elsewhere, "owner-1")
        elsewhere.add([row(owner, "late") for owner in ("owner-2", "late")])
        check_against_all_products(view)
        assert told_by(view) == before
        with store.reading() as inner:
            assert inner is view
        assert len(store) == 15
        assert told_by(view) == before
    assert everything(store) == everything(elsewhere) != before
    with store.reading() as view:
        assert view.eligible(QUERY, -1.0).tolist() == [0, 2, 3, 4, 5]
        assert view.marks(np.array([1]), KEY) == [b""]
        assert view.rows_of(np.array([1, 99, 2]))[1].tolist() == [2] * 4
        check_against_all_products(view)


def test_a_reading_that_has_ended_answers_nothing(place: Place) -> None:
    store = place(rows("a", "b"))
    with store.reading() as view, store.reading():
        pass
    uses: list[Any] = [
        lambda: view.eligible(None, 0.0),
        lambda: view.rows_of(view.numbers),
        lambda: view.read(np.arange(2)),
        lambda: view.records(np.arange(2)),
        lambda: view.similarity(np.arange(2), QUERY),
        lambda: view.marks(np.arange(2), KEY),
        lambda: view.rows_with(["#0"]),
    ]
    for use in uses:
        with pytest.raises(StoreError, match="has ended"):
            use()


def test_readings_that_overlap_see_each_its_own_moment(shared: Place) -> None:
    """Until it ends, though others, in other threads, follow further. A vector that went meanwhile is overwritten: its
    owner alone is no longer found."""
    store, elsewhere = shared(rows(*"abcdef"), vectors=unit_vectors(6, 1)), shared.open()
    store.load_vectors()
    threads = [ThreadPoolExecutor(1) for _ in range(4)]
    readings = [store.reading() for _ in threads]
    seen = []
    for step, (thread, reading) in enumerate(zip(threads, readings, strict=True)):
        view = thread.submit(reading.__enter__).result(30)
        seen.append((view, thread.submit(told_by, view).result(30)))
        forget_meanwhile(elsewhere, "abcd"[step])
        elsewhere.add(rows(f"new {step}"), vectors=unit_vectors(1, 50 + step))
    assert texts(store) == sorted(["text of e", "text of f", *(f"text of new {i}" for i in range(4))])
    for thread, reading, (view, told) in zip(threads, readings, seen, strict=True):
        thread.submit(check_against_all_products, view).result(30)
        after = thread.submit(told_by, view).result(30)
        thread.submit(reading.__exit__, None, None, None).result(30)
        thread.shutdown()
        for what in ("numbers", "ids", "owner of each", "exemplars", "records", "marks"):
            assert after[what] == told[what]


def test_a_store_in_memory_is_read_but_not_changed_within_a_reading() -> None:
    with place_at(None) as place:
        store = place(rows("a", "b"))
        with store.reading() as view:
            before = told_by(view)
            for change in (lambda: store.add(rows("c")), lambda: store.forget("a")):
                with pytest.raises(StoreError, match="end the reading first"):
                    change()
            assert (store.budgets, store.released_once, len(store)) == ((), (), 2)
            assert told_by(view) == before
        assert store.forget("a") == 1


# -- one owner's record, and the others' release -----------------------------------------------------------------------


UNREADABLE = {
    "no JSON": b"{",
    "no UTF-8": b'{"input": "\xff"}',
    "no mapping": b"[1]",
    "deeper than Python reads": b"[" * 5000 + b"]" * 5000,
    "a number of too many digits": b'{"input": 1' + b"0" * 5000 + b"}",
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_record_that_cannot_be_read_fails_no_release(kind: str, place: Place, sealed_of: Any) -> None:
    """It is an empty exemplar: its owner's member may fail on it, and nobody else's."""
    store = place(rows(*"abcdefgh"))
    statement = f"UPDATE {store._collection.exemplars} SET content = :content WHERE id = 3"
    store._database.run(lambda connection: direct(connection, statement, {"content": UNREADABLE[kind]}))
    with store.reading() as view:
        assert view.read(np.array([3])) == [{}]
        assert sum(map(bool, view.read(np.arange(8)))) == 7
    failed = Ears()

    def member(values: dict[str, Any]) -> str:
        failed.append(len(values["examples"]))
        [each["input"] for each in values["examples"]]
        failed.pop()
        return "Positive"

    assert sealed_of(member, store=store).invoke({"input": "?"}) == "Positive"
    assert len(failed) == 1
