"""What relevance and tickets cost.

- gated selection (who is eligible, their coins, buckets and texts) from a store in a file of SQLite's, over a bare
  FAISS range search of the same vectors with the same threshold, at 1e6 owners of one exemplar in 384 dimensions; the
  two take turns. At most 1.2. Loading all vectors, beside a bare read of their rows.
- the same from a collection on PostgreSQL, at 1e5 owners: over the bare search, and over the store in a file (at most
  1.5); with one record that another worker has added meanwhile. The server is `pgvector_server`'s.
- if that server computes (``vectors_in_memory=False``): gated selection over the bare search, and over the statement in
  SQL that the server needs anyway; and blind selection, for which nobody compares vectors.
- a charge of 5,000 owners' tickets, of a million who all hold some: milliseconds, on SQLite (less than 20) and on
  PostgreSQL; over a charge of the same ledger without tickets. The first charge that meets owners gives them seats.

PostgreSQL is the server at ``DPICL_TEST_POSTGRES`` (default: the local one); without one its figures are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from bench_ledger import charge, postgres_ledger, sqlite_ledger
from langchain_core.embeddings import DeterministicFakeEmbedding
from numpy.typing import NDArray

from langchain_dpicl import ExemplarStore, PoissonExampleSelector, PrivacyBudget
from langchain_dpicl.budget import BudgetLine

sys.path.append(str(Path(__file__).parents[1]))
import pgvector_server

DIMENSION = 384
TICKETS = 5000
TEXT = "a ticket of ordinary length, about a hundred characters long, as people write them in a hurry"


def vectors_of(owners: int, dimension: int) -> NDArray[np.float32]:
    """Random vectors of norm 1, one an owner."""
    vectors = np.random.default_rng(0).standard_normal((owners, dimension), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def store_of(vectors: NDArray[np.float32], url: str) -> ExemplarStore:
    """A new store of an exemplar for each vector, each its own owner's."""
    records = [{"input": TEXT, "owner": f"customer-{i:07d}"} for i in range(len(vectors))]
    model = DeterministicFakeEmbedding(size=vectors.shape[1])
    return ExemplarStore.from_records(records, model, url, output_key=None, owner_key="owner", vectors=vectors)


