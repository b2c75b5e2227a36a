"""No endpoint and no log of a real server shows what is in every exemplar, prompt and member's output.

The same search finds it on a LangServe application with a naive chain of the same members, so it can see.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import free_port, stop, wait_until

SERVER = '''
import asyncio
import logging
import sys

import numpy as np
import uvicorn
from fastapi import FastAPI
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langserve import add_routes

from langchain_dpicl import (
    DPAggregate, ExemplarStore, NoisyVote, PoissonExampleSelector, PrivacyBudget, PrivateEnsemble
)
from langchain_dpicl.serving import add_dp_routes
from langchain_dpicl.release.base import as_tool

CANARY, folder, port = sys.argv[1], sys.argv[2], int(sys.argv[3])


async def member(values):
    """What the public query asks for happens; the prompt and the output hold the canary."""
    way, prompt = values["input"], f"{CANARY} {[example['input'] for example in values['examples']]}"
    if way.startswith("one fails") and any("text 3" in example["input"] for example in values["examples"]):
        raise RuntimeError(prompt)
    if way.startswith("all fail"):
        raise RuntimeError(prompt)
    if way.startswith("timeouts"):
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(5)
        except TimeoutError as error:
            raise TimeoutError(prompt) from error
    return f"Positive {prompt}"


# So many owners that no bucket is empty (4e-8): a member without an exemplar is not asked, and does not fail.
records = [{"input": f"text {i} {CANARY}", "output": "Positive", "owner": f"{CANARY} {i}"} for i in range(64)]
store = ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=8), owner_key="owner", progress=False)
selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=8)
budget = PrivacyBudget(1000, 1e-5, 40, f"sqlite:///{folder}/budget.db", replay=False)
release = PrivateEnsemble(selector, RunnableLambda(member)) | DPAggregate(
    NoisyVote(["Positive", "Negative"]), budget, return_receipt=True
)
with store.reading() as view:
    bucket = view.read(np.arange(8))
naive = RunnableLambda(lambda values: {**values, "examples": bucket}) | RunnableParallel(
    {f"member_{i}": member for i in range(3)}
) | RunnableLambda(lambda votes: "Positive")

logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, force=True)
app = FastAPI()
add_dp_routes(app, release, "/sealed", principal_from=lambda request: "alice", max_concurrency=32)
add_routes(app, naive.with_types(input_type=dict), path="/naive", enable_feedback_endpoint=True)
uvicorn.run(app, host="127.0.0.1", port=port, log_level="trace", log_config=None)
'''
WAYS = ["success", "one fails", "all fail", "success again", "timeouts", "success at last"]
POSTS = ["invoke", "batch", "stream", "stream_log", "stream_events", "feedback", "public_trace_link"]
GETS = ["input_schema", "output_schema", "config_schema", "budget", "history", "playground/", "feedback", "", "docs"]


class Server:
    """The process, its log, and what it has answered."""

    def __init__(self, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def said(self, path: str) -> tuple[str, list[tuple[str, int]]]:
        """Everything that a client can get below a path: texts and headers, and (endpoint, status)."""
        texts, statuses = [], []
        with httpx.Client(base_url=f"{self.url}{path}", timeout=30) as client:
            for way in WAYS:
                for name in POSTS:
                    for prefix in ("", "c/N4XyA/"):
                        one, config = {"input": f"{way} {name}"}, {"tags": ["a"]}
                        body = {"input": one, "inputs": [one, one], "config": config, "run_id": "x", "key": "x"}
                        try:
                            response = client.post(f"/{prefix}{name}", json=body)
                        except httpx.TransportError:  # how LangServe ends a stream that fails
                            statuses.append((f"{prefix}{name}", 0))
                            continue
                        texts.append(f"{response.headers!r} {response.text}")
                        statuses.append((f"{prefix}{name}", response.status_code))
            for name in [*GETS, *(f"c/N4XyA/{name}" for name in GETS)]:
                response = client.get(f"/{name}")
                texts.append(f"{response.headers!r} {response.text}")
                statuses.append((name, response.status_code))
            texts.append(httpx.get(f"{self.url}/openapi.json").text)
        return "\n".join(texts), statuses


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, canary: str) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("boundary"), free_port()
    (folder / "server.py").write_text(SERVER)
    command = [sys.executable, str(folder / "server.py"), canary, str(folder), str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(f"http://127.0.0.1:{port}/openapi.json", process)
            yield Server(port, folder / "log")
        finally:
            stop(process)


@pytest.fixture(scope="module")
def sealed(server: Server) -> tuple[str, list[tuple[str, int]], str]:
    """What the sealed release said, and the log when it had said it."""
    said, statuses = server.said("/sealed")
    return said, statuses, server.log.read_text()


def test_no_endpoint_shows_the_canary(sealed: Any, canary: str) -> None:
    said, statuses, _ = sealed
    assert canary not in said
    served = {"invoke", "batch", "stream", "input_schema", "output_schema", "budget", "history"}
    assert not [name for name, status in statuses if status in (0, 500)]
    assert {name for name, status in statuses if status == 404} == {name for name, _ in statuses} - served
    for name in ("invoke", "batch", "stream"):
        assert {status for asked, status in statuses if asked == name} == {200, 503}, "the ways did what they say"


def test_no_log_at_its_most_talkative_shows_the_canary(sealed: Any, canary: str) -> None:
    log = sealed[2]
    assert canary not in log
    assert "Traceback" not in log
    for source in ("uvicorn.access", "uvicorn.asgi"):
        assert re.search(rf"(DEBUG|INFO|TRACE):{source}", log), f"{source} was listened to"


def test_the_same_search_finds_it_where_a_chain_is_served_in_the_open(server: Server, sealed: Any, canary: str) -> None:
    """The last test of this server: its log is not clean afterwards."""
    before = len(sealed[2])
    said, statuses = server.said("/naive")
    assert canary in said
    with httpx.Client(base_url=f"{server.url}/naive", timeout=30) as client:
        body = {"input": {"input": "success"}, "config": {}}
        for name in ("stream_log", "stream_events"):
            assert canary in client.post(f"/{name}", json=body).text
    assert canary in server.log.read_text()[before:], "in the trace of a member that failed"
    assert ("invoke", 500) in statuses
