"""Both databases: whatever happens to whom and when, nothing is over-spent and nothing acknowledged is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import by_hand  # noqa: F401
import pytest
import sqlalchemy as sa
from ledger_files import AFTER_A_KILL

from langchain_dpicl import LedgerError, PrivacyBudget, PrivacyBudgetExceeded
from langchain_dpicl.budget import BudgetLine, Charge, Replayed
from langchain_dpicl.budget.ledger import UNWATCHED
from langchain_dpicl.budget.opening import LOST
from langchain_dpicl.budget.schema import charges, counters

spawn = multiprocessing.get_context("spawn")
sqlite_is_slow = pytest.mark.parametrize(
    "any_url", [pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"], indirect=True
)
"""For tests that start processes. `test_ledger_processes` and `test_release_faults` kill some on SQLite."""


def line_of(url: str, releases: int = 60, **options: Any) -> BudgetLine:
    return PrivacyBudget(1000.0, 1e-5, releases, url, **options).line("vote", 0.5)


def ledger_rows(url: str) -> tuple[int, list[int]]:
    """What the counters say, and the numbers of the charges, with those that count as lost with a killed process."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        spent = connection.scalar(sa.select(sa.func.sum(counters.c.spent)))
        found = connection.execute(sa.select(charges).order_by(charges.c.number)).all()
    engine.dispose()
    lost = [n for row in found if row.outcome == LOST for n in range(row.number - row.units + 1, row.number)]
    return int(spent or 0), sorted([*lost, *(row.number for row in found)])


def whole(url: str, acknowledged: list[int], limit: int) -> None:
    """The invariant: every charge has its row, every acknowledged one is there once, and the limit holds."""
    spent, numbers = ledger_rows(url)
    assert numbers == list(range(1, spent + 1))
    assert len(acknowledged) == len(set(acknowledged))
    assert set(acknowledged) <= set(numbers)
    assert spent <= limit


# -- everybody at once -------------------------------------------------------------------------------------------------


def charge_many(url: str, barrier: Any, results: Any) -> None:
    line = line_of(url)
    barrier.wait()
    numbers, refused = [], 0
    for _ in range(25):
        try:
            numbers += [charge.number for charge in line.charge()]
        except PrivacyBudgetExceeded:
            refused += 1
    results.put((numbers, refused))


def ask_the_same(url: str, barrier: Any, results: Any) -> None:
    line = line_of(url)
    barrier.wait()
    answers = []
    for i in range(5):
        (entry,) = line.charge(queries=[line.query_id({"input": i})])
        if isinstance(entry, Charge):
            time.sleep(0.01)
            line.record(entry, answer=f'"answer {i}"')
            answers.append(f'"answer {i}"')
        else:
            answers.append(entry.answer)
    results.put(answers)


def in_processes(target: Any, count: int, url: str) -> list[Any]:
    barrier, results = spawn.Barrier(count), spawn.Queue()
    workers = [spawn.Process(target=target, args=(url, barrier, results)) for _ in range(count)]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(30)
    return answers


@sqlite_is_slow
def test_processes_charge_exactly_the_limit(any_url: str) -> None:
    answers = in_processes(charge_many, 4, any_url)
    numbers = sorted(number for charged, _ in answers for number in charged)
    assert numbers == list(range(1, 61))
    assert sum(refused for _, refused in answers) == 40
    whole(any_url, numbers, 60)


@pytest.mark.slow
def test_equal_queries_of_processes_charge_once(any_url: str) -> None:
    answers = in_processes(ask_the_same, 4, any_url)
    assert answers == [[f'"answer {i}"' for i in range(5)]] * 4
    assert line_of(any_url).spent() == 5


def test_threads_and_tasks_charge_exactly_the_limit(any_url: str) -> None:
    line = line_of(any_url, 50)
    done: list[int] = []

    def one(_: int) -> None:
        try:
            done.extend(charge.number for charge in line.charge(3))
        except PrivacyBudgetExceeded:
            done.extend([])

    async def tasks() -> None:
        async def task() -> None:
            try:
                done.extend(entry.number for entry in await line.acharge(2) if isinstance(entry, Charge))
            except PrivacyBudgetExceeded:
                return

        await asyncio.gather(*(task() for _ in range(20)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(12)))
    asyncio.run(tasks())
    assert sorted(done) == list(range(1, 51))
    whole(any_url, done, 50)