def seconds(work: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Bare:
    """A FAISS index of these vectors, with a query and a threshold that so many of them reach."""

    def __init__(self, vectors: NDArray[np.float32], wanted: int) -> None:
        self.index = faiss.IndexFlatIP(vectors.shape[1])
        self.index.add(vectors)
        model = DeterministicFakeEmbedding(size=vectors.shape[1])
        query = np.array(model.embed_query("what is it?"), np.float32)
        self.query = query / np.linalg.norm(query)
        self.threshold = float(np.sort(vectors @ self.query)[-wanted])
        self.gate: dict[str, Any] = {"shots": 5, "threshold": self.threshold, "eligible": wanted}

    def search(self) -> None:
        """All vectors that reach the threshold."""
        self.index.range_search(self.query.reshape(1, -1), self.threshold)


def read_all(path: str) -> None:
    """Read the rows of a store in a file, and do nothing with them."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for _ in connection.execute("SELECT id, owner, embedding FROM dpicl_exemplars_exemplars"):
            pass


def _ms(times: Sequence[float]) -> float:
    """Their median but for the first, in milliseconds."""
    return 1e3 * statistics.median(times[1:])


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios but for the first."""
    return statistics.median(one / other for one, other in list(zip(ours, theirs, strict=True))[1:])


def selection(store: ExemplarStore, bare: Bare, rounds: int) -> dict[str, float]:
    """Gated selection against the search alone."""
    selector = PoissonExampleSelector(store, 20, **bare.gate)
    searched = []
    gated = []
    read = seconds(lambda: read_all(str(store._database.path)))
    load = seconds(store.load_vectors)
    for _ in range(rounds + 1):
        searched.append(seconds(bare.search))
        gated.append(seconds(lambda: selector.sample(query=bare.query)))
    return {
        "owners": store.owner_count,
        "eligible": len(selector.eligible(bare.query)),
        "search_ms": _ms(searched),
        "gated_ms": _ms(gated),
        "ratio": _ratio(gated, searched),
        "load_s": load,
        "read_s": read,
    }


def on_postgresql(owners: int, rounds: int, folder: str) -> dict[str, float]:
    """Gated selection on PostgreSQL against the search alone, and against a store in a file; they take turns."""
    vectors = vectors_of(owners, DIMENSION)
    bare = Bare(vectors, min(TICKETS, owners // 20))
    local = store_of(vectors, f"sqlite:///{folder}/shared.db")
    with pgvector_server.server() as server, pgvector_server.database(server) as url:
        shared = store_of(vectors, url)
        other = ExemplarStore.open(url, local.embeddings)
        asked = ExemplarStore.open(url, local.embeddings, vectors_in_memory=False)
        load = seconds(shared.load_vectors)
        here, there, by_server = (PoissonExampleSelector(each, 20, **bare.gate) for each in (local, shared, asked))
        assert here.eligible(bare.query).tolist() == there.eligible(bare.query).tolist()
        searched = []
        alone = []
        kept = []
        changed = []
        for i in range(rounds + 1):
            searched.append(seconds(bare.search))
            alone.append(seconds(lambda: here.sample(query=bare.query)))
            kept.append(seconds(lambda: there.sample(query=bare.query)))
            other.add([{"input": TEXT, "owner": f"new-{i}"}])
            changed.append(seconds(lambda: there.sample(query=bare.query)))
        blind = PoissonExampleSelector(asked, 20, shots=2)
        with asked.reading() as view:
            statement = partial(view._near, bare.query, 2.0)  # no row reaches this: the server's scan alone
            scanned = [seconds(statement) for _ in range(rounds + 1)]
        computed = [seconds(lambda: by_server.sample(query=bare.query)) for _ in range(rounds + 1)]
        drawn = [seconds(blind.sample) for _ in range(rounds + 1)]
        for each in (local, shared, other, asked):
            each.close()
    return {
        "owners": owners,
        "search_ms": _ms(searched),
        "sqlite_ms": _ms(alone),
        "postgresql_ms": _ms(kept),
        "ratio": _ratio(kept, searched),
        "ratio_to_sqlite": _ratio(kept, alone),
        "after_a_change_ms": _ms(changed),
        "server_ms": _ms(computed),
        "server_scan_ms": _ms(scanned),
        "server_ratio": _ratio(computed, searched),
        "blind_ms": _ms(drawn),
        "blind_ratio": _ratio(drawn, searched),
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
    with tempfile.TemporaryDirectory() as folder:
        return measure(options, folder)


def measure(options: argparse.Namespace, folder: str) -> int:
    """Measure with files in a folder, and print."""
    answer: dict[str, Any] = {}
    try:
        answer["shared"] = on_postgresql(options.shared_owners, options.rounds, folder)
    except pgvector_server.NoServer as error:
        print(f"PostgreSQL's store is left out: {error}", file=sys.stderr)
    if "shared" in answer and not options.json:
        each = answer["shared"]
        print(
            f"gated selection on PostgreSQL at {each['owners']:,} owners: {each['postgresql_ms']:.0f} ms, "
            f"{each['ratio']:.2f} of a bare range search ({each['search_ms']:.0f} ms), {each['ratio_to_sqlite']:.2f} "
            f"of a store in a file ({each['sqlite_ms']:.0f} ms; target 1.5); after a change elsewhere "
            f"{each['after_a_change_ms']:.0f} ms; all vectors are loaded in {each['load_s']:.1f} s. If the server "
            f"computes: gated {each['server_ms']:.0f} ms, {each['server_ratio']:.2f} of a bare range search (its scan "
            f"alone, in SQL: {each['server_scan_ms']:.0f} ms); blind {each['blind_ms']:.1f} ms, "
            f"{each['blind_ratio']:.2f}"
        )
    if options.only_shared:
        print(json.dumps(answer, indent=2) if options.json else "", end="")
        return 0
    vectors = vectors_of(options.owners, DIMENSION)
    bare = Bare(vectors, min(TICKETS, options.owners // 20))
    store = store_of(vectors, f"sqlite:///{folder}/store.db")
    del vectors
    answer |= {"selection": selection(store, bare, options.rounds), "charging": {}}
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
        f"({found['search_ms']:.0f} ms; target 1.2); all vectors are loaded in {found['load_s']:.1f} s "
        f"(their rows are read in {found['read_s']:.1f} s)"
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
