"""The documents of a LangChain vector store, with their ids and vectors, as they stand.

Their own methods search. They do not list a collection, so each kind is read in its own way, whole.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_dpicl.errors import InvalidParameter, InvalidRecords, StoreError
from langchain_dpicl.store.records import Vectors, attempt, plain

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.vectorstores import VectorStore

_NUMBER = re.compile("#[0-9]+")
_PAGE = 1000
_NOT_AS_THEY_CAME = "which is trained on all of them or rounds them"
_TAKE_DOCUMENTS = "give its documents to ExemplarStore.from_documents"

Entry = tuple[Any, Any, Any, Any]
"""A document's id, text, metadata and vector."""

_Reader = Callable[[Any], Iterator[Entry]]


def contents_of(vectorstore: VectorStore) -> tuple[list[Document], Vectors]:
    """All documents that a vector store holds, each with its id there, and their vectors in the same order.

    An entry must be a function of its own document. So a collection that stores something else than what it was given
    is refused: what it stores may follow all documents. Raises `StoreError` for one of these, one that
    cannot be read whole, or whose ids do not tell its documents apart; `InvalidRecords` for ids of `refuse_numbers`.
    Its own errors may quote a document, so they do not get out.
    """
    from langchain_core.vectorstores import VectorStore

    if not isinstance(vectorstore, VectorStore):
        raise InvalidParameter("vectorstore", type(vectorstore).__name__, "a LangChain VectorStore")
    name = type(vectorstore).__name__
    homes = [(home.__module__, home.__name__) for home in type(vectorstore).__mro__]
    reader = next((_READERS[home] for home in homes if home in _READERS), None)
    if reader is None:
        raise StoreError(f"a {name} cannot be taken over as it stands: {_TAKE_DOCUMENTS}, with their vectors if any")
    kind, fault = attempt(_STORAGES.get(reader, lambda store: ""), vectorstore)
    if kind:
        raise StoreError(f"the {name} stores {kind}: {_TAKE_DOCUMENTS}")
    if not fault:
        entries, fault = attempt(_whole, reader, vectorstore)
    if fault:
        raise StoreError(f"the {name} cannot be read whole ({fault}): {_TAKE_DOCUMENTS}")
    if entries is None:
        raise StoreError(
            f"the {name} holds an entry without a text, without a vector, or with metadata that is no mapping: "
            f"{_TAKE_DOCUMENTS}"
        )
    documents, vectors = entries
    ids = [document.id for document in documents]
    if len(set(ids)) < len(ids) or "" in ids:
        raise StoreError(f"the {name} holds an entry without an id, or two with the same: {_TAKE_DOCUMENTS}")
    refuse_numbers(ids)
    return documents, vectors


def is_number(id: str) -> bool:
    """Return whether it is the id of a record that came without one: # and its number."""
    return _NUMBER.fullmatch(id) is not None


def refuse_numbers(ids: Sequence[str], known: Collection[str | None] = ()) -> None:
    """`InvalidRecords` for a new id that the store may give another record, which it would then replace."""
    for i, each in enumerate(ids):
        if is_number(each) and each not in known:
            raise InvalidRecords(
                f"document {i} has an id of # and a number, as records without an id have: name it else"
            )


def _whole(reader: _Reader, store: Any) -> tuple[list[Document], Vectors] | None:
    """The documents and their vectors; None if an entry is no document with a vector."""
    from langchain_core.documents import Document

    documents, vectors = [], []
    for id, text, metadata, vector in reader(store):
        metadata = {} if metadata is None else metadata
        if not isinstance(text, str) or not isinstance(metadata, Mapping) or vector is None:
            return None
        metadata = copy.deepcopy(dict(metadata))
        documents.append(Document(page_content=plain(text), metadata=metadata, id=plain(str(plain(id)))))
        vectors.append(vector)
    return documents, np.asarray(vectors, np.float32)


def _in_memory(store: Any) -> Iterator[Entry]:
    for id, entry in store.store.items():
        yield id, entry["text"], entry["metadata"], entry["vector"]


def _scikit_learn(store: Any) -> Iterator[Entry]:
    # It writes each text's own id into the metadata when it searches; here they are as they were given.
    yield from zip(store._ids, store._texts, store._metadatas, store._embeddings, strict=True)


def _scikit_learn_storage(store: Any) -> str:
    """Refuses Parquet: its columns have one type for all, so one record's metadata get the keys of others."""
    is_parquet = any(each.__name__ == "ParquetSerializer" for each in type(store._serializer).__mro__)
    return "metadata in Parquet, which gives all the same keys (fill one with a JSON serializer anew)" * is_parquet


