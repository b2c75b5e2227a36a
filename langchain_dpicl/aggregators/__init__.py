"""Aggregators: N private outputs in, one release out."""

from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.aggregators.embedding import EmbeddingMean
from langchain_dpicl.aggregators.keywords import Keywords, ReleasedKeywords
from langchain_dpicl.aggregators.vote import NoisyVote
from langchain_dpicl.aggregators.words import Words

__all__ = ["Aggregator", "EmbeddingMean", "Keywords", "NoisyVote", "ReleasedKeywords", "Words"]
