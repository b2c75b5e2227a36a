"""Numbers and dates that the members said: a noisy median, and a noisy mean."""

from __future__ import annotations

import asyncio
import math
import numbers
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any, Generic, cast

import numpy as np
from typing_extensions import TypeVar

from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.aggregators.reading import answer_of, plain
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.mechanism import Options
from langchain_dpicl.privacy.noise import Randomness, choose_exponential, random_below
from langchain_dpicl.privacy.votes import EXPONENTIAL, VoteNoise

N = TypeVar("N", bound=int | float | date)
"""What is released: the bounds' type."""

STEPS = 1 << 16
"""Lattice points of a mean between its bounds."""

_WHOLE_POINTS = 1001
_POINTS = 101
_DATE = re.compile(r"(?<![\w-])\d{4}-\d{2}-\d{2}(?![\d-])")
_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")
_CURRENCIES = "$€£¥₹"
_FIGURES = re.compile(
    rf"(?P<before>[\w.,]?)(?P<marks>[-+—{_CURRENCIES}]{{0,3}})(?<!\w)"
    r"(?P<run>\w*\d\w*(?:(?:[.,:/'’‘´·٫٬\-—+*^×÷~…\\]++|[^\S\n](?=\d{3}(?!\d)))\w*\d\w*)*)"
)
"""Words with a digit, and all that are linked to them by less than a space, or by a space that may group digits."""

_WHOLE_AND_FRACTION = r"((?:[1-9]\d{{0,2}}(?:{group}\d{{3}})+|\d+)(?:{point}\d+)?(?:[eE][-+]?\d{{1,3}})?)([^\W\d]*)"
_NUMBER = {
    point: re.compile(_WHOLE_AND_FRACTION.format(point=re.escape(point), group=re.escape(group)))
    for point, group in ((".", ","), (",", "."))
}
"""By the decimal point: a number, and the unit that is written onto it."""


class Bounded(Aggregator[N], Generic[N]):
    """A public interval, and how an output is read as a place in it.

    The interval has the type of its bounds: whole numbers, numbers (if one of them is a float), or dates. An output
    counts as a number if it is one, or if its text has one number and no other; as a date if it is one, or its text has
    one in the form 2026-03-31. A truth value is no number, nor is NaN or an infinity. What lies outside the bounds
    counts as the nearer bound. All arithmetic is in fractions: nothing overflows, and no float decides.

    A number in a text may have a sign (any minus or short dash), a currency before it and a unit behind it. The other
    mark than ``decimal`` may group its digits by threes. Whatever else is written with digits in one piece abstains: a
    range, a date, a version, an address, digits grouped otherwise ("12,50", "1_000", "1 000"). A name with digits in it
    ("B12", "GPT-4") is no number. A model's thinking is left out.
    """

    takes_own_calls = True
    tells_abstention = False
    max_tokens = 20
    steps: int

    def __init__(self, low: N, high: N, *, decimal: str = ".") -> None:
        if decimal not in _NUMBER:
            raise InvalidParameter("decimal", decimal, '"." or ","')
        self.decimal = decimal
        kinds = [_kind(name, bound) for name, bound in (("low", low), ("high", high))]
        if (kinds[0] is date) != (kinds[1] is date):
            raise InvalidParameter("high", high, "a date if low is one, and only then")
        self._type: Any = float if float in kinds else kinds[0]
        if self._type is date and decimal != ".":
            raise InvalidParameter("decimal", decimal, "left out for dates")
        bounds: list[Any] = [low, high]
        given: list[Any] = bounds if self._type is date else [self._type(each) for each in bounds]
        self.low: N = given[0]
        self.high: N = given[1]
        self._least, self._most = map(_scale, given)
        if not self._least < self._most:
            raise InvalidParameter("high", high, f"a bound above low = {low}")

    @property
    def samples(self) -> Sequence[str]:
        values = (self.at(Fraction(1, 3)), self.at(Fraction(2, 3)))
        return [str(each) if self._type is not float else f"{each:g}".replace(".", self.decimal) for each in values]

    def encode(self, output: object) -> int:
        """The nearest place among 0, ..., ``steps``. Raises for an output that is no number, or no date."""
        found = min(max(self._read(output), self._least), self._most)
        return math.floor((found - self._least) * self.steps / (self._most - self._least) + Fraction(1, 2))

    async def aencode(self, output: object) -> int:
        return await asyncio.to_thread(self.encode, output)  # a long text takes a while

    def _read(self, output: object) -> Fraction:
        """An output as an exact number; a date as its ordinal. Raises for anything else."""
        is_date = self._type is date
        if isinstance(output, date):
            if is_date:
                return Fraction(date.toordinal(output))
        elif isinstance(output, (numbers.Real, Decimal)):
            if not is_date and not isinstance(output, bool):
                return Fraction(int(output) if isinstance(output, numbers.Integral) else float(output))
        elif (text := answer_of(output)) is not None:
            text = plain(text).replace("\u2212 ", "-").translate(_DASHES)
            if is_date:
                found = {_scale(date.fromisoformat(one)) for one in _DATE.findall(text)}
            else:
                found = numbers_in(text, self.decimal)
            if len(found) == 1:
                return found.pop()
        raise ValueError("it is no date" if is_date else "it is no number, or several")

    def shown(self, encoded: object) -> object:
        return self.at(Fraction(encoded, self.steps)) if isinstance(encoded, int) else encoded

    def at(self, share: Fraction) -> N:
        """Return what lies at this share of the interval, rounded to a whole number or a day."""
        place = self._least + (self._most - self._least) * share
        whole = math.floor(place + Fraction(1, 2))
        if self._type is float:
            return cast("N", float(place))
        return cast("N", date.fromordinal(whole) if self._type is date else whole)

    def places(self, outputs: Sequence[object]) -> list[int]:
        """PRIVATE: of encoded outputs, those that are places."""
        return [out for out in outputs if type(out) is int and 0 <= out <= self.steps]

    @abstractmethod
    def draw(self, places: Sequence[int], crowd: Crowd, parameter: float, randomness: Randomness) -> N:
        """The mechanism: from the outputs that have a place to a release."""

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> N:
        return self.draw(self.places(outputs), self._crowd(outputs), parameter, randomness)

    def dump(self, release: N) -> str:
        return release.isoformat() if isinstance(release, date) else repr(release)

    def load(self, text: str, values: Mapping[str, Any]) -> N:
        return cast("N", date.fromisoformat(text) if self._type is date else self._type(text))

    def zero_shot(self, output: object, values: Mapping[str, Any]) -> N | None:
        try:
            return self.at(Fraction(self.encode(output), self.steps))
        except Exception:
            return None

    def hit(self, release: N, right: object) -> float:
        """1 for the right place, 0 for the other end of the interval."""
        return 1.0 - abs(self.encode(release) - self.encode(right)) / self.steps

    @property
    def release_type(self) -> Any:
        return self._type

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.low!r}, {self.high!r}{self._said_decimal})"

    @property
    def _said_decimal(self) -> str:
        return "" if self.decimal == "." else f", decimal={self.decimal!r}"


