"""What a chain's own rewriting makes of a question, for the gate; a chat's history outside of the members."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest
from ears import Ears
from langchain_classic.chains import (
    ConversationalRetrievalChain,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.vectorstores import InMemoryVectorStore
from ways import WAYS, ask

from langchain_dpicl import (
    Condition,
    DPAggregate,
    InvalidParameter,
    ModelUnavailable,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
    wrap_rag,
)
from langchain_dpicl.release.ensemble import PrivateEnsemble as Ensemble

LABELS = ["porch", "ledger"]
REWRITTEN = "note 7"


class Scripted(BaseChatModel):
    """Rewrites to one question, and answers with the desk that its prompt names."""

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        text = "\n".join(str(message.content) for message in messages)
        said = REWRITTEN if "Rewrite" in text else "porch" if "porch" in text else "ledger"
        return ChatResult(generations=[ChatGeneration(message=AIMessage(said))])

    @property
    def _llm_type(self) -> str:
        return "scripted"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that queries were embedded for."""
    texts: list[str] = []

    class Kept(DeterministicFakeEmbedding):
        def embed_query(self, text: str) -> list[float]:
            texts.append(text)
            return super().embed_query(text)

    monkeypatch.setattr("test_history.DeterministicFakeEmbedding", Kept, raising=False)
    globals()["MODEL"] = Kept(size=8)
    return texts


def collection() -> InMemoryVectorStore:
    documents = [
        Document(f"note {i}", metadata={"patient": f"p{i}", "desk": "porch", "ward": str(i % 4)}) for i in range(60)
    ]
    return InMemoryVectorStore.from_documents(documents, globals()["MODEL"])


REWRITE = ChatPromptTemplate.from_messages(
    [("system", "Rewrite as one question."), MessagesPlaceholder("chat_history"), ("human", "{input}")]
)
ANSWER = ChatPromptTemplate.from_messages(
    [("system", "From:\n{context}"), MessagesPlaceholder("chat_history", optional=True), ("human", "{input}")]
)


def wrap(chain: Any, budget: Any, source: Any, **options: Any) -> Any:
    options = {"calls": 10, "rate": 1.0, "owner_key": "patient", "question_key": "input"} | options
    if "filter" in options or "visible_to" in options or getattr(source, "search_kwargs", {}).get("filter"):
        options.setdefault("eligible", 15)
    return wrap_rag(chain, source, NoisyVote(LABELS), budget, **options)


def conversation(source: Any) -> Any:
    """As LangChain's tutorial on chat history writes it."""
    aware = create_history_aware_retriever(Scripted(), source.as_retriever(), REWRITE)
    documents = create_stuff_documents_chain(
        Scripted(), ANSWER, document_prompt=ChatPromptTemplate.from_template("{page_content} at {desk}")
    )
    return create_retrieval_chain(aware, documents).pick("answer")


HISTORY = [HumanMessage("which desk has note 7?"), AIMessage("porch")]


@pytest.mark.parametrize("way", WAYS)
async def test_the_chains_own_rewriting_is_what_documents_are_near_to(
    way: str, searched: list[str], budget_of: Any
) -> None:
    source = collection()
    release = wrap(conversation(source), budget_of(), source, threshold=0.999)
    searched.clear()
    assert await ask(way, release, {"input": "and who is there?", "chat_history": HISTORY}) in LABELS
    assert searched[0] == REWRITTEN
    searched.clear()
    assert await ask(way, release, {"input": "note 3", "chat_history": []}) in LABELS
    assert searched[0] == "note 3", "without a history nothing is rewritten"
    assert release.budget.spent() == 2


async def test_a_history_outside_of_the_release_is_part_of_the_request(searched: list[str], budget_of: Any) -> None:
    source, kept = collection(), InMemoryChatMessageHistory()
    release = wrap(conversation(source), budget_of(), source)
    chat = RunnableWithMessageHistory(
        release, lambda session_id: kept, input_messages_key="input", history_messages_key="chat_history"
    )
    config: Any = {"configurable": {"session_id": "one"}}
    searched.clear()
    assert chat.invoke({"input": "which desk has note 5?"}, config) in LABELS
    assert await chat.ainvoke({"input": "and who is there?"}, config) in LABELS
    assert searched[0] == "which desk has note 5?"
    assert REWRITTEN in searched
    assert [type(message) for message in kept.messages] == [HumanMessage, AIMessage] * 2
    assert all(message.content in LABELS for message in kept.messages[1::2]), "it keeps released answers alone"
    assert release.budget.spent() == 2


def test_another_history_is_another_question_and_the_same_is_replayed(searched: list[str], budget_of: Any) -> None:
    source = collection()
    release = wrap(conversation(source), budget_of(replay=True), source, return_receipt=True)
    asked = [[], HISTORY, HISTORY[:1], HISTORY, []]
    numbers = [release.invoke({"input": "q", "chat_history": each})["receipt"]["number"] for each in asked]
    assert numbers == [1, 2, 3, 2, 1]


