"""What a served chain tells its callers of its budget: what is spent, what is left, and the latest releases.

Read from the ledger, without charging or freezing anything. All of it is public to the caller who asks: where callers
share one counter, everybody's releases; where each has a counter, that caller's alone. Neither names a caller, nor a
question, nor the receipt of somebody else. Where owners pay with tickets, what is shown follows from the plan and from
the number of questions alone: nothing here reads who was eligible, or who has tickets left.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from langchain_dpicl.budget import Budget, PrivacyBudget
from langchain_dpicl.budget.policy import Replay
from langchain_dpicl.budget.renewal import assumption
from langchain_dpicl.budget.report import UNANSWERED
from langchain_dpicl.budget.stored import Release
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.release.base import AnyRelease

MOST = 1000
"""The most releases that `release_history` gives."""


class LineBudget(TypedDict):
    """One line: how many releases (or tokens: ``unit``) it is for, what is spent and left, and how it adds noise, in
    words. ``count`` is None for a filter and where owners pay with tickets: both have no count in advance. What is not
    known before the first release is None."""

    unit: str
    count: int | None
    spent: int
    remaining: int | None
    mechanism: str | None
    tickets: NotRequired[int]
    """Where owners pay with tickets: the most questions that one owner's examples are used for. A part of the plan."""


class BudgetState(TypedDict):
    """A budget as it stands for one caller. ``others``: those of a chain that releases on several budgets."""

    name: str
    epsilon: float
    delta: float
    scope: str
    assumption: str
    owner: str | None
    """The key under which the examples name whose privacy is protected; None where each example is its own owner."""
    epsilon_spent: float
    share_spent: float
    """The part of epsilon that is spent, from 0 to 1."""
    exhausted: bool
    """No line has anything left."""
    on_exhausted: str
    replay: Replay
    """Whether an equal question is answered again at no cost: to everybody, or to its caller ("principal")."""
    lines: dict[str, LineBudget]
    others: list[BudgetState]


class PastRelease(TypedDict):
    """One charge: its number on its line, when it was made, what was spent with it, and what came of it."""

    number: int
    line: str
    time: str
    epsilon_spent: float | None
    outcome: str


class History(TypedDict):
    """The latest releases, the oldest of them first, and how many there are in all."""

    releases: list[PastRelease]
    total: int


def budget_state(releases: Sequence[AnyRelease], principal: str | None) -> BudgetState:
    """The budget of the first release, as it stands for this caller; further budgets are its ``others``.

    A budget with ``scope="per_principal"`` shows the caller's own counters and needs the caller (`InvalidParameter`
    otherwise); a shared one shows everybody's. Works before the first release, and freezes no plan.
    """
    budgets = _budgets(releases)
    states = [_state(budget, [each for each in releases if each.budget is budget], principal) for budget in budgets]
    return {**states[0], "others": states[1:]}


def release_history(releases: Sequence[AnyRelease], principal: str | None, last: int = 200) -> History:
    """The latest charges on the first release's budget: everybody's, or the caller's where each has a counter.

    ``last``: how many, from 1 to `MOST`.
    """
    last = checks.whole("last", last, at_most=MOST)
    found, total = _budgets(releases)[0].latest(last, principal)
    return {"releases": [_past(release) for release in found], "total": total}


def _budgets(releases: Sequence[AnyRelease]) -> list[Budget]:
    if not releases:
        raise InvalidParameter("releases", [], "at least one release")
    return list({id(each.budget): each.budget for each in releases}.values())


def _state(budget: Budget, releases: Sequence[AnyRelease], principal: str | None) -> BudgetState:
    lines = _filtered_lines(budget, releases) if budget.is_filtered else _planned_lines(budget, releases, principal)
    if budget.is_filtered:
        spent = budget.epsilon_spent()
    else:  # of the counts that are shown
        plan, counts = budget.plan, {name: line["spent"] for name, line in lines.items()}
        spent = 0.0 if plan is None else plan.spent(plan.at_most(counts) if budget.tickets else counts)
    return {
        "name": budget.name,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "scope": budget.scope,
        "assumption": assumption(budget.scope),
        "owner": releases[0].selector.store.owner_key,
        "epsilon_spent": spent,
        "share_spent": min(1.0, spent / budget.epsilon),
        "exhausted": all(line["remaining"] == 0 for line in lines.values()),
        "on_exhausted": budget.on_exhausted,
        "replay": budget.replay,
        "lines": lines,
        "others": [],
    }


def _planned_lines(budget: Budget, releases: Sequence[AnyRelease], principal: str | None) -> dict[str, LineBudget]:
    line = _endless_line if budget.tickets else _line
    states, plan = budget.lines(principal), budget.plan
    if plan is not None:
        words = {name: planned.describe() for name, planned in plan.lines.items()}
        return {
            name: line(item["mechanism"], item["count"], item["spent"], words[name]) for name, item in states.items()
        }
    if isinstance(budget, PrivacyBudget) and isinstance(budget.releases, int):
        mechanism = releases[0].mechanism
        return {mechanism: line(mechanism, budget.releases, 0)}
    return {name: line(item["mechanism"], item["count"], item["spent"]) for name, item in states.items()}


def _filtered_lines(budget: Budget, releases: Sequence[AnyRelease]) -> dict[str, LineBudget]:
    """A filter has no count in advance, and what is left of a line depends on the noise of the release that asks."""
    used = {name: state["spent"] for name, state in budget.lines().items()}
    asked = {each.line_name or each.mechanism: each for each in releases}
    lines: dict[str, LineBudget] = {}
    for name in dict.fromkeys([*asked, *used]):
        mechanism = asked[name].mechanism if name in asked else None
        lines[name] = _line(mechanism, None, used.get(name, 0))
        if name in asked and name in used:
            line = asked[name].line()
            lines[name] |= {"remaining": line.remaining(), "mechanism": line.plan_line.describe()}
    return lines


def _line(mechanism: str | None, count: int | None, spent: int, words: str | None = None) -> LineBudget:
    remaining = None if count is None else count - spent
    return {"unit": unit_of(mechanism), "count": count, "spent": spent, "remaining": remaining, "mechanism": words}


def _endless_line(mechanism: str | None, tickets: int, spent: int, words: str | None = None) -> LineBudget:
    """A line whose owners pay, each for itself."""
    return {**_line(mechanism, None, spent, words), "tickets": tickets}


def unit_of(mechanism: str | None) -> str:
    """What a line of a mechanism counts."""
    return "tokens" if mechanism == "tokens" else "releases"


def _past(release: Release) -> PastRelease:
    receipt = {} if release.receipt is None else json.loads(release.receipt)
    return {
        "number": release.number,
        "line": release.line,
        "time": release.charged,
        "epsilon_spent": receipt.get("epsilon_spent"),
        "outcome": release.outcome or receipt.get("outcome", UNANSWERED),
    }
