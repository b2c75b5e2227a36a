"""`dpicl serve` with typed answers and with documents, as a file says, on the embedded model: the whole trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Served, dpicl_serve

pytest.importorskip("xllamacpp")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.model]

MODEL = {"name": "smollm2-135m-instruct"}
BUDGET = {"epsilon": 300, "delta": 1e-5, "ledger": "sqlite:///budget.db", "accept_noise": True}


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "notes.jsonl").write_text("\n".join(map(json.dumps, rows)))


def sections(release: dict[str, Any], budget: dict[str, Any], **selector: Any) -> dict[str, Any]:
    return {
        "chain": None,
        "store": {"data": "notes.jsonl", "owner_key": "who"},
        "model": MODEL,
        "release": release,
        "selector": selector,
        "budget": {**BUDGET, **budget},
    }


def post(served: Served, path: str, question: Any) -> httpx.Response:
    body = json.dumps({"input": {"text": question}})  # in ASCII, half a character too
    headers = {**served.headers("alice"), "Content-Type": "application/json"}
    return httpx.post(f"{served.url}/{path}", content=body, headers=headers, timeout=300)


def test_typed_answers_of_the_embedded_model_are_served(tmp_path: Path) -> None:
    """Examples with objects for outputs, as anybody writes them in JSON lines; the model writes JSON like theirs."""
    filled = [{"desk": "Porch", "days": 5}, {"desk": "Flask", "days": 2}]
    write(tmp_path, [{"text": f"a cough, day {i}", "label": filled[i % 2], "who": f"p{i}"} for i in range(6)])
    fields = {"desk": {"choices": ["Flask", "Porch"]}, "days": {"low": 0, "high": 30}}
    release = {"kind": "structured", "fields": fields, "max_tokens": 20}
    with dpicl_serve(tmp_path, names=("alice",), more=sections(release, {"releases": 3}, calls=2, pad_to=3)) as served:
        first, again = (post(served, "invoke", "a cough at night").json()["output"] for _ in range(2))
        assert first["answer"].keys() == fields.keys()
        assert first["answer"]["desk"] in ("Flask", "Porch")
        assert first["answer"]["days"] in range(31)
        assert (again["answer"], again["receipt"]["replayed"]) == (first["answer"], True)
        assert [post(served, "invoke", wrong).status_code for wrong in ("", 7, "half \ud83d")] == [422] * 3
        state = httpx.get(f"{served.url}/budget", headers=served.headers("alice")).json()
        assert [line["spent"] for line in state["lines"].values()] == [1]
    assert "cough" not in (tmp_path / "log").read_text()


def test_texts_from_documents_of_the_embedded_model_are_streamed(tmp_path: Path) -> None:
    rows = [{"text": f"The ward is closed on Monday. CANARY {'and ' * i}", "who": f"p{i}"} for i in range(8)]
    write(tmp_path, rows)
    release = {"kind": "documents", "max_tokens": 6, "min_tokens": 6, "pad": False}
    budget = {"releases": 30, "tickets": True}
    more = sections(release, budget, calls=3, threshold=-1.0, eligible=8)
    with dpicl_serve(tmp_path, names=("alice",), more=more) as served:
        streamed = post(served, "stream", "When is the ward closed?")
        pieces = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")][1:]
        assert "".join(piece["answer"] for piece in pieces[:-1])
        assert pieces[-1]["receipt"]["tokens"] == 6
        again = post(served, "invoke", "When is the ward closed?").json()["output"]
        assert again["receipt"]["replayed"]
        assert again["answer"] == "".join(piece["answer"] for piece in pieces[:-1])
        assert post(served, "stream", "who " * 9000).status_code == 422
    assert "CANARY" not in (tmp_path / "log").read_text()
