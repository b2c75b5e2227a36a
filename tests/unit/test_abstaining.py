"""`privacy/noise.py`: how rarely noise says that the members abstain, and who is heard when they do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from langchain_dpicl.aggregators import EmbeddingMean, NoisyVote
from langchain_dpicl.aggregators.means import STEPS
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.votes import (
    FALSE_RATE,
    TOLD,
    VoteNoise,
    abstention_threshold,
    tail_reach,
    tells_abstention,
    told_probability,
)


def law(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """The discrete Gaussian, from its definition."""
    reach = math.ceil(15 * sigma) + 5
    x = np.arange(-reach, reach + 1)
    weights = np.array([math.exp(-(int(k) ** 2) / (2 * sigma**2)) for k in x])
    return x, weights / weights.sum()


def rate_of_none(counts: tuple[int, ...], sigma: float) -> float:
    """Exactly how often `NoisyVote` says that the members abstain: the sum over the noise of abstentions."""
    *labels, abstentions = counts
    x, weights = law(sigma)
    total, below = 0.0, np.concatenate([[0.0], np.cumsum(weights)])
    threshold = abstention_threshold(sum(counts), sigma)
    for noise, weight in zip(x.tolist(), weights.tolist(), strict=True):
        noisy = abstentions + noise
        if noisy >= threshold:
            rest = [below[min(max(noisy - count - int(x[0]), 0), len(x))] for count in labels]  # P(count + X < noisy)
            total += weight * math.prod(rest)
    return total


NUMBERS = [1, 2, 3, 9, 10, 19, 20, 40, 100]
SIGMAS = [0.05, 0.3, 1.0, 2.5, 9.6, 30.0]


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("members", NUMBERS)
def test_noise_alone_says_that_the_members_abstain_less_than_once_in_a_million(members: int, sigma: float) -> None:
    """Exact. "Half of N and 2 sigma" has .013 and .022 at N = 20 and 10, sigma 9.6, where nobody abstains."""
    most = (members - 1) // 2  # fewer than half
    for abstentions in {0, most // 2, most}:
        votes = members - abstentions
        for counts in ((votes, 0), (votes - votes // 2, votes // 2), (*[1] * votes, 0, 0)):
            assert rate_of_none((*counts, abstentions), sigma) <= FALSE_RATE


def test_the_issue_of_the_old_rule_is_what_the_exact_law_says() -> None:
    """The law above reproduces what was measured of the rule before: so it would see a rate that is too high."""
    x, weights = law(9.6)
    for members, least, rate in ((20, 19.2, 0.013), (10, 19.2, 0.022)):
        below = np.concatenate([[0.0], np.cumsum(weights)])
        wins = [
            weight * below[min(max(noise - members - int(x[0]), 0), len(x))] * below[noise - int(x[0])]
            for noise, weight in zip(x.tolist(), weights.tolist(), strict=True)
            if noise >= least
        ]
        assert sum(wins) > rate / 2 > 1000 * FALSE_RATE


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0, 2.5, 9.6, 30.0, 999.0])
def test_the_reach_of_the_noise_is_the_least_that_is_rare_enough(sigma: float) -> None:
    x, weights = law(sigma)
    reach = tail_reach(sigma)
    assert weights[x >= reach].sum() <= FALSE_RATE < weights[x >= reach - 1].sum()


@pytest.mark.parametrize("sigma", [1000.5, 5000.0])
def test_above_a_thousand_the_bound_holds_and_costs_two_counts_at_most(sigma: float) -> None:
    x, weights = law(sigma)
    reach = tail_reach(sigma)
    assert weights[x >= reach].sum() <= FALSE_RATE < weights[x >= reach - 2].sum()


def test_where_all_abstain_the_rate_is_the_one_that_is_told() -> None:
    for members, sigma, labels in ((20, 2.0, 2), (20, 1.0, 5), (100, 9.6, 3), (10, 9.6, 2)):
        assert told_probability(members, sigma, labels) == pytest.approx(
            rate_of_none((*[0] * labels, members), sigma), abs=1e-9
        )


def test_few_members_under_much_noise_do_not_tell() -> None:
    assert [tells_abstention(n, 9.6, 2) for n in (10, 20, 100, 120)] == [False, False, False, True]
    assert [tells_abstention(20, sigma, 2) for sigma in (0.1, 1.0, 2.0)] == [True, True, False]
    vote = NoisyVote(["a", "b"])
    assert (vote.tells(20, 9.6), vote.tells(120, 9.6)) == (False, True)


def test_only_outputs_that_are_expected_to_count_can_tell(embeddings: object) -> None:
    """Calls are padded, and buckets may be empty: where all fail, fewer abstentions than N are counted."""
    for mechanism, parameter, crowd in (("vote", 1.0, Crowd(35, 20.0, True)), ("vote-em", 2.0, Crowd(35, 26.4))):
        vote = NoisyVote(["a", "b"]).under(mechanism, crowd)
        assert VoteNoise(mechanism, parameter, crowd.own_calls).told(35, 2) > TOLD
        full = vote.under(mechanism, replace(crowd, expected=35.0))
        assert (vote.tells(35, parameter), full.tells(35, parameter)) == (False, True)
    mean = EmbeddingMean(embeddings, release="vector")  # type: ignore[arg-type]
    assert [mean.under("embedding", Crowd(40, many)).tells(40, 3.0) for many in (30.0, 40.0)] == [False, True]


def test_a_mean_of_embeddings_counts_abstentions_in_steps(embeddings: object) -> None:
    """The noise is a Gaussian on a fine lattice there: the threshold is 4.754 sigma above the most that is not half."""
    threshold = abstention_threshold(20, 3.0, STEPS) / STEPS
    assert threshold == pytest.approx(9 + 4.7534 * 3, abs=1e-3)
    mean = EmbeddingMean(embeddings, release="vector")  # type: ignore[arg-type]
    told = 0.5 * math.erfc((threshold - 40) / 3.0 / math.sqrt(2))
    assert abstention_threshold(40, 3.0, STEPS) / STEPS == pytest.approx(19 + 4.7534 * 3, abs=1e-3)
    assert told_probability(40, 3.0, 0, STEPS) == pytest.approx(
        0.5 * math.erfc((19 + 4.7534 * 3 - 40) / 3.0 / math.sqrt(2)), abs=5e-3
    )
    assert told > TOLD
    assert (mean.tells(20, 3.0), mean.tells(40, 3.0)) == (False, True)


def test_a_plan_says_when_its_members_are_too_few_to_tell() -> None:
    plan = PrivacyPlan.solve(epsilon=1.0, delta=1e-5, lines={"vote": LineRequest("vote", 0.05, 1000)})
    few, many = plan.explain(members=20), plan.explain(members=400)
    assert "20 members are too few to tell failing members from noise" in few
    assert "If all 400 members fail, a release says so with probability 1" in many
    assert "abstention" not in plan.explain()
