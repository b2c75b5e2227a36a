"""Apps of every shape over `store.as_vectorstore()`: each member reads its own owner's notes, and nobody else's."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypedDict

import pytest
from ears import Ears
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, dynamic_prompt
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.example_selectors import SemanticSimilarityExampleSelector
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool, tool
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langgraph.graph import START, StateGraph
from pydantic import Field

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    InvalidParameter,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
    UnsafeConfigurationError,
    split_with_parents,
)

EMBEDDINGS = DeterministicFakeEmbedding(size=8)
PATIENTS, NOTES = 8, 3
QUESTION = {"input": "which desk renews it?"}


def notes() -> list[Document]:
    return [
        Document(f"note {i}.{j} of the porch", metadata={"patient": f"patient-{i}", "page": j})
        for i in range(PATIENTS)
        for j in range(NOTES)
    ]


class Scripted(BaseChatModel):
    """Searches by its tool, if it has one and has not yet; then names the desk. Keeps what it was told."""

    told: Any = Field(default_factory=Ears, exclude=True)
    tools: Any = ()

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.model_copy(update={"tools": tools})

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        if self.tools and not isinstance(messages[-1], ToolMessage):
            call = {"name": "search", "args": {"query": "renewals"}, "id": "1"}
            answer = AIMessage("", tool_calls=[call])
        else:
            self.told.append("\n".join(str(message.content) for message in messages))
            answer = AIMessage("porch" if "porch" in self.told[-1] else "ledger")
        return ChatResult(generations=[ChatGeneration(message=answer)])


def context_of(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


ask_agent = RunnableLambda(lambda values: {"messages": [("human", values["input"])]})
read_agent = RunnableLambda(lambda state: state["messages"][-1].text)


def a_chain(store: Any, model: Any) -> Any:
    retrieve = itemgetter("input") | store.as_retriever() | context_of
    return RunnablePassthrough.assign(context=retrieve) | (lambda values: values["context"]) | model | read_text


read_text = RunnableLambda(lambda message: message.text)


def an_agent_with_a_tool(store: Any, model: Any) -> Any:
    @tool
    def search(query: str) -> str:
        """Searches the notes."""
        return context_of(store.similarity_search(query, k=2))

    return ask_agent | create_agent(model, [search]) | read_agent


def an_agent_with_a_retriever_tool(store: Any, model: Any) -> Any:
    search = create_retriever_tool(store.as_retriever(), "search", "Searches the notes.")
    return ask_agent | create_agent(model, [search]) | read_agent


def an_agent_with_middleware(store: Any, model: Any) -> Any:
    @dynamic_prompt
    def with_notes(request: ModelRequest) -> str:
        return "Notes:\n" + context_of(store.similarity_search(request.state["messages"][-1].text))

    return ask_agent | create_agent(model, [], middleware=[with_notes]) | read_agent


class State(TypedDict, total=False):
    input: str
    context: list[Document]
    answer: str


def a_graph(store: Any, model: Any) -> Any:
    def retrieve(state: State) -> State:
        return {"context": store.similarity_search(state["input"])}

    def generate(state: State) -> State:
        return {"answer": model.invoke(context_of(state["context"])).text}

    graph = StateGraph(State).add_sequence([retrieve, generate]).add_edge(START, "retrieve")
    return graph.compile() | itemgetter("answer")


def an_async_graph(store: Any, model: Any) -> Any:
    async def retrieve(state: State) -> State:
        return {"context": await store.as_retriever(search_type="mmr").ainvoke(state["input"])}

    async def generate(state: State) -> State:
        return {"answer": (await model.ainvoke(context_of(state["context"]))).text}

    graph = StateGraph(State).add_sequence([retrieve, generate]).add_edge(START, "retrieve")
    return graph.compile() | itemgetter("answer")


def over(retriever_of: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def app(store: Any, model: Any) -> Any:
        return itemgetter("input") | retriever_of(store) | context_of | model | read_text

    return app


def many_queries(store: Any) -> Any:
    from langchain_classic.retrievers import MultiQueryRetriever

    return MultiQueryRetriever.from_llm(store.as_retriever(), FakeListChatModel(responses=["a\nb\nc"]))


def compressed(store: Any) -> Any:
    from langchain_classic.retrievers import ContextualCompressionRetriever
    from langchain_classic.retrievers.document_compressors import EmbeddingsFilter

    best = EmbeddingsFilter(embeddings=EMBEDDINGS, k=2)
    return ContextualCompressionRetriever(base_compressor=best, base_retriever=store.as_retriever())


def mixed(store: Any) -> Any:
    from langchain_classic.retrievers import EnsembleRetriever, MergerRetriever

    both = EnsembleRetriever(
        retrievers=[many_queries(store), store.as_retriever(search_type="mmr")], weights=[0.5, 0.5]
    )
    return MergerRetriever(retrievers=[both, compressed(store)])


class Own(BaseRetriever):
    """The user's own."""

    collection: VectorStore

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.collection.similarity_search(query, k=2)


