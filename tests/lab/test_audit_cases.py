"""`audit/cases.py` and `audit/worlds.py`: worst cases are as their words say, and no random number is used twice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from langchain_dpicl import InvalidParameter, NoisyVote
from langchain_dpicl.aggregators.base import WorstCase
from langchain_dpicl.lab.audit import attack, worlds
from langchain_dpicl.lab.audit.attack import CASES, Attacked, audit
from langchain_dpicl.lab.audit.cases import LABELS, MemberCase, Setting, learned_cases
from langchain_dpicl.lab.audit.draws import BlockRandomness


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


def stated() -> list[WorstCase]:
    vote = NoisyVote(LABELS, mechanism="vote-em")
    return [
        WorstCase(f"{n} others vote against the canary", vote, LABELS[0], LABELS[1], (LABELS[0],) * n) for n in (1, 4)
    ]


@pytest.mark.parametrize("own_calls", [False, True])
def test_ratios_of_a_stated_case_are_learnt(own_calls: bool) -> None:
    """Within six standard deviations of the true log-likelihood ratio (one case in 1e-8 is further off by chance)."""
    effort: dict[str, Any] = {
        "rate": 1.0,
        "releases": 1,
        "epsilon": 3.0,
        "delta": 1e-5,
        "trials": 100,
        "confidence": 0.95,
    }
    options = {"own_calls": 1.0} if own_calls else {}
    setting = Setting("vote-em", 2.0, unanimous=True, options=options, **effort)
    case, further = learned_cases(setting, stated())
    assert isinstance(case, MemberCase)
    assert isinstance(further, MemberCase)
    assert (case.members, further.members, case.base) == (2, 5, None if own_calls else LABELS[0])
    rate = 2.0 if own_calls else 1.0
    behind = {True: 0.0, False: 1.0 if own_calls else 2.0}  # the canary's label, with the canary and without
    chance = {side: 1.0 / (1.0 + np.exp(rate * votes)) for side, votes in behind.items()}
    true = np.log(chance[True] / chance[False])
    deviation = np.sqrt(sum((1.0 - p) / (p * 4000) for p in chance.values()))
    assert abs(case.statistic(LABELS[1]) - true) < 6.0 * deviation + 0.01
    assert case.statistic("never released") == 0.0


def test_a_stated_case_is_attacked_and_a_number_of_members_that_it_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CASES, "stated", Attacked("vote-em", partial(learned_cases, stated=stated())))
    monkeypatch.setattr(attack, "ATTACKED", ("stated",))
    found = audit("stated", epsilon=3.0, delta=1e-5, trials=3000)
    assert 0.5 * 3.0 < found.lower_bound <= 3.0
    assert "others vote against the canary" in found.case
    owner = audit("stated", canary="owner", epsilon=3.0, delta=1e-5, trials=300)
    assert owner.lower_bound <= 3.0
    with pytest.raises(InvalidParameter, match="one of 2, 5"):
        audit("stated", members=3)
