"""How good a private vote is: accuracy against epsilon and in the papers' ablations, all from one pass of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.aggregators import NoisyVote
from langchain_dpicl.evaluation.label_pass import SampleScores
from langchain_dpicl.evaluation.plan import EvaluationPlan
from langchain_dpicl.evaluation.scores import Score, Value
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.private.boundary import ABSTAIN

Labels = NDArray[np.int64]
"""(runs, queries) positions in the task's list of labels; -1 abstains."""


@dataclass(frozen=True)
class LabelStudy:
    """Votes over the label scores of a pass.

    Parameters
    ----------
    labels
        The task's labels.
    right
        Each query's right label, as a position.
    samples
        The scores with each sample of owners.
    plan
        The plan's numbers.
    draws
        How often the noise is drawn for each sample.
    calibrate
        Whether members divide their scores by those of the content-free texts.
    """

    labels: Sequence[str]
    right: Sequence[int]
    samples: Sequence[SampleScores]
    plan: EvaluationPlan
    draws: int = 20
    calibrate: bool = True

    def scores(self) -> list[Score]:
        """The main table: prompts alone, single members, the plain majority, and the private vote at each epsilon."""
        n, few = self.plan.members, self.plan.few_shots
        alone = [("zero-shot", n, False), ("zero-shot calibrated", n, True), (f"{few}-shot", n + 1, self.calibrate)]
        if self.samples[0].queries.shape[1] > n + 2:
            alone.append((f"public {few}-shot", n + 2, self.calibrate))
        found = []
        for method, prompt, calibrate in alone:
            said = [s.labels(slice(prompt, prompt + 1), calibrate=calibrate)[:, 0] for s in self.samples]
            found.append(self._score(method, np.array(said) == self.right))
        votes = self._votes(n)
        members = votes.transpose(0, 2, 1).reshape(-1, votes.shape[1])  # each member is a run of its own
        found.append(self._score("member", members == self.right, members=n, shots=self.plan.shots))
        return [*found, *self.votes()]

    def votes(self, study: str = "") -> list[Score]:
        """The plain majority and the private vote at each epsilon, perhaps as a part of an ablation."""
        return self._vary(study, [self.plan])

    def by_members(self, counts: Sequence[int]) -> list[Score]:
        """The ablation of the ensemble's size at the same shots.

        The first n members of N are a sample of a plan with n / N of this plan's rate, since every owner draws its
        member on its own.
        """
        return self._vary("members", [self.plan.varied(members=n) for n in counts])

    def by_releases(self, counts: Sequence[int]) -> list[Score]:
        """The ablation of the number of answers that one epsilon is for."""
        return self._vary("releases", [self.plan.varied(releases=n) for n in counts])

    def _vary(self, study: str, plans: Sequence[EvaluationPlan]) -> list[Score]:
        found = []
        for plan in plans:
            # A tie of t labels with the right one among them counts 1/t: a release draws among them.
            counts, is_down = self._counts(plan.members)
            wins = (counts == counts.max(axis=2, keepdims=True)) & ~is_down[:, :, None]
            right = wins[:, np.arange(len(self.right)), self.right] / np.maximum(wins.sum(axis=2), 1)
            found.append(self._score("vote", right, study=study, **plan.facts))
            found += [self._private(epsilon, plan, study) for epsilon in plan.epsilons]
        return found

    def _votes(self, members: int) -> NDArray[np.int64]:
        """(samples, queries, members) positions: the first so many members."""
        return np.array([s.labels(slice(0, members), calibrate=self.calibrate) for s in self.samples])

    def _counts(self, members: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(samples, queries, labels) votes, and whether most members abstain, as `NoisyVote` says."""
        votes = self._votes(members)
        counts = np.stack([(votes == label).sum(axis=2) for label in range(len(self.labels))], axis=2)
        abstained = (votes < 0).sum(axis=2)
        return counts, (abstained > counts.max(axis=2)) & (abstained >= members / 2)

    def _majority(self, members: int) -> Labels:
        """The vote without noise: the earlier label in a tie; -1 if most members abstain."""
        counts, is_down = self._counts(members)
        return np.where(is_down, -1, counts.argmax(axis=2))

    def _private(self, epsilon: float, plan: EvaluationPlan, study: str = "") -> Score:
        """Releases by the product's own mechanism, with fresh noise."""
        vote, randomness = NoisyVote(self.labels), SecureRandomness()
        sigma = plan.parameter(epsilon, vote.mechanism)
        place = {label: i for i, label in enumerate(self.labels)} | {None: -1}
        outputs = [
            [[ABSTAIN if i < 0 else i for i in members] for members in queries]
            for queries in self._votes(plan.members).tolist()
        ]
        released = np.array(
            [
                [place[vote.aggregate(members, sigma, randomness)] for members in queries]  # type: ignore[index]
                for queries in outputs
                for _ in range(self.draws)
            ]
        )
        plain = np.repeat(self._majority(plan.members), self.draws, axis=0)
        facts = {**plan.facts, "sigma": sigma, "flipped": 100 * float((released != plain).mean())}
        return self._score("vote", released == self.right, epsilon=epsilon, study=study, **facts)

    @staticmethod
    def _score(
        method: str, right: NDArray[Any], *, epsilon: float | None = None, study: str = "", **facts: float
    ) -> Score:
        """``right``: (runs, queries), between 0 and 1."""
        runs, queries = right.shape
        return Score(method, epsilon, {"accuracy": Value.of(right)}, runs, queries, facts, study)