def _faiss(store: Any) -> Iterator[Entry]:
    ids = store.index_to_docstore_id
    index, kind = _faiss_index(store.index)  # what is read is what is checked
    count = index.ntotal
    if kind or sorted(ids) != list(range(count)):
        raise LookupError
    vectors = index.reconstruct_n(0, count) if count else []
    for i, vector in enumerate(vectors):
        document = store.docstore.search(ids[i])
        yield ids[i], document.page_content, document.metadata, vector


def _faiss_storage(store: Any) -> str:
    """The kind of index, unless it keeps each vector as it came: "" then."""
    kind = _faiss_index(store.index)[1]
    return kind and f"its vectors as {kind}, {_NOT_AS_THEY_CAME}"


def _faiss_index(given: Any) -> tuple[Any, str]:
    """The index without what Python code adds to it, and its kind, unless it keeps each vector as it came."""
    import faiss

    found = index = faiss.downcast_index(given)
    while type(given).__module__.split(".")[0] == "faiss":  # else a class of somebody's own
        kind = type(index).__name__
        if kind in ("IndexFlat", "IndexFlatL2", "IndexFlatIP"):
            return found, ""
        if kind not in _AROUND:
            return found, kind
        given = getattr(index, _AROUND[kind])
        index = faiss.downcast_index(given)
    return found, type(given).__name__


_AROUND = {"IndexHNSWFlat": "storage", "IndexIDMap2": "index"}
"""Indexes whose vectors another one keeps, and their attribute for that one."""


def _chroma(store: Any) -> Iterator[Entry]:
    ids = store.get(include=[])["ids"]  # pages by number would skip documents if others are deleted meanwhile
    for start in range(0, len(ids), _PAGE):
        page = store.get(ids[start : start + _PAGE], include=["documents", "metadatas", "embeddings"])
        yield from zip(
            page["ids"],
            page["documents"],
            page["metadatas"],
            page["embeddings"],
            strict=True,
        )


def _qdrant(store: Any) -> Iterator[Entry]:
    offset = None
    while True:
        points, offset = store.client.scroll(
            store.collection_name,
            limit=_PAGE,
            offset=offset,
            with_payload=True,
            with_vectors=True,
        )
        for point in points:
            payload = point.payload or {}
            vector = point.vector
            if isinstance(vector, dict):
                vector = vector.get(store.vector_name)
            yield (
                point.id,
                payload.get(store.content_payload_key),
                payload.get(store.metadata_payload_key),
                vector,
            )
        if offset is None:
            return


def _qdrant_storage(store: Any) -> str:
    """The type of the numbers, unless it is the usual one. What the collection searches by may be quantised."""
    about = store.client.get_collection(store.collection_name).config.params.vectors
    about = about.get(store.vector_name) if isinstance(about, dict) else about
    kind = getattr(getattr(about, "datatype", None), "value", "float32")
    return "" if kind == "float32" else f"its vectors as {kind}, {_NOT_AS_THEY_CAME}"


def _pgvector(store: Any) -> Iterator[Entry]:
    with store._make_sync_session() as session:
        row = store.EmbeddingStore
        collection = store.get_collection(session)  # none: it does not exist, which the fault says
        asked = session.query(row.id, row.document, row.cmetadata, row.embedding)
        yield from asked.filter(row.collection_id == collection.uuid).order_by(row.id).yield_per(_PAGE)


_READERS: dict[tuple[str, str], _Reader] = {
    ("langchain_core.vectorstores.in_memory", "InMemoryVectorStore"): _in_memory,
    ("langchain_community.vectorstores.faiss", "FAISS"): _faiss,
    ("langchain_community.vectorstores.sklearn", "SKLearnVectorStore"): _scikit_learn,
    ("langchain_chroma.vectorstores", "Chroma"): _chroma,
    ("langchain_qdrant.qdrant", "QdrantVectorStore"): _qdrant,
    ("langchain_postgres.vectorstores", "PGVector"): _pgvector,
}
"""By the class's home and name: the libraries need not be installed."""

_STORAGES: dict[_Reader, Callable[[Any], str]] = {
    _faiss: _faiss_storage,
    _qdrant: _qdrant_storage,
    _scikit_learn: _scikit_learn_storage,
}
"""The fault in how a collection is stored, by its reader.

The other kinds have float32, or Python's floats, and metadata one by one.
"""
