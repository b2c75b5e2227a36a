"""The mechanism that suits public numbers, from which epsilon on, and for how many owners.

Nothing here sees a record. Everything follows from public numbers: of owners, labels, questions and calls, epsilon and
delta, by `privacy.advice`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from langchain_dpicl.privacy.advice import (
    DIRECTIONS,
    EMBEDDED,
    HALF,
    HEAD,
    POOR,
    head_left,
    head_steps,
    tokens_left,
    vote_left,
)
from langchain_dpicl.privacy.checks import FrozenMapping, open_unit, real, whole
from langchain_dpicl.privacy.choice import (
    CALLS,
    ELIGIBLE,
    OVERTURNED,
    Crowd,
    best_of,
    calls_made,
    compared,
    options_of,
)
from langchain_dpicl.privacy.lines import LineRequest, PlanLine
from langchain_dpicl.privacy.plan import PrivacyPlan
from langchain_dpicl.privacy.profile import MAX_COUNT
from langchain_dpicl.privacy.solving import about, solve
from langchain_dpicl.privacy.votes import LEAD, VoteNoise, vote_mechanisms

LABEL_VOTE, GATED, BLIND, TOKENS = "label vote", "gated ensemble", "blind ensemble", "tokens"

METHODS = (HEAD, LABEL_VOTE, GATED, BLIND, TOKENS)
"""In the order of preference if noise spares two of them alike: those that call no model come first."""

NEAR = (HEAD, LABEL_VOTE, GATED)
"""The methods for labels that look at the records near to a question."""

WORTH = 0.9
"""A method is worth its epsilon if noise leaves at least this share of what the records bring."""

EPSILONS = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 10.0)
"""Among these the least epsilon is looked for."""

MOST = 3.0
"""Above this epsilon nothing is recommended: a guess about a person may become 20 times likelier there."""

USUAL = tuple(epsilon for epsilon in EPSILONS if 1.0 <= epsilon <= MOST)
"""The epsilons that are proposed, if none is given: the first at which a method is worth it."""

_MOST_OWNERS = 10_000_000

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Workload:
    """The public numbers of what is to be done.

    ``owners``, ``labels`` and ``questions`` count; ``delta`` is the plan's. An ensemble makes ``calls`` calls of one
    owner each. ``gate`` and ``near`` say how many owners a question finds near enough: for a gated ensemble, and for a
    label vote; below 1 a share, but at least twice the calls. A head is fitted ``fits`` times on ``features`` features.
    A text has ``tokens`` tokens, each from ``shots`` owners.
    """

    owners: int
    labels: int
    questions: int
    delta: float
    calls: int = CALLS
    gate: float = ELIGIBLE
    near: float = ELIGIBLE
    fits: int = 1
    features: int = EMBEDDED
    tokens: int = 25
    shots: int = 4

    def __post_init__(self) -> None:
        least = {"labels": 2, "shots": 2, "features": 2}
        most = {"owners": _MOST_OWNERS, "questions": MAX_COUNT, "fits": MAX_COUNT}
        for name in ("owners", "labels", "questions", "calls", "fits", "features", "tokens", "shots"):
            value = whole(
                name,
                getattr(self, name),
                at_least=least.get(name, 1),
                at_most=most.get(name),
            )
            object.__setattr__(self, name, value)
        object.__setattr__(self, "delta", open_unit("delta", self.delta))
        for name in ("gate", "near"):
            object.__setattr__(
                self,
                name,
                real(
                    name,
                    getattr(self, name),
                    above=0.0,
                    at_most=float(self.owners),
                ),
            )

    def eligible(self, wanted: float) -> int:
        """Return the number of owners that a question finds, of a share or a number of them."""
        found = wanted if wanted >= 1.0 else max(2 * self.calls, wanted * self.owners)
        return max(1, min(self.owners, math.ceil(found - 1e-9)))

    def with_owners(self, owners: int) -> Workload:
        """The same with another number of owners, of whom the same share is near."""
        shares = [each / self.owners if each >= 1.0 else each for each in (self.gate, self.near)]
        gate, near = (min(share, 1.0 - 1e-12) for share in shares)
        return replace(self, owners=owners, gate=gate, near=near)


@dataclass(frozen=True)
class Way:
    """The numbers of a method at a task: those of its line, and its calls of a model for each answer."""

    rate: float
    count: int
    calls: int
    crowd: Crowd | None = None
    eligible: int | None = None
    steps: int | None = None

    @classmethod
    def of(cls, method: str, task: Workload) -> Way:
        """Owners behind a gate pay with tickets: twice as many as an average owner needs, at most one a question."""
        if method == HEAD:
            return cls(1.0, task.fits, 0, steps=head_steps(task.labels))
        if method == TOKENS:
            tokens = min(MAX_COUNT, task.questions * task.tokens)
            return cls(min(1.0, task.shots / task.owners), tokens, task.tokens)
        calls = task.calls
        count = task.questions
        eligible = None
        if method == LABEL_VOTE:
            calls = eligible = task.eligible(task.near)
        elif method != BLIND:
            eligible = task.eligible(task.gate)
        if eligible is not None:
            count = min(count, math.ceil(2.0 * eligible / task.owners * task.questions))
        sampled = eligible or task.owners
        rate = min(1.0, calls / sampled)
        made = calls_made(None, calls, None, None)
        crowd = Crowd.of(made, rate, sampled, calls)
        return cls(rate, count, 0 if method == LABEL_VOTE else made, crowd, eligible)

    def line(self, mechanism: str, owners: int) -> LineRequest:
        """The line, as the method's own release asks for it."""
        fixed: dict[str, Any] = {} if self.crowd is None else options_of(self.crowd)
        if self.steps is not None:
            fixed |= {"steps": self.steps, "even": 1}
        of = None if self.eligible is not None else owners
        return LineRequest(mechanism, self.rate, self.count, options=FrozenMapping(fixed), owners=of)


