"""A collection on PostgreSQL: its tables, and the changes to them.

A row in ``dpicl_collections`` and three tables of its own. Names, texts and their hashes are bytes: no encoding or
collation makes two owners equal. They are kept out of the planner's statistics, which are copies that forgetting would
not reach.

A change holds the collection's row until it is committed. So changes follow one another, counters have no gaps, and an
owner has one number whatever process adds to it. Readers wait for nobody.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_dpicl.errors import (
    InvalidParameter,
    InvalidRecords,
    StoreError,
    UnknownOwner,
)
from langchain_dpicl.store.base import Arrival, Numbers, owner_mark
from langchain_dpicl.store.notes import OpenedBudget, merged
from langchain_dpicl.store.records import (
    NOT_UNIQUE,
    Batch,
    RecordKeys,
    Vectors,
    decoded,
    encoded,
)

if TYPE_CHECKING:
    from langchain_dpicl.store.sql import Connection

MOST_DIMENSIONS = 16_000  # of pgvector's type ``vector``
_MAKING = 0x6470_6963_6C  # the advisory lock under which collections are made
_BESIDE_THE_TEXT = 1900
"""Dimensions up to which a vector lies in its row. Elsewhere each would be looked up in an index of its own, one by
one, whenever a query goes over all of them."""

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")


class Collection:
    """A collection's name, its public settings and its tables.

    ``extension`` is the schema in which pgvector is installed, quoted. ``forgets`` is how many changes were logged when
    it was opened. ``forgotten`` is the log, for workers that keep something of an exemplar: ids that went, or came
    although they were below the next id, without anything else.
    """

    def __init__(self, name: str, dimension: int, keys: RecordKeys, extension: str, forgets: int = 0) -> None:
        self.name = name
        self.dimension = dimension
        self.keys = keys
        self.extension = extension
        self.forgets = forgets
        self.owners = f"dpicl_{name}_owners"
        self.exemplars = f"dpicl_{name}_exemplars"
        self.forgotten = f"dpicl_{name}_forgotten"


def check_name(name: object) -> None:
    """A collection's name becomes part of its tables' names. Raises `InvalidParameter`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter("name", name, "up to 40 of a-z, 0-9 and _, the first one no digit")


def find(connection: Connection, name: str) -> Collection | None:
    """The collection of this name, if there is one."""
    row = None
    if _exists(connection, "dpicl_collections"):
        row = connection.execute(
            "SELECT dimension, keys, forgets FROM dpicl_collections WHERE name = %s",
            [name],
        ).fetchone()
    extension = _extension(connection)
    if row is None or extension is None:
        return None
    return Collection(name, int(row[0]), RecordKeys(*json.loads(row[1])), extension, int(row[2]))


def check_free(connection: Connection, name: str) -> Collection | None:
    """An empty collection of this name, if there is one. Raises `StoreError` for one with content."""
    found = find(connection, name)
    if found is not None and connection.execute(f"SELECT FROM {found.exemplars} LIMIT 1").fetchall():
        raise StoreError(f"there is a collection {name!r} with content already: open it, or take another name")
    return found


