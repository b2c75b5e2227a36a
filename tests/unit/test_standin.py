"""`store.as_vectorstore()`: an app is built over it, and each member searches its own bucket there."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from typing import Any

import numpy as np
import pytest
from ears import Ears
from langchain_classic.embeddings import CacheBackedEmbeddings
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.stores import InMemoryByteStore
from langchain_core.vectorstores import InMemoryVectorStore
from ways import WAYS, ask

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    InvalidParameter,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
    UnsafeConfigurationError,
)
from langchain_dpicl.private.boundary import arun_private, run_private
from langchain_dpicl.private.bucket import Examples, MadeUp
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.store.standin import MemberVectorStore

EMBEDDINGS = DeterministicFakeEmbedding(size=8)
LABELS = ["porch", "ledger"]
QUESTION = {"input": "which desk?"}
DOCUMENTS = [
    Document(f"note {i}", metadata={"patient": f"patient-{i // 2}", "page": i, "ward": "ab"[i % 2]}) for i in range(80)
]


@pytest.fixture
def store() -> ExemplarStore:
    return ExemplarStore.from_documents(DOCUMENTS, EMBEDDINGS, owner_key="patient")


@pytest.fixture
def here(store: ExemplarStore) -> MemberVectorStore:
    return store.as_vectorstore()


def bucket_of(store: ExemplarStore, rows: range = range(0, 30)) -> Examples:
    bucket = Examples((), "text", None)
    with store.reading() as view:
        numbers = np.array(rows)
        for exemplar, vector in zip(view.read(numbers), view.vectors(numbers), strict=True):
            bucket.add(exemplar, vector)
    return bucket


def within(function: Callable[[], Any], bucket: Any) -> Any:
    """What a function gives in a member with this bucket; what it raises."""
    found = run_private(
        Pristine(RunnableLambda(lambda _: function())), [({}, bucket)], max_concurrency=1, failed=lambda e: e
    )[0]
    if isinstance(found, BaseException):
        raise found
    return found


async def awithin(function: Callable[[], Any], bucket: Any) -> Any:
    async def ask(_: Any) -> Any:
        return await function()

    found = (await arun_private(Pristine(RunnableLambda(ask)), [({}, bucket)], max_concurrency=1, failed=lambda e: e))[
        0
    ]
    if isinstance(found, BaseException):
        raise found
    return found


def texts(found: Any) -> Any:
    return [(each[0].page_content, pytest.approx(each[1], abs=1e-5)) if isinstance(each, tuple) else each.page_content
            for each in found]  # fmt: skip


# -- a search is one of a collection that holds the bucket alone -------------------------------------------------------

VECTOR = EMBEDDINGS.embed_query("another vector")
SEARCHES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "similarity": ("similarity_search", ("desk",), {}),
    "k": ("similarity_search", ("desk",), {"k": 7}),
    "filter": ("similarity_search", ("desk",), {"filter": lambda document: document.metadata["ward"] == "a"}),
    "scores": ("similarity_search_with_score", ("desk", 5), {}),
    "by vector": ("similarity_search_by_vector", (VECTOR,), {"k": 3}),
    "mmr": ("max_marginal_relevance_search", ("desk",), {"k": 3, "fetch_k": 9, "lambda_mult": 0.2}),
    "mmr by default": ("max_marginal_relevance_search", ("desk",), {}),
    "mmr by vector": (
        "max_marginal_relevance_search_by_vector",
        (VECTOR,),
        {"k": 3, "filter": lambda document: document.metadata["page"] > 9},
    ),
}


@pytest.mark.parametrize("name", SEARCHES)
async def test_each_search_is_that_of_a_collection_of_the_bucket_alone(
    name: str, store: ExemplarStore, here: MemberVectorStore
) -> None:
    method, arguments, named = SEARCHES[name]
    alone = InMemoryVectorStore.from_documents(DOCUMENTS[:30], EMBEDDINGS)
    expected = texts(getattr(alone, method)(*arguments, **named))
    found = within(lambda: getattr(here, method)(*arguments, **named), bucket_of(store))
    assert texts(found) == expected
    found = await awithin(lambda: getattr(here, f"a{method}")(*arguments, **named), bucket_of(store))
    assert texts(found) == expected


async def test_every_kind_of_retriever_searches_the_bucket(store: ExemplarStore, here: MemberVectorStore) -> None:
    cosines = within(lambda: here.similarity_search_with_score("desk", 30), bucket_of(store))
    least = sorted(score for _, score in cosines)[-3] - 1e-6
    expected = {
        "similarity": [document.page_content for document, _ in cosines if document.metadata["ward"] == "a"][:2],
        "similarity_score_threshold": [document.page_content for document, score in cosines if score >= least],
        "mmr": texts(within(lambda: here.max_marginal_relevance_search("desk", 2), bucket_of(store))),
    }
    settings: dict[str, dict[str, Any]] = {
        "similarity": {"k": 2, "filter": {"$or": [{"ward": {"$in": ["a"]}}, {"page": {"$gt": 900}}]}},
        "similarity_score_threshold": {"k": 9, "score_threshold": least},
        "mmr": {"k": 2},
    }
    for kind, search in settings.items():
        retriever = here.as_retriever(search_type=kind, search_kwargs=search)
        assert texts(within(lambda r=retriever: r.invoke("desk"), bucket_of(store))) == expected[kind]  # type: ignore[misc]
        assert texts(await awithin(lambda r=retriever: r.ainvoke("desk"), bucket_of(store))) == expected[kind]  # type: ignore[misc]


def test_a_member_may_sort_and_cut_its_bucket(store: ExemplarStore, here: MemberVectorStore) -> None:
    expected = texts(within(lambda: here.similarity_search_with_score("desk", 3), bucket_of(store, range(4, 12))))
    bucket = bucket_of(store, range(4, 14))
    bucket.sort(key=lambda exemplar: -exemplar["page"])
    del bucket[:2]
    assert texts(within(lambda: here.similarity_search_with_score("desk", 3), bucket)) == expected


def test_relevance_is_the_cosine_and_never_below_zero(store: ExemplarStore, here: MemberVectorStore) -> None:
    scored = within(lambda: here.similarity_search_with_score("desk", 30), bucket_of(store))
    relevant = within(lambda: here.similarity_search_with_relevance_scores("desk", 30), bucket_of(store))
    assert min(score for _, score in scored) < 0
    assert [score for _, score in relevant] == [max(0.0, score) for _, score in scored]


# -- where there is no bucket, and where it is empty or made up --------------------------------------------------------


async def test_outside_of_a_member_every_search_says_what_to_do(here: MemberVectorStore) -> None:
    for method, arguments, named in SEARCHES.values():
        with pytest.raises(UnsafeConfigurationError, match=r"PrivateEnsemble\(selector, app\)"):
            getattr(here, method)(*arguments, **named)
        with pytest.raises(UnsafeConfigurationError, match=r"PrivateEnsemble\(selector, app\)"):
            await getattr(here, f"a{method}")(*arguments, **named)
    with pytest.raises(UnsafeConfigurationError, match="use its own methods"):
        here.as_retriever().invoke("desk")


async def test_members_cannot_write(store: ExemplarStore, here: MemberVectorStore) -> None:
    writes: list[Callable[[], Any]] = [
        lambda: here.add_texts(["x"]),
        lambda: here.add_documents([Document("x")]),
        lambda: here.delete(["1"]),
    ]
    for write in writes:
        with pytest.raises(UnsafeConfigurationError, match="members cannot write"):
            within(write, bucket_of(store))
    for awrite in (lambda: here.aadd_documents([Document("x")]), lambda: here.adelete(["1"])):
        with pytest.raises(UnsafeConfigurationError, match="members cannot write"):
            await awithin(awrite, bucket_of(store))
    with pytest.raises(UnsafeConfigurationError, match="as_vectorstore"):
        MemberVectorStore.from_texts(["x"], EMBEDDINGS)
    assert len(store) == 80


def test_an_empty_bucket_has_nothing_to_find(here: MemberVectorStore) -> None:
    for method, arguments, named in SEARCHES.values():
        assert within(lambda m=method, a=arguments, n=named: getattr(here, m)(*a, **n), Examples((), "text")) == []


def test_made_up_examples_pass_every_test(here: MemberVectorStore) -> None:
    bucket = Examples([MadeUp({"text": "a made-up example"}), MadeUp({"text": "another"})], "text")
    retriever = here.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.99, "filter": {"ward": "a"}}
    )
    found = within(lambda: retriever.invoke("desk"), bucket)
    assert [document.page_content for document in found] == ["a made-up example", "another"]
    assert found[0].metadata["any key"] == "a made-up any key"
    for filter in ({"page": {"$gt": 9}}, lambda document: document.metadata["page"] > 9):
        assert len(within(lambda f=filter: here.max_marginal_relevance_search("desk", filter=f), bucket)) == 2


def test_examples_that_came_without_vectors_are_embedded(store: ExemplarStore, here: MemberVectorStore) -> None:
    bare = Examples(bucket_of(store), "text")
    found = within(lambda: here.similarity_search_with_score("desk", 5), bare)
    assert texts(found) == texts(within(lambda: here.similarity_search_with_score("desk", 5), bucket_of(store)))


class Counted(DeterministicFakeEmbedding):
    """Counts the texts of documents that it embeds."""

    documents: int = 0

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.documents += len(texts)
        return super().embed_documents(texts)


def test_a_stored_vector_is_searched_as_it_stands() -> None:
    """Not its text's: the store may have been given another."""
    model = Counted(size=8)
    vectors = np.tile(np.eye(8, dtype=np.float32), (4, 1))[:30]
    store = ExemplarStore.from_documents(DOCUMENTS[:30], model, owner_key="patient", vectors=vectors)
    here, bucket = store.as_vectorstore(), bucket_of(store)
    for position in range(8):
        found = within(lambda vector=vectors[position]: here.similarity_search_with_score_by_vector(vector, 1), bucket)
        assert [(document.page_content, score) for document, score in found] == [(f"note {position}", 1.0)]
    for method, arguments, named in SEARCHES.values():
        within(lambda m=method, a=arguments, n=named: getattr(here, m)(*a, **n), bucket)
    assert model.documents == 0


