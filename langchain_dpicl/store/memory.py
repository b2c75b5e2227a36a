"""Exemplars in memory: texts, owners and vectors, with FAISS's exact search.

Vectors lie in a flat inner-product FAISS index; texts lie as UTF-8 in one byte arena, so that forgetting can overwrite
them (a Python string cannot be overwritten) and so that a million exemplars cost little more than their vectors. Owners
are small integers ("slots"), in order of first appearance. A row is a place in the index.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidRecords
from langchain_dpicl.store import intake, nearness
from langchain_dpicl.store.base import Numbers, PrivateStore, StoreView
from langchain_dpicl.store.file import Contents, new_lives
from langchain_dpicl.store.intake import Batch, Vectors
from langchain_dpicl.store.marks import owner_mark
from langchain_dpicl.store.owners import OwnerKeys, Owners, OwnerSlots, encoded

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings


class MemoryStore(PrivateStore, StoreView):
    """A store whose one moment is what it holds now: nobody changes it while a thread holds its ``lock``."""

    def __init__(self, embeddings: Embeddings, contents: Contents) -> None:
        super().__init__(embeddings, contents.keys, contents.dimension)
        self.lock = threading.RLock()
        self._readings = 0
        self._has_unsaved = False
        self._numbers: Numbers = np.empty(0, np.int64)
        self._next_number = 0
        self._adopt(contents)

    # -- what it holds ------------------------------------------------------------------------------------------------

    def _adopt(self, contents: Contents) -> None:
        """Hold these contents from now on. Their vectors are overwritten: the index has its own copy."""
        import faiss

        self._index = faiss.IndexFlatIP(self.dimension)
        self._index.add(contents.vectors)
        contents.vectors[:] = 0.0
        self._held = replace(contents, vectors=np.empty((0, self.dimension), np.float32))
        self._owner_slots = OwnerSlots((key, i) for i, key in enumerate(contents.owner_keys))
        self._number_the_new()
        self._by_owner: tuple[Numbers, Numbers] | None = None

    def _contents(self) -> Contents:
        """What it holds, with a view of the index's vectors."""
        return replace(self._held, vectors=self._stored_vectors())

    def _without(self, slots: Numbers) -> Contents:
        """All but these owners, as a copy."""
        held = self._held
        stays = np.ones(len(held.owner_keys), np.bool_)
        stays[slots] = False
        keep = np.flatnonzero(stays[held.owner_of])
        return replace(
            held,
            vectors=np.ascontiguousarray(self._stored_vectors()[keep]),
            ids=held.ids[keep],
            owner_of=(np.cumsum(stays) - 1)[held.owner_of[keep]].astype(np.int32),
            owner_keys=OwnerKeys(key for key, here in zip(held.owner_keys, stays.tolist(), strict=True) if here),
            lives=held.lives[stays],
            texts=held.texts.keep(keep),
        )

    def _become(self, rest: Contents) -> None:
        """Be what is left of this store. What it held is overwritten."""
        self._stored_vectors()[:] = 0.0
        self._held.texts.wipe()
        self._numbers = self._numbers[np.isin(self._held.lives, rest.lives)]
        self._adopt(rest)

    def _stored_vectors(self) -> Vectors:
        """The index's own vectors, as a view: writing to it writes to the index."""
        import faiss

        view: Vectors = faiss.rev_swig_ptr(self._index.get_xb(), self._index.ntotal * self.dimension)
        return view.reshape(self._index.ntotal, self.dimension)

    # -- adding -------------------------------------------------------------------------------------------------------

    def _insert(self, batch: Batch, matrix: Vectors) -> list[int]:
        with self.lock:
            self.refresh()
            first = self._held.next_id
            ids = np.arange(first, first + len(matrix)) if batch.ids is None else batch.ids
            if batch.ids is not None and np.isin(ids, self._held.ids).any():
                raise InvalidRecords(intake.NOT_UNIQUE)
            self._enter(batch.contents, self._slots_for(batch.names(ids)), matrix, ids)
            self._has_unsaved = True
        found: list[int] = ids.tolist()
        return found

    def _slots_for(self, names: Sequence[str]) -> NDArray[np.int32]:
        """The slots of these owners. New owners get one, at the end."""
        slots = np.empty(len(names), np.int32)
        for i, key in enumerate(names):
            slots[i] = slot = self._owner_slots.setdefault(key, len(self._owner_slots))
            if slot == len(self._held.owner_keys):
                self._held.owner_keys.append(key)
        self._number_the_new()
        return slots

    def _number_the_new(self) -> None:
        """Give owners at the end, who have no number so far, the next ones, and a life unless they have one."""
        held, end = self._held, self._next_number + len(self._held.owner_keys) - len(self._numbers)
        self._numbers = np.append(self._numbers, np.arange(self._next_number, end, dtype=np.int64))
        self._next_number = end
        held.lives = np.append(held.lives, new_lives(len(held.owner_keys) - len(held.lives)))

    def _enter(self, payloads: Sequence[bytes], slots: NDArray[np.int32], matrix: Vectors, ids: Numbers) -> None:
        """Append rows."""
        held = self._held
        self._index.add(matrix)
        held.texts.extend(payloads)
        held.ids = np.concatenate([held.ids, ids])
        held.owner_of = np.concatenate([held.owner_of, slots])
        held.next_id = max(held.next_id, int(ids.max()) + 1)
        self._by_owner = None

    # -- reading (the private side) -----------------------------------------------------------------------------------

    @property
    def owners(self) -> Owners:
        with self.lock:
            return Owners(tuple(self._held.owner_keys))

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

    @property
    def places(self) -> int:
        """One coin for each owner."""
        return self.owner_count

    def owners_at(self, places: Numbers) -> Numbers:
        return self._numbers[places]

    def eligible(self, query: Vectors, threshold: float) -> Numbers:
        """The numbers of all owners with an exemplar whose similarity to the query reaches the threshold.

        A FAISS range search finds all rows that come within rounding of it, and `similarity`, which computes each from
        its own row alone, decides. So whether an owner is eligible depends on its own vectors and the query.
        """
        with self.lock:
            least = float(np.float32(threshold - nearness.rounding(self.dimension)))
            _, _, rows = self._index.range_search(query.reshape(1, -1), least)
            near = rows[self.similarity(rows, query) >= threshold]
            found: Numbers = self._numbers[np.unique(self._held.owner_of[near])]
            return found

    def rows_of(self, owners: Numbers) -> tuple[Numbers, Numbers]:
        with self.lock:
            order, starts = self._rows_by_owner()
            slots, there = self._slots_of(owners)
            counts = np.where(there, starts[slots + 1] - starts[slots], 0)
            position = np.repeat(np.arange(len(slots)), counts)
            offset = np.arange(len(position)) - np.repeat(np.cumsum(counts) - counts, counts)
            return order[starts[slots][position] + offset], position

    def _rows_by_owner(self) -> tuple[Numbers, Numbers]:
        """All rows, owner by owner, and at which of them each slot's begin."""
        if self._by_owner is None:
            starts = np.zeros(
                len(self._held.owner_keys) + 2, np.int64
            )  # one more: an empty store has a slot to look up
            counts = np.bincount(self._held.owner_of, minlength=len(self._held.owner_keys))
            np.cumsum(counts, out=starts[1 : len(counts) + 1])
            self._by_owner = (np.argsort(self._held.owner_of, kind="stable"), starts)
        return self._by_owner

    def _slots_of(self, owners: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
        """Each owner's slot, and whether it is there at all."""
        if not len(self._numbers):
            return np.zeros(len(owners), np.int64), np.zeros(len(owners), np.bool_)
        slots = np.minimum(np.searchsorted(self._numbers, owners), len(self._numbers) - 1)
        return slots, self._numbers[slots] == owners

    def marks(self, owners: Numbers, key: bytes) -> list[bytes]:
        with self.lock:
            slots, there = self._slots_of(owners)
            found = []
            for slot, is_there in zip(slots.tolist(), there.tolist(), strict=True):
                identity, is_named = self._identity(slot) if is_there else (b"", False)
                found.append(owner_mark(key, identity, named=is_named) if is_there else b"")
            return found

    def _identity(self, slot: int) -> tuple[bytes, bool]:
        """What an owner is recognised by, and whether it is a key: else the content of its exemplar."""
        name = self._held.owner_keys[slot]
        if self._is_named(name):
            return encoded(name), True
        order, starts = self._rows_by_owner()
        return self._held.texts[int(order[starts[slot]])], False

    def _is_named(self, name: str) -> bool:
        """Whether this is a key that somebody gave, and not what an exemplar without an owner is called here."""
        return self.owner_key is not None or not name.startswith("#")

    def read(self, rows: Numbers) -> list[dict[str, Any]]:
        with self.lock:
            return [intake.unpack(self._held.texts[int(row)]) for row in rows]

    def similarity(self, rows: Numbers, query: Vectors) -> NDArray[np.float32]:
        with self.lock:
            return nearness.inner_products(self._stored_vectors(), rows, query)

    def ids_of(self, rows: Numbers) -> list[int]:
        with self.lock:
            ids: list[int] = self._held.ids[rows].tolist()
            return ids

    def _sketched(self) -> Iterator[bytes]:
        with self.lock:
            yield from self._sketched_of(range(len(self._held.owner_keys)), range(len(self._held.ids)))

    def _sketched_of(self, slots: Iterable[int], rows: Iterable[int]) -> Iterator[bytes]:
        """What a fingerprint hashes of these owners and of their rows."""
        for slot in slots:
            if self._is_named(name := self._held.owner_keys[slot]):
                yield encoded(name)
        if self.owner_key is None:
            for row in rows:
                yield self._held.texts[row]

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held: the vectors, and everything else (an estimate of Python's own objects included)."""
        with self.lock:
            per_key = 8 + 24 * 1.75 + 28  # list slot, dictionary entry at its usual load, integer value
            keys = sum(49 + per_key + len(key) for key in self._held.owner_keys)
            arrays = [self._held.ids, self._held.owner_of, self._held.lives, self._numbers, *(self._by_owner or ())]
            rest = self._held.texts.nbytes + sum(array.nbytes for array in arrays)
            return {"vectors": 4 * self.dimension * len(self._held.ids), "other": int(rest + keys)}
