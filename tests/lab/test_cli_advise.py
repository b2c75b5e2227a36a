"""``dpicl advise``: what it says, reads and writes; and the warnings of poor plans."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import ExemplarStore, NoisyVote, PrivacyBudget, wrap_rag
from langchain_dpicl.cli import main
from langchain_dpicl.errors import PrivacyWarning
from langchain_dpicl.serving.config import read

OWNERS = 400


@pytest.fixture
def data(tmp_path: Path, unthinking: None) -> Path:
    """Two records of each owner, and a model that answers without thinking."""
    rows = [{"text": f"canary {i}", "label": "ab"[i % 2], "who": f"p{i // 2}"} for i in range(2 * OWNERS)]
    path = tmp_path / "tickets.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def found(*arguments: object) -> tuple[int, str, str]:
        code = main([str(each) for each in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return found


def asked(*more: object) -> list[object]:
    return ["advise", "--labels", "a,b", "--questions", 100, *more]


def test_one_recommendation_stands_before_the_table_and_the_reasons(run: Any) -> None:
    code, out, _ = run(*asked("--owners", 5000, "--epsilon", 1, "--price-in", 2))
    assert code == 0
    first, table, reasons = out.index("Take: the head, at epsilon 1"), out.index("5,000 owners"), out.index("Reasons:")
    assert first == 0 < table < reasons
    assert "dpicl fit --data FILE" in out
    assert "delta 2e-05" in out, "a tenth of 1 / owners"
    assert "an answer" in out, "the price"
    assert max(map(len, out.splitlines())) <= 120


def test_nothing_is_recommended_where_nothing_is_feasible(run: Any) -> None:
    code, out, _ = run(*asked("--owners", 10, "--epsilon", 0.1))
    assert code == 0
    assert out.startswith("Nothing fits at epsilon 0.1")
    assert "not feasible below about" in out


@pytest.mark.parametrize("more", [("--owners", 40), ("--owners", 800, "--epsilon", 8)])
def test_nothing_is_recommended_above_epsilon_3_and_what_would_fit_is_told(more: Any, run: Any) -> None:
    """Public texts stand first. At 8 a method would be worth it, but it would hardly protect anybody."""
    code, out, _ = run("advise", "--labels", "a,b,c,d,e,f", "--questions", 500, *more)
    assert code == 0
    assert not re.search("^Take|dpicl fit|dpicl answer", out)
    told = out[: out.index("owners, 6 labels")]
    assert "--public" in told
    assert " people: noise takes" in told
    assert " questions: noise takes" in told
    assert json.loads(run("advise", "--labels", "6", "--questions", 500, *more, "--json")[1])["recommended"] is None


def test_public_texts_are_asked_for_before_anything_is_taken(data: Path, run: Any) -> None:
    code, out, _ = run(*asked("--owners", 300))
    assert code == 0
    assert out.startswith("First give --public FILE")
    Path("texts.txt").write_text("one\ntwo\n")
    code, out, _ = run(*asked("--owners", 1500, "--public", "texts.txt"))
    assert out.startswith("Take: the head")
    assert "--public texts.txt" in out


@pytest.mark.parametrize("method", ["head", "label-vote"])
def test_the_printed_command_runs_as_it_stands(method: str, tmp_path: Path) -> None:
    """Through a shell, with every option that was given: spaces and quotes in names, a delimiter, a faulty record."""
    place = tmp_path / 'Mary\'s "files" & $HOME'
    place.mkdir()
    rows = ["body|the desk|who is it", *(f"-message {i}|{'ab'[i % 2]}|p{i}" for i in range(300)), "|a|p1"]
    (place / "all tickets.csv").write_text("\n".join(rows))
    program = tmp_path / "dpicl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m langchain_dpicl "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    def shell(command: str) -> str:
        where = {"cwd": tmp_path, "env": os.environ | {"PATH": path}}
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, **where)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    given = "dpicl advise --labels a,b --questions 20 --epsilon 3 --skip-bad --delimiter pipe --delta 0.001".split()
    given += ["--data", f"{place}/all tickets.csv", "--owner-key", "who is it", "--input-key", "body"]
    given += ["--output-key", "the desk", "--fits", "2", "--method", method, "--json"]
    command = json.loads(shell(shlex.join(given)))["command"]
    assert "--skip-bad" in command
    shell(command)
    assert (tmp_path / "head.npz").exists() == (method == "head")


def test_of_the_data_nothing_counts_but_columns_and_owners(data: Path, run: Any) -> None:
    """Other texts, labels and numbers of records, the same owners and columns: the same answer, to the last byte."""
    shape = asked("--data", data, "--owner-key", "who", "--epsilon", 2)
    code, before, _ = run(*shape)
    assert code == 0
    assert "400 owners" in before
    assert "columns' names (text, label, who)" in " ".join(before.split())
    assert "canary" not in before
    rows = [{"text": "x", "label": "zzz", "who": f"p{i}"} for i in range(OWNERS)]
    data.write_text("\n".join(map(json.dumps, rows)))
    assert run(*shape)[1] == before
    assert "800 owners" not in before
    code, alone, _ = run(*asked("--data", data, "--epsilon", 2))
    assert "each its own owner" in alone


@pytest.mark.parametrize("method", ["label-vote", "gated-ensemble", "blind-ensemble"])
def test_serve_accepts_what_is_written_and_python_opens_the_same_plan(method: str, data: Path, run: Any) -> None:
    more = ["--data", data, "--owner-key", "who", "--epsilon", 3, "--method", method, "--json"]
    code, out, _ = run(*asked(*more, "--write", "server.yaml"))
    assert code == 0
    found = json.loads(out)
    code, out, err = run("serve", "--config", "server.yaml", "--check", "--json")
    assert code == 0, err
    (budget,) = json.loads(out)["budgets"]
    (line,), (planned,) = budget["lines"], found["plan"]["lines"].values()
    assert line["parameter"] == planned["parameter"]
    assert line["warning"] is None
    chain: Any = read("server.yaml").build()
    chain.line()
    assert chain.budget.plan.digest == found["digest"]
    assert chain.budget.delta == 0.1 / OWNERS
    code, _, err = run(*asked(*more, "--write", "server.yaml"))
    assert code == 1
    assert "this one is there" in err


def test_a_head_is_written_with_the_command_that_makes_it(data: Path, run: Any) -> None:
    more = ["--data", data, "--owner-key", "who", "--epsilon", 3, "--method", "head", "--json"]
    code, out, _ = run(*asked(*more, "--write", "server.yaml"))
    assert code == 0
    found, text = json.loads(out), Path("server.yaml").read_text()
    assert found["command"] in text
    assert yaml.safe_load(text) == {"head": {"file": "head.npz"}, "server": {"anonymous": True}}
    code, _, err = run(*found["command"].split()[1:])
    assert code == 0, err
    budget = PrivacyBudget.open("tickets-head")
    assert budget.plan is not None
    assert budget.plan.digest == found["digest"]
    assert run("serve", "--config", "server.yaml", "--check")[0] == 0


def test_public_records_give_an_expected_accuracy(data: Path, run: Any, tmp_path: Path) -> None:
    rows = [{"text": f"public {i}", "label": "ab"[i % 2]} for i in range(60)]
    public = tmp_path / "public.jsonl"
    public.write_text("\n".join(map(json.dumps, rows)))
    code, out, _ = run(*asked("--owners", 2000, "--epsilon", 3, "--public", public, "--json"))
    assert code == 0
    rows_of = {row["method"]: row for row in json.loads(out)["methods"]}
    for method in ("head", "label vote", "gated ensemble"):
        assert 0.0 < rows_of[method]["expected_accuracy"] < 1.0
    assert "expected_accuracy" not in rows_of["blind ensemble"]
    code, out, _ = run(*asked("--owners", 2000, "--epsilon", 3, "--public", public))
    assert "from public records" in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--owners", 0], "owners"),
        (["--owners", 800, "--owner-key", "who"], "--owner-key"),
        (["--owners", 800, "--epsilon", -1], "epsilon"),
        (["--owners", 800, "--near", 2], "near"),
        (["--owners", 800, "--write", "server.yaml"], "--data"),
        (["--owners", 800, "--public", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--data", "tickets.jsonl", "--owner-key", "customer"], "but 3 fields"),
        (["--data", "tickets.jsonl", "--public", "tickets.jsonl"], "private"),
    ],
)
def test_bad_input_is_refused_by_name(more: list[Any], said: str, data: Path, run: Any) -> None:
    code, out, err = run(*asked(*more, "--json"))
    assert code == 1
    assert said in err
    assert "canary" not in out + err
    assert not Path("server.yaml").exists()


# -- warnings of poor plans --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*other budgets were opened")
def test_answer_and_serve_say_that_a_plan_is_poor_and_go_on(data: Path, run: Any) -> None:
    shape = "--labels a,b --epsilon 0.4 --owner-key who --calls 20 --json --question b".split()
    code, out, _ = run("answer", "--data", data, *shape, "--releases", 1500, "--name", "poor")
    assert code == 0
    found = json.loads(out)
    assert "noise takes about" in found["warning"]
    assert found["answers"][0]["receipt"]["number"] == 1
    code, out, _ = run("answer", "--data", data, *shape, "--releases", 2, "--ledger", "sqlite:///good.db")
    assert json.loads(out)["warning"] is None
    budget = {"epsilon": 0.4, "delta": 2.5e-4, "releases": 1500, "ledger": "sqlite:///served.db"}
    vote = {"kind": "vote", "labels": ["a", "b"]}
    config = {"store": {"data": "tickets.jsonl", "owner_key": "who"}, "release": vote, "selector": {"calls": 20}}
    Path("server.yaml").write_text(json.dumps({**config, "budget": budget, "server": {"anonymous": True}}))
    code, out, _ = run("serve", "--config", "server.yaml", "--check")
    assert code == 0
    assert "warning: noise takes about" in out


def test_wrap_rag_warns_of_a_poor_plan(embeddings: Any, tmp_path: Path) -> None:
    store = ExemplarStore.from_texts([f"t{i}" for i in range(500)], embeddings, progress=False)
    reader = RunnableLambda(lambda values: "a")

    def wrapped(releases: int, **more: Any) -> Any:
        place = f"sqlite:///{tmp_path}/b.db", f"b{releases}{bool(more)}"
        budget = PrivacyBudget(1.0, 1e-4, releases, *place, **more)
        return wrap_rag(reader, store, NoisyVote(["a", "b"]), budget, asks="mapping", documents_key="found")

    wrapped(1)
    with pytest.warns(PrivacyWarning, match="dpicl advise"):
        assert wrapped(3000).budget.plan is None, "nothing is frozen"
    wrapped(3000, accept_noise=True)
