"""The kinds of ``dpicl serve`` that answer with texts, numbers and typed answers; and the selector's filter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from langchain_core.runnables import RunnableLambda
from serving_files import ACCESS, KEY, VOTE, ask, file_of, merged
from serving_files import models as models
from table_model import TableModel

from langchain_dpicl import InvalidParameter, local
from langchain_dpicl.cli import main
from langchain_dpicl.errors import InvalidConfiguration, InvalidRecords
from langchain_dpicl.members.chains import Wording
from langchain_dpicl.release.base import releases_in
from langchain_dpicl.release.transaction import acting_for
from langchain_dpicl.serving.app import create_app, freeze, plans
from langchain_dpicl.serving.config import read
from langchain_dpicl.spec import SECTIONS

HEADERS = {"authorization": f"Bearer {KEY}"}
CALLS = {"selector": {"calls": 60}, "budget.accept_noise": True}
"""At a rate of 1 and epsilon 300 for 30 releases: noise overturns 60 equal answers with a probability below 1e-12."""


def served(release: dict[str, Any], tmp_path: Path, **changes: Any) -> Any:
    """The application over a file with this release."""
    return create_app(read(file_of(tmp_path, merged(VOTE, {**CALLS, "release": release, **changes}))))


def says(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model say this text whatever it is asked."""
    monkeypatch.setattr(local, "local_llm", lambda *_, **__: RunnableLambda(lambda _: text))


# -- numbers, texts, typed answers -------------------------------------------------------------------------------------

VISIT = """
from typing import Literal
from pydantic import BaseModel, Field

class Visit(BaseModel):
    desk: Literal["Flask", "Porch"]
    days: int = Field(ge=0, le=30)
    note: str

NOT_A_MODEL = 3
"""
FIELDS = {
    "desk": {"choices": ["Flask", "Porch"], "weight": 2},
    "urgent": {"choices": [True, False]},
    "days": {"low": 0, "high": 30},
    "cost": {"low": 0.0, "high": 100.0, "mean": True},
    "due": {"low": "2026-01-01", "high": "2026-12-31", "optional": True},
    "note": {"candidates": ["come in", "call us"]},
}
SAID = {"desk": "Porch", "urgent": False, "days": 7, "cost": 50.0, "due": None, "note": "call us"}


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A data file whose outputs are JSON: objects, and texts that hold one."""
    rows = [{"text": f"text {i}", "label": {"days": i % 9}, "who": f"p{i}"} for i in range(60)]
    rows[0]["label"] = json.dumps({"days": 4})
    (tmp_path / "tickets.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.mark.parametrize(
    ("release", "said", "answer"),
    [
        ({"kind": "median", "low": 2000, "high": 2030}, "in 2021", 2021),
        ({"kind": "median", "low": 0.0, "high": 1.0, "points": 11}, "0.3", 0.3),
        ({"kind": "median", "low": "2026-01-01", "high": "2026-01-31"}, "2026-01-09", "2026-01-09"),
        ({"kind": "candidate-vote", "candidates": ["go home", "spray"]}, "spray", "spray"),
        ({"kind": "candidate-vote", "candidates": "public.txt"}, "go home", "go home"),
        ({"kind": "embedding", "candidates": ["go home", "spray"]}, "spray", "spray"),
    ],
)
def test_numbers_dates_and_candidates_are_served(
    release: dict[str, Any], said: str, answer: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "public.txt").write_text("spray\n\ngo home\n")
    says(said, monkeypatch)
    response = ask(served(release, tmp_path), {"input": {"text": "a cough at night"}})
    assert response.status_code == 200, response.text
    assert response.json()["output"]["answer"] == answer


def test_the_page_has_a_line_for_each_kind_that_a_file_takes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/tasks/server.md").read_text()
    lines = yaml.safe_load(page.split("Each with what it needs:\n\n```yaml\n")[1].split("```")[0])
    assert {line["kind"] for line in lines} == set(SECTIONS)
    (tmp_path / "sentences.txt").write_text("come in\ncall us")
    for line in lines:
        selector = {"calls": 20, "max_calls": 30} if line["kind"] != "documents" else {"calls": 4}
        read(file_of(tmp_path, {**VOTE, "release": line, "selector": selector}))


def test_a_mean_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 equal values at the noise of epsilon 300 for 30 releases: sigma is below 2, and the mean of 60 moves by 10 of
    its 100 with a probability below 1e-6."""
    says("75", monkeypatch)
    app = served({"kind": "mean", "low": 0.0, "high": 100.0}, tmp_path)
    assert abs(ask(app, {"input": {"text": "what cost?"}}).json()["output"]["answer"] - 75.0) < 10.0


