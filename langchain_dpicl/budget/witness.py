"""The witness: a second record, kept elsewhere, that bounds the releases of all copies of a ledger together.

It has one mark for each counter (a plan's line, and a principal where each has a counter): the interval of the latest
charge, from ``low`` to ``reserved``.

CLAIM. Somebody may copy, delete, replace, truncate or put back the ledger's file (or its log, or its database) as a
whole at any time, and processes may be killed at any time, but nobody changes the witness. Then, whatever the ledger
says:

1. on each counter, the releases or tokens of all answers that were ever begun add up to no more than the plan has;
2. if owners pay with tickets, no owner takes part more than T times on a counter.

PROOF. Let a copy's count be its counter's ``spent``, which only grows. A charge of n units on a copy of count k moves
the mark from k to k + n (`Witness.follow`): in one step, on the disk, with the counter locked, as the last act before
its COMMIT, and only if the mark ends at k or before. The interval from k to k + n is the charge's. Say that a copy of
count k is complete if for every interval below k it holds the charge that was committed there, with its tickets, or has
counted its units as ``lost``: n of ``lost`` are n units in use, and n tickets fewer for every owner.

A new ledger is complete. A charge that commits on a complete copy of count k leaves it complete at k + n. A copy whose
count j is below the mark lacks charges of the intervals from j on alone: by adding the difference to ``lost`` it
becomes one that has counted as far as the mark, and is complete again, whoever else is at work. A charge that was
rolled back for certain takes its interval back, if no other followed (`Witness.withdraw`); another charge may then have
it, and a copy that has counted it as lost has counted this one too. So every charge is made on a complete copy. Units
come back to the copy that holds their charge, once, and only if they were never sampled; of what a copy has counted as
lost, none comes back. So its units in use are at least those of all answers ever begun, less those that were never
sampled, and its own guard holds for all of them: units in use and the charge are at most the plan's, and an owner pays
only if the tickets it used, ``lost`` and the charge are at most T together. A copy finds a charge by its counter's id,
which is random, and its number: what was charged on another copy is found there, or nothing is.                    QED

STEPS. A charge that `BudgetLine.reopen` takes up again takes no new interval: the record of its steps says what it has
released, and nothing of it is given back. The witness has the hash of each step's content before anything is made of
it, so each step has one content on all copies: a copy that lacks one, or has another, is not taken up, and does not go
on.

COST. A charge writes the witness once: its block is its own units. A witness in the ledger's own database is written in
the charge's transaction, since nothing puts back one of the two alone but by hand. So a process holds nothing back from
others, loses nothing when it ends, and need not know whether it is alone: nothing here depends on a session, a lock or
a clock. Of a process that is killed between the witness's commit and the ledger's, the units of that one charge count
as spent, with a `PrivacyWarning`, at the counter's next charge or the ledger's next opening (`opening.settle`).

REFUSED (`LedgerError`), because the ledger was lost or rolled back: another identity than the witness knows; no ledger,
if the witness knows one; a count below ``low``; a plan that is gone; and a ledger without a witness, because all of it
may be an old copy. `upkeep.recover` helps: it counts as spent whatever may be missing.

NOT SEEN. A witness that is put back together with its ledger: the folder of both, restored as a whole, or the database
that holds both. Keep it elsewhere (``witness=``). A mixture of old and new pages or rows of one ledger, made by hand,
or by writing over a file, or removing its log, while it is open: a copy is whole. One witness serves one ledger.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget.records import Records
from langchain_dpicl.budget.schema import ADVICE, text, wait_for_others, whole
from langchain_dpicl.errors import LedgerError
from langchain_dpicl.sql import direct, insert, transaction

GIVEN_UP = -1

metadata = sa.MetaData()
about = sa.Table("dpicl_witness", metadata, text("key", 64, primary_key=True), text("value"))
marks = sa.Table(
    "dpicl_marks",
    metadata,
    text("plan", 255, primary_key=True),
    text("line", 255, primary_key=True),
    text("principal", 255, primary_key=True),
    text("digest", 64, primary_key=True),
    whole("low"),
    whole("reserved"),
)
kept_steps = sa.Table(
    "dpicl_kept_steps",
    metadata,
    text("charge", 64, primary_key=True),
    whole("step", primary_key=True, autoincrement=False),
    text("digest", 64),
)
_STEPS = sa.select(kept_steps.c.step, kept_steps.c.digest).where(kept_steps.c.charge == sa.bindparam("at"))
_MOVE = """UPDATE dpicl_marks SET low = :spent, reserved = :after
    WHERE plan = :plan AND line = :line AND principal = :principal AND digest = :digest AND reserved <= :spent"""


class CounterKey(NamedTuple):
    """A counter as the witness knows it."""

    plan: str
    line: str
    principal: str
    digest: str


class Mark(NamedTuple):
    """The witness's row for a counter: the interval of its latest charge."""

    key: CounterKey
    low: int
    """Where it began: surely reached. `GIVEN_UP` if the ledger need not have the plan."""
    reserved: int
    """Where it ends: the units that may have been spent, whether or not some were given back."""


def step_digest(content: str) -> str:
    """The hash by which the witness knows the content of a step."""
    return hashlib.sha256(content.encode()).hexdigest()


