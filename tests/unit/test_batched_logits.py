"""Rows that a study reads together are those that the sampler's own model reads alone, with tiny random weights."""

from __future__ import annotations

import numpy as np
import pytest
from batched_logits import BatchedLogits

from langchain_dpicl.decoding import Demonstration
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits

pytest.importorskip("torch")
from test_transformers_model import characters, network

SHOWN = ["Document: a pub\n\n", "Document: a long way to a coffee shop\n\n", "Document: an inn\n\n"]
ASKED = "Question: what?\nAnswer:"


@pytest.fixture(scope="module")
def alone() -> TransformersLogits:
    return TransformersLogits((network("llama"), characters()), threads=1)


def test_rows_are_those_of_the_samplers_model_whatever_was_read_before(alone: TransformersLogits) -> None:
    shown = [Demonstration(i, text) for i, text in enumerate(SHOWN)]
    batched = BatchedLogits(alone)
    for asked in (ASKED, "Question: where?\nAnswer:", ASKED):
        one, many = (model.session(asked, shown, steps=4) for model in (alone, batched))
        for rows, released in (
            ([0, 1], []),
            ([1, 1, 2], [40]),
            ([], [40, 50]),
            ([0, 2], [40, 50, 60]),
            ([2], [40, 50, 60]),
        ):
            assert np.abs(one.logits(rows, released) - many.logits(rows, released)).max() < 1e-3


def test_answers_are_the_likeliest_tokens_up_to_a_stop(alone: TransformersLogits) -> None:
    batched, expected = BatchedLogits(alone), []
    for text in ("", *SHOWN):
        session, tokens = alone.session(ASKED, [Demonstration(0, text)] if text else [], steps=6), list[int]()
        while len(tokens) < 6:
            token = int(session.logits([0] if text else [], tokens)[-1].argmax())
            if token in alone.end_tokens or "e" in alone.text([token]):
                break
            tokens.append(token)
        expected.append(alone.text(tokens).strip())
    assert batched.greedy([(text, ASKED) for text in ("", *SHOWN)], 6, "e") == expected
    assert len(set(expected)) > 1
