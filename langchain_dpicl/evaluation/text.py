"""How close texts are to their references, by the measures of the literature, from the libraries that define them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from langchain_dpicl.errors import InvalidParameter

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings


def meaning_scores(
    predictions: Sequence[str], references: Sequence[str | Sequence[str]], embeddings: Embeddings
) -> list[float]:
    """Return each prediction's cosine with the nearest of its references, by their embeddings; 0 for no text."""
    known = [_several(each) for each in references]
    texts = list(dict.fromkeys([*predictions, *(text for each in known for text in each)]))
    vectors = np.array(embeddings.embed_documents(texts))
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    place = {text: i for i, text in enumerate(texts)}
    return [
        max(float(vectors[place[prediction]] @ vectors[place[text]]) for text in each) if prediction.strip() else 0.0
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
    from rapidfuzz.distance import Levenshtein
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.bleu import BLEU

    rouge, bleu = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True), BLEU(effective_order=True)
    measured: dict[str, list[float]] = {name: [] for name in ("rouge1", "rouge2", "rougeL", "bleu", "levenshtein")}
    for prediction, reference in zip(predictions, references, strict=True):
        known = _several(reference)
        for name, found in rouge.score_multi(known, prediction).items():
            measured[name].append(found.fmeasure)
        measured["bleu"].append(bleu.sentence_score(prediction, known).score / 100)
        measured["levenshtein"].append(max(Levenshtein.normalized_similarity(prediction, each) for each in known))
    return measured


def _several(references: str | Sequence[str]) -> list[str]:
    return [references] if isinstance(references, str) else list(references)