def test_new_principals_at_once_get_one_counter_each(any_url: str) -> None:
    barrier, done = threading.Barrier(12), []

    def one(i: int) -> None:
        line = line_of(any_url, 4, scope="per_principal")
        barrier.wait()
        for _ in range(2):
            done.append((f"p{i % 3}", line.charge(principal=f"p{i % 3}")[0].number))

    line_of(any_url, 4, scope="per_principal")
    with ThreadPoolExecutor(12) as pool:
        futures = [pool.submit(one, i) for i in range(12)]
        refused = sum(isinstance(future.exception(60), PrivacyBudgetExceeded) for future in futures)
    assert sorted(done) == [(f"p{i}", n) for i in range(3) for n in (1, 2, 3, 4)]
    assert refused >= 3


def test_charges_of_several_lines_never_miss_one_another(any_url: str) -> None:
    """Of any two releases the later one's receipt counts the earlier one: no two can leave each other out."""
    budget = PrivacyBudget(1000.0, 1e-5, {"a": 40, "b": 40}, any_url)
    budget.declare("b", "vote", 0.5)
    lines = [budget.line("vote", 0.5, name="a"), budget.line("vote", 0.5, name="b")]
    made: list[Charge] = []

    def one(line: BudgetLine) -> None:
        for _ in range(10):
            made.extend(line.charge())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, lines * 2))
    seen = [(charge.number, charge.others["b"]) for charge in made if charge.line == "a"]
    seen += [(charge.others["a"], charge.number) for charge in made if charge.line == "b"]
    assert len(seen) == 40
    assert sorted(a + b for a, b in seen) == list(range(1, 41)), "one order of all charges, each seeing those before"


# -- killed ------------------------------------------------------------------------------------------------------------

CHARGER = """
import sys
import by_hand
from langchain_dpicl import PrivacyBudget
line = PrivacyBudget(1000.0, 1e-5, 100_000, sys.argv[1]).line("vote", 0.5)
i = 0
while True:
    i += 1
    (charge,) = line.charge(queries=[line.query_id({"input": [sys.argv[2], i]})])
    print(charge.number, flush=True)
    line.record(charge, answer=str(charge.number))
"""

CLAIMER = """
import sys, time
import by_hand
from langchain_dpicl import PrivacyBudget
line = PrivacyBudget(1000.0, 1e-5, 100_000, sys.argv[1]).line("vote", 0.5)
line.charge(queries=[line.query_id({"input": "x"})])
print("charged", flush=True)
time.sleep(100)
"""


def run_python(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)


@sqlite_is_slow
@pytest.mark.filterwarnings(AFTER_A_KILL)
def test_what_was_acknowledged_survives_kill_9(any_url: str) -> None:
    acknowledged: list[int] = []
    for turn in range(3):
        process = run_python(CHARGER, any_url, str(turn))
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(8 + turn)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.read().splitlines()[:-1]  # the last may be cut off
        process.wait()
        process.stdout.close()
        acknowledged += [int(line) for line in lines if line.strip()]
    whole(any_url, acknowledged, 100_000)
    line = line_of(any_url, 100_000)
    assert line.charge()[0].number == ledger_rows(any_url)[0]
    (again,) = line.charge(queries=[line.query_id({"input": ["0", 1]})])
    assert isinstance(again, Replayed)


@sqlite_is_slow
@pytest.mark.filterwarnings(AFTER_A_KILL)
def test_a_killed_claimant_blocks_others_for_the_patience_and_no_longer(any_url: str) -> None:
    process = run_python(CLAIMER, any_url)
    assert process.stdout is not None
    assert process.stdout.readline() == "charged\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    line = line_of(any_url, 100_000, replay_patience=0.5)
    (entry,) = line.charge(queries=[line.query_id({"input": "x"})])
    assert isinstance(entry, Charge)
    assert entry.number == line.spent() == 2, "the dead one's charge stands, and nothing else"
    line.record(entry, answer="1")
    assert isinstance(line.charge(queries=[line.query_id({"input": "x"})])[0], Replayed)


# -- the database goes away --------------------------------------------------------------------------------------------


def test_connections_that_are_cut_again_and_again_cost_nothing_twice(postgres_url: str, terminate: Any) -> None:
    line = line_of(postgres_url, 100_000)
    acknowledged: list[int] = []
    failures: list[str] = []
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            try:
                acknowledged.extend(charge.number for charge in line.charge())
            except LedgerError as error:
                failures.append(str(error))

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(work) for _ in range(3)]
        cut = 0
        for _ in range(15):
            time.sleep(0.05)
            cut += terminate(postgres_url)
        over.set()
        for future in running:
            future.result(60)
    assert cut >= 10, "or nothing was cut, and this proves nothing"
    assert acknowledged
    assert all("not known" in failure for failure in failures), "only a lost COMMIT is given to the caller"
    whole(postgres_url, acknowledged, 100_000)
    assert ledger_rows(postgres_url)[0] <= len(acknowledged) + len(failures)


