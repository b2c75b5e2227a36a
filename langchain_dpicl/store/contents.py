"""The parts of a store in memory and of its file: texts in a byte arena, owners' keys, the state of the file."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.store.base import Numbers, owner_mark
from langchain_dpicl.store.notes import OpenedBudget, merged
from langchain_dpicl.store.records import HiddenOwners, RecordKeys, Vectors


class Arena:
    """An append-only list of byte strings, held in one buffer of the exact size.

    Python's own strings cannot be overwritten and cost some fifty bytes each beyond their content. Here an entry costs
    its content and eight bytes, and `wipe` replaces everything with zeros in place.
    """

    __slots__ = ("_data", "_ends")

    def __init__(self, data: bytearray | None = None, ends: NDArray[np.int64] | None = None) -> None:
        self._data = data or bytearray()
        self._ends: NDArray[np.int64] = np.empty(0, np.int64) if ends is None else ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> bytes:
        start = int(self._ends[i - 1]) if i else 0
        return bytes(self._data[start : int(self._ends[i])])

    def extend(self, items: Sequence[bytes | memoryview]) -> None:
        """Append items. The old buffer is overwritten before it is dropped, so no copy of it lingers."""
        start = len(self._data)
        ends = start + np.cumsum(np.fromiter((len(item) for item in items), np.int64, len(items)))
        grown = bytearray(int(ends.max(initial=start)))
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
        data = memoryview(self._data)
        ends = self._ends[rows]
        starts = ends - np.diff(self._ends, prepend=0)[rows]
        kept = Arena()
        kept.extend([data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])
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
    """The store that a file holds, and its generation. Public, but for the ``key`` of its owners' marks.

    ``lineage`` is one random name for all files of one store, ``edition`` one for this very save: two files of one
    ``generation``, which every save raises, may differ. Saves with equal ``records``, the SHA-256 of all arrays, differ
    in ``budgets`` and ``releases`` alone: the budgets that were opened on the store, and what was released once of it.
    """

    lineage: str = field(default_factory=lambda: secrets.token_hex(16))
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    generation: int = 0
    edition: str = ""
    records: str = ""
    budgets: tuple[OpenedBudget, ...] = ()
    releases: tuple[str, ...] = ()
    forgotten: tuple[str, ...] = ()
    """Marks of owners who were forgotten, so that the data file of a `kept_store` does not bring them back."""
    notes: tuple[str, ...] = ()
    """The places of its data file's notes."""

    def joined(self, news: FileState) -> FileState:
        """This state with what another process has written: the later generation, and all that either remembers."""
        both: dict[str, Any] = {
            name: tuple(dict.fromkeys([*getattr(self, name), *getattr(news, name)]))
            for name in ("releases", "forgotten", "notes")
        }
        return replace(
            self,
            generation=max(self.generation, news.generation),
            budgets=merged(self.budgets, news.budgets),
            **both,
        )

    def mark(self, identity: bytes, is_named: bool) -> str:
        """The mark of an owner by its key, or without one by its exemplar's content."""
        return owner_mark(bytes.fromhex(self.lineage), identity, named=is_named).hex()


@dataclass(repr=False)
class Contents:
    """The contents of a store or its file: rows with their owners' slots, and by slot the owners' keys and lives.

    ``documents`` are the rows' ids as documents, empty for a row that has none of its own.
    """

    keys: RecordKeys
    dimension: int
    vectors: Vectors
    next_id: int = 0
    ids: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    owner_of: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    owner_keys: OwnerKeys = field(default_factory=OwnerKeys)
    lives: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    texts: Arena = field(default_factory=Arena)
    documents: Arena = field(default_factory=Arena)
    state: FileState = field(default_factory=FileState)

    def row_lives(self) -> Numbers:
        """The life of each row's owner."""
        return self.lives[self.owner_of]

    def enter(
        self,
        contents: Sequence[bytes],
        names: Sequence[str],
        ids: Numbers,
        documents: Sequence[bytes],
        slots: OwnerSlots,
    ) -> NDArray[np.int32]:
        """Append rows, without their vectors; the slots of their owners. New owners get a life and a slot at the end,
        which goes into ``slots`` too."""
        owners = np.array([slots.setdefault(name, len(slots)) for name in names], np.int32)
        self.owner_keys.extend(itertools.islice(slots, len(self.owner_keys), None))
        lives = np.frombuffer(secrets.token_bytes(8 * (len(slots) - len(self.lives))), np.int64)
        self.lives = np.append(self.lives, lives & np.int64(2**63 - 1))
        self.texts.extend(contents)
        self.documents.extend(documents)
        self.ids = np.concatenate([self.ids, ids])
        self.owner_of = np.concatenate([self.owner_of, owners])
        self.next_id = max(self.next_id, int(ids.max(initial=-1)) + 1)
        return owners

    def without(self, rows: Numbers, keep: Collection[str] = ()) -> Contents:
        """A copy without these rows, and without the owners who have no other, unless they are to be kept."""
        stays = np.ones(len(self.ids), np.bool_)
        stays[rows] = False
        left = np.flatnonzero(stays)
        owners = np.fromiter((key in keep for key in self.owner_keys), np.bool_, len(self.owner_keys))
        owners[self.owner_of[left]] = True
        return replace(
            self,
            vectors=np.ascontiguousarray(self.vectors[left]),
            ids=self.ids[left],
            owner_of=(np.cumsum(owners) - 1)[self.owner_of[left]].astype(np.int32),
            owner_keys=OwnerKeys(itertools.compress(self.owner_keys, owners)),
            lives=self.lives[owners],
            texts=self.texts.keep(left),
            documents=self.documents.keep(left),
        )
