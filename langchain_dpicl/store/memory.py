"""Exemplars in memory: texts, owners and vectors, with FAISS's exact search.

Vectors lie in a flat inner-product FAISS index; texts lie as UTF-8 in one byte arena, so that forgetting can overwrite
them (a Python string cannot be overwritten) and so that a million exemplars cost little more than their vectors. Owners
are small integers ("slots"), in order of first appearance. A row is a place in the index.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidRecords, UnsafeConfigurationError
from langchain_dpicl.store.base import HiddenOwners, Numbers, OpenedBudget, Owners, PrivateStore, StoreView, owner_mark
from langchain_dpicl.store.records import NOT_UNIQUE, Batch, RecordKeys, Vectors, encoded, unpack

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

_BLOCK = 1024  # rows at a time: they stay in the processor's cache between the product and the sum


class Arena:
    """An append-only list of byte strings, held in one buffer of the exact size.

    Python's own strings cannot be overwritten and cost some fifty bytes each beyond their content. Here an entry costs
    its content and eight bytes, and `wipe` replaces everything with zeros in place.
    """

    __slots__ = ("_data", "_ends")

    def __init__(self, data: bytearray | None = None, ends: NDArray[np.int64] | None = None) -> None:
        self._data = bytearray() if data is None else data
        self._ends: NDArray[np.int64] = np.empty(0, np.int64) if ends is None else ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> bytes:
        return bytes(self._data[int(self._ends[i - 1]) if i else 0 : int(self._ends[i])])

    def extend(self, items: Sequence[bytes | memoryview]) -> None:
        """Append items. The old buffer is overwritten before it is dropped, so no copy of it lingers."""
        start = len(self._data)
        ends = start + np.cumsum(np.fromiter((len(item) for item in items), np.int64, len(items)))
        grown = bytearray(int(ends[-1]) if len(ends) else start)
        grown[:start] = self._data
        for item, end in zip(items, ends.tolist(), strict=True):
            grown[end - len(item) : end] = item
        self._replace(grown, np.concatenate([self._ends, ends]))

    def equal_to(self, item: bytes) -> list[int]:
        """The positions of entries with exactly this content."""
        alike = np.flatnonzero(np.diff(self._ends, prepend=0) == len(item))
        return [i for i in alike.tolist() if self[i] == item]

    def keep(self, rows: NDArray[np.int64]) -> Arena:
        """A new arena of these entries alone."""
        kept, data = Arena(), memoryview(self._data)
        starts = self._ends[rows] - np.diff(self._ends, prepend=0)[rows]
        kept.extend([data[i:end] for i, end in zip(starts.tolist(), self._ends[rows].tolist(), strict=True)])
        return kept

    def wipe(self) -> None:
        """Overwrite everything with zeros and be empty."""
        self._replace(bytearray(), np.empty(0, np.int64))

    def _replace(self, data: bytearray, ends: NDArray[np.int64]) -> None:
        self._data[:] = bytes(len(self._data))
        self._data, self._ends = data, ends

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("private texts are not pickled or copied")

    @property
    def nbytes(self) -> int:
        """Bytes held: the buffer and the ends."""
        return len(self._data) + self._ends.nbytes

    def buffer(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The whole content and the end of every entry, as views (for saving)."""
        return np.frombuffer(self._data, np.uint8), self._ends


class OwnerKeys(HiddenOwners, list[str]):
    """The keys by slot, as a store keeps them."""


class OwnerSlots(HiddenOwners, dict[str, int]):
    """The slot of each key."""


@dataclass(frozen=True)
class FileState:
    """Which store a file holds, and which of its generations. Public.

    ``lineage`` is one random name for all files of one store, ``edition`` one for this very save: two files of one
    ``generation``, which every save raises, may differ. Saves with equal ``records``, the SHA-256 of all arrays, differ
    in ``budgets`` and ``releases`` alone: the budgets that were opened on the store, and what was released once of it.
    """

    lineage: str = field(default_factory=lambda: secrets.token_hex(16))
    generation: int = 0
    edition: str = ""
    records: str = ""
    budgets: tuple[OpenedBudget, ...] = ()
    releases: tuple[str, ...] = ()


@dataclass(repr=False)
class Contents:
    """The contents of a store or its file: rows with their owners' slots, and by slot the owners' keys and lives."""

    keys: RecordKeys
    dimension: int
    vectors: Vectors
    next_id: int = 0
    ids: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    owner_of: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    owner_keys: OwnerKeys = field(default_factory=OwnerKeys)
    lives: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    texts: Arena = field(default_factory=Arena)
    state: FileState = field(default_factory=FileState)

    def row_lives(self) -> Numbers:
        """The life of each row's owner."""
        return self.lives[self.owner_of]


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


