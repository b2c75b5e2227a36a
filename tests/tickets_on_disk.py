"""How many tickets every owner has burnt, read from a ledger's file by its documented layout alone: an oracle that
shares no code with `langchain_dpicl.budget`, except the marks by which a store knows its owners.
"""

from __future__ import annotations

import contextlib
import sqlite3
from array import array

import numpy as np

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
    """The mark in every seat, zeros where its owner was forgotten."""
    found = run(
        url,
        "SELECT s.marks FROM dpicl_seats s JOIN dpicl_plans p ON p.id = s.plan_id WHERE p.name = ? ORDER BY s.page",
        plan,
    )
    written = b"".join(bytes(page) for (page,) in found)  # type: ignore[call-overload]
    assert len(written) % 16 == 0
    return [written[start : start + 16] for start in range(0, len(written), 16)]


def used_in(url: str, line: str = "vote", principal: str = "", plan: str = "default") -> list[int]:
    """The tickets that every seat has burnt on a counter."""
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
        pages = run(url, "SELECT used FROM dpicl_pages WHERE counter_id = ? ORDER BY page", counter)
        for seat, count in enumerate(array("I", b"".join(bytes(page) for (page,) in pages))):  # type: ignore[call-overload]
            if count:
                used[seat] += count
        for units, seats in run(url, "SELECT units, seats FROM dpicl_burns WHERE counter_id = ?", counter):
            for seat in array("I", bytes(seats)):  # type: ignore[call-overload]
                used[seat] += int(str(units))
    return used


def burnt(
    url: str, store: PrivateStore, line: str = "vote", principal: str = "", plan: str = "default"
) -> dict[str, int]:
    """The tickets that every owner of a store has burnt; 0 for one without a seat."""
    ((key,),) = run(url, "SELECT value FROM dpicl_meta WHERE key = 'fingerprint_key'")
    assert isinstance(store, ExemplarStore)
    numbers = store.owners_at(np.arange(store.owner_count))
    marks = store.marks(numbers, bytes.fromhex(str(key)))
    of = dict(zip(marks_in(url, plan), used_in(url, line, principal, plan), strict=True))
    return {owner: of.get(mark, 0) for owner, mark in zip(store.owners, marks, strict=True)}
