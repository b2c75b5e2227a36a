"""A store's tables, on SQLite and PostgreSQL alike, and the changes to them.

A row in ``dpicl_collections`` and three tables of its own: owners, exemplars, and the exemplars that went. Names, texts
and documents' ids are bytes: no encoding or collation makes two owners equal. PostgreSQL keeps them out of the
planner's statistics, which are copies that forgetting would not reach.

**The log.** Every change has a number, the next `entry` of its collection. An exemplar has that of the change in which
it came, and one that went leaves its id beside that of the change in which it went. So whoever knows an entry finds in
the tables what came and went since, and nothing else.

**Overwritten.** SQLite moves the beginnings of rows from page to page, and may leave copies of them that secure_delete
does not reach. The rest of a long row has pages of its own, which never move and are overwritten when it goes. So a
page of zeros, ``apart``, stands in each row before all that is private. A hash may stay behind in an index: it tells no
more than the mark of an owner who was forgotten.

A change holds the collection's row until it is committed. So changes follow one another, entries have no gaps, and an
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
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy.engine import Connection

from langchain_dpicl.errors import InvalidParameter, InvalidRecords, StoreError, UnknownOwner
from langchain_dpicl.sql import direct
from langchain_dpicl.store.base import Arrival, Identity, Numbers, owner_mark
from langchain_dpicl.store.database import APPLICATION, StoreDatabase, fetch, fetch_among
from langchain_dpicl.store.notes import OpenedBudget, merged
from langchain_dpicl.store.records import NOT_UNIQUE, RecordKeys, Vectors, decoded, encoded

MOST_DIMENSIONS = 16_000  # of pgvector's type ``vector``
KEY = 32
"""Bytes of a key of owners' marks."""

MAKING = 0x6470_6963_6C  # PostgreSQL's advisory lock under which collections are made
_BESIDE_THE_TEXT = 1900
"""Dimensions up to which a vector lies in its row, on PostgreSQL. Elsewhere each would be looked up in an index of its
own, one by one, whenever a query goes over all of them."""

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_NUMBER = re.compile(r"#(0|[1-9][0-9]{0,17})")

_TYPES = {
    "sqlite": {
        "number": "integer",
        "bytes": "blob",
        "real": "real",
        "vector": "blob",
        "apart": f"apart blob NOT NULL DEFAULT (zeroblob({StoreDatabase.page_size})),",
    },
    "postgresql": {"number": "bigint", "bytes": "bytea", "real": "double precision", "apart": ""},
}
SHARED = (
    """CREATE TABLE IF NOT EXISTS dpicl_collections (name text PRIMARY KEY, identity text NOT NULL,
        dimension integer NOT NULL, keys text NOT NULL, owner_key {bytes} NOT NULL, forgotten_key {bytes} NOT NULL,
        entry {number} NOT NULL DEFAULT 0, next_id {number} NOT NULL DEFAULT 0,
        next_number {number} NOT NULL DEFAULT 0)""",
    """CREATE TABLE IF NOT EXISTS dpicl_opened_budgets (collection text NOT NULL REFERENCES dpicl_collections,
        ledger text NOT NULL, url text NOT NULL, name text NOT NULL, epsilon {real}, delta {real},
        PRIMARY KEY (collection, ledger, name))""",
    """CREATE TABLE IF NOT EXISTS dpicl_released_once (collection text NOT NULL REFERENCES dpicl_collections,
        release text NOT NULL, PRIMARY KEY (collection, release))""",
    """CREATE TABLE IF NOT EXISTS dpicl_forgotten_marks (collection text NOT NULL REFERENCES dpicl_collections,
        mark {bytes} NOT NULL, PRIMARY KEY (collection, mark))""",
)
GONE = "CREATE TABLE {gone} (entry {number} NOT NULL, id {number} NOT NULL, PRIMARY KEY (entry, id))"
_OWN = (
    """CREATE TABLE {owners} (number {number} PRIMARY KEY, name_hash text NOT NULL UNIQUE, content_hash text,
        {apart} name {bytes} NOT NULL)""",
    "CREATE INDEX {owners}_content ON {owners} (content_hash)",
    """CREATE TABLE {exemplars} (id {number} PRIMARY KEY, owner {number} NOT NULL REFERENCES {owners},
        entry {number} NOT NULL, document_hash text UNIQUE, {apart} embedding {vector} NOT NULL, document {bytes},
        content {bytes} NOT NULL)""",
    "CREATE INDEX {exemplars}_owner ON {exemplars} (owner, id)",
    "CREATE INDEX {exemplars}_entry ON {exemplars} (entry, id)",
    GONE,
)
UNSEEN = (  # by PostgreSQL's planner
    """ALTER TABLE {owners} ALTER COLUMN name SET STATISTICS 0, ALTER COLUMN name_hash SET STATISTICS 0,
        ALTER COLUMN content_hash SET STATISTICS 0""",
    """ALTER TABLE {exemplars} ALTER COLUMN content SET STATISTICS 0, ALTER COLUMN document SET STATISTICS 0,
        ALTER COLUMN document_hash SET STATISTICS 0, ALTER COLUMN embedding SET STATISTICS 0""",
)


