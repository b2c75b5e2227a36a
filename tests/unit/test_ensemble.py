"""`ensemble.py`: what an ensemble refuses, and what a member gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ears import Ears
from langchain_core.language_models import FakeListLLM
from langchain_core.load import dumps
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough, RunnableSequence
from ways import WAYS as ASKED
from ways import ask, shown

from langchain_dpicl import (
    DPAggregate,
    InvalidParameter,
    LabelScorer,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
    SealedRelease,
    UnsafeConfigurationError,
)

QUESTION = {"input": "a question"}


@pytest.fixture
def calls() -> list[Any]:
    return Ears()


@pytest.fixture
def ensemble(store_of: Any, records: Any, canary: str, calls: list[Any]) -> PrivateEnsemble:
    selector = PoissonExampleSelector(store_of(records(8, secret=canary)), 3, rate=1.0, max_exemplars=8)

    def member(values: dict[str, Any]) -> str:
        calls.append(values)
        return "Positive"

    return PrivateEnsemble(selector, member)


@pytest.fixture
def aggregate(labels: list[str], budget_of: Any) -> DPAggregate[Any]:
    return DPAggregate(NoisyVote(labels), budget_of())


# -- refusals ----------------------------------------------------------------------------------------------------------


async def use(way: str, runnable: Any) -> Any:
    match way:
        case "invoke":
            return runnable.invoke(QUESTION)
        case "ainvoke":
            return await runnable.ainvoke(QUESTION)
        case "batch":
            return runnable.batch([QUESTION])
        case "abatch":
            return await runnable.abatch([QUESTION])
        case "stream":
            return list(runnable.stream(QUESTION))
        case "astream":
            return [chunk async for chunk in runnable.astream(QUESTION)]
        case "transform":
            return list(runnable.transform(iter([QUESTION])))
        case "astream_events":
            return [event async for event in runnable.astream_events(QUESTION, version="v2")]
        case "batch_as_completed":
            return list(runnable.batch_as_completed([QUESTION]))
    raise AssertionError(way)


WAYS = [
    "invoke",
    "ainvoke",
    "batch",
    "abatch",
    "stream",
    "astream",
    "transform",
    "astream_events",
    "batch_as_completed",
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", ["ensemble", "aggregate"])
async def test_neither_part_runs_alone(
    way: str, part: str, request: pytest.FixtureRequest, calls: list[Any], canary: str
) -> None:
    with pytest.raises(UnsafeConfigurationError) as caught:
        await use(way, request.getfixturevalue(part))
    assert canary not in str(caught.value)
    assert calls == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda e, a: RunnablePassthrough() | e,
        lambda e, a: RunnablePassthrough() | e | a,
        lambda e, a: RunnablePassthrough() | e | (lambda votes: votes),
        lambda e, a: RunnableSequence(e, a),
        lambda e, a: {"votes": e} | RunnablePassthrough(),
        lambda e, a: RunnablePassthrough.assign(votes=e),
        lambda e, a: e.with_config(tags=["x"]) | a,
        lambda e, a: e.with_retry(stop_after_attempt=1),
        lambda e, a: e.bind(stop=["x"]) | (lambda votes: votes),
        lambda e, a: RunnablePassthrough() | a,
    ],
    ids=range(10),
)
async def test_no_detour_shows_the_votes(
    way: str, wrap: Callable[..., Any], ensemble: Any, aggregate: Any, calls: list[Any]
) -> None:
    """Every step that LCEL can see is traced: an ensemble within a sequence, a mapping or a binding refuses as well."""
    with pytest.raises(UnsafeConfigurationError):
        await use(way, wrap(ensemble, aggregate))
    assert calls == []
    assert aggregate.budget.spent() == 0


@pytest.mark.parametrize(
    "other", [RunnablePassthrough(), lambda votes: votes, {"a": lambda votes: votes}, None, "text"], ids=shown
)
def test_an_ensemble_pipes_into_an_aggregate_alone(other: Any, ensemble: PrivateEnsemble) -> None:
    with pytest.raises(UnsafeConfigurationError):
        ensemble | other
    with pytest.raises(UnsafeConfigurationError):
        ensemble.pipe(other)
    with pytest.raises(UnsafeConfigurationError):
        ensemble.pipe()


@pytest.mark.parametrize("name", ["assign", "pick"])
def test_lcels_shortcuts_are_refused(name: str, ensemble: PrivateEnsemble) -> None:
    with pytest.raises(UnsafeConfigurationError):
        ensemble.assign(a=RunnablePassthrough()) if name == "assign" else ensemble.pick("a")


# -- fusion ------------------------------------------------------------------------------------------------------------


def test_an_ensemble_and_an_aggregate_fuse_into_one_step(ensemble: PrivateEnsemble, aggregate: Any) -> None:
    sealed = ensemble | aggregate
    assert type(sealed) is SealedRelease
    assert type(ensemble.pipe(aggregate)) is SealedRelease
    assert sealed.invoke(QUESTION) == "Positive"
    assert isinstance(sealed | RunnablePassthrough(), RunnableSequence)
    assert ensemble.pipe(aggregate, str.upper).invoke(QUESTION) == "POSITIVE"
    assert (sealed | (lambda answer: answer.lower())).invoke(QUESTION) == "positive"
    assert ({"input": lambda text: text} | sealed).invoke("text") == "Positive"


def test_a_graph_shows_one_step_and_nothing_private(ensemble: PrivateEnsemble, aggregate: Any, canary: str) -> None:
    sealed = ensemble | aggregate
    graph = (RunnablePassthrough() | sealed | RunnableLambda(str)).get_graph()
    assert f"epsilon = {sealed.budget.epsilon}" in graph.draw_mermaid()
    shown = [graph.draw_mermaid(), repr(graph), str(graph.to_json(with_schemas=True)), dumps(sealed, pretty=True)]
    shown += [repr(sealed), str(sealed), repr(ensemble), repr(aggregate), dumps(ensemble), repr(vars(sealed))]
    shown += [repr(vars(ensemble)), str(sealed.get_input_jsonschema()), str(sealed.get_output_jsonschema())]
    assert "SealedRelease" in shown[0]
    assert not [text for text in shown if canary in text or "owner-" in text]


# -- what a member gets ------------------------------------------------------------------------------------------------


def test_a_member_gets_the_callers_input_and_its_examples(
    ensemble: PrivateEnsemble, aggregate: Any, calls: list[Any]
) -> None:
    caller = {"input": "a question", "language": "en", "number": 3}
    (ensemble | aggregate).invoke(caller)
    assert len(calls) == 3
    for values in calls:
        assert set(values) == {"input", "language", "number", "examples"}
        assert {key: values[key] for key in caller} == caller
    assert sum(len(values["examples"]) for values in calls) == 8
    assert caller == {"input": "a question", "language": "en", "number": 3}


@pytest.mark.parametrize("kind", ["function", "runnable", "mapping", "async function"])
async def test_a_member_may_be_anything_that_lcel_takes(kind: str, store_of: Any, records: Any, aggregate: Any) -> None:
    async def answer(values: dict[str, Any]) -> str:
        return "Positive"

    member: Any = {
        "function": lambda values: "Positive",
        "runnable": PromptTemplate.from_template("Positive {examples} {input}") | (lambda value: value.to_string()),
        "mapping": {"answer": lambda values: "Positive"},
        "async function": answer,
    }[kind]
    selector = PoissonExampleSelector(store_of(records(4)), 5, rate=0.01, max_exemplars=8)
    ensemble = PrivateEnsemble(selector, member, count_empty=True)
    sealed = ensemble | aggregate
    if kind == "mapping":  # its answer is a mapping, which is no label: all abstain
        assert ensemble.run(QUESTION, 0.01) == [{"answer": "Positive"}] * 5
    elif kind == "async function":
        assert await sealed.ainvoke(QUESTION) == "Positive"
    else:
        assert sealed.invoke(QUESTION) == "Positive"


def test_the_plans_rate_is_the_one_that_is_sampled(ensemble: PrivateEnsemble, calls: list[Any]) -> None:
    ensemble.run(QUESTION, 1e-12)
    assert [len(values["examples"]) for values in calls] == [0, 0, 0]
    ensemble.run(QUESTION, 1.0)
    assert sum(len(values["examples"]) for values in calls) == 8


# -- parameters --------------------------------------------------------------------------------------------------------


def test_bad_parameters_are_named(ensemble: PrivateEnsemble, labels: list[str], budget_of: Any, canary: str) -> None:
    selector = ensemble.selector
    for value in (0, -1, 1.5, True, "2"):
        with pytest.raises(InvalidParameter, match="max_concurrency"):
            PrivateEnsemble(selector, lambda v: v, max_concurrency=value)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="selector") as caught:
        PrivateEnsemble([canary], lambda v: v)  # type: ignore[arg-type]
    assert canary not in str(caught.value)
    with pytest.raises(TypeError):
        PrivateEnsemble(selector, 5)
    with pytest.raises(InvalidParameter, match="aggregator"):
        DPAggregate(labels, budget_of())  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="budget"):
        DPAggregate(NoisyVote(labels), 3.0)  # type: ignore[arg-type]


def test_an_ensemble_says_how_many_calls_it_makes(ensemble: PrivateEnsemble) -> None:
    assert ensemble.members == 3
    assert repr(ensemble) == "PrivateEnsemble(members=3, rate=1)"


@pytest.mark.parametrize("way", ASKED)
@pytest.mark.parametrize("member", ["prompt", "a chain of prompts", "scorer"])
async def test_a_request_without_a_key_that_the_prompt_needs_costs_nothing(
    way: str, member: str, sealed_of: Any
) -> None:
    """Every member would abstain, and that would be charged like any release."""
    prompt = PromptTemplate.from_template("{examples} {question}")
    members: dict[str, Any] = {
        "prompt": prompt | RunnableLambda(lambda _: "Positive"),
        "a chain of prompts": (prompt | RunnableLambda(str)) | RunnableLambda(lambda _: "Positive"),
        "scorer": LabelScorer(FakeListLLM(responses=["x"]), ["Positive", "Negative"], query_key="question"),
    }
    sealed = sealed_of(members[member])
    with pytest.raises(InvalidParameter, match=r"\['question'\]") as caught:
        await ask(way, sealed, {"input": "the text of a question"})
    assert "the text of" not in str(caught.value)
    assert sealed.budget.spent() == 0