def test_a_commit_whose_answer_is_lost_is_an_error_and_counts(
    postgres_url: str, lose_a_commit: Callable[[], list[bool]], tmp_path: Path
) -> None:
    """The server commits and the connection dies before it says so: once for a charge, once for a receipt."""
    line = line_of(postgres_url, witness=tmp_path / "witness")  # whose commits are not these
    line.charge()
    lost = lose_a_commit()
    with pytest.raises(LedgerError, match="if so, it counts"):
        line.charge()
    assert lost
    (third,) = line.charge(queries=[line.query_id({"input": "x"})])
    assert isinstance(third, Charge)
    assert third.number == 3
    whole(postgres_url, [1, 3], 60)
    lost.clear()
    line.record(third, answer="1")
    assert lost
    assert line.charge(queries=[line.query_id({"input": "x"})])[0].answer == "1", "a receipt is written again"  # type: ignore[union-attr]


@pytest.mark.filterwarnings(AFTER_A_KILL)
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_commit_that_a_signal_interrupts_keeps_no_lock(kind: type[BaseException], any_url: str) -> None:
    """The process may live on and not use the ledger again: others need not wait for it. The charge counts."""
    line = line_of(any_url)
    line.charge()
    interrupts = [kind("by a handler of a signal")]

    @sa.event.listens_for(line._ledger._engine, "commit")
    def interrupt(_: Any) -> None:
        if interrupts:
            raise interrupts.pop()

    with pytest.raises((LedgerError, KeyboardInterrupt)):
        line.charge()
    started = time.monotonic()
    other = line_of(any_url)
    assert len(other.charge(2)) == 2
    assert time.monotonic() - started < 10
    assert not interrupts
    assert other.spent() >= 3


def test_a_deadlock_is_tried_again(postgres_url: str) -> None:
    """Another session takes the rows in the other order, and the server ends the ledger's transaction."""
    budget = PrivacyBudget(1000.0, 1e-5, {"a": 40, "b": 40}, postgres_url)
    budget.declare("b", "vote", 0.5)
    line = budget.line("vote", 0.5, name="a")
    began = []

    @sa.event.listens_for(line._ledger._engine, "begin")
    def count(_: Any) -> None:
        began.append(True)

    engine = sa.create_engine(postgres_url)
    with engine.connect() as other, ThreadPoolExecutor(1) as pool:
        other.exec_driver_sql("SET deadlock_timeout = '20s'")  # the ledger's session notices first
        other.exec_driver_sql("SELECT * FROM dpicl_counters FOR UPDATE")
        charged = pool.submit(line.charge)
        time.sleep(0.3)  # the ledger holds the plan's row by now, and waits for the counter
        other.exec_driver_sql("SELECT * FROM dpicl_plans FOR UPDATE")
        other.rollback()
        assert charged.result(60)[0].number == 1
    engine.dispose()
    assert len(began) >= 2, "or there was no deadlock, and this proves nothing"
    whole(postgres_url, [1], 40)


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
def test_the_server_s_default_isolation_does_not_matter(level: str, postgres_url: str) -> None:
    engine = sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        name = sa.make_url(postgres_url).database
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET synchronous_commit = off")
    engine.dispose()
    line = line_of(postgres_url)
    with ThreadPoolExecutor(6) as pool:
        numbers = [charges[0].number for charges in pool.map(lambda _: line.charge(), range(60))]
    assert sorted(numbers) == list(range(1, 61))


def test_a_charge_is_committed_synchronously_and_a_receipt_is_not(postgres_url: str) -> None:
    line = line_of(postgres_url)
    seen: list[str] = []

    @sa.event.listens_for(line._ledger._engine, "commit")
    def watch(connection: Any) -> None:
        seen.append(connection.connection.driver_connection.execute("SHOW synchronous_commit").fetchone()[0])

    (charge,) = line.charge()
    assert seen == ["on"]
    line.record(charge)
    assert seen == ["on", "off"]


# -- a disk that is full -----------------------------------------------------------------------------------------------


