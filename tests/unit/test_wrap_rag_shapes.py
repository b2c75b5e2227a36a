"""`wrap_rag` on apps of every shape, written over their own collection: each copy searches one owner's documents."""

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
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.structured_query import Comparator, Comparison, StructuredQuery
from langchain_core.tools import create_retriever_tool, tool
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.graph import START, StateGraph
from pydantic import Field
from ways import WAYS, ask

from langchain_dpicl import InvalidParameter, NoisyVote, UnsafeConfigurationError, wrap_rag

EMBEDDINGS = DeterministicFakeEmbedding(size=8)
PATIENTS, NOTES = 24, 3
QUESTION = "which desk renews it?"


def a_collection(canary: str = "") -> InMemoryVectorStore:
    return InMemoryVectorStore.from_documents(
        [
            Document(f"note {i}.{j} of the porch {canary}", metadata={"patient": f"p{i}", "page": j})
            for i in range(PATIENTS)
            for j in range(NOTES)
        ],
        EMBEDDINGS,
    )


class Scripted(BaseChatModel):
    """Searches by its tool, if it has one and has not yet; then names the desk of the notes. Keeps what it was told."""

    told: Any = Field(default_factory=Ears, exclude=True)
    tools: Any = ()

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.model_copy(update={"tools": tools})

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        if self.tools and not isinstance(messages[-1], ToolMessage):
            answer = AIMessage("", tool_calls=[{"name": "search", "args": {"query": "renewals"}, "id": "1"}])
        else:
            text = "\n".join(str(message.content) for message in messages)
            self.told.append(text)
            answer = AIMessage("porch" if "porch" in text else "ledger")
        return ChatResult(generations=[ChatGeneration(message=answer)])


