"""``dpicl demo`` with a fake model: an ensemble and a head side by side, what each cost and can still give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluation_fakes import WordEmbeddings
from langchain_core.runnables import RunnableLambda

import langchain_dpicl
from langchain_dpicl import local
from langchain_dpicl.cli import main
from langchain_dpicl.demo.inbox import DEMO_LABELS, DESKS, INPUT_KEY

WORDS = {
    "pharmacy": "prescription tablets pharmacy refill",
    "billing": "bill charge invoice payment insurance",
    "appointments": "appointment visit doctor schedule",
}


class Telling(WordEmbeddings):
    """Counts the desks' words, whatever stands around them."""

    def embed_query(self, text: str) -> list[float]:
        return super().embed_query("".join(c if c.isalpha() else " " for c in text.lower()))


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that knows the desks' words as soon as it sees an example, and embeddings that count them."""

    def desk(values: dict[str, Any]) -> str:
        text = values[INPUT_KEY].lower()
        if not values["examples"]:
            return next(iter(DESKS.values()))
        return DESKS[max(WORDS, key=lambda desk: sum(word in text for word in WORDS[desk].split()))]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPICL_DEMO_CUSTOMERS", "120")
    monkeypatch.setattr(local, "local_embeddings", lambda: Telling(" ".join(WORDS.values())))
    monkeypatch.setattr(local, "local_llm", lambda *_, **__: None)
    monkeypatch.setattr(langchain_dpicl, "LabelScorer", lambda *_, **__: RunnableLambda(desk))


def run(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """At a large epsilon, so that the noise is nearly nothing."""
    assert main(["demo", "--epsilon", "100", "--held-out", "3", *more]) == 0
    return capsys.readouterr().out


def test_both_answer_every_question_at_the_same_epsilon(fakes: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--json"))
    ensemble, head = found["ensemble"], found["head"]
    assert found["held_out"] == 3
    assert set(found["accuracy"]) == {"private", "private, by a head", "ensemble, NOT private", "zero-shot"}
    assert [set(entry) >= {"private", "head", "zero_shot", "receipt"} for entry in found["answers"]] == [True] * 3
    assert {entry["head"] for entry in found["answers"]} <= set(DEMO_LABELS)
    assert head["accuracy"] > 0.8, "the words tell the desks apart"
    assert (head["answers"], head["remaining"]) == (60, None)
    assert (ensemble["answers"], ensemble["remaining"]) == (6, 94)
    assert head["receipt"]["epsilon"] == head["epsilon_spent"] == found["epsilon"] == 100.0
    assert head["receipt"]["delta"] == found["delta"] == found["answers"][0]["receipt"]["delta"]
    assert 0.0 < ensemble["epsilon_spent"] < 100.0, "six answers of a hundred"
    assert head["sigma"] > 0.0


@pytest.mark.filterwarnings("error::langchain_dpicl.errors.PrivacyWarning")
def test_people_see_the_price_of_each_and_that_both_add_up(
    fakes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--ledger", f"sqlite:///{tmp_path}/kept.db"]
    out = run(capsys, *given)
    assert out.count("private, by a head") == 3 + 1
    rows = {line.strip()[:17].strip(): line.split()[-2:] for line in out.splitlines()}
    assert rows["ensemble"] == ["ensemble", "head"]
    assert rows["answers left"] == ["no", "limit"]
    assert "94     no limit" in out
    assert "has also sorted all 60 new messages" in out
    assert "both together count epsilon 200." in out
    assert "88     no limit" in run(capsys, *given), "the ledger goes on counting the ensemble's answers"


def test_a_negative_number_of_questions_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--held-out", "-5", "--json"]) == 1
    assert "--held-out" in json.loads(capsys.readouterr().out)["message"]
