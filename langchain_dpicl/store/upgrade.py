"""Stores of earlier releases in today's form: whole, or not at all.

**A file** (format versions 2 and 3, an ``.npz`` archive) becomes a store on SQLite under the same path. It keeps its
keys, ids, documents' ids, owners with their numbers, contents, and vectors bit by bit; its name for other processes;
the budgets and releases that it remembers, with the budgets in the notes that it names; and its marks of forgotten
owners, whose key was its name. Its key of owners' marks in ledgers stands in version 3. In version 2 there is none, as
the ledgers had keys of their own, which `budget.upgrade` puts into the key file: the store gets a new one.

**Collections** on PostgreSQL get today's tables by ``ALTER`` in one transaction. Vectors stay where they lie, but for
the rows that have documents' ids. Marks of owners in ledgers and of forgotten owners keep their keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.engine import Connection
from typing_extensions import TypedDict

from langchain_dpicl.durable import lock, replacing, sync_folder
from langchain_dpicl.errors import StoreFileError
from langchain_dpicl.sql import direct
from langchain_dpicl.store import tables
from langchain_dpicl.store.database import IN_MEMORY, StoreDatabase, fetch
from langchain_dpicl.store.notes import OpenedBudget, read_notes
from langchain_dpicl.store.records import RecordKeys
from langchain_dpicl.store.tables import Collection, hash_of

_FORMAT = "langchain-dpicl store"
_VERSIONS = (2, 3)
_NAME = "exemplars"
_ENTRY = 1
_CHUNK = 1 << 20

Arrays = Mapping[str, NDArray[Any]]


class StoreUpgrade(TypedDict):
    """A file that is converted. Its counts are private."""

    store: str
    version: int
    """The format before."""
    exemplars: int
    owners: int


# -- a file ------------------------------------------------------------------------------------------------------------


def upgrade_file(path: Path, *, dry_run: bool = False) -> StoreUpgrade:
    """Make a store on SQLite of an earlier release's file, in its place, with its owner, group and mode.

    Processes of the earlier release that have it open release nothing more. The old content is overwritten as soon as
    the new file is in its place, and so are temporary files that a killed process left beside it, as far as the file
    system writes in place. It takes memory for three times the file.

    A ``dry_run`` makes every check, and changes nothing. Raises `StoreFileError` for a damaged or another file, for
    notes that cannot be read, and if another process writes it just now; `OSError` if it cannot be written.
    """
    with open(path, "rb" if dry_run else "r+b") as old:
        if not lock(old.fileno()) or not os.path.samestat(os.fstat(old.fileno()), path.stat()):
            raise StoreFileError(f"{path.name!r} is being written by another process: stop those that use it first")
        header, arrays = _read(old, path.name)
        with closing(StoreDatabase(IN_MEMORY)) as database:
            database.run(partial(_fill, header=header, arrays=arrays))
            if not dry_run:
                _put(database, path, old)
    return StoreUpgrade(
        store=str(path),
        version=header["version"],
        exemplars=len(arrays["ids"]),
        owners=len(arrays["owner_ends"]),
    )


def _read(file: IO[bytes], name: str) -> tuple[dict[str, Any], Arrays]:
    """The header and the arrays of an earlier release's file. `StoreFileError`, which shows no content."""
    with contextlib.suppress(Exception), np.load(file, allow_pickle=False) as archive:
        arrays = dict(archive)
        header: dict[str, Any] = json.loads(arrays.pop("header").tobytes())
        known = header.pop("sha256")
        found = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
        is_ours = header["format"] == _FORMAT and header["version"] in _VERSIONS
        if is_ours and known == found and header["records"] == _digest(arrays):
            return header, arrays
    versions = " or ".join(map(str, _VERSIONS))
    raise StoreFileError(f"{name!r} is damaged, or not a store of format {versions}: build it anew from the records")


