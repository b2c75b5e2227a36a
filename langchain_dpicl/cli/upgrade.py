"""The command that brings an earlier release's files to today's form: ``upgrade``."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import add_run, add_witness, flag, show
from langchain_dpicl.durable import replacing, sync_folder, writing
from langchain_dpicl.errors import InvalidConfiguration, InvalidParameter

if TYPE_CHECKING:
    from langchain_dpicl.budget.upgrade import LedgerUpgrade

_ONE = (
    "one address: several servers of a model stand behind one proxy, which also bounds their calls "
    "(docs/operations.md of the source archive)"
)
_SECTIONS = {
    *("chain", "head", "store", "model", "release", "selector", "budget", "keys", "server", "metrics"),
}
_OWNER = slice(stat.ST_UID, stat.ST_GID + 1)
_WHAT = "PATH_OR_URL"
_WANTED = "a server's configuration (YAML or TOML), the file of a ledger or of a store, or a database's address"
_AS_IT_IS = "this release reads it as it is, and there is nothing to upgrade"
_STORE = (0x64707376).to_bytes(4, "big")
"""The mark of a store's SQLite file, at byte 68."""
_FORMATS = {
    b"notes": "it holds an earlier release's notes of a data file: leave it beside that, and its store takes them over",
    b"fit": f"it is an unfinished fit: {_AS_IT_IS}",
    b"job": "it is the journal of an unfinished job, which no release reads any more: run the job again",
}


def upgrade_options(parser: Any) -> None:
    """Bring what an earlier release wrote to today's form: a server's configuration, a ledger, or a store.

    examples:
      dpicl upgrade server.yaml --dry-run
      dpicl upgrade server.yaml
      dpicl upgrade dpicl-budget.db
      dpicl upgrade postgresql://desk@host/budgets --witness witness.db --key-file owners.key
      dpicl upgrade notes.npz
      dpicl upgrade postgresql://desk@host/records

    Each is written whole, or not at all. What is in today's form already stays as it is.

    In a configuration, renamed kinds of release get their names of today; comments and order stay, and the old file is
    kept as FILE.bak. Settings that are gone are named, and then nothing is written.

    Stop every process that uses a ledger or a store first. A ledger is converted in one transaction, and counts what it
    has counted. A store's file becomes a SQLite database under the same name: nothing is embedded again, ledgers know
    its owners, and those who were forgotten stay out. An address on PostgreSQL stands for all that is there, a ledger
    and collections, each converted in one transaction.
    """
    add_run(parser, upgrade)
    parser.add_argument("place", metavar=_WHAT, help="a configuration, the file of a ledger or a store, or an address")
    parser.add_argument("--dry-run", action="store_true", help="say what would be changed, and change nothing")
    add_witness(parser)
    key = "where the key of owners who pay is to stand (default: beside a ledger in a file, as LEDGER.key)"
    parser.add_argument("--key-file", metavar="PATH", help=key)
    lost = "for a ledger whose witness is lost; run `dpicl budget recover` after it"
    parser.add_argument("--without-witness", action="store_true", help=lost)


def upgrade(options: argparse.Namespace) -> int:
    """Upgrade a file or a database."""
    place = options.place
    if "://" in place:
        return _database(options, place)
    path = Path(place)
    if not path.is_file():
        raise InvalidParameter(_WHAT, place, _WANTED)
    with open(path, "rb") as file:
        start = file.read(100)
    is_database = start.startswith(b"SQLite format 3\0")
    if is_database and start[68:72] != _STORE:
        return _ledger(options, f"sqlite:///{path.absolute()}")
    is_store = _is_store(path, start)
    _refuse_ledgers_options(options)
    if is_database:
        facts = {"store": str(path), "changed": False}
        return show(options, facts, f"{path.name}: in today's form already; nothing was changed")
    if is_store:
        return _store(options, path.resolve())
    return _configuration(options, path.resolve())


def _refuse_ledgers_options(options: argparse.Namespace) -> None:
    for name in ("witness", "key_file", "without_witness"):
        if getattr(options, name):
            raise InvalidParameter(flag(name), getattr(options, name), "left out: it is a ledger's")


def _is_store(path: Path, start: bytes) -> bool:
    """True for an earlier release's store. `InvalidParameter` says what this file is, if it is another of the package's
    kinds."""
    bound, names = None, set[str]()
    if start.startswith(b"PK") and zipfile.is_zipfile(path):
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
        if "about.npy" in names:
            bound = f"it is a head: {_AS_IT_IS}"
    else:
        found = re.match(rb'\{"format": "dpicl-(\w+)-', start)
        bound = found and _FORMATS.get(found[1])
    if bound is not None:
        raise InvalidParameter(_WHAT, str(path), bound)
    return "header.npy" in names


# -- a store -----------------------------------------------------------------------------------------------------------


