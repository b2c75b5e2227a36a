"""What a ledger holds: plans, counts, receipts, fresh starts. Reading it needs no witness.

All plans of a ledger count as made on the same data. They share a generation until somebody announces, with a reason,
that the data were replaced as a whole (`PrivacyBudget.start_afresh`): the plan that is then frozen under the announced
name opens the next generation. The ledger checks this as far as it can: it keeps a sketch of each plan's owners
(`ExemplarStore.fingerprint`), and refuses a fresh start on data that share an owner with an older plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget import schema
from langchain_dpicl.budget.database import Database, transaction
from langchain_dpicl.budget.schema import Account, Act, Charge, Claim, StoredPlan, charges, counters, in_use, plans
from langchain_dpicl.budget.witness import CounterKey, rolled_back
from langchain_dpicl.errors import InvalidParameter, LedgerError, PlanMismatch
from langchain_dpicl.store.base import SKETCH
from langchain_dpicl.store.sql import direct

_IN_USE = """SELECT max(spent - returned) FROM dpicl_counters
    WHERE plan_id = :plan_id AND line = :line AND principal IN ('', :principal)"""  # '': lost units count for everybody
_RELEASE = [charges.c[name] for name in ("counter_id", "number", "charged", "units", "outcome", "receipt")]


@dataclass(frozen=True)
class ReleaseRow:
    """One row of the ledger's history. Without a receipt it was charged and never answered."""

    line: str
    principal: str
    counter_id: int
    number: int
    charged: str
    units: int
    outcome: str | None
    receipt: str | None


@dataclass
class Counter:
    """What this process knows of a counter that it charges, and the permits that it has for it."""

    key: CounterKey
    allowed: int
    tickets: bool  # owners pay
    reached: int = 0  # a number that the counter has surely reached
    hand: int = 0  # permits in hand
    ahead: int = 0  # permits granted ahead
    charged: int = 0  # permits used up so far


