"""A saved store: one ``.npz`` archive without pickle, written atomically, with a checksum of the content.

The archive is a plain zip of NumPy arrays (``numpy.load(path, allow_pickle=False)`` opens it): ``header`` (JSON with
the format's name, version, keys and the SHA-256 of the other members), ``vectors``, ``ids``, ``owner_of``, ``owners``,
``owner_ends``, ``texts``, ``text_ends``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import StoreFileError
from langchain_dpicl.store.arena import Arena

_FORMAT = "langchain-dpicl store"
_VERSION = 1
_CHUNK = 1 << 20


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
    texts: Arena


def write(path: Path, contents: Contents, *, scrub: bool = False) -> None:
    """Write beside the target, flush to disk, then rename over it: a crash or a fault leaves the old file whole.

    With ``scrub`` the replaced file's bytes are overwritten afterwards (as far as the file system writes in place), and
    so are temporary files that a killed process left beside it. Raises `StoreFileError`.
    """
    reason: str | None = None
    replaced = False
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with contextlib.ExitStack() as cleanup:
        try:
            old = os.open(path, os.O_RDWR) if scrub and path.exists() else None
            if old is not None:
                cleanup.callback(os.close, old)
            cleanup.callback(_remove, temporary)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                _save(file, contents)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            replaced = True
            _sync_folder(path.parent)
            if old is not None:
                _overwrite(old)
            if scrub:
                _scrub_strays(path)
        except OSError as error:
            reason = error.strerror or "input/output error"
    if reason is not None:
        state = "the new file is in place, but perhaps not durable yet" if replaced else "the old file is as it was"
        raise StoreFileError(f"the store could not be written: {reason}; {state}")


def _save(file: IO[bytes], contents: Contents) -> None:
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
    header["sha256"] = _digest(header, arrays)
    np.savez(file, allow_pickle=False, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)


def read(path: Path) -> Contents:
    """Read and check a file; every fault is a `StoreFileError` that shows no content."""
    problem = "it is truncated, altered, or not a store"
    contents: Contents | None = None
    try:
        with np.load(path, allow_pickle=False) as archive:
            contents = _parse({name: archive[name] for name in archive.files})
    except FileNotFoundError:
        problem = "no such file"
    except OSError as error:
        problem = error.strerror or problem
    except Exception:  # whatever an altered archive makes NumPy and zipfile raise
        contents = None
    if contents is None:
        raise StoreFileError(f"{path.name!r} cannot be read: {problem}")
    return contents


def _parse(arrays: Mapping[str, NDArray[Any]]) -> Contents | None:
    header = json.loads(arrays["header"].tobytes())
    body = {name: array for name, array in arrays.items() if name != "header"}
    digest = header.pop("sha256")
    if header["format"] != _FORMAT or header["version"] != _VERSION or digest != _digest(header, body):
        return None
    owners = Arena(bytearray(body["owners"].tobytes()), body["owner_ends"])
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
        texts=Arena(bytearray(body["texts"].tobytes()), body["text_ends"]),
    )


def _digest(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
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