@pytest.mark.usefixtures("filled")
def test_a_typed_answer_of_declared_fields_is_served_and_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(json.dumps(SAID), monkeypatch)
    app = served({"kind": "structured", "fields": FIELDS}, tmp_path, **{"budget.epsilon": 900, "budget.releases": 2})
    for _ in range(2):
        output = ask(app, {"input": {"text": "when?"}}).json()["output"]
        assert {**output["answer"], "cost": 50.0} == SAID
        assert abs(output["answer"]["cost"] - 50.0) < 10.0
    assert output["receipt"]["replayed"]
    with TestClient(app) as client:
        described = client.get("/openapi.json").json()["components"]["schemas"]["AnswerAnswerFields"]
    assert set(described["properties"]) == set(SAID)
    assert described["properties"]["desk"]["enum"] == ["Flask", "Porch"]


def test_a_member_is_asked_for_the_declared_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "local_llm", lambda *_, **__: RunnableLambda(str))
    settings = read(file_of(tmp_path, merged(VOTE, {"release": {"kind": "structured", "fields": FIELDS}})))
    assert settings.release is not None
    member, _ = settings.release.parts(settings.model.choice, Wording("text", "label"))
    assert member is not None
    asked = '"desk": Flask or Porch, "urgent": true or false, "days": 0 to 30, "cost": 0.0 to 100.0, '
    asked += '"due": 2026-01-01 to 2026-12-31 or null, "note": a text'
    assert member.invoke({"text": "when?", "examples": ""}) == f"Write the label for the text as JSON: {{{asked}}}."


@pytest.mark.usefixtures("filled")
def test_a_typed_answer_of_a_model_beside_the_file_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    (tmp_path / "visits_of_a_test.py").write_text(VISIT)
    said = {"desk": "Porch", "days": 7, "note": "call us"}
    says(f"Surely:\n{json.dumps(said)}", monkeypatch)
    fields = {"note": {"candidates": ["come in", "call us"], "weight": 2}}
    release = {"kind": "structured", "model": "visits_of_a_test:Visit", "fields": fields, "instruction": "Fill it in"}
    assert ask(served(release, tmp_path), {"input": {"text": "when?"}}).json()["output"]["answer"] == said
    (line,) = plans(read(tmp_path / "server.yaml").build())[0]["lines"]
    assert "a value for each field" in line["mechanism"]


