"""Mistake 37: a model's subclass that remembers is shared by copies, as a library's model is."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.prompts import PromptTemplate
from pydantic import Field, PrivateAttr

from langchain_dpicl.private import pickling
from langchain_dpicl.private.copy import Pristine

pytestmark = pytest.mark.own_models


class Remembering(FakeListLLM):
    """A model of the user's own, which keeps what it is asked."""

    responses: list[str] = Field(default=["Positive"])
    _asked: list[str] = PrivateAttr(default_factory=list)

    def _call(self, prompt: str, *rest: Any, **named: Any) -> str:
        self._asked.append(prompt)
        return " ".join(self._asked[:-1]) or "Positive"


def found_by_another_call(canary: str) -> str:
    copies = Pristine(PromptTemplate.from_template("{text}") | Remembering())
    copies.copy().chain.invoke({"text": canary})
    return str(copies.copy().chain.invoke({"text": "another question"}))


def test_37_a_model_s_subclass_that_remembers_is_caught(canary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by_another_call(canary) == "Positive"
    honest = pickling.Pickler._is_shared
    monkeypatch.setattr(
        pickling.Pickler, "_is_shared", lambda self, obj, kind: issubclass(kind, FakeListLLM) or honest(self, obj, kind)
    )
    assert canary in found_by_another_call(canary), "the mutant's copies share the model"
