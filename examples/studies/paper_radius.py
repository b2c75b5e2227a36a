"""The published rule of DPS-MOZO (Flemings et al. 2025, theorem A.4), for comparison only: UNPROVED.

The paper keeps each mixed one-shot law within a Rényi ball of one order alpha around the zero-shot law, and accounts
for a token as if its Rényi divergence were epsilon(j) = 4 * beta * alpha at every order j up to alpha, amplified by the
sample. Neither step holds:

- One order does not bound all. Rényi divergences obey no triangle inequality at one order, so two laws in the ball can
  lie further apart than 4 * beta * alpha, by any amount (`apart_in_ball`).
- A normalised product of experts does not add up. Others' factors move the law to where one owner's factor says most
  (`apart_in_product`).

So nothing in this module may decide a release, and no option of the package spends on it. Run it to print the numbers:
``python examples/studies/paper_radius.py``.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, logsumexp

from langchain_dpicl.decoding.answer import STEP
from langchain_dpicl.decoding.exemplars import IntArray
from langchain_dpicl.privacy.losses import FloatArray

_HALVINGS = 30

_FAR = 60.0
"""A difference of logits that no ball here allows."""

ORDER, BETA = 5, 0.342
"""The ball of the counterexamples: radius 1.71, and 6.84 between any two outputs by the paper's accounting."""

Weighed = tuple[IntArray, FloatArray]
"""What each row adds to the scores, and its mixing weight."""


def claimed_beta(epsilon: float, delta: float, rate: float, tokens: int) -> tuple[float, int]:
    """The beta of the largest ball that theorem A.4 allows, and its order. UNPROVED.

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


# -- the two faults ----------------------------------------------------------------------------------------------------


def claimed(beta: float = BETA, order: int = ORDER) -> float:
    """The divergence that the paper accounts for, at every order up to the ball's."""
    return 4.0 * beta * order


def ends_of_ball(public: float, *, beta: float = BETA, order: int = ORDER) -> FloatArray:
    """Logarithms of three laws of two tokens: the public one, and the ball's two ends, found by the paper's weights.

    ``public`` is the first token's probability without any owner. One end raises it as far as the ball allows, the
    other lowers it.
    """
    zero_shot = np.log([public, 1.0 - public])
    far = np.array([[_FAR, 0.0], [-_FAR, 0.0]])
    added, _ = ball_terms(zero_shot + far, zero_shot, beta=beta, order=order, temperature=1.0, cap=1.0)
    return _normalised(np.vstack([zero_shot, zero_shot + added * STEP]))


def apart_in_ball(public: float, *, beta: float = BETA, order: int = ORDER) -> float:
    """The Rényi divergence between the two ends of the ball."""
    _, high, low = ends_of_ball(public, beta=beta, order=order)
    return float(_divergence(high[None], low, order)[0])


def apart_in_product(
    public: float, experts: int, *, leaves: bool = False, beta: float = BETA, order: int = ORDER
) -> float:
    """The largest divergence that one owner makes in a normalised product of so many experts, all in the ball.

    The owner's expert is at an end of the ball; the others say the same of the first token, anywhere between the ends.
    Without the owner its factor is the public law, or with ``leaves`` there is one factor fewer.
    """
    zero_shot, high, low = ends_of_ball(public, beta=beta, order=order)
    found = []
    for share in np.linspace(0.0, 1.0, 101):
        others = (experts - 1) * (share * high + (1.0 - share) * low)
        without = others if leaves else others + zero_shot
        for own in (high, low):
            found.append(_divergence(_normalised(others + own)[None], _normalised(without), order)[0])
    return float(max(found))


def _normalised(rows: FloatArray) -> FloatArray:
    return np.asarray(rows - logsumexp(rows, axis=-1, keepdims=True), np.float64)


def main() -> None:
    """Print the claims and the numbers that contradict them."""
    print(f"order {ORDER}, beta {BETA}: radius {ORDER * BETA:.2f}, claimed between two outputs {claimed():.2f}")
    print("public probability of a token; divergence of the two ends of the ball:")
    for public in (1e-4, 1e-10, 1e-20):
        print(f"  {public:g}: {apart_in_ball(public):.2f}")
    print("experts; one owner in a product of them, 20 % public; its factor missing, .1 % public:")
    for experts in (2, 3, 4):
        kept, missing = apart_in_product(0.2, experts), apart_in_product(1e-3, experts, leaves=True)
        print(f"  {experts}: {kept:.2f}; {missing:.2f}")


if __name__ == "__main__":
    main()
