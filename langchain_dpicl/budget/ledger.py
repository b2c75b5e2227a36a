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

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget import opening, schema
from langchain_dpicl.budget.opening import Left, Permits, Where
from langchain_dpicl.budget.requests import ChargeOutcome, ChargeRequest, DoesNotFit
from langchain_dpicl.budget.schema import ADVICE, Account, Charge, Claim, charges, counters, plans, queries, steps
from langchain_dpicl.budget.stored import Counter, StoredLedger
from langchain_dpicl.budget.witness import Behind, CounterKey, rolled_back
from langchain_dpicl.errors import InvalidParameter, LedgerError
from langchain_dpicl.sql import OwnLock, TryAgain, direct, insert, transaction

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

    def __init__(
        self,
        url: str,
        *,
        witness: Where = None,
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
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
        if self.is_in_memory:  # nobody can put back a copy
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
        """True if the witness has granted something on the plan of this name. `LedgerError` if it cannot be charged."""
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
        self,
        connection: Connection,
        request: ChargeRequest,
        undo: contextlib.ExitStack,
    ) -> list[Charge | Claim] | dict[str, Claim]:
        """Charge the queries that nobody has answered, or return the claims of other callers on them."""
        keys = request.keys
        known = schema.claims_of(connection, request.account, [*request.names])
        pending = {
            query: claim
            for query, claim in known.items()
            if claim.pending and request.overdue.get(query) != claim.number
        }
        if pending:
            return pending
        entries: dict[Hashable, Charge | Claim] = {
            query: claim for query, claim in known.items() if claim.answer is not None
        }
        new: dict[Hashable, int] = {}  # each with its first place
        for place, key in enumerate(keys):
            if key not in entries:
                new.setdefault(key, place)
        if new:
            charged = spend(connection, request, [request.queries[place] for place in new.values()])
            states: tuple[str, str] | None = None
            if request.rule is not None:
                charged, before, after = request.rule(connection, charged, [*new.values()])
                states = (before, after)
            made = dict(zip(new, charged, strict=True))
            _claim(connection, made, known)
            self._permit(connection, request, charged, states, undo)
            entries |= made
        return [entries[key] for key in keys]

    def _permit(
        self,
        connection: Connection,
        request: ChargeRequest,
        made: Sequence[Charge],
        states: tuple[str, str] | None,
        undo: contextlib.ExitStack,
    ) -> None:
        """Use permits for these charges: the last act before their COMMIT, which ``undo`` takes back.

        ``states``: the counter's digests before and after, if owners pay. Raises `DoesNotFit` and `TryAgain`.
        """
        counter = self._counter(connection, request.account)
        permits = self._permits
        before = made[0].number - request.units
        after = made[-1].number
        if before < counter.reached:
            raise rolled_back(counter.key, before, counter.reached)
        if counter.tickets and states is None:
            raise LedgerError(f"owners pay for this plan, and nobody paid: nothing was charged; {ADVICE}")
        if permits is None:
            return
        try:
            if states is not None:
                undo.callback(permits.withdraw, *permits.swap(counter.key, *states, (before, after)))
            elif permits.take(counter, after - before, before, before - made[0].returned):
                undo.callback(permits.put_back, counter, after - before)
            else:
                raise DoesNotFit
        except Behind as behind:
            repair = partial(opening.settle, self, permits.witness, behind.args[0])
            raise TryAgain(f"it does not keep up with its witness; {ADVICE}", repair) from None
        except Left:
            raise TryAgain("it was closed, again and again", self._join) from None

    def _counter(self, connection: Connection, account: Account) -> Counter:
        """A counter as the witness knows it. It is remembered from its first charge on."""
        if account not in self._charged:
            row = connection.execute(
                sa.select(plans.c.name, plans.c.digest, plans.c.tickets, counters.c.allowed)
                .join(counters, counters.c.plan_id == plans.c.id)
                .where(account.counter)
            ).one()
            key = CounterKey(row.name, account.line, account.principal, row.digest)
            self._charged.setdefault(account, Counter(key, row.allowed, bool(row.tickets)))
        return self._charged[account]

    def record(
        self,
        charge: Charge,
        receipt: str,
        outcome: str = "released",
        answer: str | None = None,
        unused: int = 0,
    ) -> None:
        """Keep a release's receipt, and its answer if it may be replayed, and give back its ``unused`` units.

        All of it is one transaction. If the power fails just now, the charge stands as it was and all of it may be
        missing. Units are given back to a charge that nobody has answered or given up, and once; the same record
        written again changes nothing.
        """
        unused = 0 if charge.all_counts else unused
        values = {
            "receipt": receipt,
            "outcome": outcome,
            "answer": answer,
            "units": charge.units - unused,
        }
        given_back = self._record(charge, values, unused)
        if given_back and self._permits is not None and charge.permit is not None:
            counter = self._charged.get(Account(charge.plan_id, charge.line, charge.principal))
            if counter is not None:  # else this object charges nothing there: what it cannot use is lost to the plan
                self._permits.put_back(counter, charge.permit.unused(given_back))

    @transaction("note")
    def _record(
        self,
        connection: Connection,
        charge: Charge,
        values: Mapping[str, object],
        unused: int,
    ) -> int:
        """Keep a record, and return the units that it gives back. `LedgerError` if the charge stands as it is."""
        row = {
            "counter_id": charge.counter_id,
            "number": charge.number,
            "charged": charge.units,
            "unused": unused,
        }
        if direct(connection, _RECORD, {**values, **row}).rowcount == 1:
            if unused:
                counter = sa.update(counters).where(counters.c.id == charge.counter_id)
                if connection.execute(counter.values(returned=counters.c.returned + unused)).rowcount != 1:
                    raise LedgerError(f"the ledger has lost this counter; {ADVICE}")
            return unused
        found = connection.execute(
            sa.select(*(charges.c[name] for name in values)).where(_row(charge)),
        ).one_or_none()
        if found is None:
            raise LedgerError(f"the ledger has lost this charge; {ADVICE}")
        if found._asdict() != values:
            raise LedgerError("this charge was answered or given up before: it stands, and nothing is given back")
        return 0

    @transaction()
    def keep_step(self, connection: Connection, charge: Charge, step: int, content: str) -> str:
        """Keep the content that one step of a charge releases, durably, and return the content that stands.

        The first to keep a step decides.
        """
        row = {"counter_id": charge.counter_id, "number": charge.number, "step": step}
        found = connection.scalar(
            sa.select(steps.c.content).where(*(steps.c[name] == value for name, value in row.items())),
        )
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


