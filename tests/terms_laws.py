"""The exact law of released terms, on a lattice so coarse that all noise can be walked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
from exact import Branching, law
from numpy.typing import NDArray

from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.terms_release import CountedTerms, TermsRelease
from langchain_dpicl.privacy.mechanisms import Terms

STEP = 1 / 64
Floats = NDArray[np.float64]
Coordinate = tuple[int | None, int | None]
"""The count of a term with the owner, and without, in steps; None: nobody gives it."""


def release_of(threshold: int, sigma: float) -> TermsRelease:
    """The product's release with this threshold and noise, in lattice steps, without a store and a budget."""
    release = TermsRelease.__new__(TermsRelease)
    release.threshold = threshold
    release.line = SimpleNamespace(parameter=sigma / LATTICE)  # type: ignore[assignment]
    return release


@lru_cache(maxsize=1024)
def coordinate_law(threshold: int, sigma: float, count: int | None) -> dict[int | None, float]:
    """The law of one term's noisy count, as the product's own code releases it; None: it is not released."""
    if count is None:
        return {None: 1.0}
    release = release_of(threshold, sigma)

    def run(randomness: Branching) -> int | None:
        release._randomness = randomness
        found = release._passing(CountedTerms(["a"], np.array([count])))
        return int(found.counts[0]) if found.terms else None

    return law(run)  # type: ignore[return-value]


def pair_of(threshold: int, sigma: float, coordinates: tuple[Coordinate, ...]) -> tuple[Floats, Floats]:
    """The masses of all outcomes with the owner and without, in one order. Terms are independent."""
    present, absent = np.ones(1), np.ones(1)
    for with_owner, without in coordinates:
        p, q = coordinate_law(threshold, sigma, with_owner), coordinate_law(threshold, sigma, without)
        outcomes = list(p | q)
        present = np.multiply.outer(present, [p.get(each, 0.0) for each in outcomes]).ravel()
        absent = np.multiply.outer(absent, [q.get(each, 0.0) for each in outcomes]).ravel()
    return present, absent


def hidden(p: Floats, q: Floats, epsilon: float) -> float:
    """The sum of max(0, p - e^eps q)."""
    return float(np.maximum(p - np.exp(epsilon) * q, 0.0).sum())


def neighbours(family: Terms, letters: str, others: int, crowd: int) -> set[tuple[Coordinate, ...]]:
    """What one owner moves, for every owner of a tiny data set and every data set of up to so many others.

    Each gives any set of at most ``at_most`` letters. Once more beside a crowd that gives all letters.
    """
    sets = [each for size in range(1, family.at_most + 1) for each in itertools.combinations(letters, size)]
    found = set()
    for rest in _multisets(sets, others):
        for each, many in itertools.product(sets, (0, crowd)):
            coordinates = []
            for letter in each:
                weights = [family.largest_weight(len(other)) for other in rest if letter in other]
                count = sum(weights) + many * family.largest_weight(1)
                without = count if weights or many else None
                coordinates.append((count + family.largest_weight(len(each)), without))
            found.add(tuple(sorted(coordinates, key=str)))
    return found


def _multisets(sets: list[tuple[str, ...]], most: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    for size in range(most + 1):
        yield from itertools.combinations_with_replacement(sets, size)
