"""Collections that exist already, on their way into a store: LangChain documents, and vector stores in memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_dpicl.errors import InvalidParameter, InvalidRecords, StoreError
from langchain_dpicl.store.intake import Vectors, attempt

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.vectorstores import VectorStore

    _Contents = tuple[list[Document] | None, Vectors]

_TAKE_DOCUMENTS = "give its documents to ExemplarStore.from_documents"


def records_of(documents: Iterable[Document], input_key: str, owner_key: str | None = None) -> list[dict[str, Any]]:
    """Each document as a record: its text under ``input_key``, its metadata beside it. Raises `InvalidRecords`.

    The owner's entry need not be JSON: it is not kept as metadata.
    """
    from langchain_core.documents import Document

    records: list[dict[str, Any]] = []
    for i, document in enumerate(documents):
        if not isinstance(document, Document):
            raise InvalidRecords(f"document {i} is not a Document but {type(document).__name__}")
        if not document.page_content.strip():
            raise InvalidRecords(f"document {i} has no text")
        for key, value in document.metadata.items():
            if not isinstance(key, str) or (key != owner_key and not _is_json(value)):
                raise InvalidRecords(f"document {i} has metadata under {key!r} that JSON cannot represent")
        if input_key in document.metadata:
            raise InvalidRecords(
                f"document {i} has metadata under {input_key!r}, where its text goes: name another input_key"
            )
        records.append({input_key: document.page_content, **document.metadata})
    return records


def _is_json(value: object) -> bool:
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        json.dumps(value)
        return True
    return False


def contents_of(vectorstore: VectorStore) -> tuple[list[Document], Vectors]:
    """All documents that a vector store holds, and their vectors in the same order.

    Raises `StoreError` for one that cannot be read whole. Its own errors may quote a document, so they do not get out.
    """
    from langchain_core.vectorstores import VectorStore

    if not isinstance(vectorstore, VectorStore):
        raise InvalidParameter("vectorstore", type(vectorstore).__name__, "a LangChain VectorStore")
    kind = type(vectorstore).__name__
    readers = (_READERS.get((base.__module__, base.__name__)) for base in type(vectorstore).__mro__)
    read = next(filter(None, readers), None)
    if read is None:
        raise StoreError(f"a {kind} cannot be taken over as it stands: {_TAKE_DOCUMENTS}, with their vectors if any")
    found, fault = attempt(read, vectorstore)
    if fault:
        raise StoreError(f"the {kind} cannot be read whole ({fault}): {_TAKE_DOCUMENTS}")
    documents, vectors = found
    if documents is None:
        raise StoreError("the FAISS index and its documents do not belong together: their numbers differ")
    return documents, vectors


def _in_memory(vectorstore: Any) -> _Contents:
    from langchain_core.documents import Document

    held = list(vectorstore.store.values())
    documents = [Document(page_content=entry["text"], metadata=entry["metadata"]) for entry in held]
    return documents, np.asarray([entry["vector"] for entry in held], np.float32)


def _faiss(vectorstore: Any) -> _Contents:
    count, ids = vectorstore.index.ntotal, vectorstore.index_to_docstore_id
    if sorted(ids) != list(range(count)):
        return None, np.empty(0, np.float32)
    documents = [vectorstore.docstore.search(ids[i]) for i in range(count)]
    return documents, np.asarray(vectorstore.index.reconstruct_n(0, count) if count else [], np.float32)


def _sklearn(vectorstore: Any) -> _Contents:
    from langchain_core.documents import Document

    pairs = zip(vectorstore._texts, vectorstore._metadatas, strict=True)
    # It writes each text's own id into the metadata when it searches; here they are as they were given.
    documents = [Document(page_content=text, metadata=dict(metadata)) for text, metadata in pairs]
    return documents, np.asarray(vectorstore._embeddings, np.float32)


_READERS: dict[tuple[str, str], Callable[[Any], _Contents]] = {
    ("langchain_core.vectorstores.in_memory", "InMemoryVectorStore"): _in_memory,
    ("langchain_community.vectorstores.faiss", "FAISS"): _faiss,
    ("langchain_community.vectorstores.sklearn", "SKLearnVectorStore"): _sklearn,
}
"""By the class's home: langchain-community need not be installed."""
