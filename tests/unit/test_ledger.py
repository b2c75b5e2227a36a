"""`budget/ledger.py`: durable, atomic, and honest about every fault."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import by_hand  # noqa: F401
import pytest
from by_hand import charged

from langchain_dpicl import InvalidParameter, LedgerError, PrivacyBudget, PrivacyWarning
from langchain_dpicl.budget.ledger import Ledger


def planned(ledger: Ledger, limit: int, name: str = "n") -> int:
    """A plan with one line of this limit; its id."""
    return ledger.store_plan(name, "{}", "0" * 64, {"vote": limit}).id


@pytest.fixture
def ledger(ledger_url: str) -> Ledger:
    return Ledger(ledger_url)


def path_of(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


# -- counting ----------------------------------------------------------------------------------------------------------


def test_numbers_are_contiguous_and_unique(ledger: Ledger, ledger_url: str) -> None:
    plan = planned(ledger, 100)
    charges = [charge for size in (1, 5, 1, 20, 3) for charge in charged(ledger, plan, "vote", size)]
    assert [charge.number for charge in charges] == list(range(1, 31))
    with sqlite3.connect(path_of(ledger_url)) as connection:
        rows = connection.execute("SELECT number, charged FROM dpicl_charges ORDER BY number").fetchall()
    connection.close()
    assert rows == [(charge.number, charge.time) for charge in charges]


def test_a_charge_fits_whole_or_not_at_all(ledger: Ledger) -> None:
    plan = planned(ledger, 10)
    assert len(charged(ledger, plan, "vote", 8)) == 8
    assert charged(ledger, plan, "vote", 3) == []
    assert ledger.spent(plan)["vote"] == 8
    assert len(charged(ledger, plan, "vote", 2)) == 2
    assert charged(ledger, plan, "vote", 1) == []
    assert charged(ledger, plan, "no such line", 1) == []
    assert charged(ledger, plan + 1, "vote", 1) == []
    assert ledger.spent(plan)["vote"] == 10


def test_a_charge_that_fails_half_way_charges_nothing(ledger: Ledger, ledger_url: str) -> None:
    """The counter and the rows of one charge are one transaction."""
    plan = planned(ledger, 10)
    charged(ledger, plan, "vote", 2)
    with sqlite3.connect(path_of(ledger_url)) as connection:
        connection.execute("ALTER TABLE dpicl_charges RENAME TO elsewhere")
    with pytest.raises(LedgerError):
        charged(ledger, plan, "vote", 3)
    connection.execute("ALTER TABLE elsewhere RENAME TO dpicl_charges")
    connection.close()
    assert ledger.spent(plan)["vote"] == 2
    assert [charge.number for charge in charged(ledger, plan, "vote", 1)] == [3]


def test_the_first_content_of_a_charges_step_stands(ledger: Ledger, ledger_url: str) -> None:
    """Also among threads that keep one step at once; each charge has steps of its own."""
    plan = planned(ledger, 10)
    one, two = charged(ledger, plan, "vote", 2)
    assert ledger.keep_step(one, 0, "a") == "a"
    assert Ledger(ledger_url).keep_step(one, 0, "b") == "a"
    stood: list[str] = []
    threads = [
        threading.Thread(target=lambda name=name: stood.append(Ledger(ledger_url).keep_step(one, 1, name)))
        for name in "cdefgh"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stood) == len(threads)
    assert len(set(stood)) == 1
    assert ledger.steps(one) == ["a", stood[0]]
    assert ledger.steps(two) == []
    assert ledger.spent(plan)["vote"] == 2


def test_a_plan_is_stored_once_and_the_first_one_stands(ledger: Ledger) -> None:
    first = ledger.store_plan("n", "first", "0" * 64, {"vote": 3})
    second = ledger.store_plan("n", "second", "1" * 64, {"vote": 300})
    assert second == first
    assert second.content == "first"
    assert ledger.find_plan("n") == first
    assert ledger.find_plan("other") is None
    assert len(charged(ledger, first.id, "vote", 4)) == 0


def test_sixteen_threads_charge_exactly_the_limit(ledger: Ledger) -> None:
    plan = planned(ledger, 300)
    numbers: list[int] = []
    refused: list[int] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(50):
                charges = charged(ledger, plan, "vote", 1)
                (numbers if charges else refused).append(charges[0].number if charges else 0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(numbers) == list(range(1, 301))
    assert len(refused) == 500
    assert ledger.spent(plan)["vote"] == 300


def test_the_database_itself_refuses_to_be_over_spent(ledger: Ledger, ledger_url: str) -> None:
    planned(ledger, 3)
    with sqlite3.connect(path_of(ledger_url)) as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute("UPDATE dpicl_counters SET spent = 4")
    connection.close()


def test_a_database_whose_rows_do_not_add_up_is_a_ledger_error(ledger: Ledger, ledger_url: str) -> None:
    """Somebody set the counter back: the next number exists already, which no raw database error may say."""
    plan = planned(ledger, 10)
    charged(ledger, plan, "vote", 3)
    with sqlite3.connect(path_of(ledger_url)) as connection:
        connection.execute("UPDATE dpicl_counters SET spent = 0")
    connection.close()
    with pytest.raises(LedgerError):
        charged(ledger, plan, "vote", 1)


def test_a_receipt_comes_back_as_it_was(ledger: Ledger) -> None:
    plan = planned(ledger, 10)
    first, second = charged(ledger, plan, "vote", 2)
    ledger.record(second, "text ü \x00 '")
    assert ledger.receipt(plan, "vote", 2) == ("text ü \x00 '", "")
    assert ledger.receipt(plan, "vote", first.number) is None
    assert ledger.receipt(plan, "other", 2) is None


def test_it_is_durable_before_it_answers(ledger: Ledger, ledger_url: str) -> None:
    """Full synchronisation on the transaction of a charge, in WAL mode, where a commit then waits for the disk."""
    plan = planned(ledger, 10)
    levels: list[int] = []
    import sqlalchemy as sa

    @sa.event.listens_for(ledger._engine, "commit")
    def watch(connection: Any) -> None:
        levels.append(connection.connection.driver_connection.execute("PRAGMA synchronous").fetchone()[0])

    for count in (1, 3):
        charged(ledger, plan, "vote", count)
    assert levels == [2, 2], "2 is FULL"
    ((mode,),) = ledger.run(lambda connection: connection.exec_driver_sql("PRAGMA journal_mode").all())
    assert mode == "wal"


def test_the_cost_of_a_charge_does_not_grow_with_what_was_spent(ledger: Ledger) -> None:
    """Counted in statements and in the rows that SQLite's plan visits: an index look-up, never a scan."""
    plan = planned(ledger, 10_000)
    charged(ledger, plan, "vote", 5000)
    import sqlalchemy as sa

    seen: list[str] = []

    @sa.event.listens_for(ledger._engine, "begin")
    def watch(connection: Any) -> None:
        connection.connection.driver_connection.set_trace_callback(seen.append)

    charged(ledger, plan, "vote", 1)
    (update,) = [statement for statement in seen if statement.startswith("UPDATE")]
    assert len(seen) <= 7
    query = f"EXPLAIN QUERY PLAN {update}"
    steps = ledger.run(lambda connection: connection.exec_driver_sql(query).all())
    assert all("SCAN" not in str(step) for step in steps)


