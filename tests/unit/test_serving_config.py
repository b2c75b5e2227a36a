"""`serving.config` and ``dpicl serve`` up to the moment when it would listen."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import shutil
import sqlite3
import stat
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from earlier_release import copied_store
from fastapi.testclient import TestClient
from langchain_core.embeddings import DeterministicFakeEmbedding, FakeEmbeddings
from pydantic import Field
from serving_files import ACCESS, KEY, VOTE, ask, file_of, merged
from serving_files import models as models

from langchain_dpicl import ExemplarStore, InvalidParameter, PrivacyBudget, PrivateHead, View, local, opening, whole
from langchain_dpicl.cli import main
from langchain_dpicl.errors import InvalidRecords, LocalModelError, StoreFileError
from langchain_dpicl.once.views import JoinedViews
from langchain_dpicl.private import notes
from langchain_dpicl.release.base import releases_in
from langchain_dpicl.release.transaction import acting_for
from langchain_dpicl.serving import app as serving_app
from langchain_dpicl.serving.app import TimedProtocol, ask_heads, create_app, freeze, plans
from langchain_dpicl.serving.config import read
from langchain_dpicl.serving.guards import hash_of, new_key
from langchain_dpicl.store.base import embedder_of

# -- what a configuration makes ----------------------------------------------------------------------------------------


def test_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    yaml = """
store: {data: tickets.jsonl, owner_key: who}
release: {kind: vote, labels: [a, b]}
budget: {epsilon: 3, delta: 1e-5, releases: 30}
server: {port: 8001, path: /route}
"""
    toml = """
