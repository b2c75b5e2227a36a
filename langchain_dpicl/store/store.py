"""Private exemplars with their owners: rows in a database, and one matrix of their vectors in memory."""

from __future__ import annotations

import os
import secrets
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from sqlalchemy.engine import URL, Connection

from langchain_dpicl.calls.shut import Shut
from langchain_dpicl.durable import sync_folder
from langchain_dpicl.errors import (
    InvalidParameter,
    InvalidRecords,
    PrivacyWarning,
    StoreError,
    StoreFileChanged,
    StoreFileError,
    UnsafeConfigurationError,
)
from langchain_dpicl.private import PrivateRecords
from langchain_dpicl.store import tables
from langchain_dpicl.store.base import (
    Arrival,
    Numbers,
    OwnerWatcher,
    Parting,
    Watcher,
    embedder_of,
    owner_mark,
)
from langchain_dpicl.store.database import IN_MEMORY, StoreDatabase
from langchain_dpicl.store.matrix import Matrix
from langchain_dpicl.store.notes import DataNotes, OpenedBudget, merged, path_of
from langchain_dpicl.store.records import (
    Owners,
    RecordKeys,
    Vectors,
    aembed_query,
    attempt,
    check_records,
    decoded,
    embed,
    embed_query,
    read_each,
    records_of,
)
from langchain_dpicl.store.sources import contents_of
from langchain_dpicl.store.tables import Collection
from langchain_dpicl.store.view import StoreView

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.indexing import IndexingResult, RecordManager
    from langchain_core.vectorstores import VectorStore

    from langchain_dpicl.store.maintenance import StoreMaintenance
    from langchain_dpicl.store.parents import MemberDocstore
    from langchain_dpicl.store.standin import MemberVectorStore

_DEFAULT_KEYS = RecordKeys("text", None, None)
_KEYS = 500  # of a record manager, in one statement
_NOT_YET = (
    "another process reads the store's file just now: what was deleted stays in its log (FILE-wal) until the next "
    "maintenance() finds nobody reading"
)


class _Here(threading.local):
    """A thread's own reading."""

    view: StoreView | None = None