def make(
    connection: Connection,
    name: str,
    dimension: int,
    keys: RecordKeys,
    batch: Batch,
    matrix: Vectors,
) -> Collection:
    """Make a collection's tables, or take over those of an empty one that is alike, and fill them.

    Raises `StoreError`.
    """
    connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
    if _extension(connection) is None:
        if not connection.execute("SELECT FROM pg_available_extensions WHERE name = 'vector'").fetchall():
            raise StoreError("the server has no pgvector: install the extension there")
        connection.execute("CREATE EXTENSION vector")
    made = check_free(connection, name)
    if made is None:
        made = Collection(name, dimension, keys, _extension(connection) or "public")
        owners, exemplars = made.owners, made.exemplars
        # An owner without a name of its own is known by its exemplar's content, of which its row has a hash.
        connection.execute(
            f"""
            CREATE TABLE IF NOT EXISTS dpicl_collections (name text PRIMARY KEY, dimension integer NOT NULL,
                keys text NOT NULL, next_id bigint NOT NULL DEFAULT 0, next_number bigint NOT NULL DEFAULT 0,
                forgets bigint NOT NULL DEFAULT 0);
            CREATE TABLE {owners} (number bigint PRIMARY KEY, name bytea NOT NULL, digest bytea);
            CREATE UNIQUE INDEX {owners}_name ON {owners} (sha256(name));
            CREATE INDEX {owners}_digest ON {owners} (digest) WHERE digest IS NOT NULL;
            CREATE TABLE {exemplars} (id bigint PRIMARY KEY, owner bigint NOT NULL REFERENCES {owners},
                content bytea NOT NULL, embedding {made.extension}.vector({dimension}) NOT NULL);
            CREATE INDEX {exemplars}_owner ON {exemplars} (owner, id);
            CREATE TABLE {made.forgotten} (entry bigint PRIMARY KEY, ids bigint[] NOT NULL);
            ALTER TABLE {owners} ALTER COLUMN name SET STATISTICS 0, ALTER COLUMN digest SET STATISTICS 0;
            ALTER TABLE {exemplars} ALTER COLUMN content SET STATISTICS 0, ALTER COLUMN embedding SET STATISTICS 0;
            ALTER INDEX {owners}_name ALTER COLUMN 1 SET STATISTICS 0;
            """
        )
        add_documents(connection, made)
        forgotten(connection, name)
        if dimension <= _BESIDE_THE_TEXT:
            connection.execute(f"ALTER TABLE {exemplars} ALTER COLUMN embedding SET STORAGE PLAIN")
        connection.execute(
            "INSERT INTO dpicl_collections (name, dimension, keys) VALUES (%s, %s, %s)",
            [name, dimension, json.dumps(keys)],
        )
    elif (made.dimension, made.keys) != (dimension, keys):
        raise StoreError(f"there is a collection {name!r} of another dimension or with other keys already")
    insert(connection, made, batch, matrix)
    return made


def add_documents(connection: Connection, collection: Collection) -> None:
    """Make the column of exemplars' ids as documents, which collections of older versions lack."""
    if not _has_documents(connection, collection):
        exemplars = collection.exemplars
        connection.execute(
            f"""
            ALTER TABLE {exemplars} ADD COLUMN IF NOT EXISTS document bytea;
            ALTER TABLE {exemplars} ALTER COLUMN document SET STATISTICS 0;
            CREATE UNIQUE INDEX IF NOT EXISTS {exemplars}_document ON {exemplars} (sha256(document))
                WHERE document IS NOT NULL;
            ALTER INDEX {exemplars}_document ALTER COLUMN 1 SET STATISTICS 0;
            """
        )


def _has_documents(connection: Connection, collection: Collection) -> bool:
    return _exists(connection, f"{collection.exemplars}_document")


def budgets(connection: Connection, name: str, new: Sequence[OpenedBudget] = ()) -> tuple[OpenedBudget, ...]:
    """The budgets that were opened on a collection, with these, which are written down."""
    columns = (
        "ledger text NOT NULL, url text NOT NULL, name text NOT NULL, epsilon double precision, "
        "delta double precision, PRIMARY KEY (collection, ledger, name)"
    )
    known: list[OpenedBudget] = []
    if _kept(connection, "dpicl_opened_budgets", columns, make=bool(new)):
        found = connection.execute(
            "SELECT ledger, url, name, epsilon, delta FROM dpicl_opened_budgets WHERE collection = %s "
            "ORDER BY ledger, name",
            [name],
        )
        known += [OpenedBudget(*row) for row in found.fetchall()]
    if _exists(connection, "dpicl_budgets"):  # of an earlier version, which wrote down no promise
        found = connection.execute(
            "SELECT ledger, url, name FROM dpicl_budgets WHERE collection = %s ORDER BY ledger, name",
            [name],
        )
        known = [*(OpenedBudget(*row) for row in found.fetchall()), *known]
    every = merged(known, new)
    if new:
        for budget in set(every) - set(known):
            connection.execute(
                "INSERT INTO dpicl_opened_budgets AS old VALUES (%s, %s, %s, %s, %s, %s) "
                "ON CONFLICT (collection, ledger, name) DO UPDATE SET url = excluded.url, "
                "epsilon = greatest(old.epsilon, excluded.epsilon), delta = greatest(old.delta, excluded.delta)",
                [name, *astuple(budget)],
            )
    return every


