"""The study of typed answers: what is read, asked once, and made of it. Model and embeddings are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import extract_study
import pytest
from ears import Ears
from extract_study import ALL, CALLS, FIELDS, FORM, OWN, Record, prompt
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableLambda

from langchain_dpicl.lab.evaluation.report import write_index

FOODS = ("English", "French", "Italian")


class ByFood(Embeddings):
    """A direction for each food."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float(food in text) for food in (*FOODS, "")] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that a model got which answers with its last example's JSON, and without examples with nonsense."""
    asked = Ears()

    def model(text: str, **_: Any) -> str:
        asked.append(text)
        found = [line.removeprefix("JSON:") for line in text.splitlines() if line.startswith("JSON:")]
        return found[-2] if len(found) > 1 else ' {"stars": 3}'

    monkeypatch.setattr(extract_study, "local_llm", lambda *_, **__: RunnableLambda(model))
    monkeypatch.setattr(extract_study, "local_embeddings", ByFood)
    return asked


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """40 owners of three records, one of each food; 6 questions of Italian places. Samples are empty once in 10^12."""

    def write(name: str, rows: list[tuple[str, str]]) -> str:
        found = [
            {"input": f"name[{n}], food[{food}], customer rating[low]", "output": f"{n} cooks {food}."}
            for n, food in rows
        ]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in found))
        return str(tmp_path / name)

    data = write("train.jsonl", [(f"Place {i}", FOODS[i % 3]) for i in range(120)])
    test = write("test.jsonl", [(f"New place {i // 2}", "Italian") for i in range(12)])
    sizes = ["--owners", "40", "--records", "3", "--calls", "20", "--questions", "6", "--draws", "5"]
    return ["--data", data, "--test", test, "--output", str(tmp_path / "study" / "extract"), *sizes]


def test_a_row_says_its_fields_and_what_is_missing_is_none() -> None:
    row = {"input": "name[A], food[Fast food], customer rating[3 out of 5], area[riverside]", "output": "A  is fast."}
    assert json.loads(Record.of(row).answer) == {"food": "Fast food", "area": "riverside", "rating": 3}
    assert Record.of(row).text == "A is fast."
    bare = Record.of({"input": "name[A], priceRange[high], near[B]", "output": "A."})
    assert json.loads(bare.answer) == dict.fromkeys(FIELDS)


def test_a_prompt_describes_the_form_only_without_examples() -> None:
    assert FORM in prompt({"examples": [], "input": "A."})
    shown = [{"input": "B.", "output": "{}"}]
    assert prompt({"examples": shown, "input": "A."}) == "Text: B.\nJSON: {}\n\nText: A.\nJSON:"


def test_each_question_is_asked_once_and_other_plans_cost_no_call(
    options: list[str], prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extract_study.main([*options, "--releases", "50", "--epsilon", "1", "8", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    folder = tmp_path / "study" / "extract"
    assert json.loads((folder / "results.json").read_text()) == results
    rows = {(row["method"], row["epsilon"]): row for row in results["scores"]}
    means = {key: {name: value["mean"] for name, value in row["values"].items()} for key, row in rows.items()}
    assert means["zero-shot prompt", None] == dict.fromkeys((*FIELDS, ALL), 0.0)
    assert means["three public examples", None] == {"food": 0.0, "area": 100.0, "rating": 100.0, ALL: 0.0}
    assert means["commonest values", None]["rating"] == 100.0
    assert means[CALLS, None]["rating"] == means[OWN, None]["rating"] == 100.0  # all records say 1
    assert 0 < rows[CALLS, 1.0]["facts"]["eps0"] < rows[CALLS, 8.0]["facts"]["eps0"]
    assert rows[CALLS, 8.0]["runs"] == 5
    assert rows[CALLS, 8.0]["queries"] == 6
    for name in FIELDS:  # a model that copies the nearest record says what it says
        assert means[f"{CALLS}, single", None][name] == means[f"{OWN}, single", None][name]
    before = len(prompts)
    assert extract_study.main([*options, "--releases", "20", "--epsilon", "3", "--rating-weight", "2"]) == 0
    assert len(prompts) == before
    assert f"| {CALLS} | 20 | 3 |" in capsys.readouterr().out
    assert "all.png" in write_index(folder.parent).read_text()


def test_a_call_shows_the_records_of_one_owner_the_nearest_last(options: list[str], prompts: list[str]) -> None:
    assert extract_study.main([*options, "--shown", "2", "--releases", "20", "--epsilon", "8"]) == 0
    private = [text for text in prompts if "Text: Place" in text]
    assert private
    for text in private:
        *_, last, question = text.split("\n\n")
        assert text.count("JSON:") == 3
        assert "New place" in question
        if "Italian" in text.removesuffix(question):
            assert "Italian" in last


def test_no_file_of_the_report_shows_a_record(options: list[str], prompts: list[str], tmp_path: Path) -> None:
    assert extract_study.main([*options, "--kept", str(tmp_path / "kept"), "--releases", "20", "--epsilon", "8"]) == 0
    written = list((tmp_path / "study" / "extract").iterdir())
    assert {path.name for path in written} == {"results.json", "table.md", "all.png"}
    assert not any(b"lace 1" in path.read_bytes() for path in written)


@pytest.mark.parametrize(("name", "value", "bound"), [("owners", "41", "120"), ("questions", "7", "6")])
def test_too_many_are_refused_before_any_call(
    name: str, value: str, bound: str, options: list[str], prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert extract_study.main([*options, f"--{name}", value]) == 1
    error = capsys.readouterr().err
    assert name in error
    assert bound in error
    assert not prompts
