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
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidRecords
from langchain_dpicl.store.base import Numbers, PrivateStore, StoreView
from langchain_dpicl.store.file import Contents
from langchain_dpicl.store.owners import OwnerKeys, Owners, OwnerSlots, encoded, owner_mark
from langchain_dpicl.store.records import NOT_UNIQUE, Batch, unpack
from langchain_dpicl.store.vectors import Vectors, inner_products, rounding

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings


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
