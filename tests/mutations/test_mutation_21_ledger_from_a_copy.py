"""Mistake 21: a ledger that is restored from a copy starts again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_hand import charged
from langchain_core.embeddings import DeterministicFakeEmbedding
from sqlalchemy.engine import Connection

from langchain_dpicl import ExemplarStore, LedgerError, PrivacyWarning
from langchain_dpicl.budget import opening, witness
from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.budget.opening import Permits
from langchain_dpicl.budget.owner_index import OwnerIndex
from langchain_dpicl.budget.schema import UNLIMITED
from langchain_dpicl.budget.tickets import TicketRule, TicketUsage

PLAN, TICKETS = 20, 2
STORE = ExemplarStore.from_records(
    [{"input": "text", "output": "x", "owner": "ann"}],
    DeterministicFakeEmbedding(size=4),
    owner_key="owner",
    progress=False,
)


def killed(ledger: Ledger) -> None:
    """What `kill -9` leaves."""
    permits = ledger._permits
    if permits is not None:
        permits.joined = False
        permits.witness.close()
    ledger._engine.dispose()


def begun(folder: Path, charge: Callable[[Ledger], bool], end: Callable[[Ledger], None]) -> int:
    """How many answers begin where an old copy is put back between three processes."""
    path, found = folder / "b.db", 0
    Ledger(f"sqlite:///{path}").close()
    copy = path.read_bytes()
    for _ in range(3):
        with contextlib.suppress(LedgerError), warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            ledger = Ledger(f"sqlite:///{path}")
            try:
                while found < 3 * PLAN and charge(ledger):
                    found += 1
                    if found == 3:  # the second process starts from here
                        copy = path.read_bytes()
                    if found % 7 == 0:
                        break
            finally:
                end(ledger)
        for log in ("b.db-wal", "b.db-shm"):
            (folder / log).unlink(missing_ok=True)
        path.write_bytes(copy)
    return found


def release(ledger: Ledger) -> bool:
    """One answer of a plan of twenty."""
    plan = ledger.store_plan("n", "{}", "0" * 64, {"vote": PLAN}).id
    return bool(charged(ledger, plan, "vote", 4))


def participation(ledger: Ledger) -> bool:
    """One answer of a plan in which each owner has two tickets: whether ann takes part in it."""
    plan = ledger.store_plan("n", "{}", "0" * 64, {"vote": UNLIMITED}, tickets=True).id
    tickets = TicketUsage(OwnerIndex(ledger, plan), TICKETS)
    rule = TicketRule(tickets, [tickets.index.find(STORE, np.array([0]))])
    return any(charge.participants.take().size > 0 for charge in charged(ledger, plan, rule=rule))


def check(folder: Path) -> None:
    """Counting: all answers that ever begin fit in the plan, and no owner is in more than it has tickets."""
    for end in (Ledger.close, killed):
        for charge, most in ((release, PLAN // 4), (participation, TICKETS)):
            place = folder / f"{end.__name__}-{charge.__name__}"
            place.mkdir()
            found = begun(place, charge, end)
            assert found <= most, f"{found} answers begin where {most} are planned"


def no_witness(patch: pytest.MonkeyPatch) -> None:
    """The mutant: the ledger alone counts."""
    patch.setattr(Ledger, "_open", lambda self: self.run(lambda c: recovery_schema(c)))


def recovery_schema(connection: Connection) -> None:
    from langchain_dpicl.budget.schema import open_schema

    open_schema(connection, create="0" * 32)


def marks_that_follow_the_ledger(patch: pytest.MonkeyPatch) -> None:
    """The mutant: what the ledger says stands, and its witness is corrected."""
    grant, swap = witness.Witness.grant, witness.Witness.swap

    def follow(self: witness.Witness, key: witness.CounterKey, reserved: int, state: str | None = None) -> None:
        values: dict[str, object] = {"low": 0, "reserved": reserved}
        if state is not None:
            values["state"] = state
        self.run(lambda connection: connection.execute(witness._UPDATE, {**witness._at(key), **values}))

    def granted(
        self: Any, key: Any, need: int, mine: int, spent: int, in_use: int, allowed: int, most: int
    ) -> int | None:
        follow(self, key, in_use)
        return grant(self, key, need, mine, spent, in_use, allowed, most)

    def swapped(self: Any, key: Any, before: Any, after: Any, counts: Any = None) -> Any:
        follow(self, key, counts[0], before)
        return swap(self, key, before, after, counts)

    patch.setattr(witness.Witness, "grant", granted)
    patch.setattr(witness.Witness, "swap", swapped)
    patch.setattr(opening, "check", lambda *_: None)


def permits_that_are_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    """The mutant: a ledger that looks right when it is opened is believed from then on."""
    patch.setattr(Permits, "take", lambda *_: True)
    patch.setattr(witness.Witness, "swap", lambda self, key, *_: (witness.Mark(key, UNLIMITED),) * 2)


@pytest.mark.parametrize("mutant", [no_witness, marks_that_follow_the_ledger, permits_that_are_not_asked_for])
def test_21_a_ledger_that_starts_again_from_a_copy_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    check(tmp_path / "right")
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="answers begin where"):
        check(tmp_path / "wrong")
