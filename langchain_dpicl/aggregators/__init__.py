"""Aggregators: N private outputs in, one release out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.aggregators.vote import NoisyVote

if TYPE_CHECKING:
    from langchain_dpicl.aggregators.embedding import EmbeddingMean
    from langchain_dpicl.aggregators.keywords import Keywords, ReleasedKeywords
    from langchain_dpicl.aggregators.words import Words

__all__ = ["Aggregator", "EmbeddingMean", "Keywords", "NoisyVote", "ReleasedKeywords", "Words"]

_HOME_OF = {"EmbeddingMean": "embedding", "Keywords": "keywords", "ReleasedKeywords": "keywords", "Words": "words"}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
