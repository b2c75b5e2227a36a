"""The private exemplars, on FAISS or PostgreSQL: texts, owners and vectors, with forgetting."""

from langchain_dpicl.store.records import Owners
from langchain_dpicl.store.store import ExemplarStore

__all__ = ["ExemplarStore", "Owners"]