class Collection:
    """A collection's name, its public settings and its tables.

    Parameters
    ----------
    schema
        PostgreSQL's schema with pgvector, quoted; None on SQLite.
    """

    def __init__(self, name: str, identity: str, dimension: int, keys: RecordKeys, schema: str | None) -> None:
        self.name = name
        self.identity = identity
        self.dimension = dimension
        self.keys = keys
        self.schema = schema
        self.owners = f"dpicl_{name}_owners"
        self.exemplars = f"dpicl_{name}_exemplars"
        self.gone = f"dpicl_{name}_gone"
        self.embedding = f"{schema}.vector_send(embedding)"
        """The vector in a query, for `unpacked`."""
        if schema is None:
            self.embedding = "embedding"

    def packed(self, matrix: Vectors) -> Iterable[bytes]:
        """Each vector as the database takes it: on PostgreSQL as pgvector receives it."""
        if self.schema is None:
            return (row.tobytes() for row in matrix.astype("<f4", copy=False))
        head = struct.pack(">HH", matrix.shape[1], 0)
        return (head + row.tobytes() for row in matrix.astype(">f4"))

    def unpacked(self, vectors: Sequence[bytes]) -> Vectors:
        """These vectors, as the database gave them: to be copied, since the bytes may be in another order."""
        whole = b"".join(vectors)
        if self.schema is None:
            return np.frombuffer(whole, "<f4").reshape(-1, self.dimension)
        return np.frombuffer(whole, ">f4").reshape(-1, self.dimension + 1)[:, 1:]


def check_name(name: object) -> None:
    """A collection's name becomes part of its tables' names. Raises `InvalidParameter`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter("name", name, "up to 40 of a-z, 0-9 and _, the first one no digit")


def hash_of(content: bytes) -> str:
    """The hash by which a name, a content or a document's id is looked up."""
    return hashlib.sha256(content).hexdigest()


# -- collections -------------------------------------------------------------------------------------------------------


def find(connection: Connection, name: str) -> Collection | None:
    """The collection of this name, if there is one. `StoreError` for one of an earlier version."""
    if not has_table(connection, "dpicl_collections"):
        return None
    if not has_table(connection, "dpicl_forgotten_marks"):
        raise StoreError("an earlier version made the collections of this database: dpicl upgrade URL brings them up")
    query = "SELECT identity, dimension, keys FROM dpicl_collections WHERE name = :name"
    rows = fetch(connection, query, name=name)
    if not rows:
        return None
    identity, dimension, keys = rows[0]
    return Collection(name, identity, dimension, RecordKeys(*json.loads(keys)), schema_of(connection))


def check_free(connection: Connection, name: str) -> None:
    """Raise `StoreError` for a collection with content."""
    found = find(connection, name)
    if found is not None and fetch(connection, f"SELECT 1 FROM {found.exemplars} LIMIT 1"):
        raise StoreError(f"there is a collection {name!r} with content already: open it, or take another name")


