"""One pass of a model over a classification task: what every member says, before any vote and any noise.

Each sample of owners is drawn once and asked all queries. A query's answer then has the law that it has with a sample
of its own, so accuracy has the same mean; between samples it varies more. What the model has read of a member's
examples serves all queries.

A pass holds members' answers in the open, so it is for data that are public in truth, or that stay with whoever owns
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableLambda
from numpy.typing import NDArray

from langchain_dpicl.evaluation.passes import PassFile, once_more
from langchain_dpicl.evaluation.samples import Pairs
from langchain_dpicl.evaluation.tasks import ClassificationTask
from langchain_dpicl.members.scoring import LabelScorer
from langchain_dpicl.private import boundary

if TYPE_CHECKING:
    from langchain_dpicl.evaluation.label_batches import LabelBatches

Scores = NDArray[np.float64]

Ask = Callable[[str], Scores]
"""From a query to (prompts, labels): the scores after each prompt's examples. A row of zeros where the model failed."""


class LabelReader(Protocol):
    """Asks a model for the labels' scores."""

    def prompts(self, examples: Sequence[Pairs]) -> Ask:
        """Prompts with these examples, to be asked many queries."""


class ChainReader:
    """Through LangChain: any model that `LabelScorer` takes, called as a release calls it."""

    def __init__(self, llm: BaseLanguageModel[Any], task: ClassificationTask, *, at_once: int = 8) -> None:
        shape = task.shape

        def prompt(values: dict[str, Any]) -> str:
            examples = [(each["text"], each["label"]) for each in values["examples"]]
            return shape.prefix(examples) + shape.ask(values["input"])

        # The embedded model returns as many alternatives as asked.
        alternatives = 100 if getattr(llm, "accepts_shared_prefix", False) else 20
        scorer = LabelScorer(llm, task.labels, prompt=prompt, calibrate=False, top_logprobs=alternatives)
        self._member = boundary.seal(RunnableLambda(scorer.scores))
        self._labels, self._at_once = task.labels, at_once

    def prompts(self, examples: Sequence[Pairs]) -> Ask:
        """See `LabelReader`."""

        buckets = [[{"text": text, "label": label} for text, label in pairs] for pairs in examples]

        def ask(query: str) -> Scores:
            requests = [({"input": query}, bucket) for bucket in buckets]
            answers = boundary.run_private(self._member, requests, max_concurrency=self._at_once)
            nothing = dict.fromkeys(self._labels, 0.0)
            found = [nothing if each is boundary.ABSTAIN else each for each in answers]
            return np.array([[each[label] for label in self._labels] for each in found])  # type: ignore[index]

        return ask


class BatchReader:
    """Reads the prompts of a query in batches, by a model of transformers in this process, loaded at first use."""

    def __init__(self, model: str, task: ClassificationTask, *, threads: int | None = None) -> None:
        self._model, self._threads, self._task = model, threads, task
        # Tokenisers part an empty line before a word into its two line breaks: the pieces meet between them.
        self._joint = "\n" if task.shape.separator.endswith("\n") else ""

    @cached_property
    def _batches(self) -> LabelBatches:
        from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
        from langchain_dpicl.evaluation.label_batches import LabelBatches

        model = TransformersLogits(self._model, threads=self._threads)
        return LabelBatches(model, self._task.labels, self._task.shape.prefix(()).removesuffix(self._joint))

    def prompts(self, examples: Sequence[Pairs]) -> Ask:
        """See `LabelReader`."""
        shape = self._task.shape
        instruction = len(shape.prefix(()).removesuffix(self._joint))
        prefixes = [shape.prefix(pairs).removesuffix(self._joint)[instruction:] for pairs in examples]
        scores = self._batches.after(prefixes, self._joint)
        return lambda query: scores(shape.ask(query))


@dataclass(frozen=True)
class Said:
    """What the model said with one sample of owners; rows are prompts.

    Attributes
    ----------
    queries
        (queries, prompts, labels) scores.
    neutral
        (texts, prompts, labels) scores after the texts to calibrate on.
    members
        How many of the prompts are members'. The next has no examples, the one after it as many private ones as it is
        compared with, and the last, where there is one more, public ones.
    """

    queries: Scores
    neutral: Scores
    members: int

    def labels(self, prompts: slice, *, calibrate: bool) -> NDArray[np.int64]:
        """(queries, prompts) positions of the label with the highest score; -1 where the model failed.

        Calibrated scores are divided by the geometric mean of those after the neutral texts, as by `LabelScorer`; a
        prompt that failed after one of these abstains always.
        """
        values = self.queries[:, prompts]
        answered = values.any(axis=2)
        if calibrate and len(self.neutral):
            neutral = self.neutral[:, prompts]
            answered = answered & neutral.any(axis=2).all(axis=0)
            values = values / np.exp(np.log(np.where(neutral > 0, neutral, 1.0)).mean(axis=0))
        return np.where(answered, values.argmax(axis=2), -1)


def read_sample(
    reader: LabelReader,
    examples: Sequence[Pairs],
    members: int,
    queries: Sequence[str],
    neutral: Sequence[str],
    file: PassFile,
    keys: Callable[[str], tuple[str, int]],
    progress: Callable[[], Any],
) -> Said:
    """What the file has for each text, else what the model says now, which the file then has.

    ``examples`` are those of the prompts, members' first. Raises `ModelUnavailable` where the model failed on every
    prompt; nothing is kept of that text.
    """
    ask: Ask | None = None
    for text in (*neutral, *queries):
        if keys(text) not in file:
            ask = ask or reader.prompts(examples)
            found = _answers(reader, ask, examples, text)
            if not found.any():
                raise file.no_answer()
            file.add(keys(text), [[float(f"{score:.5g}") for score in row] for row in found])
        progress()
    shape = (-1, len(examples), len(file[keys(queries[0])][0]))

    def table(texts: Sequence[str]) -> Scores:
        return np.array([file[keys(text)] for text in texts], float).reshape(shape)

    return Said(table(queries), table(neutral), members)


def _answers(reader: LabelReader, ask: Ask, examples: Sequence[Pairs], text: str) -> Scores:
    """The scores after each prompt, where each that failed among others has been asked once more."""

    def rows(scores: Scores) -> list[Scores | None]:
        return [row if row.any() else None for row in scores]

    found = ask(text)
    answers = once_more(rows(found), lambda some: rows(reader.prompts([examples[i] for i in some])(text)))
    return np.array([np.zeros(found.shape[1]) if row is None else row for row in answers])
