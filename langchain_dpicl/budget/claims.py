"""A charge, and the statements of its transaction: advance a counter, write rows, take the claims on queries."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from langchain_dpicl.budget.database import TryAgain
from langchain_dpicl.budget.schema import ADVICE, charges, counters, filters, in_use, plans, queries
from langchain_dpicl.errors import LedgerError

_CHUNK = 500


@dataclass(frozen=True)
class Account:
    """Which counter: a plan's line and, in a ``per_principal`` plan, the principal ("" if all callers share one)."""

    plan_id: int
    line: str
    principal: str = ""


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

    ``number`` is its number on the line (from 1; for several units, the last one), ``others`` what the plan's other
    lines had spent by then, read in the same transaction, and ``query`` the query's keyed hash.
    """

    plan_id: int
    line: str
    number: int
    time: str
    others: Mapping[str, int] = field(default_factory=dict)
    counter_id: int = 0
    principal: str = ""
    query: str | None = None
    epsilon: float | None = None
    left: int | None = None
    """What a filtered budget had spent with this charge, and how many such releases it then had room for."""
    units: int = 1
    """How many it counts for: one, or an answer's tokens."""
    returned: int = 0
    """How many of the line's tokens had been given back by then."""
    permit: Permit | None = field(default=None, repr=False, compare=False)
    """Its units, while the unused ones may be given back."""
    reopened: bool = field(default=False, compare=False)
    """Made by a process that is gone."""
    participants: Any = field(default=None, repr=False, compare=False)
    """Where owners pay with tickets: those who take part (`tickets.Participants`). Private."""

    @property
    def all_counts(self) -> bool:
        """Whether it gives nothing back: another process made it, one that is gone or the one that was forked."""
        return self.reopened or (self.permit is not None and self.permit.process != os.getpid())

    @property
    def spent(self) -> int:
        """What counted on the line with this charge, and with those before it."""
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


@dataclass(frozen=True)
class Spent:
    """What a `ChargeRule` did: the charges it completed, and the ledger's state before and after, for the witness."""

    charges: Sequence[Charge]
    before: str
    after: str


class ChargeRule:
    """What a charge costs beside its counter: a filter's divergence, or the tickets of owners."""

    whole_plan = False
    """Whether the witness keeps one state for all lines of the plan."""

    def spend(self, connection: Connection, charges: Sequence[Charge], places: Sequence[int]) -> Spent:
        """Spend it in the charge's transaction; ``places`` are the charges' places in the request.

        Raises `DoesNotFit`. The transaction may run again after a rollback, so keep nothing of it.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ChargeRequest:
    """What a line asks a ledger to charge: all of it durably, or nothing.

    Parameters
    ----------
    queries
        One entry for each release: the query's keyed hash, or None for one that is never replayed. Equal queries share
        one charge. An answered one comes back as its `Claim`, uncharged.
    units
        What each new charge counts for.
    replay
        False: charge every entry, and leave claims alone.
    others
        Each charge says what the plan's other lines have spent. The charges of a plan then wait for each other, so that
        no two of them miss one another.
    rule
        What it costs beside its counter.
    """

    account: Account
    queries: Sequence[str | None]
    units: int = 1
    replay: bool = True
    others: bool = False
    rule: ChargeRule | None = None

    @property
    def keys(self) -> list[Hashable]:
        """What entries share a charge by: the query, or its place if it is never replayed."""
        return [place if query is None or not self.replay else query for place, query in enumerate(self.queries)]


def utc_now() -> str:
    """The time of the machine's clock, for the record: nothing is decided by it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


# The statements of a charge, built once: building them anew would take as long as running them.

