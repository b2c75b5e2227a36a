"""The audit: attack a mechanism with its worst case, and prove a lower bound on epsilon."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from langchain_core.runnables import Runnable
from tqdm import tqdm

from langchain_dpicl.aggregators import KINDS, LabelVote
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.audit.bounds import choose_region
from langchain_dpicl.lab.audit.cases import (
    MORE_LABELS,
    Case,
    Setting,
    candidate_vote,
    counts_cases,
    embedding_cases,
    joint_em_cases,
    learned_cases,
    ptr_cases,
    tokens_cases,
    vote_cases,
)
from langchain_dpicl.lab.audit.draws import BlockRandomness
from langchain_dpicl.lab.audit.heads import HEAD, HEAD_TRIALS, head_cases, head_world
from langchain_dpicl.lab.audit.tables import SUM, SUM_TRIALS, table_cases, table_world
from langchain_dpicl.lab.audit.terms import TERMS, TERMS_TRIALS, terms_cases, terms_world
from langchain_dpicl.lab.audit.typed import median_cases, structured_cases, structured_options
from langchain_dpicl.lab.audit.worlds import owner_world, synthetic_world
from langchain_dpicl.lab.plots import draw_bounds
from langchain_dpicl.privacy import LineRequest, PrivacyPlan, default_delta0
from langchain_dpicl.privacy.checks import open_unit, probability, real, whole
from langchain_dpicl.privacy.choice import Crowd, options_of
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.profile import Direction
from langchain_dpicl.privacy.votes import BIT

Canary = Literal["outputs", "owner"]


@dataclass(frozen=True)
class Attacked:
    """The target of an attack: a mechanism of a plan, with or without a call for every owner, and the cases to try.

    The most telling case, by expectation, comes first.
    """

    mechanism: str
    cases: Callable[[Setting], tuple[Case, ...]]
    own_calls: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the plan's line."""
        return {**self.fixed, **options_of(Crowd(2, 2, self.own_calls))}


def _stated() -> dict[str, Attacked]:
    """The kinds that state their worst cases themselves."""
    found = {}
    for name, kind in KINDS.items():
        if stated := kind.worst_cases():
            cases = partial(learned_cases, stated=stated)
            fixed = stated[0].aggregator.options
            found[name] = Attacked(kind.mechanism, cases, fixed=fixed)
            if kind.takes_own_calls:
                found[f"{name}-own-calls"] = Attacked(kind.mechanism, cases, own_calls=True, fixed=fixed)
    return found


CASES: dict[str, Attacked] = _stated() | {
    "vote": Attacked("vote", vote_cases),
    "scores": Attacked("scores", counts_cases),
    "embedding": Attacked("embedding", embedding_cases),
    "joint-em": Attacked("joint-em", joint_em_cases),
    "ptr": Attacked("ptr", ptr_cases),
    "tokens": Attacked("tokens", tokens_cases),
    "vote-prior": Attacked("vote", partial(vote_cases, has_prior=True)),
    "vote-em": Attacked("vote-em", vote_cases),
    "vote-bit": Attacked(BIT, vote_cases),
    "vote-bit-own-calls": Attacked(BIT, vote_cases, own_calls=True),
    "vote-bit-prior": Attacked(BIT, partial(vote_cases, has_prior=True), own_calls=True),
    "vote-own-calls": Attacked("vote", partial(vote_cases, labels=MORE_LABELS), own_calls=True),
    "vote-em-own-calls": Attacked("vote-em", vote_cases, own_calls=True),
    "vote-em-prior": Attacked("vote-em", partial(vote_cases, has_prior=True), own_calls=True),
    "details-own-calls": Attacked("scores", partial(counts_cases, details=True), own_calls=True),
    "label-vote": Attacked("vote-em", partial(vote_cases, kind=LabelVote), own_calls=True),
    "embedding-own-calls": Attacked("embedding", embedding_cases, own_calls=True),
    "joint-em-own-calls": Attacked("joint-em", joint_em_cases, own_calls=True),
    "candidate-vote": Attacked("vote-em", partial(vote_cases, kind=candidate_vote)),
    "candidate-vote-own-calls": Attacked("vote-em", partial(vote_cases, kind=candidate_vote), own_calls=True),
    "median": Attacked("median", median_cases),
    "median-own-calls": Attacked("median", median_cases, own_calls=True),
    "structured": Attacked("structured", structured_cases, fixed=structured_options()),
    "structured-own-calls": Attacked("structured", structured_cases, own_calls=True, fixed=structured_options()),
}
"""What can be attacked, by name."""

PLANNED = ("vote", "scores", "embedding", "joint-em", "ptr", "tokens")
"""What a plan of many lines holds: one of each kind of mechanism."""