def test_a_model_before_the_retriever_is_found_and_where_it_is_not_it_is_asked_for(
    searched: list[str], budget_of: Any
) -> None:
    source = collection()
    rewriting = REWRITE | Scripted() | StrOutputParser()
    show = RunnableLambda(lambda documents: documents[0].metadata["desk"] if documents else "ledger")
    release = wrap(rewriting | source.as_retriever() | show, budget_of(), source)
    searched.clear()
    release.invoke({"input": "what?", "chat_history": HISTORY})
    assert searched[0] == REWRITTEN

    two = {"a": rewriting | source.as_retriever(), "b": rewriting | source.as_retriever()} | RunnableLambda(str)
    with pytest.raises(InvalidParameter, match="search_query=None"):
        wrap(two, budget_of(), source)
    release = wrap(two, budget_of(), source, search_query=itemgetter("about"))
    searched.clear()
    release.invoke({"input": "what?", "chat_history": HISTORY, "about": "note 9"})
    assert searched[0] == "note 9"


def test_a_conversational_chain_needs_to_be_told(searched: list[str], budget_of: Any) -> None:
    source = collection()
    chain = ConversationalRetrievalChain.from_llm(Scripted(), source.as_retriever())
    with pytest.raises(InvalidParameter, match="search_query=None"):
        wrap(chain.pick("answer"), budget_of(), source, question_key="question")
    told = wrap(chain.pick("answer"), budget_of(), source, question_key="question", search_query=itemgetter("question"))
    assert told.invoke({"question": "note 3", "chat_history": []}) in LABELS


# -- search_query of a selector ----------------------------------------------------------------------------------------


def sealed(store: Any, budget: Any, search_query: Any, seen: Any = None) -> Any:
    selector = PoissonExampleSelector(
        store, 3, rate=1.0, max_exemplars=1, nearest_to="input", search_query=search_query
    )
    member = lambda values: seen.append(len(values["examples"])) or "a"  # noqa: E731
    return PrivateEnsemble(selector, member) | DPAggregate(NoisyVote(["a", "b"]), budget)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "fails",
    [
        lambda values: 1 / 0,
        lambda values: values["missing"],
        lambda values: "",
        lambda values: None,
        lambda values: ["text"],
        RunnableLambda(lambda values: {"text": "q"}),
    ],
)
async def test_a_search_query_that_fails_costs_nothing(
    way: str, fails: Any, store_of: Any, records: Any, budget_of: Any
) -> None:
    release = sealed(store_of(records(12)), budget_of(), fails, Ears())
    with pytest.raises(ModelUnavailable, match="nothing was charged"):
        await ask(way, release, {"input": "q"})
    assert release.budget.spent() == 0
    assert not release.rehearse([{"input": "an open text", "output": "a"}], {"input": "q"}).passed


@pytest.mark.parametrize("way", WAYS)
async def test_a_search_query_is_asked_once_without_examples_before_the_charge(
    way: str, store_of: Any, records: Any, budget_of: Any
) -> None:
    asked: list[Any] = Ears()
    seen: list[int] = Ears()

    def about(values: Any) -> AIMessage:
        asked.append((values["topic"], list(values["examples"])))
        return AIMessage(values["topic"])

    release = sealed(store_of(records(90)), budget_of(), about, seen)  # no bucket is empty but for less than 1e-15
    assert await ask(way, release, {"topic": "text 3.0"}) == "a"
    assert asked == [("text 3.0", [])]
    assert isinstance(release.ensemble, Ensemble)
    assert seen == [1, 1, 1]
    shown = release.rehearse([{"input": "an open text", "output": "a"}], {"topic": "another"}).calls[0]
    assert (shown.name, shown.output) == ("the text to search for", "another")


@pytest.mark.parametrize(("search_query", "nearest_to"), [("text", "input"), (3, "input"), (str, None)])
def test_what_is_no_search_query_is_refused(search_query: Any, nearest_to: Any, store_of: Any, records: Any) -> None:
    with pytest.raises(InvalidParameter, match="search_query"):
        PoissonExampleSelector(
            store_of(records(12)), 3, rate=1.0, max_exemplars=1, nearest_to=nearest_to, search_query=search_query
        )


# -- filters of searches -----------------------------------------------------------------------------------------------


def test_the_sources_own_filter_and_rules_of_a_wrapped_chain_count(searched: list[str], budget_of: Any) -> None:
    source = collection()
    seen: list[str] = Ears()

    def desk(documents: list[Document]) -> str:
        seen.extend(document.metadata["ward"] for document in documents)
        return "porch"

    chain = itemgetter("input") | source.as_retriever() | RunnableLambda(desk)
    of_ward = source.as_retriever(search_kwargs={"filter": {"ward": {"$in": ["1", "2"]}}})
    options = {"threshold": None, "asks": "mapping"}
    wrap(chain, budget_of(), of_ward, **options).invoke({"input": "q"})
    assert set(seen) == {"1", "2"}
    assert len(seen) == 30
    seen.clear()
    rules = {"filter": lambda values: {"ward": Condition({"$ne": values["other"]})}, **options}
    wrap(chain, budget_of(), of_ward, **rules).invoke({"input": "q", "other": "1"})
    assert set(seen) == {"2"}
