"""Advice for questions about documents: a table, a FAQ, or votes for each question, from public numbers alone.

Nothing here sees a record. All three are votes, so that one rule (`privacy.advice.vote_left`) says what noise leaves of
each: in a table all owners with a document about a topic vote, under the noise of the whole table; in a FAQ or for a
question those whose call is drawn, under the noise of one answer of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.advice import GATED, MOST, USUAL, WORTH, Workload, compare
from langchain_dpicl.once.table import simultaneous_bars
from langchain_dpicl.privacy.advice import HALF, POOR, vote_left
from langchain_dpicl.privacy.checks import open_unit, real, whole
from langchain_dpicl.privacy.lines import LineRequest
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.plan import PrivacyPlan
from langchain_dpicl.privacy.votes import GAUSSIAN, VoteNoise

TABLE, FAQ, VOTES = "table", "FAQ", "votes"

TERMS = "terms"

_SUM = "sum"


@dataclass(frozen=True)
class Inquiry:
    """The public numbers of questions about documents.

    ``topics`` are listed, and so are ``values``: how many each column of a table has, one of which an answer names.
    ``near`` is the share of owners with a document about one topic, and ``calls`` the calls of one answer.
    """

    owners: int
    topics: int
    values: tuple[int, ...]
    questions: int
    delta: float
    near: float
    calls: int

    def __post_init__(self) -> None:
        for name in ("owners", "topics", "questions", "calls"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if not self.values:
            raise InvalidParameter("values", self.values, "the number of values of at least one column")
        for value in self.values:
            whole("values", value, at_least=2)
        open_unit("delta", self.delta)
        real("near", self.near, above=0.0, at_most=1.0)

    @property
    def cells(self) -> int:
        """Of a table."""
        return self.topics * sum(self.values)

    @property
    def pairs(self) -> float:
        """The factor by which an owner of a value in every column weighs less in each: sqrt(columns)."""
        return math.sqrt(len(self.values))

    def votes(self, questions: int) -> Workload:
        """So many answers of calls behind a gate, which choose among the values of the largest column."""
        near = max(self.near * self.owners, 1.0)
        return Workload(self.owners, max(self.values), questions, self.delta, calls=self.calls, gate=near, near=near)


@dataclass(frozen=True)
class Forecast:
    """A way to answer, at an epsilon.

    Attributes
    ----------
    left
        What noise leaves of what the documents bring: 1 if answers are as good as without noise, 0 if they guess.
    feasible
        Whether a plan is made at all.
    model_calls
        Of a model, in all.
    """

    method: str
    left: float
    feasible: bool
    model_calls: int
    parameter: float


@dataclass(frozen=True)
class TableBars:
    """A table's noise: of a count in owners, and from how many owners of one opinion on a value is known."""

    sigma: float
    known_from: float


def table_bars(inquiry: Inquiry, epsilon: float) -> TableBars:
    """The noise of the whole table, and the margin that it passes nowhere with 95 % confidence, in owners."""
    line = PrivacyPlan.alone(LineRequest(_SUM, 1.0, 1, owners=inquiry.owners), epsilon=epsilon, delta=inquiry.delta)
    margin = simultaneous_bars(line.parameter, inquiry.cells, 0.95).margin
    return TableBars(line.parameter, margin * inquiry.pairs)


def table_left(inquiry: Inquiry, sigma: float) -> float:
    """Return the share of a table's first values that noise leaves: the mean over its columns.

    Measured, in the source archive's `results/rag`: on 54 facts (34 topics, 19 and 3 values, 4,000 owners) the right
    value is first in 83.6, 97.0 and 98.1 % at epsilon .3, 1 and 3, and in 98.1 % without noise; the rule says 7 points
    more at .3, 3 and 2 at 1 and 3. It takes all topics to have as many owners, and the facts had 20 to 150.
    """
    votes = inquiry.near * inquiry.owners / inquiry.pairs
    noise = VoteNoise(GAUSSIAN, sigma, own_calls=True)
    return sum(vote_left(noise, votes, values) for values in inquiry.values) / len(inquiry.values)


def terms_from(inquiry: Inquiry, epsilon: float) -> float:
    """About how many owners share a term that is released in 19 of 20 cases."""
    chosen = MECHANISMS[TERMS].chosen(inquiry.delta, 1.0, 1, 1)
    asked = LineRequest(TERMS, 1.0, 1, options=chosen, owners=inquiry.owners)
    line = PrivacyPlan.alone(asked, epsilon=epsilon, delta=inquiry.delta)
    kind: Any = line.family
    weight = kind.largest_weight(kind.at_most) * kind.step
    threshold = kind.threshold(line.parameter) * kind.step
    return float((threshold + 1.645 * line.parameter) / weight)


def forecasts(inquiry: Inquiry, epsilon: float) -> list[Forecast]:
    """The ways in the order of preference: those that call a model least come first."""
    sigma = table_bars(inquiry, epsilon).sigma
    left = table_left(inquiry, sigma)
    found = [Forecast(TABLE, left, left >= HALF, 0, sigma)]
    for method, questions in ((FAQ, inquiry.topics), (VOTES, inquiry.questions)):
        (choice,) = compare(inquiry.votes(questions), epsilon, [GATED])
        calls = questions * choice.way.calls
        found.append(Forecast(method, choice.left, choice.feasible, calls, choice.line.parameter))
    return found


def taken(found: Sequence[Forecast], epsilon: float) -> Forecast | None:
    """The way to take: the first of which noise leaves `POOR`; None if there is none, and above `MOST`."""
    if epsilon > MOST:
        return None
    return next((each for each in found if each.feasible and each.left >= POOR), None)


def usual_epsilon(inquiry: Inquiry) -> float:
    """The least of `USUAL` at which a way is worth it, or else the largest."""
    for epsilon in USUAL:
        if any(each.feasible and each.left >= WORTH for each in forecasts(inquiry, epsilon)):
            return epsilon
    return USUAL[-1]
