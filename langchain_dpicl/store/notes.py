"""The file beside a data file: the budgets that were opened on its records, and the key of its owners' marks.

A store that is made anew from a data file remembers nothing. `DataNotes` remembers for it, in ``FILE.dpicl``: lines of
JSON, of which the first holds the key. It names ledgers and budgets, no record and no owner. Whoever has the key and a
ledger whose owners pay with tickets can test guesses of an owner's key against that ledger, so only the file's owner
may read it (mode 600).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from langchain_dpicl.durable import append, lock, sync_folder
from langchain_dpicl.errors import StoreFileError

_FORMAT = "dpicl-notes-1"
_HEAD = f'{{"format": "{_FORMAT}"'.encode()
_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class OpenedBudget:
    """A budget that was opened on a store: the ledger's permanent name, its address then (without a password), the
    budget's name, and its promise (None if an earlier version wrote it down)."""

    ledger: str
    url: str
    name: str
    epsilon: float | None = None
    delta: float | None = None

    @property
    def place(self) -> tuple[str, str]:
        """The ledger and the budget, without its address and its promise."""
        return self.ledger, self.name


def others_than(budget: OpenedBudget, known: tuple[OpenedBudget, ...]) -> tuple[OpenedBudget, ...]:
    """The budgets that are not this one."""
    return tuple(each for each in known if each.place != budget.place)


class DataNotes:
    """The notes of one data file. Threads and processes may share it.

    Raises `StoreFileError` if the file cannot be read or written, or is another program's.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().resolve()
        self._own_key = secrets.token_bytes(32)

    @classmethod
    def beside(cls, data: str | os.PathLike[str], place: str | os.PathLike[str] | None = None) -> DataNotes:
        """The notes of this data file: in ``FILE.dpicl``, or at the place that the user names."""
        data = Path(data).expanduser().resolve()
        return cls(data.with_name(data.name + ".dpicl") if place is None else place)

    def adopt(self, key: bytes) -> None:
        """Take this key, of a store that has one already, if there are no notes yet."""
        self._own_key = key

    def key(self, *, make: bool) -> bytes | None:
        """The key of the owners' marks. If there are no notes yet: make them, or None."""
        key, _ = self._read()
        if key is None and make:
            with self._writing() as (key, _, _):
                pass
        return key

    def budgets(self) -> tuple[OpenedBudget, ...]:
        """The budgets, the oldest first."""
        return self._read()[1]

    def remember(self, budget: OpenedBudget) -> tuple[OpenedBudget, ...]:
        """Write down that a budget was opened; the others that were."""
        known = self._read()[1]
        if len(others := others_than(budget, known)) == len(known):
            with self._writing() as (_, known, descriptor):
                if len(others := others_than(budget, known)) == len(known):
                    append(descriptor, _line(asdict(budget)))
        return others

    def _read(self) -> tuple[bytes | None, tuple[OpenedBudget, ...]]:
        problem = None
        try:
            return self._parse(self.path.read_bytes())
        except FileNotFoundError:
            return None, ()
        except OSError as error:
            problem = error.strerror
        raise StoreFileError(f"the notes {self.path.name!r} beside the data cannot be read: {problem}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[bytes, tuple[OpenedBudget, ...], int]]:
        """Keep other writers out: the key, the budgets, and the file's descriptor. Makes the file if there is none."""
        problem = None
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
            try:
                _wait(descriptor)
                content = self.path.read_bytes()
                key, budgets = self._parse(content)
                os.ftruncate(descriptor, content.rfind(b"\n") + 1)  # a process was killed while it wrote
                if key is None:
                    key = self._own_key
                    append(descriptor, _line({"format": _FORMAT, "key": key.hex()}))
                    sync_folder(self.path)
                yield key, budgets, descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            problem = error.strerror or type(error).__name__
        if problem is not None:
            raise StoreFileError(f"the notes {self.path.name!r} beside the data cannot be written: {problem}")

    def _parse(self, content: bytes) -> tuple[bytes | None, tuple[OpenedBudget, ...]]:
        """What the whole lines say. The last line counts when its line break is there."""
        *lines, _ = content.split(b"\n")
        if content[: len(_HEAD)] == _HEAD[: len(content)]:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                about, *budgets = [json.loads(line) for line in lines] or [None]
                key = None if about is None else bytes.fromhex(about["key"])
                return key, tuple(OpenedBudget(**each) for each in budgets)
        raise StoreFileError(f"{self.path.name!r} holds no notes of a data file: name another place for them")


def _wait(descriptor: int) -> None:
    """Lock the file. `OSError` if another process has it for too long."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not lock(descriptor):
        if time.monotonic() > deadline:
            raise TimeoutError(None, "another process holds them")
        time.sleep(0.002)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
