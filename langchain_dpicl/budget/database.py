"""Transactions on SQLite and PostgreSQL, with one meaning on both.

Every transaction is begun explicitly. SQLite runs in WAL mode; writers take the write lock when they begin, so threads
and processes queue. PostgreSQL runs at READ COMMITTED, whatever the server's default: a guarded ``UPDATE`` waits for
the row and looks at its guard again.

Three kinds: ``charge`` is on the disk before it returns (SQLite: synchronous FULL; PostgreSQL: synchronous_commit on);
``note`` is atomic and visible to all at once, but may reach the disk with the next charge; ``read`` writes nothing.

What failed before its ``COMMIT`` was sent did not happen, and is tried again where that can help (a deadlock, a
connection that was lost, a server that restarts). A charge's ``COMMIT`` whose answer was lost is never tried again: it
may have happened, so its caller gets a `CommitUnknown` and releases nothing, while the ledger counts what was written.

A SQLite database must stay the file that was opened. Before every transaction the path is looked up (one ``stat`` for
the file and one for its log): where it names another file, or none, the transaction is refused.

SQLite's connections do not survive a fork, and no table of its locks may: a child that inherits one believes that it
holds locks which are its parent's. So before a fork every open SQLite database waits until no transaction is open, and
closes its connections. Each side opens its own when it needs one.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import urllib.parse
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from langchain_dpicl.budget import schema
from langchain_dpicl.budget.schema import ADVICE
from langchain_dpicl.errors import InvalidParameter, LedgerError, PrivacyWarning

T = TypeVar("T")
Kind = Literal["charge", "note", "read"]

_BUSY_SECONDS = 60
_SQLITE_SAID_NO = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)
_SQLITE_OPTIONS = {"mode", "cache", "uri", "immutable", "nolock", "psow", "vfs", "timeout", "check_same_thread"}
_RETRY_SECONDS = 15.0
_FORK_SECONDS = 10.0
_AGAIN = {"40001", "40P01", "55P03", "57P01", "57P02", "57P03"}  # serialisation, deadlock, lock, server going or coming


class TryAgain(Exception):
    """Raised inside a transaction's work: roll back and run it again (another worker was faster)."""


class CommitUnknown(LedgerError):
    """The database did not answer the ``COMMIT`` of a charge: it may have happened."""


