"""The private sum: no owner moves it by more than 1, to the last bit; its noise, its price, and its journal."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.sums import LARGEST, owner_sum
from langchain_dpicl.once.tables_reading import given_pairs
from langchain_dpicl.privacy import MECHANISMS, LineRequest, PrivacyPlan
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.profile import Gaussian

Ints = NDArray[np.int64]


def squared(vector: Ints) -> int:
    """The square of the norm, in whole numbers."""
    return sum(int(number) ** 2 for number in vector)


def sum_of(owners: list[dict[int, int]], size: int) -> Ints:
    """The sum of owners, each a mapping of coordinates to amounts."""
    entries = [(i, cell, amount) for i, each in enumerate(owners) for cell, amount in sorted(each.items())]
    whose, cells, amounts = np.array(entries, np.int64).reshape(-1, 3).T
    return owner_sum(whose, cells, amounts, size)


def test_every_owner_of_a_tiny_domain_moves_the_sum_by_its_own_vector_and_by_1_at_most() -> None:
    """Brute force: all vectors of amounts -2 to 2 on three coordinates, beside every two others, in whole numbers."""
    vectors = [dict(enumerate(amounts)) for amounts in itertools.product((-2, 0, 1, 2), repeat=3)]
    alone = [sum_of([each], 3) for each in vectors]
    assert max(map(squared, alone)) <= LATTICE**2
    assert min(squared(part) for part, each in zip(alone, vectors, strict=True) if any(each.values())) > 0.999 * (
        LATTICE**2
    )
    for first, second in itertools.product(range(0, len(vectors), 5), repeat=2):
        others = sum_of([vectors[first], vectors[second]], 3)
        for own, each in zip(alone[::3], vectors[::3], strict=True):
            assert (sum_of([vectors[first], each, vectors[second]], 3) - others == own).all()


@pytest.mark.parametrize("pairs", [1, 2, 3, 7, 100, 4097])
def test_an_owner_of_many_pairs_has_a_norm_of_at_most_1(pairs: int) -> None:
    """Also of amounts beyond what is counted, which are cut; and the rounding costs next to nothing."""
    for amount in (1, 3, LARGEST, 10**15, -(10**15)):
        part = sum_of([dict.fromkeys(range(pairs), amount)], pairs)
        assert 0.9999 * LATTICE**2 < squared(part) <= LATTICE**2


def test_a_vector_that_is_shorter_than_1_adds_nothing_or_itself() -> None:
    assert (sum_of([{0: 0, 2: 0}], 3) == 0).all()
    assert (sum_of([], 3) == 0).all()
    assert sum_of([{1: 1}], 3)[1] in (LATTICE - 1, math.trunc((1 - 2.0**-40) * LATTICE))


def test_a_hundred_thousand_owners_are_added_exactly() -> None:
    """Far beyond the whole numbers that a float has."""
    many = 300_000
    total = owner_sum(np.arange(many), np.zeros(many, np.int64), np.ones(many, np.int64), 1)
    assert int(total[0]) == many * int(sum_of([{0: 1}], 1)[0]) > 2**54


# -- the pairs of an owner ---------------------------------------------------------------------------------------------


def test_an_owner_of_many_records_gives_its_own_most_frequent_pairs_whoever_else_there_is() -> None:
    """Each distinct pair once; others change nothing, and ties fall by coins."""
    said = [(0, 5), (0, 5), (0, 3), (0, 3), (0, 1), (0, 1), (0, 1), (0, 9), (1, 2), (1, 2), (2, 0), (2, 1), (2, 2)]
    found = set()
    for _ in range(200):
        for others in (True, False):
            kept = np.array([pair for pair in said if others or pair[0] == 0], np.int64)
            owners, cells = given_pairs(*kept.T, size=10, at_most=3, randomness=SecureRandomness())
            assert cells[owners == 0].tolist() == [1, 3, 5]
        owners, cells = given_pairs(*np.array(said, np.int64).T, size=10, at_most=2, randomness=SecureRandomness())
        assert cells[owners == 1].tolist() == [2]
        found.add((tuple(cells[owners == 0]), tuple(cells[owners == 2])))
    # each misses one of its coins' outcomes in 200 draws with probability 1e-35 at most
    assert {own for own, _ in found} == {(1, 3), (1, 5)}
    assert {other for _, other in found} == {(0, 1), (0, 2), (1, 2)}


def test_pairs_of_many_texts_in_any_order_are_those_of_each_owner() -> None:
    draw = np.random.default_rng(1)
    owners, cells = draw.integers(0, 50, 3000), draw.integers(0, 40, 3000)
    order = np.argsort(owners, kind="stable")
    whose, given = given_pairs(owners[order], cells[order], 40, 1000, SecureRandomness())
    for owner in range(50):
        assert given[whose == owner].tolist() == sorted(set(cells[owners == owner].tolist()))


# -- its price ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
def test_the_plans_noise_is_that_of_a_gaussian_for_each_sum(count: int) -> None:
    plan = PrivacyPlan.solve(epsilon=1.0, delta=1e-5, lines={"sum": LineRequest("sum", 1.0, count)})
    sigma = plan.lines["sum"].parameter
    assert Gaussian(sigma / math.sqrt(count)).delta(1.0) <= 1e-5
    assert Gaussian(0.998 * sigma / math.sqrt(count)).delta(1.0) > 1e-5


def test_the_profile_is_that_of_the_lattice_and_of_sensitivity_1() -> None:
    family = MECHANISMS["sum"]
    assert family.of({}).profile(3.0).delta(1.0) == pytest.approx(Gaussian(3.0).delta(1.0), rel=1e-9)
    coarse = family.of({"step": 1 / 64}).profile(2.0)
    assert coarse.delta(1.0) == pytest.approx(Gaussian(math.sqrt(128.0**2 - 4.0) / 64).delta(1.0), rel=1e-9)
    assert family.all_take_part