class StoredLedger(Database):
    """A ledger that exists. Raises `LedgerError` if there is none. It charges nothing."""

    def __init__(self, url: str) -> None:
        self._charged: dict[Account, Counter] = {}
        super().__init__(url)
        self._open()
        self.opened = True

    def _open(self) -> None:
        if self.path is not None and not os.path.exists(self.path):
            raise LedgerError(f"there is no ledger {self.shown!r}")
        self.run(lambda connection: schema.open_schema(connection, create=None))

    def write_through(self) -> None:
        """Move the contents of SQLite's log into the file itself, if nobody reads: a copy of the file then has it."""
        if not self.is_sqlite:
            return
        with contextlib.suppress(sa.exc.SQLAlchemyError, sqlite3.Error), self.using(), self._writers:
            pooled = self._engine.raw_connection()
            try:
                pooled.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                pooled.close()

    # -- plans ------------------------------------------------------------------------------------------------------

    @transaction("read")
    def plans(self, connection: Connection) -> list[StoredPlan]:
        """Every plan of the ledger, the oldest first."""
        return [StoredPlan(**row) for row in connection.execute(sa.select(plans).order_by(plans.c.id)).mappings()]

    def find_plan(self, name: str) -> StoredPlan | None:
        """The plan under this name, if one is stored."""
        return next((plan for plan in self.plans() if plan.name == name), None)

    def named(self, name: str) -> StoredPlan:
        """The plan under this name. `InvalidParameter` lists the names."""
        known = {plan.name: plan for plan in self.plans()}
        if name not in known:
            raise InvalidParameter("name", name, f"a plan of this ledger: {', '.join(map(repr, known)) or 'none'}")
        return known[name]

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
        """Freeze a plan under a name; if another worker was first, return that one's plan.

        It joins the generation of data that the ledger counts on, or opens a new one if a fresh start was announced
        under this name (`PlanMismatch` if the data are not fresh).
        """

        def insert(connection: Connection) -> StoredPlan:
            version = sa.select(schema.meta).where(schema.meta.c.key == "schema_version")
            connection.execute(version.with_for_update())  # workers that freeze plans at once do it one after the other
            stored = sa.select(plans).where(plans.c.name == name)
            if connection.execute(stored).one_or_none() is None:
                now = schema.utc_now()
                generation, text = _enter_generation(connection, name, fingerprint, now)
                values: dict[str, object] = {"name": name, "content": content, "digest": digest, "created": now}
                values |= {"scope": scope, "fingerprint": text, "generation": generation, "tickets": int(tickets)}
                plan_id = connection.scalar(sa.insert(plans).values(values).returning(plans.c.id))
                for line, limit in allowed.items():
                    connection.execute(sa.insert(counters).values(plan_id=plan_id, line=line, allowed=limit, spent=0))
                if tickets:
                    connection.execute(sa.insert(schema.owner_index).values(plan_id=plan_id, size=0))
                if filter_state is not None:
                    connection.execute(sa.insert(schema.filters).values(plan_id=plan_id, state=filter_state))
            return StoredPlan(**connection.execute(stored).mappings().one())

        plan = self.run(insert)
        self.write_through()
        return plan

    @transaction()
    def add_line(self, connection: Connection, plan_id: int, line: str, allowed: int) -> None:
        """A further line of a plan, unless it is there."""
        connection.execute(sa.select(plans.c.id).where(plans.c.id == plan_id).with_for_update())
        if connection.scalar(sa.select(counters.c.id).where(Account(plan_id, line).counter)) is None:
            connection.execute(sa.insert(counters).values(plan_id=plan_id, line=line, allowed=allowed, spent=0))

    @transaction()
    def announce(self, connection: Connection, name: str, reason: str) -> None:
        """Write down that the plan to come under this name is meant to start afresh, and why."""
        connection.execute(sa.insert(schema.acts).values(name=name, reason=reason, announced=schema.utc_now()))

    @transaction("read")
    def acts(self, connection: Connection) -> list[Act]:
        """Every fresh start, announced or carried out."""
        return [Act(**row) for row in connection.execute(sa.select(schema.acts).order_by(schema.acts.c.id)).mappings()]

    def forget_prints(self, gone: Sequence[str], left: Callable[[], Sequence[str]]) -> None:
        """Remove a forgotten owner's hashes from every sketch, also from SQLite's log if nobody reads.

        A plan whose sketch had one of them was made on this owner's store, so hashes of the owners ``left`` there take
        their places: a later fresh start finds them as before.
        """
        if not self.run(lambda connection: _sketches_with(connection, gone), "read"):
            return
        others = left()

        def drop(connection: Connection) -> None:
            if self.is_sqlite:
                connection.exec_driver_sql("PRAGMA secure_delete=ON")
            for column, row_id, hashes in _sketches_with(connection, gone):
                kept = sorted(hashes.difference(gone))
                if column is plans.c.fingerprint:
                    kept = heapq.nsmallest(SKETCH, {*kept, *others})
                update = sa.update(column.table).where(column.table.c.id == row_id)
                connection.execute(update.values({column: json.dumps(kept)}))

        self.run(drop)
        self.write_through()

    # -- keys and names -----------------------------------------------------------------------------------------------

    @transaction("read")
    def key(self, connection: Connection, name: str) -> bytes:
        """A random key that was made with the ledger: "query_key" or "fingerprint_key"."""
        return schema.key_of(connection, name)

    @property
    def identity(self) -> str:
        """A name that no other ledger has, and that shows nothing of its keys."""
        return hashlib.blake2b(self.key("fingerprint_key"), digest_size=16, person=b"dpicl ledger").hexdigest()

    @property
    def place(self) -> str | None:
        """Where the ledger is, without user, password and options; None for one that ends with this process."""
        url = self.url._replace(username=None, password=None).set(query={})
        if self.is_sqlite and self.path is None:
            return None
        is_plain = self.is_sqlite and not str(url.database).startswith("file:")
        return (url.set(database=self.path) if is_plain else url).render_as_string()

    # -- charges ------------------------------------------------------------------------------------------------------

    @transaction("read")
    def claims(self, connection: Connection, account: Account, wanted: Sequence[str]) -> tuple[dict[str, Claim], int]:
        """The latest claims on these queries, and what the account's line has in use. A charge checks both again."""
        (spent,) = direct(connection, _IN_USE, account._asdict()).fetchone()
        return schema.claims_of(connection, account, wanted), int(spent or 0)

    @transaction("read")
    def open_charge(self, connection: Connection, account: Account, query: str, others: bool) -> Charge | None:
        """The latest charge for this query, if nobody has answered it or given it up. ``others`` are as of now.

        Its ``spent`` is all that is in use on the line now: at least as much as when it was made.
        """
        named = schema.queries
        row = connection.execute(
            sa.select(charges, in_use.label("in_use"))
            .join(counters, counters.c.id == charges.c.counter_id)
            .join(named, sa.and_(named.c.counter_id == counters.c.id, named.c.number == charges.c.number))
            .where(account.counter, named.c.query == query)
            .where(charges.c.outcome.is_(None), charges.c.receipt.is_(None))
        ).one_or_none()
        if row is None:
            return None
        number, beside = row.number, schema.spent_beside(connection, account) if others else {}
        about = {"number": number, "counter_id": row.counter_id, "units": row.units, "returned": number - row.in_use}
        return Charge(**account._asdict(), **about, time=row.charged, others=beside, query=query)

    @transaction("read")
    def steps(self, connection: Connection, charge: Charge) -> list[str]:
        """What the steps of a charge have released, in their order."""
        table = schema.steps
        kept = sa.select(table.c.content).where(
            table.c.counter_id == charge.counter_id, table.c.number == charge.number
        )
        return [content for (content,) in connection.execute(kept.order_by(table.c.step))]

    @transaction("read")
    def receipt(
        self, connection: Connection, plan_id: int, line: str, number: int, counter_id: int | None = None
    ) -> tuple[str, str] | None:
        """The receipt of a release as it was recorded, and its principal. Without a counter: of the shared one."""
        query = (
            sa.select(charges.c.receipt, counters.c.principal)
            .join(counters, counters.c.id == charges.c.counter_id)
            .where(counters.c.plan_id == plan_id, counters.c.line == line, charges.c.number == number)
            .where(counters.c.principal == "" if counter_id is None else counters.c.id == counter_id)
        )
        row = connection.execute(query).one_or_none()
        return None if row is None or row.receipt is None else (str(row.receipt), str(row.principal))

    def spent(self, plan_id: int, principal: str = "") -> dict[str, int]:
        """Releases (or tokens) spent on each line of a plan, by everybody or by one principal."""
        found = self.most_spent(plan_id, "", principal)
        if not found:
            raise LedgerError(f"the ledger has lost this plan; {schema.ADVICE}")
        return dict(sorted(found.items()))

    def most_spent(self, plan_id: int, *principals: str) -> dict[str, int]:
        """Each line's releases, of whoever spent most of it: of these principals, or of all."""
        found = self.by_principal(plan_id, *principals)
        return {line: max(spent.get(line, 0) for spent in found.values()) for line in found.get("", {})}

    @transaction("read")
    def by_principal(self, connection: Connection, plan_id: int, *principals: str) -> dict[str, dict[str, int]]:
        """What these principals, or all, have spent on each line ("" if all share one).

        `LedgerError` if a counter is lower than this process has seen it.
        """
        query = sa.select(counters.c.principal, counters.c.line, counters.c.spent, in_use)
        query = query.where(counters.c.plan_id == plan_id).order_by(counters.c.id)
        if principals:
            query = query.where(counters.c.principal.in_(principals))
        reached = {account: counter.reached for account, counter in self._charged.copy().items()}  # before it reads
        answer: dict[str, dict[str, int]] = {}
        for principal, line, spent, counted in connection.execute(query).all():
            account = Account(plan_id, line, principal)
            if spent < reached.get(account, 0):
                raise rolled_back(self._charged[account].key, spent, reached[account])
            answer.setdefault(principal, {})[line] = int(counted)
        return answer

    @transaction("read")
    def counters(self, connection: Connection, plan_id: int, line: str) -> dict[str, int]:
        """The counters of a line that were charged, by principal ("" if all share one)."""
        of_line = (counters.c.plan_id == plan_id, counters.c.line == line, counters.c.spent > 0)
        query = sa.select(counters.c.principal, counters.c.id).where(*of_line)
        return dict(sorted(map(tuple, connection.execute(query))))

    def history(self, plan_id: int) -> Iterator[ReleaseRow]:
        """Every release of a plan, counter by counter, read in pieces."""
        place = sa.tuple_(charges.c.counter_id, charges.c.number)
        query = sa.select(counters.c.line, counters.c.principal, *_RELEASE).join(
            counters, counters.c.id == charges.c.counter_id
        )
        query = query.where(counters.c.plan_id == plan_id).order_by(*place).limit(10_000)
        rows = self.run(lambda connection: connection.execute(query).all(), "read")
        while rows:
            yield from (ReleaseRow(*row) for row in rows)
            further = query.where(place > sa.tuple_(*map(sa.literal, (rows[-1].counter_id, rows[-1].number))))
            rows = self.run(lambda connection: connection.execute(further).all(), "read")  # noqa: B023

    @transaction("read")
    def latest(self, connection: Connection, plan_id: int, principal: str, last: int) -> tuple[list[ReleaseRow], int]:
        """The latest releases of one principal ("" if all share one counter), the oldest first, and how many there
        are in all."""
        of_plan = sa.and_(counters.c.plan_id == plan_id, counters.c.principal == principal)
        found, total = [], 0
        for counter, line in connection.execute(sa.select(counters.c.id, counters.c.line).where(of_plan)).all():
            mine = charges.c.counter_id == counter
            total += connection.scalar(sa.select(sa.func.count()).where(mine)) or 0
            query = sa.select(*_RELEASE).where(mine).order_by(charges.c.number.desc()).limit(last)
            found += [ReleaseRow(line, principal, *row) for row in connection.execute(query)]
        found.sort(key=lambda release: (release.charged, release.counter_id, release.number))
        return found[-last:], total

    @transaction("read")
    def filter_state(self, connection: Connection, plan_id: int) -> str:
        """What a filtered budget has spent."""
        return schema.read_filter(connection, plan_id, to_write=False)


