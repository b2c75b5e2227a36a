"""What is poor about the plan of a release, from public numbers: for warnings, never for a refusal."""

from __future__ import annotations

from functools import partial

from langchain_dpicl.aggregators import NoisyVote
from langchain_dpicl.errors import DPICLError
from langchain_dpicl.privacy.advice import poor, poor_range, vote_left
from langchain_dpicl.privacy.choice import best_rate, options_of
from langchain_dpicl.privacy.lines import LineRequest, PlanLine
from langchain_dpicl.privacy.solving import about
from langchain_dpicl.privacy.votes import VOTES, VoteNoise
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.release.sealed import SealedRelease


def poor_plan(release: object, line: PlanLine | None = None) -> str | None:
    """What is poor about the plan of a vote or of tokens, in words; None if nothing is, or for releases of other kinds.

    ``line`` is its line of the plan. Without it, and with a plan that is not frozen, the noise is taken roughly:
    nothing is solved, declared or frozen. It looks at public numbers alone: the plan's, and the owners from which the
    plan's rate is chosen. None if the budget accepts the noise.
    """
    vote = release.aggregator if isinstance(release, SealedRelease) else None
    if not isinstance(release, AnyRelease) or not (isinstance(vote, NoisyVote) or release.mechanism == "tokens"):
        return None
    budget, selector = release.budget, release.selector
    if budget.accept_noise:
        return None
    try:
        epsilon, delta, count = budget.share(release.line_name, release.mechanism)
        known = budget.asked(release.line_name, release.mechanism)
        line = known if line is None and isinstance(known, PlanLine) else line
        if not isinstance(vote, NoisyVote):
            asked = LineRequest(release.mechanism, selector.rate or 1.0, count)
            return poor_range(about(epsilon, delta, asked) if line is None else line.parameter)
        labels = len(vote.labels)
        if line is not None:
            crowd = selector.crowd(line.rate, line.owners)
            owners, noises = line.owners, [VoteNoise(line.mechanism, line.parameter, line.own_calls)]
        else:
            rate = selector.let_plan_choose(partial(best_rate, epsilon, delta, count, selector.members))
            owners = selector.owners
            crowd = selector.crowd(rate, owners)
            fixed = options_of(crowd)
            noises = [
                VoteNoise(name, about(epsilon, delta, LineRequest(name, rate, count, options=fixed)), crowd.own_calls)
                for name in release.choices
                if name in VOTES
            ]
    except DPICLError:  # whatever is wrong with the plan, its first use says so
        return None
    best = max(noises, key=lambda noise: vote_left(noise, crowd.expected, labels))
    return poor(best, crowd.expected, labels, epsilon, None if owners is None else (owners, delta))
