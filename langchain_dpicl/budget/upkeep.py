"""A ledger in the deployer's hands, for the command line: report on it, recover it, forget an owner in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from typing_extensions import TypedDict

from langchain_dpicl.budget.budget import PrivacyBudget
from langchain_dpicl.budget.ledger import UNWATCHED
from langchain_dpicl.budget.line import parse_release_id, release_id
from langchain_dpicl.budget.opening import (
    CounterRow,
    address,
    counts,
    lose,
    with_missing,
)
from langchain_dpicl.budget.schema import StoredPlan, counters, plans, read_meta
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.budget.terms import (
    WARNING,
    Receipt,
    Total,
    assumption,
    plan_of,
    read_receipt,
    recorded_principal,
)
from langchain_dpicl.budget.tickets import KeyMissing, OwnerMarks
from langchain_dpicl.budget.witness import GIVEN_UP, CounterKey, Mark, Witness
from langchain_dpicl.errors import InvalidParameter, LedgerError, UnknownOwner
from langchain_dpicl.sql import shown
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import MarkOf, owner_mark

FIELDS = (
    *("time", "id", "budget", "plan", "line", "principal", "number", "units", "spent", "outcome", "mechanism"),
    *("epsilon_spent", "epsilon", "delta", "remaining", "query", "assumption"),
)
"""The fields of every release in `history`, in this order. Some are None if a charge was never answered.

``units`` is 1, or the tokens that the release counts for now. ``spent`` adds them up over its counter, in the order of
numbers.
"""

UNANSWERED = "charged, not answered"


class LedgerReport:
    """Reads a ledger that exists. `LedgerError` if there is none."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ledger = StoredLedger(url)
        self._plans = self._ledger.plans()

    def chosen(self, name: str | None) -> list[StoredPlan]:
        """The plan of this name, or all that were there at first. `InvalidParameter` lists the names."""
        return self._plans if name is None else [self._ledger.named(name)]

    def _open(self, name: str) -> closing[PrivacyBudget]:
        return closing(PrivacyBudget.open(name, self._url, witness=UNWATCHED))

    def show(self, name: str | None = None) -> dict[str, Any]:
        """Every budget as it stands, and the total of the ledger.

        In a ``per_principal`` plan: the lines of each principal, and the largest epsilon.
        """
        budgets: list[dict[str, Any]] = []
        total: Total | None = None
        for plan in self.chosen(name):
            row: dict[str, Any] = {
                "name": plan.name,
                "plan": plan.digest[:16],
                "tickets": bool(plan.tickets),
                "scope": plan.scope,
                "assumption": assumption(plan.scope),
                "created": plan.created,
            }
            with self._open(plan.name) as budget:
                row |= {"epsilon": budget.epsilon, "delta": budget.delta}
                if plan.scope == "shared":
                    row |= {"epsilon_spent": budget.epsilon_spent(), "lines": budget.lines()}
                else:
                    spent = {who: budget.epsilon_spent(who) for who in budget.principals()}
                    row["epsilon_spent"] = max(spent.values(), default=0.0)
                    row["principals"] = {
                        who: {"epsilon_spent": spent[who], "lines": budget.lines(who)} for who in spent
                    }
                    row["lines"] = {
                        name: {"count": line.count, "mechanism": line.mechanism}
                        for name, line in plan_of(plan).lines.items()
                    }
                total = total or budget.total()  # the ledger's: the same from each of them
            budgets.append(row)
        return {"ledger": self._ledger.shown, "budgets": budgets, "total": total}

    def history(self, name: str | None = None) -> Iterator[dict[str, Any]]:
        """Every release, budget by budget and counter by counter, in the order of their numbers."""
        for plan in self.chosen(name):
            spent: dict[int, int] = {}
            for release in self._ledger.history(plan.id):
                counter = release.counter_id
                spent[counter] = spent.get(counter, 0) + release.units
                known = {
                    "id": release_id(plan.name, release.line, release.principal, counter, release.number),
                    "budget": plan.name,
                    "plan": plan.digest[:16],
                    "line": release.line,
                    "number": release.number,
                    "assumption": assumption(plan.scope),
                    "outcome": UNANSWERED,
                    **read_receipt(release.receipt or "{}"),
                    "principal": release.principal or recorded_principal(release.receipt),
                    "time": release.charged,
                    "units": release.units,
                    "spent": spent[counter],
                }
                known["outcome"] = release.outcome or known["outcome"]
                yield {field: known.get(field) for field in FIELDS}

    def receipt(self, id_: str) -> Receipt | None:
        """The receipt with this id, of any budget."""
        known = parse_release_id(id_)
        if known is None or self._ledger.find_plan(known[0]) is None:
            return None
        with self._open(known[0]) as budget:
            return budget.receipt(id_)

    def tickets(self, name: str) -> dict[str, Any]:
        """The used tickets of the budget of this name, by line and principal. PRIVATE, for the deployer alone.

        `InvalidParameter` if there is no such budget, or if its owners pay with no tickets.
        """
        with self._open(name) as budget:
            return {"private": WARNING, "budget": name, "lines": budget.private_ticket_report()}

    def close(self) -> None:
        """Close the connections."""
        self._ledger.close()


