"""The durable counter: charges, and what becomes of them.

A charge is one transaction: a guarded ``UPDATE`` of one counter, which cannot pass its limit, and an ``INSERT`` for
each release. Its cost does not grow with what was spent, and it is durable before it returns. Clocks are written down
for people to read; nothing is decided by them. See `database` for what a transaction is on SQLite and PostgreSQL, and
`claims` for the statements of a charge. A ledger that is kept has a witness, without whose permits nothing is charged:
see `witness`.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Mapping
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget import opening
from langchain_dpicl.budget.claims import (
    Account,
    Charge,
    ChargeRequest,
    Claim,
    DoesNotFit,
    Pending,
    at,
    claims_of,
    spend,
    take_claims,
)
from langchain_dpicl.budget.database import TryAgain, transaction
from langchain_dpicl.budget.permits import Left, Permits
from langchain_dpicl.budget.schema import ADVICE, charges, counters, identity_of, open_schema, plans
from langchain_dpicl.budget.stored import Counter, StoredLedger
from langchain_dpicl.budget.witness import Behind, Grant, Key, rolled_back
from langchain_dpicl.errors import InvalidParameter, LedgerError

Where = str | os.PathLike[str] | None
"""Where a ledger's witness is: a path or a database URL; None: beside the ledger."""

