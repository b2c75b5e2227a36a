"""Exemplars in memory: texts, owners and vectors, with FAISS's exact search.

Vectors lie in a flat inner-product FAISS index; texts lie as UTF-8 in one byte arena, so that forgetting can overwrite
them (a Python string cannot be overwritten) and so that a million exemplars cost little more than their vectors. Owners
are small integers ("slots"), in order of first appearance. A row is a place in the index.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.calls.shut import Shut
from langchain_dpicl.errors import InvalidRecords, StoreError
from langchain_dpicl.store.base import Arrival, Held, Numbers, StoreView, owner_mark
from langchain_dpicl.store.contents import Contents, OwnerSlots
from langchain_dpicl.store.filters import Column, MetadataFilter, columns_of
from langchain_dpicl.store.maintenance import LiveStore
from langchain_dpicl.store.notes import OpenedBudget
from langchain_dpicl.store.records import (
    NOT_UNIQUE,
    Batch,
    Owners,
    Vectors,
    decoded,
    encoded,
    unpack,
)

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

_BLOCK = 1024  # rows at a time: they stay in the processor's cache between the product and the sum
_MOST_COLUMNS = 16  # of metadata in memory: callers name them


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


class MemoryStore(LiveStore, StoreView):
    """A store that is its own view: nobody changes it while a thread holds its ``lock``.

    A `reading` holds the lock. Take it yourself to call several methods of the view on the store. No call of a chain
    reads it, or writes there.
    """

    _held: Shut[Contents] = Shut()
    _index: Shut[Any] = Shut()
    _owner_slots: Shut[OwnerSlots] = Shut()
    numbers: Shut[Numbers] = Shut()

    def __init__(self, embeddings: Embeddings, contents: Contents) -> None:
        super().__init__(embeddings, contents.keys, contents.dimension)
        self.lock = threading.RLock()
        self._readings = 0
        self._has_unsaved = False
        self.numbers = np.empty(0, np.int64)
        self._next_number = 0
        self._adopt(contents)

    def _adopt(self, contents: Contents) -> None:
        """Hold these contents from now on, with the vectors in the index: the given ones are overwritten."""
        import faiss

        given = contents.vectors
        self._index = faiss.IndexFlatIP(self.dimension)
        self._held = contents
        self._owner_slots = OwnerSlots((key, i) for i, key in enumerate(contents.owner_keys))
        self._grow(given)
        given[:] = 0.0

    def _grow(self, matrix: Vectors) -> None:
        """Put further vectors into the index. New owners, at the end, get a number."""
        import faiss

        self._index.add(matrix)
        view = faiss.rev_swig_ptr(self._index.get_xb(), self._index.ntotal * self.dimension)
        # Writing to it writes to the index.
        self._held.vectors = view.reshape(self._index.ntotal, self.dimension)
        count = len(self._held.owner_keys) - len(self.numbers)
        new = np.arange(self._next_number, self._next_number + count, dtype=np.int64)
        self.numbers = np.append(self.numbers, new)
        self._next_number += len(new)
        self._by_owner: tuple[Numbers, Numbers] | None = None
        self._columns: dict[str, Column] = {}
        self._row_of: dict[bytes, int] | None = None

    def _become(self, rest: Contents) -> None:
        """Hold the rest of this store from now on. The old texts and vectors are overwritten."""
        self._held.vectors[:] = 0.0
        self._held.texts.wipe()
        self._held.documents.wipe()
        self.numbers = self.numbers[np.isin(self._held.lives, rest.lives)]
        self._adopt(rest)

    def _insert(self, batch: Batch, matrix: Vectors) -> list[int]:
        with self.lock:
            self.refresh()
            first = self._held.next_id
            ids = batch.ids
            if ids is None:
                ids = np.arange(first, first + len(matrix))
            elif np.isin(ids, self._held.ids).any():
                raise InvalidRecords(NOT_UNIQUE)
            self._enter(batch.contents, batch.names(ids), matrix, ids, [b""] * len(ids))
            self._has_unsaved = True
        return [int(i) for i in ids]

    def _enter(
        self,
        contents: Sequence[bytes],
        names: Sequence[str],
        matrix: Vectors,
        ids: Numbers,
        documents: Sequence[bytes],
    ) -> NDArray[np.int32]:
        """Append rows; the slots of their owners. New owners get one at the end."""
        row_of = self._row_of
        count = len(self)
        slots = self._held.enter(contents, names, ids, documents, self._owner_slots)
        self._grow(matrix)
        if row_of is not None:
            row_of.update((encoded(self._document(row)), row) for row in range(count, len(self)))
            self._row_of = row_of
        return slots

    def _changed(self, arrival: Arrival | None, gone: Sequence[str]) -> tuple[list[int], Contents]:
        """The ids of the rows that a change (see `LiveStore`) removes, and the contents after it, a copy."""
        arriving = () if arrival is None else arrival.documents
        held = self._held
        rows = self.rows_with([*gone, *arriving])
        whole = [slot for slot in np.unique(held.owner_of[rows]) if not self._is_named(held.owner_keys[slot])]
        rows = np.union1d(rows, np.flatnonzero(np.isin(held.owner_of, whole)))
        if arrival is None:
            return self.ids_of(rows), held.without(rows)
        new = np.arange(held.next_id, held.next_id + len(arriving))
        names = arrival.batch.names(new)
        contents = held.without(rows, set(names))
        slots = OwnerSlots((key, i) for i, key in enumerate(contents.owner_keys))
        contents.enter(arrival.batch.contents, names, new, [encoded(each) for each in arriving], slots)
        contents.vectors = np.concatenate([contents.vectors, arrival.matrix])
        return self.ids_of(rows), contents

    # -- reading (the private side) -----------------------------------------------------------------------------------

    @property
    def owners(self) -> Owners:
        with self.lock:
            return Owners(self._held.owner_keys)

    @property
    def owner_count(self) -> int:
        return len(self._held.owner_keys)

    def __len__(self) -> int:
        return len(self._held.ids)

    @contextmanager
    def reading(self) -> Iterator[StoreView]:
        """This moment of the store: nobody adds or forgets while the ``with`` block lasts. Private.

        It begins with `refresh`, so with what other processes have written by then.
        """
        with self.lock:
            if not self._readings:
                self.refresh()
            self._readings += 1
            try:
                yield self
            finally:
                self._readings -= 1

    def eligible(self, query: Vectors | None, threshold: float, wanted: MetadataFilter | None = None) -> Numbers:
        """The numbers of all owners with an exemplar whose similarity to the query reaches the threshold, and that
        passes the filter.

        A FAISS range search finds all rows that come within rounding of it, and `similarity`, which computes each from
        its own row alone, decides. So whether an owner is eligible depends on its own vectors and the query.
        """
        if query is None:
            near = np.arange(len(self))
        else:
            least = float(np.float32(threshold - rounding(self.dimension)))
            _, _, rows = self._index.range_search(query.reshape(1, -1), least)
            near = rows[reaches(self.similarity(rows, query), threshold)]
        if wanted is not None:
            near = near[self.passing(near, wanted)]
        return self.numbers[np.unique(self._held.owner_of[near])]

    def passing(self, rows: Numbers, wanted: MetadataFilter) -> NDArray[np.bool_]:
        """Return a mask of the rows that pass.

        The first filter on a key reads all records; its values stay in memory until the store changes.
        """
        if missing := wanted.keys - self._columns.keys():
            if len(self._columns) + len(missing) > _MOST_COLUMNS:
                self._columns = {key: self._columns[key] for key in wanted.keys & self._columns.keys()}
            records = map(unpack, map(self._held.texts.__getitem__, range(len(self))))
            self._columns |= columns_of(records, missing)
        return wanted.passing(self._columns)[rows]

    def rows_of(self, owners: Numbers) -> tuple[Numbers, Numbers]:
        if self._by_owner is None:  # all rows, owner by owner, and their owners' numbers
            order = np.argsort(self._held.owner_of, kind="stable")
            self._by_owner = order, self.numbers[self._held.owner_of[order]]
        order, numbers = self._by_owner
        first = np.searchsorted(numbers, owners)
        position = np.repeat(np.arange(len(owners)), np.searchsorted(numbers, owners, "right") - first)
        nth = np.arange(len(position)) - np.searchsorted(position, position)  # of its owner's rows
        return order[first[position] + nth], position

    def similarity(self, rows: Numbers, query: Vectors) -> NDArray[np.float32]:
        return inner_products(self._held.vectors, rows, query)

    def vectors(self, rows: Numbers) -> Vectors:
        return np.asarray(self._held.vectors[rows], np.float32)

    def read(self, rows: Numbers) -> list[dict[str, Any]]:
        return [unpack(self._held.texts[row]) for row in rows.tolist()]

    def ids_of(self, rows: Numbers) -> list[int]:
        return [int(i) for i in self._held.ids[rows]]

    def records(self, rows: Numbers) -> list[Held]:
        held = self._held
        return [
            Held(self._document(row), held.texts[row], held.owner_keys[held.owner_of[row]]) for row in rows.tolist()
        ]

    def _document(self, row: int) -> str:
        return decoded(self._held.documents[row]) or f"#{self._held.ids[row]}"

    def rows_with(self, documents: Sequence[str]) -> Numbers:
        if self._row_of is None:
            self._row_of = {encoded(self._document(row)): row for row in range(len(self))}
        return np.array(
            [row for each in documents if (row := self._row_of.get(encoded(each))) is not None],
            np.int64,
        )

    def marks(self, owners: Numbers, key: bytes) -> list[bytes]:
        marks = [b""] * len(owners)
        rows, position = self.rows_of(owners)
        firsts = np.flatnonzero(np.diff(position, prepend=-1))
        for row, owner in zip(rows[firsts].tolist(), position[firsts].tolist(), strict=True):
            identity, is_named = self._identity(row)
            marks[owner] = owner_mark(key, identity, named=is_named)
        return marks

    def _identity(self, row: int) -> tuple[bytes, bool]:
        """The identity of the owner whose first row this is: its key and True, or the row's content and False."""
        name = self._held.owner_keys[self._held.owner_of[row]]
        if self._is_named(name):
            return encoded(name), True
        return self._held.texts[row], False

    def _parting(self, rows: Numbers, rest: Contents) -> tuple[list[int], bytes | None, bool]:
        """Return the arguments of `_leave` for the owner of all these rows, when the rest stays."""
        identity, is_named = self._identity(rows[0])
        if not is_named:
            owners = [rest.owner_keys[rest.owner_of[row]] for row in rest.texts.equal_to(identity)]
            if not all(map(self._is_named, owners)):
                return self.ids_of(rows), None, False
        return self.ids_of(rows), identity, is_named

    def _is_named(self, name: str) -> bool:
        """Return whether a caller gave this key. Otherwise the store made it up for an exemplar without an owner."""
        return self.owner_key is not None or not name.startswith("#")

    def _forgotten(self) -> Callable[[bytes, bool], bool]:
        state = self._held.state
        marks = frozenset(state.forgotten)
        return lambda identity, is_named: bool(marks) and state.mark(identity, is_named) in marks

    def _opened(self) -> tuple[OpenedBudget, ...]:
        with suppress(StoreError):
            self.refresh()
        return self._held.state.budgets

    @property
    def released_once(self) -> tuple[str, ...]:
        return self._held.state.releases

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held: the vectors, and everything else (an estimate of Python's own objects included)."""
        with self.lock:
            per_key = 8 + 24 * 1.75 + 28  # list slot, dictionary entry at its usual load, integer value
            keys = sum(49 + per_key + len(key) for key in self._held.owner_keys)
            arrays = [
                self._held.ids,
                self._held.owner_of,
                self._held.lives,
                self.numbers,
                *(self._by_owner or ()),
            ]
            rest = self._held.texts.nbytes + self._held.documents.nbytes + sum(array.nbytes for array in arrays)
            for column in self._columns.values():
                rest += column.ranks.nbytes + sum(64 * len(values) for _, values in column.kinds.values())
            return {
                "vectors": 4 * self.dimension * len(self._held.ids),
                "other": int(rest + keys),
            }
