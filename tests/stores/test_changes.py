"""Additions, forgetting, documents, and what a store keeps beside its records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from by_hand import charge
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import InMemoryVectorStore
from threads import raced

from langchain_dpicl import (
    ExemplarStore,
    InvalidParameter,
    InvalidRecords,
    PrivacyBudget,
    StoreError,
    UnknownOwner,
)
from stores.places import (
    EMBEDDINGS,
    KEY,
    QUERY,
    Place,
    everything,
    marks,
    place_at,
    row,
    rows,
    texts,
    unit_vectors,
)


def document(id: str | None, text: str, owner: str = "ann", **metadata: Any) -> Document:
    return Document(id=id, page_content=text, metadata={"owner": owner, **metadata})


@pytest.fixture
def store(place: Place) -> ExemplarStore:
    """Three documents of two owners."""
    made = place.empty()
    made.maintenance().add_documents([document("a1", "one"), document("a2", "two"), document("b1", "three", "bob")])
    return made


def hearing(told: list[Any], who: str = "") -> Any:
    """A ledger that writes down the marks of those who went."""

    def leave(keys: object, mark_of: Callable[[bytes], bytes]) -> Callable[[], None]:
        mark = mark_of(KEY)
        return lambda: told.append((who, mark) if who else mark)

    return leave


# -- the same everywhere -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner_key", ["owner", None])
def test_all_stores_are_the_same_after_the_same_changes(owner_key: str | None, place: Place) -> None:
    """Ids, owners in order, marks, vectors and what watchers hear, as in a store in memory."""
    given = [row(f"p{i % 4}", f"text {i}") for i in range(12)]
    np.random.default_rng(3).shuffle(given)  # type: ignore[arg-type]
    more = [row(f"p{i}", f"more {i}") for i in range(3, 8)]
    first = [document(None, f"note {i}", f"p{i % 3}", output="x") for i in range(7)]
    second = [document(None, "x", "p1", output="x"), document(None, "y", "q", output="x")]
    changes: list[Callable[[ExemplarStore], Any]] = [
        lambda store: None,
        lambda store: store.add(more),
        lambda store: store.maintenance().add_documents(first, ids=[str(i) for i in range(7)]),
        lambda store: store.forget("p2" if owner_key else "#7"),
        lambda store: store.add(more[:2], ids=[1000, 900]),
        lambda store: store.maintenance().add_documents(second, ids=["3", "8"]),
        lambda store: store.maintenance().delete(["1", "#9", "#1", "nobody", "8"]),
        lambda store: store.add(more[2:4]),
        lambda store: store.forget("p0" if owner_key else "#0"),
    ]
    heard: list[list[int]] = [[], []]
    with place_at(None) as elsewhere:
        both = place(given, owner_key=owner_key), elsewhere(given, owner_key=owner_key)
        for store, ids in zip(both, heard, strict=True):
            store.on_forget(ids.extend)
        for i, change in enumerate(changes):
            one, other = (change(store) for store in both)
            assert one == other
            assert everything(both[0]) == everything(both[1])
            assert list(both[0].owners) == list(both[1].owners)
            assert (len(both[0]), both[0].owner_count) == (len(both[1]), both[1].owner_count)
            assert heard[0] == heard[1]
            if i == len(changes) // 2:
                both[0].load_vectors()


# -- owners ------------------------------------------------------------------------------------------------------------


def test_an_owner_that_exists_grows(place: Place) -> None:
    store = place(rows("a", "b", "c"))
    store.add([row("b", "more"), row("b", "and more")])
    assert (len(store), store.owner_count) == (5, 3)
    with store.reading() as view:
        found, position = view.rows_of(np.array([1, 2]))
    assert found.tolist() == [1, 3, 4, 2]
    assert position.tolist() == [0, 0, 0, 1]


def test_without_an_owner_key_every_record_is_its_own_owner(place: Place) -> None:
    store = place(rows("a", "a"), owner_key=None)
    store.add([{"input": "c", "output": "b"}])
    assert list(store.owners) == ["#0", "#1", "#2"]


@pytest.mark.parametrize("owner", ["nobody", "", "#0", 7, "owner-00", "Owner-0", "%", "owner-0\0"])
def test_an_unknown_owner_is_an_error_that_repeats_no_name(owner: Any, place: Place) -> None:
    store = place(rows("owner-0", "owner-1"))
    before = everything(store)
    with pytest.raises(UnknownOwner) as caught:
        store.forget(owner)
    assert str(caught.value) == "the store holds no such owner"
    assert isinstance(caught.value, KeyError)
    assert everything(store) == before
    store.forget("owner-1")
    with pytest.raises(UnknownOwner):
        store.forget("owner-1")


def test_a_forgotten_owners_number_and_ids_are_never_given_again(place: Place) -> None:
    store = place(rows("a", "b", "c"))
    assert store.forget("c") == 1
    assert store.add(rows("c")) == [3]
    with store.reading() as view:
        assert len(view.numbers) == 4, "there is a coin for each number so far"
        assert [bool(mark) for mark in view.marks(np.arange(4), KEY)] == [True, True, False, True]
    for owner in "cab":
        store.forget(owner)
    with store.reading() as view:
        assert view.eligible(QUERY, -1.0).tolist() == view.eligible(None, 0.0).tolist() == []
        assert view.rows_of(view.numbers)[0].tolist() == []
    assert store.add(rows("d"), ids=[0]) == [0]
    assert texts(store) == ["text of d"]


def test_equal_exemplars_have_one_mark_and_the_last_to_go_tells_it(place: Place) -> None:
    """Each is its own owner, and known by content. While one is there a ledger must keep the row from which all pay."""
    same = {"input": "same", "output": "b"}
    store = place([same, same, {"input": "else", "output": "b"}], owner_key=None)
    told: list[bytes] = []
    store.on_owner_forgotten(hearing(told))
    with store.reading() as view:
        first, twin, other = view.marks(view.numbers, KEY)
    assert first == twin != other
    store.forget("#1")
    store.add([same])
    store.forget("#0")
    assert told == []
    store.forget("#3")
    store.forget("#2")
    assert told == [first, other]
    store.add([same])
    assert list(marks(store).values()) == [first]


def test_an_exemplar_that_grew_keeps_its_mark(place: Place) -> None:
    """Its name, "#5", is given as an owner's, and what is added comes first by id: it is known by what it was."""
    store = place([{"input": "was", "output": "b"}] * 2, owner_key=None, ids=[5, 6])
    before = marks(store)
    told: list[bytes] = []
    store.on_owner_forgotten(hearing(told))
    more = [row("#5", "first"), row("#5", "last")]
    store.add(more, owner_key="owner", ids=[1, 9])
    assert marks(store) == before
    assert store.forget("#6") == 1
    assert told == []
    assert store.forget("#5") == 3
    assert told == [before["#5"]]


