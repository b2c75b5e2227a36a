"""A budget that was opened before a fork, on both databases: refused in the child, and whole in the parent."""

from __future__ import annotations

import subprocess
import sys
import warnings

import by_hand  # noqa: F401 - adds `charge` to `BudgetLine`
import pytest

from langchain_dpicl import PrivacyBudget

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork here")

FORKS = """
import os, sys, threading
import by_hand
from langchain_dpicl import LedgerError, PrivacyBudget
budget = PrivacyBudget(1000.0, 1e-5, 1000, sys.argv[1], replay=False)
line = budget.line("vote", 0.5)
(charge,) = line.charge()
ledger = budget._ledger

def sessions():
    if ledger.is_sqlite:
        return None
    who = lambda connection: connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
    return [database.run(who, "read") for database in (ledger, ledger._witness)]

def hold(lock):
    with lock:
        held.release()
        over.wait()

before = sessions()
over, held = threading.Event(), threading.Semaphore(0)
locks = [budget._lock, ledger._checking]
threads = [threading.Thread(target=hold, args=(lock,)) for lock in locks]
for thread in threads:  # as if they were at work: a child has no thread that would release what it inherits
    thread.start()
    held.acquire()
child = os.fork()
if child == 0:
    others = lambda: budget.line("vote", 0.5), lambda: line.record(charge), lambda: line.give_up(charge)
    for use in (*others, line.charge, line.spent, line.remaining):
        try:
            use()
        except LedgerError as error:
            assert str(error).startswith("the budget was opened before this process was forked: open it in the worker")
        else:
            os._exit(3)
    if sys.argv[2] == "close":
        budget.close()
    own = PrivacyBudget(1000.0, 1e-5, 1000, sys.argv[1], replay=False).line("vote", 0.5)
    assert own.charge()[0].number == 2
    sys.exit(0)  # an end of Python's own: what is registered for it, and what it collects, is run
over.set()
for thread in threads:
    thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert sessions() == before
assert line.charge()[0].number == 3
line.record(charge)
"""


@pytest.mark.parametrize("end", ["close", "leave"])
def test_a_child_charges_nothing_there_and_breaks_nothing(end: str, any_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, any_url, end], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing counts as lost
        budget = PrivacyBudget(1000.0, 1e-5, 1000, any_url, replay=False)
    assert budget.line("vote", 0.5).spent() == 3