def make(connection: Connection, name: str, dimension: int, keys: RecordKeys) -> Collection:
    """Make a collection, or find the one that another process has made since the last look."""
    if dimension > MOST_DIMENSIONS:
        raise InvalidRecords(f"embeddings have {dimension} dimensions, a store holds {MOST_DIMENSIONS}")
    if connection.dialect.name == "postgresql":
        direct(connection, "SELECT pg_advisory_xact_lock(:lock)", {"lock": MAKING})
    if (found := find(connection, name)) is not None:
        return found
    made = Collection(name, secrets.token_hex(16), dimension, keys, _with_pgvector(connection))
    define(connection, made)
    row = {
        "name": name,
        "identity": made.identity,
        "dimension": dimension,
        "keys": json.dumps(keys),
        "owner_key": secrets.token_bytes(KEY),
        "forgotten_key": secrets.token_bytes(KEY),
    }
    columns = ", ".join(row)
    direct(connection, f"INSERT INTO dpicl_collections ({columns}) VALUES (:{', :'.join(row)})", row)
    return made


def check_alike(made: Collection, dimension: int, keys: RecordKeys) -> None:
    """Raise `StoreError` for a collection of another dimension or with other keys."""
    if (made.dimension, made.keys) != (dimension, keys):
        raise StoreError(f"there is a collection {made.name!r} of another dimension or with other keys already")


def define(connection: Connection, made: Collection) -> None:
    """Make the tables of a collection, and those that all share."""
    statements = [*SHARED, *_OWN]
    if made.schema is None:
        statements.append(f"PRAGMA application_id={APPLICATION}")
    else:
        statements += UNSEEN
        if made.dimension <= _BESIDE_THE_TEXT:
            statements.append("ALTER TABLE {exemplars} ALTER COLUMN embedding SET STORAGE PLAIN")
    execute(connection, made, statements)


def execute(connection: Connection, collection: Collection, statements: Iterable[str]) -> None:
    """Run statements in which a collection's tables, and the database's types, have their names in braces."""
    names = {"owners": collection.owners, "exemplars": collection.exemplars, "gone": collection.gone}
    types = _TYPES[connection.dialect.name] | names
    if collection.schema is not None:
        types["vector"] = f"{collection.schema}.vector({collection.dimension})"
    for statement in statements:
        direct(connection, statement.format(**types), {})


def has_table(connection: Connection, table: str) -> bool:
    """True if there is this table, where the connection looks for it."""
    if connection.dialect.name == "sqlite":
        return bool(fetch(connection, "SELECT 1 FROM sqlite_master WHERE name = :table", table=table))
    # To go over pg_class tells the session of tables that others have just made; to_regclass alone may not know them.
    return bool(fetch(connection, "SELECT 1 FROM pg_class WHERE oid = to_regclass(:table)", table=table))


def schema_of(connection: Connection) -> str | None:
    """The schema of pgvector, quoted; None if there is none."""
    if connection.dialect.name == "sqlite":
        return None
    query = "SELECT CAST(CAST(extnamespace AS regnamespace) AS text) FROM pg_extension WHERE extname = 'vector'"
    rows = fetch(connection, query)
    return str(rows[0][0]) if rows else None


def _with_pgvector(connection: Connection) -> str | None:
    """The schema of pgvector, which is made if it has to be; None on SQLite. Raises `StoreError`."""
    if connection.dialect.name == "sqlite":
        return None
    if schema_of(connection) is None:
        if not fetch(connection, "SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"):
            raise StoreError("the server has no pgvector: install the extension there")
        direct(connection, "CREATE EXTENSION vector", {})
    return schema_of(connection)


def went_since(connection: Connection | None, collection: Collection, entry: int) -> Numbers:
    """The ids of the exemplars that went after this entry."""
    rows = fetch(connection, f"SELECT id FROM {collection.gone} WHERE entry > :entry ORDER BY entry, id", entry=entry)
    return np.array([id for (id,) in rows], np.int64)


