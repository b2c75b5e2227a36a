"""Whoever copies, deletes, replaces, restores or truncates a ledger, and kills its processes, gets no answer more."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from by_hand import charged
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from langchain_core.embeddings import DeterministicFakeEmbedding
from ledger_files import key_file_of
from thief import SETTINGS, Databases, Thief, TicketThief, back_up

from langchain_dpicl import ExemplarStore, LedgerError, PrivacyBudget, PrivacyBudgetExceeded, PrivacyWarning
from langchain_dpicl.budget import BudgetLine, schema
from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.budget.schema import SQLITE_APPLICATION_ID, UNLIMITED
from langchain_dpicl.budget.tickets import OwnerMarks, TicketLine, TicketPayment
from langchain_dpicl.budget.upkeep import recover
from langchain_dpicl.budget.witness import Witness
from langchain_dpicl.store.base import owner_mark

PLAN = 20


def line_of(url: str, releases: int = PLAN, **options: Any) -> BudgetLine:
    return PrivacyBudget(1000.0, 1e-5, releases, url, **options).line("vote", 0.5)


def close(line: BudgetLine | Counter | Payer) -> None:
    line._ledger.close()


class Counter:
    """One line's counter, as `BudgetLine` uses it, without a plan to solve and verify."""

    def __init__(self, url: str, releases: int) -> None:
        self._ledger = Ledger(url)
        self._plan = self._ledger.store_plan("default", "{}", "0" * 64, {"vote": releases}).id
        self._releases = releases

    def charge(self) -> None:
        if not charged(self._ledger, self._plan):
            raise PrivacyBudgetExceeded

    def remaining(self) -> int:
        return self._releases - self._ledger.spent(self._plan)["vote"]


def path_of(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


def snapshot(url: str, folder: str) -> Path:
    """What somebody copies: the ledger's files, and not its witness's."""
    path, copy = path_of(url), path_of(url).parent / folder
    copy.mkdir()
    for end in ("", "-wal", "-shm"):
        if Path(f"{path}{end}").exists():
            shutil.copy(f"{path}{end}", copy / f"{path.name}{end}")
    return copy


def put_back(url: str, copy: Path) -> None:
    """New files in place of the old ones."""
    path = path_of(url)
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)
        if (copy / f"{path.name}{end}").exists():
            shutil.copy(copy / f"{path.name}{end}", f"{path}{end}")


def all_of(line: BudgetLine | Counter, most: int = 1000) -> int:
    """Charge until it is refused; how many were granted."""
    for i in range(most):
        try:
            line.charge()
        except (PrivacyBudgetExceeded, LedgerError):
            return i
    return most


@contextlib.contextmanager
def child(work: Callable[[Callable[[], None]], None]) -> Iterator[tuple[int, Callable[[], int]]]:
    """A real process that calls ``work(answered)``: its number, and how many answers it has begun so far."""
    reading: int | None
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, writer = 1, os.fdopen(writing, "w")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrivacyWarning)
                work(lambda: print(".", end="", file=writer, flush=True))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    os.set_blocking(reading, False)
    begun = [0]

    def answered() -> int:
        with contextlib.suppress(BlockingIOError):
            while reading is not None and (piece := os.read(reading, 1 << 16)):
                begun[0] += len(piece)
        return begun[0]

    try:
        yield pid, answered
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        answered()
        os.close(reading)
        reading = None


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def charging(url: str, releases: int) -> Callable[[Callable[[], None]], None]:
    def work(answered: Callable[[], None]) -> None:
        line = Counter(url, releases)
        while True:
            line.charge()
            answered()
            time.sleep(0.003)  # SQLite's lock is not fair: others wait for seconds if one process never pauses

    return work


# -- a copy ------------------------------------------------------------------------------------------------------------


def test_a_new_ledger_s_file_is_a_ledger_without_its_log(ledger_url: str) -> None:
    """The tables and the plan are in the file itself."""
    line = line_of(ledger_url)
    line.charge(3)
    shutil.copy(path_of(ledger_url), copy := path_of(ledger_url).with_name("copy.db"))
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT allowed, spent FROM dpicl_counters").fetchall() == [(PLAN, 0)]


