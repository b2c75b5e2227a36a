"""Mistake 13: each part of a release amplified separately, though the parts share a sample."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import pytest
from exact import Branching, BranchingThresholds, Law, check_profile, law, mixture
from keyword_laws import EACH, neighbouring_laws, prepared

from langchain_dpicl import Keywords, NoisyVote
from langchain_dpicl.privacy import MECHANISMS, DiscreteGaussian, Profile
from langchain_dpicl.privacy.mechanisms import NoisyCounts
from langchain_dpicl.privacy.profile import Composed
from langchain_dpicl.private.boundary import ABSTAIN

RATE = 0.2
Pairs = list[tuple[Law, Law]]
"""Laws of a release in which the owner takes part, and of one in which it does not."""


@dataclass(frozen=True)
class AmplifiedApart(Composed):
    """The mutant: as if each part had a sample of its own."""

    def subsample(self, rate: float) -> Profile:
        return Composed(tuple(part.subsample(rate) for part in self.parts))


def check(pairs: Pairs, profile: Profile) -> None:
    """Exact enumeration: with its own coin the owner's release has the law (1 - q) P_absent + q P_present; that mixture
    and P_absent, both ways, are no easier to tell apart than the amplified profile says."""
    amplified = profile.subsample(RATE)
    mixed = [(mixture([(1 - RATE, absent), (RATE, present)]), absent) for present, absent in pairs]
    check_profile(mixed, amplified, "remove")
    check_profile([(q, p) for p, q in mixed], amplified, "add")


# -- a vote: two counts move -------------------------------------------------------------------------------------------

SIGMA = 0.5


def vote_pairs() -> Pairs:
    """Every output of each of two members, and every other output of one of them: all noisy counts released."""
    vote = NoisyVote(["yes", "no"], scores=True)

    def scores(said: tuple[object, ...]) -> Law:
        def run(randomness: Branching) -> Hashable:
            released = vote.aggregate(said, SIGMA, randomness)
            assert not isinstance(released, str)
            return None if released is None else tuple(released.values())

        return law(run)

    found = {said: scores(said) for said in itertools.combinations_with_replacement([0, 1, ABSTAIN], 2)}
    return [(found[a], found[b]) for a, b in itertools.permutations(found, 2) if set(a) & set(b)]


class TwoCountsApart(NoisyCounts):
    """The mutant: a vote is two counts, of sensitivity 1 each."""

    def build(self, parameter: float) -> Profile:
        return AmplifiedApart((DiscreteGaussian(parameter, (1,)), DiscreteGaussian(parameter, (1,))))


def test_13_the_counts_of_a_vote_amplified_apart_are_caught() -> None:
    pairs = vote_pairs()
    check(pairs, MECHANISMS["scores"]().profile(SIGMA))
    with pytest.raises(AssertionError, match="is claimed"):
        check(pairs, TwoCountsApart().profile(SIGMA))


# -- propose-test-release: a choice and a test -------------------------------------------------------------------------

PTR_SIGMA, DELTA0, SELECT = 0.5, 0.01, 1.0


def ptr_pairs() -> Pairs:
    """Every set of words of each of four members over three words, every neighbour."""
    aggregator = prepared(Keywords.ptr((1, 2), delta0=DELTA0, select=SELECT, words=EACH), {"delta0": DELTA0})

    def pairs() -> Iterator[tuple[Law, Law]]:
        seen: set[tuple[int, int]] = set()  # equal counts have one law
        for p, q in neighbouring_laws(aggregator, "abc", 4, PTR_SIGMA, kind=BranchingThresholds):
            if (id(p), id(q)) not in seen:
                seen.add((id(p), id(q)))
                yield p, q

    return list(pairs())


def test_13_the_choice_and_the_test_of_ptr_amplified_apart_are_caught() -> None:
    pairs = ptr_pairs()
    right = MECHANISMS["ptr"].of({"delta0": DELTA0, "select": SELECT}).profile(PTR_SIGMA)
    check(pairs, right)
    assert isinstance(right, Composed)
    with pytest.raises(AssertionError, match="is claimed"):
        check(pairs, AmplifiedApart(right.parts))
