"""``dpicl report``: what it tells a data protection officer, and what it must not."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from serving_files import ACCESS, file_of, head_in
from serving_files import models as models

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    acting_for,
)
from langchain_dpicl.budget.upkeep import LedgerReport
from langchain_dpicl.cli import main
from langchain_dpicl.serving.app import freeze
from langchain_dpicl.serving.config import read

CALLERS = ["<b>zoe7</b>", "quin|x7"]


def ask(embeddings: Any, url: str, **more: Any) -> PrivacyBudget:
    records = [{"input": f"CANARY {i}", "output": "ab"[i % 2]} for i in range(60)]
    store = ExemplarStore.from_records(records, embeddings, progress=False)
    budget = PrivacyBudget(3.0, 1e-4, 10, url, "desk", **more)
    ensemble = PrivateEnsemble(PoissonExampleSelector(store, calls=20), RunnableLambda(lambda values: "a"))
    chain = ensemble | DPAggregate(NoisyVote(["a", "b"], mechanism="vote-em"), budget, return_receipt=True)
    for number, who in enumerate((*CALLERS, CALLERS[0])):
        with acting_for(who):
            receipt = chain.invoke({"input": f"CANARY question {number}"})["receipt"]
            assert receipt["principal"] == (who if more.get("scope") == "per_principal" else None)
    return budget


def report(capsys: Any, *more: str) -> str:
    assert main(["report", *more]) == 0
    return str(capsys.readouterr().out)


@pytest.mark.parametrize("form", ["md", "html"])
def test_a_report_has_the_promise_people_purpose_spending_outcomes_and_versions(
    form: str, embeddings: Any, ledger_url: str, tmp_path: Path, capsys: Any
) -> None:
    plan = ask(embeddings, ledger_url).plan
    assert plan is not None
    audit = {"mechanism": "vote", "epsilon": 3.0, "delta": 1e-4, "lower_bound": 2.76, "confidence": 0.95, "trials": 9}
    (tmp_path / "audit.json").write_text(json.dumps({"audits": [{**audit, "event": "x"}], "above the claim": []}))
    asked = ["--ledger", ledger_url, "--purpose", "route <tickets>", "--audit", str(tmp_path / "audit.json")]
    text = report(capsys, *asked, "--format", form)
    for words in (
        "route &lt;tickets&gt;",
        "20.1 times likelier",
        "60 people",
        plan.digest,
        "langchain-dpicl ",
        "released",
        "2.76",
        "no number of people who were forgotten",
        "Who may read this",
        "Callers are not recorded",
    ):
        assert words.replace("_", "\\_" if form == "md" else "_") in text
    assert "CANARY" not in text
    assert not any(who in text for who in ("zoe7", "x7"))
    if form == "html":
        tags: list[tuple[str, Any]] = []
        parser = HTMLParser()
        parser.handle_starttag = lambda tag, attributes: tags.append((tag, attributes))  # type: ignore[method-assign]
        parser.feed(text)
        assert {name for name, _ in tags}.isdisjoint({"script", "link", "img", "iframe"}), "one file, and no script"
        assert not re.search("https?://|url[(]|@import", text)
    facts = json.loads(report(capsys, *asked, "--json"))
    assert facts["budgets"][0]["lines"]["vote-em"]["spent"] == 3


@pytest.mark.parametrize("how", [{"record_principals": True}, {"scope": "per_principal"}])
@pytest.mark.parametrize("form", ["md", "html"])
def test_callers_are_told_if_the_deployer_records_them(
    how: Any, form: str, embeddings: Any, ledger_url: str, capsys: Any
) -> None:
    """To the ledger's holder alone: the receipts that callers get, by a replay too, do not name another caller."""
    budget = ask(embeddings, ledger_url, **how)
    facts = json.loads(report(capsys, "--ledger", ledger_url, "--json"))
    assert facts["budgets"][0]["by_principal"] == {CALLERS[0]: 2, CALLERS[1]: 1}
    assert "who asked" in facts["readers"]
    text = report(capsys, "--ledger", ledger_url, "--format", form)
    assert "<b>zoe7" not in text
    assert "quin|x7" not in text or form == "html"
    if "scope" not in how:
        kept = budget.receipt("desk:vote-em:1")
        assert kept is not None
        assert "zoe7" not in json.dumps(kept)


def test_nobody_is_recorded_unless_the_deployer_asks(embeddings: Any, ledger_url: str) -> None:
    ask(embeddings, ledger_url).close()
    assert {row["principal"] for row in LedgerReport(ledger_url).history()} == {None}
    assert b"zoe7" not in Path(ledger_url.removeprefix("sqlite:///")).read_bytes()