class Database:
    """An engine, and transactions on it. Every fault of the database is a `LedgerError` without private text."""

    noun = "ledger"
    application_id = schema.SQLITE_APPLICATION_ID
    journal = "WAL"
    options: Mapping[str, Any] = {}
    """For PostgreSQL's engine."""

    def __init__(self, url: str) -> None:
        self._mutex: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._writers: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._url = _parse(url, self.noun.rpartition(" ")[2])
        self._path = _path(self._url)
        self._opened = False
        self._gate = threading.RLock()  # held while the process forks
        self._busy: list[None] = []  # one for each transaction that is open
        self._file: tuple[int, int] | None = None
        self._engine = self._sqlite() if self._url.get_backend_name() == "sqlite" else self._postgresql()
        _open_databases.add(self)

    # -- engines ----------------------------------------------------------------------------------------------------

    def _postgresql(self) -> Engine:
        if self._url.drivername != "postgresql+psycopg":
            raise LedgerError(
                f"a {self.noun} is on sqlite:///FILE or postgresql+psycopg://..., not on {self._url.drivername!r}"
            )
        try:
            engine = sa.create_engine(self._url, **self.options)
        except (ImportError, SQLAlchemyError) as error:
            reason = type(error).__name__
        else:
            me = weakref.proxy(self)  # a ledger that nobody uses any more is left at once

            @sa.event.listens_for(engine, "connect")
            def _on_connect(connection: Any, _: Any) -> None:
                connection.autocommit = True  # transactions are begun below, explicitly
                me._on_postgresql(connection)

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
        if self._path is not None and (url.database or "").startswith("file:"):
            url = url.set(database=f"file:{urllib.parse.quote(self._path)}")
        options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_SECONDS}}
        if self._path is None:
            warnings.warn(
                "this ledger lives in memory: what was spent is forgotten when the process ends",
                PrivacyWarning,
                stacklevel=7,
            )
            options = {"connect_args": {"check_same_thread": False}, "poolclass": StaticPool}
            self._mutex = threading.RLock()
        # SQLite's writers wait for each other by looking again now and then; those of one process need not.
        self._writers = threading.RLock()
        engine = sa.create_engine(url, **options)
        me = weakref.proxy(self)

        @sa.event.listens_for(engine, "connect")
        def _on_connect(connection: Any, record: Any) -> None:
            connection.isolation_level = None  # transactions are begun below, explicitly
            # One statement: a ledger that another worker is making is then seen before or after, not in between.
            cursor = connection.cursor()
            application, tables = cursor.execute(
                "SELECT application_id, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id"
            ).fetchone()
            if (tables or application) and application != me.application_id:
                raise LedgerError(f"{url.database!r} is a database, but not a {me.noun}; it was left as it is")
            _use_journal(cursor, me.journal)
            cursor.execute("PRAGMA foreign_keys=ON")
            if me._path is not None and me.journal == "WAL":
                cursor.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from here on it holds its log
                log = f"{os.path.realpath(me._path)}-wal"  # SQLite follows links, and has its log beside the file
                record.info["log"] = log, place_of(log)
            cursor.close()

        @sa.event.listens_for(engine, "begin")
        def _on_begin(connection: Connection) -> None:
            kind, driver = _kind(connection), _driver(connection)
            if kind != "read" and connection.info.get("synchronous") != kind:
                driver.execute(f"PRAGMA synchronous={'FULL' if kind == 'charge' else 'NORMAL'}")
                connection.info["synchronous"] = kind
            driver.execute("BEGIN" if kind == "read" else "BEGIN IMMEDIATE")
            me._check_file(connection)

        return engine

    def _on_postgresql(self, connection: Any) -> None:
        """What a new session does first."""

    def _check_file(self, connection: Connection) -> None:
        """`LedgerError` where the path names another file than the one that was opened, or its log is another one.

        SQLite removes the log when the last connection of all processes is closed, so while this one is open the log
        is the one that it has.
        """
        if self._path is None:
            return
        found = place_of(self._path)
        if self._file is None:
            self._file = found
        log = connection.info.get("log")
        if found is None or found != self._file or (log is not None and place_of(log[0]) != log[1]):
            raise LedgerError(
                f"the {self.noun} {self.shown!r} was deleted or replaced since this process opened it: nothing was "
                f"charged; {ADVICE}"
            )

    # -- transactions -----------------------------------------------------------------------------------------------

    def run(self, work: Callable[[Connection], T], kind: Kind = "charge") -> T:
        """One transaction. What `work` raises itself rolls back and surfaces as it is.

        ``work`` may run more than once, always after a rollback, so it must have no effect beside its statements.
        """
        deadline = time.monotonic() + _RETRY_SECONDS
        pause = 0.002
        while True:
            reason, again, unknown = "", False, False
            try:
                return self._once(work, kind)
            except TryAgain:
                reason, again = "other workers were faster, again and again", True
            except (IntegrityError, self._engine.dialect.loaded_dbapi.IntegrityError):
                reason = "its rows do not add up"
            except _CommitUnknown as lost:
                reason = f"{lost.args[0]} (whether the last transaction took place is not known; if so, it counts)"
                unknown = True
            except (SQLAlchemyError, sqlite3.Error, self._engine.dialect.loaded_dbapi.Error) as error:
                reason = _reason(error)
                again = self._opened and _may_work_again(error)
            if not again or time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        kind_of_error = CommitUnknown if unknown else LedgerError
        raise kind_of_error(f"the {self.noun} {self.shown!r} cannot be used: {reason}")

    def _once(self, work: Callable[[Connection], T], kind: Kind) -> T:
        turn = contextlib.nullcontext() if kind == "read" else self._writers
        with self.using(), self._mutex, turn, self._engine.connect() as plain:
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
                if getattr(getattr(error, "orig", None), "sqlite_errorcode", None) in _SQLITE_SAID_NO:
                    raise  # it was rolled back
                _drop_if_broken(connection, error)
                if kind != "charge" and _may_work_again(error):
                    raise TryAgain from None  # reading or noting the same twice changes nothing
                failure = _CommitUnknown(_reason(error))
            else:
                return answer
        raise failure

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """While a connection is used: the process does not fork."""
        with self._gate:
            self._busy.append(None)
        try:
            yield
        finally:
            self._busy.pop()

    def before_fork(self) -> None:
        """Let nobody use a connection, and close SQLite's."""
        self._gate.acquire()
        if self.is_sqlite and self._path is not None:
            deadline = time.monotonic() + _FORK_SECONDS
            while self._busy and time.monotonic() < deadline:  # after that the child is refused, and nothing is lost
                time.sleep(0.0005)
            self._engine.dispose()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._gate.release()

    def after_fork(self) -> None:
        """In a child: its parent's connections are not used, and not closed on the parent's side."""
        self._gate, self._busy = threading.RLock(), []
        self._engine.dispose(close=False)
        if self.is_sqlite:
            self._writers = threading.RLock()  # a thread that the child lacks may have held it

    @property
    def is_sqlite(self) -> bool:
        """Whether writers are alone from the moment they begin."""
        return self._engine.dialect.name == "sqlite"

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()
        self._file = None

    @property
    def shown(self) -> str:
        """The address without a password, wherever it stands."""
        return shown(self._url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"


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


def _use_journal(cursor: sqlite3.Cursor, mode: str) -> None:
    """Set the journal's mode. Switching it ignores SQLite's own waiting for locks, so wait here."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            cursor.execute(f"PRAGMA journal_mode={mode}")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        else:
            return
        time.sleep(0.01)


def _parse(url: object, parameter: str) -> URL:
    if isinstance(url, str):
        with contextlib.suppress(ArgumentError, ValueError):
            parsed = make_url(url)
            if parsed.drivername in ("postgresql", "postgres"):
                parsed = parsed.set(drivername="postgresql+psycopg")
            return parsed
    raise InvalidParameter(parameter, type(url).__name__, 'a database URL such as "sqlite:///budget.db"')


def _path(url: URL) -> str | None:
    """The file of a SQLite database; None for one in memory, and for PostgreSQL."""
    path = url.database or ""
    if url.get_backend_name() != "sqlite" or not path or ":memory:" in path or "mode=memory" in str(url):
        return None
    if path.startswith("file:"):
        path = urllib.parse.unquote(path.removeprefix("file:").partition("?")[0])
        path = f"/{path.lstrip('/')}" if path.startswith("//") else path
    return os.path.abspath(path)  # a process may change its directory


def place_of(path: str) -> tuple[int, int] | None:
    """Which file a path names: device and inode. None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def shown(url: str | URL) -> str:
    """A database's address as it may be printed: no password, and of its options only those that can hold none."""
    if isinstance(url, str):
        try:
            url = make_url(url)
        except (ArgumentError, ValueError):
            return "an address that cannot be read"
    query = {key: value if key in _SQLITE_OPTIONS else "***" for key, value in url.query.items()}
    return url.set(query=query if url.get_backend_name() == "sqlite" else {}).render_as_string(hide_password=True)


_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()


_forks = threading.Lock()  # one at a time
_forking: list[Database] = []


def _before_fork() -> None:
    _forks.acquire()
    # Ledgers before witnesses: a transaction on a ledger may still need its witness.
    _forking[:] = sorted(_open_databases, key=lambda database: database.journal != "WAL")
    for database in _forking:
        database.before_fork()


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop().after_fork_in_parent()
    _forks.release()


def _after_fork() -> None:
    _forking.clear()
    for database in list(_open_databases):
        database.after_fork()
    _forks.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
