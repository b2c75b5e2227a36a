"""One data set, several plans: which of them add up.

All plans of a ledger count as made on the same data. They share a generation until somebody announces, with a reason,
that the data were replaced as a whole (`PrivacyBudget.start_afresh`): the plan that is then frozen under the announced
name opens the next generation. The ledger checks what it can: it keeps a sketch of each plan's owners
(`ExemplarStore.fingerprint`), and refuses a fresh start on data that share an owner with an older plan.
"""

from __future__ import annotations

import heapq
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from typing_extensions import TypedDict

from langchain_dpicl.budget.schema import ADVICE, acts, plans
from langchain_dpicl.errors import LedgerError, PlanMismatch
from langchain_dpicl.privacy import Line, PLDAccountant, PrivacyPlan
from langchain_dpicl.store.marks import SKETCH


@dataclass(frozen=True)
class StoredPlan:
    """A plan as the ledger holds it."""

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
        """Whether its parameters are chosen as one goes."""
        return bool(json.loads(self.content).get("format") == "filter-1")


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
    """What all plans on the same data give away together.

    ``epsilon`` at ``delta``: the composition of everything released so far, certified if each plan's parameters were
    chosen without looking at another plan's answers. ``delta`` is the largest of the plans' deltas (their sum, where
    failure probabilities alone pass the largest), plus each filter's, whose epsilon adds up as a whole.
    ``promised_epsilon`` at ``promised_delta``: the sums of what the plans promise; it holds for all releases to come,
    and also where a later plan was chosen after seeing an earlier one's answers. For plans of scope ``per_principal``
    both hold for each principal, if callers do not collude.
    """

    epsilon: float
    delta: float
    promised_epsilon: float
    promised_delta: float
    assumption: str
    plans: list[PlanShare]


COLLUDING = "all callers may collude: the guarantee holds for all releases together"
NOT_COLLUDING = "callers do not collude: the guarantee holds for each principal's releases on their own"


def assumption(scope: str) -> str:
    """What a guarantee rests on, in words."""
    return NOT_COLLUDING if scope == "per_principal" else COLLUDING


def enter_generation(
    connection: Connection, name: str, fingerprint: Sequence[str] | None, now: str
) -> tuple[int, str | None]:
    """Which generation a plan that is being frozen belongs to, and its sketch as it is stored.

    Carries out a fresh start that was announced under its name: `PlanMismatch` if there is no sketch, or if it shares
    an owner with an older plan's.
    """
    text = None if fingerprint is None else json.dumps(list(fingerprint))
    latest = connection.scalar(sa.select(sa.func.max(plans.c.generation))) or 1
    announced = connection.scalar(
        sa.select(sa.func.max(acts.c.id)).where(acts.c.name == name, acts.c.generation.is_(None))
    )
    if announced is None:
        return latest, text
    if fingerprint is None:
        raise PlanMismatch(
            f"the budget {name!r} was announced to start afresh, so the store's fingerprint is needed when its plan is "
            "frozen: pass fingerprint=store.fingerprint; nothing was charged"
        )
    before = sorted({mark for sketch in sketches(connection) for mark in sketch})
    refuse_shared(name, before, fingerprint)
    values = {"generation": latest + 1, "carried_out": now, "before": json.dumps(before), "after": text}
    connection.execute(sa.update(acts).where(acts.c.id == announced).values(values))
    return latest + 1, text


def sketches(connection: Connection) -> list[list[str]]:
    """The sketches of all plans that have one."""
    rows = connection.scalars(sa.select(plans.c.fingerprint).where(plans.c.fingerprint.is_not(None)))
    return [json.loads(text) for text in rows]


def refuse_shared(name: str, before: Sequence[str], after: Sequence[str]) -> None:
    """`PlanMismatch` if two sketches share an owner."""
    if set(before) & set(after):
        raise PlanMismatch(
            f"the budget {name!r} cannot start afresh: its store shares owners with the data of an older plan in this "
            "ledger, so their losses add up; nothing was charged"
        )


def holds(connection: Connection, gone: Sequence[str]) -> bool:
    """Whether a sketch has one of these hashes."""
    texts = [*connection.scalars(sa.select(plans.c.fingerprint))]
    texts += [text for row in connection.execute(sa.select(acts.c.before, acts.c.after)) for text in row]
    return any(set(gone) & set(json.loads(text)) for text in texts if text)


