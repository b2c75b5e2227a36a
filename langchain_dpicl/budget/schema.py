"""The ledger's tables, their rows, and what every charge reads of them. A ledger of another version is refused.

- plans: frozen content under a name, and its scope. The ids of plans and counters are random: whoever knows one finds
  that plan or counter in a copy of the ledger, or nothing
- counters: the allowance and what is spent, one row per line, and per line and principal in a ``per_principal`` plan
  (there the row without a principal holds the allowance and is never spent). In a ``shared`` plan the row of a
  principal counts its answers, if the budget has a ``quota``. ``spent`` only grows and gives out the
  numbers; ``spent - returned`` counts against the allowance: ``returned`` are tokens that were charged and never
  sampled. ``lost`` is the part of ``spent`` counted for charges that the ledger may have lost (`witness`); if owners
  pay with tickets, each of them has so many fewer
- charges: one row per release: ``units`` (1, or its tokens), ``number`` (the last of the numbers it took), and its
  receipt and answer once they are recorded
- queries: the latest charge for each query, which replay looks up
- removed: the names of budgets that were removed before anything was spent
- others: the budgets that stores remember beside this ledger's, in whatever ledger
- tickets: of a plan whose owners pay, the tickets that each owner has used on a counter. An owner is known by its mark,
  a keyed hash whose key stands elsewhere (``plans.key_id`` names it, see `owner_keys`). ``life`` is the plan's number
  of forgettings (``plans.changes``) when the row was made. Private: see `tickets`
- leaving: the marks of owners who are being forgotten, each with the token of its latest forgetting
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl import sql
from langchain_dpicl.errors import LedgerError

VERSION = 8
EARLIER = 6
"""The version that `upgrade` brings to today's."""
SQLITE_APPLICATION_ID = 0x44504943  # "DPIC"
UNLIMITED = 2**62
ADVICE = (
    "stop every process that uses it, put a whole copy in place if it is damaged or gone (remove its -wal and -shm "
    "first), and run "
    "`dpicl budget recover`, which counts as spent whatever that copy may lack"
)
"""For a ledger that was lost, damaged or rolled back. A copy alone would start counting again from where it was."""
_LOCK = 0x6470696C  # a number for PostgreSQL's advisory lock; any would do, as long as all workers use the same

metadata = sa.MetaData()


def text(name: str, length: int | None = None, **how: Any) -> sa.Column[str]:
    """A column of text, at most ``length`` characters long; not nullable by default."""
    return sa.Column(name, sa.Text() if length is None else sa.String(length), **{"nullable": False, **how})


def whole(name: str, **how: Any) -> sa.Column[int]:
    """A column of whole numbers of 64 bits; not nullable by default."""
    return sa.Column(name, sa.BigInteger(), **{"nullable": False, **how})


def _id(name: str) -> sa.Column[int]:
    """A primary key, or a part of one, that is a random number."""
    return whole(name, primary_key=True, autoincrement=False)


def new_id() -> int:
    """A number that no other copy of a ledger gives to anything else."""
    return 1 + secrets.randbits(59)


def _number(name: str) -> sa.Column[int]:
    """A part of a primary key that counts."""
    return whole(name, primary_key=True, autoincrement=False)


