"""`dpicl budget`: what it prints of a ledger, and what it refuses in one line."""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import ExemplarStore, InvalidParameter, LedgerError, PrivacyBudget, PrivacyWarning
from langchain_dpicl.budget.terms import ticket_bins
from langchain_dpicl.budget.upkeep import LedgerReport
from langchain_dpicl.cli import main
from langchain_dpicl.cli.session import receipt_words
from langchain_dpicl.lab.ledger_pictures import losses


@pytest.fixture
def url(ledger_url: str) -> str:
    """Three budgets: one of two lines, one for each principal, and one more."""
    budget = PrivacyBudget(3.0, 1e-5, {"classify": 20, "keywords": 5}, ledger_url, "reviews")
    budget.declare("keywords", "joint-em", 0.1)
    line = budget.line("vote", 0.2, name="classify")
    for charge in line.charge(3)[:2]:
        line.record(charge, outcome="released" if charge.number == 1 else "members abstained")
    each = PrivacyBudget(2.0, 1e-5, 10, ledger_url, "desk", scope="per_principal")
    line = each.line("vote", 0.2)
    for who in ("alice", "=cmd()", "alice"):
        line.record(line.charge(principal=who)[0])
    PrivacyBudget(1.0, 1e-6, 10, ledger_url, "free").line("vote", 0.2).charge()
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
        "all together: reviews, desk, free",
    ):
        assert words in out


def test_show_as_json_agrees_with_the_budgets(url: str, capsys: Any) -> None:
    code, out, _ = run(capsys, url, "show", "--json")
    found = json.loads(out)
    assert code == 0
    assert [budget["name"] for budget in found["budgets"]] == ["reviews", "desk", "free"]
    reviews, desk, _ = found["budgets"]
    budget = PrivacyBudget.open("reviews", url)
    assert reviews["epsilon_spent"] == budget.epsilon_spent()
    assert reviews["lines"] == budget.lines()
    assert desk["principals"]["alice"]["lines"]["vote"]["spent"] == 2
    assert desk["epsilon_spent"] == PrivacyBudget.open("desk", url).epsilon_spent("alice")
    assert found["total"] == budget.total()
    assert json.loads(run(capsys, url, "show", "--json", "--name", "desk")[1])["budgets"] == [desk]


def test_only_a_budget_with_nothing_charged_is_removed(url: str, capsys: Any) -> None:
    PrivacyBudget(1.0, 1e-5, 10, url, "trial").line("vote", 0.2)
    assert run(capsys, url, "remove", "--name", "trial")[0] == 0
    code, _, err = run(capsys, url, "remove", "--name", "desk")
    assert (code, "something was charged to the budget 'desk'" in err) == (1, True)
    assert [budget["name"] for budget in json.loads(run(capsys, url, "show", "--json")[1])["budgets"]] == [
        *("reviews", "desk", "free")
    ]


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


def test_a_ledger_without_its_witness_is_read_and_recovered(url: str, capsys: Any) -> None:
    """Restored without its witness: it is still shown; `recover` counts all of every plan, or what it is told to."""
    for path in Path(url.removeprefix("sqlite:///")).parent.glob("*.witness*"):
        path.unlink()
    assert run(capsys, url, "show")[0] == 0
    with pytest.raises(LedgerError, match="no witness"):
        PrivacyBudget.open("reviews", url)
    code, out, err = run(capsys, url, "recover")
    assert (code, err) == (0, "")
    assert "there was none: every plan counts as spent" in out
    assert "reviews, classify: 20 count, 17 of them new" in out
    assert "desk, vote, alice: 10 count, 8 of them new" in out
    assert "free, vote: 10 count, 9 of them new" in out
    assert PrivacyBudget.open("reviews", url).remaining("keywords") == 0
    found = json.loads(run(capsys, url, "recover", "--json")[1])
    assert found["had_witness"]
    assert {counter["added"] for counter in found["counters"]} == {0}
    code, _, err = run(capsys, url, "recover", "--keep-count")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "--keep-count" in err


def test_recover_makes_no_ledger(ledger_url: str, capsys: Any, tmp_path: Path) -> None:
    code, _, err = run(capsys, ledger_url, "recover")
    assert (code, err.count("there is no ledger")) == (1, 1)
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


# -- where owners pay with tickets -------------------------------------------------------------------------------------


@pytest.fixture
def paid(store_of: Any, records: Any) -> Callable[..., None]:
    """paid(budget, [[0, 3], [3]]): a query for which the owners 0 and 3 are eligible, and one for which 3 is."""
    store = store_of(records(8))

    def pay(budget: PrivacyBudget, queries: Sequence[Sequence[int]], principal: str | None = None) -> None:
        line = budget.line("vote", 0.2)
        for i, owners in enumerate(queries):
            asked = line.ask(store, np.array(owners, np.int64))
            (charge,) = line.charge(1, principal, [f"{i}"], owners=[asked])
            line.record(charge)  # type: ignore[arg-type]

    return pay


