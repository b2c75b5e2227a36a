"""The vectors of a store in this process's memory: one matrix, which FAISS goes over for a threshold.

**It is one moment.** A `Matrix` has the rows of one entry of the store's log, and never changes. Its successor takes
over what came and went since: the log says what, so a change costs its own rows. What came is appended to arrays that
all moments share, and each has a mask of the rows that are there. So readings of several moments go on side by side.

**It is exact.** FAISS computes all inner products. Those within rounding of the threshold are found that way, and
`inner_products`, which computes each from its own row alone, decides.

**It forgets.** A row that went is left out and overwritten when this process follows. A reading that began before then
finds it far from every question, which concerns its owner alone. When more than a quarter of the rows went, the arrays
are copied without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import StoreError
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.filters import Column, MetadataFilter, columns_of
from langchain_dpicl.store.records import Vectors

_BLOCK = 1024  # rows at a time: they stay in the processor's cache between the product and the sum
_MOST_COLUMNS = 16  # of metadata in memory: callers name them
_LEAST_ROWS = 1024

Read = Callable[[Numbers], Iterable[dict[str, Any]]]


class Page(NamedTuple):
    """Some rows on their way into memory: ids, owners' numbers and vectors."""

    ids: Numbers
    owners: Numbers
    vectors: Vectors


class Came(NamedTuple):
    """The rows that came since an entry: how many, and the rows themselves."""

    number: int
    pages: Iterable[Page]


def rounding(dimension: int) -> float:
    """A bound on the difference of two ways to compute the inner product of two vectors of norm 1 in single precision.

    Each is within n u / (1 - n u) of the exact one, with n operations on the way and u = 2^-24, whatever the order of
    its sum (Higham 2002, section 3.1); norms are 1 up to rounding. Twice as much again covers that.
    """
    return 4.0 * (dimension + 4) * 2.0**-24


def inner_products(vectors: Vectors, rows: Numbers, query: Vectors) -> Vectors:
    """The inner product of each of these rows with the query.

    Each is computed from its own row alone, by the same operations in the same order wherever it lies. A matrix product
    would not do: it treats rows in groups, so the presence of one owner could change the last digit for another, and
    with it who is nearer in a bucket that is not the first owner's.
    """
    found = np.empty(len(rows), np.float32)
    for start in range(0, len(rows), _BLOCK):
        block = vectors[rows[start : start + _BLOCK]]
        block *= query
        block.sum(axis=1, out=found[start : start + _BLOCK])
    return found


def reaches(similarity: NDArray[np.float32], threshold: float) -> NDArray[np.bool_]:
    """Return a mask of the similarities that reach a threshold, in single precision.

    It decides which owners are eligible and which exemplars a call sees.
    """
    return similarity >= np.float32(threshold)


