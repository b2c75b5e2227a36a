"""Votes of which one bit leaves: one label of two, and the winner of many Gaussian counts.

Mechanism of two labels (`BitPairs`). Let d be the lead of the first label: its votes less the second's, a whole number,
with whole public votes of a prior. The release is one bit, 1 with probability f(d) = P(X < d) for discrete Gaussian
noise X on the half-integers: f grows, and f(-d) = 1 - f(d). From where f is nearly 0 or 1 (`LEAST`) it stays as it is.

Pairs. Given everybody else's votes and coins, an owner who takes part moves d by at most ``moves``: by 1 if its output
is added, by 2 if it replaces another one. So its pair is that of two coins, f(d + moves) with the owner and f(d)
without. A smaller move's pair is between: it is dominated by this one, as its coin with the owner is nearer to that
without. An owner who votes for the second label has the pair 1 - f(d - moves) = f(moves - d) and 1 - f(d) = f(-d): the
other bit's probabilities, a pair of the family too. Votes of others that nobody sees make mixtures of pairs, which
show no more (E[r V(a / r)] is jointly convex in both laws). So `adaptive` composes the family {f(d + moves), f(d)}. At
the ends of the law the last pair of two moves stands for those that a flat end shortens.

Mechanism of any number of labels (`ThresholdPairs`). Each label i has a count c_i and a public number p_i (of a prior),
and abstentions have a count c_0. Every count gets its own discrete Gaussian noise on the integers, n_i = c_i + X_i, of
which nothing is cut off. Let e_i = n_i + p_i, rounded as floats are. The release is "none" if n_0 reaches a public
threshold and n_0 > max e_i; else a label with the largest e_i, by lot if there are several.

Neighbours: one output added or removed, which moves ONE count by 1, of a label or of the abstentions. (Without the
owner there is no call, which is no abstention. An output replaced moves two counts: such votes are accounted as all
counts.)

Pairs. The lot is that of a random order of the labels, drawn beforehand: of those with the largest e the first wins.
Fix this order, everybody else's outputs, and the noise on all counts but the owner's. One threshold on the owner's
noisy count then decides the outcome:

- If it votes for label j: let e be the largest of the others' e_i, w their winner, and let j beat w if e_j > e, or if
  e_j = e and j stands before w. As e_j never falls when n_j grows, j beats w from some n_j on. If n_0 reaches the
  threshold and n_0 > e, then the release is j for e_j >= n_0, and "none" below. Otherwise "none" does not occur for any
  n_j, and the release is j if j beats w, and w below.
- If it abstains: the release is "none" from the first whole number that reaches the threshold and is above max e_i, and
  else a label that n_0 does not change.

With S(t) = P(X >= t) the pair is (S(t - 1), S(t)) for a whole number t, or nothing is told. What was fixed has the same
law with the owner and without, so the laws are mixtures of such pairs, which show no more (see above). `adaptive`
composes the family of all t. If abstentions were compared with the n_i, without the p_i, there would be two thresholds.

Sources: Balle, Barthe and Gaboardi 2018 (mixtures); Canonne, Kamath and Steinke 2020 (discrete Gaussian).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from langchain_dpicl.privacy.adaptive import PairFamily, Trials
from langchain_dpicl.privacy.losses import FloatArray, mixed

LEAST = 2.0**-40
"""f stays as it is before it is closer to 0 or 1 than this."""

_ERROR = 1e-10
"""A bound on the relative error of a ratio's logarithm, from that of a law's values (1e-13), up to sigma = 200."""

_REACH = 12.0
"""`ThresholdPairs` are listed up to so many sigma, with less than 1e-31 of the noise beyond, and paid there as lost."""

_MOST = 40
"""More pairs than these are covered by fewer."""

_SLACK = 0.004
"""The share by which pairs in the middle may be made wider to cover those between; at the ends .05."""


@lru_cache(maxsize=256)
def tails(sigma: float) -> FloatArray:
    """P(the label behind wins), by the lead: from 1/2 at 0 to the last one, which holds for every larger lead."""
    places = np.arange(math.ceil(14.0 * sigma) + 3) + 0.5
    above = np.cumsum(np.exp(-0.5 * (places / sigma) ** 2)[::-1])[::-1]
    found: FloatArray = 0.5 * above / above[0]
    found = found[found >= LEAST]
    found.flags.writeable = False
    return found


class _CoinPairs(PairFamily):
    """Pairs of coins: the chance of heads is higher with the owner."""

    beyond: float = 0.0
    """No pair that is left out has a larger gap."""

    @abstractmethod
    def coins(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Of each pair, by ascending chances of heads without the owner: heads without it, tails without it, the
        gap between heads with it and without, and tails with it."""

    def trials(self, rate: float) -> Trials:
        ratios, weights = _of_all(self)
        if rate < 1.0:
            ratios = mixed(ratios[0], rate), mixed(ratios[1], rate)
        return Trials(ratios, weights, _ERROR, rate * self.beyond)

    def deviation(self, rate: float) -> float:
        trials = self.trials(rate)
        return math.sqrt(float((trials.of_u * trials.log_u**2 + trials.of_v * trials.log_v**2).max()))