def rolled_back(key: CounterKey, spent: int | None = None, low: int | None = None) -> LedgerError:
    """The error of a ledger that is older than its witness."""
    where = f"{key.plan!r}, line {key.line!r}"
    if spent is not None:
        where += f": it has counted {spent}, and {low} were reached"
    return LedgerError(f"the ledger was rolled back ({where}): nothing was charged; {ADVICE}")


class Witness(Records):
    """The witness's own small database: one SQLite file, or tables in PostgreSQL. Raises `LedgerError`."""

    noun = "ledger's witness"
    application_id = 0x44504957  # "DPIW"
    is_nested = True
    options = {"pool_size": 1, "max_overflow": 4}  # noqa: RUF012 - never changed

    # -- its ledger ---------------------------------------------------------------------------------------------------

    def about(self) -> dict[str, str]:
        """Its ledger's ``identity``, and ``made`` ("yes" once the ledger was made).

        Empty if there is no witness.
        """
        if self.path is not None and not (os.path.exists(self.path) and os.path.getsize(self.path)):
            return {}
        found = self.run(_about, "read")
        self.opened = True
        return found

    @transaction()
    def begin(self, connection: Connection) -> dict[str, str]:
        """`about`; makes a new witness if there is none, for a ledger that is still to be made."""
        if found := _about(connection):
            return found
        wait_for_others(connection)
        metadata.create_all(connection)
        if found := _about(connection):
            return found
        if self.is_sqlite:
            connection.exec_driver_sql(f"PRAGMA application_id={self.application_id}")
        return _note(connection, {"identity": secrets.token_hex(16), "made": ""})

    @transaction()
    def note(self, connection: Connection, /, **values: str) -> None:
        """Replace parts of `about`."""
        _note(connection, values)

    # -- marks --------------------------------------------------------------------------------------------------------

    @transaction("read")
    def marks(self, connection: Connection) -> list[Mark]:
        """All of them."""
        return [Mark(CounterKey(*row[:4]), *row[4:]) for row in connection.execute(sa.select(marks))]

    @transaction()
    def write(self, connection: Connection, found: Iterable[Mark]) -> None:
        """Write these marks, for a caller who has locked their counters. No mark ends earlier than before."""
        for mark in found:
            here = sa.select(marks.c.reserved).filter_by(**mark.key._asdict()).with_for_update()
            known = connection.scalar(here)
            if known is None:
                _insert(connection, mark)
                continue
            values = {"low": mark.low, "reserved": max(mark.reserved, known)}
            connection.execute(sa.update(marks).filter_by(**mark.key._asdict()).values(values))

    def follow(self, key: CounterKey, spent: int, units: int) -> Mark | None:
        """`move`, in a transaction of its own."""
        return self.run(partial(move, key=key, spent=spent, units=units))

    @transaction()
    def withdraw(self, connection: Connection, key: CounterKey, before: int, after: int) -> None:
        """Take back the interval of a charge that was rolled back for certain, unless another charge followed."""
        own = sa.update(marks).filter_by(**key._asdict(), low=before, reserved=after)
        connection.execute(own.values(reserved=before))

    # -- steps --------------------------------------------------------------------------------------------------------

    @transaction()
    def count_steps(self, connection: Connection, charge: str, digests: Mapping[int, str]) -> dict[int, str]:
        """The digests of a charge's steps that stand: with these, unless one of them is another one."""
        known = {step: digest for step, digest in connection.execute(_STEPS, {"at": charge})}  # noqa: C416
        news = digests.keys() - known.keys()
        if all(known.get(step, digest) == digest for step, digest in digests.items()):
            for step in news:
                insert(connection, kept_steps, {"charge": charge, "step": step, "digest": digests[step]})
        return {**digests, **known}


def move(connection: Connection, key: CounterKey, spent: int, units: int) -> Mark | None:
    """Move a counter's mark over the interval of a charge, from ``spent`` on. None, or the mark that is beyond.

    `LedgerError` if the ledger's counter was rolled back.
    """
    moved = {**key._asdict(), "spent": spent, "after": spent + units}
    if direct(connection, _MOVE, moved).rowcount == 1:
        return None
    row = connection.execute(sa.select(marks.c.low, marks.c.reserved).filter_by(**key._asdict())).one_or_none()
    if row is None:
        named = sa.select(marks.c.plan).filter_by(plan=key.plan).where(marks.c.digest != key.digest)
        if connection.execute(named.where(marks.c.low != GIVEN_UP, marks.c.reserved > 0)).first() is not None:
            words = f"the witness knows another plan under the name {key.plan!r}"
            raise LedgerError(f"{words}: nothing was charged; {ADVICE}")
        _insert(connection, Mark(key, spent, spent + units))
        return None
    if spent < row.low:
        raise rolled_back(key, spent, row.low)
    return Mark(key, *row)


def _about(connection: Connection) -> dict[str, str]:
    if not sa.inspect(connection).has_table(about.name):
        return {}
    return {key: value for key, value in connection.execute(sa.select(about)).all()}  # noqa: C416


def _note(connection: Connection, values: dict[str, str]) -> dict[str, str]:
    connection.execute(sa.delete(about).where(about.c.key.in_(values)))
    insert(connection, about, [{"key": key, "value": value} for key, value in values.items()])
    return values


def _insert(connection: Connection, mark: Mark) -> None:
    insert(connection, marks, {**mark.key._asdict(), "low": mark.low, "reserved": mark.reserved})
