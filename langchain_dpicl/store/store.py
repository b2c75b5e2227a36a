"""Private exemplars with their owners: stores are made, opened, and given to LangChain."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import URL, Connection

from langchain_dpicl.durable import refused, replacing, sync_folder
from langchain_dpicl.errors import (
    InvalidParameter,
    InvalidRecords,
    PrivacyWarning,
    StoreFileChanged,
    StoreFileError,
)
from langchain_dpicl.store import tables
from langchain_dpicl.store.base import Arrival
from langchain_dpicl.store.database import IN_MEMORY, StoreDatabase
from langchain_dpicl.store.maintenance import StoreMaintenance, follow_collection
from langchain_dpicl.store.notes import path_of
from langchain_dpicl.store.opened import NOT_YET, OpenStore
from langchain_dpicl.store.records import (
    Batch,
    RecordKeys,
    Vectors,
    attempt,
    check_records,
    embed,
    read_each,
    records_of,
)
from langchain_dpicl.store.sources import contents_of
from langchain_dpicl.store.tables import Collection

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.indexing import IndexingResult, RecordManager
    from langchain_core.vectorstores import VectorStore

    from langchain_dpicl.store.parents import MemberDocstore
    from langchain_dpicl.store.standin import MemberVectorStore


class ExemplarStore(OpenStore):
    """Private exemplars with their owners, searchable by exact inner product.

    Build one with `from_records` or `from_texts`, take over a collection with `from_documents` or `from_vectorstore`,
    or open one by its address: ``sqlite:///notes.db`` for a file, ``postgresql://user@host/database`` for a server with
    pgvector (PostgreSQL 12 or later, and the extra ``langchain-dpicl[postgres]``). Without an address it lives in this
    process alone, until `save`. Many processes may share a file, and many hosts a server.

    Vectors are scaled to norm 1 on their way in (a zero vector stays zero), so an inner product is a cosine. Owners are
    the unit of privacy: all exemplars of one owner enter and leave together. Records enter all or none; two processes
    that add to one owner at a time grow one owner. Safe for threads, and for processes that fork.

    **Memory.** The first question with a threshold reads all vectors into this process (`load_vectors`), where FAISS
    goes over them; every reading follows what has changed, here or elsewhere. A million of 384 dimensions take 1.5 GB
    in each process. With ``vectors_in_memory=False``, on PostgreSQL, there are none, and the server goes over all rows
    for each such question. Without a threshold no vector is read: a sample reads the sampled owners' rows by index.

    Nothing here is differentially private: a store is the private side. Its ``repr`` shows counts, its errors name
    positions and keys, and it refuses to be pickled or deep-copied, because a copy could not be made to forget. A role
    or an account that may read the database sees the owners' names and texts.

    Parameters
    ----------
    url
        A database. It is made if it is a SQLite file that does not exist.
    embeddings
        The model that embeds records and queries.
    name
        The collection's name in the database: up to 40 of a-z, 0-9 and _. It is made, without exemplars, if there is
        none.
    input_key, output_key, owner_key
        The keys of a record for its text, its output and its owner; without an owner each record is its own. Those of a
        collection that exists are fixed: one that is given and differs is refused. A new one has ``"text"``, and no
        others unless they are given.
    vectors_in_memory
        False: let PostgreSQL compute similarities. SQLite cannot.
    batch
        Whether the model gets many records at a time. By default it gets each alone: a model that encodes several
        together may give one other last bits beside others, so that an owner's vectors depend on other owners. A sum
        over owners (`PrivateHead`) then is not what its proof is about. `local_embeddings` encodes each alone anyway.
    dimension
        Of the vectors of a new collection. Default: that of a public word's embedding.
    must_exist
        True: make no file and no collection. See `open`.

    Raises `StoreError` if the database cannot be used, has no pgvector, or holds the collection with other keys.
    """

    # -- making and opening --------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, url: str | URL, embeddings: Embeddings, *, name: str = "exemplars", **options: Any) -> ExemplarStore:
        """Open a collection that exists, here or in another process. ``options`` are those of the class.

        The model embeds one public word, to see that it is of the collection's dimension. Raises `StoreError` if
        something differs or there is no such collection, and `ModelUnavailable` if the model fails.
        """
        store = cls(url, embeddings, name=name, must_exist=True, **options)
        if embeddings is not None:  # a command that forgets has none
            store.embed_query("word")
        return store

    @classmethod
    def load(cls, path: str | os.PathLike[str], embeddings: Embeddings) -> ExemplarStore:
        """Open the store that stands in a file of SQLite's alone. Raises `StoreFileError` for a missing or foreign
        file."""
        return cls.open(address(path), embeddings)

    @classmethod
    def empty(
        cls,
        embeddings: Embeddings,
        url: str | URL | None = None,
        *,
        input_key: str = "text",
        output_key: str | None = None,
        owner_key: str | None = None,
        **options: Any,
    ) -> ExemplarStore:
        """A store without exemplars, to be filled by `add`, `maintenance` or `sync_from`. The model embeds one public
        word. ``options`` are those of the class. Raises `StoreError` for a collection that has content already."""
        keys = RecordKeys(input_key, output_key, owner_key)
        return cls._filled(check_records([], keys, None), None, embeddings, url, keys, **options)

    @classmethod
    def from_records(
        cls,
        records: Iterable[Mapping[str, Any]],
        embeddings: Embeddings,
        url: str | URL | None = None,
        *,
        name: str = "exemplars",
        input_key: str = "input",
        output_key: str | None = "output",
        owner_key: str | None = None,
        ids: Sequence[int] | None = None,
        vectors: Vectors | None = None,
        progress: bool = False,
        vectors_in_memory: bool = True,
        batch: bool = False,
    ) -> ExemplarStore:
        """Build a store from mappings: whole, or not at all.

        ``owner_key`` names the key that holds the owner; without it each record is its own owner. ``progress`` shows a
        bar on a terminal, for the operator alone: it counts private records. ``ids`` are stable whole numbers, by
        default given out in order. ``vectors`` (rows of float32) replaces the embedding of the inputs. The rest as for
        the class. Raises `InvalidRecords`, which names a record's position, never its text: empty input, a missing or
        empty key, an embedding with NaN or infinity, a repeated id; `StoreError` for a collection that has content
        already.
        """
        keys = RecordKeys(input_key, output_key, owner_key)
        return cls._filled(
            check_records(records, keys, ids, may_be_empty=False),
            vectors,
            embeddings,
            url,
            keys,
            name=name,
            progress=progress,
            vectors_in_memory=vectors_in_memory,
            batch=batch,
        )

    @classmethod
    def _filled(
        cls,
        checked: Batch,
        vectors: Vectors | None,
        embeddings: Embeddings,
        url: str | URL | None,
        keys: RecordKeys,
        *,
        documents: Sequence[str] | None = None,
        name: str = "exemplars",
        progress: bool = False,
        batch: bool = False,
        vectors_in_memory: bool = True,
    ) -> ExemplarStore:
        """A new store with these records, and their ids as documents. Nothing is embedded if it cannot be made."""
        _check_free(url, name)
        if checked.texts:
            matrix = checked.embed(embeddings, vectors, None, progress=progress, batch=batch)
        else:
            matrix = embed(embeddings, ["word"])[:0]
        arrival = Arrival(checked, matrix, documents or [""] * len(matrix))
        store = cls(
            IN_MEMORY if url is None else url,
            embeddings,
            name=name,
            **keys._asdict(),
            vectors_in_memory=vectors_in_memory,
            batch=batch,
            dimension=matrix.shape[1],
        )
        try:
            tables.check_alike(store._collection, matrix.shape[1], keys)
            store._database.run(partial(_fill, collection=store._collection, arrival=arrival))
        except BaseException:
            store.close()
            raise
        store._tidy()
        return store

    @classmethod
    def from_texts(
        cls,
        texts: Sequence[str],
        embeddings: Embeddings,
        url: str | URL | None = None,
        *,
        outputs: Sequence[str] | None = None,
        owners: Sequence[str] | None = None,
        **options: Any,
    ) -> ExemplarStore:
        """Build a store from texts, with their outputs and owners beside them (same length) if given. ``options`` are
        those of `from_records`."""
        columns = {"input": texts, "output": outputs, "owner": owners}
        given = {key: list(read_each(values, key)) for key, values in columns.items() if values is not None}
        for key, values in given.items():
            if len(values) != len(given["input"]):
                raise InvalidRecords(f"{key}s has {len(values)} entries for {len(given['input'])} texts")
        return cls.from_records(
            [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)],
            embeddings,
            url,
            output_key=None if outputs is None else "output",
            owner_key=None if owners is None else "owner",
            **options,
        )

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Document],
        embeddings: Embeddings,
        url: str | URL | None = None,
        *,
        input_key: str = "text",
        output_key: str | None = None,
        owner_key: str | None = None,
        **options: Any,
    ) -> ExemplarStore:
        """Build a store from LangChain documents. ``options`` are those of `from_records`.

        An exemplar is the document's text under ``input_key``, with its metadata beside it; ``output_key`` and
        ``owner_key`` name entries of the metadata. No member sees the owner's entry. Documents' ids are not kept.
        Raises `InvalidRecords`, which names the document's position and the key: no text, no owner, metadata that JSON
        cannot represent, metadata under ``input_key``.
        """
        keys = RecordKeys(input_key, output_key, owner_key)
        return cls.from_records(records_of(documents, input_key), embeddings, url, **keys._asdict(), **options)

    @classmethod
    def from_vectorstore(
        cls,
        vectorstore: VectorStore,
        url: str | URL | None = None,
        *,
        embeddings: Embeddings | None = None,
        input_key: str = "text",
        output_key: str | None = None,
        owner_key: str | None = None,
        **options: Any,
    ) -> ExemplarStore:
        """Copy a collection as it stands: texts, metadata, ids and vectors. Nothing is embedded again.

        For LangChain's ``InMemoryVectorStore``, langchain-community's ``FAISS`` and ``SKLearnVectorStore``,
        langchain-chroma's ``Chroma``, langchain-qdrant's ``QdrantVectorStore`` and langchain-postgres's ``PGVector``;
        raises `StoreError` for any other, whose documents `from_documents` takes. So it does for a collection whose
        entries are not stored one by one as they came: a FAISS index other than ``IndexFlat`` and ``IndexHNSWFlat``
        (product quantisers and inverted lists are trained on all documents), a Qdrant collection of another type than
        float32, a ``SKLearnVectorStore`` in Parquet, which gives all metadata the same keys. An instance of a subclass
        of yours is read as one of its base: what it stores is taken as it is. ``embeddings``, which embeds queries,
        defaults to the collection's own model and must be the one that made its vectors. The rest as in
        `from_documents`. The store compares by cosine. A collection that was searched by cosine, or that holds vectors
        of norm 1, ranks as it did, by inner product and by Euclidean distance alike; another may rank differently.
        ``options`` are those of the class.
        Later changes to the collection reach the store with `sync_from`; `forget` does not reach the collection.
        """
        documents, vectors = contents_of(vectorstore)
        if embeddings is None:
            embeddings, _ = attempt(lambda: vectorstore.embeddings)
        if embeddings is None:
            raise InvalidParameter("embeddings", None, "given if the collection does not name its embedding model")
        keys = RecordKeys(input_key, output_key, owner_key)
        checked = check_records(records_of(documents, input_key), keys, None, may_be_empty=False)
        ids = [str(document.id) for document in documents]
        return cls._filled(checked, vectors, embeddings, url, keys, documents=ids, **options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Let a store in memory live in a new file of SQLite's from now on: whole, or not at all. Mode 0600.

        Every later change is in the file when it returns. A store that lives in this file already is left as it is.
        Raises `StoreFileError` for a store that lives elsewhere, since a copy could not be made to forget, and
        `StoreFileChanged` if the file exists.
        """
        target = path_of("path", path).absolute()
        if self._database.path == str(target):
            return
        if not self._database.is_in_memory:
            raise StoreFileError("the store lives in a database already, and a copy of it could not be made to forget")
        before = self._database
        with refused(lambda why: StoreFileError(f"the store could not be written: {why}")):
            with before.following, before.alone():
                try:
                    with replacing(target, is_new=True) as file:
                        before.copy_to(file.name)
                except FileExistsError:
                    raise StoreFileChanged(f"there is a file {target.name!r} already: nothing was written") from None
                self._database = StoreDatabase(address(target))
                self._database.opened = True
                before.close()  # whoever waits for it finds no table there
            sync_folder(target)

    # -- for LangChain -------------------------------------------------------------------------------------------------
    def as_vectorstore(self) -> MemberVectorStore:
        """A LangChain vector store to build an app over: within a member of a `PrivateEnsemble` each search reads that
        member's own exemplars, and outside of one it raises `UnsafeConfigurationError`. See `MemberVectorStore`.
        """
        from langchain_dpicl.store.standin import MemberVectorStore

        return MemberVectorStore(self.embeddings, self.dimension)

    def as_docstore(self, id_key: str = "doc_id") -> MemberDocstore:
        """A LangChain document store that gives a member the whole documents of its own bucket's chunks, for a
        ``ParentDocumentRetriever`` over `as_vectorstore`. The store's records must come from `split_with_parents`.
        """
        from langchain_dpicl.store.parents import MemberDocstore

        return MemberDocstore(self.input_key, id_key)

    def maintenance(self, record_manager: RecordManager | None = None) -> StoreMaintenance:
        """This store as a LangChain vector store for whoever keeps it up to date. Private: see `StoreMaintenance`.

        With the ``record_manager`` of LangChain's indexing API, every later `forget` of this object deletes the
        owner's documents' keys there, too, before the owner goes: if that fails, nobody is forgotten. Remove them at
        their source as well: `index` adds what it finds there. It also empties the log of a SQLite file, if an earlier
        `forget` could not; a `PrivacyWarning` if it cannot either.
        """
        if record_manager is not None and not any(each is record_manager for each in self._record_managers):
            self._record_managers.append(record_manager)
        if not self._database.write_through():
            warnings.warn(NOT_YET, PrivacyWarning, stacklevel=2)
        return StoreMaintenance(self)

    def sync_from(self, vectorstore: VectorStore) -> IndexingResult:
        """Follow a collection: add what is new in it, replace what has changed, remove what is gone, in one step.

        For the kinds that `from_vectorstore` takes. Texts, metadata, ids and vectors are copied, and nothing is
        embedded; the metadata holds the owner and the output under this store's keys. Documents are compared by id.
        Those that came without an id, by `add` or `from_records`, stay; all others are taken for earlier copies of the
        collection, so follow one collection only. Answers how many were added, replaced, left and removed. Raises
        `StoreError` for a collection that cannot be read or is empty, `InvalidRecords`.
        """
        return follow_collection(self, vectorstore)


PostgresExemplarStore = ExemplarStore
"""The same class, by the name that it had when stores on PostgreSQL were another."""


def _fill(connection: Connection, collection: Collection, arrival: Arrival) -> None:
    """Put records into a collection that has none."""
    tables.check_free(connection, collection.name)
    tables.change(connection, collection, arrival)


def _check_free(url: str | URL | None, name: str) -> None:
    """Raise `StoreError` for a collection that has content already, before anything is embedded."""
    tables.check_name(name)
    if url is None:
        return
    database = StoreDatabase(url)
    try:
        if database.path is None or os.path.exists(database.path):
            database.run(partial(tables.check_free, name=name), "read")
    finally:
        database.close()


def address(place: str | os.PathLike[str] | URL) -> URL | str:
    """The address of a database: as it is, or that of a file of SQLite's."""
    if isinstance(place, URL) or "://" in str(place):
        return place  # type: ignore[return-value]
    return URL.create("sqlite", database=str(path_of("path", place).absolute()))
