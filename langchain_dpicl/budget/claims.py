"""A charge, and the statements of its transaction: advance a counter, write rows, take the claims on queries."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget.database import TryAgain, insert
from langchain_dpicl.budget.schema import ADVICE, charges, counters, filters, in_use, plans, queries
from langchain_dpicl.errors import LedgerError

_CHUNK = 500


class Account(NamedTuple):
    """Which counter: a plan's line and, in a ``per_principal`` plan, the principal ("" if all callers share one)."""

    plan_id: int
    line: str
    principal: str = ""

    @property
    def counter(self) -> sa.ColumnElement[bool]:
        """The condition for its row."""
        columns = (counters.c.plan_id, counters.c.line, counters.c.principal)
        return sa.and_(*(column == value for column, value in zip(columns, self, strict=True)))


class Permit:
    """The units of one charge. Its process gives back the unused ones, once. A child of a fork has a copy of it."""

    __slots__ = ("process", "units")

    def __init__(self, units: int) -> None:
        self.units = units
        self.process = os.getpid()

    def unused(self, units: int) -> int:
        """``units`` of them, the first time; 0 from then on."""
        given, self.units = min(units, self.units), 0
        return given


@dataclass(frozen=True)
class Charge:
    """A durable charge.

    ``number``: 1-based on the line; for several units, the last number taken. ``others``: the units that the plan's
    other lines had spent by then, read in the same transaction. ``query``: the query's keyed hash.
    """

    plan_id: int
    line: str
    number: int
    time: str
    others: Mapping[str, int] = field(default_factory=dict)
    counter_id: int = 0
    principal: str = ""
    query: str | None = None
    epsilon: float | None = None  # what a filtered budget had spent with this charge
    left: int | None = None  # how many such releases a filtered budget then had room for
    units: int = 1  # how many it counts for: one, or an answer's tokens
    returned: int = 0  # how many of the line's tokens had been given back by then
    permit: Permit | None = field(default=None, repr=False, compare=False)  # None if its process is gone
    participants: Any = field(default=None, repr=False, compare=False)  # `tickets.Participants`, if owners pay. Private

    @property
    def all_counts(self) -> bool:
        """Whether it gives nothing back: a process that is gone made it, or the parent of a fork."""
        return self.permit is None or self.permit.process != os.getpid()

    @property
    def spent(self) -> int:
        """The line's units in use with this charge and those before it."""
        return self.number - self.returned


@dataclass(frozen=True)
class Claim:
    """The latest charge for a query: its number, and its answer and receipt once they are recorded."""

    number: int
    outcome: str | None
    receipt: str | None
    answer: str | None

    @property
    def pending(self) -> bool:
        """Charged, and neither answered nor given up so far."""
        return self.outcome is None and self.receipt is None


@dataclass(frozen=True)
class Pending:
    """Nothing was charged: other callers have charged these queries and not answered them yet."""

    claims: Mapping[str, Claim]


class DoesNotFit(Exception):
    """Raised in a charge's transaction: fewer units are left. It rolls back, and nothing is charged."""


class ChargeRule:
    """The cost of a charge beside its counter: a filter's divergence, or the tickets of owners."""

    def spend(
        self, connection: Connection, charges: Sequence[Charge], places: Sequence[int]
    ) -> tuple[list[Charge], str, str]:
        """Spend it in the charge's transaction; ``places`` are the charges' places in the request.

        Returns the completed charges, and for the witness the ledger's state before and after: that of the counter if
        owners pay, otherwise that of the whole plan. Raises `DoesNotFit`. The transaction may run again after a
        rollback, so keep nothing of it.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ChargeRequest:
    """A line's request to its ledger: charge all of it durably, or nothing.

    Parameters
    ----------
    queries
        One entry for each release: the query's keyed hash, or None if the release is never replayed. Equal queries
        share one charge. An answered query comes back as its `Claim`, uncharged.
    units
        The units of each new charge.
    replay
        False: charge every entry, and leave claims alone.
    others
        Each charge names the units that the plan's other lines have spent. The charges of a plan then wait for each
        other, so no two of them miss one another.
    rule
        The cost beside the counter.
    """

    account: Account
    queries: Sequence[str | None]
    units: int = 1
    replay: bool = True
    others: bool = False
    rule: ChargeRule | None = None

    @property
    def keys(self) -> list[Hashable]:
        """The key of each entry: the query, or its place if it is never replayed. Equal keys share a charge."""
        return [place if query is None or not self.replay else query for place, query in enumerate(self.queries)]


def utc_now() -> str:
    """The time of the machine's clock, for the record; it decides nothing."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


