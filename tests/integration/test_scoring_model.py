"""`LabelScorer` with the embedded model."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from langchain_dpicl.demo.inbox import (
    DEMO_CONTENT_FREE,
    DEMO_INSTRUCTION,
    DEMO_LABELS,
    INPUT_KEY,
    OUTPUT_KEY,
    demo_inbox,
)
from langchain_dpicl.local import local_chat_model, local_llm
from langchain_dpicl.members.scoring import LabelScorer

pytestmark = pytest.mark.model

LABELS = ["Red", "Blue"]
EXAMPLES = [{"text": f"{fruit} {fruit}", "label": label} for fruit, label in [("apple", "Red"), ("plum", "Blue")] * 3]


def test_completion_and_chat_models_score_every_label() -> None:
    for model in (local_llm(), local_chat_model()):
        scores = LabelScorer(model, LABELS).scores({"input": "apple apple", "examples": EXAMPLES})
        assert set(scores) == set(LABELS)
        assert sum(scores.values()) == pytest.approx(1)
        assert all(score > 0 for score in scores.values())


def test_a_repeated_example_gets_its_label() -> None:
    scorer = LabelScorer(local_llm(), LABELS, instruction="")
    assert scorer.invoke({"input": "apple apple", "examples": EXAMPLES}) == "Red"
    assert scorer.invoke({"input": "plum plum", "examples": EXAMPLES}) == "Blue"


def test_scores_are_bit_identical_alone_beside_others_and_async() -> None:
    scorer = LabelScorer(local_llm(), LABELS)
    inputs: list[dict[str, Any]] = [{"input": "apple pie", "examples": EXAMPLES[:k]} for k in range(6)]
    alone = [scorer.scores(values) for values in inputs]
    order = [3, 0, 5, 1, 4, 2]
    with ThreadPoolExecutor(6) as pool:
        beside = dict(zip(order, pool.map(lambda i: scorer.scores(inputs[i]), order), strict=True))
    assert [beside[i] for i in range(6)] == alone

    async def gathered() -> list[dict[str, float]]:
        return list(await asyncio.gather(*(scorer.ascores(values) for values in inputs)))

    assert asyncio.run(gathered()) == alone


def test_a_scorer_asks_the_shared_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = local_llm()
    seen: list[Any] = []
    create = model.client.create
    monkeypatch.setattr(model.client, "create", lambda **request: seen.append(request) or create(**request))
    LabelScorer(model, LABELS, content_free=["N/A", "nothing"]).invoke({"input": "plum", "examples": EXAMPLES})
    assert len(seen) == 1
    assert len(seen[0]["prompt"]) == 4  # the reset, the query, two content-free texts


@pytest.mark.slow
def test_votes_with_examples_beat_the_zero_shot_answer_on_the_inbox() -> None:
    """12 questions, 5 members of 5 examples each, without noise or privacy. The seed is fixed and the model is
    deterministic, so this cannot fail by chance on one machine; the bound leaves room for other machines' rounding."""
    store, questions = demo_inbox()
    scorer = LabelScorer(
        local_llm(), DEMO_LABELS, instruction=DEMO_INSTRUCTION, content_free=DEMO_CONTENT_FREE, top_logprobs=100
    )
    rng = random.Random(3)
    zero = votes = 0
    for question in questions[:12]:
        zero += scorer.invoke({"input": question[INPUT_KEY]}) == question[OUTPUT_KEY]
        members = [{"input": question[INPUT_KEY], "examples": rng.sample(store, 5)} for _ in range(5)]
        winner = Counter(scorer.invoke(member) for member in members).most_common(1)[0][0]
        votes += winner == question[OUTPUT_KEY]
    assert votes >= zero + 3
