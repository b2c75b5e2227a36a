"""Aggregators: N private outputs in, one release out."""

from langchain_dpicl.aggregators.base import Aggregator, Words
from langchain_dpicl.aggregators.candidates import CandidateVote
from langchain_dpicl.aggregators.keywords import Keywords, ReleasedKeywords
from langchain_dpicl.aggregators.means import EmbeddingMean
from langchain_dpicl.aggregators.numbers import NoisyMean, NoisyMedian
from langchain_dpicl.aggregators.structured import Structured
from langchain_dpicl.aggregators.votes import LabelVote, NoisyVote

__all__ = [
    "Aggregator",
    "CandidateVote",
    "EmbeddingMean",
    "Keywords",
    "LabelVote",
    "NoisyMean",
    "NoisyMedian",
    "NoisyVote",
    "ReleasedKeywords",
    "Structured",
    "Words",
]
