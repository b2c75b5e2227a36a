"""Mistake 5: a sample of fixed size, accounted as Poisson. When an owner leaves, another steps in."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from owner_laws import Owners, Passing, Redrawing, check_selector

from langchain_dpicl import PoissonExampleSelector
from langchain_dpicl.privacy import Randomness

OWNERS: Owners = (("ann", 1), ("bob", 1), ("cec", 1))
RATE, SIZE = 0.5, 2


class FixedSize(Redrawing):
    """The mutant: always two owners, each pair with the same probability."""

    class Draws(Passing):
        def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
            pairs = list(itertools.combinations(range(n), SIZE))
            return np.array(pairs[int(self.inner.integers(len(pairs), 1)[0])], np.int64)

    @staticmethod
    def redrawn(randomness: Randomness) -> Randomness:
        return FixedSize.Draws(randomness)


def ann_or_not(bucket: frozenset[str]) -> str:
    """Yes where ann sits, no elsewhere, in an empty bucket too."""
    return "yes" if "ann" in bucket else "no"


def check(kind: type[PoissonExampleSelector]) -> None:
    """Exact enumeration of whole releases: every coin, member and order of the selector, every noise of the vote; with
    and without each owner, both directions, against the vote's profile on a Poisson sample."""
    check_selector(kind, OWNERS, ann_or_not, RATE)


def test_5_a_fixed_size_sample_accounted_as_poisson_is_caught() -> None:
    check(PoissonExampleSelector)
    with pytest.raises(AssertionError, match="is claimed"):
        check(FixedSize)
