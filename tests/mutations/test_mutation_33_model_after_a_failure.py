"""Mistake 33: a model that failed on one owner's record answers the others' differently.

One owner's text puts the model of a head's label scores into another state for its next thirty calls. The features of
all other records must stay what they are without that text: then the first step's sum moves by the owner's own part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from evaluation_fakes import FakeLLM, unit

from langchain_dpicl.calls.flow import Flow, run
from langchain_dpicl.once import probing as module
from langchain_dpicl.once.scores import CalibratedScores, LabelScores
from langchain_dpicl.once.steps import LATTICE, FeatureMap, OwnedRecords, clipped_sum
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.profile import Gaussian

EPSILON, DELTA, STEPS, OTHERS, DOWN = 1.0, 1e-5, 20, 60, 30
WORDS = ["bad", "good"]

Scored = Callable[[CalibratedScores, list[str]], Flow[list[Any]]]


class Fragile(FakeLLM):
    """After a text with "breaks" its next `DOWN` calls fail, or have the answers of other texts."""

    state: str = "fails"
    left: int = 0

    def _answer(self, prompt: str) -> Any:
        if self.left:
            self.left -= 1
            if self.state == "fails":
                raise TimeoutError
            return super()._answer("other")
        self.left = DOWN if "breaks" in prompt else 0
        return super()._answer(prompt)


def probed_after_failures_alone(scores: CalibratedScores, texts: list[str]) -> Flow[list[Any]]:
    """A model that answers, though otherwise than before, is believed."""
    calls, found = scores.scores.calls, list[Any]()
    ask = calls.ask()
    assert scores.probes is not None
    for text in texts:
        found.append((yield from ask(text)))
        if not isinstance(found[-1], list):
            yield from calls.waited_for(ask, scores.probes[:1])
    return found


def weight(prompt: str, word: str) -> float:
    """The model takes every record for a good one."""
    return math.exp(unit(prompt, word)) * (20.0 if "record" in prompt and word == "good" else 1.0)


def first_sum(state: str, scored: Scored, texts: list[str]) -> Any:
    llm = Fragile(words=WORDS, weight=weight, state=state)
    scores = LabelScores(llm, WORDS, share=0.9).calibrated([f"public {i}" for i in range(10)])
    features = scores.joined(FeatureMap(2).features(np.eye(2)[[0] * len(texts)]), run(scored(scores, texts)))
    owners, labels = np.arange(len(texts)), np.zeros(len(texts), np.int64)
    records = OwnedRecords(features.astype(np.float32), labels, owners)
    return np.asarray(clipped_sum(records, np.zeros((2, features.shape[1]))), np.float64) / LATTICE


@pytest.mark.parametrize("state", ["fails", "answers otherwise"])
def test_33_a_model_in_another_state_after_one_owners_text_is_caught(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product's move keeps delta. Each mutant's is a hundred times above it, in the state that it does not see."""
    monkeypatch.setattr(module, "pause", lambda seconds: lambda: None)
    request = LineRequest("head", 1.0, 1, options={"steps": STEPS})
    plan = PrivacyPlan.solve(epsilon=EPSILON, delta=DELTA, lines={"head": request})

    others = [f"record {i}" for i in range(OTHERS)]

    def delta(scored: Scored) -> float:
        """Of an owner more, who comes first."""
        sums = [first_sum(state, scored, texts) for texts in (["this record breaks it", *others], others)]
        move = float(np.linalg.norm(sums[0] - sums[1]))
        return Gaussian(plan.lines["head"].parameter / (move * math.sqrt(STEPS))).delta(EPSILON)

    assert delta(lambda scores, texts: scores.rows(texts, False)) <= DELTA
    assert delta(lambda scores, texts: scores.scores.calls.rows(texts, False)) > 100 * DELTA
    if state != "fails":
        assert delta(probed_after_failures_alone) > 100 * DELTA
