"""Walking through chains finds every Runnable, copies only what changes, and ends."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.tools import StructuredTool
from langgraph.graph import START, MessagesState, StateGraph

from langchain_dpicl.private.reach import reachable
from langchain_dpicl.private.sealing import rebuilt


def parts(chain: Any) -> list[Any]:
    """The Runnables that a chain reaches."""
    return [part for part in reachable(chain) if isinstance(part, Runnable)]


PROMPT = PromptTemplate.from_template("{input}")


def a_model() -> FakeListLLM:
    return FakeListLLM(responses=["old"])


def renewed(part: Any) -> Any:
    return part.model_copy(update={"responses": ["new"]}) if isinstance(part, FakeListLLM) else part


def same(part: Any) -> Any:
    return part


class Fake(FakeMessagesListChatModel):
    def bind_tools(self, *args: Any, **kwargs: Any) -> Any:
        return self


CHAINS: dict[str, Any] = {
    "a sequence": lambda m: PROMPT | m | StrOutputParser(),
    "a parallel": lambda m: RunnableParallel(one=PROMPT | m) | (lambda answers: answers["one"]),
    "an assign": lambda m: RunnablePassthrough.assign(one=PROMPT | m) | (lambda answers: answers["one"]),
    "a branch": lambda m: RunnableBranch((lambda _: False, PROMPT | m), PROMPT | m),
    "a fallback": lambda m: (PROMPT | RunnableLambda(lambda _: 1 / 0)).with_fallbacks([PROMPT | m]),
    "a retry and a binding": lambda m: PROMPT | m.bind(stop=["x"]).with_retry().with_config(tags=["x"]),
    "an iteration": lambda m: (lambda v: [v]) | (PROMPT | m).map() | (lambda answers: answers[0]),
}


@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_every_place_of_a_part_is_rebuilt_and_the_callers_chain_stays(make: Any) -> None:
    model = a_model()
    chain = make(model)
    copied = rebuilt(chain, renewed)
    assert copied.invoke({"input": "x"}) == "new"
    assert chain.invoke({"input": "x"}) == "old"
    assert model.responses == ["old"]


@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_what_nothing_changed_is_the_same_object(make: Any) -> None:
    chain = make(a_model())
    assert rebuilt(chain, same) is chain


def test_only_the_path_to_a_change_is_copied() -> None:
    untouched = PROMPT | StrOutputParser()
    chain = RunnableParallel(changed=PROMPT | a_model(), kept=untouched)
    copied = rebuilt(chain, renewed)
    assert copied is not chain
    assert copied.steps__["kept"] is untouched
    assert copied.steps__["changed"].first is PROMPT


def test_one_part_in_two_places_is_finished_once_and_stays_one() -> None:
    model = a_model()
    copied = rebuilt(RunnableParallel(a=PROMPT | model, b=PROMPT | model), renewed)
    assert copied.steps__["a"].last is copied.steps__["b"].last is not model


def test_the_innermost_parts_are_finished_first() -> None:
    order: list[str] = []

    def finish(part: Any) -> Any:
        order.append(type(part).__name__)
        return part

    rebuilt(PROMPT | a_model(), finish)
    assert order == ["PromptTemplate", "FakeListLLM", "RunnableSequence"]


class Around(BaseChatModel):
    inner: FakeListLLM

    @property
    def _llm_type(self) -> str:
        return "around"

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_a_model_within_a_model_is_a_part() -> None:
    outer = Around(inner=a_model())
    assert rebuilt(PROMPT | outer, renewed).last.inner.responses == ["new"]
    assert outer.inner in list(parts(PROMPT | outer))


class Circle(Runnable[Any, Any]):
    def __init__(self) -> None:
        self.me, self.all, self.model = self, [self, {"me": self}], a_model()

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        return self.model.invoke(input)


def test_a_chain_that_refers_to_itself_ends() -> None:
    circle = Circle()
    assert rebuilt(circle, same) is circle
    copied = rebuilt(circle, renewed)
    assert copied.invoke("x") == "new"
    assert circle.invoke("x") == "old"
    assert [type(part).__name__ for part in parts(circle)] == ["Circle", "FakeListLLM"]


class App:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.others = {"not": "looked into"}

    def answer(self, values: Any) -> Any:
        return self.model.invoke(values)

    def nested(self) -> Any:
        return lambda values: self.model.invoke(values)

    __call__ = answer


def _with_default(values: Any, model: Any = None) -> Any:
    return model.invoke(values)


global_model = a_model()


def _names_a_global(values: Any) -> Any:
    return global_model.invoke(values)


FUNCTIONS: dict[str, Any] = {
    "a closure": lambda m: lambda values: m.invoke(values),
    "a closure in a closure": lambda m: (lambda inner: lambda values: inner(values))(lambda values: m.invoke(values)),
    "a bound method": lambda m: App(m).answer,
    "a closure over its object": lambda m: App(m).nested(),
    "an object that is called": lambda m: App(m),
    "a partial function": lambda m: functools.partial(_with_default, model=m),
    "a chain in a closure": lambda m: (lambda chain: lambda values: chain.invoke(values))(PROMPT | m),
    "a model's own method": lambda m: m.invoke,
}


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_a_function_refers_to_is_a_part(make: Any) -> None:
    model = a_model()
    for chain in (RunnableLambda(make(model)), PROMPT | make(model), RunnableParallel(one=RunnableLambda(make(model)))):
        assert any(part is model for part in parts(chain))
        assert len({id(part) for part in parts(chain)}) == len(list(parts(chain)))
    tool = StructuredTool.from_function(make(model), name="t", description="d", infer_schema=False, args_schema={})
    assert any(part is model for part in parts(tool))


def test_a_global_that_a_function_names_is_a_part() -> None:
    assert global_model in list(parts(RunnableLambda(_names_a_global)))


def test_a_variable_without_a_value_yet_is_no_obstacle() -> None:
    function: Any = RunnableLambda(lambda values: later.invoke(values))
    assert list(parts(function)) == [function]
    later = a_model()
    assert later in list(parts(function))


def test_the_steps_of_graphs_and_agents_are_parts() -> None:
    model = Fake(responses=[AIMessage("x")])
    graph = StateGraph(MessagesState)
    graph.add_node("a", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("b", StrOutputParser())
    graph.add_edge(START, "a")
    for chain in (graph.compile(), PROMPT | graph.compile(), create_agent(model, [])):
        assert any(part is model for part in parts(chain))
    assert any(isinstance(part, StrOutputParser) for part in parts(graph.compile()))
