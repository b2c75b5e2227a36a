"""Worst cases of a mechanism, and what trials of them prove about its epsilon.

A worst case has the answers of one owner's member, and of the others, for which its presence shows most in a release.
It holds the real mechanism at the plan's noise. Its statistic is the log-likelihood ratio of a release, with the
canary's answer against without, as the claimed mechanism has it: any function of a release makes a valid attack, and
this one makes the strongest. If several settings of the others are possible, `expected_bounds` chooses one.

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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import ArrayLike
from scipy.special import bdtrc, betaincinv, log_ndtr, ndtr, ndtri

from langchain_dpicl.aggregators import Aggregator, EmbeddingMean, Keywords, NoisyVote
from langchain_dpicl.aggregators.keywords import loss_levels, sequence_counts
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.profile import Direction

SURE = 30.0
"""A log-likelihood ratio of an outcome that the other data set practically never shows."""

LABELS = ("Alder", "Birch")

_ANY_MEMBERS = 10
"""Members if their number changes nothing."""

_MANY = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96)
_FEW = (1, 2, 4, 8)


@dataclass(frozen=True)
class Setting:
    """The plan's numbers for which a case is made, and the effort.

    ``unanimous``: all other members give one answer, so that real owners cannot spoil the case, whatever members they
    draw. ``members``: N, or None for the most telling number.
    """

    parameter: float
    rate: float
    releases: int
    epsilon: float
    delta: float
    trials: int
    confidence: float
    unanimous: bool
    members: int | None = None
    options: Mapping[str, float] = field(default_factory=dict)

    def expected(self, present: object, absent: object) -> FloatArray:
        """`expected_bounds` of each design, whose event has these probabilities if the owner takes part, and if not."""
        p, q = np.asarray(present, np.float64), np.asarray(absent, np.float64)
        effort: dict[str, Any] = {"trials": self.trials, "delta": self.delta, "confidence": self.confidence}
        return expected_bounds(self.rate * p + (1.0 - self.rate) * q, q, releases=self.releases, **effort)


@dataclass(frozen=True)
class MemberCase:
    """One member answers ``canary`` if the owner takes part, else ``base``; the others answer ``others``."""

    words: str
    aggregator: Aggregator[Any]
    parameter: float
    base: str
    canary: str
    others: tuple[str, ...]
    statistic: Callable[[Any], float]

    @property
    def members(self) -> int:
        """N."""
        return 1 + len(self.others)


@dataclass(frozen=True)
class TokenCase:
    """Two candidate tokens, of which the owner's term prefers the first by all of its range; no member is asked.

    ``first`` is the probability without the owner of the first candidate, token 0.
    """

    words: str
    bound: float
    first: float
    statistic: Callable[[int], float]
    members: int = 0


Case = MemberCase | TokenCase


def tilted(probability: float, bound: float) -> float:
    """One of two outcomes, after the odds are multiplied by e^bound."""
    rest = (1.0 - probability) * math.exp(-bound)
    return probability / (probability + rest)


def two_point(present: float, without: float) -> tuple[float, float]:
    """The log-likelihood ratios of an event and of its complement."""
    tiny = math.exp(-SURE)
    inside = math.log(max(present, tiny) / max(without, tiny))
    return inside, math.log(max(1.0 - present, tiny) / max(1.0 - without, tiny))


def _vote(setting: Setting) -> tuple[Case, ...]:
    """The canary takes a vote from the first label and gives it to the second: their difference moves by 2.

    First the lead that tells most at the plan's noise; then the closest race, which tells most if there is less.
    """
    if setting.members is None:
        designs = [(n, 0) for n in range(2, math.ceil(8.0 * setting.parameter) + 3)]
    else:
        most = 0 if setting.unanimous else setting.members - 1
        designs = [(setting.members, b) for b in range(most + 1)]
    lead = np.array([n - 2 * b for n, b in designs], np.float64)
    spread = math.sqrt(2.0) * setting.parameter
    without, present = ndtr(-lead / spread), ndtr((2.0 - lead) / spread)
    telling, close = int(np.argmax(setting.expected(present, without))), int(np.argmin(np.abs(lead - 1.0)))

    def case(i: int) -> MemberCase:
        n, b = designs[i]
        ratios = dict(zip(reversed(LABELS), two_point(float(present[i]), float(without[i])), strict=True))
        votes = f"{n - 1 - b} vote for one label and {b} for the other"
        words = f"of the other members {votes}; the canary's vote changes sides"
        others = (LABELS[0],) * (n - 1 - b) + (LABELS[1],) * b
        return MemberCase(words, NoisyVote(LABELS), setting.parameter, *LABELS, others, lambda r: ratios.get(r, 0.0))

    return tuple(case(i) for i in dict.fromkeys((telling, close)))


def _scores(setting: Setting) -> tuple[Case, ...]:
    n = setting.members or _ANY_MEMBERS

    def statistic(release: dict[str, int] | None) -> float:
        if release is None:
            return 0.0
        return (release[LABELS[1]] - (release[LABELS[0]] - n) - 1.0) / setting.parameter**2

    words = "the other members vote for one label; the canary's vote changes sides"
    vote = NoisyVote(LABELS, scores=True)
    return (MemberCase(words, vote, setting.parameter, *LABELS, (LABELS[0],) * (n - 1), statistic),)


class Poles(Embeddings):
    """Embeds a text that starts with "north" as (1, 0), any other as (-1, 0)."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector a text."""
        return [[1.0 if text.startswith("north") else -1.0, 0.0] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """The same."""
        return self.embed_documents([text])[0]


def _embedding(setting: Setting) -> tuple[Case, ...]:
    """The canary's unit vector is opposite to its member's other answer: the sum moves by 2."""
    n = setting.members or _ANY_MEMBERS

    def statistic(release: list[float] | None) -> float:
        return 0.0 if release is None else 2.0 * (n * release[0] + n - 1.0) / setting.parameter**2

    aggregator = EmbeddingMean(Poles(), release="vector").prepare({}, setting.options)
    words = "the other members' answers embed as a unit vector, the canary's as its opposite"
    return (MemberCase(words, aggregator, setting.parameter, "south", "north", ("south",) * (n - 1), statistic),)


def _ptr(setting: Setting) -> tuple[Case, ...]:
    """A gap that moves by 2 over one and the same keyword, and two data sets whose keywords differ."""
    sigma, reach = setting.parameter, float(ndtri(setting.options["delta0"]))
    if setting.members is None:
        sizes = np.arange(2, math.ceil(6.0 + 2.0 * sigma * (4.0 - reach)))
    else:
        sizes = np.array([setting.members])
    at_gap = [reach + np.maximum(0.0, sizes - 2.0 - moved) / (2.0 * sigma) for moved in (0.0, 2.0)]
    i = int(np.argmax(setting.expected(ndtr(at_gap[1]), ndtr(at_gap[0]))))
    without, present = float(at_gap[0][i]), float(at_gap[1][i])
    passed = float(np.clip(log_ndtr(present) - log_ndtr(without), -SURE, SURE))
    failed = float(np.clip(log_ndtr(-present) - log_ndtr(-without), -SURE, SURE))

    def gap(release: Any) -> float:
        return failed if release.fallback else passed

    def kind(release: Any) -> float:
        return 0.0 if release.fallback else SURE * (1.0 if "maple" in release else -1.0)

    n = int(sizes[i])
    aggregator = Keywords.ptr(1).prepare({}, setting.options)
    moves = f"all {n} members name one word, the canary's another: the gap falls from {n} to {n - 2}"
    differ = "two members name one word, the canary's another: the sets differ, and the gap is at most 2"
    make = partial(MemberCase, aggregator=aggregator, parameter=sigma, base="cedar", canary="maple")
    cases: list[Case] = [make(moves, others=("cedar",) * (n - 1), statistic=gap)]
    if setting.members is None:
        cases.append(make(differ, others=("cedar",), statistic=kind))
    return tuple(cases)


class _Domain:
    """Words for the joint exponential mechanism: losses that move by 2 in opposite directions.

    One anchor a, ``many`` x_1, ..., x_m, ``few`` y_1, ..., y_r; sequences of k = 2. Without the canary its member names
    the x; with it, a and the y. Let a and the x have the count h then, and the y h - 2. With the canary a has h + 1,
    the x and the y h - 1 each. So the loss of a sequence that begins with an x rises from 0 to 2 (c_(1) rises, its own
    count falls), and there are m^2 of them or so, which makes the normaliser fall by nearly e^(-eps0/2); the loss of
    (a, y) falls from 2 to 0 (c_(2) falls, its own count rises). For many x the likelihood ratio of {(a, y)} tends to
    e^eps0, all that the bounded range allows.

    With all other members giving one answer the anchor cannot rise, only stay: ratios up to e^(3 eps0 / 4).
    """

    def __init__(self, setting: Setting, many: int, few: int) -> None:
        x, y = [f"x{i}" for i in range(many)], [f"y{i}" for i in range(few)]
        self.words, self.few = ["anchor", *x, *y], few
        self.canary, with_x = " ".join(["anchor", *y]), " ".join(["anchor", *x])
        self.base, self.others = with_x, (with_x,) * ((setting.members or 2) - 1)
        if not setting.unanimous and setting.members != 2:  # two are too few to lift the anchor above the rest
            self.base = " ".join(x)
            self.others = (with_x, "anchor", *(" ".join(self.words),) * ((setting.members or 3) - 3))
        self._scale = setting.parameter / 4.0
        self._sides = []
        for own in (self.canary, self.base):  # how many members name each word
            said = [set(answer.split()) for answer in (own, *self.others)]
            counts = {word: sum(word in each for each in said) for word in self.words}
            levels = loss_levels(np.array(list(counts.values()), np.int64), 2)
            sizes = zip(sequence_counts(levels.reach), levels.losses, strict=True)
            normaliser = math.log(sum(size * math.exp(-self._scale * int(loss)) for size, loss in sizes))
            self._sides.append((counts, sorted(counts.values(), reverse=True), normaliser))

    def log_probabilities(self, sequence: Sequence[str]) -> list[float]:
        """The logarithm of a sequence's probability, with the canary and without it."""
        return [
            -self._scale * max(top - counts[word] for top, word in zip(ranked, sequence, strict=False)) - normaliser
            for counts, ranked, normaliser in self._sides
        ]

    def statistic(self, release: Sequence[str]) -> float:
        """The log-likelihood ratio of a released sequence."""
        present, without = self.log_probabilities(release)
        return present - without


def _joint_em(setting: Setting) -> tuple[Case, ...]:
    """The most telling numbers of words, by the event that (a, y) is released for some y."""
    domains = [_Domain(setting, many, few) for many in _MANY for few in _FEW if few <= many]
    logs = np.array([each.log_probabilities(["anchor", "y0"]) for each in domains])
    present, without = np.array([[each.few] for each in domains]).T * np.exp(logs.T)
    best = domains[int(np.argmax(setting.expected(present, without)))]
    named = f"{1 + best.few} of {len(best.words)} words"
    spoken = f"the canary's member names {named}, and {len(best.base.split())} without the canary"
    keywords = Keywords.joint_em(best.words, 2)
    return (MemberCase(spoken, keywords, setting.parameter, best.base, best.canary, best.others, best.statistic),)


def _tokens(setting: Setting) -> tuple[Case, ...]:
    """The public odds are those for which a tilt by all of the range tells most."""
    bound = setting.parameter
    first = np.concatenate([np.geomspace(1e-6, 0.05, 60), np.linspace(0.06, 0.5, 23)])
    chosen = float(first[int(np.argmax(setting.expected([tilted(p, bound) for p in first], first)))])
    words = f"the owner's term prefers a token of public probability {chosen:.3g} by all of its range"
    ratios = two_point(tilted(chosen, bound), chosen)
    return (TokenCase(words, bound, chosen, lambda token: ratios[int(token != 0)]),)


CASES: dict[str, Callable[[Setting], tuple[Case, ...]]] = {
    "vote": _vote,
    "scores": _scores,
    "embedding": _embedding,
    "joint-em": _joint_em,
    "ptr": _ptr,
    "tokens": _tokens,
}
"""For each mechanism the cases to try, the most telling first by expectation."""


# -- bounds ------------------------------------------------------------------------------------------------------------


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
