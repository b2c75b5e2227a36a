"""The exponential vote, `NoisyVote` under "vote-em": its law, its range, its abstentions and its flips, enumerated."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cache, partial

import numpy as np
import pytest
from exact import EPSILONS, Law, added, check_profile, gaussian_masses, hockey_stick, law, log_range, replaced

from langchain_dpicl import NoisyVote
from langchain_dpicl.privacy import MECHANISMS
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.votes import FALSE_RATE, VoteNoise
from langchain_dpicl.private.boundary import ABSTAIN

LABELS = ("a", "b", "c")
EPS0, SIGMA = 1.7, 0.6
DOMAIN: tuple[object, ...] = (0, 1, 2, ABSTAIN)
"""What one output may be. `NOTHING` is an output that is not there."""
NOTHING = None
PRIOR = {"a": 0.9, "b": 0.1}

Outputs = tuple[object, ...]


@cache
def vote_law(outputs: Outputs, own_calls: bool, prior: bool = False) -> Law:
    """The exact law of the release of these outputs, by the code itself."""
    vote = NoisyVote(LABELS, prior=PRIOR if prior else None).under("vote-em", Crowd(5, 3.0, own_calls))
    counted = [output for output in outputs if output is not NOTHING]
    return law(lambda randomness: str(vote.aggregate(counted, EPS0, randomness)))


@cache
def gaussian_law(outputs: Outputs) -> Law:
    """The exact law of the Gaussian vote between two labels."""
    vote = NoisyVote(LABELS[:2]).under("vote", Crowd(5, 3.0, own_calls=True))
    counted = [output for output in outputs if output not in (NOTHING, 2)]
    return law(lambda randomness: str(vote.aggregate(counted, SIGMA, randomness)))


@pytest.mark.parametrize("own_calls", [False, True])
@pytest.mark.parametrize("prior", [None, {"a": 0.9, "b": 0.1}, {"c": 1.0}])
@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (3, 1, 0, 0), (0, 2, 2, 9), (0, 0, 0, 40)])
def test_the_release_has_the_law_in_closed_form(
    counts: tuple[int, ...], prior: dict[str, float] | None, own_calls: bool
) -> None:
    """Weights exp(r c) times the prior to the power r / nats; abstaining has their mean, times exp(r (A - t))."""
    vote = NoisyVote(LABELS, prior=prior).under("vote-em", Crowd(9, 6.0, own_calls))
    found = law(lambda randomness: str(vote.draw(np.array(counts), vote._crowd(()), EPS0, randomness)))
    r = EPS0 if own_calls else EPS0 / 2
    reached = 4 + math.ceil(math.log(1 / (3 * FALSE_RATE)) / r)
    nats = 2 * 0.3 * 6 / ((2 * (0.3 + 0.7 / 3) - 0.3) * 6 + 2 * math.pi**2 / 6 / r**2)
    shares = [0.99 * (prior or dict.fromkeys(LABELS, 1 / 3)).get(label, 0.0) + 0.01 / 3 for label in LABELS]
    factors = [share ** (r / nats) for share in shares]
    weights = [factor * math.exp(r * count) for factor, count in zip(factors, counts, strict=False)]
    weights.append(sum(factors) / 3 * math.exp(r * (counts[3] - reached)))
    for outcome, weight in zip((*LABELS, "None"), weights, strict=True):
        assert found[outcome] == pytest.approx(weight / sum(weights), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("prior", [False, True])
@pytest.mark.parametrize(
    ("pairs", "own_calls"),
    [(list(replaced((*DOMAIN, NOTHING), 3)), False), (list(added(DOMAIN, 4)), True)],
    ids=["replaced", "added"],
)
def test_its_range_is_eps0_for_its_neighbours_and_reached(
    pairs: list[tuple[Outputs, Outputs]], own_calls: bool, prior: bool
) -> None:
    """Brute force over all outputs of three labels, abstentions, and outputs that are not there."""
    found = [log_range(vote_law(one, own_calls, prior), vote_law(other, own_calls, prior)) for one, other in pairs]
    assert max(found) == pytest.approx(EPS0, rel=1e-9)


def test_the_rate_for_an_output_more_would_double_the_range_if_outputs_are_replaced() -> None:
    """The mutant: r = eps0 with shared buckets. The check above must see it."""
    found = [log_range(vote_law(one, True), vote_law(other, True)) for one, other in replaced((*DOMAIN, NOTHING), 2)]
    assert max(found) == pytest.approx(2 * EPS0, rel=1e-9)


@pytest.mark.parametrize("own_calls", [False, True], ids=["replaced", "added"])
def test_both_votes_keep_their_profiles(own_calls: bool) -> None:
    """The exact law of the winner of every pair, both directions, against what the plan accounts for."""
    pairs = list(added(DOMAIN, 3) if own_calls else replaced((*DOMAIN, NOTHING), 2))
    pairs += [(other, one) for one, other in pairs]
    for name, parameter, of in (
        ("vote-em", EPS0, partial(vote_law, own_calls=own_calls)),
        ("vote", SIGMA, gaussian_law),
    ):
        profile = MECHANISMS[name].of({"own_calls": float(own_calls)}).profile(parameter)
        check_profile([(of(one), of(other)) for one, other in pairs], profile)


def test_one_noisy_count_that_moves_by_one_has_exactly_the_profile_of_own_calls() -> None:
    """All noisy counts are seen, and one of them moves: the loss is that of one discrete Gaussian, no more, no less."""
    for sigma in (0.6, 1.4):
        masses = gaussian_masses(sigma)
        p: dict[Hashable, float] = dict(enumerate(masses))
        q: dict[Hashable, float] = {place + 1: mass for place, mass in p.items() if isinstance(place, int)}
        for name in ("vote", "scores"):
            allowed = MECHANISMS[name].of({"own_calls": 1.0}).profile(sigma).delta(np.array(EPSILONS))
            assert [hockey_stick(p, q, epsilon) for epsilon in EPSILONS] == pytest.approx(allowed, abs=1e-12)
            assert (allowed < MECHANISMS[name]().profile(sigma).delta(np.array(EPSILONS)) + 1e-15).all()


# -- abstentions and flips ---------------------------------------------------------------------------------------------


def release_of(noise: VoteNoise, members: int, counts: Sequence[int]) -> Law:
    """The law of a vote among as many labels as there are counts, abstentions last."""
    vote = NoisyVote([f"label {i}" for i in range(len(counts) - 1)])
    crowd = Crowd(members, members, noise.own_calls)
    bound = vote.under(noise.mechanism, crowd)
    return law(lambda randomness: str(bound.draw(np.array(counts), crowd, noise.parameter, randomness)))


@pytest.mark.parametrize("eps0", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("members", [1, 2, 9, 20])
@pytest.mark.parametrize("own_calls", [False, True])
def test_fewer_than_half_do_not_abstain_for_all(members: int, eps0: float, own_calls: bool) -> None:
    """Exact, however the others vote, and if nobody else is there."""
    noise = VoteNoise("vote-em", eps0, own_calls)
    most = (members - 1) // 2
    for votes in {0, members - most}:
        for counts in ((votes, 0, most), (votes // 2, votes - votes // 2, most), (votes, 0, 0, 0, most)):
            assert release_of(noise, members, counts)["None"] <= FALSE_RATE
    least = most + 1 + 2 * math.ceil(math.log(1 / FALSE_RATE) / noise.rate)
    assert release_of(noise, members, (0, 0, least))["None"] > 0.5, "many more than half do"


@pytest.mark.parametrize(("mechanism", "parameter"), [("vote", 0.7), ("vote", 1.5), ("vote-em", 1.0), ("vote-em", 2.0)])
@pytest.mark.parametrize("outputs", [9, 12, 20])
def test_what_is_told_if_all_abstain_is_exact(mechanism: str, parameter: float, outputs: int) -> None:
    """Also if fewer outputs come than members were counted on: with a call for every owner, or with empty buckets."""
    noise = VoteNoise(mechanism, parameter, own_calls=True)
    told = release_of(noise, 12, (0, 0, outputs))["None"]
    assert noise.told(12, 2, outputs) == pytest.approx(told, abs=1e-9)
    assert noise.told(12, 2) == noise.told(12, 2, 12)


def test_a_vote_tells_by_the_outputs_that_are_expected() -> None:
    """20 calls padded to 35: 20 abstentions under noise of sigma 1 do not reach a threshold of 17 + 5, 35 would."""
    vote = NoisyVote(["a", "b"])
    assert vote.tells(35, 1.0)
    assert not vote.under("vote", Crowd(35, 20.0, own_calls=True)).tells(35, 1.0)
    assert vote.under("vote", Crowd(35, 30.0, own_calls=True)).tells(35, 1.0)


@pytest.mark.parametrize("labels", [2, 3, 6])
@pytest.mark.parametrize("margin", [0, 1, 4])
@pytest.mark.parametrize("own_calls", [False, True])
def test_the_flip_probability_is_exact_if_all_others_are_runners_up(labels: int, margin: int, own_calls: bool) -> None:
    """But for "the members abstain", which takes less than a millionth of it."""
    noise = VoteNoise("vote-em", 0.8, own_calls)
    counts = (3 + margin, *[3] * (labels - 1), 0)
    lost = 1.0 - release_of(noise, 20, counts)["label 0"]
    assert noise.flip(margin, labels) == pytest.approx(lost, abs=FALSE_RATE)
    gaussian = VoteNoise("vote", 0.8, own_calls)
    two = 1.0 - release_of(gaussian, 20, (3 + margin, 3, 0))["label 0"]
    assert gaussian.flip(margin, 2) == pytest.approx(two, abs=FALSE_RATE)
