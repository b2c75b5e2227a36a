"""Several processes on one collection: each follows, and nobody is told twice. Objects that share nothing else stand
for processes here; some tests have real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tickets_on_disk as disk
from ears import Ears
from langchain_core.embeddings import Embeddings
from threads import raced

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivacyWarning,
    PrivateEnsemble,
    UnknownOwner,
)
from langchain_dpicl.store.notes import Notes, OpenedBudget
from stores.places import (
    DIMENSION,
    QUERY,
    Place,
    check_against_all_products,
    everything,
    forget_meanwhile,
    marks,
    place_at,
    row,
    rows,
    texts,
    told_by,
    unit_vectors,
)
from stores.test_changes import hearing


def vectors_in_memory(store: ExemplarStore) -> int:
    """The number of vectors of a store's matrix that are not overwritten."""
    assert store._memory.matrix is not None
    return int(np.count_nonzero(store._memory.matrix._vectors.any(axis=1)))


# -- changes elsewhere -------------------------------------------------------------------------------------------------


def a_change(draw: np.random.Generator, twin: ExemplarStore, vectors: Any) -> Callable[[ExemplarStore], Any]:
    """A random change that is possible for a store as this one is."""
    owners = [f"owner-{i}" for i in draw.integers(0, 15, size=draw.integers(1, 6))]
    used = everything(twin)["ids"]
    free = [i for i in range(40) if i not in used][: len(owners)]
    leaving = list(twin.owners)[draw.integers(twin.owner_count)]
    documents = [f"d{i}" for i in draw.integers(0, 4, size=2)]
    metadata = [{"owner": owners[0], "output": "x"}] * 2
    changes: list[Callable[[ExemplarStore], Any]] = [
        lambda store: twin.owner_count > 2 and store.forget(leaving),
        lambda store: store.maintenance().add_texts(["one", "two"], metadata, ids=documents),
        lambda store: store.maintenance().delete(["d0", "d1"]),
        lambda store: store.add(rows(*owners[: len(free)]), ids=free, vectors=vectors[: len(free)]),
        lambda store: store.add(rows(*owners), vectors=vectors[: len(owners)]),
    ]
    return changes[draw.integers(len(changes))]


