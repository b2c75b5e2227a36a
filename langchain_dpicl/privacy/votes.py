"""The meaning of noisy counts: how often noise overturns a winner, tells abstentions; the weight of a public answer.

All of it is arithmetic on public numbers. `discrete_gaussian` is the law of the Gaussian votes' noise. An exponential
vote among weights exp(r c) with public factors is argmax of r c + log factor + Gumbel noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.privacy.bits import tails
from langchain_dpicl.privacy.checks import positive, whole

FALSE_RATE = 1e-6
"""The rate at which a release may say that the members abstain although fewer than half do."""

TOLD = 0.9
"""The least probability that a release says so, if all members abstain, for this alone to protect the budget."""

_EXACT = 1000.0
"""The largest sigma of a discrete Gaussian whose tail is summed exactly."""


def discrete_gaussian(sigma: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The law: its support, but for less than 1e-30 on either side, and its probabilities.

    Scale 0 (a study's vote without noise) is all at 0, as every scale below .01 is. Beyond a million the support ends.
    """
    half = math.ceil(min(12.0 * sigma, 1e6)) + 2
    support = np.arange(-half, half + 1)
    weights = np.exp(-0.5 * (support / max(sigma, 0.01)) ** 2)
    return support, weights / weights.sum()


def abstention_threshold(members: int, sigma: float, unit: int = 1) -> int:
    """The noisy count t at which a release may say that the members abstain, in steps of 1 / ``unit`` members.

    Of N ``members`` A abstain. The release says so only if A + X >= t, X being discrete Gaussian noise of scale
    ``sigma``. It says so falsely if fewer than half abstained, A <= a = (N - 1) // 2 (rounded down). Then

        P(A + X >= t) = P(X >= t - A) <= P(X >= t - a),

    since the tail falls in its argument. Let u be the least whole number with P(X >= u) <= `FALSE_RATE`. Then t = a + u
    bounds the rate of false reports by `FALSE_RATE`, whatever A <= a is, for every division of the other votes, and for
    every further condition (such as "and no label has more"), which only makes the event smaller. t depends on N and
    sigma, never on the outputs: the release stays a function of the noisy counts.

    The price is that few members cannot be heard over much noise: if all N abstain, P(N + X >= t) is
    `told_probability`, and below `TOLD` a release does not count as telling. For sigma of 2 or more that takes about
    12 sigma members.
    """
    return (members - 1) // 2 * unit + tail_reach(sigma * unit)


@lru_cache(maxsize=256)
def tail_reach(sigma: float) -> int:
    """The least u with P(X >= u) <= `FALSE_RATE`; above sigma = 1000 at most two more.

    There P(X >= u) <= P(Gaussian >= u - 1) (Canonne, Kamath and Steinke 2020, proposition 25), which costs one count.
    """
    if sigma > _EXACT:
        return math.ceil(-NormalDist().inv_cdf(FALSE_RATE) * sigma * (1.0 + 1e-9)) + 1
    support, weights = discrete_gaussian(sigma)
    tails = np.cumsum(weights[::-1])[::-1]  # P(X >= support[i]); rounding errors are below one part in 1e9
    return int(support[np.flatnonzero(tails * (1.0 + 1e-9) <= FALSE_RATE)[0]])


@lru_cache(maxsize=256)
def told_probability(members: int, sigma: float, labels: int, unit: int = 1, abstaining: int | None = None) -> float:
    """Return the probability that a release says that the members abstain, if so many of N do (None: all of them).

    The noisy count reaches t and beats the noise on every one of ``labels`` counts that are zero (0: no such counts).
    With A abstentions, the noise X, and the threshold t that is

        sum over x >= t - A of P(X = x) P(X < x + A)^labels.

    Noise of more than 1000 steps is taken in steps of a thousandth of its scale, which is exact to two digits.
    """
    count = (members if abstaining is None else abstaining) * unit
    scale = max(1.0, sigma * unit / _EXACT)
    support, weights = discrete_gaussian(sigma * unit / scale)
    below = np.concatenate([[0.0], np.cumsum(weights)])  # P(X < support[i])
    reached = support * scale >= abstention_threshold(members, sigma, unit) - count
    at = np.clip(support - int(support[0]) + round(min(count / scale, support.size)), 0, support.size)
    return float((weights * reached * below[at] ** labels).sum())


def tells_abstention(members: int, sigma: float, labels: int, unit: int = 1, abstaining: int | None = None) -> bool:
    """True if a release says with probability `TOLD` or more that the members abstain, if so many (None: all) do."""
    return told_probability(members, sigma, labels, unit, abstaining) >= TOLD


def flip_probability(sigma: float, margin: int, labels: int = 2) -> float:
    """Chance that discrete Gaussian noise of `sigma` takes the win from a label that leads every other by `margin`.

    Ties are broken at random. A rival beats the winner's noise x with the probability

        lost(x) = P(X > x + margin) + P(X = x + margin) / 2 = (P(X >= x + margin) + P(X >= x + margin + 1)) / 2,

    and the answer is the sum over x of P(X = x) (1 - (1 - lost(x))^(labels - 1)). It is exact for two labels. With more
    it is an upper bound for the worst case, in which all others are runners-up (and a tie among several rivals counts
    for each of them).
    """
    sigma = positive("sigma", sigma)
    margin = whole("margin", margin, at_least=0)
    labels = whole("labels", labels, at_least=2)
    _, weights = discrete_gaussian(sigma)
    tails = np.append(np.minimum(np.cumsum(weights[::-1])[::-1], 1.0), 0.0)  # sums from the right
    level = np.arange(weights.size) + margin  # a rival's noise draws level here with the winner's
    lost = 0.5 * (tails[np.minimum(level, tails.size - 1)] + tails[np.minimum(level + 1, tails.size - 1)])
    with np.errstate(divide="ignore"):
        any_lost = -np.expm1((labels - 1) * np.log1p(-lost))
    return float(min(1.0, (weights * any_lost).sum()))


