"""A head behind `serving.routes`: the protocol, the limits, one thread for a question, no trace of what was asked."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough

from langchain_dpicl import InvalidParameter, PrivateHead
from langchain_dpicl.once.steps import FeatureMap

ALICE = {"x-user": "alice"}
SECRET = "CANARY in a question"
RECEIPT: Any = {"id": "b:head:1", "epsilon_spent": 0.9, "epsilon": 1.0, "delta": 1e-5, "mechanism": "head"}
DIMENSION = 16


class Embedder(DeterministicFakeEmbedding):
    """Notes its calls; fails, or takes a while, on texts that say so."""

    calls: list[tuple[int, int]] = []  # noqa: RUF012 - a field of a model, which copies it

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.calls.append((len(texts), threading.get_ident()))
        if any("broken" in text for text in texts):
            raise RuntimeError(f"cannot embed {texts}")
        time.sleep(0.005 * len(texts) * ("slow" in texts[0]))
        return super().embed_documents(texts)


@pytest.fixture
def head() -> PrivateHead:
    weights = np.random.default_rng(0).normal(size=(3, DIMENSION + 1)) * 4
    return PrivateHead(
        weights,
        ["a", "b", "c"],
        FeatureMap(DIMENSION),
        Embedder(size=DIMENSION),
        RECEIPT,
        embedder="x",
        input_key="text",
    )


def test_invoke_batch_and_stream_give_the_heads_answers(head: PrivateHead, serve: Any) -> None:
    client = serve(head)
    expected = head.invoke("one")
    for question in ("one", {"text": "one"}):
        found = client.post("/ask/invoke", json={"input": question}, headers=ALICE).json()
        assert found["output"] == expected
        assert set(found["metadata"]) == {"run_id", "feedback_tokens"}
    many = client.post("/ask/batch", json={"inputs": ["one", {"text": "two"}, "one"]}, headers=ALICE).json()
    for found, answer in zip(many["output"], [expected, head.invoke("two"), expected], strict=True):
        assert found["label"] == answer["label"]
        assert found["scores"] == pytest.approx(answer["scores"]), "a product of several rows may end in other digits"
    assert client.post("/ask/batch", json={"inputs": []}, headers=ALICE).json()["output"] == []
    streamed = client.post("/ask/stream", json={"input": "one"}, headers=ALICE)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    blocks = [
        dict(line.split(": ", 1) for line in block.split("\r\n")) for block in streamed.text.split("\r\n\r\n")[:-1]
    ]
    assert [block["event"] for block in blocks] == ["metadata", "data", "end"]
    assert json.loads(blocks[1]["data"]) == expected


def test_the_receipt_is_shown_once_and_there_is_no_budget(head: PrivateHead, serve: Any) -> None:
    client = serve(head)
    assert client.get("/ask/heads", headers=ALICE).json() == [{"labels": ["a", "b", "c"], "receipt": RECEIPT}]
    for path in ("budget", "history", "playground/", "config_schema", "stream_log"):
        assert client.get(f"/ask/{path}", headers=ALICE).status_code == 404
    answers = client.get("/ask/output_schema", headers=ALICE).json()
    assert set(answers["$defs"]["HeadAnswer"]["required"]) == {"label", "confidence", "scores"}
    described = client.get("/openapi.json").json()["paths"]
    assert "429" not in described["/ask/invoke"]["post"]["responses"], "no budget, none spent"
    assert "receipt" in json.dumps(client.get("/openapi.json").json()["components"]["schemas"]["ReleasedHead"])


def test_a_chain_has_the_views_of_all_that_it_holds(head: PrivateHead, sealed_of: Any, serve: Any) -> None:
    after = serve(head | RunnableLambda(lambda answer: answer["label"]))
    assert (
        after.post("/ask/invoke", json={"input": "one"}, headers=ALICE).json()["output"] == head.invoke("one")["label"]
    )
    release = sealed_of(lambda _: "Positive")
    chain: Any = RunnableParallel(desk=RunnableLambda(lambda values: values["input"]) | head, kind=release)
    both = serve(chain)
    answered = both.post("/ask/invoke", json={"input": {"input": "one"}}, headers=ALICE).json()["output"]
    assert answered == {"desk": head.invoke("one"), "kind": "Positive"}
    assert both.get("/ask/budget", headers=ALICE).json()["lines"]["vote"]["spent"] == 1
    assert len(both.get("/ask/heads", headers=ALICE).json()) == 1
    with pytest.raises(InvalidParameter, match="a release, a head, or a chain"):
        serve(RunnablePassthrough())


def test_a_chain_of_many_questions_gets_them_as_they_were_sent(head: PrivateHead, serve: Any) -> None:
    found = serve(head.map()).post("/ask/invoke", json={"input": ["one", {"text": "two"}]}, headers=ALICE)
    assert [each["label"] for each in found.json()["output"]] == [head.invoke(text)["label"] for text in ("one", "two")]


def test_requests_have_the_limits_of_a_release(head: PrivateHead, serve: Any) -> None:
    client = serve(head, max_body_bytes=1000, max_batch=2, max_concurrency=2)
    nobody = [
        client.post("/ask/invoke", json={"input": "x"}),
        client.get("/ask/heads"),
        client.get("/ask/input_schema"),
    ]
    assert [each.status_code for each in nobody] == [401] * 3
    assert client.post("/ask/invoke", json={"input": "x" * 2000}, headers=ALICE).status_code == 413
    assert client.post("/ask/batch", json={"inputs": ["x"] * 3}, headers=ALICE).status_code == 422
    odd: list[Any] = ["", "  ", 3, None, [], {}, {"text": ""}, {"input": "x"}, {"text": "x", "label": "a"}, {"text": 3}]
    for question in odd:
        for path, body in (("invoke", {"input": question}), ("batch", {"inputs": ["x", question]})):
            refused = client.post(f"/ask/{path}", json=body, headers=ALICE)
            assert (refused.status_code, set(refused.json())) == (422, {"error", "message"}), question
    assert head.embeddings.calls == [], "nothing was embedded"  # type: ignore[attr-defined]


def test_a_question_takes_one_thread_and_a_batch_one(
    head: PrivateHead, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hops: list[str] = []
    real = asyncio.BaseEventLoop.run_in_executor

    def counted(self: Any, executor: Any, function: Any, *arguments: Any) -> Any:
        hops.append(threading.current_thread().name)
        return real(self, executor, function, *arguments)

    monkeypatch.setattr(asyncio.BaseEventLoop, "run_in_executor", counted)
    client = serve(head)
    posts = [("invoke", {"input": "x"}), ("batch", {"inputs": ["x", "y", "z"]}), ("stream", {"input": "x"})]
    for number, (path, body) in enumerate(posts, start=1):
        assert client.post(f"/ask/{path}", json=body, headers=ALICE).status_code == 200
        assert len(hops) == number, path
    assert [count for count, _ in head.embeddings.calls] == [1, 3, 1]  # type: ignore[attr-defined]


async def test_a_batch_is_embedded_at_once_in_a_thread_with_faults_in_their_places(head: PrivateHead) -> None:
    asked: list[Any] = [3, "one", " ", "two", {"text": "one"}, {"input": "one"}]
    for found in (await head.abatch(asked, return_exceptions=True), head.batch(asked, return_exceptions=True)):
        assert [found[i].parameter for i in (0, 2, 5)] == ["input"] * 3
        for i, text in ((1, "one"), (3, "two"), (4, "one")):
            assert found[i]["scores"] == pytest.approx(head.invoke(text)["scores"])
    with pytest.raises(InvalidParameter, match="input"):
        await head.abatch(asked)
    assert await head.abatch([]) == []
    calls = head.embeddings.calls  # type: ignore[attr-defined]
    assert [count for count, _ in calls if count > 1] == [3, 3, 3]
    assert calls[0][1] != threading.get_ident(), "the event loop does not wait for the model"


def test_what_others_ask_at_the_same_time_changes_no_answer(head: PrivateHead, serve: Any) -> None:
    """To the last bit, and each question goes to the model by itself."""
    client = serve(head)
    asked = [f"slow question {i}" for i in range(30)]
    expected = [head.invoke(text) for text in asked]
    head.embeddings.calls.clear()  # type: ignore[attr-defined]

    def post(text: str) -> Any:
        body: dict[str, Any] = {"input": text}
        return client.post("/ask/invoke", json=body, headers={"x-user": text}).json()["output"]

    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(post, asked))
    assert found == expected
    assert [count for count, _ in head.embeddings.calls] == [1] * 30  # type: ignore[attr-defined]
    assert len({thread for _, thread in head.embeddings.calls}) > 1, "several were under way at once"  # type: ignore[attr-defined]


def test_neither_question_nor_answer_is_kept_in_logs_output_or_errors(
    head: PrivateHead, serve: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    client = serve(head)
    with caplog.at_level(logging.DEBUG):
        for text in (SECRET, f"{SECRET}, broken", " "):
            for path, body in (("invoke", {"input": text}), ("batch", {"inputs": [text]}), ("stream", {"input": text})):
                said = client.post(f"/ask/{path}", json=body, headers=ALICE)
                assert said.status_code == {SECRET: 200, " ": 422}.get(text, 503)
                assert SECRET not in said.text
                assert "Traceback" not in said.text
        client.post("/ask/invoke", json={"input": {"text": SECRET, SECRET: 1}}, headers=ALICE)
    seen = [record.getMessage() + str(record.exc_info) for record in caplog.records]
    assert [line for line in seen if SECRET in line] == []
    assert SECRET not in "".join(capfd.readouterr())
    held = [vars(head), head.embeddings.__dict__]
    assert SECRET not in repr(held), "no cache of questions"


def test_a_head_that_is_served_opens_no_file(head: PrivateHead, serve: Any, tmp_path: Path) -> None:
    """No ledger, no cache, no temporary file: since the server has started, Python opens nothing."""
    import sys

    opened: list[str] = []
    listening = [False]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if listening[0] and event in ("open", "sqlite3.connect"):
            opened.append(f"{event} {arguments[0]}")

    client = serve(head)
    client.post("/ask/invoke", json={"input": "before"}, headers=ALICE)
    sys.addaudithook(hook)  # stays for the process: so it is silent afterwards
    listening[0] = True
    try:
        for number in range(5):
            assert client.post("/ask/invoke", json={"input": f"{number}"}, headers=ALICE).status_code == 200
    finally:
        listening[0] = False
    assert opened == []
