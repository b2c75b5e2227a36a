"""`SharedFile`, and what `ExemplarStore` does with it: one file, several processes, one truth about who is there.

Two objects of one file stand for two processes: they share nothing else. `integration/test_forgetting_processes.py` has
real ones.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import ExemplarStore, PoissonExampleSelector, StoreFileChanged, StoreFileError, UnknownOwner
from langchain_dpicl.errors import PrivacyWarning
from langchain_dpicl.store import file as store_file
from langchain_dpicl.store.notes import OpenedBudget

EMBEDDINGS = DeterministicFakeEmbedding(size=8)


def row(owner: str, text: str = "") -> dict[str, str]:
    return {"input": text or f"text of {owner}", "output": "x", "owner": owner}


def names(store: ExemplarStore) -> list[str]:
    """Whom the next release finds."""
    with store.reading() as view:
        found = [each["input"] for each in view.read(view.rows_of(view.numbers)[0])]
    return sorted(found)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ExemplarStore.from_records([row(f"owner-{i}") for i in range(5)], EMBEDDINGS, owner_key="owner").save(
        tmp_path / "store.npz"
    )
    return tmp_path / "store.npz"


@pytest.fixture
def two(path: Path) -> tuple[ExemplarStore, ExemplarStore]:
    return ExemplarStore.load(path, EMBEDDINGS), ExemplarStore.load(path, EMBEDDINGS)


Two = tuple[ExemplarStore, ExemplarStore]


# -- following ---------------------------------------------------------------------------------------------------------


def test_who_was_forgotten_elsewhere_is_gone_at_the_next_reading_and_is_not_written_back(two: Two, path: Path) -> None:
    here, elsewhere = two
    gone: list[int] = []
    here.on_forget(gone.extend)
    elsewhere.forget("owner-2")
    assert names(here) == [f"text of owner-{i}" for i in (0, 1, 3, 4)]
    assert gone == [2]
    here.save(path)
    assert b"owner-2" not in path.read_bytes()
    with pytest.raises(UnknownOwner):
        here.forget("owner-2")


def test_a_selector_of_a_process_that_loaded_earlier_draws_no_forgotten_owner(two: Two) -> None:
    here, elsewhere = two
    selector = PoissonExampleSelector(here, 2, rate=1.0, max_exemplars=10)
    elsewhere.forget("owner-0")
    drawn = [each["input"] for bucket in selector.sample() for each in bucket]
    assert sorted(drawn) == [f"text of owner-{i}" for i in range(1, 5)]


def test_owners_keep_their_numbers_and_who_comes_again_has_a_new_one(two: Two, path: Path) -> None:
    here, elsewhere = two
    before = dict(zip(here.owners, here.numbers.tolist(), strict=True))
    elsewhere.forget("owner-1")
    elsewhere.add([row("owner-1", "again"), row("new")])
    elsewhere.save(path)
    assert "again" in names(here)
    after = dict(zip(here.owners, here.numbers.tolist(), strict=True))
    assert {name: after[name] for name in before if name != "owner-1"} == {
        name: number for name, number in before.items() if name != "owner-1"
    }
    assert min(after["owner-1"], after["new"]) > max(before.values())
    assert elsewhere.reading is not None
    assert names(elsewhere) == names(here)


def test_a_forgotten_owner_that_came_again_is_another_even_under_its_old_id(two: Two, path: Path) -> None:
    """The id says nothing about who it is: with ids of the caller's own it may come back."""
    here, elsewhere = two
    (number,) = here.numbers[[3]]
    elsewhere.forget("owner-3")
    elsewhere.add([row("owner-3", "second life")], ids=[3])
    elsewhere.save(path)
    assert "second life" in names(here)
    rows, _ = here.rows_of(np.array([number]))
    assert len(rows) == 0, "what was known of the first life says nothing of the second"


