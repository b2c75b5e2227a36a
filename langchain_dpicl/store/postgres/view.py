"""One moment of a collection on PostgreSQL, in one transaction. A row is an exemplar's id."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import StoreError
from langchain_dpicl.store.base import Numbers, StoreView
from langchain_dpicl.store.intake import Vectors, unpack
from langchain_dpicl.store.marks import owner_mark
from langchain_dpicl.store.postgres.collection import Collection, array
from langchain_dpicl.store.postgres.connections import Ask

_NUMBERED = "unnest(%s::bigint[]) WITH ORDINALITY AS o (wanted, position)"


class PostgresView(StoreView):
    """One transaction's view of a collection. A row is an exemplar's id."""

    def __init__(self, collection: Collection, ask: Ask, places: int) -> None:
        self._collection = collection
        self._ask = ask
        self._places = places
        self._product = f"{collection.extension}.inner_product(embedding, %s::float8[]::{collection.extension}.vector)"
        self._at_rows = f"FROM {_NUMBERED} JOIN {collection.exemplars} ON id = wanted"

    @property
    def places(self) -> int:
        """One for each number that an owner has or had, up to the greatest that one has."""
        return self._places

    def owners_at(self, places: Numbers) -> Numbers:
        """The numbers are the places."""
        return np.array(places, dtype=np.int64)

    def eligible(self, query: Vectors, threshold: float) -> Numbers:
        """The numbers of all owners with an exemplar that reaches the threshold: see `PostgresExemplarStore`."""
        wanted = (
            f"SELECT string_agg(int8send(owner), ''::bytea ORDER BY owner) FROM (SELECT DISTINCT owner "
            f"FROM {self._collection.exemplars} WHERE {self._product} >= %s) AS near"
        )
        return self._packed(">i8", wanted, query.tolist(), float(np.float32(threshold))).astype(np.int64)

    def rows_of(self, owners: Numbers) -> tuple[Numbers, Numbers]:
        """Their exemplars' ids and the positions, by position, then id."""
        wanted = (
            "SELECT string_agg(int8send(id) || int8send(position - 1), ''::bytea ORDER BY position, id) "
            f"FROM {_NUMBERED} JOIN {self._collection.exemplars} ON owner = wanted"
        )
        pairs = self._packed(">i8", wanted, array(owners)).astype(np.int64).reshape(-1, 2)
        return pairs[:, 0].copy(), pairs[:, 1].copy()

    def similarity(self, rows: Numbers, query: Vectors) -> NDArray[np.float32]:
        """The inner product of each of these rows' vectors with a query's, as `eligible` computes it."""
        wanted = f"SELECT string_agg(float4send({self._product}::real), ''::bytea ORDER BY position) {self._at_rows}"
        found = self._packed(">f4", wanted, query.tolist(), array(rows)).astype(np.float32)
        _check_all(len(found), rows)
        return found

    def read(self, rows: Numbers) -> list[dict[str, Any]]:
        found = self._ask(f"SELECT content {self._at_rows} ORDER BY position", array(rows))
        _check_all(len(found), rows)
        return [unpack(content) for (content,) in found]

    def ids_of(self, rows: Numbers) -> list[int]:
        """They are the rows."""
        ids: list[int] = rows.tolist()
        return ids

    def marks(self, owners: Numbers, key: bytes) -> list[bytes]:
        its_own = f"SELECT content FROM {self._collection.exemplars} WHERE owner = number AND sha256(content) = digest"
        query = (
            "SELECT position - 1, name, digest IS NULL, "
            f"CASE WHEN digest IS NOT NULL THEN ({its_own} LIMIT 1) END "
            f"FROM {_NUMBERED} JOIN {self._collection.owners} ON number = wanted"
        )
        marks = [b""] * len(owners)
        for position, name, is_named, content in self._ask(query, array(owners)):
            marks[position] = owner_mark(key, name if is_named else content, named=is_named)
        return marks

    def _packed(self, kind: str, query: str, *values: object) -> NDArray[Any]:
        """Numbers that the server has packed into one value."""
        packed: bytes | None = self._ask(query, *values)[0][0]
        return np.frombuffer(packed or b"", dtype=kind)


def _check_all(found: int, rows: Numbers) -> None:
    if found != len(rows):
        raise StoreError("rows of one reading of the store were used in another")
