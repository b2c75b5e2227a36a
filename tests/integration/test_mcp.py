"""`dpicl mcp`, asked by LangChain's client in another process: tools, budgets by caller, refusals, clients that end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Served, free_port, stop, until, wait_until
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.tools import load_mcp_tools
from mcp import McpError
from pages import blocks

from langchain_dpicl import PrivacyBudget
from langchain_dpicl.serving.guards import hash_of, new_key

CHAIN = """
import logging
import subprocess
import time
import warnings
from pathlib import Path

from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import (
    DPAggregate, ExemplarStore, NoisyVote, PoissonExampleSelector, PrivacyBudget, PrivateEnsemble
)

CANARY = "CANARY"


def member(values):
    prompt = f"{CANARY} {[example['input'] for example in values['examples']]}"
    print("a member prints", flush=True)
    assert subprocess.run("cat", capture_output=True).stdout == b""  # nor can a subprocess take what a client says
    logging.getLogger("member").error(prompt)
    warnings.warn(prompt)
    time.sleep(1 if values["input"].startswith("slow") else 0)
    if values["input"].startswith("fails"):
        raise RuntimeError(prompt)
    return "Positive"


def chain():
    print("started")  # a library may greet
    records = [{"input": f"text {i} {CANARY}", "output": "Positive", "owner": f"p{i}"} for i in range(64)]
    store = ExemplarStore.from_records(
        records, DeterministicFakeEmbedding(size=8), owner_key="owner", progress=False
    )
    selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=8)
    ledger = f"sqlite:///{Path(__file__).with_name('budget.db')}"
    budget = PrivacyBudget(1000, 1e-5, 5, ledger, "served", scope="per_principal")
    return PrivateEnsemble(selector, RunnableLambda(member)) | DPAggregate(
        NoisyVote(["Positive", "Negative"]), budget, return_receipt=True
    )
"""
"""At epsilon 1000 and 5 releases noise hides 4 equal votes less than once in 1e40."""

NAMES = ("alice", "bob", "carol", "dora", "eve")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, canary: str) -> Path:
    """A folder with a server's file for `NAMES`, of whom eve has no tool."""
    found = tmp_path_factory.mktemp("mcp")
    (found / "served_chain.py").write_text(CHAIN.replace('"CANARY"', repr(canary)))
    return found


def written(folder: Path, keys: dict[str, str]) -> Path:
    about = "Says what people think of a film."
    served = {"path": "/ask", "chain": "served_chain:chain", "description": about, "callers": [*NAMES[:-1]]}
    settings = {"releases": [served], "keys": {name: hash_of(key) for name, key in keys.items()}}
    path = folder / "server.yaml"
    path.write_text(json.dumps(settings))
    return path


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "langchain_dpicl", "mcp", "--config", str(folder / "server.yaml"), *more]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    """The server over HTTP."""
    keys, port = {name: new_key() for name in NAMES}, free_port()
    written(folder, keys)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command(folder, "--http", str(port)), stdout=log, stderr=log)
    try:
        wait_until(f"http://127.0.0.1:{port}/health", process)
        yield Served(process, f"http://127.0.0.1:{port}/mcp", keys, folder)
    finally:
        stop(process)


@contextlib.asynccontextmanager
async def connected(served: Served, name: str) -> AsyncIterator[Any]:
    connection: Any = {"transport": "streamable_http", "url": served.url, "headers": served.headers(name)}
    async with MultiServerMCPClient({"dpicl": connection}).session("dpicl") as session:
        yield session


async def called(session: Any, text: str) -> Any:
    """Return the message of the only tool, called as an agent's model calls it."""
    (tool,) = await load_mcp_tools(session)
    return await tool.ainvoke({"name": tool.name, "args": {"input": text}, "id": "1", "type": "tool_call"})


async def asked(session: Any, text: str) -> Any:
    """Return its structured answer."""
    return (await called(session, text)).artifact["structured_content"]


async def resource(session: Any, kind: str) -> Any:
    found = await session.read_resource(f"dpicl://{kind}/ask")
    return json.loads(found.contents[0].text)


async def test_a_release_is_a_tool_with_typed_input_and_output(server: Served) -> None:
    async with connected(server, "alice") as session:
        (tool,) = (await session.list_tools()).tools
        assert (tool.name, tool.title) == ("ask", "ask")
        assert tool.description.startswith("Says what people think of a film.\nNoise may change an answer.")
        assert tool.inputSchema["required"] == ["input"]
        assert {"answer", "receipt"} == set(tool.outputSchema["required"])
        assert tool.annotations.idempotentHint
        assert not tool.annotations.readOnlyHint
        first = await asked(session, "a witty film")
        again = await asked(session, "a witty film")
    assert first["answer"] == again["answer"] == "Positive"
    assert first["receipt"]["principal"] == "alice"
    assert [first["receipt"]["replayed"], again["receipt"]["replayed"]] == [False, True]


