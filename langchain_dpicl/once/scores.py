"""A language model's label scores, as features of a head beside those of the embedding.

**What they are.** `LabelScores` is public: a model, a template around one text, and labels. It gives a text the
model's log-probability of each label after the filled template (`LabelScorer`, with no example). `CalibratedScores`
makes features of these: they lose their mean over PUBLIC texts (contextual calibration: a model prefers some labels
whatever the text), are measured in units of their spread over the same texts, and are scaled to norm at most 1 if they
are longer. Embedding and scores share the norm of 1: x = (sqrt(1 - share) e, sqrt(share) s).

Private texts are scored one by one, each between two good probes (`once.probing`): `local_llm` answers one request at a
time, from an empty cache. From the log-probabilities on, all arithmetic is of single numbers, or exact (`once.steps`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableConfig

from langchain_dpicl.aggregators.votes import check_labels
from langchain_dpicl.calls.flow import Flow
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.members.scoring import LabelScorer
from langchain_dpicl.once.probing import Probes, TextRows, probes_of
from langchain_dpicl.once.steps import UNIT, Whole, bounded
from langchain_dpicl.privacy import checks
from langchain_dpicl.store.base import embedder_of

ScoreRow = list[float]
"""A text's log-probabilities of the labels, less their mean."""

_REACH = 3.0  # spreads from the mean, beyond which scores are scaled to norm 1
_FARTHEST = 32.0  # spreads: what is farther counts as this far
_LEAST_SPREAD = 2.0**-10
_FACTS = {"model", "labels", "template", "share", "top_logprobs", "mean", "spread"}


class LabelScores:
    """The source of a text's label scores: a model, a template and labels. All of it is public.

    Parameters
    ----------
    llm
        A LangChain completion or chat model whose server returns log-probabilities. Its answer to a prompt must not
        depend on other prompts, not in the last bit: see the module's text.
    labels
        The words that are scored; they need not be the head's labels. Distinct first words score best.
    template
        The prompt, with ``{input}`` once; it should end where a label begins. Runs of white space in a text become one
        space.
    share
        The part of a feature vector's squared norm that scores may take. The rest is the embedding's.
    top_logprobs
        Alternatives to ask for. Default: 100 of the embedded model, else 20.

    Raises `InvalidParameter`.
    """

    def __init__(
        self,
        llm: BaseLanguageModel[Any],
        labels: Sequence[str],
        template: str = "Input: {input}\nLabel:",
        *,
        share: float = 0.3,
        top_logprobs: int | None = None,
    ) -> None:
        if not isinstance(template, str) or template.count("{input}") != 1:
            raise InvalidParameter("template", template, "a text with {input} once")
        if top_logprobs is None:
            top_logprobs = 100 if getattr(llm, "accepts_shared_prefix", False) else 20
        filled = partial(_filled, template)
        self.scorer = LabelScorer(llm, labels, prompt=filled, calibrate=False, top_logprobs=top_logprobs)
        self.labels = self.scorer.labels
        self.template = template
        self.share = checks.real("share", share, above=0.0, below=1.0)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that decide the scores of a text, for the head's file."""
        return {
            "model": embedder_of(self.scorer.llm),
            "labels": list(self.labels),
            "template": self.template,
            "share": self.share,
            "top_logprobs": self.scorer.top_logprobs,
        }

    def row(self, text: str, config: RunnableConfig | None = None) -> ScoreRow:
        """The scores of one text. Raises what the model raises."""
        return self._centred(self.scorer.scores({self.scorer.query_key: text}, config))

    async def arow(self, text: str, config: RunnableConfig | None = None) -> ScoreRow:
        """The same, asynchronously."""
        return self._centred(await self.scorer.ascores({self.scorer.query_key: text}, config))

    def _centred(self, found: Mapping[str, float]) -> ScoreRow:
        logs = [math.log(max(found[label], 1e-30)) for label in self.labels]
        middle = math.fsum(logs) / len(logs)
        if not math.isfinite(middle):
            raise ValueError("no log-probabilities")
        return [each - middle for each in logs]

    @property
    def calls(self) -> TextRows:
        """The calls by which private texts are scored."""
        return TextRows(self.row, "label scores", "scoring", self.scorer.llm)

    def calibrated(self, texts: Sequence[str], progress: bool = True) -> CalibratedScores:
        """These scores with their mean and spread over public texts.

        Raises `ModelUnavailable` if a text cannot be scored, `UnsafeConfigurationError` if a text's scores depend on
        the texts before it, and `InvalidParameter` if the scores are the same for all texts.
        """
        found = self.calls.of_public(texts, progress)
        # The spread is sqrt(E |s - mean|^2), over the public texts.
        mean = [math.fsum(column) / len(found) for column in zip(*found, strict=True)]
        squares = [(each - middle) ** 2 for row in found for each, middle in zip(row, mean, strict=True)]
        spread = math.sqrt(math.fsum(squares) / len(found))
        if spread < _LEAST_SPREAD:
            raise InvalidParameter(
                "scores",
                f"a spread of {spread:g}",
                "scores that differ among the public texts",
            )
        probes = probes_of(texts, found, lambda row: max(row) > min(row))
        return CalibratedScores(self, mean, spread, probes)


