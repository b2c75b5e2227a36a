"""The cost of answers against the rate at which owners take part: tokens, price, and the noise of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.evaluation.data import Row
from langchain_dpicl.evaluation.tasks import GenerationTask, Task
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.checks import probability, real, whole
from langchain_dpicl.privacy.explain import Calls
from langchain_dpicl.privacy.mechanisms import MECHANISMS, default_delta0

_QUERIES = 100


@dataclass(frozen=True)
class PromptTokens:
    """Mean numbers of tokens of a prompt's parts, and of an answer."""

    instruction: float
    example: float
    query: float
    answer: float

    def __post_init__(self) -> None:
        for name in ("instruction", "example", "query", "answer"):
            object.__setattr__(self, name, real(name, getattr(self, name), at_least=0.0))

    @classmethod
    def measure(
        cls, task: Task, examples: Sequence[Row], queries: Sequence[Row], count: Callable[[str], float]
    ) -> PromptTokens:
        """Measure the task's prompts over these rows with a tokenizer's `count`.

        Each part is counted on its own (an example with its separator), so the sum is a prompt's count up to tokens
        that span two parts. An answer counts as the mean of the queries' own, each at most the task's `max_tokens`.
        """
        for name, rows in (("examples", examples), ("queries", queries)):
            if not rows:
                raise InvalidParameter(name, "no rows", "at least one row")
        shape = task.shape
        most = task.max_tokens if isinstance(task, GenerationTask) else float("inf")
        return cls(
            instruction=count(shape.prefix([])) if shape.instruction else 0,
            example=fmean(count(shape.example(row.input, row.output) + shape.separator) for row in examples),
            query=fmean(count(shape.ask(row.input)) for row in queries),
            answer=fmean(min(count(shape.answer.replace("{output}", row.output)), most) for row in queries),
        )

    def prompt(self, shots: float) -> float:
        """A prompt's tokens, with that many examples on average."""
        return self.instruction + shots * self.example + self.query


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
    tokens: PromptTokens,
    rates: Sequence[float],
    *,
    owners: int,
    members: int,
    shots: int,
    price_in: float,
    price_out: float,
    epsilon: float,
    delta: float,
    releases: int,
    mechanism: str = "vote",
    options: Mapping[str, float] | None = None,
    public_calls: int = 0,
) -> list[CostPoint]:
    """Return two points for each rate, rising: more members of `shots` each, and more shots for `members`.

    A release at rate q samples q * owners owners on average, each with one example. N calls then read
    N * (instruction + query) + q * owners * example tokens on average, and write N answers. (A bucket's cap that drops
    examples reads less.) With growing members, N is q * owners / shots, rounded to a whole number, at least 1.

    Parameters
    ----------
    price_in, price_out
        Of a million tokens, in any currency.
    epsilon, delta, releases, mechanism, options
        The plan's one line. Its noise depends on the rate, not on how members and shots share the sample; PTR without
        a `delta0` gets the library's.
    public_calls
        Calls of the zero-shot prompt beside the members', for each query: an embedding mean's candidates, or the answer
        written from keywords.

    Raises
    ------
    InvalidParameter
        For a number outside its bounds, no rates, or a mechanism that does not call each member once (`tokens`,
        `threshold`).
    InfeasiblePlan
        If no noise of the mechanism reaches epsilon.
    """
    owners, members, shots = whole("owners", owners), whole("members", members), whole("shots", shots)
    releases = whole("releases", releases)
    public_calls = whole("public_calls", public_calls, at_least=0)
    called = [name for name in MECHANISMS if name not in ("tokens", "threshold")]
    if mechanism not in called:
        raise InvalidParameter("mechanism", mechanism, f"one of {', '.join(called)}")
    if not rates:
        raise InvalidParameter("rates", rates, "at least one sampling probability")
    public = Calls(tokens.prompt(0.0), tokens.answer, price_in, price_out)
    points = []
    for rate in sorted({probability("rate", rate) for rate in rates}):
        sampled, given = rate * owners, dict(options or {})
        if mechanism == "ptr":
            given = {"delta0": default_delta0(delta, rate, releases), **given}
        request = LineRequest(mechanism, rate, releases, options=given)
        plan = PrivacyPlan.solve(epsilon=epsilon, delta=delta, lines={mechanism: request})
        shapes: dict[Literal["members", "shots"], int] = {"members": max(1, round(sampled / shots)), "shots": members}
        for grows, calls in shapes.items():
            member = Calls(tokens.prompt(sampled / calls), tokens.answer, price_in, price_out)
            points.append(
                CostPoint(
                    rate=rate,
                    owners=sampled,
                    grows=grows,
                    members=calls,
                    shots=sampled / calls,
                    prompt_tokens=_QUERIES * (calls * member.prompt_tokens + public_calls * public.prompt_tokens),
                    answer_tokens=_QUERIES * (calls + public_calls) * tokens.answer,
                    price=_QUERIES * (member.cost(calls) + public.cost(public_calls)),
                    parameter=MECHANISMS[mechanism].parameter,
                    noise=plan.lines[mechanism].parameter,
                )
            )
    return points
