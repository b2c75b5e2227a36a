"""docs/tasks/graph.md: its code as it stands, and each row of its table on a real graph."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt
from pages import blocks

from langchain_dpicl import ModelUnavailable, PrivacyBudgetExceeded, acting_for

THREAD: Any = {"configurable": {"thread_id": "1"}}


class State(TypedDict, total=False):
    input: str
    desks: Annotated[list[str], operator.add]


def positive(_: Any) -> str:
    return "Positive"


@pytest.fixture
def release(sealed_of: Any) -> Any:
    return sealed_of(positive, replay=True)


def graph_of(*nodes: Any, retry: Any = None, **options: Any) -> Any:
    """Nodes that run one after the other, with a checkpointer."""
    builder = StateGraph(State)
    before = START
    for node in nodes:
        builder.add_node(node.__name__, node, retry_policy=retry).add_edge(before, node.__name__)
        before = node.__name__
    return builder.add_edge(before, END).compile(checkpointer=InMemorySaver(), **options)


def asking(release: Any, after: Any = None) -> Any:
    """A node that asks, and then does something else."""

    def ask(state: State) -> State:
        desk = release.invoke({"input": state["input"]})
        if after is not None:
            after()
        return {"desks": [desk]}

    return ask


class Stumbles:
    """Fails the first time."""

    times = 0

    def __call__(self) -> None:
        self.times += 1
        if self.times == 1:
            raise ConnectionError("gone")


def test_the_pages_code_runs(release: Any) -> None:
    once, policy, _ = blocks("tasks/graph.md", "python", "")
    names: dict[str, Any] = {"release": release}
    exec(once, names)
    assert names["graph"].invoke({"input": "Which desk renews it?"})["desk"] == "Positive"
    assert release.budget.spent() == 1
    exec(policy, names)
    retries = names["again"].retry_on
    assert retries(ConnectionError())
    assert not retries(PrivacyBudgetExceeded("spent"))


def test_an_interrupt_before_the_node_costs_nothing(release: Any) -> None:
    graph = graph_of(asking(release), interrupt_before=["ask"])
    graph.invoke({"input": "one"}, THREAD)
    assert release.budget.spent() == 0
    graph.invoke(None, THREAD)
    assert release.budget.spent() == 1


def test_an_interrupt_after_the_release_replays_it(release: Any) -> None:
    graph = graph_of(asking(release, lambda: interrupt("good?")))
    graph.invoke({"input": "one"}, THREAD)
    assert graph.invoke(Command(resume="yes"), THREAD)["desks"] == ["Positive"]
    assert release.budget.spent() == 1


def test_a_node_that_fails_after_the_release_replays_it(release: Any) -> None:
    policy = RetryPolicy(initial_interval=0.0, jitter=False)
    graph = graph_of(asking(release, Stumbles()), retry=policy)
    assert graph.invoke({"input": "one"}, THREAD)["desks"] == ["Positive"]
    graph = graph_of(asking(release, Stumbles()))
    with pytest.raises(ConnectionError):
        graph.invoke({"input": "one"}, THREAD)
    assert graph.invoke(None, THREAD)["desks"] == ["Positive"]
    assert release.budget.spent() == 1


def test_an_earlier_checkpoint_replays_and_another_question_is_charged(release: Any) -> None:
    graph = graph_of(asking(release))
    graph.invoke({"input": "one"}, THREAD)
    before = next(state for state in graph.get_state_history(THREAD) if state.next == ("ask",))
    graph.invoke(None, before.config)
    assert release.budget.spent() == 1
    other = graph.update_state(before.config, {"input": "two"})
    graph.invoke(None, other)
    assert release.budget.spent() == 2


@pytest.mark.parametrize(("questions", "charged"), [(["one", "two", "three"], 3), (["one"] * 3, 1)])
async def test_nodes_at_a_time(questions: list[str], charged: int, release: Any) -> None:
    async def ask(state: State) -> State:
        return {"desks": [await release.ainvoke({"input": state["input"]})]}

    def each(_: State) -> list[Send]:
        return [Send("ask", {"input": question}) for question in questions]

    builder = StateGraph(State).add_node("ask", ask).add_conditional_edges(START, each, ["ask"]).add_edge("ask", END)
    state = await builder.compile().ainvoke({"input": ""})
    assert state["desks"] == ["Positive"] * 3
    assert release.budget.spent() == charged


def test_without_replay_each_run_of_the_node_is_a_release(sealed_of: Any) -> None:
    release = sealed_of(positive)
    graph = graph_of(asking(release, Stumbles()), retry=RetryPolicy(initial_interval=0.0, jitter=False))
    graph.invoke({"input": "one"}, THREAD)
    assert release.budget.spent() == 2


def test_a_release_of_failed_members_is_charged_once(sealed_of: Any) -> None:
    """After it a public question is asked first, which fails too."""

    def fails(_: Any) -> str:
        raise ValueError("no")

    release = sealed_of(fails, replay=True)
    policy = RetryPolicy(initial_interval=0.0, jitter=False, max_attempts=3, retry_on=lambda _: True)
    graph = graph_of(asking(release), retry=policy)
    with pytest.raises(ModelUnavailable):
        graph.invoke({"input": "one"}, THREAD)
    assert release.budget.spent() == 1


def test_a_caller_reaches_every_node(sealed_of: Any) -> None:
    release = sealed_of(positive, scope="per_principal")

    def second(state: State) -> State:
        return {"desks": [release.invoke({"input": "another"})]}

    graph = graph_of(asking(release), second)
    with acting_for("ann"):
        graph.invoke({"input": "one"}, THREAD)
    assert [release.budget.spent(principal=name) for name in ("ann", "bob")] == [2, 0]