async def test_each_caller_has_its_own_budget_and_a_spent_one_is_an_error_in_our_words(server: Served) -> None:
    async with connected(server, "bob") as bob, connected(server, "carol") as carol:
        found = await asyncio.gather(*(asked(who, f"film {i}") for i in range(5) for who in (bob, carol)))
        assert {each["answer"] for each in found} == {"Positive"}
        assert sorted(each["receipt"]["number"] for each in found[::2]) == [1, 2, 3, 4, 5]
        refused = await called(bob, "one more")
        assert refused.status == "error"
        assert [line["remaining"] for line in (await resource(bob, "budget"))["lines"].values()] == [0]
        assert (await resource(carol, "receipts"))["total"] == 5
    body = {"input": {"input": "one more"}}
    url = server.url.replace("/mcp", "/ask/invoke")
    over_http = httpx.post(url, json=body, headers=server.headers("bob")).json()
    assert over_http["error"] == "PrivacyBudgetExceeded"
    assert refused.content[0]["text"] == f"PrivacyBudgetExceeded: {over_http['message']}"


async def test_a_bad_input_a_strange_tool_and_a_strange_resource_are_refused_at_no_cost(server: Served) -> None:
    async with connected(server, "dora") as session:
        before = await resource(session, "budget")
        for arguments in ({}, {"principal": "alice"}, {"input": "x", "examples": []}):
            refused = await session.call_tool("ask", arguments)
            assert refused.isError
            assert refused.content[0].text.split(":")[0] in ("InvalidInput", "InvalidParameter")
        assert (await session.call_tool("other", {})).content[0].text == "NotFound: this caller has no such tool"
        with pytest.raises(McpError, match="no such resource"):
            await session.read_resource("dpicl://budget/other")
        assert await resource(session, "budget") == before
    async with connected(server, "eve") as session:
        assert (await session.list_tools()).tools == []
        assert (await session.list_resources()).resources == []
        assert (await session.call_tool("ask", {"input": "x"})).isError


class Scripted(FakeMessagesListChatModel):
    """Calls its tool, then reads the answer."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


async def test_the_pages_agent_asks_a_release(server: Served) -> None:
    (block,) = blocks("tasks/mcp.md", "python", "Several callers, over HTTP")
    call = AIMessage("", tool_calls=[{"name": "ask", "args": {"input": "a witty film"}, "id": "1"}])
    model = Scripted(responses=[call, AIMessage("They like it.")])
    names: dict[str, Any] = {"key": server.keys["alice"], "model": model}
    code = compile(block.replace("http://127.0.0.1:8000/mcp", server.url), "page", "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, names)
    *_, answered, last = (await names["agent"].ainvoke({"messages": "Do they like it?"}))["messages"]
    assert json.loads(answered.content[0]["text"])["answer"] == "Positive"
    assert last.content == "They like it."


def message(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def test_a_request_without_a_key_from_elsewhere_or_too_long_is_refused(server: Served) -> None:
    headers = {**server.headers("alice"), "accept": "application/json"}
    ping = message("ping")
    assert httpx.post(server.url, json=ping, headers=headers).json()["result"] == {}
    assert httpx.post(server.url, json=ping, headers={"accept": "application/json"}).status_code == 401
    assert httpx.post(server.url, json=ping, headers={**headers, "authorization": "Bearer x"}).status_code == 401
    assert httpx.post(server.url, json=ping, headers={**headers, "host": "evil.example"}).status_code == 421
    assert httpx.post(server.url, json=ping, headers={**headers, "origin": "http://evil.example"}).status_code == 403
    assert httpx.post(server.url, json=message("ping", x="x" * 70_000), headers=headers).status_code == 413
    assert httpx.get(server.url, headers=headers).status_code == 405


CLIENT = """
import asyncio
import sys

from langchain_mcp_adapters.client import MultiServerMCPClient


async def ask():
    connection = {"transport": "streamable_http", "url": sys.argv[1], "headers": {"authorization": sys.argv[2]}}
    async with MultiServerMCPClient({"dpicl": connection}).session("dpicl") as session:
        print("asking", flush=True)
        await session.call_tool("ask", {"input": "slow, and killed"})


