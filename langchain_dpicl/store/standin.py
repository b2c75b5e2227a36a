"""The stand-in for a store within a member: each search reads that member's own bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from langchain_dpicl.calls import shut
from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import OwnBucket
from langchain_dpicl.private.bucket import Examples, MadeUp
from langchain_dpicl.store.filters import MetadataFilter
from langchain_dpicl.store.records import (
    Vectors,
    aembed_query,
    as_matrix,
    embed,
    embed_query,
)

DOCUMENTS = 4
"""Documents that a search gives, unless told otherwise: as many as a LangChain retriever gives."""

FETCHED = 20
"""Documents among which maximal marginal relevance chooses, unless told otherwise."""

PARENT = "parent_text"
"""The metadata entry of a chunk with the text of its document. Searches do not show it."""

SETTINGS = {
    "similarity": {"k", "filter"},
    "mmr": {"k", "filter", "fetch_k", "lambda_mult"},
    "similarity_score_threshold": {"k", "filter", "score_threshold"},
}
"""By search type, what a search within a bucket carries out."""

SearchFilter = Mapping[str, Any] | Callable[[Document], bool] | None


def documents_of(bucket: Sequence[dict[str, Any]]) -> list[Document]:
    """A bucket's exemplars as LangChain documents, in its order."""
    key = bucket.input_key if isinstance(bucket, Examples) else "text"
    documents = [
        Document(
            each[key],
            metadata={name: each[name] for name in each if name not in (key, PARENT)},
        )
        for each in bucket
    ]
    for document, exemplar in zip(documents, bucket, strict=True):
        if isinstance(exemplar, MadeUp):
            document.metadata = MadeUp(document.metadata)
    return documents


def check_search(search_type: object, settings: Mapping[str, Any]) -> None:
    """Raises `InvalidParameter` for settings of a search that would not be carried out."""
    kind = str(getattr(search_type, "value", search_type))
    if kind not in SETTINGS:
        raise InvalidParameter("search_type", search_type, f"one of {sorted(SETTINGS)}")
    if unknown := sorted(settings.keys() - SETTINGS[kind]):
        raise InvalidParameter(
            "search_kwargs",
            unknown,
            f"a search by {kind} carries out {sorted(SETTINGS[kind])}",
        )
    _test_of(settings.get("filter"))


class _Found(NamedTuple):
    """A document of the bucket, the cosine of its vector and the query's, and its vector."""

    document: Document
    cosine: float
    vector: Vectors