# -- beside the records ------------------------------------------------------------------------------------------------


def budgets(connection: Connection, name: str, new: Sequence[OpenedBudget] = ()) -> tuple[OpenedBudget, ...]:
    """The budgets that were opened on a collection, with these, which are written down."""
    query = "SELECT ledger, url, name, epsilon, delta FROM dpicl_opened_budgets WHERE collection = :collection"
    rows = fetch(connection, f"{query} ORDER BY ledger, name", collection=name)
    known = [OpenedBudget(*row) for row in rows]
    every = merged(known, new)
    for budget in set(every) - set(known):
        values = dict(zip(("ledger", "url", "name", "epsilon", "delta"), astuple(budget), strict=True))
        direct(
            connection,
            "INSERT INTO dpicl_opened_budgets (collection, ledger, url, name, epsilon, delta) "
            "VALUES (:collection, :ledger, :url, :name, :epsilon, :delta) "
            "ON CONFLICT (collection, ledger, name) DO UPDATE "
            "SET url = excluded.url, epsilon = excluded.epsilon, delta = excluded.delta",
            {"collection": name, **values},
        )
    return every


def owner_key(connection: Connection, name: str) -> bytes:
    """The key of a collection's marks in ledgers."""
    query = "SELECT owner_key FROM dpicl_collections WHERE name = :name"
    return bytes(fetch(connection, query, name=name)[0][0])


def take_owner_key(connection: Connection, name: str, key: bytes) -> None:
    """Give a collection that never had an exemplar this key."""
    statement = "UPDATE dpicl_collections SET owner_key = :key WHERE name = :name AND next_id = 0"
    direct(connection, statement, {"name": name, "key": key})


def releases(connection: Connection, name: str, new: str | None = None) -> tuple[str, ...]:
    """Return the releases that were made once of a collection, with a new one, which is written down."""
    if new is not None:
        statement = "INSERT INTO dpicl_released_once VALUES (:name, :release) ON CONFLICT DO NOTHING"
        direct(connection, statement, {"name": name, "release": new})
    query = "SELECT release FROM dpicl_released_once WHERE collection = :name ORDER BY release"
    return tuple(str(release) for (release,) in fetch(connection, query, name=name))


def forgotten(connection: Connection, name: str) -> tuple[bytes, frozenset[bytes]]:
    """The key of a collection's marks of forgotten owners, and the marks."""
    (key,) = fetch(connection, "SELECT forgotten_key FROM dpicl_collections WHERE name = :name", name=name)[0]
    rows = fetch(connection, "SELECT mark FROM dpicl_forgotten_marks WHERE collection = :name", name=name)
    return bytes(key), frozenset(bytes(mark) for (mark,) in rows)


# -- changes -----------------------------------------------------------------------------------------------------------


class _Counters(NamedTuple):
    entry: int
    next_id: int
    next_number: int


def _begin(connection: Connection, collection: Collection) -> _Counters:
    """Let nobody else change the collection until this transaction ends; its counters, with a new entry."""
    query = "SELECT entry + 1, next_id, next_number FROM dpicl_collections WHERE name = :name AND identity = :identity"
    if collection.schema is not None:
        query += " FOR UPDATE"
    rows = fetch(connection, query, name=collection.name, identity=collection.identity)
    if not rows:
        raise StoreError(f"there is no collection {collection.name!r} any more")
    return _Counters(*rows[0])


def _end(connection: Connection, collection: Collection, counters: _Counters) -> None:
    direct(
        connection,
        "UPDATE dpicl_collections SET entry = :entry, next_id = :next_id, next_number = :next_number "
        "WHERE name = :name",
        {"name": collection.name, **counters._asdict()},
    )


