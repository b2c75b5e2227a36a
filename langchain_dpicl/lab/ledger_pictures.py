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
    path: str,
    report: LedgerReport,
    plans: Iterable[StoredPlan],
    states: Mapping[str, dict[str, Any]],
) -> None:
    """Draw budgets over time, one below the other."""
    draw_spending([_spending(report, plan, states[plan.name]) for plan in plans], path)


def _spending(report: LedgerReport, plan: StoredPlan, state: dict[str, Any]) -> Spending:
    """Return one budget over time: its charges by line and principal, or with tickets the losses by principal."""
    title = f"{plan.name}: epsilon {state['epsilon_spent']:.2g} of {state['epsilon']:g} spent"
    legend = ""
    if state["scope"] == "per_principal":
        title += ", by the principal who spent most"
        legend = "one counter each, if\ncallers do not collude"
    title += f" (delta {state['delta']:.2g})"
    planned: dict[str, int] = {name: line["count"] for name, line in state["lines"].items()}
    several = len(planned) > 1
    curves: list[tuple[str, Steps]] = []
    if plan.tickets:
        by_principal = sorted(losses(report, plan).items(), key=lambda item: -sum(item[1][1].values()))
        for who, (steps, counts) in by_principal:
            label = "\n".join(_named(counts, several, " queries"))
            if who:
                label = f"{who}: {sum(counts.values()):,} queries"
            curves.append((label, [(steps[0][0], 0.0), *steps]))
        ends = ", ".join(_named(planned, several))
        end = f"the plan: epsilon {state['epsilon']:g}, after the tickets of an owner ({ends}); there is no last answer"
        return Spending(
            title,
            "epsilon, for an owner\neligible for every query",
            curves,
            [(state["epsilon"], end)],
            legend,
        )
    charges: dict[tuple[str, str], Steps] = {}
    for row in report.history(plan.name):
        step = datetime.fromisoformat(row["time"]), row["spent"]
        charges.setdefault((row["line"], row["principal"] or ""), []).append(step)
    for (line, who), steps in sorted(charges.items(), key=lambda item: -item[1][-1][1]):
        label = f"{line}, {who}" if who and several else who or line
        curves.append((f"{label}: {steps[-1][1]:,} of {planned[line]:,}", steps))
    top = max((steps[-1][1] for _, steps in curves), default=1)
    levels = [
        (count, f"{name}: {count:,} planned" if several else f"the plan: {count:,}")
        for name, count in sorted(planned.items(), key=lambda item: item[1])
        if count <= 2.5 * top
    ]
    return Spending(title, "releases charged", curves, levels, legend)


def _named(counts: Mapping[str, int], several: bool, unit: str = "") -> list[str]:
    """Return each line's count in words, with the line's name if there are several."""
    return [f"{line}: {count:,}{unit}" if several else f"{count:,}{unit}" for line, count in counts.items()]


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
                paid = now
                loss = known.spent(now)
                if not steps or steps[-1][1] != loss:
                    steps.append((moment, loss))
        found[who] = [*steps, (moment, steps[-1][1])], counts
    return found
