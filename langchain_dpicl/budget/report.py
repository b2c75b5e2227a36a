"""What a ledger holds, as plain data: for the command line, for exports, for a compliance report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

from langchain_dpicl.budget.budget import Budget, PrivacyBudget
from langchain_dpicl.budget.ledger import UNWATCHED
from langchain_dpicl.budget.receipt import Receipt, parse_release_id, read_receipt, release_id
from langchain_dpicl.budget.renewal import StoredPlan, assumption
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.budget.tickets import WARNING
from langchain_dpicl.errors import InvalidParameter

FIELDS = (
    *("time", "id", "budget", "plan", "line", "principal", "number", "units", "spent", "outcome", "mechanism"),
    *("epsilon_spent", "epsilon", "delta", "remaining", "query", "assumption"),
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
        """Every budget as it stands, the totals of those on the same data, and the fresh starts.

        In a ``per_principal`` plan: the lines of each principal, and the largest epsilon.
        """
        budgets, totals, acts = [], {}, []
        for plan in self.chosen(name):
            row: dict[str, Any] = {
                "name": plan.name,
                "plan": plan.digest[:16],
                "kind": "filter" if plan.is_filter else "plan",
                "tickets": bool(plan.tickets),
                "scope": plan.scope,
                "assumption": assumption(plan.scope),
                "created": plan.created,
                "generation": plan.generation,
            }
            with self._open(plan.name) as budget:
                row |= {"epsilon": budget.epsilon, "delta": budget.delta}
                if plan.scope == "shared":
                    row |= {"epsilon_spent": budget.epsilon_spent(), "lines": budget.lines()}
                else:
                    spent = {who: budget.epsilon_spent(who) for who in budget.principals()}
                    row["epsilon_spent"] = max(spent.values(), default=0.0)
                    row["principals"] = {
                        who: {"epsilon_spent": each, "lines": budget.lines(who)} for who, each in spent.items()
                    }
                    lines = {} if budget.plan is None else budget.plan.lines
                    row["lines"] = {
                        key: {"count": line.count, "mechanism": line.mechanism} for key, line in lines.items()
                    }
                if plan.generation not in totals:
                    totals[plan.generation] = {"generation": plan.generation, **budget.total()}
            budgets.append(row)
        for act in self._ledger.acts():
            told = asdict(act)
            del told["id"]
            sketches = {when: json.loads(told.pop(when) or "null") for when in ("before", "after")}
            acts.append({"budget": told.pop("name"), **told, "sketches": sketches})
        by_generation = [total for _, total in sorted(totals.items())]
        return {"ledger": self._ledger.shown, "budgets": budgets, "totals": by_generation, "acts": acts}

    def history(self, name: str | None = None) -> Iterator[dict[str, Any]]:
        """Every release, budget by budget and counter by counter, in the order of their numbers."""
        for plan in self.chosen(name):
            spent: dict[int, int] = {}
            for release in self._ledger.history(plan.id):
                counter = release.counter_id
                spent[counter] = spent.get(counter, 0) + release.units
                receipt = {} if release.receipt is None else dict(read_receipt(release.receipt))
                known = {
                    "id": release_id(plan.name, release.line, release.principal, counter, release.number),
                    "budget": plan.name,
                    "plan": plan.digest[:16],
                    "line": release.line,
                    "principal": release.principal or None,
                    "number": release.number,
                    "assumption": assumption(plan.scope),
                    "outcome": UNANSWERED,
                    **receipt,
                    "time": release.charged,
                    "units": release.units,
                    "spent": spent[counter],
                }
                known["outcome"] = release.outcome or known["outcome"]
                yield {field: known.get(field) for field in FIELDS}

    def receipt(self, id_: str) -> Receipt | None:
        """The receipt with this id, of any budget."""
        known = parse_release_id(id_)
        if known is None or known[0] not in [plan.name for plan in self.stored]:
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
