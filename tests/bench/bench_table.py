"""What a table costs: 100,000 documents of as many owners, 10,000 cells, read by words without a model.

- the release: seconds, at most 20
- the same reading, counted without privacy: seconds, and the release's time over it
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter

import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import ExemplarStore, PrivacyBudget, release_table
from langchain_dpicl.once.tables_reading import ONLY, Domain

DOCUMENTS, TOPICS, VALUES = 100_000, 200, 50
SECONDS = 20.0


def documents(number: int, topics: list[str], values: list[str]) -> list[str]:
    """Texts of some 20 words that name a topic and two values."""
    draw = np.random.default_rng(0)
    filler = "the place by the old bridge was busy that evening and we came to like the food there"
    found = []
    for topic, first, second in zip(
        draw.integers(len(topics), size=number),
        draw.integers(len(values), size=number),
        draw.integers(len(values), size=number),
        strict=True,
    ):
        found.append(f"{topics[topic]}: {filler}, {values[first]} and {values[second]}.")
    return found


def plain_seconds(texts: list[str], topics: list[str], values: list[str]) -> float:
    """The time of counting the same pairs without privacy."""
    start = time.perf_counter()
    domain = Domain(tuple(topics), {ONLY: tuple(values)})
    counts = Counter[tuple[int, int]]()
    for text in texts:
        counts.update(domain.pairs(*domain.named(text)))
    return time.perf_counter() - start


def released_seconds(texts: list[str], topics: list[str], values: list[str]) -> tuple[float, float]:
    """The time of the release from a store that is there, and the processor's."""
    rows = [{"text": text, "owner": str(i)} for i, text in enumerate(texts)]
    vectors = np.ones((len(rows), 2), np.float32)  # which nothing reads
    store = ExemplarStore.from_records(
        rows,
        DeterministicFakeEmbedding(size=2),
        input_key="text",
        output_key=None,
        owner_key="owner",
        vectors=vectors,
        progress=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        budget = PrivacyBudget(1.0, 1e-6, {"sum": 1}, ledger=f"sqlite:///{folder}/b.db")
        start = time.perf_counter()
        began = time.process_time()
        release_table(store, topics, values, budget, read="named")
        worked = time.process_time() - began
        seconds = time.perf_counter() - start
        budget.close()
    return seconds, worked


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and say whether the target is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    topics = [f"topic number{i}" for i in range(TOPICS)]
    values = [f"value{i}" for i in range(VALUES)]
    texts = documents(options.documents, topics, values)
    plain = plain_seconds(texts, topics, values)
    released, worked = released_seconds(texts, topics, values)
    found = {
        "documents": options.documents,
        "cells": TOPICS * VALUES,
        "release_seconds": released,
        "release_cpu_seconds": worked,
        "plain_seconds": plain,
        "ratio": released / plain,
    }
    lines = [f"{key:20s} {value:,.3f}" for key, value in found.items()]
    print(json.dumps(found, indent=2) if options.json else "\n".join(lines))
    return int(released > SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
