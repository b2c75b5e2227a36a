"""A database's address, which is shown without a password or any part of one."""

from __future__ import annotations

import os
import re
import urllib.parse

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from langchain_dpicl.errors import InvalidParameter

PSYCOPG = "postgresql+psycopg"
_SQLITE_OPTIONS = {"mode", "cache", "uri", "immutable", "nolock", "psow", "vfs", "timeout", "check_same_thread"}
_ESCAPED = 'with %40 for an "@" and %3F for a "?" in a user, a password or an option'


def is_text(value: str) -> bool:
    """True for a text that a database's driver can be given: not empty, without NUL and halves of surrogate pairs."""
    return bool(value) and not re.search("[\0\ud800-\udfff]", value)


def _read(url: object) -> URL | None:
    """Read an address. None if it is none, or if a part of a password could be taken for another part of it."""
    if isinstance(url, URL):
        return url
    if not isinstance(url, str) or not is_text(url):
        return None
    before, _, after = url.partition("@")
    if not url.startswith("sqlite") and after and ("?" in before or "@" in after):
        return None
    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        return None


def parse(url: object, parameter: str, example: str) -> URL:
    """A database's address, as text or read before; PostgreSQL's with the driver psycopg.

    Raises `InvalidParameter`, which does not show it.
    """
    read = _read(url)
    if read is None:
        raise InvalidParameter(parameter, type(url).__name__, f'a database URL such as "{example}", {_ESCAPED}')
    return read.set(drivername=PSYCOPG) if read.drivername in ("postgresql", "postgres") else read


def is_uri(url: URL) -> bool:
    """True if SQLite reads the database's name as a URI, in which options follow the path."""
    return (url.database or "").startswith("file:") and url.query.get("uri") in ("true", "1")


def sqlite_path(url: URL) -> str | None:
    """The file of a SQLite database; None for one in memory, and for PostgreSQL."""
    path = url.database or ""
    if url.get_backend_name() != "sqlite" or path in ("", ":memory:"):
        return None
    if is_uri(url):
        if path == "file::memory:" or url.query.get("mode") == "memory":
            return None
        path = urllib.parse.unquote(path.removeprefix("file:").partition("?")[0])
        path = f"/{path.lstrip('/')}" if path.startswith("//") else path
    return os.path.abspath(path)  # a process may change its directory


def shown(url: str | URL) -> str:
    """A database's address without its password, and without options that may hold one."""
    read = url if isinstance(url, URL) else _read(url)
    if read is None:
        return "an address that cannot be read"
    is_sqlite = read.get_backend_name() == "sqlite"
    query = {key: value if key in _SQLITE_OPTIONS else "***" for key, value in read.query.items() if is_sqlite}
    return read.set(query=query).render_as_string(hide_password=True)
