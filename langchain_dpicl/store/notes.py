"""Budgets that were opened on a store, and the files in which an earlier release wrote them down.

The earlier release made a store anew from a data file each time. Its `Notes` stood beside the data, in ``FILE.dpicl``:
lines of JSON, the key of the owners' marks in the first, a budget in each other. The store that keeps the data file
today takes them over, so that ledgers know its owners and a second budget on the data is noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from langchain_dpicl.errors import InvalidParameter, StoreFileError

_FORMAT = "dpicl-notes-1"
_HEAD = f'{{"format": "{_FORMAT}"'.encode()

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


class Notes(NamedTuple):
    """The keys and the budgets in an earlier release's notes."""

    keys: tuple[bytes, ...]
    budgets: tuple[OpenedBudget, ...]


def notes_beside(data: Path) -> Notes:
    """The notes of a data file. A link's stand beside it, and beside the file that it leads to."""
    return read_notes([each.with_name(f"{each.name}.dpicl") for each in dict.fromkeys((data, data.resolve()))])


def read_notes(paths: Iterable[Path]) -> Notes:
    """The content of these notes, as far as there are any. `StoreFileError` for a file that cannot be read or holds
    something else."""
    keys: list[bytes] = []
    budgets: list[OpenedBudget] = []
    for path in paths:
        key, found = _read(path)
        keys += key
        budgets += found
    return Notes(tuple(keys), merged(budgets))


def _read(path: Path) -> tuple[list[bytes], list[OpenedBudget]]:
    """Read the whole lines. The last one counts when its line break is there: a process may have been killed."""
    problem = "holds no notes of a data file: move it away"
    try:
        content = path.read_bytes()
        about, *budgets = content.split(b"\n")[:-1] or [b""]
        if content[: len(_HEAD)] == _HEAD[: len(content)]:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if not about:
                    return [], []
                if len(key := bytes.fromhex(json.loads(about)["key"])) == KEY:
                    return [key], [OpenedBudget(**json.loads(each)) for each in budgets]
    except FileNotFoundError:
        return [], []
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise StoreFileError(f"{path.name!r} {problem}")
