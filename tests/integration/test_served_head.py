"""A head behind real servers: LangServe's client, and `dpicl serve` with the embedded model and two workers."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from browser import served
from fastapi import FastAPI
from http_server import free_port, stop, wait_until
from langchain_core.embeddings import DeterministicFakeEmbedding
from langserve import RemoteRunnable
from ways import WAYS, ask

from langchain_dpicl import ExemplarStore, PrivacyBudget, PrivateHead
from langchain_dpicl.once.steps import FeatureMap
from langchain_dpicl.serving import add_dp_routes
from langchain_dpicl.serving.guards import hash_of, new_key

MARK = "CANARY-in-a-question"


async def test_langserves_client_works_in_all_its_ways() -> None:
    weights = np.random.default_rng(0).normal(size=(3, 9))
    receipt: Any = {"id": "b:head:1"}
    model = DeterministicFakeEmbedding(size=8)
    head = PrivateHead(weights, ["a", "b", "c"], FeatureMap(8), model, receipt, embedder="x", input_key="text")
    app = FastAPI()
    add_dp_routes(app, head, "/ask", principal_from=lambda request: request.headers.get("x-user"))
    with served(app) as origin:
        remote: Any = RemoteRunnable(f"{origin}/ask", headers={"x-user": "alice"}, timeout=30)
        for way in WAYS:
            for question in ("which?", {"text": "which?"}):
                assert await ask(way, remote, question) == head.invoke("which?")
        assert [each["label"] for each in remote.batch(["one", "two"])] == [
            each["label"] for each in head.batch(["one", "two"])
        ]
        with pytest.raises(httpx.HTTPStatusError) as caught:
            remote.invoke({"input": "which?"})
        assert caught.value.response.status_code == 422


@pytest.mark.slow
@pytest.mark.model
def test_a_configured_head_answers_many_callers_and_writes_nothing(tmp_path: Path) -> None:
    """Two workers with the embedded model. What ten callers ask at once gets what it gets alone, to the last bit."""
    from langchain_dpicl.local import local_embeddings

    rows = [{"text": f"{['a lovely', 'an awful'][i % 2]} film, number {i}", "label": "+-"[i % 2]} for i in range(120)]
    store = ExemplarStore.from_records(rows, local_embeddings(), input_key="text", output_key="label")
    fitted = tmp_path / "fitted"
    fitted.mkdir()
    budget = PrivacyBudget(8, 1e-5, {"head": 1}, f"sqlite:///{fitted}/heads.db", "films")
    head = PrivateHead.fit(store, ["+", "-"], budget, input_key="text", progress=False)
    budget.close()
    folder = tmp_path / "server"
    folder.mkdir()
    head.save(folder / "head.npz")
    key, port = new_key(), free_port()
    server = {"port": port, "path": "/ask", "workers": 2}
    (folder / "server.yaml").write_text(
        json.dumps({"head": "head.npz", "keys": {"alice": hash_of(key)}, "server": server})
    )
    before = sorted(folder.iterdir())
    command = [sys.executable, "-m", "langchain_dpicl", "serve", "--config", str(folder / "server.yaml")]
    url, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {key}"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            wait_until(f"{url}/openapi.json", process, seconds=200)

            def answer(text: str) -> Any:
                body: dict[str, Any] = {"input": {"text": text}}
                answered = httpx.post(f"{url}/ask/invoke", json=body, headers=headers, timeout=60)
                assert answered.status_code == 200, answered.text
                return answered.json()["output"]

            asked = [f"{MARK}: {'what a film ' * (i % 7)}, number {i}" for i in range(40)]
            alone = [answer(text) for text in asked]
            with ThreadPoolExecutor(10) as pool:
                assert list(pool.map(answer, asked)) == alone
            for found, expected in zip(alone, map(head.invoke, asked), strict=True):
                assert found["scores"] == pytest.approx(expected["scores"], abs=1e-5)
            assert answer("a lovely film")["label"] == "+"
            receipts = [each["receipt"] for each in httpx.get(f"{url}/ask/heads", headers=headers).json()]
            assert receipts == [dict(head.receipt)]
        finally:
            stop(process)
    said = (tmp_path / "log").read_text()
    assert "released once" in said
    assert "POST /ask/invoke" in said
    assert MARK not in said
    assert "Traceback" not in said
    assert "exception" not in said
    assert sorted(folder.iterdir()) == before, "no ledger, no cache"
