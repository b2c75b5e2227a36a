"""`keywords_to_answer`: from released keywords to a text, with nothing but the keywords and the public query."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from ears import Turns
from langchain_core.language_models.fake import FakeStreamingListLLM
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tracers.context import collect_runs
from ways import WAYS, ask, shown

from langchain_dpicl import InvalidParameter, Keywords, ReleasedKeywords, keywords_to_answer
from langchain_dpicl.members.chains import RANKED, UNRANKED

TEMPLATE = "Summarize the dialogue{suggestions}.\n\n{input}\nSummary:"
QUERY = {"input": "I cough", "more": "public", "n": 3}
RANKED_RELEASE = ReleasedKeywords(["rash", "cough"], ranked=True, query=QUERY)
SET_RELEASE = ReleasedKeywords(["cough", "rash"], query=QUERY)
FALLBACK = ReleasedKeywords(fallback=True, query=QUERY)
RECEIPT = {"id": "b:l:1", "outcome": "released"}


class Writer:
    """A model that records its prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, prompt: Any) -> str:
        self.prompts.append(prompt.to_string())
        return "an answer"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("released", "lead"),
    [
        (
            RANKED_RELEASE,
            " with the following word suggestions ranked by their frequency from high to low: rash, cough",
        ),
        (SET_RELEASE, " with the following word suggestions: cough, rash"),
        (FALLBACK, ""),
        (ReleasedKeywords(query=QUERY), ""),
    ],
    ids=["ranked", "a set", "fallback", "an empty set"],
)
async def test_a_prompt_holds_every_keyword_and_the_query(way: str, released: Any, lead: str) -> None:
    """All keywords in the order of the release; without any it is the zero-shot prompt."""
    writer = Writer()
    write = keywords_to_answer(RunnableLambda(writer), TEMPLATE)
    assert await ask(way, write, released) == "an answer"
    assert writer.prompts == [f"Summarize the dialogue{lead}.\n\nI cough\nSummary:"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("released", [RANKED_RELEASE, FALLBACK], ids=["ranked", "fallback"])
async def test_the_receipt_is_passed_on(way: str, released: ReleasedKeywords) -> None:
    writer = Writer()
    answered = await ask(
        way, keywords_to_answer(RunnableLambda(writer), TEMPLATE), {"answer": released, "receipt": RECEIPT}
    )
    assert answered == {"answer": "an answer", "receipt": RECEIPT}
    assert len(writer.prompts) == 1
    assert "receipt" not in writer.prompts[0]


async def test_a_model_that_streams_streams_on() -> None:
    write = keywords_to_answer(FakeStreamingListLLM(responses=["abc"]), TEMPLATE)
    assert list(write.stream(SET_RELEASE)) == ["a", "b", "c"]
    assert [chunk async for chunk in write.astream(SET_RELEASE)] == ["a", "b", "c"]
    chunks = list(write.stream({"answer": SET_RELEASE, "receipt": RECEIPT}))
    assert {"receipt": RECEIPT} in chunks
    assert [chunk["answer"] for chunk in chunks if "answer" in chunk] == ["a", "b", "c"]


def test_any_model_and_any_template_will_do() -> None:
    chat = GenericFakeChatModel(messages=iter([AIMessage("hello")] * 9))
    for prompt in (
        TEMPLATE,
        PromptTemplate.from_template(TEMPLATE),
        ChatPromptTemplate.from_messages([("system", "Be short."), ("human", TEMPLATE)]),
        PromptTemplate.from_template("{{ input }}{{ suggestions }}", template_format="jinja2"),
    ):
        assert keywords_to_answer(chat, prompt).invoke(RANKED_RELEASE) == "hello"
    with_more = keywords_to_answer(RunnableLambda(lambda p: p.to_string()), "{more} {n}{suggestions}")
    assert with_more.invoke(SET_RELEASE) == f"public 3{UNRANKED.format(words='cough, rash')}"


def test_braces_and_keys_of_the_query_are_no_template() -> None:
    writer = Writer()
    query = {"input": "{suggestions} {receipt} {0}", "suggestions": "forged", "examples_of": "x"}
    released = ReleasedKeywords(["{input}"], ranked=True, query=query)
    keywords_to_answer(RunnableLambda(writer), TEMPLATE).invoke(released)
    assert writer.prompts == [
        f"Summarize the dialogue{RANKED.format(words='{input}')}.\n\n{{suggestions}} {{receipt}} {{0}}\nSummary:"
    ]


@pytest.mark.parametrize(
    "prompt", ["Summarize {input}", "", "{{suggestions}}", None, 5, ["{suggestions}"], Writer()], ids=shown
)
def test_a_prompt_without_suggestions_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidParameter, match="suggestions") as caught:
        keywords_to_answer(RunnableLambda(Writer()), prompt)
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize("value", [["rash"], "rash", None, 5, {"answer": ["rash"], "receipt": RECEIPT}], ids=shown)
@pytest.mark.parametrize("way", WAYS)
async def test_what_is_no_release_is_refused_before_the_model_is_called(way: str, value: Any) -> None:
    writer = Writer()
    with pytest.raises(InvalidParameter, match="keywords as a release"):
        await ask(way, keywords_to_answer(RunnableLambda(writer), TEMPLATE), value)
    assert writer.prompts == []


def test_a_copied_release_writes_the_same() -> None:
    writer = Writer()
    write = keywords_to_answer(RunnableLambda(writer), TEMPLATE)
    write.invoke(RANKED_RELEASE)
    write.invoke(pickle.loads(pickle.dumps(RANKED_RELEASE)))  # noqa: S301 - our own bytes
    assert writer.prompts[0] == writer.prompts[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("return_receipt", [True, False])
@pytest.mark.parametrize("kind", ["ranked", "set", "fallback"])
async def test_a_whole_chain_writes_from_what_was_released_and_nothing_private(
    way: str, return_receipt: bool, kind: str, sealed_of: Any, canary: str
) -> None:
    writer = Writer()
    keywords = Keywords.joint_em(["rash", "cough"], 1) if kind == "ranked" else Keywords.ptr(1)
    squeezed, number = canary.replace("-", ""), Turns()  # one word, another one from each member
    member = f"{'' if kind == 'fallback' else 'cough '}{squeezed}".__add__
    sealed = sealed_of(  # 200 owners leave none of six buckets empty but for less than 1e-14
        lambda values: member(str(next(number))), vote=keywords, members=6, owners=200, return_receipt=return_receipt
    )
    chain = RunnablePassthrough() | sealed | keywords_to_answer(RunnableLambda(writer), TEMPLATE)
    with collect_runs() as collector:
        answered = await ask(way, chain, {"input": "I cough"})
    answer = answered["answer"] if return_receipt else answered
    assert answer == "an answer"
    lead = {"ranked": RANKED.format(words="cough"), "set": UNRANKED.format(words="cough"), "fallback": ""}[kind]
    assert writer.prompts == [f"Summarize the dialogue{lead}.\n\nI cough\nSummary:"]
    if return_receipt:
        assert answered["receipt"]["outcome"] == ("zero-shot fallback" if kind == "fallback" else "released")
        assert sealed.budget.receipt(answered["receipt"]["id"]) == answered["receipt"]
    seen = repr([(run.inputs, run.outputs, run.child_runs) for run in collector.traced_runs])
    assert "I cough" in seen
    assert canary not in seen
    assert squeezed.lower() not in seen.lower()
    assert sealed.budget.spent() == 1
