"""Databases: one meaning of a transaction on SQLite and PostgreSQL, and addresses that are shown without a password."""

from langchain_dpicl.sql.address import PSYCOPG, parse, shown, sqlite_path
from langchain_dpicl.sql.database import (
    NAME,
    Database,
    OwnLock,
    direct,
    for_psycopg,
    insert,
    is_name,
    transaction,
)
from langchain_dpicl.sql.faults import TryAgain

__all__ = [
    "NAME",
    "PSYCOPG",
    "Database",
    "OwnLock",
    "TryAgain",
    "direct",
    "for_psycopg",
    "insert",
    "is_name",
    "parse",
    "shown",
    "sqlite_path",
    "transaction",
]
