"""Two real llama.cpp servers, each in a process that is killed over its calls: no output changes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import MembersAbstained, ModelServers, ModelUnavailable
from langchain_dpicl.calls.servers import Route, SlotGate
from langchain_dpicl.private import boundary
from langchain_dpicl.private.copies import TimeLimit
from langchain_dpicl.private.copy import Same
from langchain_dpicl.selection import Examples

pytestmark = pytest.mark.model

SERVER = """
import secrets, sys
secrets.token_urlsafe = lambda length: "key"
from langchain_dpicl.local.models import _start
server = _start("smollm2-135m-instruct", context=512, threads=1)
print(server.address, flush=True)
sys.stdin.read()
"""
TOPICS = ["rain", "bread", "trains", "paper", "winter", "music"]


class Real:
    """A server in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @property
    def url(self) -> str:
        if not hasattr(self, "_url"):
            assert self.process.stdout is not None
            self._url = self.process.stdout.readline().decode().strip()
        return self._url

    def kill(self) -> None:
        self.process.kill()


@pytest.fixture(scope="module")
def three() -> Iterator[list[Real]]:
    started = [Real() for _ in range(3)]
    yield started
    for each in started:
        each.kill()
        each.process.communicate()


def servers_of(found: list[Real]) -> ModelServers:
    listed = httpx.get(f"{found[-1].url}/models", headers={"authorization": "Bearer key"}).json()
    return ModelServers([each.url for each in found], listed["data"][0]["id"], concurrency=1, api_key="key")


def member(servers: ModelServers, **options: Any) -> Any:
    """Twelve tokens about a topic, as the server finds them likeliest."""
    model = servers.llm(temperature=0, max_tokens=12, extra_body={"ignore_eos": True}, **options)
    return PromptTemplate.from_template("Some words about {input}:") | model | StrOutputParser()


def outputs(way: str, chain: Any) -> list[Any]:
    limit = TimeLimit(boundary.seal(chain), 60)
    requests: list[boundary.MemberRequest] = [({"input": topic}, Examples([])) for topic in TOPICS]
    how: dict[str, Any] = {"max_concurrency": 8, "timeout": limit.seconds}
    if way == "sync":
        return boundary.run_private(Same(limit.prepared), requests, **how)
    return asyncio.run(boundary.arun_private(Same(limit.prepared), requests, **how))


@pytest.mark.parametrize(("way", "streams", "victim"), [("sync", False, 0), ("async", True, 1)])
def test_a_server_killed_in_the_middle_of_a_release_changes_no_output(
    way: str, streams: bool, victim: int, three: list[Real], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the calls that it has, one is under way; that one is repeated, too."""
    servers = servers_of([three[victim], three[2]])
    chain = member(servers, streaming=streams)
    undisturbed = outputs(way, chain)
    assert all(isinstance(text, str) and text for text in undisturbed)
    assert len(set(undisturbed)) == len(TOPICS)

    entered: list[int] = []
    moved: list[str] = []
    enter, moves_on = SlotGate.enter, Route.moves_on

    async def counted(gate: SlotGate, *arguments: Any) -> None:
        await enter(gate, *arguments)
        if gate is servers._servers.gate(three[victim].url):
            entered.append(1)
            if len(entered) == 1:
                threading.Timer(0.05, three[victim].kill).start()

    def noted(route: Route, address: str, outcome: Any) -> bool:
        moves = moves_on(route, address, outcome)
        moved.extend([type(outcome).__name__] if moves else [])
        return moves

    monkeypatch.setattr(SlotGate, "enter", counted)
    monkeypatch.setattr(Route, "moves_on", noted)
    for _ in range(6):  # all six draw the server that lives once in 64
        if "ConnectError" not in moved:
            assert outputs(way, chain) == undisturbed
    assert "ReadError" in moved or "RemoteProtocolError" in moved, "one was interrupted"
    assert "ConnectError" in moved, "others found it gone"


def test_if_all_are_killed_members_abstain_and_no_text_is_told(
    three: list[Real],
    sealed_of: Any,
    canary: str,
    canary_free: Any,
    capfd: Any,
    caplog: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = servers_of(three[2:])
    prompt = PromptTemplate.from_template("{examples} {input}")
    model = servers.llm(temperature=0, max_tokens=12, extra_body={"ignore_eos": True})
    sealed = sealed_of(prompt | model | StrOutputParser())
    enter = SlotGate.enter

    async def killed(gate: SlotGate, *arguments: Any) -> None:
        await enter(gate, *arguments)
        if sealed.budget.spent():  # a private call, not the public look before the charge
            three[2].kill()

    monkeypatch.setattr(SlotGate, "enter", killed)
    with pytest.raises(MembersAbstained) as caught:
        sealed.invoke({"input": "a question"})
    canary_free(caught.value)
    with pytest.raises(ModelUnavailable) as down:
        sealed.invoke({"input": "another question"})
    canary_free(down.value)
    assert sealed.budget.spent() == 1
    assert canary not in "".join([*capfd.readouterr(), caplog.text])
    assert list(servers.health().values()) == ["no answer: ConnectError"]