store = {data = "tickets.jsonl", owner_key = "who"}
release = {kind = "vote", labels = ["a", "b"]}
budget = {epsilon = 3, delta = 1e-5, releases = 30}
[server]
port = 8001
path = "/route"
"""
    assert read(file_of(tmp_path, yaml)) == read(file_of(tmp_path, toml, "server.toml"))


def test_a_vote_is_served_to_whoever_has_a_key(tmp_path: Path) -> None:
    settings = read(file_of(tmp_path, VOTE))
    app = create_app(settings)
    answered = ask(app, {"input": {"text": "a question"}})
    assert answered.json()["output"]["answer"] == "a"
    assert answered.json()["output"]["receipt"]["remaining"] == 29
    assert (tmp_path / "budget.db").exists(), "paths are relative to the file"
    with TestClient(app) as client:
        refused = client.post("/answer/invoke", json={"input": {"text": "x"}}, headers={"authorization": "Bearer no"})
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        for body in ({"input": {"text": ""}}, {"input": {"body": "x"}}, {"input": {"text": "x", "more": 1}}):
            bad = client.post("/answer/invoke", json=body, headers={"authorization": f"Bearer {KEY}"})
            assert bad.status_code == 422, "what the member cannot use is refused before the charge"
        for method, path in (("GET", "/nothing"), ("GET", "/docs"), ("DELETE", "/answer/invoke")):
            missing = client.request(method, path)
            assert missing.status_code in (404, 405)
            assert set(missing.json()) == {"error", "message"}
        assert client.get("/").headers["content-type"].startswith("text/html")
        document = client.get("/openapi.json").json()
    assert document["paths"]["/answer/batch"]["post"]["security"] == [{"HTTPBearer": []}]
    assert PrivacyBudget.open("tickets", f"sqlite:///{tmp_path / 'budget.db'}").spent() == 1


def test_a_saved_store_keeps_its_keys(tmp_path: Path) -> None:
    rows = [{"body": f"{i}", "desk": "ab"[i % 2]} for i in range(60)]
    fake = DeterministicFakeEmbedding(size=8)
    ExemplarStore.from_records(rows, fake, input_key="body", output_key="desk").save(tmp_path / "store.db")
    settings = read(file_of(tmp_path, merged(VOTE, {"store": {"file": "store.db"}})))
    assert ask(create_app(settings), {"input": {"body": "b question"}}).json()["output"]["answer"] == "b"


def test_a_store_beside_the_data_follows_it_and_says_so_if_it_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1, notes.NAME)  # as it is, and is again
    caplog.handler.setLevel(logging.DEBUG)
    settings = read(file_of(tmp_path, merged(VOTE, {"store.file": "kept.db", "store.skip_bad": True})))
    assert ask(create_app(settings), {"input": {"text": "b question"}}).json()["output"]["answer"] == "b"
    with (tmp_path / "tickets.jsonl").open("a") as file:
        file.write('\n{"text": "new", "label": "a", "who": "p60"}\n{"text": "CANARY", "label": "c", "who": "p61"}')
    create_app(settings)
    assert {record.name for record in caplog.records} <= {"langchain_dpicl.serving.steps"}
    create_app(settings.model_copy(update={"server": settings.server.model_copy(update={"log_private_notes": True})}))
    told = [record.getMessage() for record in caplog.records]
    assert any("1 of 62 records" in text for text in told)
    assert any("kept.db: up to date" in text for text in told)
    assert "CANARY" not in caplog.text
    assert len(ExemplarStore.load(tmp_path / "kept.db", DeterministicFakeEmbedding(size=8))) == 61
    with pytest.raises(InvalidRecords, match=r"1 of 62 records .* no label of the list under 'label' \(line 62\)"):
        read(file_of(tmp_path, VOTE)).build()


class Counting(DeterministicFakeEmbedding):
    """Keeps the texts that it embeds."""

    seen: list[str] = Field(default_factory=list)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.seen += texts
        return super().embed_documents(texts)


def test_data_alone_is_embedded_once_and_followed_and_brings_nobody_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Counting(size=8)
    monkeypatch.setattr(local, "local_embeddings", lambda: model)
    settings = read(file_of(tmp_path, VOTE))
    file = tmp_path / "tickets.jsonl.store"

    def embedded() -> list[str]:
        model.seen.clear()
        releases_in(settings.build())[0].store.close()
        return [text for text in model.seen if text not in ("word", "text 0")]

    assert embedded() == [f"text {i}" for i in range(1, 60)]
    for each in (file, tmp_path / "tickets.jsonl.store.lock"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    assert embedded() == []
    rows = (tmp_path / "tickets.jsonl").read_text().split("\n")
    rows[7:9] = ['{"text": "new", "label": "a", "who": "p7"}']
    (tmp_path / "tickets.jsonl").write_text("\n".join(rows))
    assert embedded() == ["new"]
    assert main(["forget", "--store", str(file), "--owner", "p9"]) == 0
    assert "1 exemplars went, 58 owners are left" in capsys.readouterr().out
    assert embedded() == []
    store = ExemplarStore.load(file, model)
    assert {"p7", "p8", "p9"} & set(store.owners) == {"p7"}
    assert len(store) == 58
    store.close()


def test_a_store_of_an_earlier_release_is_refused_with_the_command(tmp_path: Path) -> None:
    for path, changes in (("old.npz", {"store": {"file": "old.npz"}}), ("kept.npz", {"store.file": "kept.npz"})):
        copied_store(tmp_path).rename(tmp_path / path)
        with pytest.raises(StoreFileError, match=f"dpicl upgrade {path}"):
            read(file_of(tmp_path, merged(VOTE, changes))).build()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs the rights of root")
def test_data_alone_in_a_folder_that_cannot_be_written_needs_a_place(capsys: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "tickets.jsonl").write_text('{"text": "CANARY", "label": "a", "who": "p1"}')
        settings = read(file_of(folder, VOTE))
        try:
            os.seteuid(12345)
            with pytest.raises(
                InvalidParameter, match="file=None is not allowed: given, in a folder that can be"
            ) as told:
                settings.build()
            fit = f"fit --data {folder}/tickets.jsonl --labels a,b --epsilon 1 --output {folder}/head.npz"
            assert main(fit.split()) == 1
            assert "--store=None is not allowed: given, in a folder that can be written" in capsys.readouterr().err
        finally:
            os.seteuid(0)
        assert "CANARY" not in str(told.value)
        assert {each.name for each in folder.iterdir()} == {"tickets.jsonl", "server.yaml"}


@pytest.mark.parametrize(
    ("release", "mechanism"),
    [
        ({"kind": "vote", "labels": ["a", "b"], "scores": True}, "scores"),
        ({"kind": "vote", "labels": ["a", "b"], "details": True}, "scores"),
        ({"kind": "vote", "labels": ["a", "b"], "mechanism": "vote-em", "lead": 0.5, "prior": {"a": 0.5}}, "vote-em"),
        ({"kind": "vote", "labels": ["a", "b"], "prior": "zero_shot"}, "vote"),
        ({"kind": "label-vote", "labels": ["a", "b"], "prior": {"a": 0.9, "b": 0.1}}, "vote"),
        ({"kind": "embedding", "candidates": "public.txt"}, "embedding"),
        ({"kind": "joint-em", "k": 2}, "joint-em"),
        ({"kind": "joint-em", "k": 1, "domain": "public.txt"}, "joint-em"),
        ({"kind": "ptr", "k": [2, 4]}, "ptr"),
        ({"kind": "ptr", "k": 3}, "ptr"),
    ],
)
def test_every_kind_of_release_is_served(release: dict[str, Any], mechanism: str, tmp_path: Path) -> None:
    (tmp_path / "public.txt").write_text("spray and inhaler\n\ngo home\n")
    settings = read(file_of(tmp_path, {**VOTE, "release": release}))
    chain = settings.build()
    assert releases_in(chain)[0].aggregator.mechanism == mechanism
    response = ask(create_app(settings, chain), {"input": {"text": "a spray for my cough"}})
    assert response.status_code == 200, response.text
    if release["kind"] == "embedding":
        assert response.json()["output"]["answer"] == "spray and inhaler"


def test_a_vote_of_labels_with_details_is_served_and_described(tmp_path: Path, monkeypatch: Any) -> None:
    """At a rate of 1 all 60 owners vote, 30 for each label, and noise of epsilon 300 moves a count by 4 with a
    probability below 1e-12."""
    monkeypatch.setattr(local, "local_llm", lambda *_, **__: pytest.fail("a model is asked"))
    release = {"kind": "label-vote", "labels": ["a", "b"], "details": True, "prior": {"a": 0.9, "b": 0.1}}
    selector = {"calls": 60, "threshold": -1.0, "eligible": 60, "pad_to": 2}
    app = create_app(read(file_of(tmp_path, {**VOTE, "release": release, "selector": selector})))
    found = ask(app, {"input": {"text": "a cough at night"}}).json()["output"]
    assert set(found["answer"]) == {"label", "confidence", "counts"}
    assert all(abs(count - 30) < 4 for count in found["answer"]["counts"].values())
    assert "discrete Gaussian" in found["receipt"]["mechanism"]
    with TestClient(app) as client:
        document = client.get("/openapi.json").json()
    described = document["components"]["schemas"]["VoteDetails"]
    assert set(described["required"]) == {"label", "confidence", "counts"}
    assert described["properties"]["counts"]["additionalProperties"] == {"type": "integer"}


@pytest.mark.parametrize(
    ("selector", "crowd"),
    [
        (None, (20, False)),
        ({"members": 5}, (5, False)),
        ({"members": 5, "rate": 0.5, "max_exemplars": 4, "count_empty": True}, (5, False)),
        ({"calls": 6}, (15, True)),
        ({"calls": 6, "pad_to": 9}, (9, True)),
        ({"calls": 6, "max_calls": 8}, (8, False)),
    ],
)
def test_the_file_says_who_shares_a_call(selector: Any, crowd: tuple[int, bool], tmp_path: Path) -> None:
    chain = read(file_of(tmp_path, merged(VOTE, {"selector": selector}))).build()
    release = releases_in(chain)[0]
    assert (release.selector.members, release.selector.own_calls) == crowd
    assert release.ensemble.count_empty == bool((selector or {}).get("count_empty"))
    create_app(read(file_of(tmp_path, VOTE)), chain)
    with acting_for("anybody"):
        assert chain.invoke({"text": "a question"})["answer"] == "a"
    line = release.budget.plan.lines[release.line().name]
    assert line.own_calls == crowd[1]


OWN = """
from langchain_core.runnables import RunnableLambda
from langchain_dpicl.serving.config import read

