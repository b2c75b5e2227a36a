"""Mistake 30: a class that copies of a chain share, as cloudpickle's do. What one call writes on it, others read."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from langchain_dpicl.private import loading
from langchain_dpicl.private.copy import Pristine


class Kept:
    """A class without an attribute, until a call writes one."""


def member(text: str) -> Any:
    before = getattr(Kept, "last", None)
    Kept.last = text  # type: ignore[attr-defined]
    return before


def found_by_another_call(copies: Pristine, canary: str) -> Any:
    copies.copy().chain.invoke(canary)
    return copies.copy().chain.invoke("another question")


def test_30_a_class_that_copies_share_is_caught(canary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Pristine(RunnableLambda(member))
    assert found_by_another_call(copies, canary) is None
    assert not hasattr(Kept, "last")
    made: dict[int, type] = {}
    once = loading.made_class

    def tracked(own: Any, index: int, *how: Any) -> type:
        return made.setdefault(index, made.get(index) or once(own, index, *how))

    monkeypatch.setattr(loading, "made_class", tracked)
    copies._known.clear()
    assert found_by_another_call(copies, canary) == canary, "the mutant's copies share the class"