def test_a_servers_file_gives_the_purpose_and_the_ledger(embeddings: Any, tmp_path: Path, capsys: Any) -> None:
    ask(embeddings, f"sqlite:///{tmp_path}/budget.db")
    budget = {"epsilon": 3, "delta": 1e-4, "releases": 10, "name": "desk", "ledger": "sqlite:///budget.db"}
    config = {"store": {"data": "t.csv"}, "release": {"kind": "vote", "labels": ["a", "b"]}, "selector": {"calls": 20}}
    (tmp_path / "t.csv").write_text("text,label\n")
    path = tmp_path / "server.yaml"
    path.write_text(json.dumps({**config, "budget": budget, "purpose": "triage", "server": {"anonymous": True}}))
    facts = json.loads(report(capsys, "--config", str(path), "--json"))
    assert (facts["purpose"], facts["budgets"][0]["name"]) == ("triage", "desk")
    assert json.loads(report(capsys, "--config", str(path), "--purpose", "x", "--json"))["purpose"] == "x"


def test_a_servers_file_reports_each_budget_in_each_ledger_and_the_heads(tmp_path: Path, capsys: Any) -> None:
    """A budget of two paths, one with a ledger of its own, a head, and a chain that only the deployer knows."""
    (tmp_path / "reviews.jsonl").write_text((tmp_path / "tickets.jsonl").read_text())
    (tmp_path / "visits.jsonl").write_text((tmp_path / "tickets.jsonl").read_text())
    (tmp_path / "chain_of_a_report.py").write_text(
        "from langchain_core.runnables import RunnableLambda as R\n\nmake = R"
    )
    release = {"kind": "label-vote", "labels": ["a", "b"]}
    voted = {"release": release, "selector": {"calls": 20}}
    budget = {"epsilon": 3, "delta": 1e-5, "accept_noise": True, "ledger": "sqlite:///budget.db"}
    own = {**budget, "releases": 10, "ledger": "sqlite:///own.db"}
    config: dict[str, Any] = {
        "budget": {**budget, "name": "common", "releases": {"tickets": 10, "reviews": 10}},
        "releases": [
            {"path": "/tickets", "store": {"data": "tickets.jsonl"}, **voted, "purpose": "which desk"},
            {"path": "/reviews", "store": {"data": "reviews.jsonl"}, **voted},
            {"path": "/visits", "store": {"data": "visits.jsonl"}, **voted, "budget": own},
            {"path": "/desk", "head": head_in(tmp_path, "head.npz")},
        ],
        **ACCESS,
    }
    path = str(file_of(tmp_path, config))
    assert main(["report", "--config", path]) == 1
    assert "budget.db" in capsys.readouterr().err, "nothing was frozen: the missing ledger is named"
    assert main(["serve", "--config", path, "--check"]) == 0
    assert "2 budgets and 1 head are 3 promises. They add up for whoever is in the data of all: epsilon 7 at delta" in (
        capsys.readouterr().out
    )
    freeze(read(path).build())
    config["releases"].append({"path": "/mine", "chain": "chain_of_mine:make"})
    path = str(file_of(tmp_path, config))
    facts = json.loads(report(capsys, "--config", path, "--json"))
    assert [(each["name"], list(each["paths"])) for each in facts["budgets"]] == [
        ("common", ["/tickets", "/reviews"]),
        ("visits", ["/visits"]),
    ]
    assert [Path(each["ledger"]).name for each in facts["ledgers"]] == ["budget.db", "own.db"]
    assert facts["heads"][0]["receipt"]["id"] == "b:head:1"
    text = report(capsys, "--config", path)
    for words in (
        "Budget common", "/tickets, for this purpose: which desk", "Budget visits", "Head /desk", "b:head:1",
        "2 budgets and 1 head are 3 promises", "epsilon 7 at", "/mine: a chain of the deployer's own",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("bad", ["nothing.json", "other.json"])
def test_a_file_that_is_no_audit_is_refused(
    bad: str, embeddings: Any, tmp_path: Path, capsys: Any, ledger_url: str
) -> None:
    ask(embeddings, ledger_url)
    (tmp_path / "other.json").write_text('{"audits": [{"mechanism": 1}]}')
    assert main(["report", "--ledger", ledger_url, "--audit", str(tmp_path / bad)]) == 1
    assert "--audit=" in capsys.readouterr().err
