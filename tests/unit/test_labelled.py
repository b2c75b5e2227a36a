"""Public texts that a head labels, and the chain that shows them to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListLLM
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import Demonstrations, PrivateHead, few_shot_chain, label_public
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.once.steps import FeatureMap

EMBEDDINGS = DeterministicFakeEmbedding(size=6)
TEXTS = [f"public text {i}" for i in range(30)]


@pytest.fixture
def head() -> PrivateHead:
    weights = np.random.default_rng(0).normal(size=(3, 7)) * 4
    receipt: Any = {"id": "b:head:1", "epsilon": 1.0}
    return PrivateHead(weights, ["a", "b", "c"], FeatureMap(6), EMBEDDINGS, receipt, embedder="x", input_key="text")


def test_labels_are_the_heads_and_carry_its_receipt(head: PrivateHead, tmp_path: Path) -> None:
    shown = label_public(head, TEXTS, output_key="label")
    assert isinstance(shown, Demonstrations)
    assert [pair["text"] for pair in shown] == TEXTS
    assert [pair["label"] for pair in shown] == [answer["label"] for answer in head.batch(list(TEXTS))]
    assert {receipt["id"] for receipt in shown.receipts} == {"b:head:1"}
    shown.save(tmp_path / "shown.jsonl")
    again = Demonstrations.load(tmp_path / "shown.jsonl")
    assert (list(again), again.receipts) == (list(shown), shown.receipts)


def test_doubtful_texts_are_left_out_and_named(head: PrivateHead) -> None:
    sure = label_public(head, TEXTS, least_confidence=0.6)
    assert 0 < len(sure) < len(TEXTS)
    left = {pair["text"] for pair in sure.unanswered}
    assert left | {pair["text"] for pair in sure} == set(TEXTS)
    assert all(head.invoke(text)["confidence"] < 0.6 for text in left)


def test_one_call_builds_a_chain_that_shows_the_nearest_last(head: PrivateHead) -> None:
    prompts: list[str] = []
    llm = FakeListLLM(responses=["b"])
    shown = label_public(head, TEXTS)
    chain = few_shot_chain(shown, llm, EMBEDDINGS, k=3, input_key="text", instruction='Say {"one"} label.')
    spy = chain.steps[0] | RunnableLambda(lambda prompt: prompts.append(prompt.to_string()) or prompt) | llm  # type: ignore[attr-defined]
    assert spy.invoke({"text": TEXTS[7]}) == chain.invoke({"text": TEXTS[7]}) == "b"
    (prompt,) = prompts
    assert prompt.startswith('Say {"one"} label.')
    assert prompt.endswith(f"Text: {TEXTS[7]}\nOutput: {shown[7]['output']}\n\nText: {TEXTS[7]}\nOutput:")
    assert prompt.count("Text: ") == 4


def test_a_head_makes_texts_near_that_it_labels_alike(head: PrivateHead) -> None:
    """Beside the head's probabilities most of what is shown has the label that the head gives the question."""
    shown = label_public(head, TEXTS)
    questions = [f"question {i}" for i in range(40)]
    agreed = []
    for near in (EMBEDDINGS, head):
        prompt: Any = few_shot_chain(shown, FakeListLLM(responses=["b"]), near, k=2, input_key="text").steps[0]  # type: ignore[attr-defined]
        told = [[pair["output"] for pair in prompt._get_examples(text=question)] for question in questions]
        own = [answer["label"] for answer in head.batch(questions)]
        agreed.append(np.mean([label == right for pair, right in zip(told, own, strict=True) for label in pair]))
    assert agreed[1] > 0.8 > 0.7 > agreed[0]


def test_they_go_into_langchains_own_template(head: PrivateHead) -> None:
    template = FewShotPromptTemplate(
        examples=label_public(head, TEXTS)[:2],
        example_prompt=PromptTemplate.from_template("{text} is {output}"),
        suffix="{question} is",
        input_variables=["question"],
    )
    assert template.format(question="this").startswith(f"{TEXTS[0]} is ")


def test_bad_input_is_refused(head: PrivateHead) -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: label_public("head", TEXTS), "head"),  # type: ignore[arg-type]
        (lambda: label_public(head, []), "texts"),
        (lambda: label_public(head, ["", "b"]), r"texts\[0\]"),
        (lambda: label_public(head, TEXTS, least_confidence=1.5), "least_confidence"),
        (lambda: few_shot_chain(Demonstrations(), FakeListLLM(responses=[""]), EMBEDDINGS), "demonstrations"),
        (lambda: few_shot_chain(label_public(head, TEXTS), FakeListLLM(responses=[""]), EMBEDDINGS), "demonstrations"),
        (
            lambda: few_shot_chain(
                label_public(head, TEXTS), FakeListLLM(responses=[""]), EMBEDDINGS, k=31, input_key="text"
            ),
            "k",
        ),
    ]
    for call, named in cases:
        with pytest.raises(InvalidParameter, match=named):
            call()
