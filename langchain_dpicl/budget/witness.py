"""The witness: a second record, kept elsewhere, that bounds what all copies of a ledger give away together.

CLAIM. Somebody may copy, delete, replace, truncate or put back the ledger's file (or its log, or its database) at any
time, and processes may be killed at any time, but nobody changes the witness. Then, whatever the ledger says:

1. on each counter (a plan's line, and principal where each has a counter), the releases or tokens of all answers that
   were ever begun add up to no more than the plan has;
2. where owners pay with tickets, no owner takes part more than T times on a counter;
3. a filter's divergence, with every answer that was ever begun, stays within its budget.

PROOF OF 1. The witness holds ``reserved`` for each counter. It grows only in `Witness.grant`, a transaction that is on
the disk before the charge it is for is committed, and never beyond ``allowed``, which is frozen with the plan's digest
at the first grant. A grant of n gives n permits to one process, in its memory. A charge of n units uses up n permits
of the process that makes it, before its answer is begun. A permit is given back (``reserved`` falls, or the process
may use it again) only by the process that has it, and only if it was not used: the charge was rolled back for certain,
or the tokens were never sampled, which each charge says once. A child of a fork starts without permits, and
gives back nothing of its parent's charges. So at every
moment the units of all answers ever begun are at most the permits that were granted and not given back: at most
``reserved``, at most ``allowed``. No step looked at the ledger.                                                    QED

PROOF OF 2. Here the witness also orders charges. Let a copy's count be its counter's ``spent``. A charge of n units
on a copy of count k sets ``reserved`` from k to k + n in one step (`Witness.swap`), with the counter locked, as the
last act before its COMMIT, and only on the copy whose digest the witness has (BINDING). Say that a copy of count k is
complete if every answer begun under the grants up to k is in its usage, or in its ``lost``: n of ``lost`` are n
tickets fewer for every owner. A new ledger is complete. A charge that commits on a complete copy of count k leaves it
complete at k + n. A copy of count j < ``reserved`` becomes one of count ``reserved`` by adding the difference to
``lost``, and the answers that it may lack were begun under the grants from j on, with as many units at most: complete
again, whoever else is at work. Its digest is then another one, which the witness takes over (`Witness.settle`). So
every charge is made on a complete copy, and an owner pays only if the tickets it used there, ``lost`` and the charge
are at most T together: it uses at most T tickets in all answers ever begun. A grant is withdrawn only if its charge
was rolled back for certain and no other grant followed.                                                             QED

BINDING. A copy may be a mixture: pages or rows, some old, some new. Each counter whose owners pay has one summary row
(`usage`), with its ``spent`` and ``lost``, the chained hash of all its usage rows, the hash of their sums, and the hash
of the first s marks of the owner index, where s is how many its latest charge saw. A charge, in its transaction,
refuses unless the counter, the usage rows, the sums and the marks are those that the summary was written with, and the
witness has the summary's digest. The digest leaves out what summing and forgetting change, so the summary is that of
the latest charge, or of a summing or forgetting after it; each of these goes with the rows, sums and marks of all
charges. Positions from s on were never used on this counter, and no mark has two. What a process knows is compared in
the same way. The check is against old bytes, wherever they are put, whole rows or parts of them (a summary is a few
hundred bytes, within one page); an attacker who forges hashes can do more. `recovery.recover` takes a copy for one of
its count only if it passes these checks without the witness, and takes away all tickets of a counter otherwise.

PROOF OF 3. As 2, with the filter's state in place of the count: the witness keeps the state before and after the
latest grant. A copy in the state before takes over the state after, which holds that grant's divergence.           QED

A charge that `BudgetLine.reopen` takes up again needs no new permit: that its tokens are drawn once is known from its
caller's own record (the job's file), and nothing of it is given back.

WHAT IT COSTS. A counter of at least 200 has permits granted ahead, in blocks: all processes together hold at most 1 %
of the plan unused, each a share of it, less towards the end, and none more than it has charged. So few charges write
the witness. Below 200, and with tickets and filters, each charge writes it once more. Processes that end give back what
they have not used; what a killed process had not used stays reserved, and when next a ledger is opened while nobody
else has it open, all that is reserved counts as spent, in the ledger too, with a `PrivacyWarning`.

WHAT IS REFUSED (`LedgerError`), since the ledger was lost or rolled back: another identity than the witness knows; no
ledger where the witness knows one; a count below ``low``, which was surely reached; a plan that is gone; another file
than other processes have open. And a ledger that has no witness, for all of it may be an old copy. `recovery.recover`
helps: it counts as spent whatever may be missing.

WHAT IT CANNOT SEE. A witness that is put back together with its ledger: the folder of both, restored as a whole, or
the database in which both are. Keep it elsewhere (``witness=``). One witness serves one ledger.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from langchain_dpicl.budget.database import Database, TryAgain, transaction
from langchain_dpicl.budget.schema import ADVICE, UNLIMITED
from langchain_dpicl.errors import InvalidParameter, LedgerError

LOCK = 0x64706977  # a number for PostgreSQL's advisory locks, the same for all workers
GIVEN_UP = -1

metadata = sa.MetaData()
about = sa.Table(
    "dpicl_witness",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
marks = sa.Table(
    "dpicl_marks",
    metadata,
    sa.Column("plan", sa.String(255), primary_key=True),
    sa.Column("line", sa.String(255), primary_key=True),
    sa.Column("principal", sa.String(255), primary_key=True),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("allowed", sa.BigInteger, nullable=False),
    sa.Column("low", sa.BigInteger, nullable=False),
    sa.Column("reserved", sa.BigInteger, nullable=False),
    sa.Column("ahead", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("before", sa.Text),
    sa.Column("state", sa.Text),
    sa.CheckConstraint("reserved >= 0 AND reserved <= allowed", name="dpicl_never_over_granted"),
)


@dataclass(frozen=True)
class Key:
    """A counter as the witness knows it. A filter has one for the whole plan, whose line is ""."""

    plan: str
    line: str
    principal: str
    digest: str

    @property
    def place(self) -> tuple[str, str, str]:
        """Plan, line and principal."""
        return self.plan, self.line, self.principal

    @property
    def whole_plan(self) -> Key:
        """The key of the plan's filter."""
        return replace(self, line="", principal="")