# -- files that are not ledgers ----------------------------------------------------------------------------------------


def make_foreign(path: Path, mode: str) -> None:
    connection = sqlite3.connect(path)
    if mode == "wal":
        connection.execute("PRAGMA journal_mode=WAL")
    if mode == "application":
        connection.execute("PRAGMA application_id=7")
    connection.execute("CREATE TABLE patients (name TEXT)")
    connection.execute("INSERT INTO patients VALUES ('a private text')")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("mode", ["plain", "wal", "application"])
def test_a_foreign_database_is_refused_and_left_as_it_is(mode: str, ledger_url: str) -> None:
    path = path_of(ledger_url)
    make_foreign(path, mode)
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(LedgerError, match="not a ledger") as caught:
            Ledger(ledger_url)
        assert "private text" not in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [b"this is a text file, not a database" * 50, b"SQLite format 3\x00" + bytes(84), bytes(4096), b"\xff" * 5000],
    ids=["text", "a header alone", "zeros", "noise"],
)
def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(content: bytes, ledger_url: str) -> None:
    path = path_of(ledger_url)
    path.write_bytes(content)
    with pytest.raises(LedgerError):
        Ledger(ledger_url)
    assert path.read_bytes() == content


def test_a_truncated_ledger_is_a_ledger_error(ledger: Ledger, ledger_url: str) -> None:
    plan = planned(ledger, 1000)
    charged(ledger, plan, "vote", 500)
    ledger.close()
    path = path_of(ledger_url)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(LedgerError):
        Ledger(ledger_url).spent(plan)["vote"]


@pytest.mark.parametrize("path", ["/no/such/folder/b.db", "/proc/b.db", "/dev/null/b.db", "/tmp"])
def test_a_path_that_cannot_be_a_ledger_is_a_ledger_error(path: str) -> None:
    with pytest.raises(LedgerError, match="cannot be used"):
        Ledger(f"sqlite:///{path}")


