"""The mixing weights of the DPS-MOZO paper, for comparison only: its privacy analysis is NOT proved.

The paper keeps each mixed one-shot law within a Rényi ball of one order around the zero-shot law, and accounts for a
token as if its Rényi divergence were at most 4 * beta * order (the ball's order) at every order up to that, amplified
by the sample (theorem A.4). Neither step holds (two laws in the ball can lie further apart, and the product of experts
is no mixture), so nothing in this module may decide a release.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, logsumexp

from langchain_dpicl.decoding.answer import STEP
from langchain_dpicl.decoding.exemplars import IntArray
from langchain_dpicl.privacy.losses import FloatArray

_HALVINGS = 30

Weighed = tuple[IntArray, FloatArray]
"""What each row adds to the scores, and its mixing weight."""


def claimed_beta(epsilon: float, delta: float, rate: float, tokens: int) -> tuple[float, int]:
    """The beta of the largest ball that the paper's accounting allows, and its order. UNPROVED.

    Within .001 of the paper's table 5 at epsilon 1: SAMSum .081 at order 14, E2E .115 at order 15 (delta 1 / records, 4
    records a token on average, 100 answers of 50 or 25 tokens). The order is the whole number next to
    1 + 4 log(1 / delta) / (3 epsilon), which gives these two; how the paper chose it is not known here.
    """
    order = max(2, round(1 + 4 * math.log(1 / delta) / (3 * epsilon)))
    allowed = (epsilon - math.log(1 / delta) / (order - 1)) / tokens
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _amplified(middle, rate, order) <= allowed else (low, middle)
    return low, order


def _amplified(beta: float, rate: float, order: int) -> float:
    """The Rényi divergence of a Poisson-subsampled mechanism of divergence 4 * beta * order at all orders to this."""
    terms = [(order - 1) * math.log1p(-rate) + math.log(order * rate - rate + 1)]
    for part in range(2, order + 1):
        choose = gammaln(order + 1) - gammaln(part + 1) - gammaln(order - part + 1)
        power = (order - part) * math.log1p(-rate) + part * math.log(rate)
        terms.append(float(choose) + power + (part - 1) * 4 * beta * order)
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