def test_a_copy_of_the_file_alone_gives_no_answer(ledger_url: str) -> None:
    """It would start at 0: 20 more answers."""
    line = line_of(ledger_url)
    assert all_of(line) == PLAN
    url = ledger_url.replace(".db", "-copy.db")
    shutil.copy(path_of(ledger_url), path_of(url))
    with pytest.raises(LedgerError, match=r"no witness .* `dpicl budget recover`"):
        line_of(url)
    found = recover(url)
    assert [(each["spent"], each["added"]) for each in found["counters"]] == [(PLAN, PLAN)]
    assert all_of(line_of(url)) == 0


@pytest.mark.parametrize("marked", [False, True])
def test_a_file_without_tables_is_no_new_ledger(marked: bool, ledger_url: str) -> None:
    """4,096 bytes: what a ledger without its log was."""
    with contextlib.closing(sqlite3.connect(path_of(ledger_url))) as connection:
        if marked:
            connection.execute(f"PRAGMA application_id={SQLITE_APPLICATION_ID}")
        connection.execute("PRAGMA journal_mode=WAL")
    before = path_of(ledger_url).read_bytes()
    assert len(before) == 4096
    for options in ({}, {"witness": str(path_of(ledger_url)) + ".elsewhere"}):
        with pytest.raises(LedgerError, match=r"holds no tables"):
            Ledger(ledger_url, **options)
    assert path_of(ledger_url).read_bytes() == before


def test_a_copy_beside_a_copy_of_the_witness_is_what_the_docs_say(ledger_url: str) -> None:
    """A folder that is put back as a whole: nobody can tell. The claim is no more than that, and no less."""
    line = line_of(ledger_url, witness=(elsewhere := str(path_of(ledger_url).parent / "elsewhere.witness")))
    line.charge(5)
    close(line)
    copy = snapshot(ledger_url, "copy")
    line = line_of(ledger_url, witness=elsewhere)
    line.charge(4)
    line.charge()
    close(line)
    put_back(ledger_url, copy)
    with pytest.raises(LedgerError, match="rolled back"):
        line_of(ledger_url, witness=elsewhere)


# -- under a running process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "replaced", "replaced by itself", "log deleted", "log replaced"])
def test_a_running_process_refuses_once_its_file_is_another_one(how: str, ledger_url: str) -> None:
    line = line_of(ledger_url)
    copy = snapshot(ledger_url, "copy")
    line.charge(3)
    path = path_of(ledger_url)
    if how == "deleted":
        path.unlink()
    elif how == "replaced":
        put_back(ledger_url, copy)
    elif how == "replaced by itself":
        shutil.copy(path, path.with_name("same"))
        os.replace(path.with_name("same"), path)
    else:
        log = Path(f"{path}-wal")
        content = log.read_bytes()
        log.unlink()
        if how == "log replaced":
            (path.parent / "held").write_bytes(b"")  # takes the inode that was freed
            log.write_bytes(content)
    for use in (line.charge, line.spent, line.remaining):
        with pytest.raises(LedgerError, match=r"deleted or replaced .* `dpicl budget recover`"):
            use()


@pytest.mark.parametrize("how", ["in place", "new files"])
@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
def test_copies_that_are_put_back_under_running_processes_give_no_answer_more(how: str, ledger_url: str) -> None:
    """What gave 58 answers on a plan of 20: each time a process refuses, the next one starts on the copy."""
    line = line_of(ledger_url)
    copy = snapshot(ledger_url, "copy")
    answers = [len(line.charge(7))]
    lines = [line]
    for _ in range(4):
        if how == "in place":
            back_up(copy / "ledger.db", path_of(ledger_url))
        else:
            put_back(ledger_url, copy)
        answers += [all_of(each) for each in lines]
        with contextlib.suppress(LedgerError):
            lines.append(line_of(ledger_url))
            answers.append(all_of(lines[-1]))
    assert 7 <= sum(answers) <= PLAN