def owner_key(connection: Connection, name: str, make: bool, offered: bytes | None) -> bytes | None:
    """The key of a collection's marks in ledgers. If it has none: make it, of the ``offered`` one, or None."""
    if not _kept(
        connection,
        "dpicl_owner_keys",
        "key bytea NOT NULL, PRIMARY KEY (collection)",
        make=make,
    ):
        return None
    if make:
        connection.execute(
            "INSERT INTO dpicl_owner_keys VALUES (%s, %b) ON CONFLICT DO NOTHING",
            [name, offered or secrets.token_bytes(32)],
        )
    found = connection.execute("SELECT key FROM dpicl_owner_keys WHERE collection = %s", [name]).fetchone()
    return None if found is None else bytes(found[0])


def releases(connection: Connection, name: str, new: str | None = None) -> tuple[str, ...]:
    """Return the releases that were made once of a collection, with a new one, which is written down."""
    if not _kept(
        connection,
        "dpicl_released_once",
        "release text NOT NULL, PRIMARY KEY (collection, release)",
        make=new is not None,
    ):
        return ()
    if new is not None:
        connection.execute(
            "INSERT INTO dpicl_released_once VALUES (%s, %s) ON CONFLICT DO NOTHING",
            [name, new],
        )
    query = "SELECT release FROM dpicl_released_once WHERE collection = %s ORDER BY release"
    return tuple(str(release) for (release,) in connection.execute(query, [name]).fetchall())


def forgotten(connection: Connection, name: str, *, make: bool = True) -> tuple[bytes, frozenset[bytes]]:
    """The key of a collection's marks of forgotten owners, and the marks, which from now on are kept if ``make``."""
    if not _kept(
        connection,
        "dpicl_forgotten_owners",
        "key bytea NOT NULL, mark bytea NOT NULL, PRIMARY KEY (collection, mark)",
        make=make,
    ):
        return b"", frozenset()
    found = connection.execute(
        "SELECT key, mark FROM dpicl_forgotten_owners WHERE collection = %s",
        [name],
    ).fetchall()
    key = found[0][0] if found else secrets.token_bytes(32)
    return key, frozenset(mark for _, mark in found)


def _kept(connection: Connection, table: str, columns: str, *, make: bool) -> bool:
    """Return whether there is this table about collections, which is made if it has to be."""
    if _exists(connection, table):
        return True
    if make:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {table} (collection text NOT NULL REFERENCES dpicl_collections, {columns})"
        )
    return make


def _exists(connection: Connection, table: str) -> bool:
    return connection.execute("SELECT to_regclass(%s)", [table]).fetchall() != [(None,)]


def _extension(connection: Connection) -> str | None:
    """The schema of pgvector, quoted; None if the database does not have it."""
    row = connection.execute(
        "SELECT extnamespace::regnamespace::text FROM pg_extension WHERE extname = 'vector'",
    ).fetchone()
    return None if row is None else str(row[0])


def _hold(connection: Connection, collection: Collection) -> tuple[int, int, int]:
    """Let nobody else change the collection until this transaction ends; its counters."""
    row = connection.execute(
        "SELECT next_id, next_number, forgets FROM dpicl_collections WHERE name = %s FOR UPDATE",
        [collection.name],
    ).fetchone()
    if row is None:
        raise StoreError(f"there is no collection {collection.name!r} any more")
    return int(row[0]), int(row[1]), int(row[2])


