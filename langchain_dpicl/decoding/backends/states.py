"""What a model has read of the demonstrations, kept between answers within a bound of bytes.

The states are private: they show nothing, and they go when their exemplar is forgotten.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, NoReturn

from langchain_dpicl.decoding.model import Demonstration
from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError


class StateCache:
    """Private states by demonstration: those used last, up to ``memory_bytes`` in all. Safe to share among threads.

    A state that is larger than the bound is not kept. A demonstration whose text has changed under the same key is
    another one.
    """

    def __init__(self, memory_bytes: int) -> None:
        if not isinstance(memory_bytes, int) or isinstance(memory_bytes, bool) or memory_bytes < 0:
            raise InvalidParameter("memory_bytes", memory_bytes, "a whole number, at least 0")
        self.memory_bytes = memory_bytes
        self._entries: OrderedDict[tuple[Hashable, str], tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, demonstration: Demonstration) -> Any:
        """The state, or None."""
        place = (demonstration.key, demonstration.text)
        with self._lock:
            if place not in self._entries:
                return None
            self._entries.move_to_end(place)
            return self._entries[place][0]

    def put(self, demonstration: Demonstration, state: Any, size: int) -> None:
        """Keep a state of so many bytes; those that were used longest ago make room."""
        place = (demonstration.key, demonstration.text)
        with self._lock:
            self._drop(place)
            if size > self.memory_bytes:
                return
            self._entries[place] = (state, size)
            self._bytes += size
            while self._bytes > self.memory_bytes:
                self._drop(next(iter(self._entries)))

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop every state of these keys, whatever their text was."""
        gone = set(keys)
        with self._lock:
            for place in [place for place in self._entries if place[0] in gone]:
                self._drop(place)

    def _drop(self, place: tuple[Hashable, str]) -> None:
        _, size = self._entries.pop(place, (None, 0))
        self._bytes -= size

    @property
    def bytes(self) -> int:
        """What the states hold at present."""
        with self._lock:
            return self._bytes

    @property
    def per_demonstration(self) -> float:
        """Bytes of a state on average; 0 where there is none."""
        with self._lock:
            return self._bytes / len(self._entries) if self._entries else 0.0

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def __repr__(self) -> str:
        return f"StateCache(memory_bytes={self.memory_bytes})"

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("private states are not pickled or copied")
