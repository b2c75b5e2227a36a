"""PrivacyBudget: epsilon and delta in, a counted number of releases out."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import cast

from typing_extensions import TypedDict

from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.budget.line import BudgetLine
from langchain_dpicl.budget.receipt import Receipt
from langchain_dpicl.budget.schedule import Declaration, Releases, Schedule, against
from langchain_dpicl.errors import DPICLError, InvalidParameter, LedgerError, PlanMismatch
from langchain_dpicl.privacy import PrivacyPlan, checks


class Preview(TypedDict):
    """What ``n`` further releases would mean."""

    releases: int
    fits: bool
    epsilon_after: float
    remaining_after: int


class LineState(TypedDict):
    """A line of the budget as it stands."""

    count: int
    spent: int
    remaining: int
    mechanism: str | None


class PrivacyBudget:
    """A target (epsilon, delta) for ALL releases together, and the durable ledger that enforces it.

    Parameters
    ----------
    epsilon, delta
        The guarantee: everything that is ever released on this budget is (epsilon, delta)-differentially private with
        respect to adding or removing one owner.
    releases
        How many answers the budget is for. The noise is calibrated so that exactly this many fit. One number, or for
        several kinds of answers a mapping of line names (without ":") to numbers or `LineRequest`s.
    ledger
        A database URL. SQLite by default; share one ledger between workers.
    name
        The plan's name in the ledger.

    The plan is completed and frozen at first use, when every line's sampling rate and mechanism are known; from then
    on the ledger refuses other parameters under this name (`PlanMismatch`). Every release is charged before the first
    member is called, and nothing is ever refunded.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        releases: Releases,
        ledger: str = "sqlite:///dpicl-budget.db",
        name: str = "default",
    ) -> None:
        self.epsilon = checks.positive("epsilon", epsilon)
        self.delta = checks.open_unit("delta", delta)
        self._schedule = Schedule(releases)
        self.releases = self._schedule.counts
        if not isinstance(name, str) or not name or len(name) > 255:
            raise InvalidParameter("name", name, "a string of 1 to 255 characters")
        self.name = name
        self._ledger = Ledger(ledger)
        self._lock = threading.Lock()
        self._lines: dict[str, BudgetLine] = {}
        self._find_lines()

    def _find_lines(self) -> dict[str, BudgetLine]:
        """The plan's lines, from the ledger if another worker has stored the plan since; none before the first use."""
        if not self._lines:
            stored = self._ledger.find_plan(self.name)
            if stored is not None:
                plan = PrivacyPlan.from_json(stored.content)
                different: dict[str, tuple[object, object]] = {
                    "epsilon": (plan.epsilon, self.epsilon),
                    "delta": (plan.delta, self.delta),
                }
                self._refuse_other({**different, **self._schedule.differences(plan)})
                self._lines = {name: BudgetLine(self.name, self._ledger, stored.id, plan, name) for name in plan.lines}
        return self._lines

    @property
    def plan(self) -> PrivacyPlan | None:
        """The frozen plan; None before the first use."""
        return next((line.plan for line in self._find_lines().values()), None)

    def declare(
        self,
        line: str | None,
        mechanism: str,
        rate: float,
        *,
        rate_is_explicit: bool = False,
        options: Mapping[str, float] | None = None,
    ) -> None:
        """Say what a line is, when the chain that uses it is built. Charges and freezes nothing.

        ``line`` may be None where the budget has one. ``options`` are those that somebody chose: the rest is filled in
        when the plan is solved. `PlanMismatch` if the line was declared or frozen with another mechanism, with another
        value of an option, or with another explicit rate.
        """
        declaration = Declaration(mechanism, rate, rate_is_explicit, dict(options or {}))
        with self._lock:
            lines = self._find_lines()
            if lines:
                self._refuse_other(against(self._pick(lines, line).plan_line, declaration))
            else:
                self._schedule.declare(line, declaration)

    def line(
        self,
        mechanism: str,
        rate: float,
        *,
        name: str | None = None,
        rate_is_explicit: bool = False,
        options: Mapping[str, float] | None = None,
    ) -> BudgetLine:
        """One line of the plan, for a mechanism at a sampling rate; completes and freezes the plan at first use.

        ``name`` is needed where the budget has several lines. Where the ledger already holds the plan, its rate stands
        (the number of owners may have changed since); a rate that the caller fixed explicitly must agree with it, and
        so must every option given. Raises `PlanIncomplete` while another line is not declared, `PlanMismatch`,
        `InfeasiblePlan`, `LedgerError`; none of them costs anything.
        """
        declaration = Declaration(mechanism, rate, rate_is_explicit, dict(options or {}))
        with self._lock:
            lines = self._find_lines()
            if not lines:
                self._schedule.declare(name, declaration)
                requests = self._schedule.requests(self.delta)
                plan = PrivacyPlan.solve(epsilon=self.epsilon, delta=self.delta, lines=requests)
                allowed = {line: request.count for line, request in requests.items()}
                self._ledger.store_plan(self.name, plan.to_json(), plan.digest, allowed)
                lines = self._find_lines()
        if not lines:
            raise LedgerError("the plan could not be stored")
        found = self._pick(lines, name)
        self._refuse_other(against(found.plan_line, declaration))
        return found

    def _pick(self, lines: Mapping[str, BudgetLine], name: str | None) -> BudgetLine:
        if name is None and len(lines) == 1:
            return next(iter(lines.values()))
        if name is None or name not in lines:
            raise InvalidParameter("line", name, f"one of this budget's lines: {', '.join(lines)}")
        return lines[name]

    def _refuse_other(self, pairs: Mapping[str, tuple[object, object]]) -> None:
        different = [
            f"{key} {frozen!r} (asked: {asked!r})" for key, (frozen, asked) in pairs.items() if frozen != asked
        ]
        if different:
            raise PlanMismatch(
                f"the budget {self.name!r} was frozen at first use with {', '.join(different)}; "
                "use another name for another plan (both then count: their losses add up)"
            )

    # -- what is spent and left ----------------------------------------------------------------------------------------

    def _spent(self) -> dict[str, int]:
        """Releases spent on every line."""
        lines = self._find_lines()
        if not lines:
            return dict.fromkeys(self._schedule.names, 0)
        return self._ledger.spent(next(iter(lines.values())).plan_id)

    def _of(self, line: str | None) -> tuple[str, int, int]:
        """A line's name, how many releases it has, and how many are spent."""
        lines = self._find_lines()
        if lines:
            found = self._pick(lines, line)
            return found.name, found.count, found.spent()
        name = self._schedule.name_of(line)
        return name, self._schedule.count(name), 0

    def lines(self) -> dict[str, LineState]:
        """Every line: its count, what is spent and left of it, and its mechanism (None until somebody declares it).

        A budget of one number of releases has no line before a chain is bound to it.
        """
        frozen, states = self._find_lines(), {}
        for name, spent in self._spent().items():
            count = frozen[name].count if frozen else self._schedule.count(name)
            mechanism = frozen[name].mechanism if frozen else self._schedule.mechanism(name)
            states[name] = LineState(count=count, spent=spent, remaining=count - spent, mechanism=mechanism)
        return states

    def spent(self, line: str | None = None) -> int:
        """Releases charged so far, by all workers. ``line`` is needed where the budget has several."""
        return self._of(line)[2]

    def remaining(self, line: str | None = None) -> int:
        """Releases left."""
        _, count, spent = self._of(line)
        return count - spent

    def epsilon_spent(self) -> float:
        """Upper bound on epsilon, at the plan's delta, for the releases charged so far on all lines; 0 before any."""
        plan = self.plan
        return 0.0 if plan is None else plan.spent(self._spent())

    def preview(self, n: int = 1, line: str | None = None) -> Preview:
        """What ``n`` further releases would cost. Charges nothing. Before first use: the whole plan's epsilon."""
        checks.whole("n", n)
        name, count, spent = self._of(line)
        fits = spent + n <= count
        after = spent + n if fits else spent
        plan = self.plan
        epsilon = self.epsilon if plan is None else plan.spent({**self._spent(), name: after})
        return {
            "releases": n,
            "fits": fits,
            "epsilon_after": epsilon,
            "remaining_after": count - after,
        }

    def receipt(self, release_id: str) -> Receipt | None:
        """The receipt of an earlier release of this budget, from the ledger; None if there is none."""
        name, line, number = ["", "", "", *release_id.rsplit(":", 2)][-3:]
        found = self._find_lines().get(line)
        if found is None or name != self.name or not number.isdecimal():
            return None
        text = self._ledger.receipt(found.plan_id, line, int(number))
        return None if text is None else cast("Receipt", json.loads(text))

    def close(self) -> None:
        """Close the ledger's connections."""
        self._ledger.close()

    def __repr__(self) -> str:
        try:
            counts = self._spent()
            spent = str(counts) if len(counts) > 1 else str(sum(counts.values()))
        except DPICLError:  # showing an object must not fail
            spent = "?"
        return (
            f"PrivacyBudget(epsilon={self.epsilon:g}, delta={self.delta:g}, releases={self.releases}, "
            f"name={self.name!r}, spent={spent})"
        )
