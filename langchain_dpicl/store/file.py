"""A saved store: the file's format, and the file as several processes share it.

The format is one ``.npz`` archive without pickle: a plain zip of NumPy arrays (``numpy.load(path, allow_pickle=False)``
opens it): ``header`` (JSON with the format's name, version, keys, the state of the store that was saved, and SHA-256
sums), ``vectors``, ``ids``, ``owner_of``, ``owners``, ``owner_ends``, ``lives``, ``texts``, ``text_ends``;
``documents`` and ``document_ends``, the rows' ids as documents, which older files lack.

An owner's life is a random number from 0 to 2^63 - 1 that it gets when it enters the store. An owner that is forgotten
and comes again has another one, so processes that share a file recognise an owner by its life, not by its name.

Writers hold the file's lock (``flock``, which ends with its process) from the comparison of generations to the rename,
so of two that save at once one wins and the other is refused. Readers take no lock: a rename shows them the old file or
the new one. Whether there is a newer one costs a ``stat``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.durable import lock, replacing, sync_folder
from langchain_dpicl.errors import StoreFileChanged, StoreFileError
from langchain_dpicl.store.contents import Arena, Contents, FileState, OwnerKeys
from langchain_dpicl.store.notes import OpenedBudget
from langchain_dpicl.store.records import RecordKeys, decoded, encoded

_FORMAT = {"format": "langchain-dpicl store", "version": 3}
_WAIT_SECONDS = 60.0
_CHUNK = 1 << 20
_REFRESH = "read it with refresh(), then save again"
_START_AGAIN = "load it in a new process, or remove it and save again"

Signature = tuple[int, int, int, int]


def write(file: IO[bytes], contents: Contents) -> FileState:
    """Write an archive: the next generation after ``contents.state``. Its state."""
    owners = Arena()
    owners.extend([encoded(key) for key in contents.owner_keys])
    arrays: dict[str, NDArray[Any]] = {name: vars(contents)[name] for name in ("vectors", "ids", "owner_of", "lives")}
    arrays["owners"], arrays["owner_ends"] = owners.buffer()
    arrays["texts"], arrays["text_ends"] = contents.texts.buffer()
    arrays["documents"], arrays["document_ends"] = contents.documents.buffer()
    state = replace(
        contents.state,
        generation=contents.state.generation + 1,
        edition=secrets.token_hex(16),
        records=_digest_arrays(arrays),
    )
    header = _FORMAT | contents.keys._asdict() | asdict(state)
    header |= {"dimension": contents.dimension, "next_id": contents.next_id}
    header["sha256"] = _digest(header)
    np.savez(
        file,
        allow_pickle=False,
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        **arrays,
    )
    return state


def read(path: Path, *, with_rows: bool = True) -> Contents:
    """Read and check a file, or without its rows a page or two of it: its keys and its state.

    Every fault is a `StoreFileError` that shows no content.
    """
    problem = "it is truncated, altered, or not a store of this version"
    try:
        with np.load(path, allow_pickle=False) as archive:
            return _contents(archive, with_rows)
    except FileNotFoundError:
        problem = "no such file"
    except OSError as error:
        problem = error.strerror or problem
    except Exception:  # whatever an altered archive makes NumPy and zipfile raise
        pass
    raise StoreFileError(f"{path.name!r} cannot be read: {problem}")


def _contents(archive: Mapping[str, NDArray[Any]], with_rows: bool) -> Contents:
    """An archive's contents. `ValueError` if it has another format, or was altered."""
    header: dict[str, Any] = json.loads(archive["header"].tobytes())
    digest = header.pop("sha256")
    if any(header[name] != value for name, value in _FORMAT.items()) or digest != _digest(header):
        raise ValueError
    keys = RecordKeys(header["input_key"], header["output_key"], header["owner_key"])
    once: dict[str, Any] = {name: tuple(header[name]) for name in ("releases", "forgotten", "notes")}
    plain = {name: header[name] for name in ("lineage", "key", "generation", "edition", "records")}
    state = FileState(**plain, budgets=tuple(OpenedBudget(**each) for each in header["budgets"]), **once)
    contents = Contents(
        keys,
        header["dimension"],
        np.empty((0, 0), np.float32),
        header["next_id"],
        state=state,
    )
    if with_rows:
        arrays = {name: archive[name] for name in archive if name != "header"}
        if state.records != _digest_arrays(arrays):
            raise ValueError
        contents.vectors = np.ascontiguousarray(arrays["vectors"], np.float32)
        contents.ids = arrays["ids"]
        contents.owner_of = arrays["owner_of"]
        contents.lives = arrays["lives"]
        owners = Arena(bytearray(arrays["owners"].data), arrays["owner_ends"])
        contents.owner_keys = OwnerKeys(decoded(owners[i]) for i in range(len(owners)))
        contents.texts = Arena(bytearray(arrays["texts"].data), arrays["text_ends"])
        ends = arrays.get("document_ends", np.zeros(len(contents.ids), np.int64))
        contents.documents = Arena(bytearray(arrays.get("documents", np.empty(0, np.uint8)).data), ends)
        arrays["owners"][:] = arrays["texts"][:] = 0  # the arenas have copies of their own
    return contents


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _digest_arrays(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        if array.size:
            digest.update(array.data)
    return digest.hexdigest()


def are_among(
    ids: NDArray[np.int64],
    lives: NDArray[np.int64],
    of_ids: NDArray[np.int64],
    of_lives: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return a mask of the rows (their ids, their owners' lives) that are among other rows."""
    if not len(of_ids):
        return np.zeros(len(ids), np.bool_)
    order = np.argsort(of_ids)
    place = order[np.minimum(np.searchsorted(of_ids, ids, sorter=order), len(order) - 1)]
    found: NDArray[np.bool_] = (of_ids[place] == ids) & (of_lives[place] == lives)
    return found


class SharedFile:
    """A file that a store was loaded from or saved to, and what this process knows of it.

    ``ids`` and ``row_lives`` are the rows of the generation that is known. Compared with the file's rows, they show
    which the file has lost or gained since.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: FileState | None = None
        self.ids: NDArray[np.int64] = np.empty(0, np.int64)
        self.row_lives: NDArray[np.int64] = np.empty(0, np.int64)
        self._seen: Signature | None = None
        self._looked_at: Signature | None = None

    def knows(self, ids: NDArray[np.int64], lives: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the rows (their ids, their owners' lives) that were in the known generation."""
        return are_among(ids, lives, self.ids, self.row_lives)

    # -- reading ------------------------------------------------------------------------------------------------------

    def is_behind(self) -> bool:
        """Return whether something has happened to the file since it was read or written here. One ``stat``.

        A file that is gone tells nothing, so it is not behind. `StoreFileError` if nobody can tell.
        """
        return self._stat() not in (None, self._seen)

    def newer(self) -> tuple[FileState, Contents | None] | None:
        """The file's state if it is newer than what is known, with its contents if any record has changed.

        Call `know` when it is taken over.
        `StoreFileChanged` for an older generation or another store, `StoreFileError` for a file that cannot be read.
        """
        seen = self._stat()
        known = self.state
        if seen is None or seen == self._seen or known is None:
            return None
        found = self.read(with_rows=False).state
        if found.edition == known.edition:  # copied or touched
            self._seen = self._looked_at
            return None
        self._check_follows(found, known)
        if found.records == known.records:
            return found, None
        contents = self.read()
        self._check_follows(contents.state, known)  # another may have replaced it by then
        return contents.state, contents

    def read(self, *, with_rows: bool = True) -> Contents:
        """The file's contents. Call `know` when they are taken over."""
        while True:  # `stat` and reading must see one file: a writer replaces it, and then overwrites the old one
            contents = None
            problem = ""
            self._looked_at = self._stat()
            try:
                contents = read(self.path, with_rows=with_rows)
            except StoreFileError as error:
                problem = str(error)
            if self._looked_at == self._stat():
                if contents is None:
                    raise StoreFileError(problem)
                return contents

    def know(self, state: FileState, contents: Contents | None) -> None:
        """Remember the last read or write: its state, and its rows unless they are known already."""
        self._seen = self._looked_at
        self.state = state
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

    def _check_lineage(self, found: FileState, own: FileState) -> None:
        if found.lineage != own.lineage:
            raise StoreFileChanged(f"{self.path.name!r} holds another store: {_START_AGAIN}")

    def _check_follows(self, found: FileState, known: FileState) -> None:
        self._check_lineage(found, known)
        if found.generation < known.generation:
            raise StoreFileChanged(
                f"{self.path.name!r} is older than what this process has read (generation {found.generation}, not "
                f"{known.generation}): owners who were forgotten since may be in it; {_START_AGAIN}"
            )

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, contents: Contents, *, scrub: bool = False) -> None:
        """Write a store as the file's next generation. `StoreFileChanged` unless the file is as this process knows it.

        A path that is not known yet may hold nothing, or an older generation of the same store. A crash or a fault
        leaves the old file whole. With ``scrub`` the replaced file's bytes are overwritten afterwards (as far as the
        file system writes in place), and so are temporary files that a killed process left beside it. Raises
        `StoreFileError`.
        """
        stands = "the old file is as it was"
        problem: StoreFileError | None = None
        try:
            with self._locked(os.O_RDWR if scrub else os.O_RDONLY) as old:
                if old is not None and os.fstat(old).st_size:  # an empty file is a name that somebody reserved
                    contents.state = contents.state.joined(self._unchanged(contents.state))
                if scrub and old is not None:  # the next writer writes as soon as the new file is in place
                    self._remove_strays(old)
                with replacing(self.path, is_new=old is None) as file:
                    state = write(file, contents)
                    file.flush()
                    now = time.time_ns()  # the kernel's own times are coarse: two saves could have the same
                    os.utime(file.fileno(), ns=(now, now))
                    written = os.fstat(file.fileno())
                stands = "the new file is in place, but perhaps not durable yet"
                self._looked_at = _signature(written)
                self.know(state, contents)  # whatever fails from here on
                sync_folder(self.path, must=True)
                if scrub and old is not None:
                    _overwrite(old)
        except FileExistsError:
            problem = StoreFileChanged(
                f"{self.path.name!r} was made by another process just now: nothing was written; {_REFRESH}"
            )
        except OSError as error:
            problem = StoreFileError(
                f"the store could not be written: {error.strerror or 'input/output error'}; {stands}"
            )
        if problem is not None:
            raise problem

    def _remove_strays(self, own: int) -> None:
        """Remove temporary files of this path, left by processes that were killed while they saved, and overwrite them
        unless they are second names of the file in place, whose descriptor and lock are ``own``. Nobody who writes
        beside it lives, except one who found no file in place."""
        name = re.compile(rf"\.{re.escape(self.path.name)}\.[0-9a-f]{{16}}\.tmp")
        for stray in [entry for entry in self.path.parent.iterdir() if name.fullmatch(entry.name)]:
            with contextlib.suppress(FileNotFoundError), open(stray, "r+b", 0) as file:
                if not os.path.samestat(os.fstat(file.fileno()), os.fstat(own)):
                    _overwrite(file.fileno())
                stray.unlink()

    @contextlib.contextmanager
    def _locked(self, flags: int) -> Iterator[int | None]:
        """Keep other writers out. The file's descriptor, None if there is no file so far."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            descriptor = None
            is_locked = False
            with contextlib.ExitStack() as cleanup:
                try:
                    descriptor = os.open(self.path, flags)
                    cleanup.callback(os.close, descriptor)
                    # A writer that waited for the lock may have got that of a file which was replaced meanwhile.
                    is_locked = lock(descriptor) and os.path.samestat(os.fstat(descriptor), os.stat(self.path))
                except FileNotFoundError:
                    is_locked = descriptor is None
                if is_locked:
                    yield descriptor
                    return
            time.sleep(0.005)
        raise StoreFileError(f"{self.path.name!r} is being written by another process for a minute now")

    def _unchanged(self, own: FileState) -> FileState:
        """The file's state. `StoreFileChanged` unless it may be replaced by a store that was in this state."""
        found = None
        with contextlib.suppress(StoreFileError):
            found = read(self.path, with_rows=False).state
        if found is None:
            raise StoreFileChanged(f"{self.path.name!r} is not a store: nothing was written; take another path")
        self._check_lineage(found, own)
        if self.state is None and found.generation <= own.generation:
            return found
        if self.state is not None and found.edition == self.state.edition:
            return found
        raise StoreFileChanged(
            f"{self.path.name!r} was changed by another process (it is generation {found.generation}): "
            f"nothing was written; {_REFRESH}"
        )


def _signature(found: os.stat_result) -> Signature:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _overwrite(descriptor: int) -> None:
    left = os.fstat(descriptor).st_size
    os.lseek(descriptor, 0, os.SEEK_SET)
    while left > 0:
        left -= os.write(descriptor, bytes(min(_CHUNK, left)))
    os.fsync(descriptor)
