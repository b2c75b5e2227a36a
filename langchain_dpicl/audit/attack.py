"""The audit: attack a mechanism with its worst case, and count what the attack proves about epsilon."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from langchain_core.runnables import Runnable
from tqdm import tqdm

from langchain_dpicl.audit.bounds import Direction, FloatArray, choose_region
from langchain_dpicl.audit.case import Case, Setting
from langchain_dpicl.audit.designs import MECHANISMS, cases_of
from langchain_dpicl.audit.worlds import OwnerWorld, Stock, SyntheticWorld, World
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import MECHANISMS as FAMILIES
from langchain_dpicl.privacy import LineRequest, PlanLine, PrivacyPlan, default_delta0
from langchain_dpicl.privacy.checks import open_unit, probability, real, whole
from langchain_dpicl.privacy.noise import Randomness

Canary = Literal["outputs", "owner"]

PLAN = "plan"
"""All mechanisms in one plan, a line each."""

ATTACKED = (*MECHANISMS, PLAN)


@dataclass(frozen=True)
class AuditResult:
    """What an audit claims and found. Public: no private data went in.

    Attributes
    ----------
    mechanism, canary, case
        What was attacked, with which kind of canary, and the worst case in words.
    epsilon, delta, rate, releases, parameters
        The plan's promise, and its noise by the parameter's name. ``releases`` is the number on each line.
    members
        N of each line with members.
    lower_bound, confidence
        Epsilon is at least this, with this confidence (`bounds` has the proof). Above ``epsilon``, the claim is false.
    direction, event
        Neighbours that the bound tells apart (the owner removed, or added), and the event that does it.
    trials, true_positives, false_positives
        Trials of each of the two data sets, and how many showed the event where it is likely and where it is not.
    """

    mechanism: str
    canary: Canary
    case: str
    epsilon: float
    delta: float
    rate: float
    releases: int
    parameters: Mapping[str, float]
    members: Mapping[str, int]
    lower_bound: float
    confidence: float
    direction: Direction
    event: str
    trials: int
    true_positives: int
    false_positives: int

    @property
    def share(self) -> float:
        """The lower bound as a share of the claim."""
        return self.lower_bound / self.epsilon

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Pair:
    """One line of a plan on both data sets."""

    case: Case
    rate: float
    present: World
    absent: World

    def ratio(self, world: World) -> float:
        """The log-likelihood ratio of one release, the owner having taken part with the plan's rate."""
        ratio = self.case.statistic(world.release())
        return ratio if self.rate == 1.0 else float(np.log1p(self.rate * np.expm1(ratio)))


