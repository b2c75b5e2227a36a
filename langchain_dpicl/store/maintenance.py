"""A store's documents for those who keep it up to date: loaders, LangChain's indexing API, other vector stores.

All of this is the trusted side. Nothing that it answers is a release, and no chain that is given to an ensemble may
reach it: it is one of the `PrivateRecords`.

**A change is not a forgetting.** A document that is deleted or replaced is gone as after `forget`, and other processes
follow. But ledgers keep the marks of
its owner. So an owner whose documents change, or leave and come again, goes on with the tickets that it has left, and a
loader that loses a source for a day refills nothing. Use `forget` for an owner who is to be forgotten: while the store
holds a record of it, that removes its marks too.

Without an owner key, a document is its own owner and is known by its content. A changed document is then another owner,
with tickets of its own: each version is protected, the versions together are not. If they are to be, name what they
share as ``owner_key``, such as ``source``.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from langchain_dpicl.errors import (
    InvalidParameter,
    InvalidRecords,
    StoreError,
    UnsafeConfigurationError,
)
from langchain_dpicl.private import PrivateRecords
from langchain_dpicl.store.base import Arrival, Held, Numbers
from langchain_dpicl.store.records import (
    Batch,
    Vectors,
    as_matrix,
    attempt,
    check_records,
    plain,
    read_each,
    records_of,
    unpack,
)
from langchain_dpicl.store.sources import contents_of, is_number, refuse_numbers

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings
    from langchain_core.indexing import IndexingResult

    from langchain_dpicl.store.opened import OpenStore
    from langchain_dpicl.store.view import StoreView


def follow_collection(store: OpenStore, vectorstore: VectorStore) -> IndexingResult:
    """`ExemplarStore.sync_from`."""
    documents, vectors = contents_of(vectorstore)
    if not documents:
        raise StoreError("the collection is empty: nothing was changed; to empty the store, delete its documents")
    batch = checked(store, documents)
    matrix = batch.embed(store.embeddings, vectors, store.dimension)
    wanted = [str(document.id) for document in documents]
    records, there = content_of(store)
    stand = {each.document: i for i, each in enumerate(records)}
    new = [i for i, document in enumerate(wanted) if document not in stand]
    changed = [
        i
        for i, document in enumerate(wanted)
        if (at := stand.get(document)) is not None
        and (
            records[at].content != batch.contents[i]
            or (batch.owners is not None and records[at].owner != batch.owners[i])
            or not np.array_equal(there[at], matrix[i])
        )
    ]
    present = set(wanted)
    gone = [each for each in stand if each not in present and not is_number(each)]
    chosen = sorted([*new, *changed])
    if chosen or gone:
        arrival = None
        if chosen:
            arrival = Arrival(some(batch, chosen), matrix[chosen], [wanted[i] for i in chosen])
        store._change(arrival, gone)
    return {
        "num_added": len(new),
        "num_updated": len(changed),
        "num_skipped": len(wanted) - len(chosen),
        "num_deleted": len(gone),
    }


def checked(store: OpenStore, documents: Iterable[Document]) -> Batch:
    """Documents, checked and packed under the store's keys. Raises `InvalidRecords`."""
    return check_records(records_of(documents, store.input_key), store._collection.keys, None)


def content_of(store: OpenStore) -> tuple[list[Held], Vectors]:
    """All records of a store as they stand, and their vectors. Private."""
    with store.reading() as view:
        rows, _ = view.rows_of(view.numbers)
        return view.records(rows), view.vectors(rows)


def some(batch: Batch, chosen: Sequence[int]) -> Batch:
    """These of the records."""
    owners = None if batch.owners is None else [batch.owners[i] for i in chosen]
    return Batch([batch.texts[i] for i in chosen], [batch.contents[i] for i in chosen], owners, None)


