"""The durable counter: plans, charges, claims on queries, receipts.

A charge is one transaction: a guarded ``UPDATE`` of one counter, which cannot pass its limit, and an ``INSERT`` for
each release. Its cost does not grow with what was spent, and it is durable before it returns. Clocks are written down
for people to read; nothing is decided by them. See `database` for what a transaction is on SQLite and PostgreSQL, and
`claims` for what a charge does in it. A ledger that is kept has a witness, without whose permits nothing is charged:
see `witness`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sqlite3
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget import recovery
from langchain_dpicl.budget.claims import (
    Account,
    Advance,
    Charge,
    Claim,
    Claimed,
    Pending,
    at,
    claims_of,
    open_charge,
    read_filter,
    spend,
    take_claims,
    utc_now,
)
from langchain_dpicl.budget.database import CommitUnknown, Database
from langchain_dpicl.budget.permits import Left, Permits
from langchain_dpicl.budget.renewal import Act, StoredPlan, drop, enter_generation, holds
from langchain_dpicl.budget.schema import (
    ADVICE,
    UNLIMITED,
    acts,
    books,
    charges,
    counters,
    filters,
    identity_of,
    in_use,
    meta,
    open_schema,
    plans,
    stubs,
)
from langchain_dpicl.budget.witness import Behind, Grant, Key, rolled_back
from langchain_dpicl.errors import InvalidParameter, LedgerError

__all__ = ["Account", "Charge", "Claim", "Claimed", "Ledger", "Pending", "Release"]

Where = str | os.PathLike[str] | None
"""Where a ledger's witness is: a path or a database URL; None: beside the ledger."""

UNWATCHED: Where = "unwatched:"
"""In place of a witness, for a budget that is there to be read: it charges nothing."""

GIVEN_UP = "given up"
_HEALING = 20

Burn = Callable[[Connection, int, int, Sequence[int]], Sequence[Any]]
"""Gets a counter, its number before this charge, and positions of what was asked: who pays for each of them."""


@dataclass(frozen=True)
class Release:
    """One row of the ledger's history. Without a receipt it was charged and never answered."""

    line: str
    principal: str
    counter_id: int
    number: int
    charged: str
    units: int
    outcome: str | None
    receipt: str | None