@pytest.mark.parametrize("url", ["postgresql+nosuch://u:hunter2@h/d", "nosuch://u:hunter2@h/d", "oracle://u@h/d"])
def test_an_unknown_driver_is_a_typed_error_that_shows_no_password(url: str) -> None:
    with pytest.raises((LedgerError, InvalidParameter)) as caught:
        Ledger(url)
    assert "hunter2" not in f"{caught.value} {caught.value.args}"


# -- disks that do not take a charge -----------------------------------------------------------------------------------

SEALED = """
    import os, resource, sys, warnings
    import numpy as np
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_dpicl import (DPAggregate, ExemplarStore, LedgerError, NoisyVote, PoissonExampleSelector,
                                 PrivacyBudget, PrivateEnsemble)

    url = sys.argv[1]
    calls = []
    store = ExemplarStore.from_texts([f"t{i}" for i in range(10)], DeterministicFakeEmbedding(size=4))

    def sealed():
        budget = PrivacyBudget(1000, 1e-5, 40, url, replay=False)  # the same question is asked again
        member = lambda values: calls.append(1) or "a"
        selector = PoissonExampleSelector(store, 2, rate=1.0, max_exemplars=8)
        return PrivateEnsemble(selector, member, share=[calls]) | DPAggregate(NoisyVote(["a", "b"]), budget)
"""


def run_python(body: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(SEALED) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=100, check=False, **options
    )


def test_on_a_full_disk_nothing_is_called_and_nothing_answered(ledger_url: str) -> None:
    """No file of the process may grow beyond what it is (RLIMIT_FSIZE), which SQLite sees as a full disk."""
    done = run_python(
        """
        chain = sealed()
        assert chain.invoke({"input": "x"}) == "a"
        before = len(calls)
        size = max(os.path.getsize(url.removeprefix("sqlite:///") + end) for end in ("", "-wal"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        errors = 0
        for _ in range(30):
            try:
                chain.invoke({"input": "x"})
                print("released")
            except LedgerError as error:
                errors += 1
                assert "private" not in str(error)
                if errors == 3:
                    break
        after_first_error = len(calls)
        print(f"errors {errors} calls {(after_first_error - before)}")
        """,
        ledger_url,
    )
    assert done.returncode == 0, done.stderr
    released = done.stdout.count("released")
    assert "errors 3" in done.stdout, "or the limit did not bite and this proves nothing"
    # A charge that was written may still meet the full disk when its receipt is written: then its members were called.
    calls = int(done.stdout.split("calls ")[1])
    assert calls in (2 * released, 2 * (released + 1), 2 * (released + 2), 2 * (released + 3))
    with sqlite3.connect(path_of(ledger_url)) as connection:
        ((spent,),) = connection.execute("SELECT spent FROM dpicl_counters").fetchall()
        ((rows,),) = connection.execute("SELECT count(*) FROM dpicl_charges").fetchall()
    connection.close()
    assert spent == rows
    assert 2 * spent == calls + 2, "every call was charged, and every charge made its calls"


@pytest.mark.skipif(shutil.which("python3") is None, reason="needs a Python")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_read_only_ledger_releases_nothing(what: str, tmp_path: Path) -> None:
    """Tried as a user without privileges where the tests run as root, since root writes everywhere."""
    folder = tmp_path / "disk"
    folder.mkdir()
    url = f"sqlite:///{folder / 'ledger.db'}"
    if what == "file":
        budget = PrivacyBudget(1000, 1e-5, 40, url)
        budget.line("vote", 1.0).charge()
        budget.close()
        (folder / "ledger.db").chmod(0o444)
    folder.chmod(0o555)
    for parent in [folder, *folder.parents][:4]:
        parent.chmod(parent.stat().st_mode | 0o055)
    try:
        done = run_python(
            """
            import sqlalchemy.dialects.sqlite
            import langchain_dpicl.release.sealed
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            try:
                open(os.path.join(os.path.dirname(url.removeprefix("sqlite:///")), "probe"), "w")
                print("the folder is writable: nothing to test")
                sys.exit(0)
            except PermissionError:
                pass
            try:
                sealed().invoke({"input": "x"})
                print("released")
            except LedgerError as error:
                print("refused", error)
            print("calls", len(calls))
            """,
            url,
        )
    finally:
        folder.chmod(0o755)
    if "nothing to test" in done.stdout:
        pytest.skip("this file system does not know permissions")
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout
    assert "calls 0" in done.stdout