@pytest.mark.usefixtures("filled")
def test_a_typed_answer_is_rehearsed(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    says('{"days": 7}', monkeypatch)
    release = {"kind": "structured", "fields": {"days": {"low": 0, "high": 30}}}
    path = file_of(tmp_path, merged(VOTE, {**CALLS, "release": release}))
    command = ["rehearse", "--config", str(path), "--example", '{"text": "t", "label": "{}"}', "--question", "when?"]
    assert main([*command, "--json"]) == 0
    assert "'days': 7" in capsys.readouterr().out.replace('"', "'")


def test_examples_without_a_field_of_a_typed_answer_are_refused_and_counted(filled: Path) -> None:
    """Their members would write like them, and abstain."""
    others = ["CANARY", "days: 5", {"day": 5}, [5]]
    with (filled / "tickets.jsonl").open("a") as file:
        file.writelines(f"\n{json.dumps({'text': 'more', 'label': each, 'who': 'x'})}" for each in others)
    release = {"kind": "structured", "fields": {"days": {"low": 0, "high": 30}}}
    configuration = {**VOTE, "release": release, "budget": {**VOTE["budget"], "accept_noise": True}}
    with pytest.raises(InvalidRecords, match="4 of 64 records") as caught:
        read(file_of(filled, configuration)).build()
    assert "no JSON object with a field of the release under 'label' (lines 61" in str(caught.value)
    assert "CANARY" not in str(caught.value)
    assert not (filled / "budget.db").exists()


# -- a filter ----------------------------------------------------------------------------------------------------------


def wards(folder: Path) -> None:
    rows = [{"text": f"text {i}", "label": "ab"[i % 2], "who": f"p{i}", "ward": i % 2} for i in range(60)]
    (folder / "tickets.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("threshold", [None, -1.0])
@pytest.mark.parametrize("tickets", [False, True])
def test_a_filter_lets_through_whose_record_passes(threshold: float | None, tickets: bool, tmp_path: Path) -> None:
    """At a rate of 1 all 30 owners of ward 1, whose label is b, vote; nobody else does."""
    wards(tmp_path)
    selector = {"calls": 30, "filter": {"ward": {"$gte": 1}}, "eligible": 30}
    selector |= {} if threshold is None else {"threshold": threshold}
    release = {"kind": "label-vote", "labels": ["a", "b"], "details": True}
    app = served(release, tmp_path, selector=selector, **{"budget.tickets": tickets})
    counts = ask(app, {"input": {"text": "a cough"}}).json()["output"]["answer"]["counts"]
    assert abs(counts["a"]) < 6
    assert abs(counts["b"] - 30) < 6


# -- documents, token by token -----------------------------------------------------------------------------------------

DOCUMENTS: dict[str, Any] = {
    "store": {"data": "notes.jsonl", "owner_key": "who"},
    "release": {"kind": "documents", "max_tokens": 5, "top_k": 3, "pad": False},
    "selector": {"calls": 4, "threshold": -1.0, "eligible": 8},
    "budget": {"epsilon": 50, "delta": 1e-5, "releases": 9, "tickets": True, "ledger": "sqlite:///budget.db"},
    **ACCESS,
}


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TableModel:
    """A file of eight documents without outputs, and a model that writes "aa" surely."""
    rows = [{"text": f"note {i}", "who": f"p{i}", "ward": i % 2} for i in range(8)]
    (tmp_path / "notes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = TableModel(
        lambda _, said: [0.0, 0.0, 100.0] if len(said) == 2 else [100.0, 0.0, 0.0], ["a", "b", "."], frozenset({2})
    )
    monkeypatch.setattr("langchain_dpicl.decoding.documents.TransformersLogits", lambda name: model)
    return model


def test_documents_are_streamed_with_a_gate_and_tickets(notes: TableModel, tmp_path: Path) -> None:
    """9 tickets, of which an answer takes 5 and gives 2 back: the second finds 6 and the third 3, so all sit out."""
    settings = read(file_of(tmp_path, merged(DOCUMENTS, {"selector.filter": {"ward": 1}, "selector.calls": 8})))
    with TestClient(create_app(settings)) as client:
        for number in range(3):
            body = {"input": {"text": f"which {number}?"}}
            streamed = client.post("/answer/stream", json=body, headers=HEADERS)
            pieces = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")][1:]
            assert "".join(piece["answer"] for piece in pieces[:-1]) == "aa"
            receipt = pieces[-1]["receipt"]
            assert (receipt["outcome"], receipt["tokens"], receipt["remaining"]) == ("released", 3, None)
            shown = sorted(notes.opened[-1])
            assert shown == ([f"Document: note {i}\n\n" for i in (1, 3, 5, 7)] if number < 2 else [])
        bad = client.post("/answer/stream", json={"input": {"text": " "}}, headers=HEADERS)
        assert bad.status_code == 422
        assert client.get("/answer/budget", headers=HEADERS).json()["lines"]["tokens"]["tickets"] == 9
        assert '"inputKey": "text"' in client.get("/").text


def test_documents_have_a_plan_before_anything_is_frozen_and_no_members_to_rehearse(
    notes: TableModel, tmp_path: Path, capsys: Any
) -> None:
    path = file_of(tmp_path, DOCUMENTS)
    chain = read(path).build()
    (before,) = plans(chain)
    freeze(chain)
    (after,) = plans(chain)
    assert before["lines"] == after["lines"]
    assert after["lines"][0]["unit"] == "tokens"
    assert main(["rehearse", "--config", str(path), "--example", "{}", "--question", "which?"]) == 1
    assert "members to rehearse" in capsys.readouterr().err


def test_without_a_gate_documents_are_near_all_the_same(notes: TableModel, tmp_path: Path) -> None:
    selector = {"rate": 1.0, "members": 2, "max_exemplars": 4}
    changes = {"selector": selector, "release.shots": 8, "budget.releases": 30, "budget.accept_noise": True}
    chain = read(file_of(tmp_path, merged(DOCUMENTS, {**changes, "budget.tickets": None}))).build()
    (release,) = releases_in(chain)
    assert release.selector.nearest_to == "text"
    with acting_for("anybody"):
        assert chain.invoke({"text": "which?"})["answer"] == "aa"
    assert len(notes.opened[-1]) == 8


def test_the_model_of_documents_is_a_name_a_file_or_a_server(
    notes: TableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def made(*given: Any, **more: Any) -> TableModel:
        asked.append((*given, *more.values()))
        return notes

    monkeypatch.setenv("MINE", "secret")
    for name in ("TransformersLogits", "ServerLogits"):
        monkeypatch.setattr(f"langchain_dpicl.decoding.documents.{name}", made)
    server = {"url": "http://127.0.0.1:9/v1", "name": "m", "api_key_env": "MINE"}
    for model, end in (
        ({}, None),
        ({"name": "smollm2-135m-instruct"}, None),
        ({"name": "w.gguf"}, None),
        (server, ["."]),
    ):
        read(file_of(tmp_path, merged(DOCUMENTS, {"model": model, "release.end": end}))).build()
    file, served = (tmp_path / "w.gguf",), ("http://127.0.0.1:9/v1", "m", ["."], "secret")
    assert asked == [(local.DEFAULT_MODEL,), ("smollm2-135m-instruct",), file, served]


def test_the_pages_configurations_can_be_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "tasks" / "server.md"
    for name in ("tickets.jsonl", "reviews.jsonl", "notes.jsonl", "head.npz"):
        (tmp_path / name).touch()
    kinds = []
    for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        written = yaml.safe_load(text)
        if isinstance(written, list):  # a line for each kind
            continue
        rest = (
            {}
            if {"head", "budget", "releases"} & written.keys()
            else {name: VOTE[name] for name in ("store", "budget")}
        )
        settings = read(file_of(tmp_path, json.dumps({**rest, **written}, default=str)))
        kinds.append([each.release and each.release.kind for each in settings.served])
    assert kinds == [["vote"], ["label-vote"] * 2, ["structured"], ["documents"], [None]]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "field", "words"),
    [
        ({"kind": "median", "low": 3, "high": 3}, "release.high", "above low"),
        ({"kind": "median", "low": 0, "high": 9, "points": 99}, "release.points", "10"),
        ({"kind": "mean", "low": 0, "high": 9, "points": 3}, "release.points", "not permitted"),
        ({"kind": "mean", "low": True, "high": 9}, "release.low", ""),
        ({"kind": "mean", "low": 0, "high": "2026-01-01"}, "release.high", "date"),
        ({"kind": "candidate-vote", "candidates": ["one"]}, "release.candidates", "two texts"),
        ({"kind": "candidate-vote", "candidates": "no.txt"}, "release.candidates", "readable"),
        ({"kind": "joint-em", "domain": []}, "release.k", ""),
        ({"kind": "structured"}, "release.fields", "MODULE:CLASS"),
        ({"kind": "structured", "fields": {"a": {}}}, "release.fields.a", "candidates"),
        ({"kind": "structured", "fields": {"a": {"low": 1}}}, "release.fields.a", "bounds"),
        ({"kind": "structured", "fields": {"a": {"high": 1}}}, "release.fields.a", "bounds"),
        ({"kind": "structured", "fields": {"a": {"choices": []}}}, "release.fields.a.choices", "1"),
        ({"kind": "structured", "fields": {"copy": {"choices": ["a"]}}}, "release.fields.copy", "a name"),
        (
            {"kind": "structured", "fields": {"a": {"choices": ["a"], "low": 1, "high": 2}}},
            "release.fields.a",
            "one of the three",
        ),
        (
            {"kind": "structured", "fields": {"a": {"choices": ["a"], "mean": True}}},
            "release.fields.a",
            "",
        ),
        ({"kind": "structured", "model": "no_such_module:X"}, "release.model", "ModuleNotFoundError"),
        ({"kind": "structured", "model": "json:JSONDecoder"}, "release.model", "pydantic"),
        ({"kind": "structured", "model": "json"}, "release.model", ""),
        (
            {"kind": "structured", "model": "pydantic:BaseModel", "fields": {"a": {"mean": True}}},
            "release.fields.a",
            "a field of BaseModel",
        ),
        ({"kind": "documents", "max_tokens": 5, "min_tokens": 6}, "release.min_tokens", "max_tokens"),
        ({"kind": "documents", "slots": 5, "pad": False}, "release.slots", "pad"),
    ],
)
def test_kinds_that_cannot_work_are_refused_with_all_other_mistakes(
    release: dict[str, Any], field: str, words: str, tmp_path: Path
) -> None:
    wrong = {**VOTE, "release": release, "selector": {"filter": {"a": {"$near": 1}}, "eligible": 3, "calls": 3}}
    with pytest.raises(InvalidConfiguration) as caught:
        read(file_of(tmp_path, merged(wrong, {"budget.epsilon": -1})))
    told = dict(caught.value.mistakes)
    assert {field, "budget.epsilon", "selector.filter"} <= told.keys(), told
    assert words in told[field]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"selector.pad_to": 9}, "leave out selector.pad_to"),
        ({"selector.max_calls": 9}, "leave out selector.max_calls"),
        ({"selector.count_empty": False}, "leave out selector.count_empty"),
        ({"store.output_key": "label"}, "leave out store.output_key"),
        ({"model.timeout": 3}, "leave out model.timeout"),
        ({"selector.calls": None}, "documents need selector.calls"),
        ({"selector.calls": None, "selector.rate": 0.5}, "documents need release.shots"),
        ({"model.url": "http://127.0.0.1:9/v1"}, "documents need release.end"),
        ({"release.end": ["."]}, "documents need release.end"),
        ({"budget.releases": 4}, "at least release.max_tokens"),
        ({"selector": {"calls": 4}}, "budget.tickets needs selector.threshold"),
    ],
)
def test_what_makes_no_sense_of_documents_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text('{"text": "a", "who": "b"}')
    with pytest.raises(InvalidConfiguration, match=words):
        read(file_of(tmp_path, merged(DOCUMENTS, changes)))


def test_a_filter_on_the_owner_is_refused_before_any_ledger(tmp_path: Path) -> None:
    changes = {"selector": {"calls": 3, "filter": {"who": "p1"}, "eligible": 3}}
    with pytest.raises(InvalidParameter, match="filter"):
        read(file_of(tmp_path, merged(VOTE, changes))).build()
    assert not (tmp_path / "budget.db").exists()