@pytest.fixture
def endless(ledger_url: str, paid: Any) -> str:
    """A budget of three tickets an owner that was asked five times: owner 3 has none left, others some."""
    budget = PrivacyBudget(3.0, 1e-5, 3, ledger_url, "near", tickets=True)
    paid(budget, [[0, 3], [3], [], [1, 2, 3], [0, 3, 4]])
    PrivacyBudget(1.0, 1e-5, 10, ledger_url, "plain").line("vote", 0.2).charge()
    return ledger_url


def test_a_ticket_budget_is_shown_without_an_end(endless: str, capsys: Any) -> None:
    code, out, _ = run(capsys, endless, "show", "--name", "near")
    assert code == 0
    assert "epsilon 3 of 3 spent" in out, "after five queries of three: no more than the plan's"
    assert "5 queries so far; each owner takes part in at most 3" in out
    assert " left" not in out
    assert "10 releases (10.0%), 9 left" in run(capsys, endless, "show")[1], "others as ever"


def test_a_ticket_budget_as_json_has_nothing_left_and_nothing_private(endless: str, capsys: Any) -> None:
    near, plain = json.loads(run(capsys, endless, "show", "--json")[1])["budgets"]
    assert (near["tickets"], plain["tickets"]) == (True, False)
    assert near["lines"] == {"vote": {"count": 3, "spent": 5, "remaining": None, "mechanism": "vote"}}
    assert plain["lines"]["vote"]["remaining"] == 9
    rows = json.loads(run(capsys, endless, "history", "--json", "--name", "near")[1])
    assert [(row["spent"], row["remaining"], row["outcome"]) for row in rows] == [
        (number, None, "released") for number in range(1, 6)
    ]
    assert [row["epsilon_spent"] for row in rows[2:]] == [3.0] * 3
    receipt = json.loads(run(capsys, endless, "receipt", "near:vote:5", "--json")[1])
    assert receipt["remaining"] is None
    exported = run(capsys, endless, "export", "--name", "near")[1]
    assert [row["remaining"] for row in csv.DictReader(io.StringIO(exported))] == [""] * 5


@pytest.mark.parametrize(
    ("id_", "said"), [("near:vote:5", "no last answer"), ("reviews:classify:1", "19 answers left")]
)
def test_a_receipt_in_one_line_says_what_is_left(id_: str, said: str, endless: str, url: str, capsys: Any) -> None:
    report = LedgerReport(url)
    receipt = report.receipt(id_)
    report.close()
    assert receipt is not None
    assert receipt_words(receipt).endswith(f", {said}")


