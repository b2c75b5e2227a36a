"""Mistake 28: a sum clipped by record, or with noise only where something occurs.

The product's sum is computed for two neighbours. Of a clip the move says what delta the plan's noise leaves; of noise
that is missing the law of one cell does, which is a number that one neighbour never shows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.sums import owner_sum
from langchain_dpicl.once.tables_reading import given_pairs
from langchain_dpicl.once.tables_release import TableRelease
from langchain_dpicl.privacy import LineRequest, PrivacyPlan, SecureRandomness
from langchain_dpicl.privacy.profile import Gaussian, lattice_multiplier

EPSILON, DELTA = 1.0, 1e-5
SIZE = 12
Ints = NDArray[np.int64]
Mutant = Callable[[Ints, Ints], Ints]


def product(owners: Ints, cells: Ints) -> Ints:
    """Each owner's distinct cells, clipped to norm 1 together."""
    whose, given = given_pairs(owners, cells, SIZE, SIZE, SecureRandomness())
    return owner_sum(whose, given, np.ones(len(given), np.int64), SIZE)


def clipped_per_record(owners: Ints, cells: Ints) -> Ints:
    """Each record has a norm of 1, however many the owner has."""
    return owner_sum(np.arange(len(cells)), cells, np.ones(len(cells), np.int64), SIZE)


def weights_of_one_pair(owners: Ints, cells: Ints) -> Ints:
    """Each distinct pair adds 1: a cap on the number alone."""
    _, given = given_pairs(owners, cells, SIZE, SIZE, SecureRandomness())
    return owner_sum(np.arange(len(given)), given, np.ones(len(given), np.int64), SIZE)


def plan_sigma() -> float:
    plan = PrivacyPlan.solve(epsilon=EPSILON, delta=DELTA, lines={"sum": LineRequest("sum", 1.0, 1)})
    return plan.lines["sum"].parameter


def true_delta(mutant: Mutant) -> float:
    """The delta at the claimed epsilon of an owner of forty records on all cells beside fifty of one record each."""
    draw = np.random.default_rng(0)
    owners = np.concatenate([np.arange(50), np.full(40, 50)])
    cells = np.concatenate([draw.integers(0, SIZE, 50), np.arange(40) % SIZE])
    move = mutant(owners, cells) - mutant(owners[:50], cells[:50])
    norm = float(np.sqrt((move.astype(np.float64) ** 2).sum()))
    return Gaussian(lattice_multiplier(plan_sigma() * LATTICE, norm)).delta(EPSILON)


@pytest.mark.parametrize("mutant", [clipped_per_record, weights_of_one_pair])
def test_28_a_sum_that_an_owner_moves_too_far_is_caught(mutant: Mutant) -> None:
    assert 0.9 * DELTA < true_delta(product) <= DELTA
    assert true_delta(mutant) > 1000 * DELTA


def noisy(total: Ints, where: NDArray[np.bool_]) -> Ints:
    """The release's own noise, on these cells."""
    noise = SecureRandomness().discrete_gaussian(plan_sigma() * LATTICE, total.size)
    return total + np.where(where, noise, 0)


def test_28_noise_only_where_something_occurs_is_caught() -> None:
    """A cell that one owner alone has is exactly 0 without that owner: delta is 1, less one atom of 1e-11.

    With noise everywhere each cell is 0 with probability 1e-11 in both worlds.
    """
    release = TableRelease.__new__(TableRelease)
    release._randomness, release._shape = SecureRandomness(), (SIZE,)
    line, no_charge = type("Line", (), {"parameter": plan_sigma()})(), None
    for owners in (1, 0):
        cells = np.arange(owners)
        total = owner_sum(cells, cells, np.ones(owners, np.int64), SIZE)
        found = release._unpacked(release._noisy(line, no_charge, 0, total))  # type: ignore[arg-type]
        assert (found != 0).all()
        mutant = noisy(total, total != 0)
        assert (mutant[0] != 0) == (owners == 1)
