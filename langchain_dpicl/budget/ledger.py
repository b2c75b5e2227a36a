"""The durable counter: charges, and what becomes of them.

A charge is one transaction: a guarded ``UPDATE`` of one counter, which cannot pass its limit, and an ``INSERT`` for
each release. Its cost does not grow with what was spent, and it is durable before it returns. Clocks are written down
for people to read; nothing is decided by them. See `database` for what a transaction is on SQLite and PostgreSQL, and
`claims` for the statements of a charge. A ledger that is kept has a witness, without whose permits nothing is charged:
see `witness`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget import claims, opening
from langchain_dpicl.budget.claims import Account, Charge, ChargeRequest, Claim, DoesNotFit, Pending
from langchain_dpicl.budget.database import TryAgain, transaction
from langchain_dpicl.budget.schema import ADVICE, charges, counters, open_schema, plans
from langchain_dpicl.budget.stored import Counter, StoredLedger
from langchain_dpicl.budget.witness import Behind, CounterKey, Mark, Witness, rolled_back
from langchain_dpicl.errors import InvalidParameter, LedgerError

Where = str | os.PathLike[str] | None
"""Where a ledger's witness is: a path or a database URL; None: beside the ledger."""

UNWATCHED: Where = "unwatched:"
"""In place of a witness: the budget can only be read, and charges nothing."""

GIVEN_UP = "given up"


class Ledger(StoredLedger):
    """One ledger, shared by threads, tasks and processes. Every fault of the database is a `LedgerError`.

    Parameters
    ----------
    witness
        Where its witness is: a path or a database URL (default: beside it). See `witness`. `UNWATCHED`: open a ledger
        that exists, without its witness, and charge nothing.
    """

    def __init__(self, url: str, *, witness: Where = None) -> None:
        self._witness = witness
        self._permits: Permits | None = None
        super().__init__(url)
        if self._permits is not None:
            weakref.finalize(self, self._permits.leave)
            self._join()

    def _open(self) -> None:
        if self._witness is UNWATCHED:
            super()._open()
            return
        if self.path is None and self.is_sqlite:  # it ends with this process: nobody can put back a copy
            if self._witness is not None:
                raise InvalidParameter("witness", type(self._witness).__name__, "None for a ledger in memory")
            self.run(lambda connection: open_schema(connection, create=secrets.token_hex(16)))
            return
        self._permits = Permits(opening.open_beside(self, self._witness), self._charged)

    def _join(self) -> None:
        if self._witness is UNWATCHED:
            raise LedgerError(f"the ledger {self.shown!r} was opened to be read: nothing was charged")
        if self._permits is not None:
            self._permits.join(partial(opening.check, self, self._permits.witness))

    def after_fork(self) -> None:
        """In a child: connections, permits and the witness's lock are the parent's."""
        super().after_fork()
        if self._permits is not None:
            self._permits.after_fork()

    def close(self) -> None:
        """Give back what was granted and not used, and close the connections."""
        if self._permits is not None:
            self._permits.leave()
        super().close()

    # -- charges ----------------------------------------------------------------------------------------------------

    def charge(
        self, request: ChargeRequest, overdue: Mapping[str, int] | None = None
    ) -> list[Charge | Claim] | Pending | None:
        """Charge the queries that were not answered before: all of them durably, or nothing. None: fewer are left.

        ``overdue`` are claims (query to number) that are waited for no longer: a charge of one's own takes them over.
        """
        self._join()
        undo = contextlib.ExitStack()  # puts back the permits of a transaction that certainly was rolled back
        try:
            entries = self.run(
                lambda connection: self._charge(connection, request, overdue or {}, undo), rolled_back=undo.close
            )
        except DoesNotFit:
            return None
        for entry in [] if isinstance(entries, Pending) else entries:
            if isinstance(entry, Charge):
                counter = self._charged[request.account]
                counter.reached = max(counter.reached, entry.number)
        return entries

    def _charge(
        self, connection: Connection, request: ChargeRequest, overdue: Mapping[str, int], undo: contextlib.ExitStack
    ) -> list[Charge | Claim] | Pending:
        account, rule, keys = request.account, request.rule, request.keys
        known = claims.claims_of(connection, account, [key for key in dict.fromkeys(keys) if isinstance(key, str)])
        pending = {q: claim for q, claim in known.items() if claim.pending and overdue.get(q) != claim.number}
        if pending:
            return Pending(pending)
        answered = {query for query, claim in known.items() if claim.answer is not None}
        new: dict[Hashable, int] = {}  # each with its first place
        for place, key in enumerate(keys):
            if key not in answered:
                new.setdefault(key, place)
        if not new:
            return [known[str(key)] for key in keys]
        made = claims.spend(connection, request, [request.queries[place] for place in new.values()])
        paid = None if rule is None else rule.spend(connection, made, list(new.values()))
        owned = dict(zip(new, made if paid is None else paid[0], strict=True))
        claims.take_claims(connection, [charge for key, charge in owned.items() if isinstance(key, str)], known)
        entries: list[Charge | Claim] = [owned[key] if key in owned else known[str(key)] for key in keys]
        before, after = made[0].number - request.units, made[-1].number
        counter, permits = self._charged.get(account) or self._counter(connection, account), self._permits
        if before < counter.reached:
            raise rolled_back(counter.key, before, counter.reached)
        if counter.tickets and paid is None:
            raise LedgerError(f"owners pay for this plan, and nobody paid: nothing was charged; {ADVICE}")
        if permits is None:
            return entries
        try:  # the permits last, just before the COMMIT
            if paid is None:
                if not permits.take(counter, after - before, before, before - made[0].returned):
                    raise DoesNotFit
                undo.callback(permits.put_back, counter, after - before)
            else:
                key, counts = (counter.key, (before, after)) if counter.tickets else (counter.key.whole_plan, None)
                undo.callback(permits.withdraw, *permits.swap(key, *paid[1:], counts))
        except Behind as behind:
            repair = partial(opening.settle, self, permits.witness, behind.args[0])
            raise TryAgain(f"it does not keep up with its witness; {ADVICE}", repair) from None
        except Left:
            raise TryAgain("it was closed, again and again", self._join) from None
        return entries

    def _counter(self, connection: Connection, account: Account) -> Counter:
        """A counter as the witness knows it. It is remembered from its first charge on."""
        query = sa.select(plans.c.name, plans.c.digest, plans.c.tickets, counters.c.allowed)
        row = connection.execute(query.join(counters, counters.c.plan_id == plans.c.id).where(account.counter)).one()
        key = CounterKey(row.name, account.line, account.principal, row.digest)
        return self._charged.setdefault(account, Counter(key, row.allowed, bool(row.tickets)))

    def record(
        self, charge: Charge, receipt: str, outcome: str = "released", answer: str | None = None, unused: int = 0
    ) -> None:
        """Keep a release's receipt, its answer if it may be replayed, and give back its ``unused`` units: in one
        transaction, all or nothing.

        If the power fails just now, the charge stands as it was and all of it may be missing. Units are given back to
        a charge that nobody has answered or given up, and once; the same record written again changes nothing.
        """
        unused = 0 if charge.all_counts else unused
        values = {"receipt": receipt, "outcome": outcome, "answer": answer, "units": charge.units - unused}
        given_back = self._record(charge, values, unused)
        if given_back and self._permits is not None and charge.permit is not None:
            counter = self._charged.get(Account(charge.plan_id, charge.line, charge.principal))
            if counter is not None:  # else this object charges nothing there: what it cannot use is lost to the plan
                self._permits.put_back(counter, charge.permit.unused(given_back))

    @transaction("note")
    def _record(self, connection: Connection, charge: Charge, values: Mapping[str, object], unused: int) -> int:
        if claims.record(connection, charge, values, unused):
            if unused:
                counter = sa.update(counters).where(counters.c.id == charge.counter_id)
                if connection.execute(counter.values(returned=counters.c.returned + unused)).rowcount != 1:
                    raise LedgerError(f"the ledger has lost this counter; {ADVICE}")
            return unused
        query = sa.select(*(charges.c[name] for name in values)).where(_row(charge))
        found = connection.execute(query).one_or_none()
        if found is None:
            raise LedgerError(f"the ledger has lost this charge; {ADVICE}")
        if found._asdict() != values:
            raise LedgerError("this charge was answered or given up before: it stands, and nothing is given back")
        return 0

    @transaction("note")
    def give_up(self, connection: Connection, charge: Charge) -> None:
        """Declare that no answer will come: callers who wait for it go on. The charge stands."""
        connection.execute(sa.update(charges).where(_row(charge), charges.c.receipt.is_(None)).values(outcome=GIVEN_UP))