def test_what_is_not_the_private_report_does_not_depend_on_who_was_eligible(
    tmp_path: Path, paid: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("schema", "line"):
        monkeypatch.setattr(f"langchain_dpicl.budget.{module}.utc_now", lambda: "2026-01-01T00:00:00+00:00")
    seen: list[list[str]] = []
    for name, owners in (("nobody", []), ("everybody", list(range(8)))):
        url = f"sqlite:///{tmp_path / name}.db"
        paid(PrivacyBudget(3.0, 1e-5, 3, url, "near", tickets=True), [owners] * 5)
        actions = (["show"], ["show", "--json"], ["history"], ["receipt", "near:vote:5"], ["export"])
        outs = [run(capsys, url, *action) for action in actions]
        assert all(code == 0 for code, *_ in outs)
        seen.append([out.replace(name, "") for _, out, _ in outs])
    assert seen[0] == seen[1]


def test_the_private_report_says_so_first_and_counts_owners(endless: str, capsys: Any, tmp_path: Path) -> None:
    code, out, _ = run(capsys, endless, "tickets", "--name", "near")
    first, *rest = out.splitlines()
    assert code == 0
    assert first.startswith("PRIVATE: for the deployer alone")
    assert "owners ever eligible: 5, of whom 4 (80.0%) still hold tickets" in out
    table = [line.split() for line in rest if "#" in line or line.split()[-1] == "0"]
    assert [row[:-1] if row[-1][0] == "#" else row for row in table] == [
        ["0", "0"],
        ["1", "3"],
        ["2", "1"],
        ["all", "3", "1"],
    ]
    path = tmp_path / "private.png"
    found = json.loads(run(capsys, endless, "tickets", "--name", "near", "--json", "--plot", str(path))[1])
    assert next(iter(found)) == "private"
    assert path.read_bytes().startswith(b"\x89PNG")
    line = found["lines"]["vote"][""]
    assert (line["tickets"], line["owners"], line["without"], line["share_with_tickets"]) == (3, 5, 1, 0.8)
    assert line["burnt"] == {"1": 3, "2": 1, "3": 1}


def test_each_principal_has_tickets_of_its_own_and_none_is_no_error(
    ledger_url: str, paid: Any, capsys: Any, tmp_path: Path
) -> None:
    each = PrivacyBudget(2.0, 1e-5, 1, ledger_url, "desk", tickets=True, scope="per_principal")
    each.line("vote", 0.2)
    arguments = ("tickets", "--name", "desk", "--plot", str(tmp_path / "private.png"))
    code, out, _ = run(capsys, ledger_url, *arguments)
    assert (code, "no query so far" in out) == (0, True)
    paid(each, [[]], "bob")
    assert "no owner was ever eligible" in run(capsys, ledger_url, *arguments)[1]
    paid(each, [[0, 1], [0]], "alice")
    out = run(capsys, ledger_url, *arguments)[1]
    assert "desk, vote, alice: 1 tickets for every owner" in out
    assert "owners ever eligible: 2, of whom 0 (0.0%) still hold tickets" in out, "of alice's tickets"
    assert "desk, vote, bob: 1 tickets for every owner\n  no owner was ever eligible" in out, "alice cost bob's nothing"
    assert "2 queries so far; each owner takes part in at most 1" in run(capsys, ledger_url, "show")[1]


@pytest.mark.parametrize("more", [[], ["--json"], ["--plot", "private.png"]], ids=str)
@pytest.mark.parametrize(("name", "parameter"), [("plain", "tickets"), ("absent", "name")])
def test_a_budget_without_tickets_has_no_private_report(
    name: str, parameter: str, more: list[str], endless: str, capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, endless, "tickets", "--name", name, *more)
    assert code == 1
    assert err.startswith(f"dpicl budget: {'--' if parameter == 'name' else ''}{parameter}="), "an option by its name"
    assert (json.loads(out)["error"] == "InvalidParameter") if "--json" in more else out == ""
    assert not (tmp_path / "private.png").exists()
    with pytest.raises(InvalidParameter) as caught:
        LedgerReport(endless).tickets(name)
    assert caught.value.parameter == parameter


def test_the_private_report_is_of_one_budget(endless: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        run(capsys, endless, "tickets")
    assert caught.value.code == 2


def test_the_picture_of_a_ticket_budget_rises_to_the_plans_epsilon_and_stays(
    endless: str, capsys: Any, tmp_path: Path
) -> None:
    path = tmp_path / "spent.png"
    assert run(capsys, endless, "show", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    report = LedgerReport(endless)
    ((steps, counts),) = losses(report, report.chosen("near")[0]).values()
    report.close()
    assert counts == {"vote": 5}
    epsilons = [epsilon for _, epsilon in steps]
    assert epsilons == sorted(epsilons)
    assert (epsilons[0] > 0.0, epsilons[-1]) == (True, 3.0)
    history = json.loads(run(capsys, endless, "history", "--json", "--name", "near")[1])
    assert steps[-1][0].isoformat() == history[-1]["time"], "the curve goes on to the latest query"
    assert set(epsilons) == {row["epsilon_spent"] for row in history}


@pytest.mark.parametrize(("tickets", "most"), [(1, 10), (3, 10), (10, 10), (11, 10), (100, 10), (101, 50)])
def test_bins_hold_every_owner_once(tickets: int, most: int) -> None:
    burnt = {str(number): number + 1 for number in range(tickets + 1)}
    bins = ticket_bins(burnt, tickets, most)
    assert len(bins) <= most + 1
    assert [number for low, high, _ in bins for number in range(low, high + 1)] == list(range(tickets + 1))
    for low, high, owners in bins:
        assert owners == sum(burnt[str(number)] for number in range(low, high + 1))
    assert bins[-1] == (tickets, tickets, tickets + 1)


def test_forget_says_if_the_words_stay_in_the_files_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While another process reads; what was released once is told by the command itself."""
    rows = [{"input": f"text {i}", "owner": f"owner-{i}"} for i in range(3)]
    url = f"sqlite:///{tmp_path / 'store.db'}"
    model = DeterministicFakeEmbedding(size=4)
    store = ExemplarStore.from_records(rows, model, url, output_key=None, owner_key="owner")
    store.remember_release("a head (made up)")
    command = ["forget", "--store", url, "--owner"]
    with store.reading(), pytest.warns(PrivacyWarning, match="stays in its log") as told:
        assert main([*command, "owner-1"]) == 0
    assert len(told) == 1
    assert "released once, and not changed: a head (made up)" in capsys.readouterr().out
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*command, "owner-2"]) == 0
    store.close()


def test_a_data_file_is_no_store_but_names_the_one_beside_it(tmp_path: Path, capsys: Any) -> None:
    for name in ("tickets.csv", "tickets.csv.store"):
        (tmp_path / name).write_text("text,label\n")
    assert main(["forget", "--store", str(tmp_path / "tickets.csv"), "--owner", "x"]) == 1
    assert f"did you mean {tmp_path / 'tickets.csv.store'}?" in capsys.readouterr().err
