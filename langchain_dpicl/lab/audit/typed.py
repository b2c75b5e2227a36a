"""Worst cases of medians and of structured answers, with the exact law of a release."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, Field
from scipy.special import expit

from langchain_dpicl.aggregators import NoisyMedian, Structured
from langchain_dpicl.lab.audit.cases import Case, MemberCase, Setting, two_point
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.votes import EXPONENTIAL, VoteNoise

_TOP = 1000
"""The highest number, of 0, 1, ..."""


def _law(places: Sequence[int], rate: float) -> FloatArray:
    """The logarithms of a median's probabilities at every point of its grid."""
    grid, given = np.arange(_TOP + 1), np.sort(np.array(places, np.int64))
    below, upto = np.searchsorted(given, grid, "left"), np.searchsorted(given, grid, "right")
    losses = np.maximum(0.0, np.maximum(below, given.size - upto) - given.size / 2.0)
    logs = -rate * losses
    return np.asarray(logs - np.logaddexp.reduce(logs), np.float64)


@dataclass(frozen=True)
class _Numbers:
    """The canary gives the highest number; in its place, without it, the lowest stands, or nothing.

    The others' are one in the middle, or as many at either end beside it. All points on one side of the middle gain
    what those on the other lose, and the middle's place sets the odds between the two sides. If all others must agree,
    they and the answer in the canary's place are all in the middle.
    """

    middle: int
    others: tuple[int, ...]
    base: tuple[int, ...]
    present: FloatArray
    absent: FloatArray

    @classmethod
    def designs(cls, setting: Setting, eps0: float) -> list[_Numbers]:
        """One for each of many places of the middle."""
        rate, number = VoteNoise(EXPONENTIAL, eps0, setting.own_calls).rate, (setting.members or 2) - 1
        ends, found = 0 if setting.unanimous else (number - 1) // 2, []
        for middle in np.unique(np.geomspace(1.0, _TOP - 1.0, 60).astype(int)).tolist():
            others = (*[middle] * (number - 2 * ends), *[0, _TOP] * ends)
            base = () if setting.own_calls else (middle if setting.unanimous else 0,)
            found.append(cls(middle, others, base, _law([_TOP, *others], rate), _law([*base, *others], rate)))
        return found

    @property
    def above(self) -> tuple[float, float]:
        """The chance that a point above the middle is released, with the canary and without."""
        present, absent = (float(np.exp(law[self.middle + 1 :]).sum()) for law in (self.present, self.absent))
        return present, absent

    def statistic(self, release: int) -> float:
        """The log-likelihood ratio of a released point."""
        return float(self.present[release] - self.absent[release])


def median_cases(setting: Setting) -> tuple[Case, ...]:
    """See `_Numbers`."""
    designs = _Numbers.designs(setting, setting.parameter)
    chosen = designs[int(np.argmax(setting.expected(*np.array([each.above for each in designs]).T)))]
    median = setting.bind(NoisyMedian(0, _TOP), len(chosen.others) + 1)
    base, others = next(map(str, chosen.base), None), tuple(map(str, chosen.others))
    words = f"{_said(chosen)}; the canary's is {_TOP}"
    return (MemberCase(words, median, setting.parameter, base, str(_TOP), others, chosen.statistic),)


def _said(numbers: _Numbers) -> str:
    more = f", and {len(numbers.others) // 2} at either end" if len(set(numbers.others)) > 1 else ""
    return f"of {len(numbers.others)} others one or more give the number {numbers.middle} of {_TOP}{more}"


class Visit(BaseModel):
    """A truth value and two numbers."""

    sick: bool
    level: int = Field(ge=0, le=_TOP)
    limit: int = Field(ge=0, le=_TOP)


def structured_options() -> Mapping[str, float]:
    """The shares of the fields."""
    return Structured(Visit).options


def structured_cases(setting: Setting) -> tuple[Case, ...]:
    """The canary's numbers are as in `_Numbers` in two fields, its truth value is the opposite of all others'."""
    eps0 = setting.parameter / 3.0
    designs = _Numbers.designs(setting, eps0)
    both = np.array([each.above for each in designs]).T ** 2
    chosen = designs[int(np.argmax(setting.expected(*both)))]
    rate, number = VoteNoise(EXPONENTIAL, eps0, setting.own_calls).rate, len(chosen.others)
    lead = number - 1, number + len(chosen.base)  # the others' over the canary's value, with the canary and without
    inside, outside = two_point(*(float(expit(-rate * each)) for each in lead))

    def statistic(release: Any) -> float:
        seen = chosen.statistic(release.level) + chosen.statistic(release.limit)
        return seen + (inside if release.sick else outside)

    def answer(place: int, sick: bool = False) -> str:
        return json.dumps({"sick": sick, "level": place, "limit": place})

    aggregator = setting.bind(Structured(Visit), number + 1)
    words = f"in two fields {_said(chosen)}; the canary's are {_TOP}, and its truth value is the opposite of theirs"
    base, others = next(map(answer, chosen.base), None), tuple(map(answer, chosen.others))
    return (MemberCase(words, aggregator, setting.parameter, base, answer(_TOP, True), others, statistic),)
