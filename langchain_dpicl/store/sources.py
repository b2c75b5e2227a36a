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
    homes = [f"{home.__module__}.{home.__name__}" for home in type(vectorstore).__mro__]
    reader = next((_READERS[home] for home in homes if home in _READERS), None)
    if reader is None:
        raise StoreError(f"a {name} cannot be taken over as it stands: {_TAKE_DOCUMENTS}, with their vectors if any")
    found, fault = attempt(_whole, reader, vectorstore)
    if fault:
        found = [], [], f"cannot be read whole ({fault})"
    documents, vectors, problem = found
    if problem:
        raise StoreError(f"the {name} {problem}: {_TAKE_DOCUMENTS}")
    refuse_numbers([document.id for document in documents])
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


class _OtherwiseError(Exception):
    """A collection does not hold documents as they came. Its message quotes none."""


def _whole(reader: _Reader, store: Any) -> tuple[list[Document], Any, str]:
    """The documents and their vectors; and the problem of a collection that cannot be taken over."""
    from langchain_core.documents import Document

    documents: list[Document] = []
    vectors: list[Any] = []
    try:
        for id, text, given, vector in reader(store):
            metadata = {} if given is None else given
            if not isinstance(text, str) or not isinstance(metadata, Mapping) or vector is None:
                raise _OtherwiseError(
                    "holds an entry without a text, without a vector, or with metadata that is no mapping"
                )
            metadata = copy.deepcopy(dict(metadata))
            documents.append(Document(page_content=plain(text), metadata=metadata, id=plain(str(plain(id)))))
            vectors.append(vector)
        ids = {document.id for document in documents}
        if len(ids) < len(documents) or "" in ids:
            raise _OtherwiseError("holds an entry without an id, or two with the same")
    except _OtherwiseError as problem:
        return [], [], str(problem)
    return documents, np.asarray(vectors, np.float32), ""


# -- each kind of collection -------------------------------------------------------------------------------------------


def _in_memory(store: Any) -> Iterator[Entry]:
    for id, entry in store.store.items():
        yield id, entry["text"], entry["metadata"], entry["vector"]


def _scikit_learn(store: Any) -> Iterator[Entry]:
    if any(each.__name__ == "ParquetSerializer" for each in type(store._serializer).__mro__):
        # Its columns have one type for all, so one record's metadata get the keys of others.
        raise _OtherwiseError(
            "stores metadata in Parquet, which gives all the same keys (fill one with a JSON serializer anew)"
        )
    # It writes each text's own id into the metadata when it searches; here they are as they were given.
    return zip(store._ids, store._texts, store._metadatas, store._embeddings, strict=True)


def _faiss(store: Any) -> Iterator[Entry]:
    import faiss

    ids = store.index_to_docstore_id
    given = store.index  # what is read is what is checked
    if kind := _faiss_kind(given):
        raise _OtherwiseError(f"stores its vectors as {kind}, {_NOT_AS_THEY_CAME}")
    index = faiss.downcast_index(given)  # without what Python code adds to it
    if sorted(ids) != list(range(index.ntotal)):
        raise LookupError
    vectors = index.reconstruct_n(0, index.ntotal) if ids else []
    for i, vector in enumerate(vectors):
        document = store.docstore.search(ids[i])
        yield ids[i], document.page_content, document.metadata, vector


def _faiss_kind(given: Any) -> str:
    """The kind of an index; empty if it keeps each vector as it came."""
    import faiss

    if type(given).__module__.split(".")[0] != "faiss":  # a class of somebody's own
        return type(given).__name__
    index = faiss.downcast_index(given)
    kind = type(index).__name__
    if kind in _AROUND:
        return _faiss_kind(getattr(index, _AROUND[kind]))
    return "" if kind in ("IndexFlat", "IndexFlatL2", "IndexFlatIP") else kind


_AROUND = {"IndexHNSWFlat": "storage", "IndexIDMap2": "index"}
"""Indexes whose vectors another one keeps, and their attribute for that one."""


def _chroma(store: Any) -> Iterator[Entry]:
    parts = ["documents", "metadatas", "embeddings"]
    ids = store.get(include=[])["ids"]  # pages by number would skip documents if others are deleted meanwhile
    for start in range(0, len(ids), _PAGE):
        page = store.get(ids[start : start + _PAGE], include=parts)
        yield from zip(page["ids"], *[page[part] for part in parts], strict=True)


def _qdrant(store: Any) -> Iterator[Entry]:
    about = _named(store.client.get_collection(store.collection_name).config.params.vectors, store)
    kind = getattr(getattr(about, "datatype", None), "value", "float32")  # what it searches by may be quantised
    if kind != "float32":
        raise _OtherwiseError(f"stores its vectors as {kind}, {_NOT_AS_THEY_CAME}")
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
            yield (
                point.id,
                payload.get(store.content_payload_key),
                payload.get(store.metadata_payload_key),
                _named(point.vector, store),
            )
        if offset is None:
            return


def _named(vectors: Any, store: Any) -> Any:
    """The store's own part of what Qdrant has by the names of vectors."""
    return vectors.get(store.vector_name) if isinstance(vectors, dict) else vectors


def _pgvector(store: Any) -> Iterator[Entry]:
    with store._make_sync_session() as session:
        row = store.EmbeddingStore
        collection = store.get_collection(session)  # none: it does not exist, which the fault says
        asked = session.query(row.id, row.document, row.cmetadata, row.embedding)
        yield from asked.filter(row.collection_id == collection.uuid).order_by(row.id).yield_per(_PAGE)


_READERS: dict[str, _Reader] = {
    "langchain_core.vectorstores.in_memory.InMemoryVectorStore": _in_memory,
    "langchain_community.vectorstores.faiss.FAISS": _faiss,
    "langchain_community.vectorstores.sklearn.SKLearnVectorStore": _scikit_learn,
    "langchain_chroma.vectorstores.Chroma": _chroma,
    "langchain_qdrant.qdrant.QdrantVectorStore": _qdrant,
    "langchain_postgres.vectorstores.PGVector": _pgvector,
}
"""By the class's home and name: the libraries need not be installed."""
