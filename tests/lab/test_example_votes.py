"""The quickstart's answer: how likely it is, by the votes of the embedded model, which a slow test counts again."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import binom

from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.lines import PlanLine
from langchain_dpicl.privacy.votes import VoteNoise

ROOT = Path(__file__).parents[2]

README_VOTES = {"Flask": 95, "Porch": 9, "Ledger": 6}
"""The votes on the quickstart's question of all 110 customers with a message near to it, each by the embedded model."""


def chance_of_the_first(votes: Mapping[str, int], line: PlanLine, calls: int) -> float:
    """How likely the quickstart's release is the first of these labels: exactly, over all coins and all noise.

    Each customer's vote counts with the plan's rate, by a coin of its own: the counts are independent binomials. Given
    the counts c, a label comes with the weight exp(r c) among those of all labels and of "the members abstain".
    """
    assert (line.mechanism, line.own_calls) == ("vote-em", True)
    noise = VoteNoise(line.mechanism, line.parameter, line.own_calls)
    law, scores = np.ones(()), []
    for count in np.ix_(*(np.arange(number + 1) for number in votes.values())):
        law = law * binom.pmf(count, count.size - 1, line.rate)
        scores.append(noise.rate * count)
    abstain = np.full(law.shape, -noise.rate * noise.abstention_count(calls, len(votes)))
    total = logsumexp(np.stack([*(score + 0.0 * abstain for score in scores), abstain]), axis=0)
    return float((law * np.exp(scores[0] - total)).sum())


def test_the_quickstarts_answer_is_right_with_probability_99_percent() -> None:
    request = LineRequest("vote-em", 20 / 160, 100, options={"own_calls": 1.0})
    line = PrivacyPlan.alone(request, epsilon=3, delta=1e-5)
    assert chance_of_the_first(README_VOTES, line, 35) >= 0.99


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_these_are_the_votes_of_the_model_and_the_plan_of_the_quickstart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a rate of 1 every customer whom the gate lets through has a call: the votes without coins and noise."""
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    code, question = (ROOT / "examples" / "quickstart.py").read_text().split("print(route.invoke(")
    exec(code, made)
    query = ast.literal_eval(question.partition("))")[0])
    buckets = made["selector"].sample(1.0, made["selector"].embed_query(query))
    votes = Counter(made["member"].invoke({**query, "examples": bucket}) for bucket in buckets)
    line = made["route"].line().plan_line
    assert (line.rate, line.count) == (20 / 160, 100)
    assert chance_of_the_first({label: votes[label] for label in README_VOTES}, line, 35) >= 0.99
    assert sum(abs(votes[label] - README_VOTES[label]) for label in README_VOTES) <= 4, "other kernels move few votes"
