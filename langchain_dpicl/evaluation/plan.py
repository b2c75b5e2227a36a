"""The plan behind an evaluation's private answers, and the samples of owners that they are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from langchain_core.embeddings import FakeEmbeddings

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.evaluation.data import Row
from langchain_dpicl.evaluation.passes import Pairs, PassFile
from langchain_dpicl.privacy import PrivacyPlan, checks
from langchain_dpicl.privacy.accountant import MAX_COUNT
from langchain_dpicl.privacy.mechanisms import LineRequest
from langchain_dpicl.privacy.noise import SecureRandomness
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

    def parameter(self, epsilon: float, mechanism: str, options: Mapping[str, float] | None = None) -> float:
        """The noise that this epsilon allows."""
        request = LineRequest(mechanism, self.rate, self.releases, options=options or {})
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
