"""Opening a ledger beside its witness: refuse one that was lost, count as spent what it may lack, hold permits."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget import schema
from langchain_dpicl.budget.schema import ADVICE, Account, charges, counters, plans, usage, usage_digest
from langchain_dpicl.budget.stored import Counter, StoredLedger
from langchain_dpicl.budget.witness import GIVEN_UP, CounterKey, Mark, Witness, rolled_back
from langchain_dpicl.errors import InvalidParameter, LedgerError, PrivacyWarning
from langchain_dpicl.sql import Database, OwnLock, place_of, shown

Where = str | os.PathLike[str] | None
"""The place of a ledger's witness: a path or a database URL; None: beside the ledger."""

LOST = "counted as spent: the charge of a process that was killed, or of a copy that was lost"
Place = tuple[str, str, str]
"""Plan, line and principal of a counter."""


class CounterRow(NamedTuple):
    """A counter as the ledger has it. ``state`` is the digest if owners pay, ``id`` None if the ledger lacks it."""

    plan_id: int
    key: CounterKey
    allowed: int
    tickets: bool = False
    spent: int = 0
    in_use: int = 0
    state: str | None = None
    id: int | None = None

    def lacking(self, key: CounterKey) -> CounterRow:
        """A counter of this line that the ledger lacks: it has spent nothing."""
        return CounterRow(
            plan_id=self.plan_id,
            key=key,
            allowed=self.allowed,
            tickets=self.tickets,
            state=usage_digest() if self.tickets else None,
        )


def counts(connection: Connection, only: CounterKey | None = None) -> dict[Place, CounterRow]:
    """Every counter of a ledger, or ``only`` this one.

    A principal's counter that the ledger lacks, if asked for, has spent nothing.
    """
    found: dict[Place, CounterRow] = {}
    query = (
        sa.select(counters, plans.c.name, plans.c.digest, plans.c.tickets, usage.c.digest.label("usage"))
        .join(plans, plans.c.id == counters.c.plan_id)
        .outerjoin(usage, usage.c.counter_id == counters.c.id)
    )
    if only is not None:
        query = query.where(
            plans.c.name == only.plan,
            plans.c.digest == only.digest,
            counters.c.line == only.line,
            counters.c.principal.in_(["", only.principal]),
        )
    for row in connection.execute(query):
        key = CounterKey(row.name, row.line, row.principal, row.digest)
        digest = row.usage or usage_digest(spent=row.spent, lost=row.lost)
        found[key.place] = CounterRow(
            plan_id=row.plan_id,
            key=key,
            allowed=row.allowed,
            tickets=bool(row.tickets),
            spent=row.spent,
            in_use=row.spent - row.returned,
            state=digest if row.tickets else None,
            id=row.id,
        )
    if only is not None and only.place not in found:
        line = found.get((only.plan, only.line, ""))
        if line is not None:
            found[only.place] = line.lacking(only)
    return found


def lose(connection: Connection, count: CounterRow, units: int) -> str:
    """Count units as spent without a charge, and make the counter if it is missing. Returns the new usage digest."""
    account = Account(count.plan_id, count.key.line, count.key.principal)
    if count.id is None:
        connection.execute(sa.insert(counters).values(**account._asdict(), allowed=count.allowed, spent=0))
    row = connection.execute(
        sa.update(counters)
        .values(spent=counters.c.spent + units, lost=counters.c.lost + units)
        .where(account.counter)
        .returning(counters.c.id, counters.c.spent, counters.c.lost)
    ).one()
    connection.execute(
        sa.insert(charges).values(
            counter_id=row.id,
            number=row.spent,
            charged=schema.utc_now(),
            units=units,
            outcome=LOST,
        )
    )
    summary = connection.execute(sa.select(usage).where(usage.c.counter_id == row.id)).one_or_none()
    if summary is None:
        return usage_digest(spent=row.spent, lost=row.lost)
    if (summary.spent, summary.lost) != (row.spent - units, row.lost - units):  # torn
        return str(summary.digest)
    digest = usage_digest(summary.chain, summary.row_count, summary.tickets, row.spent, row.lost, summary.owners)
    connection.execute(
        sa.update(usage)
        .where(usage.c.counter_id == row.id)
        .values(spent=row.spent, lost=row.lost, before=summary.digest, digest=digest)
    )
    return digest


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


def is_behind(ledger: StoredLedger, plan: str) -> bool:
    """True if the witness beside a ledger knows more of this plan than the ledger: an older copy is in its place."""
    with contextlib.closing(Witness(address(ledger, None))) as witness:
        about = witness.about()
        if not about or about.get("identity") != ledger.identity:  # it is elsewhere: nobody can tell
            return False
        found = ledger.run(counts, "read")
        of_plan = [mark for mark in witness.marks() if mark.key.plan == plan]
    for mark in of_plan:
        count = found.get(mark.key.place)
        if count is None or count.key.digest != mark.key.digest or count.spent < mark.low:
            return True
    return False


