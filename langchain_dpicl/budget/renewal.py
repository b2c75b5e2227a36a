"""Several plans on one data set: which of them add up.

All plans of a ledger count as made on the same data. They share a generation until somebody announces, with a reason,
that the data were replaced as a whole (`PrivacyBudget.start_afresh`): the plan that is then frozen under the announced
name opens the next generation. The ledger checks this as far as it can: it keeps a sketch of each plan's owners
(`ExemplarStore.fingerprint`), and refuses a fresh start on data that share an owner with an older plan.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from typing_extensions import TypedDict

from langchain_dpicl.budget.schema import ADVICE, acts, plans
from langchain_dpicl.errors import LedgerError, PlanMismatch
from langchain_dpicl.privacy import Line, PLDAccountant, PrivacyPlan
from langchain_dpicl.store.owners import SKETCH


@dataclass(frozen=True)
class StoredPlan:
    """A plan as the ledger holds it: one row of its table."""

    id: int
    name: str
    content: str
    digest: str
    created: str
    scope: str
    fingerprint: str | None
    generation: int
    tickets: int = 0

    @property
    def is_filter(self) -> bool:
        """Whether its mechanisms and parameters are chosen after it is frozen."""
        return bool(json.loads(self.content).get("format") == "filter-1")

    @property
    def marks(self) -> set[str]:
        """The sketch of its owners; empty if it has none."""
        return set(json.loads(self.fingerprint or "[]"))


@dataclass(frozen=True)
class Act:
    """A fresh start: announced, and carried out when the plan of that name was frozen."""

    id: int
    name: str
    reason: str
    announced: str
    generation: int | None
    carried_out: str | None
    before: str | None
    after: str | None


class PlanShare(TypedDict):
    """One plan's part of a total."""

    name: str
    plan: str
    generation: int
    scope: str
    epsilon: float
    delta: float
    spent: dict[str, int]


class Total(TypedDict):
    """The loss of all plans on the same data together.

    ``epsilon`` at ``delta``: the composition of everything released so far, certified if each plan's parameters were
    chosen without looking at another plan's answers. ``delta`` is the largest of the plans' deltas (their sum, if
    failure probabilities alone pass the largest), plus each filter's, whose epsilon adds up as a whole.
    ``promised_epsilon`` at ``promised_delta``: the sums of the plans' promises; it holds for all releases to come,
    and also if a later plan was chosen after seeing an earlier one's answers. For plans of scope ``per_principal``
    both hold for each principal, if callers do not collude.
    """

    epsilon: float
    delta: float
    promised_epsilon: float
    promised_delta: float
    assumption: str
    plans: list[PlanShare]


def assumption(scope: str) -> str:
    """The assumption of a guarantee, in words."""
    if scope == "per_principal":
        return "callers do not collude: the guarantee holds for each principal's releases on their own"
    return "all callers may collude: the guarantee holds for all releases together"


def enter_generation(
    connection: Connection, name: str, fingerprint: Sequence[str] | None, now: str
) -> tuple[int, str | None]:
    """The generation of a plan that is being frozen, and its sketch as it is stored.

    Carries out a fresh start that was announced under its name: `PlanMismatch` if there is no sketch, or if it shares
    an owner with an older plan's.
    """
    text = None if fingerprint is None else json.dumps(list(fingerprint))
    latest = connection.scalar(sa.select(sa.func.max(plans.c.generation))) or 1
    is_ahead = sa.and_(acts.c.name == name, acts.c.generation.is_(None))
    announced = connection.scalar(sa.select(sa.func.max(acts.c.id)).where(is_ahead))
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
    connection.execute(sa.update(acts).where(acts.c.id == announced).values(values))
    return latest + 1, text


def refuse_shared(name: str, before: Iterable[str], after: Iterable[str]) -> None:
    """`PlanMismatch` if two sketches share an owner."""
    if not set(before).isdisjoint(after):
        raise PlanMismatch(
            f"the budget {name!r} cannot start afresh: its store shares owners with the data of an older plan in this "
            "ledger, so their losses add up; nothing was charged"
        )


