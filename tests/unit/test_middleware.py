"""Middleware for `create_agent`: real agents, a scripted model, real releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from channels import Recorder
from ears import Ears
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import Field

from langchain_dpicl import (
    DPRetrievalMiddleware,
    DPRetriever,
    DPToolMiddleware,
    InvalidParameter,
    UnsafeConfigurationError,
)


@dataclass
class Context:
    """What the application knows of the caller."""

    user: str | None


class Script(FakeMessagesListChatModel):
    """Says its lines, and remembers what it was asked."""

    seen: list[list[BaseMessage]] = Field(default_factory=list)

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *rest: Any, **more: Any) -> Any:
        self.seen.append(messages)
        return super()._generate(messages, *rest, **more)


@tool
def search(query: str) -> str:
    """Search the private notes."""
    raise AssertionError("the private tool ran")


@tool
def double(number: int) -> str:
    """Twice a number."""
    return str(2 * number)


def calls(*made: tuple[str, dict[str, Any]]) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": f"{i}"} for i, (name, args) in enumerate(made)])


def positive(_: Any) -> str:
    return "Positive"


async def asked(agent: Any, way: str, text: str = "Is it good?", config: Any = None, **more: Any) -> dict[str, Any]:
    given = {"messages": [("human", text)]}
    state = await agent.ainvoke(given, config, **more) if way == "ainvoke" else agent.invoke(given, config, **more)
    assert isinstance(state, dict)
    return state


THREAD: Any = {"configurable": {"thread_id": "1"}}
WAYS = pytest.mark.parametrize("way", ["invoke", "ainvoke"])


@WAYS
async def test_the_model_reads_what_was_released_and_the_state_has_its_receipt(way: str, sealed_of: Any) -> None:
    release = sealed_of(positive)
    model = Script(responses=[AIMessage("Yes.")])
    agent = create_agent(model, [], middleware=[DPRetrievalMiddleware(release)], system_prompt="Be kind.")
    state = await asked(agent, way)
    (document,) = state["released"]
    assert (document.page_content, document.metadata["receipt"]["number"]) == ("Positive", 1)
    system = model.seen[0][0].text
    assert system.startswith("Be kind.\n\n")
    assert system.endswith("\n\nPositive")
    assert [message.type for message in state["messages"]] == ["human", "ai"]
    assert release.budget.spent() == 1


async def test_a_thread_asks_for_each_new_question_and_replays_an_equal_one(sealed_of: Any) -> None:
    release = sealed_of(positive, replay=True)
    agent = create_agent(
        Script(responses=[AIMessage("Yes.")]),
        [],
        middleware=[DPRetrievalMiddleware(release)],
        checkpointer=InMemorySaver(),
    )
    thread = {"configurable": {"thread_id": "1"}}
    numbers = []
    for text in ("one", "two", "one"):
        state = await asked(agent, "invoke", text, thread)
        numbers.append(state["released"][0].metadata["receipt"]["number"])
    assert numbers == [1, 2, 1]
    first = list(agent.get_state_history(thread))[-1]
    agent.invoke(None, first.config)  # from before the first release
    assert release.budget.spent() == 2


@WAYS
async def test_a_spent_budget_is_told_to_the_model(way: str, sealed_of: Any) -> None:
    model = Script(responses=[AIMessage("I cannot know.")])
    agent = create_agent(model, [], middleware=[DPRetrievalMiddleware(sealed_of(positive, releases=1))])
    await asked(agent, way, "one")
    state = await asked(agent, way, "two")
    assert state["messages"][-1].text == "I cannot know."
    assert state["released"][0].metadata == {"error": "PrivacyBudgetExceeded"}
    assert state["released"][0].page_content in model.seen[-1][0].text


def test_released_documents_of_any_kind_are_shown(sealed_of: Any) -> None:
    vectors = InMemoryVectorStore.from_documents([Document("a released fact")], DeterministicFakeEmbedding(size=8))
    for source in (vectors, vectors.as_retriever(), DPRetriever(sealed_of(positive))):
        model = Script(responses=[AIMessage("Yes.")])
        create_agent(model, [], middleware=[DPRetrievalMiddleware(source, preamble="Known:")]).invoke(
            {"messages": [("human", "Is it good?")]}
        )
        assert model.seen[0][0].text in ("Known:\n\na released fact", "Known:\n\nPositive")


@WAYS
async def test_a_private_tool_is_answered_by_its_release_and_another_runs(way: str, sealed_of: Any) -> None:
    release = sealed_of(positive)
    script = [calls(("search", {"query": "Is it good?"}), ("double", {"number": 4})), AIMessage("Yes.")]
    agent = create_agent(
        Script(responses=script), [double], middleware=[DPToolMiddleware({"search": release}, like=[search])]
    )
    state = await asked(agent, way)
    found, doubled = state["messages"][2:4]
    assert (found.content, found.status, found.name, found.artifact["number"]) == ("Positive", "success", "search", 1)
    assert doubled.content == "8"


@WAYS
async def test_a_spent_budget_is_an_error_message_and_the_agent_goes_on(way: str, sealed_of: Any) -> None:
    release = sealed_of(positive, releases=1)
    script = [calls(("search", {"query": "one"})), calls(("search", {"query": "two"})), AIMessage("Only one.")]
    agent = create_agent(
        Script(responses=script), [], middleware=[DPToolMiddleware({"search": release}, like=[search])]
    )
    state = await asked(agent, way)
    assert [message.status for message in state["messages"] if message.type == "tool"] == ["success", "error"]
    assert state["messages"][-1].text == "Only one."
    assert release.budget.spent() == 1


@WAYS
@pytest.mark.parametrize("first", ["model", "tools"])
async def test_a_private_tool_that_the_agent_has_too_is_refused_before_it_runs(
    first: str, way: str, sealed_of: Any
) -> None:
    """Also if a client goes straight to the tools."""
    model = Script(responses=[calls(("search", {"query": "one"}))])
    middleware = DPToolMiddleware({"search": sealed_of(positive)}, like=[search])
    agent = create_agent(model, [search], middleware=[middleware], checkpointer=InMemorySaver())
    given: Any = {"messages": [("human", "one")]}
    if first == "tools":
        given["messages"].append(calls(("search", {"query": "one"})))
        agent.update_state(THREAD, given, as_node="model")
        given = None
    with pytest.raises(UnsafeConfigurationError, match=r"a tool 'search' of its own"):
        await agent.ainvoke(given, THREAD) if way == "ainvoke" else agent.invoke(given, THREAD)
    assert model.seen == []


@WAYS
async def test_a_reviewer_may_change_a_call_and_pays_for_what_is_asked_then(way: str, sealed_of: Any) -> None:
    release = sealed_of(positive, replay=True)
    reviewed = HumanInTheLoopMiddleware(interrupt_on={"double": True, "search": True})
    for middleware in (
        [DPToolMiddleware({"search": release}, like=[search]), reviewed],
        [reviewed, DPToolMiddleware({"search": release}, like=[search])],
    ):
        script = [calls(("double", {"number": 4})), AIMessage("Yes.")]
        saver = InMemorySaver()
        agent = create_agent(Script(responses=script), [double], middleware=middleware, checkpointer=saver)
        await asked(agent, way, config=THREAD)
        edited = {"type": "edit", "edited_action": {"name": "search", "args": {"query": "Is it good?"}}}
        resume: Any = Command(resume={"decisions": [edited]})
        state = await agent.ainvoke(resume, THREAD) if way == "ainvoke" else agent.invoke(resume, THREAD)
        (told,) = [message for message in state["messages"] if message.type == "tool"]
        assert told.content.endswith("Positive")
    assert release.budget.spent() == 1


def test_a_stand_in_keeps_the_name_and_the_meaning_of_its_only_argument(sealed_of: Any) -> None:
    @tool("search", parse_docstring=True)
    def search_text(text: str) -> str:
        """Search the private notes.

        Args:
            text: What to look for.
        """
        raise AssertionError("the private tool ran")

    (instead,) = DPToolMiddleware({"search": sealed_of(positive)}, like=[search_text]).tools
    assert instead.args == {"text": {"title": "Text", "type": "string", "description": "What to look for."}}
    assert instead.invoke({"text": "Is it good?"}) == "Positive"


async def test_several_arguments_are_asked_by_their_names(sealed_of: Any) -> None:
    @tool("search")
    def search_two(input: str, city: str) -> str:
        """Search the private notes of a city."""
        raise AssertionError("the private tool ran")

    asked_with: list[Any] = Ears()

    def noting(values: Any) -> str:
        asked_with.append({key: values[key] for key in ("input", "city")})
        return "Positive"

    release = sealed_of(noting, share=[asked_with])
    script = [calls(("search", {"input": "Is it good?", "city": "Bath"})), AIMessage("Yes.")]
    middleware = DPToolMiddleware({"search": release}, like=[search_two])
    state = await asked(create_agent(Script(responses=script), [], middleware=[middleware]), "invoke")
    assert state["messages"][2].content == "Positive"
    assert {"input": "Is it good?", "city": "Bath"} in list(asked_with)


@WAYS
@pytest.mark.parametrize("kind", ["retrieval", "tool"])
async def test_the_caller_in_the_runs_context_pays(kind: str, way: str, sealed_of: Any) -> None:
    release = sealed_of(positive, scope="per_principal")
    by: Any = {"principal_from": lambda context: context.user}
    middleware = (
        DPRetrievalMiddleware(release, **by)
        if kind == "retrieval"
        else DPToolMiddleware({"search": release}, like=[search], **by)
    )
    script = [AIMessage("Yes.")] if kind == "retrieval" else [calls(("search", {"query": "one"})), AIMessage("Yes.")]
    agent = create_agent(Script(responses=script), [], middleware=[middleware], context_schema=Context)
    for user in ("ann", "bob", "ann"):
        await asked(agent, way, f"for {user}", context=Context(user))
    assert [release.budget.spent(principal=user) for user in ("ann", "bob", "eve")] == [2, 1, 0]
    with pytest.raises(InvalidParameter, match="principal"):
        await asked(agent, way, context=Context(None))


@WAYS
async def test_no_stream_checkpoint_or_trace_holds_a_private_text(way: str, sealed_of: Any, canary: str) -> None:
    def telling(values: Any) -> str:
        return f"Positive {values['examples']}"

    release = sealed_of(telling)
    saver = InMemorySaver()
    recorder = Recorder()
    script = [calls(("search", {"query": "one"})), AIMessage("Yes.")]
    agent = create_agent(
        Script(responses=script),
        [],
        middleware=[DPRetrievalMiddleware(release), DPToolMiddleware({"search": release}, like=[search])],
        checkpointer=saver,
    )
    modes: Any = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints"]
    config: Any = {"configurable": {"thread_id": "1"}, "callbacks": [recorder]}
    given: Any = {"messages": [("human", "Is it good?")]}
    if way == "invoke":
        told = [repr(each) for each in agent.stream(given, config, stream_mode=modes)]
    else:
        told = [repr(each) async for each in agent.astream(given, config, stream_mode=modes)]
        async for event in agent.astream_events(given, {"configurable": {"thread_id": "2"}}, version="v2"):
            told.append(repr(event))
    told += [repr(vars(saver)), repr(list(saver.list(None))), recorder.text()]
    text = "\n".join(told)
    assert "Is it good?" in text  # the ears work
    assert "receipt" in text
    assert canary not in text


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda _: DPRetrievalMiddleware("notes"), "source"),  # type: ignore[arg-type]
        (lambda r: DPRetrievalMiddleware(r, preamble=3), "preamble"),
        (lambda r: DPRetrievalMiddleware(r, principal_from="ann"), "principal_from"),
        (lambda _: DPToolMiddleware({}, like=[]), "releases"),
        (lambda r: DPToolMiddleware({"serach": r}, like=[search]), "like"),
        (lambda r: DPToolMiddleware({"search": r}, like=[search, double]), "like"),
        (lambda r: DPToolMiddleware({"search": r}, like="search"), "like"),
        (lambda _: DPToolMiddleware({"search": positive}, like=[search]), "release"),  # type: ignore[dict-item]
    ],
)
def test_what_cannot_work_is_refused(make: Any, parameter: str, sealed_of: Any) -> None:
    with pytest.raises(InvalidParameter, match=rf"\b{parameter}\b"):
        make(sealed_of(positive))