def _row(charge: Charge) -> sa.ColumnElement[bool]:
    return sa.and_(charges.c.counter_id == charge.counter_id, charges.c.number == charge.number)


class Left(Exception):
    """The ledger was closed while this charge was under way: roll back, join again, and try again."""


class Permits:
    """What one process may charge: permits that its ledger's witness has granted, and the grants of single charges.

    `witness` says what they are for, and proves it. The process has permits in memory alone, and gives back the unused
    ones when it ends.
    """

    def __init__(self, witness: Witness, counters: Mapping[Any, Counter]) -> None:
        self.witness = witness
        self._counters = counters
        self._start()

    def _start(self) -> None:
        self.joined = False
        self._joining = threading.Lock()
        self._mutex = threading.Lock()  # held while the witness is written or left; never while waiting for a ledger
        self._at_exit: Any = None

    def join(self, check: Callable[[bool], None]) -> None:
        """Join the processes that have the ledger open. ``check(alone)`` refuses one that was lost or rolled back."""
        if self.joined:
            return
        from multiprocessing.util import Finalize

        with self._joining:
            if self.joined:
                return
            try:
                alone = self.witness.enter()
                check(alone)
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
        """Use up permits; False if the witness has no more. It grants at most as many ahead as were charged before."""
        with self._here():
            if counter.hand >= units:
                counter.hand -= units
            else:
                need, most = units - counter.hand, counter.charged
                extra = self.witness.grant(counter.key, need, counter.ahead, spent, in_use, counter.allowed, most)
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
        self, key: CounterKey, before: str, after: str, counts: tuple[int, int] | None = None
    ) -> tuple[Mark, Mark]:
        """`Witness.swap`, while this process is there."""
        with self._here():
            return self.witness.swap(key, before, after, counts)

    def withdraw(self, old: Mark, new: Mark) -> None:
        """The charge of this grant was rolled back for certain."""
        with contextlib.suppress(LedgerError):  # it then counts as spent
            self.witness.withdraw(old, new)

    def leave(self) -> None:
        """Give back the unused permits, and be gone. The ledger may be used again: it is joined anew."""
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

    def after_fork(self) -> None:
        """In a child: its parent's permits are the parent's."""
        for counter in self._counters.values():
            counter.hand = counter.ahead = counter.charged = 0
        self._start()