class Ledger(Database):
    """One ledger, shared by threads, tasks and processes. Every fault of the database is a `LedgerError`.

    Parameters
    ----------
    create
        False: open a ledger that exists, to read it. It needs no witness then, and charges nothing.
    witness
        Where its witness is: a path or a database URL (default: beside it). See `witness`.
    """

    def __init__(self, url: str, *, create: bool = True, witness: Where = None) -> None:
        super().__init__(url)
        self._reads_only = not create
        self._permits: Permits | None = None
        self._seen: dict[Key, int] = {}
        self._allowed: dict[Key, int] = {}
        self._keys: dict[int, tuple[StoredPlan, dict[tuple[str, str], Key]]] = {}
        if create and (self.path is not None or not self.is_sqlite):
            self._open(witness)
        elif witness is not None:
            bound = "None for a ledger in memory, and for one that is only read"
            raise InvalidParameter("witness", type(witness).__name__, bound)
        else:
            if self.path is not None and not os.path.exists(self.path):
                raise LedgerError(f"there is no ledger {self.shown!r}")
            identity = secrets.token_hex(16) if create else None
            self.run(lambda connection: open_schema(connection, create=identity))
        self._opened = True
        if self._permits is not None:
            weakref.finalize(self, self._permits.leave)
            self._join()

    def _open(self, given: Where) -> None:
        witness = recovery.find_witness(self, given)
        about = witness.begin()

        def make(connection: Connection) -> str | None:
            open_schema(connection, create=None if about["made"] else about["identity"])
            return identity_of(connection)

        if self.run(make) == about["identity"] and not about["made"]:
            self._write_through()
            witness.note(made="yes")
        self._permits = Permits(witness, self._seen)

    def _write_through(self) -> None:
        """Move what SQLite's log holds into the file itself, if nobody reads: a copy of the file alone then has it."""
        if not self.is_sqlite:
            return
        with contextlib.suppress(sa.exc.SQLAlchemyError, sqlite3.Error), self.using(), self._writers, self._mutex:
            pooled = self._engine.raw_connection()
            try:
                pooled.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                pooled.close()

    def _join(self) -> Permits | None:
        if self._permits is not None:
            if not self._permits.joined:
                witness = self._permits.witness
                self._permits.join(lambda alone: recovery.check(self, witness, alone))
        elif self._reads_only:
            raise LedgerError(f"the ledger {self.shown!r} was opened to be read: nothing was charged")
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

    # -- plans ------------------------------------------------------------------------------------------------------

    def find_plan(self, name: str) -> StoredPlan | None:
        """The plan under this name, if one is stored."""
        return next((plan for plan in self.plans(name)), None)

    def plans(self, name: str | None = None) -> list[StoredPlan]:
        """Every plan of the ledger, the oldest first."""
        query = sa.select(plans).order_by(plans.c.id)
        query = query if name is None else query.where(plans.c.name == name)
        rows = self.run(lambda connection: connection.execute(query).mappings().all(), "read")
        return [StoredPlan(**row) for row in rows]

    def store_plan(
        self,
        name: str,
        content: str,
        digest: str,
        allowed: Mapping[str, int],
        *,
        scope: str = "shared",
        fingerprint: Sequence[str] | None = None,
        filter_state: str | None = None,
        tickets: bool = False,
    ) -> StoredPlan:
        """Freeze a plan under a name; if another worker was first, return what that one stored.

        It joins the generation of data that the ledger counts on, or opens a new one if a fresh start was announced
        under this name (`renewal.enter_generation`; `PlanMismatch` if the data are not fresh).
        """

        def insert(connection: Connection) -> None:
            # Workers that freeze plans at once do it one after the other.
            connection.execute(sa.select(meta.c.value).where(meta.c.key == "schema_version").with_for_update())
            if connection.scalar(sa.select(plans.c.id).where(plans.c.name == name)) is not None:
                return
            now = utc_now()
            generation, text = enter_generation(connection, name, fingerprint, now)
            values: dict[str, object] = {"name": name, "content": content, "digest": digest, "created": now}
            values |= {"scope": scope, "fingerprint": text, "generation": generation, "tickets": int(tickets)}
            plan_id = connection.scalar(sa.insert(plans).values(values).returning(plans.c.id))
            for line, limit in allowed.items():
                _add_counter(connection, plan_id, line, limit)
            if tickets:
                connection.execute(sa.insert(books).values(plan_id=plan_id, seats=0))
            if filter_state is not None:
                connection.execute(sa.insert(filters).values(plan_id=plan_id, state=filter_state))

        self.run(insert)
        self._write_through()
        stored = self.find_plan(name)
        if stored is None:
            raise LedgerError("the plan could not be stored")
        return stored

    def announce(self, name: str, reason: str) -> None:
        """Write down that the plan to come under this name is meant to start afresh, and why."""
        row = {"name": name, "reason": reason, "announced": utc_now()}
        self.run(lambda connection: connection.execute(sa.insert(acts).values(row)))

    def acts(self) -> list[Act]:
        """Every fresh start, announced or carried out."""
        query = sa.select(acts).order_by(acts.c.id)
        rows = self.run(lambda connection: connection.execute(query).mappings().all(), "read")
        return [Act(**row) for row in rows]

    def add_line(self, plan_id: int, line: str, allowed: int) -> None:
        """A further line of a plan, unless it is there."""
        account = at(Account(plan_id, line))

        def add(connection: Connection) -> None:
            connection.execute(sa.select(plans.c.id).where(plans.c.id == plan_id).with_for_update())
            if connection.scalar(sa.select(counters.c.id).where(account)) is None:
                _add_counter(connection, plan_id, line, allowed)

        self.run(add)

    def key(self, name: str) -> bytes:
        """A random key that was made with the ledger: "query_key" or "fingerprint_key"."""
        query = sa.select(meta.c.value).where(meta.c.key == name)
        found = self.run(lambda connection: connection.scalar(query), "read")
        if found is None:
            raise LedgerError(f"the ledger has lost its keys; {ADVICE}")
        return bytes.fromhex(found)

    @property
    def identity(self) -> str:
        """A name that no other ledger has, and that shows nothing of its keys."""
        return hashlib.blake2b(self.key("fingerprint_key"), digest_size=16, person=b"dpicl ledger").hexdigest()

    @property
    def place(self) -> str | None:
        """Where the ledger is, without user, password and options; None for one that ends with this process."""
        url = self.url._replace(username=None, password=None).set(query={})
        if not self.is_sqlite:
            return url.render_as_string()
        if not url.database or ":memory:" in url.database or "mode=memory" in str(self.url):
            return None
        is_file = not url.database.startswith("file:")
        return url.set(database=self.path if is_file else url.database).render_as_string()

    def forget_prints(self, gone: Sequence[str], left: Callable[[], Sequence[str]]) -> None:
        """Keep no hash of an owner who was forgotten: see `renewal.drop`. SQLite's log goes too, if nobody reads."""
        if not self.run(lambda connection: holds(connection, gone), "read"):
            return
        others = left()

        def drop_all(connection: Connection) -> None:
            if self.is_sqlite:
                connection.exec_driver_sql("PRAGMA secure_delete=ON")
            drop(connection, gone, others)

        self.run(drop_all)
        self._write_through()

    # -- charges ----------------------------------------------------------------------------------------------------

    def charge(self, plan_id: int, line: str, count: int) -> list[Charge]:
        """Charge ``count`` releases, durably, all or none. An empty list means that fewer are left."""
        claimed = self.claim(Account(plan_id, line), [None] * count)
        entries = claimed.entries if isinstance(claimed, Claimed) else []
        return [entry for entry in entries if isinstance(entry, Charge)]

    def claim(
        self,
        account: Account,
        wanted: Sequence[str | None],
        *,
        replay: bool = True,
        overdue: Mapping[str, int] | None = None,
        others: bool = False,
        advance: Advance | None = None,
        units: int = 1,
        burn: Burn | None = None,
    ) -> Claimed | Pending | None:
        """Charge what is asked and was not answered before: all of it durably, or nothing. None: fewer are left.

        Parameters
        ----------
        wanted
            One entry for each release: the query's keyed hash, or None for one that is never replayed. Equal queries
            share one charge. An answered one comes back as its `Claim`, uncharged.
        replay
            False: charge every entry, and leave claims alone.
        overdue
            Claims (query to number) that are waited for no longer: they are taken over by a charge of one's own.
        others
            Each charge says what the plan's other lines have spent. The charges of a plan then wait for each other, so
            that no two of them miss one another.
        advance
            Called in the transaction with the number of new units: a filter's (epsilon, left), or None if they do not
            fit.
        units
            What each new charge counts for.
        burn
            Called in the transaction with the positions in ``wanted`` that are charged: burns their owners' tickets.
        """
        now = utc_now()
        known_names = [query for query in dict.fromkeys(wanted) if query is not None] if replay else []
        overdue = overdue or {}

        permits = self._join()
        taken: list[tuple[Key, int] | Grant] = []

        def undo() -> None:
            while taken and permits is not None:
                what = taken.pop()
                permits.withdraw(what) if isinstance(what, Grant) else permits.put_back(*what)

        def claim(connection: Connection) -> Claimed | Pending | None:
            undo()  # of a try that was rolled back
            known = claims_of(connection, account, known_names)
            waiting = {q: c for q, c in known.items() if c.pending and overdue.get(q) != c.number}
            if waiting:
                return Pending(waiting)
            fresh = [query for query in known_names if query not in known or known[query].answer is None]
            plain = [query for query in wanted if query is None or not replay]
            state = None if advance is None else read_filter(connection, account.plan_id)
            entries = spend(connection, account, [*fresh, *plain], now, others, advance, units)
            if entries is None:
                return None
            if burn is not None and entries:
                at = [wanted.index(query) for query in fresh]
                at += [i for i, query in enumerate(wanted) if query is None or not replay]
                paid = burn(connection, entries[0].counter_id, entries[0].number - units, at)
                entries = [replace(entry, participants=who) for entry, who in zip(entries, paid, strict=True)]
            if fresh:
                take_claims(connection, entries[: len(fresh)], known)
            if entries:  # last, just before the COMMIT
                self._pay(connection, account, entries, units, state, taken)
            owned = dict(zip(fresh, entries, strict=False))
            rest = iter(entries[len(fresh) :])
            return Claimed(
                [next(rest) if q is None or not replay else owned[q] if q in owned else known[q] for q in wanted]
            )

        for _ in range(_HEALING):
            try:
                claimed = self.run(claim)
            except Behind:
                assert permits is not None
                key = self._keys[account.plan_id][1][account.line, account.principal]
                recovery.settle_one(self, permits.witness, key)
                continue
            except Left:
                self._join()
                continue
            except CommitUnknown:
                raise
            except _NoPermit:
                return None
            except Exception:
                undo()
                raise
            entries = claimed.entries if isinstance(claimed, Claimed) else []
            numbers = [entry.number for entry in entries if isinstance(entry, Charge)]
            if numbers:
                key = self._keys[account.plan_id][1][account.line, account.principal]
                self._seen[key] = max(self._seen.get(key, 0), *numbers)
            return claimed
        raise LedgerError(f"the ledger {self.shown!r} does not keep up with its witness: nothing was charged; {ADVICE}")

    def _pay(
        self,
        connection: Connection,
        account: Account,
        entries: Sequence[Charge],
        units: int,
        state: str | None,
        taken: list[tuple[Key, int] | Grant],
    ) -> None:
        """Use up the permits of a charge, and write down in ``taken`` what to give back if it is rolled back."""
        key, stored = self._key_of(connection, account)
        before = entries[0].number - units
        if before < self._seen.get(key, 0):
            raise rolled_back(key, before, self._seen[key])
        permits = self._permits
        if permits is None:
            return
        if state is not None:
            whole = replace(key, line="", principal="")
            after = read_filter(connection, account.plan_id)
            taken.append(permits.swap(whole, state, after, UNLIMITED))
            return
        if stored.tickets:
            of_counter = stubs.c.counter_id == entries[0].counter_id
            row = connection.execute(sa.select(stubs.c.before, stubs.c.digest).where(of_counter)).one_or_none()
            if row is None:
                raise LedgerError(f"owners pay for this plan, and nobody paid: nothing was charged; {ADVICE}")
            taken.append(permits.swap(key, row.before, row.digest, UNLIMITED, (before, entries[-1].number)))
            return
        count = len(entries) * units
        if not permits.take(key, count, before, before - entries[0].returned, self._allowed[key]):
            raise _NoPermit
        taken.append((key, count))

    def _key_of(self, connection: Connection, account: Account) -> tuple[Key, StoredPlan]:
        """How the witness knows a counter. A plan's name and content are remembered from its first charge on."""
        if account.plan_id not in self._keys:
            row = connection.execute(sa.select(plans).where(plans.c.id == account.plan_id)).mappings().one()
            self._keys[account.plan_id] = (StoredPlan(**row), {})
        stored, keys = self._keys[account.plan_id]
        where = (account.line, account.principal)
        if where not in keys:
            key = Key(stored.name, *where, stored.digest)
            self._allowed[key] = connection.execute(sa.select(counters.c.allowed).where(at(account))).scalar_one()
            keys[where] = key
        return keys[where], stored

    def claims(self, account: Account, wanted: Sequence[str]) -> dict[str, Claim]:
        """The latest claims on these queries."""
        return self.run(lambda connection: claims_of(connection, account, wanted), "read")

    def open_charge(self, account: Account, query: str, others: bool) -> Charge | None:
        """The latest charge for this query, if nobody has answered it or given it up."""
        return self.run(lambda connection: open_charge(connection, account, query, others), "read")

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
        row = _row(charge)
        update = sa.update(charges).where(row, charges.c.units == charge.units).values(**values)
        if unused:
            update = update.where(charges.c.outcome.is_(None), charges.c.receipt.is_(None))

        def keep(connection: Connection) -> int:
            if connection.execute(update).rowcount == 1:
                if unused:
                    _give_back(connection, charge.counter_id, unused)
                return unused
            found = connection.execute(sa.select(*(charges.c[name] for name in values)).where(row)).one_or_none()
            if found is None:
                raise LedgerError(f"the ledger has lost this charge; {ADVICE}")
            if found._asdict() != values:
                raise LedgerError("this charge was answered or given up before: it stands, and nothing is given back")
            return 0

        given_back = self.run(keep, "note")
        if given_back and self._permits is not None and charge.permit is not None:
            key = self._keys.get(charge.plan_id, (None, {}))[1].get((charge.line, charge.principal))
            if key is not None:  # else this object charges nothing there: what it cannot use is lost to the plan
                self._permits.put_back(key, charge.permit.unused(given_back))

    def give_up(self, charge: Charge) -> None:
        """There will be no answer: whoever waits for one may go on. The charge stands."""
        update = sa.update(charges).where(_row(charge), charges.c.receipt.is_(None)).values(outcome=GIVEN_UP)
        self.run(lambda connection: connection.execute(update), "note")

    # -- what is in it ----------------------------------------------------------------------------------------------

    def receipt(self, plan_id: int, line: str, number: int, counter_id: int | None = None) -> tuple[str, str] | None:
        """The receipt of a release as it was recorded, and whose it is. Without a counter: of the shared one."""
        query = (
            sa.select(charges.c.receipt, counters.c.principal)
            .join(counters, counters.c.id == charges.c.counter_id)
            .where(counters.c.plan_id == plan_id, counters.c.line == line, charges.c.number == number)
            .where(counters.c.principal == "" if counter_id is None else counters.c.id == counter_id)
        )
        row = self.run(lambda connection: connection.execute(query).one_or_none(), "read")
        return None if row is None or row.receipt is None else (str(row.receipt), str(row.principal))

    def spent(self, plan_id: int, principal: str = "") -> dict[str, int]:
        """Releases (or tokens) spent on each line of a plan, by everybody or by one principal."""
        found = self._counts(plan_id, counters.c.principal.in_(["", principal]))
        if not found:
            raise LedgerError(f"the ledger has lost this plan; {ADVICE}")
        lines = sorted({line for _, line in found})
        return {line: max(found.get((who, line), 0) for who in ("", principal)) for line in lines}

    def _counts(self, plan_id: int, *which: sa.ColumnElement[bool]) -> dict[tuple[str, str], int]:
        """What counts, by principal and line. `LedgerError` where a counter is lower than this process has seen it."""
        query = sa.select(counters.c.principal, counters.c.line, counters.c.spent, in_use)
        query = query.where(counters.c.plan_id == plan_id, *which).order_by(counters.c.id)
        _, keys = self._keys.get(plan_id, (None, {}))
        seen: dict[Key, int] = {}
        while True:
            rows = self.run(lambda connection: connection.execute(query).all(), "read")
            known = [(keys.get((line, principal)), spent) for principal, line, spent, _ in rows] if keys else []
            low = {key: spent for key, spent in known if key is not None and spent < self._seen.get(key, 0)}
            for key, spent in low.items():
                if spent < seen.get(key, 0):  # it was seen before this reading
                    raise rolled_back(key, spent, seen[key])
            if not low:
                return {(principal, line): int(counted) for principal, line, _, counted in rows}
            seen = {key: self._seen[key] for key in low}  # another thread may have charged meanwhile: read again

    def by_principal(self, plan_id: int) -> dict[str, dict[str, int]]:
        """What every principal has spent on each line ("" where all share one counter)."""
        answer: dict[str, dict[str, int]] = {}
        for (principal, line), spent in self._counts(plan_id).items():
            answer.setdefault(principal, {})[line] = spent
        return answer

    def most_spent(self, plan_id: int) -> dict[str, int]:
        """Each line's releases, of whoever spent most of it."""
        found = self.by_principal(plan_id)
        return {line: max(spent.get(line, 0) for spent in found.values()) for line in found.get("", {})}

    def counters(self, plan_id: int, line: str) -> dict[str, int]:
        """The counters of a line that were charged, by principal ("" where all share one)."""
        query = sa.select(counters.c.principal, counters.c.id).where(
            counters.c.plan_id == plan_id, counters.c.line == line, counters.c.spent > 0
        )
        rows = self.run(lambda connection: connection.execute(query).all(), "read")
        return {principal: counter for principal, counter in sorted(rows)}  # noqa: C416

    def history(self, plan_id: int) -> Iterator[Release]:
        """Every release of a plan, counter by counter, read in pieces."""
        last: tuple[int, int] = (0, 0)
        while True:
            query = (
                sa.select(counters.c.line, counters.c.principal, charges)
                .join(counters, counters.c.id == charges.c.counter_id)
                .where(counters.c.plan_id == plan_id)
                .where(sa.tuple_(charges.c.counter_id, charges.c.number) > sa.tuple_(*map(sa.literal, last)))
                .order_by(charges.c.counter_id, charges.c.number)
                .limit(10_000)
            )
            rows = self.run(lambda connection, query=query: connection.execute(query).all(), "read")  # type: ignore[misc]
            for row in rows:
                last = (row.counter_id, row.number)
                yield Release(row.line, row.principal, *last, row.charged, row.units, row.outcome, row.receipt)
            if not rows:
                return

    def latest(self, plan_id: int, principal: str, last: int) -> tuple[list[Release], int]:
        """The latest releases of one principal ("" where all share one counter), the oldest first, and how many there
        are in all."""
        of_plan = sa.and_(counters.c.plan_id == plan_id, counters.c.principal == principal)

        def read(connection: Connection) -> tuple[list[Release], int]:
            found, total = [], 0
            for counter, line in connection.execute(sa.select(counters.c.id, counters.c.line).where(of_plan)).all():
                mine = charges.c.counter_id == counter
                total += connection.scalar(sa.select(sa.func.count()).where(mine)) or 0
                query = sa.select(charges).where(mine).order_by(charges.c.number.desc()).limit(last)
                for row in connection.execute(query):
                    at_number = (counter, row.number, row.charged, row.units, row.outcome, row.receipt)
                    found.append(Release(line, principal, *at_number))
            found.sort(key=lambda release: (release.charged, release.counter_id, release.number))
            return found[-last:], total

        return self.run(read, "read")

    def filter_state(self, plan_id: int) -> str:
        """What a filtered budget has spent."""
        query = sa.select(filters.c.state).where(filters.c.plan_id == plan_id)
        found = self.run(lambda connection: connection.scalar(query), "read")
        if found is None:
            raise LedgerError(f"the ledger has lost this filter; {ADVICE}")
        return str(found)


class _NoPermit(Exception):
    """The witness grants no more: the charge is rolled back."""


def _give_back(connection: Connection, counter_id: int, unused: int) -> None:
    counter = sa.update(counters).where(counters.c.id == counter_id)
    if connection.execute(counter.values(returned=counters.c.returned + unused)).rowcount != 1:
        raise LedgerError(f"the ledger has lost this counter; {ADVICE}")


def _row(charge: Charge) -> sa.ColumnElement[bool]:
    return sa.and_(charges.c.counter_id == charge.counter_id, charges.c.number == charge.number)


def _add_counter(connection: Connection, plan_id: int | None, line: str, allowed: int) -> None:
    values = {"plan_id": plan_id, "line": line, "principal": "", "allowed": allowed, "spent": 0}
    connection.execute(sa.insert(counters).values(values))
