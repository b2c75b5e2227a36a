"""How good a private vote is: accuracy against epsilon and in the papers' ablations, all from one pass of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.aggregators import NoisyVote
from langchain_dpicl.evaluation.label_pass import Said
from langchain_dpicl.evaluation.schedule import Schedule
from langchain_dpicl.evaluation.scores import Score, Value
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.private.boundary import ABSTAIN

Labels = NDArray[np.int64]
"""Positions in the task's list of labels; -1 abstains."""


@dataclass(frozen=True)
class LabelStudy:
    """What the model said, and what votes make of it.

    Parameters
    ----------
    labels
        The task's labels.
    right
        Each query's right label, as a position.
    said
        What was said with each sample of owners.
    schedule
        The plan's numbers.
    draws
        How often the noise is drawn for each sample.
    calibrate
        Whether members divide their scores by those of the content-free texts.
    """

    labels: Sequence[str]
    right: Sequence[int]
    said: Sequence[Said]
    schedule: Schedule
    draws: int = 20
    calibrate: bool = True

    def scores(self) -> list[Score]:
        """The main table: prompts alone, single members, the plain majority, and the private vote at each epsilon."""
        n, few = self.schedule.members, self.schedule.few_shots
        found = [
            self._score("zero-shot", self._alone(n, calibrate=False)),
            self._score("zero-shot calibrated", self._alone(n, calibrate=True)),
            self._score(f"{few}-shot", self._alone(n + 1, calibrate=self.calibrate)),
        ]
        if self.said[0].queries.shape[1] > n + 2:
            found.append(self._score(f"public {few}-shot", self._alone(n + 2, calibrate=self.calibrate)))
        votes = self._votes(n)
        members = votes.transpose(0, 2, 1).reshape(-1, votes.shape[1])  # each member a run of its own
        found.append(self._score("member", members, members=n, shots=self.schedule.shots))
        return [*found, *self.votes()]

    def votes(self, study: str = "") -> list[Score]:
        """The plain majority and the private vote at each epsilon, perhaps as a part of an ablation."""
        return self._vary(study, [self.schedule])

    def by_members(self, counts: Sequence[int]) -> list[Score]:
        """The ablation of the ensemble's size at the same shots: n members of N are what a plan with the rate n / N of
        this one would have sampled, since every owner draws its member on its own."""
        return self._vary("members", [self.schedule.with_members(n) for n in counts])

    def by_releases(self, counts: Sequence[int]) -> list[Score]:
        """The ablation of how many answers one epsilon is for."""
        return self._vary("releases", [self.schedule.with_releases(n) for n in counts])

    def _vary(self, study: str, schedules: Sequence[Schedule]) -> list[Score]:
        found = []
        for schedule in schedules:
            found.append(self._plain(schedule, study))
            found += [self._private(epsilon, schedule, study) for epsilon in schedule.epsilons]
        return found

    # -- answers, as (runs, queries) positions ------------------------------------------------------------------------

    def _alone(self, prompt: int, *, calibrate: bool) -> Labels:
        """What one prompt says."""
        return np.array([said.labels(slice(prompt, prompt + 1), calibrate=calibrate)[:, 0] for said in self.said])

    def _votes(self, members: int) -> Labels:
        """(samples, queries, members): the first so many members."""
        return np.array([said.labels(slice(0, members), calibrate=self.calibrate) for said in self.said])

    def _majority(self, members: int) -> Labels:
        """The vote without noise: the earlier label in a tie; -1 where most members abstain, as `NoisyVote` says."""
        counts, is_down = self._counts(members)
        return np.where(is_down, -1, counts.argmax(axis=2))

    def _counts(self, members: int) -> tuple[Labels, NDArray[np.bool_]]:
        """(samples, queries, labels) votes, and where most members abstain."""
        votes = self._votes(members)
        counts = np.stack([(votes == label).sum(axis=2) for label in range(len(self.labels))], axis=2)
        abstained = (votes < 0).sum(axis=2)
        return counts, (abstained > counts.max(axis=2)) & (abstained >= members / 2)

    def _plain(self, schedule: Schedule, study: str) -> Score:
        """The vote without noise. A tie of t labels that has the right one counts 1/t: a release draws among them."""
        counts, is_down = self._counts(schedule.members)
        wins = (counts == counts.max(axis=2, keepdims=True)) & ~is_down[:, :, None]
        right = wins[:, np.arange(len(self.right)), self.right] / np.maximum(wins.sum(axis=2), 1)
        runs, queries = right.shape
        return Score("vote", None, {"accuracy": Value.of(right)}, runs, queries, schedule.facts, study)

    def _private(self, epsilon: float, schedule: Schedule, study: str = "") -> Score:
        """Releases by the product's own mechanism, with fresh noise."""
        vote, randomness = NoisyVote(self.labels), SecureRandomness()
        sigma = schedule.parameter(epsilon, vote.mechanism)
        place = {label: i for i, label in enumerate(self.labels)} | {None: -1}
        outputs = [
            [[ABSTAIN if i < 0 else i for i in members] for members in queries]
            for queries in self._votes(schedule.members).tolist()
        ]
        released = np.array(
            [
                [place[vote.aggregate(said, sigma, randomness)] for said in queries]  # type: ignore[index]
                for queries in outputs
                for _ in range(self.draws)
            ]
        )
        plain = np.repeat(self._majority(schedule.members), self.draws, axis=0)
        flipped = 100 * float((released != plain).mean())
        facts = {**schedule.facts, "sigma": sigma, "flipped": flipped}
        return self._score("vote", released, epsilon=epsilon, study=study, **facts)

    def _score(
        self, method: str, answers: Labels, *, epsilon: float | None = None, study: str = "", **facts: float
    ) -> Score:
        right = answers == np.asarray(self.right)
        runs, queries = right.shape
        return Score(method, epsilon, {"accuracy": Value.of(right)}, runs, queries, facts, study)