def _exists(ledger: Database) -> bool:
    """True if there is a ledger, or a file in its place."""
    if ledger.path is not None:
        return os.path.exists(ledger.path) and os.path.getsize(ledger.path) > 0
    return bool(ledger.run(schema.tables_of, "read"))


def open_beside(ledger: StoredLedger, given: str | os.PathLike[str] | None) -> Witness:
    """Open a ledger, or make a new one, beside its witness.

    `LedgerError` for a ledger without a witness, and for a witness whose ledger is gone.
    """
    url = address(ledger, given)
    if _exists(ledger):  # looked at first: whoever makes a ledger makes its witness before
        with contextlib.closing(Witness(url)) as reader:
            has_witness = bool(reader.about())
        if not has_witness:
            if not ledger.run(schema.tables_of, "read"):
                raise LedgerError(
                    f"the file {ledger.shown!r} holds no tables: it is not a ledger, or one that has lost its log (the "
                    f"file of its name with -wal); {ADVICE}"
                )
            ledger.run(lambda connection: schema.open_schema(connection, create=None), "read")
            raise LedgerError(
                f"the ledger {ledger.shown!r} has no witness at {shown(url)!r}, so it may be a copy that starts "
                f"counting again: nothing was charged; name its witness, or {ADVICE}"
            )
    witness = Witness(url, live=True)
    about = witness.begin()
    if about["made"] and not _exists(ledger):
        raise LedgerError(
            f"the ledger {ledger.shown!r} is gone, and its witness {witness.shown!r} knows that it was there: nothing "
            f"was charged; {ADVICE}. For another budget name another ledger: both then count. Deleting a ledger takes "
            "no answer back. Only if no earlier answer counts, because it was a trial on data of nobody, remove the "
            "witness as well: by that you vouch for it"
        )

    def make(connection: Connection) -> str | None:
        schema.open_schema(connection, create=None if about["made"] else about["identity"])
        return schema.read_meta(connection, "identity")

    if ledger.run(make) == about["identity"] and not about["made"]:
        ledger.write_through()
        witness.note(made="yes")
    return witness


def check(ledger: Database, witness: Witness, alone: bool) -> None:
    """Compare a ledger with its witness. `LedgerError` if it is another one, or was rolled back.

    If nobody else is there, count as spent what a process that was killed may have spent.
    """
    about = witness.about()
    # The marks before the counters: they are then behind. One without a line is of a budget that no version charges.
    known = [mark for mark in witness.marks() if mark.key.line]
    place = place_of_ledger(ledger)
    identity, found = ledger.run(
        lambda connection: (schema.read_meta(connection, "identity"), counts(connection)), "read"
    )
    if identity is None or about.get("identity") != identity:
        words = f"the ledger {ledger.shown!r} is not the one whose witness is {witness.shown!r}"
        raise LedgerError(f"{words}: nothing was charged; {ADVICE}")
    if not alone and about.get("place") not in (None, place):
        words = f"other processes have another file open than the ledger {ledger.shown!r}: it was replaced"
        raise LedgerError(f"{words}; nothing was charged; {ADVICE}")
    digests = {count.key.plan: count.key.digest for count in found.values()}
    for mark in known:
        count = found.get(mark.key.place)
        if mark.key.plan not in digests and mark.ahead == GIVEN_UP:
            continue
        spent = count.spent if count else 0
        if digests.get(mark.key.plan) != mark.key.digest or spent < mark.low:
            raise rolled_back(mark.key, spent, mark.low)
        if alone and count is not None and count.state not in (None, mark.before, mark.state):
            raise rolled_back(mark.key)
    if not alone:
        return
    lost: list[str] = []
    for mark in known:
        if mark.key.plan in digests and (units := settle(ledger, witness, mark)) is not None:
            lost.append(f"{mark.key.plan!r} {mark.key.line}: {units}")
    changed = [
        mark._replace(reserved=max(mark.reserved, min(count.in_use, mark.allowed)), ahead=0)
        for mark in known
        if (count := found.get(mark.key.place)) and (mark.ahead or count.in_use > mark.reserved)
    ]
    if changed:
        witness.write(changed)
    if about.get("place") != place:
        witness.note(place=place)
    if lost:
        words = f"the ledger {ledger.shown!r} was not closed by every process that used it, or an older copy was put in"
        words += f" its place: what may have been spent counts as spent ({', '.join(lost)})"
        warnings.warn(words, PrivacyWarning, stacklevel=2)


