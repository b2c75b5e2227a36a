"""Tables of the PostgreSQL store: a row in ``dpicl_collections`` for each collection, and three tables of its own.

Names, texts and their hashes are bytes: no encoding or collation makes two owners equal. They are kept out of the
planner's statistics, which are copies that forgetting would not reach.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from langchain_dpicl.errors import InvalidParameter, StoreError
from langchain_dpicl.store.file import OpenedBudget
from langchain_dpicl.store.intake import RecordKeys

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[Any]

MOST_DIMENSIONS = 16_000
"""Of pgvector's type ``vector``."""

_BESIDE_THE_TEXT = 1900
"""Dimensions up to which a vector lies in its row. Elsewhere each would be looked up in an index of its own, one by
one, whenever a query goes over all of them."""

_MAKING = 0x6470_6963_6C
"""The advisory lock under which collections are made."""

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")


@dataclass(frozen=True)
class Collection:
    """A collection's name, what is public about it, and the schema in which pgvector is installed."""

    name: str
    dimension: int
    keys: RecordKeys
    extension: str = "public"

    @property
    def owners(self) -> str:
        """The table of owners."""
        return f"dpicl_{self.name}_owners"

    @property
    def exemplars(self) -> str:
        """The table of exemplars."""
        return f"dpicl_{self.name}_exemplars"

    @property
    def forgotten(self) -> str:
        """The table of ids that went, without anything else, for workers that keep something of an exemplar."""
        return f"dpicl_{self.name}_forgotten"


def check_name(name: object) -> str:
    """A collection's name, which becomes part of its tables' names. Raises `InvalidParameter`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter("name", name, "up to 40 of a-z, 0-9 and _, the first one no digit")
    return name


def find(connection: Connection, name: str) -> tuple[Collection, int] | None:
    """The collection of this name, if there is one, and how often it has forgotten an owner."""
    row = None
    if _exists(connection, "dpicl_collections"):
        query = "SELECT dimension, keys, forgets FROM dpicl_collections WHERE name = %s"
        row = connection.execute(query, [name]).fetchone()
    extension = _extension(connection)
    if row is None or extension is None:
        return None
    return Collection(name, int(row[0]), RecordKeys(*json.loads(row[1])), extension), int(row[2])


def check_free(connection: Connection, name: str) -> tuple[Collection, int] | None:
    """An empty collection of this name, if there is one. Raises `StoreError` for one with content."""
    found = find(connection, name)
    if found is not None and connection.execute(f"SELECT FROM {found[0].exemplars} LIMIT 1").fetchall():
        raise StoreError(f"there is a collection {name!r} with content already: open it, or take another name")
    return found


def make(connection: Connection, wanted: Collection) -> tuple[Collection, int]:
    """Make the collection's tables, or take over those of an empty one that is alike. Raises `StoreError`."""
    connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
    extension = _extension(connection)
    if extension is None:
        if not connection.execute("SELECT FROM pg_available_extensions WHERE name = 'vector'").fetchall():
            raise StoreError("the server has no pgvector: install the extension there")
        connection.execute("CREATE EXTENSION vector")
        extension = _extension(connection) or "public"
    made = replace(wanted, extension=extension)
    found = check_free(connection, made.name)
    if found is not None:
        if found[0] != made:
            raise StoreError(f"there is a collection {made.name!r} of another dimension or with other keys already")
        return found
    for statement in _statements(made):
        connection.execute(statement)
    connection.execute(
        "INSERT INTO dpicl_collections (name, dimension, keys) VALUES (%s, %s, %s)",
        [made.name, made.dimension, json.dumps(made.keys)],
    )
    return made, 0


def remember(connection: Connection, name: str, budget: OpenedBudget) -> tuple[OpenedBudget, ...]:
    """Write down that a budget was opened on a collection; the others that were."""
    if not _exists(connection, "dpicl_budgets"):
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
        connection.execute(
            "CREATE TABLE IF NOT EXISTS dpicl_budgets (collection text NOT NULL REFERENCES dpicl_collections, "
            "ledger text NOT NULL, url text NOT NULL, name text NOT NULL, PRIMARY KEY (collection, ledger, name))"
        )
    connection.execute(
        "INSERT INTO dpicl_budgets VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
        [name, budget.ledger, budget.url, budget.name],
    )
    found = remembered(connection, name)
    return tuple(each for each in found if (each.ledger, each.name) != (budget.ledger, budget.name))


def remembered(connection: Connection, name: str) -> tuple[OpenedBudget, ...]:
    """The budgets that were opened on a collection."""
    if not _exists(connection, "dpicl_budgets"):
        return ()
    query = "SELECT ledger, url, name FROM dpicl_budgets WHERE collection = %s ORDER BY ledger, name"
    return tuple(OpenedBudget(*row) for row in connection.execute(query, [name]).fetchall())


def _exists(connection: Connection, table: str) -> bool:
    return connection.execute("SELECT to_regclass(%s)", [table]).fetchall() != [(None,)]


def _extension(connection: Connection) -> str | None:
    """The schema of pgvector, quoted; None if the database does not have it."""
    query = (
        "SELECT quote_ident(nspname) FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace "
        "WHERE extname = 'vector'"
    )
    row = connection.execute(query).fetchone()
    return None if row is None else str(row[0])


def _statements(made: Collection) -> Iterator[str]:
    owners, exemplars, forgotten = made.owners, made.exemplars, made.forgotten
    yield (
        "CREATE TABLE IF NOT EXISTS dpicl_collections (name text PRIMARY KEY, dimension integer NOT NULL, "
        "keys text NOT NULL, next_id bigint NOT NULL DEFAULT 0, next_number bigint NOT NULL DEFAULT 0, "
        "forgets bigint NOT NULL DEFAULT 0)"
    )
    # An owner without a name of its own is known by its exemplar's content, of which it has a hash.
    yield f"CREATE TABLE {owners} (number bigint PRIMARY KEY, name bytea NOT NULL, digest bytea)"
    yield f"CREATE UNIQUE INDEX {owners}_name ON {owners} (sha256(name))"
    yield f"CREATE INDEX {owners}_digest ON {owners} (digest) WHERE digest IS NOT NULL"
    yield (
        f"CREATE TABLE {exemplars} (id bigint PRIMARY KEY, owner bigint NOT NULL REFERENCES {owners}, "
        f"content bytea NOT NULL, embedding {made.extension}.vector({made.dimension}) NOT NULL)"
    )
    yield f"CREATE INDEX {exemplars}_owner ON {exemplars} (owner, id)"
    yield f"CREATE TABLE {forgotten} (entry bigint PRIMARY KEY, ids bigint[] NOT NULL)"
    for table, column in [(owners, "name"), (owners, "digest"), (exemplars, "content"), (exemplars, "embedding")]:
        yield f"ALTER TABLE {table} ALTER COLUMN {column} SET STATISTICS 0"
    yield f"ALTER INDEX {owners}_name ALTER COLUMN 1 SET STATISTICS 0"
    if made.dimension <= _BESIDE_THE_TEXT:
        yield f"ALTER TABLE {exemplars} ALTER COLUMN embedding SET STORAGE PLAIN"
