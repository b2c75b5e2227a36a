"""The quality of answers: measures, their errors, and the scores that every table and picture is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.extras import require

MEASURES: Mapping[str, str] = {
    "accuracy": "accuracy",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "bleu": "BLEU",
    "levenshtein": "Levenshtein",
    "meaning": "meaning",
}
"""Measures in the order of the tables, with their names there."""

HEAD, HEAD_PUBLIC = "head", "head (public texts)"
"""The methods of a head: on the embeddings themselves, and on the principal directions of public texts."""


def share_error(shares: Sequence[float], questions: int) -> float:
    """The standard error of the mean of shares of right answers, one share for each run.

    It has the error of so many questions, which all runs share, and that of the noise among the runs.
    """
    mean = float(np.mean(shares))
    noise = float(np.var(shares, ddof=1)) / len(shares) if len(shares) > 1 else 0.0
    return math.sqrt(mean * (1.0 - mean) / questions + noise)


@dataclass(frozen=True)
class Value:
    """One measure.

    - ``mean``: in per cent.
    - ``deviation``: the standard deviation over runs: samples of owners times draws of noise. NaN for a single run.
    - ``error``: the standard error over queries, of their means over runs. NaN for a single query. If all queries of
      a run share its noise (a head), the error of the noise is in it too.
    """

    mean: float
    deviation: float = math.nan
    error: float = math.nan

    @classmethod
    def of(cls, table: Any) -> Value:
        """From a table of runs by queries, entries between 0 and 1; six decimals."""
        found = 100 * np.asarray(table, float)
        return cls(
            round(float(found.mean()), 6),
            _deviation(found.mean(axis=1)),
            _deviation(found.mean(axis=0), math.sqrt(found.shape[1])),
        )

    @classmethod
    def of_shares(cls, shares: Sequence[float], questions: int) -> Value:
        """From the share of right answers of each run, whose noise all its questions share; six decimals."""
        found = 100 * np.asarray(shares, float)
        return cls(
            round(float(found.mean()), 6),
            _deviation(found),
            round(100 * share_error(shares, questions), 6) if questions > 1 else math.nan,
        )


def _deviation(values: NDArray[np.float64], over: float = 1.0) -> float:
    """Return the values' standard deviation, divided by ``over``, to six decimals. NaN for a single value."""
    return round(float(values.std(ddof=1)) / over, 6) if len(values) > 1 else math.nan


@dataclass(frozen=True)
class Score:
    """The measures of one method.

    - ``method``: its name; the same for all epsilons.
    - ``epsilon``: of all releases of the plan together; None for a method that is not private.
    - ``values``: measures by name: accuracy; rouge1, rouge2, rougeL, bleu, levenshtein, meaning.
    - ``runs``, ``queries``: how many of each.
    - ``facts``: public numbers: sigma, members, shots, rate, releases, candidates, ..., and ``flipped``, the per cent
      of releases that differ from the answer of the same members without noise.
    - ``study``: the varied number, for a score of an ablation (members, releases, shots, candidates, ...); "" for the
      main table.
    - ``texts``: the first run's texts for the first queries, if they are to be shown.
    - ``least_weights``: for each token of an answer the mean over the queries of the least weight of a sampled owner
      (figure 3 of Flemings et al. 2025), for a method that mixes. None of it is private: for data that are public.
    """

    method: str
    epsilon: float | None
    values: Mapping[str, Value]
    runs: int
    queries: int
    facts: Mapping[str, float] = field(default_factory=dict)
    study: str = ""
    texts: Sequence[str] = ()
    least_weights: Sequence[float] = ()

    def mean(self, measure: str) -> float:
        """The measure's mean."""
        return self.values[measure].mean


def text_values(
    runs: Sequence[Sequence[str]], references: Sequence[Sequence[str]], embeddings: Embeddings
) -> dict[str, Value]:
    """Return `text_measures` and ``meaning`` of texts by run and query, against the queries' references."""
    texts = [text for run in runs for text in run]
    wide = [*references] * len(runs)
    measures = text_measures(texts, wide) | {"meaning": meaning_scores(texts, wide, embeddings)}
    return {name: Value.of(np.reshape(found, (len(runs), -1))) for name, found in measures.items()}


def meaning_scores(
    predictions: Sequence[str], references: Sequence[str | Sequence[str]], embeddings: Embeddings
) -> list[float]:
    """Return each prediction's cosine with the nearest of its references, by their embeddings; 0 for no text."""
    known = [_several(each) for each in references]
    texts = list(dict.fromkeys([*predictions, *(text for each in known for text in each)]))
    vectors = np.array(embeddings.embed_documents(texts))
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    vector_of = dict(zip(texts, vectors, strict=True))
    return [
        max(float(vector_of[prediction] @ vector_of[text]) for text in each) if prediction.strip() else 0.0
        for prediction, each in zip(predictions, known, strict=True)
    ]


def text_scores(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> dict[str, float]:
    """Return the mean of each of `text_measures` over the pairs."""
    return {name: float(np.mean(values)) for name, values in text_measures(predictions, references).items()}


def text_measures(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> dict[str, list[float]]:
    """Return scores between 0 and 1 for each pair; larger is closer.

    ROUGE-1, ROUGE-2 and ROUGE-L (F-measure with stemming, ``rouge-score``), BLEU (sentence BLEU with the effective
    order, ``sacrebleu``) and the normalised Levenshtein similarity (``rapidfuzz``). Of several references, BLEU uses
    all together and the other measures the best. ROUGE knows Latin letters and digits alone.
    """
    if isinstance(predictions, str) or len(predictions) != len(references) or not predictions:
        raise InvalidParameter("predictions", len(predictions), f"as many as there are references ({len(references)})")
    levenshtein = require("rapidfuzz.distance", "eval").Levenshtein
    rouge_scorer = require("rouge_score.rouge_scorer", "eval")
    bleu = require("sacrebleu.metrics.bleu", "eval").BLEU(effective_order=True)
    rouge = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    measured: dict[str, list[float]] = {name: [] for name in ("rouge1", "rouge2", "rougeL", "bleu", "levenshtein")}
    for prediction, reference in zip(predictions, references, strict=True):
        known = _several(reference)
        for name, found in rouge.score_multi(known, prediction).items():
            measured[name].append(found.fmeasure)
        measured["bleu"].append(bleu.sentence_score(prediction, known).score / 100)
        measured["levenshtein"].append(max(levenshtein.normalized_similarity(prediction, each) for each in known))
    return measured


def _several(references: str | Sequence[str]) -> list[str]:
    return [references] if isinstance(references, str) else list(references)


# -- in tables and sentences -------------------------------------------------------------------------------------------


def main_measure(scores: Sequence[Score]) -> str:
    """Accuracy, or ROUGE-L."""
    return "accuracy" if "accuracy" in scores[0].values else "rougeL"


def words_of(score: Score) -> str:
    """A score's epsilon in words. Without one, only a prompt that holds no private example is public."""
    if score.epsilon is not None:
        return f"epsilon {score.epsilon:g}"
    return "public" if score.method.startswith(("zero-shot", "public ")) else "not private"


def ordered(scores: Sequence[Score]) -> list[Score]:
    """Methods that are never private first; then each other method, first without noise, then by epsilon."""
    private = {score.method for score in scores if score.epsilon is not None}
    first = list(dict.fromkeys(score.method for score in scores))
    return sorted(scores, key=lambda score: (score.method in private, first.index(score.method), score.epsilon or 0.0))
