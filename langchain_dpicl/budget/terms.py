"""The policy of a budget towards its callers, and its words for them: states, receipts, totals."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from typing_extensions import TypedDict

from langchain_dpicl.budget.opening import is_behind
from langchain_dpicl.budget.schema import ADVICE, StoredPlan
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.errors import InvalidParameter, LedgerError, PlanMismatch
from langchain_dpicl.privacy import Line, LineRequest, PLDAccountant, PrivacyPlan, checks
from langchain_dpicl.privacy.mechanism import Options
from langchain_dpicl.sql import NAME, is_name
from langchain_dpicl.store.notes import OpenedBudget

Scope = Literal["shared", "per_principal"]
Replay = bool | Literal["principal"]
OnExhausted = Literal["raise", "zero_shot"]
_CHOICES: dict[str, tuple[object, ...]] = {
    "scope": ("shared", "per_principal"),
    "on_exhausted": ("raise", "zero_shot"),
    "replay": (True, False, "principal"),
    "keep_queries": (True, False),
    "record_principals": (True, False),
}


class SoftLimit(TypedDict):
    """The argument of ``on_soft_limit``."""

    budget: str
    line: str
    principal: str | None
    spent: int
    count: int
    remaining: int


class LineState(TypedDict):
    """A line of the budget as it stands."""

    count: int
    """Its releases in all; if owners pay with tickets, the tickets of each owner."""
    spent: int
    remaining: int | None
    """None if owners pay with tickets: the line has no end."""
    mechanism: str | None


class Preview(TypedDict):
    """The effect of ``n`` further releases."""

    releases: int
    fits: bool
    epsilon_after: float
    remaining_after: int | None


@dataclass(frozen=True)
class Policy:
    """The parameters of `PrivacyBudget` that are not part of its plan, checked. ``scope`` alone is frozen with it."""

    scope: Scope = "shared"
    replay: Replay = True
    replay_patience: float = 300.0
    keep_queries: bool = False
    on_exhausted: OnExhausted = "raise"
    soft_limit: float | None = None
    on_soft_limit: Callable[[SoftLimit], Any] | None = None
    quota: int | Mapping[str, int] | None = None
    record_principals: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                raise InvalidParameter(name, value, " or ".join(map(repr, choices)))
        object.__setattr__(self, "replay_patience", checks.real("replay_patience", self.replay_patience, at_least=0.0))
        if self.soft_limit is not None:
            object.__setattr__(self, "soft_limit", checks.real("soft_limit", self.soft_limit, above=0.0, at_most=1.0))
        if self.on_soft_limit is not None and not callable(self.on_soft_limit):
            raise InvalidParameter("on_soft_limit", type(self.on_soft_limit).__name__, "a function of one argument")
        if self.quota is None:
            return
        if self.scope == "per_principal":
            raise InvalidParameter("quota", self.quota, "None if each caller has a counter of its own")
        limits = self.quota if isinstance(self.quota, Mapping) else {"": self.quota}
        for name, most in limits.items():
            checks.whole(f"quota[{name!r}]" if name else "quota", most)

    def principal(self, principal: str | None) -> str:
        """The key of a request's counter: "" if all callers share one. `InvalidParameter` if no principal is set."""
        return "" if self.scope == "shared" else _checked(principal, "counts each one's releases")

    def caller(self, principal: str | None) -> str:
        """The caller who sees the answer to a request: "" if all callers do. `InvalidParameter` if none is set."""
        if self.scope == "shared" and self.replay == "principal":
            return _checked(principal, "replays an answer to the caller who asked for it")
        return self.principal(principal)

    def most(self, principal: str | None) -> int | None:
        """The most answers that a caller gets of each line; None: no limit. `InvalidParameter` if no principal is set.

        A caller whom a mapping does not name has no limit of its own.
        """
        if self.quota is None:
            return None
        name = _checked(principal, "limits what each one takes")
        return self.quota.get(name) if isinstance(self.quota, Mapping) else self.quota


def _checked(principal: str | None, reason: str) -> str:
    if not is_name(principal):
        raise InvalidParameter(
            "principal",
            principal,
            f"the authenticated caller, {NAME} (see acting_for): this budget {reason}",
        )
    return principal


def different(known: Mapping[str, object], asked: Mapping[str, object]) -> str:
    """The values that are not as asked, in words; "" if all are. Only values that both have are compared."""
    names = [name for name in known if name in asked and known[name] != asked[name]]
    return ", ".join(f"{name} {known[name]!r} (asked: {asked[name]!r})" for name in names)


