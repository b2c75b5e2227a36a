"""What relevance and tickets cost.

- gated selection (who is eligible, their coins, buckets and texts) over a bare FAISS range search of the same index
  with the same threshold, at 1e6 owners of one exemplar in 384 dimensions; the two take turns. At most 1.2.
- the same gated selection from a collection on PostgreSQL, whose vectors are in this process's memory, over the store
  in memory of the same records (at most 1.5), at 1e5 owners; with one record that another worker has added meanwhile;
  and if the server computes. The server is `pgvector_server`'s.
- a charge of 5,000 owners' tickets, of a million who all hold some: milliseconds, on SQLite (less than 20) and on
  PostgreSQL; over a charge of the same ledger without tickets. The first charge that meets owners gives them seats.

PostgreSQL is the server at ``DPICL_TEST_POSTGRES`` (default: the local one); without one its figures are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_ledger import charge, postgres_ledger, sqlite_ledger
from langchain_core.embeddings import DeterministicFakeEmbedding
from numpy.typing import NDArray

from langchain_dpicl import ExemplarStore, PoissonExampleSelector, PostgresExemplarStore, PrivacyBudget
from langchain_dpicl.budget import BudgetLine

sys.path.append(str(Path(__file__).parents[1]))
import pgvector_server

TICKETS = 5000
TEXT = "a ticket of ordinary length, about a hundred characters long, as people write them in a hurry"


def exemplars(owners: int, dimension: int) -> tuple[list[dict[str, str]], Any, dict[str, Any]]:
    """One exemplar an owner, random vectors: what `from_records` takes."""
    vectors = np.random.default_rng(0).standard_normal((owners, dimension), dtype=np.float32)
    records = [{"input": TEXT, "owner": f"customer-{i:07d}"} for i in range(owners)]
    options = {"output_key": None, "owner_key": "owner", "vectors": vectors, "progress": False}
    return records, DeterministicFakeEmbedding(size=dimension), options


def store_of(owners: int, dimension: int) -> ExemplarStore:
    """A store in memory."""
    records, model, options = exemplars(owners, dimension)
    return ExemplarStore.from_records(records, model, **options)


def seconds(work: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def selection(store: ExemplarStore, rounds: int) -> dict[str, float]:
    """Gated selection against the search alone."""
    query = store.embed_query("what is it?")
    near = np.sort(store.similarity(np.arange(len(store)), query))
    threshold = float(near[-TICKETS])
    selector = PoissonExampleSelector(store, 20, shots=5, threshold=threshold, eligible=TICKETS)
    index = store._index
    row = query.reshape(1, -1)
    both: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        bare = seconds(lambda: index.range_search(row, threshold))
        both.append((seconds(lambda: selector.sample(query=query)), bare))
    both = both[1:]
    return {
        "owners": store.owner_count,
        "eligible": len(selector.eligible(query)),
        "search_ms": 1e3 * statistics.median(bare for _, bare in both),
        "gated_ms": 1e3 * statistics.median(gated for gated, _ in both),
        "ratio": statistics.median(gated / bare for gated, bare in both),
    }


def on_postgresql(store: ExemplarStore, rounds: int) -> dict[str, float]:
    """Gated selection on PostgreSQL against that of this store, of the same records; they take turns."""
    records, model, options = exemplars(store.owner_count, store.dimension)
    query = store.embed_query("what is it?")
    near = np.sort(store.similarity(np.arange(len(store)), query))
    wanted = min(TICKETS, len(store) // 20)
    gate: dict[str, Any] = {"shots": 5, "threshold": float(near[-wanted]), "eligible": wanted}
    with pgvector_server.server() as server, pgvector_server.database(server) as url:
        shared = PostgresExemplarStore.from_records(records, model, url, **options)
        other, asked = (
            PostgresExemplarStore.open(url, model),
            PostgresExemplarStore.open(url, model, vectors_in_memory=False),
        )
        del records, options
        load = seconds(shared.load_vectors)
        here, there, by_server = (PoissonExampleSelector(each, 20, **gate) for each in (store, shared, asked))
        assert here.eligible(query).tolist() == there.eligible(query).tolist()
        alone, kept, changed = [], [], []
        for i in range(rounds + 1):
            alone.append(seconds(lambda: here.sample(query=query)))
            kept.append(seconds(lambda: there.sample(query=query)))
            other.add([{"input": TEXT, "owner": f"new-{i}"}])
            changed.append(seconds(lambda: there.sample(query=query)))
        computed = [seconds(lambda: by_server.sample(query=query)) for _ in range(3)]
        for each in (shared, other, asked):
            each.close()
    ratios = [one / another for one, another in zip(kept, alone, strict=True)]
    return {
        "owners": store.owner_count,
        "in_memory_ms": 1e3 * statistics.median(alone[1:]),
        "postgresql_ms": 1e3 * statistics.median(kept[1:]),
        "ratio": statistics.median(ratios[1:]),
        "after_a_change_ms": 1e3 * statistics.median(changed[1:]),
        "server_ms": 1e3 * statistics.median(computed),
        "load_s": load,
    }


def _pay(line: BudgetLine, store: ExemplarStore, owners: NDArray[np.int64]) -> None:
    charge(line, owners=[line.ask(store, owners)])


def charging(store: ExemplarStore, url: str, rounds: int) -> dict[str, float]:
    """Tickets of 5,000 owners, drawn anew each time, who all have seats."""
    with_tickets = PrivacyBudget(3.0, 1e-7, 1000, url, "tickets", tickets=True).line("vote", 0.2)
    without = PrivacyBudget(3.0, 1e-7, 100_000, url, "releases").line("vote", 0.2)
    everybody = np.arange(store.owner_count)
    first = seconds(lambda: charge(with_tickets, owners=[with_tickets.ask(store, everybody)]))
    charge(with_tickets, owners=[with_tickets.ask(store, everybody)])  # learns the seats, as any process does once
    draw = np.random.default_rng(1)
    tickets, plain = [], []
    for _ in range(rounds):
        owners = np.sort(draw.choice(store.owner_count, min(TICKETS, store.owner_count), replace=False))
        tickets.append(seconds(partial(_pay, with_tickets, store, owners)))
        plain.append(seconds(lambda: charge(without)))
    return {
        "owners": store.owner_count,
        "tickets": min(TICKETS, store.owner_count),
        "charge_ms": 1e3 * statistics.median(tickets),
        "slowest_of_ten_ms": 1e3 * sorted(tickets)[int(0.9 * rounds)],
        "without_tickets_ms": 1e3 * statistics.median(plain),
        "ratio": statistics.median(tickets) / statistics.median(plain),
        "seats_for_all_s": first,
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What relevance and tickets cost.")
    parser.add_argument("--owners", type=int, default=1_000_000)
    parser.add_argument("--shared-owners", type=int, default=100_000, help="on PostgreSQL")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only-shared", action="store_true", help="leave out the rest")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    answer: dict[str, Any] = {}
    try:
        answer["shared"] = on_postgresql(store_of(options.shared_owners, 384), options.rounds)
    except pgvector_server.NoServer as error:
        print(f"PostgreSQL's store is left out: {error}", file=sys.stderr)
    if "shared" in answer and not options.json:
        each = answer["shared"]
        print(
            f"gated selection on PostgreSQL at {each['owners']:,} owners: {each['postgresql_ms']:.0f} ms, "
            f"{each['ratio']:.2f} of the store in memory ({each['in_memory_ms']:.0f} ms; target 1.5); after a change "
            f"elsewhere {each['after_a_change_ms']:.0f} ms; if the server computes {each['server_ms']:.0f} ms; all "
            f"vectors are loaded in {each['load_s']:.1f} s"
        )
    if options.only_shared:
        print(json.dumps(answer, indent=2) if options.json else "", end="")
        return 0
    store = store_of(options.owners, 384)
    answer |= {"selection": selection(store, options.rounds), "charging": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, ledger in (("SQLite", sqlite_ledger), ("PostgreSQL", postgres_ledger)):
            try:
                with ledger(folder) as url:
                    answer["charging"][name] = charging(store, url, 4 * options.rounds)
            except Exception as error:
                if name == "SQLite":
                    raise
                print(f"PostgreSQL is left out: {type(error).__name__}", file=sys.stderr)
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    found = answer["selection"]
    print(
        f"gated selection at {found['owners']:,} owners, {found['eligible']:,} of them eligible: "
        f"{found['gated_ms']:.0f} ms, {found['ratio']:.2f} of a bare range search "
        f"({found['search_ms']:.0f} ms; target 1.2)"
    )
    for name, each in answer["charging"].items():
        target = "; target 20" if name == "SQLite" else ""
        print(
            f"{name}: charging {each['tickets']:,} tickets of {each['owners']:,} owners {each['charge_ms']:.1f} ms "
            f"(nine of ten within {each['slowest_of_ten_ms']:.1f}{target}), {each['ratio']:.1f} of a charge without "
            f"tickets ({each['without_tickets_ms']:.1f} ms); seats for all of them, once: "
            f"{each['seats_for_all_s']:.1f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
