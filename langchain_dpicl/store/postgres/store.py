"""The private exemplars on PostgreSQL with pgvector: for stores that many workers share, or that no memory holds.

The same owners, the same sampling and the same gate as `ExemplarStore`, which stays the default: nothing here is
needed where one process reads a store that fits its memory.

**One moment.** A reading is one REPEATABLE READ transaction, so the coins, the rows and the texts of one sample belong
together whatever other workers add or forget meanwhile. Owners have ascending numbers, and a number is never given
again. There is a coin for each number so far; that of a number whose owner is gone has no effect, and all coins are
independent, so those who are there are sampled exactly as if nobody else had ever been.

**Exact.** Whether an owner is eligible is found by going over every row and computing its own inner product with the
query, in PostgreSQL. pgvector's approximate indexes (hnsw, ivfflat) have no part in it, though somebody should make
one: they serve an ``ORDER BY`` of a distance operator with a ``LIMIT``, and the gate is a condition on the function
``inner_product``, to which no index of theirs applies. An answer that depended on one would depend, through its lists
or links, on other owners' data.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from langchain_dpicl.errors import InvalidRecords, StoreError, UnsafeConfigurationError
from langchain_dpicl.store import intake, nearness
from langchain_dpicl.store.base import Numbers, OwnerWatcher, PrintWatcher, PrivateStore, Reading
from langchain_dpicl.store.file import OpenedBudget
from langchain_dpicl.store.intake import Vectors
from langchain_dpicl.store.marks import SKETCH, sketch_hash
from langchain_dpicl.store.owners import Owners
from langchain_dpicl.store.postgres import changes, tables
from langchain_dpicl.store.postgres.connections import Connections, Snapshot
from langchain_dpicl.store.postgres.reading import Moment, mark_of
from langchain_dpicl.store.postgres.tables import Collection

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

_BATCH = 10_000


class PostgresExemplarStore(PrivateStore):
    """Private exemplars with their owners, in a database that many workers share.

    Make a collection with `from_records`, and `open` it in every worker. Needs PostgreSQL 12 or later with pgvector,
    and the extra ``langchain-dpicl[postgres]``. Everything private lies in tables named after the collection: who may
    read them sees the owners' names and texts, so give them to the workers' role alone.

    Vectors are scaled to norm 1 on their way in, as everywhere. Records enter all or none; two workers that add to one
    owner at a time grow one owner. Safe for threads, and for processes that fork.

    Cost, measured with 384 dimensions, a query on one core. A sample reads the rows of the owners who were sampled,
    by index: 5 ms for 50 of 100,000 owners, 13 ms for 500; 10 and 28 ms of a million. The gate reads every row, which
    is what makes it exact: 0.2 s for 100,000, 2 s for a million, four times as long as FAISS takes in memory.
    """

    def __init__(self, embeddings: Embeddings, connections: Connections, collection: Collection, forgets: int) -> None:
        self.embeddings = embeddings
        self.input_key = collection.input_key
        self.output_key = collection.output_key
        self.owner_key = collection.owner_key
        self.dimension = collection.dimension
        self._connections = connections
        self._collection = collection
        self._lock = threading.Lock()
        self._seen = forgets
        self._watchers: list[Callable[[Sequence[int]], None]] = []
        self._owner_watchers: list[tuple[bytes, OwnerWatcher]] = []
        self._print_watchers: list[tuple[bytes, PrintWatcher]] = []

    # -- building -----------------------------------------------------------------------------------------------------

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
        progress: bool = True,
    ) -> PostgresExemplarStore:
        """Make a collection in the database at ``url`` and fill it: whole, or not at all.

        Parameters
        ----------
        records, embeddings, input_key, output_key, owner_key, vectors
            As in `ExemplarStore.from_records`.
        url
            ``postgresql://user@host/database``. Its password is never shown.
        name
            The collection's, unique in the database's schema: up to 40 of a-z, 0-9 and _.
        ids
            Stable ids of the records, whole numbers; given out in order where they are not given.

        Raises `InvalidRecords` as `ExemplarStore` does, `StoreError` for a collection that has content already, for a
        server without pgvector, and for a database that cannot be used.
        """
        tables.check_name(name)
        rows = list(records)
        texts, owners = intake.check_records(rows, input_key, output_key, owner_key)
        if not rows:
            raise InvalidRecords("the store would be empty: at least one record is needed")
        contents, fresh = intake.pack(rows, owner_key), _checked(ids, len(rows))
        connections = Connections(url)
        try:
            connections.run(lambda connection: tables.check_free(connection, name))  # before anything is embedded
            matrix = (
                intake.embed(embeddings, texts, progress)
                if vectors is None
                else intake.as_matrix(vectors, len(rows), None)
            )
            dimension = matrix.shape[1]
            if dimension > tables.MOST_DIMENSIONS:
                raise InvalidRecords(f"embeddings have {dimension} dimensions, pgvector holds {tables.MOST_DIMENSIONS}")
            wanted = Collection(name, dimension, input_key, output_key, owner_key)

            def work(connection: Any) -> tuple[Collection, int]:
                made, forgets = tables.make(connection, wanted)
                changes.insert(connection, made, contents, owners, matrix, fresh)
                return made, forgets

            store = cls(embeddings, connections, *connections.run(work))
        except BaseException:
            connections.close()
            raise
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
    ) -> PostgresExemplarStore:
        """Open a collection that `from_records` has made, here or in another process.

        Keys that are given must be those that it was made with. The model embeds one public word, to see that it is of
        the collection's dimension. Raises `StoreError` where something differs, there is no such collection, or the
        database cannot be used, and `ModelUnavailable` where the model fails.
        """
        tables.check_name(name)
        connections = Connections(url)
        try:
            found = connections.run(lambda connection: tables.find(connection, name))
            if found is None:
                raise StoreError(f"there is no collection {name!r} in this database: make it with from_records")
            for key, given in (("input_key", input_key), ("output_key", output_key), ("owner_key", owner_key)):
                if given is not None and given != getattr(found[0], key):
                    raise StoreError(f"the collection {name!r} was made with {key}={getattr(found[0], key)!r}")
            nearness.embed_query(embeddings, "word", found[0].dimension)
            return cls(embeddings, connections, *found)
        except BaseException:
            connections.close()
            raise

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

        ``owner_key`` defaults to the one that the collection was made with. Other workers see them from their next
        reading on. Raises `InvalidRecords`, `StoreError`.
        """
        owner_key = self.owner_key if owner_key is None else owner_key
        rows = list(records)
        if not rows:
            return []
        texts, owners = intake.check_records(rows, self.input_key, self.output_key, owner_key)
        contents, fresh = intake.pack(rows, owner_key), _checked(ids, len(rows))
        matrix = intake.embed(self.embeddings, texts, progress) if vectors is None else vectors
        matrix = intake.as_matrix(matrix, len(rows), self.dimension)
        return self._connections.run(
            lambda connection: changes.insert(connection, self._collection, contents, owners, matrix, fresh)
        )

    # -- reading (the private side) -----------------------------------------------------------------------------------

    @property
    def owners(self) -> Owners:
        """The owners' keys, by number: all of them, from the server. ``owner_count`` is their number."""
        found = self._connections.look(f"SELECT name FROM {self._collection.owners} ORDER BY number")
        return Owners(tuple(changes.name_of(name) for (name,) in found))

    @property
    def owner_count(self) -> int:
        """The number of owners."""
        return int(self._connections.look(f"SELECT count(*) FROM {self._collection.owners}")[0][0])

    def __len__(self) -> int:
        """The number of exemplars."""
        return int(self._connections.look(f"SELECT count(*) FROM {self._collection.exemplars}")[0][0])

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """This moment of the collection, whatever others change while the ``with`` block lasts. Private.

        It holds a connection of the pool, and the server keeps what is deleted meanwhile, so let it end soon.
        """
        snapshot = self._connections.snapshot()
        try:
            query = (
                f"SELECT forgets, (SELECT coalesce(max(number) + 1, 0) FROM {self._collection.owners}) "
                "FROM dpicl_collections WHERE name = %s"
            )
            row = snapshot.ask(query, self._collection.name)
            if not row:
                raise StoreError(f"there is no collection {self._collection.name!r} any more")
            forgets, places = row[0]
            self._catch_up(snapshot, forgets)
            yield Moment(self._collection, snapshot, places)
        finally:
            snapshot.close()

    def fingerprint(self, key: bytes) -> tuple[str, ...]:
        """A sketch of whose data this is: see `ExemplarStore.fingerprint`, whose sketch of the same data is the same.

        The keyed hashes are made here: the key does not go to the database. So all owners' keys, or all exemplars where
        each is its own owner, are read once: half a minute for a million.
        """
        least: list[str] = []
        queries = [(self._collection.owners, "name", "number", "AND digest IS NULL")]
        if self.owner_key is None:
            queries.append((self._collection.exemplars, "content", "id", ""))
        snapshot = self._connections.snapshot()
        try:
            for table, column, order, where in queries:
                last = -1
                query = f"SELECT {order}, {column} FROM {table} WHERE {order} > %s {where} ORDER BY {order} LIMIT %s"
                while found := snapshot.ask(query, last, _BATCH):
                    last = found[-1][0]
                    hashes = {sketch_hash(key, part) for _, part in found}
                    least = heapq.nsmallest(SKETCH, hashes.union(least))
        finally:
            snapshot.close()
        return tuple(least)

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def on_forget(self, watcher: Callable[[Sequence[int]], None]) -> None:
        """Call ``watcher(ids)`` with the ids of the exemplars that went: at the end of every `forget` here, and for
        those of other workers when the next reading begins. The store keeps the watcher.
        """
        with self._lock:
            self._watchers.append(watcher)

    def on_owner_forgotten(self, key: bytes, watcher: OwnerWatcher) -> None:
        """Call ``watcher(mark)``, with the mark (of this ``key``) of the owner that went, at the end of every `forget`
        of this object.

        Not where an equal exemplar, its own owner too, still has that mark. What another worker forgets is told there:
        a ledger is shared, and needs to hear it once. The store keeps the watcher.
        """
        with self._lock:
            self._owner_watchers.append((key, watcher))

    def on_fingerprint_forgotten(self, key: bytes, watcher: PrintWatcher) -> None:
        """Call ``watcher(gone, left)`` at the end of every `forget` of this object: see `ExemplarStore`."""
        with self._lock:
            self._print_watchers.append((key, watcher))

    def forget(self, owner: str | int) -> int:
        """Remove an owner for good and return how many exemplars went. Raises `UnknownOwner`, `StoreError`.

        One transaction: other workers no longer see the owner from their next reading on. Then the watchers are called,
        and the tables are vacuumed where this role may do so and no other reading of before holds it up; otherwise the
        server's autovacuum does it later. What the tables keep is the owner's number, as a gap, and the exemplars' ids.

        PostgreSQL overwrites nothing. Vacuumed space is given to later rows, and until one takes it the old bytes may
        still lie in the table's file; ``VACUUM FULL`` writes a new one. Write-ahead logs, replicas and backups hold
        what they held until they are recycled. Where that matters, encrypt the disk, and let archives expire.
        """
        owner = str(owner)
        gone = self._connections.run(lambda connection: changes.delete(connection, self._collection, owner))
        try:
            with self._lock:
                watchers, owner_watchers = list(self._watchers), list(self._owner_watchers)
                print_watchers = list(self._print_watchers)
                if self._seen == gone.entry - 1:
                    self._seen = gone.entry
            for watcher in watchers:
                watcher(gone.ids)
            for key, owner_watcher in owner_watchers if not gone.equals else []:
                owner_watcher(mark_of(key, gone.name, gone.content))
            for key, print_watcher in print_watchers:
                print_watcher([sketch_hash(key, part) for part in gone.parts], partial(self.fingerprint, key))
        finally:
            self._tidy()
        return len(gone.ids)

    def _catch_up(self, snapshot: Snapshot, forgets: int) -> None:
        """Tell the watchers what was forgotten elsewhere. Some may hear of an exemplar twice, none never."""
        with self._lock:
            watchers, last = list(self._watchers), self._seen
            self._seen = max(last, forgets)
        if forgets <= last or not watchers:
            return
        query = f"SELECT ids FROM {self._collection.forgotten} WHERE entry > %s AND entry <= %s ORDER BY entry"
        try:
            for (ids,) in snapshot.ask(query, last, forgets):
                for watcher in watchers:
                    watcher(ids)
        except BaseException:
            with self._lock:
                self._seen = min(last, self._seen)  # again with the next reading
            raise

    def _tidy(self) -> bool:
        return self._connections.tidy([self._collection.owners, self._collection.exemplars])

    @property
    def budgets(self) -> tuple[OpenedBudget, ...]:
        """The budgets that were opened on this collection, by any worker that may write down so."""
        name = self._collection.name
        return self._connections.run(lambda connection: tables.remembered(connection, name))

    def remember_budget(self, budget: OpenedBudget) -> tuple[OpenedBudget, ...]:
        """Remember in the database that a budget was opened on this collection; the others that were.

        Where this role may not write there, nothing is remembered.
        """
        with suppress(StoreError):
            return self._connections.run(lambda connection: tables.remember(connection, self._collection.name, budget))
        return ()

    # -- what it shows ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections. The collection stays."""
        self._connections.close()

    def __repr__(self) -> str:
        try:
            counts = f"{len(self)} exemplars of {self.owner_count} owners"
        except StoreError:
            counts = "not reached"
        return f"PostgresExemplarStore({counts}, {self.dimension} dimensions)"

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("a PostgresExemplarStore is not pickled or copied; use open()")


def _checked(ids: Sequence[int] | None, count: int) -> Numbers | None:
    """Ids as whole numbers without repetition. Raises `InvalidRecords`."""
    if ids is None:
        return None
    if len(ids) != count:
        raise InvalidRecords(f"ids has {len(ids)} entries for {count} records")
    if not all(isinstance(i, (int, np.integer)) and 0 <= int(i) < 2**62 for i in ids):
        raise InvalidRecords("ids must be integers from 0 to 2**62 - 1")
    fresh = np.asarray(ids, np.int64)
    if len(np.unique(fresh)) != count:
        raise InvalidRecords("ids must be unique: one occurs twice, or is in the store already")
    return fresh