def values_of(line: LineRequest, defaults: Options | None = None) -> dict[str, object]:
    """The values of a line that declarations may choose. ``owners``: the number that its rate was computed from."""
    if defaults is None:
        defaults = line.family.left_out()
    return {
        "mechanism": line.mechanism,
        "rate": line.rate,
        "owners": line.owners,
        "weight": line.weight,
        **{option_name(key): value for key, value in {**defaults, **line.options}.items()},
    }


def option_name(name: str) -> str:
    return f"options[{name!r}]"


# -- receipts ----------------------------------------------------------------------------------------------------------


class Receipt(TypedDict):
    """One release's receipt, kept in the ledger. Public: it holds no answer, and no query unless the deployer asks."""

    id: str
    """``budget:line:number``, or ``budget:line:counter.number`` for one principal's; unique in its ledger."""
    budget: str
    plan: str
    """The first 16 hex digits of the SHA-256 of the plan's content."""
    line: str
    number: int
    """The release's number on its line, from 1; on a line that counts tokens the last of the numbers it charged."""
    principal: str | None
    """The principal whose releases are counted; None if all callers share one counter."""
    assumption: str
    """The guarantee's assumption about the callers, in words."""
    mechanism: str
    """Mechanism and noise, in words."""
    epsilon_spent: float
    """Upper bound for everything released on this budget so far, on all its lines, at the plan's delta."""
    epsilon: float
    delta: float
    remaining: int | None
    """Releases (tokens) left on this line just after this charge, less the tokens that it never sampled. None if owners
    pay with tickets: such a line has no end."""
    tokens: int | None
    """The number of tokens that it counts for, on a line that counts them."""
    outcome: str
    """"released", or in words the answer that was given instead."""
    replayed: bool
    """True if this is an earlier release's receipt, whose answer was given once more at no cost."""
    query: str | None
    """A keyed hash of the query (its text if the deployer keeps queries), if there was one."""
    time: str
    """When it was charged: UTC, ISO 8601, from the machine's clock. Nothing is computed from it."""


@dataclass(frozen=True)
class Replayed:
    """An answer that was released before: given again, byte for byte, at no cost."""

    answer: str
    receipt: Receipt


RECORDED = "recorded_principal"
"""Beside a receipt in the ledger: who asked, if the budget records principals. For the ledger's holder alone."""


def read_receipt(text: str, *, replayed: bool = False) -> Receipt:
    """A receipt as the ledger holds it, without the recorded principal: another caller may get it by a replay."""
    found = json.loads(text)
    found.pop(RECORDED, None)
    return cast("Receipt", {**found, "replayed": replayed})


def recorded_principal(text: str | None) -> str | None:
    """Return who asked, of a receipt as the ledger holds it; None if that was not recorded."""
    found: str | None = json.loads(text or "{}").get(RECORDED)
    return found


# -- other plans on the same data --------------------------------------------------------------------------------------


class PlanShare(TypedDict):
    """One plan's part of a total."""

    name: str
    plan: str
    ledger: str | None
    """The address of another ledger; None for this one."""
    scope: str
    epsilon: float
    delta: float
    spent: dict[str, int]


