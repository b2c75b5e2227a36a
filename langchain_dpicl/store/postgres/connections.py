"""Connections of the PostgreSQL store: changes that happen whole or not at all, and readings of one moment.

Every fault of the database is a `StoreError` that names its kind (a class and a SQLSTATE) and nothing else: the
server's own words may quote a value.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from langchain_dpicl.errors import InvalidParameter, StoreError, UnsafeConfigurationError

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.engine import URL
    from sqlalchemy.pool import PoolProxiedConnection

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
        self._faults = (sa.exc.SQLAlchemyError, psycopg.Error)

        @sa.event.listens_for(self._engine, "connect")
        def _on_connect(connection: psycopg.Connection[Any], _: Any) -> None:
            connection.autocommit = True  # transactions are begun below, explicitly
            # Values are always part of the plan, so a query's vector is converted once and not for every row; and
            # a pooler between here and the server need not keep statements.
            connection.prepare_threshold = None

        _pools.add(self)

    def run(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """One change: all of it, or nothing. What ``work`` raises itself rolls back and surfaces as it is."""
        try:
            return self._once(work)
        except self._faults as error:
            reason = _reason(error)
        except _CommitUnknown as lost:
            reason = f"{lost.args[0]} (whether the last change took place is not known)"
        raise self._refusal(reason)

    def _once(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        pooled = self._engine.raw_connection()
        try:
            connection = _driver(pooled)
            connection.execute(_CHANGE)
            answer = work(connection)
            failure = _commit(connection)
        except BaseException as error:
            _give_back(pooled, broken=not isinstance(error, Exception))
            raise
        _give_back(pooled)
        if failure is not None:
            raise failure
        return answer

    def look(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of one statement, at a moment of its own."""
        snapshot = self.snapshot()
        try:
            return snapshot.ask(query, *values)
        finally:
            snapshot.close()

    def snapshot(self) -> Snapshot:
        """A moment of the database: whoever takes one closes it."""
        pooled: PoolProxiedConnection | None = None
        try:
            pooled = self._engine.raw_connection()
            _driver(pooled).execute(_READING)
            return Snapshot(pooled, self._faults, self._refusal)
        except self._faults as error:
            reason = _reason(error)
            if pooled is not None:
                _give_back(pooled)
        raise self._refusal(reason)

    def tidy(self, tables: Sequence[str]) -> bool:
        """``VACUUM`` these tables, and look at their keys' distribution. Whether the server did.

        It may not: somebody else's table, or one that is being vacuumed already, is left to autovacuum.
        """
        pooled: PoolProxiedConnection | None = None
        try:
            pooled = self._engine.raw_connection()
            _driver(pooled).execute(f"VACUUM (ANALYZE, SKIP_LOCKED) {', '.join(tables)}")
        except self._faults:
            return False
        finally:
            if pooled is not None:
                _give_back(pooled)
        return True

    def _refusal(self, reason: str) -> StoreError:
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

    def __init__(
        self,
        pooled: PoolProxiedConnection,
        faults: tuple[type[BaseException], ...],
        refusal: Callable[[str], StoreError],
    ) -> None:
        self._pooled: PoolProxiedConnection | None = pooled
        self._faults = faults
        self._refusal = refusal

    def ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows of a query. Raises `StoreError`."""
        if self._pooled is None:
            raise StoreError("this reading of the store has ended: read within its with block")
        failure: BaseException | None = None
        try:
            return _driver(self._pooled).cursor(binary=True).execute(query, values).fetchall()
        except self._faults as error:
            reason = _reason(error)
        except BaseException as error:
            failure = error
        self.close(broken=True)
        if failure is not None:
            raise failure
        raise self._refusal(reason)

    def close(self, *, broken: bool = False) -> None:
        """End the transaction."""
        pooled, self._pooled = self._pooled, None
        if pooled is not None:
            _give_back(pooled, broken=broken)


class _CommitUnknown(Exception):
    """The database did not answer a COMMIT."""


def _driver(pooled: PoolProxiedConnection) -> psycopg.Connection[Any]:
    """The driver's own connection."""
    driver: Any = pooled.driver_connection
    return driver  # type: ignore[no-any-return]


def _commit(connection: psycopg.Connection[Any]) -> _CommitUnknown | None:
    """Commit. The server's refusal surfaces as it is; None where it said yes, otherwise nobody knows."""
    try:
        connection.execute("COMMIT")
    except Exception as error:
        state = getattr(error, "sqlstate", None)
        if state and not state.startswith(("08", "57")):  # the connection, or the server, went
            raise
        return _CommitUnknown(_reason(error))
    return None


def _give_back(pooled: PoolProxiedConnection, *, broken: bool = False) -> None:
    """Give a connection back to the pool, which rolls back what is open; one that may be broken is closed instead."""
    with contextlib.suppress(Exception):
        driver = _driver(pooled)
        if broken or driver.closed or driver.broken:
            pooled.invalidate()
    with contextlib.suppress(Exception):
        pooled.close()


def _reason(error: BaseException) -> str:
    """What kind of fault it is: words of the server where it cannot be reached, otherwise never any."""
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
