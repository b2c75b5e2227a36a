"""`audit/cases.py` and `audit/worlds.py`: worst cases are as their words say, and no random number is used twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from langchain_dpicl.lab.audit import worlds
from langchain_dpicl.lab.audit.attack import CASES
from langchain_dpicl.lab.audit.cases import LABELS, MemberCase, Setting
from langchain_dpicl.lab.audit.worlds import BlockRandomness


def cases(name: str, **more: Any) -> Sequence[Any]:
    numbers = {"parameter": 2.0, "rate": 1.0, "releases": 1, "trials": 10**6}
    numbers |= {"epsilon": 3.0, "delta": 1e-5, "confidence": 0.95}
    options = {**CASES[name].options, "delta0": 1e-6, "step": 2.0**-16}
    given = {**numbers, "unanimous": False, "options": options, **more}
    return CASES[name].cases(Setting(CASES[name].mechanism, **given))


@pytest.mark.parametrize("name", CASES)
def test_with_real_owners_all_other_members_agree_or_have_a_call_of_their_own(name: str) -> None:
    for case in cases(name, unanimous=True):
        base = getattr(case, "base", None)
        if CASES[name].own_calls:
            assert base is None
        else:
            assert {*getattr(case, "others", ()), base} == {base}


@pytest.mark.parametrize("name", ["joint-em", "joint-em-own-calls"])
def test_joint_em_losses_move_both_ways_by_all_they_can(name: str) -> None:
    """The likelihood ratios of two sequences differ by all of eps0, which is the whole bounded range."""
    (case,) = cases(name, parameter=3.0)
    assert isinstance(case, MemberCase)
    ratios = [case.statistic(pair) for pair in (["x0", "x1"], ["anchor", "y0"])]
    assert ratios[1] - ratios[0] == pytest.approx(3.0)


def test_a_given_number_of_members_is_kept_and_split() -> None:
    case, _ = cases("vote", members=20)
    assert isinstance(case, MemberCase)
    assert case.members == 20
    assert len(set(case.others)) == 2  # a unanimous vote of 20 would drown a single one


@pytest.mark.parametrize("name", ["vote", "vote-own-calls", "vote-prior", "vote-em", "vote-em-prior"])
def test_a_vote_shows_the_canary_as_often_as_its_case_expects(name: str) -> None:
    """The statistic is about the true ratio: the event's counts lie within six standard deviations of a tenth more or
    less than expected (one case in 1e-8 is further off by chance)."""
    case = cases(name)[0]
    gain, loss = (case.statistic(label) for label in reversed(LABELS))
    absent = (1.0 - np.exp(loss)) / (np.exp(gain) - np.exp(loss))  # from the ratios of an event and of its complement
    n, draw = 4000, BlockRandomness()
    for has_owner, chance in ((True, absent * np.exp(gain)), (False, absent)):
        world = worlds.synthetic_world(case, has_owner, 1.0, draw)
        seen = sum(world() == LABELS[1] for _ in range(n))
        assert abs(seen - n * chance) <= 0.1 * n * chance + 6.0 * np.sqrt(n * chance * (1.0 - chance))


# -- randomness in bulk ------------------------------------------------------------------------------------------------


class Counting:
    """Hands out 0, 1, 2, ... of each kind."""

    def __init__(self) -> None:
        self.next = 0

    def _numbers(self, size: int) -> NDArray[np.int64]:
        self.next += size
        return np.arange(self.next - size, self.next)

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        return self._numbers(n)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        return self._numbers(size)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        return self._numbers(size).astype(np.float64)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        return self._numbers(size)


def test_no_number_is_handed_out_twice() -> None:
    stock = BlockRandomness(Counting())
    seen: list[float] = []
    for size in (3, 1, 4000, 100, 5000, 0, 7):
        for values in (
            stock.uniforms(size),
            stock.integers(2, size),
            stock.integers(3, size),
            stock.discrete_gaussian(1.0, size),
            stock.discrete_gaussian(2.0, size),
        ):
            assert len(values) == size
            seen += values.tolist()
    assert len(set(seen)) == len(seen)
