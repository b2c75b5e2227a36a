"""`wrap_rag` at its defaults with an ideal reader: how often its answers are right, at epsilon 3 and delta 1e-5.

200 patients, each with three notes on one of six topics, of which two give the topic's advice: one of two. The reader
is scripted, and repeats the commonest advice in its documents, so all calls of a question agree. Of the 33 owners of
its topic each has a call with the plan's probability q: the exact law of an answer follows.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from scipy.stats import binom

from langchain_dpicl import EmbeddingMean, NoisyVote, PrivacyBudget, SealedRelease, wrap_rag
from langchain_dpicl.errors import InfeasiblePlan
from langchain_dpicl.privacy.votes import VoteNoise

TOPICS = ("drops", "tablets", "plaster", "inhaler", "syrup", "ointment")
ADVICE = ("after dinner", "before sunrise")
OWNERS = 200


class Topics(Embeddings):
    """Texts on one topic point into one direction, and advice into others."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        vector = np.array([float(word in text) for word in (*TOPICS, *ADVICE)])
        return [float(number) for number in vector / max(1.0, float(np.linalg.norm(vector)))]


def right(topic: int) -> str:
    return ADVICE[topic % 2]


def reader(documents: list[Document]) -> str:
    said = Counter(re.findall("|".join(ADVICE), "\n".join(document.page_content for document in documents)))
    return max(said, key=lambda text: said[text], default="I do not know")


@pytest.fixture(scope="module")
def collection() -> InMemoryVectorStore:
    documents = []
    for owner in range(OWNERS):
        topic = owner % len(TOPICS)
        for page, other in enumerate((0, 1, 0)):
            text = f"note {owner}.{page}: the {TOPICS[topic]} {right(topic + other)}"
            documents.append(Document(text, metadata={"patient": str(owner)}))
    return InMemoryVectorStore.from_documents(documents, Topics())


AGGREGATORS = {
    "label": lambda: NoisyVote(ADVICE),
    "sentence": lambda: EmbeddingMean(Topics(), ADVICE),
}


@pytest.fixture
def wrapped(collection: InMemoryVectorStore, ledger_url: str) -> Any:
    def make(kind: str, releases: int, **more: Any) -> SealedRelease:
        budget = PrivacyBudget(3.0, 1e-5, releases, ledger_url, "rag", **more)
        chain = collection.as_retriever() | RunnableLambda(reader)
        return wrap_rag(chain, collection, AGGREGATORS[kind](), budget, owner_key="patient")

    return make


def chance(release: SealedRelease, owners: int = OWNERS // len(TOPICS)) -> float:
    """The exact probability that an answer is right, over sampling and noise."""
    line, calls = release.line(), np.arange(owners + 1)
    noise = VoteNoise("vote" if line.mechanism == "embedding" else line.mechanism, line.parameter, True)
    lost = [noise.flip(int(n), len(ADVICE)) for n in calls]
    return float((binom.pmf(calls, owners, line.rate) * (1.0 - np.array(lost))).sum())


def answered(release: SealedRelease) -> int:
    """How many of 18 questions, three on each topic, have the right answer."""
    questions = [(i, f"Question {n}: when do I use the {topic}?") for n in range(3) for i, topic in enumerate(TOPICS)]
    return sum(release.invoke(question) == right(i) for i, question in questions)


@pytest.mark.parametrize(("kind", "least"), [("label", 0.9997), ("sentence", 0.998)])
def test_twenty_answers_are_right(kind: str, least: float, wrapped: Any) -> None:
    """All 18 with probability .996 and .975 at least; 14 or fewer with less than 1e-7."""
    release = wrapped(kind, 20)
    assert chance(release) > least
    assert answered(release) > 14


@pytest.mark.parametrize(("kind", "least", "most_wrong"), [("label", 0.968, 7), ("sentence", 0.892, 11)])
def test_a_thousand_questions_are_answered_with_170_tickets(
    kind: str, least: float, most_wrong: int, wrapped: Any
) -> None:
    """16 of 18 or more on average; more wrong ones than allowed with probability below 1e-7."""
    release = wrapped(kind, 170, tickets=True)
    assert chance(release) > least > 16 / 18
    assert answered(release) >= 18 - most_wrong
    assert binom.sf(most_wrong, 18, 1.0 - least) < 1e-6


@pytest.mark.filterwarnings("ignore:noise takes about:langchain_dpicl.errors.PrivacyWarning")
@pytest.mark.parametrize("kind", AGGREGATORS)
def test_a_thousand_answers_without_tickets_are_refused(kind: str, wrapped: Any) -> None:
    release = wrapped(kind, 1000)
    with pytest.raises(InfeasiblePlan, match=r"tickets=True.*PrivateHead") as caught:
        release.invoke("when do I use the drops?")
    assert "nothing was frozen or charged" in str(caught.value)
    assert release.budget.spent() == 0
    assert not release.budget.is_frozen
