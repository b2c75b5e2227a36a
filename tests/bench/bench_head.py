"""What a head costs: its fit, and its answers.

- the fit of 100,000 owners of one record each in 384 dimensions, six labels: seconds, at most 10
- answers a second from vectors: at least 20,000
- texts a second by ``batch`` over texts a second of bare ``embed_documents``, taking turns: at least .9
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time

import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import ExemplarStore, PrivacyBudget, PrivateHead
from langchain_dpicl.local import local_embeddings

OWNERS, DIMENSION, LABELS = 100_000, 384, [f"label {i}" for i in range(6)]


def fitted(owners: int) -> tuple[PrivateHead, float]:
    """A head, and the seconds of its fit."""
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((owners, DIMENSION), dtype=np.float32)
    outputs = [LABELS[i] for i in vectors[:, :6].argmax(axis=1)]
    texts = [f"text {i}" for i in range(owners)]
    model = DeterministicFakeEmbedding(size=DIMENSION)
    store = ExemplarStore.from_texts(texts, model, outputs=outputs, vectors=vectors, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        budget = PrivacyBudget(1.0, 1e-6, {"head": 1}, ledger=f"sqlite:///{folder}/b.db")
        start = time.perf_counter()
        head = PrivateHead.fit(store, LABELS, budget, progress=False)
        seconds = time.perf_counter() - start
        budget.close()
    return head, seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--owners", type=int, default=OWNERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    head, seconds = fitted(options.owners)
    asked = np.random.default_rng(1).standard_normal((20_000, DIMENSION), dtype=np.float32)
    start = time.perf_counter()
    head.answers(asked)
    rate = len(asked) / (time.perf_counter() - start)
    head.embeddings = local_embeddings()
    ratios = []
    for number in range(options.rounds + 1):
        texts = [f"Could you send me number {number} of {i} again, please? It did not arrive." for i in range(200)]
        start = time.perf_counter()
        head.embeddings.embed_documents([f"{text} " for text in texts])
        bare = time.perf_counter() - start
        start = time.perf_counter()
        head.batch(list(texts))
        ratios.append(bare / (time.perf_counter() - start))
    found = {
        "owners": options.owners,
        "fit_seconds": seconds,
        "answers_a_second": rate,
        "text_ratio": statistics.median(ratios[1:]),
    }
    lines = [f"{key:20s} {value:,.3f}" for key, value in found.items()]
    print(json.dumps(found, indent=2) if options.json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
