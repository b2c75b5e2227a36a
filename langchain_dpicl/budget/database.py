"""Transactions on SQLite and PostgreSQL, with one meaning on both.

Every transaction is begun explicitly. SQLite runs in WAL mode; writers take the write lock when they begin, so threads
and processes queue. PostgreSQL runs at READ COMMITTED, whatever the server's default: a guarded ``UPDATE`` waits for
the row and looks at its guard again.

Three kinds: ``charge`` is on the disk before it returns (SQLite: synchronous FULL; PostgreSQL: synchronous_commit on);
``note`` is atomic and visible to all at once, but may reach the disk with the next charge; ``read`` writes nothing.

What failed before its ``COMMIT`` was sent did not happen, and is tried again where that can help (a deadlock, a
connection that was lost, a server that restarts). A charge's ``COMMIT`` whose answer was lost is never tried again: it
may have happened, so its caller gets a `LedgerError` and releases nothing, while the ledger counts what was written.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from langchain_dpicl.budget import schema
from langchain_dpicl.errors import InvalidParameter, LedgerError, PrivacyWarning

T = TypeVar("T")
Kind = Literal["charge", "note", "read"]

_BUSY_SECONDS = 60
_RETRY_SECONDS = 15.0
_AGAIN = {"40001", "40P01", "55P03", "57P01", "57P02", "57P03"}  # serialisation, deadlock, lock, server going or coming


class TryAgain(Exception):
    """Raised inside a transaction's work: roll back and run it again (another worker was faster)."""


class Database:
    """An engine, and transactions on it. Every fault of the database is a `LedgerError` without private text."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        self._mutex: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._writers: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._url = _parse(url)
        self._opened = False
        if not create and self._url.get_backend_name() == "sqlite":
            path = self._url.database or ""
            if not path.startswith("file:") and not os.path.exists(path):
                raise LedgerError(f"there is no ledger {self._url.render_as_string()!r}")
        self._engine = self._sqlite() if self._url.get_backend_name() == "sqlite" else self._postgresql()
        _open_databases.add(self)
        self.run(lambda connection: schema.open_schema(connection, create=create))
        self._opened = True

    # -- engines ----------------------------------------------------------------------------------------------------

    def _postgresql(self) -> Engine:
        if self._url.drivername != "postgresql+psycopg":
            raise LedgerError(
                f"a ledger is on sqlite:///FILE or postgresql+psycopg://..., not on {self._url.drivername!r}"
            )
        try:
            engine = sa.create_engine(self._url)
        except (ImportError, SQLAlchemyError) as error:
            reason = type(error).__name__
        else:

            @sa.event.listens_for(engine, "connect")
            def _on_connect(connection: Any, _: Any) -> None:
                connection.autocommit = True  # transactions are begun below, explicitly

            @sa.event.listens_for(engine, "begin")
            def _on_begin(connection: Connection) -> None:
                durable = _kind(connection) == "charge"
                _driver(connection).execute(
                    "BEGIN ISOLATION LEVEL READ COMMITTED; "  # one message to the server
                    f"SET LOCAL synchronous_commit TO {'on' if durable else 'off'}"
                )

            return engine
        raise LedgerError(f"no driver for {self._url.drivername!r} ({reason}); install langchain-dpicl[postgres]")

    def _sqlite(self) -> Engine:
        url = self._url
        options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_SECONDS}}
        if not url.database or ":memory:" in url.database or "mode=memory" in str(url):
            warnings.warn(
                "this ledger lives in memory: what was spent is forgotten when the process ends",
                PrivacyWarning,
                stacklevel=6,
            )
            options = {"connect_args": {"check_same_thread": False}, "poolclass": StaticPool}
            self._mutex = threading.RLock()
        # SQLite's writers wait for each other by looking again now and then; those of one process need not.
        self._writers = threading.RLock()
        engine = sa.create_engine(url, **options)

        @sa.event.listens_for(engine, "connect")
        def _on_connect(connection: Any, _: Any) -> None:
            connection.isolation_level = None  # transactions are begun below, explicitly
            # One statement: a ledger that another worker is making is then seen before or after, not in between.
            cursor = connection.cursor()
            application, tables = cursor.execute(
                "SELECT application_id, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id"
            ).fetchone()
            if (tables or application) and application != schema.SQLITE_APPLICATION_ID:
                raise LedgerError(f"{url.database!r} is a database, but not a ledger; it was left as it is")
            _use_wal(cursor)
            cursor.execute("PRAGMA foreign_keys=ON")
            cursor.close()

        @sa.event.listens_for(engine, "begin")
        def _on_begin(connection: Connection) -> None:
            kind, driver = _kind(connection), _driver(connection)
            if kind != "read" and connection.info.get("synchronous") != kind:
                driver.execute(f"PRAGMA synchronous={'FULL' if kind == 'charge' else 'NORMAL'}")
                connection.info["synchronous"] = kind
            driver.execute("BEGIN" if kind == "read" else "BEGIN IMMEDIATE")

        return engine

    # -- transactions -----------------------------------------------------------------------------------------------

    def run(self, work: Callable[[Connection], T], kind: Kind = "charge") -> T:
        """One transaction. What `work` raises itself rolls back and surfaces as it is.

        ``work`` may run more than once, always after a rollback, so it must have no effect beside its statements.
        """
        deadline = time.monotonic() + _RETRY_SECONDS
        pause = 0.002
        while True:
            reason, again = "", False
            try:
                return self._once(work, kind)
            except TryAgain:
                reason, again = "other workers were faster, again and again", True
            except (IntegrityError, self._engine.dialect.loaded_dbapi.IntegrityError):
                reason = "its rows do not add up"
            except _CommitUnknown as lost:
                reason = f"{lost.args[0]} (whether the last transaction took place is not known; if so, it counts)"
            except (SQLAlchemyError, sqlite3.Error, self._engine.dialect.loaded_dbapi.Error) as error:
                reason = _reason(error)
                again = self._opened and _may_work_again(error)
            if not again or time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        raise LedgerError(f"the ledger {self._url.render_as_string()!r} cannot be used: {reason}")

    def _once(self, work: Callable[[Connection], T], kind: Kind) -> T:
        turn = contextlib.nullcontext() if kind == "read" else self._writers
        with self._mutex, turn, self._engine.connect() as plain:
            connection = plain.execution_options(dpicl_kind=kind)
            try:
                transaction = connection.begin()
                answer = work(connection)
            except BaseException as error:
                _drop_if_broken(connection, error)
                raise
            try:
                transaction.commit()
            except Exception as error:
                if getattr(error, "orig", None) is not None and _state(error) in {"40001", "40P01"}:
                    raise TryAgain from None  # the server says that it was rolled back
                _drop_if_broken(connection, error)
                if kind != "charge" and _may_work_again(error):
                    raise TryAgain from None  # reading or noting the same twice changes nothing
                failure = _CommitUnknown(_reason(error))
            else:
                return answer
        raise failure

    @property
    def is_sqlite(self) -> bool:
        """Whether writers are alone from the moment they begin."""
        return self._engine.dialect.name == "sqlite"

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def __repr__(self) -> str:
        return f"Ledger({self._url.render_as_string()!r})"


class _CommitUnknown(Exception):
    """The database did not answer a COMMIT."""


def _kind(connection: Connection) -> Kind:
    kind: Kind = connection.get_execution_options().get("dpicl_kind", "charge")
    return kind


def _driver(connection: Connection) -> Any:
    """The driver's own connection: what it raises is handled in `Database.run` as well."""
    return connection.connection.driver_connection


