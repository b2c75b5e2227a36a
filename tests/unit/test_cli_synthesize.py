"""``dpicl synthesize``, with a model of four letters: what it prints, what it refuses, and that it goes on."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from letters import ALPHABET, END, no_more, spelling
from table_model import TableModel

from langchain_dpicl import Demonstrations, PrivacyBudget
from langchain_dpicl.cli import main
from langchain_dpicl.decoding.backends import transformers_model

SECRET = "CANARY-mrs-alder"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> TableModel:
    """Stands for every model. Writes "ab", in three tokens."""
    made = TableModel(spelling("ab"), ALPHABET, frozenset({END}))
    monkeypatch.setattr(transformers_model, "TransformersLogits", lambda name, dtype: made)
    return made


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: TableModel, capsys: Any) -> Run:
    """run(*more): the exit code and what was printed, on 60 private notes and three public topics."""
    rows = [{"input": f"{SECRET} {i}", "output": f"note {SECRET}", "who": f"p{i // 2}"} for i in range(60)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "topics.txt").write_text("tea\n\n  coffee \nwater\n")
    monkeypatch.chdir(tmp_path)

    def call(*more: str) -> tuple[int, str, str]:
        always = "--data data.jsonl --inputs topics.txt --epsilon 300 --output out.jsonl --top-k 4 --max-tokens 6"
        always += " --owner-key="
        code = main(["synthesize", *always.split(), *more])
        captured = capsys.readouterr()
        assert SECRET not in captured.out + captured.err
        return code, captured.out, captured.err

    return call


def test_it_prints_each_pair_and_what_was_spent(run: Run) -> None:
    code, out, err = run()
    assert code == 0
    assert "  coffee\n    ab\n" in out
    assert "3 demonstrations (3 of them new) of 9 tokens in out.jsonl" in out
    assert "9 tokens left" in out, "the budget is for three outputs of 6 tokens"
    assert err == "", "no bar where nobody looks"
    assert Demonstrations.load("out.jsonl") == [{"input": text, "output": "ab"} for text in ("tea", "coffee", "water")]


def test_a_plan_that_says_nothing_of_the_records_is_told_in_one_line(run: Run) -> None:
    """30 owners, 4 of them to a token on average: epsilon 1 leaves each a range of 1.4 for 3 answers."""
    code, out, err = run("--owner-key", "who", "--epsilon", "1")
    assert code == 0
    assert "3 demonstrations" in out
    assert re.fullmatch(r"dpicl synthesize: an owner changes the log-odds of a token by 1\.\d+ at most, .*\n", err)


def test_json_is_one_object(run: Run) -> None:
    code, out, _ = run("--json", "--owner-key", "who", "--tokens", "50", "--limit", "2")
    assert code == 0
    facts = json.loads(out)
    assert [(pair["input"], pair["output"], pair["receipt"]["tokens"]) for pair in facts["demonstrations"]] == [
        ("tea", "ab", 3),
        ("coffee", "ab", 3),
    ]
    assert (facts["tokens"], facts["remaining"], facts["unanswered"]) == (6, 44, [])
    assert facts["delta"] == pytest.approx(0.1 / 30), "owners, not records"
    assert 0 < facts["epsilon_spent"] < facts["epsilon"] == 300


def test_the_same_command_again_finds_everything_done(run: Run, model: TableModel) -> None:
    run()
    model.table = no_more
    code, out, _ = run()
    assert code == 0
    assert "3 demonstrations (0 of them new)" in out
    code, out, _ = run("--json")
    assert len(json.loads(out)["demonstrations"]) == 3


@pytest.mark.parametrize("name", ["more.csv", "more.jsonl.gz"])
def test_further_inputs_may_come_as_records_on_the_same_budget(name: str, run: Run) -> None:
    run()
    csv = "input,other\ntea,1\nmilk,2\n"
    lines = "\n".join(json.dumps({"input": text, "other": 1}) for text in ("tea", "milk"))
    Path(name).write_bytes(csv.encode() if name == "more.csv" else gzip.compress(lines.encode()))
    code, out, _ = run("--inputs", name, "--json")
    assert code == 0, "the budget's tokens are those that it was frozen with"
    assert [pair["input"] for pair in json.loads(out)["demonstrations"]] == ["tea", "milk"]
    assert len(Demonstrations.load("out.jsonl")) == 4


def test_a_budget_that_is_spent_on_the_way_is_said_and_is_exit_1(run: Run) -> None:
    code, out, err = run("--tokens", "5")
    assert code == 1
    assert "2 demonstrations (2 of them new) of 5 tokens" in out
    assert err == "dpicl synthesize: 1 of 3 inputs stay unanswered: the budget's tokens are spent\n"
    code, out, _ = run("--json")
    assert code == 1
    assert json.loads(out)["unanswered"] == ["water"]


def test_ctrl_c_is_130_and_the_same_command_goes_on(run: Run, model: TableModel) -> None:
    table = model.table

    def stop(demonstration: str, released: str) -> Any:
        if released == "a":
            raise KeyboardInterrupt
        return table(demonstration, released)

    model.table = stop
    code, _, err = run()
    assert code == 130
    assert "the same command resumes" in err
    assert not Path("out.jsonl").exists()
    model.table = table
    assert run()[0] == 0
    budget = PrivacyBudget.open("data")
    assert budget.spent() == 6 + 9, "the charge of the answer that was interrupted stands"
    budget.close()


def test_a_failure_is_one_line_and_the_object_has_what_was_made(run: Run, model: TableModel) -> None:
    table, left = model.table, [40]

    def fail(demonstration: str, released: str) -> Any:
        left[0] -= 1
        if left[0] < 0 and released:
            raise RuntimeError(demonstration)
        return table(demonstration, released)

    model.table = fail
    code, out, err = run("--json")
    assert code == 1
    assert json.loads(out)["error"] == "ReleaseFailed"
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--epsilon", "0"], "epsilon"),
        (["--shots", "1"], "--shots"),
        (["--limit", "0"], "--limit"),
        (["--max-tokens", "0"], "--max-tokens="),
        (["--inputs", "absent.txt"], "--inputs"),
        (["--inputs", "absent.csv"], "absent.csv"),
        (["--data", "absent.jsonl"], "absent.jsonl"),
        (
            ["--inputs", "data.jsonl", "--input-key", "who", "--output-key", "input", "--max-tokens", "99999"],
            "inputs[0]",
        ),
        (["--input-key", "body"], "'body'"),
        (["--output", "none/out.jsonl"], "output"),
        (["--tokens", "0"], "--tokens="),
    ],
)
def test_bad_arguments_are_one_line_and_cost_nothing(more: list[str], says: str, run: Run) -> None:
    code, _, err = run(*more)
    assert code == 1
    assert err.count("\n") == 1 + ("texts that occur before" in err) + ("log-odds" in err)
    assert says in err
    assert not Path("out.jsonl").exists()


def test_stops_are_written_with_escapes(run: Run, model: TableModel) -> None:
    model.alphabet = ["a", "\n", "é", "."]
    model.table = lambda demonstration, released: [99.0, 0, 0, 0] if not released else [0, 99.0, 0, 0]
    code, out, _ = run("--stop", r"\n", "--json")
    assert code == 0
    assert [pair["output"] for pair in json.loads(out)["demonstrations"]] == ["a", "a", "a"]


def test_an_empty_line_ends_an_output_unless_it_is_told_otherwise(run: Run, model: TableModel) -> None:
    model.alphabet = ["a", "\n", "é", "."]
    model.table = lambda demonstration, released: [99.0, 0, 0, 0] if not released else [0, 99.0, 0, 0]
    code, out, _ = run("--json")
    assert code == 0
    assert [(pair["output"], pair["receipt"]["tokens"]) for pair in json.loads(out)["demonstrations"]] == [("a", 3)] * 3
