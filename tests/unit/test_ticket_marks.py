"""`budget/tickets.py` and `store/base.py`: marks, rows and lives. Every owner has one row, which is found again, and
goes when the owner is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tickets_on_disk as disk
from moments import marks_of, numbers_of

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.sql import direct
from langchain_dpicl.store.base import MARK


@pytest.fixture
def budget(ledger_url: str) -> Any:
    """budget(): the same budget, in an object that knows nothing so far; two tickets for every owner."""
    made: list[PrivacyBudget] = []

    def make(tickets: int = 2, **options: Any) -> PrivacyBudget:
        made.append(PrivacyBudget(1000, 1e-5, tickets, ledger_url, tickets=True, replay=False, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def charge(budget: PrivacyBudget, store: ExemplarStore, *owners: str) -> list[str]:
    """Charge one query that finds these owners (all of them by default); who pays."""
    line = budget.line("vote", 0.5)
    budget.watch(store)
    names = list(store.owners)
    numbers = numbers_of(store)
    asked = numbers[np.array([i for i, name in enumerate(names) if name in owners or not owners], np.int64)]
    (entry,) = line.charge(owners=[line.ask(store, asked)])
    paid = entry.participants.take()  # type: ignore[union-attr]
    return [name for name, number in zip(names, numbers, strict=True) if number in paid]


def mark_of(name: str, store: ExemplarStore, url: str) -> bytes:
    """The mark of one of a store's owners in a ledger."""
    return marks_of(store, disk.key_in(url, store))[name]


def anonymous(embeddings: Any, texts: list[str]) -> ExemplarStore:
    records = [{"input": text, "output": "x"} for text in texts]
    return ExemplarStore.from_records(records, embeddings, progress=False)


# -- who is who -------------------------------------------------------------------------------------------------------


def test_every_owner_has_one_row(budget: Any, store_of: Any, records: Any, ledger_url: str) -> None:
    store = store_of(records(6, 2))
    charge(budget(), store, "owner-4", "owner-1")
    charge(budget(), store, "owner-1", "owner-3")
    charge(budget(), store)
    rows = disk.run(ledger_url, "SELECT mark FROM dpicl_tickets")
    assert len(rows) == len(set(rows)) == 6
    assert all(len(mark) == MARK for mark in disk.marks_in(ledger_url))
    assert disk.burnt(ledger_url, store) == {f"owner-{i}": [1, 2, 1, 2, 2, 1][i] for i in range(6)}


def test_a_mark_names_nobody_and_is_another_in_another_ledger(
    budget: Any, store_of: Any, records: Any, ledger_url: str, tmp_path: Path
) -> None:
    store = store_of(records(3, secret="mrs alder"))
    charge(budget(), store)
    other = PrivacyBudget(1000, 1e-5, 2, f"sqlite:///{tmp_path / 'other.db'}", tickets=True)
    charge(other, store)
    here, there = disk.marks_in(ledger_url), disk.marks_in(f"sqlite:///{tmp_path / 'other.db'}")
    assert not set(here) & set(there)
    content = Path(disk.path_of(ledger_url)).read_bytes()
    assert b"alder" not in content
    assert b"owner-1" not in content


def test_named_owners_keep_their_rows_in_a_store_that_is_built_again(budget: Any, store_of: Any, records: Any) -> None:
    """In another order, with other numbers and more exemplars."""
    rows = records(4)
    assert charge(budget(), store_of(rows), "owner-0", "owner-2") == ["owner-0", "owner-2"]
    again = store_of([*records(4, 3)[::-1], *[{"input": "n", "output": "x", "owner": "new"}]])
    assert charge(budget(), again) == [*(f"owner-{i}" for i in (3, 2, 1, 0)), "new"]
    assert charge(budget(), store_of(rows[::-1])) == ["owner-3", "owner-1"]


