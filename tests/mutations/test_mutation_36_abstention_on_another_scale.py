"""Mistake 36: abstention is tested on another scale than the winner, so a count that grows passes two thresholds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from langchain_dpicl.aggregators import NoisyVote, votes
from langchain_dpicl.privacy import Line, PLDAccountant
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.votes import discrete_gaussian

SIGMA, RATE, CROWD = 1.0, 0.1, Crowd(4, 2.0, True)
PRIOR = {"a": 0.97, "b": 0.02, "c": 0.01}
REACH = range(-9, 10)
EPSILONS = (0.1, 0.2, 0.4, 0.8)


class Fixed:
    """Noise that was drawn before, in place of what is drawn, and the first of equals."""

    def __init__(self, noise: tuple[int, ...]) -> None:
        self.noise = np.array(noise)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        return self.noise

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        return np.zeros(size, np.int64)


def stories() -> Iterator[list[str | None]]:
    """What is released as one count's noise grows, for each count that may move and each noise of all others."""
    vote = NoisyVote(list(PRIOR), prior=PRIOR, mechanism="vote").under("vote", CROWD)
    for place, *others in itertools.product(range(4), *([range(-4, 5, 2)] * 3)):
        story = []
        for x in REACH:
            noise: Any = Fixed((*others[:place], x, *others[place:]))
            story.append(vote.draw(np.array([0, 3, 0, 3]), CROWD, SIGMA, noise))
        yield story


def gaps() -> set[int]:
    """Between the first and the last change of each story: 0 for one threshold."""
    found = set()
    for story in stories():
        if changes := [i for i in range(1, len(story)) if story[i] != story[i - 1]]:
            found.add(changes[-1] - changes[0])
    return found


def worst(gap: int, epsilon: float, count: int) -> float:
    """The largest delta of so many releases, if a count that moves passes two thresholds this far apart (0: one)."""
    support, weights = discrete_gaussian(SIGMA)
    a = math.exp(epsilon)

    def law(moved: int, low: int) -> NDArray[np.float64]:
        place = support + moved
        return np.array([weights[place < low].sum(), weights[(place >= low) & (place < low + gap)].sum(), 0.0])

    pairs = []
    for low in range(-5, 6):
        absent, present = law(0, low), law(1, low)
        absent[2], present[2] = 1.0 - absent.sum(), 1.0 - present.sum()
        pairs.append((absent, (1 - RATE) * absent + RATE * present))

    def best(left: int, ratio: float, adds: bool) -> float:
        if not left:
            return max(0.0, 1.0 - a * ratio) if adds else max(0.0, ratio - a)
        return max(
            sum(q * best(left - 1, ratio * p / q, adds) for q, p in zip(*pair, strict=True) if q > 1e-15)
            for pair in pairs
        )

    return max(best(count, 1.0, adds) for adds in (False, True))


def excess(gap: int, count: int) -> float:
    line = Line(MECHANISMS["vote"].of({"own_calls": 1.0}).profile(SIGMA), RATE, count)
    return max(worst(gap, epsilon, count) / PLDAccountant().delta([line], epsilon) for epsilon in EPSILONS)


def test_36_abstention_on_another_scale_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two releases: one shows nothing. The rule of an earlier release compared abstentions with counts alone."""
    assert gaps() == {0}
    assert excess(0, 2) <= 1.0
    real = votes.NoisyVote.draw

    def mutant(self: Any, counts: Any, crowd: Any, parameter: float, randomness: Any) -> Any:
        noisy = counts + randomness.discrete_gaussian(parameter, len(counts))
        reached = votes.VoteNoise("vote", parameter, True).abstention_count(crowd.members, len(self.labels))
        if noisy[-1] > noisy[:-1].max() and noisy[-1] >= reached:
            return None
        return real(self, np.array([*noisy[:-1], -100]), crowd, parameter, Fixed((0,) * len(noisy)))

    monkeypatch.setattr(votes.NoisyVote, "draw", mutant)
    found = gaps()
    assert found > {0}
    assert max(excess(gap, 1) for gap in found) <= 1.0
    assert max(excess(gap, 2) for gap in found) > 1.05