# -- a vote's noise, of either kind ------------------------------------------------------------------------------------

GAUSSIAN, EXPONENTIAL = "vote", "vote-em"
"""Mechanisms of a vote that gives out its winner alone. In the first, abstentions are compared without the prior."""

WINNER = "vote-winner"
"""The mechanism of a Gaussian vote whose abstentions compete on the winner's scale, so that its winner is one bit."""

BIT = "vote-bit"
"""The mechanism of a vote of two labels whose noise is on their difference: abstentions are no outcome of it."""

VOTES = (GAUSSIAN, WINNER, EXPONENTIAL, BIT, "scores")


def vote_mechanisms(labels: int) -> tuple[str, ...]:
    """The mechanisms among which a plan chooses for the winner of a vote; of equally good ones the first."""
    return (EXPONENTIAL, WINNER, BIT) if labels == 2 else (EXPONENTIAL, WINNER)


LEAD = 0.3
"""The share of the votes by which a winner is expected to lead, unless told otherwise."""

_GUMBEL = math.pi**2 / 6.0
"""The variance of Gumbel noise of scale 1."""


@dataclass(frozen=True)
class VoteNoise:
    """The noise of a vote under a plan's line. ``mechanism``: one of `VOTES`."""

    mechanism: str
    parameter: float
    own_calls: bool = False

    @property
    def rate(self) -> float:
        """r of an exponential vote, exp(r count). A range of eps0 takes eps0 / 2 if two counts move, eps0 if one."""
        return self.parameter if self.own_calls else self.parameter / 2.0

    @property
    def tails(self) -> NDArray[np.float64]:
        """Of one bit: the probability that the label behind wins, by the lead; the last holds for all larger ones."""
        return tails(self.parameter)

    def overturned(self, lead: int) -> float:
        """Of one bit: the probability that the label behind wins, exactly as it is drawn."""
        found = self.tails
        return float(found[min(lead, found.size - 1)])

    def flip(self, margin: int, labels: int) -> float:
        """Chance that noise takes the win from a label that leads every other by ``margin``: at most this.

        Of an exponential vote exactly (labels - 1) / (labels - 1 + e^(r margin)), if all others are runners-up.
        """
        if self.mechanism == BIT:
            return self.overturned(whole("margin", margin, at_least=0))
        if self.mechanism != EXPONENTIAL:
            return flip_probability(self.parameter, margin, labels)
        whole("margin", margin, at_least=0)
        others = math.log(whole("labels", labels, at_least=2) - 1.0)
        return 1.0 / (1.0 + math.exp(min(self.rate * margin - others, 700.0)))

    @lru_cache(maxsize=256)  # noqa: B019  # a small value itself, compared by its fields
    def abstention_count(self, members: int, labels: int) -> int:
        """The noisy count that "the members abstain" has to reach, or the penalty on its count in an exponential vote.

        For the Gaussian see `abstention_threshold`. In an exponential vote this outcome has the weight of an average
        label, times e^(r (A - t)) for A abstentions. If fewer than half of ``members`` abstain, A <= a = (N - 1) // 2,
        and the labels weigh at least as much as with no vote. So it comes with a probability of at most
        e^(r (a - t)) / labels, which is `FALSE_RATE` at most for t = a + ceil(log(1 / (labels FALSE_RATE)) / r).
        """
        if self.mechanism != EXPONENTIAL:
            return abstention_threshold(members, self.parameter)
        return (members - 1) // 2 + math.ceil(-math.log(labels * FALSE_RATE) / self.rate)

    def told(self, members: int, labels: int, abstaining: int | None = None) -> float:
        """Return the probability that a release says that the members abstain, if so many do (None: all of them).

        In an exponential vote with A abstentions, the count t of `abstention_count` and equal weights of the labels
        that is 1 / (1 + labels e^(-r (A - t))).
        """
        abstaining = members if abstaining is None else abstaining
        if self.mechanism == BIT:
            return 0.0
        if self.mechanism != EXPONENTIAL:
            return told_probability(members, self.parameter, labels, abstaining=abstaining)
        above = self.rate * (abstaining - self.abstention_count(members, labels))
        return 1.0 / (1.0 + labels * math.exp(min(-above, 700.0)))

    @lru_cache(maxsize=256)  # noqa: B019
    def nats(self, expected: float, labels: int, lead: float = LEAD) -> float:
        """Return the change of a label's log-odds by one noisy vote more: a public answer's log-odds weigh against it.

        Of M ``expected`` votes the right label gets p, every other one p - lead. The difference of two noisy counts
        then has mean lead M or less, and about the variance (2 p - lead) M + 2 v, with v the variance of the noise of
        one count (Gumbel noise of scale 1 / r in an exponential vote). The likelihood ratio of two Gaussians with means
        lead M and -lead M is exp(2 lead M / variance) for each vote.
        """
        right = lead + (1.0 - lead) / labels
        noise = self.parameter**2
        if self.mechanism == EXPONENTIAL:
            noise = _GUMBEL / self.rate**2
        elif self.mechanism == BIT:  # of the difference
            noise = 0.5 * self.parameter**2
        return 2.0 * lead * expected / ((2.0 * right - lead) * expected + 2.0 * noise)
