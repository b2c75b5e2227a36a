"""The public questions before a first charge: what no member could do on private records is refused at no cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage
from langchain_core.prompts import FewShotPromptTemplate, FewShotPromptWithTemplates, PromptTemplate
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel, Field

from langchain_dpicl import (
    DPAggregate,
    InvalidParameter,
    Keywords,
    ModelUnavailable,
    NoisyMean,
    NoisyMedian,
    PoissonExampleSelector,
    PrivacyWarning,
    PrivateEnsemble,
    Structured,
    UnsafeConfigurationError,
)

pytestmark = pytest.mark.asks_first

QUESTION = {"input": "how tall is it?"}
PUBLIC = [{"input": "a public oak", "output": "12"}, {"input": "a public elm", "output": "9"}]


class Tree(BaseModel):
    kind: Literal["oak", "elm"]
    height: int = Field(ge=0, le=60)


NUMBERS = [NoisyMedian(0, 60), NoisyMean(0, 60), Structured(Tree), Keywords.joint_em(["pine", "fir"], k=1)]


@pytest.mark.parametrize("aggregator", NUMBERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize(
    "said",
    [
        "No, sorry.",
        AIMessage("", invalid_tool_calls=[{"name": "T", "args": "{", "id": "1", "error": None}]),
        "{'kind': None}",
    ],
)
def test_answers_that_cannot_be_read_are_refused_before_the_charge(
    sealed_of: Any, said: object, aggregator: Any
) -> None:
    sealed = sealed_of(lambda values: (values["examples"], said)[1], vote=aggregator, members=6, owners=200)
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match="can read nothing in it"):
            sealed.invoke(QUESTION)
    assert sealed.budget.spent() == 0


@pytest.mark.parametrize("aggregator", NUMBERS, ids=lambda each: type(each).__name__)
def test_an_answer_to_made_up_examples_is_enough(sealed_of: Any, aggregator: Any) -> None:
    """A member that answers from its examples alone, as one that searches documents does."""

    def member(values: Mapping[str, Any]) -> str:
        return aggregator.samples[0] if values["examples"] else "Nothing is said about that."

    sealed = sealed_of(member, vote=aggregator, members=6, owners=200)
    sealed.invoke(QUESTION)
    sealed.ensemble.doubts.of("").suspected = True
    sealed.invoke(QUESTION)
    assert sealed.budget.spent() == 2


def test_a_rehearsal_that_passed_is_the_question_that_is_asked(sealed_of: Any) -> None:
    def member(values: Mapping[str, Any]) -> str:
        texts = [example["input"] for example in values["examples"]]
        return "7" if any("text" in text or "public oak" in text for text in texts) else "not known"

    with pytest.raises(ModelUnavailable, match="can read nothing"):
        sealed_of(member, vote=NoisyMedian(0, 60), members=6, owners=200).invoke(QUESTION)
    sealed = sealed_of(member, vote=NoisyMedian(0, 60), members=6, owners=200)
    assert sealed.rehearse(PUBLIC, QUESTION).passed
    sealed.ensemble.doubts.of("").suspected = True
    assert sealed.invoke(QUESTION) == 7


def test_a_member_that_only_awaits_is_refused_where_it_is_invoked(sealed_of: Any) -> None:
    async def member(values: Mapping[str, Any]) -> str:
        return "Positive" if values["examples"] else "Negative"

    sealed = sealed_of(RunnableLambda(member))
    with pytest.raises(ModelUnavailable, match="TypeError"):
        sealed.invoke(QUESTION)
    assert sealed.budget.spent() == 0


async def test_where_a_member_awaits_proves_nothing_of_its_threads(sealed_of: Any) -> None:
    sealed = sealed_of(RunnableLambda(lambda values: 1 / 0, afunc=lambda values: _positive(values)))
    assert await sealed.ainvoke(QUESTION) == "Positive"
    with pytest.raises(ModelUnavailable, match="ZeroDivisionError"):
        sealed.invoke(QUESTION)
    assert sealed.budget.spent() == 1


async def _positive(values: Mapping[str, Any]) -> str:
    return "Positive" if values["examples"] else "Negative"


def test_a_member_that_braces_break_is_refused_before_the_charge(sealed_of: Any) -> None:
    def member(values: Mapping[str, Any]) -> str:
        shown = "\n".join(example["input"] for example in values["examples"])
        return "Positive" if PromptTemplate.from_template(shown + "\n{input}").format(input="") else ""

    sealed = sealed_of(member)
    with pytest.raises(InvalidParameter, match="braces, quotes and line breaks"):
        sealed.invoke(QUESTION)
    assert sealed.budget.spent() == 0
    report = sealed.rehearse(PUBLIC, QUESTION)
    assert not report.passed
    assert not report.calls[0].error
    assert "Error" in report.calls[1].error


def test_a_member_that_made_up_examples_break_is_warned_of_once(sealed_of: Any) -> None:
    def member(values: Mapping[str, Any]) -> str:
        assert all("CANARY" in example["input"] for example in values["examples"])
        return "Positive"

    sealed = sealed_of(member)
    with pytest.warns(PrivacyWarning, match="rehearse"):
        sealed.invoke(QUESTION)
    sealed.invoke(QUESTION)


@pytest.mark.parametrize("kind", [FewShotPromptTemplate, FewShotPromptWithTemplates])
def test_a_few_shot_template_takes_what_records_say_as_it_stands(
    kind: Any, store_of: Any, records: Any, budget_of: Any
) -> None:
    kept = [{**record, "input": '{"a": {input}} {{b}}'} for record in records(40)]
    selector = PoissonExampleSelector(store_of(kept), 4, rate=1.0, max_exemplars=40)
    shown = PromptTemplate.from_template("{input} -> {output}")
    suffix = "{input} ->" if kind is FewShotPromptTemplate else PromptTemplate.from_template("{input} ->")
    few = {"example_selector": selector, "example_prompt": shown, "suffix": suffix, "input_variables": ["input"]}
    member = kind(**few) | (lambda p: "7" if '{"a": {input}} {{b}} -> ' in p.text or "made-up" in p.text else "8")
    ensemble = PrivateEnsemble(selector, member)
    assert (ensemble | DPAggregate(NoisyMedian(0, 60), budget_of())).invoke(QUESTION) == 7
    with pytest.raises(UnsafeConfigurationError, match="f-string"):
        PrivateEnsemble(selector, kind(**few, template_format="jinja2") | (lambda p: "7"))
