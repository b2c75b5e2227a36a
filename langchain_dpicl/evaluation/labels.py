"""Label tasks: every member's label scores from one pass of the model, and votes over them.

Scores are read before any vote and any noise. The model reads a member's examples once for all queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableLambda
from numpy.typing import NDArray

from langchain_dpicl.aggregators import NoisyVote
from langchain_dpicl.evaluation.passes import Pairs, PassFile, ask_members, key_of
from langchain_dpicl.evaluation.plan import EvaluationPlan
from langchain_dpicl.evaluation.scores import Score, Value
from langchain_dpicl.evaluation.tasks import ClassificationTask
from langchain_dpicl.members.scoring import LabelScorer
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.private import boundary

Scores = NDArray[np.float64]
Labels = NDArray[np.int64]
"""Positions in the task's list of labels; -1 abstains."""

Reader = Callable[[Sequence[Pairs], str], Scores]
"""From the examples of prompts and a query to (prompts, labels) scores. A row of zeros if the model failed."""


def chain_reader(llm: BaseLanguageModel[Any], task: ClassificationTask) -> Reader:
    """Ask through LangChain: any model that `LabelScorer` takes, called as a release calls it."""
    # The embedded model returns any number of alternatives.
    alternatives = 100 if getattr(llm, "accepts_shared_prefix", False) else 20
    settings: dict[str, Any] = {"input_key": "input", "output_key": "output", "top_logprobs": alternatives}
    scorer = LabelScorer(llm, task.labels, prompt=task.shape.prompt, calibrate=False, **settings)
    member, failed = boundary.seal(RunnableLambda(scorer.scores)), dict.fromkeys(task.labels, 0.0)

    def reader(examples: Sequence[Pairs], query: str) -> Scores:
        found = ask_members(member, examples, query)
        return np.array([[(each or failed)[label] for label in task.labels] for each in found])

    return reader


def read_labels(
    reader: Reader,
    labels: int,
    examples: Sequence[Pairs],
    texts: Sequence[str],
    file: PassFile,
    sample: int,
    progress: Callable[[], Any],
) -> Scores:
    """Return (texts, prompts, labels) scores from the file; ask the model for those that are missing, and keep them.

    ``examples`` are those of the sample's prompts. Raises as `PassFile.answers`.
    """
    found = []
    for text in texts:

        def ask(some: Sequence[Pairs], text: str = text) -> list[list[float]]:
            return [[float(f"{score:.5g}") for score in row] for row in reader(some, text)]

        found.append(file.answers((key_of(text), sample), examples, ask, [0.0] * labels))
        progress()
    return np.array(found, np.float64).reshape(-1, len(examples), labels)


@dataclass(frozen=True)
class LabelStudy:
    """How good a private vote is: accuracy against epsilon and in the papers' ablations, all from one pass.

    - ``labels``: the task's labels.
    - ``right``: each query's right label, as a position.
    - ``said``, ``neutral``: (samples, queries, prompts, labels) scores; the same after the texts to calibrate on. The
      first prompts are the members'. The next has no examples, the one after it ``few_shots`` private ones, and a last
      one, if there is any, public ones.
    - ``draws``: how often the noise is drawn for each sample.
    """

    labels: Sequence[str]
    right: Sequence[int]
    said: Scores
    neutral: Scores
    plan: EvaluationPlan
    draws: int = 20

    def answers(self, *, calibrate: bool = True) -> Labels:
        """Return (samples, queries, prompts) labels with the highest score.

        Calibrated scores are divided by the geometric mean of those after the neutral texts, as by `LabelScorer`; a
        prompt that failed after one of these always abstains.
        """
        values, neutral = self.said, self.neutral
        answered = values.any(axis=3)
        if calibrate and neutral.shape[1]:
            answered = answered & np.all(np.any(neutral, axis=3), axis=1, keepdims=True)
            values = values / np.exp(np.log(np.where(neutral > 0, neutral, 1.0)).mean(axis=1, keepdims=True))
        return np.where(answered, values.argmax(axis=3), -1)

    def scores(self) -> list[Score]:
        """The main table: prompts alone, single members, the plain majority, and the private vote at each epsilon."""
        n, few, said = self.plan.members, self.plan.few_shots, self.answers()
        alone = {"zero-shot": self.answers(calibrate=False)[:, :, n], "zero-shot calibrated": said[:, :, n]}
        alone[f"{few}-shot"] = said[:, :, n + 1]
        if said.shape[2] > n + 2:
            alone[f"public {few}-shot"] = said[:, :, n + 2]
        found = [_score(method, None, answers == self.right) for method, answers in alone.items()]
        members = said[:, :, :n].transpose(0, 2, 1).reshape(-1, said.shape[1])  # each member is a run of its own
        found.append(_score("member", None, members == self.right, {"members": n, "shots": self.plan.shots}))
        return [*found, *self.votes([self.plan])]

    def votes(self, plans: Sequence[EvaluationPlan], study: str = "") -> list[Score]:
        """The plain majority of each plan's members and their private vote at each epsilon, perhaps as an ablation.

        Private votes are releases by the product's own mechanism, with fresh noise.
        """
        vote, randomness, found = NoisyVote(self.labels), SecureRandomness(), []
        place: dict[str | None, int] = {label: i for i, label in enumerate(self.labels)} | {None: -1}
        for plan in plans:
            votes, counts, majority = self.tally(plan.members)
            # A tie of t labels with the right one among them counts 1/t: a release draws among them.
            wins = (counts == counts.max(axis=2, keepdims=True)) & (majority >= 0)[:, :, None]
            right = wins[:, np.arange(len(self.right)), self.right] / np.maximum(wins.sum(axis=2), 1)
            found.append(_score("vote", None, right, plan.facts, study))
            runs = [
                [[boundary.ABSTAIN if i < 0 else i for i in members] for members in queries]
                for queries in votes.tolist()
                for _ in range(self.draws)
            ]
            plain = np.repeat(majority, self.draws, axis=0)
            for epsilon in plan.epsilons:
                sigma = plan.parameter(epsilon, vote.mechanism)
                chosen = [[vote.aggregate(members, sigma, randomness) for members in run] for run in runs]
                released = np.array([[place[label] for label in run] for run in chosen])  # type: ignore[index]
                facts = {**plan.facts, "sigma": sigma, "flipped": 100 * float((released != plain).mean())}
                found.append(_score("vote", epsilon, released == self.right, facts, study))
        return found

    def tally(self, members: int) -> tuple[Labels, Labels, Labels]:
        """Return the first so many members' votes, their counts by label, and the vote without noise.

        They are (samples, queries, members), (samples, queries, labels) and (samples, queries). Without noise the
        earlier label wins a tie, and -1 if most members abstain, as `NoisyVote` says.
        """
        votes = self.answers()[:, :, :members]
        counts = np.stack([(votes == label).sum(axis=2) for label in range(len(self.labels))], axis=2)
        abstained = (votes < 0).sum(axis=2)
        is_down = (abstained > counts.max(axis=2)) & (abstained >= members / 2)
        return votes, counts, np.where(is_down, -1, counts.argmax(axis=2))


def _score(
    method: str, epsilon: float | None, right: NDArray[Any], facts: dict[str, float] | None = None, study: str = ""
) -> Score:
    """``right``: (runs, queries), between 0 and 1."""
    runs, queries = right.shape
    return Score(method, epsilon, {"accuracy": Value.of(right)}, runs, queries, facts or {}, study)