def _digest(arrays: Arrays) -> str:
    """The earlier releases' hash of all arrays."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        if array.size:
            digest.update(array.data)
    return digest.hexdigest()


def _fill(connection: Connection, header: Mapping[str, Any], arrays: Arrays) -> None:
    """Write all of an earlier file into an empty database. Owners' numbers are their places in the file."""
    keys = RecordKeys(header["input_key"], header["output_key"], header["owner_key"])
    into = tables.make(connection, _NAME, header["dimension"], keys)
    names = _entries(arrays["owners"], arrays["owner_ends"])
    contents = _entries(arrays["texts"], arrays["text_ends"])
    documents = [b""] * len(contents)
    if "documents" in arrays:
        documents = _entries(arrays["documents"], arrays["document_ends"])
    owners = arrays["owner_of"].tolist()
    unnamed: dict[int, str] = {}
    if keys.owner_key is None:
        for owner, content in zip(owners, contents, strict=True):
            if names[owner].startswith(b"#"):  # the store made this name up
                unnamed.setdefault(owner, hash_of(content))
    rows = [(number, name, hash_of(name), unnamed.get(number)) for number, name in enumerate(names)]
    tables.insert_owners(connection, into, rows)
    ids = arrays["ids"].tolist()
    tables.insert_exemplars(connection, into, _ENTRY, ids, owners, documents, contents, arrays["vectors"])
    direct(
        connection,
        "UPDATE dpicl_collections SET identity = :identity, owner_key = coalesce(:owner_key, owner_key), "
        "forgotten_key = :forgotten_key, entry = :entry, next_id = :next_id, next_number = :next_number",
        {
            "identity": header["lineage"],
            "owner_key": bytes.fromhex(header["key"]) if "key" in header else None,
            "forgotten_key": bytes.fromhex(header["lineage"]),
            "entry": _ENTRY,
            "next_id": header["next_id"],
            "next_number": len(names),
        },
    )
    marks = [{"mark": bytes.fromhex(mark)} for mark in header.get("forgotten", ())]
    direct(connection, f"INSERT INTO dpicl_forgotten_marks VALUES ('{_NAME}', :mark)", *marks)
    for release in header.get("releases", ()):
        tables.releases(connection, _NAME, release)
    budgets = [OpenedBudget(**each) for each in header["budgets"]]
    budgets += read_notes(map(Path, header.get("notes", ()))).budgets
    tables.budgets(connection, _NAME, budgets)


def _entries(data: NDArray[np.uint8], ends: NDArray[np.int64]) -> list[bytes]:
    """The byte strings that lie one after the other, each to its end."""
    whole = data.tobytes()
    return [whole[start:end] for start, end in itertools.pairwise([0, *ends.tolist()])]


def _put(database: StoreDatabase, path: Path, old: IO[bytes]) -> None:
    """Put a database in memory in the place of an old file, which is then overwritten. `OSError`."""
    about = os.fstat(old.fileno())
    _remove_strays(path, about)
    with replacing(path, mode=stat.S_IMODE(about.st_mode), like=about) as file:
        database.copy_to(file.name)
    sync_folder(path, must=True)  # before the old content goes
    _overwrite(old.fileno())


