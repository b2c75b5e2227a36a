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
complete if every answer begun under the grants up to k is in its burns, or in its ``lost``: n of ``lost`` are n
tickets fewer for every owner. A new ledger is complete. A charge that commits on a complete copy of count k leaves it
complete at k + n. A copy of count j < ``reserved`` becomes one of count ``reserved`` by adding the difference to
``lost``, and the answers that it may lack were begun under the grants from j on, with as many units at most: complete
again, whoever else is at work. Its digest is then another one, which the witness takes over (`Witness.settle`). So
every charge is made on a complete copy, and an owner pays only if its burns there, ``lost`` and the charge are at
most T together: its burns in all answers ever begun are at most T. A grant is withdrawn only if its charge was rolled
back for certain and no other grant followed.                                                                       QED

BINDING. A copy may be a mixture: pages or rows, some old, some new. Each counter whose owners pay has one row, its
stub, with its ``spent`` and ``lost``, the chained hash of all its burns, the hash of the pages of counts, and the
hash of the marks of the first s seats, where s is how many its latest charge saw. A charge, in its transaction,
refuses unless the counter, the burns, the pages and the seats are those that the stub was written with, and the
witness has the stub's digest. The digest leaves out what folding and forgetting change, so the stub is that of the
latest charge, or of a folding or forgetting after it; each of these goes with the burns, counts and seats of all
charges. Entries from s on were never used on this counter, and no mark has two. What a process knows is compared in the
same way. The check is against old bytes, wherever they are put, whole rows or parts of them (a stub is a few hundred
bytes, within one page); who forges hashes can do more. `recovery.recover` takes a copy for one of its count only if
it passes these checks without the witness, and takes away all tickets of a counter otherwise.

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

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from langchain_dpicl.budget.database import Database, TryAgain
from langchain_dpicl.budget.schema import ADVICE, UNLIMITED
from langchain_dpicl.errors import InvalidParameter, LedgerError

try:
    import fcntl
except ImportError:  # Windows: nobody ever knows that nobody else is there, which costs permits and is safe
    fcntl = None  # type: ignore[assignment]

_LOCK = 0x64706977  # a number for PostgreSQL's advisory locks, the same for all workers
_MADE = "made"
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


