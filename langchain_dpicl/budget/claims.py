"""What a charge does within its transaction: advance a counter, write its rows, take the claims on its queries."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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

Advance = Callable[[Connection, int], "tuple[float, int] | None"]


@dataclass(frozen=True)
class Account:
    """Which counter: a plan's line, and in a ``per_principal`` plan whose ("" where all callers share one)."""

    plan_id: int
    line: str
    principal: str = ""


class Permit:
    """The units of one charge. What it did not use is given back once, by the process that made the charge: a child
    of a fork has a copy of it."""

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
    """A durable charge: its plan and line, its number there (from 1; the last of them, where it took several), when it
    was made, and what the plan's other lines had spent by then (read in the same transaction). ``query`` is the keyed
    hash of what was asked."""

    plan_id: int
    line: str
    number: int
    time: str
    others: Mapping[str, int] = field(default_factory=dict)
    counter_id: int = 0
    principal: str = ""
    query: str | None = None
    text: str | None = field(default=None, repr=False)
    epsilon: float | None = None
    left: int | None = None
    """What a filtered budget had spent with this charge, and how many such releases it then had room for."""
    units: int = 1
    """How many it counts for: one, or an answer's tokens."""
    returned: int = 0
    """How many of the line's tokens had been given back by then."""
    permit: Permit | None = field(default=None, repr=False, compare=False)
    """Its units, while what it did not use may be given back."""
    reopened: bool = field(default=False, compare=False)
    """Made by a process that is gone."""
    participants: Any = field(default=None, repr=False, compare=False)
    """Where owners pay with tickets: those who paid (`tickets.Participants`). Private."""

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
class Claimed:
    """What one transaction gave, in the order asked: new charges, and claims that are answered already."""

    entries: list[Charge | Claim]


@dataclass(frozen=True)
class Pending:
    """Nothing was charged: these queries are charged by somebody who has not answered yet."""

    claims: Mapping[str, Claim]


def read_filter(connection: Connection, plan_id: int) -> str:
    """A filter's state, for a transaction that is about to replace it."""
    query = sa.select(filters.c.state).where(filters.c.plan_id == plan_id).with_for_update()
    state = connection.scalar(query)
    if state is None:
        raise LedgerError(f"the ledger has lost this filter; {ADVICE}")
    return str(state)


def write_filter(connection: Connection, plan_id: int, state: str) -> None:
    """Replace what `read_filter` gave."""
    connection.execute(sa.update(filters).where(filters.c.plan_id == plan_id).values(state=state))


def utc_now() -> str:
    """What the machine's clock says, for the record: nothing is decided by it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def at(account: Account) -> sa.ColumnElement[bool]:
    columns = counters.c
    return sa.and_(
        columns.plan_id == account.plan_id, columns.line == account.line, columns.principal == account.principal
    )


def _parameters(account: Account) -> dict[str, object]:
    return {"at_plan": account.plan_id, "at_line": account.line, "at_principal": account.principal}


# The statements of a charge, built once: building them anew would take as long as running them.
_ADVANCE = (
    sa.update(counters)
    .where(
        counters.c.plan_id == sa.bindparam("at_plan"),
        counters.c.line == sa.bindparam("at_line"),
        counters.c.principal == sa.bindparam("at_principal"),
        in_use + sa.bindparam("count", type_=sa.BigInteger) <= counters.c.allowed,
    )
    .values(spent=counters.c.spent + sa.bindparam("count", type_=sa.BigInteger))
    .returning(counters.c.id, counters.c.spent, counters.c.returned)
)
_INSERT = sa.insert(charges)
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
_INSERTED = ("counter_id", "number", "charged", "units")
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
    .where(
        counters.c.plan_id == sa.bindparam("at_plan"),
        counters.c.line == sa.bindparam("at_line"),
        counters.c.principal == sa.bindparam("at_principal"),
        queries.c.query.in_(sa.bindparam("wanted", expanding=True)),
    )
)

_OPEN = (
    sa.select(charges.c.counter_id, charges.c.number, charges.c.charged, charges.c.units, in_use.label("in_use"))
    .join(counters, counters.c.id == charges.c.counter_id)
    .join(queries, sa.and_(queries.c.counter_id == counters.c.id, queries.c.number == charges.c.number))
    .where(
        counters.c.plan_id == sa.bindparam("at_plan"),
        counters.c.line == sa.bindparam("at_line"),
        counters.c.principal == sa.bindparam("at_principal"),
        queries.c.query == sa.bindparam("wanted"),
        charges.c.outcome.is_(None),
        charges.c.receipt.is_(None),
    )
)


@lru_cache
def _text(statement: sa.Insert | sa.Update, dialect: str) -> str:
    """A statement as its driver takes it, with named parameters."""
    spoken = sqlite.dialect(paramstyle="named") if dialect == "sqlite" else psycopg.dialect()  # type: ignore[no-untyped-call]
    return str(statement.compile(dialect=spoken, column_keys=_INSERTED if statement is _INSERT else None))


def _direct(connection: Connection, statement: sa.Insert | sa.Update, values: Mapping[str, object]) -> Any:
    """Run one of the two statements of every charge by the driver itself, whose errors `Database.run` handles too:
    SQLAlchemy's own work on each would take longer than a fast disk's commit."""
    return connection.connection.driver_connection.execute(  # type: ignore[union-attr]
        _text(statement, connection.dialect.name), values
    )


def claims_of(connection: Connection, account: Account, wanted: Sequence[str]) -> dict[str, Claim]:
    answer, where = {}, _parameters(account)
    for start in range(0, len(wanted), _CHUNK):
        rows = connection.execute(_CLAIMS, {**where, "wanted": wanted[start : start + _CHUNK]})
        answer.update({name: Claim(*claim) for name, *claim in rows})
    return answer


def open_charge(connection: Connection, account: Account, query: str, others: bool) -> Charge | None:
    """The latest charge for a query, if it is neither answered nor given up. What it says of others is as of now.

    Its ``spent`` is all that is in use on the line now, which is what was in use when it was made or more.
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


