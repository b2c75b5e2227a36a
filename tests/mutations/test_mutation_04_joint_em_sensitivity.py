"""Mistake 4: joint EM for a utility that moves by 1, where it moves by 2 either way (by 2 in all for one word)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from exact import check_profile
from keyword_laws import EACH, neighbouring_laws

from langchain_dpicl import Keywords
from langchain_dpicl.aggregators import ReleasedKeywords
from langchain_dpicl.aggregators.keywords import _JointEM
from langchain_dpicl.privacy import BoundedRange, Mechanism, Profile, Randomness
from langchain_dpicl.privacy.mechanisms import JointEM

EPS0 = 1.2


class ForSensitivityOne(_JointEM):
    """The mutant: weights exp(eps0 u / 2), or exp(eps0 u) for a single word."""

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> ReleasedKeywords:
        return super().aggregate(outputs, 2 * parameter, randomness)


class AccountedForSensitivityOne(JointEM):
    """The mutant: the sampler as it is, and half of its range accounted for."""

    def build(self, parameter: float) -> Profile:
        return BoundedRange(parameter / 2)


def check(aggregator: Keywords, mechanism: Mechanism) -> None:
    """Exact enumeration: one or two of three words, ranked; every set of words of each of two members, every
    neighbour. The log of the ratio of the two laws has no wider range than claimed, and delta(eps) is at most the
    profile's."""
    profile = mechanism.profile(EPS0)
    assert isinstance(profile, BoundedRange)
    pairs = list(neighbouring_laws(aggregator, "abc", 2, EPS0))
    for p, q in pairs:
        assert set(p) == set(q), "a word that one side never releases is claimed to be as good as any"
        losses = [math.log(p[words] / q[words]) for words in p]
        found = max(losses) - min(losses)
        assert found <= profile.eps0 + 1e-9, f"a range of {found:.6g}, where {profile.eps0:g} is claimed"
    check_profile(pairs, profile)


WORDS = ["a", "b", "c"]


def test_a_single_word_uses_all_of_its_range() -> None:
    """eps0 is reached: with weights exp(eps0 u / 4) the range would be half of it."""
    pairs = neighbouring_laws(Keywords.joint_em(WORDS, 1, words=EACH), "abc", 2, EPS0)
    ranges = [np.ptp([math.log(p[words] / q[words]) for words in p]) for p, q in pairs]
    assert max(ranges) == pytest.approx(EPS0)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [(ForSensitivityOne, JointEM()), (_JointEM, AccountedForSensitivityOne())],
    ids=["sampled", "accounted"],
)
def test_4_joint_em_of_sensitivity_1_is_caught(kind: type[_JointEM], mechanism: Mechanism, k: int) -> None:
    check(Keywords.joint_em(WORDS, k, words=EACH), JointEM())
    with pytest.raises(AssertionError, match="is claimed"):
        check(kind(WORDS, k, EACH), mechanism)
