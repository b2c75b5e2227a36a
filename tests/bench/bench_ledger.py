"""What a durable charge costs, on SQLite and on PostgreSQL.

- durable charges per second over the same database's bare commits of one row (the driver alone, a table of its own),
  by one thread; they take turns, so that all see the same disk: at least .4. A charge commits its witness, too
- the same for new queries, which look for an answer of theirs first and lay claim to it, and for those with a receipt
- the same three by 8 threads of one process, over bare commits by 8 threads (no target: the charges of a counter
  follow one another). On PostgreSQL each bare thread has a connection of its own; on SQLite, which has one writer, they
  take turns
- 8 processes x 500 charges against a limit of 3,000: exactly 3,000 succeed; charges per second of all together
- a charge at 1e6 spent releases over a charge at 10: at most 1.2

PostgreSQL is the server at ``DPICL_TEST_POSTGRES`` (default: the local one); without one its figures are left out.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import sqlite3
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from figures import show

from langchain_dpicl import PrivacyBudgetExceeded
from langchain_dpicl.budget import BudgetLine, PrivacyBudget
from langchain_dpicl.budget.line import IN_TRANSACTION
from langchain_dpicl.budget.schema import charges, counters
from langchain_dpicl.calls.flow import run

SERVER = os.environ.get("DPICL_TEST_POSTGRES", "postgresql+psycopg://postgres@127.0.0.1:5432/test")
LIMIT, PROCESSES, EACH = 3000, 8, 500
THREADS = 8
TARGETS = {"charges": 0.4, "new queries": None, "new queries and receipts": None}
MILLION = 1_000_000
spawn = multiprocessing.get_context("spawn")


@contextmanager
def sqlite_ledger(folder: str) -> Iterator[str]:
    """A ledger's address in a folder."""
    yield f"sqlite:///{folder}/{uuid.uuid4().hex}.db"


@contextmanager
def postgres_ledger(_: str) -> Iterator[str]:
    """The address of a database of its own, dropped afterwards."""
    url, name = sa.make_url(SERVER), f"dpicl_bench_{uuid.uuid4().hex[:12]}"
    server = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        yield url.set(database=name).render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
        server.dispose()


def line_of(url: str, releases: int, name: str = "bench") -> BudgetLine:
    """A line with so many releases."""
    return PrivacyBudget(1000.0, 1e-5, releases, url, name).line("vote", 0.5)


def bare_commit(url: str) -> Callable[[], None]:
    """One row, one durable transaction, by the driver alone."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE bare (id INTEGER PRIMARY KEY, made TEXT)")

        def commit() -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO bare (made) VALUES ('2026-01-01T00:00:00.000000+00:00')")
            connection.execute("COMMIT")

        return commit
    import psycopg

    server: Any = psycopg.connect(sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False))
    server.execute("CREATE TABLE IF NOT EXISTS bare (id BIGSERIAL PRIMARY KEY, made TEXT)")
    server.commit()

    def commit_row() -> None:
        server.execute("INSERT INTO bare (made) VALUES ('2026-01-01T00:00:00.000000+00:00')")
        server.commit()

    return commit_row


def seconds(action: Callable[[], Any], times: int) -> float:
    """Of one action, the mean of so many."""
    started = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - started) / times


def at_once(actions: Sequence[Callable[[], Any]], times: int) -> float:
    """Seconds of an action, each of whose threads does so many of its own."""
    if len(actions) == 1:
        return seconds(actions[0], times)
    with ThreadPoolExecutor(len(actions)) as pool:
        started = time.perf_counter()
        for found in [pool.submit(seconds, action, times) for action in actions]:
            found.result()
        return (time.perf_counter() - started) / times / len(actions)


def charge(line: BudgetLine, queries: Sequence[str | None] = (None,), **options: Any) -> list[Any]:
    """Charge a line by hand, outside of any release."""
    return run(line.charging(IN_TRANSACTION, queries, **options))


def asking(line: BudgetLine, receipts: bool = False) -> Callable[[], Any]:
    """Charge for a query that nobody has asked before, and record its answer."""
    numbers = itertools.count()

    def ask() -> None:
        (entry,) = charge(line, queries=[line.query_id({"input": next(numbers), "receipts": receipts})])
        if receipts:
            line.record(entry, answer='"red"')

    return ask


def against_bare(url: str, rounds: int, threads: int) -> dict[str, float]:
    """Charges and bare commits per second, and the medians of the rounds' ratios."""
    line = line_of(url, 10_000_000)
    ours: list[Callable[[], Any]] = [partial(charge, line), asking(line), asking(line, receipts=True)]
    bare = [bare_commit(url) for _ in range(1 if url.startswith("sqlite") else threads)]
    actions = dict(zip(TARGETS, ([action] * threads for action in ours), strict=True)) | {"bare commits": bare}
    for each in actions.values():
        at_once(each, 20)
    times = [{name: at_once(each, 25) for name, each in actions.items()} for _ in range(rounds)]
    about = f"{threads} threads, " if threads > 1 else ""
    figures = {f"{about}{name} a second": 1 / statistics.median(each[name] for each in times) for name in actions}
    for name, target in TARGETS.items():
        wanted = f" (at least {target:g})" if target and threads == 1 else ""
        ratio = statistics.median(each["bare commits"] / each[name] for each in times)
        figures[f"{about}{name} over bare commits{wanted}"] = ratio
    return figures


