"""The private exemplars on PostgreSQL with pgvector: for stores that many workers share, or that no memory holds.

The same owners, sampling and gate as `ExemplarStore`, which stays the default for one process and a store that fits its
memory.

**One moment.** A reading is one REPEATABLE READ transaction, so the coins, the rows and the texts of one sample belong
together whatever other workers add or forget meanwhile. Owners have ascending numbers, and a number is never given
again. There is a coin for each number so far; that of a number whose owner is gone has no effect, and all coins are
independent, so the present owners are sampled exactly as if there had never been others.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from langchain_dpicl.errors import InvalidRecords, StoreError
from langchain_dpicl.store import Owners, tables
from langchain_dpicl.store.base import Arrival, Parting, StoreView, owner_mark
from langchain_dpicl.store.maintenance import LiveStore
from langchain_dpicl.store.notes import OpenedBudget
from langchain_dpicl.store.postgres_view import PostgresView
from langchain_dpicl.store.records import (
    Batch,
    RecordKeys,
    Vectors,
    check_records,
    decoded,
    embed,
)
from langchain_dpicl.store.tables import Collection
from langchain_dpicl.store.vector_memory import Moment, VectorMemory

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from langchain_dpicl.store.sql import Connection, Connections


@contextmanager
def _connected(url: str, name: str) -> Iterator[Connections]:
    """Connections for a collection of this name, which stay open unless the ``with`` block fails."""
    from langchain_dpicl.store.sql import Connections

    tables.check_name(name)
    connections = Connections(url)
    try:
        yield connections
    except BaseException:
        connections.close()
        raise


def _start_anew(store: weakref.ref[PostgresExemplarStore]) -> None:
    if (kept := store()) is not None:
        kept._lock = threading.Lock()
        kept._memory = VectorMemory(kept._collection)


class PostgresExemplarStore(LiveStore):
    """Private exemplars with their owners, in a database that many workers share.

    Make a collection with `from_records`, and `open` it in every worker. Needs PostgreSQL 12 or later with pgvector,
    and the extra ``langchain-dpicl[postgres]``. A role that may read the tables, which are named after the collection,
    sees the owners' names and texts, so give them to the workers' role alone. Vectors are scaled to norm 1. Records
    enter all or none; two workers that add to one owner at a time grow one owner. Safe for threads, and for processes
    that fork.

    **Memory.** The first question with a threshold reads all vectors into this process (`load_vectors`), where the gate
    then goes over them as in `ExemplarStore`; every reading follows what has changed. A million of 384 dimensions take
    1.5 GB in each process. With ``vectors_in_memory=False`` there are none, and the server goes over all rows for each
    such question: 2 s for a million. A sample reads the sampled owners' rows by index: 5 ms for 50 of 100,000 owners.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        connections: Connections,
        collection: Collection,
        vectors_in_memory: bool = True,
    ) -> None:
        super().__init__(embeddings, collection.keys, collection.dimension)
        self._connections = connections
        self._collection = collection
        self._lock = threading.Lock()
        self._seen = collection.forgets
        self._in_memory = vectors_in_memory
        self._key: bytes | None = None
        self._memory = VectorMemory(collection)
        if hasattr(os, "register_at_fork"):  # a child's threads are others, and so are its readings
            os.register_at_fork(after_in_child=partial(_start_anew, weakref.ref(self)))

    @classmethod
    def from_records(
        cls,
        records: Iterable[Mapping[str, Any]],
        embeddings: Embeddings,
        url: str,
        *,
        name: str = "exemplars",
        input_key: str = "input",
        output_key: str | None = "output",
        owner_key: str | None = None,
        ids: Sequence[int] | None = None,
        vectors: Vectors | None = None,
        progress: bool = False,
        vectors_in_memory: bool = True,
    ) -> PostgresExemplarStore:
        """Make a collection in a database and fill it: whole, or not at all.

        ``url`` is ``postgresql://user@host/database``; its password is never shown. ``name`` is unique in the
        database's schema: up to 40 of a-z, 0-9 and _. ``ids`` are stable whole numbers, by default given out in order.
        The rest is as in `ExemplarStore.from_records`, `InvalidRecords` too. Raises `StoreError` for a collection that
        has content already, for a server without pgvector, and for a database that cannot be used.
        """
        keys = RecordKeys(input_key, output_key, owner_key)
        batch = check_records(records, keys, ids, may_be_empty=False)
        return cls._made(
            url,
            name,
            embeddings,
            keys,
            batch,
            partial(batch.embed, embeddings, vectors, None, progress),
            vectors_in_memory,
        )

    @classmethod
    def empty(
        cls,
        embeddings: Embeddings,
        url: str,
        *,
        name: str = "exemplars",
        input_key: str = "text",
        output_key: str | None = None,
        owner_key: str | None = None,
        vectors_in_memory: bool = True,
    ) -> PostgresExemplarStore:
        """Make a collection without exemplars, to be filled by `add`, `maintenance` or `sync_from`, as `from_records`
        makes one. The model embeds one public word."""
        keys = RecordKeys(input_key, output_key, owner_key)
        batch = check_records([], keys, None)

        def embedded() -> Vectors:
            return embed(embeddings, ["word"], False)[:0]

        return cls._made(url, name, embeddings, keys, batch, embedded, vectors_in_memory)

    @classmethod
    def _made(
        cls,
        url: str,
        name: str,
        embeddings: Embeddings,
        keys: RecordKeys,
        batch: Batch,
        embedded: Callable[[], Vectors],
        vectors_in_memory: bool,
    ) -> PostgresExemplarStore:
        with _connected(url, name) as connections:
            connections.run(tables.check_free, name)  # before anything is embedded
            matrix = embedded()
            dimension = matrix.shape[1]
            if dimension > tables.MOST_DIMENSIONS:
                raise InvalidRecords(f"embeddings have {dimension} dimensions, pgvector holds {tables.MOST_DIMENSIONS}")
            made = connections.run(tables.make, name, dimension, keys, batch, matrix)
            store = cls(embeddings, connections, made, vectors_in_memory)
        store._tidy()
        return store

    @classmethod
    def open(
        cls,
        url: str,
        embeddings: Embeddings,
        *,
        name: str = "exemplars",
        input_key: str | None = None,
        output_key: str | None = None,
        owner_key: str | None = None,
        vectors_in_memory: bool = True,
    ) -> PostgresExemplarStore:
        """Open a collection that `from_records` has made, here or in another process.

        Keys that are given must be those that it was made with. The model embeds one public word, to see that it is of
        the collection's dimension. Raises `StoreError` if something differs, there is no such collection, or the
        database cannot be used, and `ModelUnavailable` if the model fails.
        """
        with _connected(url, name) as connections:
            found = connections.run(tables.find, name)
            if found is None:
                raise StoreError(f"there is no collection {name!r} in this database: make it with from_records")
            store = cls(embeddings, connections, found, vectors_in_memory)
            for key, made, given in zip(
                RecordKeys._fields,
                found.keys,
                (input_key, output_key, owner_key),
                strict=True,
            ):
                if given not in (None, made):
                    raise StoreError(f"the collection {name!r} was made with {key}={made!r}")
            if embeddings is not None:  # a command that forgets has none
                store.embed_query("word")
        return store

    def _insert(self, batch: Batch, matrix: Vectors) -> list[int]:
        return self._connections.run(tables.insert, self._collection, batch, matrix)

    def _prepare(self) -> None:
        self._connections.run(tables.add_documents, self._collection)

    def _forgotten(self) -> Callable[[bytes, bool], bool]:
        key, marks = self._connections.run(tables.forgotten, self._collection.name)
        return lambda identity, is_named: bool(marks) and owner_mark(key, identity, named=is_named) in marks

    def _change(self, arrival: Arrival | None, gone: Sequence[str]) -> None:
        entry, ids = self._connections.run(tables.change, self._collection, arrival, gone)
        if ids:
            try:
                self._heard(entry)
                self._hear(ids)
            finally:
                self._follow()
                self._tidy()

    @property
    def owners(self) -> Owners:
        """The owners' keys, by number: all of them, from the server. ``owner_count`` is their number."""
        found = self._connections.look(f"SELECT name FROM {self._collection.owners} ORDER BY number")
        return Owners(decoded(name) for (name,) in found)

    @property
    def owner_count(self) -> int:
        return int(self._connections.look(f"SELECT count(*) FROM {self._collection.owners}")[0][0])

    def __len__(self) -> int:
        return int(self._connections.look(f"SELECT count(*) FROM {self._collection.exemplars}")[0][0])

    @contextmanager
    def reading(self) -> Iterator[StoreView]:
        """This moment of the collection, whatever others change while the ``with`` block lasts. Private.

        It holds a connection of the pool, and the server keeps what is deleted meanwhile, so end it soon. Before it
        starts, watchers hear what was forgotten elsewhere: of every exemplar, of some twice.
        """
        counters = (
            f"SELECT '{self._collection.exemplars}'::regclass::oid::bigint, next_id, forgets, "
            f"(SELECT coalesce(max(number) + 1, 0) FROM {self._collection.owners}) "
            "FROM dpicl_collections WHERE name = %s"
        )
        went = f"SELECT ids FROM {self._collection.forgotten} WHERE entry > %s AND entry <= %s ORDER BY entry"
        memory = self._memory
        with memory.reading() as known, self._connections.snapshot() as ask:
            with memory.following:
                if not (row := ask(counters, self._collection.name)):
                    raise StoreError(f"there is no collection {self._collection.name!r} any more")
                *state, end = row[0]
                moment = Moment(*state)
                if known is not None and not moment.may_follow(known):  # made anew, or restored from an older copy
                    self._drop_vectors()
                    memory = VectorMemory(self._collection)
                elif memory.moment is not None:
                    memory.follow(ask, moment)
            with self._lock:
                watchers = list(self._watchers)
                last = self._seen
                self._seen = max(last, moment.logged)
            try:
                if watchers and moment.logged > last:
                    for (ids,) in ask(went, last, moment.logged):
                        for watcher in watchers:
                            watcher(ids)
            except BaseException:
                with self._lock:
                    self._seen = min(last, self._seen)  # again with the next reading
                raise
            view = PostgresView(self._collection, ask, end, moment, memory if self._in_memory else None)
            try:
                yield view
            finally:
                view.has_ended = True

    def forget(self, owner: str | int) -> int:
        """Remove an owner for good and return how many exemplars went. Raises `UnknownOwner`, `StoreError`.

        One transaction: other workers no longer see the owner from their next reading on. Before its commit the ledgers
        begin to forget the owner, and after it they end. Then the tables are vacuumed, if this role may do so and no
        earlier reading is open, else later by autovacuum. They keep the owner's number, as a gap, and exemplars' ids.

        PostgreSQL overwrites nothing. Until a later row takes vacuumed space, the old bytes may still lie in the
        table's file; ``VACUUM FULL`` writes a new one. Write-ahead logs, replicas and backups hold what they held until
        they are recycled. If that matters, encrypt the disk, and let archives expire. A keyed hash of the owner stays:
        the data file of a collection that follows one does not bring it back.
        """

        def leave(connection: Connection) -> tuple[int, Parting]:
            entry, gone = tables.delete(connection, self._collection, str(owner), self._delete_keys)
            return entry, self._leave(*gone)

        self.mark_keys()  # before the transaction, which another connection's would wait for
        entry, gone = self._connections.run(leave)
        try:
            self._heard(entry)
            self._tell(gone)
        finally:
            self._follow()
            self._tidy()
        return len(gone.ids)

    def refresh(self) -> bool:
        """Follow what was changed, here or elsewhere, in the vectors that are in memory; whether there was anything.

        What went is overwritten there. Every reading does it, and so do `forget` and a server's ``/ready``.
        """
        known = self._memory.moment
        with self.reading():
            return self._memory.moment != known

    def load_vectors(self) -> None:
        with self.reading() as view:
            cast(PostgresView, view).followed()

    def _follow(self) -> None:
        """Overwrite what went, in memory; if that fails, at the next reading."""
        if self._memory.moment is not None:
            with suppress(Exception):
                self.refresh()

    def _heard(self, entry: int) -> None:
        """This removal is told of here, so a reading need not tell of it."""
        with self._lock:
            if self._seen == entry - 1:
                self._seen = entry

    def _tidy(self) -> None:
        self._connections.tidy(self._collection.owners, self._collection.exemplars)

    def _own_key(self, *, make: bool) -> bytes | None:
        if self._key is None:
            noted = [key for each in self._notes if (key := each.key(make=False)) is not None]
            offered = next(iter(noted), None)
            self._key = self._connections.run(tables.owner_key, self._collection.name, make, offered)
        return self._key

    def _opened(self) -> tuple[OpenedBudget, ...]:
        return self._connections.run(tables.budgets, self._collection.name)

    def _open_budgets(self, budgets: Sequence[OpenedBudget]) -> None:
        """Keep these budgets in the database. `StoreError` if this role may not write there."""
        self._connections.run(tables.budgets, self._collection.name, budgets)

    @property
    def released_once(self) -> tuple[str, ...]:
        return self._connections.run(tables.releases, self._collection.name)

    def remember_release(self, release: str) -> None:
        """Remember in the database what is about to be released once. If this role may not write there, nothing is
        remembered."""
        with suppress(StoreError):
            self._connections.run(tables.releases, self._collection.name, release)

    @property
    def lineage(self) -> str | None:
        return f"collection {self._collection.name}"

    def close(self) -> None:
        """Close the connections, and overwrite the vectors in memory. The collection stays."""
        self._drop_vectors()
        self._connections.close()

    def _drop_vectors(self) -> None:
        dropped = self._memory
        self._memory = VectorMemory(self._collection)
        dropped.end()