class Total(TypedDict):
    """The loss of all plans together.

    ``epsilon`` at ``delta``: the composition of everything released so far, certified if each plan's parameters were
    chosen without looking at another plan's answers. ``delta`` is the largest of the plans' deltas (their sum, if
    failure probabilities alone pass the largest), plus that of each budget whose ledger cannot be read: all of it
    counts as spent, and its epsilon adds up as a whole.
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


class PlanUse(NamedTuple):
    """A plan of a total.

    ``ledger``: the address of another ledger that holds it. ``spent``: each line's releases, by the principal who has
    spent most of it. ``is_used``: True if anything was charged.
    """

    ledger: str | None
    plan: StoredPlan
    spent: dict[str, int]
    is_used: bool


def plan_of(stored: StoredPlan) -> PrivacyPlan:
    """The plan that a ledger holds. `PlanMismatch` for a budget without one, which only earlier versions made."""
    if json.loads(stored.content).get("format") == "filter-1":
        raise PlanMismatch(
            f"the budget {stored.name!r} has no plan: an earlier version made it for noise that is chosen release by "
            "release, which no version does any more; nothing was charged. Use another name"
        )
    return PrivacyPlan.from_json(stored.content)


def use_of(ledger: StoredLedger, plan: StoredPlan, url: str | None = None) -> PlanUse:
    """A plan of this ledger and its spent releases. ``url``: the ledger's, if it is another budget's."""
    return PlanUse(url, plan, ledger.most_spent(plan.id), ledger.has_spent(plan))


def elsewhere(budget: OpenedBudget) -> PlanUse | OpenedBudget | None:
    """A budget of another ledger: its plan with what was spent; itself if nobody can tell; None if it was removed."""
    found: PlanUse | OpenedBudget | None = budget
    with contextlib.suppress(LedgerError, InvalidParameter), contextlib.closing(StoredLedger(budget.url)) as ledger:
        if ledger.identity == budget.ledger and not is_behind(ledger, budget.name):
            plan = ledger.find_plan(budget.name)
            if plan is not None:
                found = use_of(ledger, plan, budget.url)
            elif ledger.was_removed(budget.name):
                found = None
    return found


def total(parts: Sequence[PlanUse], promised: Sequence[OpenedBudget] = ()) -> Total:
    """Compose these plans. Of the ``promised`` budgets nobody knows what was spent: all of each counts."""
    shares: list[PlanShare] = []
    schedule: list[Line] = []
    deltas: list[float] = []
    wholly: list[tuple[float, float]] = []
    for ledger, item, counts, _ in parts:
        plan = plan_of(item)
        if not plan.lines.keys() <= counts.keys():
            raise LedgerError(f"the ledger has lost a plan's lines; {ADVICE}")
        most = plan.at_most({name: counts[name] for name in plan.lines})
        schedule += [line.line(line.parameter, most[name]) for name, line in plan.lines.items() if most[name]]
        if any(counts.values()):
            deltas.append(plan.delta)
        shares.append(
            PlanShare(
                name=item.name,
                plan=item.digest[:16],
                ledger=ledger,
                scope=item.scope,
                epsilon=plan.epsilon,
                delta=plan.delta,
                spent=counts,
            )
        )
    for budget in promised:
        if budget.epsilon is None or budget.delta is None:
            raise LedgerError(
                f"the ledger {budget.url!r} cannot be read, and an earlier version did not write down what its budget "
                f"{budget.name!r} promised: put it back in its place"
            )
        wholly.append((budget.epsilon, budget.delta))
        shares.append(
            PlanShare(
                name=budget.name,
                plan="",
                ledger=budget.url,
                scope="shared",
                epsilon=budget.epsilon,
                delta=budget.delta,
                spent={},
            )
        )
    at = together = 0.0
    if schedule:  # at the largest delta if that gives a finite epsilon, else at the sum of all
        at = max(deltas)
        together = PLDAccountant().epsilon(schedule, at)
        if not math.isfinite(together):
            at = min(0.999, _sum(deltas))
            together = PLDAccountant().epsilon(schedule, at)
    each = any(share["scope"] == "per_principal" for share in shares)
    return Total(
        epsilon=_sum([together, *(epsilon for epsilon, _ in wholly)]),
        delta=_sum([at, *(delta for _, delta in wholly)]),
        promised_epsilon=_sum([share["epsilon"] for share in shares]),
        promised_delta=_sum([share["delta"] for share in shares]),
        assumption=assumption("per_principal" if each else "shared"),
        plans=shares,
    )


def _sum(values: Sequence[float]) -> float:
    """The sum, rounded up if adding rounds at all."""
    answer = math.fsum(values)
    is_rounded = sum(value != 0.0 for value in values) > 1
    return math.nextafter(answer, math.inf) if is_rounded else answer


# -- the private report of tickets ------------------------------------------------------------------------------------


WARNING = "PRIVATE: for the deployer alone. Nothing of it may be shown, published, or used to choose public numbers"


class LineTickets(TypedDict):
    """The numbers of owners by their used tickets, of one line, and principal if each has a counter. PRIVATE."""

    private: str
    tickets: int
    """The tickets of every owner."""
    owners: int
    """Owners who were ever eligible for its queries, and are not forgotten. All others have all their tickets."""
    without: int
    """The number of these who have none left: they are left out."""
    burnt: dict[str, int]
    """The number of these by their used tickets, ascending."""
    share_with_tickets: float | None
    """The share of these who have tickets left; None if there are none."""


TicketReport = dict[str, dict[str, LineTickets]]
"""By line, and by principal ("" if all share one counter)."""


def ticket_bins(burnt: Mapping[str, int], tickets: int, most: int) -> list[tuple[int, int, int]]:
    """The numbers of owners by their used tickets: from, to, and the number. Private.

    At most ``most`` bins of one width for owners who have some left, and a last one for owners who have none.
    """
    width = -(-tickets // most)
    ranges = [(low, min(low + width, tickets) - 1) for low in range(0, tickets, width)]
    used = [(min(int(number), tickets), owners) for number, owners in burnt.items()]
    return [
        (low, high, sum(owners for number, owners in used if low <= number <= high))
        for low, high in [*ranges, (tickets, tickets)]
    ]
