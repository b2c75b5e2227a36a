"""The public questions before a first charge: what no member could do on private records is refused at no cost."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, Literal

import pytest
from ears import Spy
from langchain_core.messages import AIMessage
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotPromptTemplate,
    HumanMessagePromptTemplate,
    PromptTemplate,
)
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel, Field

import langchain_dpicl as dp
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, PrivacyWarning
from langchain_dpicl.release import ensemble

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


def broken(values: Mapping[str, Any]) -> str:
    """A member that answers as long as it sees no example."""
    if values["examples"]:
        raise ConnectionError
    return "12"


@pytest.mark.parametrize("member", [lambda values: "I may not use records." if values["examples"] else "12", broken])
def test_an_answer_without_examples_says_nothing_where_releases_do_not_tell(sealed_of: Any, member: Any) -> None:
    sealed = sealed_of(member, vote=dp.NoisyMedian(0, 60))
    with pytest.raises(ModelUnavailable, match=r"can read nothing|ConnectionError"):
        sealed.invoke(QUESTION)
    assert sealed.budget.spent() == 0


def test_an_object_of_another_kind_is_no_answer_though_every_field_has_a_default(sealed_of: Any) -> None:
    class Loose(BaseModel):
        kind: Literal["oak", "elm"] | None = None

    sealed = sealed_of(lambda values: [values["examples"]] and '{"error": "busy"}', vote=dp.Structured(Loose))
    with pytest.raises(ModelUnavailable, match="no field of Loose"):
        sealed.invoke(QUESTION)


def test_records_of_a_strict_form_can_be_rehearsed_and_are_answered_then(sealed_of: Any, store_of: Any) -> None:
    sealed = sealed_of(
        lambda values: str(max(float(each["input"]) for each in values["examples"])),
        vote=dp.NoisyMedian(0, 60),
        store=store_of([{"input": f"{i % 50}", "output": "4", "owner": i} for i in range(80)]),
    )
    with pytest.raises(ModelUnavailable, match="ValueError"):
        sealed.invoke(QUESTION)
    report = sealed.rehearse([{"input": "3", "output": "4"}], QUESTION)
    assert report.passed, "neither the texts with braces nor an empty bucket count"
    assert [call.counts for call in report.calls] == [True, False, False]
    assert 0 <= sealed.invoke(QUESTION) <= 60


def test_another_question_is_read_by_its_own_words_and_the_rehearsed_one_by_its_own(sealed_of: Any) -> None:
    def member(values: Mapping[str, Any]) -> str:
        is_known = any("a public" in each["input"] for each in values["examples"])
        return values["input"] if is_known or values["input"] == "oak" else "no idea"

    sealed = sealed_of(member, vote=dp.Keywords.joint_em("query", k=1))
    assert sealed.rehearse(PUBLIC, {"input": "oak"}).passed
    for question in ("elm", "fir"):
        sealed.ensemble.doubts.of("").suspected = True
        assert sealed.invoke({"input": question}) == [question]  # the only word of the question


class Gate(Spy):
    """Lets a slow question pass when it is told to."""

    def __init__(self) -> None:
        self.slow, self.go_on = Event(), Event()

    def passed(self, question: str) -> None:
        if question == "slow":
            self.slow.set()
            self.go_on.wait(30)


def test_nobody_waits_long_for_another_callers_question(sealed_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensemble, "_PATIENCE", 0.05)
    gate = Gate()

    def member(values: Mapping[str, Any]) -> str:
        gate.passed(values["input"])
        return "Positive"

    sealed = sealed_of(member)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(sealed.invoke, {"input": "slow"})
        assert gate.slow.wait(30)
        try:
            assert sealed.invoke(QUESTION) == "Positive"
            assert not first.done()
        finally:
            gate.go_on.set()
        assert first.result() == "Positive"


def test_a_few_shot_template_in_a_message_takes_braces_for_text(store_of: Any, records: Any) -> None:
    selector = dp.PoissonExampleSelector(store_of(records(20)), 2, rate=1.0, max_exemplars=20)
    few = FewShotPromptTemplate(
        examples=None,
        example_selector=selector,
        example_prompt=PromptTemplate.from_template("{input} -> {output}"),
        suffix="{input} ->",
        input_variables=["input"],
    )
    chain = ChatPromptTemplate.from_messages([HumanMessagePromptTemplate(prompt=few)]) | (lambda prompt: "Positive")
    assert dp.PrivateEnsemble(selector, chain).rehearse([{"input": "a {b}", "output": "Positive"}], QUESTION).passed


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