class MemoryStore(PrivateStore, StoreView):
    """A store that is its own view: nobody changes it while a thread holds its ``lock``.

    A `reading` holds the lock. Take it yourself to call several methods of the view on the store.
    """

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
        """Put further vectors into the index. New owners, at the end, get a number, and a life unless they have one."""
        import faiss

        held, count = self._held, len(self._held.owner_keys)
        self._index.add(matrix)
        view = faiss.rev_swig_ptr(self._index.get_xb(), self._index.ntotal * self.dimension)
        held.vectors = view.reshape(self._index.ntotal, self.dimension)  # writing to it writes to the index
        new = np.arange(self._next_number, self._next_number + count - len(self.numbers), dtype=np.int64)
        self.numbers = np.append(self.numbers, new)
        self._next_number += len(new)
        lives = np.frombuffer(secrets.token_bytes(8 * (count - len(held.lives))), np.int64)
        held.lives = np.append(held.lives, lives & np.int64(2**63 - 1))
        self._by_owner: tuple[Numbers, Numbers] | None = None

    def _without(self, slots: Numbers) -> Contents:
        """All but these owners, as a copy."""
        held = self._held
        stays = np.ones(len(held.owner_keys), np.bool_)
        stays[slots] = False
        keep = np.flatnonzero(stays[held.owner_of])
        return replace(
            held,
            vectors=np.ascontiguousarray(held.vectors[keep]),
            ids=held.ids[keep],
            owner_of=(np.cumsum(stays) - 1)[held.owner_of[keep]].astype(np.int32),
            owner_keys=OwnerKeys(itertools.compress(held.owner_keys, stays)),
            lives=held.lives[stays],
            texts=held.texts.keep(keep),
        )

    def _become(self, rest: Contents) -> None:
        """Hold the rest of this store from now on. The old texts and vectors are overwritten."""
        self._held.vectors[:] = 0.0
        self._held.texts.wipe()
        self.numbers = self.numbers[np.isin(self._held.lives, rest.lives)]
        self._adopt(rest)

    def _insert(self, batch: Batch, matrix: Vectors) -> list[int]:
        with self.lock:
            self.refresh()
            first = self._held.next_id
            ids = np.arange(first, first + len(matrix)) if batch.ids is None else batch.ids
            if batch.ids is not None and np.isin(ids, self._held.ids).any():
                raise InvalidRecords(NOT_UNIQUE)
            self._enter(batch.contents, batch.names(ids), matrix, ids)
            self._has_unsaved = True
        return [int(i) for i in ids]

    def _enter(
        self, contents: Sequence[bytes], names: Sequence[str], matrix: Vectors, ids: Numbers
    ) -> NDArray[np.int32]:
        """Append rows; the slots of their owners. New owners get one at the end."""
        held, slot_of = self._held, self._owner_slots
        slots = np.array([slot_of.setdefault(name, len(slot_of)) for name in names], np.int32)
        held.owner_keys.extend(itertools.islice(slot_of, len(held.owner_keys), None))
        held.texts.extend(contents)
        held.ids = np.concatenate([held.ids, ids])
        held.owner_of = np.concatenate([held.owner_of, slots])
        held.next_id = max(held.next_id, int(ids.max()) + 1)
        self._grow(matrix)
        return slots

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

    def eligible(self, query: Vectors, threshold: float) -> Numbers:
        """The numbers of all owners with an exemplar whose similarity to the query reaches the threshold.

        A FAISS range search finds all rows that come within rounding of it, and `similarity`, which computes each from
        its own row alone, decides. So whether an owner is eligible depends on its own vectors and the query.
        """
        least = float(np.float32(threshold - rounding(self.dimension)))
        _, _, rows = self._index.range_search(query.reshape(1, -1), least)
        near = rows[self.similarity(rows, query) >= threshold]
        found: Numbers = self.numbers[np.unique(self._held.owner_of[near])]
        return found

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
        is_named = self._is_named(name)
        return encoded(name) if is_named else self._held.texts[row], is_named

    def _is_named(self, name: str) -> bool:
        """Whether a caller gave this key. Otherwise the store made it up for an exemplar without an owner."""
        return self.owner_key is not None or not name.startswith("#")

    def _sketched(self) -> Iterator[bytes]:
        with self.lock:
            yield from (encoded(name) for name in self._held.owner_keys if self._is_named(name))
            if self.owner_key is None:
                yield from map(self._held.texts.__getitem__, range(len(self)))

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held: the vectors, and everything else (an estimate of Python's own objects included)."""
        with self.lock:
            per_key = 8 + 24 * 1.75 + 28  # list slot, dictionary entry at its usual load, integer value
            keys = sum(49 + per_key + len(key) for key in self._held.owner_keys)
            arrays = [self._held.ids, self._held.owner_of, self._held.lives, self.numbers, *(self._by_owner or ())]
            rest = self._held.texts.nbytes + sum(array.nbytes for array in arrays)
            return {"vectors": 4 * self.dimension * len(self._held.ids), "other": int(rest + keys)}
