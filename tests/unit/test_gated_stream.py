"""`gated_stream`: tickets, buckets and noise of both sides, against brute force and exact laws.

Each statistical test has a false-alarm probability of 1e-8.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from gated_stream import Question, Side, released, walk_blind, walk_gated, zipf_stream
from scipy import stats

from langchain_dpicl import NoisyVote
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.private.boundary import ABSTAIN

FALSE_ALARM = 1e-8


def question(eligible: list[int], votes: list[int], *, blind: list[int] | None = None, empty: int = 0) -> Question:
    return Question(
        np.array(eligible, np.int64), np.array(votes, np.int64), np.array(blind or [0], np.int64), empty, right=0
    )


QUESTIONS = (
    question([4, 1, 0], [2, 1, 0], empty=1),
    question([1, 2], [1, -1]),
    question([], [], empty=2),
    question([3, 1, 2, 4, 0], [0, 0, 1, 2, 2], empty=-1),
)


def by_brute_force(stream: list[int], side: Side, owners: int, randomness: Any) -> tuple[list[list[int]], Counter[int]]:
    """Counts of every query, and how often each owner took part, owner by owner and bucket by bucket."""
    tickets, took_part, found = dict.fromkeys(range(owners), side.releases), Counter[int](), []
    for number in stream:
        asked = QUESTIONS[number]
        taking = [o for o in asked.eligible.tolist() if tickets[o] > 0]
        for owner in taking:
            tickets[owner] -= 1
            took_part[owner] += 1
        sampled = [taking[i] for i in randomness.coin_positions(len(taking), side.rate)]
        buckets: list[list[int]] = [[] for _ in range(side.members)]
        for owner, member in zip(sampled, randomness.integers(side.members, len(sampled)).tolist(), strict=True):
            buckets[member].append(owner)
        counts = [0] * 4
        nearness = {owner: place for place, owner in enumerate(asked.eligible.tolist())}
        for bucket in buckets:
            said = asked.empty if not bucket else int(asked.votes[min(nearness[owner] for owner in bucket)])
            counts[said if said >= 0 else 3] += 1
        found.append(counts)
    return found, took_part


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_a_walk_is_that_of_brute_force_and_no_owner_takes_part_more_than_t_times(seeded: Any, rate: float) -> None:
    stream = [0, 3, 3, 1, 2, 0, 3, 1, 0, 3, 3, 0, 1, 1, 3, 2, 0] * 2
    side = Side(members=3, rate=rate, sigma=1.0, releases=5)
    walk = walk_gated(QUESTIONS, np.array(stream), side, 6, 3, seeded(5))
    counts, took_part = by_brute_force(stream, side, 6, seeded(5))
    assert walk.counts.tolist() == counts
    assert max(took_part.values()) == 5
    assert walk.taking_part.sum() == sum(took_part.values())
    assert walk.answered == len(stream)


def test_every_eligible_owner_burns_a_ticket_whether_it_is_sampled_or_not(seeded: Any) -> None:
    """At a rate of 1e-9 nobody is sampled, and tickets are gone all the same: min(T, times eligible) of each owner."""
    stream = np.array([0, 1, 3, 0, 3, 3, 1, 0])
    side = Side(members=2, rate=1e-9, sigma=1.0, releases=4)
    walk = walk_gated(QUESTIONS, stream, side, 6, 3, seeded(1))
    times = Counter(owner for number in stream.tolist() for owner in QUESTIONS[number].eligible.tolist())
    assert walk.examples.sum() == 0
    assert walk.taking_part.sum() == sum(min(4, n) for n in times.values())
    assert walk.holding[-1] == 6 - sum(n >= 4 for n in times.values())
    assert (np.diff(walk.holding) <= 0).all()


def test_without_tickets_members_are_asked_without_examples_and_the_stream_goes_on(seeded: Any) -> None:
    walk = walk_gated(QUESTIONS, np.zeros(9, np.int64), Side(4, 1.0, 1.0, 3), 6, 3, seeded(2))
    assert walk.taking_part.tolist() == [3] * 3 + [0] * 6
    assert walk.counts[3:].tolist() == [[0, 4, 0, 0]] * 6
    assert walk.answered == 9


def test_a_blind_plan_stops_at_t(seeded: Any) -> None:
    asked = [question([], [], blind=[0, 1, 2, 1] * 20, empty=2)]
    walk = walk_blind(asked, np.zeros(12, np.int64), Side(5, 0.5, 1.0, 7), 8, 3, seeded(3))
    assert walk.answered == 7
    assert walk.counts.sum(axis=1).tolist() == [5] * 7 + [0] * 5
    assert walk.holding.tolist() == [8] * 6 + [0] * 6
    assert walk_blind(asked, np.zeros(4, np.int64), Side(5, 0.5, 1.0, 7), 8, 3, seeded(3)).holding.tolist() == [8] * 4


def test_of_a_gated_bucket_the_most_similar_owner_stays_and_coins_are_independent(seeded: Any) -> None:
    """Chi-square over all outcomes of three eligible owners with a vote each, in two members, at a rate of .6."""
    asked = [question([7, 2, 5], [0, 1, 2], empty=-1)]
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for places in itertools.product((0, 1, None), repeat=3):  # nearest first; None is not sampled
        counts = [0] * 4
        for member in (0, 1):
            inside = [vote for vote, place in enumerate(places) if place == member]
            counts[inside[0] if inside else 3] += 1
        law[tuple(counts)] += math.prod(0.4 if place is None else 0.3 for place in places)
    runs = 20_000
    walk = walk_gated(asked, np.zeros(runs, np.int64), Side(2, 0.6, 1.0, runs), 8, 3, seeded(7))
    seen = Counter(map(tuple, walk.counts.tolist()))
    assert set(seen) == set(law)
    cells = sorted(law)
    assert min(law.values()) * runs > 20
    assert stats.chisquare([seen[c] for c in cells], [law[c] * runs for c in cells]).pvalue > FALSE_ALARM


def test_a_blind_member_has_any_owners_example_or_none(seeded: Any) -> None:
    """One member's law: empty with (1 - q/N)^n, else each read example alike. Chi-square over one of two members."""
    runs, owners, rate = 20_000, 10, 0.3
    asked = [question([], [], blind=[0, 1, 1, 2], empty=-1)]
    walk = walk_blind(asked, np.zeros(runs, np.int64), Side(2, rate, 1.0, runs), owners, 3, seeded(9))
    none = (1 - rate / 2) ** owners
    expected = 2 * runs * np.array([(1 - none) / 4, (1 - none) / 2, (1 - none) / 4, none])
    # Two members of one release are negatively dependent, which makes the statistic smaller: conservative.
    assert stats.chisquare(walk.counts.sum(axis=0), expected).pvalue > FALSE_ALARM


