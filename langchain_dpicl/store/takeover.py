"""Collections that exist already, on their way into a store: LangChain documents, and vector stores in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_dpicl.errors import InvalidParameter, InvalidRecords, StoreError
from langchain_dpicl.store.intake import Vectors

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.vectorstores import VectorStore

Contents = tuple[list[Any], Vectors]
"""Documents, and their vectors in the same order."""


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
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def contents_of(vectorstore: VectorStore) -> Contents:
    """All that a vector store holds. Raises `StoreError` for one that cannot be read whole."""
    from langchain_core.vectorstores import VectorStore

    if not isinstance(vectorstore, VectorStore):
        raise InvalidParameter("vectorstore", type(vectorstore).__name__, "a LangChain VectorStore")
    for kind in type(vectorstore).__mro__:
        read = _READERS.get((kind.__module__, kind.__name__))
        if read is not None:
            return _read(read, vectorstore)
    raise StoreError(
        f"a {type(vectorstore).__name__} cannot be taken over as it stands: "
        "give its documents to ExemplarStore.from_documents, with their vectors if you have them"
    )


def _read(read: Callable[[Any], Contents], vectorstore: VectorStore) -> Contents:
    failure: type[Exception] | None = None
    try:
        return read(vectorstore)
    except StoreError:
        raise
    except Exception as error:  # its message may quote a document
        failure = type(error)
    raise StoreError(
        f"the {type(vectorstore).__name__} cannot be read whole ({failure.__module__}.{failure.__qualname__}): "
        "give its documents to ExemplarStore.from_documents"
    )


def _in_memory(vectorstore: Any) -> Contents:
    from langchain_core.documents import Document

    held = list(vectorstore.store.values())
    documents = [Document(page_content=entry["text"], metadata=entry["metadata"]) for entry in held]
    return documents, _matrix([entry["vector"] for entry in held])


def _faiss(vectorstore: Any) -> Contents:
    index = vectorstore.index
    position_to_id = vectorstore.index_to_docstore_id
    if sorted(position_to_id) != list(range(index.ntotal)):
        raise StoreError("the FAISS index and its documents do not belong together: their numbers differ")
    documents = [vectorstore.docstore.search(position_to_id[i]) for i in range(index.ntotal)]
    return documents, _matrix(index.reconstruct_n(0, index.ntotal) if index.ntotal else [])


def _sklearn(vectorstore: Any) -> Contents:
    from langchain_core.documents import Document

    pairs = zip(vectorstore._texts, vectorstore._metadatas, strict=True)
    # It writes each text's own id into the metadata when it searches; here they are as they were given.
    documents = [Document(page_content=text, metadata=dict(metadata)) for text, metadata in pairs]
    return documents, _matrix(vectorstore._embeddings)


def _matrix(vectors: Any) -> Vectors:
    return np.asarray(vectors, np.float32)


_READERS: dict[tuple[str, str], Callable[[Any], Contents]] = {
    ("langchain_core.vectorstores.in_memory", "InMemoryVectorStore"): _in_memory,
    ("langchain_community.vectorstores.faiss", "FAISS"): _faiss,
    ("langchain_community.vectorstores.sklearn", "SKLearnVectorStore"): _sklearn,
}
"""By the class's home, so that langchain-community need not be installed."""
