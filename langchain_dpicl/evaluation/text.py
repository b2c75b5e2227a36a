"""How close texts are to their references, by the measures of the literature, from the libraries that define them."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_dpicl.errors import InvalidParameter


def text_scores(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> dict[str, float]:
    """Scores between 0 and 1, each the mean over the pairs; larger is closer.

    ROUGE-1, ROUGE-2 and ROUGE-L (F-measure with stemming, ``rouge-score``), BLEU (sentence BLEU with the effective
    order, ``sacrebleu``) and the normalised Levenshtein similarity (``rapidfuzz``). Where a prediction has several
    references, BLEU uses them together and the others take the best of them. ROUGE knows Latin letters and digits
    alone.
    """
    if isinstance(predictions, str) or len(predictions) != len(references) or not predictions:
        raise InvalidParameter("predictions", len(predictions), f"as many as there are references ({len(references)})")
    for i, reference in enumerate(references):
        texts = [reference] if isinstance(reference, str) else reference
        if not isinstance(predictions[i], str) or not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidParameter(f"references[{i}]", reference, "a text, or several, for a prediction that is a text")
    from rapidfuzz.distance import Levenshtein
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.bleu import BLEU

    rouge, bleu = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True), BLEU(effective_order=True)
    totals = dict.fromkeys(("rouge1", "rouge2", "rougeL", "bleu", "levenshtein"), 0.0)
    for prediction, reference in zip(predictions, references, strict=True):
        known = [reference] if isinstance(reference, str) else list(reference)
        found = rouge.score_multi(known, prediction)
        for name in ("rouge1", "rouge2", "rougeL"):
            totals[name] += found[name].fmeasure
        totals["bleu"] += bleu.sentence_score(prediction, known).score / 100
        totals["levenshtein"] += max(Levenshtein.normalized_similarity(prediction, each) for each in known)
    return {name: total / len(predictions) for name, total in totals.items()}
