"""A saved store: one ``.npz`` archive without pickle, written atomically, with a checksum of the content.

The archive is a plain zip of NumPy arrays (``numpy.load(path, allow_pickle=False)`` opens it): ``header`` (JSON with
the format's name, version, keys, the state of the store that was saved, and SHA-256 sums), ``vectors``, ``ids``,
``owner_of``, ``owners``, ``owner_ends``, ``lives``, ``texts``, ``text_ends``.

An owner's life is a random number that it gets when it enters the store. Whoever is forgotten and comes again has
another one, so processes that share a file know an owner again by its life, not by its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import StoreFileChanged, StoreFileError
from langchain_dpicl.store.arena import Arena

_FORMAT = "langchain-dpicl store"
_VERSION = 2
_VERSION_1 = ("format", "version", "input_key", "output_key", "owner_key", "dimension", "next_id")
_ARENAS = (("owners", "owner_ends"), ("texts", "text_ends"))
_CHUNK = 1 << 20

T = TypeVar("T")

ADVICE = "read it with refresh(), then save again"


@dataclass(frozen=True)
class OpenedBudget:
    """A budget that was opened on a store. ``ledger`` names the ledger for good, ``url`` (without a password) says
    where it was."""

    ledger: str
    url: str
    name: str


@dataclass(frozen=True)
class State:
    """Which store a file holds, and which of its generations. Public.

    Attributes
    ----------
    lineage
        One random name for all files of one store.
    generation
        A number that every save raises.
    edition
        A random name of this very save: two files of one generation may differ.
    records
        SHA-256 of all arrays. Saves with equal ones differ in ``budgets`` alone.
    budgets
        Those that were opened on the store.
    """

    lineage: str
    generation: int
    edition: str = ""
    records: str = ""
    budgets: tuple[OpenedBudget, ...] = ()


@dataclass(frozen=True, repr=False)
class Contents:
    """What a file holds; arrays may be views of a living store."""

    input_key: str
    output_key: str | None
    owner_key: str | None
    dimension: int
    next_id: int
    vectors: NDArray[np.float32]
    ids: NDArray[np.int64]
    owner_of: NDArray[np.int32]
    owner_keys: list[str]
    lives: NDArray[np.int64]
    texts: Arena
    state: State = field(default_factory=lambda: State(new_name(), 0))

    def row_lives(self) -> NDArray[np.int64]:
        """The life of each row's owner."""
        return self.lives[self.owner_of]


def new_name() -> str:
    """A random name of 128 bits."""
    return secrets.token_hex(16)


def new_lives(count: int) -> NDArray[np.int64]:
    """Random numbers from 0 to 2^63 - 1, one for each new owner."""
    return np.frombuffer(secrets.token_bytes(8 * count), np.int64) & np.int64(2**63 - 1)


Written = Callable[[State, os.stat_result], None]
"""Told of a save as soon as its file is in place, whatever fails after that."""


def write(path: Path, contents: Contents, written: Written, *, new: bool = False, scrub: bool = False) -> None:
    """Write beside the target, flush to disk, then rename over it: a crash or a fault leaves the old file whole.

    The file is the next generation after ``contents.state``. ``new`` refuses to replace a file
    (`StoreFileChanged`). With ``scrub`` the replaced file's bytes are overwritten afterwards (as far as the file system
    writes in place), and so are temporary files that a killed process left beside it. Raises `StoreFileError`.
    """
    reason: str | None = None
    replaced = taken = False
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with contextlib.ExitStack() as cleanup:
        try:
            old = os.open(path, os.O_RDWR) if scrub and path.exists() else None
            if old is not None:
                cleanup.callback(os.close, old)
            cleanup.callback(_remove, temporary)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                state = _save(file, contents)
                file.flush()
                now = time.time_ns()  # the kernel's own times are coarse: two saves could have the same
                os.utime(file.fileno(), ns=(now, now))
                os.fsync(file.fileno())
                found = os.fstat(file.fileno())
            if new:
                _put(temporary, path)
            else:
                os.replace(temporary, path)
            replaced = True
            written(state, found)
            _sync_folder(path.parent)
            if old is not None:
                _overwrite(old)
            if scrub:
                _scrub_strays(path)
        except FileExistsError:
            taken = True
        except OSError as error:
            reason = error.strerror or "input/output error"
    if taken:
        raise StoreFileChanged(f"{path.name!r} was made by another process just now: nothing was written; {ADVICE}")
    if reason is not None:
        stands = "the new file is in place, but perhaps not durable yet" if replaced else "the old file is as it was"
        raise StoreFileError(f"the store could not be written: {reason}; {stands}")


