"""Aggregators: N private outputs in, one release out."""

from typing import Any

from langchain_dpicl.aggregators.base import Aggregator, Words
from langchain_dpicl.aggregators.candidates import CandidateVote
from langchain_dpicl.aggregators.keywords import Keywords, ReleasedKeywords
from langchain_dpicl.aggregators.means import EmbeddingMean
from langchain_dpicl.aggregators.numbers import NoisyMean, NoisyMedian
from langchain_dpicl.aggregators.structured import Structured
from langchain_dpicl.aggregators.top_k import NoisyTopK
from langchain_dpicl.aggregators.votes import LabelVote, NoisyVote

__all__ = [
    "KINDS",
    "Aggregator",
    "CandidateVote",
    "EmbeddingMean",
    "Keywords",
    "LabelVote",
    "NoisyMean",
    "NoisyMedian",
    "NoisyTopK",
    "NoisyVote",
    "ReleasedKeywords",
    "Structured",
    "Words",
]

KINDS: dict[str, type[Aggregator[Any]]] = {
    each.kind: each
    for exported in map(globals().__getitem__, __all__[1:])
    if issubclass(exported, Aggregator)
    for each in (exported, *exported.__subclasses__())
    if "kind" in vars(each)
}
"""Each kind of release by its name: what is exported here, and what it makes (`Keywords` has two)."""