def test_vectors_of_zeros_are_as_near_as_all_else() -> None:
    """A model of words gives them for unknown words. They have no cosine."""
    vectors = np.zeros((30, 8), np.float32)
    store = ExemplarStore.from_documents(DOCUMENTS[:30], EMBEDDINGS, owner_key="patient", vectors=vectors)
    here = store.as_vectorstore()
    for query in (VECTOR, [0.0] * 8):
        found = within(lambda query=query: here.similarity_search_with_score_by_vector(query, 2), bucket_of(store))
        assert [(document.page_content, score) for document, score in found] == [("note 0", 0.0), ("note 1", 0.0)]


@pytest.mark.parametrize(
    "search",
    [
        lambda here: here.as_retriever(search_kwargs={"where": {"ward": "a"}}),
        lambda here: here.as_retriever(search_kwargs={"score_threshold": 0.5}),
        lambda here: here.as_retriever(search_kwargs={"filter": {"ward": {"$regex": "a"}}}),
        lambda here: here.similarity_search("desk", filter={"ward": {"$regex": "a"}}),
        lambda here: here.similarity_search("desk", filter=[]),
        lambda here: here.similarity_search("desk", where={"ward": "a"}),
        lambda here: here.similarity_search("desk", k=0),
        lambda here: here.similarity_search("desk", filter=["ward"]),
        lambda here: here.max_marginal_relevance_search("desk", lambda_mult=2.0),
        lambda here: here.max_marginal_relevance_search("desk", fetch_k=0),
        lambda here: here.similarity_search_by_vector([1.0, 2.0]),
    ],
)
def test_what_a_search_would_not_carry_out_is_refused(search: Any, store: Any, here: MemberVectorStore) -> None:
    with pytest.raises(InvalidParameter):
        within(lambda: search(here), bucket_of(store))


