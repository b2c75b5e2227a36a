"""`wrap_rag`: the user's own retrieval chain as the member, over its own members' documents alone."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from ears import Ears, Spy
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langgraph.store.memory import InMemoryStore as GraphStore
from moments import similarities, vectors_of
from ways import WAYS, ask

from langchain_dpicl import (
    CandidateVote,
    DPRetriever,
    EmbeddingMean,
    ExemplarStore,
    InvalidParameter,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivacyBudgetExceeded,
    SealedRelease,
    UnsafeConfigurationError,
    as_tool,
    wrap_rag,
)
from langchain_dpicl.retrieval.rag import RELEVANT
from langchain_dpicl.store.filters import MetadataFilter

QUESTION = "which desk renews a prescription?"
LABELS = ["porch", "ledger"]
EMBEDDINGS = DeterministicFakeEmbedding(size=8)


def private_collection(canary: str, patients: int = 200) -> InMemoryVectorStore:
    """Two notes of each patient. Of 200 patients at rate 1, each of four members gets at least three, but for a
    probability below 1e-15."""
    documents = [
        Document(
            page_content=f"note {i} {canary}", metadata={"patient": f"patient-{i // 2}", "desk": "porch", "page": i}
        )
        for i in range(2 * patients)
    ]
    return InMemoryVectorStore.from_documents(documents, EMBEDDINGS)


@pytest.fixture
def collection(canary: str) -> InMemoryVectorStore:
    return private_collection(canary)


class Model(Spy):
    """Answers with the desk that its prompt names, and keeps its prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.lock = threading.Lock()

    def __call__(self, prompt: Any) -> AIMessage:
        with self.lock:
            self.prompts.append(prompt.to_string())
        return AIMessage("porch" if "porch" in prompt.to_string() else "I do not know")


def format_docs(documents: list[Document]) -> str:
    return "\n".join(f"{document.page_content} -> {document.metadata['desk']}" for document in documents)


PROMPT = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")


def rag(retriever: Any, model: Any) -> Runnable[Any, Any]:
    """The ordinary chain of every tutorial."""
    return (
        {"context": retriever | format_docs, "question": RunnablePassthrough()}
        | PROMPT
        | RunnableLambda(model)
        | StrOutputParser()
    )


@pytest.fixture
def wrap(budget_of: Any, collection: InMemoryVectorStore) -> Callable[..., SealedRelease]:
    def make(chain: Any, source: Any = None, budget: Any = None, **options: Any) -> SealedRelease:
        source = collection if source is None else source
        if not isinstance(source, ExemplarStore):
            options.setdefault("owner_key", "patient")
        options = {"members": 4, "rate": 1.0, "threshold": None} | options
        return wrap_rag(chain, source, NoisyVote(LABELS), budget_of() if budget is None else budget, **options)

    return make


# -- the ordinary chain ------------------------------------------------------------------------------------------------


async def test_the_ordinary_chain_answers_privately_and_stays_as_it_was(
    wrap: Any, collection: Any, canary: str
) -> None:
    model = Model()
    chain = rag(collection.as_retriever(), model)
    private = wrap(chain, documents=3)
    for way in WAYS:
        assert await ask(way, private, QUESTION) == "porch"
    assert private.budget.spent() == len(WAYS)
    assert len(model.prompts) == 4 * len(WAYS), "a call for each member"
    for prompt in model.prompts:
        assert prompt.count(canary) == 3
        assert prompt.endswith(f"\n\nQuestion: {QUESTION}")
    model.prompts.clear()
    assert chain.invoke(QUESTION) == "porch", "the user's own chain is as it was"
    assert model.prompts[0].count(canary) == 4


def test_public_candidates_alone_are_a_vote_for_the_nearest(collection: Any, budget_of: Any) -> None:
    chain, how = rag(collection.as_retriever(), Model()), {"members": 4, "rate": 1.0, "owner_key": "patient"}
    private = wrap_rag(chain, collection, ["ledger", "porch"], budget_of(), **how)
    assert isinstance(private.aggregator, CandidateVote)
    assert private.invoke(QUESTION) == "porch"
    for empty in ([], ["porch"], ["porch", "porch"]):
        with pytest.raises(InvalidParameter, match="candidates"):
            wrap_rag(chain, collection, empty, budget_of(), **how)
    none: list[Any] = [None, "porch", str]
    for nothing in none:
        with pytest.raises(InvalidParameter, match="for texts public candidates: a list of them, or a chain") as caught:
            wrap_rag(chain, collection, nothing, budget_of(), **how)
        assert caught.value.parameter == "aggregator"


