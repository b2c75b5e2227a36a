"""An earlier release's ledger in today's form: whole, or not at all.

Schema version 6 becomes 8. Counters, charges, receipts, answers and used tickets keep every number. Each plan keeps the
digest that it was frozen with, also where its content is written anew: the digest is the name by which the witness, the
counters and the queries know the plan, and nothing compares it with the content. What version 8 does not have is
accounted for before it goes:

- ``dpicl_filters``: a budget without a plan keeps its rows and its name, and nothing can be charged to it. Today's code
  gives no total of a ledger that holds one (`terms.plan_of`), so no sum leaves it out.
- ``dpicl_acts``, ``generation`` and ``fingerprint``: a plan after a fresh start was added up with later ones alone. All
  plans of the ledger add up now.
- ``fingerprint_key``: it makes the marks of owners who pay, and goes into the key file. A ledger that was interrupted
  then still has it, too.
- the owner index and the usage: an owner's mark and the tickets that it has used become its rows of `schema.tickets`
  (`_tickets`), once all hashes that bind them are found right.

WITNESS. The earlier release's ``reserved`` bounds the units in use on a counter, with all permits of its processes;
today's is a number of the counter. So a mark is written anew in the numbers of the ledger at hand (`_convert_witness`):
if all answers that were ever begun have at most B units, and the counter has spent k and has u in use, it ends at
k + max(0, B - u). The ledger's next opening counts what is beyond k as lost.

ORDER. While no process of the earlier release has the ledger open: one transaction of the ledger, and within it the key
file and, as its last act before the COMMIT, the witness, with a hash of the counts that were converted.

CLAIM. The process may be killed at any time, and whole copies of the ledger in either form may be put back: both
releases keep the claims of `witness`, and nothing is lost by a kill.

PROOF. Before the witness's COMMIT nothing has changed. After it the earlier release refuses the witness, which lacks
columns that it reads, whatever it is asked to do. So from then on today's release alone charges, and not before the
ledger's COMMIT, as it refuses version 6. If the process is killed in between, the same command goes on: the ledger has
the counts of the hash, and the witness stays. So it does if this copy is put back later, when marks have moved on: it
lacks what `witness` says that a copy lacks. Any other copy of version 6 has its marks written as the first had. B is
the earlier ``reserved`` (the earlier release's own proof), or today's, since all answers ever begun have fewer units
than numbers were given. Today's never falls: k + B - u >= B. Once it was settled, the copy has B units in use, so its
guard holds for all answers ever begun. This is claim 1. For claim 2, the earlier release, too, numbered the charges of
owners who pay by the one witness, and their counters give nothing back: each copy of count k on which it charged holds
the tickets of every charge that was committed below k, or has counted its units as ``lost``. `_tickets` drops those of
forgotten owners alone. The steps of a charge that may be taken up again are counted by the witness before the COMMIT.
                                                                                                                    QED

An upgrade without a witness writes none. All plans count as spent by the `upkeep.recover` that it needs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection
from typing_extensions import TypedDict

from langchain_dpicl.budget import schema
from langchain_dpicl.budget.opening import CounterRow, Where, address, counts
from langchain_dpicl.budget.owner_keys import OwnerKeyFile, key_id
from langchain_dpicl.budget.records import Records
from langchain_dpicl.budget.schema import ADVICE, EARLIER, VERSION, charges, counters, meta, plans, queries, steps
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.budget.witness import GIVEN_UP, CounterKey, Mark, Witness, about, marks, metadata, step_digest
from langchain_dpicl.durable import lock
from langchain_dpicl.errors import InvalidParameter, LedgerError
from langchain_dpicl.store.base import MARK

_NEW = [schema.removed, schema.others, schema.tickets, schema.leaving]
_GONE = [
    *("dpicl_acts", "dpicl_filters", "dpicl_owner_index", "dpicl_owner_marks"),
    *("dpicl_usage", "dpicl_usage_counts", "dpicl_usage_rows"),
]
_COUNTED = sa.select(plans.c.name, plans.c.digest, plans.c.scope, plans.c.tickets, counters)
_COUNTED = _COUNTED.outerjoin(counters, counters.c.plan_id == plans.c.id).order_by(plans.c.id, counters.c.id)
_WITH_OWNERS = sa.text("SELECT plan_id FROM dpicl_owner_index WHERE size > 0")
_OPEN_STEPS = (
    sa.select(steps.c.counter_id, steps.c.number, steps.c.step, steps.c.content)
    .join(charges, sa.and_(charges.c.counter_id == steps.c.counter_id, charges.c.number == steps.c.number))
    .where(charges.c.outcome.is_(None), charges.c.receipt.is_(None))
)
_LOCK = 0x64706977  # the earlier release's number for PostgreSQL's advisory locks
_CHUNK = 10_000


class LedgerUpgrade(TypedDict):
    """The difference between a ledger and today's form."""

    ledger: str
    version: int
    """Its schema version before."""
    rewritten: list[str]
    """The plans whose content is written anew."""
    without_plan: list[dict[str, Any]]
    """Of each budget without a plan: its ``name``, ``epsilon`` and ``delta``, and how many ``releases`` it made."""
    fresh_starts: list[dict[str, str]]
    """Of each fresh start that an earlier release wrote down: ``name``, ``reason`` and ``announced``."""
    key_file: str | None
    """Where the key of owners who pay goes; None if there is none."""