# The statements of every charge. The driver itself runs them (`_direct`): SQLAlchemy's own work on each would take
# longer than a fast disk's commit. The others are built once: building them anew would take as long as running them.

_ADVANCE = """UPDATE dpicl_counters SET spent = spent + :count
    WHERE plan_id = :plan_id AND line = :line AND principal = :principal AND spent - returned + :count <= allowed
    RETURNING id, spent, returned"""
_INSERT = "INSERT INTO dpicl_charges (counter_id, number, charged, units)"
_WRITE = f"{_INSERT} VALUES (:counter_id, :number, :charged, :units)"
_BOTH = f"""WITH advanced AS ({_ADVANCE}), written AS ({_INSERT} SELECT id, spent, :charged, :count FROM advanced)
    SELECT id, spent, returned FROM advanced"""
_RECORD = """UPDATE dpicl_charges SET receipt = :receipt, outcome = :outcome, answer = :answer, units = :units
    WHERE counter_id = :counter_id AND number = :number AND units = :charged
    AND (:unused = 0 OR (outcome IS NULL AND receipt IS NULL))"""
_POSTGRESQL = {text: re.sub(r":(\w+)", r"%(\1)s", text) for text in (_ADVANCE, _WRITE, _BOTH, _RECORD)}
_AT: list[sa.BindParameter[Any]] = [sa.bindparam(name) for name in Account._fields]
_QUEUE = sa.select(plans.c.id).where(plans.c.id == _AT[0]).with_for_update()
_OTHERS = sa.select(counters.c.line, in_use).where(
    counters.c.plan_id == _AT[0], counters.c.line != _AT[1], counters.c.principal == _AT[2]
)
_CLAIMS = (
    sa.select(queries.c.query, queries.c.number, charges.c.outcome, charges.c.receipt, charges.c.answer)
    .join(counters, counters.c.id == queries.c.counter_id)
    .join(charges, sa.and_(charges.c.counter_id == counters.c.id, charges.c.number == queries.c.number))
    .where(counters.c.plan_id == _AT[0], counters.c.line == _AT[1], counters.c.principal == _AT[2])
    .where(queries.c.query.in_(sa.bindparam("wanted", expanding=True)))
)


def _direct(connection: Connection, statement: str, values: Mapping[str, object]) -> Any:
    """Run a statement by the driver itself, whose errors `Database.run` handles too."""
    driver: Any = connection.connection.driver_connection
    return driver.execute(statement if connection.dialect.name == "sqlite" else _POSTGRESQL[statement], values)


def claims_of(connection: Connection, account: Account, wanted: Sequence[str]) -> dict[str, Claim]:
    """The latest claims on these queries."""
    answer: dict[str, Claim] = {}
    for start in range(0, len(wanted), _CHUNK):
        rows = connection.execute(_CLAIMS, {**account._asdict(), "wanted": wanted[start : start + _CHUNK]})
        answer.update({name: Claim(*claim) for name, *claim in rows})
    return answer


def spent_beside(connection: Connection, account: Account) -> dict[str, int]:
    """The units in use on the plan's other lines."""
    return {line: spent for line, spent in connection.execute(_OTHERS, account._asdict()).all()}  # noqa: C416