def chain():
    return read({path!r}).build() | RunnableLambda(lambda found: found["answer"].upper())

def nothing():
    return "not a chain"
"""


def test_a_chain_of_ones_own_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    inner = file_of(tmp_path, VOTE, "inner.yaml")
    (tmp_path / "own_chain_of_a_test.py").write_text(OWN.format(path=str(inner)))
    outer = {"chain": "own_chain_of_a_test:chain", "server": {"path": "/shout"}, **ACCESS}
    app = create_app(read(file_of(tmp_path, outer)))
    assert ask(app, {"input": {"text": "a question"}}, "/shout").json()["output"] == "A"
    for name in ("own_chain_of_a_test:absent", "absent_module:chain", "own_chain_of_a_test:nothing"):
        with pytest.raises(InvalidParameter) as caught:
            read(file_of(tmp_path, {**outer, "chain": name})).build()
        assert caught.value.parameter == "chain"


def test_calls_are_limited_as_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")

    def ensemble(**model: Any) -> Any:
        return read(file_of(tmp_path, merged(VOTE, {"model": model}))).build().bound.ensemble  # type: ignore[attr-defined]

    url = "http://127.0.0.1:9/v1"
    limited = ensemble(url=url, name="m", timeout=7, max_concurrency=2)
    assert (limited.timeout, limited.max_concurrency) == (7.0, 2)
    assert ensemble(url=url, name="m").timeout == 120
    assert ensemble(url=url, name="m", timeout=None).timeout is None


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"surprise": 1}, "surprise"),
        ({"budget.epsilom": 1}, "budget.epsilom"),
        ({"budget.epsilon": "much"}, "budget.epsilon"),
        ({"budget.delta": None}, "budget.delta"),
        ({"budget.scope": "everybody"}, "budget.scope"),
        ({"release.kind": "guess"}, "release.kind"),
        ({"release.kind": None}, "release.kind"),
        ({"release.labels": None}, "release.labels"),
        ({"release.k": 3}, "release.k"),
        ({"store.data": None}, "store"),
        ({"store.file": "s.npz", "store.url": "postgresql://h/d"}, "store"),
        ({"store.name": "notes"}, "store.name"),
        ({"store.vectors_in_memory": False}, "store.vectors_in_memory"),
        ({"store": {"url": "postgresql://h/d", "delimiter": ";"}}, "store.delimiter"),
        ({"store": {"url": "sqlite:///CANARY.db"}}, "store.url"),
        ({"store": {"url": "CANARY"}}, "store.url"),
        ({"store.url": "postgresql://h/d", "store.name": "No name"}, "store.name"),
        ({"store": None}, "server.yaml"),
        ({"chain": "own:chain"}, "server.yaml"),
        ({"chain": "own"}, "chain"),
        ({"release.prior": "one_shot"}, "release.prior"),
        ({"release.mechanism": "ptr"}, "release.mechanism"),
        (
            {"release": {"kind": "label-vote", "labels": ["a", "b"], "instruction": "x"}},
            "release.instruction",
        ),
        ({"release": {"kind": "label-vote", "labels": ["a", "b"], "prior": "zero_shot"}}, "release.prior"),
        ({"release": {"kind": "label-vote", "labels": ["a", "b"]}, "model": {"name": "m"}}, "server.yaml"),
        ({"selector.calls": "many"}, "selector.calls"),
        ({"budget.accept_noise": "much"}, "budget.accept_noise"),
        ({"model": {"timeout": 0}}, "model.timeout"),
        ({"model": {"timeout": "long"}}, "model.timeout"),
        ({"model": {"max_concurrency": 0}}, "model.max_concurrency"),
        ({"server.port": 99999}, "server.port"),
        ({"server.workers": 0}, "server.workers"),
        ({"server.path": "answer"}, "server.path"),
        ({"folder": "/"}, "folder"),
        ({"keys": ["mobile"]}, "keys"),
    ],
)
def test_faults_are_named_by_section_and_field(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read(file_of(tmp_path, merged(VOTE, changes)))
    assert caught.value.parameter == field
    assert KEY not in str(caught.value)
    assert hash_of(KEY) not in str(caught.value)


def test_all_mistakes_are_told_at_once(tmp_path: Path, capsys: Any) -> None:
    wrong = {"budget.epsilon": -1, "budget.delta": 2, "budget.tickets": True, "selector.callz": 3, "keys": {"a": KEY}}
    path = file_of(tmp_path, merged(VOTE, {**wrong, "store.data": "no.csv", "release": {"kind": "label-vote"}}))
    code, out, err = run(capsys, "--config", str(path), "--check", "--json")
    assert code == 1
    assert json.loads(out)["error"] == "InvalidConfiguration"
    fields = "budget.epsilon budget.delta selector.callz release.labels store.data".split()
    for words in (*fields, "there is no 'no.csv'", "budget.tickets needs selector.threshold"):
        assert words in err
    assert KEY not in out + err


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"selector.calls": 6}, "selector.members"),
        ({"selector": {"members": 5, "pad_to": 9}}, "selector.pad_to"),
        ({"selector": {"members": 5, "max_calls": 9}}, "selector.max_calls"),
        ({"selector": {"calls": 6, "max_calls": 3}}, "selector.max_calls"),
        ({"selector": {"calls": 0}}, "selector.calls"),
        ({"selector": {"calls": 6, "count_empty": True}}, "selector.count_empty"),
        ({"release.prior": {"c": 1}}, "release.prior"),
        ({"release.lead": 2}, "release.lead"),
        ({"release.scores": True, "release.details": True}, "release.details"),
        ({"release.details": True, "release.mechanism": "vote-em"}, "release.mechanism"),
    ],
)
def test_votes_that_cannot_work_are_refused_before_any_ledger(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read(file_of(tmp_path, merged(VOTE, changes))).build()
    assert caught.value.parameter == field


def test_a_plan_that_is_all_noise_is_served_only_if_the_file_accepts_it(tmp_path: Path, capsys: Any) -> None:
    noisy = {"budget.epsilon": 0.1, "budget.releases": 1000}
    code, _, err = run(capsys, "--config", str(file_of(tmp_path, merged(VOTE, noisy))), "--check")
    assert code == 1
    assert "accept_noise" in err
    accepted = str(file_of(tmp_path, merged(VOTE, {**noisy, "budget.accept_noise": True})))
    code, out, _ = run(capsys, "--config", accepted, "--check")
    assert (code, "not frozen yet" in out) == (0, True)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.yaml", "a: [1"), ("a.yaml", "- 1"), ("a.yaml", ""), ("a.toml", "a ="), ("a.yaml", "1: 2"), ("no.yaml", None)],
)
def test_files_that_are_no_configuration_are_refused(name: str, content: str | None, tmp_path: Path) -> None:
    path = tmp_path / name if content is None else file_of(tmp_path, content, name)
    with pytest.raises(InvalidParameter) as caught:
        read(path)
    assert caught.value.parameter == "config"


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": None},
        {"keys": {}},
        {"keys": None, "server.host": "0.0.0.0", "server.anonymous": True},
        {"keys": None, "server.host": "127.0.0.1"},
        {"server.anonymous": True},
        {"keys": {"mobile": KEY}},
    ],
)
def test_nobody_is_served_by_accident(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = read(file_of(tmp_path, merged(VOTE, changes)))
    with pytest.raises(InvalidParameter) as caught:
        create_app(settings)
    assert KEY not in str(caught.value)


def test_without_keys_only_this_machine_by_its_own_name_is_served(tmp_path: Path) -> None:
    settings = read(file_of(tmp_path, merged(VOTE, {"keys": None, "server.anonymous": True})))
    app = create_app(settings)
    body = {"input": {"text": "a question"}}
    with TestClient(app, base_url="http://localhost:8000") as client:
        assert client.post("/answer/invoke", json=body).status_code == 200
    with TestClient(app, base_url="http://rebound.example:8000") as client:
        assert client.post("/answer/invoke", json=body).status_code == 401


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_a_look_at_the_plan_freezes_nothing_and_freezing_does(tmp_path: Path) -> None:
    chain = read(file_of(tmp_path, VOTE)).build()
    (before,) = plans(chain)
    assert not before["frozen"]
    assert releases_in(chain)[0].budget.plan is None
    freeze(chain)
    (after,) = plans(chain)
    assert after["frozen"]
    assert before["lines"] == after["lines"], "the plan that was shown is the one that holds"
    assert after["lines"][0]["left"] == 30


def test_per_principal_budgets_have_no_common_number(tmp_path: Path, capsys: Any) -> None:
    """Not before the plan is frozen either."""
    path = file_of(tmp_path, merged(VOTE, {"budget.scope": "per_principal"}))
    chain = read(path).build()
    (before,) = plans(chain)
    code, out, _ = run(capsys, "--config", str(path), "--check")
    freeze(chain)
    (after,) = plans(chain)
    assert (before["frozen"], after["frozen"]) == (False, True)
    assert before["lines"] == after["lines"]
    assert (after["lines"][0]["spent"], after["lines"][0]["left"]) == (None, None)
    assert code == 0
    assert "30 releases, for each caller; rate" in out


# -- where owners pay with tickets -------------------------------------------------------------------------------------

NEAR: dict[str, Any] = {
    "selector.threshold": -1,  # everybody is near to everything
    "selector.eligible": 20,
    "budget.tickets": True,
    "budget.name": "near",
}


def test_yaml_and_toml_say_the_same_of_tickets(tmp_path: Path) -> None:
    toml = f"""