class MemberVectorStore(OwnBucket, VectorStore):
    """Stands in for a vector store in an app: within a member, each search reads that member's own exemplars.

    Build the app over it, in any shape (a tool, middleware, a graph's node, retrievers around its ``as_retriever()``),
    and give the app to `PrivateEnsemble`. The selector draws the bucket; a search ranks it by the cosine of the query
    that the app asks and the exemplars' vectors, which equals a search of a collection that holds the bucket alone. So
    let the selector's ``max_exemplars`` be at least the ``k`` (or ``fetch_k``) of the app's searches. It holds no
    record itself, and members cannot write to it.

    Scores are cosines; relevance scores are these, negative ones 0. ``filter`` is a mapping (see
    `langchain_dpicl.store.filters`) or a function of the document. Settings that it would not carry out raise
    `InvalidParameter`.

    Raises `UnsafeConfigurationError` outside of a member, and for embeddings that keep queries. A call without examples
    finds nothing. The made-up examples of a public question pass every filter, and are as near as can be.
    """

    def __init__(self, embeddings: Embeddings, input_key: str, dimension: int, k: int = DOCUMENTS) -> None:
        if getattr(embeddings, "query_embedding_store", None) is not None:
            raise UnsafeConfigurationError(
                f"the store's {type(embeddings).__name__} keeps queries, and members would write there what they "
                "search for, which can hold private text: give the store embeddings without a query_embedding_cache"
            )
        self._embeddings = embeddings
        self._input_key = input_key
        self._dimension = dimension
        self.k = k

    @property
    def embeddings(self) -> Embeddings | None:
        """The model that embeds the store's records and queries. None within a call: it may keep what it embeds."""
        return None if shut.in_call() else self._embeddings

    def as_retriever(self, **kwargs: Any) -> VectorStoreRetriever:
        """A retriever of the member's own documents. Raises `InvalidParameter` for settings that would get lost."""
        check_search(kwargs.get("search_type", "similarity"), kwargs.get("search_kwargs") or {})
        return super().as_retriever(**kwargs)

    # -- searches ------------------------------------------------------------------------------------------------------

    def similarity_search(
        self, query: str, k: int | None = None, filter: SearchFilter = None, **kwargs: Any
    ) -> list[Document]:
        """The ``k`` nearest documents of the bucket."""
        return [found.document for found in self._nearest(self._embed(query), k, filter, kwargs)]

    async def asimilarity_search(
        self, query: str, k: int | None = None, filter: SearchFilter = None, **kwargs: Any
    ) -> list[Document]:
        """`similarity_search`."""
        return [found.document for found in self._nearest(await self._aembed(query), k, filter, kwargs)]

    def similarity_search_with_score(
        self, query: str, k: int | None = None, filter: SearchFilter = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The same with their cosines."""
        return [found[:2] for found in self._nearest(self._embed(query), k, filter, kwargs)]

    async def asimilarity_search_with_score(
        self, query: str, k: int | None = None, filter: SearchFilter = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """`similarity_search_with_score`."""
        return [found[:2] for found in self._nearest(await self._aembed(query), k, filter, kwargs)]

    def similarity_search_by_vector(
        self,
        embedding: list[float],
        k: int | None = None,
        filter: SearchFilter = None,
        **kwargs: Any,
    ) -> list[Document]:
        """The documents nearest to a vector of the store's embedding model."""
        return [found.document for found in self._nearest(self._given(embedding), k, filter, kwargs)]

    async def asimilarity_search_by_vector(
        self,
        embedding: list[float],
        k: int | None = None,
        filter: SearchFilter = None,
        **kwargs: Any,
    ) -> list[Document]:
        """`similarity_search_by_vector`, which waits for nothing."""
        return self.similarity_search_by_vector(embedding, k, filter, **kwargs)

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int | None = None,
        fetch_k: int = FETCHED,
        lambda_mult: float = 0.5,
        filter: SearchFilter = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Of the ``fetch_k`` nearest documents, ``k`` that are near to the query and unlike each other."""
        return self._diverse(self._embed(query), k, fetch_k, lambda_mult, filter, kwargs)

    async def amax_marginal_relevance_search(
        self,
        query: str,
        k: int | None = None,
        fetch_k: int = FETCHED,
        lambda_mult: float = 0.5,
        filter: SearchFilter = None,
        **kwargs: Any,
    ) -> list[Document]:
        """`max_marginal_relevance_search`."""
        return self._diverse(await self._aembed(query), k, fetch_k, lambda_mult, filter, kwargs)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int | None = None,
        fetch_k: int = FETCHED,
        lambda_mult: float = 0.5,
        filter: SearchFilter = None,
        **kwargs: Any,
    ) -> list[Document]:
        """The same for a vector of the store's embedding model."""
        return self._diverse(self._given(embedding), k, fetch_k, lambda_mult, filter, kwargs)

    async def amax_marginal_relevance_search_by_vector(self, *arguments: Any, **named: Any) -> list[Document]:
        """`max_marginal_relevance_search_by_vector`, which waits for nothing."""
        return self.max_marginal_relevance_search_by_vector(*arguments, **named)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda cosine: min(1.0, max(0.0, cosine))

    def _embed(self, query: str) -> Vectors:
        self.bucket_here()
        return embed_query(self._embeddings, query, self._dimension)

    async def _aembed(self, query: str) -> Vectors:
        self.bucket_here()
        return await aembed_query(self._embeddings, query, self._dimension)

    def _given(self, embedding: Sequence[float]) -> Vectors:
        self.bucket_here()
        if len(embedding) != self._dimension:
            raise InvalidParameter(
                "embedding",
                f"{len(embedding)} numbers",
                f"{self._dimension}, as the store's",
            )
        vector: Vectors = as_matrix([embedding], 1)[0]
        return vector

    def _nearest(
        self,
        query: Vectors,
        k: int | None,
        filter: SearchFilter,
        others: Mapping[str, Any] | None = None,
    ) -> list[_Found]:
        """The nearest of the bucket first; equally near ones in its order."""
        check_search("similarity", others or {})
        k = checks.whole("k", self.k if k is None else k)
        passes = _test_of(filter)
        bucket = self.bucket_here()
        found: list[_Found] = []
        for exemplar, document in zip(list(bucket), documents_of(bucket), strict=True):
            if passes(document) or isinstance(exemplar, MadeUp):
                vector = query if isinstance(exemplar, MadeUp) else self._vector_of(exemplar, bucket, document)
                found.append(_Found(document, float(vector @ query), vector))
        return sorted(found, key=lambda each: -each.cosine)[:k]

    def _vector_of(self, exemplar: dict[str, Any], bucket: Sequence[dict[str, Any]], document: Document) -> Vectors:
        """The stored vector; of an example that is no record of a store, its text's."""
        known = bucket.vector_of(exemplar) if isinstance(bucket, Examples) else None
        return embed(self._embeddings, [document.page_content], progress=False)[0] if known is None else known

    def _diverse(
        self,
        query: Vectors,
        k: int | None,
        fetch_k: int,
        lambda_mult: float,
        filter: SearchFilter,
        others: Mapping[str, Any],
    ) -> list[Document]:
        lambda_mult = checks.real("lambda_mult", lambda_mult, at_least=0.0, at_most=1.0)
        near = self._nearest(query, checks.whole("fetch_k", fetch_k), filter, others)
        k = checks.whole("k", self.k if k is None else k)
        if not near:
            return []
        vectors = [each.vector.tolist() for each in near]
        return [near[i].document for i in maximal_marginal_relevance(query, vectors, lambda_mult, k)]

    # -- what members cannot do ----------------------------------------------------------------------------------------

    def add_texts(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refused, and with it every way to add: members cannot write."""
        raise UnsafeConfigurationError("members cannot write: add records to the store itself, by its add()")

    aadd_texts = add_texts

    def delete(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refused: members cannot write."""
        raise UnsafeConfigurationError("members cannot write: let the store itself forget() an owner")

    adelete = delete

    @classmethod
    def from_texts(cls, *arguments: Any, **named: Any) -> NoReturn:
        """Refused: it stands in for a store that exists."""
        raise UnsafeConfigurationError("make an ExemplarStore of the texts, and use its as_vectorstore()")

    def __repr__(self) -> str:
        return f"MemberVectorStore({self._dimension} dimensions)"


def _test_of(filter: object) -> Callable[[Document], bool]:
    if callable(filter):
        return filter
    if filter is None or filter == {}:
        return lambda document: True
    asked = MetadataFilter.parse(filter)
    return lambda document: asked.passes(document.metadata)
