"""A private release behind a head: paid exactly if the head is unsure, whichever way it is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import Runnable, RunnableLambda

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    PrivateHead,
)
from langchain_dpicl.errors import InvalidParameter, PrivacyBudgetExceeded, UnsafeConfigurationError
from langchain_dpicl.once.steps import FeatureMap
from langchain_dpicl.private.reach import reachable

LABELS = ["red", "green"]
EMBEDDINGS = DeterministicFakeEmbedding(size=6)
QUESTIONS = [f"question {i}" for i in range(12)]


@pytest.fixture
def head() -> PrivateHead:
    """Its confidence in the questions is between .5 and .9, and differs."""
    weights = np.zeros((2, 7))
    weights[0, 0] = 4.0
    receipt: Any = {"id": "desks:head:1", "mechanism": "head", "epsilon_spent": 1.0}
    return PrivateHead(weights, LABELS, FeatureMap(6), EMBEDDINGS, receipt, embedder="fake")


@pytest.fixture
def release(tmp_path: Path) -> Runnable[Any, Any]:
    records = [{"input": f"text {i}", "output": LABELS[i % 2]} for i in range(200)]
    store = ExemplarStore.from_records(records, EMBEDDINGS, input_key="input", output_key="output", progress=False)
    budget = PrivacyBudget(8.0, 1e-5, {"vote": 4}, ledger=f"sqlite:///{tmp_path}/ledger.db", replay=False)
    ensemble = PrivateEnsemble(PoissonExampleSelector(store, 5), RunnableLambda(lambda values: "red"))
    return ensemble | DPAggregate(NoisyVote(LABELS), budget)


def test_a_question_is_paid_exactly_if_the_head_is_unsure(head: PrivateHead, release: Any) -> None:
    confidences = sorted(each["confidence"] for each in head.batch(QUESTIONS))
    below = (confidences[3] + confidences[4]) / 2  # four are below
    both = head.with_private_fallback(release, below)
    answers = both.batch([{"input": text} for text in QUESTIONS], {"max_concurrency": 1})
    assert release.budget.spent() == 4
    for text, answer, own in zip(QUESTIONS, answers, head.batch(QUESTIONS), strict=True):
        assert answer["answer"] in LABELS, text
        path = "release" if own["confidence"] < below else "head"
        assert answer["receipt"]["path"] == path
        assert answer["receipt"]["id"].startswith("desks:head" if path == "head" else "default:vote"), answer["receipt"]
        assert path == "release" or answer["answer"] == own["label"]
    with pytest.raises(PrivacyBudgetExceeded):
        both.batch([{"input": text} for text in QUESTIONS])


def test_a_head_that_is_as_sure_as_asked_pays_nothing(head: PrivateHead, release: Any) -> None:
    least = min(answer["confidence"] for answer in head.batch(QUESTIONS))
    answers = head.with_private_fallback(release, least).batch(QUESTIONS)
    assert {answer["receipt"]["path"] for answer in answers} == {"head"}
    assert release.budget.spent() == 0


def test_asynchronous_answers_take_the_same_paths(head: PrivateHead, release: Any) -> None:
    both = head.with_private_fallback(release, 1.0)
    answer = asyncio.run(both.ainvoke({"input": QUESTIONS[0]}))
    assert (answer["receipt"]["path"], answer["receipt"]["number"]) == ("release", 1)
    easy = asyncio.run(head.with_private_fallback(release, 0.01).ainvoke(QUESTIONS[0]))
    assert easy == {"answer": head.invoke(QUESTIONS[0])["label"], "receipt": {**head.receipt, "path": "head"}}
    assert release.budget.spent() == 1


def test_a_fallback_of_the_pair_does_not_hide_a_spent_budget(head: PrivateHead, release: Any) -> None:
    both = head.with_private_fallback(release, 1.0)
    with pytest.raises(UnsafeConfigurationError, match="PrivacyBudgetExceeded"):
        both.with_fallbacks([RunnableLambda(str)], exceptions_to_handle=(Exception,))
    safe = both.with_fallbacks([RunnableLambda(str)])
    for text in QUESTIONS[:4]:
        safe.invoke({"input": text})
    with pytest.raises(PrivacyBudgetExceeded):
        safe.invoke({"input": QUESTIONS[5]})


@pytest.mark.parametrize("below", [0.0, -1, 1.01, float("nan"), "half", True])
def test_a_bound_that_is_no_probability_is_refused(below: Any, head: PrivateHead, release: Any) -> None:
    with pytest.raises(InvalidParameter, match="below"):
        head.with_private_fallback(release, below)


def test_what_is_no_release_is_refused(head: PrivateHead) -> None:
    for other in (RunnableLambda(str), "release", None):
        with pytest.raises(InvalidParameter, match="release"):
            head.with_private_fallback(other)  # type: ignore[arg-type]


def test_the_release_is_found_within_the_pair(head: PrivateHead, release: Any) -> None:
    assert any(type(each) is type(release) for each in reachable(head.with_private_fallback(release)))
