"""The proof about epsilon that trials of two data sets give, and the event of theirs that proves most.

**Lower bounds on epsilon**: what the two error rates of a test prove about a mechanism.

Statement. Let P be the law of all releases on a data set WITH the owner, Q on the same without it, and S any fixed set
of outcomes. Let S occur k times in n trials of P and j times in m trials of Q, all independent. With

- L, the one-sided Clopper-Pearson lower bound of P(S) at confidence 1 - alpha/2,
- U, the one-sided Clopper-Pearson upper bound of Q(S) at confidence 1 - alpha/2,

the number max(0, log((L - delta) / U)) (0 if L <= delta) exceeds the epsilon of every (epsilon, delta) promise that
the mechanism keeps with a probability of at most alpha. The same holds with P and Q exchanged.

Proof. A promise (epsilon, delta) for these neighbours says P(S) <= e^epsilon Q(S) + delta, so epsilon >=
log((P(S) - delta) / Q(S)) if P(S) > delta, and epsilon >= 0 always. A Clopper-Pearson bound misses its side with a
probability of at most alpha/2, whatever the rate; so with a probability of at least 1 - alpha (Bonferroni) both
L <= P(S) and U >= Q(S), and then log((L - delta) / U) <= log((P(S) - delta) / Q(S)) <= epsilon.

The set may depend on anything but these trials: given other trials, it is fixed, and the statement holds for it. So
`choose_region` looks for the most telling set among all those of the form {statistic >= t}, tried as P against Q
("remove": the owner is taken away), and {statistic < t}, tried as Q against P ("add"), which are each other's
complements; the bound then counts fresh trials. That costs no confidence. A statistic that is no likelihood ratio makes
the bound weaker, never wrong.

A low bound is no proof of privacy: the attack may be weak. Nothing is assumed about the mechanism: fitting, say, a
Gaussian trade-off curve to the error rates would give larger numbers, and wrong ones if the mechanism is not Gaussian.

Source: Jagielski, Ullman and Oprea 2020; Nasr et al. 2021; Clopper and Pearson 1934.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtrc, betaincinv

from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.profile import Direction

_THRESHOLDS = 1000
"""How many thresholds are tried on the trials that choose the event."""


def clopper_pearson(successes: ArrayLike, trials: ArrayLike, miss: float) -> tuple[FloatArray, FloatArray]:
    """One-sided lower and upper bounds of a binomial rate, each wrong with a probability of at most ``miss``."""
    k, n = np.asarray(successes, np.float64), np.asarray(trials, np.float64)
    with np.errstate(all="ignore"):
        low = np.where(k > 0, betaincinv(np.maximum(k, 1e-9), n - k + 1, miss), 0.0)
        high = np.where(k < n, betaincinv(k + 1, np.maximum(n - k, 1e-9), 1.0 - miss), 1.0)
    return low, high


def lower_bounds(
    hits: ArrayLike, misfires: ArrayLike, trials: tuple[float, float], delta: float, confidence: float
) -> FloatArray:
    """max(0, log((L - delta) / U)) for each pair of counts: ``hits`` if the event is likely, ``misfires`` if not.

    ``trials`` are the numbers of trials of the two. Numbers that are not whole (expected counts) are allowed. If these
    trials have not chosen the event, a bound exceeds the true epsilon with a probability of at most 1 - ``confidence``.
    """
    miss = (1.0 - confidence) / 2.0
    low, _ = clopper_pearson(hits, trials[0], miss)
    _, high = clopper_pearson(misfires, trials[1], miss)
    return np.asarray(np.log(np.maximum((low - delta) / high, 1.0)), np.float64)


@dataclass(frozen=True)
class Region:
    """An event: the statistic is at least the threshold ("remove": likelier with the owner), or below it ("add")."""

    direction: Direction
    threshold: float

    def lower_bound(
        self, present: FloatArray, absent: FloatArray, delta: float, confidence: float
    ) -> tuple[float, int, int]:
        """The bound from trials with and without the owner, and its true and false positives."""
        likely, rare = present >= self.threshold, absent >= self.threshold
        if self.direction == "add":
            likely, rare = ~rare, ~likely
        hits, misfires = int(np.count_nonzero(likely)), int(np.count_nonzero(rare))
        bound = lower_bounds(hits, misfires, (len(likely), len(rare)), delta, confidence)
        return float(bound), hits, misfires


def choose_region(present: FloatArray, absent: FloatArray, delta: float, confidence: float) -> tuple[Region, float]:
    """The event with the largest bound on these trials, and that bound. Count other trials for it: see the module.

    If none proves anything, the event whose two rates differ most.
    """
    pooled = np.unique(np.concatenate([present, absent]))
    thresholds = pooled[np.linspace(0, len(pooled) - 1, min(len(pooled), _THRESHOLDS)).astype(np.int64)]
    n, m = len(present), len(absent)
    with_owner = n - np.searchsorted(np.sort(present), thresholds)
    without = m - np.searchsorted(np.sort(absent), thresholds)
    removed = lower_bounds(with_owner, without, (n, m), delta, confidence)
    added = lower_bounds(m - without, n - with_owner, (m, n), delta, confidence)
    apart = 1e-9 * (with_owner / n - without / m)
    i, j = int(np.argmax(removed + apart)), int(np.argmax(added + apart))
    if removed[i] + apart[i] >= added[j] + apart[j]:
        return Region("remove", float(thresholds[i])), float(removed[i])
    return Region("add", float(thresholds[j])), float(added[j])


def expected_bounds(
    present: ArrayLike, absent: ArrayLike, *, releases: int, trials: int, delta: float, confidence: float
) -> FloatArray:
    """The bound to expect of each design whose release is one of two outcomes: it guides the choice of a design.

    ``present`` and ``absent`` are the probabilities of the first outcome, with and without the owner. The event is the
    best number of firsts among ``releases``, and its counts are the expected ones.
    """
    p, q = np.atleast_1d(np.asarray(present, np.float64)), np.atleast_1d(np.asarray(absent, np.float64))
    high, low = np.maximum(p, q)[:, None], np.minimum(p, q)[:, None]
    steps = np.linspace(-4.0, 6.0, 41)
    at = np.clip(np.floor(releases * low + steps * np.sqrt(releases * low * (1.0 - low))), 0, releases - 1)
    likely, rare = bdtrc(at, releases, high), bdtrc(at, releases, low)
    more = lower_bounds(trials * likely, trials * rare, (trials, trials), delta, confidence)
    fewer = lower_bounds(trials * (1.0 - rare), trials * (1.0 - likely), (trials, trials), delta, confidence)
    return np.asarray(np.maximum(more, fewer).max(axis=1), np.float64)
