"""`tool.py`: a release as an agent's tool, and what the agent reads when there is no answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from ears import Ears
from langchain.agents import create_agent
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import ToolException, create_retriever_tool, tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from typing_extensions import TypedDict

from langchain_dpicl import (
    DPAggregate,
    DPRetriever,
    InvalidParameter,
    LedgerError,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudgetExceeded,
    PrivateEnsemble,
    acting_for,
)
from langchain_dpicl.release.base import ABSTAINED, SPENT, UNAVAILABLE, as_tool


class Script(FakeMessagesListChatModel):
    """A model that asks for what the test says."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def calls(*questions: str, name: str = "route", key: str = "query") -> list[AIMessage]:
    """One tool call a turn, then the end."""
    asked = [
        AIMessage("", tool_calls=[{"name": name, "args": {key: question}, "id": f"call-{i}"}])
        for i, question in enumerate(questions)
    ]
    return [*asked, AIMessage("done")]


def positive(values: Any) -> str:
    return "Positive"


@pytest.fixture(params=["invoke", "ainvoke"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """run(runnable, input): synchronously or not."""

    async def go(runnable: Any, value: Any) -> Any:
        return runnable.invoke(value) if request.param == "invoke" else await runnable.ainvoke(value)

    return go


def tool_messages(state: Any) -> list[ToolMessage]:
    return [message for message in state["messages"] if isinstance(message, ToolMessage)]


async def test_an_agent_reads_the_answer_and_its_artifact_is_the_receipt(sealed_of: Any, run: Any) -> None:
    route = sealed_of(positive)
    agent = create_agent(Script(responses=calls("a film")), [route.as_tool("route", "what it is")])
    (message,) = tool_messages(await run(agent, {"messages": [("user", "go")]}))
    assert (message.content, message.status) == ("Positive", "success")
    assert message.artifact["outcome"] == "released"
    assert message.artifact["number"] == route.budget.spent() == 1
    json.dumps(message.artifact)


async def test_a_spent_budget_reaches_the_agent_as_a_message_it_can_act_on(sealed_of: Any, run: Any) -> None:
    """Mistake to guard against: an agent that crashes, or that is told nothing and asks for ever."""
    route = sealed_of(positive, releases=1)
    agent = create_agent(Script(responses=calls("one", "two", "three")), [as_tool(route, "route", "what it is")])
    state = await run(agent, {"messages": [("user", "go")]})
    assert [(m.content, m.status) for m in tool_messages(state)] == [
        ("Positive", "success"),
        (SPENT, "error"),
        (SPENT, "error"),
    ]
    assert state["messages"][-1].content == "done"
    assert route.budget.spent() == 1


async def test_a_model_that_is_down_is_said_too_and_costs_nothing_once_it_is_known(sealed_of: Any, run: Any) -> None:
    def broken(values: Any) -> str:
        raise ConnectionError("no model")

    route = sealed_of(broken)
    agent = create_agent(Script(responses=calls("one", "two")), [as_tool(route, "route", "what it is")])
    messages = tool_messages(await run(agent, {"messages": [("user", "go")]}))
    assert [(m.content, m.status) for m in messages] == [(ABSTAINED, "error"), (UNAVAILABLE, "error")]
    assert route.budget.spent() == 1, "the first is a release that says so; the second is refused before the charge"


async def test_other_failures_are_raised(sealed_of: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that cannot be written is for whoever runs the agent, not for the agent."""
    route = sealed_of(positive)

    def gone(*args: Any, **kwargs: Any) -> Any:
        raise LedgerError("gone")

    tool = as_tool(route, "route", "what it is")
    monkeypatch.setattr(route.budget._ledger, "charge", gone)
    with pytest.raises(LedgerError):
        await run(create_agent(Script(responses=calls("one")), [tool]), {"messages": [("user", "go")]})


async def test_a_tool_node_of_a_graph_makes_the_release(sealed_of: Any, run: Any) -> None:
    route = sealed_of(positive, releases=1)
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode([as_tool(route, "route", "what it is")]))
    graph.add_edge(START, "tools")
    graph.add_edge("tools", END)
    compiled = graph.compile()
    first = tool_messages(await run(compiled, {"messages": calls("a film")[:1]}))
    again = tool_messages(await run(compiled, {"messages": calls("another")[:1]}))
    assert (first[-1].content, again[-1].content, again[-1].status) == ("Positive", SPENT, "error")


class Film(TypedDict, total=False):
    input: str
    label: str


async def test_a_release_is_a_node_of_its_own_where_the_graph_names_its_result(sealed_of: Any, run: Any) -> None:
    """Plain LCEL makes the node's update from the release; a spent budget is an error, as everywhere."""
    route = sealed_of(positive, releases=1)
    graph = StateGraph(Film)
    graph.add_node("label", route | RunnableLambda(lambda label: {"label": label}))
    graph.add_edge(START, "label")
    graph.add_edge("label", END)
    compiled = graph.compile()
    assert await run(compiled, {"input": "a film"}) == {"input": "a film", "label": "Positive"}
    with pytest.raises(PrivacyBudgetExceeded):
        await run(compiled, {"input": "another"})


async def test_a_chain_from_a_release_is_a_tool_too(sealed_of: Any, run: Any) -> None:
    chain = sealed_of(positive) | RunnableLambda(str.upper)
    agent = create_agent(Script(responses=calls("a film")), [as_tool(chain, "route", "what it is")])
    (message,) = tool_messages(await run(agent, {"messages": [("user", "go")]}))
    assert (message.content, message.artifact) == ("POSITIVE", None)


async def test_the_arguments_are_the_ones_that_were_declared(sealed_of: Any, run: Any) -> None:
    seen: list[Any] = Ears()

    def member(values: Any) -> str:
        seen.append(values["review"])
        return "Positive"

    tool = as_tool(sealed_of(member), "route", "what it is", inputs={"review": "a film review"})
    assert tool.args == {"review": {"description": "a film review", "title": "Review", "type": "string"}}
    agent = create_agent(Script(responses=calls("a film", key="review")), [tool])
    (message,) = tool_messages(await run(agent, {"messages": [("user", "go")]}))
    assert message.content == "Positive"
    assert set(seen) == {"a film"}


def test_a_release_that_looks_for_near_examples_is_asked_under_its_own_key(
    store_of: Any, records: Any, budget_of: Any
) -> None:
    selector = PoissonExampleSelector(store_of(records(8)), 2, rate=1.0, max_exemplars=2, nearest_to="question")
    release = PrivateEnsemble(selector, positive) | DPAggregate(NoisyVote(["Positive", "Negative"]), budget_of())
    tool = release.as_tool("route", "what it is")
    assert list(tool.args) == ["query"]
    assert tool.invoke({"query": "a film"}) == "Positive"


async def test_an_agents_releases_count_for_whom_it_acts(sealed_of: Any, run: Any) -> None:
    """The principal is set around the agent; nothing that the model writes can change it."""
    route = sealed_of(positive, scope="per_principal", releases=2)
    tool = as_tool(route, "route", "what it is")
    with acting_for("alice"):
        await run(create_agent(Script(responses=calls("one", "two")), [tool]), {"messages": [("user", "go")]})
    with acting_for("bob"):
        await run(create_agent(Script(responses=calls("one")), [tool]), {"messages": [("user", "go")]})
    assert (route.budget.spent(principal="alice"), route.budget.spent(principal="bob")) == (2, 1)


async def test_what_an_agent_is_told_hangs_on_no_other_error(sealed_of: Any, canary_free: Any) -> None:
    tool = as_tool(sealed_of(positive, releases=1), "route", "what it is")
    tool.handle_tool_error = False
    tool.invoke({"query": "one"})
    with pytest.raises(ToolException, match="privacy budget") as caught:
        tool.invoke({"query": "two"})
    canary_free(caught.value, frames=True)
    with pytest.raises(ToolException, match="privacy budget") as caught:
        await tool.ainvoke({"query": "two"})
    canary_free(caught.value, frames=True)


@pytest.mark.parametrize(
    ("name", "description", "parameter"),
    [
        ("", "what it is", "name"),
        (3, "what it is", "name"),
        ("route", "", "description"),
        ("route", None, "description"),
    ],
)
def test_a_tool_needs_a_name_and_a_description(sealed_of: Any, name: Any, description: Any, parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        as_tool(sealed_of(positive), name, description)
    assert caught.value.parameter == parameter


def test_a_chain_without_a_release_is_refused() -> None:
    """It would be a tool like any other, with the name of a private one."""
    with pytest.raises(InvalidParameter, match="RunnableLambda"):
        as_tool(RunnableLambda(positive), "route", "what it is")


async def test_a_tool_of_one_argument_may_be_asked_without_its_name(sealed_of: Any, run: Any) -> None:
    tool = as_tool(sealed_of(positive), "route", "what it is")
    assert await run(tool, "a film") == "Positive"


BAD = [{}, {"model_config": "x"}, {"_x": "x"}, {"self": "x"}, {"a b": "x"}, {"a": 3}]


@pytest.mark.parametrize("inputs", BAD, ids=str)
def test_arguments_that_langchain_cannot_take_are_refused(sealed_of: Any, inputs: Any) -> None:
    with pytest.raises(InvalidParameter, match="inputs"):
        as_tool(sealed_of(positive), "route", "what it is", inputs=inputs)


def search_of(kind: str, retriever: DPRetriever) -> Any:
    """The tool that LangChain makes of a retriever, or a user's own."""
    if kind == "a retriever tool":
        return create_retriever_tool(retriever, "search", "Searches.")

    @tool
    def search(query: str) -> str:
        """Searches."""
        return "\n".join(document.page_content for document in retriever.invoke(query))

    return search


@pytest.mark.parametrize("kind", ["a retriever tool", "a function"])
async def test_a_spent_retriever_within_a_tool_is_a_message(kind: str, sealed_of: Any, run: Any) -> None:
    retriever = DPRetriever(sealed_of(positive, releases=1))
    agent = create_agent(Script(responses=calls("one", "two", name="search")), [search_of(kind, retriever)])
    state = await run(agent, {"messages": [("user", "go")]})
    assert [message.content for message in tool_messages(state)] == ["Positive", SPENT]
    with pytest.raises(PrivacyBudgetExceeded):  # in a chain an error stays one
        await run(retriever, "two")
    (document,) = await run(DPRetriever(retriever.release, on_exhausted="message"), "two")
    assert (document.page_content, document.metadata) == (SPENT, {"error": "PrivacyBudgetExceeded"})


async def test_a_retriever_that_shall_raise_does_so_within_a_tool(sealed_of: Any, run: Any) -> None:
    retriever = DPRetriever(sealed_of(positive, releases=1), on_exhausted="raise")
    agent = create_agent(Script(responses=calls("one", "two", name="search")), [search_of("a function", retriever)])
    with pytest.raises(PrivacyBudgetExceeded):
        await run(agent, {"messages": [("user", "go")]})
    with pytest.raises(InvalidParameter, match="on_exhausted"):
        DPRetriever(retriever.release, on_exhausted="never")  # type: ignore[arg-type]