def test_a_counter_that_falls_is_noticed(any_url: str) -> None:
    """Rows set back by SQL: no file has changed."""
    line = line_of(any_url)
    charges = [line.charge() for _ in range(8)]
    engine = sa.create_engine(any_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM dpicl_charges WHERE number > 3")
        connection.exec_driver_sql("UPDATE dpicl_counters SET spent = 3")
    engine.dispose()
    for use in (line.charge, line.spent):
        with pytest.raises(LedgerError, match=r"rolled back .*8 were reached.*`dpicl budget recover`"):
            use()
    with pytest.raises(LedgerError, match="rolled back"):
        line_of(any_url)
    close(line)
    with pytest.raises(LedgerError, match="rolled back"):
        line_of(any_url)
    (counter,) = recover(any_url)["counters"]
    assert (counter["spent"], counter["added"]) == (8, 5)
    assert len(charges) + all_of(line_of(any_url)) == PLAN


# -- after a clean end, and after none ---------------------------------------------------------------------------------


def test_a_ledger_that_is_gone_while_its_witness_is_there_is_not_made_anew(ledger_url: str) -> None:
    line = line_of(ledger_url)
    copy = snapshot(ledger_url, "copy")
    line.charge(5)
    close(line)
    path_of(ledger_url).unlink()
    with pytest.raises(LedgerError, match=r"is gone, .* `dpicl budget recover`"):
        line_of(ledger_url)
    with pytest.raises(LedgerError, match="there is no ledger"):
        recover(ledger_url)
    assert not path_of(ledger_url).exists()
    put_back(ledger_url, copy)  # however old
    recover(ledger_url)
    assert all_of(line_of(ledger_url)) == PLAN - 5


def test_what_a_copy_from_before_the_plan_was_frozen_lacks_counts_as_spent(ledger_url: str) -> None:
    Ledger(ledger_url).close()
    copy = snapshot(ledger_url, "empty")
    line = line_of(ledger_url)
    line.charge(5)
    close(line)
    put_back(ledger_url, copy)
    with pytest.raises(LedgerError, match="rolled back"):
        line_of(ledger_url)
    assert recover(ledger_url)["missing"] == ["default"]
    again = line_of(ledger_url)  # freezes the plan again
    with pytest.warns(PrivacyWarning, match="counts as spent"):
        again.charge()
    assert all_of(again) == PLAN - 6
    assert all_of(line_of(ledger_url, name="other")) == PLAN


def test_another_ledger_s_witness_is_refused(ledger_url: str, tmp_path: Path) -> None:
    close(line_of(ledger_url))
    other = f"sqlite:///{tmp_path / 'other.db'}"
    close(line_of(other))
    with pytest.raises(LedgerError, match="whose witness"):
        line_of(other, witness=f"{path_of(ledger_url)}.witness")
    with pytest.raises(LedgerError, match="another ledger"):
        recover(other, f"{path_of(ledger_url)}.witness")


@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
def test_one_ledger_in_two_files_with_one_witness_is_one_plan(ledger_url: str) -> None:
    line = line_of(ledger_url)
    line.charge()
    close(line)
    shutil.copy(path_of(ledger_url), copy := path_of(ledger_url).with_name("twice.db"))
    lines = [line_of(ledger_url), line_of(f"sqlite:///{copy}", witness=f"{path_of(ledger_url)}.witness")]
    answers = [1, *(len(lines[turn].charge()) for turn in (0, 1, 0, 1, 0)), all_of(lines[1])]
    with pytest.raises(LedgerError, match="rolled back"):  # it lacks more than the latest charge
        lines[0].charge()
    close(lines[0])
    recover(ledger_url)
    assert sum(answers) + all_of(line_of(ledger_url)) == PLAN


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Thief, TicketThief])
def test_all_copies_of_a_ledger_on_a_server_give_one_plan(machine: type[Thief], postgres_url: str) -> None:
    """As `unit/test_witness.py` has it for files: rows are put back under whoever uses them."""
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        for name in ("one", "two"):
            connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    engine.dispose()
    urls = [f"{postgres_url}?options=-csearch_path%3D{name}" for name in ("one", "two")]
    kind = type(machine.__name__, (machine,), {"make_places": lambda _: Databases(urls)})
    run_state_machine_as_test(kind, settings=settings(SETTINGS, max_examples=8))


