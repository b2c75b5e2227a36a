"""Opening a collection of very many owners on PostgreSQL, and a blind sample of 40 of them.

No vector is read, so each has two dimensions, and the server itself makes the rows. It is `pgvector_server`'s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import ExemplarStore, PoissonExampleSelector

sys.path.append(str(Path(__file__).parents[1]))
import pgvector_server

MODEL = DeterministicFakeEmbedding(size=2)
ROWS = (
    """INSERT INTO dpicl_exemplars_owners (number, name_hash, name)
        SELECT i, encode(sha256(name), 'hex'), name
        FROM (SELECT i, convert_to('customer-' || i, 'UTF8') AS name FROM generate_series(0, {last}) i) made""",
    """INSERT INTO dpicl_exemplars_exemplars (id, owner, entry, embedding, content)
        SELECT i, i, 1, '[1,0]', convert_to('{{"text":"a ticket of ordinary length, as people write them"}}', 'UTF8')
        FROM generate_series(0, {last}) i""",
    "UPDATE dpicl_collections SET entry = 1, next_id = {last} + 1, next_number = {last} + 1",
    "VACUUM ANALYZE",
)


def milliseconds(work: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--owners", type=int, default=3_000_000)
    options = parser.parse_args()
    with pgvector_server.server() as server, pgvector_server.database(server) as url:
        ExemplarStore.empty(MODEL, url, owner_key="owner", vectors_in_memory=False).close()
        pgvector_server.ask(url, *(each.format(last=options.owners - 1) for each in ROWS))
        opened: list[ExemplarStore] = []
        opening = milliseconds(lambda: opened.append(ExemplarStore.open(url, MODEL, vectors_in_memory=False)))
        (store,) = opened
        selector = PoissonExampleSelector(store, 20, rate=40 / options.owners, max_exemplars=10)
        first = milliseconds(selector.sample)
        later = statistics.median(milliseconds(selector.sample) for _ in range(50))
        store.close()
    print(
        f"{options.owners:,} owners on PostgreSQL: opened in {opening:.0f} ms, the first blind sample of 40 takes "
        f"{first:.0f} ms, a later one {later:.1f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
