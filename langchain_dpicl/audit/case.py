"""What a case of an audit is: one mechanism, and the answers that make one owner's presence show in its releases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from langchain_dpicl.aggregators import Aggregator
from langchain_dpicl.audit.bounds import FloatArray, expected_bounds

SURE = 30.0
"""A log-likelihood ratio of what the other data set practically never shows."""


@dataclass(frozen=True)
class Setting:
    """What a case is made for: the plan's numbers, and the effort.

    ``unanimous``: all other members give one answer, so that real owners cannot spoil the case, whatever members they
    draw. ``members`` is None for as many as tell most.
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
        """`expected_bounds` of what takes part at the rate, for each design."""
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
    """One member's answer is ``canary`` where the owner takes part, else ``base``; the others give ``others``."""

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
    """Two candidates, of which the owner's term prefers the first by all of its range; no other owner has a say."""

    words: str
    bound: float
    first: float
    """The first candidate's probability without the owner."""

    @property
    def members(self) -> int:
        """No member is asked: the model's rows are owners."""
        return 0

    @property
    def with_owner(self) -> float:
        """The first candidate's probability with the owner's term."""
        return tilted(self.first, self.bound)

    def statistic(self, token: int) -> float:
        """Token 0 is the first candidate."""
        return two_point(self.with_owner, self.first)[int(token != 0)]


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
