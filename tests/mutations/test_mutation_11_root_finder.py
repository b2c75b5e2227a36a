"""Mistake 11: a root finder that rounds towards more leakage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from langchain_dpicl.privacy import (
    MECHANISMS,
    Gaussian,
    Line,
    LineRequest,
    PLDAccountant,
    PrivacyPlan,
    ProposeTestRelease,
    mechanism,
    profile,
    solving,
)

Patch = pytest.MonkeyPatch


# -- the search for the least noise ------------------------------------------------------------------------------------


class NearEnough(PLDAccountant):
    """The mutant's accountant: a search that takes one per cent too much for a hit."""

    def epsilon(self, schedule: Sequence[Line], delta: float) -> float:
        return super().epsilon(schedule, delta) / 1.01


def check_plan() -> None:
    """Accounting, in closed form: n embedding releases without sampling are one Gaussian of multiplier z / sqrt(n), so
    the noise that `PrivacyPlan.solve` finds must have delta(epsilon) <= delta, exactly."""
    for epsilon, delta, count in ((1.0, 1e-5, 1), (0.5, 1e-6, 30), (4.0, 1e-5, 200)):
        request = LineRequest("embedding", 1.0, count)
        plan = PrivacyPlan.solve(epsilon=epsilon, delta=delta, lines={"line": request})
        line = plan.lines["line"]
        one = line.family.profile(line.parameter)
        assert isinstance(one, Gaussian)
        true = float(Gaussian(one.multiplier / math.sqrt(count)).delta(epsilon))
        assert true <= delta, f"the plan's noise has delta {true:.6g}, and {delta:g} is claimed"


def test_11_a_search_that_stops_on_the_wrong_side_is_caught(monkeypatch: Patch) -> None:
    check_plan()
    monkeypatch.setattr(solving, "PLDAccountant", NearEnough)
    with pytest.raises(AssertionError, match="is claimed"):
        check_plan()


# -- the digits of a noise parameter -----------------------------------------------------------------------------------


def check_digits() -> None:
    """Exact comparison: of every mechanism, a parameter rounded to its digits has at least the noise asked for."""
    for family in MECHANISMS.values():
        low, high = max(family.coordinates()[0], -8.0), min(family.coordinates()[1], 8.0)
        for coordinate in np.linspace(low, high, 101)[1:-1]:
            rounded = family.coordinate(family.at_coordinate(float(coordinate)))
            assert rounded <= coordinate + 1e-12, f"{family.name}: less noise than is claimed"


def test_11_a_parameter_rounded_towards_less_noise_is_caught(monkeypatch: Patch) -> None:
    right = mechanism.round_digits
    check_digits()
    monkeypatch.setattr(mechanism, "round_digits", lambda value, digits, direction: right(value, digits, -direction))
    with pytest.raises(AssertionError, match="is claimed"):
        check_digits()


# -- the root within a profile -----------------------------------------------------------------------------------------


def wrong_end(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """The mutant: bisection to a thousandth, and then the end that is not certified."""
    while high - low > 1e-3:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if function(middle) <= target else (middle, high)
    return low


def check_bend() -> None:
    """Exact comparison: the atoms that stand for propose-test-release have at least its delta at every epsilon."""
    for sigma, delta0 in ((1.0, 1e-5), (4.0, 1e-3), (0.4, 0.01)):
        profile = ProposeTestRelease(sigma, delta0)
        atoms = profile.losses()
        epsilons = np.linspace(0.0, float(atoms.losses.max()) + 0.1, 400)
        true, claimed = profile.delta(epsilons), atoms.delta(epsilons)
        worst = int(np.argmax(true - claimed))
        said = f"delta({epsilons[worst]:.4g}) is {true[worst]:.8g}, and {claimed[worst]:.8g} is claimed"
        assert true[worst] <= claimed[worst] + 1e-12, said


def test_11_a_root_of_the_uncertified_side_is_caught(monkeypatch: Patch) -> None:
    check_bend()
    monkeypatch.setattr(profile, "solve_decreasing", wrong_end)
    with pytest.raises(AssertionError, match="is claimed"):
        check_bend()
