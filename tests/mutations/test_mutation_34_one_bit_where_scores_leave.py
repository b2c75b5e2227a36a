"""Mistake 34: the accounting of one bit, where all noisy counts are released."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from langchain_dpicl.privacy import Line, PLDAccountant, Profile
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.votes import discrete_gaussian

SIGMA, RATE, EPSILONS = 1.0, 0.3, (0.0, 0.5, 1.0)


def two_releases(epsilon: float) -> float:
    """The delta of two releases of counts, of which one moves by 1, summed over all noise: of both directions."""
    _, absent = discrete_gaussian(SIGMA)
    without = absent[1:]
    present = (1 - RATE) * without + RATE * absent[:-1]
    with_owner, no_owner = np.multiply.outer(present, present), np.multiply.outer(without, without)
    a = math.exp(epsilon)
    return max(
        float(np.maximum(with_owner - a * no_owner, 0.0).sum()), float(np.maximum(no_owner - a * with_owner, 0.0).sum())
    )


def check(build: Callable[[float], Profile]) -> None:
    line = Line(build(SIGMA), RATE, 2)
    for epsilon in EPSILONS:
        claimed = PLDAccountant().delta([line], epsilon)
        assert two_releases(epsilon) <= claimed * (1 + 1e-9), f"{claimed:.3g} is claimed at epsilon {epsilon}"


@pytest.mark.parametrize("name", ["scores"])
def test_34_one_bit_for_scores_is_caught(name: str) -> None:
    check(MECHANISMS[name](own_calls=True).profile)  # type: ignore[call-arg]
    with pytest.raises(AssertionError, match="is claimed"):
        check(MECHANISMS["vote-bit"](own_calls=True).profile)  # type: ignore[call-arg]
