"""For all users of a database: its address, its driver, and the words for a fault.

A message never holds a statement, its values or a password. The words of a PostgreSQL server may quote a value, so a
fault of the server is named by its class and its SQLSTATE alone.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import urllib.parse
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from langchain_dpicl.errors import DPICLError, InvalidParameter

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
    """An engine whose connections begin no transaction by themselves. Raises ``error`` if the driver is missing."""
    try:
        engine = sa.create_engine(url, **options)
    except (ImportError, SQLAlchemyError) as missing:
        reason = type(missing).__name__
    else:
        sa.event.listen(engine, "connect", lambda connection, _: setattr(connection, "autocommit", True))
        return engine
    raise error(f"no driver for {url.drivername!r} ({reason}); install langchain-dpicl[postgres]")


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
    words = str(origin).splitlines() if speaks and not isinstance(origin, SQLAlchemyError) else []
    return (words or [name])[0]


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
    query = {key: value if key in _SQLITE_OPTIONS else "***" for key, value in url.query.items()}
    return url.set(query=query if url.get_backend_name() == "sqlite" else {}).render_as_string(hide_password=True)