def insert(
    connection: Connection,
    into: Collection,
    batch: Batch,
    matrix: Vectors,
    documents: Sequence[bytes] | None = None,
) -> list[int]:
    """Add exemplars with their owners, and with their ids as documents if given; their ids.

    An empty document is none. Raises `InvalidRecords` for an id that is there already.
    """
    next_id, next_number, logged = _hold(connection, into)
    taken = f"SELECT FROM {into.exemplars} WHERE id = ANY(%s::bigint[]) LIMIT 1"
    ids = batch.ids
    if ids is None:
        ids = np.arange(next_id, next_id + len(matrix))
    elif connection.execute(taken, [as_array(ids)]).fetchall():
        raise InvalidRecords(NOT_UNIQUE)
    names = batch.names(ids)
    distinct = list(dict.fromkeys(names))
    found = connection.execute(
        "SELECT o.position, w.number FROM unnest(%b::bytea[]) WITH ORDINALITY AS o (name, position) "
        f"JOIN {into.owners} w ON sha256(w.name) = sha256(o.name)",
        [[encoded(name) for name in distinct]],
    ).fetchall()
    numbers: dict[str, int] = {distinct[position - 1]: number for position, number in found}
    new = [name for name in distinct if name not in numbers]
    numbers |= {name: next_number + i for i, name in enumerate(new)}
    digests = {} if batch.owners else dict(zip(names, map(_digest_of, batch.contents), strict=True))
    _copy(
        connection,
        f"{into.owners} (number, name, digest)",
        ["int8", "bytea", "bytea"],
        ((numbers[name], encoded(name), digests.get(name)) for name in new),
    )
    head = struct.pack(">HH", matrix.shape[1], 0)
    vectors = (head + vector.astype(">f4").tobytes() for vector in matrix)  # as pgvector receives them
    columns = "id, owner, content, embedding"
    types = ["int8", "int8", "bytea", "bytea"]
    rows: list[Iterable[Any]] = [
        ids.tolist(),
        (numbers[name] for name in names),
        batch.contents,
        vectors,
    ]
    if documents is not None:
        columns += ", document"
        types.append("bytea")
        rows.append(each or None for each in documents)
    _copy(connection, f"{into.exemplars} ({columns})", types, zip(*rows, strict=True))
    connection.execute(
        "UPDATE dpicl_collections SET next_id = greatest(next_id, %s), next_number = %s WHERE name = %s",
        [int(ids.max(initial=-1)) + 1, next_number + len(new), into.name],
    )
    if len(late := ids[ids < next_id]):
        _log(connection, into, logged + 1, late.tolist())
    return [int(i) for i in ids]


def _copy(
    connection: Connection,
    target: str,
    types: Sequence[str],
    rows: Iterable[tuple[Any, ...]],
) -> None:
    with (
        connection.cursor() as cursor,
        cursor.copy(f"COPY {target} FROM STDIN (FORMAT BINARY)") as copy,
    ):
        copy.set_types(types)
        for row in rows:
            copy.write_row(row)


def change(
    connection: Connection,
    collection: Collection,
    arrival: Arrival | None,
    gone: Sequence[str],
) -> tuple[int, list[int]]:
    """Remove these documents and those that arrivals replace, and add the arrivals (see `LiveStore`).

    The count of removals, and the ids of the exemplars that went.
    """
    entry = _hold(connection, collection)[2]
    arriving = [] if arrival is None else [encoded(each) for each in arrival.documents]
    leaving = [*map(encoded, gone), *arriving]
    exemplars, owners = collection.exemplars, collection.owners
    with_them = f"SELECT owner FROM {exemplars} JOIN {owners} ON number = owner WHERE digest IS NOT NULL"
    where = rows_with("%(documents)b::bytea[]")
    deleted = connection.execute(
        f"DELETE FROM {exemplars} WHERE {where} OR owner IN ({with_them} AND {where}) RETURNING id, owner",
        {"documents": leaving},
    ).fetchall()
    if arrival is not None:
        insert(connection, collection, arrival.batch, arrival.matrix, arriving)
    if deleted:
        connection.execute(
            f"DELETE FROM {owners} WHERE number = ANY(%s) "
            f"AND NOT EXISTS (SELECT FROM {exemplars} WHERE owner = number)",
            [list({owner for _, owner in deleted})],
        )
        entry += 1
        _log(connection, collection, entry, sorted(id for id, _ in deleted))
    return entry, sorted(int(id) for id, _ in deleted)


