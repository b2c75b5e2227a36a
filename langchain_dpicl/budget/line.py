"""One line of a frozen plan, with its counter."""

from __future__ import annotations

import json
from collections.abc import Mapping

from langchain_dpicl.budget.ledger import Charge, Ledger
from langchain_dpicl.budget.receipt import Receipt
from langchain_dpicl.errors import PrivacyBudgetExceeded
from langchain_dpicl.privacy import PrivacyPlan


class BudgetLine:
    """One line of a frozen plan, with its counter."""

    def __init__(self, budget_name: str, ledger: Ledger, plan_id: int, plan: PrivacyPlan, name: str) -> None:
        self.plan = plan
        self.name = name
        self.plan_line = item = plan.lines[name]
        self.mechanism = item.mechanism
        self.rate = item.rate
        self.parameter = item.parameter
        self.count = item.count
        self.options: Mapping[str, float] = item.options
        self.plan_id = plan_id
        self._budget_name = budget_name
        self._ledger = ledger
        self._words = item.describe()

    def charge(self, count: int = 1) -> list[Charge]:
        """Charge ``count`` releases durably, all or none. Raises `PrivacyBudgetExceeded`, which costs nothing."""
        charges = self._ledger.charge(self.plan_id, self.name, count, others=len(self.plan.lines) > 1)
        if not charges:
            left = self.count - self.spent()
            where = f" on the line {self.name!r}" if len(self.plan.lines) > 1 else ""
            raise PrivacyBudgetExceeded(
                f"the budget {self._budget_name!r} has {left} of {self.count} releases left{where}, and {count} are "
                "needed: nothing was released and nothing charged"
            )
        return charges

    def record(self, charge: Charge, outcome: str = "released") -> Receipt:
        """Write and return the receipt of a release; ``outcome`` says what came of it."""
        receipt: Receipt = {
            "id": f"{self._budget_name}:{self.name}:{charge.number}",
            "budget": self._budget_name,
            "plan": self.plan.digest[:16],
            "line": self.name,
            "number": charge.number,
            "mechanism": self._words,
            "epsilon_spent": self.plan.spent({**charge.others, self.name: charge.number}),
            "epsilon": self.plan.epsilon,
            "delta": self.plan.delta,
            "remaining": self.count - charge.number,
            "outcome": outcome,
            "time": charge.time,
        }
        self._ledger.record(charge, json.dumps(receipt))
        return receipt

    def spent(self) -> int:
        """Releases charged on this line."""
        return self._ledger.spent(self.plan_id)[self.name]

    def epsilon_after(self, releases: int) -> float:
        """Upper bound on epsilon at the plan's delta after so many releases of this line, and what others spent."""
        others = self._ledger.spent(self.plan_id) if len(self.plan.lines) > 1 else {}
        return self.plan.spent({**others, self.name: releases})