def _store(options: argparse.Namespace, path: Path) -> int:
    from langchain_dpicl.store.upgrade import upgrade_file

    about = path.stat()
    with writing(_WHAT, path):
        if options.dry_run:
            _check_writable(path)
        found = upgrade_file(path, dry_run=options.dry_run)
    done = "would become" if options.dry_run else "is now"
    counts = f"{found['exemplars']:,} exemplars of {found['owners']:,} owners"
    lines = [f"{path.name}: format {found['version']} {done} a SQLite database, with {counts}"]
    facts: dict[str, Any] = {**found, "changed": not options.dry_run}
    _warn_of_owner(facts, lines, about, path)
    return show(options, facts, "\n".join(lines))


# -- a database --------------------------------------------------------------------------------------------------------


def _database(options: argparse.Namespace, url: str) -> int:
    """Upgrade what an address stands for: a ledger, and on PostgreSQL collections."""
    from langchain_dpicl import sql

    if sql.parse(url, _WHAT, "postgresql://user@host/database").drivername != sql.PSYCOPG:
        return _ledger(options, url)
    from langchain_dpicl.store.database import StoreDatabase
    from langchain_dpicl.store.tables import has_table
    from langchain_dpicl.store.upgrade import earlier_collections, upgrade_collections

    with contextlib.closing(StoreDatabase(url)) as database:
        has_collections = database.run(partial(has_table, table="dpicl_collections"), "read")
        has_ledger = database.run(partial(has_table, table="dpicl_meta"), "read")
        if not has_collections:
            return _ledger(options, url)
        facts: dict[str, Any] = {"changed": False}
        lines: list[str] = []
        if has_ledger:
            facts, lines = _upgraded(options, url)
        else:
            _refuse_ledgers_options(options)
        names = database.run(earlier_collections, "read")
        if names is not None and not options.dry_run:
            database.run(upgrade_collections)
            database.tidy(*(f"dpicl_{name}_{table}" for name in names for table in ("owners", "exemplars")))
    facts["collections"] = names or []
    if names is None:
        lines.append("collections: in today's form already; nothing was changed")
    else:
        facts["changed"] = not options.dry_run
        done = "would be" if options.dry_run else "are"
        lines.append(f"collections ({', '.join(names)}): {done} in today's form; nothing was embedded")
    return show(options, facts, "\n".join(lines))


# -- a ledger ----------------------------------------------------------------------------------------------------------


def _ledger(options: argparse.Namespace, url: str) -> int:
    facts, lines = _upgraded(options, url)
    return show(options, facts, "\n".join(lines))


def _upgraded(options: argparse.Namespace, url: str) -> tuple[dict[str, Any], list[str]]:
    """Upgrade a ledger; the facts, and words."""
    from langchain_dpicl.budget.upgrade import upgrade as upgrade_ledger
    from langchain_dpicl.sql import shown

    found = upgrade_ledger(
        url,
        options.witness,
        key_file=options.key_file,
        without_witness=options.without_witness,
        dry_run=options.dry_run,
    )
    if found is None:
        facts: dict[str, Any] = {"ledger": shown(url), "changed": False}
        return facts, [f"{shown(url)}: in today's form already; nothing was changed"]
    return {**found, "changed": not options.dry_run}, list(_told(found, options.dry_run))


def _told(found: LedgerUpgrade, dry_run: bool) -> Iterator[str]:
    from langchain_dpicl.budget.schema import VERSION

    done = "would become" if dry_run else "is now"
    yield f"{found['ledger']}: schema version {found['version']} {done} {VERSION}; every charge counts as before"
    for name in found["rewritten"]:
        yield f"{name}: the shares of its structured answers are lists; its digest stays"
    for budget in found["without_plan"]:
        yield (
            f"{budget['name']}: a budget without a plan, with {budget['releases']:,} releases. It stays, and nothing "
            "can be charged to it any more: use another name. No total of this ledger is given while it is there "
            f"(PlanMismatch): count all of its epsilon {budget['epsilon']:g} and delta {budget['delta']:g} beside the "
            "other budgets"
        )
    for start in found["fresh_starts"]:
        yield (
            f"{start['name']}: a fresh start of {start['announced'][:10]} ({start['reason']}). All budgets of this "
            "ledger add up now, those before it too; keep this line if you need the reason"
        )
    if found["key_file"] is not None:
        yield (
            f"{found['key_file']}: the key of owners who pay {'would go' if dry_run else 'went'} from the ledger into "
            "this file. Back it up apart from the ledger, and name it as key_file if it is not beside it: without it "
            "no such budget answers"
        )


# -- a configuration ---------------------------------------------------------------------------------------------------


