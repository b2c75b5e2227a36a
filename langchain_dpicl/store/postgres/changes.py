"""Changes to a collection: exemplars that come, and owners who go.

A change holds the collection's row until it is committed. So changes follow one another, counters have no gaps, and an
owner has one number whatever process adds to it. Readers wait for nobody.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_dpicl.errors import InvalidRecords, StoreError, UnknownOwner
from langchain_dpicl.store.base import Forgotten, Numbers
from langchain_dpicl.store.intake import NOT_UNIQUE, Batch, Vectors
from langchain_dpicl.store.owners import encoded
from langchain_dpicl.store.postgres.tables import Collection

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[Any]

_BLOCK = 1024


def hold(connection: Connection, collection: Collection) -> tuple[int, int, int]:
    """Let nobody else change the collection until this transaction ends; its counters."""
    query = "SELECT next_id, next_number, forgets FROM dpicl_collections WHERE name = %s FOR UPDATE"
    row = connection.execute(query, [collection.name]).fetchone()
    if row is None:
        raise StoreError(f"there is no collection {collection.name!r} any more")
    return int(row[0]), int(row[1]), int(row[2])


def insert(connection: Connection, into: Collection, batch: Batch, matrix: Vectors) -> list[int]:
    """Add exemplars with their owners; their ids. Raises `InvalidRecords` for an id that is there already."""
    next_id, next_number, _ = hold(connection, into)
    ids = np.arange(next_id, next_id + len(matrix)) if batch.ids is None else batch.ids
    taken = f"SELECT FROM {into.exemplars} WHERE id = ANY(%s::bigint[]) LIMIT 1"
    if batch.ids is not None and connection.execute(taken, [array(ids)]).fetchall():
        raise InvalidRecords(NOT_UNIQUE)
    names = batch.names(ids)
    first: dict[str, int] = {}
    for position, name in enumerate(names):
        first.setdefault(name, position)
    distinct = list(first)
    query = (
        "SELECT o.position, w.number FROM unnest(%b::bytea[]) WITH ORDINALITY AS o (name, position) "
        f"JOIN {into.owners} w ON sha256(w.name) = sha256(o.name)"
    )
    found = connection.execute(query, [[encoded(name) for name in distinct]]).fetchall()
    numbers: dict[str, int] = {distinct[position - 1]: number for position, number in found}
    new = [name for name in distinct if name not in numbers]
    numbers |= {name: next_number + i for i, name in enumerate(new)}
    owners = (
        _row(
            _bigint(numbers[name]),
            encoded(name),
            digest_of(batch.contents[first[name]]) if batch.owners is None else None,
        )
        for name in new
    )
    _copy(connection, f"{into.owners} (number, name, digest)", owners)
    exemplars = _exemplars(ids, [numbers[name] for name in names], batch.contents, matrix)
    _copy(connection, f"{into.exemplars} (id, owner, content, embedding)", exemplars)
    connection.execute(
        "UPDATE dpicl_collections SET next_id = greatest(next_id, %s), next_number = %s WHERE name = %s",
        [int(ids.max()) + 1, next_number + len(new), into.name],
    )
    return [int(i) for i in ids]


def _exemplars(ids: Numbers, owners: Sequence[int], contents: Sequence[bytes], matrix: Vectors) -> Iterator[bytes]:
    head = struct.pack(">HH", matrix.shape[1], 0)
    for start in range(0, len(contents), _BLOCK):
        for i, vector in enumerate(matrix[start : start + _BLOCK].astype(">f4"), start):
            yield _row(_bigint(int(ids[i])), _bigint(owners[i]), contents[i], head + vector.tobytes())


def _bigint(number: int) -> bytes:
    return struct.pack(">q", number)


def _row(*cells: bytes | None) -> bytes:
    """One row in the form of a binary COPY."""
    parts = [struct.pack(">h", len(cells))]
    for cell in cells:
        parts += [struct.pack(">i", -1)] if cell is None else [struct.pack(">i", len(cell)), cell]
    return b"".join(parts)


def _copy(connection: Connection, target: str, rows: Iterable[bytes]) -> None:
    with connection.cursor() as cursor, cursor.copy(f"COPY {target} FROM STDIN (FORMAT BINARY)") as copy:
        copy.write(b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0))
        left = iter(rows)
        while block := b"".join(itertools.islice(left, _BLOCK)):
            copy.write(block)
        copy.write(struct.pack(">h", -1))


def delete(connection: Connection, collection: Collection, owner: str) -> tuple[Forgotten, int]:
    """Delete an owner with all exemplars, and count it. Raises `UnknownOwner`."""
    entry = hold(connection, collection)[2] + 1
    query = f"SELECT number, name, digest FROM {collection.owners} WHERE sha256(name) = sha256(%b)"
    row = connection.execute(query, [encoded(owner)]).fetchone()
    if row is None:
        raise UnknownOwner("the store holds no such owner")
    number, name, digest = row
    deleted = connection.cursor(binary=True).execute(
        f"DELETE FROM {collection.exemplars} WHERE owner = %s RETURNING id, content", [number]
    )
    exemplars = sorted(deleted.fetchall())
    ids = [int(row[0]) for row in exemplars]
    contents = list(dict.fromkeys(bytes(row[1]) for row in exemplars))
    connection.execute(f"DELETE FROM {collection.owners} WHERE number = %s", [number])
    connection.execute(f"INSERT INTO {collection.forgotten} VALUES (%s, %s)", [entry, ids])
    connection.execute("UPDATE dpicl_collections SET forgets = %s WHERE name = %s", [entry, collection.name])
    parts = [bytes(name)] if digest is None else []
    if collection.keys.owner_key is None:
        same = f"SELECT DISTINCT content FROM {collection.exemplars} WHERE content = ANY(%b::bytea[])"
        others = {bytes(content) for (content,) in connection.execute(same, [contents]).fetchall()}
        parts += [content for content in contents if content not in others]
    identity: bytes | None = bytes(name)
    if digest is not None:  # an owner of its own, known by its exemplar
        query = f"SELECT FROM {collection.owners} WHERE digest = %b LIMIT 1"
        has_equal = bool(connection.execute(query, [digest]).fetchall())
        identity = None if has_equal else next(each for each in contents if digest_of(each) == digest)
    return Forgotten(ids, identity, digest is None, parts), entry


def array(numbers: Numbers) -> str:
    """Numbers as a value that is cast to ``bigint[]``."""
    return "{" + ",".join(map(str, numbers.tolist())) + "}"


def digest_of(content: bytes) -> bytes:
    """The server's ``sha256(content)``."""
    return hashlib.sha256(content).digest()