def _remove_strays(path: Path, own: os.stat_result) -> None:
    """Remove what killed processes left beside a file, unless it is another name of the file itself."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp(-journal)?")
    for stray in [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]:
        with open(stray, "r+b") as file:
            if not os.path.samestat(os.fstat(file.fileno()), own):
                _overwrite(file.fileno())
        stray.unlink()


def _overwrite(descriptor: int) -> None:
    left = os.fstat(descriptor).st_size
    os.lseek(descriptor, 0, os.SEEK_SET)
    while left > 0:
        left -= os.write(descriptor, bytes(min(_CHUNK, left)))
    os.fsync(descriptor)


# -- collections -------------------------------------------------------------------------------------------------------

_FIRST = (
    "CREATE TABLE IF NOT EXISTS dpicl_budgets (collection text, ledger text, url text, name text)",
    "CREATE TABLE IF NOT EXISTS dpicl_owner_keys (collection text, key {bytes})",
    "CREATE TABLE IF NOT EXISTS dpicl_forgotten_owners (collection text, key {bytes}, mark {bytes})",
    "ALTER TABLE dpicl_collections RENAME forgets TO entry",
    "ALTER TABLE dpicl_collections ADD identity text, ADD owner_key {bytes}, ADD forgotten_key {bytes}",
    *tables.SHARED,
)
_EACH = (
    "DROP INDEX {owners}_name, {owners}_digest",
    "DROP INDEX IF EXISTS {exemplars}_document",
    "ALTER TABLE {owners} RENAME digest TO content_hash",
    "ALTER TABLE {owners} ADD name_hash text",
    """ALTER TABLE {owners} ALTER name_hash TYPE text USING encode(sha256(name), 'hex'), ALTER name_hash SET NOT NULL,
        ALTER content_hash TYPE text USING encode(content_hash, 'hex'), ADD UNIQUE (name_hash)""",
    "CREATE INDEX {owners}_content ON {owners} (content_hash)",
    f"""ALTER TABLE {{exemplars}} ADD IF NOT EXISTS document {{bytes}}, ADD document_hash text,
        ADD entry {{number}} NOT NULL DEFAULT {_ENTRY}""",
    "ALTER TABLE {exemplars} ALTER entry DROP DEFAULT",
    "UPDATE {exemplars} SET document_hash = encode(sha256(document), 'hex') WHERE document IS NOT NULL",
    "ALTER TABLE {exemplars} ADD UNIQUE (document_hash)",
    "CREATE INDEX {exemplars}_entry ON {exemplars} (entry, id)",
    tables.GONE,
    *tables.UNSEEN,
)
_LAST = (
    "INSERT INTO dpicl_forgotten_marks SELECT collection, mark FROM dpicl_forgotten_owners",
    """INSERT INTO dpicl_opened_budgets (collection, ledger, url, name)
        SELECT collection, ledger, url, name FROM dpicl_budgets ON CONFLICT DO NOTHING""",
    "DROP TABLE dpicl_budgets, dpicl_owner_keys, dpicl_forgotten_owners",
    """ALTER TABLE dpicl_collections ALTER identity SET NOT NULL, ALTER owner_key SET NOT NULL,
        ALTER forgotten_key SET NOT NULL""",
)


def earlier_collections(connection: Connection) -> list[str] | None:
    """The names of the collections in this database if they are in an earlier release's form, else None."""
    if not tables.has_table(connection, "dpicl_collections") or tables.has_table(connection, "dpicl_forgotten_marks"):
        return None
    return [name for (name,) in fetch(connection, "SELECT name FROM dpicl_collections ORDER BY name")]


def upgrade_collections(connection: Connection) -> list[str]:
    """Bring all collections of a database on PostgreSQL to today's form, in this transaction; their names."""
    direct(connection, "SELECT pg_advisory_xact_lock(:lock)", {"lock": tables.MAKING})
    names = earlier_collections(connection)
    if names is None:
        return []
    shared, *every = (
        Collection(name, secrets.token_hex(16), 0, RecordKeys("", None, None), None) for name in ("", *names)
    )
    tables.execute(connection, shared, _FIRST)
    for each in every:
        tables.execute(connection, each, (*_EACH, f"DROP TABLE dpicl_{each.name}_forgotten"))
        direct(
            connection,
            f"UPDATE dpicl_collections SET identity = :identity, entry = {_ENTRY}, "
            "owner_key = coalesce((SELECT key FROM dpicl_owner_keys WHERE collection = :name), :key), forgotten_key = "
            "coalesce((SELECT key FROM dpicl_forgotten_owners WHERE collection = :name LIMIT 1), :marks) "
            "WHERE name = :name",
            {
                "name": each.name,
                "identity": each.identity,
                "key": secrets.token_bytes(tables.KEY),
                "marks": secrets.token_bytes(tables.KEY),
            },
        )
    tables.execute(connection, shared, _LAST)
    return names
