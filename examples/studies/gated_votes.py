"""What members say with one example each: a table over (query, example), read in batches and kept in a pass file.

A query is asked with the examples of owners that the gate lets in, drawn uniformly from all of these, and with none.
An example's prompt is read once for all its queries. Like `label_reader`, this is for data that are public in truth:
the file holds what single examples made the model say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.lab.evaluation.batches import Batches, State
from langchain_dpicl.lab.evaluation.passes import PassFile, key_of
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.studies import Scores
from langchain_dpicl.lab.evaluation.tasks import Shape
from langchain_dpicl.privacy.noise import Randomness

_KEPT = 90_000  # tokens of examples whose states are kept; 46 KB each with SmolLM2-135M

Example = tuple[str, str]
Ints = NDArray[np.int64]
Vectors = NDArray[np.float32]
T = TypeVar("T")


class Reader(Protocol):
    """Asks a model for the labels' scores after single examples."""

    def scores(self, examples: Sequence[Example | None], query: str) -> Scores:
        """(examples, labels); None is the prompt without one."""


class BatchedReader:
    """A model of transformers in this process. What it has read of an example serves all queries, while it is kept.

    The instruction is read once for all prompts. Each piece is tokenised on its own, so pieces have to meet where a
    tokeniser splits the whole prompt too.
    """

    def __init__(self, model: TransformersLogits, labels: Sequence[str], shape: Shape) -> None:
        self._batches, self._labels, self._shape = Batches(model), labels, shape
        # Tokenisers split an empty line before a word into its two line breaks: the pieces meet between them.
        self._joint = "\n"
        self._instruction = shape.prefix(()).removesuffix(self._joint)
        network = self._batches.network
        first = [*network.first, *network.tokens(self._instruction)]
        self._start = self._batches.states([first], None)[0] if first else None
        self._known: dict[Example, State] = {}
        self._size = 0

    def scores(self, examples: Sequence[Example | None], query: str) -> Scores:
        """See `Reader`."""
        self._learn([example for example in examples if example is not None])
        states = [self._start if each is None else self._whole(self._known[each]) for each in examples]
        tokens, asked = self._batches.network.tokens, self._shape.ask(query)
        first, after = tokens(asked), tokens(self._joint + asked)
        endings = [first if each is None and not self._instruction else after for each in examples]
        rows = self._batches.scores(endings, states)
        return np.array([self._batches.label_scores(row, self._labels) for row in rows], np.float64)

    def _learn(self, examples: Sequence[Example]) -> None:
        """Read the examples that are not known; forget the oldest where they are too many."""
        fresh = [example for example in dict.fromkeys(examples) if example not in self._known]
        past = 0 if self._start is None else self._start[0][0].shape[1]
        texts = [self._shape.prefix([example]).removesuffix(self._joint) for example in fresh]
        tokens = [self._batches.network.tokens(text[len(self._instruction) :]) for text in texts]
        states = self._batches.states(tokens, self._start)
        for example, state in zip(fresh, states, strict=True):
            self._known[example] = [(keys[:, past:].clone(), values[:, past:].clone()) for keys, values in state]
            self._size += state[0][0].shape[1] - past
        needed = set(examples)
        for example in [each for each in self._known if each not in needed]:
            if self._size <= _KEPT:
                break
            self._size -= self._known.pop(example)[0][0].shape[1]

    def _whole(self, state: State) -> State:
        import torch

        if self._start is None:
            return state
        return [
            (torch.cat([before[0], own[0]], dim=1), torch.cat([before[1], own[1]], dim=1))
            for before, own in zip(self._start, state, strict=True)
        ]


@dataclass(frozen=True)
class Reading:
    """What was read of one query.

    Attributes
    ----------
    near, similarity
        The owners that the widest gate lets in, the nearest first, and their similarities to the query.
    bar
        What the gate asks for: from a share of public texts to the similarity to the query that this share reaches. It
        is public, so whether an owner is eligible depends on its own example alone. A share of 1 admits every owner.
    reads
        From a share to how many owners behind its gate were read.
    read, scores
        Places in `near` of the owners whose examples the model read, in an order drawn uniformly, and the labels'
        scores after each of them.
    empty
        The labels' scores after the prompt without a private example.
    """

    near: Ints
    similarity: NDArray[np.float64]
    bar: Mapping[float, float]
    reads: Mapping[float, int]
    read: Ints
    scores: Scores
    empty: Scores

    def eligible(self, share: float) -> Ints:
        """The owners that the gate of this share lets in."""
        return self.near[self.similarity >= self.bar[share]]

    def votes(self, share: float, leaning: Scores) -> tuple[Ints, Ints]:
        """Owners drawn uniformly from those behind the gate of this share, and what each one's call says.

        That is the label with the largest score, divided by the prompts' leaning.
        """
        kept = np.flatnonzero(self.similarity[self.read] >= self.bar[share])[: self.reads[share]]
        return self.near[self.read[kept]], (self.scores[kept] / leaning).argmax(axis=1)


