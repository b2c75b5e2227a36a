"""The study of RAG by a FAQ, and by a model that reads a table's passages. The model is made up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rag_faq import BY_TOPIC, FAQ, TABLE, Faq, report, rows_of
from rag_study import Study, app
from rag_table import TableStudy
from test_rag_study import KIND, NAMES, PLACES, SETTINGS, Copying, Embedded, record

from langchain_dpicl import PrivacyBudget, release_collection, wrap_rag

FAQ_SETTINGS = {"epsilons": [300], "rows": 10, "eligible": 10, "tickets": 4, "draws": 2, "tables": 1}
RECORDS = [record(NAMES[i % 2]) for i in range(60)]


def study_in(folder: Path, model: Copying, **changes: Any) -> Study:
    settings = {**SETTINGS, "faq": {**FAQ_SETTINGS, **changes}}
    embeddings = Embedded("Alpha Beta Harbour Castle pub coffee restaurant which What kind sort")
    return Study(RECORDS, settings, folder, embeddings, lambda: model)  # type: ignore[arg-type,return-value]


def test_a_faq_and_a_table_before_a_model_answer_what_all_documents_say(tmp_path: Path) -> None:
    """At epsilon 300 noise changes nothing (e^-30). What was read is not read again."""
    study = study_in(tmp_path / "kept", Copying())
    rows = rows_of(study, TableStudy(RECORDS, study.settings))
    study.file.close()
    expected = [(TABLE, 300), *((name, epsilon) for name in (FAQ, BY_TOPIC) for epsilon in (300, "no noise"))]
    assert [(row["method"], row["epsilon"]) for row in rows] == expected
    assert {(row["right"], row["error"], row["kind"], row["near"]) for row in rows} == {(100, 0, 100, 100)}
    assert rows[1]["found"] == 100
    model = Copying()
    again = study_in(tmp_path / "kept", model)
    assert rows_of(again, TableStudy(RECORDS, again.settings)) == rows
    assert model.asked == []
    results = report(again, rows, "python", tmp_path / "report")
    assert json.loads((tmp_path / "report" / "faq.json").read_text()) == results
    assert "| 300 | 100.0 ± 0.0 |" in (tmp_path / "report" / "faq.md").read_text()


@pytest.mark.parametrize("tickets", [1, 2])
def test_an_owner_is_in_the_calls_of_no_more_topics_than_it_has_tickets(tickets: int, tmp_path: Path) -> None:
    """At a rate of 1 every eligible owner has a call; both topics of a name have the same ten."""
    study = study_in(tmp_path, Copying(), tickets=tickets)
    study.documents[:] = [f"{text}, {i}" for i, text in enumerate(study.documents)]
    faq = Faq(study)
    samples = faq.samples()
    calls = Counter(place for sample in samples for place in sample)
    assert len(samples) == len(faq.topics) == 4
    assert set(calls.values()) == {tickets}
    study.file.close()


def test_the_passages_are_those_of_a_released_collection(tmp_path: Path) -> None:
    """At epsilon 300, where noise changes nothing (e^-30): a topic, and below it what `wrap_rag` answers."""
    model = Copying()
    study = study_in(tmp_path / "kept", model)
    budget = PrivacyBudget(300, 1e-5, 4, f"sqlite:///{tmp_path}/b.db")
    chain = app(
        study.collection, 1, lambda prompt: model.greedy([(prompt, prompt.rpartition("Question")[2])], 1, "")[0]
    )
    wrapped = wrap_rag(
        chain, study.collection, study.candidates, budget,
        owner_key="owner", calls=10, pad_to=1, eligible=10, threshold=study.gates["calls"],
    )  # fmt: skip
    faq = Faq(study)
    released = release_collection(wrapped, faq.topics, embeddings=study.embeddings)
    budget.close()
    answers = [
        PLACES[name] if "near" in topic else KIND[name] for topic in faq.topics for name in NAMES if name in topic
    ]
    expected = {f"{topic}\n{answer}" for topic, answer in zip(faq.topics, answers, strict=True)}
    assert {each["text"] for each in released.store.values()} == expected
    study.file.close()
