"""What one release costs apart from the models, against the papers' own samplers. Both sides run here, one after the
other, and the ratios are printed.

- the embedding mean, 384 dimensions, N = 100 members, 100 candidates: from the embeddings to the sentence, without the
  embedding model
- keywords by the joint exponential mechanism, N = 100 members, (d, k) = (1e5, 100) and (1e3, 10), with the secure
  generator: three shapes of counts; and against the papers' sampler (`tests/joint_em_oracle.py`), once with its running
  product as a Python loop, as published, and once with all of it in NumPy
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from figures import show
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl.aggregators import EmbeddingMean
from langchain_dpicl.aggregators.keywords import sample_sequence
from langchain_dpicl.privacy import SecureRandomness

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
oracle = importlib.import_module("joint_em_oracle")

MEMBERS, EPS0 = 100, 1.59
TARGETS = {(100_000, 100): 120.0, (1_000, 10): 2.0}
"""The most milliseconds that one release may take, by (d, k)."""

Figures = dict[str, float]


def milliseconds(function: Callable[[], Any], repeats: int) -> float:
    """Median of the repeats."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return 1000.0 * statistics.median(seconds)


# Keywords: the joint exponential mechanism ----------------------------------------------------------------------------


def count_shapes(d: int) -> dict[str, NDArray[np.int64]]:
    generator = np.random.default_rng(0)
    return {
        "zipf": np.minimum(MEMBERS, 1.3 * MEMBERS / np.arange(1, d + 1) ** 0.7).astype(np.int64),
        "uniform": generator.integers(0, MEMBERS + 1, d),
        "nearly all zero": np.where(np.arange(d) < d // 500, generator.integers(1, MEMBERS + 1, d), 0),
    }


def joint_em(repeats: int, with_oracle: bool) -> Figures:
    """Ours on every shape; the papers' sampler on the first, once where it takes seconds."""
    figures: Figures = {}
    for d, k in TARGETS:
        name = f"joint EM, d={d}, k={k}"
        for shape, counts in count_shapes(d).items():
            release = partial(sample_sequence, counts, k, EPS0, SecureRandomness())
            figures[f"{name}, {shape}, ms"] = milliseconds(release, repeats)
        if with_oracle:
            counts, ours = count_shapes(d)["zipf"], figures[f"{name}, zipf, ms"]
            for way, looped in (("as published", True), ("all in NumPy", False)):
                release = partial(oracle.algorithm5, counts, k, EPS0, np.random.default_rng(), looped=looped)
                theirs = milliseconds(release, 1 if d * k > 1e6 else 5)
                figures[f"{name}, papers' sampler {way}, ms"] = theirs
                figures[f"{name}, times faster than papers' sampler {way}"] = theirs / ours
    return figures


# The embedding mean ---------------------------------------------------------------------------------------------------

DIMENSION, CANDIDATES, MEAN_TARGET = 384, 100, 40.0
MEAN = f"embedding mean, {DIMENSION} dimensions, N={MEMBERS}, {CANDIDATES} candidates, ms"


class Sentences(Embeddings):
    """Ready vectors, so that no model is timed."""

    def __init__(self) -> None:
        self.rows = np.random.default_rng(0).normal(size=(1000, DIMENSION)).tolist()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.rows[int(text)] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def embedding_mean(repeats: int, with_oracle: bool) -> Figures:
    """Clipping and rounding N embeddings, summing, noise, and the nearest candidate."""
    candidates = [str(i) for i in range(CANDIDATES)]
    mean = EmbeddingMean(Sentences(), candidates).prepare({}, {})

    def release() -> None:
        mean.aggregate([mean.encode(text) for text in candidates], 3.0, SecureRandomness())

    return {MEAN: milliseconds(release, repeats)}


# All measurements: one function each, (repeats, with_oracle) to figures -----------------------------------------------

MEASUREMENTS: list[Callable[[int, bool], Figures]] = [joint_em, embedding_mean]


def met(figures: Figures) -> bool:
    """Whether every release keeps its target."""
    return figures[MEAN] < MEAN_TARGET and all(
        figures[f"joint EM, d={d}, k={k}, {shape}, ms"] < target
        for (d, k), target in TARGETS.items()
        for shape in count_shapes(1)
    )


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit with 1 if one misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-oracle", action="store_true", help="leave out what others' samplers take")
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args(argv)
    figures: Figures = {}
    for measurement in MEASUREMENTS:
        figures |= measurement(args.repeats, not args.no_oracle)
    show(figures, args.json)
    return 0 if met(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