class _Ledger(Records):
    """A ledger of whatever version, whose tables may be made anew."""

    answer_seconds = 40  # more than the wait for its tables


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
        As for `PrivacyBudget`. No process of the earlier release may have the ledger open.
    key_file
        Where the key of owners who pay is to be kept. Default: beside a ledger in a file, as ``<ledger>.key``.
    without_witness
        For a ledger whose witness is lost. Today's code refuses to charge it until `upkeep.recover` has made a new one.
    dry_run
        Make every check, and change nothing.

    `LedgerError` if there is no whole ledger, for any other version than 6 and today's, without its own witness, while
    a process of the earlier release has it open, and if rows of tickets are missing.
    """
    with ExitStack() as stack:
        old = stack.enter_context(closing(_Ledger(ledger)))
        if old.is_in_memory:
            raise InvalidParameter("ledger", old.shown, "a ledger that is kept: one in memory is gone already")
        if old.path is not None and not os.path.exists(old.path):
            raise LedgerError(f"there is no ledger {old.shown!r}")
        keys = OwnerKeyFile(old.path, key_file)
        found = old.run(lambda connection: _differences(connection, old, keys), "read")
        if found is None:
            return None
        own = stack.enter_context(closing(Witness(address(old, witness))))
        has_witness = _enter(old, own, without_witness, stack, dry_run)
        if dry_run:
            return found
        old.run(lambda connection: _convert(connection, old, keys, own if has_witness else None))
    with closing(StoredLedger(ledger)) as made:  # today's code opens it
        made.write_through()
    return found


def _enter(ledger: Records, witness: Witness, without: bool, stack: ExitStack, dry_run: bool) -> bool:
    """Keep out every process of the earlier release until ``stack`` ends: each shares a lock of the witness.

    False if the ledger has no witness and needs none. `LedgerError` if it needs one, or if a process is there. A dry
    run makes no file for the lock: where there is none, nobody has it.
    """
    known = witness.about()
    if without and not known:
        return False
    identity = ledger.run(lambda connection: schema.read_meta(connection, "identity"), "read")
    if not known or known.get("identity") != identity:
        fault = "belongs to another ledger" if known else "is not there"
        raise LedgerError(
            f"the witness {witness.shown!r} {fault}: nothing was changed. Name the one of {ledger.shown!r} with "
            "--witness; if it is lost, upgrade with --without-witness, and then run `dpicl budget recover`"
        )
    if witness.path is None:  # the pool keeps the session until it is closed
        taken = sa.select(sa.func.pg_try_advisory_lock(_LOCK))
        is_alone = witness.run(lambda connection: connection.scalar(taken), "read")
    elif dry_run and not os.path.exists(f"{witness.path}.lock"):
        is_alone = True
    else:
        is_alone = lock(stack.enter_context(open(f"{witness.path}.lock", "ab")).fileno())  # noqa: SIM115 - it stays open
    if not is_alone:
        raise LedgerError(f"the ledger {ledger.shown!r} is in use: stop every process that uses it first")
    return True


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
        expected = expected.difference(table.name for table in _NEW).union(_GONE)
    if not expected <= there:
        raise LedgerError(f"the ledger has lost tables; {ADVICE}")
    return int(version)


def _differences(connection: Connection, ledger: Records, keys: OwnerKeyFile) -> LedgerUpgrade | None:
    version = _version(connection)
    if version == VERSION:
        return None
    contents = connection.execute(sa.select(plans.c.name, plans.c.content).order_by(plans.c.id)).all()
    found = LedgerUpgrade(
        ledger=ledger.shown,
        version=version,
        rewritten=[name for name, content in contents if with_lists(content) != content],
        without_plan=[],
        fresh_starts=[],
        key_file=None,
    )
    for name, content in contents:
        plan = json.loads(content)
        if plan.get("format") == "filter-1":
            releases = sa.select(sa.func.sum(counters.c.spent)).join(plans, plans.c.id == counters.c.plan_id)
            count = int(connection.scalar(releases.where(plans.c.name == name)) or 0)
            promise = {key: plan[key] for key in ("epsilon", "delta")}
            found["without_plan"].append({"name": name, **promise, "releases": count})
    acts = sa.text("SELECT name, reason, announced FROM dpicl_acts ORDER BY id")
    found["fresh_starts"] += [dict(act) for act in connection.execute(acts).mappings()]
    if connection.scalar(_WITH_OWNERS):
        if keys.path is None:
            bound = "a path: owners pay with tickets, and this ledger is no file beside which their key could stand"
            raise InvalidParameter("key_file", None, bound)
        found["key_file"] = str(keys.path)
        _same_key(keys, schema.key_of(connection, "fingerprint_key"))
    for _ in _tickets(connection):  # they are whole
        pass
    return found


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


def _same_key(keys: OwnerKeyFile, key: bytes) -> None:
    if keys.read() not in (None, key):
        raise InvalidParameter("key_file", str(keys.path), "a path where no file is yet: this one holds another key")


# -- tickets -----------------------------------------------------------------------------------------------------------


def _tickets(connection: Connection) -> Iterator[tuple[sa.Table, list[dict[str, Any]]]]:
    """Today's rows of the owners who pay, in pieces: of ``tickets``, and of ``leaving`` for interrupted forgettings.

    An owner without a used ticket gets no row: it has all of them, and its first charge makes one. Nor does a forgotten
    one. While the earlier release forgot an owner, its index held the complement of the owner's mark: an entry added by
    itself, with no ticket used, which nobody can tell from a mark. So for each such entry that is left, its complement
    is leaving. If it is a hold, its owner gets no tickets until it is forgotten once more, as before. If it is a mark,
    its complement is nobody's: that one of n owners has one of m complements for its mark has probability n m / 2^128
    at most, 3e-27 for a million of each.

    Raises `LedgerError` if rows are missing, or not those of one copy.
    """
    try:
        for plan_id in connection.scalars(sa.select(plans.c.id).where(plans.c.tickets != 0)).all():
            here = {"plan_id": plan_id}
            size = connection.scalar(sa.text("SELECT size FROM dpicl_owner_index WHERE plan_id = :plan_id"), here)
            pieces = connection.execute(
                sa.text("SELECT start, marks FROM dpicl_owner_marks WHERE plan_id = :plan_id ORDER BY start"), here
            ).all()
            index = np.frombuffer(b"".join(piece for _, piece in pieces), np.uint8).reshape(size, MARK)
            is_known = index.any(axis=1)  # zeros: it was forgotten
            is_hold = is_known & np.isin(np.arange(size), [start for start, piece in pieces if len(piece) == MARK])
            for counter in connection.execute(sa.select(counters).filter_by(plan_id=plan_id)).all():
                used = _used(connection, counter, index)
                is_hold &= used == 0
                paid = np.flatnonzero(is_known & (used > 0))
                for part in np.array_split(paid, 1 + len(paid) // _CHUNK):
                    yield (
                        schema.tickets,
                        [
                            {
                                "counter_id": counter.id,
                                "mark": index[at].tobytes().hex(),
                                "used": int(used[at]),
                                "life": 0,
                            }
                            for at in part
                        ],
                    )
            holds = [mark.tobytes().hex() for mark in ~index[is_hold]]
            yield schema.leaving, [{"plan_id": plan_id, "mark": mark, "token": ""} for mark in holds]
    except (ValueError, TypeError, IndexError):
        raise LedgerError(
            "the ledger's tables of tickets have lost rows: nothing was changed; run `dpicl budget recover` with the "
            "release that wrote it, which counts as used what may be missing, and then upgrade"
        ) from None


def _used(connection: Connection, counter: Any, index: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The used tickets of a counter by position: the sums, and the rows since, all bound by hashes in a summary."""
    here = {"id": counter.id}
    summary = connection.execute(sa.text("SELECT * FROM dpicl_usage WHERE counter_id = :id"), here).one_or_none()
    sums = connection.scalar(sa.text("SELECT counts FROM dpicl_usage_counts WHERE counter_id = :id"), here) or b""
    rows = connection.execute(
        sa.text("SELECT number, units, positions FROM dpicl_usage_rows WHERE counter_id = :id ORDER BY number"), here
    ).all()
    used = np.zeros(len(index), np.int64)
    if summary is None:
        if counter.spent != counter.lost or rows:
            raise ValueError
        return used
    counted = np.frombuffer(sums, "<u4")
    used[: len(counted)] = counted
    chain = summary.base
    number = summary.summed
    for number, units, positions in rows:
        chain = _hashed(chain.encode(), str(number).encode(), str(units).encode(), positions)
        start = 8 if units < 0 else 0  # the number of the charge that it gives back
        used[np.frombuffer(positions[start:], "<u4")] += units
    facts = f"{chain}:{number}:{used.sum()}:{counter.spent}:{counter.lost}:{summary.owners}"
    first = hashlib.blake2b(index[: summary.owners].tobytes(), digest_size=16).hexdigest()
    found = (_hashed(facts.encode()), first, _hashed(sums) if summary.summed else "")
    if found != (summary.digest, summary.marks, summary.sums):
        raise ValueError
    return used


