"""Opening a ledger beside its witness, and `recover`: counting as spent what a lost or old copy may lack."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from typing_extensions import TypedDict

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
    stub_digest,
    stubs,
)
from langchain_dpicl.budget.witness import GIVEN_UP, Key, Mark, Presence, Witness, address, rolled_back
from langchain_dpicl.errors import InvalidParameter, LedgerError, PrivacyWarning
from langchain_dpicl.store.sql import shown

if TYPE_CHECKING:
    from langchain_dpicl.budget.ledger import Ledger

LOST = "counted as spent: the charge of a process that was killed, or of a copy that was lost"


@dataclass(frozen=True)
class Count:
    """A counter as the ledger has it; of a filter, whose line is "", its state; of one whose owners pay, its digest."""

    plan_id: int
    key: Key
    allowed: int
    spent: int
    in_use: int
    tickets: bool
    state: str | None = None
    id: int | None = None

    @property
    def filter(self) -> str | None:
        """A filter's state."""
        return None if self.tickets else self.state


class Recovered(TypedDict):
    """One counter after `recover`: what counts on it now, and how much of that was not counted before."""

    budget: str
    line: str
    principal: str | None
    spent: int | None
    """None of a filter."""
    added: int | None
    """None of a filter, and where owners pay with tickets and have lost all of them."""


class Recovery(TypedDict):
    """What `recover` did."""

    ledger: str
    witness: str
    had_witness: bool
    counters: list[Recovered]
    missing: list[str]
    """Plans that the witness knows and the ledger lacks: they count as spent, all of them."""


# -- what the ledger says ----------------------------------------------------------------------------------------------


def counts(connection: Connection) -> dict[tuple[str, str, str], Count]:
    """Every counter and every filter of a ledger."""
    found: dict[tuple[str, str, str], Count] = {}
    query = sa.select(counters, plans.c.name, plans.c.digest, plans.c.tickets, filters.c.state)
    query = query.add_columns(stubs.c.digest.label("stub")).outerjoin(stubs, stubs.c.counter_id == counters.c.id)
    query = query.join(plans, plans.c.id == counters.c.plan_id).outerjoin(filters, filters.c.plan_id == plans.c.id)
    for row in connection.execute(query):
        if row.state is None:
            key = Key(row.name, row.line, row.principal, row.digest)
            numbers = (row.allowed, row.spent, row.spent - row.returned)
            stub = row.stub if row.stub is not None else stub_digest(spent=row.spent, lost=row.lost)
            state = stub if row.tickets else None
            found[row.name, row.line, row.principal] = Count(
                row.plan_id, key, *numbers, bool(row.tickets), state, row.id
            )
    query = sa.select(filters, plans.c.name, plans.c.digest).join(plans, plans.c.id == filters.c.plan_id)
    for row in connection.execute(query):
        key = Key(row.name, "", "", row.digest)
        found[row.name, "", ""] = Count(row.plan_id, key, UNLIMITED, 0, 0, False, row.state)
    return found


def lose(connection: Connection, plan_id: int, key: Key, units: int) -> None:
    """Count so many units as spent for which there is no charge. Makes a principal's counter where it is missing."""
    where = at(Account(plan_id, key.line, key.principal))
    values = {"spent": counters.c.spent + units, "lost": counters.c.lost + units}
    returned = (counters.c.id, counters.c.spent, counters.c.lost)
    advance = sa.update(counters).where(where).values(**values).returning(*returned)
    row = connection.execute(advance).one_or_none()
    if row is None:
        allowed = connection.scalar(sa.select(counters.c.allowed).where(at(Account(plan_id, key.line))))
        if allowed is None:
            raise LedgerError(f"the ledger has lost a counter; {ADVICE}")
        new = {"plan_id": plan_id, "line": key.line, "principal": key.principal, "allowed": allowed, "spent": 0}
        connection.execute(sa.insert(counters).values(new))
        row = connection.execute(advance).one()
    written = {"counter_id": row.id, "number": row.spent, "charged": utc_now(), "units": units, "outcome": LOST}
    connection.execute(sa.insert(charges).values(written))
    mine = stubs.c.counter_id == row.id
    stub = connection.execute(sa.select(stubs).where(mine)).one_or_none()
    if stub is not None and (stub.spent, stub.lost) == (row.spent - units, row.lost - units):  # else it is no such copy
        digest = stub_digest(stub.chain, stub.burns, stub.tickets, row.spent, row.lost, stub.seats)
        new = {"spent": row.spent, "lost": row.lost, "before": stub.digest, "digest": digest}
        connection.execute(sa.update(stubs).where(mine).values(**new))


