"""The PostgreSQL store's connections."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from langchain_dpicl import sql
from langchain_dpicl.calls import shut
from langchain_dpicl.errors import StoreError, UnsafeConfigurationError
from langchain_dpicl.sql import reason, sqlstate

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[Any]

T = TypeVar("T")
AskServer = Callable[..., list[tuple[Any, ...]]]
"""Answers a query with all its rows."""

_CHANGE = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit TO on"
_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_POOL: dict[str, Any] = {
    "pool_size": 5,
    "max_overflow": 15,
    "pool_pre_ping": True,  # a server that was restarted costs no reading
    # Values are always part of the plan: a query's vector is converted once and not for every row.
    "connect_args": {"prepare_threshold": None},
}


class Connections:
    """A pool of connections to one database, for changes that happen whole or not at all and readings of one moment.

    Every fault of the database is a `StoreError`. The ``repr`` hides the password; it is not pickled or copied.
    """

    def __init__(self, url: object) -> None:
        self._url = sql.parse(url, "url", "postgresql://user@host/database")
        if self._url.drivername != sql.PSYCOPG:
            raise StoreError(f"a shared store is on postgresql+psycopg://..., not on {self._url.drivername!r}")
        subject = f"the exemplar store on {self}"
        self._refusal: Callable[[str], StoreError] = lambda fault: StoreError(f"{subject} cannot be used: {fault}")
        self._engine = sql.postgresql_engine(self._url, self._refusal, **_POOL)
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
        """A connection of the pool that has run a statement. The pool rolls back what is left open, and closes all its
        connections after one that has ended."""
        shut.check_records()
        pooled = self._engine.raw_connection()
        driver: Any = pooled.driver_connection
        try:
            driver.execute(statement)
            yield driver
        except BaseException as error:
            if not isinstance(error, Exception) or sql.has_ended(driver, error):
                driver.close()
                self._engine.dispose()
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

    def close(self) -> None:
        """Close the connections that nobody uses; the others close when they are given back."""
        self._engine.dispose()

    def __repr__(self) -> str:
        return repr(sql.shown(self._url))

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("connections to private exemplars are not pickled or copied")
