"""The study of RAG: its questions, what is kept, and that its calls are those of `wrap_rag`. The model is made up."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_fakes import WordEmbeddings
from rag_questions import KINDS, Fact, facts_of, said
from rag_report import report
from rag_study import Study, app

from langchain_dpicl import PrivacyBudget, wrap_rag
from langchain_dpicl.calls.flow import run
from langchain_dpicl.decoding import Demonstration

NAMES, PLACES = ("Alpha", "Beta"), {"Alpha": "Harbour", "Beta": "Castle"}
KIND = {"Alpha": "pub", "Beta": "coffee shop"}
WORDS = ["", "Harbour", "Castle", *KINDS]
SETTINGS: dict[str, Any] = {
    "owners": 20, "public": 20, "least": 3, "every": 1, "samples": 2, "kappa": 1,
    "draws": 2, "epsilon": 300, "delta": 1e-5, "plans": [2, 20], "token_plans": [20],
    "max_tokens": 3, "top_k": 6, "passages": 4, "k": [1, 2],
    "calls": {"share": 0.5, "eligible": 10, "rows": 10}, "tokens": {"share": 0.5, "eligible": 10, "rows": 10},
}  # fmt: skip


def record(name: str) -> dict[str, str]:
    text = f"{name} is a {KIND[name]} near {PLACES[name]}"
    return {"input": f"name[{name}], near[{PLACES[name]}]", "output": text}


class Copying:
    """Says what a document has; of a place where the question has "place" at its end, else of a kind."""

    name, vocabulary, end_tokens = "copying", len(WORDS), frozenset({0})

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def fits(self, demonstration: str, shared: str, tokens: int) -> bool:
        return len(demonstration) < 1000

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(WORDS[token] for token in tokens if token)

    def token(self, text: str, shared: str) -> int:
        self.asked.append((text, shared))
        among = WORDS[1:3] if "which place" in shared else WORDS[3:]
        return next((WORDS.index(each) for each in among if each in text), 0)

    def greedy(self, prompts: Sequence[tuple[str, str]], tokens: int, stop: str) -> list[str]:
        return [WORDS[self.token(text, shared)] for text, shared in prompts]

    def session(self, shared: str, demonstrations: Sequence[Demonstration], *, steps: int) -> Any:
        return CopyingAnswer(self, shared, demonstrations)

    def forget(self, keys: Iterable[Hashable]) -> None:
        pass


class CopyingAnswer:
    def __init__(self, model: Copying, shared: str, demonstrations: Sequence[Demonstration]) -> None:
        self.model, self.shared, self.demonstrations = model, shared, demonstrations

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Any:
        texts = ["", *(self.demonstrations[row].text for row in rows)]
        said = [0 if released else self.model.token(text, self.shared) for text in texts]
        return np.array([[60.0 * (word == token) for word in range(len(WORDS))] for token in said], np.float32)

    def close(self) -> None:
        pass


class Embedded(WordEmbeddings):
    """Words without question marks."""

    def embed_query(self, text: str) -> list[float]:
        return super().embed_query(text.replace("?", " "))


def study_in(folder: Path, model: Copying) -> Study:
    records = [record(NAMES[i % 2]) for i in range(60)]
    embeddings = Embedded("Alpha Beta Harbour Castle pub coffee restaurant which What")
    return Study(records, SETTINGS, folder, embeddings, lambda: model)  # type: ignore[arg-type,return-value]


def test_a_fact_is_what_most_documents_of_a_name_say() -> None:
    records = [record("Alpha")] * 3 + [{**record("Alpha"), "output": "Alpha, a restaurant near Castle, or Harbour"}] * 2
    found = {(fact.name, fact.kind): fact.right for fact in facts_of(records, ["Castle", "Harbour"], 3)}
    assert found == {("Alpha", "near"): "Harbour", ("Alpha", "kind"): "pub"}
    assert facts_of(records, ["Castle", "Harbour"], 4) == []  # no value is in four documents
    split = [record("Alpha"), {**record("Alpha"), "output": "Alpha is a restaurant"}]
    assert [fact.kind for fact in facts_of(split, ["Harbour"], 1)] == ["near"]  # no kind is in more than half


def test_an_answer_is_right_with_the_right_value_alone() -> None:
    fact = Fact("The Boat", "near", "Inn", ("Castle", "Inn", "The Boat"))
    answers = {"The Boat is near the inn.": 1, "Dinner": 0, "Castle, or Inn": 0, "": 0, "The Boat": 0}
    assert {answer: fact.score(answer) for answer in answers} == answers
    assert said("a pub, or coffee shop", KINDS, "") == ["coffee shop", "pub"]


def test_every_way_is_scored_and_a_stopped_study_asks_nothing_again(tmp_path: Path) -> None:
    """At epsilon 300 noise changes nothing (e^-30). Owners' documents agree; without them the model says nothing."""
    study = study_in(tmp_path / "kept", Copying())
    rows = study.scores()
    study.file.close()
    assert len(rows) == len(study.questions) == 8
    for row in rows:
        assert row["scores"].pop("no documents") == 0.0
        assert row["scores"] == dict.fromkeys(row["scores"], 1.0)
    assert {"over_documents, 20", "release_collection", "all documents, 2"} < rows[0]["scores"].keys()
    model = Copying()
    again = study_in(tmp_path / "kept", model)
    assert [row["scores"]["release_collection"] for row in again.scores()] == [1.0] * 8
    assert model.asked == []
    results = report(again.scores(), again.facts() | {"command": "python"}, tmp_path / "report")
    assert json.loads((tmp_path / "report" / "results.json").read_text()) == results
    assert results["guess"] == pytest.approx({"near": 50.0, "kind": 100 / 3})
    assert (tmp_path / "report" / "rag.png").exists()
    assert "| (b) over_documents | 20 | 100.0 ± 0.0 |" in results["table"]


def test_the_calls_are_those_of_wrap_rag(tmp_path: Path) -> None:
    """At a rate of 1 both have a call for each of the ten owners who are eligible."""
    study = study_in(tmp_path, Copying())
    fact, question = next(each for each in study.questions if each[0].kind == "near")
    budget = PrivacyBudget(300, 1e-5, 20, f"sqlite:///{tmp_path}/b.db")
    chain = app(study.collection, 1, lambda prompt: next(word for word in ("Harbour", "Castle") if word in prompt))
    wrapped = wrap_rag(
        chain, study.collection, study.candidates, budget,
        owner_key="owner", calls=10, pad_to=1, eligible=10, threshold=study.gates["calls"],
    )  # fmt: skip
    selector = wrapped.ensemble.selector
    values = {"question": question}
    found = run(wrapped.ensemble.outputs(values, 1.0, query=selector.embed_query(values)))
    assert found == study.written(study.calls(question)[0]) == [fact.right] * 10
