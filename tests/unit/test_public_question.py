"""The public questions before a first charge: what no member could do on private records is refused at no cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel, Field

import langchain_dpicl as dp
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, PrivacyWarning

pytestmark = pytest.mark.asks_first
QUESTION = {"input": "how tall is it?"}
PUBLIC = [{"input": "a public oak", "output": "12"}, {"input": "a public elm", "output": "9"}]
CUT: Any = {"name": "Tree", "args": '{"kind": "o', "id": "1", "error": None}


class Tree(BaseModel):
    kind: Literal["oak", "elm"]
    height: int = Field(ge=0, le=60)


@pytest.mark.parametrize(
    "aggregator",
    [dp.NoisyMedian(0, 60), dp.NoisyMean(0, 60), dp.Structured(Tree), dp.Keywords.joint_em(["pine", "fir"], k=1)],
)
def test_answers_that_cannot_be_read_cost_nothing_and_one_to_made_up_examples_is_enough(
    sealed_of: Any, aggregator: Any
) -> None:
    said: list[Any] = ["No, sorry.", AIMessage("", invalid_tool_calls=[CUT]), "{'kind': None}"]
    for each in said:
        sealed = sealed_of(lambda values, each=each: (values["examples"], each)[1], vote=aggregator)
        for _ in range(2):
            with pytest.raises(ModelUnavailable, match="can read nothing in it"):
                sealed.invoke(QUESTION)
        assert sealed.budget.spent() == 0
    # One that answers from its examples alone, as one that searches documents does.
    sealed = sealed_of(lambda values: aggregator.samples[0] if values["examples"] else "No, sorry.", vote=aggregator)
    for spent in (1, 2):
        sealed.invoke(QUESTION)
        assert sealed.budget.spent() == spent
        sealed.ensemble.doubts.of("").suspected = True


def test_a_rehearsal_that_passed_is_the_question_that_is_asked(sealed_of: Any) -> None:
    def member(values: Mapping[str, Any]) -> str:
        known = [text for each in values["examples"] if "other words" not in (text := each["input"])]
        return "7" if known else "not known"

    sealed = sealed_of(member, vote=dp.NoisyMedian(0, 60))
    with pytest.raises(ModelUnavailable, match="can read nothing"):
        sealed.invoke(QUESTION)
    assert sealed.rehearse(PUBLIC, QUESTION).passed
    sealed.ensemble.doubts.of("").suspected = True
    assert sealed.invoke(QUESTION) == 7


async def test_a_member_that_only_awaits_is_refused_where_it_is_invoked(sealed_of: Any) -> None:
    async def member(values: Mapping[str, Any]) -> str:
        return "Positive" if values["examples"] else "Negative"

    sealed = sealed_of(RunnableLambda(member))
    assert await sealed.ainvoke(QUESTION) == "Positive"
    with pytest.raises(ModelUnavailable, match="TypeError"):
        sealed.invoke(QUESTION)
    assert sealed.budget.spent() == 1, "that it awaits proves nothing of its threads"


def test_a_member_that_braces_break_is_refused_before_the_charge(sealed_of: Any) -> None:
    def member(values: Mapping[str, Any]) -> str:
        shown = "\n".join(example["input"] for example in values["examples"])
        return "Positive" if PromptTemplate.from_template(shown + "\n{input}").format(input="") else ""

    sealed = sealed_of(member)
    with pytest.raises(InvalidParameter, match="braces, quotes and line breaks"):
        sealed.invoke(QUESTION)
    assert sealed.budget.spent() == 0
    plain, marked, _ = sealed.rehearse(PUBLIC, QUESTION).calls
    assert (plain.error, marked.error[:10]) == ("", "ValueError")


def test_a_member_that_made_up_examples_break_is_warned_of_once(sealed_of: Any) -> None:
    def member(values: Mapping[str, Any]) -> str:
        assert all("CANARY" in example["input"] for example in values["examples"])
        return "Positive"

    sealed = sealed_of(member)
    with pytest.warns(PrivacyWarning, match="rehearse"):
        sealed.invoke(QUESTION)
    sealed.invoke(QUESTION)
