"""Aggregators: N private outputs in, one release out."""

from langchain_dpicl.aggregators.base import Aggregator, Words
from langchain_dpicl.aggregators.gaussian import EmbeddingMean, NoisyVote
from langchain_dpicl.aggregators.keywords import Keywords, ReleasedKeywords

__all__ = ["Aggregator", "EmbeddingMean", "Keywords", "NoisyVote", "ReleasedKeywords", "Words"]