def _enter_generation(
    connection: Connection, name: str, fingerprint: Sequence[str] | None, now: str
) -> tuple[int, str | None]:
    """The generation of a plan that is being frozen, and its sketch as it is stored.

    Carries out a fresh start that was announced under its name: `PlanMismatch` if there is no sketch, or if it shares
    an owner with an older plan's.
    """
    text = None if fingerprint is None else json.dumps(list(fingerprint))
    latest = connection.scalar(sa.select(sa.func.max(plans.c.generation))) or 1
    is_ahead = sa.and_(schema.acts.c.name == name, schema.acts.c.generation.is_(None))
    announced = connection.scalar(sa.select(sa.func.max(schema.acts.c.id)).where(is_ahead))
    if announced is None:
        return latest, text
    if fingerprint is None:
        raise PlanMismatch(
            f"the budget {name!r} was announced to start afresh, so the store's fingerprint is needed when its plan is "
            "frozen: pass fingerprint=store.fingerprint; nothing was charged"
        )
    rows = connection.scalars(sa.select(plans.c.fingerprint).where(plans.c.fingerprint.is_not(None)))
    before = sorted({mark for row in rows for mark in json.loads(row)})
    refuse_shared(name, before, fingerprint)
    values = {"generation": latest + 1, "carried_out": now, "before": json.dumps(before), "after": text}
    connection.execute(sa.update(schema.acts).where(schema.acts.c.id == announced).values(values))
    return latest + 1, text


def refuse_shared(name: str, before: Iterable[str], after: Iterable[str]) -> None:
    """`PlanMismatch` if two sketches share an owner."""
    if not set(before).isdisjoint(after):
        raise PlanMismatch(
            f"the budget {name!r} cannot start afresh: its store shares owners with the data of an older plan in this "
            "ledger, so their losses add up; nothing was charged"
        )


def _sketches_with(connection: Connection, gone: Sequence[str]) -> list[tuple[sa.Column[str], int, set[str]]]:
    """The sketches that have one of these hashes: each one's column, the id of its row, and its hashes."""
    found = []
    for column in (plans.c.fingerprint, schema.acts.c.before, schema.acts.c.after):
        for row_id, text in connection.execute(sa.select(column.table.c.id, column).where(column.is_not(None))).all():
            hashes = set(json.loads(text))
            if hashes & set(gone):
                found.append((column, row_id, hashes))
    return found