def test_a_reading_under_way_sees_one_moment(two: Two) -> None:
    here, elsewhere = two
    with here.reading() as view:
        elsewhere.forget("owner-0")
        with here.reading() as inner:
            assert len(inner.numbers) == 5
        assert len(view.numbers) == 5
    assert len(names(here)) == 4


def test_a_file_that_was_only_touched_copied_or_removed_changes_nothing(two: Two, path: Path) -> None:
    here, _ = two
    os.utime(path)
    assert here.is_behind
    assert not here.refresh()
    assert not here.is_behind
    content = path.read_bytes()
    path.unlink()
    assert len(names(here)) == 5
    path.write_bytes(content)
    assert not here.refresh()
    assert len(names(here)) == 5


def test_saves_within_one_tick_of_the_clock_are_told_apart(two: Two, path: Path) -> None:
    """Of one size each, under inodes that the file system gives again: 200 times."""
    here, elsewhere = two
    for i in range(200):
        elsewhere.remember_budget(OpenedBudget("ledger", "url", f"{i:04d}"))
        assert here.is_behind
        assert here.refresh()
    assert len(here.budgets) == 200


def test_both_processes_know_what_either_has_released_once(two: Two) -> None:
    here, elsewhere = two
    assert here.lineage == elsewhere.lineage is not None
    here.remember_release("a head")
    elsewhere.remember_release("demonstrations")
    elsewhere.remember_release("a head")
    here.refresh()
    assert here.released_once == elsewhere.released_once == ("a head", "demonstrations")
    with pytest.warns(PrivacyWarning, match="not changed by forgetting: a head; demonstrations"):
        here.forget("owner-0")


