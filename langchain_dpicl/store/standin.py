"""The stand-in for a store within a member: each search reads that member's own bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from langchain_dpicl.calls import shut
from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import OwnBucket
from langchain_dpicl.private.bucket import MadeUp
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
    key = getattr(bucket, "input_key", "text")
    documents: list[Document] = []
    for exemplar in bucket:
        document = Document(exemplar[key])
        shown = {name: exemplar[name] for name in exemplar if name not in (key, PARENT)}
        document.metadata = type(exemplar)(shown)  # of a made-up example, with something under every key
        documents.append(document)
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


def _by_query(search: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A search by a vector, as one for a query's vector, with the same settings; and this, awaited."""

    def by_query(self: MemberVectorStore, query: str, *settings: Any, **named: Any) -> Any:
        self.bucket_here()
        vector = embed_query(self._embeddings, query, self._dimension)
        return search(self, vector, *settings, **named)

    async def by_query_awaited(self: MemberVectorStore, query: str, *settings: Any, **named: Any) -> Any:
        self.bucket_here()
        vector = await aembed_query(self._embeddings, query, self._dimension)
        return search(self, vector, *settings, **named)

    return by_query, by_query_awaited


class MemberVectorStore(OwnBucket, VectorStore):
    """Stands in for a vector store in an app: within a member, each search reads that member's own exemplars.

    Build the app over it, in any shape (a tool, middleware, a graph's node, retrievers around its ``as_retriever()``),
    and give the app to `PrivateEnsemble`. The selector draws the bucket, with its stored vectors: a search embeds
    nothing but the query. So let the selector's
    ``max_exemplars`` be at least the ``k`` (or ``fetch_k``) of the app's searches. It holds no record itself, and
    members cannot write to it.

    Scores are cosines; relevance scores are these, negative ones 0. ``filter`` is a mapping (see
    `langchain_dpicl.store.filters`) or a function of the document. Settings that it would not carry out raise
    `InvalidParameter`.

    Raises `UnsafeConfigurationError` outside of a member, and for embeddings that keep queries. A call without examples
    finds nothing. The made-up examples of a public question pass every filter, and are as near as can be.
    """

    def __init__(self, embeddings: Embeddings, dimension: int) -> None:
        if getattr(embeddings, "query_embedding_store", None) is not None:
            raise UnsafeConfigurationError(
                f"the store's {type(embeddings).__name__} keeps queries, and members would write there what they "
                "search for, which can hold private text: give the store embeddings without a query_embedding_cache"
            )
        self._embeddings = embeddings
        self._dimension = dimension

    @property
    def embeddings(self) -> Embeddings | None:
        """The model that embeds the store's records and queries. None within a call: it may keep what it embeds."""
        return None if shut.in_call() else self._embeddings

    def as_retriever(self, **kwargs: Any) -> VectorStoreRetriever:
        """A retriever of the member's own documents. Raises `InvalidParameter` for settings that would get lost."""
        check_search(kwargs.get("search_type", "similarity"), kwargs.get("search_kwargs") or {})
        return super().as_retriever(**kwargs)

    # -- searches ------------------------------------------------------------------------------------------------------

    def similarity_search_with_score_by_vector(
        self,
        embedding: Sequence[float] | Vectors,
        k: int = DOCUMENTS,
        filter: SearchFilter = None,
        **others: Any,
    ) -> list[tuple[Document, float]]:
        """The ``k`` documents of the bucket nearest to a vector of the store's embedding model, with their cosines.

        The nearest comes first; equally near ones stand in the bucket's order.
        """
        check_search("similarity", others)
        k = checks.whole("k", k)
        query = self._checked(embedding)
        return [(document, cosine) for document, cosine, _ in self._ranked(query, filter)[:k]]

    def similarity_search_by_vector(
        self, embedding: Sequence[float] | Vectors, *settings: Any, **named: Any
    ) -> list[Document]:
        """The same without cosines."""
        found = self.similarity_search_with_score_by_vector(embedding, *settings, **named)
        return [document for document, _ in found]

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: Sequence[float] | Vectors,
        k: int = DOCUMENTS,
        fetch_k: int = FETCHED,
        lambda_mult: float = 0.5,
        filter: SearchFilter = None,
        **others: Any,
    ) -> list[Document]:
        """Of the ``fetch_k`` nearest documents, ``k`` that are near to the vector and unlike each other."""
        check_search("mmr", others)
        k = checks.whole("k", k)
        fetch_k = checks.whole("fetch_k", fetch_k)
        lambda_mult = checks.real("lambda_mult", lambda_mult, at_least=0.0, at_most=1.0)
        query = self._checked(embedding)
        near = self._ranked(query, filter)[:fetch_k]
        vectors: Any = [vector for _, _, vector in near]
        chosen = maximal_marginal_relevance(query, vectors, lambda_mult, k)
        return [near[i][0] for i in chosen]

    similarity_search, asimilarity_search = _by_query(similarity_search_by_vector)
    similarity_search_with_score, asimilarity_search_with_score = _by_query(similarity_search_with_score_by_vector)
    max_marginal_relevance_search, amax_marginal_relevance_search = _by_query(max_marginal_relevance_search_by_vector)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda cosine: min(1.0, max(0.0, cosine))

    def _checked(self, embedding: Sequence[float] | Vectors) -> Vectors:
        self.bucket_here()
        if len(embedding) != self._dimension:
            raise InvalidParameter(
                "embedding",
                f"{len(embedding)} numbers",
                f"{self._dimension}, as the store's",
            )
        vector: Vectors = as_matrix([embedding], 1)[0]
        return vector

    def _ranked(self, query: Vectors, filter: SearchFilter) -> list[tuple[Document, float, Vectors]]:
        """The bucket's documents that pass, the nearest first, with their cosines and vectors.

        A made-up example's vector is the query's. An example that is no record of a store has its text's.
        """
        passes = _test_of(filter)
        bucket: Any = self.bucket_here()
        found: list[tuple[Document, float, Vectors]] = []
        for exemplar, document in zip(list(bucket), documents_of(bucket), strict=True):
            is_made_up = isinstance(exemplar, MadeUp)
            if is_made_up or passes(document):
                vector = query if is_made_up else bucket.vector_of(exemplar)
                if vector is None:
                    vector = embed(self._embeddings, [document.page_content], progress=False)[0]
                found.append((document, float(vector @ query), vector))
        return sorted(found, key=lambda each: -each[1])

    # -- what members cannot do ----------------------------------------------------------------------------------------

    def add_texts(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refused, and with it every way to add: members cannot write."""
        raise UnsafeConfigurationError("members cannot write: add records to the store itself, by its add()")

    def delete(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refused: members cannot write."""
        raise UnsafeConfigurationError("members cannot write: let the store itself forget() an owner")

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
