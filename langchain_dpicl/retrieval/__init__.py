"""Retrieval with a guarantee: released documents for any chain, or a retrieval chain as the member."""

from langchain_dpicl.retrieval.rag import wrap_rag
from langchain_dpicl.retrieval.retrievers import DPRetriever

__all__ = ["DPRetriever", "wrap_rag"]
