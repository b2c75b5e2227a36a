"""Members that are whole apps over `store.as_vectorstore()`: no channel shows a record of their searches or tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, TypedDict

import pytest
from channels import (
    EXEMPLAR,
    LABELS,
    OUTPUT,
    QUESTION,
    Channel,
    Clinic,
    Recorder,
    Tally,
    every_run,
    found_in,
    hear,
    langsmith_from_the_environment,
    sealed_release,
    secret_records,
    secret_store,
)
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, dynamic_prompt
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.globals import get_debug, set_debug
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool, tool
from langchain_core.tracers.context import collect_runs
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph

from langchain_dpicl import PrivacyBudget, UnsafeConfigurationError
from langchain_dpicl.errors import MembersAbstained

MEMBERS = 3
MODES = ["values", "updates", "messages", "custom", "checkpoints", "tasks", "debug"]


class SearchingClinic(Clinic):
    """Searches by its tool first, if it has one; then it tells secrets as a `Clinic` does."""

    tools: Any = ()

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.model_copy(update={"tools": tools})

    def _asks(self, messages: list[BaseMessage]) -> ChatResult | None:
        if not self.tools or isinstance(messages[-1], ToolMessage):
            return None
        call = AIMessage("", tool_calls=[{"name": "search", "args": {"query": "movie"}, "id": "1"}])
        return ChatResult(generations=[ChatGeneration(message=call)])

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return self._asks(messages) or super()._generate(messages, *args, **kwargs)

    async def _agenerate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return self._asks(messages) or await super()._agenerate(messages, *args, **kwargs)


def context_of(documents: Any) -> str:
    return " ".join(document.page_content for document in documents)


read_text = RunnableLambda(lambda message: message.text)
ask_agent = RunnableLambda(lambda values: {"messages": [("human", values["input"])]})
read_agent = RunnableLambda(lambda state: state["messages"][-1].text)


def a_chain(vectors: Any, model: Any) -> Any:
    return itemgetter("input") | vectors.as_retriever() | context_of | model | read_text


def an_agent_with_a_tool(vectors: Any, model: Any) -> Any:
    @tool
    def search(query: str) -> str:
        """Searches the notes."""
        return context_of(vectors.similarity_search(query, k=2))

    return ask_agent | create_agent(model, [search]) | read_agent


def an_agent_with_a_retriever_tool(vectors: Any, model: Any) -> Any:
    search = create_retriever_tool(vectors.as_retriever(), "search", "Searches the notes.")
    return ask_agent | create_agent(model, [search]) | read_agent


def an_agent_with_middleware(vectors: Any, model: Any) -> Any:
    @dynamic_prompt
    def with_notes(request: ModelRequest) -> str:
        return context_of(vectors.similarity_search(request.state["messages"][-1].text))

    return ask_agent | create_agent(model, [], middleware=[with_notes]) | read_agent


class Steps(TypedDict, total=False):
    input: str
    context: Any
    answer: str


def a_graph(vectors: Any, model: Any) -> Any:
    def retrieve(state: Steps) -> Steps:
        found = vectors.similarity_search(state["input"])
        get_stream_writer()(f"{OUTPUT} {context_of(found)}")
        return {"context": found}

    def generate(state: Steps) -> Steps:
        return {"answer": model.invoke(context_of(state["context"])).text}

    graph = StateGraph(Steps).add_sequence([retrieve, generate]).add_edge(START, "retrieve")
    return graph.compile() | itemgetter("answer")


APPS: dict[str, Callable[[Any, Any], Any]] = {
    "a chain": a_chain,
    "a tool": an_agent_with_a_tool,
    "a retriever's tool": an_agent_with_a_retriever_tool,
    "middleware": an_agent_with_middleware,
    "a graph": a_graph,
}


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivacyBudget]:
    path = tmp_path_factory.mktemp("standin") / "budget.db"
    made = PrivacyBudget(1000, 1e-5, 250, replay=False, ledger=f"sqlite:///{path}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def store() -> Any:
    return secret_store()


@pytest.fixture
def release_of(budget: PrivacyBudget, store: Any) -> Callable[[str, Any], Any]:
    vectors = store.as_vectorstore()
    return lambda name, model: sealed_release(
        store, APPS[name](vectors, model), Tally(LABELS, mechanism="vote"), budget, MEMBERS
    )


def in_the_open(name: str, model: Any) -> Any:
    """The same app over a collection that anyone reads, in a step: graphs stream their updates, which no key is in."""
    open_to_all = InMemoryVectorStore.from_texts(
        [record["input"] for record in secret_records()], DeterministicFakeEmbedding(size=4)
    )
    app = APPS[name](open_to_all, model)

    async def aask(values: Any) -> Any:
        return await app.ainvoke(values)

    return RunnableLambda(lambda values: app.invoke(values), afunc=aask)


# -- the channels ------------------------------------------------------------------------------------------------------


async def callbacks(runnable: Any, told: list[str]) -> None:
    recorder = Recorder()
    try:
        runnable.invoke(QUESTION, {"callbacks": [recorder]})
        await runnable.ainvoke(QUESTION, {"callbacks": [recorder]})
    finally:
        told.append(recorder.text())


async def events_v1(runnable: Any, told: list[str]) -> None:
    async for event in runnable.astream_events(QUESTION, version="v1"):
        told.append(repr(event))


async def events_v2(runnable: Any, told: list[str]) -> None:
    async for event in runnable.astream_events(QUESTION, version="v2"):
        told.append(repr(event))


async def the_log(runnable: Any, told: list[str]) -> None:
    async for patch in runnable.astream_log(QUESTION):
        told.append(repr(patch))


async def collected_runs(runnable: Any, told: list[str]) -> None:
    with collect_runs() as runs:
        try:
            await runnable.ainvoke(QUESTION)
        finally:
            told += map(every_run, runs.traced_runs)


async def a_tracer_from_the_environment(runnable: Any, told: list[str]) -> None:
    with langsmith_from_the_environment(pytest.MonkeyPatch) as client:
        try:
            runnable.invoke(QUESTION)
        finally:
            told += client.sent


async def a_graph_around_it(runnable: Any, told: list[str]) -> None:
    async def answer(state: Steps) -> Steps:
        return {"answer": await runnable.ainvoke({"input": state["input"]})}

    graph: Any = StateGraph(Steps).add_node("answer", answer).add_edge(START, "answer").compile()
    async for chunk in graph.astream(QUESTION, stream_mode=MODES, subgraphs=True):
        told.append(repr(chunk))


CHANNELS: list[Channel] = [
    callbacks,
    events_v1,
    events_v2,
    the_log,
    collected_runs,
    a_tracer_from_the_environment,
    a_graph_around_it,
]
EVERY_CHANNEL = pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.__name__)
EVERY_APP = pytest.mark.parametrize("name", APPS)


@EVERY_CHANNEL
@EVERY_APP
async def test_in_the_open_the_channel_shows_secrets(name: str, channel: Channel) -> None:
    heard = await hear(channel, in_the_open(name, SearchingClinic()))
    assert heard.error is None
    assert found_in("\n".join(heard.told)), "the channel hears what it should, so the other tests can fail"


@pytest.mark.parametrize("fares", ["success", "one fails", "all fail"])
@EVERY_CHANNEL
@EVERY_APP
async def test_a_release_shows_itself_and_no_secret(name: str, channel: Channel, fares: str, release_of: Any) -> None:
    model = SearchingClinic(fares=fares)
    heard = await hear(channel, release_of(name, model))
    assert isinstance(heard.error, MembersAbstained | None)
    assert heard.error is None or fares == "all fail"
    assert len(model.calls) == MEMBERS * (2 if channel is callbacks and heard.error is None else 1)
    assert all(EXEMPLAR in call for call in model.calls), "each member has read a record"
    assert found_in(heard.all()) == []
    if fares == "success":
        assert "Positive" in "\n".join(heard.told)


@EVERY_APP
async def test_a_cancelled_call_shows_nothing(name: str, release_of: Any) -> None:
    model = SearchingClinic(fares="hangs")

    async def awaited(runnable: Any, told: list[str]) -> None:
        told.append(repr(await runnable.ainvoke(QUESTION)))

    heard = await hear(awaited, release_of(name, model), cancel_when=lambda: len(model.calls) == MEMBERS)
    assert isinstance(heard.error, asyncio.CancelledError)
    assert found_in(heard.all()) == []


@EVERY_APP
def test_debug_mode_is_refused_and_charges_nothing(name: str, release_of: Any, budget: PrivacyBudget) -> None:
    release, before, debug = release_of(name, SearchingClinic()), budget.spent(), get_debug()
    set_debug(True)
    try:
        with pytest.raises(UnsafeConfigurationError, match="debug"):
            release.invoke(QUESTION)
    finally:
        set_debug(debug)
    assert budget.spent() == before


@EVERY_APP
def test_neither_the_app_nor_the_release_has_a_record_in_its_texts(name: str, release_of: Any, store: Any) -> None:
    release = release_of(name, SearchingClinic())
    vectors = store.as_vectorstore()
    shown = [release, release.ensemble, vectors, vectors.as_retriever(), vars(vectors), vars(vectors.as_retriever())]
    assert found_in("\n".join([*map(repr, shown), *map(str, shown), repr(release.get_graph())])) == []
    with pytest.raises(UnsafeConfigurationError) as outside:
        APPS[name](vectors, SearchingClinic()).invoke(QUESTION)
    assert found_in(str(outside.value)) == []