class _Arrays:
    """Rows that are only ever appended, with room for more. What was read stays as it was."""

    def __init__(self, dimension: int) -> None:
        self.count = 0
        self.ids = np.empty(0, np.int64)
        self.owners = np.empty(0, np.int64)
        self.vectors = np.empty((0, dimension), np.float32)

    def reserve(self, more: int) -> None:
        """Make room for so many rows more, and for some that come later: all that is there has to be copied."""
        end = self.count + more
        if end > len(self.ids):
            room = end + max(end // 8, _LEAST_ROWS)
            self.ids = self._grown(self.ids, room)
            self.owners = self._grown(self.owners, room)
            self.vectors = self._grown(self.vectors, room)

    def append(self, page: Page) -> None:
        """Add rows for which there is room."""
        end = self.count + len(page.ids)
        self.ids[self.count : end] = page.ids
        self.owners[self.count : end] = page.owners
        self.vectors[self.count : end] = page.vectors
        self.count = end

    def _grown(self, array: NDArray[Any], room: int) -> NDArray[Any]:
        grown = np.zeros((room, *array.shape[1:]), array.dtype)  # freed memory may hold texts
        grown[: self.count] = array[: self.count]
        return grown


class Matrix:
    """The rows at one entry of a store's log: ids, owners' numbers and vectors. Private."""

    def __init__(self, entry: int, arrays: _Arrays, there: NDArray[np.bool_]) -> None:
        self.entry = entry
        self._arrays = arrays
        self._there = there
        self.ids = arrays.ids[: len(there)]
        self._owners = arrays.owners[: len(there)]
        self._vectors = arrays.vectors[: len(there)]
        self._columns: dict[str, Column] = {}

    @classmethod
    def empty(cls, dimension: int) -> Matrix:
        """The matrix before the first entry."""
        return cls(0, _Arrays(dimension), np.empty(0, np.bool_))

    def followed(self, entry: int, gone: Numbers, came: Came) -> Matrix:
        """Its successor at a later entry. Call it on the latest matrix alone, one thread at a time."""
        went = self._there & np.isin(self.ids, gone)
        self._vectors[went] = 0.0
        there = self._there & ~went
        arrays = self._arrays
        arrays.count = len(there)  # an attempt that failed may have left rows behind
        if 4 * np.count_nonzero(there) < 3 * len(there):
            arrays = _Arrays(self._vectors.shape[1])
            arrays.reserve(int(np.count_nonzero(there)) + came.number)
            arrays.append(Page(self.ids[there], self._owners[there], self._vectors[there]))
            there = np.ones(arrays.count, np.bool_)
        arrays.reserve(came.number)
        for page in came.pages:
            arrays.append(page)
        new = np.ones(arrays.count - len(there), np.bool_)
        return Matrix(entry, arrays, np.concatenate([there, new]))

    def near(self, query: Vectors, threshold: float) -> tuple[Numbers, Numbers]:
        """The ids of all rows whose inner product with the query reaches the threshold, and their owners' numbers."""
        import faiss

        products = np.empty(len(self.ids), np.float32)
        pointers = map(faiss.swig_ptr, (products, np.ascontiguousarray(query, np.float32), self._vectors))
        faiss.fvec_inner_products_ny(*pointers, len(query), len(products))  # type: ignore[attr-defined]
        close = np.flatnonzero(products >= np.float32(threshold - rounding(len(query))))
        close = close[self._there[close]]
        close = close[reaches(inner_products(self._vectors, close, query), threshold)]
        return self.ids[close], self._owners[close]

    def rows(self) -> tuple[Numbers, Numbers]:
        """All ids, and their owners' numbers."""
        return self.ids[self._there], self._owners[self._there]

    def vectors(self, ids: Numbers) -> Vectors:
        """The vectors of these rows, which are there: a copy."""
        found: Vectors = self._vectors[self._order[self._positions(ids)]]
        return found

    def passing(self, ids: Numbers, wanted: MetadataFilter, read: Read) -> NDArray[np.bool_] | None:
        """Return a mask of these rows that pass a filter; None if reading them costs less than reading all rows.

        The first filter on a key reads all records. Its values stay in memory until the store changes.
        """
        columns = self._columns
        if missing := wanted.keys - columns.keys():
            if 8 * len(ids) < len(self.ids):
                return None
            if len(columns) + len(missing) > _MOST_COLUMNS:
                columns = {key: columns[key] for key in wanted.keys & columns.keys()}
            self._columns = columns = columns | columns_of(read(self._sorted), missing)
        return wanted.passing(columns)[self._positions(ids)]

    @cached_property
    def _order(self) -> Numbers:
        """The places of the rows that are there, by id."""
        places = np.flatnonzero(self._there)
        return places[np.argsort(self.ids[places], kind="stable")]

    @cached_property
    def _sorted(self) -> Numbers:
        """Their ids, ascending."""
        return self.ids[self._order]

    def _positions(self, ids: Numbers) -> Numbers:
        """The positions of these ids among all, ascending. `StoreError` for one that is not there."""
        found = np.searchsorted(self._sorted, ids)
        if len(ids) and (found.max() == len(self._sorted) or (self._sorted[found] != ids).any()):
            raise StoreError("rows of one reading of the store were used in another")
        return found