# -- whole releases ----------------------------------------------------------------------------------------------------


@pytest.fixture
def release_of(store: ExemplarStore, budget_of: Any) -> Callable[..., Any]:
    """release_of(app): every owner takes part, and the vote goes on what the app answers."""

    def make(app: Any, members: int = 4, **options: Any) -> Any:
        selector = PoissonExampleSelector(store, members, rate=1.0, max_exemplars=80, exemplars_per_owner=2)
        return PrivateEnsemble(selector, app, **options) | DPAggregate(NoisyVote(LABELS, mechanism="vote"), budget_of())

    return make


@pytest.mark.parametrize(
    "hide",
    [
        lambda chosen: chosen,
        lambda chosen: [AIMessage([{"text": (chosen,)}])],
        lambda chosen: AIMessage.model_validate({"type": "ai", "content": "x", "ward": chosen}),
        lambda chosen: deque([np.array([chosen], object)]),
        make_dataclass("Slotted", ["ward"], slots=True),
    ],
)
def test_a_request_holds_no_operator_for_a_members_search(hide: Any, here: MemberVectorStore, release_of: Any) -> None:
    chain = release_of(lambda values: here.similarity_search("q", filter={"ward": values["ward"]}) and "porch")
    with pytest.raises(InvalidParameter, match="input='\\$ne'"):
        chain.invoke({**QUESTION, "ward": hide({"$ne": "a"})})
    assert chain.budget.spent() == 0
    assert chain.invoke({**QUESTION, "ward": "a", "more": {"$schema": 1}}) == "porch"


