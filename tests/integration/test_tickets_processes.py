"""Tickets in many processes and threads at once, on both databases: nobody pays twice, nothing is lost, nobody waits
for ever."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import by_hand  # noqa: F401
import numpy as np
import pytest
import sqlalchemy as sa
from langchain_core.embeddings import DeterministicFakeEmbedding
from ledger_files import AFTER_A_KILL, key_file_of

from langchain_dpicl import ExemplarStore, PrivacyBudget
from langchain_dpicl.budget.tickets import OwnerMarks, TicketLine
from langchain_dpicl.store.base import owner_mark

spawn = multiprocessing.get_context("spawn")
TICKETS, OWNERS, ROUNDS, THREADS = 5, 60, 12, 2


def store_of(names: list[str]) -> ExemplarStore:
    rows = [{"input": f"text of {name}", "output": "x", "owner": name} for name in names]
    return ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=4), owner_key="owner", progress=False)


def opened(url: str) -> PrivacyBudget:
    return PrivacyBudget(1000, 1e-5, TICKETS, url, tickets=True, replay=False, key_file=key_file_of(url))


def charge(budget: PrivacyBudget, store: ExemplarStore, *queries: list[int]) -> Any:
    """Charge a query that finds these owners; the names of those who pay. Of several queries at once: each one's."""
    line = budget.line("vote", 0.5)
    asked = [line.ask(store, np.array(sorted(numbers), np.int64)) for numbers in queries]
    entries = line.charge(len(queries), owners=asked)  # type: ignore[attr-defined]
    paid = [[store.owners[int(number)] for number in entry.participants.take()] for entry in entries]
    return paid if len(queries) > 1 else paid[0]


def work(url: str, worker: int, barrier: Any, results: Any) -> None:
    """Threads that share a budget and a store; owners come at different times in every process, in another order."""
    generator = np.random.default_rng(worker)
    names = [f"owner-{i}" for i in generator.permutation(OWNERS)]
    store, budget = store_of(names), opened(url)
    paid: list[str] = []
    charges, faults = itertools.count(), []

    def ask(thread: int) -> None:
        own = np.random.default_rng([worker, thread])
        try:
            for turn in range(ROUNDS):
                there = int(OWNERS * (turn + 1) / ROUNDS)
                numbers = own.choice(there, size=max(1, there // 3), replace=False).tolist()
                paid.extend(charge(budget, store, numbers))
                next(charges)
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}")

    barrier.wait(60)
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((paid, next(charges), faults))


def query(url: str, statement: str) -> list[Any]:
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            return list(connection.exec_driver_sql(statement).all())
    finally:
        engine.dispose()


def on_disk(url: str) -> tuple[int, int]:
    """Charges that were committed, and used tickets."""
    ((charges, lost),) = query(url, "SELECT count(*), count(outcome) FROM dpicl_charges")
    ((used,),) = query(url, "SELECT sum(used) FROM dpicl_tickets")
    return charges - lost, int(used)


@pytest.mark.slow
def test_processes_and_threads_burn_every_ticket_once(any_url: str) -> None:
    """Three processes of two threads: exactly what everybody was told to have paid is on the disk, at most T each."""
    opened(any_url).line("vote", 0.5)
    barrier, results = spawn.Barrier(3), spawn.Queue()
    processes = [spawn.Process(target=work, args=(any_url, i, barrier, results)) for i in range(3)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=180) for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert [faults for *_, faults in answers] == [[], [], []]
    paid = [name for names, *_ in answers for name in names]
    counts = {name: paid.count(name) for name in set(paid)}
    assert max(counts.values()) == TICKETS, "many were asked for more often than they had tickets"
    assert sum(number for _, number, _ in answers) == 3 * THREADS * ROUNDS
    assert on_disk(any_url) == (3 * THREADS * ROUNDS, len(paid))
    (report,) = opened(any_url).private_ticket_report().values()
    assert report[""]["burnt"] == {str(n): list(counts.values()).count(n) for n in set(counts.values())}
    store = store_of([f"owner-{i}" for i in range(OWNERS)])
    again = charge(opened(any_url), store, list(range(OWNERS)))
    assert again == [name for name in store.owners if counts.get(name, 0) < TICKETS]


CHARGER = """
import sys
from test_tickets_processes import OWNERS, charge, opened, store_of
names = [f"owner-{i}" for i in range(OWNERS)]
store, budget, turn = store_of(names), opened(sys.argv[1]), int(sys.argv[2])
while True:
    print("paid", *charge(budget, store, [turn % OWNERS, (7 * turn + 3) % OWNERS]), "end", flush=True)
    turn += 1
"""


@pytest.mark.slow
@pytest.mark.filterwarnings(AFTER_A_KILL)
def test_a_process_killed_at_any_time_loses_no_ticket_and_fills_up_none(any_url: str) -> None:
    """Killed five times while it charges: what it said to be paid is burnt, and of every charge that it did
    not live to tell the tickets are burnt or not, all of them together."""
    opened(any_url).line("vote", 0.5)
    told: list[str] = []
    folder = os.path.dirname(__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.path.dirname(folder), *sys.path])}
    for run in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", CHARGER, any_url, str(11 * run)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6 + run)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.read().splitlines()
        process.wait(30)
        process.stdout.close()
        told += [name for line in lines if line.split()[-1:] == ["end"] for name in line.split()[1:-1]]
    counts = {name: told.count(name) for name in set(told)}
    assert len(told) > 30
    assert max(counts.values()) <= TICKETS
    charges, used = on_disk(any_url)
    assert used >= len(told)
    budget = opened(any_url)
    ((lost,),) = query(any_url, "SELECT lost FROM dpicl_counters")
    assert lost == budget.spent() - charges <= 5, "of a process that died after its witness had heard of a charge"
    store = store_of([f"owner-{i}" for i in range(OWNERS)])
    for _ in range(TICKETS):
        for name in charge(budget, store, list(range(OWNERS))):
            counts[name] = counts.get(name, 0) + 1
    assert max(counts.values()) <= TICKETS
    assert charge(budget, store, list(range(OWNERS))) == []


