"""Worst cases: the answers of one owner's member, and of the others, for which its presence shows most in a release.

A case holds the real mechanism at the plan's noise. Its statistic is the log-likelihood ratio of a release, with the
canary's answer against without, as the claimed mechanism has it: any function of a release makes a valid attack, and
this one makes the strongest. If several settings of the others are possible, `expected_bounds` chooses one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr, ndtri

from langchain_dpicl.aggregators import Aggregator, EmbeddingMean, Keywords, NoisyVote
from langchain_dpicl.aggregators.joint_em import loss_levels, sequence_counts
from langchain_dpicl.audit.bounds import expected_bounds
from langchain_dpicl.privacy.losses import FloatArray

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
    delta: float
    trials: int
    confidence: float
    unanimous: bool
    members: int | None = None
    options: Mapping[str, float] = field(default_factory=dict)

    def expected(self, present: object, absent: object) -> FloatArray:
        """`expected_bounds` of each design, whose event has these probabilities if the owner takes part, and if not."""
        p, q = np.asarray(present, np.float64), np.asarray(absent, np.float64)
        return expected_bounds(
            self.rate * p + (1.0 - self.rate) * q,
            q,
            releases=self.releases,
            trials=self.trials,
            delta=self.delta,
            confidence=self.confidence,
        )


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

    ``first`` is the first candidate's probability without the owner.
    """

    words: str
    bound: float
    first: float
    members: int = 0

    def statistic(self, token: int) -> float:
        """Token 0 is the first candidate."""
        return two_point(tilted(self.first, self.bound), self.first)[int(token != 0)]


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


# -- counts of labels --------------------------------------------------------------------------------------------------


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


# -- the embedding mean ------------------------------------------------------------------------------------------------


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


# -- keywords ----------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
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

    setting: Setting
    many: int
    few: int

    @property
    def words(self) -> list[str]:
        """All words, in the order of the counts below."""
        return ["anchor", *(f"x{i}" for i in range(self.many)), *(f"y{i}" for i in range(self.few))]

    def answers(self) -> tuple[str, str, tuple[str, ...]]:
        """The member's answer without the canary and with it, and those of the others."""
        anchor, x, y = "anchor", self.words[1 : 1 + self.many], self.words[1 + self.many :]
        canary, with_x, members = " ".join([anchor, *y]), " ".join([anchor, *x]), self.setting.members
        if self.setting.unanimous or members == 2:  # two are too few to lift the anchor above the rest
            return with_x, canary, (with_x,) * ((members or 2) - 1)
        return " ".join(x), canary, (with_x, anchor, *(" ".join(self.words),) * ((members or 3) - 3))

    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many members name each word, with the canary and without it."""
        base, canary, others = self.answers()
        said = [[set(answer.split()) for answer in (own, *others)] for own in (canary, base)]
        present, without = ([sum(word in each for each in answers) for word in self.words] for answers in said)
        return np.array(present, np.int64), np.array(without, np.int64)

    def log_normaliser(self, counts: NDArray[np.int64]) -> float:
        """log of the sum of all sequences' weights."""
        levels = loss_levels(counts, 2)
        pairs = zip(sequence_counts(levels.reach), levels.losses, strict=True)
        return math.log(sum(size * math.exp(-self.setting.parameter * int(loss) / 4.0) for size, loss in pairs))

    def probabilities(self) -> tuple[float, float]:
        """P((a, y) for some y), with the canary and without it."""

        def probability(counts: NDArray[np.int64]) -> float:
            ranked = np.sort(counts)[::-1]
            loss = max(int(ranked[i] - counts[j]) for i, j in enumerate((0, 1 + self.many)))
            return self.few * math.exp(-self.setting.parameter * loss / 4.0 - self.log_normaliser(counts))

        present, without = map(probability, self.counts())
        return present, without

    def statistic(self) -> Callable[[Any], float]:
        """The log-likelihood ratio of a released sequence."""
        place = {word: i for i, word in enumerate(self.words)}
        both = self.counts()
        ranked = [np.sort(counts)[::-1].tolist() for counts in both]
        counted = [counts.tolist() for counts in both]
        present, without = map(self.log_normaliser, both)

        def ratio(release: Sequence[str]) -> float:
            sequence = [place[word] for word in release]
            losses = [
                max(top[i] - c[j] for i, j in enumerate(sequence)) for top, c in zip(ranked, counted, strict=True)
            ]
            return float(without - present + self.setting.parameter * (losses[1] - losses[0]) / 4.0)

        return ratio


def _joint_em(setting: Setting) -> tuple[Case, ...]:
    """The most telling numbers of words."""
    domains = [_Domain(setting, many, few) for many in _MANY for few in _FEW if few <= many]
    present, without = np.array([domain.probabilities() for domain in domains]).T
    best = domains[int(np.argmax(setting.expected(present, without)))]
    base, canary, others = best.answers()
    named = f"{1 + best.few} of {len(best.words)} words"
    spoken = f"the canary's member names {named}, and {len(base.split())} without the canary"
    keywords = Keywords.joint_em(best.words, 2)
    return (MemberCase(spoken, keywords, setting.parameter, base, canary, others, best.statistic()),)


# -- tokens ------------------------------------------------------------------------------------------------------------


def _tokens(setting: Setting) -> tuple[Case, ...]:
    """The public odds are those for which a tilt by all of the range tells most."""
    bound = setting.parameter
    first = np.concatenate([np.geomspace(1e-6, 0.05, 60), np.linspace(0.06, 0.5, 23)])
    chosen = float(first[int(np.argmax(setting.expected([tilted(p, bound) for p in first], first)))])
    words = f"the owner's term prefers a token of public probability {chosen:.3g} by all of its range"
    return (TokenCase(words, bound, chosen),)


_CASES: dict[str, Callable[[Setting], tuple[Case, ...]]] = {
    "vote": _vote,
    "scores": _scores,
    "embedding": _embedding,
    "joint-em": _joint_em,
    "ptr": _ptr,
    "tokens": _tokens,
}

MECHANISMS = tuple(_CASES)


def cases_of(mechanism: str, setting: Setting) -> tuple[Case, ...]:
    """The cases to try for a mechanism, the most telling first by expectation."""
    return _CASES[mechanism](setting)
