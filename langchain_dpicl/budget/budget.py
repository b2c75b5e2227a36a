"""PrivacyBudget: epsilon and delta in, a counted number of releases out."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import cast

from typing_extensions import TypedDict

from langchain_dpicl.budget.ledger import Charge, Ledger, StoredPlan
from langchain_dpicl.budget.receipt import Receipt
from langchain_dpicl.errors import DPICLError, InvalidParameter, LedgerError, PlanMismatch, PrivacyBudgetExceeded
from langchain_dpicl.privacy import MECHANISMS, LineRequest, PrivacyPlan, checks


class Preview(TypedDict):
    """What ``n`` further releases would mean."""

    releases: int
    fits: bool
    epsilon_after: float
    remaining_after: int


class PrivacyBudget:
    """A target (epsilon, delta) for ALL releases together, and the durable ledger that enforces it.

    Parameters
    ----------
    epsilon, delta
        The guarantee: everything that is ever released on this budget is (epsilon, delta)-differentially private with
        respect to adding or removing one owner.
    releases
        How many answers the budget is for. The noise is calibrated so that exactly this many fit.
    ledger
        A database URL. SQLite by default; share one ledger between workers.
    name
        The plan's name in the ledger.

    The plan is completed and frozen at first use, when the sampling rate and the mechanism are known; from then on the
    ledger refuses other parameters under this name (`PlanMismatch`). Every release is charged before the first member
    is called, and nothing is ever refunded.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        releases: int,
        ledger: str = "sqlite:///dpicl-budget.db",
        name: str = "default",
    ) -> None:
        self.epsilon = checks.positive("epsilon", epsilon)
        self.delta = checks.open_unit("delta", delta)
        self.releases = checks.whole("releases", releases)
        if not isinstance(name, str) or not name or len(name) > 255:
            raise InvalidParameter("name", name, "a string of 1 to 255 characters")
        self.name = name
        self._ledger = Ledger(ledger)
        self._lock = threading.Lock()
        self._line: BudgetLine | None = None
        self._find_line()

    def _find_line(self) -> BudgetLine | None:
        """The plan's line, from the ledger if another worker has stored the plan since."""
        if self._line is None:
            stored = self._ledger.find_plan(self.name)
            if stored is not None:
                plan = PrivacyPlan.from_json(stored.content)
                (line,) = plan.lines
                asked = {"epsilon": self.epsilon, "delta": self.delta, "releases": self.releases}
                frozen = {"epsilon": plan.epsilon, "delta": plan.delta, "releases": plan.lines[line].count}
                self._refuse_other(frozen, asked)
                self._line = BudgetLine(self, self._ledger, stored, plan, line)
        return self._line

    @property
    def plan(self) -> PrivacyPlan | None:
        """The frozen plan; None before the first use."""
        line = self._find_line()
        return None if line is None else line.plan

    def line(
        self,
        mechanism: str,
        rate: float,
        *,
        rate_is_explicit: bool = False,
        options: Mapping[str, float] | None = None,
    ) -> BudgetLine:
        """The plan's line for a mechanism at a sampling rate; completes and freezes the plan at first use.

        Where the ledger already holds the plan, its rate stands (the number of owners may have changed since); a rate
        that the caller fixed explicitly must agree with it. Raises `PlanMismatch`, `InfeasiblePlan`, `LedgerError`.
        """
        options = dict(options or {})
        with self._lock:
            line = self._find_line()
            if line is None:
                request = LineRequest(mechanism, rate=rate, count=self.releases, options=options)
                plan = PrivacyPlan.solve(epsilon=self.epsilon, delta=self.delta, lines={mechanism: request})
                self._ledger.store_plan(self.name, plan.to_json(), plan.digest, {mechanism: self.releases})
                line = self._find_line()
        if line is None:
            raise LedgerError("the plan could not be stored")
        item = line.plan.lines[line.name]
        frozen: dict[str, object] = {
            "epsilon": line.plan.epsilon,
            "delta": line.plan.delta,
            "releases": item.count,
            "mechanism": item.mechanism,
            "options": dict(item.options),
        }
        asked: dict[str, object] = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "releases": self.releases,
            "mechanism": mechanism,
            "options": options,
        }
        if rate_is_explicit:
            frozen["rate"], asked["rate"] = item.rate, rate
        self._refuse_other(frozen, asked)
        return line

    def _refuse_other(self, frozen: Mapping[str, object], asked: Mapping[str, object]) -> None:
        different = [f"{key} {frozen[key]!r} (asked: {asked[key]!r})" for key in asked if asked[key] != frozen[key]]
        if different:
            raise PlanMismatch(
                f"the budget {self.name!r} was frozen at first use with {', '.join(different)}; "
                "use another name for another plan (both then count: their losses add up)"
            )

    # -- what is spent and left ----------------------------------------------------------------------------------------

    def spent(self) -> int:
        """Releases charged so far, by all workers."""
        line = self._find_line()
        return 0 if line is None else line.spent()

    def remaining(self) -> int:
        """Releases left."""
        return self.releases - self.spent()

    def epsilon_spent(self) -> float:
        """Upper bound on epsilon, at the plan's delta, for the releases charged so far; 0 before the first."""
        line = self._find_line()
        return 0.0 if line is None else line.epsilon_after(line.spent())

    def preview(self, n: int = 1) -> Preview:
        """What ``n`` further releases would cost. Charges nothing. Before first use: the whole plan's epsilon."""
        checks.whole("n", n)
        spent = self.spent()
        fits = spent + n <= self.releases
        after = spent + n if fits else spent
        line = self._find_line()
        epsilon = self.epsilon if line is None else line.epsilon_after(after)
        return {
            "releases": n,
            "fits": fits,
            "epsilon_after": epsilon,
            "remaining_after": self.releases - after,
        }

    def receipt(self, release_id: str) -> Receipt | None:
        """The receipt of an earlier release of this budget, from the ledger; None if there is none."""
        name, line, number = ["", "", "", *release_id.rsplit(":", 2)][-3:]
        found = self._find_line()
        if found is None or name != self.name or not number.isdecimal():
            return None
        text = self._ledger.receipt(found.plan_id, line, int(number))
        return None if text is None else cast("Receipt", json.loads(text))

    def close(self) -> None:
        """Close the ledger's connections."""
        self._ledger.close()

    def __repr__(self) -> str:
        try:
            spent = str(self.spent())
        except DPICLError:  # showing an object must not fail
            spent = "?"
        return (
            f"PrivacyBudget(epsilon={self.epsilon:g}, delta={self.delta:g}, releases={self.releases}, "
            f"name={self.name!r}, spent={spent})"
        )


