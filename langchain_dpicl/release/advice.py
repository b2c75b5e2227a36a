"""The reasons why the plan of a release is poor, from public numbers: for warnings, never for a refusal."""

from __future__ import annotations

from functools import partial

from langchain_dpicl.errors import DPICLError
from langchain_dpicl.privacy.advice import poor, poor_range, vote_left
from langchain_dpicl.privacy.choice import best_rate, options_of
from langchain_dpicl.privacy.lines import LineRequest, PlanLine, family_of
from langchain_dpicl.privacy.solving import about
from langchain_dpicl.privacy.votes import VOTES, VoteNoise
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.selection import PoissonExampleSelector


def poor_plan(release: object, line: PlanLine | None = None) -> str | None:
    """Say in words why the plan of a release is poor; None if it is not.

    ``line`` is its line of the plan. Without it, and with a plan that is not frozen, the
    noise is taken roughly: nothing is solved, declared or frozen. It looks at public
    numbers alone: the plan's, the owners from which the plan's rate is chosen, and the
    ``eligible`` that the deployer has estimated. It never counts the owners behind a gate
    or a filter. Of a vote it judges the noise, of tokens the range, and of other kinds only
    whether owners are too few for their calls. None if the budget accepts the noise.
    """
    if not isinstance(release, AnyRelease) or release.budget.accept_noise:
        return None
    labels = None
    if release.mechanism in VOTES:
        labels = release.aggregator.outcomes  # type: ignore[attr-defined]
    selector = release.selector
    if labels is None and family_of(release.mechanism).unit != "tokens":
        return few_owners(selector)
    try:
        epsilon, delta, count = release.budget.share(release.line_name, release.mechanism)
        known = release.budget.asked(release.line_name, release.mechanism)
        if line is None and isinstance(known, PlanLine):
            line = known
        if labels is None:
            asked = LineRequest(release.mechanism, selector.rate or 1.0, count)
            bound = about(epsilon, delta, asked) if line is None else line.parameter
            return few_owners(selector) or (None if bound is None else poor_range(bound))
        if line is not None:
            owners = line.owners
            crowd = selector.crowd(line.rate, owners)
            noises = [VoteNoise(line.mechanism, line.parameter, line.own_calls)]
        else:
            rate = selector.let_plan_choose(partial(best_rate, epsilon, delta, count, selector.members))
            owners = selector.owners
            crowd = selector.crowd(rate, owners)
            noises = []
            for name in filter(VOTES.__contains__, release.choices):
                parameter = about(epsilon, delta, LineRequest(name, rate, count, options=options_of(crowd)))
                if parameter is not None:
                    noises.append(VoteNoise(name, parameter, crowd.own_calls))
            if not noises:
                return None
    except DPICLError:  # whatever is wrong with the plan, its first use says so
        return None
    best = max(noises, key=lambda noise: vote_left(noise, crowd.expected, labels))
    return poor(
        best,
        crowd.expected,
        labels,
        epsilon,
        None if owners is None else (owners, delta),
    )


def few_owners(selector: PoissonExampleSelector) -> str | None:
    """Say that fewer owners are eligible than calls are asked for, if so by the public estimate; None otherwise."""
    eligible = selector.sampled_from(None)
    if eligible is None or selector.calls is None or eligible >= selector.calls:
        return None
    return (
        f"{eligible} eligible owners are fewer than {selector.calls:g} calls: each of them takes part in every "
        "release, which takes the most noise for the fewest answers. A wider filter or threshold, or fewer calls, help"
    )
