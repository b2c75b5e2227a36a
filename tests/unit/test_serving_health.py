"""`serving.health`: what lives, what is ready, and that neither says, costs or changes anything else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ears import Spy
from fastapi.testclient import TestClient
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
    PrivateHead,
)
from langchain_dpicl.once.steps import FeatureMap
from langchain_dpicl.serving import app as serving_app
from langchain_dpicl.serving import health
from langchain_dpicl.serving.app import create_app
from langchain_dpicl.serving.config import Configuration
from langchain_dpicl.serving.guards import hash_of, new_key

Make = Callable[..., Any]
CANARY = "CANARY-7f3a-mrs-alder-of-9-elm-street"
KEY = new_key()
ALICE = {"authorization": f"Bearer {KEY}"}
ALL = {"ready": True, "store": True, "ledger": True, "model": True}


class Told(Spy):
    """What the member does, and what it was asked."""

    def __init__(self) -> None:
        self.fails, self.hangs, self.asked = False, None, []


Model: Any = Told()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    Model.__init__()
    monkeypatch.setattr(serving_app, "warm", serving_app.freeze)
    monkeypatch.setattr(health, "_AGAIN", {"store": 0.0, "ledger": 0.0, "model": 0.0, "server": 0.0})
    monkeypatch.setattr(health, "_AFTER_TROUBLE", 0.0)
    return Model


def member(values: Any) -> str:
    if Model.hangs is not None:
        Model.hangs.wait(20)
    if Model.fails:
        raise RuntimeError(CANARY)
    Model.asked.append((dict(values), len(values["examples"])))
    return "Positive"


MEMBER = RunnableLambda(member)


@pytest.fixture
def client_of(sealed_of: Make, model: Any) -> Any:
    opened: list[TestClient] = []

    def make(chosen: Any = MEMBER, question: Any = None, **options: Any) -> tuple[TestClient, Any]:
        chain = sealed_of(chosen, **options)
        settings = Configuration(
            chain="its:own",
            keys={"alice": hash_of(KEY)},
            server={"ready_question": question},  # type: ignore[arg-type]
        )
        opened.append(TestClient(create_app(settings, chain)))
        opened[-1].__enter__()
        return opened[-1], chain

    yield make
    for client in opened:
        client.__exit__(None, None, None)


def test_a_server_lives_and_is_ready_without_a_key_and_at_no_cost(client_of: Make, model: Any) -> None:
    client, chain = client_of()
    assert client.get("/health").json() == {"alive": True}
    answer = client.get("/ready")
    assert (answer.status_code, answer.json()) == (200, ALL)
    assert model.asked == [({"input": "ready?", "examples": []}, 0)], "a public question, without an example"
    assert chain.budget.spent() == 0
    assert {"/health", "/ready", "/metrics"}.isdisjoint(client.get("/openapi.json").json()["paths"])


def test_a_model_that_fails_is_named_and_comes_back(
    client_of: Make, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = client_of()
    model.fails = True
    for _ in range(3):
        answer = client.get("/ready")
        assert (answer.status_code, answer.json()) == (503, {**ALL, "ready": False, "model": False})
    assert client.get("/health").status_code == 200, "a server that is restarted for this would be none the better"
    model.fails = False
    assert client.get("/ready").json() == ALL
    said = [record.getMessage() for record in caplog.records if record.name == health.__name__]
    assert said == ["not ready: model (builtins.RuntimeError)", "ready again: model"], "once each"
    assert CANARY not in caplog.text


def test_no_private_failure_changes_what_is_ready(client_of: Make, model: Any) -> None:
    def fails_in_private(values: Any) -> str:
        if any(CANARY in example["input"] for example in values["examples"]):
            raise RuntimeError(CANARY)
        return "Positive"

    client, _ = client_of(RunnableLambda(fails_in_private))
    answered = client.post("/answer/invoke", json={"input": {"input": "one"}}, headers=ALICE)
    assert answered.status_code == 503
    assert answered.json()["error"] == "MembersAbstained"
    assert client.get("/ready").json() == ALL


def test_a_look_leaves_a_callers_doubt_as_it_was(client_of: Make, model: Any) -> None:
    """A failed look costs no caller a public question before the next charge."""
    client, chain = client_of()
    model.fails = True
    assert client.get("/ready").status_code == 503
    assert len(chain.ensemble.doubts._held) == 0


def test_a_model_that_hangs_keeps_nobody_waiting(client_of: Make, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = client_of()
    model.hangs = threading.Event()
    try:
        monkeypatch.setattr(health, "PATIENCE", 0.1)
        began = time.monotonic()
        for _ in range(3):
            assert client.get("/ready").json() == {**ALL, "ready": False, "model": False}
        assert time.monotonic() - began < 5
    finally:
        model.hangs.set()
    monkeypatch.setattr(health, "PATIENCE", 5.0)
    assert client.get("/ready").json() == ALL
    assert len(model.asked) <= 2, "one look at a time"
    model.hangs = threading.Event()
    try:
        monkeypatch.setattr(health, "PATIENCE", 0.1)
        assert client.get("/ready").json() == ALL, "the last look counts until the next has ended"
        monkeypatch.setattr(health, "_HANGS", 0.0)
        assert not client.get("/ready").json()["model"], "but not for ever"
    finally:
        model.hangs.set()


def test_a_ledger_that_is_gone_is_named(client_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    client, chain = client_of()
    assert client.get("/ready").json() == ALL
    Path(chain.budget._ledger.path).unlink()
    answer = client.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {**ALL, "ready": False, "ledger": False})
    assert "not ready: ledger (langchain_dpicl.errors.LedgerError)" in caplog.text


def test_a_store_whose_file_cannot_be_followed_is_named(
    client_of: Make, store_of: Make, records: Make, tmp_path: Path, canary: str
) -> None:
    file, embeddings = tmp_path / "store.db", DeterministicFakeEmbedding(size=8)
    store_of(records(16, secret=canary)).save(file)
    client, _ = client_of(store=ExemplarStore.load(file, embeddings), owners=16)
    assert client.get("/ready").json() == ALL
    (tmp_path / "other").write_bytes(canary.encode())
    (tmp_path / "other").replace(file)
    answer = client.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {**ALL, "ready": False, "store": False})


def test_the_deployers_own_question_is_asked_if_there_is_one(client_of: Make, model: Any) -> None:
    def answer(prompt: Any) -> str:
        Model.asked.append(prompt.text)
        return "Positive"

    prompt = PromptTemplate.from_template("{topic} {examples}") | RunnableLambda(answer)
    client, _ = client_of(prompt)
    assert client.get("/ready").json() == ALL
    assert model.asked[0].startswith("ready? "), "every key that the prompt names"
    other, _ = client_of(prompt, question={"topic": "weather"})
    assert other.get("/ready").json() == ALL
    assert model.asked[1].startswith("weather ")


@pytest.mark.parametrize("fails", [False, True])
def test_a_gated_release_has_embedded_a_question_before_it_answers(
    fails: bool, model: Any, records: Make, budget_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that loads at its first use keeps no caller waiting; one that is down keeps no server from starting. It
    loads when the plans are done: torch and scipy cannot be imported side by side."""
    asked: list[str] = []

    def warm(chain: Any) -> None:
        asked.append("plans")
        time.sleep(0.2)
        asked.append("done")

    monkeypatch.setattr(serving_app, "warm", warm)

    class Embedder(DeterministicFakeEmbedding):
        def embed_query(self, text: str) -> list[float]:
            asked.append(text)
            if fails:
                raise RuntimeError(CANARY)
            return super().embed_query(text)

    store = ExemplarStore.from_records(records(16), Embedder(size=8), owner_key="owner", progress=False)
    gate: dict[str, Any] = {"threshold": -1.0, "eligible": 16, "nearest_to": "input"}
    selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=16, **gate)
    vote = NoisyVote(["Positive", "Negative"], mechanism="vote")
    release: Any = PrivateEnsemble(selector, MEMBER) | DPAggregate(vote, budget_of())
    settings = Configuration(chain="its:own", keys={"alice": hash_of(KEY)})
    with TestClient(create_app(settings, release)) as client:
        assert asked == ["plans", "done", "ready?"]
        assert client.get("/ready").json() == {**ALL, "ready": not fails, "model": not fails}


def test_a_head_has_a_model_alone() -> None:
    receipt: Any = {"id": "b:head:1", "epsilon_spent": 0.9, "epsilon": 1.0, "delta": 1e-5, "mechanism": "head"}
    weights, model = np.zeros((2, 9)), DeterministicFakeEmbedding(size=8)
    head = PrivateHead(weights, ["a", "b"], FeatureMap(8), model, receipt, embedder="x", input_key="text")
    settings = Configuration(chain="its:own", keys={"alice": hash_of(KEY)})
    with TestClient(create_app(settings, head)) as client:
        assert client.get("/ready").json() == {"ready": True, "model": True}