asyncio.run(ask())
"""


async def test_a_killed_client_keeps_its_charge_and_the_answer_waits_for_its_caller_alone(server: Served) -> None:
    arguments = [sys.executable, "-c", CLIENT, server.url, server.headers("dora")["authorization"]]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"asking\n"
        async with connected(server, "dora") as session:

            async def charged() -> int:
                return int((await resource(session, "receipts"))["total"])

            while await charged() == 0:
                await asyncio.sleep(0.02)
            client.send_signal(signal.SIGKILL)
            client.wait()
            replayed = await asked(session, "slow, and killed")
            assert (replayed["answer"], replayed["receipt"]["number"]) == ("Positive", 1)
            assert await charged() == 1
        async with connected(server, "alice") as other:
            assert "killed" not in json.dumps(await resource(other, "receipts"))


async def test_no_log_of_the_server_shows_what_is_private_or_what_is_asked(server: Served, canary: str) -> None:
    async with connected(server, "alice") as session:
        failed = await called(session, "fails, and says so")
        assert failed.status == "error"
        shown = f"{failed!r} {await resource(session, 'receipts')}"
    headers = {**server.headers("alice"), "accept": "application/json"}
    httpx.post(server.url, json=message("tools/call", name=["a strange question"]), headers=headers)
    log = (server.folder / "log").read_text()
    assert "POST /mcp 200" in log
    assert "of the MCP SDK" in log
    for said in (canary, "fails, and says so", "strange question", "Traceback"):
        assert said not in log
    assert canary not in shown


# -- over standard input and output ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_standard_output_is_the_protocol_alone_and_a_release_under_way_ends(
    number: signal.Signals, tmp_path: Path, canary: str
) -> None:
    """A client that leaves in the middle of a call, and ends the process: what was begun is recorded before it ends."""
    (tmp_path / "served_chain.py").write_text(CHAIN.replace('"CANARY"', repr(canary)))
    written(tmp_path, {name: new_key() for name in NAMES})
    begin = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    lines = [
        message("initialize", **begin),
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        message("tools/call", name="ask", arguments={"input": "a witty film"}) | {"id": 2},
        message("tools/call", name="ask", arguments={"input": "slow, and left"}) | {"id": 3},
    ]
    process = subprocess.Popen(
        command(tmp_path, "--caller", "alice"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(b"no protocol: a witty film\n" + "".join(f"{json.dumps(line)}\n" for line in lines).encode())
    process.stdin.flush()
    said = []
    while not any(each.get("id") == 2 for each in said):
        said.append(json.loads(process.stdout.readline()))
    ledger = f"sqlite:///{tmp_path / 'budget.db'}"
    with contextlib.closing(PrivacyBudget.open("served", ledger)) as budget:
        until(lambda: budget.spent(principal="alice") == 2)
    process.send_signal(number)
    rest, log = process.communicate(timeout=60)
    said += map(json.loads, rest.decode().splitlines())
    assert process.returncode in (0, 128 + signal.SIGTERM)
    assert {each["jsonrpc"] for each in said} == {"2.0"}
    assert canary not in f"{said}{log.decode()}"
    assert "witty" not in log.decode()
    assert "started" in log.decode()
    with contextlib.closing(PrivacyBudget.open("served", ledger)) as budget:
        found, _ = budget.latest(2, "alice")
    assert [json.loads(each.receipt or "{}").get("outcome") for each in found] == ["released", "released"]


def test_what_a_module_of_the_file_prints_is_no_reply(tmp_path: Path) -> None:
    """The class of a structured release is imported while the file is read."""
    (tmp_path / "greeting.py").write_text(
        "from pydantic import BaseModel\n\nprint('greets')\n\n\nclass Visit(BaseModel):\n    good: bool\n"
    )
    rows = [{"text": f"visit {i}", "good": {"good": True}, "owner": f"o{i}"} for i in range(40)]
    (tmp_path / "visits.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {
        "store": {"data": "visits.jsonl", "input_key": "text", "output_key": "good", "owner_key": "owner"},
        "release": {"kind": "structured", "model": "greeting:Visit"},
        "selector": {"calls": 8},
        "budget": {"epsilon": 1000, "delta": 1e-5, "releases": 1, "name": "visits"},
        "server": {"path": "/visits"},
    }
    (tmp_path / "server.yaml").write_text(json.dumps(settings))
    ended = subprocess.run(command(tmp_path), input=b"", capture_output=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, b""), ended.stderr.decode()
    assert "greets" in ended.stderr.decode()


async def test_langchains_client_asks_over_standard_input_and_output(server: Served, tmp_path: Path) -> None:
    (tmp_path / "served_chain.py").write_text((server.folder / "served_chain.py").read_text())
    written(tmp_path, {name: new_key() for name in NAMES})
    python, *arguments = command(tmp_path, "--caller", "bob")
    connection: Any = {"transport": "stdio", "command": python, "args": arguments, "env": dict(os.environ)}
    async with MultiServerMCPClient({"dpicl": connection}).session("dpicl") as session:
        assert (await asked(session, "a witty film"))["receipt"]["principal"] == "bob"
        assert (await resource(session, "receipts"))["total"] == 1