def test_exemplars_that_are_their_own_owners_are_known_by_their_content(budget: Any, embeddings: Any) -> None:
    store = anonymous(embeddings, ["a", "b", "c"])
    charge(budget(tickets=1), store, "#0", "#1")
    turned = anonymous(embeddings, ["c", "x", "b", "a"])
    assert charge(budget(tickets=1), turned) == ["#0", "#1"], "c had its ticket, and x is new"


def test_equal_exemplars_are_one_owner(budget: Any, embeddings: Any, ledger_url: str) -> None:
    """Else removing one would move another's tickets: which of them a row belongs to, nobody can say."""
    store = anonymous(embeddings, ["same", "other", "same", "same"])
    assert charge(budget(tickets=2), store) == ["#0", "#1"], "one of them takes part"
    assert charge(budget(tickets=2), store, "#2", "#3") == ["#2"]
    assert charge(budget(tickets=2), store) == ["#1"]
    assert len(set(disk.marks_in(ledger_url))) == 2


# -- forgetting -------------------------------------------------------------------------------------------------------


def test_forgetting_removes_the_row_and_who_comes_again_is_new(
    budget: Any, store_of: Any, records: Any, ledger_url: str
) -> None:
    store = store_of(records(4))
    own = budget(tickets=1)
    charge(own, store)
    mark = mark_of("owner-1", store, ledger_url)
    before = disk.marks_in(ledger_url)
    store.forget("owner-1")
    assert set(disk.marks_in(ledger_url)) == set(before) - {mark}
    disk.run(ledger_url, "PRAGMA wal_checkpoint(TRUNCATE)")
    content = Path(disk.path_of(ledger_url)).read_bytes()
    assert mark.hex().encode() not in content
    assert mark_of("owner-2", store, ledger_url).hex().encode() in content
    store.add([{"input": "again", "output": "x", "owner": "owner-1"}])
    for each in (own, budget(tickets=1)):
        assert charge(each, store) == (["owner-1"] if each is own else [])
    assert set(disk.marks_in(ledger_url)) == set(before), "an owner's mark is the same in every life"
    assert own.private_ticket_report()["vote"][""]["owners"] == 4


def test_the_row_of_equal_exemplars_goes_with_the_last_of_them(budget: Any, embeddings: Any, ledger_url: str) -> None:
    store = anonymous(embeddings, ["same", "same", "other"])
    own = budget(tickets=3)
    charge(own, store)
    charge(own, store, "#1")
    store.forget("#0")
    assert disk.burnt(ledger_url, store) == {"#1": 2, "#2": 1}
    assert charge(budget(tickets=3), anonymous(embeddings, ["other", "same"])) == ["#0", "#1"]
    assert charge(own, store) == ["#2"]
    other = mark_of("#2", store, ledger_url)
    store.forget("#1")
    assert disk.marks_in(ledger_url) == [other]
    store.add([{"input": "same", "output": "x"}])
    assert charge(own, store, "#3") == ["#3"], "who comes again is new"


@pytest.mark.parametrize("knows", ["two budgets of one ledger", "two copies of the store"])
def test_an_equal_exemplar_keeps_its_count_when_a_forgetting_is_told_twice(
    knows: str, budget: Any, embeddings: Any, ledger_url: str
) -> None:
    """By two objects of a process, or by two processes that each have a copy of the store and are told to forget."""
    store, copy = (anonymous(embeddings, ["same", "same"]) for _ in range(2))
    one, other = budget(tickets=1), budget(tickets=1)
    charge(one, store)
    if knows == "two copies of the store":
        assert charge(other, copy) == []
        store.forget("#0")
        copy.forget("#0")
    else:
        assert charge(other, store) == []
        store.forget("#0")
    assert charge(budget(tickets=1), anonymous(embeddings, ["same"])) == [], "#1 had burnt its only ticket"