# -- recovery ----------------------------------------------------------------------------------------------------------


class Recovered(TypedDict):
    """One counter after `recover`: what counts on it now, and how much of that was not counted before."""

    budget: str
    line: str
    principal: str | None
    spent: int
    added: int


class Recovery(TypedDict):
    """The outcome of `recover`."""

    ledger: str
    witness: str
    had_witness: bool
    counters: list[Recovered]
    missing: list[str]
    """Plans that the witness knows and the ledger lacks: they count as spent, all of them."""


def recover(
    ledger: str,
    witness: str | os.PathLike[str] | None = None,
    *,
    keep_count: bool = False,
) -> Recovery:
    """Count as spent whatever a ledger may lack, and let it be used again.

    Parameters
    ----------
    ledger, witness
        As for `PrivacyBudget`. A witness that is there has a mark on every counter that was ever charged: all up to
        the mark counts as spent. Without one, every plan of the ledger counts as spent as a whole, and a new witness is
        made.
    keep_count
        Without a witness: believe the ledger's counts. For a ledger whose witness was lost, of which you KNOW that no
        copy was ever put in its place and that this is no copy itself. If it is, the guarantee is void.

    `LedgerError` if there is no whole ledger, and for another ledger's witness.
    """
    with ExitStack() as stack:
        reader = stack.enter_context(closing(StoredLedger(ledger)))
        if reader.is_in_memory:
            raise InvalidParameter("ledger", shown(ledger), "a ledger that is kept: one in memory is gone already")
        own = stack.enter_context(closing(Witness(address(reader, witness))))
        about = own.about()
        identity = reader.run(lambda connection: read_meta(connection, "identity"), "read")
        had_witness = bool(about.get("made"))
        if had_witness and about["identity"] != identity:
            raise LedgerError(
                f"the witness {own.shown!r} belongs to another ledger than {reader.shown!r}: name the right one; if it "
                "is lost, name a path where no file is yet"
            )
        if had_witness and keep_count:
            raise InvalidParameter("keep_count", True, "False: the ledger has a witness, whose marks count")
        own.begin()
        known = {mark.key: mark for mark in own.marks()} if had_witness else {}
        before, after = reader.run(partial(_recover, own, known, had_witness or keep_count))
        own.note(identity=str(identity), made="yes")
        missing = {key.plan for key in known} - {key.plan for key in after}
        found = [
            Recovered(
                budget=count.key.plan,
                line=count.key.line,
                principal=count.key.principal or None,
                spent=count.in_use,
                added=count.in_use - (before[key].in_use if key in before else 0),
            )
            for key, count in after.items()
        ]
        return Recovery(
            ledger=reader.shown,
            witness=own.shown,
            had_witness=had_witness,
            counters=found,
            missing=sorted(missing),
        )


Counts = Mapping[CounterKey, CounterRow]