def test_a_watcher_that_fails_hears_again_and_may_read(place: Place) -> None:
    store = place(rows(*"abcd"))
    calls: list[Any] = []

    def watcher(gone: Any) -> None:
        calls.append((list(gone), len(store), store.released_once))
        if len(calls) == 1:
            raise RuntimeError("busy")

    store.on_forget(watcher)
    with pytest.raises(RuntimeError, match="busy"):
        store.forget("a")
    assert len(store) == 3
    store.refresh()
    assert calls == [([0], 3, ())] * 2
    store.forget("b")
    assert calls[2:] == [([1], 2, ())]


# -- documents ---------------------------------------------------------------------------------------------------------


def test_a_document_is_replaced_by_its_id_and_its_owner_stays(store: ExemplarStore) -> None:
    """Also if it was the only one of its owner: no new number, no new mark."""
    before, owners = marks(store), list(store.owners)
    heard: list[list[int]] = []
    store.on_forget(lambda ids: heard.append(list(ids)))
    documents = store.maintenance()
    documents.add_documents([document("b1", "three, corrected", "bob"), document("a2", "two, too")])
    assert texts(store) == ["one", "three, corrected", "two, too"]
    assert (marks(store), list(store.owners)) == (before, owners)
    with store.reading() as view:
        assert view.numbers.tolist() == [0, 1]
    documents.add_documents([document("b1", "three", "cleo")])
    assert list(store.owners) == ["ann", "cleo"]
    assert documents.get_by_ids(["b1", "none"]) == [document("b1", "three", "cleo")]
    assert heard == [[1, 2], [3]]


