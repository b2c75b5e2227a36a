"""The witness: a second record, kept elsewhere, that bounds the releases of all copies of a ledger together.

CLAIM. Somebody may copy, delete, replace, truncate or put back the ledger's file (or its log, or its database) at any
time, and processes may be killed at any time, but nobody changes the witness. Then, whatever the ledger says:

1. on each counter (a plan's line, and principal where each has a counter), the releases or tokens of all answers that
   were ever begun add up to no more than the plan has;
2. if owners pay with tickets, no owner takes part more than T times on a counter.

PROOF OF 1. The witness holds ``reserved`` for each counter. It grows only in `Witness.grant`, a transaction that is on
the disk before its charge is committed, and never beyond ``allowed``, which is frozen with the plan's digest at the
first grant. A grant of n gives n permits to one process, in its memory. A charge of n units uses up n permits of its
process before its answer is begun. Only the process that has a permit gives it back (``reserved`` falls, or the process
may use it again), and only if it was not used: the charge was rolled back for certain, or the tokens were never
sampled, which each charge says once. A child of a fork cannot use its parent's permits, and gives none of them back. So
at every moment the units of all answers ever begun are at most the permits granted and not given back: at most
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
(`Usage`), with its ``spent`` and ``lost``, the chained hash of all its usage rows, the hash of their sums, and the hash
of the first s marks of the owner index, where s is how many its latest charge saw. A charge, in its transaction,
refuses unless the counter, the usage rows, the sums and the marks are those that the summary was written with, and the
witness has the summary's digest. The digest leaves out what summing and forgetting change, so the summary is that of
the latest charge, or of a summing or forgetting after it; each of these goes with the rows, sums and marks of all
charges. Positions from s on were never used on this counter, and no mark has two. What a process knows is compared in
the same way. The check is against old bytes, wherever they are put, whole rows or parts of them (a summary is a few
hundred bytes, within one page); an attacker who forges hashes can do more. `upkeep.recover` takes a copy for one of
its count only if it passes these checks without the witness, and takes away all tickets of a counter otherwise.

A charge that `BudgetLine.reopen` takes up again needs no new permit: the record of its steps says what it has
released, and nothing of it is given back.

COST. A counter of at least 200 has permits granted ahead, in blocks: all processes together hold at most 1 % of the
plan unused, each a share of it, less towards the end, and none more than it has charged. So few charges write the
witness. Below 200, and with tickets, each charge writes it once more. Processes that end give back their unused
permits. Those of a killed process stay reserved; when the ledger is next opened while nobody else has it open, all that
is reserved counts as spent, in the ledger too, with a `PrivacyWarning`.

REFUSED (`LedgerError`), because the ledger was lost or rolled back: another identity than the witness knows; no ledger,
if the witness knows one; a count below ``low``, which was surely reached; a plan that is gone; another file than other
processes have open; and a ledger without a witness, because all of it may be an old copy. `upkeep.recover` helps: it
counts as spent whatever may be missing.

NOT SEEN. A witness that is put back together with its ledger: the folder of both, restored as a whole, or the database
that holds both. Keep it elsewhere (``witness=``). One witness serves one ledger.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget.records import Records as Database
from langchain_dpicl.budget.schema import ADVICE, UNLIMITED, text, whole
from langchain_dpicl.errors import LedgerError
from langchain_dpicl.sql import insert, transaction

try:
    import fcntl
except ImportError:  # Windows: no process ever knows that it is alone, which costs permits and is safe
    fcntl = None  # type: ignore[assignment]

LOCK = 0x64706977  # a number for PostgreSQL's advisory locks, the same for all workers
GIVEN_UP = -1

metadata = sa.MetaData()
about = sa.Table("dpicl_witness", metadata, text("key", 64, primary_key=True), text("value"))
marks = sa.Table(
    "dpicl_marks",
    metadata,
    text("plan", 255, primary_key=True),
    text("line", 255, primary_key=True),
    text("principal", 255, primary_key=True),
    text("digest", 64),
    whole("allowed"),
    whole("low"),
    whole("reserved"),
    whole("ahead", server_default="0"),
    text("before", nullable=True),
    text("state", nullable=True),
    sa.CheckConstraint("reserved >= 0 AND reserved <= allowed", name="dpicl_never_over_granted"),
)
# The statements of a grant, built once: building them anew takes about as long as running them.
_AT = sa.and_(*(marks.c[name] == sa.bindparam(f"at_{name}") for name in ("plan", "line", "principal")))
_READ = sa.select(marks).where(_AT).with_for_update()
_UPDATE = sa.update(marks).where(_AT)


class CounterKey(NamedTuple):
    """A counter as the witness knows it."""

    plan: str
    line: str
    principal: str
    digest: str

    @property
    def place(self) -> tuple[str, str, str]:
        """Plan, line and principal."""
        return self.plan, self.line, self.principal


class Mark(NamedTuple):
    """The witness's row for a counter."""

    key: CounterKey
    allowed: int
    low: int = 0  # a number that the counter has surely reached
    reserved: int = 0  # what may have been spent
    ahead: int = 0  # how many of these were granted ahead; `GIVEN_UP` if the ledger need not have the plan
    before: str | None = None  # the digest of a counter whose owners pay, before its latest grant
    state: str | None = None  # and after it

    @property
    def values(self) -> dict[str, object]:
        """The columns of its row that may change."""
        return {"digest": self.key.digest, **{name: getattr(self, name) for name in self._fields[1:]}}