_HERE = sa.and_(
    counters.c.plan_id == sa.bindparam("at_plan"),
    counters.c.line == sa.bindparam("at_line"),
    counters.c.principal == sa.bindparam("at_principal"),
)
_COUNT = sa.bindparam("count", type_=sa.BigInteger)
_ADVANCE = (
    sa.update(counters)
    .where(_HERE, in_use + _COUNT <= counters.c.allowed)
    .values(spent=counters.c.spent + _COUNT)
    .returning(counters.c.id, counters.c.spent, counters.c.returned)
)
_INSERT = sa.insert(charges)
_INSERTED = ("counter_id", "number", "charged", "units")
_BOTH = """
    WITH advanced AS (
        UPDATE dpicl_counters SET spent = spent + %(count)s
        WHERE plan_id = %(at_plan)s AND line = %(at_line)s AND principal = %(at_principal)s
        AND spent - returned + %(count)s <= allowed
        RETURNING id, spent, returned
    ), written AS (
        INSERT INTO dpicl_charges (counter_id, number, charged, units)
        SELECT id, spent, %(charged)s, %(count)s FROM advanced
    )
    SELECT id, spent, returned FROM advanced
"""
_QUEUE = sa.select(plans.c.id).where(plans.c.id == sa.bindparam("at_plan")).with_for_update()
_OTHERS = sa.select(counters.c.line, in_use).where(
    counters.c.plan_id == sa.bindparam("at_plan"),
    counters.c.principal == sa.bindparam("at_principal"),
    counters.c.line != sa.bindparam("at_line"),
)
_CLAIMS = (
    sa.select(queries.c.query, queries.c.number, charges.c.outcome, charges.c.receipt, charges.c.answer)
    .join(counters, counters.c.id == queries.c.counter_id)
    .join(charges, sa.and_(charges.c.counter_id == counters.c.id, charges.c.number == queries.c.number))
    .where(_HERE, queries.c.query.in_(sa.bindparam("wanted", expanding=True)))
)
_OPEN = (
    sa.select(charges.c.counter_id, charges.c.number, charges.c.charged, charges.c.units, in_use.label("in_use"))
    .join(counters, counters.c.id == charges.c.counter_id)
    .join(queries, sa.and_(queries.c.counter_id == counters.c.id, queries.c.number == charges.c.number))
    .where(_HERE, queries.c.query == sa.bindparam("wanted"))
    .where(charges.c.outcome.is_(None), charges.c.receipt.is_(None))
)


def _parameters(account: Account) -> dict[str, object]:
    return {"at_plan": account.plan_id, "at_line": account.line, "at_principal": account.principal}


def at(account: Account) -> sa.ColumnElement[bool]:
    """The condition for an account's counter."""
    columns = counters.c
    return sa.and_(
        columns.plan_id == account.plan_id, columns.line == account.line, columns.principal == account.principal
    )


@lru_cache
def _text(statement: sa.Insert | sa.Update, dialect: str) -> str:
    """A statement as its driver takes it, with named parameters."""
    known: dict[str, Any] = {"sqlite": sqlite.dialect, "postgresql": psycopg.dialect}
    spoken = known[dialect](**({"paramstyle": "named"} if dialect == "sqlite" else {}))
    return str(statement.compile(dialect=spoken, column_keys=_INSERTED if statement is _INSERT else None))


def _direct(connection: Connection, statement: str | sa.Insert | sa.Update, values: Mapping[str, object]) -> Any:
    """Run a statement of every charge by the driver itself, whose errors `Database.run` handles too: SQLAlchemy's own
    work on each would take longer than a fast disk's commit."""
    text = statement if isinstance(statement, str) else _text(statement, connection.dialect.name)
    driver: Any = connection.connection.driver_connection
    return driver.execute(text, values)


# -- a charge ---------------------------------------------------------------------------------------------------------


def claims_of(connection: Connection, account: Account, wanted: Sequence[str]) -> dict[str, Claim]:
    """The latest claims on these queries."""
    answer, here = {}, _parameters(account)
    for start in range(0, len(wanted), _CHUNK):
        rows = connection.execute(_CLAIMS, {**here, "wanted": wanted[start : start + _CHUNK]})
        answer.update({name: Claim(*claim) for name, *claim in rows})
    return answer


def open_charge(connection: Connection, account: Account, query: str, others: bool) -> Charge | None:
    """The latest charge for a query, if it is neither answered nor given up. ``others`` are as of now.

    Its ``spent`` is all that is in use on the line now, at least what was in use when it was made.
    """
    row = connection.execute(_OPEN, {**_parameters(account), "wanted": query}).one_or_none()
    if row is None:
        return None
    return Charge(
        plan_id=account.plan_id,
        line=account.line,
        number=row.number,
        time=row.charged,
        others=_beside(connection, account) if others else {},
        counter_id=row.counter_id,
        principal=account.principal,
        query=query,
        units=row.units,
        returned=row.number - row.in_use,
        reopened=True,
    )