def _filled(template: str, values: Mapping[str, Any]) -> str:
    return template.replace("{input}", " ".join(values["input"].split()))


@dataclass(frozen=True, eq=False)
class CalibratedScores:
    """Label scores with their ``mean`` and ``spread`` over public texts: features of norm at most 1. Public.

    ``probes``: two of the public texts and their scores, if these were made in this process.
    """

    scores: LabelScores
    mean: list[float]
    spread: float
    probes: Probes | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """For the head's file, from which `read` makes an equal object."""
        return {**self.scores.facts, "mean": self.mean, "spread": self.spread}

    @staticmethod
    def checked(facts: Mapping[str, Any]) -> dict[str, Any]:
        """The facts in a head's file. Raises whatever it may if they are not those of scores."""
        found = {
            **facts,
            "model": str(facts["model"]),
            "mean": [checks.real("mean", each) for each in facts["mean"]],
            "spread": checks.real("spread", facts["spread"], at_least=_LEAST_SPREAD),
        }
        check_labels("labels", found["labels"])
        if set(found) != _FACTS or len(found["mean"]) != len(found["labels"]):
            raise ValueError("other facts")
        return found

    @classmethod
    def read(cls, facts: dict[str, Any], llm: BaseLanguageModel[Any] | None) -> CalibratedScores:
        """From `checked` facts. Raises `InvalidParameter` for another model, by its name, or for none."""
        named = None if llm is None else embedder_of(llm)
        if llm is None or named != facts["model"]:
            raise InvalidParameter("llm", named, f"{facts['model']}, whose label scores the head looks at")
        settings = {name: facts[name] for name in ("labels", "template", "share", "top_logprobs")}
        return cls(LabelScores(llm, **settings), facts["mean"], facts["spread"])

    @property
    def size(self) -> int:
        """The number of features."""
        return len(self.mean)

    def rows(self, texts: Sequence[str], progress: bool) -> Flow[list[Any]]:
        """`TextRows.rows` of private texts, each between two good probes."""
        return self.scores.calls.rows(texts, progress, self.probes)

    def features(self, rows: Sequence[Any]) -> Whole:
        """Features of norm at most 1 in the units of `FeatureMap.features`. Zero for what is no `ScoreRow`.

        A score s gives (s - mean) / (3 spread), at most 32/3 either way. A row that is longer than 1 is scaled to 1.
        """
        unit = self.spread * _REACH / UNIT
        far = _FARTHEST / _REACH * UNIT
        found = np.zeros((len(rows), self.size))
        for place, row in enumerate(rows):
            if isinstance(row, list):
                found[place] = [
                    min(max((each - mean) / unit, -far), far) for each, mean in zip(row, self.mean, strict=True)
                ]
        return bounded(np.trunc(found), far * math.sqrt(self.size) + 1.0)

    def joined(self, features: Whole, rows: Sequence[Any]) -> Whole:
        """An embedding's features and these scores, of norm at most 1 together."""
        # As in `bounded`: the square of a row's norm is a whole number below 2^32 + 1.
        parts = (
            (features, 1.0 - self.scores.share),
            (self.features(rows), self.scores.share),
        )
        return np.concatenate([np.trunc(part * math.sqrt(share)) for part, share in parts], axis=1)
