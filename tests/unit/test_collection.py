"""`release_collection`: answers of any release to public topics, charged once each and searched for ever.

The stores are real, the models scripted. At epsilon 1000 the noise decides nothing (`conftest.budget_of`).
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListLLM
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import BaseModel
from test_wrap_rag_shapes import Scripted, a_collection

from langchain_dpicl import (
    CandidateVote,
    DPAggregate,
    EmbeddingMean,
    ExemplarStore,
    InvalidParameter,
    Keywords,
    ModelUnavailable,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivacyBudgetExceeded,
    PrivacyWarning,
    PrivateEnsemble,
    Structured,
    acting_for,
    keywords_to_answer,
    release_collection,
    wrap_rag,
)
from langchain_dpicl.decoding.synthesis import Made

pytestmark = pytest.mark.filterwarnings("ignore:the budget .* is used with data on which other budgets")

EMBEDDINGS = DeterministicFakeEmbedding(size=8)
TOPICS = ["When do I take the drops?", "Who renews a prescription?", "Is the porch open?"]
OWNERS = 80


class Facts(BaseModel):
    desk: Literal["porch", "ledger"]


class Model:
    """Says "porch" of what it reads, and "nothing" of a ``silent`` topic; ``meet`` sees each prompt."""

    def __init__(self) -> None:
        self.silent = "no topic"
        self.meet: Callable[[str], None] = lambda prompt: None

    def __call__(self, prompt: Any) -> str:
        text = prompt.to_string()
        self.meet(text)
        return "nothing" if self.silent in text else "porch"


@pytest.fixture
def store(canary: str) -> ExemplarStore:
    texts = [f"note {i} of the porch {canary}" for i in range(OWNERS)]
    return ExemplarStore.from_texts(texts, EMBEDDINGS, progress=False)


Make = Callable[..., Any]


@pytest.fixture
def faq(store: ExemplarStore, budget_of: Any) -> Make:
    """faq(aggregator, model): an ordinary chain over the store, wrapped, with four members that share all owners."""

    def make(aggregator: Any = None, model: Any = None, budget: PrivacyBudget | None = None, **options: Any) -> Any:
        found = store.as_vectorstore().as_retriever() | (lambda documents: "\n".join(d.page_content for d in documents))
        chain: Runnable[Any, Any] = {
            "context": found,
            "question": RunnablePassthrough(),
        } | ChatPromptTemplate.from_template("{context}\n{question}")
        model = RunnableLambda(Model() if model is None else model)
        return wrap_rag(
            chain | model | StrOutputParser(),
            store,
            NoisyVote(["porch", "ledger"]) if aggregator is None else aggregator,
            budget_of(replay=True) if budget is None else budget,
            members=4,
            rate=1.0,
            threshold=None,
            share=[model.func],
            **options,
        )

    return make


def passages(collection: Any) -> dict[str, str]:
    """By topic."""
    found = {}
    for document in collection.similarity_search("anything", k=100):
        topic, _, passage = document.page_content.partition("\n")
        assert topic == document.metadata["topic"]
        found[topic] = passage
    return found


# -- what it makes -----------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "a vote": (lambda: NoisyVote(["porch", "ledger"]), "porch"),
    "sentences": (lambda: CandidateVote(EMBEDDINGS, ["porch", "ledger"]), "porch"),
    "a mean": (lambda: EmbeddingMean(EMBEDDINGS, ["porch", "ledger"]), "porch"),
    "keywords": (lambda: Keywords.joint_em(domain=["porch", "ledger"], k=2), "porch, ledger"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_release_answers_each_topic_once_and_is_searched_for_ever(kind: str, faq: Make, canary: str) -> None:
    aggregator, said = KINDS[kind]
    release = faq(aggregator())
    collection = release_collection(release, TOPICS)
    assert passages(collection) == dict.fromkeys(TOPICS, said)
    for topic in TOPICS:
        (found,) = collection.as_retriever(search_kwargs={"k": 1}).invoke(topic)
        assert found.metadata["topic"] == topic
        assert found.metadata["receipt"]["outcome"] == "released"
        assert canary not in str(found)
    assert release.budget.spent() == len(TOPICS)


def test_a_model_comes_as_json_and_scores_in_words(store: ExemplarStore, faq: Make, budget_of: Any) -> None:
    selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=OWNERS)
    ensemble = PrivateEnsemble(selector, RunnableLambda(lambda values: json.dumps({"desk": "porch"})))
    facts = ensemble | DPAggregate(Structured(Facts), budget_of())
    assert passages(release_collection(facts, ["desk"])) == {"desk": '{"desk":"porch"}'}
    scores = release_collection(faq(NoisyVote(["porch", "ledger"], scores=True)), ["desk"])
    assert passages(scores)["desk"].startswith("porch: 4")


def test_an_agent_is_asked_by_messages(budget_of: Any) -> None:
    notes = a_collection()
    agent = create_agent(Scripted(), [create_retriever_tool(notes.as_retriever(), "search", "Searches the notes.")])
    release = wrap_rag(
        agent,
        notes,
        NoisyVote(["porch", "ledger"]),
        budget_of(),
        calls=20,
        rate=1.0,
        threshold=None,
        owner_key="patient",
    )
    assert release.asks == "messages"
    assert passages(release_collection(release, TOPICS[:1])) == {TOPICS[0]: "porch"}


def test_keywords_become_a_passage_by_a_public_model(faq: Make) -> None:
    keywords = faq(Keywords.joint_em(domain=["porch", "ledger"], k=2))
    write = keywords_to_answer(FakeListLLM(responses=["At the porch."]), "{question}{suggestions}")
    collection = release_collection(keywords.with_receipt() | write, TOPICS[:2])
    assert passages(collection) == dict.fromkeys(TOPICS[:2], "At the porch.")
    (found,) = collection.similarity_search("x", k=1)
    assert found.metadata["receipt"]["outcome"] == "released"
    bare = release_collection(keywords | write, TOPICS[:1])
    assert "id" not in bare.similarity_search("x", k=1)[0].metadata["receipt"]
    assert keywords.budget.spent() == 2, "replayed"


def test_a_chain_that_fails_after_its_release_pays_once(faq: Make) -> None:
    keywords = faq(Keywords.joint_em(domain=["porch", "ledger"], k=2))

    def broken(released: Any) -> str:
        raise ValueError("broken")

    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            release_collection(keywords | broken, TOPICS)
        assert keywords.budget.spent() == 1
    assert passages(release_collection(keywords, TOPICS[:1])) == {TOPICS[0]: "porch, ledger"}
    assert keywords.budget.spent() == 1


def test_a_chain_without_receipts_is_refused_if_a_spent_budget_answers_in_public(faq: Make, budget_of: Any) -> None:
    """Nothing would tell its public answers from released ones."""
    release = faq(budget=budget_of(on_exhausted="zero_shot"), return_receipt=True)
    with pytest.raises(InvalidParameter, match="receipt"):
        release_collection(release | (lambda answer: answer["answer"]), TOPICS)
    assert release.budget.spent() == 0


def test_a_question_finds_the_nearest_topic_whatever_the_answers_say(faq: Make) -> None:
    collection = release_collection(faq(), TOPICS, embeddings=EMBEDDINGS)
    for topic in TOPICS:
        ((found, score),) = collection.similarity_search_with_score(topic, k=1)
        assert found.metadata["topic"] == topic
        assert score == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["memory", "chroma"])
def test_a_store_of_the_callers_gets_the_documents_once(kind: str, faq: Make, tmp_path: Path) -> None:
    into: Any = InMemoryVectorStore(EMBEDDINGS)
    if kind == "chroma":
        chroma = pytest.importorskip("langchain_chroma")
        into = chroma.Chroma(embedding_function=EMBEDDINGS, persist_directory=str(tmp_path / "chroma"))
    release = faq()
    for _ in range(2):
        assert release_collection(release, TOPICS, into=into) is into
    found = into.similarity_search("x", k=9)
    assert len(found) == len(TOPICS)
    assert json.loads(found[0].metadata["receipt"])["outcome"] == "released"
    assert release.budget.spent() == len(TOPICS)


# -- interrupted jobs --------------------------------------------------------------------------------------------------


def test_the_same_call_pays_for_nothing_twice_and_more_topics_for_themselves(
    faq: Make, budget_of: Any, tmp_path: Path
) -> None:
    file = tmp_path / "faq.jsonl"
    release = faq(budget=budget_of(replay=False))
    made: list[Made] = []
    release_collection(release, TOPICS[:2], output=file, progress=made.append)
    assert [(each.pair["passage"], each.done, each.total) for each in made] == [("porch", 1, 2), ("porch", 2, 2)]
    release_collection(release, TOPICS[:2], output=file, progress=made.append)
    assert release.budget.spent() == len(made) == 2
    assert set(passages(release_collection(release, TOPICS, output=file))) == set(TOPICS)
    assert release.budget.spent() == 3
    assert len(file.read_text().splitlines()) == 3


def test_a_file_is_of_one_release_and_one_caller(faq: Make, budget_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "faq.jsonl"
    budget = budget_of(scope="per_principal")
    release = faq(budget=budget)
    with acting_for("ann"):
        release_collection(release, TOPICS[:1], output=file)
    others = [("bob", release), ("ann", faq(NoisyVote(["porch", "desk"]), budget=budget)), ("ann", faq())]
    before = file.read_bytes()
    for who, other in others:
        with acting_for(who), pytest.raises(InvalidParameter, match="output"):
            release_collection(other, TOPICS[:1], output=file)
    assert file.read_bytes() == before
    assert [budget.spent(principal=who) for who in ("ann", "bob")] == [1, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_job_goes_on_and_loses_one_charge(faq: Make, ledger_url: str, canary: str, tmp_path: Path) -> None:
    """The child is killed while its third topic is answered: two answers are in the file, three in the ledger."""
    file = tmp_path / "faq.jsonl"

    def budget() -> PrivacyBudget:
        return PrivacyBudget(1000.0, 1e-5, 10, ledger_url, name="faq", replay_patience=0.05)

    child = os.fork()
    if child == 0:
        try:
            model = Model()
            model.meet = lambda prompt: os.kill(os.getpid(), signal.SIGKILL) if TOPICS[2] in prompt else None
            release_collection(faq(model=model, budget=budget()), TOPICS, output=file)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [json.loads(line)["topic"] for line in file.read_text().splitlines()] == TOPICS[:2]
    release = faq(budget=budget())
    release.line()
    assert release.budget.spent() == 3
    assert passages(release_collection(release, TOPICS, output=file)) == dict.fromkeys(TOPICS, "porch")
    assert release.budget.spent() == 4
    assert canary not in file.read_text()
    file.unlink()  # a file that is lost: the ledger replays what it has recorded
    release_collection(release, TOPICS, output=file)
    assert release.budget.spent() == 4
    release.budget.close()


# -- topics without an answer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_exhausted", ["raise", "zero_shot"])
def test_a_spent_budget_leaves_topics_without_an_answer_and_loses_none(
    on_exhausted: Any, faq: Make, budget_of: Any
) -> None:
    budget = budget_of(releases=2, replay=True, on_exhausted=on_exhausted)
    release = faq(budget=budget, return_receipt=on_exhausted == "zero_shot")
    with pytest.warns(PrivacyWarning, match="spent: 1 of 3 topics"):
        assert set(passages(release_collection(release, TOPICS))) == set(TOPICS[:2])
    assert budget.spent() == 2
    with pytest.raises(PrivacyBudgetExceeded):
        release_collection(release, TOPICS[2:])


def test_what_members_abstain_on_is_charged_and_told_and_not_asked_again(faq: Make, tmp_path: Path) -> None:
    file = tmp_path / "faq.jsonl"
    model = Model()
    model.silent = TOPICS[1]
    release = faq(model=model)
    for _ in range(2):
        with pytest.warns(PrivacyWarning, match="on 1 of 3 topics, which were charged"):
            assert set(passages(release_collection(release, TOPICS, output=file))) == {TOPICS[0], TOPICS[2]}
        assert release.budget.spent() == 3
    line = json.loads(file.read_text().splitlines()[1])
    assert (line["topic"], line["passage"]) == (TOPICS[1], None)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "topics", [[], "one topic", ["a", ""], ["a", 3], ["a", "a"], ["A café", "a cafe"], ["When?", "when"], ["\ud800"]]
)
def test_topics_that_are_no_distinct_texts_cost_nothing(topics: Any, faq: Make) -> None:
    release = faq()
    with pytest.raises(InvalidParameter, match="topics"):
        release_collection(release, topics)
    assert release.budget.plan is None


def test_what_is_no_single_release_costs_nothing(faq: Make, store: ExemplarStore) -> None:
    release = faq()
    selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=OWNERS)
    ensemble: Any = PrivateEnsemble(selector, RunnableLambda(lambda values: "porch"))
    two: Any = RunnableLambda(lambda values: values) | {"one": release, "other": faq()}
    other: list[Any] = [ensemble, two, RunnableLambda(str), store, "release", None]
    for wrong in other:
        with pytest.raises(InvalidParameter, match="release"):
            release_collection(wrong, TOPICS)
    assert release.budget.plan is None


def test_a_release_that_needs_more_than_a_topic_costs_nothing(store: ExemplarStore, budget_of: Any) -> None:
    prompt = ChatPromptTemplate.from_template("{examples}{input}{desk}")
    selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=OWNERS)
    release = PrivateEnsemble(selector, prompt | RunnableLambda(Model())) | DPAggregate(
        NoisyVote(["porch", "ledger"]), budget_of()
    )
    with pytest.raises(InvalidParameter, match="desk"):
        release_collection(release, TOPICS)
    assert release.budget.spent() == 0


def test_embeddings_and_stores_are_tried_before_the_charge(faq: Make) -> None:
    class Broken(DeterministicFakeEmbedding):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            raise ValueError("broken")

    release = faq()
    wrong: Any = "MiniLM"
    for options in (
        {"embeddings": wrong},
        {"into": wrong},
        {"into": InMemoryVectorStore(EMBEDDINGS), "embeddings": EMBEDDINGS},
    ):
        with pytest.raises(InvalidParameter, match=r"embeddings|into"):
            release_collection(release, TOPICS, **options)
    for options in ({"embeddings": Broken(size=4)}, {"into": InMemoryVectorStore(Broken(size=4))}):
        with pytest.raises(ModelUnavailable, match="nothing was charged"):
            release_collection(release, TOPICS, **options)
    assert release.budget.plan is None
