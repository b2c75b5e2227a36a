"""``dpicl topics``: released once, then done; what it shows, and what it refuses before a ledger is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import FakeListLLM
from pages import blocks

from langchain_dpicl import PrivacyBudget, PrivateTopics, local
from langchain_dpicl.cli import main

SECRET = "zebedeequill"
STATES = ["answered", "unanswered"]


@pytest.fixture
def data(tmp_path: Path, unthinking: None) -> Path:
    """Questions of 200 owners: of refunds, not answered, and of passwords, answered; and one owner's own word."""
    rows = [f"u{i % 200},my {['refund', 'password'][i % 2]} please,{STATES[1 - i % 2]}" for i in range(400)]
    rows += [f"canary,my {SECRET} {SECRET},answered"] * 50
    path = tmp_path / "questions.csv"
    path.write_text("\n".join(["user,text,status", *rows]))
    return path


COMMAND = "topics --data questions.csv --epsilon 5 --delta 1e-7 --owner-key user".split()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_topics_are_released_once_and_the_same_command_is_done(data: Path, capsys: Any) -> None:
    """That the canary comes out is a false alarm of 5e-8, delta0; a count of 200 has noise of sigma 3."""
    command = [*COMMAND, "--split", "status=answered,unanswered", "--markdown", "t.md", "--report", "r.json"]
    code, out, err = run(capsys, *command, "--json")
    assert code == 0, err
    facts = json.loads(out)
    found = PrivateTopics.load("questions.topics.json")
    assert facts["output"] == "questions.topics.json"
    assert facts["receipts"] == list(found.receipts)
    assert (facts["receipt"]["budget"], facts["receipt"]["remaining"]) == ("questions-topics", 0)
    by_term = {term: topic for topic in facts["topics"] for term in topic["terms"]}
    assert {"refund", "password"} <= by_term.keys()
    assert "unanswered" in by_term["refund"]["known"]
    assert json.loads(Path("r.json").read_text())["records"] == 450
    assert Path("t.md").read_text() == found.report()
    assert not [path for path in Path().glob("*t*.*") if path.suffix in (".md", ".json") and SECRET in path.read_text()]
    code, out, _ = run(capsys, *command)
    assert (code, out.startswith("questions.topics.json is done: nothing was charged")) == (0, True)
    assert found.report() in out
    code, _, err = run(capsys, *COMMAND, "--split", "status=unanswered,answered")
    assert (code, "topics of another release" in err) == (1, True)
    budget = PrivacyBudget.open("questions-topics")
    assert (budget.spent("terms"), budget.spent("sum")) == (1, 1)


def test_a_report_each_month_is_one_promise_and_a_model_may_name_topics(
    data: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "local_llm", lambda *_, **__: FakeListLLM(responses=["A title"]))
    command = [*COMMAND, "--reports", "2", "--topics", "1", "--model", "smollm2-135m-instruct"]
    code, _, err = run(capsys, *command)
    assert (code, "--name" in err) == (1, True)
    for number in (1, 2):
        code, out, err = run(capsys, *command, "--name", "asked", "--output", f"{number}.json")
        assert code == 0, err
        assert f"{2 - number} reports left" in out
        assert "| A title |" in out
    code, _, err = run(capsys, *command, "--name", "asked", "--output", "3.json")
    assert (code, "nothing was charged" in err) == (1, True)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--epsilon -1", "--epsilon"),
        ("--delta 2", "--delta"),
        ("--split status", "--split"),
        ("--split status=", "--split['status'][0]"),
        ("--split text=a,b", "--split"),
        ("--split status=a,A", "--split['status'][1]"),
        ("--split state=a,b", "--split"),
        ("--output nowhere/t.json", "--output"),
        ("--output questions.csv", "--output"),
        ("--at-most 0", "--at-most"),
        ("--topics 0", "--topics"),
        ("--topics-per-owner 0", "--topics-per-owner"),
        ("--phrases 4", "--phrases"),
        ("--records-per-owner 0", "--records-per-owner"),
        ("--owners 0", "--owners"),
        ("--reports 0", ""),
    ],
)
def test_a_report_that_is_refused_makes_no_ledger_and_no_file(more: str, named: str, data: Path, capsys: Any) -> None:
    """But the store beside the data: no text is embedded again for the next one."""
    before = set(Path().rglob("*"))
    code, _, err = run(capsys, *COMMAND, *more.split())
    assert (code, named in err, SECRET in err) == (1, True, False), err
    made = set(Path().rglob("*")) - before
    assert all(path.name.startswith("questions.csv.store") for path in made)


@pytest.mark.filterwarnings("ignore:the budget .* is used with data on which other budgets")
def test_the_page_of_topics_runs_as_it_stands(data: Path, capsys: Any) -> None:
    """Its command on this file, and its Python on the same questions."""
    (command,) = blocks("tasks/topics.md", "bash", "")
    code, out, err = run(capsys, *command.split()[1:])
    assert code == 0, err
    assert Path("topics.md").read_text() in out
    (block,) = blocks("tasks/topics.md", "python", "In Python")
    rows = [{"text": f"my parcel {i}", "user": i, "status": STATES[i % 2]} for i in range(300)]
    embeddings = local.local_embeddings()
    names: dict[str, Any] = {"rows": rows, "embeddings": embeddings, "llm": FakeListLLM(responses=["Parcels"])}
    exec(block, names)
    assert "# What users ask" in capsys.readouterr().out
    assert set(names["named"].titles) == {"Parcels"}
