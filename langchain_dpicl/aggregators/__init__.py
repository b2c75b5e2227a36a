"""Aggregators: N private outputs in, one release out."""

from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.aggregators.vote import NoisyVote

__all__ = ["Aggregator", "NoisyVote"]