@dataclass(frozen=True)
class Verdict:
    """A method at the task's numbers.

    Attributes
    ----------
    method, way, epsilon, delta, line
        What it is, and the only line of its plan. (Of tokens roughly: no plan is certified.)
    left
        What noise leaves of it.
    feasible
        Whether a plan is made at all: a vote whose noise overturns unanimous answers is refused.
    flip
        Of a vote: how likely noise overturns a winner who leads by 30 % of the votes.
    least_epsilon
        The least of `EPSILONS` at which it is worth it; None if none is.
    least_owners
        For how many owners it would be feasible at this epsilon, roughly; None if for no number.
    """

    method: str
    way: Way
    epsilon: float
    delta: float
    line: PlanLine
    left: float
    feasible: bool
    flip: float | None
    least_epsilon: float | None
    least_owners: int | None

    @property
    def plan(self) -> PrivacyPlan:
        """The plan, as a budget makes it."""
        return PrivacyPlan(self.epsilon, self.delta, {self.line.mechanism: self.line})

    @property
    def noise(self) -> VoteNoise | None:
        """Of a vote."""
        if self.way.crowd is None:
            return None
        return VoteNoise(self.line.mechanism, self.line.parameter, self.line.own_calls)

    @property
    def worth(self) -> bool:
        """True if the method is worth its epsilon."""
        return self.feasible and self.left >= WORTH


def compare(task: Workload, epsilon: float, methods: Sequence[str] = METHODS) -> list[Verdict]:
    """The methods at this epsilon. All of them take a few seconds: the plans for labels are certified."""
    return [
        _choice(
            method,
            task,
            real(
                "epsilon",
                epsilon,
                above=0.0,
                at_most=1000.0,
            ),
        )
        for method in methods
    ]


def recommended(choices: Sequence[Verdict], right: Mapping[str, float] = FrozenMapping()) -> Verdict | None:
    """The method for labels to take; None if none is feasible, and above an epsilon of `MOST`.

    If it is known how often some are ``right``: the first of `METHODS` that is within .02 of the best of these. Else a
    head if noise spares `POOR` of it and at most .15 less than of a vote of near records: on three data sets of four a
    head was right more often than label votes, on the fourth about as often, and it has no last answer. Else the first
    vote of near records that is worth its epsilon, or the one that noise spares most, if it spares `POOR`. A blind
    ensemble comes last: noise takes little of it, and random records bring little. On three data sets it was 1 point
    above, level with, and 7 points below a prompt of public examples.
    """
    fit = [each for each in choices if each.feasible and each.method != TOKENS and each.epsilon <= MOST]
    if known := [each for each in fit if each.method in right]:
        best = max(right[each.method] for each in known)
        return next(each for each in known if right[each.method] >= best - 0.02)
    near = [each for each in fit if each.method != BLIND and each.left >= POOR]
    if near:
        most = max(near, key=lambda each: each.left)
        good = (each for each in near if each.worth or (each.method == HEAD and each.left >= most.left - 0.15))
        return next(good, most)
    return next((each for each in fit if each.worth), max(fit, key=lambda each: each.left, default=None))


def proposed(task: Workload) -> float:
    """The least of `USUAL` at which a method of `NEAR` is worth it, or else a blind ensemble, or else the largest."""
    for methods in (NEAR, (BLIND,)):
        found = _first(USUAL, partial(_any_worth, methods, task))
        if found is not None:
            return found
    return USUAL[-1]