def _claim(connection: Connection, made: Mapping[Hashable, Charge], known: Mapping[str, Claim]) -> None:
    """Make each query's new charge its claim. Raises `TryAgain` if its claim is not the ``known`` one any more."""
    fresh = []
    for query, charge in made.items():
        if not isinstance(query, str):  # it is never replayed
            continue
        if query not in known:
            fresh.append({"counter_id": charge.counter_id, "query": query, "number": charge.number})
            continue
        take_over = (
            sa.update(queries)
            .where(
                queries.c.counter_id == charge.counter_id,
                queries.c.query == query,
                queries.c.number == known[query].number,
            )
            .values(number=charge.number)
        )
        if connection.execute(take_over).rowcount != 1:
            raise TryAgain
    if fresh and direct(connection, _CLAIM, *fresh).rowcount != len(fresh):
        raise TryAgain


def spend(connection: Connection, request: ChargeRequest, names: Sequence[str | None]) -> list[Charge]:
    """Advance the counter by the request's units for each name, and write a row for each. Raises `DoesNotFit`."""
    account = request.account
    units = request.units
    now = schema.utc_now()
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
    rows = [
        {
            "counter_id": counter,
            "number": number,
            "charged": now,
            "units": units,
        }
        for number in numbers
    ]
    if not at_once:
        direct(connection, _WRITE, *rows)
    others = schema.spent_beside(connection, account) if request.others else {}
    return [
        Charge(
            **account._asdict(),
            number=number,
            time=now,
            others=others,
            counter_id=counter,
            query=name,
            units=units,
            returned=returned,
            permit=schema.Permit(units),
        )
        for number, name in zip(numbers, names, strict=True)
    ]


def _add_principal(connection: Connection, account: Account, count: int) -> bool:
    """Make a principal's first counter, unless it is there; False if so many units do not fit."""
    of_line = sa.select(counters).where(Account(account.plan_id, account.line).counter)
    line = connection.execute(of_line).one_or_none()  # it has spent nothing, unless all of the plan counts as spent
    if line is None or line.spent + count > line.allowed:
        return False
    if connection.scalar(sa.select(counters.c.id).where(account.counter)) is None:
        insert(
            connection,
            counters,
            {**account._asdict(), "allowed": line.allowed, "spent": line.spent, "lost": line.lost},
        )
    return True
