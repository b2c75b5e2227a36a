"""The budget of a served chain for its callers: what is spent, what is left, and the latest releases.

Read from the ledger, without charging or freezing anything. All of it is public to the caller: everybody's releases if
callers share one counter, that caller's alone if each has a counter. It names no caller, no question, and no receipt of
another caller. With tickets it follows from the plan and the number of questions alone: nothing here reads which owners
were eligible, or have tickets left.
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
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.release.base import AnyRelease

MOST = 1000
"""The most releases that `release_history` gives."""


class LineBudget(TypedDict):
    """One line: how many releases (or tokens: ``unit``) it is for, what is spent and left, and its noise in words.

    ``count`` is None for a filter and for tickets, which have no count in advance. Unknown values are None before the
    first release.
    """

    unit: str
    count: int | None
    spent: int
    remaining: int | None
    mechanism: str | None
    tickets: NotRequired[int]
    """With tickets: the most questions that one owner's examples are used for. A part of the plan."""


class BudgetState(TypedDict):
    """A budget as it stands for one caller."""

    name: str
    epsilon: float
    delta: float
    scope: str
    assumption: str
    owner: str | None
    """The key under which an example names its owner; None if each example is its own owner."""
    epsilon_spent: float
    share_spent: float
    """The part of epsilon that is spent, from 0 to 1."""
    exhausted: bool
    """No line has anything left."""
    on_exhausted: str
    replay: Replay
    """Whether an equal question is answered again at no cost: for all callers, or for its caller ("principal")."""
    lines: dict[str, LineBudget]
    others: list[BudgetState]
    """The further budgets of a chain that releases on several."""


class PastRelease(TypedDict):
    """One charge: its number on its line, its time, epsilon after it, and its outcome."""

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
    """Return the budget of the first release as it stands for this caller; further budgets are its ``others``.

    A budget with ``scope="per_principal"`` shows the caller's own counters. It raises `InvalidParameter` without a
    caller. A shared one shows everybody's. Works before the first release, and freezes no plan.
    """
    budgets = _budgets(releases)
    first, *others = (
        _state(budget, [each for each in releases if each.budget is budget], principal) for budget in budgets
    )
    return {**first, "others": others}


def release_history(releases: Sequence[AnyRelease], principal: str | None, last: int = 200) -> History:
    """Return the latest charges on the first release's budget: everybody's, or the caller's if each has a counter.

    ``last``: how many, from 1 to `MOST`.
    """
    last = checks.whole("last", last, at_most=MOST)
    found, total = _budgets(releases)[0].latest(last, principal)
    past: list[PastRelease] = []
    for release in found:
        receipt = {} if release.receipt is None else json.loads(release.receipt)
        past.append(
            {
                "number": release.number,
                "line": release.line,
                "time": release.charged,
                "epsilon_spent": receipt.get("epsilon_spent"),
                "outcome": release.outcome or receipt.get("outcome", UNANSWERED),
            }
        )
    return {"releases": past, "total": total}


def _budgets(releases: Sequence[AnyRelease]) -> list[Budget]:
    if not releases:
        raise InvalidParameter("releases", [], "at least one release")
    return list({id(each.budget): each.budget for each in releases}.values())


def _state(budget: Budget, releases: Sequence[AnyRelease], principal: str | None) -> BudgetState:
    states = budget.lines(principal)
    spent = budget.epsilon_spent(principal)
    asked = {each.line_name or each.mechanism: each for each in releases}
    lines: dict[str, LineBudget] = {}
    if not isinstance(budget, PrivacyBudget):  # without a count; what is left depends on the noise of the release
        for name in dict.fromkeys([*asked, *states]):
            lines[name] = _line(
                asked[name].mechanism if name in asked else None, states[name]["spent"] if name in states else 0
            )
            if name in asked and name in states:
                line = asked[name].line()
                lines[name] |= {"remaining": line.remaining(), "mechanism": line.plan_line.describe()}
    else:
        if isinstance(budget.releases, int) and not budget.is_frozen:  # its one line has the mechanism's name
            name = releases[0].mechanism
            states = {name: {"count": budget.releases, "spent": 0, "remaining": None, "mechanism": name}}
        for name, state in states.items():
            lines[name] = _line(state["mechanism"], state["spent"])
            if budget.tickets:
                lines[name]["tickets"] = state["count"]
            else:
                lines[name] |= {"count": state["count"], "remaining": state["count"] - state["spent"]}
            if budget.plan is not None:
                lines[name]["mechanism"] = budget.plan.lines[name].describe()
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


def _line(mechanism: str | None, spent: int) -> LineBudget:
    return {"unit": unit_of(mechanism), "count": None, "spent": spent, "remaining": None, "mechanism": None}


def unit_of(mechanism: str | None) -> str:
    """Return what a line of a mechanism counts."""
    return "tokens" if mechanism == "tokens" else "releases"