def audit(
    mechanism: str,
    *,
    canary: Canary = "outputs",
    epsilon: float = 3.0,
    delta: float = 1e-4,
    rate: float = 1.0,
    releases: int = 1,
    members: int | None = None,
    trials: int = 30_000,
    confidence: float = 0.95,
    member: Runnable[Any, Any] | None = None,
) -> AuditResult:
    """Run a mechanism on neighbouring data sets with a worst-case canary, and bound epsilon from below.

    The noise is that of a `PrivacyPlan` solved for the promise. Each trial makes all releases of the plan on a data set
    with the owner and on one without it; the adversary sees them all and adds up their log-likelihood ratios. A third
    as many trials as ``trials``, made first, choose the case and the event; the bound counts the others alone.

    Parameters
    ----------
    mechanism
        "vote", "scores", "embedding", "joint-em", "ptr", "tokens", or "plan": one plan with a line of each.
    canary
        "outputs": the members' answers are the worst there are. "owner": a real store, selector, member chain and
        ensemble, and an inserted owner whose member answers the canary.
    epsilon, delta
        The promise of the whole plan.
    rate, releases
        The probability with which an owner takes part, and the releases of each line. At rate 1 nothing is amplified,
        and the bound comes nearest to the claim.
    members
        N; default: as many as make the attack strongest.
    trials
        How many trials of each data set the bound counts.
    confidence
        Of the bound.
    member
        With canary="owner" and a vote: another member chain than the deterministic one. It gets ``input`` and
        ``examples`` and should answer "Birch" where an example says so of the same input, else "Alder".

    Raises `InvalidParameter` and what `PrivacyPlan.solve` raises.
    """
    if mechanism not in ATTACKED:
        raise InvalidParameter("mechanism", mechanism, f"one of {', '.join(ATTACKED)}")
    if canary not in ("outputs", "owner"):
        raise InvalidParameter("canary", canary, '"outputs" or "owner"')
    if member is not None and (canary != "owner" or mechanism != "vote"):
        raise InvalidParameter("member", type(member).__name__, 'None unless canary="owner" and mechanism="vote"')
    epsilon, delta = real("epsilon", epsilon, above=0.0, at_most=1000.0), open_unit("delta", delta)
    rate, releases = probability("rate", rate), whole("releases", releases)
    members = None if members is None else whole("members", members, at_least=2)
    trials, confidence = whole("trials", trials), open_unit("confidence", confidence)

    plan = _plan(MECHANISMS if mechanism == PLAN else (mechanism,), epsilon, delta, rate, releases)
    settings = {
        name: Setting(
            parameter=line.parameter,
            rate=rate,
            releases=releases * len(plan.lines),
            delta=delta,
            trials=trials,
            confidence=confidence,
            unanimous=canary == "owner",
            members=members,
            options=line.options,
        )
        for name, line in plan.lines.items()
    }
    cases = {name: cases_of(name, setting) for name, setting in settings.items()}
    # Of a plan of several lines each shows its first case; of one line, all are tried.
    choices = [{name: case} for name, many in cases.items() for case in (many if len(cases) == 1 else many[:1])]
    if len(cases) > 1:
        choices = [{name: case for each in choices for name, case in each.items()}]

    randomness = Stock()
    attempts = [_pairs(choice, canary, rate, randomness, member) for choice in choices]
    first = -(-trials // 3)
    with tqdm(
        total=2 * (trials + first * len(attempts)), desc=mechanism, unit="trial", disable=None, file=sys.stderr
    ) as bar:
        tried = [
            choose_region(*_statistics(pairs, releases, first, bar), delta=delta, confidence=confidence)
            for pairs in attempts
        ]
        best = max(range(len(tried)), key=lambda i: tried[i][1])
        region = tried[best][0]
        present, absent = _statistics(attempts[best], releases, trials, bar)
    bound, hits, misfires = region.lower_bound(present, absent, delta, confidence)
    return AuditResult(
        mechanism=mechanism,
        canary=canary,
        case="; ".join(case.words for case in choices[best].values()),
        epsilon=epsilon,
        delta=delta,
        rate=rate,
        releases=releases,
        parameters=_parameters(plan),
        members={name: case.members for name, case in choices[best].items() if case.members},
        lower_bound=bound,
        confidence=confidence,
        direction=region.direction,
        event=_words(region.direction, region.threshold, releases * len(plan.lines)),
        trials=trials,
        true_positives=hits,
        false_positives=misfires,
    )


def _plan(mechanisms: Sequence[str], epsilon: float, delta: float, rate: float, releases: int) -> PrivacyPlan:
    delta0 = default_delta0(delta, rate, releases)
    lines = {
        name: LineRequest(name, rate, releases, options={"delta0": delta0} if name == "ptr" else {})
        for name in mechanisms
    }
    return PrivacyPlan.solve(epsilon=epsilon, delta=delta, lines=lines)


def _parameters(plan: PrivacyPlan) -> dict[str, float]:
    def name(line: PlanLine) -> str:
        own = FAMILIES[line.mechanism].parameter
        return own if len(plan.lines) == 1 else f"{line.mechanism} {own}"

    return {name(line): line.parameter for line in plan.lines.values()}


def _pairs(
    choice: Mapping[str, Case], canary: Canary, rate: float, randomness: Randomness, member: Runnable[Any, Any] | None
) -> list[_Pair]:
    def world(case: Case, has_owner: bool) -> World:
        if canary == "outputs":
            return SyntheticWorld(case, has_owner=has_owner, rate=rate, randomness=randomness)
        return OwnerWorld(case, has_owner=has_owner, rate=rate, randomness=randomness, member=member)

    return [_Pair(case, rate, world(case, True), world(case, False)) for case in choice.values()]


def _statistics(pairs: Sequence[_Pair], releases: int, trials: int, bar: Any) -> tuple[FloatArray, FloatArray]:
    """The sum of the log-likelihood ratios of all releases, with the owner and without, for each trial."""
    answer = np.zeros((2, trials))
    for i in range(trials):
        for pair in pairs:
            for _ in range(releases):
                answer[0, i] += pair.ratio(pair.present)
                answer[1, i] += pair.ratio(pair.absent)
        bar.update(2)
    return answer[0], answer[1]


def _words(direction: Direction, threshold: float, releases: int) -> str:
    what = "the log-likelihood ratio" + (f" of {releases} releases together" if releases > 1 else "")
    return f"{what} is {'at least' if direction == 'remove' else 'below'} {threshold:.4g}"