def few_shots(store: Any, model: Any) -> Any:
    selector = SemanticSimilarityExampleSelector(vectorstore=store, k=2, input_keys=["input"], example_keys=["page"])
    return RunnableLambda(lambda values: selector.select_examples(values)) | str | model | read_text


APPS: dict[str, Callable[[Any, Any], Any]] = {
    "a chain": a_chain,
    "a tool": an_agent_with_a_tool,
    "a retriever's tool": an_agent_with_a_retriever_tool,
    "middleware": an_agent_with_middleware,
    "a graph": a_graph,
    "many queries": over(many_queries),
    "compression": over(compressed),
    "mixed": over(mixed),
    "the user's own": over(lambda store: Own(collection=store)),
}


@pytest.fixture
def release_of(budget_of: Any) -> Callable[..., Any]:
    def make(app: Any, store: ExemplarStore, **options: Any) -> Any:
        selector = PoissonExampleSelector(store, calls=PATIENTS, pad_to=10, rate=1.0, exemplars_per_owner=9)
        vote = NoisyVote(["porch", "ledger"], mechanism="vote")
        return PrivateEnsemble(selector, app, **options) | DPAggregate(vote, budget_of())

    return make


def owners_in(told: str) -> set[int]:
    return {int(found) for found in re.findall(r"note (\d+)\.", told)}


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "abatch"])
@pytest.mark.parametrize("name", APPS)
async def test_each_call_reads_its_own_owners_notes_alone(name: str, way: str, release_of: Any) -> None:
    store = ExemplarStore.from_documents(notes(), EMBEDDINGS, owner_key="patient")
    model = Scripted()
    release = release_of(APPS[name](store.as_vectorstore(), model), store)
    questions = [QUESTION, {"input": "and where?"}] if way == "abatch" else [QUESTION]
    if way == "abatch":
        assert await release.abatch(questions) == ["porch"] * 2
    else:
        assert (release.invoke(QUESTION) if way == "invoke" else await release.ainvoke(QUESTION)) == "porch"
    seen = [owners_in(told) for told in model.told if "note" in told]
    assert sorted(seen, key=min) == [{i} for i in range(PATIENTS) for _ in questions]


async def test_nodes_of_a_graph_that_await_search_the_same(release_of: Any) -> None:
    store = ExemplarStore.from_documents(notes(), EMBEDDINGS, owner_key="patient")
    model = Scripted()
    release = release_of(an_async_graph(store.as_vectorstore(), model), store)
    assert await release.ainvoke(QUESTION) == "porch"
    seen = [owners_in(told) for told in model.told if "note" in told]
    assert sorted(seen, key=min) == [{i} for i in range(PATIENTS)]


def test_a_selector_over_it_selects_of_the_bucket(release_of: Any) -> None:
    store = ExemplarStore.from_documents(notes(), EMBEDDINGS, owner_key="patient")
    model = Scripted()
    release_of(few_shots(store.as_vectorstore(), model), store).invoke(QUESTION)
    assert sum(told.count("page") == 2 for told in model.told) == PATIENTS


