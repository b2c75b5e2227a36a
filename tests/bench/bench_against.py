"""A release's own CPU time beside that of another checkout, the two alternating, each run in a process of its own.

    python tests/bench/bench_against.py ../other-checkout

The clock is the process's CPU time, so a busy machine moves it less than wall time. Three chains: a function that
answers at once (the release and nothing else), a prompt with a fake model and a parser, and the first with `ainvoke`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
OWNERS, MEMBERS, SHOTS = 10_000, 10, 4


def measure(releases: int) -> dict[str, float]:
    """CPU milliseconds of one release, for each chain. Runs with whichever package is on the path."""
    import numpy as np
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.language_models import FakeListChatModel
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import Runnable, RunnableLambda

    from langchain_dpicl import (
        DPAggregate,
        ExemplarStore,
        NoisyVote,
        PoissonExampleSelector,
        PrivacyBudget,
        PrivateEnsemble,
    )

    labels = ["red", "blue"]
    records = [{"input": f"text {i}", "output": labels[i % 2], "owner": f"o{i}"} for i in range(OWNERS)]
    vectors = np.random.default_rng(0).standard_normal((OWNERS, 16), dtype=np.float32)
    instant: Runnable[Any, Any] = RunnableLambda(lambda _: "red")
    prompt = ChatPromptTemplate.from_template("{examples}\n{input}\nColour:")
    chain = prompt | FakeListChatModel(responses=["red"]) | StrOutputParser()
    chains = [
        ("function", instant, False),
        ("prompt and model", chain, False),
        ("function, ainvoke", instant, True),
    ]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, member, is_async) in enumerate(chains):
            # A store of its own for each budget: two budgets on one store add up, which the package warns of.
            store = ExemplarStore.from_records(
                records,
                DeterministicFakeEmbedding(size=16),
                owner_key="owner",
                vectors=vectors,
                progress=False,
            )
            budget = PrivacyBudget(30.0, 1e-7, 100_000, ledger=f"sqlite:///{folder}/{number}.db", replay=False)
            ensemble = PrivateEnsemble(PoissonExampleSelector(store, MEMBERS, shots=SHOTS), member)
            release = ensemble | DPAggregate(NoisyVote(labels), budget)

            async def many(count: int, release: Any = release) -> None:
                for _ in range(count):
                    await release.ainvoke({"input": "which colour?"})

            def run(count: int, release: Any = release, is_async: bool = is_async, many: Any = many) -> None:
                if is_async:
                    asyncio.run(many(count))
                    return
                for _ in range(count):
                    release.invoke({"input": "which colour?"})

            run(releases)  # a receipt's epsilon is computed at 8 steps for each doubling of the count
            start = time.process_time()
            run(releases)
            found[name] = 1e3 * (time.process_time() - start) / releases
            budget.close()
    return found


def main(argv: list[str] | None = None) -> int:
    """Alternate, and print the median of the ratios (this checkout over the other)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", nargs="?", help="another checkout of the package")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--releases", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        print(json.dumps(measure(options.releases)))
        return 0
    if options.other is None:
        parser.error("the folder of another checkout is needed")

    def once(folder: Path) -> dict[str, float]:
        command = [sys.executable, __file__, "--measure", "--releases", str(options.releases)]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))

    ours, theirs = [], []
    for _ in range(options.rounds):
        theirs.append(once(Path(options.other).resolve()))
        ours.append(once(HERE))
    results = {
        name: {
            "ms": statistics.median(run[name] for run in ours),
            "other_ms": statistics.median(run[name] for run in theirs),
            "ratio": statistics.median(a[name] / b[name] for a, b in zip(ours, theirs, strict=True)),
        }
        for name in ours[0]
    }
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    for name, figures in results.items():
        print(f"{name:24s} " + "  ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
