"""Mistake 32: a digest of owners beside its key."""

from __future__ import annotations

import hashlib
import hmac
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import ExemplarStore, PrivacyBudget
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.store.base import MARK, owner_mark

MEMBERS, GUESSES = [f"patient-{i}" for i in range(8)], [f"patient-{i}" for i in range(24)]


def held_in(path: Path) -> list[bytes]:
    """Every value of every table of a ledger's file, texts in hexadecimal as the bytes that they stand for."""
    with sqlite3.connect(path) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        values = [value for name in names for row in connection.execute(f"SELECT * FROM {name}") for value in row]
    found = [value for value in values if isinstance(value, bytes)]
    for value in values:
        if isinstance(value, str):
            try:
                found.append(bytes.fromhex(value))
            except ValueError:
                found.append(value.encode())
    return found


def proved(path: Path, guesses: Sequence[str]) -> set[str]:
    """Who is in the data, for certain, by the ledger's file alone: each value of it is tried as the key of all others.

    A false alarm takes two equal hashes of 128 bits: below 1e-30.
    """
    held = held_in(path)
    everything = b"|".join(held)
    found = set()
    for key in [value for value in held if 16 <= len(value) <= 64]:
        for name in guesses:
            digests = [owner_mark(key, name.encode(), named=named) for named in (True, False)]
            keyed = hmac.digest(key, name.encode(), hashlib.sha256)[:MARK]
            if any(each in everything for each in (*digests, keyed, keyed.hex().encode())):
                found.add(name)
    return found


def used(folder: Path, tickets: bool) -> Path:
    """A ledger on which all owners were asked for."""
    rows = [{"input": "text", "output": "x", "owner": name} for name in MEMBERS]
    store = ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=4), owner_key="owner", progress=False)
    path = folder / "ledger.db"
    budget = PrivacyBudget(10, 1e-5, 5, f"sqlite:///{path}", tickets=tickets)
    budget.watch(store)
    line = budget.line("vote", 0.5)
    line.charge(**({"owners": [line.ask(store, np.arange(len(MEMBERS)))]} if tickets else {}))
    budget.close()
    return path


@pytest.mark.parametrize("tickets", [True, False])
def test_32_a_digest_beside_its_key_is_caught(tickets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = used(tmp_path, tickets)
    assert proved(path, GUESSES) == set()
    if not tickets:
        return
    own = StoredLedger.owner_key

    def kept_beside(self: StoredLedger, *given: Any, **how: Any) -> bytes | None:
        key = own(self, *given, **how)
        if key is not None:
            insert = "INSERT OR REPLACE INTO dpicl_meta VALUES ('owner_key', ?)"
            self.run(lambda connection: connection.exec_driver_sql(insert, (key.hex(),)).rowcount)
        return key

    monkeypatch.setattr(StoredLedger, "owner_key", kept_beside)
    (tmp_path / "mutant").mkdir()
    assert proved(used(tmp_path / "mutant", tickets), GUESSES) == set(MEMBERS), "8 of 8 owners, and nobody else"
