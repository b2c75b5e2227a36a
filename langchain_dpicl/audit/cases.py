"""Worst cases: what one owner's member answers, and the others, for its presence to show most in a release.

A case holds the real mechanism at the plan's noise. Its statistic is the log-likelihood ratio of a release, with the
canary's answer against without, as the claimed mechanism has it: any function of a release makes a valid attack, and
this one makes the strongest. Where several settings of the others are possible, `expected_bounds` says which tells
most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from scipy.special import log_ndtr, ndtr, ndtri

from langchain_dpicl.aggregators import EmbeddingMean, Keywords, NoisyVote
from langchain_dpicl.audit.case import SURE, Case, MemberCase, Setting, TokenCase, tilted, two_point
from langchain_dpicl.audit.keyword_sequences import joint_em_case

_ANY_MEMBERS = 10
"""Members where their number changes nothing."""


def cases_of(mechanism: str, setting: Setting) -> tuple[Case, ...]:
    """The cases to try for a mechanism, the most telling first by expectation."""
    return _DESIGNS[mechanism](setting)


# -- counts of labels --------------------------------------------------------------------------------------------------

LABELS = ("Alder", "Birch")


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
    return tuple(
        _vote_case(setting, *designs[i], two_point(float(present[i]), float(without[i])))
        for i in dict.fromkeys((telling, close))
    )


def _vote_case(setting: Setting, n: int, b: int, ratios: tuple[float, float]) -> MemberCase:
    scores = {LABELS[1]: ratios[0], LABELS[0]: ratios[1]}
    words = (
        f"of the other members {n - 1 - b} vote for one label and {b} for the other; the canary's vote changes sides"
    )
    others = (LABELS[0],) * (n - 1 - b) + (LABELS[1],) * b
    return _labels_case(words, setting, others, NoisyVote(LABELS), lambda release: scores.get(release, 0.0))


def _scores(setting: Setting) -> tuple[Case, ...]:
    n = setting.members or _ANY_MEMBERS

    def statistic(release: dict[str, int] | None) -> float:
        if release is None:
            return 0.0
        return (release[LABELS[1]] - (release[LABELS[0]] - n) - 1.0) / setting.parameter**2

    words = "the other members vote for one label; the canary's vote changes sides"
    return (_labels_case(words, setting, (LABELS[0],) * (n - 1), NoisyVote(LABELS, scores=True), statistic),)


def _labels_case(
    words: str, setting: Setting, others: Sequence[str], vote: NoisyVote, statistic: Callable[[Any], float]
) -> MemberCase:
    return MemberCase(words, vote, setting.parameter, LABELS[0], LABELS[1], tuple(others), statistic)


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
    """The canary's unit vector is opposite to what its member says otherwise: the sum moves by 2."""
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


# -- tokens ------------------------------------------------------------------------------------------------------------


def _tokens(setting: Setting) -> tuple[Case, ...]:
    """The public odds are those for which a tilt by all of the range tells most."""
    bound = setting.parameter
    first = np.concatenate([np.geomspace(1e-6, 0.05, 60), np.linspace(0.06, 0.5, 23)])
    chosen = float(first[int(np.argmax(setting.expected([tilted(p, bound) for p in first], first)))])
    words = f"the owner's term prefers a token of public probability {chosen:.3g} by all of its range"
    return (TokenCase(words, bound, chosen),)


_DESIGNS: dict[str, Callable[[Setting], tuple[Case, ...]]] = {
    "vote": _vote,
    "scores": _scores,
    "embedding": _embedding,
    "joint-em": lambda setting: (joint_em_case(setting),),
    "ptr": _ptr,
    "tokens": _tokens,
}

MECHANISMS = tuple(_DESIGNS)