def _enter(
    connection: Connection,
    into: Collection,
    counters: _Counters,
    arrival: Arrival,
) -> tuple[list[int], _Counters]:
    """Add exemplars with their owners and ids as documents, and return their ids and the counters after them.

    Raises `InvalidRecords` for an id that is there already.
    """
    batch = arrival.batch
    ids = batch.ids
    if ids is None:
        ids = np.arange(counters.next_id, counters.next_id + len(batch.texts))
    elif any(fetch_among(connection, f"SELECT id FROM {into.exemplars} WHERE", "id", ids.tolist())):
        raise InvalidRecords(NOT_UNIQUE)
    names = batch.names(ids)
    hashes = {name: hash_of(encoded(name)) for name in dict.fromkeys(names)}
    query = f"SELECT name_hash, number FROM {into.owners} WHERE"
    known = dict(fetch_among(connection, query, "name_hash", list(hashes.values()), "text"))
    new = [name for name, hash in hashes.items() if hash not in known]
    known |= {hashes[name]: counters.next_number + i for i, name in enumerate(new)}
    contents: dict[str, str] = {}
    if batch.owners is None:
        contents = {name: hash_of(content) for name, content in zip(names, batch.contents, strict=True)}
    owners = [(known[hashes[name]], encoded(name), hashes[name], contents.get(name)) for name in new]
    insert_owners(connection, into, owners)
    insert_exemplars(
        connection,
        into,
        counters.entry,
        ids.tolist(),
        [known[hashes[name]] for name in names],
        [encoded(each) for each in arrival.documents],
        batch.contents,
        arrival.matrix,
    )
    after = _Counters(
        counters.entry,
        max(counters.next_id, int(ids.max(initial=-1)) + 1),
        counters.next_number + len(new),
    )
    return ids.tolist(), after


def insert_owners(
    connection: Connection,
    into: Collection,
    owners: Iterable[tuple[int, bytes, str, str | None]],
) -> None:
    """Insert owners: each one's number, name, and the name's hash; the content's too of one who is known by it."""
    columns = "(number, name, name_hash, content_hash)"
    _insert(connection, f"{into.owners} {columns}", ("int8", "bytea", "text", "text"), owners)


def insert_exemplars(
    connection: Connection,
    into: Collection,
    entry: int,
    ids: Sequence[int],
    owners: Sequence[int],
    documents: Sequence[bytes],
    contents: Sequence[bytes],
    matrix: Vectors,
) -> None:
    """Insert exemplars of one entry. ``documents`` are their ids as documents, empty for one that has none."""
    _insert(
        connection,
        f"{into.exemplars} (id, owner, entry, document, document_hash, content, embedding)",
        ("int8", "int8", "int8", "bytea", "text", "bytea", "bytea"),
        zip(
            ids,
            owners,
            [entry] * len(ids),
            [each or None for each in documents],
            [hash_of(each) if each else None for each in documents],
            contents,
            into.packed(matrix),
            strict=True,
        ),
    )