# -- parents -----------------------------------------------------------------------------------------------------------


class Halves:
    """Splits a text in two, as a text splitter does."""

    def split_documents(self, documents: Any) -> list[Document]:
        return [
            Document(half, metadata={**document.metadata, "start_index": i})
            for document in documents
            for i, half in enumerate(document.page_content.split(" of "))
        ]


async def test_parents_come_from_the_bucket_and_leave_with_their_owner(release_of: Any) -> None:
    from langchain_classic.retrievers import ParentDocumentRetriever
    from langchain_text_splitters import CharacterTextSplitter

    store = ExemplarStore.from_documents(split_with_parents(notes(), Halves()), EMBEDDINGS, owner_key="patient")
    assert len(store) == 2 * PATIENTS * NOTES
    heard: list[Any] = Ears()
    retriever = ParentDocumentRetriever(
        vectorstore=store.as_vectorstore(), docstore=store.as_docstore(), child_splitter=CharacterTextSplitter()
    )

    def keep(documents: list[Document]) -> str:
        heard.append(documents)
        return "porch"

    release = release_of(itemgetter("input") | retriever | keep, store)
    for answer in (release.invoke(QUESTION), await release.ainvoke(QUESTION)):
        assert answer == "porch"
    found = [documents for documents in heard if documents]
    assert len(found) == 2 * PATIENTS
    whole = {document.page_content: document.metadata["page"] for document in notes()}
    for documents in found:
        assert len(owners_in(context_of(documents))) == 1
        assert 2 <= len(documents) <= NOTES, "four chunks are of two documents at least"
        assert all(document.metadata == {"page": whole[document.page_content]} for document in documents)
    store.forget("patient-3")
    heard.clear()
    release.invoke(QUESTION)
    assert {3} not in [owners_in(context_of(documents)) for documents in heard]


async def test_parents_exist_within_a_member_alone_and_are_not_written() -> None:
    store = ExemplarStore.from_documents(split_with_parents(notes(), Halves()), EMBEDDINGS, owner_key="patient")
    docstore = store.as_docstore()
    with pytest.raises(UnsafeConfigurationError, match="within a release"):
        docstore.mget(["x"])
    with pytest.raises(UnsafeConfigurationError, match="within a release"):
        await docstore.amget(["x"])
    with pytest.raises(UnsafeConfigurationError, match="split_with_parents"):
        docstore.mset([("x", Document("y"))])
    with pytest.raises(InvalidParameter, match="doc_id"):
        split_with_parents([Document("x", metadata={"doc_id": "1"})], Halves())


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", APPS)
def test_the_same_app_over_a_real_collection_is_refused(name: str, release_of: Any) -> None:
    store = ExemplarStore.from_documents(notes(), EMBEDDINGS, owner_key="patient")
    real = InMemoryVectorStore.from_documents(notes(), EMBEDDINGS)
    with pytest.raises(UnsafeConfigurationError, match=r"store.as_vectorstore\(\)"):
        release_of(APPS[name](real, Scripted()), store)


def test_rankings_and_memories_beside_the_store_are_refused_with_what_to_use(release_of: Any) -> None:
    from langchain_classic.retrievers import TimeWeightedVectorStoreRetriever
    from langchain_community.retrievers import BM25Retriever, TFIDFRetriever

    store = ExemplarStore.from_documents(notes(), EMBEDDINGS, owner_key="patient")
    retrievers: dict[str, Any] = {
        "BM25Retriever.*words of all documents": BM25Retriever.model_construct(vectorizer=None, docs=notes(), k=4),
        "TFIDFRetriever.*words of all documents": TFIDFRetriever.from_documents(notes()),
        "TimeWeighted.*keeps a memory": TimeWeightedVectorStoreRetriever(vectorstore=store.as_vectorstore()),
    }
    for match, retriever in retrievers.items():
        with pytest.raises(UnsafeConfigurationError, match=rf"(?s){match}.*store.as_vectorstore\(\).as_retriever\(\)"):
            release_of(itemgetter("input") | retriever | str, store)