def context_of(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


PROMPT = ChatPromptTemplate.from_template("{context}\n\n{question}")
read_text = RunnableLambda(lambda message: message.text)
ask_agent = RunnableLambda(lambda values: {"messages": [("human", values["question"])]})
read_agent = RunnableLambda(lambda state: state["messages"][-1].text)


def over(retriever_of: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def app(collection: Any, model: Any) -> Any:
        retrieve = itemgetter("question") | retriever_of(collection) | context_of
        return RunnablePassthrough.assign(context=retrieve) | PROMPT | model | read_text

    return app


def with_sources(collection: Any, model: Any) -> Any:
    found = RunnablePassthrough.assign(context=itemgetter("question") | collection.as_retriever())
    answer = RunnablePassthrough.assign(context=lambda values: context_of(values["context"])) | PROMPT | model
    return found.assign(answer=answer | read_text).pick("answer")


def a_retrieval_chain(collection: Any, model: Any) -> Any:
    from langchain_classic.chains import create_retrieval_chain
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain

    prompt = ChatPromptTemplate.from_template("{context}\n\n{input}")
    chain = create_retrieval_chain(collection.as_retriever(), create_stuff_documents_chain(model, prompt))
    return RunnableLambda(lambda values: {"input": values["question"]}) | chain.pick("answer")


def history_aware(collection: Any, model: Any) -> Any:
    from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain

    rewrite = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{input}")])
    aware = create_history_aware_retriever(
        FakeListChatModel(responses=["a question"]), collection.as_retriever(), rewrite
    )
    prompt = ChatPromptTemplate.from_template("{context}\n\n{input}")
    return create_retrieval_chain(aware, create_stuff_documents_chain(model, prompt)).pick("answer")


def an_agent_with_a_tool(collection: Any, model: Any) -> Any:
    @tool
    def search(query: str) -> str:
        """Searches the notes."""
        return context_of(collection.similarity_search(query, k=2))

    return ask_agent | create_agent(model, [search]) | read_agent


def an_agent_with_a_retriever_tool(collection: Any, model: Any) -> Any:
    search = create_retriever_tool(collection.as_retriever(), "search", "Searches the notes.")
    return ask_agent | create_agent(model, [search]) | read_agent


def an_agent_with_middleware(collection: Any, model: Any) -> Any:
    @dynamic_prompt
    def with_notes(request: ModelRequest) -> str:
        return context_of(collection.similarity_search(request.state["messages"][-1].text))

    return ask_agent | create_agent(model, [], middleware=[with_notes]) | read_agent


class Stage(TypedDict, total=False):
    question: str
    context: Any
    answer: str


def a_graph(collection: Any, model: Any) -> Any:
    def retrieve(state: Stage) -> Stage:
        return {"context": collection.similarity_search(state["question"])}

    def generate(state: Stage) -> Stage:
        return {"answer": model.invoke(context_of(state["context"])).text}

    graph = StateGraph(Stage).add_sequence([retrieve, generate]).add_edge(START, "retrieve")
    return graph.compile() | itemgetter("answer")


def graphs_within_graphs(collection: Any, model: Any) -> Any:
    """An agent in a graph in a node of a graph, with an agent in its tool."""
    inner = an_agent_with_a_tool(collection, model)

    @tool
    def search(query: str) -> str:
        """Asks another agent."""
        return str(inner.invoke({"question": query}))

    outer = ask_agent | create_agent(model, [search]) | read_agent
    graph = StateGraph(Stage).add_node("ask", lambda state: {"answer": outer.invoke(state)}).add_edge(START, "ask")
    return StateGraph(Stage).add_node("graph", graph.compile()).add_edge(START, "graph").compile().pick("answer")


def many_queries(collection: Any) -> Any:
    from langchain_classic.retrievers import MultiQueryRetriever

    return MultiQueryRetriever.from_llm(collection.as_retriever(), FakeListChatModel(responses=["a\nb\nc"]))


def compressed(collection: Any) -> Any:
    from langchain_classic.retrievers import ContextualCompressionRetriever
    from langchain_classic.retrievers.document_compressors import EmbeddingsFilter

    best = EmbeddingsFilter(embeddings=EMBEDDINGS, k=2)
    return ContextualCompressionRetriever(base_compressor=best, base_retriever=collection.as_retriever())


def asked_by_itself(collection: Any, translator: Any = None) -> Any:
    from langchain_classic.retrievers.self_query.base import SelfQueryRetriever
    from langchain_community.query_constructors.chroma import ChromaTranslator

    page = Comparison(comparator=Comparator.EQ, attribute="page", value=1)
    constructor = RunnableLambda(lambda values: StructuredQuery(query="desk", filter=page))
    translator = ChromaTranslator() if translator is None else translator
    return SelfQueryRetriever(
        vectorstore=collection, query_constructor=constructor, structured_query_translator=translator
    )


def an_ensemble(collection: Any) -> Any:
    from langchain_classic.retrievers import EnsembleRetriever

    mmr = collection.as_retriever(search_type="mmr", search_kwargs={"k": 1})
    return EnsembleRetriever(retrievers=[asked_by_itself(collection), mmr], weights=[0.5, 0.5])


def at_least(score: float) -> Callable[[Any], Any]:
    settings = {"score_threshold": score, "k": 4}
    return lambda collection: collection.as_retriever(search_type="similarity_score_threshold", search_kwargs=settings)


APPS: dict[str, Callable[[Any, Any], Any]] = {
    "a chain": over(lambda collection: collection.as_retriever()),
    "sources": with_sources,
    "mmr": over(lambda collection: collection.as_retriever(search_type="mmr", search_kwargs={"k": 2})),
    "a score threshold": over(at_least(0.0)),
    "many queries": over(many_queries),
    "compression": over(compressed),
    "a retrieval chain": a_retrieval_chain,
    "a tool": an_agent_with_a_tool,
    "a retriever's tool": an_agent_with_a_retriever_tool,
    "middleware": an_agent_with_middleware,
    "a graph": a_graph,
    "graphs within graphs": graphs_within_graphs,
    "an ensemble": over(an_ensemble),
}
MOST = {"mmr": 2, "compression": 2, "a tool": 2, "an ensemble": 2}


@pytest.fixture
def wrap(budget_of: Any) -> Callable[..., Any]:
    def make(app: Any, collection: Any, **options: Any) -> Any:
        options = {"calls": 20, "rate": 1.0, "pad_to": PATIENTS, "threshold": None, "asks": "mapping"} | options
        vote = NoisyVote(["porch", "ledger"])
        return wrap_rag(app, collection, vote, budget_of(), owner_key="patient", **options)

    return make


def owners_in(told: str) -> set[str]:
    return set(re.findall(r"note (\d+)\.", told))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", APPS)
async def test_each_copy_reads_one_owners_notes_and_the_app_stays_as_it_was(name: str, way: str, wrap: Any) -> None:
    collection, model = a_collection(), Scripted()
    app = APPS[name](collection, model)
    release = wrap(app, collection)
    assert await ask(way, release, {"question": QUESTION}) == "porch"
    seen = [owners_in(told) for told in model.told if owners_in(told)]
    assert sorted(map(len, seen)) == [1] * PATIENTS, "rate 1: every owner has a copy"
    assert len(set().union(*seen)) == PATIENTS
    for told in model.told:
        assert len(set(re.findall(r"note \d+\.\d", told))) <= MOST.get(name, NOTES)
    model.told.clear()
    if name in ("a score threshold", "an ensemble"):
        return  # the collection itself has neither relevance scores nor filters that are mappings; the stand-in has
    assert app.invoke({"question": QUESTION}) == "porch"
    assert len(set().union(*map(owners_in, model.told))) > 1, "the user's own app still searches the whole collection"


def test_a_score_threshold_leaves_documents_out_within_the_bucket(wrap: Any) -> None:
    collection, model = a_collection(), Scripted()
    wrap(over(at_least(0.99))(collection, model), collection).invoke({"question": QUESTION})
    assert model.told
    assert not any(map(owners_in, model.told)), "no fake vector is so near"


async def test_a_rewriting_before_the_retriever_is_the_gates_query_too(wrap: Any) -> None:
    collection, model = a_collection(), Scripted()
    release = wrap(history_aware(collection, model), collection, question_key="input")
    request = {"input": "and there?", "chat_history": [("human", "hello")]}
    assert release.invoke(request) == await release.ainvoke(request) == "porch"
    assert release.selector.search_query is not None
    assert {len(owners_in(told)) for told in model.told} <= {0, 1}


@pytest.mark.parametrize("name", APPS)
def test_a_source_that_the_app_does_not_search_is_refused(name: str, wrap: Any, canary: str) -> None:
    app = APPS[name](a_collection(canary), Scripted())
    with pytest.raises(UnsafeConfigurationError, match="InMemoryVectorStore") as caught:
        wrap(app, a_collection(canary))
    assert canary not in str(caught.value)


def test_what_a_bucket_cannot_be_searched_by_is_refused_with_what_helps(wrap: Any, canary: str, budget_of: Any) -> None:
    from langchain_classic.retrievers import TimeWeightedVectorStoreRetriever
    from langchain_community.retrievers import TFIDFRetriever

    collection = a_collection(canary)
    for retriever, said in (
        (TFIDFRetriever.from_documents([Document(canary)]), "words of all documents"),
        (TimeWeightedVectorStoreRetriever(vectorstore=collection), "keeps a memory"),
    ):
        with pytest.raises(UnsafeConfigurationError, match=said) as caught:
            wrap(over(lambda collection, retriever=retriever: retriever)(collection, Scripted()), collection)
        assert canary not in str(caught.value)
    from langchain_classic.retrievers import ParentDocumentRetriever
    from langchain_community.query_constructors.pgvector import PGVectorTranslator
    from langchain_text_splitters import CharacterTextSplitter

    parents = over(
        lambda collection: ParentDocumentRetriever(
            vectorstore=collection, docstore=InMemoryStore(), child_splitter=CharacterTextSplitter()
        )
    )
    with pytest.raises(UnsafeConfigurationError, match="split_with_parents"):
        wrap(parents(collection, Scripted()), collection)
    with pytest.raises(InvalidParameter, match="PGVectorTranslator"):  # each member would fail, and be charged
        wrap(
            over(lambda collection: asked_by_itself(collection, PGVectorTranslator()))(collection, Scripted()),
            collection,
        )
    unknown = over(lambda collection: collection.as_retriever(search_kwargs={"where": {"page": 1}}))
    with pytest.raises(InvalidParameter, match="where"):
        wrap(unknown(collection, Scripted()), collection)