def rows_with(documents: str) -> str:
    """The condition for the rows of these documents: a parameter's place, as ``bytea[]``."""
    return (
        f"((document IS NOT NULL AND sha256(document) IN (SELECT sha256(d) FROM unnest({documents}) d)) OR "
        f"(document IS NULL AND id IN (SELECT substr(encode(d, 'escape'), 2)::bigint FROM unnest({documents}) d "
        "WHERE encode(d, 'escape') ~ '^#(0|[1-9][0-9]{0,17})$')))"
    )


def _log(connection: Connection, collection: Collection, entry: int, ids: Sequence[int]) -> None:
    """Tell workers of exemplars that went, or came under ids below the next."""
    connection.execute(f"INSERT INTO {collection.forgotten} VALUES (%s, %s)", [entry, list(ids)])
    connection.execute(
        "UPDATE dpicl_collections SET forgets = %s WHERE name = %s",
        [entry, collection.name],
    )


def delete(
    connection: Connection,
    collection: Collection,
    owner: str,
    leave: Callable[[list[str]], None],
) -> tuple[int, tuple[list[int], bytes | None, bool]]:
    """Delete an owner with all exemplars, and count it: the count, and what `PrivateStore._leave` tells the ledgers.

    ``leave`` hears its documents' ids before this is committed. Raises `UnknownOwner`.
    """
    entry = _hold(connection, collection)[2] + 1
    row = connection.execute(
        f"SELECT number, name, digest FROM {collection.owners} WHERE sha256(name) = sha256(%b)",
        [encoded(owner)],
    ).fetchone()
    if row is None:
        raise UnknownOwner("the store holds no such owner")
    number, name, digest = row
    document = "document" if _has_documents(connection, collection) else "NULL::bytea"
    deleted = connection.cursor(binary=True).execute(
        f"DELETE FROM {collection.exemplars} WHERE owner = %s RETURNING id, content, {document}",
        [number],
    )
    exemplars = sorted(deleted.fetchall(), key=lambda row: row[0])
    ids = [int(row[0]) for row in exemplars]
    leave([document_of(row[2], row[0]) for row in exemplars])
    contents = list(dict.fromkeys(bytes(row[1]) for row in exemplars))
    connection.execute(f"DELETE FROM {collection.owners} WHERE number = %s", [number])
    _log(connection, collection, entry, ids)
    identity = bytes(name)
    has_equal = False
    if digest is not None:  # an owner of its own, known by its exemplar
        query = f"SELECT FROM {collection.owners} WHERE digest = %b LIMIT 1"
        has_equal = bool(connection.execute(query, [digest]).fetchall())
        identity = next(each for each in contents if _digest_of(each) == digest)
    if key := forgotten(connection, collection.name, make=False)[0]:
        connection.execute(
            "INSERT INTO dpicl_forgotten_owners VALUES (%s, %b, %b) ON CONFLICT DO NOTHING",
            [collection.name, key, owner_mark(key, identity, named=digest is None)],
        )
    return entry, (ids, None if has_equal else identity, digest is None)


def document_of(document: bytes | None, id: int) -> str:
    """An exemplar's id as a document."""
    return f"#{id}" if document is None else decoded(bytes(document))


def as_array(numbers: Numbers) -> str:
    """Numbers as a value that is cast to ``bigint[]``."""
    return "{" + ",".join(map(str, numbers.tolist())) + "}"


def _digest_of(content: bytes) -> bytes:
    """The server's ``sha256(content)``."""
    return hashlib.sha256(content).digest()
