"""Transactions on SQLite and PostgreSQL, with one meaning on both.

Every transaction is begun explicitly. SQLite runs in WAL mode; writers take the write lock when they begin, so threads
and processes queue. PostgreSQL runs at READ COMMITTED, whatever the server's default: a guarded ``UPDATE`` waits for
the row and looks at its guard again.

Four kinds: ``charge`` is on the disk before it returns (SQLite: synchronous FULL; PostgreSQL: synchronous_commit on);
``note`` is atomic and visible to all at once, but may reach the disk with the next charge; ``read`` writes nothing; a
``moment`` writes nothing either, and all its statements see the same moment.

A transaction that failed before its ``COMMIT`` was sent did not happen. It runs again if that can help: after a
deadlock, a lost connection, on a server that restarts, on one that can only be read because another one has taken over.
A charge whose ``COMMIT`` got no answer never runs again, because it may have happened: its caller gets a `LedgerError`
and releases nothing, while the ledger counts what was written.

No wait is without end. On PostgreSQL a statement waits 15 s for a lock, and 20 s for the server's next word; a new
connection has 10 s. A session whose process does nothing within a transaction for 30 s is ended by the server, which
lets its locks go. A transaction is tried again until 15 s after it first failed, so it ends within about a minute,
whatever the network does. After one lost session all idle ones are closed, and so is a session that can only read.

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
import math
import os
import re
import sqlite3
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, TypeGuard, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import QueuePool, StaticPool

from langchain_dpicl.errors import DPICLError, LedgerError, PrivacyWarning
from langchain_dpicl.sql import address, faults
from langchain_dpicl.sql.faults import CommitLost, TryAgain
from langchain_dpicl.sql.postgresql import postgresql_engine

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound="Database")
Kind = Literal["charge", "note", "read", "moment"]
Place = tuple[int, int]
"""A file: its device and inode."""

NAME = "a string of 1 to 255 characters, none of them NUL or half of a surrogate pair"
_BUSY_SECONDS = 60
_READERS_SECONDS = 1
_WAIT = f"PRAGMA busy_timeout={1000 * _BUSY_SECONDS}"
_NO_WAIT = "PRAGMA busy_timeout=0"
_FIRST_LOOK = 0.0003
_LAST_LOOK = 0.005
_FORK_SECONDS = 10.0
_FORKED = "the budget was opened before this process was forked: open it in the worker; nothing was charged"
_READING = ("read", "moment")
_SYNCHRONOUS = {"charge": "FULL", "note": "NORMAL"}  # of SQLite
_SYNCHRONOUS_COMMIT = {"charge": "on", "note": "off", "read": "off", "moment": "off"}  # of PostgreSQL
_ISOLATION = {"moment": "REPEATABLE READ, READ ONLY"}  # of PostgreSQL
_SQLITE_SAID_NO = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)


def is_name(value: object) -> TypeGuard[str]:
    """True for a text of 1 to 255 characters that every database can keep as it is."""
    return isinstance(value, str) and 0 < len(value) <= 255 and not re.search("[\0\ud800-\udfff]", value)


def insert(connection: Connection, table: sa.Table, rows: Any) -> None:
    """Insert a row or several. Raises `TryAgain` if another worker was faster."""
    try:
        connection.execute(sa.insert(table), rows)
    except IntegrityError:
        raise TryAgain from None


def direct(connection: Connection, statement: str, *rows: Mapping[str, object], **cursor_options: Any) -> Any:
    """Run a statement once for each row, by the driver itself, whose own errors it raises.

    For what must be quick: SQLAlchemy's own work on a statement takes longer than a fast disk's commit. Parameters
    are written ``:name``.
    """
    cursor = connection.connection.cursor(**cursor_options)
    text = statement if connection.dialect.name == "sqlite" else for_psycopg(statement)
    if len(rows) == 1:
        cursor.execute(text, rows[0])
    else:
        cursor.executemany(text, rows)
    return cursor


@functools.cache
def for_psycopg(statement: str) -> str:
    """A statement with its parameters as psycopg writes them."""
    return re.sub(r":(\w+)", r"%(\1)s", statement)


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


class OwnLock:
    """A lock of this process. In a child of a fork nobody would release it: there `LedgerError` is raised."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = _this_process()

    def __enter__(self) -> None:
        if self._process != _this_process():
            raise LedgerError(_FORKED)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Database:
    """An engine, and transactions on it. Every fault of the database is its ``error``, without private text."""

    noun = "ledger"
    error: ClassVar[type[DPICLError]] = LedgerError
    replaced: ClassVar[type[DPICLError]] = LedgerError  # the file is another one now
    unharmed = "nothing was charged"
    example = "sqlite:///budget.db"
    parameter: ClassVar[str] = ""  # its address's name where it is given; default: the last word of the noun
    may_fork: ClassVar[bool] = False  # True if a child of a fork may go on with it
    application_id = 0  # of SQLite's file
    page_size: ClassVar[int] = 4096  # of a new one, in bytes
    advice = ""  # for one that was lost
    is_nested = False  # True if its transactions run within another database's
    options: Mapping[str, Any] = {}  # for PostgreSQL's engine
    lock_seconds: ClassVar[float] = 15
    answer_seconds: ClassVar[float] = 20  # of silence; more than a wait for a lock
    idle_seconds: ClassVar[float] = 30  # within a transaction; more than the silence of a witness
    retry_seconds: ClassVar[float] = 15  # from the first failure on

    def __init__(self, url: str | URL) -> None:
        self.url = address.parse(url, self.parameter or self.noun.rpartition(" ")[2], self.example)
        self.path = address.sqlite_path(self.url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.is_in_memory = self.is_sqlite and self.path is None  # it ends with this process
        self.opened = False  # True once it worked: a lost connection is tried again from then on
        self._process = _this_process()
        # SQLite's writers wait for each other by looking again now and then; those of one process need not.
        self._writers: Any = threading.RLock() if self.is_sqlite else contextlib.nullcontext()
        self._gate = threading.RLock()  # held while the process forks
        self._busy: list[None] = []  # one for each transaction that is open
        self._here = threading.local()  # its ``moment``: the connection of a thread's own, in memory
        self._file: Place | None = None
        subject = f"the {self.noun} {self.shown!r}"
        error = self.error
        self._refusal: Callable[[str], DPICLError] = lambda fault: error(f"{subject} cannot be used: {fault}")
        try:
            self._engine = self._new_engine()
        except (ArgumentError, TypeError, ValueError):
            raise self._refusal("an option of its address cannot be read") from None
        self._driver: Any = self._engine.dialect.loaded_dbapi
        me = weakref.proxy(self)  # a ledger that nobody uses any more is left at once
        sa.event.listen(self._engine, "connect", lambda connection, record: me._on_connect(connection, record))
        with _forks:
            _open_databases.add(self)

    def _new_engine(self) -> Engine:
        if self.url.drivername == address.PSYCOPG:
            return postgresql_engine(self.url, self._refusal, self.answer_seconds, **self.options)
        if self.url.drivername not in ("sqlite", "sqlite+pysqlite"):
            raise self.error(
                f"a {self.noun} is on sqlite:///FILE or postgresql+psycopg://..., not on {self.url.drivername!r}"
            )
        if self.path is None:
            self._warn_of_memory()
            return sa.create_engine(self.url, connect_args={"check_same_thread": False}, poolclass=StaticPool)
        url = self.url
        if address.is_uri(url):
            url = url.set(database=f"file:{quote(self.path)}")
        return sa.create_engine(url, connect_args={"timeout": _BUSY_SECONDS}, poolclass=QueuePool)

    def _warn_of_memory(self) -> None:
        warnings.warn(
            "this ledger lives in memory: what was spent is forgotten when the process ends",
            PrivacyWarning,
            stacklevel=8,
        )

    def _on_connect(self, connection: Any, record: Any) -> None:
        """Prepare a new connection to SQLite. Raises its ``error`` if the file is another program's."""
        if not self.is_sqlite:
            return
        connection.isolation_level = None  # transactions are begun explicitly
        # One statement: a ledger that another worker is making is then seen before or after, not in between.
        application, tables = (
            connection.cursor()
            .execute("SELECT application_id, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id")
            .fetchone()
        )
        if (tables or application) and application != self.application_id:
            raise self.error(f"{self.url.database!r} is a database, but not a {self.noun}; it was left as it is")
        connection.execute(f"PRAGMA page_size={self.page_size}")  # a file with content keeps its own
        _when_free(connection, "PRAGMA journal_mode=WAL")  # for which SQLite itself does not wait
        if self.path is not None and connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            raise self._refusal("its file system, or its address, does not let processes share it")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA secure_delete=ON")  # whatever SQLite was built with: a mark that went is gone
        if self.path is not None:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from here on it holds its log
            log = f"{os.path.realpath(self.path)}-wal"  # SQLite follows links, and has its log beside the file
            if (place := place_of(log)) is not None:  # none where SQLite can share no memory: it then keeps no log
                record.info["log"] = log, place

    def _check(self) -> None:
        """Raise an error if nothing may run here."""

    # -- transactions -----------------------------------------------------------------------------------------------

    def run(
        self,
        work: Callable[[Connection], T],
        kind: Kind = "charge",
        *,
        rolled_back: Callable[[], object] = faults.nothing,
    ) -> T:
        """Run one transaction. An exception of ``work`` rolls back and surfaces unchanged.

        ``work`` may run more than once, always after a rollback. Apart from its statements it may only do what
        ``rolled_back`` undoes: this is called after each try that certainly did not happen.
        """
        self._check()
        if self.is_in_memory and (mine := getattr(self._here, "moment", None)) is not None:
            if kind != "read":
                raise self._within_a_moment()
            return work(mine)
        deadline = math.inf
        pause = 0.002
        while True:
            repair: Callable[[], object] | None = None  # None: do not try again
            try:
                return self._once(work, kind)
            except CommitLost as lost:
                reason = f"{lost.args[0]} (whether the last transaction took place is not known; if so, it counts)"
            except Exception as error:
                rolled_back()
                if isinstance(error, TryAgain):
                    reason = str(error)
                    repair = error.repair
                elif isinstance(error, (IntegrityError, self._driver.IntegrityError)):
                    reason = "its rows do not add up"
                elif isinstance(error, (SQLAlchemyError, self._driver.Error, UnicodeDecodeError)):  # the last: damage
                    reason = faults.reason(error)
                    repair = faults.nothing if self.opened and faults.may_pass(error, self._driver) else None
                else:
                    raise
            deadline = min(deadline, time.monotonic() + self.retry_seconds)
            if repair is None or time.monotonic() >= deadline:
                raise self._refusal(reason)
            repair()
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    @contextlib.contextmanager
    def moment(self) -> Iterator[Connection]:
        """One moment of the database, to read from while the ``with`` block lasts. Raises its ``error``."""
        self._check()
        turn: Any = contextlib.nullcontext()
        if self.is_in_memory:
            turn = self._writers
            if getattr(self._here, "moment", None) is not None:
                raise self._within_a_moment()
        fault = ""
        self._enter()
        try:
            with turn, self._engine.connect() as connection:
                try:
                    self._begin(connection, "moment")
                    self._here.moment = connection
                    yield connection
                except BaseException as error:
                    self._drop_if_ended(connection, error)
                    raise
                finally:
                    self._here.moment = None
        except (SQLAlchemyError, self._driver.Error, UnicodeDecodeError) as error:
            fault = faults.reason(error)
        finally:
            self._busy.pop()
        if fault:
            refusal = self._refusal(fault)
            try:
                raise refusal
            finally:
                refusal.__context__ = None  # the driver's error, which the block still handles, may quote a value

    def _within_a_moment(self) -> DPICLError:
        """The error of a use within a moment of this thread, which has the one connection to a database in memory."""
        return self.error(f"the {self.noun} in memory is used within a reading of it: end the reading first")

    def _once(self, work: Callable[[Connection], T], kind: Kind) -> T:
        """One try of a transaction, which ends with its COMMIT."""
        turn = self._writers if kind not in _READING or self.path is None else contextlib.nullcontext()
        failure: Exception | None = None
        is_committed = False
        self._enter()
        try:
            with turn, self._engine.connect() as connection:
                try:
                    transaction = connection.begin()
                    self._begin(connection, kind)
                    found = work(connection)
                except BaseException as error:
                    self._drop_if_ended(connection, error)
                    raise
                try:
                    transaction.commit()
                    is_committed = True
                except Exception as error:
                    failure = self._not_committed(connection, error, kind)
                except BaseException as error:
                    self._drop_if_ended(connection, error)
                    raise
        except Exception as error:  # perhaps of a signal, while the connection goes back
            if not is_committed:
                raise
            failure = CommitLost(faults.reason(error))
        finally:
            self._busy.pop()
        if failure is not None:
            raise failure
        return found

    def _not_committed(self, connection: Connection, error: Exception, kind: Kind) -> Exception:
        """The meaning of an error of a COMMIT."""
        self._drop_if_ended(connection, error)
        if faults.sqlstate(error) in faults.ROLLED_BACK:
            return TryAgain(faults.reason(error))  # the server says so
        if getattr(faults.origin(error), "sqlite_errorcode", None) in _SQLITE_SAID_NO:
            driver: Any = connection.connection.driver_connection
            driver.rollback()  # a COMMIT that found the file busy leaves its transaction open
            return error
        with contextlib.suppress(Exception):  # so does one that was interrupted: it would keep others waiting
            connection.connection.driver_connection.rollback()  # type: ignore[union-attr]
        if kind != "charge" and faults.may_pass(error, self._driver):
            return TryAgain(faults.reason(error))  # reading or noting the same twice changes nothing
        return CommitLost(faults.reason(error))

    def _begin(self, connection: Connection, kind: Kind) -> None:
        """Begin a transaction of this kind.

        `LedgerError` if SQLite's path names another file than the one that was opened, or if its log is another one.
        SQLite removes the log when the last connection of all processes is closed, so the log stays the same one
        while this connection is open.
        """
        driver: Any = connection.connection.driver_connection
        if not self.is_sqlite:
            driver.execute(
                f"BEGIN ISOLATION LEVEL {_ISOLATION.get(kind, 'READ COMMITTED')}; "  # one message to the server
                f"SET LOCAL synchronous_commit TO {_SYNCHRONOUS_COMMIT[kind]}; "
                f"SET LOCAL lock_timeout TO '{self.lock_seconds}s'; "
                f"SET LOCAL idle_in_transaction_session_timeout TO '{self.idle_seconds}s'"
            )
            return
        if kind in _READING:
            driver.execute(_WAIT)
            driver.execute("BEGIN")
        else:
            if connection.info.get("synchronous") != kind:
                driver.execute(f"PRAGMA synchronous={_SYNCHRONOUS[kind]}")
                connection.info["synchronous"] = kind
            _when_free(driver, "BEGIN IMMEDIATE")
        if self.path is None:
            return
        opened: tuple[str, Place] | None = connection.info.get("log")
        is_same = True
        try:
            found = os.stat(self.path)
            self._file = self._file or (found.st_dev, found.st_ino)
            is_same = self._file == (found.st_dev, found.st_ino)
            if opened is not None:
                log = os.stat(opened[0])
                is_same = is_same and opened[1] == (log.st_dev, log.st_ino)
        except OSError:
            is_same = False
        if not is_same:
            raise self.replaced(
                f"the {self.noun} {self.shown!r} was deleted or replaced since this process opened it: "
                f"{self.unharmed}; {self.advice}"
            )

    def _drop_if_ended(self, connection: Connection, error: BaseException) -> None:
        """Close a connection that an interrupt has left anywhere; and all that are idle, if the server ended one."""
        with contextlib.suppress(Exception):
            ended = not self.is_sqlite and faults.has_ended(connection.connection.driver_connection, error)
            if ended or not isinstance(error, Exception):
                connection.invalidate()
            if ended:
                self._engine.dispose()

    def _enter(self) -> None:
        """Keep the process from forking until an entry of ``_busy`` is taken away.

        `LedgerError` if the connections are its parent's.
        """
        if self._process != (os.getpid(), _forks_behind):
            raise self.error(_FORKED)
        with self._gate:
            self._busy.append(None)

    def write_through(self) -> bool:
        """Move the contents of SQLite's log into the file itself: a copy of the file then has it, and the log is empty.

        False if somebody reads for longer than a second, in which all writers wait. Then it is left for later.
        """
        if self.path is None:
            return True
        self._enter()
        try:
            with contextlib.suppress(SQLAlchemyError, sqlite3.Error), self._writers:
                pooled = self._engine.raw_connection()
                try:
                    pooled.cursor().execute(f"PRAGMA busy_timeout={1000 * _READERS_SECONDS}")
                    was_busy, *_ = pooled.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                    return not was_busy
                finally:
                    pooled.close()
            return False
        finally:
            self._busy.pop()

    def start_anew(self) -> None:
        """Go on in the child of a fork, which leaves its parent's connections alone. What is in memory is its own."""
        self._process = _this_process()
        if not self.is_in_memory:
            self._engine.dispose(close=False)

    @property
    def inherited(self) -> bool:
        """True if it was opened before this process was forked."""
        return self._process != _this_process()

    def close(self) -> None:
        """Close the connections, unless they are the parent's."""
        if not self.inherited:
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
    driver.execute(_NO_WAIT)
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
    finally:  # an interrupt may leave a connection at 0, so each transaction says it
        driver.execute(_WAIT)


def place_of(path: str) -> Place | None:
    """The file that a path names: device and inode. None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


# -- forks -----------------------------------------------------------------------------------------------------------

_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_forks = threading.RLock()  # one at a time, and none while a database is added
_forking: list[Database] = []
_forks_behind = 0
"""The forks between the first process and this one: beside its number, as a system uses numbers again."""


def _this_process() -> tuple[int, int]:
    return os.getpid(), _forks_behind


def _before_fork() -> None:
    _forks.acquire()
    # Ledgers before witnesses, which a transaction on a ledger may still need.
    waiting = [each for each in _open_databases if each.is_sqlite and not each.inherited]
    waiting = [each for each in waiting if each.path is not None or each.may_fork]
    _forking[:] = sorted(waiting, key=lambda database: database.is_nested)
    for database in _forking:
        database._gate.acquire()  # nobody uses a connection from now on
        deadline = time.monotonic() + _FORK_SECONDS
        while database._busy and time.monotonic() < deadline:  # after that the child is refused: nothing is lost
            time.sleep(0.0005)
        if database.path is not None:
            database._engine.dispose()


def _after_fork() -> None:
    while _forking:
        _forking.pop()._gate.release()
    _forks.release()


def _after_fork_in_child() -> None:
    global _forks_behind
    _forks_behind += 1
    for database in list(_open_databases):
        if database.may_fork:
            database.start_anew()
        else:
            database.close()  # its connections are the parent's, and stay
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
