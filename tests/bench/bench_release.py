"""What a release costs beyond its N model calls. Measures both sides in one run and prints the ratios.

- a release over the same N calls made by ``member.batch``: calls with a fixed latency of 20 ms, and the embedded model
- a release's own time with an instant member, at 1e4, 1e5 and 1e6 owners
- the store's memory over its vectors' size
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import Runnable, RunnableLambda

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.release.sealed import SealedRelease

LABELS = ["red", "blue"]
TEXT = "a ticket of ordinary length, about a hundred characters long, as people write them in a hurry"


@contextlib.contextmanager
def budget(releases: int = 100_000) -> Iterator[PrivacyBudget]:
    """A durable budget in a fresh SQLite file."""
    with tempfile.TemporaryDirectory() as folder:
        opened = PrivacyBudget(30.0, 1e-7, releases, ledger=f"sqlite:///{folder}/budget.db", replay=False)
        try:
            yield opened
        finally:
            opened.close()


def store(owners: int, dimension: int = 384) -> ExemplarStore:
    """One exemplar an owner, random vectors."""
    vectors = np.random.default_rng(0).standard_normal((owners, dimension), dtype=np.float32)
    records = [{"input": TEXT, "output": LABELS[i % 2], "owner": f"customer-{i:07d}"} for i in range(owners)]
    return ExemplarStore.from_records(
        records, DeterministicFakeEmbedding(size=dimension), owner_key="owner", vectors=vectors, progress=False
    )


def sealed(data: ExemplarStore, member: Runnable[Any, Any], opened: PrivacyBudget, members: int = 10) -> SealedRelease:
    """The usual chain."""
    ensemble = PrivateEnsemble(PoissonExampleSelector(data, members, shots=4), member)
    return ensemble | DPAggregate(NoisyVote(LABELS), opened)


def median_ms(call: Callable[[], object], runs: int) -> float:
    """The median of several runs, in milliseconds, after one that is not counted."""
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def over_batch(member: Runnable[Any, Any], data: ExemplarStore, runs: int, members: int = 10) -> dict[str, float]:
    """A release over ``member.batch`` of the same N inputs with the same concurrency, run in turn."""
    with budget() as opened:
        release = sealed(data, member, opened, members)
        buckets = release.ensemble.selector.sample()
        inputs = [{"input": "which colour?", "examples": bucket} for bucket in buckets]
        config: Any = {"max_concurrency": members}
        ours, theirs = [], []
        for i in range(runs + 1):
            start = time.perf_counter()
            member.batch(inputs, config)
            middle = time.perf_counter()
            release.invoke({"input": "which colour?"})
            end = time.perf_counter()
            if i:
                theirs.append(1e3 * (middle - start))
                ours.append(1e3 * (end - middle))
    return {
        "release_ms": statistics.median(ours),
        "batch_ms": statistics.median(theirs),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    }


def wait_20_ms(_: Any) -> str:
    """A model with a fixed latency."""
    time.sleep(0.020)
    return "red"


def real_member() -> Runnable[Any, Any]:
    """The embedded model, scoring labels."""
    from langchain_dpicl.local import local_llm
    from langchain_dpicl.members.scoring import LabelScorer

    return LabelScorer(local_llm(), LABELS)


def main(argv: list[str] | None = None) -> int:
    """Run everything; ``--json`` prints one object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--owners", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--no-model", action="store_true", help="leave the embedded model out")
    options = parser.parse_args(argv)
    small = store(10_000, 16)
    slow: Runnable[Any, Any] = RunnableLambda(wait_20_ms)
    results: dict[str, Any] = {"release over member.batch, 20 ms calls": over_batch(slow, small, 30)}
    if not options.no_model:
        results["release over member.batch, embedded model"] = over_batch(real_member(), small, 5)
    instant: Runnable[Any, Any] = RunnableLambda(lambda _: "red")
    for owners in options.owners:
        data = store(owners)
        with budget() as opened:
            release = sealed(data, instant, opened)
            own = median_ms(lambda chain=release: chain.invoke({"input": "which colour?"}), 50)  # type: ignore[misc]
        with data.reading() as view:
            ((size,),) = view.ask("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        results[f"own time, {owners:,} owners"] = {
            "own_ms": own,
            "memory_ratio": size / (4 * data.dimension * owners),
        }
        del data, release
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    for name, figures in results.items():
        print(f"{name:45s} " + "  ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