store = {{data = "tickets.jsonl", owner_key = "who"}}
release = {{kind = "vote", labels = ["a", "b"]}}
selector = {{members = 10, shots = 2, threshold = -1, eligible = 20}}
[budget]
epsilon = 300
delta = 1e-5
releases = 30
ledger = "sqlite:///budget.db"
name = "near"
tickets = true
[keys]
mobile = "{hash_of(KEY)}"
"""
    settings = read(file_of(tmp_path, toml, "server.toml"))
    assert settings == read(file_of(tmp_path, merged(VOTE, NEAR)))
    (release,) = releases_in(settings.build())
    assert release.budget.tickets
    assert (release.selector.threshold, release.selector.nearest_to, release.selector.rate) == (-1.0, "text", 1.0)


def test_questions_have_no_end_and_each_answer_says_nothing_of_tickets(tmp_path: Path) -> None:
    settings = read(file_of(tmp_path, merged(VOTE, {**NEAR, "budget.releases": 2, "budget.replay": False})))
    headers = {"authorization": f"Bearer {KEY}"}
    with TestClient(create_app(settings)) as client:
        states = [client.get("/answer/budget", headers=headers).json()]
        for _ in range(4):  # after two, no owner has a ticket
            answered = client.post("/answer/invoke", json={"input": {"text": "a question"}}, headers=headers)
            assert answered.status_code == 200, answered.text
            assert answered.json()["output"]["receipt"]["remaining"] is None
            assert "ticket" not in json.dumps(answered.json())
            states.append(client.get("/answer/budget", headers=headers).json())
        blank = client.post("/answer/invoke", json={"input": {"text": "  "}}, headers=headers)
        assert blank.status_code == 422, "nothing is near to it"
        assert client.get("/answer/budget", headers=headers).json() == states[-1], "and it cost nothing"
    for number, state in enumerate(states):
        public = {**state, "epsilon_spent": 0, "share_spent": 0}
        first = {**states[0], "epsilon_spent": 0, "share_spent": 0}
        line = {**first["lines"]["vote-winner"], "spent": number}
        assert public == {**first, "lines": {"vote-winner": line}}
    assert [state["epsilon_spent"] for state in states[2:]] == [300.0] * 3
    budget = PrivacyBudget.open("near", f"sqlite:///{tmp_path / 'budget.db'}")
    assert budget.private_ticket_report()["vote-winner"][""]["burnt"] == {"2": 60}
    budget.close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"selector.threshold": 1.01}, "selector.threshold"),
        ({"selector.threshold": -1.01}, "selector.threshold"),
        ({"selector.threshold": "near"}, "selector.threshold"),
        ({"selector.threshold": True}, "selector.threshold"),
        ({"selector.threshold": float("nan")}, "selector.threshold"),
        ({"selector.eligible": 0}, "selector.eligible"),
        ({"selector.eligible": 2.5}, "selector.eligible"),
        ({"selector.eligible": None}, "selector"),
        ({"selector.threshold": None}, "selector"),
        ({"selector.threshold": None, "selector.eligible": None}, "server.yaml"),
        ({"budget.tickets": "many"}, "budget.tickets"),
        ({"budget.soft_limit": 0.8}, "budget.soft_limit"),
    ],
)
def test_tickets_and_gates_that_cannot_work_are_refused(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    content = json.dumps(merged(merged(VOTE, NEAR), changes)).replace("NaN", ".nan")
    with pytest.raises(InvalidParameter) as caught:
        read(file_of(tmp_path, content))
    assert caught.value.parameter == field


@pytest.mark.parametrize("scope", ["shared", "per_principal"])
def test_the_plan_of_a_ticket_budget_is_shown_without_an_end(scope: str, tmp_path: Path, capsys: Any) -> None:
    path = file_of(tmp_path, merged(VOTE, {**NEAR, "budget.scope": scope, "budget.releases": 2}))
    chain = read(path).build()
    (before,) = plans(chain)
    freeze(chain)
    with acting_for("mobile"):
        for i in range(5):
            chain.invoke({"text": f"a question {i}"})
    (after,) = plans(chain)
    assert (before["tickets"], after["tickets"], before["frozen"], after["frozen"]) == (True, True, False, True)
    assert (before["lines"][0]["left"], after["lines"][0]["left"]) == (None, None)
    assert before["lines"][0]["parameter"] == after["lines"][0]["parameter"]
    code, out, _ = run(capsys, "--config", str(path), "--check")
    assert code == 0
    said = "no last answer, 5 so far" if scope == "shared" else "no last answer for each caller"
    assert f"vote-winner: {said}; each owner takes part in at most 2; rate 1" in out
    assert " left" not in out


@pytest.mark.filterwarnings("ignore:.*other budgets were opened")
def test_a_server_replays_an_answer_to_the_caller_who_asked_unless_told_otherwise(tmp_path: Path) -> None:
    """Two keys on one shared budget: by default the second caller's equal question is a new one, and refused when the
    budget is spent, as an unknown one is. With ``replay: true`` he gets the first one's answer, number and second."""
    other = new_key()
    two = {"keys": {"mobile": hash_of(KEY), "web": hash_of(other)}, "budget.epsilon": 100}

    def answers(name: str, changes: dict[str, Any]) -> list[Any]:
        ledger = {"budget.ledger": f"sqlite:///{name}.db", "budget.releases": 2}
        seen = []
        with TestClient(create_app(read(file_of(tmp_path, merged(VOTE, {**two, **ledger, **changes}))))) as client:
            for key, text in ((KEY, "a"), (other, "a"), (KEY, "a"), (KEY, "b"), (other, "b"), (other, "c")):
                got = client.post(
                    "/answer/invoke", json={"input": {"text": text}}, headers={"authorization": f"Bearer {key}"}
                )
                receipt = got.json().get("output", {}).get("receipt", {})
                seen.append((got.status_code, receipt.get("number"), receipt.get("replayed")))
            state = client.get("/answer/budget", headers={"authorization": f"Bearer {KEY}"}).json()
        return [*seen, state["replay"]]

    new, known, no = (200, 2, False), (200, 1, True), (429, None, None)
    assert answers("apart", {}) == [(200, 1, False), new, known, no, no, no, "principal"]
    assert answers("all", {"budget.replay": True}) == [(200, 1, False), known, known, new, (200, 2, True), no, True]
    assert answers("none", {"budget.replay": False}) == [(200, 1, False), new, no, no, no, no, False]