@pytest.mark.parametrize("way", WAYS)
async def test_each_member_finds_the_nearest_of_its_own_bucket(
    way: str, store: ExemplarStore, here: MemberVectorStore, release_of: Any
) -> None:
    heard: list[tuple[list[str], list[str]]] = Ears()
    retriever = here.as_retriever(search_kwargs={"k": 3})

    def search(values: Any) -> str:
        found = retriever.invoke(values["input"])
        heard.append(([each["text"] for each in values["examples"]], [each.page_content for each in found]))
        return "porch"

    assert await ask(way, release_of(search), QUESTION) == "porch"
    assert len(heard) == 4
    order = [document.page_content for document in within(lambda: here.similarity_search("which desk?", 80),
                                                          bucket_of(store, range(80)))]  # fmt: skip
    owners = [{int(text.split()[1]) // 2 for text in bucket} for bucket, _ in heard]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 40
    for bucket, found in heard:
        assert found == [text for text in order if text in bucket][:3]


async def test_threads_tasks_and_nested_calls_of_a_member_stay_in_its_bucket(
    here: MemberVectorStore, release_of: Any
) -> None:
    wrong: list[Any] = Ears()

    def look(values: Any) -> None:
        found = {each.page_content for each in here.similarity_search("desk", 80)}
        if found != {each["text"] for each in values["examples"]}:
            wrong.append(found)

    def search(values: Any) -> str:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(look, values) for _ in range(8)]:
                done.result()
        thread = threading.Thread(target=lambda: look(values) or wrong.remove("a thread"))
        wrong.append("a thread")
        thread.start()
        thread.join()
        RunnableLambda(look).batch([values] * 3)
        return "porch"

    async def asearch(values: Any) -> str:
        async def alook(_: int) -> None:
            await asyncio.sleep(0)
            found = {each.page_content for each in await here.asimilarity_search("desk", 80)}
            if found != {each["text"] for each in values["examples"]}:
                wrong.append(found)

        await asyncio.gather(*map(alook, range(5)), asyncio.to_thread(look, values))
        await RunnableLambda(look).abatch([values] * 3)
        return "porch"

    release = release_of(RunnableLambda(search, afunc=asearch), members=8)
    assert release.batch([{"input": f"{i}"} for i in range(3)]) == ["porch"] * 3
    assert await release.abatch([{"input": f"{i}"} for i in range(3)]) == ["porch"] * 3
    assert wrong == []


def test_a_real_collection_stays_refused_with_what_to_do(here: MemberVectorStore, release_of: Any) -> None:
    real = InMemoryVectorStore.from_documents(DOCUMENTS[:2], EMBEDDINGS)
    for searched in (real, real.as_retriever()):
        with pytest.raises(UnsafeConfigurationError, match=r"InMemoryVectorStore.*store.as_vectorstore\(\)"):
            release_of(lambda values, both=(here, searched): str(both))
    assert release_of(lambda values: str(real.similarity_search("x")) and "porch", public=[real])


def test_embeddings_that_keep_what_members_search_for_are_refused(store: ExemplarStore) -> None:
    """Such a cache would hold private texts' vectors, and the number of its keys how many owners were sampled."""
    kept = InMemoryByteStore()
    for cache in (False, kept):
        model = CacheBackedEmbeddings.from_bytes_store(
            store.embeddings, InMemoryByteStore(), key_encoder="sha256", query_embedding_cache=cache
        )
        made = ExemplarStore.from_texts(["a", "b"], model)
        if cache is False:
            assert made.as_vectorstore().embeddings is model
        else:
            with pytest.raises(UnsafeConfigurationError, match="keeps queries"):
                made.as_vectorstore()


def test_the_stand_in_writes_no_candidates(here: MemberVectorStore, store: ExemplarStore, budget_of: Any) -> None:
    from langchain_dpicl import EmbeddingMean

    chain = here.as_retriever() | RunnableLambda(str)
    mean = EmbeddingMean(EMBEDDINGS, candidates=chain, n_candidates=1)
    selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=9)
    with pytest.raises(UnsafeConfigurationError, match="candidates must come from public text alone"):
        PrivateEnsemble(selector, chain) | DPAggregate(mean, budget_of())