def digest(connection: Connection, plan_id: int, key: Key) -> str:
    """What the witness must know of a counter whose owners pay."""
    query = sa.select(counters.c.spent, counters.c.lost, stubs.c.digest).where(
        at(Account(plan_id, key.line, key.principal))
    )
    row = connection.execute(query.outerjoin(stubs, stubs.c.counter_id == counters.c.id)).one_or_none()
    if row is None:
        return stub_digest()
    return row.digest if row.digest is not None else stub_digest(spent=row.spent, lost=row.lost)


# -- opening -----------------------------------------------------------------------------------------------------------


def exists(ledger: Database) -> bool:
    """Whether there is a ledger, or a file in its place."""
    if ledger.path is not None:
        return os.path.exists(ledger.path) and os.path.getsize(ledger.path) > 0
    return ledger.run(has_ledger, "read")


def find_witness(ledger: Ledger, given: str | os.PathLike[str] | None) -> Witness:
    """The witness of a ledger that is about to be opened; a new one for a new ledger. Never makes the ledger."""
    was_there = exists(ledger)  # looked at first: whoever makes a ledger makes its witness before
    url = address(ledger, given)
    if was_there and not _about(url):
        if not ledger.run(has_ledger, "read"):
            raise LedgerError(
                f"the file {ledger.shown!r} holds no tables: it is not a ledger, or one that has lost its log (the "
                f"file of its name with -wal); {ADVICE}"
            )
        ledger.run(check_version, "read")
        raise LedgerError(
            f"the ledger {ledger.shown!r} has no witness at {shown(url)!r}, so it may be a copy that starts counting "
            f"again: nothing was charged; name its witness, or {ADVICE}"
        )
    witness = Witness(url, live=True)
    if witness.begin()["made"] and not exists(ledger):
        raise LedgerError(
            f"the ledger {ledger.shown!r} is gone, and its witness {witness.shown!r} knows that it was there: nothing "
            f"was charged; {ADVICE}. For another budget name another ledger: both then count. Deleting a ledger takes "
            "no answer back. Only if no earlier answer counts, because it was a trial on data of nobody, remove the "
            "witness as well: by that you vouch for it"
        )
    return witness


def _about(url: str) -> dict[str, str]:
    witness = Witness(url)
    try:
        return witness.about()
    finally:
        witness.close()