class BudgetLine:
    """One line of a frozen plan, with its counter."""

    def __init__(self, budget: PrivacyBudget, ledger: Ledger, stored: StoredPlan, plan: PrivacyPlan, name: str) -> None:
        self.plan = plan
        self.name = name
        item = plan.lines[name]
        self.rate = item.rate
        self.parameter = item.parameter
        self.count = item.count
        self._budget_name = budget.name
        self._ledger = ledger
        self.plan_id = stored.id
        self._words = MECHANISMS[item.mechanism].describe(item.parameter)

    def charge(self, count: int = 1) -> list[Charge]:
        """Charge ``count`` releases durably, all or none. Raises `PrivacyBudgetExceeded`, which costs nothing."""
        charges = self._ledger.charge(self.plan_id, self.name, count)
        if not charges:
            left = self.count - self.spent()
            raise PrivacyBudgetExceeded(
                f"the budget {self._budget_name!r} has {left} of {self.count} releases left, and {count} are needed: "
                "nothing was released and nothing charged"
            )
        return charges

    def record(self, charge: Charge) -> Receipt:
        """Write and return the receipt of a release."""
        receipt: Receipt = {
            "id": f"{self._budget_name}:{self.name}:{charge.number}",
            "budget": self._budget_name,
            "plan": self.plan.digest[:16],
            "line": self.name,
            "number": charge.number,
            "mechanism": self._words,
            "epsilon_spent": self.epsilon_after(charge.number),
            "epsilon": self.plan.epsilon,
            "delta": self.plan.delta,
            "remaining": self.count - charge.number,
            "time": charge.time,
        }
        self._ledger.record(charge, json.dumps(receipt))
        return receipt

    def spent(self) -> int:
        """Releases charged on this line."""
        return self._ledger.spent(self.plan_id, self.name)

    def epsilon_after(self, releases: int) -> float:
        """Upper bound on epsilon at the plan's delta after so many releases."""
        return self.plan.spent({self.name: releases}) if releases else 0.0
