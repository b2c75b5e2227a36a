"""The plan behind an evaluation's private answers, the samples of owners that they are made from, and their cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np
from langchain_core.embeddings import FakeEmbeddings

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.evaluation.data import Row
from langchain_dpicl.evaluation.passes import Pairs, PassFile
from langchain_dpicl.evaluation.tasks import GenerationTask, Task
from langchain_dpicl.privacy import PrivacyPlan, checks
from langchain_dpicl.privacy.accountant import MAX_COUNT
from langchain_dpicl.privacy.mechanisms import MECHANISMS, LineRequest
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.plan import CallCosts
from langchain_dpicl.selection.selector import PoissonExampleSelector
from langchain_dpicl.store import ExemplarStore


@dataclass(frozen=True)
class EvaluationPlan:
    """The numbers of owners, members and releases, and the epsilons for which the noise is solved.

    ``shots`` is the expected number of owners in a member's prompt, so the rate is members * shots / owners.
    ``few_shots`` is the number of examples in the prompts that are not private, for comparison.
    """

    owners: int
    members: int
    shots: int
    releases: int
    delta: float
    epsilons: Sequence[float]
    few_shots: int = 4

    def __post_init__(self) -> None:
        for name in ("owners", "shots"):
            checks.whole(name, getattr(self, name))
        checks.whole("members", self.members, at_least=2)
        checks.whole("few_shots", self.few_shots, at_most=self.owners)
        checks.whole("releases", self.releases, at_most=MAX_COUNT)
        checks.open_unit("delta", self.delta)
        if not self.epsilons:
            raise InvalidParameter("epsilon", self.epsilons, "at least one number")
        for epsilon in self.epsilons:
            checks.real("epsilon", epsilon, above=0.0, at_most=1000.0)
        if self.members * self.shots > self.owners:
            raise InvalidParameter("shots", self.shots, f"members * shots at most the number of owners, {self.owners}")

    @property
    def rate(self) -> float:
        """An owner's probability to take part in one release."""
        return self.members * self.shots / self.owners

    @property
    def facts(self) -> dict[str, float]:
        """The public numbers of a private answer."""
        held: dict[str, float] = {"members": self.members, "shots": self.shots, "rate": self.rate}
        return {**held, "releases": self.releases, "delta": self.delta}

    def varied(self, **numbers: int) -> EvaluationPlan:
        """The same plan with other numbers. Other members keep their shots, so the rate changes.

        The first n members of N are a sample of the plan with n members, whose rate is n / N of this one's: every owner
        draws its member on its own.
        """
        return replace(self, **numbers)  # type: ignore[arg-type]

    def parameter(
        self, epsilon: float, mechanism: str, options: Mapping[str, float] | None = None, rate: float | None = None
    ) -> float:
        """The noise that this epsilon allows; at another rate, if one is given."""
        request = LineRequest(mechanism, self.rate if rate is None else rate, self.releases, options=options or {})
        plan = PrivacyPlan.solve(epsilon=epsilon, delta=self.delta, lines={"only": request})
        return plan.lines["only"].parameter


class Sampler:
    """Draws the examples of prompts from rows, by the release's own sampling; every row is its own owner.

    A sample has these prompts: one for each member, with its bucket; one without examples; one with ``few_shots``
    private examples; and if there are public rows, one with as many of them. Every query gets the same samples: its
    answer then has the law that it has with a sample of its own, so a score has the same mean; between samples it
    varies more.
    """

    def __init__(self, rows: Sequence[Row], public: Sequence[Row], plan: EvaluationPlan) -> None:
        if len(rows) < (needed := plan.members * plan.shots):
            raise InvalidParameter("data", f"{len(rows)} records", f"at least members * shots = {needed} records")
        store = ExemplarStore.from_records(
            [{"input": row.input, "output": row.output, "row": i} for i, row in enumerate(rows)],
            FakeEmbeddings(size=1),  # never asked: nothing is looked for by similarity
            input_key="input",
            output_key="output",
            vectors=np.zeros((len(rows), 1), np.float32),
        )
        self._selector = PoissonExampleSelector(store, plan.members, shots=plan.shots)
        self._rows, self._public, self._few = rows, public, plan.few_shots

    def draw(self, number: int, file: PassFile) -> list[Pairs]:
        """The prompts of this sample. It is drawn once; the file keeps it."""
        key = ("sample", number)
        if key not in file:
            buckets = [[int(each["row"]) for each in bucket] for bucket in self._selector.sample()]
            orders = [np.argsort(SecureRandomness().uniforms(len(rows))) for rows in (self._rows, self._public)]
            file.add(key, [buckets, *(order[: self._few].tolist() for order in orders)])
        buckets, few_shot, public = file[key]
        prompts = [(self._rows, bucket) for bucket in (*buckets, (), few_shot)]
        prompts += [(self._public, public)] if self._public else []
        return [[(rows[i].input, rows[i].output) for i in chosen] for rows, chosen in prompts]


# -- the cost ----------------------------------------------------------------------------------------------------------

_QUERIES = 100


def tokens_of(task: Task, examples: Sequence[Row], queries: Sequence[Row]) -> tuple[float, float, float]:
    """Return the mean tokens of a prompt without examples, of an example, and of an answer. Four characters are one.

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

    - ``rate``, ``owners``: the rate, and how many owners a release then samples on average.
    - ``grows``: whether the owners beyond the least take more `members` of as many shots, or more `shots` for as many
      members.
    - ``members``, ``shots``: N, and how many examples a member sees on average.
    - ``prompt_tokens``, ``answer_tokens``, ``price``: of 100 queries.
    - ``parameter``, ``noise``: the mechanism's noise parameter by name, and its value in the plan.
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
    tokens: tuple[float, float, float],
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

    - ``tokens``: see `tokens_of`.
    - ``plan``: its noise at the largest epsilon depends on the rate, not on how members and shots share the sample.
    - ``price_in``, ``price_out``: of a million tokens, in any currency.
    - ``mechanism``: one that calls each member once.
    - ``public_calls``: calls of the zero-shot prompt beside the members', for each query: an embedding mean's
      candidates.

    Raises `InvalidParameter` for a price below 0, and `InfeasiblePlan` if no noise of the mechanism reaches epsilon.
    """
    bare, example, answer = tokens
    public = CallCosts(bare, answer, price_in, price_out)
    points = []
    for rate in sorted({min(1.0, plan.rate * factor) for factor in (0.25, 0.5, 1, 2, 4)}):
        sampled, noise = rate * plan.owners, plan.parameter(max(plan.epsilons), mechanism, rate=rate)
        sizes: dict[Literal["members", "shots"], int] = {"members": max(1, round(sampled / plan.shots))}
        for grows, calls in (sizes | {"shots": plan.members}).items():
            member = CallCosts(bare + example * sampled / calls, answer, price_in, price_out)
            prompt_tokens = _QUERIES * (calls * member.prompt_tokens + public_calls * public.prompt_tokens)
            answer_tokens = _QUERIES * (calls + public_calls) * answer
            price = _QUERIES * (member.cost(calls) + public.cost(public_calls))
            spent = prompt_tokens, answer_tokens, price, MECHANISMS[mechanism].parameter, noise
            points.append(CostPoint(rate, sampled, grows, calls, sampled / calls, *spent))
    return points
