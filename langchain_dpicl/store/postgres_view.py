"""One moment of a collection on PostgreSQL.

**Exact.** To find the eligible owners, every row's own inner product with the query is computed: over the vectors in
this process's memory (`VectorMemory`), or if none are to be kept, by PostgreSQL. pgvector's approximate indexes (hnsw,
ivfflat) have no part in it, even if somebody makes one: they serve an ``ORDER BY`` of a distance operator with a
``LIMIT``, and the server's gate is a condition on the function ``inner_product``. An answer that depended on one would
depend, through its lists or links, on other owners' data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import StoreError
from langchain_dpicl.store import tables
from langchain_dpicl.store.base import Held, Numbers, StoreView, owner_mark
from langchain_dpicl.store.filters import MetadataFilter, columns_of
from langchain_dpicl.store.memory import inner_products
from langchain_dpicl.store.records import Vectors, decoded, encoded, unpack
from langchain_dpicl.store.tables import Collection
from langchain_dpicl.store.vector_memory import Moment, VectorMemory

if TYPE_CHECKING:
    from langchain_dpicl.store.sql import AskServer

_BATCH = 10_000
_NUMBERED = "unnest(%s::bigint[]) WITH ORDINALITY AS o (wanted, position)"


class PostgresView(StoreView):
    """A collection at one moment, in one transaction. A row is an exemplar's id.

    The numbers are all below ``end``, with those of forgotten owners. Without a ``memory`` the server computes
    similarities.
    """

    def __init__(
        self,
        collection: Collection,
        ask: AskServer,
        end: int,
        moment: Moment,
        memory: VectorMemory | None,
    ) -> None:
        self._collection = collection
        self._ask = ask
        self.numbers = np.arange(end)
        self._moment = moment
        self._memory = memory
        self._is_followed = self.has_ended = False
        # The server's one similarity, in single precision: of the gate, and of what a call sees.
        schema = collection.extension
        self._product = f"{schema}.inner_product(embedding, %s::float8[]::{schema}.vector)::real"
        self._at_rows = f"FROM {_NUMBERED} JOIN {collection.exemplars} ON id = wanted"

    def followed(self) -> VectorMemory | None:
        """The vectors at this moment, in memory from now on."""
        if self.has_ended:
            raise StoreError("this reading of the store has ended: read within its with block")
        if self._memory is not None and not self._is_followed:
            self._memory = self._memory.at(self._ask, self._moment)
            self._is_followed = True
        return self._memory

    def eligible(self, query: Vectors | None, threshold: float, wanted: MetadataFilter | None = None) -> Numbers:
        if query is not None and (memory := self.followed()) is not None:
            rows, owner_of = memory.near(query, threshold, self._moment.time)
            if wanted is not None:
                owner_of = owner_of[self.passing(rows, wanted)]
            return np.unique(owner_of)
        near = "TRUE"
        values: list[object] = []
        if query is not None:
            near = f"{self._product} >= %s::real"
            values = [query.tolist(), float(np.float32(threshold))]
        if wanted is None:
            return self._packed(
                ">i8",
                "SELECT string_agg(int8send(owner), ''::bytea ORDER BY owner) FROM (SELECT DISTINCT owner "
                f"FROM {self._collection.exemplars} WHERE {near}) AS near",
                *values,
            ).astype(np.int64)
        pairs = f"SELECT string_agg(int8send(id) || int8send(owner), ''::bytea) FROM {self._collection.exemplars}"
        found = self._packed(">i8", f"{pairs} WHERE {near}", *values).astype(np.int64).reshape(-1, 2)
        return np.unique(found[self.passing(found[:, 0].copy(), wanted), 1])

    def passing(self, rows: Numbers, wanted: MetadataFilter) -> NDArray[np.bool_]:
        """Read here: PostgreSQL's JSON refuses texts that Python's takes, and one record would fail the others."""
        records = (
            record for start in range(0, len(rows), _BATCH) for record in self.read(rows[start : start + _BATCH])
        )
        return wanted.passing(columns_of(records, wanted.keys))

    def rows_of(self, owners: Numbers) -> tuple[Numbers, Numbers]:
        """Their exemplars' ids and the positions, by position, then id."""
        packed = self._packed(
            ">i8",
            "SELECT string_agg(int8send(id) || int8send(position - 1), ''::bytea ORDER BY position, id) "
            f"FROM {_NUMBERED} JOIN {self._collection.exemplars} ON owner = wanted",
            tables.as_array(owners),
        )
        pairs = packed.astype(np.int64).reshape(-1, 2)
        return pairs[:, 0].copy(), pairs[:, 1].copy()

    def similarity(self, rows: Numbers, query: Vectors) -> NDArray[np.float32]:
        """The inner product of each of these rows' vectors with a query's, as `eligible` computes it."""
        if self._is_followed and (memory := self.followed()) is not None:
            return memory.similarity(rows, query, self._moment.time)
        if self._memory is not None:
            parts = [rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH)]
            products = [inner_products(self.vectors(part), np.arange(len(part)), query) for part in parts]
            return np.concatenate([np.empty(0, np.float32), *products])
        found = self._packed(
            ">f4",
            f"SELECT string_agg(float4send({self._product}), ''::bytea ORDER BY position) {self._at_rows}",
            query.tolist(),
            tables.as_array(rows),
        ).astype(np.float32)
        _check_all(len(found), rows)
        return found

    def vectors(self, rows: Numbers) -> Vectors:
        """As pgvector sends them: behind four bytes of header."""
        wanted = f"SELECT string_agg({self._collection.extension}.vector_send(embedding), ''::bytea ORDER BY position)"
        found = np.empty((len(rows), self._collection.dimension), np.float32)
        for start in range(0, len(rows), _BATCH):  # a value has a gigabyte at most
            part = rows[start : start + _BATCH]
            packed = self._packed(">f4", f"{wanted} {self._at_rows}", tables.as_array(part))
            _check_all(len(packed) // (self._collection.dimension + 1), part)
            found[start : start + _BATCH] = packed.reshape(len(part), -1)[:, 1:]
        return found

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
