"""One pass of a model over a classification task: each member's label scores, before any vote and any noise.

Each sample of owners is drawn once and gets all queries. A query's answer then has the law that it has with a sample
of its own, so accuracy has the same mean; between samples it varies more. The model reads a member's examples once for
all queries. A pass holds members' answers in the open: for data that are public in truth, or stay with their owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableLambda
from numpy.typing import NDArray

from langchain_dpicl.evaluation.passes import PassFile, once_more
from langchain_dpicl.evaluation.plan import Pairs
from langchain_dpicl.evaluation.tasks import ClassificationTask
from langchain_dpicl.members.scoring import LabelScorer
from langchain_dpicl.private import boundary

Scores = NDArray[np.float64]

Ask = Callable[[str], Scores]
"""From a query to (prompts, labels): the scores after each prompt's examples. A row of zeros if the model failed."""


class LabelReader(Protocol):
    """Asks a model for the labels' scores."""

    def prompts(self, examples: Sequence[Pairs]) -> Ask:
        """Return a function that asks many queries after each of these examples."""


class ChainReader:
    """Asks through LangChain: any model that `LabelScorer` takes, called as a release calls it."""

    def __init__(self, llm: BaseLanguageModel[Any], task: ClassificationTask, *, at_once: int = 8) -> None:
        shape = task.shape

        def prompt(values: dict[str, Any]) -> str:
            examples = [(each["text"], each["label"]) for each in values["examples"]]
            return shape.prefix(examples) + shape.ask(values["input"])

        # The embedded model returns any number of alternatives.
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


@dataclass(frozen=True)
class SampleScores:
    """What the model said with one sample of owners; rows are prompts.

    Attributes
    ----------
    queries
        (queries, prompts, labels) scores.
    neutral
        (texts, prompts, labels) scores after the texts to calibrate on.
    members
        How many of the prompts are members'. The next has no examples, the one after it ``few_shots`` private ones,
        and a last one, if there is any, public ones.
    """

    queries: Scores
    neutral: Scores
    members: int

    def labels(self, prompts: slice, *, calibrate: bool) -> NDArray[np.int64]:
        """Return (queries, prompts) positions of the label with the highest score; -1 if the model failed.

        Calibrated scores are divided by the geometric mean of those after the neutral texts, as by `LabelScorer`; a
        prompt that failed after one of these always abstains.
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
) -> SampleScores:
    """Return the file's scores for each text; ask the model for those that are missing, and add them to the file.

    ``examples`` are those of the prompts, members' first. A prompt that fails among others is asked once more. Raises
    `ModelUnavailable` if the model failed on every prompt; nothing is kept of that text.
    """
    ask: Ask | None = None

    def rows(scores: Scores) -> list[Scores | None]:
        return [row if row.any() else None for row in scores]

    def ask_again(text: str, some: list[int]) -> list[Scores | None]:
        return rows(reader.prompts([examples[i] for i in some])(text))

    for text in (*neutral, *queries):
        if keys(text) not in file:
            ask = ask or reader.prompts(examples)
            found = ask(text)
            answers = once_more(rows(found), partial(ask_again, text))
            if all(row is None for row in answers):
                raise file.no_answer()
            table = [np.zeros(found.shape[1]) if row is None else row for row in answers]
            file.add(keys(text), [[float(f"{score:.5g}") for score in row] for row in table])
        progress()
    shape = (-1, len(examples), len(file[keys(queries[0])][0]))
    said, alone = (np.array([file[keys(text)] for text in texts], float).reshape(shape) for texts in (queries, neutral))
    return SampleScores(said, alone, members)
