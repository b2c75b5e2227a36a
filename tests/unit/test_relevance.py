"""The threshold of the relevance gate, suggested from public texts.

A text of these tests is an angle in degrees, and its embedding the point of the unit circle there: the similarity of
two texts is the cosine of the difference of their angles.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings

from langchain_dpicl import ExemplarStore, InvalidParameter, ModelUnavailable, PoissonExampleSelector, suggest_threshold


class Angles(Embeddings):
    """Points of the unit circle. A text that is no angle raises."""

    def embed_query(self, text: str) -> list[float]:
        angle = math.radians(float(text))
        return [math.cos(angle), math.sin(angle)]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


def cosine(one: float, other: float) -> float:
    return math.cos(math.radians(one - other))


def test_the_suggested_threshold_finds_the_wanted_share() -> None:
    """At it the mean share is the wanted one at least, and a little above it is less: by counting."""
    queries, texts = ["0", "33", "71"], [str(angle) for angle in range(-180, 180, 7)]
    for share in (0.02, 0.1, 0.5, 1.0):
        found = suggest_threshold(Angles(), queries, texts, share=share, owners=5000)
        cosines = np.array([[cosine(float(q), float(t)) for t in texts] for q in queries])
        assert (cosines >= found.threshold).mean() == pytest.approx(found.share)
        assert found.share >= share - 1e-12
        assert (cosines >= found.threshold + 2e-4).mean() < share
        assert found.eligible == round(5000 * found.share)
        assert found.low <= found.eligible <= found.high


def test_a_number_of_owners_is_a_share_of_all() -> None:
    texts = [str(angle) for angle in range(-180, 180, 7)]
    by_number = suggest_threshold(Angles(), ["0"], texts, eligible=500, owners=5000)
    assert by_number == suggest_threshold(Angles(), ["0"], texts, share=0.1, owners=5000)
    assert 500 <= by_number.eligible <= 600
    assert f"eligible={by_number.eligible}" in repr(by_number)
    assert str(by_number.threshold) in repr(by_number)


def test_an_owner_of_several_texts_counts_once_by_its_best() -> None:
    texts, owners = ["0", "5", "10", "60", "90"], ["a", "a", "a", "b", "c"]
    found = suggest_threshold(Angles(), ["0"], texts, share=2 / 3, owner_of=owners)
    assert found.threshold == pytest.approx(0.5, abs=1e-3)
    assert found.owners == 3
    assert found.eligible == 2
    assert suggest_threshold(Angles(), ["0"], texts, share=2 / 5).threshold == pytest.approx(cosine(0, 5), abs=1e-3)


def test_equally_near_texts_come_together_and_the_answer_says_so() -> None:
    found = suggest_threshold(Angles(), ["0"], ["30"] * 10, share=0.1)
    assert (found.share, found.eligible) == (1.0, 10)


def test_the_spread_over_the_queries_is_told() -> None:
    texts = ["0"] * 90 + ["180"] * 10
    found = suggest_threshold(Angles(), ["0"] * 5 + ["180"] * 5, texts, share=0.5)
    assert (found.low, found.high, found.eligible) == (10, 90, 50)


def test_a_model_that_fails_on_public_texts_is_told_apart() -> None:
    with pytest.raises(ModelUnavailable):
        suggest_threshold(Angles(), ["no angle"], ["0"], share=1.0)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({}, "share"),
        ({"share": 0.5, "eligible": 2, "owners": 10}, "share"),
        ({"share": 0.0}, "share"),
        ({"share": 1.5}, "share"),
        ({"share": 0.01}, "share"),
        ({"eligible": 2}, "owners"),
        ({"eligible": 11, "owners": 10}, "eligible"),
        ({"eligible": 0, "owners": 10}, "eligible"),
        ({"share": 0.5, "owners": 0}, "owners"),
        ({"share": 0.5, "owner_of": ["a"]}, "owner_of"),
        ({"share": 0.5, "owner_of": 3}, "owner_of"),
        ({"share": 0.5, "owner_of": ["a", None, "b"]}, "owner_of[1]"),
        ({"share": 0.5, "queries": []}, "queries"),
        ({"share": 0.5, "texts": "0"}, "texts"),
        ({"share": 0.5, "texts": ["0", ""]}, "texts[1]"),
    ],
)
def test_bad_input_of_a_suggestion_is_named(options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        suggest_threshold(Angles(), **{"queries": ["0", "9"], "texts": ["0", "40", "80"], **options})
    assert caught.value.parameter == parameter


def test_a_selector_takes_both_numbers() -> None:
    records = [{"input": str(angle), "output": "x", "owner": f"owner-{angle}"} for angle in (0, 10, 20, 70, 180)]
    store = ExemplarStore.from_records(records, Angles(), owner_key="owner")
    found = suggest_threshold(Angles(), ["0", "50"], ["0", "30", "60", "180"], share=0.5, owners=5)
    selector = PoissonExampleSelector(store, 2, shots=1, threshold=found.threshold, eligible=found.eligible)
    assert selector.rate == min(1.0, 2 / found.eligible)
