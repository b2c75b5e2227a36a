"""Recovering a ledger: count as spent whatever a lost or old copy may lack, and let it be used again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from typing_extensions import TypedDict

from langchain_dpicl.budget.claims import write_filter
from langchain_dpicl.budget.opening import Count, Place, counts, lose, place_of_ledger
from langchain_dpicl.budget.owner_index import OwnerIndex
from langchain_dpicl.budget.permits import Presence
from langchain_dpicl.budget.schema import identity_of, plans, usage_digest
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.budget.usage import begin_anew, is_whole
from langchain_dpicl.budget.witness import GIVEN_UP, Mark, Witness, address
from langchain_dpicl.errors import InvalidParameter, LedgerError
from langchain_dpicl.store.sql import shown


class Recovered(TypedDict):
    """One counter after `recover`: what counts on it now, and how much of that was not counted before."""

    budget: str
    line: str
    principal: str | None
    spent: int | None
    """None of a filter."""
    added: int | None
    """None of a filter, and if owners pay with tickets and have lost all of them."""


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
    reader = StoredLedger(ledger)
    try:
        if reader.path is None and reader.is_sqlite:
            raise InvalidParameter("ledger", shown(ledger), "a ledger that is kept: one in memory is gone already")
        own = Witness(address(reader, witness), live=True)
        presence = Presence(own)
        try:
            return _recover(reader, own, presence, keep_count)
        finally:
            presence.leave()
    finally:
        reader.close()


def _recover(reader: StoredLedger, own: Witness, presence: Presence, keep_count: bool) -> Recovery:
    about = own.about()
    identity = reader.run(identity_of, "read")
    had_witness = bool(about.get("made"))
    if had_witness and about["identity"] != identity:
        raise LedgerError(
            f"the witness {own.shown!r} belongs to another ledger than {reader.shown!r}: name the right one; if it is "
            "lost, name a path where no file is yet"
        )
    if had_witness and keep_count:
        raise InvalidParameter("keep_count", True, "False: the ledger has a witness, whose marks count")
    own.begin()
    if not presence.enter():
        raise LedgerError(f"the ledger {reader.shown!r} is in use: stop every process that uses it first")
    known = {mark.key.place: mark for mark in own.marks()} if had_witness else {}
    before = reader.run(counts, "read")
    believe = had_witness or keep_count
    reader.run(lambda connection: _lose_all(reader, connection, known, before, believe))
    after = reader.run(counts, "read")
    plans_there = {plan for plan, _, _ in after}
    found: list[Mark] = []
    for count in after.values():
        reserved = min(count.in_use, count.allowed)
        found.append(Mark(count.key, count.allowed, count.spent, reserved, 0, count.state, count.state))
    missing = [mark for mark in known.values() if mark.key.plan not in plans_there]
    for mark in missing:
        gone = replace(mark, reserved=mark.allowed, low=0, ahead=GIVEN_UP)
        pays = mark.key.line and mark.state is not None
        found.append(replace(gone, before=usage_digest(), state="") if pays else gone)
    found += [replace(m, low=0, ahead=0) for place, m in known.items() if place not in after and m not in missing]
    own.write(found)
    own.note(identity=str(identity), made="yes", place=place_of_ledger(reader))
    return Recovery(
        ledger=reader.shown,
        witness=own.shown,
        had_witness=had_witness,
        counters=[_recovered(count, before.get(place)) for place, count in after.items()],
        missing=sorted({mark.key.plan for mark in missing}),
    )


def _lose_all(
    reader: StoredLedger,
    connection: Connection,
    known: Mapping[Place, Mark],
    before: Mapping[Place, Count],
    believe: bool,
) -> None:
    """Count as spent what each counter and filter may lack; everything, unless there are marks to ``believe``."""
    torn = _torn(reader, connection)
    for count in [*counts(connection).values(), *_unknown(known, before)]:
        mark = known.get(count.key.place)
        whole = mark.key.digest != count.key.digest if mark is not None else not believe
        if count.filter is not None:
            state = _spent_filter(count.filter) if whole else count.filter
            if mark is not None and mark.state is not None and not whole:
                state = _later(count.filter, mark.state)
            write_filter(connection, count.plan_id, state)
            continue
        units = mark.reserved - count.in_use if mark is not None else 0
        if whole:
            units = _tickets(connection, count) if count.tickets else count.allowed - count.in_use
        if count.id in torn:
            units = max(units, _tickets(connection, count))
        if units > 0:
            lose(connection, count.plan_id, count.key, units)
        if count.id is not None and count.id in torn:
            begin_anew(connection, count.id)


def _unknown(known: Mapping[Place, Mark], before: Mapping[Place, Count]) -> Iterator[Count]:
    """Principals' counters that the witness knows and the ledger lacks."""
    for place, mark in known.items():
        template = before.get((mark.key.plan, mark.key.line, ""))
        if place not in before and template is not None and template.key.digest == mark.key.digest:
            yield Count(template.plan_id, mark.key, mark.allowed, tickets=template.tickets)


def _torn(reader: StoredLedger, connection: Connection) -> set[int | None]:
    """The counters whose owners pay and whose rows are not of one copy. Unreadable owner indexes are emptied."""
    found: set[int | None] = set()
    for count in counts(connection).values():
        if count.tickets and count.id is not None:
            OwnerIndex(reader, count.plan_id).mend(connection)
            if not is_whole(connection, count.id, OwnerIndex(reader, count.plan_id)):
                found.add(count.id)
    return found


def _recovered(count: Count, before: Count | None) -> Recovered:
    added = count.in_use - (before.in_use if before else 0)
    plain = count.filter is None
    return Recovered(
        budget=count.key.plan,
        line=count.key.line,
        principal=count.key.principal or None,
        spent=count.in_use if plain else None,
        added=added if plain else None,
    )


def _tickets(connection: Connection, count: Count) -> int:
    """How many tickets every owner has of a line."""
    content = connection.scalar(sa.select(plans.c.content).where(plans.c.id == count.plan_id))
    return int(json.loads(content or "{}")["lines"][count.key.line]["count"])


def _spent_filter(state: str) -> str:
    found = json.loads(state)
    return json.dumps({"spent": [float("inf").hex() for _ in found["spent"]], "failed": found["failed"]})


def _later(*states: str) -> str:
    """At each order what is spent in the later of two states."""
    found: Sequence[dict[str, Any]] = [json.loads(state) for state in states]
    spent = [max(values, key=float.fromhex) for values in zip(*(each["spent"] for each in found), strict=True)]
    return json.dumps({"spent": spent, "failed": max((each["failed"] for each in found), key=float.fromhex)})
