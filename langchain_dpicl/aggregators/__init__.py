"""Aggregators: N private outputs in, one release out."""

from langchain_dpicl.aggregators.base import Aggregator, Words
from langchain_dpicl.aggregators.embedding import EmbeddingMean
from langchain_dpicl.aggregators.keywords import Keywords, ReleasedKeywords
from langchain_dpicl.aggregators.vote import NoisyVote

__all__ = ["Aggregator", "EmbeddingMean", "Keywords", "NoisyVote", "ReleasedKeywords", "Words"]