class NoisyMedian(Bounded[N]):
    """The median of the members' numbers or dates, by the exponential mechanism on a public grid.

    Mechanism. Each output becomes the nearest point of an evenly spaced public grid. Of n outputs with a value, B lie
    below a grid point and A above it; its loss is max(0, B - n/2, A - n/2), the rank's distance from the middle. A
    point is released with probability proportional to exp(-r loss), drawn exactly: points between two values have one
    loss, so the grid's size costs no time.

    Neighbours and range. One output replaced by any other, by an abstention or by nothing: B, A and n move by at most 1
    each, and B - n/2 and A - n/2 by at most 1 (a value moves to the other side, n stays) or 1/2 (it disappears: an
    abstention counts half below and half above, which changes neither). So a loss moves by at most 1 either way,
    log-probabilities differ by at most 2 r between points, and r = eps0 / 2 is eps0-bounded range. With a call for
    every owner one output is added or removed, n moves by 1 with B or A or neither: every loss moves by at most 1/2
    either way, and r = eps0.

    Parameters
    ----------
    low, high
        The public bounds: whole numbers, floats or dates. They say what is released, too.
    points
        How many points the grid has; of whole numbers and dates at most one for each. Default: 1001 of those, 101 of
        floats. Empty grid points draw the release away from few answers: a grid twice as fine takes log(2) / r
        of rank.
    decimal
        The decimal mark of the members' texts, "." or ",": the other one groups digits.

    If nobody has a value the release is a uniformly random point: it cannot show that the members fail, so the
    ensemble asks the member a public question from time to time first.

    Source: the exponential mechanism for quantiles, Smith 2011, "Privacy-preserving statistical estimation with optimal
    convergence rates"; bounded range, Dong, Durfee and Rogers 2020.
    """

    kind = "median"
    mechanism = "median"

    def __init__(self, low: N, high: N, *, points: int | None = None, decimal: str = ".") -> None:
        super().__init__(low, high, decimal=decimal)
        most = None if self._type is float else int(self._most - self._least) + 1
        usual = _POINTS if most is None else min(most, _WHOLE_POINTS)
        self.points = usual if points is None else checks.whole("points", points, at_least=2, at_most=most)
        self.steps = self.points - 1

    def draw(self, places: Sequence[int], crowd: Crowd, parameter: float, randomness: Randomness) -> N:
        rate = VoteNoise(EXPONENTIAL, parameter, crowd.own_calls).rate
        starts: list[int] = []
        sizes: list[int] = []
        losses: list[int] = []
        below = free = 0
        n = len(places)
        for place, count in [*sorted(Counter(places).items()), (self.points, 0)]:
            above = n - below - count
            starts += [free, place]  # the points between two values, then the value's own
            sizes += [place - free, min(1, self.points - place)]
            losses += [max(0, 2 * max(below, n - below) - n), max(0, 2 * max(below, above) - n)]  # in halves
            below += count
            free = place + 1
        chosen = choose_exponential(sizes, losses, rate / 2.0, randomness)
        return self.at(Fraction(starts[chosen] + random_below(sizes[chosen], randomness), self.steps))

    @property
    def outcomes(self) -> int:
        return self.points

    def __repr__(self) -> str:
        return f"NoisyMedian({self.low!r}, {self.high!r}, points={self.points}{self._said_decimal})"


