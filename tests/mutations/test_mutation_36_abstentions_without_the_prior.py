"""Mistake 36: one bit for the winner of a vote whose abstentions are compared with counts without their prior."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache

import numpy as np
import pytest

from langchain_dpicl import NoisyVote
from langchain_dpicl.privacy import LineRequest, PLDAccountant
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.votes import GAUSSIAN, WINNER, discrete_gaussian

RIVALS, SIGMA, RATE, EPSILON = 50, 0.5, 0.05, 0.3
LABELS = ["mine", *(f"rival {i}" for i in range(RIVALS))]
PRIOR = {label: 0.17 if label == "mine" else 1.0 for label in LABELS}
COUNTS = [(abstain - behind, abstain) for abstain in range(4, 9) for behind in (-5, -4, -1, 0, 1, 2)]
"""Votes for the owner's label, and abstentions. Nobody votes for the rivals, whose largest noise hardly varies."""


class Told(SecureRandomness):
    """Draws the noise that it is told: of the owner's label, of the best rival, and of abstentions."""

    def __init__(self, own: int, rival: int, abstain: int) -> None:
        self.noise = np.array([own, rival, *[-50] * (RIVALS - 1), abstain])

    def discrete_gaussian(self, sigma: float, size: int) -> np.ndarray:
        return self.noise


@cache
def law(mechanism: str, own: int, abstain: int) -> dict[str | None, float]:
    """The release's law, all rivals as one, summed over all noise but 1e-14 of it. The prior is no whole number of
    votes, so that no lot is drawn."""
    vote = NoisyVote(LABELS, prior=PRIOR, lead=0.05).under(mechanism, Crowd(2, 3.0, True))
    counts = np.array([own, *[0] * RIVALS, abstain])
    support, weights = discrete_gaussian(SIGMA)
    chance = dict(zip(support.tolist(), weights.tolist(), strict=True))
    largest = dict(zip(support.tolist(), np.diff(np.cumsum(weights) ** RIVALS, prepend=0.0).tolist(), strict=True))
    found: Counter[str | None] = Counter()
    for x, m, y in itertools.product(range(-4, 5), range(-1, 5), range(-4, 5)):
        release = vote.draw(counts, Crowd(2, 3.0, True), SIGMA, Told(x, m, y))
        found[release if release in (None, "mine") else "rival"] += chance[x] * largest[m] * chance[y]
    return found


def largest(mechanism: str, releases: int) -> float:
    """The delta of the best adversary, who chooses the others' votes before each release."""
    a = math.exp(EPSILON)
    pairs = []
    for own, abstain in COUNTS:
        absent, added = law(mechanism, own, abstain), law(mechanism, own + 1, abstain)
        pairs.append([((1 - RATE) * q + RATE * added.get(name, 0.0), q) for name, q in absent.items()])

    def worth(left: int, ratio: float) -> float:
        if not left:
            return max(0.0, ratio - a)
        return max(sum(q * worth(left - 1, ratio * p / q) for p, q in pair) for pair in pairs)

    return worth(releases, 1.0)


def check(mechanism: str, releases: int) -> None:
    line = LineRequest(WINNER, RATE, releases, options={"own_calls": 1.0}).line(SIGMA)
    claimed = PLDAccountant().delta([line], EPSILON)
    assert largest(mechanism, releases) <= claimed, f"{claimed:.3g} is claimed at epsilon {EPSILON}"


def test_36_abstentions_without_the_prior_are_caught() -> None:
    """Two thresholds tell more than one (1.27 times the claim of two releases), but one release does not show it."""
    for releases in (1, 2):
        check(WINNER, releases)
    check(GAUSSIAN, 1)
    with pytest.raises(AssertionError, match="is claimed"):
        check(GAUSSIAN, 2)
