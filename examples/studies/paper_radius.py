"""The mixing weights of the DPS-MOZO paper, for comparison only: its privacy analysis is NOT proved.

The paper keeps each mixed one-shot law within a Rényi ball of one order around the zero-shot law, and accounts for a
token as if its Rényi divergence at that order were at most 4 * beta * order, amplified by the sample. Neither step
holds (two laws in the ball can lie further apart, and the product of experts is no mixture), so nothing in this module
may decide a release.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, logsumexp

from langchain_dpicl.decoding.answer import STEP
from langchain_dpicl.decoding.exemplars import IntArray
from langchain_dpicl.privacy.losses import FloatArray

_ORDERS = range(2, 65)
_HALVINGS = 30

Weighed = tuple[IntArray, FloatArray]
"""What each row adds to the scores, and its mixing weight."""


def claimed_beta(epsilon: float, delta: float, rate: float, tokens: int) -> tuple[float, int]:
    """The beta, and the order, of the largest ball that the paper's accounting allows. UNPROVED."""
    return max(((_beta(epsilon, delta, rate, tokens, order), order) for order in _ORDERS), key=lambda it: it[0] * it[1])


def _beta(epsilon: float, delta: float, rate: float, tokens: int, order: int) -> float:
    allowed = (epsilon - math.log(1 / delta) / (order - 1)) / tokens
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _amplified(middle, rate, order) <= allowed else (low, middle)
    return low


def _amplified(beta: float, rate: float, order: int) -> float:
    """The Rényi divergence of a Poisson-subsampled mechanism of divergence 4 * beta * l at each order l."""
    terms = [(order - 1) * math.log1p(-rate) + math.log(order * rate - rate + 1)]
    for part in range(2, order + 1):
        choose = gammaln(order + 1) - gammaln(part + 1) - gammaln(order - part + 1)
        factor = 0.0 if part == 2 else math.log(3)
        power = (order - part) * math.log1p(-rate) + part * math.log(rate)
        terms.append(factor + float(choose) + power + (part - 1) * 4 * beta * part)
    return float(logsumexp(terms)) / (order - 1)


def ball_terms(
    one_shot: FloatArray, zero_shot: FloatArray, *, beta: float, order: int, temperature: float, cap: float
) -> Weighed:
    """Terms whose weights are the largest that stay in the ball, both ways. UNPROVED."""
    difference = (one_shot - zero_shot) / temperature
    public = zero_shot / temperature
    low, high = np.zeros(len(difference)), np.full(len(difference), cap)
    inside = _divergence(public + cap * difference, public, order) <= beta * order
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = _divergence(public + middle[:, None] * difference, public, order) <= beta * order
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    weights = np.where(inside, cap, low)
    return np.rint(weights[:, None] * difference / STEP).astype(np.int64), weights


def _divergence(rows: FloatArray, public: FloatArray, order: int) -> FloatArray:
    """The larger of the two Rényi divergences between each row's law and the public one."""
    p = rows - logsumexp(rows, axis=1, keepdims=True)
    q = public - logsumexp(public)
    there = logsumexp(order * p + (1 - order) * q, axis=1) / (order - 1)
    back = logsumexp(order * q + (1 - order) * p, axis=1) / (order - 1)
    return np.asarray(np.maximum(there, back), np.float64)
