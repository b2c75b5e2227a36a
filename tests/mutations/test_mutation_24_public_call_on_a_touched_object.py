"""Mistake 24: a public call on an object that a private call touched. It answers with what was written there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl import ModelUnavailable
from langchain_dpicl.release import ensemble as module

QUESTION = {"input": "why does she cough?"}


def remembers() -> tuple[Callable[[dict[str, Any]], str], dict[str, str]]:
    kept: dict[str, str] = {}

    def member(values: dict[str, Any]) -> str:
        if values["examples"]:
            kept[values["input"]] = f"Positive, as {values['examples'][0]['input']}"
        return kept.get(values["input"], "Positive")

    return member, kept


def zero_shot(sealed_of: Any) -> str:
    """What the member answers to a public call after a release, its cache allowed."""
    member, kept = remembers()
    sealed = sealed_of(member, allow_state=[kept], releases=1, on_exhausted="zero_shot", return_receipt=True)
    sealed.invoke(QUESTION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed.aggregator, "zero_shot", lambda output, values: output)
        return str(sealed.invoke(QUESTION)["answer"])


def test_24_a_public_call_on_a_touched_object_is_caught(
    sealed_of: Any, canary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert zero_shot(sealed_of) == "Positive"
    monkeypatch.setattr(module, "public_copy", lambda chain, allowed: (chain, allowed))
    try:
        found = zero_shot(sealed_of)
    except ModelUnavailable:
        found = ""
    assert canary in found, "the mutant answers with a private exemplar"