@dataclass(frozen=True)
class Leanings:
    """What the prompts lean to, from public texts alone: of one example, and of the public examples together."""

    single: Scores
    public: Scores


class Table:
    """Reads queries into a pass file, and what the file has, from there.

    Parameters
    ----------
    rows
        The examples, one for each owner.
    public
        Labelled public examples: the prompt without a private example shows them all, and one at a time they show what
        a prompt with one example leans to.
    reads
        From a share of the gate to how many of the owners behind it are read for each query.
    pool
        How many owners, drawn once, stand for all where examples are drawn: those that are read often cost less.
    """

    def __init__(
        self,
        file: PassFile,
        rows: Sequence[Row],
        public: Sequence[Example],
        readers: Callable[[], tuple[Reader, Reader]],
        vectors: Callable[[], tuple[Vectors, Vectors]],
        randomness: Randomness,
        reads: Mapping[float, int],
        pool: int | None = None,
    ) -> None:
        self._file, self._rows, self._public, self._randomness = file, rows, public, randomness
        self._readers, self._vectors, self._reads = cached(readers), cached(vectors), reads
        if pool is not None and ("pool",) not in file:
            file.add(("pool",), np.argsort(randomness.uniforms(len(rows)))[:pool].tolist())

    def leanings(self, neutral: Sequence[str]) -> Leanings:
        """Geometric means of the scores after neutral public texts."""
        for text in neutral:
            if ("neutral", key_of(text)) not in self._file:
                single, public = self._readers()
                found = [single.scores(list(self._public), text), public.scores([None], text)]
                self._file.add(("neutral", key_of(text)), [_short(each) for each in found])
        held = [self._file[("neutral", key_of(text))] for text in neutral]

        def mean(part: int) -> Scores:
            found: Scores = np.exp(np.log(np.maximum([each[part] for each in held], 1e-6)).mean(axis=(0, 1)))
            return found

        return Leanings(mean(0), mean(1))

    def reading(self, text: str, vector: Callable[[], Vectors], but: int | None = None) -> Reading:
        """What there is of a query; ``but`` is the owner whose own text it is, if it is one's."""
        key = ("query" if but is None else "own query", key_of(text))
        if key not in self._file:
            self._file.add(key, self._read(text, vector(), but))
        near, similarity, bar, read, scores, empty = self._file[key]
        return Reading(
            np.array(near, np.int64),
            np.array(similarity),
            dict(zip(self._reads, bar, strict=True)),
            self._reads,
            np.array(read, np.int64),
            np.array(scores),
            np.array(empty),
        )

    def _read(self, text: str, vector: Vectors, but: int | None) -> list[Any]:
        owners, public = self._vectors()
        similarity = owners @ vector
        if but is not None:
            similarity[but] = -np.inf
        alike = public @ vector
        bar = np.array([np.quantile(alike, 1 - share) if share < 1 else -2.0 for share in self._reads])
        order = np.argsort(-similarity, kind="stable")
        near = order[: int((similarity >= bar.min()).sum())]
        drawn = np.argsort(self._randomness.uniforms(len(near)))
        if ("pool",) in self._file:
            drawn = drawn[np.isin(near[drawn], self._file[("pool",)])]
        behind = [similarity[near[drawn]] >= each for each in bar]
        kept = [each & (np.cumsum(each) <= count) for each, count in zip(behind, self._reads.values(), strict=True)]
        read = drawn[np.logical_or.reduce(kept)]
        single, shown = self._readers()
        examples = [(self._rows[i].input, self._rows[i].output) for i in near[read].tolist()]
        found = [_short(part) for part in (single.scores(examples, text), shown.scores([None], text)[0])]
        return [near.tolist(), _short(similarity[near]), _short(bar), read.tolist(), *found]


def cached(make: Callable[[], T]) -> Callable[[], T]:
    """Made when it is first asked for."""
    return functools.cache(make)


def _short(values: NDArray[np.floating[Any]]) -> Any:
    if values.ndim > 1:
        return [_short(row) for row in values]
    return [float(f"{value:.5g}") for value in values]