# -- a head ------------------------------------------------------------------------------------------------------------

HEAD = {"head": "head.npz", **ACCESS}


@pytest.fixture
def head(tmp_path: Path) -> PrivateHead:
    """A head that was fitted on the file's records and saved beside it. The ledger of its fit is gone."""
    folder = tmp_path / "fitted"
    folder.mkdir()
    rows = [{"text": f"text {i}", "label": "ab"[i % 2]} for i in range(200)]
    store = ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=8), input_key="text", output_key="label")
    with closing(PrivacyBudget(3, 1e-5, {"head": 1}, f"sqlite:///{folder}/heads.db", "tickets-head")) as budget:
        made = PrivateHead.fit(store, ["a", "b"], budget, views=[whole, opening(2)], input_key="text", progress=False)
    made.save(tmp_path / "head.npz")
    shutil.rmtree(folder)
    return made


def test_a_head_is_served_from_its_file_without_a_ledger(tmp_path: Path, head: PrivateHead) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    for content in (HEAD, merged(HEAD, {"head": {"file": "head.npz"}})):
        settings = read(file_of(tmp_path, content, "head.yaml"))
        with TestClient(create_app(settings), headers={"authorization": f"Bearer {KEY}"}) as client:
            for asked in ("a question", {"text": "a question"}):
                output = client.post("/answer/invoke", json={"input": asked}).json()["output"]
                assert output == head.invoke("a question")
            assert client.get("/answer/heads").json() == [{"labels": ["a", "b"], "receipt": dict(head.receipt)}]
            page = client.get("/").text
    assert '"inputKey": "text", "needsKey": true, "line": null, "head": true' in page
    assert sorted(path.name for path in tmp_path.iterdir()) == [*before[:1], "head.yaml", *before[1:]]


