"""`store/postgres.py`: what is forgotten, by which name a collection is known, and what faults show."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tickets_on_disk as disk
from langchain_core.embeddings import DeterministicFakeEmbedding
from pgvector_server import KEY, ask, everyone

from langchain_dpicl import (
    InvalidParameter,
    ModelUnavailable,
    PostgresExemplarStore,
    PrivacyBudget,
    PrivacyWarning,
    StoreError,
    UnknownOwner,
    UnsafeConfigurationError,
)
from langchain_dpicl.cli import main

DIMENSION = 8
UNIT = np.full(DIMENSION, DIMENSION**-0.5, np.float32)


# -- budgets, and what ledgers keep of an owner ------------------------------------------------------------------------


def use(budget: PrivacyBudget, store: PostgresExemplarStore) -> None:
    """As a chain does when it is built, and at a release."""
    budget.watch(store)
    budget.line("vote", 0.2).charge()


def test_a_collection_remembers_its_budgets_for_every_worker(
    shared_store: Any, worker: Any, records: Any, tmp_path: Any
) -> None:
    here = shared_store(records(5))
    one, other = (f"sqlite:///{tmp_path / name}.db" for name in ("one", "other"))
    use(PrivacyBudget(2, 1e-5, 10, one), here)
    elsewhere = worker()
    use(PrivacyBudget(2, 1e-5, 10, one), elsewhere)
    with pytest.warns(PrivacyWarning, match=f"'default' in {one}. Their losses add up"):
        use(PrivacyBudget(2, 1e-5, 10, other), elsewhere)
    assert {(each.url, each.name) for each in here.budgets} == {(one, "default"), (other, "default")}


def test_a_collection_remembers_what_was_released_once_for_every_worker(
    shared_store: Any, worker: Any, records: Any
) -> None:
    here, elsewhere = shared_store(records(5)), worker()
    assert here.released_once == ()
    assert here.lineage == elsewhere.lineage is not None
    for _ in range(2):
        elsewhere.remember_release("a head, on the budget 'monthly'")
    with pytest.warns(PrivacyWarning, match="forgetting: a head, on the budget 'monthly'. If"):
        here.forget(here.owners[0])


@pytest.mark.parametrize("way", ["in the process", "by command"])
def test_a_forgotten_owner_leaves_the_marks(
    way: str, pgvector_url: str, shared_store: Any, records: Any, tmp_path: Any, capsys: Any
) -> None:
    """They are made by the collection's own key, which every worker has."""
    store, url = shared_store(records(5)), f"sqlite:///{tmp_path / 'ledger.db'}"
    budget = PrivacyBudget(2, 1e-5, 10, url, tickets=True)
    budget.watch(store)
    line = budget.line("vote", 0.2)
    line.charge(owners=[line.ask(store, np.arange(5))])
    with store.reading() as view:
        marks = view.marks(np.arange(5), disk.key_in(url, store))
    assert set(disk.marks_in(url)) == set(marks)
    if way == "in the process":
        store.forget("owner-1")
    else:
        name = store._collection.name
        command = ["forget", "--store", pgvector_url, "--collection", name, "--owner", "owner-1", "--json"]
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)["exemplars"] == 1
    assert marks[1] not in disk.marks_in(url)
    assert marks[2] in disk.marks_in(url)
    assert store.owner_count == 4


# -- forgetting --------------------------------------------------------------------------------------------------------


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


def test_a_forgotten_owners_number_and_ids_are_never_given_again(shared_store: Any, records: Any) -> None:
    store = shared_store(records(3))
    assert store.forget("owner-2") == 1
    with store.reading() as view:
        assert len(view.numbers) == 2
    assert store.add([records(3)[2]]) == [3]
    with store.reading() as view:
        assert len(view.numbers) == 4
        assert [bool(mark) for mark in view.marks(np.arange(4), KEY)] == [True, True, False, True]
    for owner in ("owner-2", "owner-0", "owner-1"):
        store.forget(owner)
    with store.reading() as view:
        assert (len(view.numbers), view.eligible(UNIT, -1.0).tolist()) == (0, [])


def test_watchers_hear_of_what_went_here_and_elsewhere(shared_store: Any, worker: Any, records: Any) -> None:
    here, elsewhere = shared_store(records(6, 2)), worker()
    ids: dict[str, list[Any]] = {"here": [], "elsewhere": []}
    marks: list[bytes] = []
    here.on_forget(lambda gone: ids["here"].append(list(gone)))
    elsewhere.on_forget(lambda gone: ids["elsewhere"].append(list(gone)))
    here.on_owner_forgotten(hearing(marks))
    with here.reading() as view:
        (mark,) = view.marks(np.array([4]), KEY)
    here.forget("owner-4")
    assert ids == {"here": [[8, 9]], "elsewhere": []}
    assert marks == [mark]
    elsewhere.forget("owner-1")
    with elsewhere.reading():
        pass
    assert sorted(ids["elsewhere"]) == [[2, 3], [2, 3], [8, 9]] or sorted(ids["elsewhere"]) == [[2, 3], [8, 9]]
    with here.reading():
        pass
    assert ids["here"] == [[8, 9], [2, 3]]
    with here.reading():
        pass
    assert ids["here"] == [[8, 9], [2, 3]], "once"
    assert len(marks) == 1, "the ledger is told where the owner is forgotten"