def test_members_see_disjoint_owners_and_the_nearest_first(wrap: Any, collection: Any) -> None:
    seen: list[list[Document]] = Ears()
    keep = RunnableLambda(lambda documents: (seen.append(documents), "porch")[1])
    wrap(collection.as_retriever(search_kwargs={"k": 5}) | keep).invoke(QUESTION)
    store = ExemplarStore.from_vectorstore(collection, owner_key="patient")
    query = store.embed_query(QUESTION)
    owners = [{int(document.page_content.split()[1]) // 2 for document in documents} for documents in seen]
    assert sum(map(len, owners)) == len(set.union(*owners))
    for documents in seen:
        near = [float(vectors_of(store)[document.metadata["page"]] @ query) for document in documents]
        assert len(near) == 5
        assert near == sorted(near, reverse=True)


def test_by_default_documents_that_are_not_near_to_the_question_reach_no_member(
    collection: Any, budget_of: Any
) -> None:
    seen: list[str] = Ears()
    keep = RunnableLambda(lambda documents: (seen.extend(each.page_content for each in documents), "porch")[1])
    store = ExemplarStore.from_vectorstore(collection, owner_key="patient")
    near = similarities(store, store.embed_query(QUESTION))
    for threshold, options in ((RELEVANT, {}), (0.7, {"threshold": 0.7})):
        store = ExemplarStore.from_vectorstore(collection, owner_key="patient")  # which remembers its budgets
        seen.clear()
        every: dict[str, Any] = {"members": 4, "rate": 1.0, **options}
        retriever = collection.as_retriever(search_kwargs={"k": 400})
        wrap_rag(retriever | keep, store, NoisyVote(LABELS), budget_of(), **every).invoke(QUESTION)
        owners = {row // 2 for row in np.flatnonzero(near >= threshold)}
        assert {int(text.split()[1]) // 2 for text in seen} == owners, "all documents of those who have a near one"
        assert 0 < len(owners) < 200


def test_calls_and_how_many_are_eligible_size_the_rate(collection: Any, budget_of: Any, canary: str) -> None:
    def selector(source: Any = collection, **options: Any) -> PoissonExampleSelector:
        chain = source.as_retriever() | format_docs
        every: dict[str, Any] = {"documents": 2, "owner_key": "patient", **options}
        return wrap_rag(chain, source, NoisyVote(LABELS), budget_of(), **every).selector

    default = selector()
    assert (default.calls, default.members, default.own_calls) == (20, 35, True)
    assert default.rate == 20 / 40, "a fifth of 200 owners"
    assert selector(threshold=None).rate == 20 / 200
    assert selector(private_collection(canary, patients=24)).rate == 20 / 24, "twice the calls, but at most all"
    assert selector(private_collection(canary, patients=90)).rate == 20 / 40, "twice the calls"
    assert selector(calls=10, eligible=40).rate == selector(calls=10, eligible=0.2).rate == 10 / 40
    assert selector(calls=10, eligible=5).rate == 1.0
    assert selector(rate=0.3).rate == 0.3
    assert (selector(pad_to=25).members, selector(calls=5, max_calls=9).members) == (25, 9)
    assert selector(members=4, shots=1).rate == selector(members=4, shots=1, eligible=40).rate == 4 / 40
    shared = selector(members=4)
    assert (shared.rate, shared.members, shared.own_calls) == (None, 4, False), "the plan will choose"
    with pytest.raises(InvalidParameter, match="eligible"):
        selector(eligible=40, threshold=None)


def test_the_default_share_of_owners_stays_the_plans(budget_of: Any, ledger_url: str) -> None:
    """However the collection grows, and whoever builds the chain again: rate and expected calls follow no owner."""
    store = ExemplarStore.from_texts([f"note {i}" for i in range(300)], EMBEDDINGS, progress=False)

    def facts() -> Any:
        budget = PrivacyBudget(300.0, 1e-5, 5, ledger_url, "rag")
        release = wrap_rag(RunnableLambda(str), store, NoisyVote(LABELS), budget, documents_key="context")
        line = release.line()
        return line.rate, release._bound_to(line).crowd, release.selector.max_exemplars

    before = facts()
    assert before[0] == 20 / 60
    assert before[1].expected == 20.0
    store.add([{"input": f"another {i}"} for i in range(300)])
    assert facts() == before


def test_metadata_reaches_the_member_without_the_owner(wrap: Any, collection: Any) -> None:
    seen: list[Document] = Ears()
    keep = RunnableLambda(lambda documents: (seen.extend(documents), "porch")[1])
    wrap(collection.as_retriever() | keep).invoke(QUESTION)
    assert seen
    assert all(set(document.metadata) == {"desk", "page"} for document in seen)


async def test_a_mapping_reaches_the_chain_as_its_caller_gave_it(wrap: Any, collection: Any) -> None:
    seen: list[Any] = Ears()
    chain = RunnablePassthrough.assign(context=(lambda values: values["question"]) | collection.as_retriever()) | (
        lambda values: (seen.append({**values, "context": len(values["context"])}), "porch")[1]
    )
    private = wrap(chain, documents=2)
    values = {"question": QUESTION, "language": "en", "history": [1, 2]}
    for way in WAYS:
        assert await ask(way, private, values) == "porch"
    assert all(found == {**values, "context": 2} for found in seen)
    assert len(seen) == 4 * len(WAYS)


def test_a_chain_that_rewrites_its_question_still_gets_its_own_documents(
    wrap: Any, collection: Any, canary: str
) -> None:
    model = Model()
    rewrite = RunnableLambda(lambda question: "something else")
    assert wrap(rag(rewrite | collection.as_retriever(), model), asks="text").invoke(QUESTION) == "porch"
    assert all(prompt.count(canary) == 4 for prompt in model.prompts)


async def test_a_batch_is_charged_together_or_not_at_all(wrap: Any, collection: Any, budget_of: Any) -> None:
    budget = budget_of(releases=5)
    private = wrap(rag(collection.as_retriever(), Model()), budget=budget)
    assert private.batch(["one", "two", {"question": "three"}]) == ["porch"] * 2 + ["porch"]
    assert budget.spent() == 3
    with pytest.raises(PrivacyBudgetExceeded):
        await private.abatch(["four", "five", "six"])
    assert budget.spent() == 3


def mapping_rag(retriever: Any, model: Any) -> Runnable[Any, Any]:
    """The chain of `create_retrieval_chain`: it takes a mapping, and its prompt wants another key of it."""
    prompt = ChatPromptTemplate.from_template("{context}\n\nIn {language}: {question}")
    documents = RunnableLambda(lambda values: values["question"]) | retriever | format_docs
    return RunnablePassthrough.assign(context=documents) | prompt | RunnableLambda(model) | StrOutputParser()


@pytest.mark.parametrize("asked", [QUESTION, {"question": QUESTION}], ids=["text", "mapping"])
def test_the_chain_is_asked_in_its_own_form_whatever_the_request_is(asked: Any, wrap: Any, collection: Any) -> None:
    model = Model()
    private = wrap(rag(collection.as_retriever(), model))
    assert private.asks == "text"
    assert private.invoke(asked) == "porch"
    assert all(prompt.endswith(f"Question: {QUESTION}") for prompt in model.prompts)
    retrieve = (lambda values: values["question"]) | collection.as_retriever()
    private = wrap(RunnablePassthrough.assign(context=retrieve) | (lambda values: "porch"))
    assert private.asks == "mapping"
    assert private.invoke(asked) == "porch"


async def test_a_text_a_mapping_a_tool_and_a_retriever_ask_the_same_request(
    wrap: Any, collection: Any, budget_of: Any
) -> None:
    for chain in (
        rag(collection.as_retriever(), Model()),
        RunnablePassthrough.assign(context=(lambda values: values["question"]) | collection.as_retriever())
        | (lambda values: "porch"),
    ):
        budget = budget_of(replay=True)
        private = wrap(chain, budget=budget)
        for asked in (QUESTION, {"question": QUESTION}):
            assert private.invoke(asked) == "porch"
        assert private.as_tool("desk", "Names the desk.").invoke({"query": QUESTION}) == "porch"
        (document,) = await DPRetriever(private).ainvoke(QUESTION)
        assert document.page_content == "porch"
        assert budget.spent() == 1


@pytest.mark.parametrize("asked", [QUESTION, {"question": QUESTION}, {"question": QUESTION, "context": "x"}])
def test_a_request_without_a_key_that_the_chain_needs_costs_nothing(asked: Any, wrap: Any, collection: Any) -> None:
    private = wrap(mapping_rag(collection.as_retriever(), Model()))
    with pytest.raises(InvalidParameter, match="'language'"):
        private.invoke(asked)
    assert private.budget.spent() == 0
    assert private.invoke({"question": QUESTION, "language": "English"}) == "porch"


def test_a_mapping_of_more_than_the_question_is_refused_where_the_chain_takes_a_text(
    wrap: Any, collection: Any
) -> None:
    private = wrap(rag(collection.as_retriever(), Model()))
    with pytest.raises(InvalidParameter, match="takes a text"):
        private.invoke({"question": QUESTION, "language": "English"})
    assert private.budget.spent() == 0


def test_a_chat_of_messages_is_told_what_a_chain_of_texts_takes(wrap: Any, collection: Any) -> None:
    private = wrap(rag(collection.as_retriever(), Model()))
    with pytest.raises(InvalidParameter, match=r"input='list' is not allowed: a text, .* the last one's text"):
        private.invoke([HumanMessage(QUESTION)])
    assert private.budget.spent() == 0


def test_what_a_chain_takes_is_told_where_it_does_not_show_and_never_against_what_it_shows(
    wrap: Any, collection: Any
) -> None:
    hidden = RunnableLambda(lambda values: values["question"]) | collection.as_retriever() | (lambda found: "porch")
    with pytest.raises(InvalidParameter, match="asks"):
        wrap(hidden)
    assert wrap(hidden, asks="mapping").invoke(QUESTION) == "porch"
    for chain, asks in (
        (rag(collection.as_retriever(), Model()), "mapping"),
        (mapping_rag(collection.as_retriever(), Model()), "text"),
        ({"a": itemgetter("question") | collection.as_retriever()} | RunnableLambda(str), "text"),
        (hidden, "list"),
    ):
        with pytest.raises(InvalidParameter, match="asks"):
            wrap(chain, asks=asks)
    with pytest.raises(InvalidParameter, match="asks"):
        wrap(PROMPT | RunnableLambda(Model()), documents_key="context", asks="text")


def test_two_wrapped_chains_with_other_settings_do_not_answer_each_others_questions(
    wrap: Any, collection: Any, budget_of: Any
) -> None:
    budget = budget_of(replay=True)
    for documents in (2, 3):
        private = wrap(rag(collection.as_retriever(), Model()), budget=budget, documents=documents)
        private.invoke(QUESTION)
        private.invoke(QUESTION)
    assert budget.spent() == 2


def test_a_candidates_chain_gets_the_question_and_nothing_of_the_wrapping(collection: Any, budget_of: Any) -> None:
    asked: list[Any] = Ears()

    def write(values: Any) -> str:
        asked.append(dict(values))
        return "porch"

    mean = EmbeddingMean(EMBEDDINGS, candidates=RunnableLambda(write), n_candidates=1)
    chain = rag(collection.as_retriever(), Model())
    private = wrap_rag(chain, collection, mean, budget_of(), members=4, rate=1.0, owner_key="patient")
    assert private.invoke(QUESTION) == "porch"
    assert asked == [{"question": QUESTION, "examples": []}]


def test_the_chain_itself_is_no_writer_of_candidates(collection: Any, budget_of: Any) -> None:
    """A public call has no bucket, so it would find nothing."""
    chain = rag(collection.as_retriever(), Model())
    mean = EmbeddingMean(EMBEDDINGS, candidates=chain)
    with pytest.raises(UnsafeConfigurationError, match="public text alone"):
        wrap_rag(chain, collection, mean, budget_of(), members=4, rate=1.0, owner_key="patient")


class OverADatabase(BaseRetriever):
    """A retriever of the user's own without any vector store."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return []


def test_what_a_search_would_lose_is_never_dropped(wrap: Any, collection: Any, budget_of: Any) -> None:
    searching, budget = collection.as_retriever, budget_of()
    configurable = searching().configurable_fields(search_kwargs=ConfigurableField(id="search"))
    where = {"where": {"ward": "7"}}
    chains = {
        "pre_filter": searching(search_kwargs={"pre_filter": {"ward": "7"}}),
        "score_threshold": searching(search_kwargs={"k": 2, "score_threshold": 0.5}),
        "where": configurable.with_config(configurable={"search": where}),
        "where ": searching().bind(**where),
        "where  ": searching(search_kwargs=where).with_retry(),
        "where   ": (searching() | RunnableLambda(str)).bind(**where),
    }
    for name, retriever in chains.items():
        chain = {"context": itemgetter("question") | retriever} | RunnableLambda(str)
        with pytest.raises(InvalidParameter, match=f"search_kwargs.*{name.strip()}"):
            wrap(chain, budget=budget)
    outer = ({"context": itemgetter("question") | configurable} | RunnableLambda(str)).with_config(
        configurable={"search": where}
    )
    with pytest.raises(InvalidParameter, match=r"search_kwargs.*where"):
        wrap(outer, budget=budget)
    for source in (searching(search_kwargs={"filter": lambda document: True}), searching(search_type="mmr")):
        with pytest.raises(UnsafeConfigurationError, match="the source's VectorStoreRetriever searches with"):
            wrap(rag(searching(), Model()), source, budget=budget)
    assert budget.spent() == 0


def test_filters_configured_or_bound_are_carried_out_and_narrow_who_takes_part(wrap: Any, collection: Any) -> None:
    searching = collection.as_retriever
    page = {"filter": {"page": 7}}
    configurable = searching().configurable_fields(search_kwargs=ConfigurableField(id="search"))
    one_page = {"eligible": 2}
    for retriever, known in (
        (searching(search_kwargs=page), one_page),
        (configurable.with_config(configurable={"search": page}), {}),
        (searching().bind(**page), {}),
        (searching(search_kwargs={"filter": lambda document: document.metadata["page"] == 7}), {}),
    ):
        seen: list[Document] = Ears()
        keep = RunnableLambda(lambda documents, seen=seen: (seen.extend(documents), "porch")[1])
        wrap(retriever | keep, documents=400, **known).invoke(QUESTION)
        real = [document.metadata["page"] for document in seen if "note" in document.page_content]
        assert real == [7], "beside what was made up for a public question"
    with pytest.raises(InvalidParameter, match="eligible=None is not allowed: given with a filter or visible_to"):
        wrap(searching(search_kwargs=page) | RunnableLambda(str))
    every = wrap(searching(search_kwargs=page) | RunnableLambda(str), **one_page).ensemble.selector
    assert str(every.rules.wanted({}, None)) == str(MetadataFilter.parse({"page": 7}))
    beside = {"a": searching(search_kwargs=page), "b": RunnableLambda(collection.similarity_search)}
    assert not wrap(beside | RunnableLambda(str), asks="text").ensemble.selector.rules, "one search has no filter"


def test_members_get_as_many_documents_as_the_replaced_retriever_gave(wrap: Any, collection: Any) -> None:
    three = collection.as_retriever(search_kwargs={"k": 3})
    given = {None: 3, 5: 5}
    for documents, expected in given.items():
        made = wrap(rag(three, Model()), documents=documents)
        assert made.ensemble.selector.max_exemplars == expected
    assert wrap(rag(collection.as_retriever(), Model())).ensemble.selector.max_exemplars == 4
    both = {"a": three, "b": collection.as_retriever(search_kwargs={"k": 2})} | RunnableLambda(str)
    assert wrap(both, asks="text").ensemble.selector.max_exemplars == 3
    sizes = {
        20: collection.as_retriever(search_type="mmr"),
        9: collection.as_retriever(search_type="mmr", search_kwargs={"k": 2, "fetch_k": 9}),
        7: collection.as_retriever().bind(k=7),
        6: collection.as_retriever()
        .configurable_fields(search_kwargs=ConfigurableField(id="search"))
        .with_config(configurable={"search": {"k": 6}}),
        4: RunnableLambda(lambda question: collection.similarity_search(question, k=9)),
    }
    for size, retriever in sizes.items():
        assert wrap(retriever | RunnableLambda(str), asks="text").ensemble.selector.max_exemplars == size


def test_sources(wrap: Any, collection: Any, canary: str) -> None:
    store = ExemplarStore.from_vectorstore(collection, owner_key="patient")
    for source in (store, collection, collection.as_retriever(search_kwargs={"k": 1})):
        private = wrap(rag(collection.as_retriever(), Model()), source)
        assert private.invoke(QUESTION) == "porch"
        assert private.ensemble.selector.store.owner_count == 200
    with pytest.raises(InvalidParameter, match="source"):
        wrap(rag(collection.as_retriever(), Model()), "text")
    with pytest.raises(InvalidParameter, match="owner_key"):
        wrap(rag(collection.as_retriever(), Model()), store, owner_key="patient")


def test_a_rate_or_shots_may_be_given(wrap: Any, collection: Any) -> None:
    chain = rag(collection.as_retriever(), Model())
    assert wrap(chain, rate=0.3).ensemble.selector.rate == 0.3
    assert wrap(chain, rate=None, shots=2).ensemble.selector.rate == pytest.approx(4 * 2 / 200)
    chosen = wrap(chain, rate=None)
    assert chosen.line().plan_line.owners == 200, "the plan chooses, and keeps the number of owners"
    assert (chosen.selector.rate, chosen.selector.rate_is_explicit) == (None, False)


# -- what it is --------------------------------------------------------------------------------------------------------


def test_it_is_a_sealed_release_of_texts_or_mappings(wrap: Any, collection: Any) -> None:
    private = wrap(rag(collection.as_retriever(), Model()), return_receipt=False)
    assert isinstance(private, SealedRelease)
    assert private.InputType == str | dict[str, Any]
    assert private.OutputType is NoisyVote(LABELS).release_type
    assert private.get_input_jsonschema()["anyOf"]
    assert private.get_output_jsonschema()["type"] == "string"
    assert private.with_receipt().invoke(QUESTION)["receipt"]["number"] == 1
    assert wrap(rag(collection.as_retriever(), Model()), return_receipt=True).invoke(QUESTION)["answer"] == "porch"
    assert (private | str.upper).invoke(QUESTION) == "PORCH"


async def test_it_serves_as_a_retriever_and_as_a_tool(wrap: Any, collection: Any) -> None:
    model = Model()
    private = wrap(rag(collection.as_retriever(), model))
    (document,) = await DPRetriever(release=private).ainvoke(QUESTION)
    assert document.page_content == "porch"
    assert model.prompts[0].endswith(f"Question: {QUESTION}"), "asked as the chain is asked"
    tool = as_tool(private, "desk", "Names the desk.", inputs={"question": "what is asked"})
    assert tool.invoke({"question": QUESTION}) == "porch"


@pytest.mark.filterwarnings("ignore")
async def test_no_callback_sees_a_document(wrap: Any, collection: Any, canary: str) -> None:
    chain = rag(collection.as_retriever(), Model())
    told = [repr(event) async for event in chain.astream_events(QUESTION, version="v2")]
    assert canary in "".join(told), "the chain alone shows them, so the check can fail"
    private = wrap(chain)
    told = [repr(event) async for event in private.astream_events(QUESTION, version="v2")]
    assert QUESTION in "".join(told)
    assert canary not in "".join(told) + repr(private)


@pytest.mark.parametrize(
    "values", [None, 3, ["q"], {}, {"input": "q"}, {"question": 3}, {"question": "q", "examples": []}]
)
def test_a_bad_request_costs_nothing(values: Any, wrap: Any, collection: Any) -> None:
    private = wrap(rag(collection.as_retriever(), Model()))
    with pytest.raises(InvalidParameter):
        private.invoke(values)
    assert private.budget.spent() == 0


# -- every retriever is replaced, or the chain refused -----------------------------------------------------------------


def test_retrievers_within_retrievers_keep_their_meaning(wrap: Any, collection: Any, canary: str) -> None:
    from langchain_classic.retrievers import EnsembleRetriever, MultiQueryRetriever
    from langchain_core.language_models import FakeListChatModel

    many = MultiQueryRetriever.from_llm(
        collection.as_retriever(search_kwargs={"k": 1}), FakeListChatModel(responses=["a\nb"])
    )
    mixed = EnsembleRetriever(retrievers=[many, collection.as_retriever()], weights=[0.5, 0.5])
    model = Model()
    assert wrap(rag(mixed, model), documents=3).invoke(QUESTION) == "porch"
    assert [prompt.count(canary) for prompt in model.prompts] == [3] * 4
    model.prompts.clear()
    assert wrap(rag(many, model), documents=8).invoke(QUESTION) == "porch"
    assert all(1 <= prompt.count(canary) <= 2 for prompt in model.prompts), "two queries with one document each"


def test_configured_and_bound_retrievers_search_the_bucket(wrap: Any, collection: Any, canary: str) -> None:
    for retriever in (
        collection.as_retriever().with_config(tags=["a"]),
        collection.as_retriever().with_retry(),
        collection.as_retriever().configurable_fields(search_kwargs=ConfigurableField("search")),
        RunnablePassthrough() | collection.as_retriever(),
    ):
        model = Model()
        assert wrap(rag(retriever, model), documents=2).invoke(QUESTION) == "porch"
        assert [prompt.count(canary) for prompt in model.prompts] == [2] * 4


SHARED: list[Any] = []  # a global that a function below names


class Answerer:
    """The user's own object with a retriever inside."""

    def __init__(self, retriever: Any) -> None:
        self._retriever = retriever

    def answer(self, question: str) -> str:
        return str(self._retriever.invoke(question))

    __call__ = answer


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, question: str) -> str:
        return str(self.held.invoke(question))


class OfTheClass:
    def __call__(self, question: str) -> str:
        return self.asked(question)

    def asked(self, question: str) -> str:
        return str(SHARED[0].invoke(question))


def by_global(question: str) -> str:
    return str([document for retriever in (SHARED,) for document in retriever[0].invoke(question)])


def calls_another(question: str) -> str:
    return by_global(question)


def given(question: str, collection: Any) -> str:
    return str(collection.similarity_search(question))


def with_default(retriever: Any) -> Callable[[str], str]:
    def answer(question: str, retriever: Any = retriever) -> str:
        return str(retriever.invoke(question))

    return answer


def opens_a_collection(question: str) -> str:
    return str(InMemoryVectorStore.load("notes.json", EMBEDDINGS).similarity_search(question))


HELD: dict[str, Callable[[Any], Any]] = {
    "a closure": lambda collection: lambda question: collection.similarity_search(question)[0].page_content,
    "a closure over a retriever": lambda collection: functools.partial(
        lambda retriever, question: retriever.invoke(question), collection.as_retriever()
    ),
    "a closure over a function over a retriever": lambda collection: (
        lambda search: lambda question: search(question)[0].page_content
    )(collection.similarity_search),
    "a bound method": lambda collection: Answerer(collection.as_retriever()).answer,
    "an object that can be called": lambda collection: Answerer(collection.as_retriever()).__call__,
    "slots": lambda collection: Slotted(collection.as_retriever()).__call__,
    "a default argument": lambda collection: with_default(collection.as_retriever()),
    "bound arguments": lambda collection: RunnableLambda(given).bind(collection=collection),
    "a global": lambda collection: by_global,
    "a function's global": lambda collection: calls_another,
    "a tool": lambda collection: create_retriever_tool(collection.as_retriever(), "search", "Searches."),
    "a mapping in a closure": lambda collection: (
        lambda question, held={"c": [collection]}: str(held["c"][0].similarity_search(question))
    ),
    "a bound method of its own": lambda collection: collection.similarity_search,
    "a class's global": lambda collection: OfTheClass().__call__,
}


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "a method that the stand-in lacks": lambda collection: collection.dump,
    "an attribute that the stand-in lacks": lambda collection: lambda question: str(collection.store),
    "a second collection": lambda collection: (
        InMemoryVectorStore.from_texts(["note"], EMBEDDINGS).as_retriever() | RunnableLambda(str)
    ),
    "a retriever over a database": lambda collection: OverADatabase() | RunnableLambda(str),
    "a document": lambda collection: (lambda held: lambda question: str(held))((Document("the policy"),)),
    "a document store": lambda collection: InMemoryStore().mget,
    "a graph's store": lambda collection: GraphStore().search,
    "a class that opens a collection": lambda collection: opens_a_collection,
    "a selector": lambda collection: (
        PoissonExampleSelector(
            ExemplarStore.from_vectorstore(collection, owner_key="patient"), 4, rate=1.0, max_exemplars=8
        ).select_examples
    ),
}


@pytest.mark.parametrize("where", HELD)
def test_a_collection_in_a_function_or_an_object_is_replaced_in_a_copy(
    where: str, wrap: Any, collection: Any, canary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SHARED", [collection.as_retriever()])
    seen: list[str] = Ears()
    keep = RunnableLambda(lambda found: (seen.append(str(found)), "porch")[1])
    chain = RunnablePassthrough() | HELD[where](collection) | keep
    assert wrap(chain, asks="text").invoke(QUESTION) == "porch"
    owners = [{int(number) // 2 for number in re.findall(r"note (\d+) ", told)} for told in seen if "note" in told]
    assert len(owners) == 4, "beside a public question on what was made up"
    assert sum(map(len, owners)) == len(set.union(*owners)), "no owner in two members"
    seen.clear()
    chain.invoke(QUESTION)
    assert canary in seen[0], "the user's own chain is as it was"


@pytest.mark.parametrize("where", HIDDEN)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a step"])
def test_what_cannot_be_replaced_is_refused(
    where: str,
    beside: bool,
    wrap: Any,
    collection: Any,
    canary: str,
    budget_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "SHARED", [collection.as_retriever()])
    budget = budget_of()
    hidden = RunnableLambda(lambda question: question) | HIDDEN[where](collection)
    chain = {"context": collection.as_retriever(), "more": hidden} if beside else hidden
    with pytest.raises(UnsafeConfigurationError, match=r"the chain('s| reaches an?) ") as caught:
        wrap(chain | RunnableLambda(str), budget=budget, asks="text")
    assert canary not in str(caught.value)
    assert budget.spent() == 0


def test_a_class_named_to_compare_with_is_no_collection(wrap: Any, collection: Any) -> None:
    def answer(found: Any) -> str:
        return "ledger" if isinstance(found, VectorStore) else "porch"

    assert wrap(collection.as_retriever() | RunnableLambda(answer)).invoke(QUESTION) == "porch"


def test_the_source_is_out_of_the_members_reach(wrap: Any, collection: Any) -> None:
    copies = wrap(rag(collection.as_retriever(), Model())).ensemble.copies
    assert copies.searches
    assert not any(isinstance(part, VectorStore) for part in copies.items), "each copy has a stand-in of its own"


# -- chains without a retriever ----------------------------------------------------------------------------------------


def test_documents_go_in_under_their_key_where_there_is_no_retriever(wrap: Any, canary: str) -> None:
    model = Model()
    chain = (
        RunnablePassthrough.assign(context=lambda values: format_docs(values["context"]))
        | PROMPT
        | RunnableLambda(model)
        | StrOutputParser()
    )
    private = wrap(chain, documents_key="context", documents=2)
    assert private.invoke(QUESTION) == private.invoke({"question": QUESTION}) == "porch"
    assert [prompt.count(canary) for prompt in model.prompts] == [2] * 8
    with pytest.raises(InvalidParameter, match="context"):
        private.invoke({"question": QUESTION, "context": []})


def test_documents_key_and_retriever_exclude_one_another(wrap: Any, collection: Any) -> None:
    with pytest.raises(InvalidParameter, match="documents_key=None"):
        wrap(PROMPT | RunnableLambda(Model()))
    with pytest.raises(InvalidParameter, match="documents_key='context'"):
        wrap(rag(collection.as_retriever(), Model()), documents_key="context")


def test_an_empty_bucket_asks_the_chain_without_documents(wrap: Any, canary: str) -> None:
    """At rate 0.01 six or more of 24 owners take part with a probability below 2e-7."""
    model, few = Model(), private_collection(canary, patients=24)
    private = wrap(rag(few.as_retriever(), model), few, rate=0.01, members=10)
    private.invoke(QUESTION)
    assert len(model.prompts) == 10
    assert sum(canary in prompt for prompt in model.prompts) < 6


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"documents": 0}, "documents"),
        ({"members": 1}, "members"),
        ({"calls": 5}, "members"),
        ({"members": None, "calls": 0.5}, "calls"),
        ({"members": None, "shots": 2, "rate": None}, "shots"),
        ({"pad_to": 9}, "pad_to"),
        ({"max_calls": 9}, "max_calls"),
        ({"members": None, "calls": 9, "max_calls": 8}, "max_calls"),
        ({"threshold": 0.3, "eligible": 0.0}, "eligible"),
        ({"threshold": 0.3, "eligible": 1.5}, "eligible"),
        ({"threshold": 0.3, "eligible": -0.2}, "eligible"),
        ({"threshold": 0.3, "eligible": float("nan")}, "eligible"),
        ({"threshold": 0.3, "eligible": "many"}, "eligible"),
        ({"shots": 1, "rate": 0.5}, "shots"),
        ({"question_key": ""}, "nearest_to"),
        ({"members": 300, "rate": None, "shots": 1}, "shots"),
    ],
)
def test_bad_parameters_are_refused(options: dict[str, Any], name: str, wrap: Any, collection: Any) -> None:
    with pytest.raises(InvalidParameter, match=name):
        wrap(rag(collection.as_retriever(), Model()), **options)
