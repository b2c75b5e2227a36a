"""For all users of a database: its address, its driver, the words for a fault; and the PostgreSQL store's connections.

A message never holds a statement, its values or a password. The words of a PostgreSQL server may quote a value, so a
fault of the server is named by its class and its SQLSTATE alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import urllib.parse
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from langchain_dpicl.calls import shut
from langchain_dpicl.errors import (
    DPICLError,
    InvalidParameter,
    StoreError,
    UnsafeConfigurationError,
)
from langchain_dpicl.extras import require

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[Any]

T = TypeVar("T")
AskServer = Callable[..., list[tuple[Any, ...]]]
"""Answers a query with all its rows."""

_SQLITE_OPTIONS = {"mode", "cache", "uri", "immutable", "nolock", "psow", "vfs", "timeout", "check_same_thread"}
_CHANGE = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit TO on"
_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_POOL = {
    "pool_size": 5,
    "max_overflow": 15,
    "pool_pre_ping": True,  # a server that was restarted costs no reading
    # Values are always part of the plan: a query's vector is converted once and not for every row, and a pooler between
    # here and the server need not keep statements.
    "connect_args": {"prepare_threshold": None},
}


class CommitLost(Exception):
    """The database did not answer a ``COMMIT``, which may have happened. The argument says why."""


def parse(url: object, parameter: str, example: str) -> URL:
    """A database's address; PostgreSQL's with the driver psycopg. Raises `InvalidParameter`."""
    if isinstance(url, str):
        with contextlib.suppress(ArgumentError, ValueError):
            parsed = make_url(url)
            if parsed.drivername in ("postgresql", "postgres"):
                return parsed.set(drivername="postgresql+psycopg")
            return parsed
    raise InvalidParameter(parameter, type(url).__name__, f'a database URL such as "{example}"')


def postgresql_engine(url: URL, error: type[DPICLError], **options: Any) -> Engine:
    """An engine whose connections begin no transaction by themselves.

    Raises `MissingExtra` without psycopg, and ``error`` for another driver that is missing.
    """
    if url.drivername == "postgresql+psycopg":
        require("psycopg", "postgres")
    try:
        engine = sa.create_engine(url, **options)
    except (ImportError, SQLAlchemyError) as missing:
        reason = type(missing).__name__
    else:
        sa.event.listen(engine, "connect", lambda connection, _: setattr(connection, "autocommit", True))
        return engine
    raise error(f"no driver for {url.drivername!r} ({reason})")


def sqlstate(error: BaseException) -> str:
    """PostgreSQL's code of an error; "" if it has none."""
    return str(getattr(getattr(error, "orig", None) or error, "sqlstate", None) or "")


def reason(error: BaseException) -> str:
    """One line about a fault: SQLite's words, the words for a server that cannot be reached, otherwise its class."""
    origin = getattr(error, "orig", None) or error
    name = type(origin).__name__
    if state := sqlstate(error):
        return f"{name} ({state})"
    speaks = isinstance(origin, sqlite3.Error) or name in ("OperationalError", "ConnectionTimeout")
    if speaks and not isinstance(origin, SQLAlchemyError):
        return next(iter(str(origin).splitlines()), name)
    return name


def sqlite_path(url: URL) -> str | None:
    """The file of a SQLite database; None for one in memory, and for PostgreSQL."""
    path = url.database or ""
    if url.get_backend_name() != "sqlite" or not path or ":memory:" in path or "mode=memory" in str(url):
        return None
    if path.startswith("file:"):
        path = urllib.parse.unquote(path.removeprefix("file:").partition("?")[0])
        path = f"/{path.lstrip('/')}" if path.startswith("//") else path
    return os.path.abspath(path)  # a process may change its directory


def shown(url: str | URL) -> str:
    """A database's address without its password, and without options that may hold one."""
    if isinstance(url, str):
        try:
            url = make_url(url)
        except (ArgumentError, ValueError):
            return "an address that cannot be read"
    is_sqlite = url.get_backend_name() == "sqlite"
    query = {key: value if key in _SQLITE_OPTIONS else "***" for key, value in url.query.items() if is_sqlite}
    return url.set(query=query).render_as_string(hide_password=True)