@dataclass(frozen=True)
class Mark:
    """What the witness knows of a counter."""

    key: Key
    allowed: int
    low: int = 0
    """A number that the counter has surely reached."""
    reserved: int = 0
    """What may have been spent."""
    ahead: int = 0
    """How many of these were granted ahead. `GIVEN_UP` if the ledger need not have the plan."""
    before: str | None = None
    state: str | None = None
    """A filter's state, or the digest of a counter whose owners pay, before and after its latest grant."""


@dataclass(frozen=True)
class Grant:
    """A grant of `Witness.swap`: the mark before it, and after it."""

    old: Mark
    new: Mark


class Behind(Exception):
    """The ledger lacks the latest grant: its process was killed before the charge was there, or an old copy is back."""


class Witness(Database):
    """The witness's own small database: one SQLite file, or tables in PostgreSQL.

    Raises `LedgerError`. With ``live`` (PostgreSQL alone): every session says by a lock that this process is there.
    """

    noun = "ledger's witness"
    application_id = 0x44504957  # "DPIW"
    journal = "PERSIST"  # one file: the journal beside it is empty between transactions
    options = {"pool_size": 1, "max_overflow": 0}  # noqa: RUF012 - never changed

    def __init__(self, url: str, *, live: bool = False) -> None:
        self._live = live
        super().__init__(url)

    def _on_postgresql(self, connection: Any) -> None:
        if self._live:
            connection.execute("SELECT pg_advisory_lock_shared(%s)", (LOCK,))

    # -- whose witness it is -------------------------------------------------------------------------------------------

    def about(self) -> dict[str, str]:
        """The identity of its ledger, whether that is ``made``, and its ``place``; empty if there is no witness."""
        if self.path is not None and not (os.path.exists(self.path) and os.path.getsize(self.path)):
            return {}
        found = self._about()
        self._opened = True
        return found

    @transaction("read")
    def _about(self, connection: Connection) -> dict[str, str]:
        return _about(connection) if sa.inspect(connection).has_table(about.name) else {}

    def begin(self) -> dict[str, str]:
        """`about`; makes a new witness if there is none, for a ledger that is still to be made."""
        return self.about() or self._begin()

    @transaction()
    def _begin(self, connection: Connection) -> dict[str, str]:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK + 1)))
        metadata.create_all(connection)
        found = _about(connection)
        if not found:
            found = {"identity": secrets.token_hex(16), "made": ""}
            _write(connection, found)
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql(f"PRAGMA application_id={self.application_id}")
        return found

    @transaction()
    def note(self, connection: Connection, /, **values: str) -> None:
        """Replace parts of `about`."""
        _write(connection, values)

    def once(self) -> None:
        """From now on try everything once: this process is leaving, and what it cannot give back stays reserved."""
        self._opened = False

    # -- marks --------------------------------------------------------------------------------------------------------

    @transaction("read")
    def marks(self, connection: Connection) -> list[Mark]:
        """All of them."""
        return [_mark(row) for row in connection.execute(sa.select(marks))]

    @transaction()
    def write(self, connection: Connection, found: Sequence[Mark]) -> None:
        """Replace these marks, for a process that knows that no other is there. ``reserved`` never falls by it,
        whatever was granted since they were read."""
        for mark in found:
            there = _read(connection, mark.key, any_plan=True)
            if there is None:
                _insert(connection, mark)
                continue
            if there.key == mark.key:
                mark = replace(mark, reserved=max(mark.reserved, min(there.reserved, mark.allowed)))
            connection.execute(sa.update(marks).where(_at(mark.key)).values(**_values(mark)))

    @transaction()
    def grant(
        self,
        connection: Connection,
        key: Key,
        need: int,
        mine: int,
        spent: int,
        in_use: int,
        allowed: int,
        *,
        most: int = UNLIMITED,
    ) -> int | None:
        """Grant ``need`` permits, and some ahead: how many of these. None if fewer than ``need`` are left.

        Parameters
        ----------
        mine
            How many this process was granted ahead before, and has used up.
        spent, in_use, allowed
            What the ledger's counter says before the charge. The first grant alone believes ``allowed``.
        most
            How many it takes ahead, at most.
        """
        mark = _read(connection, key)
        if mark is None:
            mark = _insert(connection, Mark(key, allowed, low=spent, reserved=in_use))
        if spent < mark.low:
            raise rolled_back(key, spent, mark.low)
        reserved = max(mark.reserved, min(in_use, mark.allowed)) + need
        if reserved > mark.allowed:
            return None
        others = max(mark.ahead - mine, 0)
        share = (mark.allowed // 100 - others) // 2  # n processes come to have 1 % / (n + 1) each
        extra = max(0, min(share, (mark.allowed - reserved) // 8, most))
        low, reserved = max(mark.low, spent), reserved + extra
        _update(connection, replace(mark, low=low, reserved=reserved, ahead=others + extra))
        return extra

    @transaction()
    def give_back(self, connection: Connection, key: Key, permits: int, ahead: int = 0, low: int = 0) -> None:
        """``permits`` were not used; ``ahead`` of them count as granted ahead. ``low`` was surely reached."""
        mark = _read(connection, key)
        if mark is not None:
            reserved, left = mark.reserved - permits, max(mark.ahead - ahead, 0)
            _update(connection, replace(mark, low=max(mark.low, low), reserved=reserved, ahead=left))

    @transaction()
    def swap(
        self, connection: Connection, key: Key, before: str, after: str, counts: tuple[int, int] | None = None
    ) -> Grant:
        """Grant one charge, on a copy of the ledger that lacks none: from a state to a state and, if owners pay, from
        a count to a count. Raises `Behind` if the copy lacks the latest grant alone."""
        mark = _read(connection, key)
        if mark is None:
            mark = _insert(connection, Mark(key, UNLIMITED))
        elif before != mark.state:
            if before == mark.before:
                raise Behind
            raise rolled_back(key, *((counts[0], mark.low) if counts else ()))
        low, reserved = counts or (mark.low, mark.reserved)
        new = replace(mark, low=low, reserved=max(reserved, mark.reserved), before=before, state=after)
        _update(connection, new)
        return Grant(mark, new)

    @transaction()
    def settle(self, connection: Connection, mark: Mark, state: str) -> None:
        """The ledger's counter, which lacked the latest grant, counts it as lost: no copy that has it is taken."""
        if connection.execute(sa.update(marks).where(_same(mark)).values(state=state)).rowcount != 1:
            raise rolled_back(mark.key)

    @transaction()
    def withdraw(self, connection: Connection, grant: Grant) -> None:
        """A grant whose charge was rolled back for certain, unless another followed it."""
        old = {name: getattr(grant.old, name) for name in _CHANGED}
        connection.execute(sa.update(marks).where(_same(grant.new)).values(**old))


def _about(connection: Connection) -> dict[str, str]:
    return {key: value for key, value in connection.execute(sa.select(about)).all()}  # noqa: C416


def _write(connection: Connection, values: dict[str, str]) -> None:
    connection.execute(sa.delete(about).where(about.c.key.in_(values)))
    try:
        connection.execute(sa.insert(about), [{"key": key, "value": value} for key, value in values.items()])
    except IntegrityError:  # another worker wrote it between the two statements
        raise TryAgain from None


# The statements of a grant, built once: building them anew takes about as long as running them.
_PLACE = ("plan", "line", "principal")
_CHANGED = ("low", "reserved", "ahead", "before", "state")
_HERE = sa.and_(*(marks.c[name] == sa.bindparam(f"at_{name}") for name in _PLACE))
_READ = sa.select(marks).where(_HERE).with_for_update()
_UPDATE = sa.update(marks).where(_HERE).values({name: sa.bindparam(f"new_{name}") for name in _CHANGED})


def _where(key: Key) -> dict[str, object]:
    return {f"at_{name}": getattr(key, name) for name in _PLACE}


def _at(key: Key) -> sa.ColumnElement[bool]:
    return sa.and_(*(marks.c[name] == getattr(key, name) for name in _PLACE))


def _same(mark: Mark) -> sa.ColumnElement[bool]:
    """This mark, if no other grant followed it."""
    return sa.and_(_at(mark.key), marks.c.before == mark.before, marks.c.state == mark.state)


def _mark(row: Any) -> Mark:
    plan, line, principal, digest, *rest = row
    return Mark(Key(plan, line, principal, digest), *rest)


def _read(connection: Connection, key: Key, *, any_plan: bool = False) -> Mark | None:
    row = connection.execute(_READ, _where(key)).one_or_none()
    if row is None:
        return None
    if row.digest != key.digest and not any_plan:
        raise LedgerError(f"the witness knows another plan under the name {key.plan!r}: nothing was charged; {ADVICE}")
    return _mark(row)


def _update(connection: Connection, mark: Mark) -> None:
    connection.execute(_UPDATE, _where(mark.key) | {f"new_{name}": getattr(mark, name) for name in _CHANGED})


def _values(mark: Mark) -> dict[str, object]:
    return {**mark.key.__dict__, "allowed": mark.allowed, **{name: getattr(mark, name) for name in _CHANGED}}


def _insert(connection: Connection, mark: Mark) -> Mark:
    try:
        connection.execute(sa.insert(marks).values(**_values(mark)))
    except IntegrityError:  # another process was first
        raise TryAgain from None
    return mark


def rolled_back(key: Key, spent: int | None = None, low: int | None = None) -> LedgerError:
    """The ledger is older than the witness."""
    counts = "" if spent is None else f": it has counted {spent}, and {low} were reached"
    where = f"{key.plan!r}, line {key.line!r}" if key.line else repr(key.plan)
    return LedgerError(f"the ledger was rolled back ({where}{counts}): nothing was charged; {ADVICE}")


def address(ledger: Database, witness: str | os.PathLike[str] | None) -> str:
    """The witness's URL: as it was given (a path or a URL), or beside the ledger."""
    if witness is None:
        if ledger.path is None:
            return ledger.url.render_as_string(hide_password=False)
        return f"sqlite:///{ledger.path}.witness"
    if not isinstance(witness, (str, os.PathLike)) or not str(witness):
        raise InvalidParameter("witness", type(witness).__name__, "a path, or a database URL")
    given = os.fspath(witness)
    return given if "://" in given else f"sqlite:///{given}"