def test_a_database_that_cannot_grow_refuses_and_forgets_nothing(tmp_path: Path) -> None:
    """SQLite is told that its file may have no page more; then there is room again."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    line = line_of(url, 100_000)
    acknowledged = [charge.number for charge in line.charge(50)]
    limit: list[int] = []

    @sa.event.listens_for(line._ledger._engine, "begin")
    def full(connection: Any) -> None:
        driver: sqlite3.Connection = connection.connection.driver_connection
        (pages,) = driver.execute("PRAGMA page_count").fetchone()
        driver.execute(f"PRAGMA max_page_count={limit[0] if limit else 2**30}")
        assert pages > 0

    connection = sqlite3.connect(tmp_path / "ledger.db")
    limit.append(connection.execute("PRAGMA page_count").fetchone()[0])
    connection.close()
    refused = 0
    for _ in range(400):
        try:
            acknowledged += [charge.number for charge in line.charge(5)]
        except LedgerError as error:
            refused += "full" in str(error)
            if refused == 3:
                break
    assert refused == 3, "or the limit did not bite and this proves nothing"
    whole(url, acknowledged, 100_000)
    assert ledger_rows(url)[0] == len(acknowledged), "what was refused was not charged"
    limit.clear()
    assert line.charge()[0].number == len(acknowledged) + 1


# -- tokens ------------------------------------------------------------------------------------------------------------


def token_line(url: str, tokens: int = 300) -> BudgetLine:
    return PrivacyBudget(8.0, 1e-5, tokens, url, "tokens").line("tokens", 0.05)


def adds_up(url: str, limit: int = 300) -> int:
    """What the one counter counts: within its limit, and as many as its rows say."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        spent, returned = connection.execute(sa.select(counters.c.spent, counters.c.returned)).one()
        units, last = connection.execute(sa.select(sa.func.sum(charges.c.units), sa.func.max(charges.c.number))).one()
    engine.dispose()
    assert (spent, spent - returned) == (last, units)
    assert spent - returned <= limit
    return int(spent - returned)


def answer_many(url: str, barrier: Any, results: Any) -> None:
    line, draw = token_line(url), random.Random()
    barrier.wait()
    numbers, counted = [], 0
    while True:
        units = draw.randrange(1, 40)
        try:
            answers = line.charge(draw.randrange(1, 3), units=units)
        except PrivacyBudgetExceeded:
            if units == 1:
                break
            continue
        for charge in answers:
            numbers.append(charge.number)
            counted += line.record(charge, unused=draw.randrange(units))["tokens"] or 0
    results.put((numbers, counted))


@pytest.mark.slow
def test_processes_that_give_back_tokens_never_over_spend(any_url: str) -> None:
    answers = in_processes(answer_many, 3, any_url)
    numbers = [number for some, _ in answers for number in some]
    assert len(set(numbers)) == len(numbers), "a number is given out once, whatever was given back"
    assert max(numbers) > 300, "or nothing that was given back was used"
    assert sum(counted for _, counted in answers) == adds_up(any_url)
    line = token_line(any_url)
    (receipt,) = [line._ledger.receipt(line.plan_id, "tokens", number) for number in numbers[-1:]]
    assert receipt is not None
    assert f'"id": "tokens:tokens:{numbers[-1]}"' in receipt[0]


def test_all_of_the_tokens_or_none(any_url: str) -> None:
    line = token_line(any_url)
    barrier, made = threading.Barrier(6), []

    def one(_: int) -> None:
        barrier.wait()
        try:
            made.extend(line.charge(3, units=30))
        except PrivacyBudgetExceeded:
            return

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(6)))
    assert sorted(charge.number for charge in made) == [30 * i for i in range(1, 10)]
    assert adds_up(any_url) == 270
    with pytest.raises(PrivacyBudgetExceeded):
        line.charge(units=31)
    assert (line.charge(units=30)[0].number, line.remaining()) == (300, 0)


def test_a_race_for_the_same_tokens_gives_them_back_once(any_url: str) -> None:
    lines = [token_line(any_url) for _ in range(3)]
    net = 0
    for turn in range(6):
        (charge,) = lines[0].charge(units=10)
        barrier = threading.Barrier(6)

        def one(i: int, charge: Charge = charge, barrier: threading.Barrier = barrier, turn: int = turn) -> int | None:
            barrier.wait()
            if i == 5 and turn % 2:
                lines[0].give_up(charge)
                return None
            try:
                return lines[i % 3].record(charge, unused=4 + i % 2)["tokens"]
            except LedgerError:
                return None

        with ThreadPoolExecutor(6) as pool:
            counted = {tokens for tokens in pool.map(one, range(6)) if tokens is not None}
        assert len(counted) <= 1
        net += counted.pop() if counted else 10
        assert adds_up(any_url) == net