def remedies(task: Workload) -> list[tuple[str, str, float]]:
    """The changes that make a method of `NEAR` worth it at an epsilon of `MOST`, the least change first in each way.

    Of each change: in words, the method, and what noise then leaves of it. Public texts stand first, whatever they buy.
    """
    found = []
    if task.features > DIRECTIONS:
        way = Way.of(HEAD, task)
        (sigma,) = solve(MOST, task.delta, {HEAD: way.line(HEAD, task.owners)})
        with_texts, _ = _judged(replace(task, features=DIRECTIONS), way, HEAD, sigma)
        found.append(("some hundred public texts like your questions (--public)", HEAD, with_texts))
    people = ((least, method) for method in NEAR if (least := _least_owners(method, task, MOST, WORTH)) is not None)
    for owners, method in sorted(people)[:1]:
        found.append((f"{owners:,} people", method, _state(method, task.with_owners(owners), MOST)))
    fewer: list[tuple[str, Workload]] = []
    for labels in range(task.labels - 1, 1, -1):
        fewer.append((f"{labels} labels", replace(task, labels=labels)))
    for questions in (task.questions // share for share in (2, 5, 10, 100) if task.questions >= share):
        fewer.append((f"{questions:,} questions", replace(task, questions=questions)))
    told = set()
    for words, changed in fewer:
        kind = words.partition(" ")[2]
        for method in NEAR:
            if kind not in told and (left := _state(method, changed, MOST)) >= WORTH:
                told.add(kind)
                found.append((words, method, left))
    return found


def _choice(method: str, task: Workload, epsilon: float) -> Verdict:
    way = Way.of(method, task)
    mechanism = method
    flip = None
    if way.crowd is not None:
        found = compared(epsilon, task.delta, way.count, way.rate, way.crowd, task.labels)
        mechanism = best_of(found)
    (parameter,) = solve(epsilon, task.delta, {method: way.line(mechanism, task.owners)})
    if way.crowd is not None:
        flip = VoteNoise(mechanism, parameter, way.crowd.own_calls).flip(way.crowd.ahead_by(LEAD), task.labels)
    line = PlanLine(**{**vars(way.line(mechanism, task.owners)), "parameter": parameter})
    left, feasible = _judged(task, way, mechanism, parameter)
    least = _first(EPSILONS, lambda each: _state(method, task, each) >= WORTH)
    owners = _least_owners(method, task, epsilon)
    return Verdict(method, way, epsilon, task.delta, line, left, feasible, flip, least, owners)


def _any_worth(methods: Sequence[str], task: Workload, epsilon: float) -> bool:
    return any(_state(method, task, epsilon) >= WORTH for method in methods)


def _judged(task: Workload, way: Way, mechanism: str, parameter: float) -> tuple[float, bool]:
    """Return the share that noise leaves, and whether such a plan is made."""
    if way.crowd is not None:
        noise = VoteNoise(mechanism, parameter, way.crowd.own_calls)
        refused = noise.flip(math.floor(way.crowd.expected), task.labels) > OVERTURNED
        return vote_left(noise, way.crowd.expected, task.labels), not refused
    left = tokens_left(parameter)
    if mechanism == HEAD:
        left = head_left(task.owners, parameter, head_steps(task.labels), task.features)
    return left, left >= HALF


def _state(method: str, task: Workload, epsilon: float) -> float:
    """About what noise leaves of a method; 0 if it is not feasible."""
    way = Way.of(method, task)
    mechanisms: tuple[str, ...] = (method,)
    if way.crowd is not None:
        mechanisms = vote_mechanisms(task.labels)
    found = []
    for mechanism in mechanisms:
        parameter = about(epsilon, task.delta, way.line(mechanism, task.owners))
        if parameter is None:
            continue
        left, feasible = _judged(task, way, mechanism, parameter)
        if feasible:
            found.append(left)
    return max(found, default=0.0)


def _least_owners(method: str, task: Workload, epsilon: float, left: float = 0.0) -> int | None:
    """For how many owners noise leaves more than this. Two digits, rounded up."""
    steps = [int(10.0 ** (i / 24) + 0.5) for i in range(24, 24 * 7 + 1)]
    found: int | None = _first(steps, lambda owners: _state(method, task.with_owners(owners), epsilon) > left)
    if found is None:
        return None
    unit: int = 10 ** max(0, len(str(found)) - 2)
    return math.ceil(found / unit) * unit


def _first(steps: Sequence[Number], holds: Callable[[Number], bool]) -> Number | None:
    """Return the first step at which something holds, if it then holds at all later ones."""
    place = bisect_left(steps, True, key=holds)
    return steps[place] if place < len(steps) else None
