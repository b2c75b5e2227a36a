"""One moment of a store.

**Exact.** To find the eligible owners, every row's own inner product with the query is computed: over the vectors in
this process's memory (`Matrix`), or if none are to be kept, by PostgreSQL, and then again here for those within
rounding of the threshold. So the answer is the same bit by bit. pgvector's approximate indexes (hnsw, ivfflat) have no
part in it, even if somebody makes one: they serve an ``ORDER BY`` of a distance operator with a ``LIMIT``, and the
server's gate is a condition on the function ``inner_product``. An answer that depended on one would depend, through its
lists or links, on other owners' data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from langchain_dpicl.errors import StoreError
from langchain_dpicl.store import tables
from langchain_dpicl.store.base import Held, Numbers, owner_mark
from langchain_dpicl.store.database import MANY, fetch, fetch_among, fetch_parts
from langchain_dpicl.store.filters import MetadataFilter, columns_of
from langchain_dpicl.store.matrix import Came, Matrix, Page, inner_products, reaches, rounding
from langchain_dpicl.store.records import Vectors, decoded, unpack
from langchain_dpicl.store.tables import Collection

_PAGE_BYTES = 1 << 20

Load = Callable[["StoreView"], Matrix | None]


class Moment(NamedTuple):
    """The state of a collection: its latest change, and the number that its next owner gets."""

    identity: str
    entry: int
    next_number: int


def moment_of(connection: Connection, collection: Collection) -> Moment:
    """The collection as this transaction sees it. `StoreError` if it is gone."""
    query = "SELECT identity, entry, next_number FROM dpicl_collections WHERE name = :name"
    rows = fetch(connection, query, name=collection.name)
    if not rows:
        raise StoreError(f"there is no collection {collection.name!r} any more")
    return Moment(*rows[0])


class StoreView:
    """A store at one moment: all that is read through it belongs together. A row is an exemplar's id. Private.

    ``numbers`` are the owners' numbers, ascending. There is a coin for each number given so far. That of a number whose
    owner is gone has no effect, and all coins are independent, so the present owners are sampled exactly as if there
    had never been others.

    Parameters
    ----------
    matrix
        The rows in memory at this moment, if they were read before.
    load
        Reads them, and answers None if the store keeps none.
    """

    def __init__(
        self,
        collection: Collection,
        connection: Connection,
        moment: Moment,
        numbers: Numbers,
        matrix: Matrix | None,
        load: Load,
    ) -> None:
        self.moment = moment
        self.numbers = numbers
        self._collection = collection
        self.connection: Connection | None = connection
        """None once the reading has ended: then nothing can be read."""
        self.known = matrix
        """The rows in memory; None as long as nothing has asked for them."""
        self._load = load

    def matrix(self) -> Matrix | None:
        """The rows in memory, which are read if they have to be; None if the store keeps none."""
        if self.known is None:
            self.known = self._load(self)
        return self.known

    def ask(self, query: str) -> list[Any]:
        """The rows of a statement."""
        return fetch(self.connection, query)

    # -- owners --------------------------------------------------------------------------------------------------------

    def eligible(self, query: Vectors | None, threshold: float, wanted: MetadataFilter | None = None) -> Numbers:
        """The numbers, ascending, of all owners with an exemplar whose similarity to the query reaches the threshold
        and that passes the filter: one exemplar for both. Without a query, that passes the filter.

        Exact: whether an owner is among them is a function of its own exemplars, the query and the filter alone. (The
        nearest k, or an approximate index whose cells or links depend on the data, would not be: there one owner's
        presence decides on another.)
        """
        matrix = self.matrix()
        if query is None:
            rows, owners = self._owned()
        elif matrix is None:
            rows, owners = self._near(query, threshold)
        else:
            rows, owners = matrix.near(query, threshold)
        if wanted is not None:
            owners = owners[self.passing(rows, wanted)]
        return np.unique(owners)

    def _near(self, query: Vectors, threshold: float) -> tuple[Numbers, Numbers]:
        """The rows that reach a threshold and their owners, without a matrix: PostgreSQL goes over all rows."""
        schema = self._collection.schema
        limit = float(np.float32(threshold))
        margin = rounding(len(query))
        product = f"{schema}.inner_product(embedding, CAST(CAST(:vector AS float8[]) AS {schema}.vector))"
        found = fetch(
            self.connection,
            f"SELECT id, owner, {product} FROM {self._collection.exemplars} WHERE {product} >= :least",
            vector=query.tolist(),
            least=limit - margin,
        )
        rows = np.array([id for id, _, _ in found], np.int64)
        owners = np.array([owner for _, owner, _ in found], np.int64)
        near = np.array([product >= limit + margin for _, _, product in found], np.bool_)
        close = np.flatnonzero(~near)
        near[close] = reaches(self.similarity(rows[close], query), threshold)
        return rows[near], owners[near]

    def _owned(self, owners: Numbers | None = None) -> tuple[Numbers, Numbers]:
        """The rows of these owners, or all rows, and each row's owner."""
        if owners is None and self.known is not None:
            return self.known.rows()
        query = f"SELECT id, owner FROM {self._collection.exemplars}"
        if owners is None:
            found = fetch(self.connection, query)
        else:
            found = fetch_among(self.connection, f"{query} WHERE", "owner", owners.tolist())
        pairs = np.array(found, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def rows_of(self, owners: Numbers) -> tuple[Numbers, Numbers]:
        """Rows of these owners, and for each row the position of its owner in ``owners``, by position, then id.

        A forgotten owner has none. Cost: the rows alone.
        """
        if np.array_equal(owners, self.numbers):
            rows, numbers = self._owned()
        else:
            rows, numbers = self._owned(owners)
        order = np.argsort(owners, kind="stable")
        position = order[np.searchsorted(owners, numbers, sorter=order)]
        by_position = np.lexsort((rows, position))
        return rows[by_position], position[by_position]

    def marks(self, owners: Numbers, key: bytes) -> list[bytes]:
        """A keyed hash of each of these owners (see `base`), made in this process: of its key, or of the exemplar
        that it is. b"" for a forgotten owner."""
        query = (
            f"SELECT number, name, content_hash, content FROM {self._collection.owners} LEFT JOIN "
            f"{self._collection.exemplars} ON content_hash IS NOT NULL AND owner = number WHERE"
        )
        marks: dict[int, bytes] = {}
        for number, name, content_hash, content in fetch_among(self.connection, query, "number", owners.tolist()):
            if content_hash is None:
                marks[number] = owner_mark(key, bytes(name), named=True)
            elif tables.hash_of(content) == content_hash:
                marks[number] = owner_mark(key, bytes(content), named=False)
        return [marks.get(number, b"") for number in owners.tolist()]

    # -- exemplars -----------------------------------------------------------------------------------------------------

    def passing(self, rows: Numbers, wanted: MetadataFilter) -> NDArray[np.bool_]:
        """Return a mask of the rows whose exemplars pass a filter. One that cannot be read does not pass.

        Filters are applied here: a database's JSON refuses texts that Python's takes, and one record would fail the
        others.
        """
        found = None
        if self.known is not None:
            found = self.known.passing(rows, wanted, self._each)
        if found is None:
            found = wanted.passing(columns_of(self._each(rows), wanted.keys))
        return found

    def similarity(self, rows: Numbers, query: Vectors) -> NDArray[np.float32]:
        """The inner product of each of these rows' vectors with a query's, by which `eligible` decides. Reads no text.

        Equal to the last bit whichever other rows there are, here and in `eligible`.
        """
        found = np.empty(len(rows), np.float32)
        for start in range(0, len(rows), MANY):
            part = self.vectors(rows[start : start + MANY])
            found[start : start + MANY] = inner_products(part, np.arange(len(part)), query)
        return found

    def vectors(self, rows: Numbers) -> Vectors:
        """The vectors of these rows, a copy. Reads no text."""
        if self.known is not None:
            return self.known.vectors(rows)
        found = self._columns(self._collection.embedding, rows)
        return self._collection.unpacked([vector for (vector,) in found]).astype(np.float32)

    def read(self, rows: Numbers) -> list[dict[str, Any]]:
        """The exemplars at these rows, as fresh dictionaries; an empty one for a record that cannot be read."""
        return [unpack(content) for (content,) in self._columns("content", rows)]

    def _each(self, rows: Numbers) -> Iterator[dict[str, Any]]:
        for start in range(0, len(rows), MANY):
            yield from self.read(rows[start : start + MANY])

    def records(self, rows: Numbers) -> list[Held]:
        """These rows as the store holds them, owners included: for maintenance, never for a member."""
        owner = f"(SELECT name FROM {self._collection.owners} WHERE number = owner)"
        return [
            Held(tables.document_of(document, id), bytes(content), decoded(bytes(name)))
            for id, document, content, name in self._columns(f"id, document, content, {owner}", rows)
        ]

    def _columns(self, columns: str, rows: Numbers) -> list[Any]:
        """These columns of each of these rows, in their order."""
        query = f"SELECT id, {columns} FROM {self._collection.exemplars} WHERE"
        found = {id: values for id, *values in fetch_among(self.connection, query, "id", rows.tolist())}
        try:
            return list(map(found.__getitem__, rows.tolist()))
        except KeyError:
            pass
        raise StoreError("rows of one reading of the store were used in another")

    def rows_with(self, documents: Sequence[str]) -> Numbers:
        """The rows of these documents, as far as there are any."""
        found = tables.rows_with(self.connection, self._collection, documents)
        return np.array([id for id, _ in found], np.int64)

    def went_since(self, entry: int) -> Numbers:
        """The ids of the exemplars that went after this entry of the log."""
        return tables.went_since(self.connection, self._collection, entry)

    def came_since(self, entry: int) -> Came:
        """The rows that came after this entry, with their vectors, page by page."""
        query = f"SELECT count(*) FROM {self._collection.exemplars} WHERE entry > :entry"
        ((number,),) = fetch(self.connection, query, entry=entry)
        return Came(number, self._pages(entry))

    def _pages(self, entry: int) -> Iterator[Page]:
        query = f"SELECT id, owner, {self._collection.embedding} FROM {self._collection.exemplars} WHERE entry > :entry"
        size = max(1, _PAGE_BYTES // (4 * self._collection.dimension))
        for rows in fetch_parts(self.connection, query, size, entry=entry):
            ids, owners, vectors = zip(*rows, strict=True)
            yield Page(np.array(ids, np.int64), np.array(owners, np.int64), self._collection.unpacked(vectors))