def test_an_owner_whose_documents_leave_is_gone_and_comes_back_with_its_old_mark(store: ExemplarStore) -> None:
    """A ledger keeps the marks of an owner who was not forgotten, so it comes back to the tickets that it had left."""
    told: list[Any] = []
    store.on_owner_forgotten(lambda keys, mark_of: partial(told.append, mark_of(KEY)))
    before = marks(store)["bob"]
    store.maintenance().delete(["b1", "unknown"])
    assert list(store.owners) == ["ann"]
    store.maintenance().add_documents([document("b2", "other", "bob")])
    assert marks(store)["bob"] == before
    assert told == []


def test_tickets_are_not_refilled_by_a_loader_that_loses_an_owner_for_a_while(
    store: ExemplarStore, ledger_url: str
) -> None:
    def paying(line: Any) -> int:
        with store.reading() as view:
            present = view.eligible(None, 0.0)
        (entry,) = charge(line, owners=[line.ask(store, present)])
        return len(entry.participants.take())

    budget = PrivacyBudget(1000, 1e-5, 1, ledger_url, tickets=True, replay=False)
    line = budget.line("vote", 0.5)
    budget.watch(store)
    assert [paying(line), paying(line)] == [2, 0]
    documents = store.maintenance()
    kept = documents.get_by_ids(["a1", "a2", "b1"])
    documents.delete(["a1", "a2", "b1"])
    assert len(store) == 0
    documents.add_documents(kept)
    assert (store.owner_count, paying(line)) == (2, 0)
    store.forget("bob")
    documents.add_documents([document("b1", "three", "bob")])
    assert paying(line) == 1, "a forgotten owner who comes again is a new one"
    budget.close()


def test_without_an_owner_key_a_changed_document_is_another_owner_and_its_first_version_is_known_again(
    place: Place,
) -> None:
    store = place.empty(owner_key=None)
    documents = store.maintenance()

    def write(text: str) -> bytes:
        documents.add_documents([Document(id="a", page_content=text)])
        assert store.owner_count == 1
        return next(iter(marks(store).values()))

    first, second = write("version 1"), write("version 2")
    assert first != second
    assert write("version 1") == first
    documents.add_documents([Document(id="b", page_content="y")])
    store.add([{"text": "z", "who": store.owners[0]}], owner_key="who")
    documents.delete(["a"])
    assert texts(store) == ["y"], "an exemplar without a name goes with what was added to it"


def test_records_without_an_id_are_found_by_their_number(place: Place) -> None:
    store = place([row("ann", "one"), row("bob", "two")])
    documents = store.maintenance()
    assert sorted(each.id or "" for each in documents.similarity_search("one", 2)) == ["#0", "#1"]
    documents.delete(["#0"])
    documents.add_texts(["three"], [{"owner": "bob", "output": "x"}], ids=["#1"])
    assert texts(store) == ["three"]
    assert documents.get_by_ids(["#1"])[0].page_content == "three"
    with pytest.raises(InvalidRecords, match="document 1 has an id of # and a number"):
        documents.add_documents([document("c", "fine", output="x"), document("#4", "an issue", output="x")])
    assert texts(store) == ["three"]


def test_searches_are_exact_and_the_nearest_comes_first(place: Place) -> None:
    vectors = unit_vectors(30, 4)
    store = place([row(f"o{i % 7}", f"t{i}") for i in range(30)], vectors=vectors)
    found = store.maintenance().similarity_search_by_vector(QUERY.tolist(), 5)
    best = np.argsort(-(vectors.astype(float) @ QUERY.astype(float)))[:5]
    assert [each.page_content for each in found] == [f"t{i}" for i in best]


