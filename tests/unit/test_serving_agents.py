"""An agent behind `add_dp_routes`: its messages go out, with releases in them; its releases count for the caller."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from langchain.agents import create_agent
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langserve import add_routes
from sse_starlette.sse import AppStatus

from langchain_dpicl import DPRetriever
from langchain_dpicl.release.base import SPENT, as_tool
from langchain_dpicl.serving import add_dp_routes

ASKED = {"messages": [{"type": "human", "content": "go"}]}


class Script(FakeMessagesListChatModel):
    """Calls the tool twice, then ends; from the start again for the next request."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


@pytest.fixture
def route(sealed_of: Any, canary: str) -> Any:
    """A release whose members all see and say the canary."""
    return sealed_of(lambda values: f"Positive {canary} {[*values['examples']]}", scope="per_principal", releases=3)


@pytest.fixture
def client(route: Any) -> Iterator[TestClient]:
    calls = [
        AIMessage("", tool_calls=[{"name": "route", "args": {"query": f"film {i}"}, "id": f"call-{i}"}]) for i in (1, 2)
    ]
    agent = create_agent(Script(responses=[*calls, AIMessage("done")]), [as_tool(route, "route", "what it is")])
    app = FastAPI()
    add_dp_routes(app, agent, "/agent", principal_from=lambda request: request.headers.get("x-user"))
    with TestClient(app) as opened:
        yield opened


def test_an_agents_messages_are_the_answer_and_its_releases_are_the_callers(
    client: TestClient, route: Any, canary: str
) -> None:
    first = client.post("/agent/invoke", json={"input": ASKED}, headers={"x-user": "alice"})
    assert first.status_code == 200
    said = first.json()["output"]["messages"]
    assert [message["type"] for message in said] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert [message["content"] for message in said if message["type"] == "tool"] == ["Positive", "Positive"]
    assert (route.budget.spent(principal="alice"), route.budget.spent(principal="bob")) == (2, 0)
    assert canary not in first.text


def test_a_spent_budget_is_a_message_of_the_agents_and_no_error_of_the_servers(client: TestClient, canary: str) -> None:
    client.post("/agent/invoke", json={"input": ASKED}, headers={"x-user": "alice"})
    again = client.post("/agent/invoke", json={"input": ASKED}, headers={"x-user": "alice"})
    said = again.json()["output"]["messages"]
    assert [m["content"] for m in said if m["type"] == "tool"] == ["Positive", SPENT]
    other = client.post("/agent/invoke", json={"input": ASKED}, headers={"x-user": "bob"})
    assert SPENT not in other.text


def test_a_stream_of_an_agent_carries_its_messages_alone(client: TestClient, route: Any, canary: str) -> None:
    streamed = client.post("/agent/stream", json={"input": ASKED}, headers={"x-user": "alice"})
    assert streamed.status_code == 200
    assert "Positive" in streamed.text
    assert "done" in streamed.text
    assert canary not in streamed.text
    assert route.budget.spent(principal="alice") == 2


@pytest.mark.parametrize(
    ("way", "body"),
    [
        ("invoke", {"input": {"input": "a film"}}),
        ("batch", {"inputs": [{"input": "a film"}]}),
        ("stream", {"input": {"input": "a film"}}),
        ("stream_log", {"input": {"input": "a film"}}),
        ("stream_events", {"input": {"input": "a film"}}),
    ],
)
@pytest.mark.parametrize("shape", ["a release", "a chain", "within a function", "a retriever"])
def test_langserves_own_routes_are_refused(
    way: str, body: Any, shape: str, sealed_of: Any, canary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name no caller: whoever asked would spend the budget of all."""
    monkeypatch.setattr(AppStatus, "should_exit_event", None)  # of another test's event loop
    route = sealed_of(lambda values: f"Positive {canary}", releases=3)
    chain = {
        "a release": route,
        "a chain": RunnableLambda(dict) | route | str.upper,
        "within a function": RunnableLambda(route.invoke),
        "a retriever": itemgetter("input") | DPRetriever(route),
    }[shape]
    app = FastAPI()
    add_routes(app, chain.with_types(input_type=dict), path="/naive")
    with TestClient(app, raise_server_exceptions=False) as opened:
        answer = opened.post(f"/naive/{way}", json=body)
        assert "POSITIVE" not in answer.text.upper()
    assert route.budget.spent() == 0
