"""Roots of functions of one number: for searches, and for certified ends."""

from __future__ import annotations

import math
from collections.abc import Callable


def crossing(function: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """An x near which `function` changes its sign between `low` and `high` (it must have different signs there).

    A search, no certificate: inverse quadratic steps if they are safe, else halving (Chandrupatla 1997).
    """
    b, a = low, high
    at_b, at_a = function(b), function(a)
    c, at_c, share = a, at_a, 0.5
    for _ in range(200):
        x = a + share * (b - a)
        at_x = function(x)
        if (at_x > 0.0) == (at_a > 0.0):
            c, at_c = a, at_a
        else:
            c, at_c, b, at_b = b, at_b, a, at_a
        a, at_a = x, at_x
        if at_x == 0.0 or abs(b - a) <= tolerance:
            break
        where, height = (a - b) / (c - b), (at_a - at_b) / (at_c - at_b)
        share = 0.5
        if 1.0 - math.sqrt(max(0.0, 1.0 - where)) < height < math.sqrt(max(0.0, where)):
            share = at_a / (at_b - at_a) * at_c / (at_b - at_c)
            share += (c - a) / (b - a) * at_a / (at_c - at_a) * at_b / (at_c - at_b)
        least = min(0.5, 0.5 * tolerance / abs(b - a))
        share = min(max(share, least), 1.0 - least) if math.isfinite(share) else 0.5
    return a if abs(at_a) < abs(at_b) else b


def solve_decreasing(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """The smallest x in [low, high] found with function(x) <= target; `high` if none: always the certified side."""
    if function(low) <= target:
        return low
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if function(middle) <= target:
            high = middle
        else:
            low = middle
    return high
