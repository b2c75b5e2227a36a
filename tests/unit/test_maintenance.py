"""`store/maintenance.py`: single documents are added, replaced and removed, and what that tells nobody."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_hand import charge
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    InvalidParameter,
    InvalidRecords,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    StoreError,
    UnsafeConfigurationError,
)
from langchain_dpicl.store.maintenance import LiveStore

KEY = b"k" * 32
MODEL = DeterministicFakeEmbedding(size=6)


def document(id: str, text: str, owner: str = "ann", **metadata: Any) -> Document:
    return Document(id=id, page_content=text, metadata={"patient": owner, **metadata})


@pytest.fixture
def store() -> ExemplarStore:
    made = ExemplarStore.empty(MODEL, owner_key="patient")
    made.maintenance().add_documents([document("a1", "one"), document("a2", "two"), document("b1", "three", "bob")])
    return made


def texts(store: LiveStore) -> list[str]:
    with store.reading() as view:
        rows, _ = view.rows_of(view.numbers)
        return sorted(record["text"] for record in view.read(rows))


def marks(store: LiveStore) -> dict[str, bytes]:
    with store.reading() as view:
        return dict(zip(store.owners, view.marks(view.numbers, KEY), strict=True))


# -- what a change does ------------------------------------------------------------------------------------------------


def test_a_document_is_replaced_by_its_id_and_its_owner_stays(store: ExemplarStore) -> None:
    """Also if it was the only one of its owner: no new number, no new life, no new mark."""
    before, numbers, lives = marks(store), store.numbers.copy(), store._held.lives.copy()
    store.maintenance().add_documents([document("b1", "three, corrected", "bob"), document("a2", "two, too")])
    assert texts(store) == ["one", "three, corrected", "two, too"]
    assert marks(store) == before
    assert np.array_equal(store.numbers, numbers)
    assert np.array_equal(store._held.lives, lives)


def test_a_document_may_change_its_owner(store: ExemplarStore) -> None:
    store.maintenance().add_documents([document("b1", "three", "cleo")])
    assert list(store.owners) == ["ann", "cleo"]
    assert store.maintenance().get_by_ids(["b1"]) == [document("b1", "three", "cleo")]


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
        (entry,) = charge(line, owners=[line.ask(store, store.numbers)])
        return len(entry.participants.take())

    budget = PrivacyBudget(1000, 1e-5, 1, ledger_url, tickets=True, replay=False)
    line = budget.line("vote", 0.5)
    budget.watch(store)
    assert [paying(line), paying(line)] == [2, 0]
    kept = store.maintenance().get_by_ids(["a1", "a2", "b1"])
    store.maintenance().delete(["a1", "a2", "b1"])
    assert len(store) == 0
    store.maintenance().add_documents(kept)
    assert store.owner_count == 2
    assert paying(line) == 0
    store.forget("bob")
    store.maintenance().add_documents([document("b1", "three", "bob")])
    assert paying(line) == 1, "a forgotten owner who comes again is a new one"
    budget.close()


def test_without_an_owner_key_a_changed_document_is_another_owner_and_its_first_version_is_known_again() -> None:
    store = ExemplarStore.empty(MODEL)
    documents = store.maintenance()

    def write(text: str) -> bytes:
        documents.add_documents([Document(id="a", page_content=text)])
        assert store.owner_count == 1
        return next(iter(marks(store).values()))

    first, second = write("version 1"), write("version 2")
    assert first != second
    assert write("version 1") == first


def test_an_exemplar_without_a_name_goes_with_what_was_added_to_it() -> None:
    """Its content is its mark: without it, the rest would have another one."""
    store = ExemplarStore.empty(MODEL)
    store.maintenance().add_documents([Document(id="a", page_content="x"), Document(id="b", page_content="y")])
    store.add([{"text": "z", "who": "#0"}], owner_key="who")
    store.maintenance().delete(["a"])
    assert texts(store) == ["y"]


def test_ids_are_kept_apart_from_what_members_see(store: ExemplarStore) -> None:
    with store.reading() as view:
        rows, _ = view.rows_of(view.numbers)
        assert [sorted(record) for record in view.read(rows)] == [["text"]] * 3
    plain = ExemplarStore.from_records(
        [{"text": "one", "patient": "ann"}], MODEL, input_key="text", output_key=None, owner_key="patient"
    )
    assert plain._held.texts[0] == store._held.texts[0]


def test_records_without_an_id_are_found_by_their_number() -> None:
    store = ExemplarStore.from_texts(["one", "two"], MODEL)
    documents = store.maintenance()
    assert [each.id for each in documents.similarity_search("one", 2)] == ["#0", "#1"]
    documents.delete(["#0"])
    documents.add_texts(["three"], ids=["#1"])
    assert [each["input"] for each in store.read(np.arange(len(store)))] == ["three"]
    assert documents.get_by_ids(["#1"])[0].page_content == "three"


def test_watchers_hear_the_ids_of_what_went_and_of_what_was_replaced(store: ExemplarStore) -> None:
    heard: list[list[int]] = []
    store.on_forget(lambda ids: heard.append(list(ids)))
    store.maintenance().add_documents([document("c1", "four", "cleo")])
    store.maintenance().add_documents([document("a1", "one!")])
    store.maintenance().delete(["b1"])
    store.maintenance().delete(["b1"])
    assert heard == [[0], [2]]


def test_a_replaced_documents_bytes_are_overwritten(store: ExemplarStore, tmp_path: Path) -> None:
    path = tmp_path / "store.npz"
    store.save(path)
    old = store._held.texts._data
    assert b"three" in path.read_bytes()
    with path.open("rb") as replaced:
        store.maintenance().add_documents([document("b1", "changed", "bob")])
        assert set(replaced.read()) <= {0}
    assert set(old) <= {0}
    assert b"three" not in path.read_bytes()
    assert b"changed" in path.read_bytes()


# -- files and other processes -----------------------------------------------------------------------------------------


def test_ids_are_saved_and_loaded(store: ExemplarStore, tmp_path: Path) -> None:
    store.save(tmp_path / "store.npz")
    again = ExemplarStore.load(tmp_path / "store.npz", MODEL).maintenance()
    assert again.get_by_ids(["b1"]) == [document("b1", "three", "bob")]


def test_a_file_of_a_version_without_ids_is_read(store: ExemplarStore, tmp_path: Path) -> None:
    from langchain_dpicl.store import file

    def old(arrays: dict[str, Any]) -> str:
        return digest({name: array for name, array in arrays.items() if not name.startswith("document")})

    digest = file._digest_arrays
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "_digest_arrays", old)
        store.save(tmp_path / "store.npz")
    with np.load(tmp_path / "store.npz") as archive:
        arrays = {name: archive[name] for name in archive if not name.startswith("document")}
    np.savez(tmp_path / "old.npz", **arrays)
    again = ExemplarStore.load(tmp_path / "old.npz", MODEL)
    assert texts(again) == texts(store)
    again.maintenance().delete(["#1"])
    assert texts(again) == ["one", "three"]


def test_another_process_follows_changes_and_keeps_what_it_added(store: ExemplarStore, tmp_path: Path) -> None:
    store.save(tmp_path / "store.npz")
    other = ExemplarStore.load(tmp_path / "store.npz", MODEL)
    other.add([{"text": "unsaved", "patient": "ann"}, {"text": "unsaved, too", "patient": "dora"}])
    heard: list[int] = []
    other.on_forget(heard.extend)
    numbers = dict(zip(other.owners, other.numbers.tolist(), strict=True))
    documents = store.maintenance()
    documents.add_documents([document("b1", "three, corrected", "bob"), document("c1", "four", "cleo")])
    documents.delete(["a1"])
    assert texts(other) == ["four", "three, corrected", "two", "unsaved", "unsaved, too"]
    after = dict(zip(other.owners, other.numbers.tolist(), strict=True))
    assert {name: after[name] for name in ("ann", "bob", "dora")} == {
        name: numbers[name] for name in after if name != "cleo"
    }
    assert sorted(heard)[:2] == [0, 2]
    assert other.maintenance().get_by_ids(["b1"])[0].page_content == "three, corrected"
    other.save(tmp_path / "store.npz")
    store.refresh()
    assert texts(store) == texts(other)
    assert marks(store) == marks(other)


def _add_some(path: Path, name: str) -> None:
    documents = ExemplarStore.load(path, MODEL).maintenance()
    for i in range(5):
        documents.add_documents([document(f"{name}{i}", f"{name} {i}", name)])
        documents.add_documents([document(f"{name}{i}", f"{name} {i}!", name)])


@pytest.mark.slow
def test_processes_that_change_one_file_at_once_lose_nothing(store: ExemplarStore, tmp_path: Path) -> None:
    path = tmp_path / "store.npz"
    store.save(path)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add_some, args=(path, name)) for name in ("x", "y", "z")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    store.refresh()
    assert texts(store) == sorted(["one", "two", "three", *(f"{name} {i}!" for name in "xyz" for i in range(5))])


def test_a_change_waits_its_turn_among_many_writers(
    store: ExemplarStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may be faster many times in a row; each time it is made again on what they have written."""
    path = tmp_path / "store.npz"
    store.save(path)
    others, faster, changed = ExemplarStore.load(path, MODEL).maintenance(), iter(range(20)), store._changed

    def overtaken(*given: Any) -> Any:
        made = changed(*given)
        if (i := next(faster, None)) is not None:
            others.add_documents([document(f"x{i}", f"x {i}")])
        return made

    monkeypatch.setattr(store, "_changed", overtaken)
    store.maintenance().add_documents([document("d", "four")])
    assert texts(ExemplarStore.load(path, MODEL)) == sorted(
        ["four", "one", "three", "two", *(f"x {i}" for i in range(20))]
    )