def test_bad_documents_change_nothing_and_show_nothing(store: ExemplarStore, canary: str, canary_free: Any) -> None:
    documents = store.maintenance()
    bad: list[tuple[Document, str]] = [
        (Document(page_content=canary), "no owner"),
        (document("c", " ", canary), "document 1 has no text"),
        (Document(page_content=canary, metadata={"owner": "c", "text": "x"}), "under 'text'"),
        (document("c", canary, bad=object()), "under 'bad'"),
    ]
    for each, problem in bad:
        with pytest.raises(InvalidRecords, match=problem) as caught:
            documents.add_documents([document("a1", "changed"), each])
        canary_free(caught.value)
    with pytest.raises(InvalidRecords, match="document 0 has an id that is no text: int"):
        documents.add_texts(["x"], [{"owner": "ann"}], ids=[3])  # type: ignore[list-item]
    with pytest.raises(InvalidRecords, match="2 entries for 1"):
        documents.add_documents([document("a1", "changed")], ids=["a", "b"])
    options: list[tuple[str, Callable[[], Any]]] = [
        ("filter", lambda: documents.similarity_search("one", filter={"owner": "ann"})),
        ("ids", documents.delete),
        ("k", lambda: documents.similarity_search("one", k=0)),
        ("embedding", lambda: documents.similarity_search_by_vector([1.0])),
    ]
    for name, call in options:
        with pytest.raises(InvalidParameter, match=name):
            call()
    assert texts(store) == ["one", "three", "two"]
    given = [document("a1", "first"), document("c1", "four", "cleo"), document("a1", "last")]
    assert documents.add_documents(given) == ["a1", "c1", "a1"], "the last of several with one id counts"
    assert texts(store) == ["four", "last", "three", "two"]


# -- sources -----------------------------------------------------------------------------------------------------------


def test_the_indexing_api_adds_changes_and_deletes(place: Place) -> None:
    store, manager = place.empty(), InMemoryRecordManager("notes")
    documents = store.maintenance(record_manager=manager)
    store.maintenance(record_manager=manager)

    def load(*notes: Document, cleanup: Any = "incremental") -> tuple[int, int, int]:
        done = index(list(notes), manager, documents, cleanup=cleanup, source_id_key="source", key_encoder="sha256")
        return done["num_added"], done["num_skipped"], done["num_deleted"]

    def note(text: str, owner: str, source: str) -> Document:
        return document(None, text, owner, source=source)

    one, two, three = note("one", "ann", "a"), note("two", "ann", "a"), note("three", "bob", "b")
    assert load(one, two, three) == (3, 0, 0)
    assert load(one, two, three) == (0, 3, 0)
    before = marks(store)
    assert load(note("one, corrected", "ann", "a"), two) == (1, 1, 1)
    assert texts(store) == ["one, corrected", "three", "two"]
    assert load(note("three, corrected", "bob", "b"), cleanup="scoped_full") == (1, 0, 1)
    assert marks(store) == before
    assert load(three, cleanup="full") == (1, 0, 3)
    assert load(one, three, cleanup=None) == (1, 1, 0)
    assert store.forget("bob") == 1
    (key,) = manager.list_keys()
    assert documents.get_by_ids([key])[0].metadata == {"owner": "ann", "source": "a"}
    assert load(three) == (1, 0, 0), "the record manager has forgotten it, too"


async def test_the_indexing_api_works_from_an_event_loop(place: Place) -> None:
    store, manager = place.empty(), InMemoryRecordManager("notes")
    for text in ("one", "two"):
        note = document(None, text, source="a")
        about: dict[str, Any] = {"cleanup": "incremental", "source_id_key": "source", "key_encoder": "sha256"}
        await aindex([note], manager, store.maintenance(), **about)
        assert texts(store) == [text]


