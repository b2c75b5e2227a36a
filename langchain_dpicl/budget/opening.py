"""Opening a ledger beside its witness: refuse one that was lost, and count as spent what it may lack."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget.claims import Account, at, read_filter, utc_now, write_filter
from langchain_dpicl.budget.database import Database, place_of
from langchain_dpicl.budget.schema import (
    ADVICE,
    UNLIMITED,
    charges,
    check_version,
    counters,
    filters,
    has_ledger,
    identity_of,
    plans,
    usage,
    usage_digest,
)
from langchain_dpicl.budget.usage import write_summary
from langchain_dpicl.budget.witness import Key, Mark, Witness, address, rolled_back
from langchain_dpicl.errors import LedgerError, PrivacyWarning
from langchain_dpicl.store.sql import shown

LOST = "counted as spent: the charge of a process that was killed, or of a copy that was lost"

Place = tuple[str, str, str]
"""Plan, line and principal of a counter; a filter's line is ""."""


@dataclass(frozen=True)
class Count:
    """A counter as the ledger has it, or a filter. ``state`` is a filter's state, or the digest if owners pay."""

    plan_id: int
    key: Key
    allowed: int
    spent: int = 0
    in_use: int = 0
    tickets: bool = False
    state: str | None = None
    id: int | None = None

    @property
    def filter(self) -> str | None:
        """A filter's state."""
        return None if self.tickets else self.state


def counts(connection: Connection) -> dict[Place, Count]:
    """Every counter and every filter of a ledger."""
    found: dict[Place, Count] = {}
    query = sa.select(counters, plans.c.name, plans.c.digest, plans.c.tickets, filters.c.state)
    query = query.add_columns(usage.c.digest.label("usage")).outerjoin(usage, usage.c.counter_id == counters.c.id)
    query = query.join(plans, plans.c.id == counters.c.plan_id).outerjoin(filters, filters.c.plan_id == plans.c.id)
    for row in connection.execute(query):
        if row.state is None:
            key, in_use = Key(row.name, row.line, row.principal, row.digest), row.spent - row.returned
            state = (row.usage or usage_digest(spent=row.spent, lost=row.lost)) if row.tickets else None
            found[key.place] = Count(row.plan_id, key, row.allowed, row.spent, in_use, bool(row.tickets), state, row.id)
    query = sa.select(filters, plans.c.name, plans.c.digest).join(plans, plans.c.id == filters.c.plan_id)
    for row in connection.execute(query):
        key = Key(row.name, "", "", row.digest)
        found[key.place] = Count(row.plan_id, key, UNLIMITED, state=row.state)
    return found


def lose(connection: Connection, plan_id: int, key: Key, units: int) -> None:
    """Count so many units as spent without a charge. Makes a principal's counter if it is missing."""
    where = at(Account(plan_id, key.line, key.principal))
    values = {"spent": counters.c.spent + units, "lost": counters.c.lost + units}
    advance = sa.update(counters).where(where).values(**values)
    advance_and_read = advance.returning(counters.c.id, counters.c.spent, counters.c.lost)
    row = connection.execute(advance_and_read).one_or_none()
    if row is None:
        allowed = connection.scalar(sa.select(counters.c.allowed).where(at(Account(plan_id, key.line))))
        if allowed is None:
            raise LedgerError(f"the ledger has lost a counter; {ADVICE}")
        new = {"plan_id": plan_id, "line": key.line, "principal": key.principal, "allowed": allowed, "spent": 0}
        connection.execute(sa.insert(counters).values(new))
        row = connection.execute(advance_and_read).one()
    written = {"counter_id": row.id, "number": row.spent, "charged": utc_now(), "units": units, "outcome": LOST}
    connection.execute(sa.insert(charges).values(written))
    summary = connection.execute(sa.select(usage).where(usage.c.counter_id == row.id)).one_or_none()
    if summary is not None and (summary.spent, summary.lost) == (row.spent - units, row.lost - units):  # else torn
        rows = (summary.chain, summary.row_count, summary.tickets)
        digest = usage_digest(*rows, row.spent, row.lost, summary.owners)
        write_summary(connection, row.id, False, spent=row.spent, lost=row.lost, before=summary.digest, digest=digest)


def digest_of(connection: Connection, plan_id: int, key: Key) -> str:
    """What the witness must know of a counter whose owners pay."""
    query = sa.select(counters.c.spent, counters.c.lost, usage.c.digest)
    query = query.outerjoin(usage, usage.c.counter_id == counters.c.id)
    row = connection.execute(query.where(at(Account(plan_id, key.line, key.principal)))).one_or_none()
    if row is None:
        return usage_digest()
    return row.digest if row.digest is not None else usage_digest(spent=row.spent, lost=row.lost)


def _exists(ledger: Database) -> bool:
    """Whether there is a ledger, or a file in its place."""
    if ledger.path is not None:
        return os.path.exists(ledger.path) and os.path.getsize(ledger.path) > 0
    return ledger.run(has_ledger, "read")


