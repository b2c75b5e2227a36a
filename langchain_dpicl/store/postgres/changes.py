"""Changes to a collection: exemplars that come, and owners who go.

Whoever changes a collection holds its row until the change is committed. So changes follow one another, counters have
no gaps, and an owner has one number whoever adds to it. Readers wait for nobody.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_dpicl.errors import InvalidRecords, StoreError, UnknownOwner
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.intake import Vectors
from langchain_dpicl.store.postgres.tables import Collection

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[Any]

_BLOCK = 1024


# -- adding ------------------------------------------------------------------------------------------------------------


def insert(
    connection: Connection,
    into: Collection,
    contents: Sequence[bytes],
    owners: Sequence[str] | None,
    matrix: Vectors,
    ids: Numbers | None,
) -> list[int]:
    """Add exemplars with their owners; their ids. Raises `InvalidRecords` for an id that is there already."""
    next_id, next_number, _ = hold(connection, into)
    if ids is None:
        ids = np.arange(next_id, next_id + len(contents), dtype=np.int64)
    elif connection.execute(
        f"SELECT FROM {into.exemplars} WHERE id = ANY(%s::bigint[]) LIMIT 1", [array(ids)]
    ).fetchall():
        raise InvalidRecords("ids must be unique: one occurs twice, or is in the store already")
    names = [f"#{i}" for i in ids.tolist()] if owners is None else list(owners)
    first: dict[str, int] = {}
    for position, name in enumerate(names):
        first.setdefault(name, position)
    numbers = _numbers_of(connection, into, list(first))
    new = {name: position for name, position in first.items() if name not in numbers}
    numbers |= {name: next_number + i for i, name in enumerate(new)}
    rows = (
        _cells(
            struct.pack(">q", numbers[name]), _bytes_of(name), digest_of(contents[position]) if owners is None else None
        )
        for name, position in new.items()
    )
    _copy(connection, f"{into.owners} (number, name, digest)", rows)
    owner_of = [numbers[name] for name in names]
    _copy(connection, f"{into.exemplars} (id, owner, content, embedding)", _rows(ids, owner_of, contents, matrix))
    connection.execute(
        "UPDATE dpicl_collections SET next_id = greatest(next_id, %s), next_number = %s WHERE name = %s",
        [int(ids.max()) + 1, next_number + len(new), into.name],
    )
    return [int(i) for i in ids]


def hold(connection: Connection, collection: Collection) -> tuple[int, int, int]:
    """Let nobody else change the collection until this transaction ends; its counters."""
    query = "SELECT next_id, next_number, forgets FROM dpicl_collections WHERE name = %s FOR UPDATE"
    row = connection.execute(query, [collection.name]).fetchone()
    if row is None:
        raise StoreError(f"there is no collection {collection.name!r} any more")
    return int(row[0]), int(row[1]), int(row[2])


def _numbers_of(connection: Connection, collection: Collection, names: Sequence[str]) -> dict[str, int]:
    """The numbers of those who are in the collection."""
    query = (
        "SELECT o.position, w.number FROM unnest(%b::bytea[]) WITH ORDINALITY AS o (name, position) "
        f"JOIN {collection.owners} w ON sha256(w.name) = sha256(o.name)"
    )
    found = connection.execute(query, [[_bytes_of(name) for name in names]]).fetchall()
    return {names[position - 1]: number for position, number in found}


def _rows(ids: Numbers, owners: Sequence[int], contents: Sequence[bytes], matrix: Vectors) -> Iterator[bytes]:
    """Exemplars in the form of a binary COPY."""
    head = struct.pack(">HH", matrix.shape[1], 0)
    for start in range(0, len(contents), _BLOCK):
        block = matrix[start : start + _BLOCK].astype(">f4")
        for i, vector in enumerate(block, start):
            yield _cells(
                struct.pack(">q", int(ids[i])), struct.pack(">q", owners[i]), contents[i], head + vector.tobytes()
            )


def _cells(*cells: bytes | None) -> bytes:
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


# -- forgetting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Gone:
    """An owner that was forgotten, as its marks are made: its name, or its content. Private."""

    ids: list[int]
    name: bytes
    content: bytes | None
    equals: bool
    """Whether another, of equal content, is still there and has its mark."""
    entry: int
    parts: list[bytes]
    """What a fingerprint hashes of it and of nobody else."""


def delete(connection: Connection, collection: Collection, owner: str) -> Gone:
    """Delete an owner with all exemplars. Raises `UnknownOwner`."""
    _, _, forgets = hold(connection, collection)
    query = f"SELECT number, name, digest FROM {collection.owners} WHERE sha256(name) = sha256(%b)"
    row = connection.execute(query, [_bytes_of(owner)]).fetchone()
    if row is None:
        raise UnknownOwner("the store holds no such owner")
    number, name, digest = row
    deleted = connection.cursor(binary=True).execute(
        f"DELETE FROM {collection.exemplars} WHERE owner = %s RETURNING id, content", [number]
    )
    exemplars = sorted(deleted.fetchall())
    connection.execute(f"DELETE FROM {collection.owners} WHERE number = %s", [number])
    ids = [int(row[0]) for row in exemplars]
    connection.execute(f"INSERT INTO {collection.forgotten} VALUES (%s, %s)", [forgets + 1, ids])
    connection.execute("UPDATE dpicl_collections SET forgets = %s WHERE name = %s", [forgets + 1, collection.name])
    parts = [bytes(name)] if digest is None else []
    if collection.owner_key is None:
        contents = list(dict.fromkeys(bytes(content) for _, content in exemplars))
        same = f"SELECT DISTINCT content FROM {collection.exemplars} WHERE content = ANY(%b::bytea[])"
        others = {bytes(content) for (content,) in connection.execute(same, [contents]).fetchall()}
        parts += [content for content in contents if content not in others]
    if digest is None:
        return Gone(ids, bytes(name), None, False, forgets + 1, parts)
    content = next(bytes(content) for _, content in exemplars if digest_of(content) == digest)
    query = f"SELECT FROM {collection.owners} WHERE digest = %b LIMIT 1"
    equals = bool(connection.execute(query, [digest]).fetchall())
    return Gone(ids, bytes(name), content, equals, forgets + 1, parts)


# -- values ------------------------------------------------------------------------------------------------------------


def array(numbers: Numbers) -> str:
    """Numbers as a value that is cast to ``bigint[]``."""
    return "{" + ",".join(map(str, numbers.tolist())) + "}"


def _bytes_of(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def digest_of(content: bytes) -> bytes:
    """The server's ``sha256(content)``."""
    return hashlib.sha256(content).digest()


def name_of(name: bytes) -> str:
    """An owner's name as it came in."""
    return name.decode("utf-8", "surrogatepass")
