"""The format of a saved store: one ``.npz`` archive without pickle, with checksums of its content.

The archive is a plain zip of NumPy arrays (``numpy.load(path, allow_pickle=False)`` opens it): ``header`` (JSON with
the format's name, version, keys, the state of the store that was saved, and SHA-256 sums), ``vectors``, ``ids``,
``owner_of``, ``owners``, ``owner_ends``, ``lives``, ``texts``, ``text_ends``.

An owner's life is a random number from 0 to 2^63 - 1 that it gets when it enters the store. An owner that is forgotten
and comes again has another one, so processes that share a file recognise an owner by its life, not by its name.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import StoreFileError
from langchain_dpicl.store.arena import Arena
from langchain_dpicl.store.intake import RecordKeys
from langchain_dpicl.store.owners import OwnerKeys, decoded, encoded

_FORMAT = {"format": "langchain-dpicl store", "version": 2}


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

    ``lineage`` is one random name for all files of one store, ``edition`` one for this very save: two files of one
    ``generation``, which every save raises, may differ. Saves with equal ``records``, the SHA-256 of all arrays, differ
    in ``budgets`` alone: those that were opened on the store.
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


def write(file: IO[bytes], contents: Contents) -> State:
    """Write an archive: the next generation after ``contents.state``. Its state."""
    owners = Arena()
    owners.extend([encoded(key) for key in contents.owner_keys])
    arrays: dict[str, NDArray[Any]] = {
        name: getattr(contents, name) for name in ("vectors", "ids", "owner_of", "lives")
    }
    arrays["owners"], arrays["owner_ends"] = owners.buffer()
    arrays["texts"], arrays["text_ends"] = contents.texts.buffer()
    generation = contents.state.generation + 1
    records = _digest_arrays(arrays)
    state = replace(contents.state, generation=generation, edition=secrets.token_hex(16), records=records)
    header = _FORMAT | contents.keys._asdict() | asdict(state)
    header |= {"dimension": contents.dimension, "next_id": contents.next_id}
    header["sha256"] = _digest(header)
    np.savez(file, allow_pickle=False, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
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
    """What an archive holds. `ValueError` for one that is not of this format, or was altered."""
    header: dict[str, Any] = json.loads(archive["header"].tobytes())
    digest = header.pop("sha256")
    if any(header[name] != value for name, value in _FORMAT.items()) or digest != _digest(header):
        raise ValueError
    keys = RecordKeys(header["input_key"], header["output_key"], header["owner_key"])
    budgets = tuple(OpenedBudget(**each) for each in header["budgets"])
    state = State(header["lineage"], header["generation"], header["edition"], header["records"], budgets)
    contents = Contents(keys, header["dimension"], np.empty((0, 0), np.float32), header["next_id"], state=state)
    if with_rows:
        arrays = {name: archive[name] for name in archive if name != "header"}
        if state.records != _digest_arrays(arrays):
            raise ValueError
        contents.vectors = np.ascontiguousarray(arrays["vectors"], np.float32)
        contents.ids, contents.owner_of, contents.lives = arrays["ids"], arrays["owner_of"], arrays["lives"]
        owners = Arena(bytearray(arrays["owners"].data), arrays["owner_ends"])
        contents.owner_keys = OwnerKeys(decoded(owners[i]) for i in range(len(owners)))
        contents.texts = Arena(bytearray(arrays["texts"].data), arrays["text_ends"])
        arrays["owners"][:] = arrays["texts"][:] = 0  # the arenas have copies of their own
    return contents


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _digest_arrays(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()
