"""When a noisy count of abstentions may say that the members abstain: a threshold from public numbers alone.

Of N members A abstain. The release says "the members abstain" only if A + X >= t, X being discrete Gaussian noise of
scale sigma. It says so falsely if fewer than half abstained, A <= a = (N - 1) // 2 (rounded down). Then

    P(A + X >= t) = P(X >= t - A) <= P(X >= t - a),

since the tail falls in its argument. Let u be the least whole number with P(X >= u) <= `FALSE_RATE`. Then t = a + u
bounds the rate of false reports by `FALSE_RATE`, whatever A <= a is, for every division of the other votes, and for
every further condition (such as "and no label has more"), which only makes the event smaller. t depends on N and sigma,
never on the outputs: the release stays a function of the noisy counts.

The tail is summed exactly up to sigma = `_EXACT`; above, P(X >= u) <= P(Gaussian >= u - 1) (Canonne, Kamath and Steinke
2020, proposition 25), which costs one count.

The price is that few members cannot be heard over much noise: if all N abstain, P(N + X >= t) is
`told_probability`, and below `TOLD` a release does not count as telling. For sigma of 2 or more that takes about
12 sigma members.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FALSE_RATE = 1e-6
"""How often a release may say that the members abstain although fewer than half do."""

TOLD = 0.9
"""How likely a release must say so, if all members abstain, for the budget to be protected by that alone."""

_EXACT = 1000.0


def abstention_threshold(members: int, sigma: float, unit: int = 1) -> int:
    """t for N members at noise of scale sigma, in steps of 1 / ``unit`` members (as `EmbeddingMean` counts)."""
    return (members - 1) // 2 * unit + tail_reach(sigma * unit)


@lru_cache(maxsize=256)
def told_probability(members: int, sigma: float, labels: int, unit: int = 1) -> float:
    """How likely a release says that the members abstain if all N of them do.

    The noisy count reaches t and beats the noise on every one of ``labels`` counts that are zero (0: no such counts).
    Noise of more than 1000 steps is taken in steps of a thousandth of its scale, which is exact to two digits.
    """
    scale = max(1.0, sigma * unit / _EXACT)
    support, weights = discrete_gaussian(sigma * unit / scale)
    below = np.concatenate([[0.0], np.cumsum(weights)])  # P(X < support[i])
    reached = support * scale >= abstention_threshold(members, sigma, unit) - members * unit
    at = np.clip(support - int(support[0]) + round(min(members * unit / scale, support.size)), 0, support.size)
    return float((weights * reached * below[at] ** labels).sum())


def tells_abstention(members: int, sigma: float, labels: int, unit: int = 1) -> bool:
    """Whether a release says with probability `TOLD` or more that all members abstain."""
    return told_probability(members, sigma, labels, unit) >= TOLD


@lru_cache(maxsize=256)
def tail_reach(sigma: float) -> int:
    """The least u with P(X >= u) <= `FALSE_RATE`; above sigma = 1000 at most two more."""
    if sigma > _EXACT:
        return math.ceil(-NormalDist().inv_cdf(FALSE_RATE) * sigma * (1.0 + 1e-9)) + 1
    support, weights = discrete_gaussian(sigma)
    tails = np.cumsum(weights[::-1])[::-1]  # P(X >= support[i]); rounding errors are below one part in 1e9
    return int(support[np.flatnonzero(tails * (1.0 + 1e-9) <= FALSE_RATE)[0]])


def discrete_gaussian(sigma: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The discrete Gaussian: its support, but for less than 1e-30 on either side, and its probabilities.

    Scale 0 (a study's vote without noise) is all at 0, as every scale below .01 is. Beyond a million the support ends.
    """
    half = math.ceil(min(12.0 * sigma, 1e6)) + 2
    support = np.arange(-half, half + 1)
    weights = np.exp(-0.5 * (support / max(sigma, 0.01)) ** 2)
    return support, weights / weights.sum()