class NoisyMean(Bounded[N]):
    """The mean of the members' numbers or dates, clipped to public bounds, by Gaussian noise.

    Mechanism. Each value is a vote that is divided between the two bounds: s for the upper one and 1 - s for the lower,
    its share s of the interval rounded to a multiple of 2^-16. Both sums get discrete Gaussian noise of standard
    deviation sigma on this lattice. The release is the interval's point at the noisy upper sum over both noisy sums; a
    total of less than half of the expected outputs counts as that half, with the rest divided evenly.

    Neighbours and sensitivity. (s, 1 - s) has a norm of at most 1, and two of them lie at most sqrt(2) apart. One
    output replaced by any other, by an abstention or by nothing, (0, 0): sqrt(2). With a call for every owner one
    output is added or removed: 1. The noisy total is one of the two numbers' sums, so the private number of values
    costs nothing more.

    Parameters
    ----------
    low, high
        The public bounds: whole numbers, floats or dates. They say what is released, too.
    decimal
        The decimal mark of the members' texts, "." or ",": the other one groups digits.

    Source: the Gaussian mechanism on a sum and a count; discrete Gaussian, Canonne, Kamath and Steinke 2020.
    """

    kind = "mean"
    mechanism = "mean"
    steps = STEPS

    @property
    def options(self) -> Options:
        return {"step": 1.0 / STEPS}

    def draw(self, places: Sequence[int], crowd: Crowd, parameter: float, randomness: Randomness) -> N:
        sums = np.array([sum(places), STEPS * len(places) - sum(places)], np.int64)
        upper, lower = map(int, sums + randomness.discrete_gaussian(parameter * STEPS, 2))
        # From here on everything is a function of the noisy sums.
        total = max(Fraction(upper + lower), Fraction(crowd.expected * STEPS) / 2)
        share = Fraction(1, 2) + Fraction(upper - lower) / total / 2
        return self.at(min(max(share, Fraction(0)), Fraction(1)))

    @property
    def outcomes(self) -> int:
        """Both bounds."""
        return 2


def _kind(name: str, bound: object) -> type[Any]:
    if isinstance(bound, date) and not isinstance(bound, datetime):
        return date
    if isinstance(bound, numbers.Integral) and not isinstance(bound, bool):
        return int
    if isinstance(bound, (datetime, str)) or bound is None:
        raise InvalidParameter(name, bound, "a finite number or a date")
    checks.real(name, bound)
    return float


def _scale(value: Any) -> Fraction:
    return Fraction(value.toordinal() if isinstance(value, date) else value)


def numbers_in(text: str, decimal: str) -> set[Fraction]:
    """The different numbers of a text. Raises `ValueError` for figures that could be read in more than one way."""
    found = set[str]()
    for figures in _FIGURES.finditer(text):
        sign = figures["marks"].strip(_CURRENCIES)
        if not figures["run"][0].isdecimal() or (sign and figures["before"].isalnum()):
            continue  # a name
        number = _NUMBER[decimal].fullmatch(figures["run"])
        has_unit = number is not None and (not number[2] or number[2][0].isalpha())
        is_sure = sign in ("-", "+") or (not sign and figures["before"] not in (".", ","))
        if number is None or not has_unit or not is_sure:
            raise ValueError(f"it has figures that are no number with the decimal mark {decimal!r}, or not surely one")
        digits = number[1].replace("," if decimal == "." else ".", "").replace(decimal, ".")
        found.add(sign + digits)
    return set(map(Fraction, found))