def _recover(
    witness: Witness,
    known: Mapping[CounterKey, Mark],
    believe: bool,
    connection: Connection,
) -> tuple[Counts, Counts]:
    """Count as spent what each counter may lack, and write its mark; the counters before and after.

    Everything counts as spent, unless there are marks to ``believe``. The witness is written last: if the ledger then
    fails to commit, it is refused until it was recovered again.
    """
    connection.execute(sa.select(counters.c.id).order_by(counters.c.id).with_for_update()).all()  # no charge now
    before = counts(connection)
    for key, count in with_missing(before, known).items():
        if key in known:
            units = known[key].reserved - count.spent
        elif believe:
            units = 0
        elif count.tickets:  # as many as every owner has
            content = connection.scalar(sa.select(plans.c.content).where(plans.c.id == count.plan_id))
            units = int(json.loads(content or "{}")["lines"][count.key.line]["count"])
        else:
            units = count.allowed - count.in_use
        if units > 0:
            lose(connection, count, units)
    after = counts(connection)
    here = {(key.plan, key.digest) for key in after}
    found = [Mark(key, count.spent, count.spent) for key, count in after.items()]
    found += [mark._replace(low=GIVEN_UP) for key, mark in known.items() if (key.plan, key.digest) not in here]
    witness.write(found)
    return before, after


# -- forgetting --------------------------------------------------------------------------------------------------------


def open_ledgers(
    store: ExemplarStore,
    urls: Sequence[str],
    key_file: str | os.PathLike[str] | None = None,
) -> tuple[list[StoredLedger], list[str]]:
    """These ledgers, those that the store remembers, and the places of the remembered ones that cannot be opened.

    ``key_file``: of plans whose key stands neither with the store nor beside the ledger. Raises `LedgerError` if one of
    ``urls`` cannot be opened.
    """
    ledgers = {(ledger := StoredLedger(url, key_file=key_file)).identity: ledger for url in urls}
    lost: dict[str, None] = {}
    for budget in store.budgets:
        if budget.ledger in ledgers:
            continue
        try:
            found = StoredLedger(budget.url, key_file=key_file)
            if found.identity == budget.ledger:
                ledgers[budget.ledger] = found
                continue
            found.close()
        except LedgerError:
            pass
        lost[budget.url] = None
    return list(ledgers.values()), list(lost)


def forget(store: ExemplarStore, owner: str, ledgers: Sequence[StoredLedger]) -> int:
    """Forget an owner in a store and then in ledgers, and return the number of forgotten exemplars.

    If the store has no such owner, its row leaves the ledgers all the same (a repeated call ends what an interrupted
    one began), and then `UnknownOwner` is raised. An exemplar that was its own owner is known by its content, so its
    row stays then. A plan that knows owners by another store's key holds none of this store's.
    """
    used = {budget.place for budget in store.budgets}
    for ledger in ledgers:
        store.on_owner_forgotten(partial(_leave, ledger, used))
    with suppress(UnknownOwner):
        return store.forget(owner)
    keys = store.mark_keys()
    mark_of = partial(owner_mark, content=owner.encode("utf-8", "surrogatepass"), named=True)
    ends = [_leave(ledger, used, keys, mark_of) for ledger in ledgers]
    with suppress(UnknownOwner):
        return store.forget(owner)  # it came meanwhile
    for end in ends:
        end()
    raise UnknownOwner("the store holds no such owner; the ledgers hold nothing under its name any more")


def _leave(
    ledger: StoredLedger,
    used: Collection[tuple[str, str]],
    keys: Sequence[bytes],
    mark_of: MarkOf,
) -> Callable[[], None]:
    """Let an owner leave every plan of a ledger that knows it by one of these keys.

    `LedgerError` for a plan that was ``used`` with the store, and whose key is not at hand.
    """
    ends: list[Callable[[], object]] = []

    def end_all() -> None:
        for end in ends:
            end()

    missing = None
    for plan in ledger.plans():
        if not plan.tickets:
            continue
        end = OwnerMarks(ledger, plan.id).leave(keys, mark_of)
        if end is not None:
            ends.append(end)
        elif (ledger.identity, plan.name) in used:
            missing = plan.name
    if missing is not None:
        end_all()
        raise KeyMissing(missing)
    return end_all
