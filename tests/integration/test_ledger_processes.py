"""One ledger, many processes: exactly the budget, whatever happens to whom."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import by_hand  # noqa: F401
import pytest
from by_hand import charged

from langchain_dpicl import PrivacyBudget, PrivacyBudgetExceeded, PrivacyWarning
from langchain_dpicl.budget.ledger import Ledger

spawn = multiprocessing.get_context("spawn")


def charge_many(url: str, times: int, barrier: Any, results: Any) -> None:
    budget = PrivacyBudget(1000, 1e-5, 150, url)
    line = budget.line("vote", 0.5)
    numbers, refused = [], 0
    barrier.wait()
    for _ in range(times):
        try:
            numbers += [charge.number for charge in line.charge()]
        except PrivacyBudgetExceeded:
            refused += 1
    results.put((numbers, refused))


ROUNDS = 25


def open_at_once(folder: str, _: Any, barrier: Any, results: Any) -> None:
    faults = []
    for i in range(ROUNDS):
        barrier.wait(60)
        try:
            PrivacyBudget(1000, 1e-5, 150, f"sqlite:///{folder}/{i}.db").close()
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}".replace(folder, ""))
    results.put(faults)


def run_processes(target: Any, count: int, *arguments: Any) -> list[Any]:
    barrier, results = spawn.Barrier(count), spawn.Queue()
    processes = [spawn.Process(target=target, args=(*arguments, barrier, results)) for _ in range(count)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    return answers


def rows_of(url: str) -> tuple[int, list[int]]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    ((spent,),) = connection.execute("SELECT spent FROM dpicl_counters").fetchall()
    numbers = [number for (number,) in connection.execute("SELECT number FROM dpicl_charges ORDER BY number")]
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    return spent, numbers


@pytest.mark.slow
def test_four_processes_charge_exactly_the_limit(ledger_url: str) -> None:
    answers = run_processes(charge_many, 4, ledger_url, 100)
    numbers = sorted(number for charged, _ in answers for number in charged)
    assert numbers == list(range(1, 151))
    assert sum(refused for _, refused in answers) == 250
    assert rows_of(ledger_url) == (150, numbers)


@pytest.mark.slow
def test_processes_that_open_a_new_ledger_at_once_all_succeed(tmp_path: Path) -> None:
    """Workers that a server starts together, on a ledger that none of them has made yet, 25 times over."""
    assert run_processes(open_at_once, 6, str(tmp_path), None) == [[]] * 6


CHARGER = """
import sys
import by_hand
from langchain_dpicl import PrivacyBudget
line = PrivacyBudget(1000, 1e-5, 100_000, sys.argv[1]).line("vote", 0.5)
while True:
    for charge in line.charge(int(sys.argv[2])):
        print(charge.number, charge.time)
    sys.stdout.flush()
"""


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_a_process_killed_after_an_acknowledged_charge_keeps_it(size: int, ledger_url: str) -> None:
    acknowledged: list[tuple[int, str]] = []
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", CHARGER, ledger_url, str(size)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5 * size)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.read().splitlines()
        process.wait()
        process.stdout.close()
        whole = [line.split() for line in lines if len(line.split()) == 2 and len(line.split()[1]) == 32]
        acknowledged += [(int(number), made) for number, made in whole]
    connection = sqlite3.connect(Path(ledger_url.removeprefix("sqlite:///")))
    kept = set(connection.execute("SELECT number, charged FROM dpicl_charges WHERE outcome IS NULL"))
    lost = connection.execute("SELECT number, units FROM dpicl_charges WHERE outcome IS NOT NULL").fetchall()
    connection.close()
    assert [units for _, units in lost] in ([], [size], [size, size]), (
        "the charge that the one before was making, if any"
    )
    taken = [number for number, _ in kept] + [last - i for last, units in lost for i in range(units)]
    assert sorted(taken) == list(range(1, len(taken) + 1))
    assert len(kept) % size == 0, "a charge of several is there whole or not at all"
    assert set(acknowledged) <= kept
    assert len(acknowledged) >= 15 * size
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a process was killed while it charged", PrivacyWarning)
        ledger = Ledger(ledger_url)
    plan = ledger.find_plan("default")
    assert plan is not None
    spent = ledger.spent(plan.id)["vote"]
    assert spent in (len(taken), len(taken) + size), "and that of the third"
    assert [charge.number for charge in charged(ledger, plan.id, "vote", 1)] == [spent + 1]
