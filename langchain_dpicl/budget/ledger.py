"""The durable counter, on SQLAlchemy.

Three tables: plans (frozen content under a name), lines (how much is allowed and spent), releases (one row per charge,
its receipt once it is recorded). A charge is one transaction: a guarded ``UPDATE`` of one row that cannot pass the
limit, and an ``INSERT``. Its cost does not grow with what was spent, and it is durable before `Ledger.charge` returns:
SQLite runs in WAL mode with full synchronisation, and takes its write lock when the transaction begins, so threads and
processes queue.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from langchain_dpicl.errors import InvalidParameter, LedgerError, PrivacyWarning

T = TypeVar("T")

SCHEMA_VERSION = 1
_SQLITE_APPLICATION_ID = 0x44504943  # "DPIC"
_BUSY_SECONDS = 60

_metadata = sa.MetaData()
_meta = sa.Table(
    "dpicl_meta",
    _metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
_plans = sa.Table(
    "dpicl_plans",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(255), nullable=False, unique=True),
    sa.Column("content", sa.Text, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("created", sa.String(40), nullable=False),
)
_lines = sa.Table(
    "dpicl_lines",
    _metadata,
    sa.Column("plan_id", sa.Integer, sa.ForeignKey("dpicl_plans.id"), primary_key=True),
    sa.Column("line", sa.String(255), primary_key=True),
    sa.Column("allowed", sa.BigInteger, nullable=False),
    sa.Column("spent", sa.BigInteger, nullable=False),
    sa.CheckConstraint("spent >= 0 AND spent <= allowed", name="never_over_spent"),
)
_releases = sa.Table(
    "dpicl_releases",
    _metadata,
    sa.Column("plan_id", sa.Integer, primary_key=True),
    sa.Column("line", sa.String(255), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("charged", sa.String(40), nullable=False),
    sa.Column("receipt", sa.Text),
    sqlite_with_rowid=False,  # rows are appended in key order: a charge touches two pages, whatever came before
)


@dataclass(frozen=True)
class Charge:
    """A durable charge: its plan and line, its number there (from 1), when it was made, and what the plan's other
    lines had spent by then (read in the same transaction)."""

    plan_id: int
    line: str
    number: int
    time: str
    others: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredPlan:
    """A plan as the ledger holds it."""

    id: int
    content: str


class Ledger:
    """One ledger, shared by threads, tasks and processes. Every fault of the database is a `LedgerError`."""

    def __init__(self, url: str) -> None:
        self._mutex: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._engine = self._create_engine(_parse(url))
        _open_ledgers.add(self)
        self._run(self._check_schema)

    def _create_engine(self, url: URL) -> Engine:
        if url.get_backend_name() != "sqlite":
            try:
                return sa.create_engine(url, pool_pre_ping=True)
            except (ImportError, SQLAlchemyError) as error:
                reason = type(error).__name__
            raise LedgerError(f"no driver for {url.drivername!r} ({reason}); install langchain-dpicl[postgres]")
        options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_SECONDS}}
        if not url.database or ":memory:" in url.database or "mode=memory" in str(url):
            warnings.warn(
                "this ledger lives in memory: what was spent is forgotten when the process ends",
                PrivacyWarning,
                stacklevel=4,
            )
            options = {"connect_args": {"check_same_thread": False}, "poolclass": StaticPool}
            self._mutex = threading.RLock()
        engine = sa.create_engine(url, **options)

        @sa.event.listens_for(engine, "connect")
        def _on_connect(connection: Any, _: Any) -> None:
            connection.isolation_level = None  # transactions are begun below, explicitly
            # One statement: a ledger that another worker is making is then seen before or after, not in between.
            cursor = connection.cursor()
            application, tables = cursor.execute(
                "SELECT application_id, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id"
            ).fetchone()
            if (tables or application) and application != _SQLITE_APPLICATION_ID:
                raise LedgerError(f"{url.database!r} is a database, but not a ledger; it was left as it is")
            _use_wal(cursor)
            cursor.execute("PRAGMA foreign_keys=ON")
            cursor.close()

        @sa.event.listens_for(engine, "begin")
        def _on_begin(connection: Connection) -> None:
            durable = connection.get_execution_options().get("dpicl_durable", True)
            connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            connection.exec_driver_sql("BEGIN IMMEDIATE")

        return engine

    def _run(self, work: Callable[[Connection], T], *, durable: bool = True) -> T:
        """One transaction. Database errors become `LedgerError`, without the statement and its values.

        On SQLite, one that is not ``durable`` is atomic and visible to all at once, but reaches the disk with the next
        durable one.
        """
        reason: str
        try:
            with self._mutex, self._engine.execution_options(dpicl_durable=durable).begin() as connection:
                return work(connection)
        except IntegrityError:
            reason = "its rows do not add up"
        except (SQLAlchemyError, sqlite3.Error) as error:
            reason = str(getattr(error, "orig", None) or type(error).__name__).splitlines()[0]
        raise LedgerError(f"the ledger {self._engine.url.render_as_string()!r} cannot be used: {reason}")

    def _check_schema(self, connection: Connection) -> None:
        sqlite = self._engine.dialect.name == "sqlite"
        tables = set(sa.inspect(connection).get_table_names()) & set(_metadata.tables)
        if tables and tables != set(_metadata.tables):
            raise LedgerError("the ledger has lost tables; restore it from a backup")
        if not tables:
            _metadata.create_all(connection)
            connection.execute(sa.insert(_meta).values(key="schema_version", value=str(SCHEMA_VERSION)))
            if sqlite:
                connection.exec_driver_sql(f"PRAGMA application_id={_SQLITE_APPLICATION_ID}")
        version = connection.scalar(sa.select(_meta.c.value).where(_meta.c.key == "schema_version"))
        if version != str(SCHEMA_VERSION):
            raise LedgerError(f"the ledger has schema version {version}; this release reads version {SCHEMA_VERSION}")

    # -- plans ------------------------------------------------------------------------------------------------------

    def find_plan(self, name: str) -> StoredPlan | None:
        """The plan under this name, if one is stored."""
        query = sa.select(_plans.c.id, _plans.c.content).where(_plans.c.name == name)
        row = self._run(lambda connection: connection.execute(query).one_or_none(), durable=False)
        return None if row is None else StoredPlan(row.id, row.content)

    def store_plan(self, name: str, content: str, digest: str, allowed: Mapping[str, int]) -> StoredPlan:
        """Freeze a plan under a name; if another worker was first, return what that one stored."""

        def insert(connection: Connection) -> None:
            if connection.scalar(sa.select(_plans.c.id).where(_plans.c.name == name)) is not None:
                return
            values = {"name": name, "content": content, "digest": digest, "created": _now()}
            plan_id = connection.scalar(sa.insert(_plans).values(values).returning(_plans.c.id))
            rows = [{"plan_id": plan_id, "line": line, "allowed": limit, "spent": 0} for line, limit in allowed.items()]
            connection.execute(sa.insert(_lines), rows)

        failure: LedgerError | None = None
        try:
            self._run(insert)
        except LedgerError as error:  # perhaps another worker stored its plan at the same moment
            failure = error
        stored = self.find_plan(name)
        if stored is None:
            raise failure or LedgerError("the plan could not be stored")
        return stored

    # -- charges ----------------------------------------------------------------------------------------------------

    def charge(self, plan_id: int, line: str, count: int, *, others: bool = False) -> list[Charge]:
        """Charge ``count`` releases, durably, all or none. An empty list means that fewer are left.

        With ``others`` each charge says what the plan's other lines have spent: the charges of a plan then wait for
        each other, so that no two of them miss one another.
        """
        now = _now()
        advance = (
            sa.update(_lines)
            .where(_lines.c.plan_id == plan_id, _lines.c.line == line, _lines.c.spent + count <= _lines.c.allowed)
            .values(spent=_lines.c.spent + count)
            .returning(_lines.c.spent)
        )
        queue = sa.select(_plans.c.id).where(_plans.c.id == plan_id).with_for_update()
        rest = sa.select(_lines.c.line, _lines.c.spent).where(_lines.c.plan_id == plan_id, _lines.c.line != line)

        def charge(connection: Connection) -> list[Charge]:
            if others:
                connection.execute(queue)
            spent = connection.scalar(advance)
            if spent is None:
                return []
            numbers = range(spent - count + 1, spent + 1)
            rows = [{"plan_id": plan_id, "line": line, "number": number, "charged": now} for number in numbers]
            connection.execute(sa.insert(_releases), rows)
            beside = {row.line: row.spent for row in connection.execute(rest)} if others else {}
            return [Charge(plan_id, line, number, now, beside) for number in numbers]

        return self._run(charge)

    def record(self, charge: Charge, receipt: str) -> None:
        """Keep a release's receipt. If the power fails just now, the charge stands and its receipt may be missing."""
        row = _row(charge.plan_id, charge.line, charge.number)
        update = sa.update(_releases).where(row).values(receipt=receipt)
        self._run(lambda connection: connection.execute(update), durable=False)

    def receipt(self, plan_id: int, line: str, number: int) -> str | None:
        """The receipt of a release, as it was recorded."""
        query = sa.select(_releases.c.receipt).where(_row(plan_id, line, number))
        found = self._run(lambda connection: connection.scalar(query), durable=False)
        return None if found is None else str(found)

    def spent(self, plan_id: int) -> dict[str, int]:
        """Releases spent on each line of a plan."""
        query = sa.select(_lines.c.line, _lines.c.spent).where(_lines.c.plan_id == plan_id)
        rows = self._run(lambda connection: connection.execute(query).all(), durable=False)
        if not rows:
            raise LedgerError("the ledger has lost this plan; restore it from a backup")
        return {row.line: row.spent for row in rows}

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def __repr__(self) -> str:
        return f"Ledger({self._engine.url.render_as_string()!r})"


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """Write-ahead logging. Switching to it ignores SQLite's own waiting for locks, so wait here."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        else:
            return
        time.sleep(0.01)


def _parse(url: object) -> URL:
    if isinstance(url, str):
        with contextlib.suppress(ArgumentError):
            return make_url(url)
    raise InvalidParameter("ledger", type(url).__name__, 'a database URL such as "sqlite:///budget.db"')


def _row(plan_id: int, line: str, number: int) -> sa.ColumnElement[bool]:
    columns = _releases.c
    return sa.and_(columns.plan_id == plan_id, columns.line == line, columns.number == number)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


_open_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _forget_connections_after_fork() -> None:
    """A child must not use its parent's connections; drop them without closing the parent's side."""
    for ledger in list(_open_ledgers):
        ledger._engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections_after_fork)