def check(ledger: Ledger, witness: Witness, alone: bool) -> None:
    """Compare a ledger with its witness. `LedgerError` where it is another one, or was rolled back.

    While nobody else is there, what a process that was killed may have spent is counted as spent.
    """
    about, known, place = witness.about(), witness.marks(), _place(ledger)  # the marks first: they are behind
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
    present = {name for name, _, _ in found}
    for mark in known:
        count = found.get((mark.plan, mark.line, mark.principal))
        if mark.plan not in present and mark.ahead < 0:
            continue  # given up by `recover`
        if mark.plan not in present or (count.spent if count else 0) < mark.low or _other_plan(mark, found):
            raise rolled_back(mark.key, count.spent if count else 0, mark.low)
        if alone and count is not None and count.state not in (None, mark.before, mark.state):
            raise rolled_back(mark.key)
    if not alone:
        return
    here = [mark for mark in known if mark.plan in present]
    lost = {mark.key: units for mark in here if (units := settle(ledger, witness, mark)) is not None}
    changed = [
        replace(mark, reserved=max(mark.reserved, min(count.in_use, mark.allowed)), ahead=0)
        for mark in known
        if (count := found.get((mark.plan, mark.line, mark.principal))) and (mark.ahead or count.in_use > mark.reserved)
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


def settle_one(ledger: Ledger, witness: Witness, key: Key) -> None:
    """For a counter or filter whose ledger lacks the latest grant: count it as spent."""
    filter_key = replace(key, line="", principal="")
    for mark in witness.marks():
        if mark.key in (key, filter_key):
            settle(ledger, witness, mark)


def settle(ledger: Ledger, witness: Witness, mark: Mark) -> int | None:
    """Count as spent what is reserved and not in the ledger: how much that was (0 of a filter), None if nothing."""

    def work(connection: Connection) -> int | None:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
        plan = sa.select(plans.c.id, plans.c.tickets).where(plans.c.name == mark.plan, plans.c.digest == mark.digest)
        stored = connection.execute(plan).one_or_none()
        if stored is None:
            raise rolled_back(mark.key)
        if mark.state is not None and not stored.tickets:
            if read_filter(connection, stored.id) != mark.before or mark.before == mark.state:
                return None
            write_filter(connection, stored.id, mark.state)
            return 0
        of_counter = sa.select(counters.c.spent, counters.c.returned).where(
            at(Account(stored.id, mark.line, mark.principal))
        )
        row = connection.execute(of_counter.with_for_update()).one_or_none()
        spent, returned = (0, 0) if row is None else (row.spent, row.returned)
        if spent < mark.low:
            raise rolled_back(mark.key, spent, mark.low)
        units: int = mark.reserved - (spent - returned)
        before = digest(connection, stored.id, mark.key) if stored.tickets else None
        if units <= 0 or (before is not None and before != mark.before):
            return None
        lose(connection, stored.id, mark.key, units)
        if before is not None:  # the next charge is on this copy, and on no other that has counted as far
            witness.settle(mark, digest(connection, stored.id, mark.key))
        return units

    return ledger.run(work)


def _other_plan(mark: Mark, found: dict[tuple[str, str, str], Count]) -> bool:
    return any(count.key.plan == mark.plan and count.key.digest != mark.digest for count in found.values())


def _place(ledger: Database) -> str:
    """Which file, or which database, holds a ledger."""
    if ledger.path is not None:
        return "{}:{}".format(*(place_of(ledger.path) or (0, 0)))
    query = "SELECT oid FROM pg_database WHERE datname = current_database()"
    return str(ledger.run(lambda connection: connection.exec_driver_sql(query).scalar(), "read"))


# -- recovering --------------------------------------------------------------------------------------------------------


def recover(ledger: str, witness: str | os.PathLike[str] | None = None, *, keep_count: bool = False) -> Recovery:
    """Count as spent whatever a ledger may lack, and let it be used again.

    Parameters
    ----------
    ledger, witness
        As for `PrivacyBudget`. A witness that is there has a mark on every counter that was ever charged: all up to
        the mark counts as spent. Without one, every plan of the ledger counts as spent as a whole, and a new witness is
        made.
    keep_count
        Without a witness: believe the ledger's counts. For a ledger of a release that had no witnesses, of which you
        KNOW that no copy was ever put in its place and that this is no copy itself. If it is, the guarantee is void.

    `LedgerError` where there is no whole ledger, while any process has it open, and for another ledger's witness.
    """
    from langchain_dpicl.budget.ledger import Ledger

    reader = Ledger(ledger, create=False)
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


def _recover(reader: Ledger, own: Witness, presence: Presence, keep_count: bool) -> Recovery:
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
    from langchain_dpicl.budget.tickets import begin_anew

    if not presence.enter():
        raise LedgerError(f"the ledger {reader.shown!r} is in use: stop every process that uses it first")
    known = {(mark.plan, mark.line, mark.principal): mark for mark in own.marks()} if had_witness else {}
    before = reader.run(counts, "read")

    def work(connection: Connection) -> None:
        torn = _torn(reader, connection)
        for count in [*counts(connection).values(), *_unknown(known, before)]:
            mark = known.get((count.key.plan, count.key.line, count.key.principal))
            whole = mark.digest != count.key.digest if mark is not None else not (had_witness or keep_count)
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

    reader.run(work)
    after = reader.run(counts, "read")
    present = {name for name, _, _ in after}
    missing = [mark for mark in known.values() if mark.plan not in present]
    gone = [replace(mark, reserved=mark.allowed, low=0, ahead=GIVEN_UP) for mark in missing]
    gone = [replace(mark, before=stub_digest(), state="") if _pays(mark) else mark for mark in gone]
    unused = [replace(mark, low=0, ahead=0) for at, mark in known.items() if at not in after and mark not in missing]
    own.write([*map(_mark, after.values()), *unused, *gone])
    own.note(identity=str(identity), made="yes", place=_place(reader))
    return Recovery(
        ledger=reader.shown,
        witness=own.shown,
        had_witness=had_witness,
        counters=[_recovered(count, before.get(at)) for at, count in after.items()],
        missing=sorted({mark.plan for mark in missing}),
    )


def _unknown(known: dict[tuple[str, str, str], Mark], before: dict[tuple[str, str, str], Count]) -> Iterator[Count]:
    """Principals' counters that the witness knows and the ledger lacks."""
    for place, mark in known.items():
        template = before.get((mark.plan, mark.line, ""))
        if place not in before and template is not None and template.key.digest == mark.digest:
            yield Count(template.plan_id, mark.key, mark.allowed, 0, 0, template.tickets)


def _torn(reader: Ledger, connection: Connection) -> set[int | None]:
    """The counters whose owners pay and whose rows are not of one copy. Unreadable owner indexes are emptied."""
    from langchain_dpicl.budget.owner_index import OwnerIndex
    from langchain_dpicl.budget.tickets import whole

    found: set[int | None] = set()
    for count in counts(connection).values():
        if count.tickets and count.id is not None:
            OwnerIndex(reader, count.plan_id).mend(connection)
            if not whole(connection, count.id, OwnerIndex(reader, count.plan_id)):
                found.add(count.id)
    return found


def _pays(mark: Mark) -> bool:
    return bool(mark.line) and mark.state is not None


def _mark(count: Count) -> Mark:
    key = count.key
    numbers = (count.allowed, count.spent, min(count.in_use, count.allowed), 0)
    return Mark(key.plan, key.line, key.principal, key.digest, *numbers, count.state, count.state)


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
