"""A database's address, its driver, and the words for a fault.

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
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from langchain_dpicl.errors import DPICLError, InvalidParameter
from langchain_dpicl.extras import require

_SQLITE_OPTIONS = {"mode", "cache", "uri", "immutable", "nolock", "psow", "vfs", "timeout", "check_same_thread"}


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
