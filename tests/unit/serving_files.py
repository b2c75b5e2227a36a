"""Configuration files of ``dpicl serve`` over a few records, with models that answer without thinking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import PrivateHead, local
from langchain_dpicl.budget import Receipt
from langchain_dpicl.once.steps import FeatureMap
from langchain_dpicl.serving.guards import hash_of, new_key
from langchain_dpicl.store.base import embedder_of

KEY = new_key()
ACCESS = {"keys": {"mobile": hash_of(KEY)}}
VOTE: dict[str, Any] = {
    "store": {"data": "tickets.jsonl", "owner_key": "who"},
    "release": {"kind": "vote", "labels": ["a", "b"]},
    "selector": {"members": 10, "shots": 2},
    "budget": {"epsilon": 300, "delta": 1e-5, "releases": 30, "ledger": "sqlite:///budget.db", "name": "tickets"},
    **ACCESS,
}


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 60 records in a folder, and models that answer without thinking."""
    rows = [{"text": f"text {i}", "label": "ab"[i % 2], "who": f"p{i}"} for i in range(60)]
    (tmp_path / "tickets.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(local, "local_embeddings", lambda: DeterministicFakeEmbedding(size=8))
    monkeypatch.setattr(local, "local_llm", lambda *_, **__: RunnableLambda(lambda _: "spray and inhaler"))
    monkeypatch.setattr(
        "langchain_dpicl.members.chains.LabelScorer",
        lambda llm, labels, query_key, **_: RunnableLambda(lambda v: v[query_key].split()[0]),
    )


def file_of(folder: Path, content: Any, name: str = "server.yaml") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))  # JSON is YAML
    return path


def head_in(folder: Path, name: str) -> str:
    """Write a head of epsilon 1 into a file of this name."""
    model: Any = local.local_embeddings()
    receipt: Any = dict.fromkeys(Receipt.__annotations__, "") | dict.fromkeys(("principal", "remaining", "tokens"))
    receipt |= {"id": "b:head:1", "budget": "b", "number": 1, "mechanism": "a head", "replayed": False, "query": None}
    receipt |= {"epsilon_spent": 0.9, "epsilon": 1.0, "delta": 1e-5}
    weights, about = np.zeros((2, 9)), {"embedder": embedder_of(model), "input_key": "text"}
    PrivateHead(weights, ["a", "b"], FeatureMap(8), model, receipt, **about).save(folder / name)
    return name


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` by dotted names; None leaves out."""
    result: dict[str, Any] = json.loads(json.dumps(base))
    for name, value in changes.items():
        *sections, last = name.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return result


def ask(app: Any, body: Any, path: str = "/answer") -> Any:
    with TestClient(app) as client:
        return client.post(f"{path}/invoke", json=body, headers={"authorization": f"Bearer {KEY}"})