def _state(error: BaseException) -> str:
    """PostgreSQL's code of an error, if it has one."""
    return str(getattr(getattr(error, "orig", None) or error, "sqlstate", None) or "")


def _reason(error: BaseException) -> str:
    """One line from the driver: never the statement and its values."""
    origin = getattr(error, "orig", None) or error
    words = "" if isinstance(origin, SQLAlchemyError) else str(origin)
    return (words.splitlines() or [type(error).__name__])[0]


def _may_work_again(error: BaseException) -> bool:
    """Whether a transaction that was not committed may succeed on another try."""
    origin = getattr(error, "orig", None) or error
    if isinstance(origin, sqlite3.Error):
        return False  # SQLite has waited for its locks already
    state = _state(error)
    lost = type(origin).__name__ in ("OperationalError", "AdminShutdown", "InterfaceError") and not state
    return state in _AGAIN or state.startswith("08") or lost


def _drop_if_broken(connection: Connection, error: BaseException) -> None:
    """A connection that the server has closed must not go back to the pool."""
    with contextlib.suppress(Exception):
        driver = connection.connection.driver_connection
        if not isinstance(error, Exception) or getattr(driver, "closed", False) or getattr(driver, "broken", False):
            connection.invalidate()


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
            parsed = make_url(url)
            if parsed.drivername in ("postgresql", "postgres"):
                parsed = parsed.set(drivername="postgresql+psycopg")
            return parsed
    raise InvalidParameter("ledger", type(url).__name__, 'a database URL such as "sqlite:///budget.db"')


_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()


def _forget_connections_after_fork() -> None:
    """A child must not use its parent's connections; drop them without closing the parent's side."""
    for database in list(_open_databases):
        database._engine.dispose(close=False)
        if database.is_sqlite:
            database._writers = threading.RLock()  # a thread that the child lacks may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections_after_fork)