class Behind(Exception):
    """The ledger lacks the latest grant: its process was killed before the charge was there, or an old copy is back.

    The argument is the `Mark`.
    """


def rolled_back(key: CounterKey, spent: int | None = None, low: int | None = None) -> LedgerError:
    """The error of a ledger that is older than its witness."""
    where = f"{key.plan!r}, line {key.line!r}"
    if spent is not None:
        where += f": it has counted {spent}, and {low} were reached"
    return LedgerError(f"the ledger was rolled back ({where}): nothing was charged; {ADVICE}")


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
        self.needs_session = live
        self._lock: int | None = None
        super().__init__(url)

    def _on_connect(self, connection: Any, record: Any) -> None:
        super()._on_connect(connection, record)
        if self._live and not self.is_sqlite:
            connection.execute("SELECT pg_advisory_lock_shared(%s)", (LOCK,))

    # -- other processes ----------------------------------------------------------------------------------------------

    def enter(self) -> bool:
        """Take the lock that every open ledger shares while its process lives, and that dies with it.

        True: nobody else is there, and nobody enters before `share` or `close`.
        """
        if self.path is None:
            return bool(self._ask(sa.func.pg_try_advisory_lock(LOCK)))
        if fcntl is None:
            return False
        try:
            self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            return False
        except OSError as error:
            reason = error.strerror or type(error).__name__
        raise LedgerError(f"the witness {self.shown!r} cannot be used: {reason}")

    def share(self) -> None:
        """Let others enter too."""
        if self.path is None:
            self._ask(sa.func.pg_advisory_unlock(LOCK))
        elif self._lock is not None and fcntl is not None:
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _ask(self, function: sa.Function[Any]) -> Any:
        return self.run(lambda connection: connection.scalar(sa.select(function)), "read")

    def close(self) -> None:
        """Close the connections, and release this process's lock."""
        lock = self._lock
        self._lock = None
        if lock is not None:
            os.close(lock)
        super().close()

    # -- its ledger ---------------------------------------------------------------------------------------------------

    def about(self) -> dict[str, str]:
        """Its ledger's ``identity`` and ``place``, and ``made`` ("yes" once the ledger was made).

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
        if not self.is_sqlite:  # workers that start together wait for the first
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK + 1)))
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
        """Replace these marks, for a process that knows that no other is there.

        ``reserved`` never falls below the grants made since they were read.
        """
        for mark in found:
            there = _read(connection, mark.key, any_plan=True)
            if there is None:
                _insert(connection, mark)
                continue
            if there.key == mark.key:
                granted = min(there.reserved, mark.allowed)
                mark = mark._replace(reserved=max(mark.reserved, granted))
            _update(connection, mark)

    @transaction()
    def grant(
        self,
        connection: Connection,
        key: CounterKey,
        need: int,
        mine: int,
        spent: int,
        in_use: int,
        allowed: int,
        most: int,
    ) -> int | None:
        """Grant ``need`` permits and some ahead, and return the number of these. None if fewer than ``need`` are left.

        Parameters
        ----------
        mine
            The permits that this process was granted ahead before, and has used up.
        spent, in_use, allowed
            The ledger's counter before the charge. The first grant alone believes ``allowed``.
        most
            The most permits that it takes ahead.
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
        _update(
            connection,
            mark._replace(
                low=max(mark.low, spent),
                reserved=reserved + extra,
                ahead=others + extra,
            ),
        )
        return extra

    @transaction()
    def give_back(
        self,
        connection: Connection,
        key: CounterKey,
        permits: int,
        ahead: int = 0,
        low: int = 0,
    ) -> None:
        """Take back ``permits`` that were not used; ``ahead`` of them count as granted ahead.

        ``low`` was surely reached.
        """
        mark = _read(connection, key)
        if mark is not None:
            _update(
                connection,
                mark._replace(
                    low=max(mark.low, low),
                    reserved=mark.reserved - permits,
                    ahead=max(mark.ahead - ahead, 0),
                ),
            )

    @transaction()
    def swap(
        self,
        connection: Connection,
        key: CounterKey,
        before: str,
        after: str,
        counts: tuple[int, int],
    ) -> tuple[Mark, Mark]:
        """Grant one charge whose owners pay, on a copy of the ledger that lacks none.

        The grant leads from a digest to a digest, and from a count to a count. Returns the mark before and after.
        Raises `Behind` if the copy lacks the latest grant alone.
        """
        mark = _read(connection, key)
        if mark is None:
            mark = _insert(connection, Mark(key, UNLIMITED, before=before, state=before))
        elif before != mark.state:
            if before == mark.before:
                raise Behind(mark)
            raise rolled_back(key, counts[0], mark.low)
        low, reserved = counts
        new = mark._replace(
            low=low,
            reserved=max(reserved, mark.reserved),
            before=before,
            state=after,
        )
        _update(connection, new)
        return mark, new

    @transaction()
    def settle(self, connection: Connection, mark: Mark, state: str) -> None:
        """Follow the ledger's counter, which lacked the latest grant and has counted it as lost.

        From then on no copy that has the grant is taken.
        """
        if connection.execute(_unless_followed(mark), {**_at(mark.key), "state": state}).rowcount != 1:
            raise rolled_back(mark.key)

    @transaction()
    def withdraw(self, connection: Connection, old: Mark, new: Mark) -> None:
        """Take back a grant of `swap` whose charge was rolled back for certain, unless another followed it."""
        connection.execute(_unless_followed(new), {**_at(old.key), **old.values})


