"""What an editor and mypy know of an answer's type: `make lint` reads this file, and nothing runs it."""

from __future__ import annotations

from datetime import date
from typing import Any, assert_type

from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable
from pydantic import BaseModel

from langchain_dpicl import (
    CandidateVote,
    DPAggregate,
    EmbeddingMean,
    Keywords,
    NoisyMean,
    NoisyMedian,
    NoisyVote,
    PrivacyBudget,
    PrivateEnsemble,
    Structured,
)
from langchain_dpicl.aggregators import ReleasedKeywords
from langchain_dpicl.aggregators.votes import VoteDetails
from langchain_dpicl.release.base import AnswerWithReceipt

LABELS = ["Positive", "Negative"]


class Visit(BaseModel):
    """A structured answer."""

    sick: bool


async def answers(ensemble: PrivateEnsemble, budget: PrivacyBudget, embeddings: Embeddings, chosen: bool) -> None:
    """Each aggregator's own type, through `|`, ``invoke``, ``ainvoke``, ``batch`` and receipts."""
    vote = ensemble | DPAggregate(NoisyVote(LABELS), budget)
    as_declared: Runnable[dict[str, Any], str] = vote
    assert_type(vote.invoke({}), str)
    assert_type(await vote.ainvoke({}), str)
    assert_type(vote.batch([{}]), list[str])
    assert_type(as_declared.invoke({}), str)
    assert_type(vote.with_receipt().invoke({}), AnswerWithReceipt[str])
    told = ensemble | DPAggregate(NoisyVote(LABELS), budget, return_receipt=True)
    assert_type(told.invoke({})["answer"], str)
    assert_type((ensemble | DPAggregate(NoisyVote(LABELS, scores=True), budget)).invoke({}), dict[str, int])
    assert_type((ensemble | DPAggregate(NoisyVote(LABELS, details=True), budget)).invoke({}), VoteDetails)
    assert_type((ensemble | DPAggregate(NoisyVote(LABELS, scores=chosen), budget)).invoke({}), Any)
    assert_type((ensemble | DPAggregate(EmbeddingMean(embeddings, ["a"]), budget)).invoke({}), str)
    assert_type((ensemble | DPAggregate(EmbeddingMean(embeddings, release="vector"), budget)).invoke({}), list[float])
    assert_type((ensemble | DPAggregate(Keywords.joint_em(["a"], k=1), budget)).invoke({}), ReleasedKeywords)
    assert_type((ensemble | DPAggregate(CandidateVote(embeddings, ["a", "b"]), budget)).invoke({}), str)
    assert_type((ensemble | DPAggregate(Structured(Visit), budget)).invoke({}), Visit)
    assert_type((ensemble | DPAggregate(NoisyMedian(0, 10), budget)).invoke({}), int)
    assert_type((ensemble | DPAggregate(NoisyMean(0.0, 1.0), budget)).invoke({}), float)
    days = NoisyMedian(date(2026, 1, 1), date(2026, 12, 31))
    assert_type((ensemble | DPAggregate(days, budget)).invoke({}), date)
