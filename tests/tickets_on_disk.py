"""How many tickets every owner has used, read from a ledger's file by its documented layout alone: an oracle that
shares no code with `langchain_dpicl.budget`, except the marks by which a store knows its owners.
"""

from __future__ import annotations

import contextlib
import sqlite3
from array import array
from pathlib import Path

from langchain_dpicl import ExemplarStore
from langchain_dpicl.store.base import PrivateStore


def path_of(url: str) -> str:
    return url.removeprefix("sqlite:///")


def run(url: str, statement: str, *values: object) -> list[tuple[object, ...]]:
    """One statement on a ledger's file, as whoever damages it would run it."""
    with contextlib.closing(sqlite3.connect(path_of(url), timeout=60)) as connection:
        found = connection.execute(statement, values).fetchall()
        connection.commit()
        return found


def marks_in(url: str, plan: str = "default") -> list[bytes]:
    """The mark at every position of the owner index; zeros if its owner was forgotten."""
    found = run(
        url,
        "SELECT m.marks FROM dpicl_owner_marks m JOIN dpicl_plans p ON p.id = m.plan_id "
        "WHERE p.name = ? ORDER BY m.start",
        plan,
    )
    written = b"".join(bytes(piece) for (piece,) in found)  # type: ignore[call-overload]
    assert len(written) % 16 == 0
    return [written[start : start + 16] for start in range(0, len(written), 16)]


def used_in(url: str, line: str = "vote", principal: str = "", plan: str = "default") -> list[int]:
    """The tickets that every position has used on a counter."""
    found = run(
        url,
        "SELECT c.id FROM dpicl_counters c JOIN dpicl_plans p ON p.id = c.plan_id "
        "WHERE p.name = ? AND c.line = ? AND c.principal = ?",
        plan,
        line,
        principal,
    )
    used = [0] * len(marks_in(url, plan))
    for (counter,) in found:
        counts = run(url, "SELECT counts FROM dpicl_usage_counts WHERE counter_id = ?", counter)
        for position, count in enumerate(array("I", b"".join(bytes(piece) for (piece,) in counts))):  # type: ignore[call-overload]
            if count:
                used[position] += count
        for units, positions in run(url, "SELECT units, positions FROM dpicl_usage_rows WHERE counter_id = ?", counter):
            packed = bytes(positions)  # type: ignore[call-overload]
            for position in array("I", packed[8:] if int(str(units)) < 0 else packed):
                used[position] += int(str(units))
    return used


def key_in(url: str, store: PrivateStore | None = None) -> bytes:
    """The key of a ledger's marks: the store's own, or that of the key file beside the ledger."""
    own, file = () if store is None else store.mark_keys(), Path(f"{path_of(url)}.key")
    if own or not file.exists():  # nobody was asked for so far
        return own[0] if own else bytes(32)
    return bytes.fromhex(file.read_text())


def burnt(
    url: str, store: PrivateStore, line: str = "vote", principal: str = "", plan: str = "default"
) -> dict[str, int]:
    """The tickets that every owner of a store has used; 0 for one without a position."""
    assert isinstance(store, ExemplarStore)
    numbers = store.numbers
    marks = store.marks(numbers, key_in(url, store))
    of = dict(zip(marks_in(url, plan), used_in(url, line, principal, plan), strict=True))
    return {owner: of.get(mark, 0) for owner, mark in zip(store.owners, marks, strict=True)}
