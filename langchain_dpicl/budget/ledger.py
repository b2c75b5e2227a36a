"""The durable counter: the story of a charge, and what becomes of it.

A charge is one transaction, and `Ledger._charge` tells it in order: replay (answered queries cost nothing), count (a
guarded ``UPDATE`` of one counter, which cannot pass its limit, and a row for each release), tickets (if owners pay),
claims (an equal query waits for this one), and last the witness, which orders the charges of all copies (`witness`).
Its cost does not grow with what was spent, and it is durable before it returns. Clocks are written down for people to
read; nothing is decided by them. See `sql.database` for what a transaction is on SQLite and PostgreSQL.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget import opening, schema
from langchain_dpicl.budget.opening import Where
from langchain_dpicl.budget.schema import ADVICE, Account, Charge, Claim, charges, counters, plans, queries, steps
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.budget.tickets import TicketLine, TicketPayment
from langchain_dpicl.budget.witness import CounterKey, Witness, move, rolled_back, step_digest
from langchain_dpicl.errors import InvalidParameter, LedgerError, PrivacyWarning, QuotaExceeded
from langchain_dpicl.sql import OwnLock, TryAgain, direct, insert, transaction

UNWATCHED: Where = "unwatched:"
"""In place of a witness: the budget can only be read, and charges nothing."""

GIVEN_UP = "given up"

ChargeOutcome = list[Charge | Claim] | dict[str, Claim] | None
"""Of a charge: its entries; the claims of other callers, on queries that they have not answered yet; or None, because
fewer units are left."""


class DoesNotFit(Exception):
    """Raised in a charge's transaction: fewer units are left. It rolls back, and nothing is charged."""


@dataclass(frozen=True)
class Quota:
    """The most answers that one principal may take of a counter that all share. It has a row among the counters, too.

    No statement about privacy: that is the shared counter's. A row without the witness's mark may lose what others
    took, and then gives them more of what is left for all.
    """

    budget: str
    principal: str
    most: int


