"""Was this record among the private ones? The membership attack of the papers, on private decoding.

The game (Duan et al. 2023, *Flocks of stochastic parrots*; Flemings et al. 2025, DPS-MOZO): one record is a member, so
it takes part in the answers; others are not. The attacker holds all of them, asks each one's query, and scores how well
what it sees fits each record's own output. The AUC is the probability that the member's score is above a non-member's,
ties counting half: 0.5 for an attacker without knowledge.

What the attacker sees, and its score:

- ``likelihood``, as in the papers: the exact probability of every token of the record's output after those before it.
  The score is the mean of their logarithms.
- ``likelihood ratio``: the same probabilities, and the score is the sum of the logarithms of their ratios to the public
  law in which nobody takes part. It forgives a record for being likely or unlikely by itself.
- ``tokens``: at each of these places one token drawn from the law, as a release draws it. The score is the
  log-likelihood ratio of the tokens, for that record taking part with its probability against nobody taking part.

In a mixture the first two look at the places whose token is possible there; at the others the law says 0 whoever takes
part.

**The guarantee speaks of the last alone.** A probability is no release: whoever sees the law sees an owner's term
without any noise. The first two attackers are stronger than any caller, and no epsilon bounds them. The third is still
stronger than a caller, since it chooses what a token follows; all its tokens are in the plan.

**What the guarantee implies** for ``tokens``. Let all tokens of a trial together be (epsilon, delta)-DP for one owner
added or removed; x is the member, y a non-member, z the other owners. A score looks at the tokens and its own record
alone, and x and y are exchangeable. Let phi be 1 if x scores above y, 1/2 if they tie, else 0. The AUC is E[phi]
on z with x, and on z alone E[phi] = 1/2 by symmetry. So 1/2 <= e^epsilon * (1 - AUC) + delta, that is

    AUC <= 1 - e^-epsilon * (1/2 - delta) = 1 - f(1/2)

for the trade-off curve f of (epsilon, delta) (Kairouz, Oh, Viswanath 2015; Dong, Roth, Su 2022), which can be attained.
Every point of the plan's privacy profile gives such a bound. At epsilon 0 it is 1/2 + delta(0), the total variation
distance of the neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp

from langchain_dpicl.audit.membership_reading import Readings
from langchain_dpicl.decoding.mixing import STEP, FloatArray, IntArray, base_scores, clipped_terms
from langchain_dpicl.privacy.checks import real
from langchain_dpicl.privacy.noise import Randomness

LIKELIHOOD, RATIO, TOKENS = ATTACKS = ("likelihood", "likelihood ratio", "tokens")

_RESAMPLES = 2000

Scores = dict[str, FloatArray]
"""For each attack one score a record, the higher the more like a member."""


@dataclass(frozen=True)
class Crowd:
    """The data set of a trial: the member, and ``owners - 1`` others who each take part in a token with ``rate``.

    The others show the demonstrations from number ``first`` on, in turn: owners may show the same text.
    """

    owners: int
    rate: float
    first: int


@dataclass(frozen=True)
class Mixture:
    """The law of a token: proportional to exp(kappa * l0 + the sum of the terms of the owners who take part).

    A term is cut to the range ``range_bound`` with a weight of at most ``cap``; the member takes part in each token
    with probability ``participation``. The temperature is 1.
    """

    range_bound: float
    cap: float
    kappa: float
    participation: float


class Terms:
    """What each demonstration adds to the scores of the possible tokens at every place, in whole steps."""

    def __init__(self, readings: Readings, mixture: Mixture) -> None:
        rows = np.concatenate([readings.one_shot, readings.own[None]])
        limits = {"bound": mixture.range_bound, "temperature": 1.0, "cap": mixture.cap}
        places = range(len(readings.record))
        terms = [clipped_terms(rows[:, place], readings.zero_shot[place], **limits) for place in places]
        self.shown, self.own = np.stack(terms, axis=1)[:-1], np.stack([each[-1] for each in terms])
        self.base = np.stack([base_scores(row, mixture.kappa, 1.0) for row in readings.zero_shot])


def log_law(scores: IntArray) -> FloatArray:
    """Row by row the logarithm of the law from which `langchain_dpicl.decoding.mixing.draw` draws."""
    return np.asarray(log_softmax(STEP * (scores - scores.max(axis=1, keepdims=True)), axis=1), np.float64)


def prompt_scores(readings: Readings, member: int) -> Scores:
    """The scores of answers after the member's demonstration and its query, without any protection."""
    found = readings.one_shot_log_prob[member]
    return {
        LIKELIHOOD: _sums(readings, found) / _sums(readings, np.ones_like(found)),
        RATIO: _sums(readings, found - readings.zero_shot_log_prob),
    }