def _configuration(options: argparse.Namespace, path: Path) -> int:
    from langchain_dpicl.serving.secrets import mapping_of
    from langchain_dpicl.spec.releases import RENAMED, of_today

    before = mapping_of(_WHAT, path)
    if not before.keys() & _SECTIONS:
        raise InvalidParameter(_WHAT, str(path), _WANTED)
    if mistakes := list(_gone(before)):
        raise InvalidConfiguration(path.name, mistakes)
    release = before.get("release")
    kind = release.get("kind") if isinstance(release, dict) else None
    if not isinstance(kind, str) or kind not in RENAMED:
        facts = {"file": str(path), "changed": False, "changes": []}
        return show(options, facts, f"{path.name}: no name of an earlier release is in it; nothing was changed")
    old = path.read_bytes()
    today = of_today(kind)
    new = _renamed(path, old.decode("utf-8"), before, kind, today).encode("utf-8")
    changes = [f"release.kind: {kind} -> {today['kind']}"]
    changes += ["release.scores: true is new"] if "scores" in today else []
    kept = path.with_name(f"{path.name}.bak")
    about = path.stat()
    _replace(path, about, kept, old, new, dry_run=options.dry_run)
    facts = {"file": str(path), "changed": not options.dry_run, "changes": changes}
    lines = [f"  {change}" for change in changes]
    if options.dry_run:
        return show(options, facts, "\n".join([f"{path.name}: would be changed", *lines]))
    facts["kept"] = str(kept)
    lines = [f"{path.name}: changed; the old file is {kept.name}", *lines]
    lines.append(f"check it: dpicl serve --config {path.name} --check")
    _warn_of_owner(facts, lines, about, path, kept)
    return show(options, facts, "\n".join(lines))


def _warn_of_owner(facts: dict[str, Any], lines: list[str], about: os.stat_result, *paths: Path) -> None:
    """Say which files do not have the owner and the group of the old one."""
    if names := [each.name for each in paths if each.stat()[_OWNER] != about[_OWNER]]:
        owner = f"user {about.st_uid} and group {about.st_gid}"
        facts["warning"] = f"not of {owner} as before, which you may not set: {', '.join(names)}"
        lines.append(f"warning: {facts['warning']}")


def _gone(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings that no release reads any more: the field, and what to do."""
    model, store = values.get("model"), values.get("store")
    if isinstance(store, dict) and "notes" in store:
        yield "store.notes", "leave it out, and move that file to DATA.dpicl beside the data, whose store takes it over"
    if isinstance(model, dict):
        if "concurrency" in model:
            yield "model.concurrency", "leave it out: it was for several servers, which stand behind one proxy now"
        if isinstance(model.get("url"), list):
            yield "model.url", _ONE


def _renamed(path: Path, text: str, before: dict[str, Any], kind: str, today: dict[str, Any]) -> str:
    """The text with today's kind, and nothing else changed: it is read again to see so.

    Every place that looks like the kind is tried, for the first whose change gives what is wanted.
    `InvalidParameter` if there is none.
    """
    import yaml  # type: ignore[import-untyped]

    from langchain_dpicl.serving.secrets import content_of

    wanted = {**before, "release": {**before["release"], **today}}
    is_toml = path.suffix == ".toml"
    for changed in _tries(text, kind, today, "=" if is_toml else ":"):
        try:
            if content_of(changed, is_toml) == wanted:
                return changed
        except (ValueError, yaml.YAMLError):
            continue
    names = ", ".join(f"{name}: {json.dumps(value)}" for name, value in today.items())
    raise InvalidParameter("release.kind", kind, f"changed by hand here ({names}): it is not written in the usual way")


def _tries(text: str, kind: str, today: dict[str, Any], sign: str) -> Iterator[str]:
    """The text with one kind renamed, for each that it seems to hold; ``scores`` goes into a line of its own, or behind
    the kind."""
    newline = "\r\n" if "\r\n" in text else "\n"
    more = f"scores{' = ' if sign == '=' else ': '}true"
    written = rf"""(?<![\w-])(?P<key>["']?kind["']?[ \t]*{sign}[ \t]*)(?P<quote>["']?){kind}(?P=quote)"""
    for found in re.finditer(written, text):
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        value = f"{found['key']}{found['quote']}{today['kind']}{found['quote']}"
        head, tail = f"{text[: found.start()]}{value}", text[found.end() :]
        if "scores" not in today:
            yield head + tail
            continue
        rest = tail.partition("\n")[0].rstrip("\r")
        yield f"{head}{rest}{newline}{line}{more}{tail[len(rest) :]}"
        yield f"{head}, {more}{tail}"


def _replace(path: Path, about: os.stat_result, kept: Path, old: bytes, new: bytes, *, dry_run: bool) -> None:
    """Keep the old content, and put the new in its place, both whole, with the owner, the group and the mode of the old
    file. `InvalidParameter` if that cannot be done; a dry run looks whether it can.
    """
    mode = stat.S_IMODE(about.st_mode)
    with writing(_WHAT, path):
        try:
            is_kept = os.path.lexists(kept)
            if is_kept and kept.read_bytes() != old:  # else an earlier call was interrupted after it
                raise FileExistsError
            if dry_run:
                _check_writable(path)
                return
            if not is_kept:
                with replacing(kept, mode=mode, like=about, is_new=True) as file:
                    file.write(old)
        except FileExistsError:
            bound = f"a file beside which no {kept.name} is: the old file is kept under this name"
            raise InvalidParameter(_WHAT, str(path), bound) from None
        with replacing(path, mode=mode, like=about) as file:
            file.write(new)
        sync_folder(path)


def _check_writable(path: Path) -> None:
    """Raise `PermissionError` unless the user may put another file in a file's place."""
    effective = os.access in os.supports_effective_ids
    if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=effective):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