class ExemplarStore(PrivateRecords):
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

    Raises `StoreError` if the database cannot be used, has no pgvector, or holds the collection with other keys.
    """

    _database: Shut[StoreDatabase] = Shut()
    _matrix: Shut[Matrix | None] = Shut()
    _numbers: Shut[Numbers] = Shut()

    def __init__(
        self,
        url: str | URL,
        embeddings: Embeddings,
        *,
        name: str = "exemplars",
        input_key: str | None = None,
        output_key: str | None = None,
        owner_key: str | None = None,
        vectors_in_memory: bool = True,
        batch: bool = False,
        dimension: int | None = None,
    ) -> None:
        tables.check_name(name)
        given = RecordKeys(input_key or "", output_key, owner_key)
        self.embeddings = embeddings
        self.batch = batch
        self._watchers: list[Watcher] = []
        self._owner_watchers: list[OwnerWatcher] = []
        self._record_managers: list[RecordManager] = []
        self._notes: list[DataNotes] = []
        self._database = StoreDatabase(url)
        if not vectors_in_memory and self._database.is_sqlite:
            raise InvalidParameter("vectors_in_memory", False, "True on SQLite, which computes no similarities")
        self._in_memory = vectors_in_memory
        self._database.make_file()
        self._database.check_file()
        try:
            found = self._database.run(partial(tables.find, name=name), "read")
            if found is None:
                keys = given._replace(input_key=input_key or _DEFAULT_KEYS.input_key)
                check_records([], keys, None)
                size = dimension or embed(embeddings, ["word"]).shape[1]
                found = self._database.run(partial(tables.make, name=name, dimension=size, keys=keys))
        except BaseException:
            self._database.close()
            raise
        for key, made, asked in zip(RecordKeys._fields, found.keys, given, strict=True):
            if asked and asked != made:
                self._database.close()
                raise StoreError(f"the collection {name!r} was made with {key}={made!r}")
        self._collection = found
        self.input_key, self.output_key, self.owner_key = found.keys
        self.dimension = found.dimension
        """Of the vectors."""
        self._database.opened = True
        self._here = _Here()
        self._matrix = None
        self._numbers = np.empty(0, np.int64)
        self._key: bytes | None = None
        self._seen = self._database.run(partial(tables.moment_of, collection=found), "read").entry

    # -- making and opening --------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, url: str | URL, embeddings: Embeddings, *, name: str = "exemplars", **options: Any) -> ExemplarStore:
        """Open a collection that exists, here or in another process. ``options`` are those of the class.

        The model embeds one public word, to see that it is of the collection's dimension. Raises `StoreError` if
        something differs or there is no such collection, and `ModelUnavailable` if the model fails.
        """
        tables.check_name(name)
        database = StoreDatabase(url)
        database.check_file()
        try:
            found = database.run(partial(tables.find, name=name), "read")
        finally:
            database.close()
        if found is None:
            raise StoreError(f"there is no collection {name!r} in this database: make it with from_records")
        store = cls(url, embeddings, name=name, **options)
        if embeddings is not None:  # a command that forgets has none
            store.embed_query("word")
        return store

    @classmethod
    def load(cls, path: str | os.PathLike[str], embeddings: Embeddings) -> ExemplarStore:
        """Open the store that stands in a file of SQLite's alone. Raises `StoreFileError` for a missing or foreign
        file."""
        return cls.open(_address(path), embeddings)

    @classmethod
    def empty(
        cls,
        embeddings: Embeddings,
        url: str | URL | None = None,
        *,
        name: str = "exemplars",
        input_key: str = "text",
        output_key: str | None = None,
        owner_key: str | None = None,
        vectors_in_memory: bool = True,
        batch: bool = False,
    ) -> ExemplarStore:
        """A store without exemplars, to be filled by `add`, `maintenance` or `sync_from`. The model embeds one public
        word. Raises `StoreError` for a collection that has content already."""
        keys = RecordKeys(input_key, output_key, owner_key)
        check_records([], keys, None)
        _check_free(url, name)
        none = embed(embeddings, ["word"])[:0]
        return cls._filled(
            Arrival(check_records([], keys, None), none, ()), embeddings, url, name, keys, batch, vectors_in_memory
        )

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
        checked = check_records(records, keys, ids, may_be_empty=False)
        _check_free(url, name)
        matrix = checked.embed(embeddings, vectors, None, progress=progress, batch=batch)
        arrival = Arrival(checked, matrix, [""] * len(matrix))
        return cls._filled(arrival, embeddings, url, name, keys, batch, vectors_in_memory)

    @classmethod
    def _filled(
        cls,
        arrival: Arrival,
        embeddings: Embeddings,
        url: str | URL | None,
        name: str,
        keys: RecordKeys,
        batch: bool,
        vectors_in_memory: bool,
    ) -> ExemplarStore:
        """A new store with these records."""
        store = cls(
            IN_MEMORY if url is None else url,
            embeddings,
            name=name,
            **keys._asdict(),
            vectors_in_memory=vectors_in_memory,
            batch=batch,
            dimension=arrival.matrix.shape[1],
        )
        try:
            made = store._collection
            if (made.dimension, made.keys) != (arrival.matrix.shape[1], keys):
                raise StoreError(f"there is a collection {name!r} of another dimension or with other keys already")
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
        name: str = "exemplars",
        input_key: str = "text",
        output_key: str | None = None,
        owner_key: str | None = None,
        vectors_in_memory: bool = True,
        batch: bool = False,
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
        Later changes to the collection reach the store with `sync_from`; `forget` does not reach the collection.
        """
        documents, vectors = contents_of(vectorstore)
        if embeddings is None:
            embeddings, _ = attempt(lambda: vectorstore.embeddings)
        if embeddings is None:
            raise InvalidParameter("embeddings", None, "given if the collection does not name its embedding model")
        keys = RecordKeys(input_key, output_key, owner_key)
        checked = check_records(records_of(documents, input_key), keys, None, may_be_empty=False)
        _check_free(url, name)
        matrix = checked.embed(embeddings, vectors, None)
        arrival = Arrival(checked, matrix, [str(document.id) for document in documents])
        return cls._filled(arrival, embeddings, url, name, keys, batch, vectors_in_memory)

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
        part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        fault = ""
        try:
            os.close(os.open(part, os.O_CREAT | os.O_EXCL, 0o600))
            try:
                with self._database.following, self._database.alone():
                    before = self._database
                    before.copy_to(str(part))
                    os.link(part, target)
                    self._database = StoreDatabase(_address(target))
                    self._database.opened = True
                    before.close()  # whoever waits for it finds no table there
            finally:
                os.unlink(part)
            sync_folder(target)
        except FileExistsError:
            raise StoreFileChanged(f"there is a file {target.name!r} already: nothing was written") from None
        except OSError as error:
            fault = error.strerror or type(error).__name__
        if fault:
            raise StoreFileError(f"the store could not be written: {fault}")

    # -- public facts --------------------------------------------------------------------------------------------------

    @property
    def embedder(self) -> str:
        """The name of the model that embeds its records and queries."""
        return embedder_of(self.embeddings)

    @property
    def lineage(self) -> str | None:
        """A name by which other processes know this store again; None while it is in this process alone. Public."""
        return None if self._database.is_in_memory else self._collection.identity

    @property
    def owners(self) -> Owners:
        """The owners' keys, by number: all of them. ``owner_count`` is their number."""
        rows = self._ask(f"SELECT name FROM {self._collection.owners} ORDER BY number")
        return Owners(decoded(bytes(name)) for (name,) in rows)

    @property
    def owner_count(self) -> int:
        """The number of owners."""
        return int(self._ask(f"SELECT count(*) FROM {self._collection.owners}")[0][0])

    def __len__(self) -> int:
        """The number of exemplars."""
        return int(self._ask(f"SELECT count(*) FROM {self._collection.exemplars}")[0][0])

    def _ask(self, query: str) -> list[Any]:
        with self.reading() as view:
            return view.ask(query)

    # -- reading (the private side) ------------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[StoreView]:
        """This moment of the store, whatever others change while the ``with`` block lasts. Private.

        It holds a connection, so end it soon. Before it starts, watchers hear what was forgotten elsewhere. Readings
        within each other, in one thread, are one.
        """
        database = self._database
        if self._here.view is not None:
            yield self._here.view
            return
        with ExitStack() as ends:
            try:
                with database.following:
                    view = self._followed(ends.enter_context(database.moment()))
                    self._here.view = view
                    if view.moment.entry > self._seen:
                        self._tell_watchers(view)
                yield view
            finally:
                if (ended := self._here.view) is not None:
                    ended.connection = None
                self._here.view = None

    def _followed(self, connection: Connection) -> StoreView:
        """This transaction's moment, to which what is in memory has followed."""
        collection = self._collection
        moment = tables.moment_of(connection, collection)
        if moment.identity != collection.identity or moment.entry < self._seen:
            raise StoreFileChanged(
                f"the collection {collection.name!r} is another one, or older, than this process has read: owners who "
                "were forgotten since may be in it; open the store in a new process"
            )
        if len(self._numbers) != moment.next_number:
            self._numbers = np.arange(moment.next_number)
        matrix = self._matrix
        view = StoreView(collection, connection, moment, self._numbers, matrix, self._load)
        if matrix is not None and matrix.entry < moment.entry:
            went = view.went_since(matrix.entry)
            self._matrix = view.known = matrix.followed(moment.entry, went, view.came_since(matrix.entry))
        return view

    def _tell_watchers(self, view: StoreView) -> None:
        """Let watchers hear what went before this moment. They may read; if one fails, all hear it again."""
        if self._watchers and len(ids := view.went_since(self._seen)):
            for watcher in self._watchers:
                watcher(ids.tolist())
        self._seen = view.moment.entry

    def _load(self, view: StoreView) -> Matrix | None:
        """All rows at a reading's moment, in memory; None if none are to be kept."""
        if not self._in_memory:
            return None
        with self._database.loading:
            latest = self._matrix
            if latest is not None and latest.entry == view.moment.entry:
                return latest
            nothing = np.empty(0, np.int64)
            made = Matrix.empty(self.dimension).followed(view.moment.entry, nothing, view.came_since(0))
            if latest is None:
                self._matrix = made
            return made

    def refresh(self) -> bool:
        """Take over what other processes have changed; whether there was anything. Every reading does it."""
        moment = self._database.run(partial(tables.moment_of, collection=self._collection), "read")
        if (moment.identity, moment.entry) == (self._collection.identity, self._seen):
            return False
        with self.reading():
            return True

    def load_vectors(self) -> None:
        """Have all vectors in memory that a threshold needs, so that the first question need not wait for them."""
        with self.reading() as view:
            view.matrix()

    def close(self) -> None:
        """Close the connections, and drop the vectors in memory. A store in memory is gone then."""
        self._matrix = None
        self._database.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dimension} dimensions)"

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("a store is not pickled or copied: open it again by its address, or load() it")

    # -- queries -------------------------------------------------------------------------------------------------------

    def embed_query(self, text: str) -> Vectors:
        """A query's embedding, scaled to norm 1. Public. Raises `ModelUnavailable`, `StoreError` for a wrong size."""
        return embed_query(self.embeddings, text, self.dimension)

    async def aembed_query(self, text: str) -> Vectors:
        """`embed_query`, without blocking the event loop."""
        return await aembed_query(self.embeddings, text, self.dimension)

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

    # -- changes -------------------------------------------------------------------------------------------------------

    def add(
        self,
        records: Iterable[Mapping[str, Any]],
        *,
        owner_key: str | None = None,
        ids: Sequence[int] | None = None,
        vectors: Vectors | None = None,
        progress: bool = False,
    ) -> list[int]:
        """Add records and return their ids. All of them, or none if one is bad. An owner that exists grows.

        ``owner_key`` defaults to the store's own. Raises `InvalidRecords`; `StoreError` if the model or the database
        cannot be used. Other processes see them from their next reading on.
        """
        own = self._collection.keys
        keys = own if owner_key is None else own._replace(owner_key=owner_key)
        batch = check_records(records, keys, ids)
        if not batch.texts:
            return []
        matrix = batch.embed(self.embeddings, vectors, self.dimension, progress=progress, batch=self.batch)
        ids = self._database.run(partial(tables.insert, into=self._collection, batch=batch, matrix=matrix))
        return list(ids)

    def _change(self, arrival: Arrival | None, gone: Sequence[str]) -> None:
        """Remove these documents and those that are replaced, and add the arrivals, in one step.

        An owner who has a document before and after stays. An owner without a name goes with the exemplar that it is.
        For `maintenance` and whatever follows a source: it is not a forgetting, so ledgers keep the owners' marks.
        """
        work = partial(tables.change, collection=self._collection, arrival=arrival, gone=gone)
        if self._database.run(work):
            try:
                self.refresh()
            finally:
                self._tidy()

    def forget(self, owner: str | int) -> int:
        """Remove an owner for good and return how many exemplars went. Raises `UnknownOwner`, `StoreError`.

        One transaction: other processes no longer see the owner from their next reading on. Before its commit each
        ledger whose budgets are used with this store in this process begins to forget the owner, and after it they end;
        ``dpicl forget`` names further ledgers. What was released once of this store (`released_once`: heads,
        demonstrations) stays as it is: a `PrivacyWarning` names it.

        On SQLite the owner's words are overwritten in the file, and its log is emptied. While another process reads,
        the log stays as it is (`PrivacyWarning`), until the next `maintenance`. On PostgreSQL the tables are vacuumed,
        if this role may do so and no earlier reading is open, else later by autovacuum. It overwrites nothing: until a
        later row takes vacuumed space, the old bytes may still lie in the table's file; ``VACUUM FULL`` writes a new
        one. Write-ahead logs, replicas and backups hold what they held until they are recycled. If that matters,
        encrypt the disk, and let archives expire.

        In this process, the store's vectors of the owner are overwritten. Other copies (the caller's records, Python
        strings, prompts, buffers of libraries) are freed, and freed memory keeps its bytes until it is used again: end
        the process if that matters. Copies made elsewhere (backups, a model server's cache) are beyond its reach.

        A keyed hash of the owner stays, and the owner's number as a gap: the data file of a collection that follows one
        does not bring the owner back. If the store cannot be written, call it again: the owner gets no new tickets.
        """
        partings: list[Parting] = []
        self.mark_keys()  # before the transaction, which another connection's would wait for

        def leave(connection: Connection) -> None:
            gone = tables.delete(connection, self._collection, str(owner), self._delete_keys)
            partings.append(self._leave(gone))

        self._database.run(leave)
        try:
            self._tell(partings)
        finally:
            if not self._tidy():
                warnings.warn(_NOT_YET, PrivacyWarning, stacklevel=2)
        return len(partings[-1].ids)

    def _leave(self, gone: tables.Gone) -> Parting:
        """Tell the ledgers of an owner that is about to go.

        A ledger that fails keeps its mark: an owner who comes again has what it had left.
        """
        ends: list[Callable[[], object]] = []
        failed: Exception | None = None
        if gone.identity is None:
            return Parting(gone.ids)
        mark_of = partial(owner_mark, content=gone.identity.content, named=gone.identity.is_named)
        for watcher in self._owner_watchers:
            try:
                ends.append(watcher(self.mark_keys(), mark_of))
            except Exception as error:
                failed = failed or error
        return Parting(gone.ids, ends, failed)

    def _tell(self, partings: Sequence[Parting]) -> None:
        """Call the watchers about an owner that went. If one fails, others still hear."""
        told: list[Callable[[], object]] = [self.refresh]
        failed: BaseException | None = None
        for parting in partings:
            told += parting.ends
            failed = failed or parting.failed
        for tell in told:
            try:
                tell()
            except BaseException as error:
                if failed is None or not isinstance(error, Exception):
                    failed = error
        if failed is not None:
            raise failed
        if released := self.released_once:
            warnings.warn(
                f"released once of this store, and not changed by forgetting: {'; '.join(released)}. If the owner is "
                "to leave them too, make each anew, which takes a new share of budget, and remove the old one",
                PrivacyWarning,
                stacklevel=3,
            )

    def _tidy(self) -> bool:
        return self._database.tidy(self._collection.owners, self._collection.exemplars)

    def on_forget(self, watcher: Watcher) -> None:
        """Call ``watcher(ids)`` with the ids of the exemplars that went: at the end of every `forget` and of every
        change by `maintenance` that removed some, and when a reading finds that another process has removed some. The
        store keeps the watcher."""
        self._watchers.append(watcher)

    def on_owner_forgotten(self, watcher: OwnerWatcher) -> None:
        """At every `forget` of this object, let a ledger whose owners pay with tickets know the owner's mark.

        ``watcher(keys, mark_of)`` gets the store's own keys and the owner's mark by a key, before the owner goes,
        unless an equal exemplar, its own owner too, still has that mark. What it answers is called when the owner is
        gone (see `budget.tickets`). Another process tells its own watchers: a ledger is shared, and needs to hear
        it once. The store keeps the watchers.
        """
        self._owner_watchers.append(watcher)

    # -- for those who keep it up to date ------------------------------------------------------------------------------

    def maintenance(self, record_manager: RecordManager | None = None) -> StoreMaintenance:
        """This store as a LangChain vector store for whoever keeps it up to date. Private: see `StoreMaintenance`.

        With the ``record_manager`` of LangChain's indexing API, every later `forget` of this object deletes the
        owner's documents' keys there, too, before the owner goes: if that fails, nobody is forgotten. Remove them at
        their source as well: `index` adds what it finds there. It also empties the log of a SQLite file, if an earlier
        `forget` could not; a `PrivacyWarning` if it cannot either.
        """
        from langchain_dpicl.store.maintenance import StoreMaintenance

        if record_manager is not None and not any(each is record_manager for each in self._record_managers):
            self._record_managers.append(record_manager)
        if not self._database.write_through():
            warnings.warn(_NOT_YET, PrivacyWarning, stacklevel=2)
        return StoreMaintenance(self)

    def _delete_keys(self, documents: Sequence[str]) -> None:
        """Before an owner with these documents goes. `StoreError`; once it is gone nobody knows which they were."""
        for manager in self._record_managers:
            for start in range(0, len(documents), _KEYS):
                _, fault = attempt(manager.delete_keys, documents[start : start + _KEYS])
                if fault:
                    raise StoreError(f"the record manager fails ({fault}): nobody was forgotten; call it again")

    def sync_from(self, vectorstore: VectorStore) -> IndexingResult:
        """Follow a collection: add what is new in it, replace what has changed, remove what is gone, in one step.

        For the kinds that `from_vectorstore` takes. Texts, metadata, ids and vectors are copied, and nothing is
        embedded; the metadata holds the owner and the output under this store's keys. Documents are compared by id.
        Those that came without an id, by `add` or `from_records`, stay; all others are taken for earlier copies of the
        collection, so follow one collection only. Answers how many were added, replaced, left and removed. Raises
        `StoreError` for a collection that cannot be read or is empty, `InvalidRecords`.
        """
        from langchain_dpicl.store.maintenance import follow_collection

        return follow_collection(self, vectorstore)

    # -- beside the records --------------------------------------------------------------------------------------------

    def keep_notes(self, *notes: DataNotes | str | os.PathLike[str]) -> None:
        """Remember opened budgets in this file too, which stands beside the data file that the records came from.

        A store that is made anew from a data file then knows what was opened on the data before, and ledgers know its
        owners again. Commands and servers that read a data file do so by themselves, in ``FILE.dpicl``. Raises
        `InvalidParameter` for what is no path.
        """
        own = self._own_key()
        for each in notes:
            kept = each if isinstance(each, DataNotes) else DataNotes(each)
            if own is not None:
                kept.adopt(own)
            if kept.path not in (known.path for known in self._notes):
                self._notes.append(kept)

    def mark_keys(self, *, make: bool = False) -> tuple[bytes, ...]:
        """The secret keys by which ledgers may know this store's owners, its own first. Private.

        Its own stands in its database, a second one in its notes. A store in memory alone has none, but for that.
        ``make``: it is made there if it is missing. Raises `StoreError`, `StoreFileError`.
        """
        own = self._own_key()
        keys = [] if own is None else [own]
        for notes in self._notes:
            if (noted := notes.key(make=make and not keys)) is not None:
                keys.append(noted)
        return tuple(dict.fromkeys(keys))

    def _own_key(self) -> bytes | None:
        if self._database.is_in_memory:
            return None
        if self._key is None:
            self._key = self._database.run(partial(tables.owner_key, name=self._collection.name), "read")
        return self._key

    def _take_key(self, key: bytes) -> None:
        """Know the owners by this key, of the notes beside their data, if there are none yet."""
        self._database.run(partial(tables.take_owner_key, name=self._collection.name, key=key))
        self._key = None

    @property
    def remembers(self) -> bool:
        """True if it knows budgets again that another process, or an earlier one, opened on it."""
        return self.lineage is not None or bool(self._notes)

    @property
    def budgets(self) -> tuple[OpenedBudget, ...]:
        """The budgets that were opened on this store, here or by another process, as far as it remembers."""
        return merged(self._opened(), *(notes.budgets() for notes in self._notes))

    def remember_budget(self, budget: OpenedBudget) -> tuple[OpenedBudget, ...]:
        """Remember that a budget was opened on this store, through every change of its records; the others that were.

        Whatever one place knows, the store's own or its notes, is then known in all. A `PrivacyWarning` if it cannot be
        written down: then this process remembers alone.
        """
        known: tuple[OpenedBudget, ...] = ()
        for recall in (self._opened, *(notes.budgets for notes in self._notes)):
            with suppress(StoreError):
                known = merged(known, recall())
        known = merged(known, [budget])
        for remember in (self._open_budgets, *(notes.remember for notes in self._notes)):
            try:
                remember(known)
            except StoreError as error:
                warnings.warn(
                    f"the store cannot write down that the budget {budget.name!r} is used with its data ({error}): a "
                    "second budget that is opened elsewhere will not be noticed",
                    PrivacyWarning,
                    stacklevel=3,
                )
        return tuple(each for each in known if each.place != budget.place)

    def _opened(self) -> tuple[OpenedBudget, ...]:
        return self._database.run(partial(tables.budgets, name=self._collection.name), "read")

    def _open_budgets(self, budgets: Sequence[OpenedBudget]) -> None:
        known = self._opened()
        if not set(merged(known, budgets)) <= set(known):  # else it would wait for a change that is under way
            self._database.run(partial(tables.budgets, name=self._collection.name, new=budgets))

    @property
    def released_once(self) -> tuple[str, ...]:
        """The heads and demonstrations that were made of this store, in words, here or by another process, as far as it
        remembers. Public. They stay as they are, so `forget` warns of them (`PrivacyWarning`)."""
        return self._database.run(partial(tables.releases, name=self._collection.name), "read")

    def remember_release(self, release: str) -> None:
        """Remember what is about to be released once of this store. If it cannot be written, nothing is remembered."""
        with suppress(StoreError):
            self._database.run(partial(tables.releases, name=self._collection.name, new=release))

    def _forgotten(self) -> Callable[[bytes, bool], bool]:
        """Return the test of a forgotten owner: a function of its key and True, or of its exemplar's content and False.

        As of now: ask after the reading whose owners it is about. Private.
        """
        key, marks = self._database.run(partial(tables.forgotten, name=self._collection.name), "read")
        return lambda identity, is_named: bool(marks) and owner_mark(key, identity, named=is_named) in marks


PostgresExemplarStore = ExemplarStore
"""The same class, by the name that it had when stores on PostgreSQL were another."""


def _fill(connection: Connection, collection: Collection, arrival: Arrival) -> None:
    """Put records into a collection that has none."""
    tables.check_free(connection, collection.name)
    tables.change(connection, collection, arrival, ())


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
    return _address(place)


def _address(path: str | os.PathLike[str]) -> URL:
    return URL.create("sqlite", database=str(path_of("path", path).absolute()))
