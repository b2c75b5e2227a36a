"""Tickets of tokens that were never drawn, given back by many processes and threads at once, some of which are killed
or cut off: of each charge once, to those who paid it, and never one of a token that was drawn."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import by_hand  # noqa: F401
import numpy as np
import pytest
from ledger_files import AFTER_A_KILL, key_file_of
from moments import marks_of
from test_tickets_processes import query, store_of
from tickets_on_disk import path_of

from langchain_dpicl import LedgerError, PrivacyBudget

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(AFTER_A_KILL)]
spawn = multiprocessing.get_context("spawn")
TICKETS, UNITS, OWNERS, THREADS, TURNS = 60, 5, 9, 3, 15
NAMES = [f"owner-{i}" for i in range(OWNERS)]


def opened(url: str) -> PrivacyBudget:
    return PrivacyBudget(1000, 1e-3, TICKETS, url, tickets=True, replay=False, key_file=key_file_of(url))


def work(url: str, log: str, seed: int, barrier: Any) -> None:
    """Charge answers and end them: recorded with some tokens unused, twice and by two threads at once, or given up.

    What must be known of it when this process is killed is in the log before the ledger learns of it."""
    store, line = store_of(NAMES), opened(url).line("tokens", 0.5)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def ask(thread: int) -> None:
        own = np.random.default_rng([seed, thread])
        for _ in range(TURNS):
            owners = np.sort(own.choice(OWNERS, size=int(own.integers(1, 4)), replace=False))
            unused = int(own.integers(-1, UNITS))
            with contextlib.suppress(LedgerError):  # it was cut off: whether it was charged is not known
                (charge,) = line.charge(units=UNITS, owners=[line.ask(store, owners)])  # type: ignore[attr-defined]
                told = {"charge": charge.number, "paid": charge.participants.take().tolist(), "unused": unused}
                os.write(written, json.dumps(told).encode() + b"\n")
                if unused < 0:
                    line.give_up(charge)
                    continue
                again = threading.Thread(target=_record, args=(line, charge, unused))
                again.start()
                _record(line, charge, unused)
                again.join()

    barrier.wait(60)
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _record(line: Any, charge: Any, unused: int) -> None:
    with contextlib.suppress(LedgerError):
        line.record(charge, unused=unused)


def check(url: str, logs: list[Path]) -> int:
    """The charges of which tickets came back, each of them once and as it was told."""
    told = {}
    for log in logs:
        for line in log.read_bytes().split(b"\n")[:-1]:
            each = json.loads(line)
            assert told.setdefault(each["charge"], each) is each, "a number of one charge"
    drawn, expected, back, untold = np.zeros(OWNERS, int), np.zeros(OWNERS, int), 0, 0
    for number, outcome, receipt in query(url, "SELECT number, outcome, receipt FROM dpicl_charges"):
        if number not in told:
            assert receipt is None, "its process was stopped before it knew of it"
            untold += outcome is None
            continue
        paid, unused = told[number]["paid"], max(0, told[number]["unused"])
        drawn[paid] += UNITS - unused
        given = 0 if receipt is None else UNITS - json.loads(receipt)["tokens"]
        assert given in (0, unused), "what was not drawn, or nothing if it could not be recorded"
        expected[paid] += UNITS - given
        back += given > 0
    assert drawn.max() <= TICKETS, "nobody took part in more tokens than it has tickets for"
    key = bytes.fromhex(Path(key_file_of(url) or f"{path_of(url)}.key").read_text())
    marks = list(marks_of(store_of(NAMES), key).values())
    found = dict(query(url, "SELECT mark, used FROM dpicl_tickets"))
    more = np.array([found.get(mark.hex(), 0) for mark in marks]) - expected
    assert set(more.tolist()) <= {UNITS * i for i in range(untold + 1)}, "to all who paid, and once"
    return back


def run(url: str, folder: Path, meanwhile: Any) -> tuple[list[Path], list[Any]]:
    opened(url).line("tokens", 0.5)
    logs = [folder / f"{i}.log" for i in range(3)]
    barrier = spawn.Barrier(3)
    processes = [spawn.Process(target=work, args=(url, str(log), i, barrier)) for i, log in enumerate(logs)]
    for process in processes:
        process.start()
    meanwhile(processes, logs)
    for process in processes:
        process.join(120)
    return logs, processes


def lines_in(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def test_processes_give_back_at_once_and_one_is_killed(any_url: str, tmp_path: Path) -> None:
    def kill(processes: Any, logs: list[Path]) -> None:
        while lines_in(logs[0]) < 12:
            time.sleep(0.002)
        os.kill(processes[0].pid, signal.SIGKILL)

    logs, processes = run(any_url, tmp_path, kill)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, 0]
    assert check(any_url, logs) > 20, "or this proves nothing"


def test_connections_that_are_cut_give_back_once(postgres_url: str, terminate: Any, tmp_path: Path) -> None:
    cut = 0

    def cutting(processes: Any, logs: list[Path]) -> None:
        nonlocal cut
        while not all(log.exists() for log in logs):
            time.sleep(0.01)
        while any(process.is_alive() for process in processes):
            cut += terminate(postgres_url)
            time.sleep(0.05)

    logs, processes = run(postgres_url, tmp_path, cutting)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert cut >= 10 <= check(postgres_url, logs), "or this proves nothing"