def charge_many(url: str, barrier: Any, results: Any) -> None:
    """One of the processes: how many charges succeeded, and when it began and ended."""
    line = line_of(url, LIMIT)
    done = 0
    barrier.wait()
    started = time.monotonic()
    for _ in range(EACH):
        try:
            done += len(charge(line))
        except PrivacyBudgetExceeded:
            continue
    results.put((done, started, time.monotonic()))


def together(url: str) -> tuple[int, float]:
    """How many charges of all processes succeeded, and how many a second."""
    line_of(url, LIMIT)
    barrier, results = spawn.Barrier(PROCESSES), spawn.Queue()
    workers = [spawn.Process(target=charge_many, args=(url, barrier, results)) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join()
    done = sum(answer[0] for answer in answers)
    return done, done / (max(answer[2] for answer in answers) - min(answer[1] for answer in answers))


def fill(url: str, name: str, upto: int) -> None:
    """As many spent releases as if they had been charged one by one."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        plan = connection.exec_driver_sql(f"SELECT id FROM dpicl_plans WHERE name = '{name}'").scalar_one()
        counter = connection.scalar(sa.select(counters.c.id).where(counters.c.plan_id == plan))
        row = {"counter_id": counter, "charged": "2026-01-01T00:00:00.000000+00:00", "outcome": "released"}
        for start in range(1, upto + 1, 50_000):
            rows = [{**row, "number": n, "receipt": "{}"} for n in range(start, min(start + 50_000, upto + 1))]
            connection.execute(sa.insert(charges), rows)
        connection.execute(sa.update(counters).where(counters.c.id == counter).values(spent=upto))
    engine.dispose()


def growth(url: str, rounds: int) -> float:
    """Time of a charge at a million spent releases over that at ten; the two take turns, median of the ratios."""
    few, many = line_of(url, 10_000_000, "few"), line_of(url, 10_000_000, "many")
    charge(few, [None] * 10)
    fill(url, "many", MILLION)
    for line in (few, many):
        seconds(partial(charge, line), 20)
    return statistics.median(
        seconds(partial(charge, many), 25) / seconds(partial(charge, few), 25) for _ in range(rounds)
    )


def reachable() -> bool:
    """Whether there is a PostgreSQL."""
    try:
        engine = sa.create_engine(SERVER)
        with engine.connect():
            return True
    except (sa.exc.SQLAlchemyError, ImportError):
        return False


def measure(rounds: int) -> dict[str, Any]:
    """Every figure, by name."""
    figures: dict[str, Any] = {}
    kinds: dict[str, Callable[[str], Any]] = {"SQLite": sqlite_ledger}
    if reachable():
        kinds["PostgreSQL"] = postgres_ledger
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # not /tmp, which may be memory
        for kind, ledger in kinds.items():
            for threads in (1, THREADS):
                with ledger(folder) as url:
                    figures |= {f"{kind}, {name}": value for name, value in against_bare(url, rounds, threads).items()}
            with ledger(folder) as url:
                done, rate = together(url)
                figures[f"{kind}, {PROCESSES} x {EACH} charges that succeeded (exactly {LIMIT})"] = done
                figures[f"{kind}, {PROCESSES} processes, charges a second"] = rate
            with ledger(folder) as url:
                figures[f"{kind}, a charge at 1e6 spent over one at 10 (at most 1.2)"] = growth(url, rounds)
    return figures


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit with 1 if one misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=20, help="of 25 of each kind by each thread (default 20)")
    args = parser.parse_args(argv)
    figures = measure(args.rounds)
    show(figures, args.json)
    least = {name: float(found[1]) for name in figures if (found := re.search(r"\(at least ([\d.]+)\)$", name))}
    good = all(figures[name] >= target for name, target in least.items())
    good = good and all(value == LIMIT for name, value in figures.items() if "exactly" in name)
    good = good and all(value <= 1.2 for name, value in figures.items() if "at most 1.2" in name)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