def test_a_watcher_that_fails_is_called_again_and_may_read(shared_store: Any, worker: Any, records: Any) -> None:
    here, elsewhere = shared_store(records(4)), worker()
    calls: list[int] = []

    def watcher(gone: Any) -> None:
        calls.append(len(here))
        with here.reading() as view:
            calls.append(len(view.numbers))
        if len(calls) == 2:
            raise RuntimeError("busy")

    here.on_forget(watcher)
    elsewhere.forget("owner-0")
    with pytest.raises(RuntimeError, match="busy"), here.reading():
        pass
    with here.reading():
        pass
    assert calls == [3, 4, 3, 4]


def hearing(told: list[Any], who: str = "") -> Any:
    """A ledger that writes down the marks of those who went."""

    def leave(keys: object, mark_of: Callable[[bytes], bytes]) -> Callable[[], None]:
        mark = mark_of(KEY)
        return lambda: told.append((who, mark) if who else mark)

    return leave


def marks_of(store: PostgresExemplarStore) -> list[bytes]:
    """By the owners' numbers, b"" for one who is gone."""
    with store.reading() as view:
        return view.marks(view.numbers, KEY)


def test_equal_exemplars_have_one_mark_and_the_last_to_go_tells_it(shared_store: Any, worker: Any) -> None:
    """Each is its own owner, and known by content. While one is there a ledger must keep the row from which all pay,
    whichever worker forgets the others."""
    row = {"input": "same", "output": "b"}
    here = shared_store([row, row, {"input": "else", "output": "b"}, row], owner_key=None)
    elsewhere = worker()
    told: list[tuple[str, bytes]] = []
    here.on_owner_forgotten(hearing(told, "here"))
    elsewhere.on_owner_forgotten(hearing(told, "elsewhere"))
    same, _, other, _ = before = marks_of(here)
    assert before == [same, same, other, same]
    assert same != other
    here.forget("#1")
    elsewhere.forget("#3")
    here.add([row])
    elsewhere.forget("#0")
    assert marks_of(here) == [b"", b"", other, b"", same]
    assert told == []
    elsewhere.forget("#4")
    here.forget("#2")
    assert told == [("elsewhere", same), ("here", other)]
    here.add([row])
    assert marks_of(elsewhere)[5] == same