def test_a_ledger_opened_read_only_by_its_address_releases_nothing(ledger_url: str) -> None:
    budget = PrivacyBudget(1000, 1e-5, 40, ledger_url)
    budget.line("vote", 1.0).charge()
    budget.close()
    read_only = f"sqlite:///file:{path_of(ledger_url)}?mode=ro&uri=true"
    with pytest.raises(LedgerError):
        PrivacyBudget(1000, 1e-5, 40, read_only).line("vote", 1.0).charge()
    assert PrivacyBudget(1000, 1e-5, 40, ledger_url).spent() == 1


# -- errors carry nothing ----------------------------------------------------------------------------------------------


def test_a_ledger_error_holds_no_statement(ledger: Ledger, ledger_url: str, canary: str) -> None:
    plan = planned(ledger, 10)
    (charge,) = charged(ledger, plan, "vote", 1)
    with sqlite3.connect(path_of(ledger_url)) as connection:
        connection.execute("DROP TABLE dpicl_charges")
    connection.close()
    with pytest.raises(LedgerError) as caught:
        ledger.record(charge, canary)
    assert canary not in f"{caught.value} {caught.value.args!r}"
    assert caught.value.__cause__ is None
    printed = "".join(traceback.format_exception(caught.value))
    assert canary not in printed, "a context is printed with its statement and its parameters"


# -- busy, forked, in memory -------------------------------------------------------------------------------------------


def test_a_new_ledger_waits_for_whoever_is_making_it(ledger_url: str) -> None:
    """Two workers start together; one holds the lock of the file that is not in WAL mode yet, where SQLite's own
    waiting does not apply to the change of mode."""
    blocker = sqlite3.connect(path_of(ledger_url), isolation_level=None, check_same_thread=False)
    blocker.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.3, lambda: blocker.execute("ROLLBACK"))
    timer.start()
    try:
        ledger = Ledger(ledger_url)
    finally:
        timer.join()
        blocker.close()
    assert len(charged(ledger, planned(ledger, 10))) == 1


def test_a_ledger_that_another_worker_makes_meanwhile_is_not_taken_for_a_foreign_file(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at the file's mark and a look at its tables, another worker writes both."""
    real = sqlite3.dbapi2.connect
    waiting = [True]

    class Cursor(sqlite3.Cursor):
        def execute(self, statement: str, *parameters: Any) -> Any:
            answer = super().execute(statement, *parameters)
            if "application_id" in statement and waiting:
                waiting.clear()
                row = answer.fetchone()
                answer = super().execute(f"SELECT {', '.join(map(str, row))}")  # the same row, still to be fetched
                Ledger(ledger_url).close()
            return answer

    class Connection(sqlite3.Connection):
        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

    monkeypatch.setattr(sqlite3.dbapi2, "connect", lambda *a, **k: real(*a, **{**k, "factory": Connection}))
    ledger = Ledger(ledger_url)
    assert not waiting, "the other worker came in between, or this proves nothing"
    assert len(charged(ledger, planned(ledger, 10))) == 1


def in_a_child(body: Callable[[], bool], seconds: float = 30) -> int:
    """Run `body` in a forked child; its exit status, 0 for True."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if body() else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork_a_parent_and_a_child_that_opens_its_own_share_one_count(ledger: Ledger, ledger_url: str) -> None:
    plan = planned(ledger, 100)
    charged(ledger, plan, "vote", 1)
    for _ in range(3):
        assert in_a_child(lambda: len(charged(Ledger(ledger_url), plan, "vote", 10)) == 10) == 0
        assert len(charged(ledger, plan, "vote", 1)) == 1
    assert ledger.spent(plan)["vote"] == 34
    with sqlite3.connect(path_of(ledger_url)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        numbers = [number for (number,) in connection.execute("SELECT number FROM dpicl_charges ORDER BY number")]
    connection.close()
    assert numbers == list(range(1, 35))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_of_a_ledger_in_memory_does_not_start_a_second_count() -> None:
    """The child cannot share memory: it must be refused, since two counters would spend the budget twice."""
    with pytest.warns(PrivacyWarning):
        ledger = Ledger("sqlite://")
    plan = planned(ledger, 1)

    def refused() -> bool:
        try:
            return charged(ledger, plan, "vote", 1) == []
        except LedgerError:
            return True

    assert in_a_child(refused) == 0
    assert len(charged(ledger, plan, "vote", 1)) == 1


def test_what_a_ledger_shows_is_its_address(ledger: Ledger, ledger_url: str) -> None:
    assert repr(ledger) == f"Ledger({ledger_url!r})"