@dataclass(frozen=True)
class Mark:
    """What the witness knows of a counter."""

    plan: str
    line: str
    principal: str
    digest: str
    allowed: int
    low: int
    """A number that the counter has surely reached."""
    reserved: int
    """What may have been spent."""
    ahead: int
    """How many of these were granted ahead. `GIVEN_UP` where the ledger need not have the plan."""
    before: str | None
    state: str | None
    """A filter's state, or the digest of a counter whose owners pay, before and after its latest grant."""

    @property
    def key(self) -> Key:
        """Which counter."""
        return Key(self.plan, self.line, self.principal, self.digest)


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
            connection.execute("SELECT pg_advisory_lock_shared(%s)", (_LOCK,))

    # -- whose witness it is -------------------------------------------------------------------------------------------

    def about(self) -> dict[str, str]:
        """The identity of its ledger, whether that is ``made``, and its ``place``; empty where there is no witness."""
        if self.path is not None and not (os.path.exists(self.path) and os.path.getsize(self.path)):
            return {}

        def read(connection: Connection) -> dict[str, str]:
            if not sa.inspect(connection).has_table(about.name):
                return {}
            return {key: value for key, value in connection.execute(sa.select(about)).all()}  # noqa: C416

        found = self.run(read, "read")
        self._opened = True
        return found

    def begin(self) -> dict[str, str]:
        """`about`; a new witness is made where there is none, for a ledger that is still to be made."""

        def make(connection: Connection) -> dict[str, str]:
            if connection.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK + 1)))
            metadata.create_all(connection)
            found = {key: value for key, value in connection.execute(sa.select(about)).all()}  # noqa: C416
            if not found:
                found = {"identity": secrets.token_hex(16), _MADE: ""}
                _write(connection, found)
                if connection.dialect.name == "sqlite":
                    connection.exec_driver_sql(f"PRAGMA application_id={self.application_id}")
            return found

        return self.about() or self.run(make)

    def note(self, **values: str) -> None:
        """Replace what `about` says."""
        self.run(lambda connection: _write(connection, values))

    def once(self) -> None:
        """From now on try everything once: this process is leaving, and what it cannot give back stays reserved."""
        self._opened = False

    # -- marks --------------------------------------------------------------------------------------------------------

    def marks(self) -> list[Mark]:
        """All of them."""
        return self.run(lambda connection: [Mark(*row) for row in connection.execute(sa.select(marks))], "read")

    def write(self, found: Sequence[Mark]) -> None:
        """Replace these marks, for a process that knows that no other is there. ``reserved`` never falls by it,
        whatever was granted since they were read."""

        def put(connection: Connection) -> None:
            for mark in found:
                there = _read(connection, mark.key, any_plan=True)
                if there is None:
                    _insert(connection, mark)
                    continue
                if there.digest == mark.digest:
                    mark = replace(mark, reserved=max(mark.reserved, min(there.reserved, mark.allowed)))
                connection.execute(sa.update(marks).where(_at(mark.key)).values(**mark.__dict__))

        self.run(put)

    def grant(
        self, key: Key, need: int, mine: int, spent: int, in_use: int, allowed: int, *, most: int = UNLIMITED
    ) -> int | None:
        """Grant ``need`` permits, and some ahead: how many of these. None where fewer than ``need`` are left.

        Parameters
        ----------
        mine
            How many this process was granted ahead before, and has used up.
        spent, in_use, allowed
            What the ledger's counter says before the charge. The first grant alone believes ``allowed``.
        most
            How many it takes ahead, at most.
        """

        def take(connection: Connection) -> int | None:
            mark = _read(connection, key)
            if mark is None:
                mark = Mark(key.plan, key.line, key.principal, key.digest, allowed, spent, in_use, 0, None, None)
                _insert(connection, mark)
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

        return self.run(take)

    def give_back(self, key: Key, permits: int, ahead: int = 0, low: int = 0) -> None:
        """``permits`` were not used, of which so many were counted as granted ahead. ``low`` was surely reached."""

        def give(connection: Connection) -> None:
            mark = _read(connection, key)
            if mark is not None:
                reserved, left = mark.reserved - permits, max(mark.ahead - ahead, 0)
                _update(connection, replace(mark, low=max(mark.low, low), reserved=reserved, ahead=left))

        self.run(give)

    def swap(self, key: Key, before: str, after: str, allowed: int, counts: tuple[int, int] | None = None) -> Grant:
        """Grant one charge, on a copy of the ledger that lacks none: from a state to a state, and from a count to a
        count where owners pay. Raises `Behind` where the copy lacks the latest grant alone."""

        def take(connection: Connection) -> Grant:
            mark = _read(connection, key)
            if mark is None:
                mark = Mark(key.plan, key.line, key.principal, key.digest, allowed, 0, 0, 0, None, None)
                _insert(connection, mark)
            elif before != mark.state:
                raise (
                    Behind if before == mark.before else rolled_back(key, *((counts[0], mark.low) if counts else ()))
                )
            low, reserved = counts or (mark.low, mark.reserved)
            new = replace(mark, low=low, reserved=max(reserved, mark.reserved), before=before, state=after)
            _update(connection, new)
            return Grant(mark, new)

        return self.run(take)

    def settle(self, mark: Mark, state: str) -> None:
        """The ledger's counter, which lacked the latest grant, counts it as lost: no copy that has it is taken."""
        same = sa.and_(_at(mark.key), marks.c.before == mark.before, marks.c.state == mark.state)

        def put(connection: Connection) -> None:
            if connection.execute(sa.update(marks).where(same).values(state=state)).rowcount != 1:
                raise rolled_back(mark.key)

        self.run(put)

    def withdraw(self, grant: Grant) -> None:
        """A grant whose charge was rolled back for certain, unless another followed it."""
        same = sa.and_(_at(grant.new.key), marks.c.before == grant.new.before, marks.c.state == grant.new.state)
        old = {name: getattr(grant.old, name) for name in _CHANGED}
        self.run(lambda connection: connection.execute(sa.update(marks).where(same).values(**old)))