def _about(connection: Connection) -> dict[str, str]:
    if not sa.inspect(connection).has_table(about.name):
        return {}
    return {key: value for key, value in connection.execute(sa.select(about)).all()}  # noqa: C416


def _note(connection: Connection, values: dict[str, str]) -> dict[str, str]:
    connection.execute(sa.delete(about).where(about.c.key.in_(values)))
    insert(connection, about, [{"key": key, "value": value} for key, value in values.items()])
    return values


def _at(key: CounterKey) -> dict[str, str]:
    return {"at_plan": key.plan, "at_line": key.line, "at_principal": key.principal}


def _read(connection: Connection, key: CounterKey, *, any_plan: bool = False) -> Mark | None:
    row = connection.execute(_READ, _at(key)).one_or_none()
    if row is None:
        return None
    if row.digest != key.digest and not any_plan:
        raise LedgerError(f"the witness knows another plan under the name {key.plan!r}: nothing was charged; {ADVICE}")
    return Mark(CounterKey(*row[:4]), *row[4:])


def _update(connection: Connection, mark: Mark) -> None:
    connection.execute(_UPDATE, {**_at(mark.key), **mark.values})


def _unless_followed(mark: Mark) -> sa.Update:
    """An update of a mark, if no other grant followed it."""
    return _UPDATE.where(marks.c.before == mark.before, marks.c.state == mark.state)


def _insert(connection: Connection, mark: Mark) -> Mark:
    insert(connection, marks, {**mark.key._asdict(), **mark.values})
    return mark
