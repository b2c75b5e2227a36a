"""Mistake 3: PTR tests the gap at k + 1 while it releases k words."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from exact import BranchingThresholds, check_profile
from keyword_laws import EACH, neighbouring_laws, prepared

from langchain_dpicl import Keywords
from langchain_dpicl.aggregators.keywords import _ProposeTestRelease
from langchain_dpicl.privacy import MECHANISMS, Randomness

SIGMA, DELTA0, SELECT = 0.4, 0.01, 0.4


class NextGapTested(_ProposeTestRelease):
    """The mutant: chooses k among all but the last, and lets the test look at the gap after it."""

    def _choose(self, gaps: Mapping[int, int], sigma: float, randomness: Randomness) -> int:
        k = super()._choose({k: gap for k, gap in gaps.items() if k < self.most}, sigma, randomness)
        assert isinstance(gaps, dict)
        gaps[k] = gaps[k + 1]
        return k


def check(aggregator: Keywords) -> None:
    """Exact enumeration: every set of words of each of four members over three words, every neighbour, both ways; the
    choice of k and the test's outcome, against the profile of both on one sample."""
    profile = MECHANISMS["ptr"].of({"delta0": DELTA0, "select": SELECT}).profile(SIGMA)
    check_profile(neighbouring_laws(aggregator, "abc", 4, SIGMA, kind=BranchingThresholds), profile)


def test_3_a_gap_tested_at_another_k_is_caught() -> None:
    check(prepared(Keywords.ptr((1, 2), delta0=DELTA0, select=SELECT, words=EACH), {"delta0": DELTA0}))
    with pytest.raises(AssertionError, match="is claimed"):
        check(prepared(NextGapTested((1, 3), DELTA0, SELECT, EACH), {"delta0": DELTA0}))
