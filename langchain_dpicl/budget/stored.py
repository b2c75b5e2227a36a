"""The content of a ledger: plans, counts, receipts. Reading it needs no witness."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.budget import schema
from langchain_dpicl.budget.owner_keys import OwnerKeyFile, key_id
from langchain_dpicl.budget.records import Records
from langchain_dpicl.budget.schema import (
    Account,
    Charge,
    Claim,
    StoredPlan,
    charges,
    counters,
    in_use,
    plans,
)
from langchain_dpicl.budget.witness import CounterKey, rolled_back
from langchain_dpicl.errors import InvalidParameter, LedgerError
from langchain_dpicl.sql import direct, insert, transaction
from langchain_dpicl.store.notes import OpenedBudget, merged

_IN_USE = """SELECT max(spent - returned) FROM dpicl_counters
    WHERE plan_id = :plan_id AND line = :line AND principal IN ('', :principal)"""  # '': lost units count for everybody
_PLAN = [plans.c[name] for name in ("id", "name", "content", "digest", "created", "scope", "tickets")]
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


class StoredLedger(Records):
    """A ledger that exists. Raises `LedgerError` if there is none. It charges nothing."""

    def __init__(self, url: str, *, key_file: str | os.PathLike[str] | None = None) -> None:
        self._reached: dict[Account, int] = {}  # numbers that the counters have surely reached
        self._keys: dict[Account, CounterKey] = {}
        super().__init__(url)
        self.key_file = OwnerKeyFile(self.path, key_file, ends_with_process=self.is_in_memory)
        try:
            self._open()
        except BaseException:
            self._engine.dispose()
            raise
        self.opened = True

    def _open(self) -> None:
        if self.path is not None and not os.path.exists(self.path):
            raise LedgerError(f"there is no ledger {self.shown!r}")
        self.run(lambda connection: schema.open_schema(connection, create=None))

    # -- plans ------------------------------------------------------------------------------------------------------

    @transaction("read")
    def plans(self, connection: Connection) -> list[StoredPlan]:
        """Every plan of the ledger, the oldest first."""
        return [StoredPlan(*row) for row in connection.execute(sa.select(*_PLAN).order_by(plans.c.created, plans.c.id))]

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
        tickets: bool = False,
    ) -> StoredPlan:
        """Freeze a plan under a name; if another worker was first, return that one's plan."""

        def insert(connection: Connection) -> StoredPlan:
            # Workers that freeze plans at once do it one after the other.
            connection.execute(sa.select(schema.meta).where(schema.meta.c.key == "schema_version").with_for_update())
            stored = sa.select(*_PLAN).where(plans.c.name == name)
            if connection.execute(stored).one_or_none() is None:
                connection.execute(sa.delete(schema.removed).where(schema.removed.c.name == name))
                plan_id = schema.new_id()
                frozen = {"content": content, "digest": digest, "created": schema.utc_now(), "scope": scope}
                row = {"id": plan_id, "name": name, **frozen, "tickets": int(tickets)}
                connection.execute(sa.insert(plans).values(row))
                rows = [
                    {"id": schema.new_id(), "plan_id": plan_id, "line": line, "allowed": limit, "spent": 0}
                    for line, limit in allowed.items()
                ]
                connection.execute(sa.insert(counters), rows)
            return StoredPlan(*connection.execute(stored).one())

        plan = self.run(insert)
        self.write_through()
        return plan

    def remove_plan(self, plan: StoredPlan) -> bool:
        """Remove a plan on which nothing was ever charged, and remember that; False if something was."""

        def work(connection: Connection) -> bool:
            here = sa.select(plans.c.id).where(plans.c.id == plan.id).with_for_update()
            if connection.scalar(here) is None:  # from here on nobody adds a counter
                return False
            held = sa.select(counters).where(counters.c.plan_id == plan.id).with_for_update()
            if any(counter.spent for counter in connection.execute(held).all()):
                return False
            for table in (schema.leaving, counters):
                connection.execute(sa.delete(table).where(table.c.plan_id == plan.id))
            connection.execute(sa.delete(plans).where(plans.c.id == plan.id))
            connection.execute(sa.insert(schema.removed).values(name=plan.name, removed=schema.utc_now()))
            return True

        return self.run(work)

    @transaction("read")
    def has_spent(self, connection: Connection, plan: StoredPlan) -> bool:
        """True if anything was ever charged on a plan, or counts as charged."""
        spent = sa.select(counters.c.id).where(counters.c.plan_id == plan.id, counters.c.spent > 0).limit(1)
        return connection.scalar(spent) is not None

    @transaction("read")
    def has_key(self, connection: Connection, plan_id: int) -> bool:
        """True if a plan whose owners pay has chosen its key."""
        return bool(connection.scalar(sa.select(plans.c.key_id).where(plans.c.id == plan_id)))

    @transaction("read")
    def others(self, connection: Connection) -> tuple[OpenedBudget, ...]:
        """The budgets that stores remember beside this ledger's, in whatever ledger."""
        columns = [schema.others.c[name] for name in ("ledger", "url", "name", "epsilon", "delta")]
        return tuple(OpenedBudget(*row) for row in connection.execute(sa.select(*columns)))

    def note_others(self, found: Sequence[OpenedBudget]) -> None:
        """Keep these among `others`."""
        known = self.others()
        news = set(merged(known, found)) - set(known)
        table = schema.others

        def write(connection: Connection) -> None:
            for each in news:
                connection.execute(sa.delete(table).where(table.c.ledger == each.ledger, table.c.name == each.name))
                insert(connection, table, asdict(each))

        if news:
            self.run(write)

    @transaction("read")
    def was_removed(self, connection: Connection, name: str) -> bool:
        """True if a budget of this name was removed before anything was spent, and none has come since."""
        return connection.scalar(sa.select(schema.removed.c.name).where(schema.removed.c.name == name)) is not None

    # -- the key of owners' marks --------------------------------------------------------------------------------------

    def owner_key(self, plan_id: int, own: Sequence[bytes] = (), *, make: bool = False) -> bytes | None:
        """The key that makes the marks of a plan whose owners pay: one of a store's ``own``, or that of the key file.

        The first question chooses it (``make``), and the ledger keeps its name, so no owner is known by two marks and
        has its tickets twice. None if the plan has no key so far, or another one than those at hand.
        """
        here = plans.c.id == plan_id
        chosen = self.run(lambda connection: connection.scalar(sa.select(plans.c.key_id).where(here)), "read")
        if chosen:
            fitting = (key for key in own if key_id(key) == chosen)
            key = next(fitting, None) or self.key_file.read()
            return key if key is not None and key_id(key) == chosen else None
        if not make:
            return None
        key = own[0] if own else self.key_file.make()
        first = sa.update(plans).where(here, plans.c.key_id == "").values(key_id=key_id(key))
        self.run(lambda connection: connection.execute(first).rowcount)
        return self.owner_key(plan_id, own)

    # -- keys and names -----------------------------------------------------------------------------------------------

    @transaction("read")
    def key(self, connection: Connection, name: str) -> bytes:
        """A random key that was made with the ledger: "query_key"."""
        return schema.key_of(connection, name)

    @property
    def identity(self) -> str:
        """A random name that no other ledger has."""
        found = self.run(lambda connection: schema.read_meta(connection, "identity"), "read")
        if found is None:
            raise LedgerError(f"the ledger has lost its name; {schema.ADVICE}")
        return found

    @property
    def place(self) -> str | None:
        """The ledger's URL without user, password and options; None for one that ends with this process."""
        if self.is_in_memory:
            return None
        url = self.url._replace(username=None, password=None).set(query={})
        if self.is_sqlite:
            url = url.set(database=self.path)
        return url.render_as_string()

    def _key_of(self, connection: Connection, account: Account) -> CounterKey:
        """A counter's name for the witness."""
        if account not in self._keys:
            row = connection.execute(sa.select(plans.c.name, plans.c.digest).where(plans.c.id == account.plan_id)).one()
            self._keys[account] = CounterKey(row.name, account.line, account.principal, row.digest)
        return self._keys[account]

    # -- charges ------------------------------------------------------------------------------------------------------

    @transaction("read")
    def claims(
        self,
        connection: Connection,
        account: Account,
        wanted: Sequence[str],
    ) -> tuple[dict[str, Claim], int]:
        """The latest claims on these queries, and what the account's line has in use. A charge checks both again."""
        (spent,) = direct(connection, _IN_USE, account._asdict()).fetchone()
        return schema.claims_of(connection, account, wanted), int(spent or 0)

    @transaction("read")
    def open_charge(
        self,
        connection: Connection,
        account: Account,
        query: str,
        others: bool,
    ) -> Charge | None:
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
        return Charge(
            **account._asdict(),
            number=row.number,
            time=row.charged,
            others=schema.spent_beside(connection, account) if others else {},
            counter_id=row.counter_id,
            query=query,
            units=row.units,
            returned=row.number - row.in_use,
        )

    @transaction("read")
    def steps(self, connection: Connection, charge: Charge) -> list[str]:
        """The contents that the steps of a charge have released, in their order."""
        table = schema.steps
        kept = (
            sa.select(table.c.content)
            .where(table.c.counter_id == charge.counter_id, table.c.number == charge.number)
            .order_by(table.c.step)
        )
        return [*connection.scalars(kept)]

    @transaction("read")
    def receipt(
        self,
        connection: Connection,
        plan_id: int,
        line: str,
        number: int,
        counter_id: int | None = None,
    ) -> tuple[str, str] | None:
        """The receipt of a release as it was recorded, and its principal. Without a counter: of the shared one."""
        of_counter = counters.c.principal == "" if counter_id is None else counters.c.id == counter_id
        query = (
            sa.select(charges.c.receipt, counters.c.principal)
            .join(counters, counters.c.id == charges.c.counter_id)
            .where(counters.c.plan_id == plan_id, counters.c.line == line, of_counter)
            .where(charges.c.number == number, charges.c.receipt.is_not(None))
        )
        row = connection.execute(query).one_or_none()
        if row is None:
            return None
        return str(row.receipt), str(row.principal)

    def spent(self, plan_id: int, principal: str = "") -> dict[str, int]:
        """Releases (or tokens) spent on each line of a plan, by everybody or by one principal."""
        found = self.most_spent(plan_id, "", principal)
        if not found:
            raise LedgerError(f"the ledger has lost this plan; {schema.ADVICE}")
        return dict(sorted(found.items()))

    def most_spent(self, plan_id: int, *principals: str) -> dict[str, int]:
        """The most releases that one principal has spent on each line: of these principals, or of all."""
        found = self.by_principal(plan_id, *principals)
        return {line: max(spent.get(line, 0) for spent in found.values()) for line in found.get("", {})}

    @transaction("read")
    def by_principal(
        self,
        connection: Connection,
        plan_id: int,
        *principals: str,
    ) -> dict[str, dict[str, int]]:
        """The releases of these principals, or of all, on each line ("" if all share one).

        `LedgerError` if a counter is lower than this process has seen it.
        """
        query = (
            sa.select(counters.c.principal, counters.c.line, counters.c.spent, in_use)
            .where(counters.c.plan_id == plan_id)
            .order_by(counters.c.line, counters.c.principal)
        )
        if principals:
            query = query.where(counters.c.principal.in_(principals))
        reached = self._reached.copy()  # before the counters are read: a later charge only raises them
        answer: dict[str, dict[str, int]] = {}
        for principal, line, spent, counted in connection.execute(query).all():
            account = Account(plan_id, line, principal)
            if spent < reached.get(account, 0):
                raise rolled_back(self._keys[account], spent, reached[account])
            answer.setdefault(principal, {})[line] = int(counted)
        return answer

    @transaction("read")
    def counters(self, connection: Connection, plan_id: int, line: str) -> dict[str, int]:
        """The counters of a line that were charged, by principal ("" if all share one)."""
        query = sa.select(counters.c.principal, counters.c.id).where(
            counters.c.plan_id == plan_id,
            counters.c.line == line,
            counters.c.spent > 0,
        )
        return dict(sorted(map(tuple, connection.execute(query))))

    def history(self, plan_id: int) -> Iterator[ReleaseRow]:
        """Every release of a plan, counter by counter, read in pieces."""
        place = sa.tuple_(counters.c.line, counters.c.principal, charges.c.number)
        query = (
            sa.select(counters.c.line, counters.c.principal, *_RELEASE)
            .join(counters, counters.c.id == charges.c.counter_id)
            .where(counters.c.plan_id == plan_id)
            .order_by(*place)
            .limit(10_000)
        )
        rows = self.run(lambda connection: connection.execute(query).all(), "read")
        while rows:
            yield from (ReleaseRow(*row) for row in rows)
            further = query.where(
                place > sa.tuple_(*map(sa.literal, (rows[-1].line, rows[-1].principal, rows[-1].number)))
            )
            rows = self.run(lambda connection: connection.execute(further).all(), "read")  # noqa: B023

    @transaction("read")
    def latest(
        self,
        connection: Connection,
        plan_id: int,
        principal: str,
        last: int,
    ) -> tuple[list[ReleaseRow], int]:
        """The latest releases of one principal, the oldest first, and the number of all.

        The principal is "" if all share one counter.
        """
        lines = sa.select(counters.c.id, counters.c.line).where(
            counters.c.plan_id == plan_id,
            counters.c.principal == principal,
        )
        found = []
        total = 0
        for counter, line in connection.execute(lines).all():
            mine = charges.c.counter_id == counter
            total += connection.scalar(sa.select(sa.func.count()).where(mine)) or 0
            query = sa.select(*_RELEASE).where(mine).order_by(charges.c.number.desc()).limit(last)
            found += [ReleaseRow(line, principal, *row) for row in connection.execute(query)]
        found.sort(key=lambda release: (release.charged, release.counter_id, release.number))
        return found[-last:], total
