"""What a ledger holds, as plain data: for the command line, for exports, for a compliance report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from langchain_dpicl.budget import renewal
from langchain_dpicl.budget.budget import PrivacyBudget
from langchain_dpicl.budget.ledger import UNWATCHED, Ledger
from langchain_dpicl.budget.receipt import Receipt, read_receipt, release_id
from langchain_dpicl.budget.renewal import StoredPlan
from langchain_dpicl.budget.tickets import WARNING
from langchain_dpicl.errors import InvalidParameter

FIELDS = (
    "time",
    "id",
    "budget",
    "plan",
    "line",
    "principal",
    "number",
    "units",
    "spent",
    "outcome",
    "mechanism",
    "epsilon_spent",
    "epsilon",
    "delta",
    "remaining",
    "query",
    "assumption",
)
"""What `history` says of every release, in this order. Of one that was charged and never answered, some are None.

``units`` is what it counts for now: 1, or its tokens. ``spent`` adds them up over its counter, in the order of numbers.
"""

UNANSWERED = "charged, not answered"


class LedgerReport:
    """Reads a ledger that exists. `LedgerError` where there is none."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ledger = Ledger(url, create=False)
        self.stored = self._ledger.plans()

    def chosen(self, name: str | None) -> list[StoredPlan]:
        """The plan of this name, or all. `InvalidParameter` lists the names."""
        found = [plan for plan in self.stored if name in (None, plan.name)]
        if name is not None and not found:
            known = ", ".join(repr(plan.name) for plan in self.stored) or "none"
            raise InvalidParameter("name", name, f"a plan of this ledger: {known}")
        return found

    def show(self, name: str | None = None) -> dict[str, Any]:
        """Every budget as it stands, what those on the same data add up to, and the fresh starts."""
        chosen = self.chosen(name)
        totals = []
        for generation in sorted({plan.generation for plan in chosen}):
            same = renewal.same_data(self.stored, generation)
            spent = {plan.id: self._ledger.most_spent(plan.id) for plan in same}
            totals.append({"generation": generation, **renewal.total(same, spent)})
        acts = [
            {
                "budget": act.name,
                "reason": act.reason,
                "announced": act.announced,
                "carried_out": act.carried_out,
                "generation": act.generation,
                "sketches": {"before": _marks(act.before), "after": _marks(act.after)},
            }
            for act in self._ledger.acts()
        ]
        return {
            "ledger": self._ledger.shown,
            "budgets": [*map(self._budget, chosen)],
            "totals": totals,
            "acts": acts,
        }

    def _budget(self, stored: StoredPlan) -> dict[str, Any]:
        budget = PrivacyBudget.open(stored.name, self._url, witness=UNWATCHED)
        try:
            spent_by = budget.principals()
            entry: dict[str, Any] = {
                "name": stored.name,
                "plan": stored.digest[:16],
                "kind": "filter" if stored.is_filter else "plan",
                "tickets": bool(stored.tickets),
                "epsilon": budget.epsilon,
                "delta": budget.delta,
                "scope": stored.scope,
                "assumption": renewal.assumption(stored.scope),
                "created": stored.created,
                "generation": stored.generation,
            }
            if stored.scope == "shared":
                return {**entry, "epsilon_spent": budget.epsilon_spent(), "lines": budget.lines()}
            each = {who: {"epsilon_spent": budget.epsilon_spent(who), "lines": budget.lines(who)} for who in spent_by}
            most = max((budget.epsilon_spent(who) for who in spent_by), default=0.0)
            return {**entry, "epsilon_spent": most, "principals": each, "lines": _empty_lines(budget)}
        finally:
            budget.close()

    def history(self, name: str | None = None) -> Iterator[dict[str, Any]]:
        """Every release, budget by budget and counter by counter, in the order of their numbers."""
        for plan in self.chosen(name):
            spent: dict[int, int] = {}
            for release in self._ledger.history(plan.id):
                spent[release.counter_id] = spent.get(release.counter_id, 0) + release.units
                row: dict[str, Any] = dict.fromkeys(FIELDS)
                row |= {
                    "time": release.charged,
                    "id": release_id(plan.name, release.line, release.principal, release.counter_id, release.number),
                    "budget": plan.name,
                    "plan": plan.digest[:16],
                    "line": release.line,
                    "principal": release.principal or None,
                    "number": release.number,
                    "units": release.units,
                    "spent": spent[release.counter_id],
                    "outcome": release.outcome or UNANSWERED,
                    "assumption": renewal.assumption(plan.scope),
                }
                if release.receipt is not None:
                    receipt: dict[str, Any] = dict(read_receipt(release.receipt))
                    row |= {field: receipt.get(field) for field in FIELDS[1:] if field in receipt}
                    row["outcome"] = release.outcome or receipt["outcome"]
                yield row

    def receipt(self, id_: str) -> Receipt | None:
        """The receipt with this id, of whichever budget."""
        name = id_.rsplit(":", 2)[0]
        if name not in [plan.name for plan in self.stored]:
            return None
        budget = PrivacyBudget.open(name, self._url, witness=UNWATCHED)
        try:
            return budget.receipt(id_)
        finally:
            budget.close()

    def tickets(self, name: str) -> dict[str, Any]:
        """What owners have burnt on the budget of this name, by line and principal. PRIVATE, for the deployer alone.

        `InvalidParameter` where there is no such budget, or where owners pay for nothing on it.
        """
        budget = PrivacyBudget.open(name, self._url, witness=UNWATCHED)
        try:
            found = budget.private_ticket_report()
        finally:
            budget.close()
        lines: dict[str, Any] = {}
        for line, by_principal in found.items():
            lines[line] = {}
            for who, of in by_principal.items():
                share = 1.0 - of["without"] / of["owners"] if of["owners"] else None
                lines[line][who] = {**of, "share_with_tickets": share}
        return {"private": WARNING, "budget": name, "lines": lines}

    def close(self) -> None:
        """Close the connections."""
        self._ledger.close()


def ticket_bins(burnt: Mapping[str, int], tickets: int, most: int) -> list[tuple[int, int, int]]:
    """Owners by the tickets that they have burnt: from, to, and how many owners.

    At most ``most`` bins of one width for those who have some left, and a last one for those who have none. Private.
    """
    width = -(-tickets // most)
    used = [(int(number), owners) for number, owners in burnt.items()]
    bins = []
    for low in range(0, tickets, width):
        high = min(low + width, tickets) - 1
        bins.append((low, high, sum(owners for number, owners in used if low <= number <= high)))
    return [*bins, (tickets, tickets, sum(owners for number, owners in used if number >= tickets))]


def _marks(text: str | None) -> list[str] | None:
    return None if text is None else json.loads(text)


def _empty_lines(budget: PrivacyBudget) -> dict[str, dict[str, Any]]:
    plan = budget.plan
    lines = {} if plan is None else plan.lines
    return {name: {"count": line.count, "mechanism": line.mechanism} for name, line in lines.items()}