def test_a_copy_of_a_store_forgets_too(budget: Any, store_of: Any, records: Any, ledger_url: str) -> None:
    """A store in memory is one process's own. Where it was not told, the owner lives on, from a first ticket again."""
    store, copy = store_of(records(3)), store_of(records(3))
    one, other = budget(tickets=1), budget(tickets=1)
    charge(other, copy, "owner-0")
    charge(one, store)
    mark = mark_of("owner-0", store, ledger_url)
    store.forget("owner-0")
    assert charge(other, copy) == ["owner-0"]
    assert charge(other, copy) == []
    copy.forget("owner-0")
    assert charge(other, copy) == []
    assert mark not in disk.marks_in(ledger_url)


def test_an_owner_that_is_forgotten_between_its_query_and_the_charge_gets_no_row(
    budget: Any, store_of: Any, records: Any, ledger_url: str
) -> None:
    store = store_of(records(3))
    own = budget()
    own.watch(store)
    line = own.line("vote", 0.5)
    asked = line.ask(store, np.arange(3))
    mark = mark_of("owner-1", store, ledger_url)
    store.forget("owner-1")
    line.charge(owners=[asked])
    assert mark not in disk.marks_in(ledger_url)


def test_an_equal_exemplar_keeps_its_count_when_another_is_forgotten_between_a_query_and_its_charge(
    budget: Any, embeddings: Any, ledger_url: str
) -> None:
    store = anonymous(embeddings, ["same", "same"])
    charge(budget(tickets=1), store)
    own = budget(tickets=1)
    own.watch(store)
    line = own.line("vote", 0.5)
    asked = line.ask(store, np.arange(2))
    store.forget("#0")
    (entry,) = line.charge(owners=[asked])
    assert 1 not in entry.participants.take(), "#1 has burnt its only ticket"


def test_forgetting_before_the_first_query_of_a_process_removes_the_row_too(
    budget: Any, store_of: Any, records: Any, ledger_url: str
) -> None:
    charge(budget(), store_of(records(3)))
    store = store_of(records(3))
    later = budget()
    selector = PoissonExampleSelector(store, 2, rate=0.5, threshold=0.5, max_exemplars=2)
    PrivateEnsemble(selector, lambda values: "a") | DPAggregate(NoisyVote(["a", "b"]), later)
    mark = mark_of("owner-1", store, ledger_url)
    assert mark in disk.marks_in(ledger_url)
    store.forget("owner-1")
    charge(later, store)
    assert mark not in disk.marks_in(ledger_url)


def test_forgetting_a_named_owner_gives_an_equal_exemplar_without_a_name_no_new_tickets(
    budget: Any, embeddings: Any
) -> None:
    store = anonymous(embeddings, ["zzz"])
    store.add([{"input": "same", "output": "x", "owner": "A"}], owner_key="owner")
    store.add([{"input": "same", "output": "x"}])
    assert charge(budget(tickets=1), store) == ["#0", "A", "#2"]
    store.forget("A")
    assert charge(budget(tickets=1), store) == []


# -- rows -------------------------------------------------------------------------------------------------------------


def test_counts_are_exact_whatever_comes_at_once(budget: Any, store_of: Any, records: Any, ledger_url: str) -> None:
    """Owners come in two lots, and one by one; then a process that knows nothing goes on."""
    names = [f"owner-{i}" for i in range(13)]
    store = store_of(records(13))
    own = budget(tickets=3)
    charge(own, store, *names[:4])
    charge(own, store, *names[:-2])
    for name in names[-2:]:
        charge(own, store, name)
    store.forget("owner-7")
    assert charge(budget(tickets=3), store) == [name for name in names if name != "owner-7"]
    counts = disk.burnt(ledger_url, store)
    assert counts == {n: 3 if i < 4 else 2 for i, n in enumerate(names) if n != "owner-7"}
    assert charge(budget(tickets=3), store, *names[:4]) == []