meta = sa.Table("dpicl_meta", metadata, text("key", 64, primary_key=True), text("value"))
plans = sa.Table(
    "dpicl_plans",
    metadata,
    _id("id"),
    text("name", 255, unique=True),
    text("content"),
    text("digest", 64),
    text("created", 40),
    text("scope", 20, server_default="shared"),
    sa.Column("tickets", sa.Integer, nullable=False, server_default="0"),
    text("key_id", 32, server_default=""),
    whole("changes", server_default="0"),
)
counters = sa.Table(
    "dpicl_counters",
    metadata,
    _id("id"),
    sa.Column("plan_id", sa.BigInteger, sa.ForeignKey("dpicl_plans.id"), nullable=False),
    text("line", 255),
    text("principal", 255, server_default=""),
    whole("allowed"),
    whole("spent"),
    whole("returned", server_default="0"),
    whole("lost", server_default="0"),
    sa.UniqueConstraint("plan_id", "line", "principal", name="dpicl_one_counter"),
    sa.CheckConstraint(
        "returned >= 0 AND returned <= spent AND spent - lost - returned <= allowed", name="dpicl_never_over_spent"
    ),
)
charges = sa.Table(
    "dpicl_charges",
    metadata,
    _id("counter_id"),
    _number("number"),
    text("charged", 40),
    whole("units", server_default="1"),
    text("outcome", 255, nullable=True),
    text("receipt", nullable=True),
    text("answer", nullable=True),
    sqlite_with_rowid=False,  # rows are appended in key order: a charge touches few pages, whatever came before
)
queries = sa.Table(
    "dpicl_queries",
    metadata,
    _id("counter_id"),
    text("query", 64, primary_key=True),
    whole("number"),
    sqlite_with_rowid=False,
)
steps = sa.Table(
    "dpicl_steps", metadata, _id("counter_id"), _number("number"), _number("step"), text("content")
)  # what a charge's steps have released, for a release of several steps that may be interrupted
removed = sa.Table("dpicl_removed", metadata, text("name", 255, primary_key=True), text("removed", 40))
others = sa.Table(
    "dpicl_other_budgets",
    metadata,
    text("ledger", 64, primary_key=True),
    text("name", 255, primary_key=True),
    text("url"),
    sa.Column("epsilon", sa.Float),
    sa.Column("delta", sa.Float),
)
tickets = sa.Table(
    "dpicl_tickets",
    metadata,
    _id("counter_id"),
    text("mark", 32, primary_key=True),
    whole("used"),
    whole("life"),
    sqlite_with_rowid=False,
)
leaving = sa.Table("dpicl_leaving", metadata, _id("plan_id"), text("mark", 32, primary_key=True), text("token", 16))

_counted = counters.c.spent - counters.c.returned
in_use: sa.ColumnElement[int] = sa.case((_counted > counters.c.allowed, counters.c.allowed), else_=_counted)
"""The units of a counter that count against its allowance: all of it, if more may have been lost."""


def tables_of(connection: Connection) -> set[str]:
    """The names of the ledger's tables that are there."""
    return set(sa.inspect(connection).get_table_names()) & set(metadata.tables)


def read_meta(connection: Connection, name: str) -> str | None:
    """A value that was made with the ledger: "identity" (a random name), "query_key" (in hexadecimal), or
    "schema_version"."""
    return connection.scalar(sa.select(meta.c.value).where(meta.c.key == name))


def key_of(connection: Connection, name: str) -> bytes:
    """Return a random key that was made with the ledger. Raises `LedgerError` if it is lost."""
    found = read_meta(connection, name)
    if found is None:
        raise LedgerError(f"the ledger has lost its keys; {ADVICE}")
    return bytes.fromhex(found)