def spend(connection: Connection, request: ChargeRequest, names: Sequence[str | None]) -> list[Charge]:
    """Advance the counter by the request's units for each name, and write a row for each. Raises `DoesNotFit`."""
    account, units, now = request.account, request.units, utc_now()
    count = len(names) * units
    if request.others:
        connection.execute(_QUEUE, {"plan_id": account.plan_id})
    values = {**account._asdict(), "count": count, "charged": now}
    at_once = len(names) == 1 and connection.dialect.name == "postgresql"
    statement = _BOTH if at_once else _ADVANCE  # both statements in one message to the server
    row = _direct(connection, statement, values).fetchone()
    if row is None and account.principal and _add_principal(connection, account, count):
        row = _direct(connection, statement, values).fetchone()
    if row is None:
        raise DoesNotFit
    counter, spent, returned = row
    numbers = range(spent - count + units, spent + 1, units)
    rows = [{"counter_id": counter, "number": number, "charged": now, "units": units} for number in numbers]
    if len(rows) > 1:
        connection.execute(sa.insert(charges), rows)
    elif not at_once:
        _direct(connection, _WRITE, rows[0])
    common: dict[str, Any] = {"time": now, "others": spent_beside(connection, account) if request.others else {}}
    common |= {**account._asdict(), "counter_id": counter, "units": units, "returned": returned}
    pairs = zip(numbers, names, strict=True)
    return [Charge(number=number, query=name, permit=Permit(units), **common) for number, name in pairs]


def _add_principal(connection: Connection, account: Account, count: int) -> bool:
    """Make a principal's first counter, unless it is there; False if so many units do not fit."""
    of_line = sa.select(counters).where(Account(account.plan_id, account.line).counter)
    line = connection.execute(of_line).one_or_none()  # it has spent nothing, unless all of the plan counts as spent
    if line is None or line.spent + count > line.allowed:
        return False
    if connection.scalar(sa.select(counters.c.id).where(account.counter)) is None:
        new = {**account._asdict(), "allowed": line.allowed, "spent": line.spent, "lost": line.lost}
        insert(connection, counters, new)
    return True


def take_claims(connection: Connection, entries: Sequence[Charge], known: Mapping[str, Claim]) -> None:
    """Point each query at its new charge; `TryAgain` if another worker was faster."""
    fresh = []
    for entry in entries:
        before = known.get(str(entry.query))
        if before is None:
            fresh.append({"counter_id": entry.counter_id, "query": entry.query, "number": entry.number})
            continue
        row = sa.and_(queries.c.counter_id == entry.counter_id, queries.c.query == entry.query)
        taken = sa.update(queries).where(row, queries.c.number == before.number)
        if connection.execute(taken.values(number=entry.number)).rowcount != 1:
            raise TryAgain
    if fresh:
        insert(connection, queries, fresh)


def record(connection: Connection, charge: Charge, values: Mapping[str, object], unused: int) -> bool:
    """Write these values of a charge; with ``unused`` units only if nobody has answered it or given it up."""
    row = {"counter_id": charge.counter_id, "number": charge.number, "charged": charge.units, "unused": unused}
    return bool(_direct(connection, _RECORD, {**values, **row}).rowcount == 1)


def read_filter(connection: Connection, plan_id: int, *, to_write: bool = True) -> str:
    """The state of a plan's filter. ``to_write``: this transaction replaces it, and others wait."""
    query = sa.select(filters.c.state).where(filters.c.plan_id == plan_id)
    state = connection.scalar(query.with_for_update() if to_write else query)
    if state is None:
        raise LedgerError(f"the ledger has lost this filter; {ADVICE}")
    return str(state)


def write_filter(connection: Connection, plan_id: int, state: str) -> None:
    """Replace a filter's state."""
    connection.execute(sa.update(filters).where(filters.c.plan_id == plan_id).values(state=state))
