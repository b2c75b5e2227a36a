"""The private exemplars on PostgreSQL with pgvector: for stores that many workers share, or that no memory holds.

The same owners, sampling and gate as `ExemplarStore`, which stays the default for one process and a store that fits its
memory.

**One moment.** A reading is one REPEATABLE READ transaction, so the coins, the rows and the texts of one sample belong
together whatever other workers add or forget meanwhile. Owners have ascending numbers, and a number is never given
again. There is a coin for each number so far; that of a number whose owner is gone has no effect, and all coins are
independent, so the present owners are sampled exactly as if there had never been others.

**Exact.** To find the eligible owners, PostgreSQL computes every row's own inner product with the query. pgvector's
approximate indexes (hnsw, ivfflat) have no part in it, even if somebody makes one: they serve an ``ORDER BY`` of a
distance operator with a ``LIMIT``, and the gate is a condition on the function ``inner_product``. An answer that
depended on one would depend, through its lists or links, on other owners' data.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidRecords, StoreError
from langchain_dpicl.store import tables
from langchain_dpicl.store.base import Arrival, Held, Numbers, OpenedBudget, Owners, StoreView, owner_mark
from langchain_dpicl.store.filters import MetadataFilter, columns_of
from langchain_dpicl.store.maintenance import LiveStore
from langchain_dpicl.store.records import Batch, RecordKeys, Vectors, check_records, decoded, embed, encoded, unpack
from langchain_dpicl.store.tables import Collection

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from langchain_dpicl.store.sql import AskServer, Connections

_BATCH = 10_000
_NUMBERED = "unnest(%s::bigint[]) WITH ORDINALITY AS o (wanted, position)"


class PostgresView(StoreView):
    """A collection at one moment, in one transaction. A row is an exemplar's id.

    The numbers are all below ``end``, with those of forgotten owners.
    """

    def __init__(self, collection: Collection, ask: AskServer, end: int) -> None:
        self._collection, self._ask, self.numbers = collection, ask, np.arange(end)
        self._product = f"{collection.extension}.inner_product(embedding, %s::float8[]::{collection.extension}.vector)"
        self._at_rows = f"FROM {_NUMBERED} JOIN {collection.exemplars} ON id = wanted"

    def eligible(self, query: Vectors | None, threshold: float, wanted: MetadataFilter | None = None) -> Numbers:
        near, values = "TRUE", list[object]()
        if query is not None:
            near, values = f"{self._product} >= %s", [query.tolist(), float(np.float32(threshold))]
        if wanted is None:
            owners = (
                f"SELECT string_agg(int8send(owner), ''::bytea ORDER BY owner) FROM (SELECT DISTINCT owner "
                f"FROM {self._collection.exemplars} WHERE {near}) AS near"
            )
            return self._packed(">i8", owners, *values).astype(np.int64)
        pairs = f"SELECT string_agg(int8send(id) || int8send(owner), ''::bytea) FROM {self._collection.exemplars}"
        found = self._packed(">i8", f"{pairs} WHERE {near}", *values).astype(np.int64).reshape(-1, 2)
        return np.unique(found[self.passing(found[:, 0].copy(), wanted), 1])

    def passing(self, rows: Numbers, wanted: MetadataFilter) -> NDArray[np.bool_]:
        """Read here: PostgreSQL's JSON refuses texts that Python's takes, and one record would fail the others."""
        parts = [rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH)]
        records = itertools.chain.from_iterable(map(self.read, parts))
        return wanted.passing(columns_of(records, wanted.keys))

    def rows_of(self, owners: Numbers) -> tuple[Numbers, Numbers]:
        """Their exemplars' ids and the positions, by position, then id."""
        wanted = (
            "SELECT string_agg(int8send(id) || int8send(position - 1), ''::bytea ORDER BY position, id) "
            f"FROM {_NUMBERED} JOIN {self._collection.exemplars} ON owner = wanted"
        )
        pairs = self._packed(">i8", wanted, tables.as_array(owners)).astype(np.int64).reshape(-1, 2)
        return pairs[:, 0].copy(), pairs[:, 1].copy()

    def similarity(self, rows: Numbers, query: Vectors) -> NDArray[np.float32]:
        """The inner product of each of these rows' vectors with a query's, as `eligible` computes it."""
        wanted = f"SELECT string_agg(float4send({self._product}::real), ''::bytea ORDER BY position) {self._at_rows}"
        found = self._packed(">f4", wanted, query.tolist(), tables.as_array(rows)).astype(np.float32)
        _check_all(len(found), rows)
        return found

    def vectors(self, rows: Numbers) -> Vectors:
        """As pgvector sends them: behind four bytes of header."""
        wanted = f"SELECT string_agg({self._collection.extension}.vector_send(embedding), ''::bytea ORDER BY position)"
        found = self._packed(">f4", f"{wanted} {self._at_rows}", tables.as_array(rows)).astype(np.float32)
        _check_all(len(found) // (self._collection.dimension + 1), rows)
        return found.reshape(len(rows), self._collection.dimension + 1)[:, 1:]

    def read(self, rows: Numbers) -> list[dict[str, Any]]:
        found = self._ask(f"SELECT content {self._at_rows} ORDER BY position", tables.as_array(rows))
        _check_all(len(found), rows)
        return [unpack(content) for (content,) in found]

    def records(self, rows: Numbers) -> list[Held]:
        query = f"SELECT document, id, content, name {self._at_rows} JOIN {self._collection.owners} ON number = owner"
        found = self._ask(f"{query} ORDER BY position", tables.as_array(rows))
        _check_all(len(found), rows)
        return [Held(tables.document_of(row[0], row[1]), row[2], decoded(row[3])) for row in found]

    def rows_with(self, documents: Sequence[str]) -> Numbers:
        asked = [encoded(each) for each in documents]
        query = f"SELECT id FROM {self._collection.exemplars} WHERE {tables.rows_with('%b::bytea[]')} ORDER BY id"
        return np.array([row for (row,) in self._ask(query, asked, asked)], np.int64)

    def ids_of(self, rows: Numbers) -> list[int]:
        """They are the rows."""
        return [int(row) for row in rows]

    def marks(self, owners: Numbers, key: bytes) -> list[bytes]:
        its_own = f"SELECT content FROM {self._collection.exemplars} WHERE owner = number AND sha256(content) = digest"
        query = (
            f"SELECT position - 1, digest IS NULL, CASE WHEN digest IS NULL THEN name ELSE ({its_own} LIMIT 1) END "
            f"FROM {_NUMBERED} JOIN {self._collection.owners} ON number = wanted"
        )
        marks = [b""] * len(owners)
        for position, is_named, identity in self._ask(query, tables.as_array(owners)):
            marks[position] = owner_mark(key, identity, named=is_named)
        return marks

    def _packed(self, kind: str, query: str, *values: object) -> NDArray[Any]:
        """Numbers that the server has packed into one value."""
        packed: bytes | None = self._ask(query, *values)[0][0]
        return np.frombuffer(packed or b"", dtype=kind)


def _check_all(found: int, rows: Numbers) -> None:
    if found != len(rows):
        raise StoreError("rows of one reading of the store were used in another")


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


class PostgresExemplarStore(LiveStore):
    """Private exemplars with their owners, in a database that many workers share.

    Make a collection with `from_records`, and `open` it in every worker. Needs PostgreSQL 12 or later with pgvector,
    and the extra ``langchain-dpicl[postgres]``. A role that may read the tables, which are named after the collection,
    sees the owners' names and texts, so give them to the workers' role alone. Vectors are scaled to norm 1. Records
    enter all or none; two workers that add to one owner at a time grow one owner. Safe for threads, and for processes
    that fork.

    Cost, measured with 384 dimensions, a query on one core. A sample reads the sampled owners' rows by
    index: 5 ms for 50 of 100,000 owners, 13 ms for 500; 10 and 28 ms of a million. The gate reads every row, to be
    exact: 0.2 s for 100,000, 2 s for a million, four times as long as FAISS takes in memory.
    """

    def __init__(self, embeddings: Embeddings, connections: Connections, collection: Collection) -> None:
        super().__init__(embeddings, collection.keys, collection.dimension)
        self._connections, self._collection = connections, collection
        self._lock = threading.Lock()
        self._seen = collection.forgets

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
        """Make a collection in a database and fill it: whole, or not at all.

        ``url`` is ``postgresql://user@host/database``; its password is never shown. ``name`` is unique in the
        database's schema: up to 40 of a-z, 0-9 and _. ``ids`` are stable whole numbers, by default given out in order.
        The rest is as in `ExemplarStore.from_records`, `InvalidRecords` too. Raises `StoreError` for a collection that
        has content already, for a server without pgvector, and for a database that cannot be used.
        """
        keys = RecordKeys(input_key, output_key, owner_key)
        batch = check_records(records, keys, ids, may_be_empty=False)
        return cls._made(url, name, embeddings, keys, batch, lambda: batch.embed(embeddings, vectors, None, progress))

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
    ) -> PostgresExemplarStore:
        """Make a collection without exemplars, to be filled by `add`, `maintenance` or `sync_from`, as `from_records`
        makes one. The model embeds one public word."""
        keys = RecordKeys(input_key, output_key, owner_key)
        batch = check_records([], keys, None)
        return cls._made(url, name, embeddings, keys, batch, lambda: embed(embeddings, ["word"], False)[:0])

    @classmethod
    def _made(
        cls,
        url: str,
        name: str,
        embeddings: Embeddings,
        keys: RecordKeys,
        batch: Batch,
        embedded: Callable[[], Vectors],
    ) -> PostgresExemplarStore:
        with _connected(url, name) as connections:
            connections.run(tables.check_free, name)  # before anything is embedded
            matrix = embedded()
            dimension = matrix.shape[1]
            if dimension > tables.MOST_DIMENSIONS:
                raise InvalidRecords(f"embeddings have {dimension} dimensions, pgvector holds {tables.MOST_DIMENSIONS}")
            store = cls(embeddings, connections, connections.run(tables.make, name, dimension, keys, batch, matrix))
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
        the collection's dimension. Raises `StoreError` if something differs, there is no such collection, or the
        database cannot be used, and `ModelUnavailable` if the model fails.
        """
        with _connected(url, name) as connections:
            found = connections.run(tables.find, name)
            if found is None:
                raise StoreError(f"there is no collection {name!r} in this database: make it with from_records")
            store = cls(embeddings, connections, found)
            asked = (input_key, output_key, owner_key)
            for key, made, given in zip(RecordKeys._fields, found.keys, asked, strict=True):
                if given not in (None, made):
                    raise StoreError(f"the collection {name!r} was made with {key}={made!r}")
            if embeddings is not None:  # a command that forgets has none
                store.embed_query("word")
        return store

    def _insert(self, batch: Batch, matrix: Vectors) -> list[int]:
        return self._connections.run(tables.insert, self._collection, batch, matrix)

    def _prepare(self) -> None:
        self._connections.run(tables.add_documents, self._collection)

    def _change(self, arrival: Arrival | None, gone: Sequence[str]) -> None:
        entry, ids = self._connections.run(tables.change, self._collection, arrival, gone)
        if ids:
            try:
                self._heard(entry)
                self._hear(ids)
            finally:
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
            f"SELECT forgets, (SELECT coalesce(max(number) + 1, 0) FROM {self._collection.owners}) "
            "FROM dpicl_collections WHERE name = %s"
        )
        went = f"SELECT ids FROM {self._collection.forgotten} WHERE entry > %s AND entry <= %s ORDER BY entry"
        with self._connections.snapshot() as ask:
            row = ask(counters, self._collection.name)
            if not row:
                raise StoreError(f"there is no collection {self._collection.name!r} any more")
            forgets, end = row[0]
            with self._lock:
                watchers, last = list(self._watchers), self._seen
                self._seen = max(last, forgets)
            try:
                for (ids,) in ask(went, last, forgets) if watchers and forgets > last else []:
                    for watcher in watchers:
                        watcher(ids)
            except BaseException:
                with self._lock:
                    self._seen = min(last, self._seen)  # again with the next reading
                raise
            yield PostgresView(self._collection, ask, end)

    def _sketched(self) -> Iterator[bytes]:
        queries = [(self._collection.owners, "name", "number", "AND digest IS NULL")]
        if self.owner_key is None:
            queries.append((self._collection.exemplars, "content", "id", ""))
        with self._connections.snapshot() as ask:
            for table, column, order, where in queries:
                last = -1
                query = f"SELECT {order}, {column} FROM {table} WHERE {order} > %s {where} ORDER BY {order} LIMIT %s"
                while found := ask(query, last, _BATCH):
                    last = found[-1][0]
                    for _, part in found:
                        yield part

    def forget(self, owner: str | int) -> int:
        """Remove an owner for good and return how many exemplars went. Raises `UnknownOwner`, `StoreError`.

        One transaction: other workers no longer see the owner from their next reading on. Then the watchers are called,
        and the tables are vacuumed if this role may do so and no earlier reading is open; otherwise the server's
        autovacuum does it later. The tables keep the owner's number, as a gap, and the exemplars' ids.

        PostgreSQL overwrites nothing. Vacuumed space is given to later rows, and until one takes it the old bytes may
        still lie in the table's file; ``VACUUM FULL`` writes a new one. Write-ahead logs, replicas and backups hold
        what they held until they are recycled. If that matters, encrypt the disk, and let archives expire.
        """
        entry, gone = self._connections.run(tables.delete, self._collection, str(owner))
        try:
            self._heard(entry)
            self._tell(*gone)
        finally:
            self._tidy()
        return len(gone[0])

    def _heard(self, entry: int) -> None:
        """This removal is told of here, so a reading need not tell of it."""
        with self._lock:
            if self._seen == entry - 1:
                self._seen = entry

    def _tidy(self) -> None:
        self._connections.tidy(self._collection.owners, self._collection.exemplars)

    @property
    def budgets(self) -> tuple[OpenedBudget, ...]:
        return self._connections.run(tables.budgets, self._collection.name)

    def remember_budget(self, budget: OpenedBudget) -> tuple[OpenedBudget, ...]:
        """Remember in the database that a budget was opened on this collection; the others that were.

        If this role may not write there, nothing is remembered.
        """
        with suppress(StoreError):
            return self._connections.run(tables.budgets, self._collection.name, budget)
        return ()

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
        """Close the connections. The collection stays."""
        self._connections.close()
