"""Databases: one meaning of a transaction on SQLite and PostgreSQL, and addresses that are shown without a password."""

from langchain_dpicl.sql.address import (
    CommitLost,
    direct,
    parse,
    postgresql_engine,
    reason,
    shown,
    sqlite_path,
    sqlstate,
)
from langchain_dpicl.sql.database import Database, Kind, OwnLock, TryAgain, insert, place_of, transaction

__all__ = [
    "CommitLost",
    "Database",
    "Kind",
    "OwnLock",
    "TryAgain",
    "direct",
    "insert",
    "parse",
    "place_of",
    "postgresql_engine",
    "reason",
    "shown",
    "sqlite_path",
    "sqlstate",
    "transaction",
]