def _hashed(*pieces: bytes) -> str:
    """The earlier release's hash of bytes and of their lengths."""
    lengths = (len(piece).to_bytes(8, "big") for piece in pieces)
    return hashlib.blake2b(b"".join(map(bytes.__add__, lengths, pieces)), digest_size=16).hexdigest()


# -- writing -----------------------------------------------------------------------------------------------------------


def _convert(connection: Connection, ledger: Records, keys: OwnerKeyFile, witness: Witness | None) -> None:
    """Convert it, within the caller's transaction, which no other writer shares, and at the end its witness."""
    schema.wait_for_others(connection)
    if not ledger.is_sqlite:  # of SQLite the transaction has the write lock
        connection.exec_driver_sql("SET LOCAL lock_timeout = '30s'")
        names = ", ".join(sorted(schema.tables_of(connection)))
        connection.exec_driver_sql(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE")
    if _version(connection) == VERSION:  # another call was faster
        return
    before = connection.execute(_COUNTED).all()
    key = schema.key_of(connection, "fingerprint_key")
    if paying := connection.scalars(_WITH_OWNERS).all():
        keys.make(key)
        _same_key(keys, key)
    for table in _NEW:
        table.create(connection)
    for table, rows in _tickets(connection):
        if rows:
            connection.execute(sa.insert(table), rows)
    for name in _GONE:
        connection.exec_driver_sql(f"DROP TABLE {name}")
    _change_tables(connection, dict.fromkeys(paying, key_id(key)))
    connection.execute(sa.delete(meta).where(meta.c.key == "fingerprint_key"))
    connection.execute(sa.update(meta).where(meta.c.key == "schema_version").values(value=str(VERSION)))
    if connection.execute(_COUNTED).all() != before:
        raise LedgerError(f"the ledger's rows do not add up: nothing was changed; {ADVICE}")
    if witness is not None:
        copy = hashlib.blake2b(repr(before).encode(), digest_size=16).hexdigest()
        witness.run(partial(_convert_witness, counts(connection), copy))
        for counter_id, number, step, content in connection.execute(_OPEN_STEPS).all():
            witness.count_steps(f"{counter_id}.{number}", {step: step_digest(content)})


def _change_tables(connection: Connection, key_ids: Mapping[int, str]) -> None:
    """Make the tables anew that have other columns today, with all their rows; ``key_ids`` of plans that have marks."""
    kept = [column for column in plans.c if column.name not in ("key_id", "changes")]
    old_plans = connection.execute(sa.select(*kept)).mappings().all()
    old_counters = connection.execute(sa.select(counters)).mappings().all()
    for table in (counters, plans):
        table.drop(connection)
    for table in (plans, counters):
        table.create(connection)
    for plan in old_plans:
        new = {"content": with_lists(plan["content"]), "key_id": key_ids.get(plan["id"], "")}
        connection.execute(sa.insert(plans).values({**plan, **new}))
    for counter in old_counters:
        connection.execute(sa.insert(counters).values(dict(counter)))
    if connection.dialect.name == "postgresql":  # SQLite's whole numbers have 64 bits, whatever they are called
        for table in (charges, queries, steps):
            connection.exec_driver_sql(f"ALTER TABLE {table.name} ALTER COLUMN counter_id TYPE BIGINT")


def _convert_witness(found: Mapping[CounterKey, CounterRow], copy: str, connection: Connection) -> None:
    """Write the witness's marks anew in the numbers of these counters, unless it has those of this copy: see WITNESS.

    A mark whose counter is not in the ledger keeps its numbers: it is refused, or counts as lost, as before.
    """
    upgraded = about.c.key == "upgraded"
    if connection.scalar(sa.select(about.c.value).where(upgraded)) == copy:
        return
    low = "low"
    if "ahead" in {column["name"] for column in sa.inspect(connection).get_columns(marks.name)}:
        low = f"CASE ahead WHEN {GIVEN_UP} THEN {GIVEN_UP} ELSE low END"
    query = f"SELECT plan, line, principal, digest, {low}, reserved FROM dpicl_marks"
    known = [Mark(CounterKey(*row[:4]), *row[4:]) for row in connection.exec_driver_sql(query).all()]
    marks.drop(connection)
    metadata.create_all(connection)
    for mark in known:
        if (count := found.get(mark.key)) is not None:
            end = count.spent + max(0, mark.reserved - count.in_use)
            mark = Mark(mark.key, max(mark.low, count.spent), end)
        row = {**mark.key._asdict(), "low": mark.low, "reserved": mark.reserved}
        connection.execute(sa.insert(marks).values(row))
    connection.execute(sa.delete(about).where(upgraded))
    connection.execute(sa.insert(about).values(key="upgraded", value=copy))