@pytest.mark.parametrize("seed", range(4))
def test_processes_that_change_a_collection_at_random_see_every_change(
    seed: int, shared: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Additions (also under ids that were used before), replacements, removals and forgettings, by two; a third one
    reads now and then. A store in memory goes through the same changes, and is the same. Rows are read page by page."""
    monkeypatch.setattr("langchain_dpicl.store.view._PAGE_BYTES", 4 * DIMENSION * 3)
    draw = np.random.default_rng(seed)
    first = [f"owner-{i}" for i in range(12)]
    about = {"vectors": unit_vectors(12, seed)}
    stores = [shared(rows(*first), **about), shared.open(), shared.open()]
    with place_at(None) as elsewhere:
        twin = elsewhere(rows(*first), **about)
        for step in range(60):
            change = a_change(draw, twin, unit_vectors(5, 1000 * seed + step))
            assert change(stores[draw.integers(2)]) == change(twin)
            if draw.integers(2):
                with stores[draw.integers(3)].reading() as view:
                    view.eligible(QUERY, 0.3)
                    assert told_by(view) == everything(twin)
        for store in stores:
            with store.reading() as view:
                check_against_all_products(view)
            assert everything(store) == everything(twin)
            if store._in_memory:
                assert vectors_in_memory(store) == len(twin), "and nothing else"


def test_watchers_hear_once_of_what_went_here_and_elsewhere(shared: Place) -> None:
    here = shared([row(f"o{i}", f"{i}.{j}") for i in range(6) for j in range(2)])
    elsewhere = shared.open()
    heard: dict[str, list[Any]] = {"here": [], "elsewhere": []}
    told: list[bytes] = []
    here.on_forget(lambda gone: heard["here"].append(list(gone)))
    elsewhere.on_forget(lambda gone: heard["elsewhere"].append(list(gone)))
    here.on_owner_forgotten(hearing(told))
    mark = marks(here)["o4"]
    here.forget("o4")
    assert heard == {"here": [[8, 9]], "elsewhere": []}
    elsewhere.forget("o1")
    assert heard["elsewhere"] == [[8, 9, 2, 3]]
    assert here.refresh() is True
    assert here.refresh() is False
    here.maintenance().add_texts(["new"], [{"owner": "o2", "output": "x"}], ids=["#4"])
    elsewhere.refresh()
    with here.reading():
        pass
    assert heard == {"here": [[8, 9], [2, 3], [4]], "elsewhere": [[8, 9, 2, 3], [4]]}
    assert told == [mark], "a ledger is told where the owner is forgotten"


def test_an_owner_forgotten_elsewhere_is_drawn_by_nobody(shared: Place) -> None:
    here, elsewhere = shared(rows("a", "b", "c")), shared.open()
    selector = PoissonExampleSelector(here, 2, rate=1.0, max_exemplars=10)
    elsewhere.forget("a")
    drawn = [each["input"] for bucket in selector.sample() for each in bucket]
    assert sorted(drawn) == ["text of b", "text of c"]
    with pytest.raises(UnknownOwner):
        here.forget("a")
    elsewhere.add([row("a", "second life")], ids=[0])
    with here.reading() as view:
        assert view.rows_of(np.array([0]))[0].tolist() == [], "the first life's number is not the second's"
        assert view.numbers.tolist() == [0, 1, 2, 3]


def test_a_forgotten_owners_vectors_are_overwritten_when_a_process_follows(shared: Place) -> None:
    stores = [shared(rows(*"abcdefgh"), vectors=np.eye(DIMENSION)), shared.open()]
    for store in stores:
        store.load_vectors()
    if not stores[0]._in_memory:
        assert [store._memory.matrix for store in stores] == [None, None]
        return
    held = [store._memory.matrix._vectors for store in stores if store._memory.matrix is not None]
    stores[0].forget("d")
    assert [vectors[:, 3].any() for vectors in held] == [False, True]
    assert stores[1].refresh() is True
    assert [vectors[:, 3].any() for vectors in held] == [False, False]


@pytest.mark.filterwarnings("ignore:another process reads")
def test_threads_that_read_while_others_change_see_whole_moments(shared: Place) -> None:
    """Two threads change, as two processes; three compare memory with all products of their moment."""
    here, elsewhere = shared(rows(*"abcde"), vectors=unit_vectors(5, 1)), shared.open()

    def changing(store: ExemplarStore, name: str) -> Callable[[int], None]:
        def once(turn: int) -> None:
            store.add(rows(name, name), vectors=unit_vectors(2, turn))
            store.forget(name)

        return once

    def read(turn: int) -> None:
        with here.reading() as view:
            found = view.eligible(QUERY, -1.0)
            assert set(found.tolist()) <= set(np.unique(view.rows_of(view.numbers)[1]).tolist())
            assert np.isin(np.arange(5), found).all()

    assert raced([changing(here, "x"), changing(elsewhere, "y"), read, read, read], 2) == []
    assert everything(here) == everything(elsewhere)


WORKER = """
import sys
import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import ExemplarStore

url, name, me = sys.argv[1:]
store = ExemplarStore.open(url, DeterministicFakeEmbedding(size=8), name=name)
print("ready", flush=True)
sys.stdin.readline()
for i in range(15):
    store.add([{"input": f"{me} {i} {j}", "output": "b", "owner": f"new-{i}-{j % 3}"} for j in range(6)],
              vectors=np.ones((6, 8), np.float32))
"""


def test_processes_that_add_to_the_same_owners_grow_one_owner_each(shared: Place) -> None:
    store = shared(rows("a", "b"))
    command = [sys.executable, "-c", WORKER, str(shared.url), shared.name]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers: list[Any] = [subprocess.Popen([*command, str(i)], **pipes) for i in range(3)]
    try:
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        assert [worker.wait(200) for worker in workers] == [0, 0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert sorted(store.owners) == sorted([f"new-{i}-{j}" for i in range(15) for j in range(3)] + ["a", "b"])
    with store.reading() as view:
        found, position = view.rows_of(view.numbers)
    assert sorted(found.tolist()) == list(range(2 + 3 * 15 * 6))
    assert np.bincount(position).tolist() == [1, 1] + [6] * 45, "numbers have no gaps"


def in_a_child(work: Callable[[], object]) -> int:
    """Run this in a fork of this process; its status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_goes_on_with_a_store_of_its_own(place: Place) -> None:
    store = place(rows("a", "b", "c"), vectors=unit_vectors(3, 1))
    store.load_vectors()
    before = everything(store)

    def work() -> None:
        assert everything(store) == before
        store.add(rows("child"))
        forget_meanwhile(store, "a")
        assert texts(store) == ["text of b", "text of c", "text of child"]

    assert in_a_child(work) == 0
    if place.url is None:
        assert everything(store) == before, "memory is each process's own"
    else:
        assert texts(store) == ["text of b", "text of c", "text of child"]
    store.add(rows("parent"))
    assert "text of parent" in texts(store)


# -- beside the records ------------------------------------------------------------------------------------------------


def use(budget: PrivacyBudget, store: ExemplarStore) -> None:
    """As a chain does when it is built, and at a release."""
    budget.watch(store)
    budget.line("vote", 0.2).charge()


def test_a_collection_remembers_its_budgets_for_every_process(shared: Place, tmp_path: Path) -> None:
    here = shared(rows(*"abc"))
    one, other = (f"sqlite:///{tmp_path / name}.ledger" for name in ("one", "other"))
    use(PrivacyBudget(2, 1e-5, 10, one), here)
    elsewhere = shared.open()
    use(PrivacyBudget(2, 1e-5, 10, one), elsewhere)
    with pytest.warns(PrivacyWarning, match=f"'default' in {one}. Their losses add up"):
        use(PrivacyBudget(2, 1e-5, 10, other), elsewhere)
    assert {(each.url, each.name) for each in here.budgets} == {(one, "default"), (other, "default")}
    assert here.remember_budget(OpenedBudget("third", "url", "name")) == here.budgets[:2]
    assert len(elsewhere.budgets) == 3


def test_a_collection_remembers_what_was_released_once_for_every_process(shared: Place) -> None:
    here, elsewhere = shared(rows("a", "b")), shared.open()
    assert here.released_once == ()
    assert here.lineage == elsewhere.lineage is not None
    here.remember_release("demonstrations")
    for _ in range(2):
        elsewhere.remember_release("a head, on the budget 'monthly'")
    words = ("a head, on the budget 'monthly'", "demonstrations")
    assert here.released_once == elsewhere.released_once == words
    with pytest.warns(PrivacyWarning, match="forgetting: a head, on the budget 'monthly'; demonstrations. If"):
        here.forget("a")


def test_a_collection_has_one_key_and_takes_that_of_notes_only_before_it_has_content(shared: Place) -> None:
    store = shared.empty()
    (own,) = store.mark_keys()
    key, other = b"k" * 32, b"o" * 32
    assert shared.open().mark_keys() == (own,)
    store._take_notes(Notes((key, other), ()))
    assert store.mark_keys() == (key, other), "of the data and of a link to it: a ledger may know owners by either"
    assert shared.open().mark_keys() == (key,)
    store.add([{"text": "one", "owner": "a"}])
    store._take_notes(Notes((own,), ()))
    assert store.mark_keys() == (key, own)


def test_a_store_in_memory_remembers_nothing() -> None:
    with place_at(None) as place:
        store = place(rows("a"))
        assert (store.lineage, store.remembers, store.mark_keys()) == (None, False, ())


class Fixed(Embeddings):
    """Every text is the first unit vector."""

    def embed_query(self, text: str) -> list[float]:
        return [1.0] + [0.0] * (DIMENSION - 1)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


@pytest.mark.parametrize("owner_key", ["owner", None])
def test_processes_share_the_tickets_of_their_owners_until_they_are_forgotten(
    owner_key: str | None, shared: Place, budget_of: Any, ledger_url: str
) -> None:
    """Two on one ledger, with a store and a budget each. At a rate of 1 an owner that pays is shown. Without names,
    a and its twin have equal exemplars: one owner with one row, until the last of them goes."""
    given = {"a": "A", "twin": "A", "b": "B", "far": "C"}
    records = [row(name, text) for name, text in given.items()]
    if owner_key is None:
        records = [{key: each[key] for key in ("input", "output")} for each in records]
    vectors = np.eye(DIMENSION, dtype=np.float32)[[0, 0, 0, 1]]
    shared(records, owner_key=owner_key, vectors=vectors)
    called = dict(zip(given, given if owner_key else ("#0", "#1", "#2", "#3"), strict=True))
    shown: list[str] = Ears()

    def member(values: dict[str, Any]) -> str:
        shown.extend(each["input"] for each in values["examples"])
        return "x"

    def seal(store: ExemplarStore) -> Any:
        selector = PoissonExampleSelector(store, 3, rate=1.0, max_exemplars=9, threshold=0.5)
        budget = budget_of(releases=2, ledger=ledger_url, tickets=True)
        vote = NoisyVote(["x", "y"], mechanism="vote")
        return PrivateEnsemble(selector, member, count_empty=True) | DPAggregate(vote, budget)

    def ask(chain: Any) -> list[str]:
        shown.clear()
        assert chain.invoke({"input": "question"}) == "x"
        return sorted(shown)

    stores = [shared.open(Fixed()) for _ in range(2)]
    one, other = (seal(store) for store in stores)
    everybody = ["A", "A", "B"] if owner_key else ["A", "B"]
    assert [ask(one), ask(other)] == [everybody] * 2
    assert [ask(one), ask(other)] == [[]] * 2, "two tickets each, whichever process took them"
    with stores[0].reading() as view:
        a, twin, b, far = view.marks(np.arange(4), disk.key_in(ledger_url, stores[0]))
    assert disk.used_in(ledger_url) == dict.fromkeys((a, twin, b), 2), "far was never eligible"
    assert len({a, twin, b, far}) == len(everybody) + 1
    stores[1].forget(called["a"])
    assert set(disk.marks_in(ledger_url)) == {twin, b}
    assert [ask(one), ask(other)] == [[]] * 2, "the twin has burnt its own, or theirs"
    stores[0].forget(called["twin"])
    assert set(disk.marks_in(ledger_url)) == {b}
    stores[0].add(records[:1], vectors=vectors[:1])
    assert [ask(other), ask(one), ask(other)] == [["A"], ["A"], []], "an owner that comes again is new"


@pytest.mark.filterwarnings("ignore:another process reads")
def test_a_mark_is_told_once_by_the_last_of_several_processes(shared: Place) -> None:
    """Each of equal exemplars is its own owner; the last one has to see that the others are gone already."""
    same = {"input": "same", "output": "b"}
    shared([same] * 12, owner_key=None)
    stores = [shared.open() for _ in range(3)]
    (mark,) = set(marks(stores[0]).values())
    told: list[bytes] = []
    for store in stores:
        store.on_owner_forgotten(hearing(told))

    def forgetting(number: int) -> Callable[[int], None]:
        left = [f"#{i}" for i in range(number, 12, 3)]

        def once(turn: int) -> None:
            while left:
                stores[number].forget(left.pop())

        return once

    assert raced([forgetting(i) for i in range(3)], 1) == []
    assert len(stores[0]) == 0
    assert told == [mark]
