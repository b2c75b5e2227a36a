"""A store's file as several processes share it: who may write it, and what of it is new.

Writers hold the file's lock (``flock``, which ends with its process) from the comparison of generations to the rename,
so of two that save at once one wins and the other is refused. Readers take no lock: a rename shows them the old file or
the new one. Whether there is a newer one costs a ``stat``.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import StoreFileChanged, StoreFileError
from langchain_dpicl.store import file as store_file
from langchain_dpicl.store.durable import lock
from langchain_dpicl.store.file import Contents, State

_WAIT_SECONDS = 60.0
_CHUNK = 1 << 20
_REFRESH = "read it with refresh(), then save again"
_START_AGAIN = "load it in a new process, or remove it and save again"

Signature = tuple[int, int, int, int]


class SharedFile:
    """A file that a store was loaded from or saved to, and what this process knows of it.

    ``ids`` and ``row_lives`` are the rows of the generation that is known: they tell what the file has lost or gained
    since.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: State | None = None
        self.ids: NDArray[np.int64] = np.empty(0, np.int64)
        self.row_lives: NDArray[np.int64] = np.empty(0, np.int64)
        self._seen: Signature | None = None
        self._looked_at: Signature | None = None

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

        A file that is gone tells nothing, so it is not behind. `StoreFileError` if nobody can tell.
        """
        seen = self._stat()
        return seen is not None and seen != self._seen

    def newer(self) -> tuple[State, Contents | None] | None:
        """The file's state if it is newer than what is known, with its contents if any record has changed.

        Call `know` when it is taken over.
        `StoreFileChanged` for an older generation or another store, `StoreFileError` for a file that cannot be read.
        """
        seen, known = self._stat(), self.state
        if seen is None or seen == self._seen or known is None:
            return None
        found = store_file.read(self.path, with_rows=False).state
        if found.edition == known.edition:  # copied or touched
            self._seen = seen
            return None
        self._check_lineage(found, known)
        if found.generation < known.generation:
            raise StoreFileChanged(
                f"{self.path.name!r} is older than what this process has read (generation {found.generation}, not "
                f"{known.generation}): owners who were forgotten since may be in it; {_START_AGAIN}"
            )
        if found.records == known.records:
            self._looked_at = seen
            return found, None
        contents = self.read()
        self._check_lineage(contents.state, known)
        return contents.state, contents

    def read(self) -> Contents:
        """What the file holds. Call `know` when it is taken over."""
        while True:  # what was looked at and what is read must be one file
            self._looked_at = self._stat()
            contents = store_file.read(self.path)
            if self._looked_at == self._stat():
                return contents

    def know(self, state: State, contents: Contents | None) -> None:
        """This process knows what was read or written last: a state, and the rows unless they are known already."""
        self._seen, self.state = self._looked_at, state
        if contents is not None:
            self.ids, self.row_lives = contents.ids, contents.row_lives()

    def _stat(self) -> Signature | None:
        try:
            return _signature(os.stat(self.path))
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = error.strerror
        raise StoreFileError(f"{self.path.name!r} cannot be read: {reason}; so nobody can tell who was forgotten in it")

    def _check_lineage(self, found: State, own: State) -> None:
        if found.lineage != own.lineage:
            raise StoreFileChanged(f"{self.path.name!r} holds another store: {_START_AGAIN}")

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, contents: Contents, *, scrub: bool = False) -> None:
        """Write a store as the file's next generation. `StoreFileChanged` unless the file is as this process knows it.

        A path that is not known yet may hold nothing, or an older generation of the same store. With ``scrub`` the
        replaced file's bytes are overwritten afterwards (as far as the file system writes in place), and so are
        temporary files that a killed process left beside it. Raises `StoreFileError`.
        """
        with self._locked() as exists:
            if exists and os.path.getsize(self.path):  # an empty file is a name that somebody reserved
                found, own, known = None, contents.state, self.state
                with contextlib.suppress(StoreFileError):
                    found = store_file.read(self.path, with_rows=False).state
                if found is None:
                    raise StoreFileChanged(f"{self.path.name!r} is not a store: nothing was written; take another path")
                self._check_lineage(found, own)
                if not (found.generation <= own.generation if known is None else found.edition == known.edition):
                    raise StoreFileChanged(
                        f"{self.path.name!r} was changed by another process (it is generation {found.generation}): "
                        f"nothing was written; {_REFRESH}"
                    )
            self._replace(contents, exists, scrub)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Keep other writers out. False if there is no file so far."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            exists, is_locked, reason = False, True, ""
            with contextlib.ExitStack() as cleanup:
                try:
                    descriptor = os.open(self.path, os.O_RDONLY)
                    cleanup.callback(os.close, descriptor)
                    exists = True
                    # A writer that waited for the lock may have got that of a file which was replaced meanwhile.
                    is_locked = lock(descriptor) and os.path.samestat(os.fstat(descriptor), os.stat(self.path))
                except FileNotFoundError:
                    is_locked = not exists
                except OSError as error:
                    reason = error.strerror or "input/output error"
                if reason:
                    raise StoreFileError(f"the store could not be written: {reason}; the old file is as it was")
                if is_locked:
                    yield exists
                    return
            time.sleep(0.005)
        raise StoreFileError(f"{self.path.name!r} is being written by another process for a minute now")

    def _replace(self, contents: Contents, exists: bool, scrub: bool) -> None:
        """Write beside the target, flush to disk, then rename over it: a crash or a fault leaves the old file whole."""
        path, reason, stands, is_taken = self.path, "", "the old file is as it was", False
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        with contextlib.ExitStack() as cleanup:
            try:
                old = cleanup.enter_context(open(path, "r+b", 0)) if scrub and exists else None
                cleanup.callback(_remove, temporary)
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    state = store_file.write(file, contents)
                    file.flush()
                    now = time.time_ns()  # the kernel's own times are coarse: two saves could have the same
                    os.utime(descriptor, ns=(now, now))
                    os.fsync(descriptor)
                    found = os.fstat(descriptor)
                if exists or not _link(temporary, path):
                    os.replace(temporary, path)
                stands = "the new file is in place, but perhaps not durable yet"
                self._looked_at = _signature(found)
                self.know(state, contents)  # whatever fails from here on
                folder = os.open(path.parent, os.O_RDONLY)
                cleanup.callback(os.close, folder)
                os.fsync(folder)
                if old is not None:
                    _overwrite(old.fileno())
                if scrub:  # and temporary files of this target, left by a process that was killed while it saved
                    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")
                    for stray in [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]:
                        with open(stray, "r+b", 0) as file:
                            _overwrite(file.fileno())
                        stray.unlink()
            except FileExistsError:
                is_taken = True
            except OSError as error:
                reason = error.strerror or "input/output error"
        if is_taken:
            raise StoreFileChanged(
                f"{path.name!r} was made by another process just now: nothing was written; {_REFRESH}"
            )
        if reason:
            raise StoreFileError(f"the store could not be written: {reason}; {stands}")


def _signature(found: os.stat_result) -> Signature:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _link(temporary: Path, path: Path) -> bool:
    """Give a new file its name; False on a file system without links. Raises `FileExistsError` if the name is taken."""
    try:
        os.link(temporary, path)
        os.unlink(temporary)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _overwrite(descriptor: int) -> None:
    left = os.fstat(descriptor).st_size
    os.lseek(descriptor, 0, os.SEEK_SET)
    while left > 0:
        left -= os.write(descriptor, bytes(min(_CHUNK, left)))
    os.fsync(descriptor)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