def test_clocks_that_are_set_back_change_nothing(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    years = itertools.count(2100, -1)
    monkeypatch.setattr(schema, "utc_now", lambda: f"{next(years)}-01-01T00:00:00.000000+00:00")
    lines = [line_of(any_url), line_of(any_url)]
    numbers = [line.charge()[0].number for _ in range(5) for line in lines]
    assert numbers == [*range(1, 11)]
    close(lines[0])
    assert all_of(line_of(any_url)) + all_of(lines[1]) == PLAN - 10


@pytest.mark.slow
@pytest.mark.parametrize("releases", [PLAN, 400])
def test_killed_processes_and_old_copies_give_no_answer_more(releases: int, ledger_url: str) -> None:
    """Kill -9 at any moment, then an older copy; where the ledger refuses, `recover`. All answers ever begun fit."""
    close(Counter(ledger_url, releases))
    copies, begun, rounds, refused = [snapshot(ledger_url, "0")], 0, 0, 0
    while rounds < 8:
        rounds += 1
        with child(charging(ledger_url, releases)) as (pid, answered), contextlib.suppress(AssertionError):
            wait_for(lambda n=answered, r=rounds: n() >= (3 if releases == PLAN else 20 + 7 * r), 3)
            os.kill(pid, signal.SIGKILL)
        begun += answered()
        if rounds % 3 == 1:
            copies.append(snapshot(ledger_url, str(rounds)))
        put_back(ledger_url, copies[rounds % len(copies)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            try:
                close(Counter(ledger_url, releases))
            except LedgerError:
                refused += 1
                recover(ledger_url)
    assert begun > 5
    assert refused, "or nothing was rolled back"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        line = Counter(ledger_url, releases)
    rest = all_of(line, 2000)
    assert begun + rest <= releases
    assert releases - begun - rest <= rounds, "no more than a charge for each killed process"


@pytest.mark.parametrize("any_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
def test_killed_workers_cost_the_charges_that_they_were_making(any_url: str) -> None:
    """Three at once, of which none closes; then all that is left can be charged, and no more."""
    releases = 400
    close(Counter(any_url, releases))
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(child(charging(any_url, releases))) for _ in range(3)]
        wait_for(lambda: all(answered() >= 20 for _, answered in workers), 60)
        for pid, _ in workers:
            os.kill(pid, signal.SIGKILL)
    begun = sum(answered() for _, answered in workers)
    line = Counter(any_url, releases)
    left = line.remaining()
    assert begun <= releases - left <= begun + 3
    assert left - 1 <= all_of(line) <= left
    close(line)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        close(Counter(any_url, releases))


def test_a_ledger_that_is_opened_while_a_principal_s_first_charge_is_made_loses_nothing(
    any_url: str, tmp_path: Path
) -> None:
    """The witness has the charge, and nobody sees the counter yet: who opens the ledger waits."""
    make = partial(line_of, any_url, scope="per_principal", witness=tmp_path / "witness")
    line, opened = make(), []
    other = threading.Thread(target=lambda: opened.append(make()))
    real = line._ledger._charge

    def _charge(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        other.start()
        other.join(0.5)
        return found

    line._ledger._charge = _charge  # type: ignore[method-assign]
    line.charge(principal="ann")
    other.join(30)
    assert [each.spent("ann") for each in opened] == [1]


def test_a_charge_between_the_witness_and_its_own_commit_counts_as_spent(ledger_url: str) -> None:
    """A process that is killed there. Nobody need be alone to count it."""
    line, other = line_of(ledger_url), line_of(ledger_url)

    def dies(answered: Callable[[], None]) -> None:
        own = line_of(ledger_url)
        real = Witness.follow

        def follow(*given: Any) -> None:
            real(*given)
            os.kill(os.getpid(), signal.SIGKILL)

        Witness.follow = follow  # type: ignore[method-assign]
        own.charge()

    line.charge(2)
    with child(dies) as (pid, _):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.warns(PrivacyWarning, match=r"counts as spent \('default' vote: 1\)"):
        assert [charge.number for charge in other.charge(2)] == [4, 5]
    assert [charge.number for charge in line.charge()] == [6]
    assert line.remaining() == PLAN - 6


# -- tickets -----------------------------------------------------------------------------------------------------------


STORE = ExemplarStore.from_records(
    [{"input": f"text {i}", "output": "x", "owner": f"o{i}"} for i in range(3)],
    DeterministicFakeEmbedding(size=4),
    owner_key="owner",
    progress=False,
)


class Payer:
    """A plan whose owners have six tickets."""

    def __init__(self, url: str) -> None:
        self._ledger = Ledger(url, key_file=key_file_of(url))
        try:
            content = '{"lines": {"vote": {"count": 6}}}'
            self._plan = self._ledger.store_plan("n", content, "0" * 64, {"vote": UNLIMITED}, tickets=True).id
        except LedgerError:
            self._ledger.close()
            raise
        self.tickets = TicketLine(OwnerMarks(self._ledger, self._plan), 6)

    def took(self, times: int, owner: int = 0) -> int:
        """In how many answers the owner takes part, of so many; none after an error."""
        found = 0
        for _ in range(times):
            payment = TicketPayment(self.tickets, [self.tickets.marks.find(STORE, np.array([owner]))])
            try:
                (charge,) = charged(self._ledger, self._plan, tickets=payment)
            except LedgerError:
                break
            found += charge.participants.take().size
        return found


def test_forgetting_somebody_changes_no_ticket_of_others(any_url: str) -> None:
    """In processes that run and in new ones."""
    one, other = Payer(any_url), Payer(any_url)
    assert (one.took(1), one.took(1, owner=1), one.took(1, owner=2), other.took(1)) == (1, 1, 1, 1)
    end = one.tickets.marks.leave(STORE.mark_keys(), partial(owner_mark, content=b"o1", named=True))
    assert end is not None
    end()
    assert (one.took(1), other.took(1)) == (1, 1)
    new = Payer(any_url)
    assert (new.took(9), one.took(9, owner=2), other.took(1)) == (2, 5, 0)
    for payer in (one, other, new):
        close(payer)


@pytest.mark.parametrize("recovered", [False, True])
@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
def test_an_older_copy_gives_no_ticket_back(recovered: bool, ledger_url: str) -> None:
    """It lacks charges, which count as tickets of everybody, whether the copy is settled or recovered."""
    payer = Payer(ledger_url)
    assert payer.took(2) == 2
    close(payer)
    copy = snapshot(ledger_url, "copy")
    payer = Payer(ledger_url)
    assert payer.took(2) == 2
    close(payer)
    put_back(ledger_url, copy)
    with pytest.raises(LedgerError, match="rolled back"):
        Payer(ledger_url)
    if recovered:
        recover(ledger_url)
        payer = Payer(ledger_url)
        assert (payer.took(9), payer.took(9, owner=1)) == (2, 4), "less by what the copy lacks"
        close(payer)


# -- elsewhere ---------------------------------------------------------------------------------------------------------


def test_a_witness_may_be_on_another_database(postgres_url: str, tmp_path: Path) -> None:
    """And then sees that a whole database was put back, witness tables of its own and all."""
    witness = tmp_path / "witness"
    line = line_of(postgres_url, witness=witness)
    line.charge(4)
    line.charge()
    close(line)
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        assert not sa.inspect(connection).has_table("dpicl_marks")
        connection.exec_driver_sql("DELETE FROM dpicl_charges")
        connection.exec_driver_sql("UPDATE dpicl_counters SET spent = 0")
    engine.dispose()
    with pytest.raises(LedgerError, match="rolled back"):
        line_of(postgres_url, witness=witness)
    url, elsewhere = f"sqlite:///{tmp_path / 'b.db'}", postgres_url
    line = line_of(url, witness=elsewhere)
    line.charge(5)
    close(line)
    with pytest.raises(LedgerError, match="no witness"):
        line_of(url)
    path_of(url).unlink()
    with pytest.raises(LedgerError, match="is gone"):
        line_of(url, witness=elsewhere)
