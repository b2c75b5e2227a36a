"""The copy of a chain in which one object has another in its place."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel

from langchain_dpicl.private.copies import copied

GLOBAL: dict[str, str] = {}
LAST = ""


def by_question(values: dict[str, Any]) -> str:
    return GLOBAL.setdefault(values["input"], "Positive")


def rebinds(values: dict[str, Any]) -> str:
    global LAST
    LAST = values["input"]
    return "Positive"


class Prefix:
    """Builds its prompt once."""

    prefix: Any = None

    def answer(self, values: dict[str, Any]) -> str:
        if self.prefix is None:
            self.prefix = "Examples: " + values["input"]
        return "Positive"


def test_a_copy_shares_models_alone_and_works_alike() -> None:
    llm, space = FakeListLLM(responses=["Positive"]), {"n": 0}
    kept: list[Any] = [1]

    def helper(text: str) -> None:
        kept.append(text)

    def recursive(n: int) -> int:
        space["n"] += 1
        return 0 if n == 0 else 1 + recursive(n - 1)

    made = copied({"f": recursive, "g": helper, "llm": llm, "again": kept, "lock": threading.RLock()})
    assert made["f"](3) == 3
    assert space == {"n": 0}
    made["g"]("q")
    assert (kept, made["again"]) == ([1], [1, "q"])
    assert made["llm"] is llm
    copy = copied(by_question)
    assert copy({"input": "q", "examples": []}) == "Positive"
    assert "q" not in GLOBAL
    assert copied(rebinds)({"input": "q", "examples": []}) == "Positive"
    assert LAST == ""
    assert copied(len) is len
    assert copied(json := sys.modules["json"].dumps) is json


def test_an_object_that_holds_nothing_yet_is_copied() -> None:
    prefix, nothing = Prefix(), object()
    made = copied((prefix.answer, nothing))
    made[0]({"input": "q", "examples": []})
    assert prefix.prefix is None
    assert made[1] is nothing


class Registered(BaseModel):
    """A user's object that is pickled by its name."""

    notes: list[str] = []

    def __reduce__(self) -> Any:
        return (lambda: REGISTERED), ()


class SaysItsName(BaseModel):
    notes: list[str] = []

    def __reduce_ex__(self, protocol: Any) -> Any:
        return "SaysItsName"


REGISTERED = Registered()


@pytest.mark.parametrize("held", [REGISTERED, SaysItsName()])
def test_a_pydantic_objects_own_reduction_does_not_decide_what_a_public_copy_shares(held: Any) -> None:
    made = copied(RunnableLambda(lambda _: list(held.notes)))
    held.notes.append("a secret")
    assert made.invoke("a public question") == []
    held.notes.clear()
