"""The private exemplars, on FAISS: texts, owners and vectors, with forgetting."""

from langchain_dpicl.store.store import ExemplarStore, Owners

__all__ = ["ExemplarStore", "Owners"]
