"""What more workers bring to a server whose ledger is on PostgreSQL, and what a release takes there.

`bench_serving`'s server and clients, with 1, 2 and 4 workers: a release of 10 member calls of an instant model, and on
the same server a release that does nothing, which shows what HTTP, the checks of requests and the clients take. They
take turns. Of each: answers a second, and quantiles of an answer's time as its client sees it, while 20 clients wait
for one another; of the release also its own time, from its check to its receipt. (No target: clients, workers and
PostgreSQL share the machine's processors.)

PostgreSQL is the server at ``DPICL_TEST_POSTGRES`` (default: the local one).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench_ledger import postgres_ledger, reachable
from bench_serving import all_times, load, released, served, share, spent

PARTS = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
ROUNDS = 3


def measured(workers: int, seconds: float) -> dict[str, float]:
    """The figures of a number of workers. Checks that nothing is lost."""
    rates: dict[str, list[float]] = {"private": [], "nothing": []}
    times: dict[str, list[float]] = {"private": [], "nothing": []}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, contextlib.ExitStack() as stack:
        folders = {kind: Path(name, kind) for kind in rates}
        for folder in folders.values():
            folder.mkdir()
            (folder / "ledger").write_text(stack.enter_context(postgres_ledger("")))
        with contextlib.ExitStack() as servers:
            ports = {kind: servers.enter_context(served(kind, folder, workers)) for kind, folder in folders.items()}
            for port in ports.values():
                asyncio.run(load(port, 1.0, "before", 0.0))  # not counted, but charged
            before, answers = spent(folders["private"]), 0
            for number in range(ROUNDS):
                for kind, port in ports.items():
                    statuses, rate, took = asyncio.run(load(port, seconds, f"measured {number}", 0.0))
                    if set(statuses) != {200}:
                        raise RuntimeError(f"{kind}: statuses {dict(statuses)}")
                    rates[kind].append(rate)
                    times[kind] += took
                    answers += statuses.total() * (kind == "private")
        charges, receipts = (count(folders["private"]) - before for count in (spent, released))
        if not charges == receipts == answers:
            raise RuntimeError(f"{answers} answers, {charges} charges, {receipts} receipts")
        own = all_times(folders["private"])["whole"]
    figures = {}
    for kind in rates:
        figures[f"{kind}, answers a second"] = statistics.median(rates[kind])
        figures |= {f"{kind}, {part} of an answer, ms": share(times[kind], q) for part, q in PARTS.items()}
    figures |= {f"private, {part} of its own time, ms": share(own, q) for part, q in PARTS.items()}
    ratio = statistics.median(mine / idle for mine, idle in zip(*rates.values(), strict=True))
    return {f"{workers} workers, {name}": value for name, value in figures.items()} | {
        f"{workers} workers, private over a release that does nothing": ratio
    }


def main(argv: list[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seconds", type=float, default=5.0, help="of every load (default 5)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="how many (default 1 2 4)")
    args = parser.parse_args(argv)
    if not reachable():
        print("no PostgreSQL answers: set DPICL_TEST_POSTGRES", file=sys.stderr)
        return 1
    figures: dict[str, float] = {"processors": os.cpu_count() or 0}
    for workers in args.workers:
        figures |= measured(workers, args.seconds)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        width = max(len(name) for name in figures)
        print(*(f"{name:<{width}}  {value:.4g}" for name, value in figures.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