def mixture_scores(
    readings: Readings, terms: Terms, mixture: Mixture, crowd: Crowd, member: int, randomness: Randomness
) -> Scores:
    """The scores of tokens that are drawn, at every place, from a mixture over a fresh sample of the owners."""
    scores, places = terms.base.copy(), len(terms.base)
    coins = randomness.coin_positions(places * (crowd.owners - 1), crowd.rate)
    place, owner = np.divmod(coins, crowd.owners - 1)
    show = crowd.first + owner % (len(terms.shown) - crowd.first)
    np.add.at(scores, place, terms.shown[show, place])
    present = randomness.coin_positions(places, mixture.participation)
    scores[present] += terms.shown[member, present]

    law, public = log_law(scores), log_law(terms.base)
    known = np.flatnonzero(readings.target >= 0)
    at = (known, readings.target[known])
    drawn = (np.exp(law).cumsum(axis=1)[:, :-1] < randomness.uniforms(places)[:, None]).sum(axis=1)
    counts = _sums(readings, np.ones(len(known)), known)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, _sums(readings, law[at], known) / counts, -np.inf)
    return {
        LIKELIHOOD: means,
        RATIO: _sums(readings, law[at] - public[at], known),
        TOKENS: _sums(readings, token_gains(terms.own, public, drawn, mixture.participation)),
    }


def token_gains(own: IntArray, public: FloatArray, drawn: NDArray[np.intp], participation: float) -> FloatArray:
    """log((1 - p) + p * P'(u) / P(u)) for each drawn token u: P the public law, P' the law tilted by the own term."""
    tilt = STEP * own
    ratio = (tilt - logsumexp(public + tilt, axis=1, keepdims=True))[np.arange(len(drawn)), drawn]
    absent = math.log1p(-participation) if participation < 1.0 else -math.inf
    return np.asarray(np.logaddexp(absent, math.log(participation) + ratio), np.float64)


def wins(scores: FloatArray, member: int) -> FloatArray:
    """For each record 1 if the member's score is above its own, 1/2 if they are equal, else 0; NaN for itself."""
    found = np.where(scores[member] == scores, 0.5, (scores[member] > scores).astype(np.float64))
    found[member] = np.nan
    return found


def interval(won: FloatArray, randomness: Randomness) -> tuple[float, float, float]:
    """The mean of ``won`` (trials, records) and a 95 % interval, by Owen's pigeonhole bootstrap (2007).

    The trials share their non-members, so members and records are resampled both, independently. It speaks of other
    records like these with the same crowd. Where every comparison has the same result it has no width: then n trials
    leave, at 95 %, a chance of up to 1 - 0.05^(1/n) for a trial with another one.
    """
    is_pair = ~np.isnan(won)
    value = np.where(is_pair, won, 0.0)

    def resampled(size: int) -> FloatArray:
        taken = randomness.integers(size, _RESAMPLES * size).reshape(_RESAMPLES, size)
        flat = taken + size * np.arange(_RESAMPLES)[:, None]
        return np.bincount(flat.ravel(), minlength=_RESAMPLES * size).reshape(_RESAMPLES, size).astype(np.float64)

    members, records = (resampled(size) for size in won.shape)
    weight = ((members @ is_pair) * records).sum(axis=1)
    mean = ((members @ value) * records).sum(axis=1)[weight > 0] / weight[weight > 0]
    low, high = np.quantile(mean, (0.025, 0.975))
    return float(value.sum() / is_pair.sum()), float(low), float(high)


def auc_bound(epsilon: float, delta: float) -> float:
    """The largest AUC of a member against a non-member under (epsilon, delta)-DP: 1 - e^-epsilon * (1/2 - delta)."""
    epsilon, delta = real("epsilon", epsilon, at_least=0.0), real("delta", delta, at_least=0.0, at_most=1.0)
    return min(1.0, 1.0 - math.exp(-epsilon) * (0.5 - delta))


def _sums(readings: Readings, values: FloatArray, places: IntArray | None = None) -> FloatArray:
    """For each record the sum over its places, or over those of ``places``."""
    record = readings.record if places is None else readings.record[places]
    return np.bincount(record, weights=values, minlength=readings.records).astype(np.float64)
