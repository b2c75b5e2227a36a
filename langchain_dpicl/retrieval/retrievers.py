"""Retrievers: `DPRetriever` gives releases; `BucketRetriever` gives a member its own documents."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableBindingBase, coerce_to_runnable
from langchain_core.runnables.configurable import DynamicRunnable, RunnableConfigurableFields
from langchain_core.stores import BaseStore
from langchain_core.vectorstores import VectorStore

from langchain_dpicl.aggregators.base import text_of
from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import OwnBucket, Released
from langchain_dpicl.private.boundary import current_bucket
from langchain_dpicl.private.reach import is_named, is_one, reachable
from langchain_dpicl.private.sealing import rebuilt
from langchain_dpicl.private.sharing import MadeUp
from langchain_dpicl.release.base import AnyRelease, releases_in
from langchain_dpicl.selection import Examples, PoissonExampleSelector
from langchain_dpicl.store.base import PrivateStore

_SETTINGS = (
    "search_kwargs", "search_type", "filter", "filters", "pre_filter", "post_filter", "where", "score_threshold",
    "similarity_threshold", "metadata_filter",
)  # fmt: skip
"""The names under which retrievers keep what narrows a search."""

_DOCUMENTS = (Document, BaseRetriever, VectorStore, BaseStore, PrivateStore, PoissonExampleSelector)
_GRAPH_STORES = ("langgraph.store.base.BaseStore",)


class DPRetriever(Released, BaseRetriever):
    """A retriever whose documents are releases: put it in the place of a chain's retriever, and the chain is private.

    Parameters
    ----------
    release
        A sealed release, a `DPSampler`, or a chain with one in it that answers with a text, such as
        ``keywords.with_receipt() | keywords_to_answer(llm, prompt)``, which writes a passage from released keywords.
    input_key
        The request's key for the query. Default: the ``nearest_to`` of the release's selector, else "input"; of a
        sampler its store's ``input_key``. A release of `wrap_rag` asks its chain in the form that the chain takes.
    k
        At most this many documents; may also be given to `invoke`.

    In a release of `wrap_rag` only documents near to the query take part (its ``threshold``), and in another release if
    its selector has a threshold.

    Each query is one release, charged like any other. It gives one document: a label, a sentence, a passage, noisy
    scores as "label: count, ...", keywords as "word, word, ...". With ``k``, the first k keywords give one document
    each; whatever k is, the release is the same and is charged once. If nothing is released, as when
    propose-test-release fails, there is no document. ``metadata["receipt"]`` is the receipt, if the chain gives one.

    Raises the release's errors, above all `PrivacyBudgetExceeded`, and `InvalidParameter` for a query that is no text,
    which costs nothing. Callbacks see the query and the released documents.
    """

    release: Runnable[Any, Any]
    input_key: str
    k: int | None = None

    def __init__(
        self, release: Runnable[Any, Any], *, input_key: str | None = None, k: int | None = None, **options: Any
    ) -> None:
        found = releases_in(release)
        if not isinstance(release, Runnable) or not found:
            raise InvalidParameter("release", type(release).__name__, "a release, or a chain with one in it")
        if input_key is None:
            input_key = found[0].query_key
        if not isinstance(input_key, str) or not input_key:
            raise InvalidParameter("input_key", input_key, "a non-empty string")
        if isinstance(release, AnyRelease):
            release = release.with_receipt()
        k = None if k is None else checks.whole("k", k)
        fields: dict[str, Any] = {"release": release, "input_key": input_key, "k": k, **options}
        super().__init__(**fields)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        request, k = self._checked(query, k)
        return _documents(self.release.invoke(request, {"callbacks": run_manager.get_child()}), k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        request, k = self._checked(query, k)
        return _documents(await self.release.ainvoke(request, {"callbacks": run_manager.get_child()}), k)

    def _checked(self, query: str, k: int | None) -> tuple[dict[str, str], int | None]:
        if not isinstance(query, str):
            raise InvalidParameter("query", type(query).__name__, "a text")
        return {self.input_key: query}, self.k if k is None else checks.whole("k", k)


def _documents(answer: Any, k: int | None) -> list[Document]:
    """The release as documents. Post-processing: it sees nothing else."""
    metadata: dict[str, Any] = {}
    if isinstance(answer, Mapping) and set(answer) == {"answer", "receipt"}:
        metadata, answer = {"receipt": dict(answer["receipt"])}, answer["answer"]
    if answer is None:
        texts = []
    elif isinstance(answer, (list, tuple)):
        words = [str(word) for word in answer]
        texts = [", ".join(words)] if k is None else words[:k]
    elif isinstance(answer, Mapping):
        texts = [", ".join(f"{label}: {value}" for label, value in answer.items())]
    else:
        text = text_of(answer)
        texts = [str(answer) if text is None else text]
    return [Document(page_content=text, metadata=dict(metadata)) for text in texts if text.strip()]


class BucketRetriever(OwnBucket, BaseRetriever):
    """Stands in for a chain's retriever within a member: gives that member's own documents, whatever it is asked."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return bucket_documents()

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return bucket_documents()


