"""An earlier release's ledger in today's form: whole, or not at all.

Schema version 6 becomes 7 in one transaction of the ledger; its witness is not written. Counters, charges, receipts,
answers and used tickets keep every number. Each plan keeps the digest that it was frozen with, also where its content
is written anew: the digest is the name by which the witness, the counters and the queries know the plan, and nothing
compares it with the content. What version 7 does not have is accounted for before it goes:

- ``dpicl_filters``: a budget without a plan keeps its rows and its name, and nothing can be charged to it. Today's code
  gives no total of a ledger that holds one (`terms.plan_of`), so no sum leaves it out.
- ``dpicl_acts``, ``generation`` and ``fingerprint``: a plan after a fresh start was added up with later ones alone. All
  plans of the ledger add up now.
- ``fingerprint_key``: it makes the marks of owners who pay, and goes into the key file, which is written first. A
  ledger that was interrupted then still has it, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack, closing
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from typing_extensions import TypedDict

from langchain_dpicl.budget import schema
from langchain_dpicl.budget.opening import Where, address
from langchain_dpicl.budget.owner_keys import OwnerKeyFile, key_id
from langchain_dpicl.budget.records import Records as Database
from langchain_dpicl.budget.schema import ADVICE, EARLIER, VERSION, counters, meta, owner_index, plans
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.budget.witness import Witness
from langchain_dpicl.durable import replacing, sync_folder
from langchain_dpicl.errors import InvalidParameter, LedgerError

_NEW = {schema.removed.name, schema.others.name}
_GONE = {"dpicl_filters", "dpicl_acts"}
_COUNTED = sa.select(plans.c.name, plans.c.digest, plans.c.scope, plans.c.tickets, counters)
_COUNTED = _COUNTED.outerjoin(counters, counters.c.plan_id == plans.c.id).order_by(plans.c.id, counters.c.id)


class WithoutPlan(TypedDict):
    """A budget without a plan: what it promised, and how many releases it made."""

    name: str
    epsilon: float
    delta: float
    releases: int


class FreshStart(TypedDict):
    """A fresh start that an earlier release wrote down."""

    name: str
    reason: str
    announced: str


class LedgerUpgrade(TypedDict):
    """The difference between a ledger and today's form."""

    ledger: str
    version: int
    """Its schema version before."""
    rewritten: list[str]
    """The plans whose content is written anew."""
    without_plan: list[WithoutPlan]
    fresh_starts: list[FreshStart]
    key_file: str | None
    """Where the key of owners who pay goes; None if there is none."""


class _Ledger(Database):
    """A ledger of whatever version, whose tables may be made anew."""

    def _on_connect(self, connection: Any, record: Any) -> None:
        super()._on_connect(connection, record)
        if self.is_sqlite:
            connection.execute("PRAGMA foreign_keys=OFF")  # they are checked at the end
            connection.execute("PRAGMA secure_delete=ON")  # of the key, nothing stays in the file


def upgrade(
    ledger: str,
    witness: Where = None,
    *,
    key_file: str | os.PathLike[str] | None = None,
    without_witness: bool = False,
    dry_run: bool = False,
) -> LedgerUpgrade | None:
    """Bring a ledger to today's form. Returns the changes, or None if there are none.

    Parameters
    ----------
    ledger, witness
        As for `PrivacyBudget`. The witness is locked meanwhile: no process of any release has the ledger open.
    key_file
        Where the key of owners who pay is to be kept. Default: beside a ledger in a file, as ``<ledger>.key``.
    without_witness
        For a ledger whose witness is lost. Today's code refuses to charge it until `upkeep.recover` has made a new one.
    dry_run
        Change nothing.

    `LedgerError` if there is no whole ledger, for any other version than 6 and today's, without its own witness, and
    while any process has it open.
    """
    with ExitStack() as stack:
        old = stack.enter_context(closing(_Ledger(ledger)))
        if old.is_sqlite and old.path is None:
            raise InvalidParameter("ledger", old.shown, "a ledger that is kept: one in memory is gone already")
        if old.path is not None and not os.path.exists(old.path):
            raise LedgerError(f"there is no ledger {old.shown!r}")
        keys = OwnerKeyFile(old.path, key_file)
        found = old.run(lambda connection: _differences(connection, old, keys), "read")
        if found is None or dry_run:
            return found
        own = stack.enter_context(closing(Witness(address(old, witness), live=True)))
        _enter(old, own, without_witness)
        if found["key_file"] is not None:
            _keep_key(keys, old.run(_owners_key, "read"))
        old.run(lambda connection: _convert(connection, old, keys))
    with closing(StoredLedger(ledger)) as made:  # today's code opens it
        made.write_through()
    return found