def _beside(connection: Connection, account: Account) -> dict[str, int]:
    """What the plan's other lines have in use."""
    return {line: spent for line, spent in connection.execute(_OTHERS, _parameters(account)).all()}  # noqa: C416


def spend(connection: Connection, request: ChargeRequest, names: Sequence[str | None]) -> list[Charge]:
    """Advance the counter by the request's units for each name, and write a row for each. Raises `DoesNotFit`."""
    account, units, now = request.account, request.units, utc_now()
    count = len(names) * units
    if request.others:
        connection.execute(_QUEUE, {"at_plan": account.plan_id})
    values = {**_parameters(account), "count": count}
    row = None
    written = len(names) == 1 and connection.dialect.name == "postgresql"
    if written:  # both statements in one message to the server
        row = _direct(connection, _BOTH, {**values, "charged": now}).fetchone()
    if row is None:
        written, row = False, _direct(connection, _ADVANCE, values).fetchone()
    if row is None and account.principal and _add_principal(connection, account, count):
        row = connection.execute(_ADVANCE, values).one_or_none()
    if row is None:
        raise DoesNotFit
    counter, spent, returned = row
    numbers = range(spent - count + units, spent + 1, units)
    rows = [{"counter_id": counter, "number": number, "charged": now, "units": units} for number in numbers]
    if len(rows) > 1:
        connection.execute(_INSERT, rows)
    elif not written:
        _direct(connection, _INSERT, rows[0])
    beside = _beside(connection, account) if request.others else {}
    return [
        Charge(
            plan_id=account.plan_id,
            line=account.line,
            number=number,
            time=now,
            others=beside,
            counter_id=counter,
            principal=account.principal,
            query=name,
            units=units,
            returned=returned,
            permit=Permit(units),
        )
        for number, name in zip(numbers, names, strict=True)
    ]


def _add_principal(connection: Connection, account: Account, count: int) -> bool:
    """Make a principal's first counter, unless it is there; False if so many units do not fit."""
    of_line = sa.select(counters).where(at(Account(account.plan_id, account.line)))
    line = connection.execute(of_line).one_or_none()  # it has spent nothing, unless all of the plan counts as spent
    if line is None or line.spent + count > line.allowed:
        return False
    if connection.scalar(sa.select(counters.c.id).where(at(account))) is None:
        new = {"plan_id": account.plan_id, "line": account.line, "principal": account.principal}
        new |= {"allowed": line.allowed, "spent": line.spent, "lost": line.lost}
        try:
            connection.execute(sa.insert(counters).values(new))
        except IntegrityError:  # another worker made this principal's counter just now
            raise TryAgain from None
    return True


def take_claims(connection: Connection, entries: Sequence[Charge], known: Mapping[str, Claim]) -> None:
    """Point each query at its new charge; `TryAgain` if another worker was faster."""
    fresh = []
    for entry in entries:
        name = str(entry.query)
        if name not in known:
            fresh.append({"counter_id": entry.counter_id, "query": name, "number": entry.number})
            continue
        row = sa.and_(queries.c.counter_id == entry.counter_id, queries.c.query == name)
        taken = sa.update(queries).where(row, queries.c.number == known[name].number).values(number=entry.number)
        if connection.execute(taken).rowcount != 1:
            raise TryAgain
    if fresh:
        try:
            connection.execute(sa.insert(queries), fresh)
        except IntegrityError:
            raise TryAgain from None


# -- a filter's state ------------------------------------------------------------------------------------------------


def read_filter(connection: Connection, plan_id: int) -> str:
    """A filter's state, for a transaction that is about to replace it."""
    query = sa.select(filters.c.state).where(filters.c.plan_id == plan_id).with_for_update()
    state = connection.scalar(query)
    if state is None:
        raise LedgerError(f"the ledger has lost this filter; {ADVICE}")
    return str(state)


def write_filter(connection: Connection, plan_id: int, state: str) -> None:
    """Replace a filter's state."""
    connection.execute(sa.update(filters).where(filters.c.plan_id == plan_id).values(state=state))