def wait_for_others(connection: Connection) -> None:
    """Wait for other workers that make or change the tables, until the transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))


def open_schema(connection: Connection, *, create: str | None) -> None:
    """Make the tables, or check them, within the caller's transaction.

    ``create`` is the identity of a ledger that may be made; None if none may. Raises `LedgerError` for a ledger that
    is not there, that another version wrote, or that has lost tables.
    """
    wait_for_others(connection)  # workers that start together wait for the first
    if present := tables_of(connection):
        version = read_meta(connection, "schema_version") if "dpicl_meta" in present else None
        if version not in (None, str(VERSION)):
            cure = "; `dpicl upgrade PATH` brings it to today's form" if version == str(EARLIER) else ""
            raise LedgerError(
                f"the ledger has schema version {version}; this release reads version {VERSION} alone{cure}"
            )
        if version is None or present != set(metadata.tables):
            raise LedgerError(f"the ledger has lost tables; {ADVICE}")
        return
    if create is None:
        raise LedgerError("there is no ledger here")
    metadata.create_all(connection)
    values = {"query_key": secrets.token_hex(32), "schema_version": str(VERSION), "identity": create}
    connection.execute(sa.insert(meta), [{"key": key, "value": value} for key, value in values.items()])
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA application_id={SQLITE_APPLICATION_ID}")


# -- rows --------------------------------------------------------------------------------------------------------------


class Account(NamedTuple):
    """The name of a counter in a ledger: a plan's line and, in a ``per_principal`` plan, the principal.

    The principal is "" if all callers share one counter.
    """

    plan_id: int
    line: str
    principal: str = ""

    @property
    def counter(self) -> sa.ColumnElement[bool]:
        """The condition for its row."""
        return sa.and_(*(counters.c[name] == value for name, value in self._asdict().items()))


@dataclass(frozen=True)
class Charge:
    """A durable charge.

    ``number``: 1-based on the line; for several units, the last number taken. ``others``: the units that the plan's
    other lines had spent by then, read in the same transaction. ``query``: the query's keyed hash. ``units``: one, or
    an answer's tokens. ``returned``: the line's tokens that had been given back by then. ``process``: its maker's
    number, None if that is gone. ``participants``: `tickets.Participants`, if owners pay. Private.
    """

    plan_id: int
    line: str
    number: int
    time: str
    others: Mapping[str, int] = field(default_factory=dict)
    counter_id: int = 0
    principal: str = ""
    query: str | None = None
    units: int = 1
    returned: int = 0
    process: int | None = field(default=None, repr=False, compare=False)
    participants: Any = field(default=None, repr=False, compare=False)

    @property
    def all_counts(self) -> bool:
        """True if it gives nothing back: a process that is gone made it, or the parent of a fork."""
        return self.process != os.getpid()

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
        """True if it was neither answered nor given up so far."""
        return self.outcome is None and self.receipt is None


@dataclass(frozen=True)
class StoredPlan:
    """A plan as the ledger holds it: one row of its table."""

    id: int
    name: str
    content: str
    digest: str
    created: str
    scope: str
    tickets: int = 0


def utc_now() -> str:
    """The time of the machine's clock, for the record; it decides nothing."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


# -- what every charge reads -------------------------------------------------------------------------------------------

_CHUNK = 500
_WANTED = [f"wanted_{i}" for i in range(_CHUNK)]
_AT: list[sa.BindParameter[Any]] = [sa.bindparam(name) for name in Account._fields]
# Built once: building it anew would take as long as running it.
_OTHERS = sa.select(counters.c.line, in_use).where(
    counters.c.plan_id == _AT[0], counters.c.line != _AT[1], counters.c.principal == _AT[2]
)


@functools.cache
def _claims(number: int) -> str:
    """Lookups by keys alone, which a planner cannot take for a join of whole tables when it has no statistics yet."""
    made = "FROM dpicl_charges AS made WHERE made.counter_id = named.counter_id AND made.number = named.number"
    found = (f"(SELECT {column} {made})" for column in ("outcome", "receipt", "answer"))
    return f"""SELECT named.query, named.number, {", ".join(found)} FROM dpicl_queries AS named
        WHERE named.counter_id =
            (SELECT id FROM dpicl_counters WHERE plan_id = :plan_id AND line = :line AND principal = :principal)
        AND named.query IN (:{", :".join(_WANTED[:number])})"""


def claims_of(connection: Connection, account: Account, wanted: Sequence[str]) -> dict[str, Claim]:
    """The latest claims on these queries."""
    answer: dict[str, Claim] = {}
    for start in range(0, len(wanted), _CHUNK):
        names = dict(zip(_WANTED, wanted[start : start + _CHUNK], strict=False))
        for name, *claim in sql.direct(connection, _claims(len(names)), {**account._asdict(), **names}):
            answer[name] = Claim(*claim)
    return answer


def spent_beside(connection: Connection, account: Account) -> dict[str, int]:
    """The units in use on the plan's other lines."""
    return {line: spent for line, spent in connection.execute(_OTHERS, account._asdict()).all()}  # noqa: C416
