"""Mistake 25: the optimal composition of one line, started from another line's profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from langchain_dpicl.privacy import BoundedRange, Gaussian, Line, PLDAccountant
from langchain_dpicl.privacy.losses import FloatArray

Curve = Callable[[FloatArray], FloatArray]
"""The delta of log a."""

SCHEDULES = [
    [Line(BoundedRange(2.0), 1.0, 1), Line(Gaussian(1.0), 1.0, 1)],
    [Line(BoundedRange(2.0), 1.0, 2), Line(Gaussian(1.0), 1.0, 1)],
    [Line(BoundedRange(3.0), 1.0, 2), Line(BoundedRange(1.0), 1.0, 1)],
]
EPSILONS = (0.5, 3.0)


def ranges_first(curve: Curve, line: Line) -> Curve:
    """The best releases of a line of bounded range, one after the other, BEFORE something of this curve."""
    assert isinstance(line.profile, BoundedRange)
    eps0 = line.profile.eps0
    low = np.exp(-np.linspace(0.0, eps0, 40))
    high = low * math.exp(eps0)
    weight = (1 - low) / (high - low)
    for _ in range(line.count):

        def longer(a: FloatArray, curve: Curve = curve) -> FloatArray:
            a = np.asarray(a)[..., None]
            both = weight * high * curve(a / high) + (1 - weight) * low * curve(a / low)
            return np.asarray(both.max(axis=-1))

        curve = longer
    return curve


def of_one(line: Line) -> Curve:
    return lambda a: line.profile.direction_delta(np.log(a), "remove")


def ranges_last(first: Line, line: Line, a: float) -> float:
    """The best releases of a line, chosen AFTER seeing one release of the other line."""
    values = ranges_first(lambda b: np.maximum(0.0, 1.0 - b), line)
    if isinstance(first.profile, Gaussian):  # its loss is normal, of mean 1/2 and deviation 1
        losses = np.linspace(-7.5, 8.5, 401)
        masses = np.exp(-0.5 * (losses - 0.5) ** 2) * (losses[1] - losses[0]) / math.sqrt(2 * math.pi)
        return float((masses * values(a * np.exp(-losses))).sum())
    return float(ranges_first(values, first)(np.array(a)))


def check(delta: Callable[[Sequence[Line], float], float]) -> None:
    """Both orders of the lines, computed: one of them is what an adversary may choose."""
    for line, other in SCHEDULES:
        for epsilon in EPSILONS:
            a = math.exp(epsilon)
            true = max(ranges_last(other, line, a), float(ranges_first(of_one(other), line)(np.array(a))))
            claimed = delta([line, other], epsilon)
            assert true <= claimed + 1e-9, f"delta({epsilon}) is {true:.3g}, and {claimed:.3g} is claimed"


def started_from_the_other(schedule: Sequence[Line], epsilon: float) -> float:
    """The mutant: the recursion of the first line begins with what the other gives away."""
    line, other = schedule
    return float(ranges_first(of_one(other), line)(np.array(math.exp(epsilon))))


@pytest.mark.parametrize("at", range(len(SCHEDULES)))
def test_25_a_composition_that_starts_from_another_line_is_caught(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCHEDULES", SCHEDULES[at : at + 1])
    check(PLDAccountant().delta)
    with pytest.raises(AssertionError, match="is claimed"):
        check(started_from_the_other)
