"""`DPRetriever`: documents that are releases, in the place of a chain's retriever."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.load import dumps
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from ways import WAYS, ask

from langchain_dpicl import (
    DPAggregate,
    DPRetriever,
    InvalidParameter,
    Keywords,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudgetExceeded,
    PrivateEnsemble,
    UnsafeConfigurationError,
    keywords_to_answer,
)
from langchain_dpicl.release.base import releases_in

QUESTION = "which words?"
DOMAIN = ["pharmacy", "billing", "porch", "ledger"]


@pytest.fixture
def keywords(budget_of: Any, store_of: Any, records: Any, canary: str) -> Callable[..., Any]:
    """keywords(): ranked keywords that ten agreeing members name, over a store whose every text holds the canary."""

    def make(
        aggregator: Any = None, answer: str = "pharmacy ledger", nearest_to: str | None = None, **options: Any
    ) -> Any:
        store = store_of(records(300, secret=canary))  # no bucket is empty but for less than 1e-12
        selector = PoissonExampleSelector(store, 10, rate=1.0, max_exemplars=9, nearest_to=nearest_to)
        ensemble = PrivateEnsemble(selector, lambda values: f"{answer} {values['examples']:s}")
        made = Keywords.joint_em(DOMAIN, k=2) if aggregator is None else aggregator
        return ensemble | DPAggregate(made, budget_of(**options))

    return make


# -- its documents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_keywords_are_one_document_with_the_receipt(way: str, keywords: Any) -> None:
    release = keywords()
    (document,) = await ask(way, DPRetriever(release=release), QUESTION)
    assert isinstance(document, Document)
    assert sorted(document.page_content.split(", ")) == ["ledger", "pharmacy"]
    receipt = document.metadata["receipt"]
    assert receipt["number"] == 1
    assert receipt["outcome"] == "released"
    assert json.loads(json.dumps(document.metadata)) == document.metadata
    assert release.budget.spent() == 1


def test_with_k_the_first_k_keywords_are_a_document_each(keywords: Any) -> None:
    release = keywords(replay=True)
    both = DPRetriever(release=release, k=5).invoke(QUESTION)
    assert [document.page_content for document in both] in (["pharmacy", "ledger"], ["ledger", "pharmacy"])
    assert DPRetriever(release=release, k=1).invoke(QUESTION)[0].page_content == both[0].page_content
    assert len(DPRetriever(release=release).invoke(QUESTION, k=1)) == 1
    assert release.budget.spent() == 1, "another k reads the same release"


def test_nothing_released_is_no_document(keywords: Any) -> None:
    failed = keywords(Keywords.ptr(k=2), epsilon=0.01)
    assert DPRetriever(release=failed).invoke(QUESTION) == []
    assert failed.budget.spent() == 1


def test_a_label_and_scores_are_one_document(keywords: Any) -> None:
    (label,) = DPRetriever(release=keywords(NoisyVote(DOMAIN), answer="porch")).invoke(QUESTION)
    assert label.page_content == "porch"
    (scores,) = DPRetriever(release=keywords(NoisyVote(DOMAIN, scores=True), answer="porch"), k=3).invoke(QUESTION)
    assert scores.page_content == "pharmacy: 0, billing: 0, porch: 10, ledger: 0"


async def test_a_passage_written_from_keywords_is_one_document_with_their_receipt(keywords: Any) -> None:
    writer = GenericFakeChatModel(messages=itertools.cycle([AIMessage("Ask the pharmacy.")]))
    passage = keywords(replay=True).with_receipt() | keywords_to_answer(writer, "Write{suggestions}.\n{input}")
    for way in WAYS:
        (document,) = await ask(way, DPRetriever(release=passage), QUESTION)
        assert document.page_content == "Ask the pharmacy."
        assert document.metadata["receipt"]["number"] == 1


def test_a_chain_that_drops_the_receipt_gives_documents_without_one(keywords: Any) -> None:
    bare = keywords() | RunnableLambda(lambda words: AIMessage(" and ".join(sorted(words))))
    (document,) = DPRetriever(release=bare).invoke(QUESTION)
    assert document == Document(page_content="ledger and pharmacy")


# -- its query ---------------------------------------------------------------------------------------------------------


def test_the_query_goes_where_the_release_looks_for_it(keywords: Any) -> None:
    assert DPRetriever(release=keywords()).input_key == "input"
    near = keywords(nearest_to="question")
    assert DPRetriever(release=near).input_key == "question"
    assert DPRetriever(release=near).invoke(QUESTION)
    assert DPRetriever(release=near, input_key="query").input_key == "query"


async def test_a_spent_budget_is_an_error_and_no_empty_answer(keywords: Any) -> None:
    retriever = DPRetriever(release=keywords(releases=1))
    retriever.invoke("one")
    with pytest.raises(PrivacyBudgetExceeded):
        retriever.invoke("two")
    with pytest.raises(PrivacyBudgetExceeded):
        await retriever.ainvoke("two")


async def test_a_fallback_hides_no_spent_budget(keywords: Any) -> None:
    retriever = DPRetriever(keywords(releases=1))
    safe = retriever.with_fallbacks([RunnableLambda(lambda query: [Document("as if nothing had happened")])])
    assert len(safe.invoke("which words?")) == 1
    with pytest.raises(PrivacyBudgetExceeded):
        safe.invoke("which others?")
    with pytest.raises(PrivacyBudgetExceeded):
        await safe.ainvoke("which others?")
    with pytest.raises(UnsafeConfigurationError, match="PrivacyBudgetExceeded"):
        retriever.with_fallbacks([RunnableLambda(lambda query: [])], exceptions_to_handle=(Exception,))


def test_what_is_no_release_is_refused(keywords: Any) -> None:
    for nothing in (None, "text", RunnablePassthrough()):
        with pytest.raises(InvalidParameter, match="release"):
            DPRetriever(release=nothing)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="input_key"):
        DPRetriever(release=keywords(), input_key="")
    for k in (0, -1, 1.5, "2"):
        with pytest.raises(InvalidParameter, match="k="):
            DPRetriever(release=keywords(), k=k)  # type: ignore[arg-type]


def test_a_bad_k_in_a_call_costs_nothing(keywords: Any) -> None:
    release = keywords()
    with pytest.raises(InvalidParameter, match="k="):
        DPRetriever(release=release).invoke(QUESTION, k=0)
    assert release.budget.spent() == 0


@pytest.mark.parametrize("query", [None, 3, b"which", ["which"], {"input": "which"}])
async def test_a_query_that_is_no_text_costs_nothing(query: Any, keywords: Any) -> None:
    release = keywords()
    for way in ("invoke", "ainvoke"):
        with pytest.raises(InvalidParameter, match="query="):
            await ask(way, DPRetriever(release=release), query)
    assert release.budget.spent() == 0


# -- in a chain --------------------------------------------------------------------------------------------------------


class Recorder(BaseCallbackHandler):
    """Keeps everything that any callback is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return object.__getattribute__(self, name)
        return lambda *args, **kwargs: self.told.append(f"{name} {args!r} {kwargs!r}")


