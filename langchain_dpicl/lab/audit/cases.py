"""Worst cases of every mechanism.

A worst case has the answers of one owner's member, and of the others, for which its presence shows most in a release.
With a call for every owner the canary's answer is one more, and none stands in its place without it.
It holds the real mechanism at the plan's noise. Its statistic is the log-likelihood ratio of a release, with the
canary's answer against without, as the claimed mechanism has it: any function of a release makes a valid attack, and
this one makes the strongest. If several settings of the others are possible, `expected_bounds` chooses one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from scipy.special import expit, log_ndtr, ndtr, ndtri

from langchain_dpicl.aggregators import Aggregator, CandidateVote, EmbeddingMean, Keywords, NoisyVote
from langchain_dpicl.aggregators.base import WorstCase
from langchain_dpicl.aggregators.keywords import loss_levels, sequence_counts
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.audit.bounds import expected_bounds
from langchain_dpicl.lab.audit.draws import BlockRandomness
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.mechanisms import OWN_CALLS
from langchain_dpicl.privacy.votes import BIT, EXPONENTIAL, VoteNoise, discrete_gaussian

SURE = 30.0
"""A log-likelihood ratio of an outcome that the other data set practically never shows."""

LABELS = ("Alder", "Birch")
MORE_LABELS = (*LABELS, "Cedar", "Elm", "Fir", "Hazel")
_VOTES = 3  # of others for a label whose odds a prior sets

_ANY_MEMBERS = 10
"""Members if their number changes nothing."""

_LEARNED = 4000
"""Releases of either data set from which the ratios of a stated case are learnt."""

_MANY = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96)
_FEW = (1, 2, 4, 8)


@dataclass(frozen=True)
class Setting:
    """The plan's numbers for which a case is made, and the effort.

    ``unanimous``: all other members give one answer, so that real owners cannot spoil the case, whatever members they
    draw. (With calls of their own they draw none.) ``members``: N, or None for the most telling number.
    """

    mechanism: str
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

    @property
    def own_calls(self) -> bool:
        """True if the canary adds an output. Otherwise it replaces one."""
        return bool(self.options.get(OWN_CALLS))

    @property
    def moved(self) -> int:
        """By how much the canary moves the difference of two counts."""
        return 1 if self.own_calls else 2

    def bind(self, aggregator: Aggregator[Any], members: int) -> Aggregator[Any]:
        """The aggregator under the plan's line, for so many outputs with the canary's."""
        return aggregator.under(self.mechanism, Crowd(members, members, self.own_calls)).prepare({}, self.options)

    def expected(self, present: object, absent: object) -> FloatArray:
        """`expected_bounds` of each design, whose event has these probabilities if the owner takes part, and if not."""
        p, q = np.asarray(present, np.float64), np.asarray(absent, np.float64)
        effort: dict[str, Any] = {"trials": self.trials, "delta": self.delta, "confidence": self.confidence}
        return expected_bounds(self.rate * p + (1.0 - self.rate) * q, q, releases=self.releases, **effort)


@dataclass(frozen=True)
class MemberCase:
    """One member answers ``canary`` if the owner takes part, else ``base``; the others answer ``others``.

    ``base`` is None if every owner has a call of its own: without the owner there is no such output.
    """

    words: str
    aggregator: Aggregator[Any]
    parameter: float
    base: str | None
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


def _behind(setting: Setting, labels: int, behind: FloatArray) -> FloatArray:
    """The probability that a label wins which is so many votes behind each of the others (close to it: no proof)."""
    if setting.mechanism == EXPONENTIAL:
        rate = VoteNoise(setting.mechanism, setting.parameter, setting.own_calls).rate
        return np.asarray(expit(-rate * behind - math.log(labels - 1)), np.float64)
    if setting.mechanism == BIT:
        tails = VoteNoise(BIT, setting.parameter).tails
        places = np.arange(1 - tails.size, tails.size)
        return np.asarray(np.interp(behind, places, np.concatenate([1.0 - tails[:0:-1], tails])), np.float64)
    noise, weights = discrete_gaussian(setting.parameter)
    below = np.cumsum(weights) - weights / 2.0
    at = np.interp(np.subtract.outer(noise, behind).ravel(), noise, below, 0.0, 1.0).reshape(-1, len(behind))
    return np.asarray(weights @ at ** (labels - 1), np.float64)


def vote_cases(
    setting: Setting,
    labels: Sequence[str] = LABELS,
    kind: Callable[..., Aggregator[Any]] = NoisyVote,
    has_prior: bool = False,
) -> tuple[Case, ...]:
    """The canary votes for the second label; without a call of its own it takes this vote from the first.

    First the lead of the others that tells most at the plan's noise; then the closest race, which tells most if there
    is less. If one count moves, the Gaussian noise on the others' is best lost in the largest of many. A prior sets the
    odds between two votes.
    """
    own, rivals, mechanism = setting.own_calls, len(labels) - 1, setting.mechanism
    noise = VoteNoise(mechanism, setting.parameter, own)
    if setting.members is None:
        reach = 16.0 / noise.rate if mechanism == EXPONENTIAL else 8.0 * setting.parameter
        leads = [_VOTES] if has_prior else range(1, min(math.ceil(reach), 10_000) + 2)
        designs = [(lead, 0) for lead in leads]
    else:
        others = setting.members - 1
        most = 0 if setting.unanimous and not own else others
        designs = [((others - b) // rivals, b) for b in range(most + 1) if (others - b) % rivals == 0]
    chances = np.linspace(0.0, 1.0, 81).tolist() if has_prior else [0.5]
    tried = [(each, b, chance) for each, b in designs for chance in chances]

    def prior(chance: float) -> dict[str, float] | None:
        return dict(zip(LABELS, (chance, 1.0 - chance), strict=True)) if has_prior else None

    def shift(each: int, b: int, chance: float) -> float:
        """The worth of the prior, in votes."""
        first, second = NoisyVote(LABELS, prior=prior(chance))._logs.tolist()
        return float(first - second) / noise.nats(rivals * each + b + 1, len(labels))

    lead = np.array([each - b + (shift(each, b, chance) if has_prior else 0.0) for each, b, chance in tried])
    present, without = (_behind(setting, len(labels), lead + more) for more in (-1.0, setting.moved - 1.0))
    telling, close = int(np.argmax(setting.expected(present, without))), int(np.argmin(np.abs(lead)))

    def case(i: int) -> MemberCase:
        each, b, chance = tried[i]
        inside, outside = two_point(float(present[i]), float(without[i]))
        others = tuple(label for label in labels if label != LABELS[1]) * each + (LABELS[1],) * b
        words = f"of the others {each} vote for {'one label' if rivals == 1 else 'each label'} and {b} for the canary's"
        vote = kind(labels, prior=prior(chance), mechanism=mechanism)
        bound, base = setting.bind(vote, len(others) + 1), None if own else LABELS[0]

        def statistic(release: str | None) -> float:
            return 0.0 if release is None else inside if release == LABELS[1] else outside

        return MemberCase(words, bound, setting.parameter, base, LABELS[1], others, statistic)

    return tuple(case(i) for i in dict.fromkeys((telling, close)))


def counts_cases(setting: Setting, details: bool = False) -> tuple[Case, ...]:
    """All noisy counts are seen: the canary's vote moves its label's, and without a call of its own another's."""
    n, own = setting.members or _ANY_MEMBERS, setting.own_calls

    def statistic(release: dict[str, Any] | None) -> float:
        if release is None:
            return 0.0
        counts = release["counts"] if details else release
        seen: float = counts[LABELS[1]] - (0.0 if own else counts[LABELS[0]] - n)
        return (seen - setting.moved / 2.0) / setting.parameter**2

    words = "the others vote for one label, the canary for another"
    vote = setting.bind(NoisyVote(LABELS, scores=not details, details=details), n)
    base, others = None if own else LABELS[0], (LABELS[0],) * (n - 1)
    return (MemberCase(words, vote, setting.parameter, base, LABELS[1], others, statistic),)


