"""The durable counter: charges, and what becomes of them.

A charge is one transaction: a guarded ``UPDATE`` of one counter, which cannot pass its limit, and an ``INSERT`` for
each release. Its cost does not grow with what was spent, and it is durable before it returns. Clocks are written down
for people to read; nothing is decided by them. See `database` for what a transaction is on SQLite and PostgreSQL. A
ledger that is kept has a witness, without whose permits nothing is charged: see `witness`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import weakref
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget import opening, schema
from langchain_dpicl.budget.database import OwnLock, TryAgain, insert, transaction
from langchain_dpicl.budget.opening import Left, Permits, Where
from langchain_dpicl.budget.requests import ChargeOutcome, ChargeRequest, DoesNotFit
from langchain_dpicl.budget.schema import ADVICE, Account, Charge, Claim, charges, counters, plans, queries, steps
from langchain_dpicl.budget.stored import Counter, StoredLedger
from langchain_dpicl.budget.witness import Behind, CounterKey, rolled_back
from langchain_dpicl.errors import InvalidParameter, LedgerError
from langchain_dpicl.store.sql import direct

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

    def __init__(self, url: str, *, witness: Where = None, key_file: str | os.PathLike[str] | None = None) -> None:
        self._witness = witness
        self._permits: Permits | None = None
        self._reaching = OwnLock()
        super().__init__(url, key_file=key_file)
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
            self.run(lambda connection: schema.open_schema(connection, create=secrets.token_hex(16)))
            return
        self._permits = Permits(opening.open_beside(self, self._witness), self._charged)

    def _join(self) -> None:
        if self._witness is UNWATCHED:
            raise LedgerError(f"the ledger {self.shown!r} was opened to be read: nothing was charged")
        if self._permits is not None:
            self._permits.join(self)

    def close(self) -> None:
        """Give back what was granted and not used, and close the connections."""
        if self._permits is not None:
            self._permits.leave()
        super().close()

    def is_marked(self, plan: str) -> bool:
        """Whether the witness has granted something on the plan of this name. `LedgerError` if it cannot be charged."""
        self._join()
        return self._permits is not None and any(mark.key.plan == plan for mark in self._permits.witness.marks())

    # -- charges ----------------------------------------------------------------------------------------------------

    def charge(self, request: ChargeRequest) -> ChargeOutcome:
        """Charge the queries that were not answered before: all of them durably, or nothing, in one transaction."""
        self._join()
        undo = contextlib.ExitStack()  # puts back the permits of a transaction that certainly was rolled back
        try:
            entries = self.run(partial(self._charge, request=request, undo=undo), rolled_back=undo.close)
        except DoesNotFit:
            return None
        with self._reaching:
            for entry in entries:
                if isinstance(entry, Charge):
                    counter = self._charged[request.account]
                    counter.reached = max(counter.reached, entry.number)
        return entries

    def _charge(
        self, connection: Connection, request: ChargeRequest, undo: contextlib.ExitStack
    ) -> list[Charge | Claim] | dict[str, Claim]:
        account, rule, keys = request.account, request.rule, request.keys
        known = schema.claims_of(connection, account, [*request.names])
        pending = {q: claim for q, claim in known.items() if claim.pending and request.overdue.get(q) != claim.number}
        if pending:
            return pending
        answered = {query for query, claim in known.items() if claim.answer is not None}
        new: dict[Hashable, int] = {}  # each with its first place
        for place, key in enumerate(keys):
            if key not in answered:
                new.setdefault(key, place)
        if not new:
            return [known[str(key)] for key in keys]
        made = spend(connection, request, [request.queries[place] for place in new.values()])
        paid = None if rule is None else rule(connection, made, list(new.values()))
        owned = dict(zip(new, made if paid is None else paid[0], strict=True))
        fresh = []
        for key, charge in owned.items():  # each query's claim is its new charge
            if key in known:
                row = (queries.c.counter_id == charge.counter_id, queries.c.query == key)
                taken = sa.update(queries).where(*row, queries.c.number == known[str(key)].number)
                if connection.execute(taken.values(number=charge.number)).rowcount != 1:
                    raise TryAgain
            elif isinstance(key, str):
                fresh.append({"counter_id": charge.counter_id, "query": key, "number": charge.number})
        if fresh and direct(connection, _CLAIM, *fresh).rowcount != len(fresh):
            raise TryAgain
        before, after = made[0].number - request.units, made[-1].number
        counter, permits = self._charged.get(account) or self._counter(connection, account), self._permits
        if before < counter.reached:
            raise rolled_back(counter.key, before, counter.reached)
        if counter.tickets and paid is None:
            raise LedgerError(f"owners pay for this plan, and nobody paid: nothing was charged; {ADVICE}")
        entries: list[Charge | Claim] = [owned[key] if key in owned else known[str(key)] for key in keys]
        if permits is None:
            return entries
        try:  # the permits last, just before the COMMIT
            if paid is None:
                if not permits.take(counter, after - before, before, before - made[0].returned):
                    raise DoesNotFit
                undo.callback(permits.put_back, counter, after - before)
            else:
                undo.callback(permits.withdraw, *permits.swap(counter.key, *paid[1:], (before, after)))
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
        """How many units it gives back. `LedgerError` if the charge stands as it is."""
        row = {"counter_id": charge.counter_id, "number": charge.number, "charged": charge.units, "unused": unused}
        if direct(connection, _RECORD, {**values, **row}).rowcount == 1:
            if unused:
                counter = sa.update(counters).where(counters.c.id == charge.counter_id)
                if connection.execute(counter.values(returned=counters.c.returned + unused)).rowcount != 1:
                    raise LedgerError(f"the ledger has lost this counter; {ADVICE}")
            return unused
        found = connection.execute(sa.select(*(charges.c[name] for name in values)).where(_row(charge))).one_or_none()
        if found is None:
            raise LedgerError(f"the ledger has lost this charge; {ADVICE}")
        if found._asdict() != values:
            raise LedgerError("this charge was answered or given up before: it stands, and nothing is given back")
        return 0

    @transaction()
    def keep_step(self, connection: Connection, charge: Charge, step: int, content: str) -> str:
        """Keep what one step of a charge releases, durably; returns what stands. The first to keep a step decides."""
        row = {"counter_id": charge.counter_id, "number": charge.number, "step": step}
        known = sa.select(steps.c.content).where(*(steps.c[name] == value for name, value in row.items()))
        found = connection.scalar(known)
        if found is None:
            insert(connection, steps, {**row, "content": content})
            return content
        return str(found)

    @transaction("note")
    def give_up(self, connection: Connection, charge: Charge) -> None:
        """Declare that no answer will come: callers who wait for it go on. The charge stands."""
        connection.execute(sa.update(charges).where(_row(charge), charges.c.receipt.is_(None)).values(outcome=GIVEN_UP))


def _row(charge: Charge) -> sa.ColumnElement[bool]:
    return sa.and_(charges.c.counter_id == charge.counter_id, charges.c.number == charge.number)


# The statements of every charge.
_ADVANCE = """UPDATE dpicl_counters SET spent = spent + :count
    WHERE plan_id = :plan_id AND line = :line AND principal = :principal AND spent - returned + :count <= allowed
    RETURNING id, spent, returned"""
_INSERT = "INSERT INTO dpicl_charges (counter_id, number, charged, units)"
_WRITE = f"{_INSERT} VALUES (:counter_id, :number, :charged, :units)"
_BOTH = f"""WITH advanced AS ({_ADVANCE}), written AS ({_INSERT} SELECT id, spent, :charged, :count FROM advanced)
    SELECT id, spent, returned FROM advanced"""
_RECORD = """UPDATE dpicl_charges SET receipt = :receipt, outcome = :outcome, answer = :answer, units = :units
    WHERE counter_id = :counter_id AND number = :number AND units = :charged
    AND (:unused = 0 OR (outcome IS NULL AND receipt IS NULL))"""
_CLAIM = """INSERT INTO dpicl_queries (counter_id, query, number) VALUES (:counter_id, :query, :number)
    ON CONFLICT DO NOTHING"""
_QUEUE = sa.select(plans.c.id).where(plans.c.id == sa.bindparam("plan_id")).with_for_update()


def spend(connection: Connection, request: ChargeRequest, names: Sequence[str | None]) -> list[Charge]:
    """Advance the counter by the request's units for each name, and write a row for each. Raises `DoesNotFit`."""
    account, units, now = request.account, request.units, schema.utc_now()
    count = len(names) * units
    if request.others:
        connection.execute(_QUEUE, {"plan_id": account.plan_id})
    values = {**account._asdict(), "count": count, "charged": now}
    at_once = len(names) == 1 and connection.dialect.name == "postgresql"
    statement = _BOTH if at_once else _ADVANCE  # both statements in one message to the server
    row = direct(connection, statement, values).fetchone()
    if row is None and account.principal and _add_principal(connection, account, count):
        row = direct(connection, statement, values).fetchone()
    if row is None:
        raise DoesNotFit
    counter, spent, returned = row
    numbers = range(spent - count + units, spent + 1, units)
    rows = [{"counter_id": counter, "number": number, "charged": now, "units": units} for number in numbers]
    if not at_once:
        direct(connection, _WRITE, *rows)
    common: dict[str, Any] = {"time": now, "others": schema.spent_beside(connection, account) if request.others else {}}
    common |= {**account._asdict(), "counter_id": counter, "units": units, "returned": returned}
    pairs = zip(numbers, names, strict=True)
    return [Charge(number=number, query=name, permit=schema.Permit(units), **common) for number, name in pairs]


def _add_principal(connection: Connection, account: Account, count: int) -> bool:
    """Make a principal's first counter, unless it is there; False if so many units do not fit."""
    of_line = sa.select(counters).where(Account(account.plan_id, account.line).counter)
    line = connection.execute(of_line).one_or_none()  # it has spent nothing, unless all of the plan counts as spent
    if line is None or line.spent + count > line.allowed:
        return False
    if connection.scalar(sa.select(counters.c.id).where(account.counter)) is None:
        new = {**account._asdict(), "allowed": line.allowed, "spent": line.spent, "lost": line.lost}
        insert(connection, counters, new)
    return True
