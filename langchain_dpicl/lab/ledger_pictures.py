"""Pictures of ``dpicl budget show --plot``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from langchain_dpicl.budget.schema import StoredPlan
from langchain_dpicl.budget.upkeep import LedgerReport
from langchain_dpicl.lab.plots import Spending, draw_spending
from langchain_dpicl.privacy import PrivacyPlan

Steps = list[tuple[datetime, float]]


def draw_budgets(
    path: str, report: LedgerReport, plans: Iterable[StoredPlan], states: Mapping[str, dict[str, Any]]
) -> None:
    """Draw budgets over time, one below the other."""
    draw_spending([_spending(report, plan, states[plan.name]) for plan in plans], path)


def _spending(report: LedgerReport, plan: StoredPlan, state: dict[str, Any]) -> Spending:
    """Return one budget over time: its charges by line and principal, or with tickets the losses by principal."""
    each, lines = state["scope"] == "per_principal", state["lines"]
    several = len(lines) > 1
    title = (
        f"{plan.name}: epsilon {state['epsilon_spent']:.2g} of {state['epsilon']:g} spent"
        f"{', by the principal who spent most' if each else ''} (delta {state['delta']:.2g})"
    )
    legend = "one counter each, if\ncallers do not collude" if each else ""
    curves: list[tuple[str, Steps]] = []
    if plan.tickets:
        for who, (steps, counts) in sorted(losses(report, plan).items(), key=lambda item: -sum(item[1][1].values())):
            by_line = [f"{line}: {n:,} queries" if several else f"{n:,} queries" for line, n in counts.items()]
            label = f"{who}: {sum(counts.values()):,} queries" if who else "\n".join(by_line)
            curves.append((label, [(steps[0][0], 0.0), *steps]))
        ends = ", ".join(f"{name + ': ' if several else ''}{line['count']:,}" for name, line in lines.items())
        end = f"the plan: epsilon {state['epsilon']:g}, after the tickets of an owner ({ends}); there is no last answer"
        y = "epsilon, for an owner\neligible for every query"
        return Spending(title, y, curves, [(state["epsilon"], end)], legend)
    planned = {name: line["count"] for name, line in lines.items()}
    charges: dict[tuple[str, str], Steps] = {}
    for row in report.history(plan.name):
        step = datetime.fromisoformat(row["time"]), row["spent"]
        charges.setdefault((row["line"], row["principal"] or ""), []).append(step)
    for (line, who), steps in sorted(charges.items(), key=lambda item: -item[1][-1][1]):
        label = f"{line}, {who}" if who and several else who or line
        curves.append((f"{label}: {steps[-1][1]:,} of {planned[line]:,}", steps))
    top = max((steps[-1][1] for _, steps in curves), default=1)
    levels = [
        (count, f"{name}: {count:,} planned" if len(planned) > 1 else f"the plan: {count:,}")
        for name, count in sorted(planned.items(), key=lambda item: item[1])
        if count <= 2.5 * top
    ]
    return Spending(title, "releases charged", curves, levels, legend)


def losses(report: LedgerReport, plan: StoredPlan) -> dict[str, tuple[Steps, dict[str, int]]]:
    """Return, by principal, the most that an owner has lost, and the queries by line.

    The loss is an upper bound on epsilon, with the moment of every change and of the latest charge.
    """
    known = PrivacyPlan.from_json(plan.content)
    charges: dict[str, list[tuple[datetime, str, int]]] = {}
    for row in report.history(plan.name):
        moment = datetime.fromisoformat(row["time"])
        charges.setdefault(row["principal"] or "", []).append((moment, row["line"], row["units"]))
    found: dict[str, tuple[Steps, dict[str, int]]] = {}
    for who, made in charges.items():
        counts: dict[str, int] = dict.fromkeys(known.lines, 0)
        steps: Steps = []
        paid = None
        for moment, line, units in sorted(made):
            counts[line] += units
            if (now := known.at_most(counts)) != paid:
                paid, loss = now, known.spent(now)
                steps += [(moment, loss)] if not steps or steps[-1][1] != loss else []
        found[who] = [*steps, (moment, steps[-1][1])], counts
    return found
