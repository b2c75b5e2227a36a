"""Aggregators: N private outputs in, one release out."""

from langchain_dpicl.aggregators.base import Aggregator, Words
from langchain_dpicl.aggregators.keywords import Keywords, ReleasedKeywords
from langchain_dpicl.aggregators.means import EmbeddingMean
from langchain_dpicl.aggregators.votes import LabelVote, NoisyVote

__all__ = ["Aggregator", "EmbeddingMean", "Keywords", "LabelVote", "NoisyVote", "ReleasedKeywords", "Words"]
