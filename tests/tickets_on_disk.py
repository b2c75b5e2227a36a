"""How many tickets every owner has used, read from a ledger's file by its documented layout alone: an oracle that
shares no code with `langchain_dpicl.budget`, except the marks by which a store knows its owners.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from moments import marks_of

from langchain_dpicl import ExemplarStore


def path_of(url: str) -> str:
    return url.removeprefix("sqlite:///")


def run(url: str, statement: str, *values: object) -> list[tuple[object, ...]]:
    """One statement on a ledger's file, as whoever damages it would run it."""
    with contextlib.closing(sqlite3.connect(path_of(url), timeout=60)) as connection:
        found = connection.execute(statement, values).fetchall()
        connection.commit()
        return found


def marks_in(url: str, plan: str = "default") -> list[bytes]:
    """The marks of all owners who have used a ticket of a plan, each once, and of those who are being forgotten."""
    found = run(
        url,
        "SELECT t.mark FROM dpicl_tickets t JOIN dpicl_counters c ON c.id = t.counter_id "
        "JOIN dpicl_plans p ON p.id = c.plan_id WHERE p.name = ?1 "
        "UNION SELECT l.mark FROM dpicl_leaving l JOIN dpicl_plans p ON p.id = l.plan_id WHERE p.name = ?1",
        plan,
    )
    return [bytes.fromhex(str(mark)) for (mark,) in found]


def used_in(url: str, line: str = "vote", principal: str = "", plan: str = "default") -> dict[bytes, int]:
    """The tickets that every mark has used on a counter."""
    found = run(
        url,
        "SELECT t.mark, t.used FROM dpicl_tickets t JOIN dpicl_counters c ON c.id = t.counter_id "
        "JOIN dpicl_plans p ON p.id = c.plan_id WHERE p.name = ? AND c.line = ? AND c.principal = ?",
        plan,
        line,
        principal,
    )
    return {bytes.fromhex(str(mark)): int(str(used)) for mark, used in found}


def key_in(url: str, store: ExemplarStore | None = None) -> bytes:
    """The key of a ledger's marks: the store's own, or that of the key file beside the ledger."""
    own, file = () if store is None else store.mark_keys(), Path(f"{path_of(url)}.key")
    if own or not file.exists():  # nobody was asked for so far
        return own[0] if own else bytes(32)
    return bytes.fromhex(file.read_text())


def burnt(
    url: str, store: ExemplarStore, line: str = "vote", principal: str = "", plan: str = "default"
) -> dict[str, int]:
    """The tickets that every owner of a store has used; 0 for one without a row."""
    of = used_in(url, line, principal, plan)
    return {owner: of.get(mark, 0) for owner, mark in marks_of(store, key_in(url, store)).items()}