def bucket_documents() -> list[Document]:
    """The documents of the member that runs now. Raises `UnsafeConfigurationError` outside of a release."""
    bucket = current_bucket()
    if bucket is None:
        raise UnsafeConfigurationError("a member's documents exist within a release alone: invoke what wrap_rag gave")
    key = bucket.input_key if isinstance(bucket, Examples) else "text"
    documents = [Document(each[key], metadata={name: each[name] for name in each if name != key}) for each in bucket]
    for document, exemplar in zip(documents, bucket, strict=True):
        if isinstance(exemplar, MadeUp):
            document.metadata = MadeUp(document.metadata)
    return documents


def on_buckets(chain: Any, documents_key: str | None) -> tuple[Runnable[Any, Any], set[int]]:
    """The chain on its own member's documents alone, and the ``k`` of its retrievers, each once.

    Raises if another source of documents is left in it, or a retriever has settings that would get lost.
    """
    stand_in = BucketRetriever()
    limits: set[int] = set()
    configurable: set[str] = set()

    def replace(part: Any) -> Any:
        if isinstance(part, DynamicRunnable) and part.default is stand_in:
            fields = part.fields.values() if isinstance(part, RunnableConfigurableFields) else (part.which,)
            configurable.update(field.id for field in fields)
        if isinstance(part, (DynamicRunnable, RunnableBindingBase)):
            chosen = (part.config or {}).get("configurable") or {}
            lost = [(name, value) for name, value in chosen.items() if name in configurable]
            if isinstance(part, RunnableBindingBase) and part.bound is stand_in:
                lost += part.kwargs.items()
            _refuse_settings("the chain's retriever", lost)
        if not isinstance(part, BaseRetriever):
            return part
        limits.update(limit_of(part, "the chain"))
        return stand_in

    replaced: Runnable[Any, Any] = rebuilt(coerce_to_runnable(chain), replace)
    found = list(reachable(replaced))
    has_retriever = any(part is stand_in for part in found)
    for part in found:
        is_class = is_one(part, type)
        if part is stand_in or part is BucketRetriever:
            continue
        if is_class:  # abstract ones are named to compare with, or to annotate
            gives_documents = issubclass(part, (BaseRetriever, VectorStore)) and not inspect.isabstract(part)
        else:
            gives_documents = is_one(part, _DOCUMENTS) or is_named(part, _GRAPH_STORES)
        if gives_documents:
            raise UnsafeConfigurationError(
                f"the chain reaches a {(part if is_class else type(part)).__name__} that cannot be replaced, since it "
                "lies in a function, a tool or an object: every member would search the whole collection. Make the "
                "retriever a step of the chain, or write the chain without it and name documents_key"
            )
    if has_retriever == (documents_key is not None):
        bound = "None if the chain holds a retriever" if has_retriever else "given if the chain has no retriever"
        raise InvalidParameter("documents_key", documents_key, bound)
    return replaced, limits


def limit_of(retriever: BaseRetriever, whose: str) -> set[int]:
    """The number of documents that a retriever finds, if it has one. Raises for further settings."""
    held: dict[str, Any] = {name: getattr(retriever, name, None) for name in _SETTINGS}
    search = dict(held.pop("search_kwargs") or {})
    k = search.pop("k", None)
    if getattr(held["search_type"], "value", held["search_type"]) == "similarity":
        held["search_type"] = None
    _refuse_settings(f"{whose}'s {type(retriever).__name__}", [*search.items(), *held.items()])
    return set() if k is None else {checks.whole("k", k)}


def _refuse_settings(whose: str, settings: list[tuple[str, Any]]) -> None:
    if lost := sorted(name for name, value in settings if value is not None):
        raise UnsafeConfigurationError(
            f"{whose} searches with {', '.join(lost)}, which wrap_rag does not carry out: members would get documents "
            "that it leaves out, and a filter may be what keeps them from a reader. Take a collection that holds only "
            "the documents that every caller may see, and a retriever without these"
        )
