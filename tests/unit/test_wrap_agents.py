"""`wrap_rag` on agents and graphs whose state has messages: how they are asked, and what they answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel
from test_wrap_rag_shapes import QUESTION, Scripted, a_collection, context_of, owners_in
from ways import WAYS, ask

from langchain_dpicl import (
    DPAggregate,
    InvalidParameter,
    ModelUnavailable,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
    Structured,
    wrap_rag,
)

DESKS = NoisyVote(["porch", "ledger"])


class Fix(BaseModel):
    desk: Literal["porch", "ledger"]


class Answer(BaseModel):
    text: str


@pytest.fixture
def wrap(budget_of: Any) -> Callable[..., Any]:
    def make(app: Any, collection: Any, aggregator: Any = DESKS, **options: Any) -> Any:
        options = {"calls": 20, "rate": 1.0, "threshold": None, "owner_key": "patient"} | options
        budget = budget_of(replay=True)
        return wrap_rag(app, collection, aggregator, budget, **options)

    return make


def agent_over(collection: Any, model: Any) -> Any:
    return create_agent(model, [create_retriever_tool(collection.as_retriever(), "search", "Searches the notes.")])


def graph_over(collection: Any, model: Any) -> Any:
    class State(MessagesState):
        context: str

    def retrieve(state: State) -> Any:
        return {"context": context_of(collection.similarity_search(state["messages"][-1].text))}

    def generate(state: State) -> Any:
        return {"messages": [model.invoke(state["context"])]}

    return StateGraph(State).add_sequence([retrieve, generate]).add_edge(START, "retrieve").compile()


APPS = {"an agent": agent_over, "a graph": graph_over}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", APPS)
async def test_messages_and_a_plain_text_ask_the_same_and_the_last_message_answers(
    name: str, way: str, wrap: Any
) -> None:
    collection, model = a_collection(), Scripted()
    release = wrap(APPS[name](collection, model), collection)
    assert release.asks == "messages"
    equal: list[Any] = [QUESTION, {"question": QUESTION}, {"messages": [("human", QUESTION)]}]
    equal += [{"messages": QUESTION}, {"messages": [{"role": "user", "content": QUESTION}]}]
    for request in equal:
        assert await ask(way, release, request) == "porch"
    assert release.budget.spent() == 1, "one request, which is replayed"
    assert {len(owners_in(told)) for told in model.told} <= {0, 1}


def test_of_a_conversation_the_last_message_of_a_person_is_what_documents_are_near_to(wrap: Any) -> None:
    collection, asked = a_collection(), list[str]()
    release = wrap(agent_over(collection, Scripted()), collection)
    embed = release.store.embed_query
    release.store.embed_query = lambda text: asked.append(text) or embed(text)
    said = [HumanMessage("hello"), AIMessage("hello"), HumanMessage(QUESTION), AIMessage("a moment")]
    assert release.invoke({"messages": said}) == "porch"
    assert asked == [QUESTION]


@pytest.mark.parametrize("messages", [[], [AIMessage("porch")], [("nobody", "hello")], 7, None])
def test_messages_without_a_question_are_refused_and_cost_nothing(messages: Any, wrap: Any) -> None:
    collection = a_collection()
    release = wrap(agent_over(collection, Scripted()), collection)
    with pytest.raises(InvalidParameter, match=r"input='messages' is not allowed: messages .* one of a person"):
        release.invoke({"messages": messages})
    assert release.budget.spent() == 0


def test_what_the_user_reads_out_of_the_state_stays_the_answer(wrap: Any) -> None:
    collection = a_collection()
    release = wrap(agent_over(collection, Scripted()) | (lambda state: state["messages"][-1].text), collection)
    assert release.invoke({"messages": [("human", QUESTION)]}) == "porch"


def structured(model: type[BaseModel], **values: Any) -> Callable[[Any], Any]:
    """A graph that answers as `create_agent(..., response_format=model)` does."""

    class State(MessagesState):
        structured_response: Any

    def app(collection: Any) -> Any:
        def generate(state: State) -> Any:
            collection.similarity_search(state["messages"][-1].text)
            return {"messages": [AIMessage("done")], "structured_response": model(**values)}

        return StateGraph(State).add_node("generate", generate).add_edge(START, "generate").compile()

    return app


def test_a_structured_response_is_the_answer(wrap: Any) -> None:
    collection = a_collection()
    release = wrap(structured(Fix, desk="porch")(collection), collection, Structured(Fix))
    assert release.invoke(QUESTION) == Fix(desk="porch")


@pytest.mark.parametrize("at", ["a later question", pytest.param("the first one", marks=pytest.mark.asks_first)])
def test_another_model_than_the_expected_one_is_named_by_rehearsal_and_public_question(at: str, wrap: Any) -> None:
    """Both ask on public words alone. Of a private answer nothing is told: there the member abstains."""
    collection = a_collection()
    release = wrap(structured(Answer, text="porch")(collection), collection, Structured(Fix))
    told = "the member answers Answer, and Fix is expected"
    assert told in release.rehearse([Document("a public note")], QUESTION).calls[0].error
    with pytest.raises(ModelUnavailable, match=told):
        release.invoke(QUESTION)
    assert release.budget.spent() == 0


def test_fields_that_are_not_there_are_named(wrap: Any) -> None:
    collection = a_collection()
    chain = collection.as_retriever() | RunnableLambda(lambda found: {"answer": "porch"})
    with pytest.raises(ModelUnavailable, match="it has no field of Fix: desk"):
        wrap(chain, collection, Structured(Fix)).invoke(QUESTION)


def test_a_state_that_nobody_reads_is_told(store_of: Any, records: Any, budget_of: Any) -> None:
    app = RunnableLambda(lambda request: {"messages": [("human", str([*request["examples"]]))]})
    agent = create_agent(Scripted(), [])
    release = PrivateEnsemble(PoissonExampleSelector(store_of(records(20)), calls=5), app | agent) | DPAggregate(
        DESKS, budget_of()
    )
    report = release.rehearse([{"input": "a note", "output": "porch"}], {"input": QUESTION})
    assert "end the member with `| (lambda state: state['messages'][-1])`" in report.calls[0].error


# -- a plain text stands for one key -----------------------------------------------------------------------------------


def topic_chain(collection: Any, *more: str) -> Any:
    names = " ".join(f"{{{name}}}" for name in ("context", "topic", *more))
    found = RunnablePassthrough.assign(context=lambda values: context_of(collection.similarity_search("a desk")))
    return found | ChatPromptTemplate.from_template(names) | Scripted() | StrOutputParser()


def test_a_plain_text_is_taken_for_the_one_key_that_a_chain_needs(wrap: Any) -> None:
    collection = a_collection()
    release = wrap(topic_chain(collection), collection)
    assert release.invoke("desks") == release.invoke({"topic": "desks"}) == "porch"
    assert release.budget.spent() == 1


def test_a_plain_text_that_is_refused_names_the_keys(wrap: Any, sealed_of: Any) -> None:
    collection = a_collection()
    several = wrap(topic_chain(collection, "language"), collection)
    named = wrap(topic_chain(collection), collection, question_key="question")
    member = ChatPromptTemplate.from_template("{examples} {input} {language}") | Scripted() | StrOutputParser()
    for release, keys in (
        (several, ["language", "question", "topic"]),
        (named, ["question", "topic"]),
        (sealed_of(member), ["input", "language"]),
    ):
        said = f"input='a text' is not allowed: a mapping with the keys {keys}: a text stands for one key alone"
        with pytest.raises(InvalidParameter, match=re.escape(said)):
            release.invoke("desks")
        assert release.budget.spent() == 0


@pytest.mark.parametrize("way", WAYS)
async def test_an_ensemble_takes_a_plain_text_too(way: str, sealed_of: Any) -> None:
    member = ChatPromptTemplate.from_template("{examples} {input} positive") | RunnableLambda(lambda _: "Positive")
    assert await ask(way, sealed_of(member), "a film") == "Positive"
