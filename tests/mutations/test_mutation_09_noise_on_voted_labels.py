"""Mistake 9: noise on those labels alone that got votes. A label without votes then shows that nobody voted for it."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from exact import Branching, Law, check_profile, law
from numpy.typing import NDArray
from owner_laws import Passing

from langchain_dpicl import NoisyVote
from langchain_dpicl.privacy import MECHANISMS, Randomness
from langchain_dpicl.private.boundary import ABSTAIN

SIGMA, MEMBERS = 0.5, 2
ANSWERS: list[object] = [0, 1, ABSTAIN]


class NoiseOnVotedLabels(NoisyVote):
    """The mutant: no noise where the count is 0."""

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> Any:
        counts = self.counts(outputs)

        class Draws(Passing):
            def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
                return np.asarray(self.inner.discrete_gaussian(sigma, size) * (counts > 0), np.int64)

        return super().aggregate(outputs, parameter, Draws(randomness))


def vote_law(vote: NoisyVote, outputs: Sequence[object]) -> Law:
    def run(randomness: Branching) -> Hashable:
        released = vote.aggregate(outputs, SIGMA, randomness)
        return tuple(sorted(released.items())) if isinstance(released, dict) else released

    return law(run)


def check(vote: NoisyVote) -> None:
    """Exact enumeration: every output of each of two members, every neighbour, every noise on every count; the release
    as it is (the winner, or the noisy counts), against the profile of the vote."""

    def pairs() -> Iterator[tuple[Law, Law]]:
        found = {said: vote_law(vote, said) for said in itertools.combinations_with_replacement(ANSWERS, MEMBERS)}
        for one, other in itertools.permutations(found, 2):
            if set(one) & set(other):
                yield found[one], found[other]

    check_profile(pairs(), MECHANISMS[vote.mechanism]().profile(SIGMA))


@pytest.mark.parametrize("scores", [False, True], ids=["winner", "scores"])
def test_9_noise_only_on_labels_that_got_votes_is_caught(scores: bool) -> None:
    check(NoisyVote(["yes", "no"], scores=scores))
    with pytest.raises(AssertionError, match="is claimed"):
        check(NoiseOnVotedLabels(["yes", "no"], scores=scores))
