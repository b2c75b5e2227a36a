"""What it costs that owners pay with tickets, on SQLite and on PostgreSQL.

For 1e3, 1e4 and 1e5 owners who are eligible for a query: the time of its charge, over that of the same update by the
database's driver alone, in a table of its own, in one durable transaction of one ``UPDATE`` for each owner
(``executemany``, in the order of the key). The two take turns, so that both see the same disk: at most 1.5, the median
of the rounds' ratios. For 1e3 there is no target: there the commits take most of the time, of which a charge has two,
its witness's too.

PostgreSQL is the server at ``DPICL_TEST_POSTGRES`` (default: the local one); without one its figures are left out.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from bench_ledger import charge, postgres_ledger, reachable, seconds, sqlite_ledger
from figures import show
from langchain_core.embeddings import Embeddings

from langchain_dpicl import ExemplarStore
from langchain_dpicl.budget import BudgetLine, PrivacyBudget

OWNERS = (1_000, 10_000, 100_000)
TICKETS = 500
AT_MOST = 1.5


class Same(Embeddings):
    """One vector for every text."""

    def embed_query(self, text: str) -> list[float]:
        return [1.0, 0.0]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[1.0, 0.0]] * len(texts)


def charging(url: str, key_file: Path, owners: int) -> tuple[Callable[[], Any], list[str]]:
    """A charge that so many owners pay, and their marks in the ledger."""
    rows = [{"input": "a text", "output": "x", "owner": f"owner-{i}"} for i in range(owners)]
    store = ExemplarStore.from_records(rows, Same(), owner_key="owner", progress=False)
    budget = PrivacyBudget(1000.0, 1e-5, TICKETS, url, tickets=True, replay=False, key_file=key_file)
    line = budget.line("vote", 0.5)
    _pay(line, store)
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        marks = [mark for (mark,) in connection.exec_driver_sql("SELECT mark FROM dpicl_tickets")]
    engine.dispose()
    return partial(_pay, line, store), marks


def _pay(line: BudgetLine, store: ExemplarStore) -> None:
    everybody = np.arange(store.owner_count)
    (entry,) = charge(line, owners=[line.ask(store, everybody)])
    if len(entry.participants.take()) != len(everybody):
        raise SystemExit("somebody did not pay")


def bare_update(url: str, marks: list[str]) -> Callable[[], None]:
    """One row for each owner, one durable transaction, by the driver alone."""
    make = """CREATE TABLE bare_tickets (counter_id INTEGER NOT NULL, mark VARCHAR(32) NOT NULL, used BIGINT NOT NULL,
        PRIMARY KEY (counter_id, mark))"""
    add = "INSERT INTO bare_tickets VALUES (1, ?, 0)"
    change = "UPDATE bare_tickets SET used = used + 1 WHERE counter_id = 1 AND mark = ? AND used < 1000000000"
    values = [(mark,) for mark in sorted(marks)]  # in the order of the key, which is quickest
    if url.startswith("sqlite"):
        file = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        file.execute("PRAGMA synchronous=FULL")
        file.execute(f"{make} WITHOUT ROWID")

        def run(statement: str) -> None:
            file.execute("BEGIN IMMEDIATE")
            file.executemany(statement, values)
            file.execute("COMMIT")

    else:
        import psycopg

        address = sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        server: Any = psycopg.connect(address)
        server.execute(make)

        def run(statement: str) -> None:
            server.cursor().executemany(statement.replace("?", "%s"), values)
            server.commit()

    run(add)
    return partial(run, change)


def against_bare(url: str, folder: str, owners: int, rounds: int) -> dict[str, float]:
    """Seconds of both, and the median of the rounds' ratios."""
    ours, marks = charging(url, Path(folder) / f"{owners}.key", owners)
    bare = bare_update(url, marks)
    seconds(ours, 2)
    seconds(bare, 2)
    times = [(seconds(ours, 1), seconds(bare, 1)) for _ in range(rounds)]
    about = f"{owners:,} eligible owners"
    wanted = f" (at most {AT_MOST})" if owners > OWNERS[0] else ""
    return {
        f"{about}, seconds of a charge": statistics.median(charged for charged, _ in times),
        f"{about}, seconds of the update by the driver": statistics.median(updated for _, updated in times),
        f"{about}, a charge over the update{wanted}": statistics.median(a / b for a, b in times),
    }


def measure(rounds: int) -> dict[str, float]:
    """Every figure, by name."""
    figures: dict[str, float] = {}
    kinds: dict[str, Callable[[str], Any]] = {"SQLite": sqlite_ledger}
    if reachable():
        kinds["PostgreSQL"] = postgres_ledger
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # not /tmp, which may be memory
        for kind, ledger in kinds.items():
            for owners in OWNERS:
                with ledger(folder) as url:
                    found = against_bare(url, folder, owners, rounds)
                figures |= {f"{kind}, {name}": value for name, value in found.items()}
    return figures


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit with 1 if one misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=11, help="of each (default 11)")
    args = parser.parse_args(argv)
    figures = measure(args.rounds)
    show(figures, args.json)
    return 0 if all(value <= AT_MOST for name, value in figures.items() if "at most" in name) else 1


if __name__ == "__main__":
    sys.exit(main())