def test_forgetting_waits_for_the_record_manager(store: ExemplarStore, canary: str, canary_free: Any) -> None:
    """Once the owner is gone, nobody knows its keys."""

    class Down(InMemoryRecordManager):
        is_down = True

        def delete_keys(self, keys: Any) -> None:
            if self.is_down:
                raise OSError(canary)
            super().delete_keys(keys)

    manager = Down("notes")
    manager.update(["a1", "a2", "b1"])
    store.maintenance(record_manager=manager)
    with pytest.raises(StoreError, match=r"record manager fails .*OSError.*nobody was forgotten") as caught:
        store.forget("ann")
    canary_free(caught.value)
    assert texts(store) == ["one", "three", "two"]
    manager.is_down = False
    assert store.forget("ann") == 2
    assert manager.list_keys() == ["b1"]


def test_a_store_follows_a_collection(place: Place) -> None:
    """What is new is added, what changed replaced, what is gone removed; the rest, and records without an id, stay."""
    collection = InMemoryVectorStore(EMBEDDINGS)
    collection.add_documents([document(f"d{i}", f"note {i}", f"p{i % 2}") for i in range(5)])
    store = place.empty()
    store.add([{"text": "plain", "owner": "ann"}])  # its number is 0
    store.maintenance().add_documents([document("#0", "plain, corrected")])
    counts = {"num_added": 5, "num_updated": 0, "num_skipped": 0, "num_deleted": 0}
    assert store.sync_from(collection) == counts
    assert store.sync_from(collection) == {**counts, "num_added": 0, "num_skipped": 5}
    before = marks(store)
    collection.delete(["d0"])
    collection.add_documents([document("d1", "note 1, corrected", "p1"), document("d5", "note 5", "p5")])
    collection.store["d2"]["metadata"]["owner"] = "p1"
    collection.store["d3"]["vector"] = [1.0] + [0.0] * 7
    assert store.sync_from(collection) == {"num_added": 1, "num_updated": 3, "num_skipped": 1, "num_deleted": 1}
    assert texts(store) == ["note 1, corrected", "note 2", "note 3", "note 4", "note 5", "plain, corrected"]
    assert {name: mark for name, mark in marks(store).items() if name != "p5"} == before
    collection.add_documents([document("#3", "an issue")])
    with pytest.raises(InvalidRecords, match="has an id of # and a number"):
        store.sync_from(collection)
    with pytest.raises(StoreError, match="empty"):
        store.sync_from(InMemoryVectorStore(EMBEDDINGS))
    assert len(store) == 6


def test_a_collection_is_taken_over_with_its_ids_and_vectors(place: Place) -> None:
    collection = InMemoryVectorStore(EMBEDDINGS)
    collection.add_documents([document(f"d{i}", f"note {i}", f"p{i % 2}") for i in range(5)])
    about: dict[str, Any] = {"owner_key": "owner", "name": place.name, **place.options}
    store = ExemplarStore.from_vectorstore(collection, place.url, **about)
    assert store.sync_from(collection)["num_skipped"] == 5
    assert store.maintenance().get_by_ids(["d3"]) == [document("d3", "note 3", "p1")]
    store.close()


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:another process reads")
def test_threads_that_add_forget_and_read_see_whole_changes_only(place: Place) -> None:
    """Owners come and go with three exemplars each, and every reading finds all three or none, with their texts."""
    store = place(rows("first"))

    def change(number: int, turn: int) -> None:
        owner = f"{number} {turn % 5}"
        store.add([row(owner, f"{owner} {i}") for i in range(3)], vectors=unit_vectors(3, turn))
        assert store.forget(owner) == 3

    def read(_: int) -> None:
        with store.reading() as view:
            found, position = view.rows_of(view.numbers)
            assert set(np.bincount(position).tolist()) <= {0, 1, 3}
            owners = [tuple(each["input"].split()[:2]) for each in view.read(found)]
            assert all(len({owners[i] for i in np.flatnonzero(position == p)}) == 1 for p in np.unique(position))
            assert len(view.eligible(QUERY, -1.0)) == len(np.unique(position))

    assert raced([partial(change, 1), partial(change, 2), read, read], 2) == []
    assert texts(store) == ["text of first"]
