"""`privacy/choice.py`: what a plan chooses by public numbers, and which plans are refused."""

from __future__ import annotations

import numpy as np
import pytest

from langchain_dpicl.errors import InfeasiblePlan
from langchain_dpicl.privacy import LineRequest, PLDAccountant, PrivacyPlan
from langchain_dpicl.privacy.choice import Crowd, best_rate, best_vote, compared, filled, options_of, refuse_noise
from langchain_dpicl.privacy.lines import PlanLine
from langchain_dpicl.privacy.votes import VoteNoise


def noise(epsilon: float, rate: float, count: int, mechanism: str = "vote", **options: float) -> float:
    """The plan's noise for one line."""
    line = LineRequest(mechanism, rate, count, options=options)
    return PrivacyPlan.solve(epsilon=epsilon, delta=1e-5, lines={"line": line}).lines["line"].parameter


@pytest.mark.parametrize(("epsilon", "count", "owners"), [(1.0, 1000, 600), (8.0, 20, 60)])
def test_the_rate_has_nearly_the_largest_margin_over_noise(epsilon: float, count: int, owners: int) -> None:
    """Against a grid of twenty rates, most of which are not compared: 3 % less at most."""
    members = 20

    def signal(rate: float) -> float:
        return filled(members, rate, owners) / noise(epsilon, rate, count)

    chosen = best_rate(epsilon, 1e-5, count, members, owners)
    grid = np.geomspace(0.2, 5.0, 20) * members / owners
    assert signal(chosen) >= 0.97 * max(signal(min(1.0, float(rate))) for rate in grid)


@pytest.mark.parametrize(("rate", "owners"), [(0.004, 5000), (1.0, 20), (0.5, 7)])
def test_the_filled_buckets_are_counted_exactly(rate: float, owners: int) -> None:
    """Of N buckets each is empty with probability (1 - q / N)^owners."""
    assert filled(20, rate, owners) == pytest.approx(20 * (1 - (1 - rate / 20) ** owners), rel=1e-12)


@pytest.mark.parametrize("own_calls", [False, True])
@pytest.mark.parametrize(("epsilon", "count", "expected"), [(1.0, 100, 20.0), (3.0, 10, 6.0), (0.5, 20, 60.0)])
def test_the_vote_is_the_one_that_noise_overturns_less_often(
    epsilon: float, count: int, expected: float, own_calls: bool
) -> None:
    crowd, rate, lead = Crowd(40, expected, own_calls), 0.02, 0.35
    margin, flips = int(lead * expected), {}
    found = compared(epsilon, 1e-5, count, rate, crowd, 3, lead)
    for name in ("vote-winner", "vote-em"):
        parameter = noise(epsilon, rate, count, name, **options_of(crowd))
        assert found[name][0] == pytest.approx(parameter, rel=0.1)
        flips[name] = VoteNoise(name, parameter, own_calls).flip(margin, 3)
    assert flips[best_vote(epsilon, 1e-5, count, rate, crowd, 3, lead)] <= 1.5 * min(flips.values())


def test_both_votes_are_chosen_somewhere() -> None:
    """Far ahead the Gaussian's tail is the lighter one; next to each other the exponential vote errs less."""
    chosen = {lead: best_vote(1.0, 1e-5, 10, 0.02, Crowd(40, 20.0), 2, lead) for lead in (0.1, 0.9)}
    assert chosen == {0.1: "vote-em", 0.9: "vote-winner"}


def test_the_exponential_vote_overturns_a_quarter_as_often_at_a_margin_of_two() -> None:
    """Epsilon 3, q 40 / 6920, 1,000 releases: margins of 2 and 4 votes flip with .019 and .0004 for outputs that are
    replaced, by a range of 3.9 that the accountant certifies; with a call for each owner, .0004 and 2e-7."""
    line = LineRequest("vote-em", 40 / 6920, 1000)
    assert PLDAccountant().epsilon([line.line(3.9)], 1e-5) <= 3.0
    shared, own = VoteNoise("vote-em", 3.9), VoteNoise("vote-em", 3.9, own_calls=True)
    assert [shared.flip(margin, 2) for margin in (2, 4)] == pytest.approx([0.0198, 0.00041], rel=0.02)
    assert [own.flip(margin, 2) for margin in (2, 4)] == pytest.approx([0.00041, 1.7e-7], rel=0.02)
    gaussian = VoteNoise("vote", noise(3.0, 40 / 6920, 1000))
    assert gaussian.flip(2, 2) > 3.5 * shared.flip(2, 2)


def test_a_plan_that_is_all_noise_is_refused_with_what_helps() -> None:
    line, crowd = PlanLine("vote", 0.2, 1000, parameter=7.0), Crowd(20, 12.5)
    refuse_noise(line, 0.1, crowd, tickets=False)
    with pytest.raises(
        InfeasiblePlan, match=r"sigma 7\).*12\.5 expected.*0\.11.*1,000.*tickets=True.*calls=.*PrivateHead"
    ):
        refuse_noise(line, 0.11, crowd, tickets=False)
    with pytest.raises(InfeasiblePlan, match="fewer tickets than 1,000"):
        refuse_noise(line, 0.11, crowd, tickets=True)


def test_plans_of_earlier_versions_keep_their_digest() -> None:
    """Computed by the version before calls of one owner each. The option that says so is in no plan without them."""
    vote = PrivacyPlan.solve(epsilon=3, delta=1e-5, lines={"vote": LineRequest("vote", 0.01, 100)})
    assert vote.digest == "eabbf13225275b74032d89c70110b387fe2824af7722b24f3a7a127f75bea0b8"
    keywords = PlanLine("joint-em", 0.01, 100, parameter=4.60243)
    mean = PlanLine("embedding", 0.02, 50, parameter=1.97657)
    both = PrivacyPlan(3.0, 1e-5, {"joint-em": keywords, "embedding": mean})
    assert both.digest == "7a3448a97750253c061c1724752aefe6e95483459e8483f3c5ed1f946993174f"
    assert both == PrivacyPlan.from_json(both.to_json())
    said = LineRequest("vote", 0.01, 100, options={"own_calls": 0.0})
    assert PrivacyPlan.solve(epsilon=3, delta=1e-5, lines={"vote": said}).digest == vote.digest
    own = LineRequest("vote", 0.01, 100, options={"own_calls": 1.0})
    assert PrivacyPlan.solve(epsilon=3, delta=1e-5, lines={"vote": own}).digest != vote.digest
