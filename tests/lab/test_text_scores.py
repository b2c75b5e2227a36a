"""Texts in `evaluation/scores.py`: scores between 0 and 1, by the libraries that define them."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.embeddings import Embeddings

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.evaluation.scores import meaning_scores, text_scores

NAMES = {"rouge1", "rouge2", "rougeL", "bleu", "levenshtein"}
REFERENCE = "the patient reports a dry cough since monday"


def test_an_equal_text_scores_one_and_a_foreign_one_almost_nothing() -> None:
    assert text_scores([REFERENCE], [REFERENCE]) == dict.fromkeys(NAMES, pytest.approx(1.0))
    foreign = text_scores(["zzzz qqqq"], [REFERENCE])
    assert set(foreign) == NAMES
    assert all(0.0 <= value < 0.2 for value in foreign.values())


def test_the_scores_are_the_libraries_own() -> None:
    scores = text_scores(["police kill the gunman"], ["police killed the gunman"])
    assert scores["rouge1"] == scores["rouge2"] == scores["rougeL"] == pytest.approx(1.0), "with stemming"
    scores = text_scores(["the gunman kill police"], ["police killed the gunman"])
    assert scores["rouge1"] == pytest.approx(1.0)
    assert scores["rouge2"] == pytest.approx(1 / 3)
    assert scores["rougeL"] == pytest.approx(1 / 2)
    assert text_scores(["kitten"], ["sitting"])["levenshtein"] == pytest.approx(1 - 3 / 7)


def test_a_score_is_the_mean_over_the_pairs() -> None:
    one, other = text_scores([REFERENCE], [REFERENCE]), text_scores(["a cough"], [REFERENCE])
    both = text_scores([REFERENCE, "a cough"], [REFERENCE, REFERENCE])
    assert both == {name: pytest.approx((one[name] + other[name]) / 2) for name in NAMES}


def test_the_best_of_several_references_counts() -> None:
    several = text_scores([REFERENCE], [["nothing of the kind", REFERENCE]])
    assert several == dict.fromkeys(NAMES, pytest.approx(1.0))
    worse = text_scores([REFERENCE], ["nothing of the kind"])
    assert all(worse[name] < several[name] for name in NAMES)


@pytest.mark.parametrize("prediction", ["", " ", "...", "日本語", "\x00", "a"])
def test_an_odd_prediction_scores_low_and_breaks_nothing(prediction: str) -> None:
    scores = text_scores([prediction], [REFERENCE])
    assert set(scores) == NAMES
    assert all(0.0 <= value < 0.3 for value in scores.values())
    assert all(0.0 <= value <= 1.0 + 1e-9 for value in text_scores([prediction], [prediction]).values())


@pytest.mark.parametrize(("predictions", "references"), [([], []), (["a"], []), ([], ["a"]), (["a"], ["a", "b"])])
def test_lists_that_do_not_match_are_refused(predictions: Any, references: Any) -> None:
    with pytest.raises(InvalidParameter, match="references") as caught:
        text_scores(predictions, references)
    assert caught.value.parameter == "predictions"


def test_meaning_is_the_cosine_with_the_nearest_reference() -> None:
    class Corners(Embeddings):
        """Along one axis for "a", along the other for "b", between them for both."""

        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [[3.0 * ("a" in text), 3.0 * ("b" in text)] for text in texts]

        def embed_query(self, text: str) -> list[float]:
            raise NotImplementedError

    found = meaning_scores(["a", "ab", "a", " "], ["a", "a", ["b", "ab"], "b"], Corners())
    assert found == pytest.approx([1.0, 0.5**0.5, 0.5**0.5, 0.0])
