"""Mistake 6: a Poisson sample that is cut into chunks. Without one owner the others move up, into other buckets."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from owner_laws import Owners, Passing, Redrawing, check_selector

from langchain_dpicl import PoissonExampleSelector
from langchain_dpicl.privacy import Randomness

OWNERS: Owners = (("ann", 1), ("bob", 1), ("cec", 1), ("dan", 1))
RATE = 0.9


class EqualChunks(Redrawing):
    """The mutant: the first of the sample to the first member, the next to the second."""

    class Draws(Passing):
        def integers(self, high: int, size: int) -> NDArray[np.int64]:
            return np.arange(size) * high // max(1, size)

    @staticmethod
    def redrawn(randomness: Randomness) -> Randomness:
        return EqualChunks.Draws(randomness)


class RoundRobin(Redrawing):
    """The mutant: the sample dealt out like cards."""

    class Draws(Passing):
        def integers(self, high: int, size: int) -> NDArray[np.int64]:
            return np.arange(size) % high

    @staticmethod
    def redrawn(randomness: Randomness) -> Randomness:
        return RoundRobin.Draws(randomness)


def of_neighbours(bucket: frozenset[str]) -> str:
    """Yes for a pair that stands together in the store, or one place apart."""
    pairs = [{"ann", "bob"}, {"cec", "dan"}, {"ann", "cec"}, {"bob", "dan"}]
    return "yes" if bucket in pairs else "no"


def check(kind: type[PoissonExampleSelector]) -> None:
    """Exact enumeration of whole releases: every coin, member and order of the selector, every noise of the vote; with
    and without each owner, both directions, against the profile where ONE member's output moves."""
    check_selector(kind, OWNERS, of_neighbours, RATE)


@pytest.mark.parametrize("mutant", [EqualChunks, RoundRobin])
def test_6_chunking_a_poisson_sample_is_caught(mutant: type[PoissonExampleSelector]) -> None:
    check(PoissonExampleSelector)
    with pytest.raises(AssertionError, match="is claimed"):
        check(mutant)