def test_a_chain_with_a_head_is_served(tmp_path: Path, head: PrivateHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    own = f"""
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_dpicl import PrivateHead

def chain():
    head = PrivateHead.load({str(tmp_path / "head.npz")!r}, DeterministicFakeEmbedding(size=8))
    return head | RunnableLambda(lambda answer: answer["label"].upper())
"""
    (tmp_path / "own_head_of_a_test.py").write_text(own)
    app = create_app(read(file_of(tmp_path, {"chain": "own_head_of_a_test:chain", **ACCESS})))
    answered = ask(app, {"input": "a question"})
    assert answered.json()["output"] == head.invoke("a question")["label"].upper()


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"chain": "own:chain"}, "server.yaml", "chain stands alone: leave out head"),
        ({"budget": VOTE["budget"]}, "server.yaml", "head stands alone: leave out budget"),
        ({"store": VOTE["store"]}, "server.yaml", "head stands alone: leave out store"),
        ({"model": {"timeout": 3}}, "server.yaml", "leave out model.timeout"),
        ({"chain": "own:chain", "head": None, "model": {}}, "server.yaml", "chain stands alone: leave out model"),
        ({"selector": {}, "release": VOTE["release"]}, "server.yaml", "leave out release, selector"),
        ({"server.input_key": "text"}, "server.yaml", "leave out server.input_key"),
        ({"head": 3}, "head", "valid dictionary"),
        ({"head": []}, "head", "valid dictionary"),
        ({"head": {}}, "head.file", "required"),
        ({"head": {"file": "head.npz", "epsilon": 1}}, "head.epsilon", "not permitted"),
        ({"head": None}, "server.yaml", "missing: store, release, budget (or head, or chain)"),
    ],
)
def test_what_makes_no_sense_beside_a_head_is_refused(
    changes: dict[str, Any], field: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read(file_of(tmp_path, merged(HEAD, changes)))
    assert caught.value.parameter == field
    assert words in str(caught.value)


def test_another_file_or_another_model_is_refused_when_the_server_starts(
    tmp_path: Path, head: PrivateHead, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noise.npz").write_bytes(b"PK and no more")
    for name, receipt in (("bare.npz", {"id": "b:head:1"}), ("odd.npz", {**head.receipt, "epsilon": "one"})):
        other = copy.copy(head)
        other.receipt = receipt  # type: ignore[assignment]
        other.save(tmp_path / name)
    path = file_of(tmp_path, HEAD)
    for name, words in (
        ("missing.npz", "there is no 'missing.npz'"),
        ("noise.npz", "a head's file"),
        ("", "a head's file"),
        ("bare.npz", "a head"),
        ("odd.npz", "a head"),
    ):
        with pytest.raises(InvalidParameter, match=words) as caught:
            create_app(read(file_of(tmp_path, merged(HEAD, {"head": name}), "other.yaml")))
        assert caught.value.parameter == "head.file"
        assert caught.value.__context__ is None
    other = copy.copy(head)
    other.views = JoinedViews((whole, View("mine", str.lower)), (8, 8))
    other.save(tmp_path / "own.npz")
    with pytest.raises(InvalidParameter, match="with 'mine'") as caught:
        create_app(read(file_of(tmp_path, merged(HEAD, {"head": "own.npz"}), "other.yaml")))
    assert caught.value.parameter == "head.file"
    with pytest.raises(InvalidParameter, match="looks at no label scores") as caught:
        read(file_of(tmp_path, merged(HEAD, {"model.name": "smollm2-135m-instruct"}), "other.yaml")).build()
    assert caught.value.parameter == "model"
    monkeypatch.setattr(local, "local_embeddings", lambda: FakeEmbeddings(size=8))
    code, out, err = run(capsys, "--config", str(path), "--check")
    assert (code, out, len(err.splitlines())) == (1, "", 3), "two steps, and the error"
    assert "head.embeddings='FakeEmbeddings()' is not allowed: DeterministicFakeEmbedding()" in err
    monkeypatch.setattr(local, "local_embeddings", lambda: DeterministicFakeEmbedding(size=9))
    code, out, err = run(capsys, "--config", str(path), "--check")
    assert (code, out, len(err.splitlines())) == (1, "", 3), "two steps, and the error"
    assert "9 dimensions" in err, "a model of the same name is asked once"


def test_a_heads_model_is_the_one_in_its_folder(
    tmp_path: Path, head: PrivateHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by that folder, so that no other model takes its place."""
    monkeypatch.undo()
    assert embedder_of(local.local_embeddings()) == "LocalEmbeddings()"
    named: Any = local.local_embeddings(tmp_path / "models" / "other")
    assert embedder_of(named) == "LocalEmbeddings(other)"
    head.embeddings, head.embedder = named, embedder_of(named)
    head.save(tmp_path / "head.npz")
    section = {"file": "head.npz", "embeddings": "models/other"}
    chain: Any = read(file_of(tmp_path, merged(HEAD, {"head": section}))).build()
    assert chain.embeddings is named
    with pytest.raises(InvalidParameter, match=r"LocalEmbeddings\(other\), the model") as caught:
        read(file_of(tmp_path, HEAD)).build()
    assert caught.value.parameter == "head.embeddings"
    with pytest.raises(LocalModelError, match="no such folder"):
        ask_heads(chain)


def test_check_shows_what_a_head_is_and_what_it_cost(tmp_path: Path, head: PrivateHead, capsys: Any) -> None:
    path = str(file_of(tmp_path, HEAD))
    code, out, _ = run(capsys, "--config", path, "--check", "--port", "9999")
    assert code == 0
    first, cost, free, where = out.splitlines()
    assert first == "head tickets-head:head:1: a, b"
    assert cost.startswith("  released once: ")
    assert cost.endswith(f"epsilon {head.receipt['epsilon_spent']:.3g} of 3 spent at delta 1e-05")
    assert free == "  no last answer, and none costs anything; embeddings: DeterministicFakeEmbedding()"
    assert where == "http://127.0.0.1:9999/answer (workers: 1; keys: mobile)"
    found = json.loads(run(capsys, "--config", path, "--check", "--json")[1])
    about = {"labels": ["a", "b"], "embedder": "DeterministicFakeEmbedding()", "input_key": "text"}
    assert found["heads"] == [{**about, "receipt": dict(head.receipt)}]
    assert found["budgets"] == []
    assert not list(tmp_path.glob("*.db*"))


# -- the command -------------------------------------------------------------------------------------------------------


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = main(["serve", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_new_key_is_shown_once_with_its_hash(tmp_path: Path, capsys: Any) -> None:
    code, out, _ = run(capsys, "--new-key", "mobile")
    assert code == 0
    key, _, _, line, _, metrics = out.strip().splitlines()
    assert line.strip() == f"mobile: {hash_of(key)}"
    assert metrics.strip() == f"metrics: {{key: {hash_of(key)}}}"
    made = json.loads(run(capsys, "--new-key", "web", "--json")[1])
    assert made["sha256"] == hash_of(made["key"])
    assert run(capsys, "--new-key", "a b")[0] == 1


def test_check_prints_the_plan_and_does_not_listen(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: pytest.fail("it listens"))
    path = str(file_of(tmp_path, VOTE))
    code, out, _ = run(capsys, "--config", path, "--check", "--port", "9999")
    assert code == 0
    assert "epsilon 300" in out
    assert "30 releases, 30 left" in out
    assert ":9999/answer" in out
    found = json.loads(run(capsys, "--config", path, "--check", "--json")[1])
    assert found["budgets"][0]["lines"][0]["parameter"] > 0
    assert PrivacyBudget(300, 1e-5, 30, f"sqlite:///{tmp_path / 'budget.db'}", "tickets").plan is None
    code, _, err = run(capsys, "--config", path, "--check", "--host", "0.0.0.0", "--workers", "0")
    assert code == 1
    assert "server.workers" in err


def test_a_server_does_not_start_on_a_ledger_that_was_restored(tmp_path: Path, capsys: Any) -> None:
    """In one line after the steps, before any worker. The witness is where the configuration says."""
    path = str(file_of(tmp_path, merged(VOTE, {"budget.witness": "elsewhere/w"})))
    (tmp_path / "elsewhere").mkdir()
    assert run(capsys, "--config", path, "--check")[0] == 0
    assert (tmp_path / "elsewhere" / "w").exists()
    assert not (tmp_path / "budget.db.witness").exists()
    (tmp_path / "elsewhere" / "w").unlink()
    for more in ((), ("--check",)):
        code, out, err = run(capsys, "--config", path, *more)
        assert (code, out, len(err.splitlines())) == (1, "", 3), "two steps, and the error"
        assert "dpicl serve: the ledger " in err
        assert "has no witness" in err
        assert "dpicl budget recover" in err


def test_the_plan_is_frozen_before_workers_start_and_they_open_it(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    started: list[Any] = []

    def listen(what: Any, **how: Any) -> None:
        with sqlite3.connect(tmp_path / "budget.db") as ledger:
            assert ledger.execute("SELECT count(*) FROM dpicl_plans").fetchone() == (1,)
        started.append((what, how))

    monkeypatch.setenv(serving_app.ENVIRONMENT, "")  # so that it is taken back afterwards
    monkeypatch.setattr("uvicorn.run", listen)
    assert run(capsys, "--config", str(file_of(tmp_path, VOTE)), "--workers", "3")[0] == 0
    ((what, how),) = started
    assert what == "langchain_dpicl.serving.app:from_environment"
    assert (how["workers"], how["factory"], how["server_header"]) == (3, True, False)
    assert (how["http"].func, how["http"].keywords) == (TimedProtocol, {"header_seconds": 10.0})
    assert how["timeout_worker_healthcheck"] >= 60, "uvicorn's 5 seconds are few for a worker that loads a model"
    assert pickle.loads(pickle.dumps(how["http"])).keywords == how["http"].keywords  # noqa: S301 - our own bytes, as workers get them
    assert ask(serving_app.from_environment(), {"input": {"text": "b"}}).json()["output"]["answer"] == "b"