def _insert(connection: Connection, target: str, types: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """Insert rows, in bulk."""
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        driver.executemany(f"INSERT INTO {target} VALUES ({', '.join('?' * len(types))})", rows)
        return
    with driver.cursor() as cursor, cursor.copy(f"COPY {target} FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(types)
        for row in rows:
            copy.write_row(row)


def change(
    connection: Connection,
    collection: Collection,
    arrival: Arrival | None,
    gone: Sequence[str] = (),
) -> tuple[list[int], list[int]]:
    """Remove these documents and those that arrivals replace, and add the arrivals, as one change.

    An owner who has a document before and after stays. An owner without a name goes with the exemplar that it is. The
    ids of the exemplars that came, and of those that went.
    """
    counters = _begin(connection, collection)
    came: list[int] = []
    leaving = list(gone)
    if arrival is not None:
        leaving += arrival.documents
    rows = rows_with(connection, collection, leaving)
    owners = {owner for _, owner in rows}
    unnamed = f"SELECT number FROM {collection.owners} WHERE content_hash IS NOT NULL AND"
    whole = [number for (number,) in fetch_among(connection, unnamed, "number", sorted(owners))]
    with_them = f"SELECT id FROM {collection.exemplars} WHERE"
    ids = {id for id, _ in rows} | {id for (id,) in fetch_among(connection, with_them, "owner", whole)}
    _remove(connection, collection, counters.entry, sorted(ids))
    if arrival is not None:
        came, counters = _enter(connection, collection, counters, arrival)
    present = f"SELECT owner FROM {collection.exemplars} WHERE"
    stay = {owner for (owner,) in fetch_among(connection, present, "owner", sorted(owners))}
    _delete(connection, f"DELETE FROM {collection.owners} WHERE", "number", sorted(owners - stay))
    _end(connection, collection, counters)
    return came, sorted(ids)


def rows_with(connection: Connection | None, collection: Collection, documents: Sequence[str]) -> list[tuple[int, int]]:
    """The ids of these documents' rows and their owners' numbers, as far as there are any."""
    query = f"SELECT id, owner FROM {collection.exemplars} WHERE"
    hashes = [hash_of(encoded(each)) for each in documents if each]
    numbers = [int(each[1:]) for each in documents if _NUMBER.fullmatch(each)]
    found = dict(fetch_among(connection, query, "document_hash", hashes, "text"))
    found |= dict(fetch_among(connection, f"{query} document_hash IS NULL AND", "id", numbers))
    return sorted(found.items())


def _remove(connection: Connection, collection: Collection, entry: int, ids: Sequence[int]) -> None:
    """Delete exemplars, and log it."""
    _delete(connection, f"DELETE FROM {collection.exemplars} WHERE", "id", ids)
    _insert(connection, f"{collection.gone} (entry, id)", ("int8", "int8"), [(entry, id) for id in ids])


def _delete(connection: Connection, statement: str, column: str, values: Sequence[int]) -> None:
    direct(connection, f"{statement} {column} = :value", *({"value": value} for value in values))


class Gone(NamedTuple):
    """An owner that was deleted, for ledgers: its exemplars' ids, and its identity.

    The identity is None if an equal exemplar, its own owner too, has the same marks.
    """

    ids: list[int]
    identity: Identity | None


def delete(
    connection: Connection,
    collection: Collection,
    owner: str,
    leave: Callable[[list[str]], None],
) -> Gone:
    """Delete an owner with all exemplars. ``leave`` hears its documents' ids before. Raises `UnknownOwner`."""
    counters = _begin(connection, collection)
    query = f"SELECT number, name, content_hash FROM {collection.owners} WHERE name_hash = :hash"
    rows = fetch(connection, query, hash=hash_of(encoded(owner)))
    if not rows:
        raise UnknownOwner("the store holds no such owner")
    number, name, content_hash = rows[0]
    query = f"SELECT id, document, content FROM {collection.exemplars} WHERE owner = :number ORDER BY id"
    exemplars = fetch(connection, query, number=number)
    leave([document_of(document, id) for id, document, _ in exemplars])
    ids = [id for id, _, _ in exemplars]
    identity = Identity(bytes(name), True)
    if content_hash is not None:  # an owner of its own, known by its exemplar
        content = next(bytes(each) for _, _, each in exemplars if hash_of(bytes(each)) == content_hash)
        identity = Identity(content, False)
    _remove(connection, collection, counters.entry, ids)
    direct(connection, f"DELETE FROM {collection.owners} WHERE number = :number", {"number": number})
    key, _ = forgotten(connection, collection.name)
    mark = owner_mark(key, identity.content, named=identity.is_named)
    statement = "INSERT INTO dpicl_forgotten_marks VALUES (:collection, :mark) ON CONFLICT DO NOTHING"
    direct(connection, statement, {"collection": collection.name, "mark": mark})
    _end(connection, collection, counters)
    equal = f"SELECT 1 FROM {collection.owners} WHERE content_hash = :hash LIMIT 1"
    if content_hash is not None and fetch(connection, equal, hash=content_hash):
        return Gone(ids, None)
    return Gone(ids, identity)


def document_of(document: bytes | None, id: int) -> str:
    """An exemplar's id as a document."""
    return f"#{id}" if document is None else decoded(bytes(document))
