"""Records from elsewhere: users' files, LangChain documents, and vector stores in memory."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_dpicl.errors import InvalidParameter, InvalidRecords, StoreError
from langchain_dpicl.store.intake import Vectors, attempt

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.vectorstores import VectorStore

_TAKE_DOCUMENTS = "give its documents to ExemplarStore.from_documents"

_READABLE = {
    ("langchain_core.vectorstores.in_memory", "InMemoryVectorStore"),
    ("langchain_community.vectorstores.faiss", "FAISS"),
    ("langchain_community.vectorstores.sklearn", "SKLearnVectorStore"),
}
"""The class's home and name: langchain-community need not be installed."""


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All records of a ``.jsonl``, ``.json`` (lines) or ``.csv`` file (``.gz`` too), UTF-8.

    Raises `InvalidRecords` for a file that cannot be read, is empty, or has a bad line; the message names the line's
    number and shows nothing of it.
    """
    path = Path(path)
    is_gzip = path.suffix == ".gz"
    is_csv = Path(path.stem if is_gzip else path.name).suffix == ".csv"
    text, reason = "", ""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if is_gzip else content).decode("utf-8-sig")
    except UnicodeDecodeError:
        reason = "not UTF-8"
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "not a whole gzip file"
    if reason:
        raise InvalidRecords(f"{path.name!r} cannot be read: {reason}")
    records: list[dict[str, Any]] = []
    for line, record in _parsed(text, is_csv):
        if record is None:
            problem = "does not match the CSV header" if is_csv else "is not a JSON object"
            raise InvalidRecords(f"line {line} of {path.name!r} {problem}")
        records.append(record)
    if not records:
        raise InvalidRecords(f"{path.name!r} holds no records")
    return records


def _parsed(text: str, is_csv: bool) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Each record with its line's number, None for a bad line."""
    if is_csv:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        try:
            for row in reader:
                yield reader.line_num, None if None in row or None in row.values() else row
        except csv.Error:
            yield reader.line_num, None
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            record: Any = None
            with contextlib.suppress(ValueError):
                record = json.loads(line)
            yield number, record if isinstance(record, dict) else None


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
            is_kept = False
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                is_kept = isinstance(key, str) and (key == owner_key or bool(json.dumps(value)))
            if not is_kept:
                raise InvalidRecords(f"document {i} has metadata under {key!r} that JSON cannot represent")
        if input_key in document.metadata:
            raise InvalidRecords(
                f"document {i} has metadata under {input_key!r}, where its text goes: name another input_key"
            )
        records.append({input_key: document.page_content, **document.metadata})
    return records


def contents_of(vectorstore: VectorStore) -> tuple[list[Document], Vectors]:
    """All documents that a vector store holds, and their vectors in the same order.

    Raises `StoreError` for one that cannot be read whole. Its own errors may quote a document, so they do not get out.
    """
    from langchain_core.vectorstores import VectorStore

    if not isinstance(vectorstore, VectorStore):
        raise InvalidParameter("vectorstore", type(vectorstore).__name__, "a LangChain VectorStore")
    name = type(vectorstore).__name__
    kind = next((c.__name__ for c in type(vectorstore).__mro__ if (c.__module__, c.__name__) in _READABLE), None)
    if kind is None:
        raise StoreError(f"a {name} cannot be taken over as it stands: {_TAKE_DOCUMENTS}, with their vectors if any")
    found, fault = attempt(_read, kind, vectorstore)
    if fault:
        raise StoreError(f"the {name} cannot be read whole ({fault}): {_TAKE_DOCUMENTS}")
    if found is None:
        raise StoreError("the FAISS index and its documents do not belong together: their numbers differ")
    documents, vectors = found
    return documents, vectors


def _read(kind: str, store: Any) -> tuple[list[Document], Vectors] | None:
    """What a vector store of this kind holds; None if FAISS's index and documents differ."""
    from langchain_core.documents import Document

    if kind == "InMemoryVectorStore":
        held = list(store.store.values())
        documents = [Document(page_content=entry["text"], metadata=entry["metadata"]) for entry in held]
        return documents, np.asarray([entry["vector"] for entry in held], np.float32)
    if kind == "SKLearnVectorStore":
        pairs = zip(store._texts, store._metadatas, strict=True)
        # It writes each text's own id into the metadata when it searches; here they are as they were given.
        documents = [Document(page_content=text, metadata=dict(metadata)) for text, metadata in pairs]
        return documents, np.asarray(store._embeddings, np.float32)
    count, ids = store.index.ntotal, store.index_to_docstore_id
    if sorted(ids) != list(range(count)):
        return None
    documents = [store.docstore.search(ids[i]) for i in range(count)]
    return documents, np.asarray(store.index.reconstruct_n(0, count) if count else [], np.float32)