def _put(temporary: Path, path: Path) -> None:
    """Give a file its name, unless there is one of that name. Raises `FileExistsError`."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.replace(temporary, path)


def _save(file: IO[bytes], contents: Contents) -> State:
    owners = Arena()
    owners.extend([key.encode("utf-8", "surrogatepass") for key in contents.owner_keys])
    owner_data, owner_ends = owners.buffer()
    text_data, text_ends = contents.texts.buffer()
    arrays: dict[str, NDArray[Any]] = {
        "vectors": contents.vectors,
        "ids": contents.ids,
        "owner_of": contents.owner_of,
        "owners": owner_data,
        "owner_ends": owner_ends,
        "lives": contents.lives,
        "texts": text_data,
        "text_ends": text_ends,
    }
    header: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "input_key": contents.input_key,
        "output_key": contents.output_key,
        "owner_key": contents.owner_key,
        "dimension": contents.dimension,
        "next_id": contents.next_id,
    }
    before = contents.state
    state = replace(before, generation=before.generation + 1, edition=new_name(), records=_digest(arrays))
    header |= asdict(state)
    header["sha256"] = _header_digest(header)
    np.savez(file, allow_pickle=False, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
    return state


def read(path: Path) -> Contents:
    """Read and check a file; every fault is a `StoreFileError` that shows no content."""
    return _read(path, lambda archive: _parse({name: archive[name] for name in archive.files}))


def read_state(path: Path) -> State:
    """The state of a file, without its records: a page or two are read. Raises `StoreFileError`."""
    return _read(path, lambda archive: _state(_header(archive["header"])[0]))


def _read(path: Path, parse: Callable[[Any], T]) -> T:
    problem = "it is truncated, altered, or not a store"
    try:
        with np.load(path, allow_pickle=False) as archive:
            return parse(archive)
    except FileNotFoundError:
        problem = "no such file"
    except OSError as error:
        problem = error.strerror or problem
    except Exception:  # whatever an altered archive makes NumPy and zipfile raise
        pass
    raise StoreFileError(f"{path.name!r} cannot be read: {problem}")


def _header(array: NDArray[Any]) -> tuple[dict[str, Any], str]:
    """A header and its checksum. `ValueError` for one that is not of this format."""
    header: dict[str, Any] = json.loads(array.tobytes())
    digest = header.pop("sha256")
    if header["format"] != _FORMAT or header["version"] not in (1, _VERSION):
        raise ValueError
    if header["version"] == 1:  # its checksum is of everything: two processes that read it agree on its name
        header |= {"lineage": digest[:32], "generation": 0, "edition": digest[:32], "records": "", "budgets": []}
    elif digest != _header_digest(header):
        raise ValueError
    return header, digest


def _state(header: Mapping[str, Any]) -> State:
    budgets = tuple(OpenedBudget(**each) for each in header["budgets"])
    return State(header["lineage"], header["generation"], header["edition"], header["records"], budgets)


def _parse(arrays: Mapping[str, NDArray[Any]]) -> Contents:
    header, digest = _header(arrays["header"])
    body = {name: array for name, array in arrays.items() if name != "header"}
    if header["version"] == 1:
        shown = {name: header[name] for name in _VERSION_1}
        if _digest(body, json.dumps(shown, sort_keys=True).encode()) != digest:
            raise ValueError
        body["lives"] = _derived_lives(digest, len(body["owner_ends"]))
    elif header["records"] != _digest(body):
        raise ValueError
    owners, texts = (Arena(bytearray(body[name].data), body[ends]) for name, ends in _ARENAS)
    for name, _ in _ARENAS:
        body[name][:] = 0  # an arena has a copy of its own
    return Contents(
        input_key=header["input_key"],
        output_key=header["output_key"],
        owner_key=header["owner_key"],
        dimension=header["dimension"],
        next_id=header["next_id"],
        vectors=np.ascontiguousarray(body["vectors"], np.float32),
        ids=body["ids"],
        owner_of=body["owner_of"],
        owner_keys=[owners[i].decode("utf-8", "surrogatepass") for i in range(len(owners))],
        lives=body["lives"],
        texts=texts,
        state=_state(header),
    )


def _derived_lives(digest: str, count: int) -> NDArray[np.int64]:
    """Lives for the owners of a file that has none: the same in every process that reads it."""
    generated = hashlib.shake_128(digest.encode()).digest(8 * count)
    return np.frombuffer(generated, np.int64) & np.int64(2**63 - 1)


def _header_digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _digest(arrays: Mapping[str, NDArray[Any]], start: bytes = b"") -> str:
    digest = hashlib.sha256(start)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _overwrite(descriptor: int) -> None:
    left = os.fstat(descriptor).st_size
    os.lseek(descriptor, 0, os.SEEK_SET)
    while left > 0:
        left -= os.write(descriptor, bytes(min(_CHUNK, left)))
    os.fsync(descriptor)


def _scrub_strays(path: Path) -> None:
    """Temporary files of this target, left by a process that was killed while it saved."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")
    for stray in [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]:
        descriptor = os.open(stray, os.O_RDWR)
        try:
            _overwrite(descriptor)
        finally:
            os.close(descriptor)
        stray.unlink()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