@pytest.mark.parametrize("kind", ["lines", "principals"])
def test_lines_and_principals_meet_owners_at_once(kind: str, any_url: str) -> None:
    """One row for each, whoever is first; every line (or principal) burns tickets of its own, and nobody waits for
    another for ever."""
    names = [f"owner-{i}" for i in range(40)]
    several = kind == "lines"
    budget = PrivacyBudget(
        1000,
        1e-5,
        {"vote": TICKETS, "scores": TICKETS} if several else TICKETS,
        any_url,
        tickets=True,
        key_file=key_file_of(any_url),
        replay=False,
        scope="shared" if several else "per_principal",
    )
    if several:
        budget.declare("vote", "vote", 0.5)
        budget.declare("scores", "scores", 0.5)
    faults: list[str] = []
    paid: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}

    def ask(which: int) -> None:
        store = store_of(names)
        line = budget.line(("vote", "scores")[which % 2], 0.5, name=("vote", "scores")[which % 2] if several else None)
        for turn in range(10):
            asked = line.ask(store, np.arange(4 * turn, 4 * turn + 4))
            try:
                (entry,) = line.charge(owners=[asked], principal=None if several else f"caller-{which}")
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error}")
                return
            paid[which] += entry.participants.take().tolist()  # type: ignore[union-attr]

    if not several:
        ask_line = ask

        def ask(which: int) -> None:
            ask_line(2 * which)

        paid.update({4: [], 6: []})
    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    assert faults == []
    assert all(numbers == list(range(40)) for numbers in paid.values() if numbers)
    assert query(any_url, "SELECT count(DISTINCT mark) FROM dpicl_tickets") == [(40,)]
    totals = sorted(total for (total,) in query(any_url, "SELECT sum(used) FROM dpicl_tickets GROUP BY counter_id"))
    assert totals == ([80, 80] if several else [40] * 4)


# -- several queries at once -------------------------------------------------------------------------------------------


def last_tickets(url: str, at_once: bool) -> list[list[str]]:
    """Ann has one ticket left and bob two; who pays for three queries that find both, the second of them cec too."""
    store, budget = store_of(["ann", "bob", "cec"]), opened(url)
    charge(budget, store, *[[0, 1]] * (TICKETS - 2), [0])
    queries = [[0, 1], [0, 1, 2], [0, 1]]
    return charge(budget, store, *queries) if at_once else [charge(budget, store, query) for query in queries]


@pytest.mark.parametrize("at_once", [True, False])
def test_an_owner_with_one_ticket_left_pays_for_the_first_of_several_queries(at_once: bool, any_url: str) -> None:
    assert last_tickets(any_url, at_once) == [["ann", "bob"], ["bob", "cec"], []]
    assert query(any_url, "SELECT used, count(*) FROM dpicl_tickets GROUP BY used ORDER BY used") == [(1, 1), (5, 2)]


def test_queries_that_do_not_see_each_others_tickets_are_caught(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake: each query of a charge looks at the tickets as they were before the charge."""
    real = TicketLine.use

    def use(self: TicketLine, connection: Any, charges: Any, eligible: Any, lost: int) -> Any:
        found = []
        for each in zip(charges, eligible, strict=True):
            before = connection.begin_nested()
            found += real(self, connection, [each[0]], [each[1]], lost)
            before.rollback()
        real(self, connection, charges, eligible, lost)
        return found

    monkeypatch.setattr(TicketLine, "use", use)
    assert last_tickets(any_url, True) == [["ann", "bob"], ["ann", "bob", "cec"], ["ann", "bob"]]


# -- forgetting at once ------------------------------------------------------------------------------------------------


def test_a_forgetting_waits_for_the_charge_that_has_found_its_owner(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would remove the row first, and the charge would write it again: a mark that outlives its owner."""
    store, budget = store_of(["ann", "bob"]), opened(any_url)
    charge(budget, store, [0, 1])
    tickets = budget.line("vote", 0.5).tickets
    assert tickets is not None
    marks = tickets.marks
    hold = OwnerMarks.hold
    threads: list[threading.Thread] = []

    def forget() -> None:
        end = marks.leave([marks.key_for(store)], partial(owner_mark, content=b"ann", named=True))
        assert end is not None
        end()

    def meanwhile(self: OwnerMarks, connection: Any) -> Any:
        found = hold(self, connection)
        if not threads:
            threads.append(threading.Thread(target=forget))
            threads[0].start()
            threads[0].join(0.5)
        return found

    monkeypatch.setattr(OwnerMarks, "hold", meanwhile)
    assert charge(budget, store, [0, 1]) == ["ann", "bob"]
    threads[0].join(30)
    assert query(any_url, "SELECT used FROM dpicl_tickets") == [(2,)], "bob's row alone"
