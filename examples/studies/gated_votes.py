"""What members say with one example each: a table over (query, example), read in batches and kept in a pass file.

A query is asked with the example of every owner that the gate lets in, with those of a uniform sample of all owners
(what blind selection may show), and with none. An example's prompt is read once for all its queries. Like
`label_reader`, this is for data that are public in truth: the file holds what single examples made the model say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from gated_stream import Ints, Question
from numpy.typing import NDArray

from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.evaluation.batches import Batches, State
from langchain_dpicl.evaluation.passes import PassFile, Row, key_of
from langchain_dpicl.evaluation.studies import Scores
from langchain_dpicl.evaluation.tasks import Shape
from langchain_dpicl.privacy.noise import Randomness

_KEPT = 90_000  # tokens of examples whose states are kept; 46 KB each with SmolLM2-135M

Example = tuple[str, str]
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
        The owners that are most similar to the query, the nearest first, and their similarities.
    bar
        What the gate asks for: from a share of public texts to the similarity to the query that this share reaches. It
        is public, so whether an owner is eligible depends on its own example alone.
    read, scores
        Places in `near` whose examples the model read, and the labels' scores after each of them.
    blind
        The labels' scores after the examples of a uniform sample of all owners.
    empty
        The labels' scores after the prompt without a private example.
    """

    near: Ints
    similarity: NDArray[np.float64]
    bar: Mapping[float, float]
    read: Ints
    scores: Scores
    blind: Scores
    empty: Scores

    def question(self, share: float, label_of: Ints, leanings: Leanings, right: int) -> Question:
        """What members say behind the gate of this share, by scores divided by the prompts' public leanings.

        An owner whose example was not read gets the vote of the one that was read, has an example of the same label and
        is nearest to it in similarity; of any label where none has it.
        """
        kept = self.similarity >= self.bar[share]
        known = (self.scores / leanings.single).argmax(axis=1)
        votes = known[self._stand_ins(label_of)][kept]
        blind = (self.blind / leanings.public).argmax(axis=1)
        return Question(self.near[kept], votes, blind, int((self.empty / leanings.public).argmax()), right)

    def _stand_ins(self, label_of: Ints) -> Ints:
        """For every near owner the place in `read` of the one that stands for it: its own where it was read."""
        labels, of_read = label_of[self.near], label_of[self.near[self.read]]
        far = np.abs(self.similarity[:, None] - self.similarity[self.read][None, :])
        far = far + 10.0 * (labels[:, None] != of_read[None, :])  # similarities are at most 2 apart
        far[self.read, np.arange(len(self.read))] = -1.0
        found: Ints = far.argmin(axis=1)
        return found


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
        Labelled public examples: the prompt of a member without a private example shows them all, blind members have
        their example after them, and one at a time they show what a prompt with one example leans to.
    pool
        How many owners, drawn once, stand for all: a query's near owners are read where they are among them, and blind
        samples are drawn from them. States of so many examples fit into memory.
    nearest
        How many of the nearest owners are read for each query, in the pool or not.
    reach
        How many near owners are kept; no gate may let in more.
    """

    def __init__(
        self,
        file: PassFile,
        rows: Sequence[Row],
        public: Sequence[Example],
        readers: Callable[[], tuple[Reader, Reader]],
        vectors: Callable[[], tuple[Vectors, Vectors, Vectors]],
        randomness: Randomness,
        *,
        pool: int,
        nearest: int,
        reach: int,
        blind: int,
        shares: Sequence[float],
    ) -> None:
        self._file, self._rows, self._public, self._randomness = file, rows, public, randomness
        self._readers, self._vectors = cached(readers), cached(vectors)
        self._nearest, self._reach, self._blind, self._shares = nearest, min(reach, len(rows)), blind, shares
        if ("pool",) not in file:
            order = np.argsort(randomness.uniforms(len(rows)))
            file.add(("pool",), order[: min(pool, len(rows))].tolist())
        self._pool = np.array(file[("pool",)], np.int64)

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

    def __contains__(self, text: str) -> bool:
        """Whether this query was read."""
        return ("query", key_of(text)) in self._file

    def reading(self, number: int, text: str) -> Reading:
        """What there is of the query at this place of the vectors of queries."""
        key = ("query", key_of(text))
        if key not in self._file:
            self._file.add(key, self._read(number, text))
        near, similarity, bar, read, scores, blind, empty = self._file[key]
        return Reading(
            np.array(near, np.int64),
            np.array(similarity),
            dict(zip(self._shares, bar, strict=True)),
            np.array(read, np.int64),
            np.array(scores),
            np.array(blind),
            np.array(empty),
        )

    def _read(self, number: int, text: str) -> list[Any]:
        owners, queries, public = self._vectors()
        similarity = owners @ queries[number]
        near = np.argsort(-similarity, kind="stable")[: self._reach]
        bar = np.quantile(public @ queries[number], [1 - share for share in self._shares])
        widest = max(self._nearest, int((similarity >= bar.min()).sum()))
        in_pool = np.isin(near[:widest], self._pool) | (np.arange(min(widest, len(near))) < self._nearest)
        read = np.flatnonzero(in_pool)
        sample = self._pool[np.argsort(self._randomness.uniforms(len(self._pool)))[: self._blind]]
        single, shown = self._readers()
        scores = single.scores([self._example(i) for i in near[read]], text)
        *blind, empty = shown.scores([*(self._example(i) for i in sample), None], text)
        found = [_short(part) for part in (scores, np.array(blind), empty)]
        return [near.tolist(), _short(similarity[near]), _short(bar), read.tolist(), *found]

    def _example(self, owner: int) -> Example:
        return self._rows[owner].input, self._rows[owner].output


def cached(make: Callable[[], T]) -> Callable[[], T]:
    """Made when it is first asked for."""
    return functools.cache(make)


def _short(values: NDArray[np.float64]) -> Any:
    if values.ndim > 1:
        return [_short(row) for row in values]
    return [float(f"{value:.5g}") for value in values]