@pytest.mark.parametrize("way", ["load", "refresh"])
def test_a_file_that_is_replaced_and_overwritten_while_it_is_read_is_read_again(
    way: str, store: ExemplarStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change overwrites the bytes of the file that it replaced, which a reader may have open."""
    path = tmp_path / "store.npz"
    store.save(path)
    other, writes, load = ExemplarStore.load(path, MODEL), ["four", "five", "six"], np.load

    def slow(*given: Any, **options: Any) -> Any:
        archive = load(*given, **options)
        if writes:
            monkeypatch.setattr(np, "load", load)
            store.maintenance().add_documents([document("d", writes.pop())])
            monkeypatch.setattr(np, "load", slow)
        return archive

    store.maintenance().add_documents([document("d", "three and a half")])
    monkeypatch.setattr(np, "load", slow)
    if way == "load":
        other = ExemplarStore.load(path, MODEL)
    else:
        other.refresh()
    assert not writes
    assert texts(other) == ["four", "one", "three", "two"]


def test_a_change_leaves_alone_what_the_next_writer_has_begun_to_write(
    store: ExemplarStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next writer begins as soon as the new file is in place, while the old one is still being overwritten."""
    from langchain_dpicl.store import file

    path = tmp_path / "store.npz"
    store.save(path)
    other = ExemplarStore.load(path, MODEL).maintenance()
    overwrite, write, begun, ended = file._overwrite, file.write, threading.Event(), threading.Event()
    second = threading.Thread(target=lambda: other.add_documents([document("e", "five")]))

    def slow_write(*given: Any) -> Any:
        state = write(*given)
        if threading.current_thread() is second:
            begun.set()
            assert ended.wait(60)
        return state

    def slow_overwrite(descriptor: int) -> None:
        if not second.ident:
            second.start()
            assert begun.wait(60)
        overwrite(descriptor)

    monkeypatch.setattr(file, "write", slow_write)
    monkeypatch.setattr(file, "_overwrite", slow_overwrite)
    store.maintenance().add_documents([document("d", "four")])
    ended.set()
    second.join(60)
    assert texts(ExemplarStore.load(path, MODEL)) == ["five", "four", "one", "three", "two"]


def test_a_second_name_of_the_file_in_place_goes_and_is_not_overwritten(store: ExemplarStore, tmp_path: Path) -> None:
    """As a writer of a new file has it for a moment, and leaves it if it is killed then."""
    path = tmp_path / "store.npz"
    store.save(path)
    name = path.with_name(f".{path.name}.{'0' * 16}.tmp")
    os.link(path, name)
    found = []

    def listening(*_: Any) -> None:
        found.append(texts(ExemplarStore.load(path, MODEL)))
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("langchain_dpicl.store.file.write", listening)
        with pytest.raises(StoreError, match="No space"):
            store.maintenance().add_documents([document("d", "four")])
    assert found == [["one", "three", "two"]]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_the_store_as_it_was(
    store: ExemplarStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from langchain_dpicl.store import file

    store.save(tmp_path / "store.npz")

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "write", full)
    with pytest.raises(StoreError, match="No space"):
        store.maintenance().add_documents([document("a1", "changed"), document("c1", "new", "cleo")])
    monkeypatch.undo()
    assert texts(store) == texts(ExemplarStore.load(tmp_path / "store.npz", MODEL)) == ["one", "three", "two"]


def test_a_change_is_refused_if_the_stores_file_is_gone(store: ExemplarStore, tmp_path: Path) -> None:
    """It would end with the process, while a record manager takes it for done."""
    path = tmp_path / "store.npz"
    store.save(path)
    path.rename(tmp_path / "moved.npz")
    with pytest.raises(StoreError, match=r"'store.npz' is gone.*save"):
        store.maintenance().add_documents([document("c1", "four", "cleo")])
    assert texts(store) == ["one", "three", "two"]
    store.save(path)
    store.maintenance().add_documents([document("c1", "four", "cleo")])
    assert texts(ExemplarStore.load(path, MODEL)) == ["four", "one", "three", "two"]


# -- forgetting, and a record manager ----------------------------------------------------------------------------------


def test_forgetting_deletes_the_owners_keys_of_a_record_manager(store: ExemplarStore) -> None:
    manager = InMemoryRecordManager("notes")
    for _ in range(2):
        documents = store.maintenance(record_manager=manager)
    assert len(store._record_managers) == 1
    source = [
        Document(page_content=f"note {i}", metadata={"patient": f"p{i % 2}", "source": f"s{i}"}) for i in range(4)
    ]
    index(source, manager, documents, cleanup=None, key_encoder="sha256")
    keys = set(manager.list_keys())
    assert len(keys) == 4
    gone = {each.id for each in documents.get_by_ids(sorted(keys)) if each.metadata["patient"] == "p1"}
    store.forget("p1")
    assert set(manager.list_keys()) == keys - gone
    assert len(gone) == 2


def test_a_record_manager_that_fails_is_named_and_forgetting_can_be_asked_again(
    store: ExemplarStore, canary: str, canary_free: Any
) -> None:
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


# -- members, copies, refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["object", "retriever", "tool"])
def test_no_member_may_reach_it(way: str, store: ExemplarStore, budget_of: Any) -> None:
    documents = store.maintenance()
    held: Any = documents
    if way != "object":
        held = documents.as_retriever()
    if way == "tool":
        held = create_retriever_tool(held, "notes", "all notes")
    member = RunnableLambda(lambda given: "yes" if held else "no")
    with pytest.raises(UnsafeConfigurationError):
        PrivateEnsemble(PoissonExampleSelector(store, members=2, shots=1), member) | DPAggregate(
            NoisyVote(["yes", "no"]), budget_of()
        )


def test_it_is_not_copied_and_shows_nothing(store: ExemplarStore) -> None:
    documents = store.maintenance()
    for copying in (pickle.dumps, copy.deepcopy):
        with pytest.raises(UnsafeConfigurationError):
            copying(documents)
    assert "one" not in repr(documents)
    with pytest.raises(UnsafeConfigurationError, match="empty"):
        type(documents).from_texts(["x"], MODEL)


def test_bad_documents_change_nothing_and_show_nothing(store: ExemplarStore, canary: str, canary_free: Any) -> None:
    documents = store.maintenance()
    bad: list[tuple[Document, str]] = [
        (Document(page_content=canary), "no owner"),
        (document("c", " ", canary), "document 1 has no text"),
        (Document(page_content=canary, metadata={"patient": "c", "text": "x"}), "under 'text'"),
        (document("c", canary, bad=object()), "under 'bad'"),
    ]
    for each, problem in bad:
        with pytest.raises(InvalidRecords, match=problem) as caught:
            documents.add_documents([document("a1", "changed"), each])
        canary_free(caught.value)
    with pytest.raises(InvalidRecords, match="document 0 has an id that is no text: int"):
        documents.add_texts(["x"], [{"patient": "ann"}], ids=[3])  # type: ignore[list-item]
    with pytest.raises(InvalidRecords, match="2 entries for 1"):
        documents.add_documents([document("a1", "changed")], ids=["a", "b"])
    assert texts(store) == ["one", "three", "two"]


def test_options_without_effect_are_refused(store: ExemplarStore) -> None:
    documents = store.maintenance()
    with pytest.raises(InvalidParameter, match="filter"):
        documents.similarity_search("one", filter={"patient": "ann"})
    with pytest.raises(InvalidParameter, match="ids"):
        documents.delete()
    with pytest.raises(InvalidParameter, match="k"):
        documents.similarity_search("one", k=0)
    with pytest.raises(InvalidParameter, match="embedding"):
        documents.similarity_search_by_vector([1.0])


def test_the_last_of_several_documents_with_one_id_counts(store: ExemplarStore) -> None:
    given = [document("a1", "first"), document("c1", "four", "cleo"), document("a1", "last")]
    assert store.maintenance().add_documents(given) == ["a1", "c1", "a1"]
    assert texts(store) == ["four", "last", "three", "two"]


def test_a_sources_id_never_takes_a_record_that_came_without_one(store: ExemplarStore) -> None:
    """An id of a source such as "#4", an issue's number, is also what the store calls its record number 4."""
    with pytest.raises(InvalidRecords, match="document 1 has an id of # and a number"):
        store.maintenance().add_documents([document("c", "fine"), document("#4", "an issue")])
    store.add([{"text": "bob's", "patient": "bob"}, {"text": "cid's", "patient": "cid"}])  # numbers 3 and 4
    collection = InMemoryVectorStore(MODEL)
    collection.add_documents([document("x", "new"), document("#3", "an issue")])
    with pytest.raises(InvalidRecords, match="document 1 has an id of # and a number"):
        store.sync_from(collection)
    assert texts(store) == ["bob's", "cid's", "one", "three", "two"]
    for text in ("cid's, seen anew", "and again"):  # by the id that the store shows, also once it is the document's own
        store.maintenance().add_documents([document("#4", text, "cid")])
    assert texts(store) == ["and again", "bob's", "one", "three", "two"]


def test_a_corrected_record_that_came_without_an_id_is_no_copy_of_the_collection(store: ExemplarStore) -> None:
    store.add([{"text": "own", "patient": "ann"}])  # number 3
    store.maintenance().add_documents([document("#3", "own, corrected")])
    collection = InMemoryVectorStore(MODEL)
    collection.add_documents([document("x", "new")])
    assert store.sync_from(collection)["num_deleted"] == 3
    assert texts(store) == ["new", "own, corrected"]


@pytest.mark.parametrize(
    ("ids", "error", "problem"),
    [
        (["x", "#1"], InvalidRecords, "document 1 has an id of # and a number"),
        (["x", ""], StoreError, "an entry without an id, or two with the same"),
        ([1, "1"], StoreError, "an entry without an id, or two with the same"),
    ],
)
def test_a_collection_whose_ids_do_not_tell_its_documents_apart_is_refused(
    ids: list[Any], error: Any, problem: str, store: ExemplarStore
) -> None:
    """A document could not be replaced or removed, or another one would be in its place."""
    collection = InMemoryVectorStore(MODEL)
    collection.add_documents([document("x", "new")])
    (entry,) = collection.store.values()
    collection.store = dict.fromkeys(ids, entry)
    for take in (store.sync_from, lambda held: ExemplarStore.from_vectorstore(held, owner_key="patient")):
        with pytest.raises(error, match=problem):
            take(collection)
    assert texts(store) == ["one", "three", "two"]
