"""What a ledger holds, as plain data: for the command line, for exports, for a compliance report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

from langchain_dpicl.budget import renewal
from langchain_dpicl.budget.budget import Budget, PrivacyBudget
from langchain_dpicl.budget.ledger import UNWATCHED
from langchain_dpicl.budget.receipt import Receipt, parse_release_id, read_receipt, release_id
from langchain_dpicl.budget.renewal import StoredPlan
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.budget.ticket_report import WARNING
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
    """Reads a ledger that exists. `LedgerError` if there is none."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ledger = StoredLedger(url)
        self.stored = self._ledger.plans()

    def chosen(self, name: str | None) -> list[StoredPlan]:
        """The plan of this name, or all. `InvalidParameter` lists the names."""
        found = [plan for plan in self.stored if name in (None, plan.name)]
        if name is not None and not found:
            known = ", ".join(repr(plan.name) for plan in self.stored) or "none"
            raise InvalidParameter("name", name, f"a plan of this ledger: {known}")
        return found

    def _open(self, name: str) -> closing[Budget]:
        return closing(PrivacyBudget.open(name, self._url, witness=UNWATCHED))

    def show(self, name: str | None = None) -> dict[str, Any]:
        """Every budget as it stands, the totals of those on the same data, and the fresh starts."""
        budgets, totals, acts = [], [], []
        for plan in self.chosen(name):
            with self._open(plan.name) as budget:
                budgets.append({**_facts(plan), "epsilon": budget.epsilon, "delta": budget.delta, **_spent(budget)})
        for generation in sorted({plan.generation for plan in self.chosen(name)}):
            same = renewal.same_data(self.stored, generation)
            spent = {plan.id: self._ledger.most_spent(plan.id) for plan in same}
            totals.append({"generation": generation, **renewal.total(same, spent)})
        for act in self._ledger.acts():
            row = asdict(act)
            del row["id"]
            sketches = {when: json.loads(row.pop(when) or "null") for when in ("before", "after")}
            acts.append({"budget": row.pop("name"), **row, "sketches": sketches})
        return {"ledger": self._ledger.shown, "budgets": budgets, "totals": totals, "acts": acts}

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
                    row |= {field: receipt[field] for field in FIELDS[1:] if field in receipt}
                    row["outcome"] = release.outcome or receipt["outcome"]
                yield row

    def receipt(self, id_: str) -> Receipt | None:
        """The receipt with this id, of any budget."""
        known = parse_release_id(id_)
        if known is None or known.budget not in [plan.name for plan in self.stored]:
            return None
        with self._open(known.budget) as budget:
            return budget.receipt(id_)

    def tickets(self, name: str) -> dict[str, Any]:
        """The used tickets of the budget of this name, by line and principal. PRIVATE, for the deployer alone.

        `InvalidParameter` if there is no such budget, or if its owners pay with no tickets.
        """
        with self._open(name) as budget:
            found = budget.private_ticket_report()
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


def _facts(plan: StoredPlan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "plan": plan.digest[:16],
        "kind": "filter" if plan.is_filter else "plan",
        "tickets": bool(plan.tickets),
        "scope": plan.scope,
        "assumption": renewal.assumption(plan.scope),
        "created": plan.created,
        "generation": plan.generation,
    }


def _spent(budget: Budget) -> dict[str, Any]:
    """The lines as they stand, and epsilon; in a ``per_principal`` plan by principal, and the largest epsilon."""
    if budget.scope == "shared":
        return {"epsilon_spent": budget.epsilon_spent(), "lines": budget.lines()}
    principals: dict[str, dict[str, Any]] = {
        who: {"epsilon_spent": budget.epsilon_spent(who), "lines": budget.lines(who)} for who in budget.principals()
    }
    most = max((each["epsilon_spent"] for each in principals.values()), default=0.0)
    lines = {} if budget.plan is None else budget.plan.lines
    empty = {name: {"count": line.count, "mechanism": line.mechanism} for name, line in lines.items()}
    return {"epsilon_spent": most, "principals": principals, "lines": empty}