def test_nothing_is_given_back_of_what_failed_was_given_up_or_is_pending(any_url: str) -> None:
    line = token_line(any_url)
    failed, given_up, pending = line.charge(3, units=10)
    line.record(failed, "members abstained")
    line.give_up(given_up)
    for charge in (failed, given_up):
        with pytest.raises(LedgerError, match="nothing is given back"):
            line.record(charge, unused=5)
    assert adds_up(any_url) == 30
    receipt = line.record(pending, unused=9)
    assert (receipt["tokens"], adds_up(any_url)) == (1, 21)
    assert line.charge(units=279)[0].number == 309


ANSWERER = """
import sys
import by_hand
from langchain_dpicl import PrivacyBudget
line = PrivacyBudget(8.0, 1e-5, 2000, sys.argv[1], "tokens").line("tokens", 0.05)
while True:
    (charge,) = line.charge(units=20)
    print(f"{charge.number} charged", flush=True)
    line.record(charge, unused=15)
    print(f"{charge.number} answered", flush=True)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings(AFTER_A_KILL)
def test_tokens_of_a_killed_process_are_given_back_with_their_receipt_or_not_at_all(any_url: str) -> None:
    charged: set[str] = set()
    answered: set[str] = set()
    for turn in range(3):
        process = run_python(ANSWERER, any_url)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(9 + turn)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.read().splitlines()
        process.wait()
        process.stdout.close()
        charged |= {line.split()[0] for line in lines if line.strip().endswith(" charged")}
        answered |= {line.split()[0] for line in lines if line.strip().endswith(" answered")}
    engine = sa.create_engine(any_url)
    with engine.connect() as connection:
        query = sa.select(charges.c.number, charges.c.units, charges.c.receipt)
        found = connection.execute(query.where(charges.c.outcome.is_distinct_from(LOST))).all()
    engine.dispose()
    assert {(units, receipt is None) for _, units, receipt in found} <= {(5, False), (20, True)}
    assert {int(number) for number in charged} <= {number for number, *_ in found}
    assert {int(number) for number in answered} <= {number for number, units, _ in found if units == 5}
    adds_up(any_url, 2000)


@sqlite_is_slow
@pytest.mark.filterwarnings(AFTER_A_KILL)
def test_a_process_killed_before_its_answer_leaves_everything_charged(any_url: str) -> None:
    process = run_python(
        CLAIMER.replace('"vote", 0.5', '"tokens", 0.05').replace("charge(", "charge(units=30, "), any_url
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "charged\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert adds_up(any_url, 100_000) == 30
    assert PrivacyBudget.open("default", any_url, witness=UNWATCHED).spent() == 30


def test_tokens_whose_return_was_not_confirmed_are_given_back_once(
    postgres_url: str, lose_a_commit: Callable[[], list[bool]]
) -> None:
    """The server commits the receipt and the connection dies before it says so: it is written again."""
    line = token_line(postgres_url)
    (charge,) = line.charge(units=50)
    lost = lose_a_commit()
    receipt = line.record(charge, unused=30)
    assert lost
    assert (receipt["tokens"], adds_up(postgres_url)) == (20, 20)


def test_connections_that_are_cut_give_tokens_back_once(postgres_url: str, terminate: Any) -> None:
    line = token_line(postgres_url, 5000)
    line.record(line.charge(units=20)[0], unused=15)  # what a receipt needs once is computed
    over = threading.Event()
    done: list[int] = [20]

    def work() -> None:
        while not over.is_set():
            with contextlib.suppress(LedgerError):  # a COMMIT whose answer is lost
                (charge,) = line.charge(units=20)
                line.record(charge, unused=15)
                done.append(charge.number)

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(work) for _ in range(3)]
        cut = 0
        for _ in range(15):
            time.sleep(0.05)
            cut += terminate(postgres_url)
        over.set()
        for future in running:
            future.result(60)
    assert cut >= 10, "or nothing was cut, and this proves nothing"
    assert len(done) == len(set(done)) > 0
    net = adds_up(postgres_url, 5000)
    assert net >= 5 * len(done)
    assert (net - 5 * len(done)) % 5 == 0
