"""Byte strings side by side in one buffer that can be overwritten in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import UnsafeConfigurationError


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
