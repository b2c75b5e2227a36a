"""The collections that a chain searches, and those that its members may reach.

A collection is a retriever, a vector store, an example selector or a document store. Members may search what the user
calls public, and what stands in for their own bucket.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, BaseCallbackManager
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.retrievers import BaseRetriever
from langchain_core.stores import BaseStore
from langchain_core.vectorstores import VectorStore

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.private import OwnBucket, Released
from langchain_dpicl.private.reach import is_named, is_one

COLLECTIONS = (BaseRetriever, VectorStore, BaseExampleSelector, BaseStore)
_DOCSTORES = ("langchain_community.docstore.base.Docstore", "langchain_classic.docstore.base.Docstore")

AROUND = (
    "langchain_core.example_selectors.semantic_similarity._VectorStoreExampleSelector",
    "langchain_core.vectorstores.base.VectorStoreRetriever",
    "langchain_classic.retrievers.contextual_compression.ContextualCompressionRetriever",
    "langchain_classic.retrievers.ensemble.EnsembleRetriever",
    "langchain_classic.retrievers.merger_retriever.MergerRetriever",
    "langchain_classic.retrievers.multi_query.MultiQueryRetriever",
    "langchain_classic.retrievers.multi_vector.MultiVectorRetriever",
    "langchain_classic.retrievers.re_phraser.RePhraseQueryRetriever",
    "langchain_classic.retrievers.self_query.base.SelfQueryRetriever",
)
"""Libraries' classes that hold no document: what they search, they hold as a field, where a copy has it, too."""

_ALL = "all documents: search by store.as_vectorstore().as_retriever() instead"
_INSTEAD = {
    "BM25Retriever": f"it ranks by the words of {_ALL}",
    "TFIDFRetriever": f"it ranks by the words of {_ALL}",
    "KNNRetriever": f"it keeps an index of {_ALL}",
    "SVMRetriever": f"it keeps an index of {_ALL}",
    "TimeWeightedVectorStoreRetriever": (
        "it keeps a memory beside the store, which members would share: use store.as_vectorstore().as_retriever(), "
        "and keep times as metadata"
    ),
}

_BASES = (BaseCallbackHandler, AsyncCallbackHandler, BaseCallbackManager)
"""They are not abstract, but code names them only to compare with."""


def parts_of(public: Iterable[object]) -> list[Any]:
    """The public collections, and those that public retrievers and selectors search."""
    found: list[Any] = []
    waiting: list[Any] = list(public)
    while waiting:
        part = waiting.pop()
        if is_collection(part) and not is_one(part, type) and not any(part is each for each in found):
            found.append(part)
            waiting += getattr(part, "__dict__", {}).values()
        elif type(part) in (list, tuple):
            waiting += part
    return found


def check_public(public: object) -> tuple[object, ...]:
    """The collections that a user calls public. Raises `InvalidParameter` for what is no collection, or is private."""
    bound = "a list of retrievers, vector stores, example selectors and document stores with public documents alone"
    if not isinstance(public, (list, tuple)):
        raise InvalidParameter("public", type(public).__name__, bound)
    for i, named in enumerate(public):
        if isinstance(named, type) or not is_collection(named):
            raise InvalidParameter(f"public[{i}]", name_of(named), bound)
    return tuple(public)


def instead_of(part: Any) -> str:
    """Say what to use in the place of a collection of private documents."""
    if is_of(part, (BaseStore,)):
        return (
            "If it holds the documents of a ParentDocumentRetriever's chunks, make an ExemplarStore of "
            "split_with_parents(documents, splitter), build the app over its as_vectorstore() and as_docstore(), and "
            "give it to PrivateEnsemble(selector, app)"
        )
    return _INSTEAD.get(name_of(part)) or (
        "If it holds the private documents, put them into an ExemplarStore, build the app over store.as_vectorstore() "
        "and give it to PrivateEnsemble(selector, app)"
    )


def is_collection(part: Any) -> bool:
    """Return whether an object is a collection, or a class makes one."""
    return is_of(part, COLLECTIONS, _DOCSTORES) and not is_of(part, (Released, OwnBucket))


def is_of(part: Any, kinds: tuple[type, ...], names: Iterable[str] = ()) -> bool:
    """Return whether a part is of one of these kinds (or full names), or a class that makes one.

    Code names an abstract class only to compare with it.
    """
    if not is_one(part, type):
        return is_one(part, kinds) or is_named(part, names)
    full_names = (f"{kind.__module__}.{kind.__qualname__}" for kind in part.__mro__)
    found = issubclass(part, kinds) or not set(names).isdisjoint(full_names)
    return found and not inspect.isabstract(part) and part not in _BASES


def name_of(part: Any) -> str:
    """The name of a class, or of an object's."""
    return part.__name__ if is_one(part, type) else type(part).__name__
