"""Databases: one meaning of a transaction on SQLite and PostgreSQL, and addresses that are shown without a password."""

from langchain_dpicl.sql.address import PSYCOPG, parse, shown, sqlite_path
from langchain_dpicl.sql.database import (
    NAME,
    Database,
    Kind,
    OwnLock,
    direct,
    for_psycopg,
    insert,
    is_name,
    place_of,
    transaction,
)
from langchain_dpicl.sql.faults import CommitLost, TryAgain, has_ended, reason, sqlstate
from langchain_dpicl.sql.postgresql import postgresql_engine

__all__ = [
    "NAME",
    "PSYCOPG",
    "CommitLost",
    "Database",
    "Kind",
    "OwnLock",
    "TryAgain",
    "direct",
    "for_psycopg",
    "has_ended",
    "insert",
    "is_name",
    "parse",
    "place_of",
    "postgresql_engine",
    "reason",
    "shown",
    "sqlite_path",
    "sqlstate",
    "transaction",
]
