"""A store's file as several processes share it: who may write it, and what of it is new.

Writers hold the file's lock (``flock``, which ends with its process) from the comparison of generations to the rename,
so of two that save at once one wins and the other is refused. Readers take no lock: a rename shows them the old file or
the new one. Whether there is a newer one costs a ``stat``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import StoreFileChanged, StoreFileError
from langchain_dpicl.store import file as store_file
from langchain_dpicl.store.durable import lock
from langchain_dpicl.store.file import Contents, State

_WAIT_SECONDS = 60.0
_START_AGAIN = "load it in a new process, or remove it and save again"

Signature = tuple[int, int, int, int]


class SharedFile:
    """A file that a store was loaded from or saved to, and what this process knows of it.

    ``ids`` and ``row_lives`` are the rows of the generation that is known: what the file has lost or gained since is
    told by them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: State | None = None
        self.ids: NDArray[np.int64] = np.empty(0, np.int64)
        self.row_lives: NDArray[np.int64] = np.empty(0, np.int64)
        self._seen: Signature | None = None
        self._looked_at: Signature | None = None

    @classmethod
    def load(cls, path: Path) -> tuple[SharedFile, Contents]:
        """A file and what it holds, which is known from now on."""
        file = cls(path)
        contents = file._read()
        file.know(contents)
        return file, contents

    def knows(self, ids: NDArray[np.int64], lives: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these rows (their ids, their owners' lives) were in the generation that is known."""
        if not len(self.ids):
            return np.zeros(len(ids), np.bool_)
        order = np.argsort(self.ids)
        place = order[np.minimum(np.searchsorted(self.ids, ids, sorter=order), len(order) - 1)]
        known: NDArray[np.bool_] = (self.ids[place] == ids) & (self.row_lives[place] == lives)
        return known

    # -- reading ------------------------------------------------------------------------------------------------------

    def is_behind(self) -> bool:
        """Whether something has happened to the file since it was read or written here. One ``stat``.

        A file that is gone tells nothing, so it is not behind. `StoreFileError` where nobody can tell.
        """
        seen = self._stat()
        return seen is not None and seen != self._seen

    def newer(self) -> Contents | State | None:
        """What the file holds now if it is newer than what is known; its `State` alone where no record has changed.

        Whoever has taken it over says so with `know`.
        `StoreFileChanged` for an older generation or another store, `StoreFileError` for a file that cannot be read.
        """
        seen = self._stat()
        known = self.state
        if seen is None or seen == self._seen or known is None:
            return None
        found = store_file.read_state(self.path)
        if found.edition == known.edition:  # copied or touched
            self._seen = seen
            return None
        self._check_lineage(found, known.lineage)
        if found.generation < known.generation:
            raise StoreFileChanged(
                f"{self.path.name!r} is older than what this process has read (generation {found.generation}, not "
                f"{known.generation}): who was forgotten since may be in it; {_START_AGAIN}"
            )
        if found.records and found.records == known.records:
            self._looked_at = seen
            return found
        contents = self._read()
        self._check_lineage(contents.state, known.lineage)
        return contents

    def _read(self) -> Contents:
        while True:  # what was looked at and what is read must be one file
            self._looked_at = self._stat()
            contents = store_file.read(self.path)
            if self._looked_at == self._stat():
                return contents

    def know(self, found: Contents | State) -> None:
        """What was read last is what this process knows."""
        self._seen = self._looked_at
        if isinstance(found, State):
            self.state = found
        else:
            self.state, self.ids, self.row_lives = found.state, found.ids, found.row_lives()

    def _stat(self) -> Signature | None:
        try:
            return _signature(os.stat(self.path))
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = error.strerror
        raise StoreFileError(f"{self.path.name!r} cannot be read: {reason}; so nobody can tell who was forgotten in it")

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, contents: Contents, *, scrub: bool = False) -> None:
        """Write a store as the file's next generation. `StoreFileChanged` unless the file is as this process knows it.

        A path that is not known yet may hold nothing, or an older generation of the same store.
        """
        with self._held() as there:
            if there:
                self._check(contents.state)
            store_file.write(
                self.path,
                contents,
                lambda state, seen: self._written(contents, state, seen),
                new=not there,
                scrub=scrub,
            )

    def _written(self, contents: Contents, state: State, seen: os.stat_result) -> None:
        self._looked_at = _signature(seen)
        self.know(replace(contents, state=state))

    def _check(self, own: State) -> None:
        """`StoreFileChanged` unless this store may replace the file, which is locked."""
        unreadable = False
        found: State | None = None
        if os.path.getsize(self.path) == 0:  # a name that somebody reserved
            return
        try:
            found = store_file.read_state(self.path)
        except StoreFileError:
            unreadable = True
        if unreadable or found is None:
            raise StoreFileChanged(f"{self.path.name!r} is not a store: nothing was written; take another path")
        self._check_lineage(found, own.lineage)
        if self.state is None:
            is_known = found.generation <= own.generation
        else:
            is_known = found.edition == self.state.edition
        if not is_known:
            raise StoreFileChanged(
                f"{self.path.name!r} was changed by another process (it is generation {found.generation}): nothing was "
                f"written; {store_file.ADVICE}"
            )

    def _check_lineage(self, found: State, own: str) -> None:
        if found.lineage != own:
            raise StoreFileChanged(f"{self.path.name!r} holds another store: {_START_AGAIN}")

    @contextlib.contextmanager
    def _held(self) -> Iterator[bool]:
        """Keep other writers out. False where there is no file so far."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            with contextlib.ExitStack() as cleanup:
                held = self._lock(cleanup)
                if held is not False:
                    yield held is not None
                    return
            if time.monotonic() > deadline:
                raise StoreFileError(f"{self.path.name!r} is being written by another process for a minute now")
            time.sleep(0.005)

    def _lock(self, cleanup: contextlib.ExitStack) -> bool | None:
        """Whether the file is locked now; None where there is none."""
        reason: str | None = None
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            cleanup.callback(os.close, descriptor)
            # Who waited for a lock may have got that of a file which was replaced meanwhile.
            return lock(descriptor) and os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = error.strerror or "input/output error"
        raise StoreFileError(f"the store could not be written: {reason}; the old file is as it was")


def _signature(found: os.stat_result) -> Signature:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
