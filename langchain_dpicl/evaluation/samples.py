"""Who takes part in an evaluation: the release's own sampling, and the baselines' examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from langchain_core.embeddings import Embeddings

from langchain_dpicl.evaluation.data import Row, check_size
from langchain_dpicl.evaluation.passes import PassFile
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.selection.selector import PoissonExampleSelector
from langchain_dpicl.store import ExemplarStore

Pairs = Sequence[tuple[str, str]]
"""Examples of one prompt: (input, output)."""


class Sampler:
    """Draws the examples of prompts from rows; every row is its own owner.

    A sample's prompts are: one for each member, with its bucket; one without examples; one with ``few_shots`` private
    examples; and where there are public rows, one with as many of them.
    """

    def __init__(self, rows: Sequence[Row], public: Sequence[Row], *, members: int, shots: int, few_shots: int) -> None:
        check_size(rows, members, shots)
        store = ExemplarStore.from_records(
            [{"input": row.input, "output": row.output, "row": i} for i, row in enumerate(rows)],
            _NoEmbeddings(),
            input_key="input",
            output_key="output",
            vectors=np.zeros((len(rows), 1), np.float32),  # nothing is looked for by similarity
        )
        self._selector = PoissonExampleSelector(store, members, shots=shots)
        self._rows, self._public, self._few = rows, public, few_shots
        self._randomness = SecureRandomness()

    @property
    def members(self) -> int:
        """How many buckets."""
        return self._selector.members

    def draw(self, number: int, file: PassFile) -> list[Pairs]:
        """The prompts of this sample, which the file keeps: drawn once."""
        key = ("sample", number)
        if key not in file:
            buckets = [[int(each["row"]) for each in bucket] for bucket in self._selector.sample()]
            file.add(key, [buckets, self._some(len(self._rows)), self._some(len(self._public))])
        buckets, few_shot, public = file[key]
        prompts = [self._pairs(self._rows, bucket) for bucket in (*buckets, (), few_shot)]
        return [*prompts, self._pairs(self._public, public)] if self._public else prompts

    def _some(self, count: int) -> list[int]:
        order: list[int] = np.argsort(self._randomness.uniforms(count))[: self._few].tolist()
        return order

    @staticmethod
    def _pairs(rows: Sequence[Row], chosen: Sequence[int]) -> Pairs:
        return [(rows[i].input, rows[i].output) for i in chosen]


class _NoEmbeddings(Embeddings):
    """For a store that embeds nothing."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[0.0] for _ in texts]

    def embed_query(self, text: str) -> list[float]:
        return [0.0]
