"""Recovering a ledger: count as spent whatever a lost or old copy may lack, and let it be used again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from typing_extensions import TypedDict

from langchain_dpicl.budget.claims import write_filter
from langchain_dpicl.budget.opening import CounterRow, Place, address, counts, lose, place_of_ledger
from langchain_dpicl.budget.owner_index import OwnerIndex
from langchain_dpicl.budget.schema import plans, read_meta, usage_digest
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.budget.usage import begin_anew, is_whole
from langchain_dpicl.budget.witness import GIVEN_UP, Mark, Witness
from langchain_dpicl.errors import InvalidParameter, LedgerError
from langchain_dpicl.store.sql import shown


class Recovered(TypedDict):
    """One counter after `recover`: what counts on it now, and how much of that was not counted before."""

    budget: str
    line: str
    principal: str | None
    spent: int | None
    """None of a filter, like ``added``."""
    added: int | None


class Recovery(TypedDict):
    """What `recover` did."""

    ledger: str
    witness: str
    had_witness: bool
    counters: list[Recovered]
    missing: list[str]
    """Plans that the witness knows and the ledger lacks: they count as spent, all of them."""


def recover(ledger: str, witness: str | os.PathLike[str] | None = None, *, keep_count: bool = False) -> Recovery:
    """Count as spent whatever a ledger may lack, and let it be used again.

    Parameters
    ----------
    ledger, witness
        As for `PrivacyBudget`. A witness that is there has a mark on every counter that was ever charged: all up to
        the mark counts as spent. Without one, every plan of the ledger counts as spent as a whole, and a new witness is
        made.
    keep_count
        Without a witness: believe the ledger's counts. For a ledger whose witness was lost, of which you KNOW that no
        copy was ever put in its place and that this is no copy itself. If it is, the guarantee is void.

    `LedgerError` if there is no whole ledger, while any process has it open, and for another ledger's witness.
    """
    with ExitStack() as stack:
        reader = StoredLedger(ledger)
        stack.callback(reader.close)
        if reader.path is None and reader.is_sqlite:
            raise InvalidParameter("ledger", shown(ledger), "a ledger that is kept: one in memory is gone already")
        own = Witness(address(reader, witness), live=True)
        stack.callback(own.close)
        about = own.about()
        identity = reader.run(lambda connection: read_meta(connection, "identity"), "read")
        had_witness = bool(about.get("made"))
        if had_witness and about["identity"] != identity:
            raise LedgerError(
                f"the witness {own.shown!r} belongs to another ledger than {reader.shown!r}: name the right one; if it "
                "is lost, name a path where no file is yet"
            )
        if had_witness and keep_count:
            raise InvalidParameter("keep_count", True, "False: the ledger has a witness, whose marks count")
        own.begin()
        if not own.enter():
            raise LedgerError(f"the ledger {reader.shown!r} is in use: stop every process that uses it first")
        known = {mark.key.place: mark for mark in own.marks()} if had_witness else {}
        before = reader.run(counts, "read")
        reader.run(lambda connection: _lose_all(reader, connection, known, had_witness or keep_count))
        after = reader.run(counts, "read")
        missing = {mark.key.plan for mark in known.values()} - {count.key.plan for count in after.values()}
        own.write(_marks_after(known, after, missing))
        own.note(identity=str(identity), made="yes", place=place_of_ledger(reader))
        found: list[Recovered] = []
        for place, count in after.items():
            plan, line, who, _ = count.key
            spent = count.in_use if line else None
            added = None if spent is None else spent - (before[place].in_use if place in before else 0)
            found.append(Recovered(budget=plan, line=line, principal=who or None, spent=spent, added=added))
        return Recovery(
            ledger=reader.shown, witness=own.shown, had_witness=had_witness, counters=found, missing=sorted(missing)
        )


def _lose_all(reader: StoredLedger, connection: Connection, known: Mapping[Place, Mark], believe: bool) -> None:
    """Count as spent what each counter and filter may lack; everything, unless there are marks to ``believe``.

    A counter is torn if its owners pay and its rows are not of one copy. An owner index that cannot be read is emptied.
    """
    found = counts(connection)
    for place, its_mark in known.items():  # principals' counters that the ledger lacks
        line = found.get((its_mark.key.plan, its_mark.key.line, ""))
        if line is not None and line.key.digest == its_mark.key.digest:
            found.setdefault(place, line.lacking(its_mark.key))
    torn: set[Place] = set()
    for place, count in found.items():
        if count.tickets and count.id is not None:
            OwnerIndex(reader, count.plan_id).mend(connection)
            if not is_whole(connection, count.id, OwnerIndex(reader, count.plan_id)):
                torn.add(place)
    for place, count in found.items():
        mark, is_other = known.get(place), not believe
        if mark is not None:
            is_other = mark.key.digest != count.key.digest
        if not count.key.line:
            write_filter(connection, count.plan_id, _filter_after(str(count.state), mark, is_other))
            continue
        units = mark.reserved - count.in_use if mark is not None else 0
        if is_other or place in torn:
            everything = count.allowed - count.in_use
            if count.tickets:  # as many as every owner has
                content = connection.scalar(sa.select(plans.c.content).where(plans.c.id == count.plan_id))
                everything = int(json.loads(content or "{}")["lines"][count.key.line]["count"])
            units = everything if is_other else max(units, everything)
        if units > 0:
            lose(connection, count, units)
        if place in torn and count.id is not None:
            begin_anew(connection, count.id)


def _filter_after(state: str, mark: Mark | None, is_other: bool) -> str:
    """The state of a filter that counts as spent: all of it, or at each order the later of two states."""
    now = json.loads(state)
    if is_other:
        return json.dumps({"spent": [float("inf").hex() for _ in now["spent"]], "failed": now["failed"]})
    if mark is None or mark.state is None:
        return state
    kept = json.loads(mark.state)
    spent = [max(pair, key=float.fromhex) for pair in zip(now["spent"], kept["spent"], strict=True)]
    return json.dumps({"spent": spent, "failed": max(now["failed"], kept["failed"], key=float.fromhex)})


def _marks_after(known: Mapping[Place, Mark], after: Mapping[Place, CounterRow], missing: set[str]) -> list[Mark]:
    """The marks of a recovered ledger. Plans that it lacks are given up: all of them counts as spent."""
    found: list[Mark] = []
    for count in after.values():
        reserved = min(count.in_use, count.allowed)
        found.append(Mark(count.key, count.allowed, count.spent, reserved, 0, count.state, count.state))
    for place, mark in known.items():
        if mark.key.plan in missing:
            gone = mark._replace(reserved=mark.allowed, low=0, ahead=GIVEN_UP)
            pays = mark.key.line and mark.state is not None
            found.append(gone._replace(before=usage_digest(), state="") if pays else gone)
        elif place not in after:
            found.append(mark._replace(low=0, ahead=0))
    return found
