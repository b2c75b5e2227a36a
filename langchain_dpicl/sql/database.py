"""Transactions on SQLite and PostgreSQL, with one meaning on both.

Every transaction is begun explicitly. SQLite runs in WAL mode; writers take the write lock when they begin, so threads
and processes queue. PostgreSQL runs at READ COMMITTED, whatever the server's default: a guarded ``UPDATE`` waits for
the row and looks at its guard again.

Three kinds: ``charge`` is on the disk before it returns (SQLite: synchronous FULL; PostgreSQL: synchronous_commit on);
``note`` is atomic and visible to all at once, but may reach the disk with the next charge; ``read`` writes nothing.

A transaction that failed before its ``COMMIT`` was sent did not happen. It runs again if that can help (a deadlock, a
lost connection, a server that restarts). A charge whose ``COMMIT`` got no answer never runs again, because it may have
happened: its caller gets a `LedgerError` and releases nothing, while the ledger counts what was written.

A SQLite database must stay the file that was opened. Every transaction looks up the path first (one ``stat`` for the
file and one for its log) and is refused if it names another file, or none.

What was opened before a fork is the parent's: a child that uses it gets a `LedgerError`, and opens its own. On SQLite a
child that inherits a connection believes that it holds its parent's locks, in the connections that it opens itself as
well. So before a fork every open SQLite database waits until no transaction is open, and closes its connections. The
parent opens new ones when it needs them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from langchain_dpicl.errors import LedgerError, PrivacyWarning
from langchain_dpicl.sql import address

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound="Database")
Kind = Literal["charge", "note", "read"]

_BUSY_SECONDS = 60
_FIRST_LOOK = 0.0003
_LAST_LOOK = 0.005
_RETRY_SECONDS = 15.0
_FORK_SECONDS = 10.0
_FORKED = "the budget was opened before this process was forked: open it in the worker; nothing was charged"
_SYNCHRONOUS = {"charge": "FULL", "note": "NORMAL"}  # of SQLite
_SYNCHRONOUS_COMMIT = {"charge": "on", "note": "off", "read": "off"}  # of PostgreSQL
_SQLITE_SAID_NO = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)
_ROLLED_BACK = {"40001", "40P01"}  # serialisation, deadlock
_AGAIN = {*_ROLLED_BACK, "55P03", "57P01", "57P02", "57P03"}  # lock, server going or coming


def _nothing() -> None: ...


class TryAgain(Exception):
    """Raised in a transaction: roll back, call ``repair`` outside of any transaction, and run it again."""

    def __init__(
        self,
        reason: str = "other workers were faster, again and again",
        repair: Callable[[], object] = _nothing,
    ) -> None:
        super().__init__(reason)
        self.repair = repair


def insert(connection: Connection, table: sa.Table, rows: Any) -> None:
    """Insert a row or several. Raises `TryAgain` if another worker was faster."""
    try:
        connection.execute(sa.insert(table), rows)
    except IntegrityError:
        raise TryAgain from None


def transaction(
    kind: Kind = "charge",
) -> Callable[[Callable[Concatenate[D, Connection, P], T]], Callable[Concatenate[D, P], T]]:
    """Make a method one transaction (see `Database.run`), whose connection it gets as its first argument."""

    def decorate(method: Callable[Concatenate[D, Connection, P], T]) -> Callable[Concatenate[D, P], T]:
        @functools.wraps(method)
        def run(self: D, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return self.run(lambda connection: method(self, connection, *args, **kwargs), kind)

        return run

    return decorate


_forks_behind = 0
"""The forks between the first process and this one: beside its number, as a system uses numbers again."""


class OwnLock:
    """A lock of this process. In a child of a fork nobody would release it: there `LedgerError` is raised."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = (os.getpid(), _forks_behind)

    def __enter__(self) -> None:
        if self._process != (os.getpid(), _forks_behind):
            raise LedgerError(_FORKED)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Database:
    """An engine, and transactions on it. Every fault of the database is a `LedgerError` without private text."""

    noun = "ledger"
    application_id = 0  # of SQLite's file
    advice = ""  # for one that was lost
    journal = "WAL"
    options: Mapping[str, Any] = {}  # for PostgreSQL's engine

    def __init__(self, url: str) -> None:
        self.url = address.parse(url, self.noun.rpartition(" ")[2], "sqlite:///budget.db")
        self.path = address.sqlite_path(self.url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.is_in_memory = self.is_sqlite and self.path is None  # it ends with this process
        self.opened = False  # True once it worked: a lost connection is tried again from then on
        self._process = (os.getpid(), _forks_behind)
        # SQLite's writers wait for each other by looking again now and then; those of one process need not.
        self._writers: Any = threading.RLock() if self.is_sqlite else contextlib.nullcontext()
        self._gate = threading.RLock()  # held while the process forks
        self._busy: list[None] = []  # one for each transaction that is open
        self._file: tuple[int, int] | None = None
        self._engine = self._new_engine()
        me = weakref.proxy(self)  # a ledger that nobody uses any more is left at once
        sa.event.listen(self._engine, "connect", lambda connection, record: me._on_connect(connection, record))
        driver = self._engine.dialect.loaded_dbapi
        self._contradictions = (IntegrityError, driver.IntegrityError)
        self._faults = (SQLAlchemyError, sqlite3.Error, driver.Error)
        _open_databases.add(self)

    def _new_engine(self) -> Engine:
        if not self.is_sqlite:
            if (driver := self.url.drivername) != "postgresql+psycopg":
                raise LedgerError(f"a {self.noun} is on sqlite:///FILE or postgresql+psycopg://..., not on {driver!r}")
            return address.postgresql_engine(self.url, LedgerError, **self.options)
        if self.path is None:
            warnings.warn(
                "this ledger lives in memory: what was spent is forgotten when the process ends",
                PrivacyWarning,
                stacklevel=7,
            )
            return sa.create_engine(self.url, connect_args={"check_same_thread": False}, poolclass=StaticPool)
        url = self.url
        if (url.database or "").startswith("file:"):
            url = url.set(database=f"file:{quote(self.path)}")
        return sa.create_engine(url, connect_args={"timeout": _BUSY_SECONDS})

    def _on_connect(self, connection: Any, record: Any) -> None:
        """Prepare a new connection to SQLite. `LedgerError` if the file is another program's."""
        if not self.is_sqlite:
            return
        connection.isolation_level = None  # transactions are begun explicitly
        cursor = connection.cursor()
        # One statement: a ledger that another worker is making is then seen before or after, not in between.
        application, tables = cursor.execute(
            "SELECT application_id, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id"
        ).fetchone()
        if (tables or application) and application != self.application_id:
            raise LedgerError(f"{self.url.database!r} is a database, but not a {self.noun}; it was left as it is")
        _when_free(connection, f"PRAGMA journal_mode={self.journal}")  # for which SQLite itself does not wait
        cursor.execute("PRAGMA foreign_keys=ON")
        if self.path is not None and self.journal == "WAL":
            cursor.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from here on it holds its log
            log = f"{os.path.realpath(self.path)}-wal"  # SQLite follows links, and has its log beside the file
            record.info["log"] = log, place_of(log)
        cursor.close()

    def _check(self) -> None:
        """Raise an error if nothing may run here."""

    # -- transactions -----------------------------------------------------------------------------------------------

    def run(
        self,
        work: Callable[[Connection], T],
        kind: Kind = "charge",
        *,
        rolled_back: Callable[[], None] = _nothing,
    ) -> T:
        """Run one transaction. An exception of ``work`` rolls back and surfaces unchanged.

        ``work`` may run more than once, always after a rollback. Apart from its statements it may only do what
        ``rolled_back`` undoes: this is called after each try that certainly did not happen.
        """
        self._check()
        deadline = time.monotonic() + _RETRY_SECONDS
        pause = 0.002
        while True:
            repair: Callable[[], object] | None = None  # None: do not try again
            try:
                return self._once(work, kind)
            except address.CommitLost as lost:
                reason = f"{lost.args[0]} (whether the last transaction took place is not known; if so, it counts)"
            except Exception as error:
                rolled_back()
                if isinstance(error, TryAgain):
                    reason = str(error)
                    repair = error.repair
                elif isinstance(error, self._contradictions):
                    reason = "its rows do not add up"
                elif isinstance(error, self._faults):
                    reason = address.reason(error)
                    if self.opened and _may_work_again(error):
                        repair = _nothing
                else:
                    raise
            if repair is None or time.monotonic() > deadline:
                break
            repair()
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        raise LedgerError(f"the {self.noun} {self.shown!r} cannot be used: {reason}")

    def _once(self, work: Callable[[Connection], T], kind: Kind) -> T:
        turn = self._writers if kind != "read" or self.path is None else contextlib.nullcontext()
        with self.using(), turn, self._engine.connect() as connection:
            try:
                transaction = connection.begin()
                self._begin(connection, kind)
                answer = work(connection)
            except BaseException as error:
                _drop_if_broken(connection, error)
                raise
            try:
                transaction.commit()
            except Exception as error:
                origin = getattr(error, "orig", None)
                if origin is not None and address.sqlstate(error) in _ROLLED_BACK:
                    raise TryAgain from None  # the server says so
                if getattr(origin, "sqlite_errorcode", None) in _SQLITE_SAID_NO:
                    driver: Any = connection.connection.driver_connection
                    driver.rollback()  # a COMMIT that found the file busy leaves its transaction open
                    raise
                _drop_if_broken(connection, error)
                if kind != "charge" and _may_work_again(error):
                    raise TryAgain from None  # reading or noting the same twice changes nothing
                failure = address.CommitLost(address.reason(error))
            else:
                return answer
        raise failure

    def _begin(self, connection: Connection, kind: Kind) -> None:
        """Begin a transaction of this kind.

        `LedgerError` if SQLite's path names another file than the one that was opened, or if its log is another one.
        SQLite removes the log when the last connection of all processes is closed, so the log stays the same one
        while this connection is open.
        """
        driver: Any = connection.connection.driver_connection
        if not self.is_sqlite:
            driver.execute(
                "BEGIN ISOLATION LEVEL READ COMMITTED; "  # one message to the server
                f"SET LOCAL synchronous_commit TO {_SYNCHRONOUS_COMMIT[kind]}"
            )
            return
        if kind == "read":
            _wait(driver, _BUSY_SECONDS)
            driver.execute("BEGIN")
        else:
            if connection.info.get("synchronous") != kind:
                driver.execute(f"PRAGMA synchronous={_SYNCHRONOUS[kind]}")
                connection.info["synchronous"] = kind
            _when_free(driver, "BEGIN IMMEDIATE")
        if self.path is None:
            return
        found = place_of(self.path)
        if self._file is None:
            self._file = found
        log = connection.info.get("log")
        if found is None or found != self._file or (log is not None and place_of(log[0]) != log[1]):
            raise LedgerError(
                f"the {self.noun} {self.shown!r} was deleted or replaced since this process opened it: nothing was "
                f"charged; {self.advice}"
            )

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keep the process from forking while a connection is used.

        `LedgerError` if the connections are its parent's.
        """
        if self._process != (os.getpid(), _forks_behind):
            raise LedgerError(_FORKED)
        with self._gate:
            self._busy.append(None)
        try:
            yield
        finally:
            self._busy.pop()

    @property
    def inherited(self) -> bool:
        """True if it was opened before this process was forked."""
        return self._process != (os.getpid(), _forks_behind)

    def close(self) -> None:
        """Close the connections, unless they are the parent's."""
        if self.inherited:
            return
        self._engine.dispose()
        self._file = None

    @property
    def shown(self) -> str:
        """The address without a password, wherever it stands."""
        return address.shown(self.url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"


def _when_free(driver: Any, statement: str) -> None:
    """Run a statement that needs a lock.

    SQLite's own waiting looks again after 1, 2, 5 and up to 100 ms, and a lock is held for less than one: this looks
    often.
    """
    deadline = time.monotonic() + _BUSY_SECONDS
    pause = _FIRST_LOOK
    _wait(driver, 0)
    try:
        while True:
            try:
                driver.execute(statement)
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(pause)
            pause = min(1.2 * pause, _LAST_LOOK)
    finally:
        _wait(driver, _BUSY_SECONDS)


def _wait(driver: Any, seconds: float) -> None:
    """Let SQLite wait so long for a lock. An interrupt may leave a connection at 0, so each transaction says it."""
    driver.execute(f"PRAGMA busy_timeout={int(1000 * seconds)}")


def _may_work_again(error: BaseException) -> bool:
    """True if a transaction that was not committed may succeed on another try."""
    origin = getattr(error, "orig", None) or error
    if isinstance(origin, sqlite3.Error):
        return False  # SQLite has waited for its locks already
    state = address.sqlstate(error)
    if not state:  # the connection was lost
        return type(origin).__name__ in ("OperationalError", "AdminShutdown", "InterfaceError")
    return state in _AGAIN or state.startswith("08")


def _drop_if_broken(connection: Connection, error: BaseException) -> None:
    """A connection that the server has closed must not go back to the pool."""
    with contextlib.suppress(Exception):
        driver = connection.connection.driver_connection
        if not isinstance(error, Exception) or getattr(driver, "closed", False) or getattr(driver, "broken", False):
            connection.invalidate()


def place_of(path: str) -> tuple[int, int] | None:
    """The file that a path names: device and inode. None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


# -- forks -----------------------------------------------------------------------------------------------------------

_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_forks = threading.Lock()  # one at a time
_forking: list[Database] = []


def _before_fork() -> None:
    _forks.acquire()
    # Ledgers before witnesses: a transaction on a ledger may still need its witness.
    files = [each for each in _open_databases if each.is_sqlite and each.path is not None and not each.inherited]
    _forking[:] = sorted(files, key=lambda database: database.journal != "WAL")
    for database in _forking:
        database._gate.acquire()  # nobody uses a connection from now on
        deadline = time.monotonic() + _FORK_SECONDS
        while database._busy and time.monotonic() < deadline:  # after that the child is refused: nothing is lost
            time.sleep(0.0005)
        database._engine.dispose()


def _after_fork() -> None:
    while _forking:
        _forking.pop()._gate.release()
    _forks.release()


def _after_fork_in_child() -> None:
    global _forks_behind
    _forks_behind += 1
    for database in list(_open_databases):
        database.close()  # its connections are the parent's and stay; a witness lets go of its lock
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