def direct(connection: sa.Connection, statement: str, *rows: Mapping[str, object]) -> Any:
    """Run a statement once for each row, by the driver itself, whose own errors it raises.

    For what must be quick: SQLAlchemy's own work on a statement takes longer than a fast disk's commit. Parameters
    are written ``:name``.
    """
    cursor = connection.connection.cursor()
    text = statement if connection.dialect.name == "sqlite" else _for_postgresql(statement)
    if len(rows) == 1:
        cursor.execute(text, rows[0])
    else:
        cursor.executemany(text, rows)
    return cursor


@functools.cache
def _for_postgresql(statement: str) -> str:
    return re.sub(r":(\w+)", r"%(\1)s", statement)


class Connections:
    """A pool of connections to one database, for changes that happen whole or not at all and readings of one moment.

    Every fault of the database is a `StoreError`. The ``repr`` hides the password; it is not pickled or copied.
    """

    def __init__(self, url: object) -> None:
        self._url = parse(url, "url", "postgresql://user@host/database")
        if self._url.drivername != "postgresql+psycopg":
            raise StoreError(f"a shared store is on postgresql+psycopg://..., not on {self._url.drivername!r}")
        self._engine = postgresql_engine(self._url, StoreError, **_POOL)
        self._faults = (SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error)
        engine = weakref.ref(self._engine)

        def drop() -> None:
            """A child must not use its parent's connections, nor close them on the parent's side."""
            if (kept := engine()) is not None:
                kept.dispose(close=False)

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=drop)

    @contextlib.contextmanager
    def _borrowed(self, statement: str) -> Iterator[Connection]:
        """A connection of the pool that has run a statement. The pool rolls back what is left open, and closes a
        connection that may be broken."""
        shut.check_records()
        pooled = self._engine.raw_connection()
        driver: Any = pooled.driver_connection
        try:
            driver.execute(statement)
            yield driver
        except BaseException as error:
            if not isinstance(error, Exception):
                driver.close()
            raise
        finally:
            with contextlib.suppress(Exception):
                if driver.closed or driver.broken:
                    pooled.invalidate()
            with contextlib.suppress(Exception):
                pooled.close()

    def run(self, work: Callable[..., T], *given: Any) -> T:
        """``work(connection, *given)`` as one change: all of it, or nothing.

        What ``work`` raises itself rolls back and surfaces as it is.
        """
        fault = ""
        try:
            with self._borrowed(_CHANGE) as connection:
                answer = work(connection, *given)
                try:
                    connection.execute("COMMIT")
                except Exception as error:
                    state = sqlstate(error)
                    if state and not state.startswith(("08", "57")):  # not the connection, or the server, that went
                        raise
                    fault = f"{reason(error)} (whether the last change took place is not known)"
            if not fault:
                return answer
        except self._faults as error:
            fault = reason(error)
        raise self._refusal(fault)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[AskServer]:
        """A moment of the database: a function that answers queries while the ``with`` block lasts.

        It gives all rows, and raises `StoreError`. An error ends the connection.
        """
        fault = ""
        has_ended = False
        with contextlib.ExitStack() as cleanup:
            try:
                connection = cleanup.enter_context(self._borrowed(_READING))
            except self._faults as error:
                fault = reason(error)
            if fault:
                raise self._refusal(fault)

            def ask(query: str, *values: object) -> list[tuple[Any, ...]]:
                nonlocal has_ended
                if has_ended:
                    raise StoreError("this reading of the store has ended: read within its with block")
                try:
                    return connection.cursor(binary=True).execute(query, values).fetchall()
                except BaseException as error:
                    has_ended = True
                    connection.close()
                    if not isinstance(error, self._faults):
                        raise
                    fault = reason(error)
                raise self._refusal(fault)

            try:
                yield ask
            finally:
                has_ended = True

    def look(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of one statement, at a moment of its own."""
        with self.snapshot() as ask:
            return ask(query, *values)

    def tidy(self, *tables: str) -> None:
        """``VACUUM`` these tables, and look at their keys' distribution.

        The server may refuse: somebody else's table, or one that is being vacuumed already, is left to autovacuum.
        """
        with (
            contextlib.suppress(*self._faults),
            self._borrowed(f"VACUUM (ANALYZE, SKIP_LOCKED) {', '.join(tables)}"),
        ):
            pass

    def _refusal(self, fault: str) -> StoreError:
        return StoreError(f"the exemplar store on {self} cannot be used: {fault}")

    def close(self) -> None:
        """Close the connections that nobody uses; the others close when they are given back."""
        self._engine.dispose()

    def __repr__(self) -> str:
        return repr(shown(self._url))

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("connections to private exemplars are not pickled or copied")
