"""The databases of stores: SQLite, in a file or in memory, and PostgreSQL with pgvector."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn, TypeVar
from urllib.parse import quote

from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import SQLAlchemyError

from langchain_dpicl import durable, sql
from langchain_dpicl.calls import shut
from langchain_dpicl.errors import (
    DPICLError,
    StoreError,
    StoreFileChanged,
    StoreFileError,
    UnsafeConfigurationError,
)

T = TypeVar("T")
APPLICATION = 0x64707376
"""SQLite's mark of a store's file."""
IN_MEMORY = "sqlite://"
_FOLLOWING = 0x6470_6963_6D  # PostgreSQL's advisory lock of whoever follows a data file
_PAUSE = 0.05
MANY = 10_000
"""Values that one statement names at most."""


class StoreDatabase(sql.Database):
    """The database of a store. It is closed to the calls of a chain, and is not pickled or copied."""

    noun = "exemplar store"
    parameter: ClassVar[str] = "url"
    error: ClassVar[type[DPICLError]] = StoreError
    replaced: ClassVar[type[DPICLError]] = StoreFileChanged
    unharmed = "nobody can tell who was forgotten in it, so nothing is released"
    advice = "open the store in a new process"
    example = "sqlite:///notes.db"
    application_id = APPLICATION
    page_size: ClassVar[int] = 1024
    may_fork: ClassVar[bool] = True
    answer_seconds: ClassVar[float] = 600  # a gate on the server goes over all rows
    idle_seconds: ClassVar[float] = 600  # a head is fitted on the records of one moment
    options: Mapping[str, Any] = {"pool_size": 5, "max_overflow": 15, "pool_pre_ping": True}
    _check = staticmethod(shut.check_records)

    def __init__(self, url: str | URL) -> None:
        super().__init__(url)
        self.following = threading.RLock()
        """Held from the beginning of a moment until what is in memory has followed it."""
        self.loading = threading.Lock()
        """Held while all vectors are read."""

    def start_anew(self) -> None:
        super().start_anew()
        self.following = threading.RLock()
        self.loading = threading.Lock()

    def make_file(self) -> None:
        """Make SQLite's file, which its owner alone may read, if there is none. Raises `StoreFileError`."""
        if self.path is None:
            return
        refusal = f"the exemplar store {self.shown!r} cannot be made"
        with durable.refused(lambda why: StoreFileError(f"{refusal}: {why}")), contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL, 0o600))

    def check_file(self) -> None:
        """Raise `StoreFileError` for a file of SQLite's that is not there, or that an earlier version made.

        SQLite reads it. A process that opens and closes a database's file by other means gives up all locks that it
        has there, and another process then removes the log from under its connections.
        """
        if self.path is None:
            return
        name = os.path.basename(self.path)
        start = b""
        with durable.refused(lambda why: StoreFileError(f"{name!r} cannot be read: {why}")):
            if not os.path.exists(self.path):
                raise FileNotFoundError(errno.ENOENT, "no such file")
            if not self._is_database():
                with open(self.path, "rb") as file:
                    start = file.read(2)
        if start == b"PK":
            raise StoreFileError(
                f"{name!r} cannot be read: an earlier version made it: dpicl upgrade {name} makes a store of it"
            )

    def _is_database(self) -> bool:
        """False if SQLite cannot open the file, or finds something else in it. Raises `OSError` if it is not there."""
        path = str(self.path)
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        not_one = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN)
        try:
            with contextlib.closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)) as connection:
                connection.execute("PRAGMA schema_version")
        except sqlite3.Error as error:
            return error.sqlite_errorcode & 0xFF not in not_one
        return True

    def _warn_of_memory(self) -> None:
        pass

    def tidy(self, *tables: str) -> bool:
        """Have what was deleted leave the files too, as far as this database can do it now. False: not yet.

        On PostgreSQL: ``VACUUM``, and a look at the keys' distribution. The server may refuse, since the tables are
        another role's, or are vacuumed already: then autovacuum does it later.
        """
        if self.is_sqlite:
            return self.write_through()
        faults = (SQLAlchemyError, self._driver.Error, StoreError)
        with contextlib.suppress(*faults), self._engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver.execute(f"VACUUM (ANALYZE, SKIP_LOCKED) {', '.join(tables)}")
        return True

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let one process at a time run this block: by the server, or for a file by a lock beside it."""
        with contextlib.ExitStack() as ends:
            if not self.is_sqlite:
                connection = ends.enter_context(self._engine.connect())
                self._begin(connection, "note")
                sql.direct(connection, "SET LOCAL idle_in_transaction_session_timeout TO 0", {})
                sql.direct(connection, "SET LOCAL lock_timeout TO 0", {})
                sql.direct(connection, "SELECT pg_advisory_xact_lock(:lock)", {"lock": _FOLLOWING})
            elif self.path is not None:
                descriptor = self._lock_file()
                ends.callback(os.close, descriptor)
                while not durable.lock(descriptor):
                    time.sleep(_PAUSE)
            yield

    def alone(self) -> AbstractContextManager[object]:
        """Keep the other threads from writing, and from reading what is in memory."""
        found: AbstractContextManager[object] = self._writers
        return found

    def _lock_file(self) -> int:
        """A descriptor of the file beside SQLite's that is locked. Raises `StoreFileError`."""
        path = f"{self.path}.lock"
        with durable.refused(lambda why: StoreFileError(f"the lock {os.path.basename(path)} cannot be made: {why}")):
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def copy_to(self, path: str) -> None:
        """Copy a database in memory to a file of SQLite's."""
        with self.moment() as connection, contextlib.closing(sqlite3.connect(path)) as copy:
            source: Any = connection.connection.driver_connection
            source.backup(copy)

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("connections to private exemplars are not pickled or copied")


