"""The reasons why the plan of a release is poor, from public numbers: for warnings, never for a refusal."""

from __future__ import annotations

from functools import partial

from langchain_dpicl.aggregators import NoisyVote
from langchain_dpicl.errors import DPICLError
from langchain_dpicl.privacy.advice import poor, poor_range, vote_left
from langchain_dpicl.privacy.choice import best_rate, options_of
from langchain_dpicl.privacy.lines import LineRequest, PlanLine, family_of
from langchain_dpicl.privacy.solving import about
from langchain_dpicl.privacy.votes import VOTES, VoteNoise
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.release.sealed import SealedRelease


def poor_plan(release: object, line: PlanLine | None = None) -> str | None:
    """Say in words why the plan of a vote or of tokens is poor; None if it is not, or for releases of other kinds.

    ``line`` is its line of the plan. Without it, and with a plan that is not frozen, the
    noise is taken roughly: nothing is solved, declared or frozen. It looks at public
    numbers alone: the plan's, and the owners from which the plan's rate is chosen. None if
    the budget accepts the noise.
    """
    if not isinstance(release, AnyRelease) or release.budget.accept_noise:
        return None
    vote = None
    if isinstance(release, SealedRelease) and release.mechanism in VOTES and isinstance(release.aggregator, NoisyVote):
        vote = release.aggregator
    if vote is None and family_of(release.mechanism).unit != "tokens":
        return None
    selector = release.selector
    try:
        epsilon, delta, count = release.budget.share(release.line_name, release.mechanism)
        known = release.budget.asked(release.line_name, release.mechanism)
        if line is None and isinstance(known, PlanLine):
            line = known
        if vote is None:
            asked = LineRequest(release.mechanism, selector.rate or 1.0, count)
            return poor_range(about(epsilon, delta, asked) if line is None else line.parameter)
        if line is not None:
            owners = line.owners
            crowd = selector.crowd(line.rate, owners)
            noises = [VoteNoise(line.mechanism, line.parameter, line.own_calls)]
        else:
            rate = selector.let_plan_choose(partial(best_rate, epsilon, delta, count, selector.members))
            owners = selector.owners
            crowd = selector.crowd(rate, owners)
            noises = [
                VoteNoise(
                    name,
                    about(epsilon, delta, LineRequest(name, rate, count, options=options_of(crowd))),
                    crowd.own_calls,
                )
                for name in release.choices
                if name in VOTES
            ]
    except DPICLError:  # whatever is wrong with the plan, its first use says so
        return None
    labels = len(vote.labels)
    best = max(noises, key=lambda noise: vote_left(noise, crowd.expected, labels))
    return poor(
        best,
        crowd.expected,
        labels,
        epsilon,
        None if owners is None else (owners, delta),
    )
