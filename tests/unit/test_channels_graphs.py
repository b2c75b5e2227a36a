"""LangGraph and agents: their streams, checkpoints and events see a release and nothing of how it came about.

The release is (part of) a node, a tool in a ``ToolNode``, an agent's tool; and the members are graphs and agents
themselves, which stream, checkpoint and announce what they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import pytest
from channels import (
    EXEMPLAR,
    OUTPUT,
    QUESTION,
    Channel,
    Clinic,
    Recorder,
    Tally,
    a_member,
    found_in,
    hear,
    naive,
    sealed_release,
    secret_store,
)
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from langchain_dpicl import PrivacyBudget, SealedRelease, UnsafeConfigurationError
from langchain_dpicl.errors import MembersAbstained
from langchain_dpicl.release.base import as_tool

MEMBERS = 3
MODES = ["values", "updates", "messages", "custom", "checkpoints", "tasks", "debug"]
THREAD: Any = {"configurable": {"thread_id": "1"}}


class State(TypedDict, total=False):
    input: str
    answer: str


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivacyBudget]:
    path = tmp_path_factory.mktemp("graphs") / "budget.db"
    made = PrivacyBudget(1000, 1e-5, 250, replay=False, ledger=f"sqlite:///{path}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def store() -> Any:
    return secret_store()


@pytest.fixture
def sealed_of(budget: PrivacyBudget, store: Any) -> Callable[[Any], SealedRelease]:
    return lambda member: sealed_release(
        store, member, Tally(["Positive", "Negative"], mechanism="vote"), budget, MEMBERS
    )


def clinic(fares: str = "success") -> Clinic:
    return Clinic(fares=fares)


# -- the channels ------------------------------------------------------------------------------------------------------


def a_graph(runnable: Any, *, nested: bool = False, checkpointer: Any = None) -> Any:
    """A node that asks the Runnable in its function."""

    def answer(state: State) -> State:
        return {"answer": runnable.invoke({"input": state["input"]})}

    async def aanswer(state: State) -> State:
        return {"answer": await runnable.ainvoke({"input": state["input"]})}

    graph = StateGraph(State)
    graph.add_node("answer", RunnableLambda(answer, afunc=aanswer))
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    if not nested:
        return graph.compile(checkpointer=checkpointer)
    outer = StateGraph(State)
    outer.add_node("inner", graph.compile())
    outer.add_edge(START, "inner")
    return outer.compile(checkpointer=checkpointer)


def streamed(modes: Any, *, nested: bool = False) -> Channel:
    async def channel(runnable: Any, told: list[str]) -> None:
        saver = InMemorySaver()
        graph = a_graph(runnable, nested=nested, checkpointer=saver)
        try:
            async for chunk in graph.astream(QUESTION, THREAD, stream_mode=modes, subgraphs=nested):
                told.append(repr(chunk))
        finally:
            told.append(repr([vars(saver), list(saver.list(None))]))

    channel.__name__ = f"a_stream_of_{modes if isinstance(modes, str) else 'every_mode'}{'_with_subgraphs' * nested}"
    return channel


async def a_blocking_stream(runnable: Any, told: list[str]) -> None:
    saver = InMemorySaver()
    try:
        for chunk in a_graph(runnable, checkpointer=saver).stream(QUESTION, THREAD, stream_mode=MODES):
            told.append(repr(chunk))
    finally:
        told.append(repr([vars(saver), list(saver.list(None))]))


async def events_of_a_graph(runnable: Any, told: list[str]) -> None:
    async for event in a_graph(runnable, nested=True).astream_events(QUESTION, version="v2"):
        told.append(repr(event))


async def callbacks_of_a_graph(runnable: Any, told: list[str]) -> None:
    recorder = Recorder()
    try:
        await a_graph(runnable).ainvoke(QUESTION, {"callbacks": [recorder]})
    finally:
        told.append(recorder.text())


def tool_of(runnable: Any) -> BaseTool:
    if isinstance(runnable, SealedRelease):
        return as_tool(runnable, "ask", "Asks.")

    def ask(query: str) -> str:
        return str(runnable.invoke({"input": query}))

    async def aask(query: str) -> str:
        return str(await runnable.ainvoke({"input": query}))

    return StructuredTool.from_function(ask, aask, name="ask", description="Asks.")


CALL = AIMessage("", tool_calls=[{"name": "ask", "args": {"query": "a movie"}, "id": "1"}])


async def a_tool_node(runnable: Any, told: list[str]) -> None:
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode([tool_of(runnable)], handle_tool_errors=False))
    graph.add_edge(START, "tools")
    saver = InMemorySaver()
    try:
        async for chunk in graph.compile(checkpointer=saver).astream({"messages": [CALL]}, THREAD, stream_mode=MODES):
            told.append(repr(chunk))
    finally:
        told.append(repr(vars(saver)))


class Scripted(FakeMessagesListChatModel):
    """Calls the tool, then ends."""

    def bind_tools(self, *args: Any, **kwargs: Any) -> Any:
        return self


def an_agent(tools: list[Any]) -> Any:
    return create_agent(Scripted(responses=[CALL, AIMessage("done")]), tools, checkpointer=InMemorySaver())


ASKED: Any = {"messages": [("human", "is it a good movie?")]}


async def an_agents_answer(runnable: Any, told: list[str]) -> None:
    recorder = Recorder()
    try:
        told.append(repr(await an_agent([tool_of(runnable)]).ainvoke(ASKED, {**THREAD, "callbacks": [recorder]})))
    finally:
        told.append(recorder.text())


async def an_agents_stream(runnable: Any, told: list[str]) -> None:
    agent = an_agent([tool_of(runnable)])
    try:
        async for chunk in agent.astream(ASKED, THREAD, stream_mode=MODES, subgraphs=True):
            told.append(repr(chunk))
    finally:
        told.append(repr(vars(agent.checkpointer)))


async def an_agents_blocking_stream(runnable: Any, told: list[str]) -> None:
    told += map(repr, an_agent([tool_of(runnable)]).stream(ASKED, THREAD, stream_mode=MODES))


async def events_of_an_agent(runnable: Any, told: list[str]) -> None:
    async for event in an_agent([tool_of(runnable)]).astream_events(ASKED, THREAD, version="v2"):
        told.append(repr(event))


EVERY = streamed(MODES)
CHANNELS: list[Channel] = [
    EVERY,
    streamed("messages"),
    streamed("custom"),
    streamed(MODES, nested=True),
    a_blocking_stream,
    events_of_a_graph,
    callbacks_of_a_graph,
    a_tool_node,
    an_agents_answer,
    an_agents_stream,
    an_agents_blocking_stream,
    events_of_an_agent,
]
STATE_ALONE = [streamed(mode) for mode in MODES if mode not in ("messages", "custom")]  # naive chains hide there, too
BLOCKING = {"a_blocking_stream", "an_agents_blocking_stream"}


def name_of(channel: Any) -> str:
    return str(channel.__name__)


@pytest.mark.parametrize("channel", CHANNELS, ids=name_of)
async def test_on_a_naive_chain_the_channel_shows_secrets(channel: Channel) -> None:
    heard = await hear(channel, naive(a_member(clinic())))
    assert heard.error is None
    assert found_in("\n".join(heard.told)), "the channel hears what it should, so the other tests can fail"


@pytest.mark.parametrize("channel", [*CHANNELS, *STATE_ALONE], ids=name_of)
async def test_a_release_shows_itself_and_no_secret(channel: Channel, sealed_of: Any) -> None:
    model = clinic()
    heard = await hear(channel, sealed_of(a_member(model)))
    assert heard.error is None
    assert len(model.calls) == MEMBERS
    if name_of(channel) not in ("a_stream_of_messages", "a_stream_of_custom"):
        assert "Positive" in "\n".join(heard.told)
    assert found_in(heard.all()) == []


@pytest.mark.parametrize("fares", ["one fails", "all fail"])
@pytest.mark.parametrize("channel", [*CHANNELS, *STATE_ALONE], ids=name_of)
async def test_failing_members_show_nothing(channel: Channel, fares: str, sealed_of: Any) -> None:
    model = clinic(fares)
    heard = await hear(channel, sealed_of(a_member(model)))
    assert isinstance(heard.error, MembersAbstained | None)
    assert len(model.calls) == MEMBERS
    assert found_in(heard.all()) == []


async def test_on_a_naive_chain_a_failing_member_shows() -> None:
    for channel in (EVERY, an_agents_stream):
        assert found_in((await hear(channel, naive(a_member(clinic("one fails"))))).all())


@pytest.mark.parametrize("channel", [channel for channel in CHANNELS if name_of(channel) not in BLOCKING], ids=name_of)
async def test_a_cancelled_call_shows_nothing(channel: Channel, sealed_of: Any) -> None:
    model = clinic("hangs")
    heard = await hear(channel, sealed_of(a_member(model)), cancel_when=lambda: len(model.calls) == MEMBERS)
    assert isinstance(heard.error, asyncio.CancelledError)
    assert found_in(heard.all()) == []


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_step_that_takes_too_long_shows_nothing(blocking: bool, sealed_of: Any) -> None:
    async def channel(runnable: Any, told: list[str]) -> None:
        graph = a_graph(runnable)
        graph.step_timeout = 0.15
        if blocking:
            told += map(repr, graph.stream(QUESTION, stream_mode=MODES[:4]))
        else:
            async for chunk in graph.astream(QUESTION, stream_mode=MODES[:4]):
                told.append(repr(chunk))

    model = clinic("hangs")
    heard = await hear(channel, sealed_of(a_member(model)))
    assert isinstance(heard.error, TimeoutError)
    assert len(model.calls) == MEMBERS
    assert found_in(heard.all()) == []


# -- members that are graphs and agents themselves ---------------------------------------------------------------------


class Asked(TypedDict, total=False):
    input: str
    examples: Any
    said: str


def a_graph_member(model: Any, **options: Any) -> Runnable[Any, Any]:
    """It streams, announces, and may checkpoint all that it is given."""

    def ask(state: Asked) -> Asked:
        get_stream_writer()(f"{OUTPUT} {_text(state['examples'])}")
        return {"said": str(model.invoke(_text(state["examples"])).text)}

    graph = StateGraph(Asked)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    return graph.compile(**options) | RunnableLambda(lambda state: state["said"])


def _text(examples: Any) -> str:
    return " ".join(str(example["input"]) for example in examples)


def an_agent_member(model: Any, **options: Any) -> Runnable[Any, Any]:
    agent = create_agent(model, [], **options)
    return (
        RunnableLambda(lambda values: {"messages": [("human", f"{_text(values['examples'])} {values['input']}")]})
        | agent
        | RunnableLambda(lambda state: state["messages"][-1].text)
    )


MEMBER_KINDS = {"graph": a_graph_member, "agent": an_agent_member}


@pytest.mark.parametrize("channel", [EVERY, streamed(MODES, nested=True), events_of_a_graph], ids=name_of)
@pytest.mark.parametrize("kind", MEMBER_KINDS)
async def test_a_member_that_is_a_graph_streams_nothing_out(kind: str, channel: Channel, sealed_of: Any) -> None:
    make = MEMBER_KINDS[kind]
    assert found_in("\n".join((await hear(channel, naive(make(clinic())))).told))
    for fares in ("success", "one fails"):
        model = clinic(fares)
        heard = await hear(channel, sealed_of(make(model)))
        assert heard.error is None
        assert len(model.calls) == MEMBERS
        assert found_in(heard.all()) == []


@pytest.mark.parametrize("kind", MEMBER_KINDS)
async def test_a_members_own_checkpoints_are_off(kind: str, sealed_of: Any) -> None:
    saver = InMemorySaver()
    config = {"configurable": {"thread_id": "1"}}
    member = MEMBER_KINDS[kind](clinic(), checkpointer=saver)
    bound = member.with_config(config)
    await naive(bound).ainvoke(QUESTION, config)
    assert found_in(repr(vars(saver)))
    for ask in ("invoke", "ainvoke"):
        saver = InMemorySaver()
        release = sealed_of(MEMBER_KINDS[kind](clinic(), checkpointer=saver).with_config(config))
        answer = release.invoke(QUESTION) if ask == "invoke" else await release.ainvoke(QUESTION)
        assert answer == "Positive"
        assert found_in(repr(vars(saver))) == []


@pytest.mark.parametrize("kind", MEMBER_KINDS)
def test_a_member_graph_whose_model_tells_callbacks_is_refused(kind: str, sealed_of: Any) -> None:
    """A node's function cannot be exchanged, so its model cannot be sealed."""
    with pytest.raises(UnsafeConfigurationError, match=r"Clinic .* callbacks"):
        sealed_of(MEMBER_KINDS[kind](Clinic(callbacks=[Recorder()])))


async def test_a_member_graphs_debug_mode_and_bound_callbacks_are_off(
    sealed_of: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    a_graph_member(clinic(), debug=True).invoke({"input": "x", "examples": [{"input": EXEMPLAR}]})
    assert found_in(capfd.readouterr().out)
    recorder = Recorder()
    graph, last = a_graph_member(clinic(), debug=True).steps  # type: ignore[attr-defined]
    release = sealed_of(graph.with_config(callbacks=[recorder]) | last)
    assert release.invoke(QUESTION) == await release.ainvoke(QUESTION) == "Positive"
    captured = capfd.readouterr()
    assert found_in(captured.out + captured.err + recorder.text()) == []
