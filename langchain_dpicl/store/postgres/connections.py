"""Connections of the PostgreSQL store: changes that happen whole or not at all, and readings of one moment.

Every fault of the database is a `StoreError` that names its kind (a class and a SQLSTATE) and nothing else: the
server's own words may quote a value.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from langchain_dpicl.errors import InvalidParameter, StoreError, UnsafeConfigurationError

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.engine import URL

T = TypeVar("T")

_CHANGE = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit TO on"
_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_CONNECTIONS, _MORE_CONNECTIONS = 5, 15


class Connections:
    """A pool of connections to one database. Its ``repr`` hides the password; it is not pickled or copied."""

    def __init__(self, url: object) -> None:
        self._url = _parse(url)
        import sqlalchemy as sa

        missing = ""
        try:
            import psycopg

            self._engine = sa.create_engine(
                self._url,
                pool_size=_CONNECTIONS,
                max_overflow=_MORE_CONNECTIONS,
                pool_pre_ping=True,  # a server that was restarted costs no reading
            )
        except (ImportError, sa.exc.SQLAlchemyError) as error:
            missing = type(error).__name__
        if missing:
            raise StoreError(f"no driver for {self._url.drivername!r} ({missing}); install langchain-dpicl[postgres]")
        self.faults = (sa.exc.SQLAlchemyError, psycopg.Error)

        @sa.event.listens_for(self._engine, "connect")
        def _on_connect(connection: psycopg.Connection[Any], _: Any) -> None:
            connection.autocommit = True  # transactions are begun below, explicitly
            # Values are always part of the plan: a query's vector is converted once and not for every row, and a pooler
            # between here and the server need not keep statements.
            connection.prepare_threshold = None

        _pools.add(self)

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection of the pool, which rolls back what is left open. One that may be broken is closed instead."""
        pooled = self._engine.raw_connection()
        driver: Any = pooled.driver_connection
        try:
            yield driver
        except Exception:
            raise
        except BaseException:
            driver.close()
            raise
        finally:
            with contextlib.suppress(Exception):
                if driver.closed or driver.broken:
                    pooled.invalidate()
            with contextlib.suppress(Exception):
                pooled.close()

    def run(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """One change: all of it, or nothing. What ``work`` raises itself rolls back and surfaces as it is."""
        try:
            with self._borrowed() as connection:
                connection.execute(_CHANGE)
                answer = work(connection)
                reason = _commit(connection)
            if not reason:
                return answer
        except self.faults as error:
            reason = reason_of(error)
        raise self.refusal(reason)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """A moment of the database, while the ``with`` block lasts."""
        reason = ""
        with contextlib.ExitStack() as cleanup:
            try:
                connection = cleanup.enter_context(self._borrowed())
                connection.execute(_READING)
            except self.faults as error:
                reason = reason_of(error)
            if reason:
                raise self.refusal(reason)
            snapshot = Snapshot(self, connection)
            cleanup.callback(snapshot.end)
            yield snapshot

    def look(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of one statement, at a moment of its own."""
        with self.snapshot() as snapshot:
            return snapshot.ask(query, *values)

    def tidy(self, tables: Sequence[str]) -> None:
        """``VACUUM`` these tables, and look at their keys' distribution.

        The server may refuse: somebody else's table, or one that is being vacuumed already, is left to autovacuum.
        """
        with contextlib.suppress(*self.faults), self._borrowed() as connection:
            connection.execute(f"VACUUM (ANALYZE, SKIP_LOCKED) {', '.join(tables)}")

    def refusal(self, reason: str) -> StoreError:
        """The error for a fault of the database."""
        return StoreError(f"the exemplar store on {self} cannot be used: {reason}")

    def close(self) -> None:
        """Close the connections that nobody uses; the others close when they are given back."""
        self._engine.dispose()

    def __repr__(self) -> str:
        return repr(self._url.set(query={}).render_as_string(hide_password=True))

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("connections to private exemplars are not pickled or copied")


class Snapshot:
    """One moment of the database, in a transaction that only reads."""

    def __init__(self, connections: Connections, connection: psycopg.Connection[Any]) -> None:
        self._connections = connections
        self._connection: psycopg.Connection[Any] | None = connection

    def ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows of a query. Raises `StoreError`. What interrupts it ends the connection."""
        connection = self._connection
        if connection is None:
            raise StoreError("this reading of the store has ended: read within its with block")
        try:
            return connection.cursor(binary=True).execute(query, values).fetchall()
        except BaseException as error:
            self.end()
            connection.close()
            if not isinstance(error, self._connections.faults):
                raise
            reason = reason_of(error)
        raise self._connections.refusal(reason)

    def end(self) -> None:
        """Answer nothing from here on."""
        self._connection = None


def _commit(connection: psycopg.Connection[Any]) -> str:
    """Commit. The server's refusal surfaces as it is; why nobody knows whether it took place, if nobody does."""
    try:
        connection.execute("COMMIT")
    except Exception as error:
        state = getattr(error, "sqlstate", None)
        if state and not state.startswith(("08", "57")):  # the connection, or the server, went
            raise
        return f"{reason_of(error)} (whether the last change took place is not known)"
    return ""


def reason_of(error: BaseException) -> str:
    """What kind of fault it is: words of the server if it cannot be reached, otherwise none."""
    origin = getattr(error, "orig", None) or error
    state = getattr(origin, "sqlstate", None)
    if state:
        return f"{type(origin).__name__} ({state})"
    words = str(origin).splitlines() if type(origin).__name__ in ("OperationalError", "ConnectionTimeout") else []
    return (words or [type(origin).__name__])[0]


def _parse(url: object) -> URL:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    if isinstance(url, str):
        with contextlib.suppress(ArgumentError, ValueError):
            parsed = make_url(url)
            if parsed.drivername in ("postgresql", "postgres"):
                parsed = parsed.set(drivername="postgresql+psycopg")
            if parsed.drivername == "postgresql+psycopg":
                return parsed
            raise StoreError(f"a shared store is on postgresql+psycopg://..., not on {parsed.drivername!r}")
    raise InvalidParameter("url", type(url).__name__, 'a database URL such as "postgresql://user@host/database"')


_pools: weakref.WeakSet[Connections] = weakref.WeakSet()


def _forget_connections_after_fork() -> None:
    """A child must not use its parent's connections; drop them without closing the parent's side."""
    for pool in list(_pools):
        pool._engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections_after_fork)
