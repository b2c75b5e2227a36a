"""What an editor and mypy know of an answer's type: `make lint` reads this file, and nothing runs it."""

from __future__ import annotations

from typing import Any, assert_type

from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable

from langchain_dpicl import DPAggregate, EmbeddingMean, Keywords, NoisyVote, PrivacyBudget, PrivateEnsemble
from langchain_dpicl.aggregators import ReleasedKeywords
from langchain_dpicl.aggregators.votes import VoteDetails
from langchain_dpicl.release.base import AnswerWithReceipt

LABELS = ["Positive", "Negative"]


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