class Prepared:
    """Noise that a test wrote down; ties in the order of their labels."""

    def __init__(self, noise: np.ndarray[Any, Any]) -> None:
        self.noise = noise

    def discrete_gaussian(self, sigma: float, size: int) -> Any:
        assert size == self.noise.size
        return self.noise.ravel()

    def uniforms(self, size: int) -> Any:
        return np.tile(np.linspace(0.9, 0.5, 3), size // 3)

    def integers(self, high: int, size: int) -> Any:
        return np.zeros(size, np.int64)


def test_a_release_is_what_the_noisy_vote_releases_from_the_same_noise(seeded: Any) -> None:
    labels, members, sigma = ["a", "b", "c"], 8, 0.5
    counts = seeded(4).generator.multinomial(members, [0.3, 0.1, 0.1, 0.5], size=400)
    noise = np.rint(seeded(6).generator.normal(0, sigma, counts.shape)).astype(np.int64)
    found = released(counts, members, sigma, Prepared(noise))  # type: ignore[arg-type]
    vote = NoisyVote(labels)
    for row, extra, label in zip(counts, noise, found.tolist(), strict=True):
        outputs = [voted for voted, n in zip([0, 1, 2, ABSTAIN], row, strict=True) for _ in range(n)]
        said = vote.aggregate(outputs, sigma, Prepared(extra))  # type: ignore[arg-type]
        assert (labels[label] if label >= 0 else None) == said
    assert 20 < (found < 0).sum() < 380


def test_ties_between_labels_are_even(seeded: Any) -> None:
    counts = np.tile([2, 2, 0, 2, 0], (6000, 1))
    found = released(counts, 6, 0.02, seeded(8))
    seen = np.bincount(found, minlength=4)
    assert seen[2] == 0
    assert stats.chisquare(seen[[0, 1, 3]]).pvalue > FALSE_ALARM


def test_a_stream_follows_zipfs_law(seeded: Any) -> None:
    stream = zipf_stream(5, 20_000, 1.5, seeded(10))
    weights = np.arange(1, 6) ** -1.5
    expected = 20_000 * weights / weights.sum()
    assert stats.chisquare(np.bincount(stream, minlength=5), expected).pvalue > FALSE_ALARM
    even = np.bincount(zipf_stream(5, 20_000, 0.0, seeded(11)), minlength=5)
    assert stats.chisquare(even).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    "wrong",
    [{"members": 1}, {"rate": 0.0}, {"rate": 1.1}, {"sigma": 0.0}, {"releases": 0}],
)
def test_numbers_out_of_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(wrong))):
        Side(**({"members": 2, "rate": 0.5, "sigma": 1.0, "releases": 3} | wrong))  # type: ignore[arg-type]


def test_a_question_has_a_vote_for_every_eligible_owner() -> None:
    with pytest.raises(InvalidParameter, match="votes"):
        question([1, 2], [0])