def _at(key: Key) -> sa.ColumnElement[bool]:
    return sa.and_(marks.c.plan == key.plan, marks.c.line == key.line, marks.c.principal == key.principal)


# The statements of a grant, built once: building them anew takes about as long as running them.
_HERE = sa.and_(*(marks.c[name] == sa.bindparam(f"at_{name}") for name in ("plan", "line", "principal")))
_READ = sa.select(marks).where(_HERE).with_for_update()
_CHANGED = ("low", "reserved", "ahead", "before", "state")
_UPDATE = sa.update(marks).where(_HERE).values({name: sa.bindparam(f"new_{name}") for name in _CHANGED})


def _where(key: Key | Mark) -> dict[str, object]:
    return {"at_plan": key.plan, "at_line": key.line, "at_principal": key.principal}


def _update(connection: Connection, mark: Mark) -> None:
    connection.execute(_UPDATE, _where(mark) | {f"new_{name}": getattr(mark, name) for name in _CHANGED})


def _read(connection: Connection, key: Key, *, any_plan: bool = False) -> Mark | None:
    row = connection.execute(_READ, _where(key)).one_or_none()
    if row is None:
        return None
    if row.digest != key.digest and not any_plan:
        raise LedgerError(f"the witness knows another plan under the name {key.plan!r}: nothing was charged; {ADVICE}")
    return Mark(*row)


def _insert(connection: Connection, mark: Mark) -> None:
    try:
        connection.execute(sa.insert(marks).values(**mark.__dict__))
    except IntegrityError:  # another process was first
        raise TryAgain from None


def _write(connection: Connection, values: dict[str, str]) -> None:
    connection.execute(sa.delete(about).where(about.c.key.in_(values)))
    try:
        connection.execute(sa.insert(about), [{"key": key, "value": value} for key, value in values.items()])
    except IntegrityError:  # another worker wrote it between the two statements
        raise TryAgain from None


def rolled_back(key: Key, spent: int | None = None, low: int | None = None) -> LedgerError:
    """The ledger is older than the witness."""
    counts = "" if spent is None else f": it has counted {spent}, and {low} were reached"
    where = f"{key.plan!r}, line {key.line!r}" if key.line else repr(key.plan)
    return LedgerError(f"the ledger was rolled back ({where}{counts}): nothing was charged; {ADVICE}")


# -- where it is -------------------------------------------------------------------------------------------------------


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


# -- who else is there -------------------------------------------------------------------------------------------------


class Presence:
    """A lock that every open ledger shares while its process lives, and that dies with it."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._file: int | None = None

    def enter(self) -> bool:
        """Enter. True: nobody else is, and nobody enters before `share` or `leave`."""
        path = self._witness.path
        if path is None:
            ask = sa.select(sa.func.pg_try_advisory_lock(_LOCK))
            return bool(self._witness.run(lambda connection: connection.scalar(ask), "read"))
        if fcntl is None:
            return False
        reason = ""
        try:
            self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            fcntl.flock(self._file, fcntl.LOCK_SH)
        except OSError as error:
            reason = error.strerror or type(error).__name__
        if reason:
            self.leave()
            raise LedgerError(f"the witness {self._witness.shown!r} cannot be used: {reason}")
        return False

    def share(self) -> None:
        """Let others enter too."""
        if self._witness.path is None:
            free = sa.select(sa.func.pg_advisory_unlock(_LOCK))
            self._witness.run(lambda connection: connection.scalar(free), "read")
        elif self._file is not None and fcntl is not None:
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Be gone."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        self._witness.close()

    def forget(self) -> None:
        """In the child of a fork: the lock is its parent's."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