UNWATCHED: Where = "unwatched:"
"""In place of a witness, for a budget that is there to be read: it charges nothing."""

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
        witness = opening.find_witness(self, self._witness)
        about = witness.begin()

        def make(connection: Connection) -> str | None:
            open_schema(connection, create=None if about["made"] else about["identity"])
            return identity_of(connection)

        if self.run(make) == about["identity"] and not about["made"]:
            self.write_through()
            witness.note(made="yes")
        self._permits = Permits(witness)

    def _join(self) -> Permits | None:
        if self._witness is UNWATCHED:
            raise LedgerError(f"the ledger {self.shown!r} was opened to be read: nothing was charged")
        if self._permits is not None:
            self._permits.join(partial(opening.check, self, self._permits.witness))
        return self._permits

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
        taken: list[tuple[Key, int] | Grant] = []
        try:
            entries = self.run(
                lambda connection: self._charge(connection, request, overdue or {}, taken),
                rolled_back=lambda: self._put_back(taken),
            )
        except DoesNotFit:
            return None
        numbers = [entry.number for entry in entries if isinstance(entry, Charge)] if isinstance(entries, list) else []
        if numbers:
            known = self._charged[request.account]
            known.reached = max(known.reached, *numbers)
            if self._permits is not None:
                self._permits.reach(known.key, known.reached)
        return entries

    def _charge(
        self,
        connection: Connection,
        request: ChargeRequest,
        overdue: Mapping[str, int],
        taken: list[tuple[Key, int] | Grant],
    ) -> list[Charge | Claim] | Pending:
        """The transaction of a charge; ``taken`` are the permits that it used up, to be put back if it rolls back."""
        keys = request.keys
        named = [key for key in dict.fromkeys(keys) if isinstance(key, str)]
        known = claims_of(connection, request.account, named)
        pending = {q: claim for q, claim in known.items() if claim.pending and overdue.get(q) != claim.number}
        if pending:
            return Pending(pending)
        answered = {query for query, claim in known.items() if claim.answer is not None}
        places = {key: place for place, key in reversed(list(enumerate(keys))) if key not in answered}
        new = [key for key in dict.fromkeys(keys) if key in places]
        if not new:
            return [known[str(key)] for key in keys]
        charged = spend(connection, request, [request.queries[places[key]] for key in new])
        before, after = charged[0].number - request.units, charged[-1].number
        states: tuple[str, str] | None = None
        if request.rule is not None:
            spent = request.rule.spend(connection, charged, [places[key] for key in new])
            charged, states = list(spent.charges), (spent.before, spent.after)
        owned = dict(zip(new, charged, strict=True))
        take_claims(connection, [owned[key] for key in new if isinstance(key, str)], known)
        counts = (before, after, charged[0].returned)
        self._use_permits(connection, request, counts, states, taken)  # last, just before the COMMIT
        return [owned[key] if key in owned else known[str(key)] for key in keys]

    def _use_permits(
        self,
        connection: Connection,
        request: ChargeRequest,
        counts: tuple[int, int, int],
        states: tuple[str, str] | None,
        taken: list[tuple[Key, int] | Grant],
    ) -> None:
        """Use up the permits of a charge that takes its counter from one number to another."""
        account, rule = request.account, request.rule
        before, after, returned = counts
        known = self._charged.get(account) or self._counter(connection, account)
        if before < known.reached:
            raise rolled_back(known.key, before, known.reached)
        if known.tickets and states is None:
            raise LedgerError(f"owners pay for this plan, and nobody paid: nothing was charged; {ADVICE}")
        permits = self._permits
        if permits is None:
            return
        try:
            if rule is None or states is None:
                if not permits.take(known.key, after - before, before, before - returned, known.allowed):
                    raise DoesNotFit
                taken.append((known.key, after - before))
            elif rule.whole_plan:
                taken.append(permits.swap(known.key.whole_plan, *states))
            else:
                taken.append(permits.swap(known.key, *states, (before, after)))
        except Behind:
            repair = partial(opening.settle_one, self, permits.witness, known.key)
            raise TryAgain(f"it does not keep up with its witness; {ADVICE}", repair) from None
        except Left:
            raise TryAgain("it was closed, again and again", self._join) from None

    def _put_back(self, taken: list[tuple[Key, int] | Grant]) -> None:
        """Put back the permits of a transaction that certainly was rolled back."""
        while taken and self._permits is not None:
            permit = taken.pop()
            if isinstance(permit, Grant):
                self._permits.withdraw(permit)
            else:
                self._permits.put_back(*permit)

    def _counter(self, connection: Connection, account: Account) -> Counter:
        """What the witness must know of a counter. It is remembered from its first charge on."""
        query = sa.select(plans.c.name, plans.c.digest, plans.c.tickets, counters.c.allowed)
        row = connection.execute(query.join(counters, counters.c.plan_id == plans.c.id).where(at(account))).one()
        key = Key(row.name, account.line, account.principal, row.digest)
        return self._charged.setdefault(account, Counter(key, row.allowed, bool(row.tickets)))

    def record(
        self, charge: Charge, receipt: str, outcome: str = "released", answer: str | None = None, unused: int = 0
    ) -> None:
        """Keep a release's receipt, its answer if it may be replayed, and give back its ``unused`` units: in one
        transaction, all or nothing.

        If the power fails just now, the charge stands as it was and all of it may be missing. Units are given back to
        a charge that nobody has answered or given up, and once; the same record written again changes nothing.
        """
        given_back = self._record(charge, receipt, outcome, answer, 0 if charge.all_counts else unused)
        if given_back and self._permits is not None and charge.permit is not None:
            known = self._charged.get(Account(charge.plan_id, charge.line, charge.principal))
            if known is not None:  # else this object charges nothing there: what it cannot use is lost to the plan
                self._permits.put_back(known.key, charge.permit.unused(given_back))

    @transaction("note")
    def _record(
        self, connection: Connection, charge: Charge, receipt: str, outcome: str, answer: str | None, unused: int
    ) -> int:
        values = {"receipt": receipt, "outcome": outcome, "answer": answer, "units": charge.units - unused}
        update = sa.update(charges).where(_row(charge), charges.c.units == charge.units).values(**values)
        if unused:
            update = update.where(charges.c.outcome.is_(None), charges.c.receipt.is_(None))
        if connection.execute(update).rowcount == 1:
            counter = sa.update(counters).where(counters.c.id == charge.counter_id)
            counter = counter.values(returned=counters.c.returned + unused)
            if unused and connection.execute(counter).rowcount != 1:
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
        """There will be no answer: callers who wait for one may go on. The charge stands."""
        connection.execute(sa.update(charges).where(_row(charge), charges.c.receipt.is_(None)).values(outcome=GIVEN_UP))


def _row(charge: Charge) -> sa.ColumnElement[bool]:
    return sa.and_(charges.c.counter_id == charge.counter_id, charges.c.number == charge.number)