def find_witness(ledger: Database, given: str | os.PathLike[str] | None) -> Witness:
    """The witness of a ledger that is about to be opened; a new one for a new ledger. Never makes the ledger."""
    was_there = _exists(ledger)  # looked at first: whoever makes a ledger makes its witness before
    url = address(ledger, given)
    if was_there:
        reader = Witness(url)
        try:
            about = reader.about()
        finally:
            reader.close()
        if not about and not ledger.run(has_ledger, "read"):
            raise LedgerError(
                f"the file {ledger.shown!r} holds no tables: it is not a ledger, or one that has lost its log (the "
                f"file of its name with -wal); {ADVICE}"
            )
        if not about:
            ledger.run(check_version, "read")
            raise LedgerError(
                f"the ledger {ledger.shown!r} has no witness at {shown(url)!r}, so it may be a copy that starts "
                f"counting again: nothing was charged; name its witness, or {ADVICE}"
            )
    witness = Witness(url, live=True)
    if witness.begin()["made"] and not _exists(ledger):
        raise LedgerError(
            f"the ledger {ledger.shown!r} is gone, and its witness {witness.shown!r} knows that it was there: nothing "
            f"was charged; {ADVICE}. For another budget name another ledger: both then count. Deleting a ledger takes "
            "no answer back. Only if no earlier answer counts, because it was a trial on data of nobody, remove the "
            "witness as well: by that you vouch for it"
        )
    return witness


def check(ledger: Database, witness: Witness, alone: bool) -> None:
    """Compare a ledger with its witness. `LedgerError` if it is another one, or was rolled back.

    If nobody else is there, count as spent what a process that was killed may have spent.
    """
    about, known, place = witness.about(), witness.marks(), place_of_ledger(ledger)  # the marks first: they are behind
    identity, found = ledger.run(lambda connection: (identity_of(connection), counts(connection)), "read")
    if identity is None or about.get("identity") != identity:
        raise LedgerError(
            f"the ledger {ledger.shown!r} is not the one whose witness is {witness.shown!r}: nothing was charged; "
            f"{ADVICE}"
        )
    if not alone and about.get("place") not in (None, place):
        raise LedgerError(
            f"other processes have another file open than the ledger {ledger.shown!r}: it was replaced; nothing was "
            f"charged; {ADVICE}"
        )
    digests = {count.key.plan: count.key.digest for count in found.values()}
    for mark in known:
        count = found.get(mark.key.place)
        if mark.key.plan not in digests and mark.ahead < 0:
            continue  # given up by `recover`
        spent = count.spent if count else 0
        if digests.get(mark.key.plan) != mark.key.digest or spent < mark.low:
            raise rolled_back(mark.key, spent, mark.low)
        if alone and count is not None and count.state not in (None, mark.before, mark.state):
            raise rolled_back(mark.key)
    if not alone:
        return
    here = [mark for mark in known if mark.key.plan in digests]
    lost = {mark.key: units for mark in here if (units := settle(ledger, witness, mark)) is not None}
    changed = [
        replace(mark, reserved=max(mark.reserved, min(count.in_use, mark.allowed)), ahead=0)
        for mark in known
        if (count := found.get(mark.key.place)) and (mark.ahead or count.in_use > mark.reserved)
    ]
    if changed:
        witness.write(changed)
    if about.get("place") != place:
        witness.note(place=place)
    if lost:
        words = ", ".join(f"{key.plan!r} {key.line}: {units or 'the latest charge'}" for key, units in lost.items())
        warnings.warn(
            f"the ledger {ledger.shown!r} was not closed by every process that used it, or an older copy was put in "
            f"its place: what may have been spent counts as spent ({words})",
            PrivacyWarning,
            stacklevel=2,
        )


def settle_one(ledger: Database, witness: Witness, key: Key) -> None:
    """For a counter or filter whose ledger lacks the latest grant: count it as spent."""
    for mark in witness.marks():
        if mark.key in (key, key.whole_plan):
            settle(ledger, witness, mark)


def settle(ledger: Database, witness: Witness, mark: Mark) -> int | None:
    """Count as spent what is reserved and not in the ledger: how much that was (0 of a filter), None if nothing."""
    return ledger.run(lambda connection: _settle(connection, witness, mark))


def _settle(connection: Connection, witness: Witness, mark: Mark) -> int | None:
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
    key = mark.key
    plan = sa.select(plans.c.id, plans.c.tickets).where(plans.c.name == key.plan, plans.c.digest == key.digest)
    stored = connection.execute(plan).one_or_none()
    if stored is None:
        raise rolled_back(key)
    if mark.state is not None and not stored.tickets:
        if read_filter(connection, stored.id) != mark.before or mark.before == mark.state:
            return None
        write_filter(connection, stored.id, mark.state)
        return 0
    of_counter = sa.select(counters.c.spent, counters.c.returned).where(at(Account(stored.id, key.line, key.principal)))
    row = connection.execute(of_counter.with_for_update()).one_or_none()
    spent, returned = (0, 0) if row is None else (row.spent, row.returned)
    if spent < mark.low:
        raise rolled_back(key, spent, mark.low)
    units: int = mark.reserved - (spent - returned)
    before = digest_of(connection, stored.id, key) if stored.tickets else None
    if units <= 0 or (before is not None and before != mark.before):
        return None
    lose(connection, stored.id, key, units)
    if before is not None:  # the next charge is on this copy, and on no other that has counted as far
        witness.settle(mark, digest_of(connection, stored.id, key))
    return units


def place_of_ledger(ledger: Database) -> str:
    """Which file, or which database, holds a ledger."""
    if ledger.path is not None:
        return "{}:{}".format(*(place_of(ledger.path) or (0, 0)))
    query = "SELECT oid FROM pg_database WHERE datname = current_database()"
    return str(ledger.run(lambda connection: connection.exec_driver_sql(query).scalar(), "read"))