@dataclass(frozen=True)
class ChargeRequest:
    """A line's request to its ledger: charge all of it durably, or nothing.

    Parameters
    ----------
    queries
        One entry for each release: the query's keyed hash, or None if the release is never replayed. Equal queries
        share one charge. An answered query comes back as its `Claim`, uncharged.
    units
        The units of each new charge.
    replay
        False: charge every entry, and leave claims alone.
    others
        Each charge names the units that the plan's other lines have spent. The charges of a plan then wait for each
        other, so no two of them miss one another.
    tickets
        The payment of the owners, if owners pay.
    quota
        The part of the counter that its caller may take at most, in new charges.
    overdue
        Claims (query to number) that are waited for no longer: a charge of one's own takes them over.
    """

    account: Account
    queries: Sequence[str | None]
    units: int = 1
    replay: bool = True
    others: bool = False
    tickets: TicketPayment | None = None
    quota: Quota | None = None
    overdue: Mapping[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> list[Hashable]:
        """The key of each entry: the query, or its place if it is never replayed. Equal keys share a charge."""
        found: list[Hashable] = list(range(len(self.queries)))
        if self.replay:
            for place, query in enumerate(self.queries):
                if query is not None:
                    found[place] = query
        return found

    @property
    def names(self) -> list[str]:
        """The different queries that may be replayed."""
        return list(dict.fromkeys(filter(None, self.queries))) if self.replay else []


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
        self._given = witness
        self._witness: Witness | None = None
        self._is_checked = False
        self._checking = OwnLock()
        super().__init__(url, key_file=key_file)
        if witness is not UNWATCHED:
            self._check_witness()

    def _open(self) -> None:
        if self._given is UNWATCHED:
            super()._open()
            return
        if self.is_in_memory:  # nobody can put back a copy
            if self._given is not None:
                raise InvalidParameter("witness", type(self._given).__name__, "None for a ledger in memory")
            self.run(lambda connection: schema.open_schema(connection, create=secrets.token_hex(16)))
            return
        self._witness = opening.open_beside(self, self._given)

    def _check_witness(self) -> None:
        """Compare the ledger with its witness, once after each opening."""
        if self._given is UNWATCHED:
            raise LedgerError(f"the ledger {self.shown!r} was opened to be read: nothing was charged")
        with self._checking:
            if self._witness is not None and not self._is_checked:
                opening.check(self, self._witness)
            self._is_checked = True

    def close(self) -> None:
        """Close the connections."""
        super().close()
        if self._witness is not None:
            self._witness.close()
            self._is_checked = False

    def is_marked(self, plan: str) -> bool:
        """True if the witness knows a charge on the plan of this name. `LedgerError` if it cannot be charged."""
        self._check_witness()
        return self._witness is not None and any(
            mark.key.plan == plan and mark.reserved for mark in self._witness.marks()
        )

    # -- a charge ---------------------------------------------------------------------------------------------------

    def charge(self, request: ChargeRequest) -> ChargeOutcome:
        """Charge the queries that were not answered before: all of them durably, or nothing, in one transaction."""
        if not self._is_checked:
            self._check_witness()
        undo = contextlib.ExitStack()  # takes back the interval of a transaction that certainly was rolled back
        try:
            entries = self.run(partial(self._charge, request=request, undo=undo), rolled_back=undo.close)
        except DoesNotFit:
            return None
        for entry in entries:
            if isinstance(entry, Charge):
                self._reached[request.account] = max(self._reached.get(request.account, 0), entry.number)
        return entries

    def _charge(
        self,
        connection: Connection,
        request: ChargeRequest,
        undo: contextlib.ExitStack,
    ) -> list[Charge | Claim] | dict[str, Claim]:
        """Charge the queries that nobody has answered, or return the claims of other callers on them."""
        # Replay.
        keys = request.keys
        known = schema.claims_of(connection, request.account, request.names)
        pending: dict[str, Claim] = {}
        entries: dict[Hashable, Charge | Claim] = {}
        for query, claim in known.items():
            if claim.answer is not None:
                entries[query] = claim
            elif claim.pending and request.overdue.get(query) != claim.number:
                pending[query] = claim
        if pending:
            return pending
        new: dict[Hashable, int] = {}  # each with its first place
        for place, key in enumerate(keys):
            if key not in entries:
                new.setdefault(key, place)
        if not new:
            return list(map(entries.__getitem__, keys))
        # Count, and let the owners pay.
        made, lost = _count(connection, request, list(map(request.queries.__getitem__, new.values())))
        if request.quota is not None:
            _take(connection, request.account, request.quota, len(made))
        if request.tickets is not None:
            made = request.tickets(connection, made, list(new.values()), lost)
        charged = dict(zip(new, made, strict=True))
        _claim(connection, charged, known)
        # The witness: the last act before the COMMIT, which ``undo`` takes back.
        before = made[0].number - request.units
        after = made[-1].number
        key = self._keys.get(request.account) or self._key_of(connection, request.account)
        if before < self._reached.get(request.account, 0):
            raise rolled_back(key, before, self._reached[request.account])
        witness = self._witness
        if witness is not None:
            is_inside = witness.url == self.url  # its mark is then rolled back with the charge
            follow = partial(move, connection) if is_inside else witness.follow
            beyond = follow(key, before, after - before)
            if beyond is not None:
                raise TryAgain(f"it does not keep up with its witness; {ADVICE}", partial(opening.settle, self, beyond))
            if not is_inside:
                undo.callback(self._withdraw, key, before, after)
        entries |= charged
        return list(map(entries.__getitem__, keys))

    def _withdraw(self, key: CounterKey, before: int, after: int) -> None:
        if self._witness is not None:
            with contextlib.suppress(LedgerError):  # it then counts as lost
                self._witness.withdraw(key, before, after)

    # -- what becomes of it -----------------------------------------------------------------------------------------

    def record(
        self,
        charge: Charge,
        receipt: str,
        outcome: str = "released",
        answer: str | None = None,
        unused: int = 0,
        tickets: TicketLine | None = None,
    ) -> None:
        """Keep a release's receipt, and its answer if it may be replayed, and give back its ``unused`` units.

        All of it is one transaction. If the power fails just now, the charge stands as it was and all of it may be
        missing. Units are given back to a charge that nobody has answered or given up, and once; the same record
        written again changes nothing. They go back to the counter, or, if owners pay, as ``tickets`` to its owners.
        """
        if unused and charge.all_counts:
            unused = 0
        to_counter = unused if tickets is None else 0
        values = {
            "receipt": receipt,
            "outcome": outcome,
            "answer": answer,
            "units": charge.units - to_counter,
        }
        record = partial(
            self._record,
            charge=charge,
            values=values,
            unused=unused,
            to_counter=to_counter,
            tickets=tickets,
        )
        self.run(record, "note")

    def _record(
        self,
        connection: Connection,
        charge: Charge,
        values: Mapping[str, object],
        unused: int,
        to_counter: int,
        tickets: TicketLine | None,
    ) -> None:
        """Keep a record, unless it is there already. `LedgerError` if the charge stands as it is."""
        row = {
            "counter_id": charge.counter_id,
            "number": charge.number,
            "charged": charge.units,
            "unused": unused,
        }
        if direct(connection, _RECORD, {**values, **row}).rowcount == 1:
            if to_counter:
                counter = sa.update(counters).where(counters.c.id == charge.counter_id)
                if connection.execute(counter.values(returned=counters.c.returned + to_counter)).rowcount != 1:
                    raise LedgerError(f"the ledger has lost this counter; {ADVICE}")
            if unused and tickets is not None:
                tickets.give_back(connection, charge, unused)
            return
        found = connection.execute(
            sa.select(*(charges.c[name] for name in values)).where(_row(charge)),
        ).one_or_none()
        if found is None:
            raise LedgerError(f"the ledger has lost this charge; {ADVICE}")
        if found._asdict() != values:
            raise LedgerError("this charge was answered or given up before: it stands, and nothing is given back")

    def keep_step(self, charge: Charge, step: int, content: str) -> str:
        """Keep the content that one step of a charge releases, durably, and return the content that stands.

        The first to keep a step decides. `LedgerError` if that was on another copy of the ledger (`witness`, "Steps").
        """
        kept = self._keep_step(charge, step, content)
        digest = step_digest(kept)
        if self._witness is not None and self._witness.count_steps(_name(charge), {step: digest})[step] != digest:
            raise LedgerError(f"another copy of this ledger has made this step of a release; {ADVICE}")
        return kept

    @transaction()
    def _keep_step(self, connection: Connection, charge: Charge, step: int, content: str) -> str:
        row = {"counter_id": charge.counter_id, "number": charge.number, "step": step}
        found = connection.scalar(sa.select(steps.c.content).filter_by(**row))
        if found is None:
            insert(connection, steps, {**row, "content": content})
            return content
        return str(found)

    def reopened(self, account: Account, query: str, others: bool) -> Charge | None:
        """`open_charge`; None, with a `PrivacyWarning`, if the ledger has not all the steps that the witness has."""
        charge = self.open_charge(account, query, others)
        if charge is None or self._witness is None:
            return charge
        kept = {step: step_digest(content) for step, content in enumerate(self.steps(charge))}
        if self._witness.count_steps(_name(charge), kept) == kept:
            return charge
        words = f"the ledger {self.shown!r} has lost what an interrupted release has kept: it is charged anew"
        warnings.warn(words, PrivacyWarning, stacklevel=2)
        return None

    @transaction("note")
    def give_up(self, connection: Connection, charge: Charge) -> None:
        """Declare that no answer will come: callers who wait for it go on. The charge stands."""
        connection.execute(sa.update(charges).where(_row(charge), charges.c.receipt.is_(None)).values(outcome=GIVEN_UP))


def _name(charge: Charge) -> str:
    return f"{charge.counter_id}.{charge.number}"


def _row(charge: Charge) -> sa.ColumnElement[bool]:
    return sa.and_(charges.c.counter_id == charge.counter_id, charges.c.number == charge.number)


# The statements of every charge.
_ADVANCE = """UPDATE dpicl_counters SET spent = spent + :count
    WHERE plan_id = :plan_id AND line = :line AND principal = :principal AND spent - returned + :count <= allowed
    RETURNING id, spent, returned, lost"""
_INSERT = "INSERT INTO dpicl_charges (counter_id, number, charged, units)"
_WRITE = f"{_INSERT} VALUES (:counter_id, :number, :charged, :units)"
_BOTH = f"""WITH advanced AS ({_ADVANCE}), written AS ({_INSERT} SELECT id, spent, :charged, :count FROM advanced)
    SELECT id, spent, returned, lost FROM advanced"""
_RECORD = """UPDATE dpicl_charges SET receipt = :receipt, outcome = :outcome, answer = :answer, units = :units
    WHERE counter_id = :counter_id AND number = :number AND units = :charged
    AND (:unused = 0 OR (outcome IS NULL AND receipt IS NULL))"""
_CLAIM = """INSERT INTO dpicl_queries (counter_id, query, number) VALUES (:counter_id, :query, :number)
    ON CONFLICT DO NOTHING"""
_QUEUE = sa.select(plans.c.id).where(plans.c.id == sa.bindparam("plan_id")).with_for_update()


def _count(
    connection: Connection,
    request: ChargeRequest,
    names: Sequence[str | None],
) -> tuple[list[Charge], int]:
    """Advance the counter by the request's units for each name, and write a row for each; the units that it has lost.

    Raises `DoesNotFit`.
    """
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
    counter_id, spent, returned, lost = row
    numbers = range(spent - count + units, spent + 1, units)
    others = schema.spent_beside(connection, account) if request.others else {}
    rows: list[dict[str, object]] = []
    made: list[Charge] = []
    for number, name in zip(numbers, names, strict=True):
        rows.append({"counter_id": counter_id, "number": number, "charged": now, "units": units})
        charge = Charge(
            *account[:2],
            number=number,
            time=now,
            others=others,
            counter_id=counter_id,
            principal=account.principal,
            query=name,
            units=units,
            returned=returned,
            process=os.getpid(),
        )
        made.append(charge)
    if not at_once:
        direct(connection, _WRITE, *rows)
    return made, lost


def _take(connection: Connection, account: Account, quota: Quota, count: int) -> None:
    """Take so many answers of a caller's quota, while the shared counter's row is held. Raises `QuotaExceeded`."""
    own = account._replace(principal=quota.principal)
    taken = connection.scalar(sa.select(counters.c.spent).where(own.counter))
    if (taken or 0) + count > quota.most:
        raise QuotaExceeded(
            f"the quota of {quota.principal!r} on the budget {quota.budget!r} is {quota.most} answers, of which "
            f"{max(0, quota.most - (taken or 0))} are left, and {count} are needed: nothing was released and nothing "
            "charged. Other callers may go on"
        )
    if taken is None:
        insert(connection, counters, {"id": schema.new_id(), **own._asdict(), "allowed": quota.most, "spent": count})
    else:
        connection.execute(sa.update(counters).where(own.counter).values(allowed=quota.most, spent=taken + count))


def _add_principal(connection: Connection, account: Account, count: int) -> bool:
    """Make a principal's first counter, unless it is there; False if so many units do not fit."""
    of_line = sa.select(counters).where(Account(account.plan_id, account.line).counter).with_for_update()
    line = connection.execute(of_line).one_or_none()  # it has spent nothing, unless all of the plan counts as spent
    if line is None or line.spent + count > line.allowed:
        return False
    if connection.scalar(sa.select(counters.c.id).where(account.counter)) is None:
        values = {"allowed": line.allowed, "spent": line.spent, "lost": line.lost}
        insert(connection, counters, {"id": schema.new_id(), **account._asdict(), **values})
    return True


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
            .filter_by(counter_id=charge.counter_id, query=query, number=known[query].number)
            .values(number=charge.number)
        )
        if connection.execute(take_over).rowcount != 1:
            raise TryAgain
    if fresh and direct(connection, _CLAIM, *fresh).rowcount != len(fresh):
        raise TryAgain