PLAN = "plan"
"""One of each kind of mechanism in one plan, a line each."""

ONCE: dict[str, Any] = {
    HEAD: (head_cases, head_world, HEAD_TRIALS),
    SUM: (table_cases, table_world, SUM_TRIALS),
    TERMS: (terms_cases, terms_world, TERMS_TRIALS),
}
"""Releases that are made once, with rate 1: their cases, worlds and trials."""

ATTACKED = (*CASES, PLAN, *ONCE)

_TRIALS = 30_000


@dataclass(frozen=True)
class AuditResult:
    """The claim that an audit attacked, and the bound it proved. Public: no private data went in.

    ``epsilon`` and ``delta`` are the plan's promise, ``parameters`` its noise by the parameter's name, ``releases`` the
    number on each line, ``members`` N of each line with members. Epsilon is at least ``lower_bound``, with this
    ``confidence`` (`cases` has the proof); above ``epsilon``, the claim is false. The bound tells the neighbours of
    ``direction`` apart (the owner removed, or added) by the ``event``. Of so many ``trials`` of each data set
    ``true_positives`` showed the event on the one that makes it likely, and ``false_positives`` on the other.
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


def audit(
    mechanism: str,
    *,
    canary: Canary = "outputs",
    epsilon: float = 3.0,
    delta: float = 1e-4,
    rate: float = 1.0,
    releases: int = 1,
    members: int | None = None,
    trials: int | None = None,
    confidence: float = 0.95,
    member: Runnable[Any, Any] | None = None,
) -> AuditResult:
    """Run a mechanism on neighbouring data sets with a worst-case canary, and bound epsilon from below.

    The noise is that of a `PrivacyPlan` solved for the promise. Each trial makes all releases of the plan on a data set
    with the owner and on one without it; the adversary sees them all and adds up their log-likelihood ratios. A third
    as many trials as ``trials``, made first, choose the case and the event; the bound counts the others alone.

    - ``mechanism``: a name in `CASES` ("-own-calls", "label-vote" and "vote-em-prior": every owner has a call of
      its own), "plan" (six of them in one plan, a line each), "head", "sum" (a table), or "terms".
    - ``canary``: "outputs": the members' answers are the worst there are. "owner": a real store, selector, member chain
      and ensemble, and an inserted owner whose member answers the canary. Of a head "outputs" shows all noisy sums, of
      the product's own steps on a real store; "owner" shows the head alone, of whole fits with their ledgers. Of a
      sum, and of terms, both show all counts that are released; "owner" makes whole releases.
    - ``epsilon``, ``delta``: the promise of the whole plan.
    - ``rate``, ``releases``: the probability with which an owner takes part, and the releases of each line. At rate 1
      nothing is amplified, and the bound comes nearest to the claim. A head, a sum and terms have no other rate.
    - ``members``: N; by default as many as make the attack strongest.
    - ``trials``, ``confidence``: how many trials of each data set the bound counts (default: 30,000; of a head 10,000,
      or 1,000 with canary="owner"), and the bound's confidence.
    - ``member``: with canary="owner" and a vote, another member chain than the deterministic one. It gets ``input`` and
      ``examples`` and should answer "Birch" if an example says so of the same input, else "Alder".

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
    if mechanism in ONCE and rate != 1.0:
        raise InvalidParameter("rate", rate, f"1 for {mechanism}: every owner takes part")
    if trials is None:
        trials = ONCE[mechanism][2][canary] if mechanism in ONCE else _TRIALS
    trials, confidence = whole("trials", trials), open_unit("confidence", confidence)

    names = PLANNED if mechanism == PLAN else (mechanism,)
    requests = {}
    for name in names:
        kind, options = (CASES[name].mechanism, CASES[name].options) if name in CASES else (name, {})
        options |= {"delta0": default_delta0(delta, rate, releases)} if kind in ("ptr", TERMS) else {}
        requests[name] = LineRequest(kind, rate, releases, options=options)
    lines = PrivacyPlan.solve(epsilon=epsilon, delta=delta, lines=requests).lines
    count = releases * len(lines)
    effort: dict[str, Any] = {"rate": rate, "epsilon": epsilon, "delta": delta}
    effort |= {"trials": trials, "confidence": confidence}
    attacked = {**effort, "releases": count, "unanimous": canary == "owner", "members": members}
    made = {name: each.cases for name, each in CASES.items()} | {name: each[0] for name, each in ONCE.items()}
    settings = [Setting(line.mechanism, line.parameter, options=line.options, **attacked) for line in lines.values()]
    cases = [made[name](setting) for name, setting in zip(lines, settings, strict=True)]
    # Of a plan each line shows its first case; of one mechanism, all are tried.
    choices = [[many[0] for many in cases]] if mechanism == PLAN else [[case] for case in cases[0]]

    draw = BlockRandomness()
    world: Any = synthetic_world if canary == "outputs" else partial(owner_world, member=member)
    if mechanism in ONCE:
        world = ONCE[mechanism][1]
    attempts = [
        [(case, [world(case, has_owner, rate, draw) for has_owner in (True, False)]) for case in choice]
        for choice in choices
    ]
    first = -(-trials // 3)
    with tqdm(
        total=2 * (trials + first * len(attempts)), desc=mechanism, unit="trial", disable=None, file=sys.stderr
    ) as bar:

        def statistics(
            attempt: Sequence[tuple[Any, Sequence[Callable[[], Any]]]], size: int
        ) -> tuple[FloatArray, FloatArray]:
            """For each trial the sum of all releases' log-likelihood ratios, with the owner and without.

            The attempt has for each line its case, and one release of it with the owner and without. A ratio is that of
            one release, the owner having taken part with the plan's rate.
            """
            sums = np.zeros((2, size))
            for i in range(size):
                for case, worlds in attempt:
                    for side in (0, 1) * releases:
                        ratio = case.statistic(worlds[side]())
                        sums[side, i] += ratio if rate == 1.0 else np.log1p(rate * np.expm1(ratio))
                bar.update(2)
            return sums[0], sums[1]

        tried = [choose_region(*statistics(attempt, first), delta, confidence) for attempt in attempts]
        best = max(range(len(tried)), key=lambda i: tried[i][1])
        region = tried[best][0]
        bound, hits, misfires = region.lower_bound(*statistics(attempts[best], trials), delta, confidence)
    together = f" of {count} releases together" if count > 1 else ""
    side = "at least" if region.direction == "remove" else "below"
    noise = {
        line.family.parameter if len(lines) == 1 else f"{name} {line.family.parameter}": line.parameter
        for name, line in lines.items()
    }
    return AuditResult(
        mechanism=mechanism,
        canary=canary,
        case="; ".join(case.words for case in choices[best]),
        releases=releases,
        parameters=noise,
        members={name: case.members for name, case in zip(lines, choices[best], strict=True) if case.members},
        lower_bound=bound,
        direction=region.direction,
        event=f"the log-likelihood ratio{together} is {side} {region.threshold:.4g}",
        true_positives=hits,
        false_positives=misfires,
        **effort,
    )


# -- results -----------------------------------------------------------------------------------------------------------

_HEAD = ("mechanism", "noise", "claimed", "at least", "share", "neighbours", "true/false positives", "trials")


def table(results: Sequence[AuditResult]) -> str:
    """One line a mechanism, and below it the case and the event."""
    rows = [_HEAD]
    for result in results:
        noise = [f"{name} {value:.4g}" for name, value in result.parameters.items()]
        shown = noise[0] if len(noise) == 1 else f"{len(noise)} lines"
        bound, share = f"{result.lower_bound:.3f}", f"{result.lower_bound / result.epsilon:.0%}"
        owner = "owner removed" if result.direction == "remove" else "owner added"
        counts = f"{result.true_positives}/{result.false_positives}", str(result.trials)
        rows.append((result.mechanism, shown, f"{result.epsilon:.4g}", bound, share, owner, *counts))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += ["", *(f"{result.mechanism}: {result.case}. Event: {result.event}." for result in results)]
    return "\n".join(lines)


def headline(results: Sequence[AuditResult]) -> str:
    """The settings that the results share, in one line."""
    first = results[0]
    what = "worst-case member outputs" if first.canary == "outputs" else "an inserted owner among real members"
    many = "one release" if first.releases == 1 else f"{first.releases} releases"
    return (
        f"lower bounds on epsilon ({first.confidence:.4g} confidence each) beside the claim, at delta {first.delta:g}, "
        f"rate {first.rate:g}, {many}; canary: {what}"
    )


def draw(results: Sequence[AuditResult], path: str | Path) -> None:
    """Draw two bars for each mechanism: the claim, and what the attack proves. Raises as `save_figure`."""
    several = len({result.epsilon for result in results}) > 1
    bars = [
        (f"{r.mechanism}\nepsilon {r.epsilon:g}" if several else r.mechanism, r.epsilon, r.lower_bound) for r in results
    ]
    first = results[0]
    many = "1 release" if first.releases == 1 else f"{first.releases} releases"
    title = f"Audit at delta {first.delta:g}, rate {first.rate:g}, {many}, canary: {first.canary}"
    draw_bounds(bars, title, f"proved by the attack ({first.confidence:.4g} confidence)", path)
