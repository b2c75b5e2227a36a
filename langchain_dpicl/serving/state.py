"""The callers' view of a chain's budgets, and of the heads in it.

A budget is read from its ledger, without charging or freezing anything. All of it is public to the caller: everybody's
releases if callers share one counter, that caller's alone if each has a counter. It names no caller, no question, and
no receipt of another caller. With tickets it follows from the plan and the number of questions alone: nothing here
reads which owners were eligible, or have tickets left.
"""

import json
from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from langchain_dpicl.budget import Receipt
from langchain_dpicl.budget.terms import Replay, assumption
from langchain_dpicl.budget.upkeep import UNANSWERED
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import MECHANISMS, checks
from langchain_dpicl.release.base import AnyRelease

MOST = 1000
"""The most releases that `release_history` gives."""


class LineBudget(TypedDict):
    """One line: how many releases (or tokens: ``unit``) it is for, what is spent and left, and its noise in words.

    ``count`` is None for tickets, which have no count in advance. Unknown values are None before the first release.
    """

    unit: str
    count: int | None
    spent: int
    remaining: int | None
    mechanism: str | None
    tickets: NotRequired[int]
    """With tickets: the most questions that one owner's examples are used for. A part of the plan."""
    quota: NotRequired[int]
    """The most answers that this caller gets of the line, if it has a limit of its own."""
    quota_left: NotRequired[int]


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
    others: "list[BudgetState]"
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


class ReleasedHead(TypedDict):
    """A head: its labels, and what it cost, once for all answers."""

    labels: list[str]
    receipt: Receipt


def budget_state(releases: Sequence[AnyRelease], principal: str | None) -> BudgetState:
    """Return the budget of the first release as it stands for this caller; further budgets are its ``others``.

    A budget with ``scope="per_principal"`` shows the caller's own counters. It raises `InvalidParameter` without a
    caller. A shared one shows everybody's. Works before the first release, and freezes no plan.
    """
    first, *others = [_state(bound, principal) for bound in by_budget(releases)]
    return {**first, "others": others}


def release_history(releases: Sequence[AnyRelease], principal: str | None, last: int = 200) -> History:
    """Return the latest charges on the first release's budget: everybody's, or the caller's if each has a counter.

    ``last``: how many, from 1 to `MOST`.
    """
    last = checks.whole("last", last, at_most=MOST)
    found, total = by_budget(releases)[0][0].budget.latest(last, principal)
    past: list[PastRelease] = [
        {
            "number": release.number,
            "line": release.line,
            "time": release.charged,
            "epsilon_spent": receipt.get("epsilon_spent"),
            "outcome": release.outcome or receipt.get("outcome", UNANSWERED),
        }
        for release, receipt in ((each, json.loads(each.receipt or "{}")) for each in found)
    ]
    return {"releases": past, "total": total}


def by_budget(releases: Sequence[AnyRelease]) -> list[list[AnyRelease]]:
    """Return the releases of each budget, in their order. Raises `InvalidParameter` without a release."""
    if not releases:
        raise InvalidParameter("releases", [], "at least one release")
    found: dict[int, list[AnyRelease]] = {}
    for release in releases:
        found.setdefault(id(release.budget), []).append(release)
    return list(found.values())


def unit_of(mechanism: str | None) -> str:
    """Return what a line of a mechanism counts."""
    return "releases" if mechanism is None else MECHANISMS[mechanism].unit


def _state(releases: Sequence[AnyRelease], principal: str | None) -> BudgetState:
    """Return the state of the one budget of these releases."""
    budget = releases[0].budget
    states, spent = budget.lines(principal), budget.epsilon_spent(principal)
    lines: dict[str, LineBudget] = {}
    if isinstance(budget.releases, int) and not budget.is_frozen:  # its one line has the mechanism's name
        left, mechanism = None if budget.tickets else budget.releases, releases[0].planned()
        states = {mechanism: {"count": budget.releases, "spent": 0, "remaining": left, "mechanism": mechanism}}
    for name, state in states.items():
        lines[name] = {
            "unit": unit_of(state["mechanism"]),
            "count": None if budget.tickets else state["count"],
            "spent": state["spent"],
            "remaining": state["remaining"],
            "mechanism": None if budget.plan is None else budget.plan.lines[name].describe(),
        }
        if budget.tickets:
            lines[name]["tickets"] = state["count"]
    most, taken = budget.quota_of(principal)
    if most is not None:
        for name, line in lines.items():
            line |= {"quota": most, "quota_left": max(0, most - taken.get(name, 0))}
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
