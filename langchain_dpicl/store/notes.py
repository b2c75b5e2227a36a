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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from langchain_dpicl.durable import append, lock, sync_folder
from langchain_dpicl.errors import (
    InvalidParameter,
    StoreFileError,
    UnsafeConfigurationError,
)

_FORMAT = "dpicl-notes-1"
_HEAD = f'{{"format": "{_FORMAT}"'.encode()
_WAIT_SECONDS = 10.0

KEY = 32
"""Bytes of a key of owners' marks."""


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


def path_of(parameter: str, given: str | os.PathLike[str]) -> Path:
    """A path that a user gives. Raises `InvalidParameter` for what is none."""
    if not isinstance(given, (str, os.PathLike)) or "\0" in os.fspath(given):
        raise InvalidParameter(parameter, type(given).__name__, "the path of a file")
    return Path(given).expanduser()


def merged(*lists: Iterable[OpenedBudget]) -> tuple[OpenedBudget, ...]:
    """Every budget once: its latest address, and the most that it promised (a name may have been given again)."""
    found: dict[tuple[str, str], OpenedBudget] = {}
    for budget in (each for some in lists for each in some):
        known = found.get(budget.place, budget)
        found[budget.place] = OpenedBudget(
            budget.ledger,
            budget.url,
            budget.name,
            _most(known.epsilon, budget.epsilon),
            _most(known.delta, budget.delta),
        )
    return tuple(found.values())


def _most(one: float | None, other: float | None) -> float | None:
    return max((each for each in (one, other) if each is not None), default=None)


class DataNotes:
    """The notes of one data file. Threads and processes may share it.

    Raises `StoreFileError` if the file cannot be read or written, or is another program's.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of("notes", path).absolute()
        self._own_key = secrets.token_bytes(KEY)

    @classmethod
    def beside(cls, data: str | os.PathLike[str], place: str | os.PathLike[str] | None = None) -> list[DataNotes]:
        """The notes of this data file: in ``FILE.dpicl``, or at the place that the user names. For a link both beside
        it and beside the file that it leads to now, which may be another tomorrow."""
        if place is not None:
            return [cls(place)]
        data = Path(data).expanduser().absolute()
        return [cls(each.with_name(each.name + ".dpicl")) for each in dict.fromkeys((data, data.resolve()))]

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

    def remember(self, budgets: Sequence[OpenedBudget]) -> None:
        """Write down that these budgets were opened."""
        _, known = self._read()
        if set(merged(known, budgets)) <= set(known):
            return
        with self._writing() as (_, known, descriptor):
            for budget in set(merged(known, budgets)) - set(known):
                append(descriptor, _line(asdict(budget)))

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("notes hold a key: they are not pickled or copied")

    def _read(self) -> tuple[bytes | None, tuple[OpenedBudget, ...]]:
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
            descriptor = _locked(self.path)
            try:
                content = self.path.read_bytes()
                key, budgets = self._parse(content)
                os.ftruncate(descriptor, content.rfind(b"\n") + 1)  # a process was killed while it wrote
                if key is None:
                    key = self._own_key
                    os.chmod(self.path, 0o600)
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
        """Read the whole lines: the key and the budgets. The last line counts when its line break is there."""
        *lines, _ = content.split(b"\n")
        if content[: len(_HEAD)] == _HEAD[: len(content)]:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                about, *budgets = [json.loads(line) for line in lines] or [None]
                if about is None:
                    return None, ()
                if len(key := bytes.fromhex(about["key"])) == KEY:
                    return key, merged(OpenedBudget(**each) for each in budgets)
        raise StoreFileError(f"{self.path.name!r} holds no notes of a data file: name another place for them")


def _locked(path: Path) -> int:
    """A descriptor of the file that is there, made if there is none, and its lock. `OSError` if another process has it
    for too long."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        with contextlib.suppress(FileNotFoundError):
            if lock(descriptor) and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # another has it, or has put another file in its place
        time.sleep(0.002)
    raise TimeoutError(None, "another process holds them")


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