def test_a_store_that_lost_owners_and_got_others_asks_for_whom_it_has(budget: Any, store_of: Any, records: Any) -> None:
    store = store_of(records(5))
    own = budget(tickets=1)
    charge(own, store)
    for name in ("owner-0", "owner-3"):
        store.forget(name)
    store.add([{"input": f"new {i}", "output": "x", "owner": f"new-{i}"} for i in range(3)])
    assert charge(own, store) == ["new-0", "new-1", "new-2"]
    assert charge(own, store) == []


def test_nobody_pays_twice_if_processes_meet_owners_in_turn(budget: Any, store_of: Any, records: Any) -> None:
    """Two processes in turn, each meeting owners whom the other has not met."""
    store, other_store = store_of(records(20)), store_of(records(20)[::-1])
    one, other = budget(tickets=1), budget(tickets=1)
    paid: list[str] = []
    for i in range(10):
        paid += charge(one, store, f"owner-{i}", f"owner-{i + 1}")
        paid += charge(other, other_store, f"owner-{i + 1}", f"owner-{19 - i}")
    assert len(paid) == len(set(paid)) == 20


def test_what_was_asked_shows_nothing(budget: Any, store_of: Any, records: Any) -> None:
    line = budget().line("vote", 0.5)
    asked = line.ask(store_of(records(7)), np.arange(7))
    assert repr(asked) == "EligibleOwners()"


# -- many, few and none ------------------------------------------------------------------------------------------------


def test_numbers_with_gaps_cost_no_more_than_their_owners(budget: Any, store_of: Any, records: Any) -> None:
    """As in a store whose records were replaced for years: what a process knows grows with owners, not with numbers."""
    store = store_of(records(5))
    for name in ("owner-0", "owner-2", "owner-4"):
        store.forget(name)
    store._database.run(lambda connection: direct(connection, "UPDATE dpicl_collections SET next_number = 1000000", {}))
    store.add([{"input": "late", "output": "x", "owner": "late"}])
    own = budget(tickets=1)
    assert charge(own, store, "owner-3", "late") == ["owner-3", "late"]
    assert charge(own, store) == ["owner-1"]
    assert charge(budget(tickets=1), store) == []


def test_queries_that_find_nobody_and_owners_without_tickets_are_charged_alike(
    budget: Any, store_of: Any, records: Any, ledger_url: str
) -> None:
    """Nobody, everybody, everybody without tickets, nobody: one number of the line each, and no ticket too many."""
    store = store_of(records(3))
    own = budget(tickets=1)
    line = own.line("vote", 0.5)
    nobody = np.zeros(0, np.int64)
    paid = []
    for owners in (nobody, np.arange(3), np.arange(3), nobody):
        (entry,) = line.charge(owners=[line.ask(store, owners)])
        paid.append(entry.participants.take().tolist())
    assert paid == [[], [0, 1, 2], [], []]
    assert own.spent() == 4
    assert disk.burnt(ledger_url, store) == dict.fromkeys(store.owners, 1)


def test_seventy_thousand_owners_pay_at_once(budget: Any, ledger_url: str) -> None:
    """In one statement; and once more when all but one of them have nothing left."""
    count = 70_000
    rows = [{"input": "text", "output": "x", "owner": f"owner-{i}"} for i in range(count)]
    vectors = np.full((count, 2), 0.5**0.5, np.float32)
    store = ExemplarStore.from_records(rows, None, vectors=vectors, owner_key="owner")  # type: ignore[arg-type]
    everyone = np.arange(count)
    for asked, paid in ((everyone[:-1], everyone[:-1]), (everyone, everyone[-1:])):
        line = budget(tickets=1).line("vote", 0.5)
        (entry,) = line.charge(owners=[line.ask(store, asked)])
        assert np.array_equal(entry.participants.take(), paid)
    assert disk.run(ledger_url, "SELECT used, count(*) FROM dpicl_tickets GROUP BY used") == [(1, count)]
