"""A head's label scores from the embedded model: a record's are the same bits whoever is scored before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import ExemplarStore, LabelScores, PrivacyBudget, PrivateHead
from langchain_dpicl.calls.flow import run
from langchain_dpicl.errors import PrivacyWarning
from langchain_dpicl.local import local_embeddings, local_llm, models
from langchain_dpicl.once.probing import BROKEN

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"
TEMPLATE = "Review: A moving film.\nSentiment: positive\n\nReview: {input}\nSentiment:"
WORDS = ["negative", "positive"]
PRAISE = ["wonderful", "charming", "brilliant", "lovely", "superb"]
BLAME = ["awful", "boring", "stupid", "terrible", "dreadful"]
STARTS = ["What a", "Such a", "This was a", "I saw a", "Truly a"]


def texts_of(start: str) -> list[str]:
    return [f"{start} {word} film." for pair in zip(PRAISE, BLAME, strict=True) for word in pair]


def test_an_embedded_model_that_stops_is_opened_anew_and_no_score_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp ends whenever the third text is asked. Scores have the same bits in any order, and without others."""
    llm = local_llm(MODEL, context=512)
    scores = LabelScores(llm, WORDS, TEMPLATE)
    calibrated, texts = scores.calibrated(["A film.", "A dreadful film."]), texts_of("It is a")[:4]
    whole, real = run(calibrated.rows(texts, progress=False)), scores.row
    assert run(calibrated.rows(texts[::-1], progress=False)) == whole[::-1]
    assert [scores.row(texts[2]), *run(scores.calls.rows(texts[3:], progress=False))] == whole[2:], "as for a question"

    def row(text: str, config: Any = None) -> list[float]:
        if text == texts[2]:
            (place,) = (place for place in models._servers if place[1] == 512)
            models._servers[place] = replace(models._servers[place], native=None)
        return real(text, config)

    monkeypatch.setattr(scores, "row", row)
    assert run(calibrated.rows(texts, progress=False)) == [*whole[:2], BROKEN, whole[3]]
    assert local_llm(MODEL, context=512).invoke("1, 2,", max_tokens=2) == llm.invoke("1, 2,", max_tokens=2)


@pytest.mark.slow
def test_a_head_learns_from_the_embedded_models_scores(tmp_path: Path) -> None:
    """Ten public texts calibrate; the head is right on words that no record has. Epsilon is 1,000."""
    keys: dict[str, Any] = {"input_key": "text", "output_key": "label", "progress": False}
    records = [
        {"text": text, "label": ["good", "bad"][i % 2]}
        for i, text in enumerate(text for start in STARTS for text in texts_of(start))
    ]
    store = ExemplarStore.from_records(records, local_embeddings(), **keys)
    scores = LabelScores(local_llm(MODEL), WORDS, TEMPLATE, share=0.9)
    budget = PrivacyBudget(1000.0, 0.01, {"head": 1}, ledger=f"sqlite:///{tmp_path}/b.db")
    with pytest.warns(PrivacyWarning, match="50 owners"):
        head = PrivateHead.fit(
            store, ["bad", "good"], budget, public=texts_of("It is a"), scores=scores, progress=False
        )
    budget.close()
    head.save(tmp_path / "head.npz")
    loaded = PrivateHead.load(tmp_path / "head.npz", local_embeddings(), llm=local_llm(MODEL))
    asked = ["an excellent , moving story", "a bad , tiresome story", "a great film", "a horrible film"]
    assert [answer["label"] for answer in loaded.batch(asked)] == ["good", "bad", "good", "bad"]