def fetch(connection: Connection | None, statement: str, **values: object) -> list[Any]:
    """All rows of a statement, by the driver itself; from PostgreSQL in its binary form, which is quicker.

    `StoreError` without a connection, as a reading has none that has ended.
    """
    if connection is None:
        raise StoreError("this reading of the store has ended: read within its with block")
    pooled: Any = connection.connection
    if connection.dialect.name == "sqlite":
        return list(pooled.cursor().execute(statement, values))
    return list(pooled.cursor(binary=True).execute(sql.for_psycopg(statement), values))


def fetch_parts(connection: Connection | None, statement: str, size: int, **values: object) -> Iterator[list[Any]]:
    """The same, so many rows at a time. A server keeps the others until they are asked for."""
    if connection is None:
        raise StoreError("this reading of the store has ended: read within its with block")
    pooled: Any = connection.connection
    text = statement
    on_server: dict[str, Any] = {}
    if connection.dialect.name != "sqlite":
        text = sql.for_psycopg(statement)
        on_server = {"name": "dpicl_parts", "binary": True}
    with contextlib.closing(pooled.cursor(**on_server)) as cursor:
        cursor.execute(text, values)
        while rows := cursor.fetchmany(size):
            yield rows


def fetch_among(
    connection: Connection | None,
    statement: str,
    column: str,
    values: Sequence[Any],
    kind: str = "bigint",
) -> list[Any]:
    """The rows in which a column has one of these values; the statement ends before this condition."""
    condition = f"{column} = ANY(CAST(:given AS {kind}[]))"
    as_given: Callable[[Any], Any] = list
    if connection is not None and connection.dialect.name == "sqlite":
        condition = f"{column} IN (SELECT value FROM json_each(:given))"
        as_given = json.dumps
    found: list[Any] = []
    for start in range(0, len(values), MANY):
        found += fetch(connection, f"{statement} {condition}", given=as_given(values[start : start + MANY]))
    return found