class StoreMaintenance(VectorStore, PrivateRecords):
    """A store as a LangChain vector store, for the trusted side: what loaders and the indexing API write to.

    Its documents have the store's input as their text, and the rest of a record, the owner included, as their metadata.
    A record that came without an id has ``#`` and its number. Every change is committed in the database when a method
    returns: all of it, or nothing. A change costs its own documents.

    Searches read all records and are exact, by cosine. They are not differentially private: show nothing of them to
    somebody who may not see the records, and give no member this object, its retriever or its tools.

    Raises `InvalidRecords`, which names a document's position: no text, no owner, metadata that cannot be kept;
    `StoreError` if the model, a file or the database fails.
    """

    def __init__(self, store: OpenStore) -> None:
        self._store = store

    @property
    def embeddings(self) -> Embeddings:
        """The store's embedding model."""
        return self._store.embeddings

    # -- changes ------------------------------------------------------------------------------------------------------

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents, or replace those whose id is there already; their ids.

        ``ids`` are theirs by default, and random for a document without one. The last of several with one id counts.
        An id of ``#`` and a number replaces a record that has it, and is refused otherwise.
        ``batch_size``, which `index` gives, has no effect: all documents are one change.
        """
        given = kwargs.pop("ids", None)
        kwargs.pop("batch_size", None)
        _refuse(kwargs, "ids")
        own: list[Any] = []

        def noted() -> Iterator[Document]:
            for document in documents:
                own.append(plain(getattr(document, "id", None)))
                yield document

        batch = checked(self._store, noted())
        chosen = own if given is None else list(read_each(given, "id"))
        if len(chosen) != len(batch.texts):
            raise InvalidRecords(f"ids has {len(chosen)} entries for {len(batch.texts)} documents")
        ids = [str(uuid.uuid4()) if each is None else each for each in chosen]
        for i, each in enumerate(ids):
            if not isinstance(each, str) or not each:
                raise InvalidRecords(f"document {i} has an id that is no text: {type(each).__name__}")
        if numbers := [each for each in ids if is_number(each)]:
            refuse_numbers(ids, {each.id for each in self.get_by_ids(numbers)})
        if last := sorted({each: i for i, each in enumerate(ids)}.values()):
            batch = some(batch, last)
            matrix = batch.embed(self._store.embeddings, None, self._store.dimension, batch=self._store.batch)
            self._store._change(Arrival(batch, matrix, [ids[i] for i in last]), ())
        return ids

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """`add_documents`, of texts with their metadata beside them."""
        texts = list(read_each(texts, "text"))
        given = [{}] * len(texts) if metadatas is None else metadatas
        beside = list(read_each(given, "metadata", copy.deepcopy))
        if len(beside) != len(texts):
            raise InvalidRecords(f"metadatas has {len(beside)} entries for {len(texts)} texts")
        documents = []
        for i, (text, metadata) in enumerate(zip(texts, beside, strict=True)):
            document, fault = attempt(partial(Document, metadata=metadata), text)
            if fault:
                raise InvalidRecords(
                    f"document {i} cannot be read ({fault}): give a text, and a mapping as its metadata"
                )
            documents.append(document)
        return self.add_documents(documents, ids=ids, **kwargs)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Remove documents, as far as they are there. An owner with no other leaves the store, not the ledgers."""
        _refuse(kwargs, "ids")
        if ids is None or isinstance(ids, str) or not all(isinstance(each, str) for each in ids):
            raise InvalidParameter("ids", type(ids).__name__, "a list of documents' ids")
        with self._store.reading() as view:
            is_any = len(view.rows_with(ids)) > 0
        if is_any:
            self._store._change(None, ids)
        return True

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """These documents, as far as they are there."""
        with self._store.reading() as view:
            return self._documents(view, view.rows_with(ids))

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """The k documents nearest to a query, the nearest first."""
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        """The same with their cosines."""
        return self._nearest(self._store.embed_query(query), k, kwargs)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """The k documents nearest to a vector, the nearest first."""
        vector = as_matrix([embedding], 1)
        if vector.shape[1] != self._store.dimension:
            raise InvalidParameter("embedding", vector.shape[1], f"a vector of {self._store.dimension} numbers")
        return [document for document, _ in self._nearest(vector[0], k, kwargs)]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda cosine: (1.0 + cosine) / 2.0

    def _nearest(self, query: Vectors, k: int, options: dict[str, Any]) -> list[tuple[Document, float]]:
        _refuse(options, "query and k")
        if not isinstance(k, int) or k < 1:
            raise InvalidParameter("k", k, "a whole number of at least 1")
        with self._store.reading() as view:
            rows, _ = view.rows_of(view.numbers)
            cosines = view.similarity(rows, query)
            best = np.argsort(-cosines, kind="stable")[:k]
            documents = self._documents(view, rows[best])
        return list(zip(documents, cosines[best].tolist(), strict=True))

    def _documents(self, view: StoreView, rows: Numbers) -> list[Document]:
        return [self._document(held) for held in view.records(rows)]

    def _document(self, held: Held) -> Document:
        fields = unpack(held.content)
        if self._store.owner_key is not None:
            fields[self._store.owner_key] = held.owner
        return Document(
            page_content=fields.pop(self._store.input_key, ""),
            metadata=fields,
            id=held.document,
        )

    @classmethod
    def from_texts(cls, texts: list[str], embedding: Embeddings, *_: Any, **__: Any) -> NoReturn:
        """Refused: a store is made first."""
        raise UnsafeConfigurationError(
            "make a store (ExemplarStore.from_documents, or empty) and ask its maintenance()"
        )

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("a store's documents are not pickled or copied")


def _refuse(options: dict[str, Any], known: str) -> None:
    """An option without effect, such as a filter, would be taken for one that has it."""
    if options:
        raise InvalidParameter(next(iter(options)), "given", f"left out: only {known} are read here")
