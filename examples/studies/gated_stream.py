"""Gated selection with tickets beside blind selection, on the votes that a model gave: coins, buckets, tickets, noise.

A member with room for one example says what the query and that example make it say. So a table of (query, example)
votes, read once, holds every release that a plan could make, and what is drawn here has exactly a release's law:

- *Gated.* An owner is eligible where its similarity reaches a public threshold. Every eligible owner that still has a
  ticket burns one, sampled or not; the others are left out. Each of the former flips a coin and falls into one of N
  buckets, where the most similar example stays. The plan's T counts tickets, so queries have no end.
- *Blind.* Every owner flips a coin for every query, the example that stays in a bucket is any of them, and the plan's T
  counts queries: there are no answers after the T-th.

Every owner of either side has one example. Equal queries of a stream are releases of their own: nothing is replayed.
(A ledger replays an equal query of the same caller for nothing; it is left out here, since then a stream over a few
hundred questions would be free after a while.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.noise import Randomness, abstention_threshold

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Question:
    """What members say to one query, as positions in the list of labels; -1 abstains.

    Parameters
    ----------
    eligible
        Positions of the owners whose similarity reaches the threshold, the most similar first.
    votes
        What a member says with the example of each of these.
    blind
        What members say with the examples of a sample of all owners, drawn once and uniformly for this query. A blind
        sample's examples are drawn from them, with replacement: each member has the law of a release's.
    empty
        What a member says without an example.
    right
        The right label.
    """

    eligible: Ints
    votes: Ints
    blind: Ints
    empty: int
    right: int

    def __post_init__(self) -> None:
        if len(self.eligible) != len(self.votes):
            raise InvalidParameter(
                "votes", len(self.votes), f"as many as there are eligible owners, {len(self.eligible)}"
            )


@dataclass(frozen=True)
class Side:
    """A plan's public numbers: N, the rate q, the noise, and T (tickets of an owner, or queries)."""

    members: int
    rate: float
    sigma: float
    releases: int

    def __post_init__(self) -> None:
        checks.whole("members", self.members, at_least=2)
        checks.probability("rate", self.rate)
        checks.positive("sigma", self.sigma)
        checks.whole("releases", self.releases)


@dataclass(frozen=True)
class Walk:
    """What happened along a stream, one entry for each query.

    Attributes
    ----------
    counts
        (queries, labels + 1) votes, abstentions last. Rows of a blind plan after its T-th query are zeros.
    answered
        How many queries got an answer: the first so many.
    examples
        How many members had an example.
    eligible, taking_part
        How many owners were eligible, and how many of these still had a ticket.
    holding
        How many of all owners hold a ticket after the query.
    """

    counts: Ints
    answered: int
    examples: Ints
    eligible: Ints
    taking_part: Ints
    holding: Ints


def zipf_stream(questions: int, length: int, exponent: float, randomness: Randomness) -> Ints:
    """Which question is asked at each time: question i with a weight of (i + 1)^-exponent; exponent 0 is uniform."""
    weights = np.arange(1, checks.whole("questions", questions) + 1) ** -checks.real("exponent", exponent, at_least=0.0)
    ends = np.cumsum(weights) / weights.sum()
    found = np.searchsorted(ends, randomness.uniforms(checks.whole("length", length)), side="right")
    return np.minimum(found, questions - 1).astype(np.int64)


def walk_gated(
    questions: Sequence[Question], stream: Ints, side: Side, owners: int, labels: int, randomness: Randomness
) -> Walk:
    """All queries of the stream, with a ticket burnt for every eligible owner that has one."""
    tickets = np.full(owners, side.releases, np.int64)
    counts = np.zeros((len(stream), labels + 1), np.int64)
    examples, eligible, taking, holding = (np.zeros(len(stream), np.int64) for _ in range(4))
    held = owners
    for time, number in enumerate(stream.tolist()):
        question = questions[number]
        is_in = tickets[question.eligible] > 0
        burning = question.eligible[is_in]
        tickets[burning] -= 1
        held -= int((tickets[burning] == 0).sum())
        coins = randomness.coin_positions(len(burning), side.rate)
        said, filled = _members(question.votes[is_in][coins], question.empty, side.members, randomness)
        counts[time] = np.bincount(np.where(said < 0, labels, said), minlength=labels + 1)
        examples[time], eligible[time], taking[time], holding[time] = filled, len(is_in), len(burning), held
    return Walk(counts, len(stream), examples, eligible, taking, holding)


def walk_blind(
    questions: Sequence[Question], stream: Ints, side: Side, owners: int, labels: int, randomness: Randomness
) -> Walk:
    """The first T queries of the stream: every owner may take part in each of them, and none after them."""
    counts = np.zeros((len(stream), labels + 1), np.int64)
    examples, holding = np.zeros(len(stream), np.int64), np.zeros(len(stream), np.int64)
    answered = min(side.releases, len(stream))
    for time, number in enumerate(stream[:answered].tolist()):
        question = questions[number]
        taking = len(randomness.coin_positions(owners, side.rate))
        sample = randomness.integers(len(question.blind), taking)
        said, filled = _members(question.blind[sample], question.empty, side.members, randomness)
        counts[time] = np.bincount(np.where(said < 0, labels, said), minlength=labels + 1)
        examples[time] = filled
    holding[: max(0, min(side.releases - 1, len(stream)))] = owners
    everyone = np.where(np.arange(len(stream)) < answered, owners, 0)
    return Walk(counts, answered, examples, everyone, everyone, holding)


def _members(votes: Ints, empty: int, members: int, randomness: Randomness) -> tuple[Ints, int]:
    """What each member says, and how many have an example: the first of these votes that falls to a member stays."""
    said = np.full(members, empty, np.int64)
    member_of, first = np.unique(randomness.integers(members, len(votes)), return_index=True)
    said[member_of] = votes[first]
    return said, len(first)


def released(counts: Ints, members: int, sigma: float, randomness: Randomness) -> Ints:
    """One release of `NoisyVote` for each row of counts, abstentions last: a label's position, -1 for abstention."""
    noisy = counts + randomness.discrete_gaussian(sigma, counts.size).reshape(counts.shape)
    labels, down = noisy[:, :-1], noisy[:, -1]
    best = labels.max(axis=1)
    # Among equal ones any is as likely: the largest of independent numbers below 1.
    order = (labels == best[:, None]) * randomness.uniforms(labels.size).reshape(labels.shape)
    abstains = (down > best) & (down >= abstention_threshold(members, sigma))
    return np.where(abstains, -1, order.argmax(axis=1)).astype(np.int64)
