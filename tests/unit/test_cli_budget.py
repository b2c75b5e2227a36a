"""`dpicl budget`: what it prints of a ledger, and what it refuses in one line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import PrivacyBudget
from langchain_dpicl.cli import main


@pytest.fixture
def url(ledger_url: str) -> str:
    """Three budgets: one of two lines, one for each principal, and a filter."""
    budget = PrivacyBudget(3.0, 1e-5, {"classify": 20, "keywords": 5}, ledger_url, "reviews")
    budget.declare("keywords", "joint-em", 0.1)
    line = budget.line("vote", 0.2, name="classify")
    for charge in line.charge(3)[:2]:
        line.record(charge, outcome="released" if charge.number == 1 else "members abstained")
    each = PrivacyBudget(2.0, 1e-5, 10, ledger_url, "desk", scope="per_principal")
    line = each.line("vote", 0.2)
    for who in ("alice", "=cmd()", "alice"):
        line.record(line.charge(principal=who)[0])
    PrivacyBudget.filtered(1.0, 1e-6, ledger_url, "free").line("vote", 0.2, parameter=20.0).charge()
    fresh = PrivacyBudget(1.0, 1e-5, 10, ledger_url, "later")
    fresh.start_afresh("the old records were deleted")
    return ledger_url


def run(capsys: pytest.CaptureFixture[str], url: str, action: str, *more: str) -> tuple[int, str, str]:
    code = main(["budget", action, *more, "--ledger", url])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_show_says_what_was_promised_spent_and_assumed(url: str, capsys: Any) -> None:
    code, out, _ = run(capsys, url, "show")
    assert code == 0
    for words in (
        "3 of 20 releases (15.0%), 17 left",
        "0 of 5 releases",
        "all callers may collude",
        "callers do not collude: the guarantee holds for each principal's releases on their own",
        "alice",
        "on the same data (generation 1): reviews, desk, free",
        "fresh start of later",
        "not carried out: the old records were deleted",
    ):
        assert words in out


def test_show_as_json_agrees_with_the_budgets(url: str, capsys: Any) -> None:
    code, out, _ = run(capsys, url, "show", "--json")
    found = json.loads(out)
    assert code == 0
    assert [budget["name"] for budget in found["budgets"]] == ["reviews", "desk", "free"]
    reviews, desk, free = found["budgets"]
    budget = PrivacyBudget.open("reviews", url)
    assert reviews["epsilon_spent"] == budget.epsilon_spent()
    assert reviews["lines"] == budget.lines()
    assert desk["principals"]["alice"]["lines"]["vote"]["spent"] == 2
    assert desk["epsilon_spent"] == PrivacyBudget.open("desk", url).epsilon_spent("alice")
    assert free["kind"] == "filter"
    (total,) = found["totals"]
    assert {**total, "generation": None} == {**budget.total(), "generation": None}
    assert found["acts"][0]["reason"] == "the old records were deleted"
    assert json.loads(run(capsys, url, "show", "--json", "--name", "desk")[1])["budgets"] == [desk]


def test_history_has_every_release_and_those_without_an_answer(url: str, capsys: Any) -> None:
    rows = json.loads(run(capsys, url, "history", "--json")[1])
    assert len(rows) == 7
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    outcomes = {row["id"]: row["outcome"] for row in rows if row["budget"] == "reviews"}
    assert outcomes == {
        "reviews:classify:1": "released",
        "reviews:classify:2": "members abstained",
        "reviews:classify:3": "charged, not answered",
    }
    code, out, _ = run(capsys, url, "history", "--last", "2")
    assert (code, len(out.splitlines())) == (0, 2)


@pytest.mark.parametrize("form", ["csv", "json"])
def test_an_export_reads_back(form: str, url: str, capsys: Any) -> None:
    code, out, _ = run(capsys, url, "export", "--format", form)
    rows = list(csv.DictReader(io.StringIO(out))) if form == "csv" else json.loads(out)
    assert code == 0
    assert len(rows) == 7
    assert {row["budget"] for row in rows} == {"reviews", "desk", "free"}
    names = {row["principal"] for row in rows if row["budget"] == "desk"}
    assert names == {"alice", "'=cmd()" if form == "csv" else "=cmd()"}, "no spreadsheet runs a principal's name"
    assert [int(row["number"]) for row in rows if row["budget"] == "reviews"] == [1, 2, 3]


def test_a_receipt_is_found_by_its_id(url: str, capsys: Any) -> None:
    wanted = PrivacyBudget.open("reviews", url).receipt("reviews:classify:2")
    code, out, _ = run(capsys, url, "receipt", "reviews:classify:2", "--json")
    assert (code, json.loads(out)) == (0, wanted)
    code, out, _ = run(capsys, url, "receipt", "reviews:classify:1")
    assert code == 0
    assert "discrete Gaussian noise" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["receipt", "reviews:classify:3"],
        ["receipt", "nonsense"],
        ["receipt", "other:classify:1"],
        ["receipt", "reviews:classify:1", "--name", "desk"],
        ["show", "--name", "nonsense"],
        ["history", "--last", "0"],
        ["show", "--plot", "/no/such/folder/spent.png"],
    ],
    ids=" ".join,
)
def test_errors_are_one_line(arguments: list[str], url: str, capsys: Any) -> None:
    code, out, err = run(capsys, url, *arguments)  # type: ignore[arg-type]
    assert code == 1
    assert out == ""
    assert err.startswith("dpicl budget: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("action", ["show", "history", "export"])
def test_reading_makes_no_ledger(action: str, ledger_url: str, capsys: Any, tmp_path: Path) -> None:
    code, _, err = run(capsys, ledger_url, action)
    assert code == 1
    assert "there is no ledger" in err
    assert list(tmp_path.iterdir()) == []


def test_the_picture_has_a_panel_for_every_budget(url: str, capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "spent.png"
    code, _, err = run(capsys, url, "show", "--plot", str(path))
    assert (code, err) == (0, "")
    assert path.read_bytes().startswith(b"\x89PNG")
    whole = int.from_bytes(path.read_bytes()[20:24], "big")
    assert run(capsys, url, "show", "--plot", str(path), "--name", "desk")[0] == 0
    assert int.from_bytes(path.read_bytes()[20:24], "big") < whole / 2


def test_an_empty_ledger_is_shown_as_such(ledger_url: str, capsys: Any, tmp_path: Path) -> None:
    PrivacyBudget(3.0, 1e-5, 10, ledger_url).close()
    assert "no budget" in run(capsys, ledger_url, "show", "--plot", str(tmp_path / "spent.png"))[1]
    assert json.loads(run(capsys, ledger_url, "export", "--format", "json")[1]) == []
    assert "nothing was released" in run(capsys, ledger_url, "history")[1]
