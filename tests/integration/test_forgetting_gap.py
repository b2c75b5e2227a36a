"""Forgetting takes two databases, the store's and the ledger's, and ends in neither at once. A process stops between
their commits, or is killed there, while others look the owner up, and add it again: one life has its tickets once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from pgvector_server import KEY

from langchain_dpicl import ExemplarStore, PrivacyBudget, UnknownOwner
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.budget.upkeep import forget
from langchain_dpicl.store.base import owner_mark

EMBEDDINGS = DeterministicFakeEmbedding(size=8)
TICKETS = 4
ANN = {"input": "text of ann", "output": "x", "owner": "ann"}
OTHERS = [{"input": f"text {i}", "output": "x", "owner": f"owner-{i}"} for i in range(3)]
pytestmark = pytest.mark.timeout(60)

FORGETTER = """
import sys
from test_forgetting_gap import opened, store_at

_, where, ledger, moment = sys.argv
store = store_at(where)
budget, line = opened(ledger)
budget.watch(store)
name = {"before": "_leave", "after": "refresh"}[moment]
method = getattr(store, name)

def stop(*given, **named):
    answer = method(*given, **named)
    print("stopped", flush=True)
    sys.stdin.readline()
    return answer

setattr(store, name, stop)
store.forget("ann")
print("done", flush=True)
"""


def store_at(where: str) -> Any:
    """A store as another process opens it."""
    return ExemplarStore.open(where, EMBEDDINGS)


def opened(ledger: str) -> tuple[PrivacyBudget, Any]:
    budget = PrivacyBudget(1000, 1e-5, TICKETS, ledger, tickets=True, replay=False)
    return budget, budget.line("vote", 0.5)


class Worker:
    """What one process knows: a store and a ledger that it has opened for itself."""

    def __init__(self, where: str, ledger: str) -> None:
        self.store = store_at(where)
        self.budget, self.line = opened(ledger)
        self.budget.watch(self.store)

    def took(self, times: int) -> int:
        """Tickets that Ann used in so many queries that find everybody."""
        (ann,) = (owner_mark(KEY, b"ann", named=True),)
        took = 0
        for _ in range(times):
            with self.store.reading() as view:
                numbers = view.numbers
                marks = view.marks(numbers, KEY)
            there = np.array([bool(mark) for mark in marks])
            (entry,) = self.line.charge(owners=[self.line.ask(self.store, numbers[there])])
            paid = entry.participants.take()
            took += sum(marks[list(numbers).index(number)] == ann for number in paid)
        return took

    def add(self) -> None:
        self.store.add([ANN])


@pytest.fixture(params=["file", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a store: Ann and three others."""
    url = f"sqlite:///{tmp_path}/store.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("pgvector_url")
    ExemplarStore.from_records([ANN, *OTHERS], EMBEDDINGS, url, owner_key="owner").close()
    return url


@pytest.fixture
def forgetter(where: str, ledger_url: str) -> Iterator[Callable[[str], Any]]:
    """forgetter(moment): a process that forgets Ann, and stops just before or after the store's commit."""
    processes: list[Any] = []

    def start(moment: str) -> Any:
        process: Any = subprocess.Popen(
            [sys.executable, "-c", FORGETTER, where, ledger_url, moment],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        processes.append(process)
        assert process.stdout.readline() == "stopped\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def go_on(process: Any) -> None:
    assert process.communicate("\n", timeout=30)[0] == "done\n"


def is_there(store: ExemplarStore) -> bool:
    return "ann" in store.owners


def test_who_comes_again_before_the_ledger_has_heard_gets_its_tickets_once(
    where: str, ledger_url: str, forgetter: Any
) -> None:
    """A worker that took the new life for the old one gave it what was left, and the others all tickets once more."""
    one, other = (Worker(where, ledger_url) for _ in range(2))
    assert (one.took(1), other.took(1)) == (1, 1)
    process = forgetter("after")
    assert not is_there(one.store)
    one.add()
    took = one.took(TICKETS) + Worker(where, ledger_url).took(1)
    go_on(process)
    took += one.took(2) + Worker(where, ledger_url).took(TICKETS) + other.took(TICKETS) + one.took(TICKETS)
    assert took == TICKETS


def test_an_owner_that_is_about_to_go_gets_no_second_tickets(where: str, ledger_url: str, forgetter: Any) -> None:
    """The ledger hears first: from then on no worker gives the owner a ticket, whether it has met it or not."""
    one = Worker(where, ledger_url)
    took = one.took(2)
    process = forgetter("before")
    took += Worker(where, ledger_url).took(TICKETS) + one.took(1)
    assert took == 2
    go_on(process)
    assert not is_there(one.store)
    one.add()
    assert Worker(where, ledger_url).took(2) + one.took(TICKETS) == TICKETS


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_forgetting_that_is_killed_gives_no_second_tickets_and_is_ended_by_the_next(
    moment: str, where: str, ledger_url: str, forgetter: Any
) -> None:
    one = Worker(where, ledger_url)
    took = one.took(2)
    forgetter(moment).kill()
    assert is_there(one.store) == (moment == "before")
    if moment == "after":
        one.add()
        took = 0
    took += Worker(where, ledger_url).took(TICKETS) + one.took(1)
    assert took == (2 if moment == "before" else 0), "until it is forgotten once more"
    one.store.forget("ann")
    one.add()
    assert Worker(where, ledger_url).took(2) + one.took(TICKETS) == TICKETS


def test_a_killed_forgetting_is_ended_by_name_if_the_owner_is_gone(where: str, ledger_url: str, forgetter: Any) -> None:
    """As `dpicl forget` does; an owner who comes meanwhile is forgotten too, and its tickets are not given twice."""
    one = Worker(where, ledger_url)
    assert one.took(1) == 1
    forgetter("after").kill()
    ledger = StoredLedger(ledger_url)
    with pytest.raises(UnknownOwner):
        forget(store_at(where), "ann", [ledger])
    one.add()
    assert one.took(1) + Worker(where, ledger_url).took(TICKETS) == TICKETS

    late = store_at(where)
    late_forget = late.forget

    def comes_again(owner: str) -> int:
        late.forget = late_forget
        late.forget(owner)
        one.add()
        assert one.took(1) == 1
        raise UnknownOwner("the store holds no such owner")

    late.forget = comes_again
    assert forget(late, "ann", [ledger]) == 1
    assert not is_there(one.store)


def test_two_forgettings_at_a_time_end_in_either_order(where: str, ledger_url: str, forgetter: Any) -> None:
    """The first has yet to tell the ledger when the second begins, of the next life: it must not let that one in."""
    one = Worker(where, ledger_url)
    assert one.took(1) == 1
    first = forgetter("after")
    one.add()
    second = forgetter("before")
    go_on(first)
    assert Worker(where, ledger_url).took(1) + one.took(1) == 0
    go_on(second)
    assert not is_there(one.store)
    one.add()
    assert one.took(1) + Worker(where, ledger_url).took(TICKETS) == TICKETS
