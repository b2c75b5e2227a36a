"""Small chunks to search by, and the whole documents that they come from: for `ParentDocumentRetriever` in a member.

A chunk is a record of its own, and carries its document's text. So a document belongs to its chunks' owner, enters a
bucket with them and leaves the store with them; nothing is looked up beside the bucket. A chunk passes a gate by its
own vector and metadata, and its whole document is then read, other chunks' text included.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from langchain_core.documents import Document
from langchain_core.stores import BaseStore, InMemoryBaseStore

from langchain_dpicl.errors import (
    InvalidParameter,
    InvalidRecords,
    UnsafeConfigurationError,
)
from langchain_dpicl.private import OwnBucket
from langchain_dpicl.store.records import attempt, read_each, text_and_metadata
from langchain_dpicl.store.standin import PARENT


class DocumentSplitter(Protocol):
    """Splits documents, as LangChain's text splitters do."""

    def split_documents(self, documents: Iterable[Document]) -> list[Document]:
        """The chunks, each with its document's metadata."""


def split_with_parents(
    documents: Iterable[Document], splitter: DocumentSplitter, *, id_key: str = "doc_id"
) -> list[Document]:
    """Chunks to make a store of, each with the text of the document that it comes from.

    For ``ParentDocumentRetriever(vectorstore=store.as_vectorstore(), docstore=store.as_docstore(), ...)``: it searches
    chunks and gives documents, within a member's own bucket. ``id_key`` is the retriever's. A document is stored once
    for each of its chunks. Raises `InvalidParameter` if metadata uses the keys that this needs,
    `InvalidRecords` for a document that cannot be read or split.
    """
    chunks: list[Document] = []
    for i, document in enumerate(read_each(documents, "document")):
        parts, fault = attempt(_chunks, document, splitter)
        if fault:
            raise InvalidRecords(f"document {i} cannot be split ({fault})")
        text, metadata, found = parts
        if taken := sorted({id_key, PARENT} & metadata.keys()):
            raise InvalidParameter("documents", f"document {i}", f"without metadata under {taken}")
        own = {id_key: str(uuid.uuid4()), PARENT: text}
        chunks += [Document(part, metadata={**beside, **own}) for part, beside in found]
    return chunks


def _chunks(document: Document, splitter: DocumentSplitter) -> tuple[str, dict[str, Any], list[Any]]:
    """A document's text and metadata, and those of each of its chunks."""
    return *text_and_metadata(document), [text_and_metadata(chunk) for chunk in splitter.split_documents([document])]


class MemberDocstore(OwnBucket, BaseStore[str, Document]):
    """Stands in for a document store within a member: the documents whose chunks lie in the member's own bucket.

    Raises `UnsafeConfigurationError` outside of a member. Members cannot write.
    """

    def __init__(self, input_key: str, id_key: str) -> None:
        self._without = {input_key, id_key, PARENT, "start_index"}
        self._id_key = id_key

    def mget(self, keys: Sequence[str]) -> list[Document | None]:
        """The documents with these ids, None for each that is not in the bucket."""
        return self._documents().mget(keys)

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        """The ids of the bucket's documents."""
        return self._documents().yield_keys(prefix=prefix)

    def _documents(self) -> InMemoryBaseStore[Document]:
        found = InMemoryBaseStore[Document]()
        for chunk in self.bucket_here():
            if PARENT in chunk:
                metadata = {name: chunk[name] for name in chunk.keys() - self._without}
                found.mset([(chunk[self._id_key], Document(chunk[PARENT], metadata=metadata))])
        return found

    def mset(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refused: members cannot write."""
        raise UnsafeConfigurationError(
            "members cannot write: make the store of split_with_parents(documents, splitter), whose chunks carry their "
            "documents"
        )

    mdelete = mset

    def __repr__(self) -> str:
        return "MemberDocstore()"