def spend(
    connection: Connection,
    account: Account,
    names: Sequence[str | None],
    now: str,
    others: bool,
    advance: Advance | None,
    units: int,
) -> list[Charge] | None:
    """Advance the counter by so many units for each name, and write a row for each; None if they do not fit."""
    count = len(names) * units
    if not count:
        return []
    if others:
        connection.execute(_QUEUE, {"at_plan": account.plan_id})
    extra = (None, None) if advance is None else advance(connection, count)
    if extra is None:
        return None
    row = _advance_and_insert(connection, account, count, now) if len(names) == 1 else None
    written = row is not None
    row = row or _advance_counter(connection, account, count)
    if row is None:
        return None
    counter, spent, returned = row
    numbers = range(spent - count + units, spent + 1, units)
    rows = [{"counter_id": counter, "number": number, "charged": now, "units": units} for number in numbers]
    if len(names) == 1 and not written:
        _direct(connection, _INSERT, rows[0])
    elif not written:
        connection.execute(_INSERT, rows)
    beside = _beside(connection, account) if others else {}
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
            epsilon=extra[0],
            left=extra[1],
            units=units,
            returned=returned,
            permit=Permit(units),
        )
        for number, name in zip(numbers, names, strict=True)
    ]


def _advance_and_insert(connection: Connection, account: Account, count: int, now: str) -> tuple[int, int, int] | None:
    """On PostgreSQL, one row of a counter that is there: both statements in one message to the server."""
    if connection.dialect.name != "postgresql":
        return None
    values = {**_parameters(account), "count": count, "charged": now}
    driver = connection.connection.driver_connection
    row = driver.execute(_BOTH, values).fetchone()  # type: ignore[union-attr]
    return None if row is None else (row[0], row[1], row[2])


def _advance_counter(connection: Connection, account: Account, count: int) -> tuple[int, int, int] | None:
    """A counter's id, its last number and what was given back; None if they do not fit. Makes a principal's first."""
    where = _parameters(account)
    row = _direct(connection, _ADVANCE, {**where, "count": count}).fetchone()
    if row is not None or not account.principal:
        return None if row is None else (row[0], row[1], row[2])
    of_line = sa.select(counters).where(at(Account(account.plan_id, account.line)))
    line = connection.execute(of_line).one_or_none()  # it has spent nothing, unless all of the plan counts as spent
    if line is None or line.spent + count > line.allowed:
        return None
    if connection.scalar(sa.select(counters.c.id).where(at(account))) is None:
        values = {"plan_id": account.plan_id, "line": account.line, "principal": account.principal}
        try:
            start = {"allowed": line.allowed, "spent": line.spent, "lost": line.lost}
            connection.execute(sa.insert(counters).values(**values, **start))
        except IntegrityError:  # another worker made this principal's counter just now
            raise TryAgain from None
    row = connection.execute(
        _ADVANCE, {**where, "count": count}
    ).one_or_none()  # it may be there only since the first try
    return None if row is None else (row[0], row[1], row[2])


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
