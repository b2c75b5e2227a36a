"""The cost of a plan when one owner is replaced, not added or removed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from langchain_dpicl.privacy import Gaussian, LineRequest, PLDAccountant, PrivacyPlan
from langchain_dpicl.privacy.profile import BoundedRange, Subsampled, solve_decreasing

PLD = PLDAccountant()


def planned(epsilon: float = 1.0, delta: float = 1e-5, **lines: LineRequest) -> PrivacyPlan:
    return PrivacyPlan.solve(epsilon=epsilon, delta=delta, lines=lines)


def of_gaussian(multiplier: float, delta: float) -> float:
    """The epsilon at which the closed form of the Gaussian mechanism falls to delta."""
    return solve_decreasing(lambda e: float(Gaussian(multiplier).delta(e)), delta, 0.0, 400.0)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("delta", [1e-4, 1e-8])
def test_a_replaced_owner_moves_a_sum_twice_as_far(epsilon: float, delta: float) -> None:
    """Sums released once are Gaussian at rate 1: replacing moves them by 2 where removing moves them by 1.

    The bound is above that closed form, by little. Two losses that are composed as two releases are below it.
    """
    plan = planned(epsilon, delta, once=LineRequest("sum", 1.0, 1))
    line = plan.lines["once"].line(plan.lines["once"].parameter)
    multiplier = solve_decreasing(lambda z: of_gaussian(z, delta), plan.certified_epsilon, 0.05, 100.0)
    truth = of_gaussian(multiplier / 2.0, delta)
    found = plan.numbers()["replaced"]["epsilon"]
    assert truth <= found <= 1.1 * truth
    assert PLD.epsilon([line, line], delta) < 0.9 * truth, "the mistake: a profile composed with itself"


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
def test_no_better_bound_follows_from_the_profile_alone(multiplier: float) -> None:
    """The least d(a) + e^a d(epsilon - a) over all a is the closed form of a sum that moves by 2, to 1e-5."""
    for epsilon in (0.1, 1.0, 3.0):
        first = 0.5 * epsilon + np.linspace(-6.0, 6.0, 8001)
        bounds = Gaussian(multiplier).delta(first) + np.exp(first) * Gaussian(multiplier).delta(epsilon - first)
        assert bounds.min() == pytest.approx(float(Gaussian(multiplier / 2.0).delta(epsilon)), rel=1e-5, abs=1e-12)


def laws_of_votes(rate: float, eps0: float) -> list[np.ndarray]:
    """The laws of two exponential votes of 3 labels: the owner votes for the first, is absent, votes for the second."""
    others = np.array([1.0, 2.0, 1.0])
    found = []
    for moved in (np.array([1.0, 0.0, 0.0]), None, np.array([0.0, 1.0, 0.0])):
        absent, present = np.exp(eps0 * others), np.exp(eps0 * (others + (0.0 if moved is None else moved)))
        law = (1.0 - rate) * absent / absent.sum() + rate * present / present.sum()
        found.append(np.outer(law, law).ravel())
    return found


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_exact_laws_of_a_replaced_owner_keep_the_bound(rate: float) -> None:
    delta = 0.02
    plan = planned(0.9, delta, vote=LineRequest("vote-em", rate, 2, options={"own_calls": True}))
    eps0 = plan.lines["vote"].parameter
    present, absent, other = laws_of_votes(rate, eps0)
    found = plan.numbers()["replaced"]
    for epsilon, allowed in ((found["epsilon"], delta), (found["group_epsilon"], found["group_delta"])):
        for p, r in ((present, other), (other, present)):
            assert np.maximum(p - math.exp(epsilon) * r, 0.0).sum() <= allowed
    one = Subsampled(BoundedRange(eps0), rate)
    for p, q in ((present, absent), (absent, other)):  # the two steps, each within the profile that the proof uses
        single = np.sqrt(np.diag(p.reshape(3, 3))), np.sqrt(np.diag(q.reshape(3, 3)))
        for epsilon in (0.1, 0.3, 0.6):
            assert np.maximum(single[0] - math.exp(epsilon) * single[1], 0.0).sum() <= one.delta(epsilon) + 1e-12


def test_a_plan_says_both_bounds_rounded_up() -> None:
    plan = planned(1.0, 5e-5, words=LineRequest("joint-em", 400 / 14732, 100))
    found = plan.numbers()["replaced"]
    json.dumps(found, allow_nan=False)
    assert found["epsilon"] == pytest.approx(2.19, abs=0.05)
    assert (found["group_epsilon"], found["group_delta"]) == (2.0, pytest.approx(5e-5 * (1 + math.e)))
    (said,) = (line for line in plan.explain().splitlines() if "replaced by others" in line)
    shown = float(said.split("epsilon is ")[1].split()[0])
    assert found["epsilon"] <= shown <= found["epsilon"] + 0.01
    assert said.endswith("at the same delta, or 2 at delta 0.000186.")


def test_what_leaves_out_more_than_the_second_step_allows_has_no_bound_at_delta() -> None:
    """delta0 takes half of delta: nothing is left for the second step, so the group's pair alone is said."""
    plan = planned(3.0, 1e-5, words=LineRequest("ptr", 0.01, 100, options={"delta0": 4e-6}))
    assert plan.numbers()["replaced"]["epsilon"] is None
    assert "instead (one owner removed, one added), epsilon is 6 at delta 0.000211." in plan.explain()


def test_a_promise_that_is_none_is_said_to_be_none() -> None:
    assert "Nothing is promised when" in planned(150.0, 1e-5, counts=LineRequest("scores", 1.0, 100)).explain()
