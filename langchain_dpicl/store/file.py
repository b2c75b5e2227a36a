"""The format of a saved store: one ``.npz`` archive without pickle, with checksums of its content.

The archive is a plain zip of NumPy arrays (``numpy.load(path, allow_pickle=False)`` opens it): ``header`` (JSON with
the format's name, version, keys, the state of the store that was saved, and SHA-256 sums), ``vectors``, ``ids``,
``owner_of``, ``owners``, ``owner_ends``, ``lives``, ``texts``, ``text_ends``.

An owner's life is a random number that it gets when it enters the store. An owner that is forgotten and comes again has
another one, so processes that share a file recognise an owner by its life, not by its name.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import StoreFileError
from langchain_dpicl.store.arena import Arena
from langchain_dpicl.store.intake import RecordKeys
from langchain_dpicl.store.owners import OwnerKeys, decoded, encoded

_FORMAT = {"format": "langchain-dpicl store", "version": 2}

T = TypeVar("T")


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

    lineage: str = field(default_factory=lambda: secrets.token_hex(16))
    generation: int = 0
    edition: str = ""
    records: str = ""
    budgets: tuple[OpenedBudget, ...] = ()


@dataclass(repr=False)
class Contents:
    """What a store and its file hold: rows, with the slots of their owners, and an owner's key and life by slot."""

    keys: RecordKeys
    dimension: int
    vectors: NDArray[np.float32]
    next_id: int = 0
    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    owner_of: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    owner_keys: OwnerKeys = field(default_factory=OwnerKeys)
    lives: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    texts: Arena = field(default_factory=Arena)
    state: State = field(default_factory=State)

    def row_lives(self) -> NDArray[np.int64]:
        """The life of each row's owner."""
        return self.lives[self.owner_of]


def new_lives(count: int) -> NDArray[np.int64]:
    """Random numbers from 0 to 2^63 - 1, one for each new owner."""
    return np.frombuffer(secrets.token_bytes(8 * count), np.int64) & np.int64(2**63 - 1)


def write(file: IO[bytes], contents: Contents) -> State:
    """Write an archive: the next generation after ``contents.state``. Its state."""
    owners = Arena()
    owners.extend([encoded(key) for key in contents.owner_keys])
    arrays: dict[str, NDArray[Any]] = {
        name: getattr(contents, name) for name in ("vectors", "ids", "owner_of", "lives")
    }
    arrays["owners"], arrays["owner_ends"] = owners.buffer()
    arrays["texts"], arrays["text_ends"] = contents.texts.buffer()
    before = contents.state
    state = replace(
        before, generation=before.generation + 1, edition=secrets.token_hex(16), records=_digest_arrays(arrays)
    )
    header = _FORMAT | contents.keys._asdict() | asdict(state)
    header |= {"dimension": contents.dimension, "next_id": contents.next_id}
    header["sha256"] = _digest(header)
    np.savez(file, allow_pickle=False, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
    return state


def read(path: Path) -> Contents:
    """Read and check a file; every fault is a `StoreFileError` that shows no content."""
    return _read(path, _contents)


def read_state(path: Path) -> State:
    """The state of a file, without its records: a page or two are read. Raises `StoreFileError`."""
    return _read(path, lambda archive: _state(_header(archive)))


def _read(path: Path, parse: Callable[[Mapping[str, NDArray[Any]]], T]) -> T:
    problem = "it is truncated, altered, or not a store of this version"
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


def _header(archive: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The header. `ValueError` for one that is not of this format, or was altered."""
    header: dict[str, Any] = json.loads(archive["header"].tobytes())
    digest = header.pop("sha256")
    if any(header[name] != value for name, value in _FORMAT.items()) or digest != _digest(header):
        raise ValueError
    return header


def _state(header: Mapping[str, Any]) -> State:
    budgets = tuple(OpenedBudget(**each) for each in header["budgets"])
    return State(header["lineage"], header["generation"], header["edition"], header["records"], budgets)


def _contents(archive: Mapping[str, NDArray[Any]]) -> Contents:
    header = _header(archive)
    arrays = {name: archive[name] for name in archive if name != "header"}
    if header["records"] != _digest_arrays(arrays):
        raise ValueError
    arenas = []
    for name in ("owner", "text"):
        data = arrays[f"{name}s"]
        arenas.append(Arena(bytearray(data.data), arrays[f"{name}_ends"]))
        data[:] = 0  # the arena has a copy of its own
    owners, texts = arenas
    return Contents(
        keys=RecordKeys(header["input_key"], header["output_key"], header["owner_key"]),
        dimension=header["dimension"],
        next_id=header["next_id"],
        vectors=np.ascontiguousarray(arrays["vectors"], np.float32),
        ids=arrays["ids"],
        owner_of=arrays["owner_of"],
        owner_keys=OwnerKeys(decoded(owners[i]) for i in range(len(owners))),
        lives=arrays["lives"],
        texts=texts,
        state=_state(header),
    )


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _digest_arrays(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()
