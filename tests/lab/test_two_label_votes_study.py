"""The study of votes of two labels: the examples in a call, the votes, and the probability of the right label."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import two_label_votes
from evaluation_fakes import FakeLLM
from two_label_votes import chances, crowd_of, noise_of
from two_labels import TASKS, Calls, Kept, Store

from langchain_dpicl import NoisyVote
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.votes import BIT, EXPONENTIAL, GAUSSIAN

OWNERS = [(f"owner {i} .", i % 2) for i in range(100)]
STORE = Store(TASKS["sst2"], OWNERS, [f"public {i} ." for i in range(20)], [("one .", 0), ("two .", 1)])


def test_every_owner_is_in_one_call_at_most_and_never_in_its_own_question() -> None:
    for shots, members in ((1, Calls(STORE, 1).members), (4, Calls(STORE, 4).members)):
        for each in members:
            owners = [owner for call in each for owner in call]
            assert len(set(owners)) == len(owners) > 0
            assert len(each) <= (100 if shots == 1 else 20)
    own = Calls(STORE, 1, own=True)
    assert len(own.questions) == 100
    for (text, _), each in zip(own.questions, own.members, strict=True):
        assert OWNERS.index((text, int(text.split()[1]) % 2)) not in {owner for call in each for owner in call}


def test_votes_are_calibrated_on_public_texts_with_the_same_example(tmp_path: Path) -> None:
    """The model says Positive a little more after every question, and after "two" more than that."""
    calls, kept = Calls(STORE, 1), Kept(tmp_path / "kept.jsonl")
    prompts = list(calls.prompts())
    kept.add(prompts, [[-1.5, -1.0 + 0.1 * ("two" in prompt[-1]) - 0.1 * ("one" in prompt[-1])] for prompt in prompts])
    again = Kept(tmp_path / "kept.jsonl")
    sizes = [len(each) for each in calls.members]
    assert calls.votes(again, calibrated=False).tolist() == [[0, sizes[0], 0], [0, sizes[1], 0]]
    assert calls.votes(again, calibrated=True).tolist() == [[sizes[0], 0, 0], [0, sizes[1], 0]]


@pytest.mark.parametrize("mechanism", [BIT, EXPONENTIAL, GAUSSIAN])
@pytest.mark.parametrize("shots", [1, 4])
def test_a_chance_is_that_of_the_products_own_draw(mechanism: str, shots: int) -> None:
    """4,000 draws: out by 5.5 standard errors with a probability below 1e-6 in all six cases together."""
    calls = Calls(STORE, shots)
    noise, crowd = noise_of(mechanism, calls, 3.0, 40), crowd_of(calls)
    assert noise is not None
    votes = np.array([[11, 8, 0]])
    (chance,) = chances(votes, np.array([0]), noise)
    vote = NoisyVote(STORE.words.labels).under(mechanism, crowd)
    drawn = [vote.draw(votes[0], crowd, noise.parameter, SecureRandomness()) == "Negative" for _ in range(4000)]
    assert 0.5 < chance < 0.999
    assert abs(np.mean(drawn) - chance) < 5.5 * math.sqrt(chance * (1 - chance) / 4000)


def test_a_tiny_study_chooses_without_a_test_question_and_asks_nothing_twice(tmp_path: Path, monkeypatch: Any) -> None:
    weight = lambda prompt, word: 4.0 if word in prompt.splitlines()[-2] else 1.0  # noqa: E731
    model = FakeLLM(words=["Negative", "Positive"], weight=weight)
    monkeypatch.setattr(two_label_votes, "local_llm", lambda name: model)
    monkeypatch.setattr(two_label_votes, "FEW", 60)
    monkeypatch.setattr(two_label_votes, "RELEASES", (10,))
    monkeypatch.setattr(two_label_votes, "EPSILONS", (3.0,))
    monkeypatch.setattr(two_label_votes, "WITH_FOUR", {"sst2": 3})
    files = []
    for name, count in (("train", 600), ("test", 4)):
        rows = [{"text": f"{name} {i} {model.words[i % 2]}", "label": model.words[i % 2].lower()} for i in range(count)]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("\n".join(map(json.dumps, rows)))
    options = ["--model", "made-up", "--task", f"sst2={files[0]}:{files[1]}", "--cache", str(tmp_path / "cache")]
    options += ["--output", str(tmp_path)]
    assert two_label_votes.main([*options, "--choose"]) == 0
    assert not any("test" in str(call) for call in model.calls)
    assert two_label_votes.main(options) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert [(row["examples"], row["owners"], row["questions"]) for row in found["rows"]] == [
        (1, 100, 4),
        (1, 60, 4),
        (4, 100, 3),
    ]
    assert all(row["no noise"]["accuracy"] == 1.0 for row in found["rows"])
    assert all(0.5 < row["one bit"]["accuracy"] <= 1.0 for row in found["rows"])
    asked = len(model.calls)
    assert two_label_votes.main(options) == 0
    assert len(model.calls) == asked