def candidate_vote(labels: Sequence[str], **_: object) -> CandidateVote:
    """A vote for the nearest of two candidates, which the labels are."""
    return CandidateVote(Poles(), labels)


class Poles(Embeddings):
    """Embeds a text that starts with "north", and the canary's label, as (1, 0), any other as (-1, 0)."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector a text."""
        return [[1.0 if text.startswith(("north", LABELS[1])) else -1.0, 0.0] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """The same."""
        return self.embed_documents([text])[0]


def embedding_cases(setting: Setting) -> tuple[Case, ...]:
    """The canary's unit vector is opposite to its member's other answer: the sum moves by 2, or by 1 without that."""
    n, moved = setting.members or _ANY_MEMBERS, setting.moved

    def statistic(release: list[float] | None) -> float:
        return 0.0 if release is None else moved * (n * release[0] + n - 2.0 + moved / 2.0) / setting.parameter**2

    aggregator = setting.bind(EmbeddingMean(Poles(), release="vector"), n)
    words = "the others' answers embed as a unit vector, the canary's as its opposite"
    base, others = None if setting.own_calls else "south", ("south",) * (n - 1)
    return (MemberCase(words, aggregator, setting.parameter, base, "north", others, statistic),)


def ptr_cases(setting: Setting) -> tuple[Case, ...]:
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
    """Words for the joint exponential mechanism: losses that move by 2, or by 1, in opposite directions.

    One anchor a, ``many`` x_1, ..., x_m, ``few`` y_1, ..., y_r; sequences of k = 2. Without the canary its member names
    the x; with it, a and the y. Let a and the x have the count h then, and the y h - 2. With the canary a has h + 1,
    the x and the y h - 1 each. So the loss of a sequence that begins with an x rises from 0 to 2 (c_(1) rises, its own
    count falls), and there are m^2 of them or so, which makes the normaliser fall by nearly e^(-eps0/2); the loss of
    (a, y) falls from 2 to 0 (c_(2) falls, its own count rises). For many x the likelihood ratio of {(a, y)} tends to
    e^eps0, all that the bounded range allows.

    With all other members giving one answer the anchor cannot rise, only stay: ratios up to e^(3 eps0 / 4). With a call
    of its own the canary adds 1 to a and the y, and the y have h - 1: these losses move by 1, at twice the rate.
    """

    def __init__(self, setting: Setting, many: int, few: int) -> None:
        x, y = [f"x{i}" for i in range(many)], [f"y{i}" for i in range(few)]
        self.words, self.few = ["anchor", *x, *y], few
        self.canary, with_x = " ".join(["anchor", *y]), " ".join(["anchor", *x])
        self.base: str | None = with_x
        self.others: tuple[str, ...] = (with_x,) * ((setting.members or 2) - 1)
        if setting.own_calls:
            self.base, self.others = None, (with_x, *(" ".join(self.words),) * ((setting.members or 2) - 2))
        elif not setting.unanimous and setting.members != 2:  # two are too few to lift the anchor above the rest
            self.base = " ".join(x)
            self.others = (with_x, "anchor", *(" ".join(self.words),) * ((setting.members or 3) - 3))
        self._scale = setting.parameter / (2.0 * setting.moved)
        self._sides = []
        for own in (self.canary, self.base or ""):  # how many members name each word
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


def joint_em_cases(setting: Setting) -> tuple[Case, ...]:
    """The most telling numbers of words, by the event that (a, y) is released for some y."""
    domains = [_Domain(setting, many, few) for many in _MANY for few in _FEW if few <= many]
    logs = np.array([each.log_probabilities(["anchor", "y0"]) for each in domains])
    present, without = np.array([[each.few] for each in domains]).T * np.exp(logs.T)
    best = domains[int(np.argmax(setting.expected(present, without)))]
    named = f"{1 + best.few} of {len(best.words)} words"
    spoken = f"the canary's member names {named}, and {len((best.base or '').split())} without the canary"
    keywords = setting.bind(Keywords.joint_em(best.words, 2), len(best.others) + 1)
    return (MemberCase(spoken, keywords, setting.parameter, best.base, best.canary, best.others, best.statistic),)


def learned_cases(setting: Setting, stated: Sequence[WorstCase]) -> tuple[Case, ...]:
    """The cases that a kind states, with ratios that are learnt: from `_LEARNED` releases of either data set.

    A release that is not among them tells nothing. Ratios that are not the true ones make an attack weaker, never
    wrong.
    """
    found = []
    for case in stated:
        same = setting.own_calls or set(case.others) <= {case.base}
        if (setting.unanimous and not same) or setting.members not in (None, 1 + len(case.others)):
            continue
        aggregator = setting.bind(case.aggregator, 1 + len(case.others))
        base = None if setting.own_calls else case.base
        others = [aggregator.encode(answer) for answer in case.others]
        present = [aggregator.encode(case.canary), *others]
        absent = [*([] if base is None else [aggregator.encode(base)]), *others]
        randomness = BlockRandomness()
        seen, rare = (
            Counter(repr(aggregator.aggregate(outputs, setting.parameter, randomness)) for _ in range(_LEARNED))
            for outputs in (present, absent)
        )

        def statistic(release: Any, seen: Counter[str] = seen, rare: Counter[str] = rare) -> float:
            return math.log((seen[repr(release)] + 1) / (rare[repr(release)] + 1))

        about = (setting.parameter, base, case.canary, case.others, statistic)
        found.append(MemberCase(case.words, aggregator, *about))
    if not found:
        sizes = sorted({1 + len(case.others) for case in stated})
        raise InvalidParameter("members", setting.members, f"one of {', '.join(map(str, sizes))}")
    return tuple(found)


def tokens_cases(setting: Setting) -> tuple[Case, ...]:
    """The public odds are those for which a tilt by all of the range tells most."""
    bound = setting.parameter
    first = np.concatenate([np.geomspace(1e-6, 0.05, 60), np.linspace(0.06, 0.5, 23)])
    chosen = float(first[int(np.argmax(setting.expected([tilted(p, bound) for p in first], first)))])
    words = f"the owner's term prefers a token of public probability {chosen:.3g} by all of its range"
    ratios = two_point(tilted(chosen, bound), chosen)
    return (TokenCase(words, bound, chosen, lambda token: ratios[int(token != 0)]),)