def settle(ledger: Database, witness: Witness, mark: Mark) -> int | None:
    """Count as spent what is reserved and not in the ledger. Returns the units, or None if nothing."""
    key = mark.key

    def work(connection: Connection) -> int | None:
        if not ledger.is_sqlite:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
        plan_id = sa.select(plans.c.id).where(plans.c.name == key.plan).scalar_subquery()
        connection.execute(  # no charge until the end
            sa.select(counters.c.id)
            .where(
                counters.c.plan_id == plan_id,
                counters.c.line == key.line,
                counters.c.principal == key.principal,
            )
            .with_for_update()
        ).all()
        count = counts(connection, key).get(key.place)
        if count is None:
            raise rolled_back(key)
        if count.spent < mark.low:
            raise rolled_back(key, count.spent, mark.low)
        units = mark.reserved - count.in_use
        if units <= 0 or (count.tickets and count.state != mark.before):
            return None
        digest = lose(connection, count, units)
        if count.tickets:  # the next charge is on this copy, and on no other that has counted as far
            witness.settle(mark, digest)
        return units

    return ledger.run(work)


def place_of_ledger(ledger: Database) -> str:
    """The identity of the file, or of the database, that holds a ledger."""
    if ledger.path is not None:
        return "{}:{}".format(*(place_of(ledger.path) or (0, 0)))
    query = "SELECT oid FROM pg_database WHERE datname = current_database()"
    return str(ledger.run(lambda connection: connection.exec_driver_sql(query).scalar(), "read"))


class Left(Exception):
    """The ledger was closed while this charge was under way: roll back, join again, and try again."""


class Permits:
    """The permits of one process, which its ledger's witness has granted, and the grants of single charges.

    `witness` says what they are for, and proves it. The process has permits in memory alone, and gives back the unused
    ones when it ends.
    """

    def __init__(self, witness: Witness, counters: Mapping[Any, Counter]) -> None:
        self.witness = witness
        self._counters = counters
        self.joined = False
        self._joining = OwnLock()
        self._mutex = OwnLock()  # held while the witness is written or left; never while waiting for a ledger
        self._at_exit: Any = None

    def join(self, ledger: Database) -> None:
        """Join the processes that have the ledger open, if `check` does not refuse it."""
        if self.joined:
            return
        from multiprocessing.util import Finalize

        with self._joining:
            if self.joined:
                return
            try:
                alone = self.witness.enter()
                check(ledger, self.witness, alone)
                if alone:
                    self.witness.share()
            except BaseException:
                self.witness.close()
                raise
            self.joined = True
            # A child of `multiprocessing` ends without Python's own exit, and forgets what its parent has registered.
            self._at_exit = Finalize(None, self.leave, exitpriority=0)

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Keep `leave` waiting. Raises `Left` if it was called: a process that has left is granted nothing."""
        with self._mutex:
            if not self.joined:
                raise Left
            yield

    def take(self, counter: Counter, units: int, spent: int, in_use: int) -> bool:
        """Use up permits; False if the witness has no more.

        It grants at most as many ahead as were charged before.
        """
        with self._here():
            if counter.hand >= units:
                counter.hand -= units
            else:
                extra = self.witness.grant(
                    counter.key,
                    units - counter.hand,
                    counter.ahead,
                    spent,
                    in_use,
                    counter.allowed,
                    counter.charged,
                )
                if extra is None:
                    return False
                counter.hand = counter.ahead = extra
            counter.charged += units
            return True

    def put_back(self, counter: Counter, units: int) -> None:
        """Return permits that were not used. A surplus over those granted ahead goes back to the witness."""
        with self._mutex:
            surplus = counter.hand + units - counter.ahead
            counter.hand = min(counter.hand + units, counter.ahead)
            if surplus > 0:
                with contextlib.suppress(LedgerError):  # they then stay reserved
                    self.witness.give_back(counter.key, surplus)

    def swap(
        self,
        key: CounterKey,
        before: str,
        after: str,
        counts: tuple[int, int],
    ) -> tuple[Mark, Mark]:
        """`Witness.swap`, while this process is there."""
        with self._here():
            return self.witness.swap(key, before, after, counts)

    def withdraw(self, old: Mark, new: Mark) -> None:
        """The charge of this grant was rolled back for certain."""
        with contextlib.suppress(LedgerError):  # it then counts as spent
            self.witness.withdraw(old, new)

    def leave(self) -> None:
        """Give back the unused permits, and be gone. The ledger may be used again: it is joined anew.

        In a child of a fork they are the parent's, and stay.
        """
        if self.witness.inherited:
            return
        with self._joining, self._mutex:
            if not self.joined:
                return
            self.joined = False
            self._at_exit.cancel()
            self.witness.opened = False  # try everything once: what cannot be given back stays reserved
            for counter in list(self._counters.values()):
                if counter.charged:
                    with contextlib.suppress(LedgerError):
                        self.witness.give_back(counter.key, counter.hand, counter.ahead, counter.reached)
                counter.hand = counter.ahead = 0
            self.witness.close()