def rag(retriever: Any) -> Any:
    """An ordinary retrieval chain."""

    def format_docs(documents: list[Document]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
    echo = RunnableLambda(lambda prompt: AIMessage(prompt.to_string()))
    return {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | echo | StrOutputParser()


async def test_in_an_ordinary_chain_only_the_retriever_changes(keywords: Any, canary: str) -> None:
    release = keywords(NoisyVote(DOMAIN), answer="porch", replay=True)
    chain = rag(DPRetriever(release=release))
    for way in WAYS:
        assert await ask(way, chain, QUESTION) == f"Human: porch\n\nQuestion: {QUESTION}"
    assert [found.ensemble for found in releases_in(chain)] == [release.ensemble]


async def test_callbacks_see_the_query_and_the_released_documents_alone(keywords: Any, canary: str) -> None:
    chain = rag(DPRetriever(release=keywords(NoisyVote(DOMAIN), answer="porch")))
    recorder = Recorder()
    chain.invoke(QUESTION, {"callbacks": [recorder]})
    await chain.ainvoke(QUESTION, {"callbacks": [recorder]})
    recorder.told += [repr(event) async for event in chain.astream_events(QUESTION, version="v2")]
    seen = "\n".join(recorder.told)
    assert "on_retriever_end" in seen
    assert "porch" in seen
    assert QUESTION in seen
    assert canary not in seen


def test_it_shows_nothing_private_of_itself(keywords: Any, canary: str) -> None:
    retriever = DPRetriever(release=keywords())
    for shown in (repr(retriever), str(retriever), dumps(retriever), repr(retriever.model_copy())):
        assert canary not in shown
    assert "SealedRelease(PrivateEnsemble(members=10" in repr(retriever)
