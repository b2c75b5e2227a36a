"""Lines of a plan whose schedule is fixed in advance: what their releases cost."""

from __future__ import annotations

from collections.abc import Mapping

from langchain_dpicl.budget.claims import Charge
from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.budget.line import BudgetLine
from langchain_dpicl.budget.policy import Policy
from langchain_dpicl.budget.tickets import Tickets
from langchain_dpicl.privacy import PrivacyPlan


class PlannedLine(BudgetLine):
    """A line of a plan whose schedule is fixed in advance."""

    def __init__(
        self,
        budget_name: str,
        ledger: Ledger,
        plan_id: int,
        plan: PrivacyPlan,
        name: str,
        policy: Policy,
        tickets: Tickets | None = None,
    ) -> None:
        super().__init__(budget_name, ledger, plan_id, plan.digest, name, plan.lines[name], policy, tickets)
        self.plan = plan

    @property
    def _counts_others(self) -> bool:
        return len(self.plan.lines) > 1

    @property
    def _target(self) -> tuple[float, float]:
        return self.plan.epsilon, self.plan.delta

    def _epsilon_of(self, charge: Charge, spent: int) -> float:
        return self.plan.spent(at_most(self.plan, {**charge.others, self.name: spent}))

    def epsilon_after(self, releases: int, principal: str | None = None) -> float:
        """Upper bound on epsilon at the plan's delta after so many releases of this line, and what others spent."""
        others: Mapping[str, int] = {}
        if self._counts_others:
            others = self._ledger.spent(self.plan_id, self._policy.principal(principal))
        counts = {**others, self.name: releases}
        return self.plan.spent(at_most(self.plan, counts) if self.has_tickets else counts)


def at_most(plan: PrivacyPlan, counts: Mapping[str, int]) -> dict[str, int]:
    """What an owner has paid at most: one ticket for each query so far, and no more than it has."""
    return {line: min(count, plan.lines[line].count) for line, count in counts.items()}
