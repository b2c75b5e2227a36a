"""The searches of a chain: over a member's own bucket in its copy, and what their settings say about the bucket."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from langchain_core.documents import Document
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.structured_query import Comparator, Comparison, StructuredQuery, Visitor
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import Released
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.private.pickling import other_collection
from langchain_dpicl.private.reach import (
    held_by,
    is_named,
    is_one,
    is_users,
    names_in,
    reachable,
)
from langchain_dpicl.private.sealing import seal
from langchain_dpicl.private.sources import parts_of
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.selection.rules import OfRequest, OfRequests
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.filters import MetadataFilter
from langchain_dpicl.store.standin import DOCUMENTS, FETCHED, check_search

_BUILD = "build it over store.as_vectorstore() and give it to PrivateEnsemble(selector, app)"

_DOCUMENTS = (Document, ExemplarStore, PoissonExampleSelector)
_GRAPH_STORES = ("langgraph.store.base.BaseStore",)


def stand_ins(
    chain: Runnable[Any, Any],
    store: ExemplarStore,
    collection: VectorStore | None,
    public: Sequence[object],
    share: Sequence[object],
    isolate: Sequence[str],
) -> tuple[list[tuple[object, object]], bool]:
    """The collection with what stands in for it in the chain's copies, if the chain has it; and whether it searches.

    Without a ``collection`` it is the chain's one vector store that is not public. Raises `UnsafeConfigurationError` if
    the chain reaches another collection, or a document.
    """
    if any(part is collection for part in parts_of(public)):
        raise InvalidParameter(
            "public",
            type(collection).__name__,
            "without the source, whose documents are private",
        )
    found: list[Any] = []
    copies = Pristine(seal(chain), share=share, public=public, isolate=isolate, found=found)
    searched = [part for part in found if is_one(part, VectorStore) and collection in (None, part)]
    source = searched[0] if len(searched) == 1 else None
    if others := [part for part in found if part is not source]:
        raise UnsafeConfigurationError(other_collection(others[0]))
    for part in reachable(chain):
        if is_one(part, _DOCUMENTS) or is_named(part, _GRAPH_STORES):
            raise UnsafeConfigurationError(
                f"the chain reaches a {type(part).__name__}: every member would read the same documents there. Put "
                "them into the source, or write the chain without it and name documents_key"
            )
    if source is None:
        return [], copies.searches
    stand_in = store.as_vectorstore()
    _check_uses(chain, source, stand_in)
    return [(source, stand_in)], True


def _check_uses(chain: Any, collection: VectorStore, stand_in: VectorStore) -> None:
    """Raises `UnsafeConfigurationError` for a function that asks the collection for what its stand-in does not have."""
    for part in reachable(chain):
        names: set[str] = set()
        if type(part) is MethodType and part.__self__ is collection:
            names = {part.__name__}
        elif type(part) is FunctionType and any(each is collection for each in held_by(part)):
            names = names_in(part.__code__).attributes
        if lost := [name for name in sorted(names) if _has(collection, name) and not _has(stand_in, name)]:
            raise UnsafeConfigurationError(
                f"{part.__qualname__} asks the chain's {type(collection).__name__} for {lost[0]}, which a member's own "
                f"bucket does not have: {_BUILD}"
            )


def _has(item: object, name: str) -> bool:
    return inspect.getattr_static(item, name, None) is not None


class Search(NamedTuple):
    """A search that a chain shows, and its settings."""

    kind: str
    settings: Mapping[str, Any]

    @property
    def documents(self) -> int:
        """The most documents that it looks at."""
        k = checks.whole("k", self.settings.get("k", DOCUMENTS))
        if self.kind != "mmr":
            return k
        return max(k, checks.whole("fetch_k", self.settings.get("fetch_k", FETCHED)))


def searches_in(chain: Any) -> list[Search]:
    """The searches of a chain's retrievers and selectors, also as configured or bound; those in functions do not show.

    Raises `InvalidParameter` for a setting that a search within a bucket would not carry out.
    """
    found: list[Search] = []
    for part in _prepared(chain):
        added: dict[str, Any] = {}
        if is_one(part, RunnableBindingBase):
            added = dict(part.kwargs)
            part = _first(part.bound)
            if not added or not is_one(part, VectorStoreRetriever):
                continue
        if is_one(part, type) or is_one(part, Released):
            continue
        settings = getattr(part, "search_kwargs", None)
        if is_one(part, BaseRetriever) and isinstance(settings, Mapping):
            kind = getattr(part, "search_type", "similarity")
            search = Search(str(getattr(kind, "value", kind)), {**settings, **added})
            if not is_users(type(part).__module__):
                check_search(search.kind, search.settings)
                _check_translator(getattr(part, "structured_query_translator", None))
            found.append(search)
        elif is_one(part, BaseExampleSelector) and hasattr(part, "vectorstore"):
            limits = {name: getattr(part, name) for name in ("k", "fetch_k") if hasattr(part, name)}
            found.append(Search("mmr" if "fetch_k" in limits else "similarity", limits))
    return found


def _check_translator(translator: Any) -> None:
    """Refuse a self-query retriever whose filters no bucket carries out: each member would fail, and be charged."""
    if is_one(translator, Visitor):
        equal = Comparison(comparator=Comparator.EQ, attribute="name", value="value")
        try:
            check_search(
                "similarity",
                translator.visit_structured_query(StructuredQuery(query="", filter=equal))[1],
            )
        except Exception:
            raise InvalidParameter(
                "structured_query_translator",
                type(translator).__name__,
                "one that writes filters as mappings with $eq, $and and the like, such as a ChromaTranslator",
            ) from None


def _prepared(chain: Any) -> Iterator[Any]:
    """Yield the parts that a chain reaches, and its configurable parts as the chain's own values make them."""
    for part in reachable(chain):
        yield part
        if is_one(part, (DynamicRunnable, RunnableBindingBase)) and (part.config or {}).get("configurable"):
            for inner in reachable(part):
                if is_one(inner, DynamicRunnable):
                    yield from reachable(inner.prepare({"configurable": part.config["configurable"]})[0])


def _first(part: Any) -> Any:
    """Return the part that gets the arguments that are bound to a part."""
    while isinstance(part, (RunnableBindingBase, RunnableSequence)):
        part = part.bound if isinstance(part, RunnableBindingBase) else part.first
    return part


# -- filters -----------------------------------------------------------------------------------------------------------


def narrowed(filter: OfRequest, *fixed: MetadataFilter | None) -> OfRequests:
    """A filter and those that a retriever's own search has: all of them count."""
    given = tuple(each for each in (*fixed, filter) if each is not None)
    return given if len(given) > 1 else next(iter(given), None)


def filter_of(settings: Mapping[str, Any]) -> MetadataFilter | None:
    """The filter of a search, read whole; None without one, or for one that cannot be read."""
    given = settings.get("filter")
    if not isinstance(given, Mapping) or not given:
        return None
    try:
        return MetadataFilter.parse(given)
    except InvalidParameter:
        return None


def filter_in(chain: Any, searches: Sequence[Search]) -> MetadataFilter | None:
    """Return the filter of the records that the chain's searches can find; None if a search has none, or hides."""
    filters = [filter_of(search.settings) for search in searches]
    hides = any(is_one(part, VectorStore) for part in reachable(chain, closed=VectorStoreRetriever))
    if not filters or None in filters or hides:
        return None
    distinct = {str(each): each for each in filters if each is not None}
    parts = tuple(distinct[text] for text in sorted(distinct))
    return parts[0] if len(parts) == 1 else MetadataFilter("$or", parts=parts)
