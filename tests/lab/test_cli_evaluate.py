"""``dpicl evaluate``: what it writes and prints, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluation_fakes import FakeLLM, WordEmbeddings, unit

from langchain_dpicl import local
from langchain_dpicl.cli import main
from langchain_dpicl.lab.evaluation.passes import EvaluationPlan
from langchain_dpicl.members.chains import ModelChoice

LABELS = ("Negative", "Positive")


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """A model for labels and for texts; without plans, which take seconds to solve."""
    fake = FakeLLM(words=list(LABELS))
    monkeypatch.setattr(ModelChoice, "load", lambda self, **_: fake)
    monkeypatch.setattr(local, "local_embeddings", lambda: WordEmbeddings("cat dog owl fox"))
    monkeypatch.setattr(EvaluationPlan, "parameter", lambda self, epsilon, *_, **__: self.rate / epsilon)
    monkeypatch.setattr("langchain_dpicl.lab.evaluation.evaluate.cost_curve", lambda *_, **__: [])
    return fake


def lines(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def reviews(count: int, name: str) -> list[dict[str, Any]]:
    return [{"text": f"{name} {i}", "label": LABELS[i % 2]} for i in range(count)]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    data = lines(tmp_path / "train.jsonl", reviews(40, "review"))
    test = lines(tmp_path / "test.jsonl", reviews(8, "query"))
    given = ["evaluate", "--task", "sst2", "--data", data, "--test", test, "--output", str(tmp_path / "out")]
    return [*given, *"--members 4 --shots 1 --releases 20 --draws 2 --heads 1 --epsilon 1 8 --queries 5".split()]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_label_task_leaves_numbers_a_table_and_pictures(
    llm: FakeLLM, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, *command, "--vary", "members=2,4", "--vary", "releases=20,200", "--calibrate-on", "2")
    assert code == 0
    folder = tmp_path / "out"
    assert out.strip() == (folder / "table.md").read_text().strip()
    assert {path.name for path in folder.iterdir()} >= {"results.json", "table.md", "accuracy.png", "members.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    results = json.loads((folder / "results.json").read_text())
    assert results["settings"]["queries"] == 5
    scored = {score["method"] for score in results["scores"]} | {"member"}  # of which there is none in an empty sample
    assert scored == {
        "zero-shot",
        "zero-shot calibrated",
        "4-shot",
        "member",
        "vote",
        "vote, prior",
        "label vote",
        "head",
    }
    assert len(llm.calls) == (5 + 2) * (4 + 2)
    assert not any("N/A" in prompt for prompt in llm.calls), "calibrated on further test rows"


def test_own_labels_are_measured_with_columns_of_other_names(tmp_path: Path, capsys: Any, unthinking: None) -> None:
    rows = [{"body": f"message {i}", "desk": ["billing", "technical"][i % 2]} for i in range(40)]
    data = lines(tmp_path / "tickets.jsonl", rows)
    test = lines(tmp_path / "solved.jsonl", [{"words": row["body"], "answer": row["desk"]} for row in rows[:8]])
    given = "evaluate --labels billing,technical --method head --heads 1 --epsilon 1 --output out --json".split()
    given += ["--data", data, "--input-key", "body", "--output-key", "desk", "--test", test]
    code, out, err = run(capsys, *given, "--test-columns", "text=words,label=answer")
    assert code == 0, err
    assert json.loads(out)["settings"]["queries"] == 8
    code, _, err = run(capsys, *given)
    assert (code, "no column 'desk'" in err) == (1, True)


def test_json_is_one_object_and_the_same_command_asks_nothing_again(
    llm: FakeLLM, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, *command, "--json")
    assert code == 0
    first = json.loads(out)
    assert first == json.loads((tmp_path / "out" / "results.json").read_text())
    llm.calls.clear()
    code, out, _ = run(capsys, *command, "--json", "--epsilon", "2", "4", "8")
    assert code == 0
    assert llm.calls == []
    again = json.loads(out)
    assert {score["epsilon"] for score in again["scores"]} == {None, 2.0, 4.0, 8.0}
    assert [s for s in again["scores"] if s["epsilon"] is None] == [s for s in first["scores"] if s["epsilon"] is None]


def test_a_text_task_leaves_its_measures(llm: FakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm.writes = lambda prompt: " " + ["cat dog", "owl fox"][int(2 * unit(prompt))]
    data = lines(tmp_path / "train.jsonl", [{"input": f"cat {i}", "output": "cat dog"} for i in range(40)])
    records = [{"input": f"owl {i}", "references": ["owl fox", "cat"]} for i in range(3)]
    test = lines(tmp_path / "test.jsonl", records)
    given = ["evaluate", "--task", "wikilarge", "--data", data, "--test", test, "--output", str(tmp_path / "out")]
    given += "--members 4 --releases 20 --draws 2 --epsilon 1 --candidates 3 --vary candidates=1,3 --json".split()
    code, out, _ = run(capsys, *given)
    assert code == 0
    results = json.loads(out)
    assert {score["method"] for score in results["scores"]} >= {"zero-shot", "embedding", "joint-em", "ptr"}
    assert set(results["scores"][0]["values"]) == {"rouge1", "rouge2", "rougeL", "bleu", "levenshtein", "meaning"}


def test_the_command_line_names_files_and_not_where_they_lie(
    llm: FakeLLM, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    given = [*command[:3], f"--data={command[4]}", *command[5:]]
    monkeypatch.setattr("sys.argv", ["dpicl", *given])
    assert run(capsys, *given)[0] == 0
    text = (tmp_path / "out" / "results.json").read_text()
    assert str(tmp_path) not in text
    wanted = f"--data={tmp_path.name}/train.jsonl --test {tmp_path.name}/test.jsonl"
    assert wanted in json.loads(text)["settings"]["command"]


def test_a_model_that_times_out_in_the_middle_is_one_line_and_the_same_command_goes_on(
    llm: FakeLLM, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.fails = lambda prompt: len(llm.calls) > 3 * 6
    code, out, err = run(capsys, *command)
    assert (code, out) == (1, "")
    (line,) = [line for line in err.splitlines() if "dpicl evaluate:" in line]
    assert "the model answers no prompt" in line
    assert str(tmp_path / "out" / "labels-4x1.jsonl") in line
    llm.fails = lambda prompt: False
    llm.calls.clear()
    assert run(capsys, *command)[0] == 0
    assert len(llm.calls) == (5 + 1 - 3) * 6


def test_one_owner_in_each_call_is_a_pass_of_its_own(
    llm: FakeLLM, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, *command, "--calls", "6", "--method", "vote", "--method", "label-vote", "--json")
    assert (code, (tmp_path / "out" / "labels-6-calls.jsonl").exists()) == (0, True)
    results = json.loads(out)
    assert (results["settings"]["calls"], results["settings"]["rate"]) == (6, 6 / 40)
    assert "members" not in results["settings"]
    private = [score for score in results["scores"] if score["epsilon"] == 1.0]
    assert [score["method"] for score in private] == ["vote", "vote, prior", "label vote"]
    assert private[0]["facts"]["calls"] == 6


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--task", "sst3"], "--task='sst3' is not allowed: one of sst2"),
        (["--queries", "0"], "--queries=0 is not allowed: a whole number >= 1"),
        (["--queries", "-5", "--calibrate-on", "8"], "--queries=-5 is not allowed"),
        (["--calibrate-on", "-1"], "--calibrate-on=-1 is not allowed: a whole number >= 0"),
        (["--calibrate-on", "8"], "--calibrate-on=8 is not allowed: a whole number >= 0 and <= 7"),
        (["--method", "ptr"], "--method='ptr' is not allowed: of vote, label-vote, head, top-k for sst2"),
        (["--vary", "rate=1,2"], "vary='rate' is not allowed: one of members, releases, shots, fits"),
        (["--vary", "members"], "--vary='members' is not allowed: of the form NAME=VALUE"),
        (["--vary", "members=few"], "whole numbers, separated by commas"),
        (["--vary", "members=8"], "a whole number >= 2 and <= 4"),
        (["--members", "41"], "members * shots at most the number of owners, 40"),
        (["--calls", "0"], "calls=0 is not allowed"),
        (["--calls", "41"], "calls=41 is not allowed: a whole number >= 0 and <= 40"),
        (["--calls", "4", "--vary", "members=2"], "vary='members' is not allowed: one of releases, fits"),
        (["--epsilon", "0"], "epsilon=0.0 is not allowed"),
        (["--epsilon", "nan"], "epsilon=nan is not allowed"),
        (["--delta", "1"], "delta=1.0 is not allowed"),
        (["--draws", "0"], "--draws=0 is not allowed"),
        (["--heads", "0"], "heads=0 is not allowed"),
        (["--vary", "fits=0"], "vary['fits']=0 is not allowed"),
        (["--column", "text=review"], "has no column 'review'"),
        (["--column", "words=text"], "--column='words' is not allowed"),
        (["--data", "missing.jsonl"], "'missing.jsonl' cannot be read"),
        (["--public", "missing.jsonl"], "'missing.jsonl' cannot be read"),
        (["--query", "no place for it"], "a template with {input} once"),
        (["--in-batches", "--model", "gpt", "--model-url", "http://localhost:1"], "an embedded model"),
    ],
)
def test_bad_input_is_one_line_and_costs_no_call(
    llm: FakeLLM, command: list[str], capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    code, out, err = run(capsys, *command, *more)
    assert (code, out) == (1, "")
    assert err.startswith("dpicl evaluate: ")
    assert len(err.splitlines()) == 1
    assert words in err
    assert llm.calls == []
    code, out, _ = run(capsys, *command, *more, "--json")
    assert code == 1
    assert words in json.loads(out)["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no records"),
        ("\n\n", "holds no records"),
        (
            '{"text": "a", "label": "Positive"}\n{"text": "b"',
            "1 of 2 records of 'bad.jsonl' cannot be used: no JSON object",
        ),
        ('{"text": "a", "label": "Lukewarm"}\n', "a label under 'label' other than Negative, Positive"),
        ('{"review": "a", "label": "Positive"}\n', "has no column 'text'"),
        ('{"text": "", "label": "Positive"}\n', "no text under 'text' (line 1)"),
        ('{"text": "a", "label": "Positive"}\n', "at most the number of owners, 1"),
    ],
)
def test_bad_data_are_one_line(
    llm: FakeLLM, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    code, out, err = run(capsys, *command, "--data", str(tmp_path / "bad.jsonl"), "--few-shots", "1")
    assert (code, out) == (1, "")
    assert words in err
    assert len(err.splitlines()) == 1
    assert llm.calls == []


def test_one_file_without_queries_is_refused(
    llm: FakeLLM, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    at = command.index("--test")
    code, _, err = run(capsys, *command[:at], *command[at + 2 :])
    assert code == 1
    assert "--test=None is not allowed: a file with the queries and their answers" in err


def test_a_folder_with_a_file_for_each_split_needs_no_test_option(
    llm: FakeLLM, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = command.index("--test")
    assert run(capsys, *command[:at], *command[at + 2 :], "--data", str(tmp_path))[0] == 0


def test_a_folder_that_cannot_hold_results_is_one_line(
    llm: FakeLLM, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    code, out, err = run(capsys, *command, "--output", str(tmp_path / "file"))
    assert (code, out) == (1, "")
    assert "output=" in err
    assert len(err.splitlines()) == 1
    assert llm.calls == []


def test_a_damaged_or_foreign_cache_is_one_line_and_stays(
    llm: FakeLLM, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, *command)[0] == 0
    path = tmp_path / "out" / "labels-4x1.jsonl"
    whole = path.read_bytes().split(b"\n")
    llm.calls.clear()

    path.write_bytes(b"\n".join(whole[:-2]) + b"\n" + whole[-2][:25])  # a stop in the middle of the last line
    assert run(capsys, *command)[0] == 0
    assert len(llm.calls) == 6
    assert path.read_bytes().split(b"\n") == whole

    damaged = b"\n".join([*whole[:3], whole[3][:25], *whole[4:]])
    path.write_bytes(damaged)
    code, _, err = run(capsys, *command)
    assert code == 1
    assert "line 4 is damaged" in err
    assert path.read_bytes() == damaged

    path.write_bytes(b"\n".join(whole))
    code, _, err = run(capsys, *command, "--few-shots", "3")
    assert code == 1
    assert "--few-shots=3 is not allowed: 4, with which" in err
    assert len(llm.calls) == 6