def _enter(ledger: Database, witness: Witness, without: bool) -> None:
    """Keep every process out that may charge the ledger. `LedgerError` if one is there, or if it has no witness."""
    about = witness.about()
    if without and not about:
        return
    identity = ledger.run(lambda connection: schema.read_meta(connection, "identity"), "read")
    if not about or about.get("identity") != identity:
        known = "belongs to another ledger" if about else "is not there"
        raise LedgerError(
            f"the witness {witness.shown!r} {known}: nothing was changed. Name the one of {ledger.shown!r} with "
            "--witness; if it is lost, upgrade with --without-witness, and then run `dpicl budget recover`"
        )
    if not witness.enter():
        raise LedgerError(f"the ledger {ledger.shown!r} is in use: stop every process that uses it first")


# -- reading -----------------------------------------------------------------------------------------------------------


def _version(connection: Connection) -> int:
    """The schema version: today's, or the earlier one. `LedgerError` for another one and for lost tables."""
    there = set(sa.inspect(connection).get_table_names())
    if meta.name not in there:
        raise LedgerError("there is no ledger here")
    version = schema.read_meta(connection, "schema_version")
    if version not in (str(EARLIER), str(VERSION)):
        raise LedgerError(f"the ledger has schema version {version}; this release upgrades version {EARLIER} alone")
    expected = set(schema.metadata.tables)
    if version == str(EARLIER):
        expected = expected - _NEW | _GONE
    if not expected <= there:
        raise LedgerError(f"the ledger has lost tables; {ADVICE}")
    return int(version)


def _differences(connection: Connection, ledger: Database, keys: OwnerKeyFile) -> LedgerUpgrade | None:
    version = _version(connection)
    contents = connection.execute(sa.select(plans.c.name, plans.c.content).order_by(plans.c.id)).all()
    found = LedgerUpgrade(
        ledger=ledger.shown,
        version=version,
        rewritten=[name for name, content in contents if with_lists(content) != content],
        without_plan=[],
        fresh_starts=[],
        key_file=None,
    )
    if version == VERSION:
        return found if found["rewritten"] else None
    for name, content in contents:
        about = json.loads(content)
        if about.get("format") == "filter-1":
            releases = sa.select(sa.func.sum(counters.c.spent)).join(plans, plans.c.id == counters.c.plan_id)
            count = int(connection.scalar(releases.where(plans.c.name == name)) or 0)
            row = WithoutPlan(name=name, epsilon=about["epsilon"], delta=about["delta"], releases=count)
            found["without_plan"].append(row)
    acts = "SELECT name, reason, announced FROM dpicl_acts ORDER BY id"
    for name, reason, announced in connection.exec_driver_sql(acts):
        found["fresh_starts"].append(FreshStart(name=name, reason=reason, announced=announced))
    if connection.scalar(sa.select(sa.func.max(owner_index.c.size))):
        if keys.path is None:
            bound = "a path: owners pay with tickets, and this ledger is no file beside which their key could stand"
            raise InvalidParameter("key_file", None, bound)
        found["key_file"] = str(keys.path)
    return found


def _owners_key(connection: Connection) -> bytes:
    return schema.key_of(connection, "fingerprint_key")


def _keep_key(file: OwnerKeyFile, key: bytes) -> None:
    """Write the key into its file, unless it is there. `InvalidParameter` if another key is."""
    path = file.path
    assert path is not None
    known = file.read()
    if known not in (None, key):
        raise InvalidParameter("key_file", str(path), "a path where no file is yet: this one holds another key")
    if known is not None:
        return
    problem = None
    try:
        with replacing(path, is_new=True) as written:
            written.write(key.hex().encode() + b"\n")
        sync_folder(path)
    except OSError as error:
        problem = error.strerror or type(error).__name__
    if problem is not None:
        raise LedgerError(f"the key file {str(path)!r} cannot be written ({problem}): nothing was changed")