@lru_cache(maxsize=256)
def _of_all(pairs: _CoinPairs) -> tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]:
    """The logarithms of the ratios of the pairs to try, before amplification, and their weights."""
    absent, absent_low, gap, present_low = pairs.coins()
    if gap.size > _MOST:
        kept, wider = _covering(absent, absent_low, gap)
        absent = absent[kept]
        absent_low = absent_low[kept]
        gap = gap[kept] * wider
        present_low = absent_low - gap
    near = np.log1p(-np.minimum(gap / absent_low, 0.5))
    ratios = np.log1p(gap / absent), np.where(gap < 0.5 * absent_low, near, np.log(present_low / absent_low))
    return ratios, (absent, absent_low)


@dataclass(frozen=True)
class BitPairs(_CoinPairs):
    """The pairs of coins f(d + ``moves``) with the owner and f(d) without, for every d, at this noise."""

    sigma: float
    moves: int = 1

    def coins(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        behind = tails(self.sigma)
        high = np.concatenate([behind[::-1], 1.0 - behind[1:]])  # f, ascending
        low = high[::-1]
        here = slice(0, high.size - self.moves)
        there = slice(self.moves, high.size)
        gap = np.where(high[here] < 0.5, high[there] - high[here], low[here] - low[there])  # without cancelling
        return high[here], low[here], gap, low[there]


@dataclass(frozen=True)
class ThresholdPairs(_CoinPairs):
    """The pairs of coins S(t - 1) with the owner and S(t) without, for every whole t, at this noise."""

    sigma: float

    @property
    def _last(self) -> int:
        """The largest t that is listed. The least is 2 - t: the pair of 2 - t is that of t with both laws exchanged."""
        return math.ceil(_REACH * self.sigma) + 1

    @property
    def beyond(self) -> float:  # type: ignore[override]
        """P(X = t) for the largest t: no pair beyond it, on either side, is further apart."""
        return float(_weights(self.sigma)[self._last]) * (1.0 + _ERROR)

    def coins(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        last = self._last
        weights = _weights(self.sigma)
        above = np.cumsum(weights[::-1])[::-1]  # S(t) for t >= 0
        reaching = np.concatenate([above[last:0:-1], 1.0 - above[1 : last + 1]])  # S, from t = last to 1 - last
        falling = reaching[::-1]  # 1 - S(t) = S(1 - t)
        gap = np.concatenate([weights[last - 1 :: -1], weights[1:last]])  # P(X = t - 1), from t = last to 2 - last
        return reaching[:-1], falling[:-1], gap, falling[1:]


def _weights(sigma: float) -> FloatArray:
    """P(X = k) for k >= 0, X being discrete Gaussian on the integers."""
    places = np.arange(math.ceil((_REACH + 4.0) * sigma) + 4.0)  # beyond, 1e-24 of the last pair's gap is left out
    found: FloatArray = np.exp(-0.5 * (places / sigma) ** 2)
    found /= 2.0 * found[:0:-1].sum() + found[0]
    return found


def _covering(absent: FloatArray, absent_low: FloatArray, gap: FloatArray) -> tuple[list[int], FloatArray]:
    """A few of the pairs, and the factors by which their gaps grow, so that mixtures of neighbours cover all others.

    Let Q = f(d) and g = P - Q its gap. A mixture of kept pairs i and j with the Q of a pair between has its gap on the
    chord from (Q_i, g_i) to (Q_j, g_j). If that is no smaller, the mixture's P is no smaller at the same Q,
    so it dominates the pair between. Both ends grow by what the worst pair between needs. The middle, where many
    releases are decided, may grow by `_SLACK`; the ends by more, and never so far that P comes near 1.
    """
    slack = np.minimum(0.05, _SLACK / np.sqrt(4.0 * absent * absent_low))
    slack = np.minimum(slack, 0.5 * (absent_low / gap - 1.0))
    kept = [0]
    grown = [0.0]
    last = gap.size - 1
    while kept[-1] < last:
        start = kept[-1]
        end = start + 1
        needed = 0.0
        while end < last:
            more = _needed(start, end + 1, absent, absent_low, gap)
            if more > slack[start : end + 2].min():
                break
            end += 1
            needed = more
        grown[-1] = max(grown[-1], needed)
        kept.append(end)
        grown.append(needed)
    return kept, 1.0 + np.array(grown) * (1.0 + 1e-6) + 1e-12


def _needed(start: int, end: int, absent: FloatArray, absent_low: FloatArray, gap: FloatArray) -> float:
    """The share by which a chord has to grow to cover the pairs between its ends."""
    inner = slice(start + 1, end)
    if absent[end] < 0.5:
        share = (absent[inner] - absent[start]) / (absent[end] - absent[start])
    else:
        share = (absent_low[start] - absent_low[inner]) / (absent_low[start] - absent_low[end])
    chord = gap[start] + share * (gap[end] - gap[start])
    return max(0.0, float((gap[inner] / chord).max()) - 1.0)