def drop(connection: Connection, gone: Sequence[str], left: Sequence[str]) -> None:
    """Take the hashes of an owner who was forgotten out of every sketch.

    A plan whose sketch had one of them was made on this owner's store, so hashes of those who are ``left`` there take
    their places: a later fresh start finds them as before.
    """
    out = set(gone)
    rows = connection.execute(sa.select(plans.c.id, plans.c.fingerprint).where(plans.c.fingerprint.is_not(None)))
    for plan_id, text in rows.all():
        sketch = set(json.loads(text))
        if sketch & out:
            now = json.dumps(heapq.nsmallest(SKETCH, (sketch - out) | set(left)))
            connection.execute(sa.update(plans).where(plans.c.id == plan_id).values(fingerprint=now))
    for act in connection.execute(sa.select(acts.c.id, acts.c.before, acts.c.after)).all():
        for column in ("before", "after"):
            marks = json.loads(getattr(act, column) or "[]")
            if out & set(marks):
                kept = json.dumps([mark for mark in marks if mark not in out])
                connection.execute(sa.update(acts).where(acts.c.id == act.id).values({column: kept}))


def neighbours(stored: Sequence[StoredPlan], name: str) -> list[str]:
    """The names of other plans whose sketch shares an owner with this plan's."""
    mine = {mark for plan in stored if plan.name == name for mark in json.loads(plan.fingerprint or "[]")}
    return [plan.name for plan in stored if plan.name != name and mine & set(json.loads(plan.fingerprint or "[]"))]


def same_data(stored: Sequence[StoredPlan], generation: int) -> list[StoredPlan]:
    """The plans of a generation, and those of others that are seen to share an owner with one of them."""
    chosen = [plan for plan in stored if plan.generation == generation]
    rest = [plan for plan in stored if plan.generation != generation]
    while True:
        marks = {mark for plan in chosen for mark in json.loads(plan.fingerprint or "[]")}
        more = [plan for plan in rest if marks & set(json.loads(plan.fingerprint or "[]"))]
        if not more:
            return sorted(chosen, key=lambda plan: plan.id)
        chosen += more
        rest = [plan for plan in rest if plan not in more]


def total(stored: Sequence[StoredPlan], spent: Mapping[int, Mapping[str, int]]) -> Total:
    """Compose plans; ``spent`` gives each line's releases (of whoever spent most, in a ``per_principal`` plan)."""
    shares: list[PlanShare] = []
    schedule: list[Line] = []
    deltas: list[float] = []
    filter_epsilons: list[float] = []
    filter_deltas: list[float] = []
    for item in stored:
        counts = dict(spent[item.id])
        if item.is_filter:
            content = json.loads(item.content)
            epsilon, delta = content["epsilon"], content["delta"]
            if any(counts.values()):
                filter_epsilons.append(epsilon)
                filter_deltas.append(delta)
        else:
            try:
                plan = PrivacyPlan.from_json(item.content)
                # Where owners pay with tickets, one has paid for each query at most, and never more than it has.
                most = {name: min(counts[name], line.count) for name, line in plan.lines.items()}
                schedule += [line.line(line.parameter, most[name]) for name, line in plan.lines.items()]
            except KeyError:
                raise LedgerError(f"the ledger has lost a plan's lines; {ADVICE}") from None
            epsilon, delta = plan.epsilon, plan.delta
            if any(counts.values()):
                deltas.append(delta)
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
    at, together = _compose([line for line in schedule if line.count], deltas)
    assumed = NOT_COLLUDING if any(item.scope == "per_principal" for item in stored) else COLLUDING
    return Total(
        epsilon=_sum(together, *filter_epsilons),
        delta=_sum(at, *filter_deltas),
        promised_epsilon=_sum(*(share["epsilon"] for share in shares)),
        promised_delta=_sum(*(share["delta"] for share in shares)),
        assumption=assumed,
        plans=shares,
    )


def _compose(schedule: Sequence[Line], deltas: Sequence[float]) -> tuple[float, float]:
    """(delta, epsilon) of these releases, at the largest delta where that is finite, else at their sum."""
    if not schedule:
        return 0.0, 0.0
    largest, together = max(deltas), min(0.999, _sum(*deltas))
    epsilon = PLDAccountant().epsilon(schedule, largest)
    if math.isfinite(epsilon):
        return largest, epsilon
    return together, PLDAccountant().epsilon(schedule, together)


def _sum(*values: float) -> float:
    """The sum, rounded up where adding rounds at all."""
    answer = math.fsum(values)
    return answer if sum(value != 0.0 for value in values) < 2 else math.nextafter(answer, math.inf)


def users_line() -> int:
    """The ``stacklevel`` of the caller's warning: the first line that is neither this package's nor LangChain's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(("langchain_dpicl", "langchain_core")):
        level, frame = level + 1, frame.f_back
    return level