def test_workers_that_forget_all_equal_exemplars_at_a_time_tell_their_mark_once(shared_store: Any, worker: Any) -> None:
    """Whoever is last has to see that the others are gone already, or the row would stay for ever."""
    here = shared_store([{"input": "same", "output": "b"}] * 18, owner_key=None)
    (mark,) = set(marks_of(here))
    stores, ready = [worker() for _ in range(3)], threading.Barrier(3)
    told: list[bytes] = []
    failures: list[Exception] = []

    def forget(store: PostgresExemplarStore, first: int) -> None:
        try:
            ready.wait(20)
            for number in range(first, 18, 3):
                store.forget(f"#{number}")
        except Exception as error:
            failures.append(error)

    for store in stores:
        store.on_owner_forgotten(hearing(told))
    threads = [threading.Thread(target=forget, args=(store, i)) for i, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(here) == 0
    assert told == [mark]


def test_a_named_owner_and_an_exemplar_of_equal_text_have_marks_of_their_own(shared_store: Any) -> None:
    row = {"input": "same", "output": "b"}
    store = shared_store([row], owner_key=None)
    store.add([{**row, "owner": "A"}, {**row, "owner": "B"}], owner_key="owner")
    assert len(set(marks_of(store))) == 3
    with store.reading() as view:
        contents = view.read(np.arange(3))
    assert contents == [row] * 3, "and nothing but the names differs"
    told: list[bytes] = []
    store.on_owner_forgotten(hearing(told))
    before = marks_of(store)
    for owner in ("A", "#0", "B"):
        store.forget(owner)
    assert told == [before[1], before[0], before[2]]


def test_an_exemplar_that_grew_keeps_its_mark(shared_store: Any) -> None:
    """Its name, "#5", is given as an owner's, and what is added comes first by id: it is known by what it was."""
    store = shared_store([{"input": "was", "output": "b"}, {"input": "was", "output": "b"}], owner_key=None, ids=[5, 6])
    before = marks_of(store)
    told: list[bytes] = []
    store.on_owner_forgotten(hearing(told))
    store.add(
        [{"input": text, "output": "b", "owner": "#5"} for text in ("first", "last")], owner_key="owner", ids=[1, 9]
    )
    assert marks_of(store) == before
    assert store.forget("#6") == 1
    assert told == []
    assert store.forget("#5") == 3
    assert told == before[:1]


@pytest.mark.parametrize("owner", ["nobody", "", "#0", 7, "owner-00", "Owner-0", "%", "owner-0\0"])
def test_an_unknown_owner_is_an_error_that_repeats_no_name(owner: Any, shared_store: Any, records: Any) -> None:
    store = shared_store(records(2))
    with pytest.raises(UnknownOwner) as caught:
        store.forget(owner)
    assert str(caught.value) == "the store holds no such owner"
    assert len(store) == 2


# -- collections -------------------------------------------------------------------------------------------------------


def test_collections_of_one_database_know_nothing_of_one_another(shared_store: Any, worker: Any, records: Any) -> None:
    one, two = shared_store(records(3), name="one"), shared_store(records(5, 2), name="two", owner_key=None)
    one.forget("owner-1")
    assert (len(one), len(two)) == (2, 10)
    assert (worker(name="one").owner_key, worker(name="two").owner_key) == ("owner", None)
    assert sorted(worker(name="two").owners)[0] == "#0"


def test_a_collection_with_content_is_not_made_again(shared_store: Any, records: Any) -> None:
    store = shared_store(records(2))
    asked: list[Any] = []

    class Counting(DeterministicFakeEmbedding):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            asked.append(len(texts))
            return super().embed_documents(texts)

    url = store._connections._url.render_as_string(hide_password=False)
    with pytest.raises(StoreError, match="with content already"):
        PostgresExemplarStore.from_records(records(3), Counting(size=DIMENSION), url, owner_key="owner")
    assert asked == [], "nothing was embedded"
    for owner in list(store.owners):
        store.forget(owner)
    with pytest.raises(StoreError, match="other keys"):
        shared_store(records(2), owner_key=None)
    assert len(shared_store(records(3))) == len(store) == 3
    assert everyone(store)["ids"] == [2, 3, 4]


@pytest.mark.parametrize("name", ["", "1a", "A", "a-b", "a b", "a" * 41, 'a"; DROP', None, 5])
def test_a_bad_name_is_refused(name: Any, shared_store: Any, records: Any) -> None:
    with pytest.raises(InvalidParameter, match="name="):
        shared_store(records(1), name=name)


def test_what_is_not_as_the_collection_was_made_is_refused(
    pgvector_url: str, shared_store: Any, worker: Any, records: Any
) -> None:
    with pytest.raises(StoreError, match="no collection 'exemplars'"):
        worker()
    shared_store(records(2))
    with pytest.raises(StoreError, match="no collection 'other'"):
        worker(name="other")
    for key in ("input_key", "output_key", "owner_key"):
        with pytest.raises(StoreError, match=f"was made with {key}="):
            worker(**{key: "else"})
    assert worker(input_key="input", output_key="output", owner_key="owner").dimension == DIMENSION
    with pytest.raises(StoreError, match="9 dimensions, the store has 8"):
        PostgresExemplarStore.open(pgvector_url, DeterministicFakeEmbedding(size=9))

    class Down(DeterministicFakeEmbedding):
        def embed_query(self, text: str) -> list[float]:
            raise ConnectionError

    with pytest.raises(ModelUnavailable):
        PostgresExemplarStore.open(pgvector_url, Down(size=8))


def test_pgvector_may_lie_in_any_schema(pgvector_url: str, shared_store: Any, records: Any) -> None:
    ask(pgvector_url, 'CREATE SCHEMA "Ex tensions"', 'CREATE EXTENSION vector SCHEMA "Ex tensions"')
    store = shared_store(records(5))
    with store.reading() as view:
        assert len(view.eligible(UNIT, -1.0)) == 5


# -- what it shows -----------------------------------------------------------------------------------------------------


def test_it_shows_counts_and_no_more(pgvector_url: str, shared_store: Any, records: Any, canary: str) -> None:
    store = shared_store(records(4, secret=canary))
    assert repr(store) == "PostgresExemplarStore(8 dimensions)"
    assert canary not in repr(vars(store))
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UnsafeConfigurationError):
            way(store)
        with pytest.raises(UnsafeConfigurationError):
            way(store._connections)
    ask(pgvector_url, "DROP TABLE dpicl_exemplars_exemplars")
    assert repr(store) == "PostgresExemplarStore(8 dimensions)"


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
    with store.reading() as view:
        ask(pgvector_url, end)
        with pytest.raises(StoreError):
            view.rows_of(np.arange(3))
    assert len(store) == 3