def with_lists(content: str) -> str:
    """A plan's content with the shares of structured answers as lists. Itself if it has none to be rewritten."""
    plan = json.loads(content)
    lines = [line for line in plan.get("lines", {}).values() if line["mechanism"] == "structured"]
    changed = False
    for line in lines:
        options = dict(line.get("options", {}))
        for prefix in ("share", "mean_share"):
            numbers = {int(name.removeprefix(f"{prefix}_")): name for name in options if _is_share(name, prefix)}
            values = [options.pop(numbers[number]) for number in sorted(numbers)]
            if values:
                options[f"{prefix}s"] = values
                changed = True
        line["options"] = options
    return json.dumps(plan, sort_keys=True, allow_nan=False) if changed else content


def _is_share(name: str, prefix: str) -> bool:
    return name.startswith(f"{prefix}_") and name.removeprefix(f"{prefix}_").isdecimal()


# -- writing -----------------------------------------------------------------------------------------------------------


def _convert(connection: Connection, ledger: Database, keys: OwnerKeyFile) -> None:
    """Convert it, within the caller's transaction, which no other writer shares."""
    schema.wait_for_others(connection)
    if not ledger.is_sqlite:  # of SQLite the transaction has the write lock
        connection.exec_driver_sql("SET LOCAL lock_timeout = '30s'")
        names = ", ".join(sorted(schema.tables_of(connection)))
        connection.exec_driver_sql(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE")
    before = connection.execute(_COUNTED).all()
    if _version(connection) == EARLIER:
        _change_tables(connection)
        _change_keys(connection, keys)
    for plan_id, content in connection.execute(sa.select(plans.c.id, plans.c.content)).all():
        if (today := with_lists(content)) != content:
            connection.execute(sa.update(plans).where(plans.c.id == plan_id).values(content=today))
    is_broken = ledger.is_sqlite and connection.exec_driver_sql("PRAGMA foreign_key_check").first() is not None
    if is_broken or connection.execute(_COUNTED).all() != before:
        raise LedgerError(f"the ledger's rows do not add up: nothing was changed; {ADVICE}")


def _change_tables(connection: Connection) -> None:
    """Make the tables of version 7 of those of version 6."""
    if connection.dialect.name == "sqlite":
        for table in (plans, counters, owner_index):
            _make_anew(connection, table)
    else:
        connection.exec_driver_sql("ALTER TABLE dpicl_plans DROP COLUMN fingerprint, DROP COLUMN generation")
        column = "key_id VARCHAR(32) DEFAULT '' NOT NULL"
        connection.exec_driver_sql(f"ALTER TABLE dpicl_owner_index ADD COLUMN {column}")
    for name in sorted(_GONE):
        connection.exec_driver_sql(f"DROP TABLE {name}")
    for name in sorted(_NEW):
        schema.metadata.tables[name].create(connection)


def _make_anew(connection: Connection, table: sa.Table) -> None:
    """Make a table of SQLite anew, as it is defined today, with all its rows."""
    known = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
    columns = ", ".join(column.name for column in table.columns if column.name in known)
    connection.exec_driver_sql(f"CREATE TEMP TABLE dpicl_kept AS SELECT {columns} FROM {table.name}")
    connection.exec_driver_sql(f"DROP TABLE {table.name}")
    table.create(connection)
    connection.exec_driver_sql(f"INSERT INTO {table.name} ({columns}) SELECT {columns} FROM dpicl_kept")
    connection.exec_driver_sql("DROP TABLE dpicl_kept")


def _change_keys(connection: Connection, keys: OwnerKeyFile) -> None:
    """Take the key of the owners' marks out of the ledger, and name it at each plan that has marks.

    ``former_identity`` is the name by which stores of the earlier release knew the ledger: a hash of that key.
    """
    key = _owners_key(connection)
    has_marks = owner_index.c.size > 0
    if connection.scalar(sa.select(sa.func.count()).select_from(owner_index).where(has_marks)):
        if keys.read() != key:
            raise LedgerError("the key of the owners' marks is not in the key file: nothing was changed; try again")
        connection.execute(sa.update(owner_index).where(has_marks).values(key_id=key_id(key)))
    connection.execute(sa.delete(meta).where(meta.c.key == "fingerprint_key"))
    former = hashlib.blake2b(key, digest_size=16, person=b"dpicl ledger").hexdigest()
    connection.execute(sa.insert(meta).values(key="former_identity", value=former))
    connection.execute(sa.update(meta).where(meta.c.key == "schema_version").values(value=str(VERSION)))