def test_two_processes_that_remember_at_once_lose_nothing(
    two: Two, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has read the file before the other writes it."""
    here, elsewhere = two
    write = store_file.SharedFile.write

    def late(*arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        elsewhere.remember_release("demonstrations")
        elsewhere.remember_budget(OpenedBudget("ledger", "url", "elsewhere"))
        write(*arguments, **options)

    monkeypatch.setattr(store_file.SharedFile, "write", late)
    here.remember_release("a head")
    left = ExemplarStore.load(path, EMBEDDINGS)
    assert set(left.released_once) == set(here.released_once) == {"a head", "demonstrations"}
    assert [budget.name for budget in left.budgets] == ["elsewhere"]


@pytest.mark.parametrize("what", ["older", "another store", "broken", "a folder"])
def test_a_file_that_cannot_be_followed_stops_releases_with_a_reason(
    what: str, two: Two, path: Path, canary_free: Callable[..., None]
) -> None:
    here, elsewhere = two
    old = path.read_bytes()
    elsewhere.forget("owner-0")
    here.refresh()
    match what:
        case "older":
            path.write_bytes(old)
        case "another store":
            path.unlink()
            ExemplarStore.from_records([row("owner-0")], EMBEDDINGS, owner_key="owner").save(path)
        case "broken":
            path.write_bytes(old[:-50])
        case "a folder":
            path.unlink()
            path.mkdir()
    for _ in range(2):
        with pytest.raises(StoreFileError, match=r"store\.npz") as caught, here.reading():
            pass
        canary_free(caught.value)
    assert isinstance(caught.value, StoreFileChanged) == (what in ("older", "another store"))
    with pytest.raises(StoreFileError):
        here.forget("owner-1")
    with pytest.raises(StoreFileError):
        here.save(path)


def test_an_older_file_that_comes_while_a_newer_one_is_read_is_refused(
    two: Two, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = two
    old, real = path.read_bytes(), store_file.read
    elsewhere.forget("owner-0")
    here.refresh()
    elsewhere.add([row("new")])
    elsewhere.save(path)

    def swapped(target: Path, *, with_rows: bool = True) -> Any:
        found = real(target, with_rows=with_rows)
        if path.read_bytes() != old:
            path.write_bytes(old)
        return found

    monkeypatch.setattr(store_file, "read", swapped)
    with pytest.raises(StoreFileChanged, match="older"):
        here.refresh()
    assert "text of owner-0" not in [each["input"] for each in _rows_of(here)]


def test_looking_costs_microseconds_and_reads_nothing(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = two
    monkeypatch.setattr(store_file, "read", lambda path, **how: pytest.fail("read"))
    best = min(_timed(here) for _ in range(5))
    assert best < 50e-6, f"{best * 1e6:.1f} microseconds"


def _timed(store: ExemplarStore) -> float:
    start = time.perf_counter()
    for _ in range(200):
        store.refresh()
    return (time.perf_counter() - start) / 200


# -- saving ------------------------------------------------------------------------------------------------------------


def test_saving_over_a_newer_generation_is_refused_and_says_what_to_do(two: Two, path: Path) -> None:
    here, elsewhere = two
    elsewhere.forget("owner-4")
    content = path.read_bytes()
    with pytest.raises(StoreFileChanged, match=r"refresh\(\), then save again"):
        here.save(path)
    assert path.read_bytes() == content
    here.refresh()
    here.save(path)
    assert "owner-4" not in ExemplarStore.load(path, EMBEDDINGS).owners


def test_who_was_forgotten_in_one_file_is_written_to_no_other(two: Two, path: Path, tmp_path: Path) -> None:
    """A process that has not looked since would make a file that still holds it."""
    first, stale = two
    stale.save(tmp_path / "second.npz")
    first.forget("owner-1")
    first.save(path)
    for target in ("second.npz", "third.npz"):  # one that it knows, and a new one
        stale.save(tmp_path / target)
        assert "text of owner-1" not in names(ExemplarStore.load(tmp_path / target, EMBEDDINGS))


def test_saving_over_another_store_or_something_else_is_refused(two: Two, path: Path, tmp_path: Path) -> None:
    here, _ = two
    other = ExemplarStore.from_records([row("a")], EMBEDDINGS, owner_key="owner")
    with pytest.raises(StoreFileChanged, match="another store"):
        other.save(path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreFileChanged, match="not a store"):
        here.save(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "reserved").touch()
    here.save(tmp_path / "reserved")
    assert len(ExemplarStore.load(tmp_path / "reserved", EMBEDDINGS)) == 5


def test_a_copy_may_be_saved_over_its_older_self_by_a_process_that_did_not_make_it(two: Two, tmp_path: Path) -> None:
    """As a nightly copy is."""
    here, elsewhere = two
    here.save(tmp_path / "copy.npz")
    elsewhere.refresh()
    elsewhere.add([row("new")])
    elsewhere.save(tmp_path / "store.npz")
    elsewhere.save(tmp_path / "copy.npz")
    assert "new" in ExemplarStore.load(tmp_path / "copy.npz", EMBEDDINGS).owners


def test_of_many_that_save_at_once_exactly_one_wins(path: Path) -> None:
    stores = [ExemplarStore.load(path, EMBEDDINGS) for _ in range(8)]
    for i, store in enumerate(stores):
        store.add([row(f"added by {i}")])
    barrier = threading.Barrier(len(stores))
    refused: list[int] = []

    def save(i: int) -> None:
        barrier.wait(10)
        try:
            stores[i].save(path)
        except StoreFileChanged:
            refused.append(i)

    threads = [threading.Thread(target=save, args=(i,)) for i in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    (winner,) = set(range(8)) - set(refused)
    assert list(ExemplarStore.load(path, EMBEDDINGS).owners)[5:] == [f"added by {winner}"]
    for i in refused:  # and none of them loses what it holds
        stores[i].refresh()
        stores[i].save(path)
    assert len(ExemplarStore.load(path, EMBEDDINGS)) == 13


def test_of_many_that_make_a_file_at_once_exactly_one_wins(tmp_path: Path) -> None:
    stores = [ExemplarStore.from_records([row(f"a{i}")], EMBEDDINGS, owner_key="owner") for i in range(6)]
    barrier, won = threading.Barrier(6), []

    def save(i: int) -> None:
        barrier.wait(10)
        try:
            stores[i].save(tmp_path / "new.npz")
        except StoreFileChanged:
            return
        won.append(i)

    threads = [threading.Thread(target=save, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = won
    assert list(ExemplarStore.load(tmp_path / "new.npz", EMBEDDINGS).owners) == [f"a{winner}"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["new.npz"]


# -- records that are not saved yet ------------------------------------------------------------------------------------


def test_what_was_added_here_stays_and_what_was_added_there_comes(two: Two, path: Path) -> None:
    """Both gave the same ids away: the file's stand, and caches hear of those that moved."""
    here, elsewhere = two
    moved: list[int] = []
    here.on_forget(moved.extend)
    assert here.add([row("mine"), row("owner-0", "more of owner-0")]) == [5, 6]
    elsewhere.add([row("theirs")])
    elsewhere.forget("owner-1")
    found = names(here)
    assert {"text of mine", "more of owner-0", "text of theirs"} <= set(found)
    assert "text of owner-1" not in found
    assert sorted(moved) == [1, 5]
    assert len(set(here._held.ids.tolist())) == len(here) == 7
    here.save(path)
    assert names(elsewhere) == names(here)


def test_what_was_added_to_an_owner_who_was_forgotten_elsewhere_goes_with_it(two: Two, path: Path) -> None:
    here, elsewhere = two
    gone: list[int] = []
    here.on_forget(gone.extend)
    here.add([row("owner-3", "too late"), row("mine")])
    elsewhere.forget("owner-3")
    assert not [text for text in names(here) if "late" in text or "owner-3" in text]
    assert sorted(gone) == [3, 5], "nothing goes in silence"
    here.save(path)
    assert b"too late" not in path.read_bytes()
    assert "text of mine" in names(elsewhere)


def test_one_owner_whom_both_added_is_one_owner(two: Two, path: Path) -> None:
    here, elsewhere = two
    here.add([row("both", "from here")])
    elsewhere.add([row("both", "from there")])
    elsewhere.save(path)
    assert {"from here", "from there"} <= set(names(here))
    assert here.owner_count == 6
    here.save(path)
    names(elsewhere)
    elsewhere.forget("both")
    assert not [text for text in names(here) if text.startswith("from")]


def test_exemplars_without_owners_are_told_apart_when_their_numbers_meet(tmp_path: Path) -> None:
    path = tmp_path / "plain.npz"
    ExemplarStore.from_texts(["a", "b"], EMBEDDINGS).save(path)
    here, elsewhere = (ExemplarStore.load(path, EMBEDDINGS) for _ in range(2))
    here.add([{"input": "mine"}])
    elsewhere.add([{"input": "theirs"}])
    elsewhere.save(path)
    assert names(here) == ["a", "b", "mine", "theirs"]
    assert list(here.owners) == ["#0", "#1", "#3", "#2"]
    here.save(path)
    elsewhere.refresh()
    elsewhere.forget("#2")
    assert names(here) == ["a", "b", "mine"]


# -- several files -----------------------------------------------------------------------------------------------------


def test_forgetting_in_any_file_of_a_store_counts_and_comes_back_by_no_other(two: Two, path: Path) -> None:
    here, elsewhere = two
    copy = path.with_name("copy.npz")
    here.save(copy)
    ExemplarStore.load(copy, EMBEDDINGS).forget("owner-0")
    assert "text of owner-0" not in names(here)
    elsewhere.add([row("new")])
    elsewhere.save(path)  # the other file changes, and still has owner-0
    assert "text of new" in names(here)
    assert "text of owner-0" not in names(here)
    here.save(path)
    assert b"owner-0" not in path.read_bytes()


# -- whatever happens, in whatever order -------------------------------------------------------------------------------


class Sharing(RuleBasedStateMachine):
    """Three processes on one file, against a model that says who must be where."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "store.npz"
        ExemplarStore.from_records([row("a"), row("b")], EMBEDDINGS, owner_key="owner").save(self.path)
        self.stores = [ExemplarStore.load(self.path, EMBEDDINGS) for _ in range(3)]
        self.saved = {"a": {"text of a"}, "b": {"text of b"}}
        self.held: list[dict[str, set[str]]] = [dict(self.saved) for _ in self.stores]
        self.pending: list[dict[str, set[str]]] = [{} for _ in self.stores]
        self.forgotten: Counter[str] = Counter()
        self.heard: list[Counter[str]] = [Counter() for _ in self.stores]
        self.next = 0

    def follow(self, which: int) -> None:
        """The model of `refresh`."""
        for owner in self.held[which]:
            if owner not in self.saved or self.forgotten[owner] > self.heard[which][owner]:  # it may have come again
                self.pending[which].pop(owner, None)
        self.held[which], self.heard[which] = dict(self.saved), Counter(self.forgotten)

    def there(self, which: int) -> set[str]:
        mine = [text for texts in self.pending[which].values() for text in texts]
        return {text for texts in self.held[which].values() for text in texts} | set(mine)

    @rule(which=st.integers(0, 2), owner=st.sampled_from("abcd"))
    def add(self, which: int, owner: str) -> None:
        self.next += 1
        self.follow(which)
        self.stores[which].add([row(owner, f"{owner} {self.next}")])
        self.pending[which].setdefault(owner, set()).add(f"{owner} {self.next}")

    @rule(which=st.integers(0, 2))
    def save(self, which: int) -> None:
        if self.held[which] != self.saved:
            with pytest.raises(StoreFileChanged):
                self.stores[which].save(self.path)
            return
        try:
            self.stores[which].save(self.path)
        except StoreFileChanged:  # the same records, saved again by another
            self.stores[which].refresh()
            self.stores[which].save(self.path)
        self.keep(which)

    def keep(self, which: int) -> None:
        for owner, texts in self.pending[which].items():
            self.saved[owner] = self.saved.get(owner, set()) | texts
        self.pending[which] = {}
        self.saved = dict(self.saved)
        self.held[which], self.heard[which] = dict(self.saved), Counter(self.forgotten)

    @rule(which=st.integers(0, 2), owner=st.sampled_from("abcd"))
    def forget(self, which: int, owner: str) -> None:
        self.follow(which)
        if owner not in self.saved and owner not in self.pending[which]:
            with pytest.raises(UnknownOwner):
                self.stores[which].forget(owner)
            return
        self.stores[which].forget(owner)
        self.pending[which].pop(owner, None)
        self.saved = {name: texts for name, texts in self.saved.items() if name != owner}
        self.forgotten[owner] += 1
        self.keep(which)

    @rule(which=st.integers(0, 2))
    def read(self, which: int) -> None:
        self.follow(which)
        assert set(names(self.stores[which])) == self.there(which)

    @invariant()
    def holds(self) -> None:
        for store, expected in zip(self.stores, map(self.there, range(3)), strict=True):
            rows = np.arange(len(store))
            assert {each["input"] for each in store.read(rows)} == expected
            assert store.numbers.tolist() == sorted(set(store.numbers.tolist()))
            assert len(set(store._held.ids.tolist())) == len(store) == store._index.ntotal
            assert len(set(store._held.lives.tolist())) == store.owner_count == len(store._owner_slots)
        assert {text for texts in self.saved.values() for text in texts} == {
            each["input"] for each in _rows_of(ExemplarStore.load(self.path, EMBEDDINGS))
        }

    def teardown(self) -> None:
        self.folder.cleanup()


def _rows_of(store: ExemplarStore) -> list[dict[str, Any]]:
    return store.read(np.arange(len(store)))


Sharing.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestSharing = Sharing.TestCase
