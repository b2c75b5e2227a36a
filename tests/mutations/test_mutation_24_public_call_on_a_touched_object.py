"""Mistake 24: a public call on an object that a private call touched. It answers with what was written there."""

from __future__ import annotations

from typing import Any

import pytest
from ears import Same

from langchain_dpicl.private.copy import Pristine

QUESTION = {"input": "why does she cough?"}


class Kept:
    """A class without an attribute, until a call writes one."""


def member(values: dict[str, Any]) -> str:
    if values["examples"]:
        Kept.last = f"Positive, as {values['examples'][0]['input']}"  # type: ignore[attr-defined]
    return str(getattr(Kept, "last", "Positive"))


def zero_shot(sealed_of: Any) -> str:
    """What the member answers to a public call after a release."""
    sealed = sealed_of(member, releases=1, on_exhausted="zero_shot", return_receipt=True)
    sealed.invoke(QUESTION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed.aggregator, "zero_shot", lambda output, values: output)
        return str(sealed.invoke(QUESTION)["answer"])


def test_24_a_public_call_on_a_touched_object_is_caught(
    sealed_of: Any, canary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert zero_shot(sealed_of) == "Positive"
    monkeypatch.setattr(Pristine, "copy", lambda self, bucket=(): Same(self.chain).copy())
    assert canary in zero_shot(sealed_of), "the mutant answers with a private exemplar"
    del Kept.last  # type: ignore[attr-defined]
