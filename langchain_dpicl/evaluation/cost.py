"""The cost of answers against the rate at which owners take part: tokens, price, and the noise of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from langchain_dpicl.evaluation.data import Row
from langchain_dpicl.evaluation.plan import EvaluationPlan
from langchain_dpicl.evaluation.tasks import GenerationTask, Task
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.plan import CallCosts

_QUERIES = 100


Tokens = tuple[float, float, float]
"""Mean numbers of tokens: of a prompt without examples, of an example, and of an answer."""


def tokens_of(task: Task, examples: Sequence[Row], queries: Sequence[Row]) -> Tokens:
    """Measure the task's prompts over these rows. A token is taken for four characters.

    An answer counts as the mean of the queries' own, each at most the task's `max_tokens`.
    """
    shape, most = task.shape, task.max_tokens if isinstance(task, GenerationTask) else math.inf
    return (
        fmean(len(shape.prefix([]) + shape.ask(row.input)) for row in queries) / 4,
        fmean(len(shape.example(row.input, row.output)) for row in examples) / 4,
        fmean(min(len(f" {row.output}") / 4, most) for row in queries),
    )


@dataclass(frozen=True)
class CostPoint:
    """The cost at one sampling rate.

    Parameters
    ----------
    rate, owners
        The rate, and how many owners a release then samples on average.
    grows
        Whether the owners beyond the least take more `members` of as many shots, or more `shots` for as many members.
    members, shots
        N, and how many examples a member sees on average.
    prompt_tokens, answer_tokens, price
        Of 100 queries.
    parameter, noise
        The mechanism's noise parameter by name, and its value in the plan.
    """

    rate: float
    owners: float
    grows: Literal["members", "shots"]
    members: int
    shots: float
    prompt_tokens: float
    answer_tokens: float
    price: float
    parameter: str
    noise: float


def cost_curve(
    tokens: Tokens,
    plan: EvaluationPlan,
    *,
    price_in: float,
    price_out: float,
    mechanism: str = "vote",
    public_calls: int = 0,
) -> list[CostPoint]:
    """Return two points for each of five rates around the plan's, rising: more members of the plan's shots, more shots.

    A release at rate q samples q * owners owners on average, each with one example. N calls then read
    N bare prompts and q * owners examples on average, and write N answers. (A bucket's cap that drops examples reads
    less.) With growing members, N is q * owners / shots, rounded to a whole number, at least 1.

    Parameters
    ----------
    plan
        Its noise at the largest epsilon depends on the rate, not on how members and shots share the sample.
    price_in, price_out
        Of a million tokens, in any currency.
    mechanism
        One that calls each member once.
    public_calls
        Calls of the zero-shot prompt beside the members', for each query: an embedding mean's candidates.

    Raises
    ------
    InvalidParameter
        For a price below 0.
    InfeasiblePlan
        If no noise of the mechanism reaches epsilon.
    """
    bare, example, answer = tokens
    public = CallCosts(bare, answer, price_in, price_out)
    points = []
    for rate in sorted({min(1.0, plan.rate * factor) for factor in (0.25, 0.5, 1, 2, 4)}):
        sampled, request = rate * plan.owners, LineRequest(mechanism, rate, plan.releases)
        solved = PrivacyPlan.solve(epsilon=max(plan.epsilons), delta=plan.delta, lines={"only": request})
        sizes: dict[Literal["members", "shots"], int] = {"members": max(1, round(sampled / plan.shots))}
        for grows, calls in (sizes | {"shots": plan.members}).items():
            member = CallCosts(bare + example * sampled / calls, answer, price_in, price_out)
            points.append(
                CostPoint(
                    rate=rate,
                    owners=sampled,
                    grows=grows,
                    members=calls,
                    shots=sampled / calls,
                    prompt_tokens=_QUERIES * (calls * member.prompt_tokens + public_calls * public.prompt_tokens),
                    answer_tokens=_QUERIES * (calls + public_calls) * answer,
                    price=_QUERIES * (member.cost(calls) + public.cost(public_calls)),
                    parameter=MECHANISMS[mechanism].parameter,
                    noise=solved.lines["only"].parameter,
                )
            )
    return points
