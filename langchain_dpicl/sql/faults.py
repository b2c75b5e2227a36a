"""The faults of a database: what they are called, and what can be done.

A message never holds a statement, its values or a password. The words of a PostgreSQL server may quote a value, so a
fault of the server is named by its class and its SQLSTATE alone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

# SQLSTATEs of PostgreSQL, or their beginnings.
ROLLED_BACK = ("40001", "40P01", "25P03")  # serialisation, deadlock; a client that was idle within its transaction
_ENDED = ("08", "57P", "25P03", "25P04", "25006")  # lost, by the server's end or for being idle; it can only read now


def nothing() -> None:
    """Do nothing."""


class CommitLost(Exception):
    """The database did not answer a ``COMMIT``, which may have happened. The argument says why."""


class TryAgain(Exception):
    """Raised in a transaction: roll back, call ``repair`` outside of any transaction, and run it again."""

    def __init__(
        self,
        reason: str = "other workers were faster, again and again",
        repair: Callable[[], object] = nothing,
    ) -> None:
        super().__init__(reason)
        self.repair = repair


def origin(error: BaseException) -> BaseException:
    """The driver's own error."""
    return getattr(error, "orig", None) or error


def sqlstate(error: BaseException) -> str:
    """PostgreSQL's code of an error; "" if it has none."""
    return str(getattr(origin(error), "sqlstate", None) or "")


def reason(error: BaseException) -> str:
    """One line about a fault: SQLite's words, the words for a server that cannot be reached, otherwise its class."""
    own = origin(error)
    name = type(own).__name__
    if state := sqlstate(error):
        return f"{name} ({state})"
    speaks = isinstance(own, sqlite3.Error) or name in ("OperationalError", "ConnectionTimeout")
    if speaks and not isinstance(own, SQLAlchemyError):
        return next(iter(str(own).splitlines()), name)
    return name


def has_ended(session: Any, error: BaseException) -> bool:
    """True if a session with PostgreSQL is of no more use: it was lost, or its server is not the primary any more."""
    return session.closed or session.broken or sqlstate(error).startswith(_ENDED)


def may_pass(error: BaseException, driver: Any) -> bool:
    """True if a transaction that was not committed may succeed on another try. SQLite has waited for its locks."""
    if isinstance(origin(error), sqlite3.Error):
        return False
    is_operational = isinstance(origin(error), (driver.OperationalError, driver.InterfaceError))
    return is_operational or sqlstate(error).startswith(_ENDED)
