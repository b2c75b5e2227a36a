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
from typing import Any

import by_hand  # noqa: F401
import numpy as np
import pytest
import sqlalchemy as sa
from langchain_core.embeddings import DeterministicFakeEmbedding
from ledger_files import AFTER_A_KILL, key_file_of

from langchain_dpicl import ExemplarStore, PrivacyBudget
from langchain_dpicl.budget import tickets

spawn = multiprocessing.get_context("spawn")
TICKETS, OWNERS, ROUNDS, THREADS = 5, 60, 12, 2


def store_of(names: list[str]) -> ExemplarStore:
    rows = [{"input": f"text of {name}", "output": "x", "owner": name} for name in names]
    return ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=4), owner_key="owner", progress=False)


def opened(url: str) -> PrivacyBudget:
    return PrivacyBudget(1000, 1e-5, TICKETS, url, tickets=True, replay=False, key_file=key_file_of(url))


def charge(budget: PrivacyBudget, store: ExemplarStore, numbers: list[int]) -> list[str]:
    """Charge a query that finds these owners; the names of those who pay."""
    line = budget.line("vote", 0.5)
    (entry,) = line.charge(owners=[line.ask(store, np.array(sorted(numbers), np.int64))])
    return [store.owners[int(number)] for number in entry.participants.take()]  # type: ignore[union-attr]


def work(url: str, worker: int, barrier: Any, results: Any) -> None:
    """Threads that share a budget and a store; owners come at different times in every process, in another order."""
    tickets.SUM_AFTER = 7
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


def on_disk(url: str) -> tuple[int, int, int]:
    """Usage rows, used tickets, and the tickets that counts and rows add up to."""
    ((number, total),) = query(url, "SELECT row_count, tickets FROM dpicl_usage")
    counts = query(url, "SELECT counts FROM dpicl_usage_counts")
    rows = query(url, "SELECT positions FROM dpicl_usage_rows")
    found = sum(int(np.frombuffer(bytes(used), "<u4").sum()) for (used,) in counts)
    return number, total, found + sum(len(bytes(positions)) // 4 for (positions,) in rows)


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
    assert on_disk(any_url) == (3 * THREADS * ROUNDS, len(paid), len(paid))
    (report,) = opened(any_url).private_ticket_report().values()
    assert report[""]["burnt"] | {"0": 0} == {"0": 0} | {
        str(n): list(counts.values()).count(n) for n in set(counts.values())
    }
    assert query(any_url, "SELECT summed > 0 FROM dpicl_usage") in ([(1,)], [(True,)])
    store = store_of([f"owner-{i}" for i in range(OWNERS)])
    again = charge(opened(any_url), store, list(range(OWNERS)))
    assert again == [name for name in store.owners if counts.get(name, 0) < TICKETS]


CHARGER = """
import sys
from test_tickets_processes import OWNERS, charge, opened, store_of, tickets
tickets.SUM_AFTER = 3
names = [f"owner-{i}" for i in range(OWNERS)]
store, budget, turn = store_of(names), opened(sys.argv[1]), int(sys.argv[2])
while True:
    print("paid", *charge(budget, store, [turn % OWNERS, (7 * turn + 3) % OWNERS]), "end", flush=True)
    turn += 1
"""


@pytest.mark.slow
@pytest.mark.filterwarnings(AFTER_A_KILL)
def test_a_process_killed_at_any_time_loses_no_ticket_and_fills_up_none(any_url: str) -> None:
    """Killed five times while it charges and folds: what it said to be paid is burnt, and of every charge that it did
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
    burns, total, found = on_disk(any_url)
    assert total == found >= len(told)
    budget = opened(any_url)
    assert 0 <= budget.spent() - burns <= 1, "a grant that died with its process just before its charge"
    store = store_of([f"owner-{i}" for i in range(OWNERS)])
    for _ in range(TICKETS):
        for name in charge(budget, store, list(range(OWNERS))):
            counts[name] = counts.get(name, 0) + 1
    assert max(counts.values()) <= TICKETS
    assert charge(budget, store, list(range(OWNERS))) == []


@pytest.mark.parametrize("kind", ["lines", "principals"])
def test_lines_and_principals_enrol_owners_at_once(kind: str, any_url: str) -> None:
    """One position for each, whoever is first; every line (or principal) burns tickets of its own, and nobody waits for
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
    assert query(any_url, "SELECT size FROM dpicl_owner_index") == [(40,)]
    totals = sorted(total for (total,) in query(any_url, "SELECT tickets FROM dpicl_usage"))
    assert totals == ([80, 80] if several else [40] * 4)