def sketches_with(connection: Connection, gone: Sequence[str]) -> list[tuple[sa.Column[str], int, set[str]]]:
    """The sketches that have one of these hashes: each one's column, the id of its row, and its hashes."""
    found = []
    for column in (plans.c.fingerprint, acts.c.before, acts.c.after):
        for row_id, text in connection.execute(sa.select(column.table.c.id, column).where(column.is_not(None))).all():
            hashes = set(json.loads(text))
            if hashes & set(gone):
                found.append((column, row_id, hashes))
    return found


def drop(connection: Connection, gone: Sequence[str], left: Sequence[str]) -> None:
    """Remove the hashes of a forgotten owner from every sketch.

    A plan whose sketch had one of them was made on this owner's store, so hashes of the owners ``left`` there take
    their places: a later fresh start finds them as before.
    """
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete=ON")
    for column, row_id, hashes in sketches_with(connection, gone):
        kept = sorted(hashes.difference(gone))
        if column is plans.c.fingerprint:
            kept = heapq.nsmallest(SKETCH, {*kept, *left})
        update = sa.update(column.table).where(column.table.c.id == row_id)
        connection.execute(update.values({column: json.dumps(kept)}))


def same_data(stored: Sequence[StoredPlan], generation: int) -> list[StoredPlan]:
    """The plans of a generation, and those of others that share an owner with one of them, as far as sketches show."""
    chosen = {plan.id: plan for plan in stored if plan.generation == generation}
    more = chosen
    while more:
        marks = {mark for plan in chosen.values() for mark in plan.marks}
        more = {plan.id: plan for plan in stored if plan.id not in chosen and marks & plan.marks}
        chosen |= more
    return sorted(chosen.values(), key=lambda plan: plan.id)


def total(stored: Sequence[StoredPlan], spent: Mapping[int, Mapping[str, int]]) -> Total:
    """Compose plans; ``spent`` gives each line's releases (the most of any principal in a ``per_principal`` plan)."""
    shares: list[PlanShare] = []
    schedule: list[Line] = []
    deltas: list[float] = []
    of_filters: list[tuple[float, float]] = []
    for item in stored:
        counts = dict(spent[item.id])
        if item.is_filter:
            content = json.loads(item.content)
            epsilon, delta = content["epsilon"], content["delta"]
            of_filters += [(epsilon, delta)] if any(counts.values()) else []
        else:
            plan = PrivacyPlan.from_json(item.content)
            epsilon, delta = plan.epsilon, plan.delta
            if not plan.lines.keys() <= counts.keys():
                raise LedgerError(f"the ledger has lost a plan's lines; {ADVICE}")
            most = plan.at_most({name: counts[name] for name in plan.lines})
            schedule += [line.line(line.parameter, most[name]) for name, line in plan.lines.items() if most[name]]
            deltas += [delta] if any(counts.values()) else []
        shares.append(
            PlanShare(
                name=item.name,
                plan=item.digest[:16],
                generation=item.generation,
                scope=item.scope,
                epsilon=epsilon,
                delta=delta,
                spent=counts,
            )
        )
    at = together = 0.0
    if schedule:  # at the largest delta if that gives a finite epsilon, else at the sum of all
        at = max(deltas)
        together = PLDAccountant().epsilon(schedule, at)
        if not math.isfinite(together):
            at = min(0.999, _sum(deltas))
            together = PLDAccountant().epsilon(schedule, at)
    return Total(
        epsilon=_sum([together, *(epsilon for epsilon, _ in of_filters)]),
        delta=_sum([at, *(delta for _, delta in of_filters)]),
        promised_epsilon=_sum([share["epsilon"] for share in shares]),
        promised_delta=_sum([share["delta"] for share in shares]),
        assumption=assumption("per_principal" if any(item.scope == "per_principal" for item in stored) else "shared"),
        plans=shares,
    )


def _sum(values: Sequence[float]) -> float:
    """The sum, rounded up if adding rounds at all."""
    answer = math.fsum(values)
    return answer if sum(value != 0.0 for value in values) < 2 else math.nextafter(answer, math.inf)
