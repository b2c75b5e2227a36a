"""Mistake 8: the list of keywords that may be released is made from the private outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
from exact import check_profile
from keyword_laws import EACH, neighbouring_laws

from langchain_dpicl import Keywords
from langchain_dpicl.aggregators import ReleasedKeywords
from langchain_dpicl.aggregators.keywords import _JointEM
from langchain_dpicl.privacy import MECHANISMS, Randomness

EPS0 = 1.2


class DomainFromOutputs(_JointEM):
    """The mutant: only words that somebody said may be released."""

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> ReleasedKeywords:
        said = sorted({int(i) for output in outputs if isinstance(output, np.ndarray) for i in output})
        narrow = copy.copy(self)
        narrow._set_domain([self._spelling[i] for i in said])
        narrow.k = min(self.k, len(said))
        if not said:
            return ReleasedKeywords(ranked=True)
        renamed = [
            np.array([said.index(int(i)) for i in o], np.int64) if isinstance(o, np.ndarray) else o for o in outputs
        ]
        return _JointEM.aggregate(narrow, renamed, parameter, randomness)


def check(aggregator: Keywords) -> None:
    """Exact enumeration: the likeliest of three words; every set of words of each of two members, every neighbour."""
    check_profile(neighbouring_laws(aggregator, "abc", 2, EPS0), MECHANISMS["joint-em"]().profile(EPS0))


def test_8_a_keyword_domain_from_the_private_outputs_is_caught() -> None:
    check(Keywords.joint_em(["a", "b", "c"], 1, words=EACH))
    with pytest.raises(AssertionError, match="is claimed"):
        check(DomainFromOutputs(["a", "b", "c"], 1, EACH))
