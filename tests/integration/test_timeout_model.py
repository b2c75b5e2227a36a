"""One slow owner on the embedded model, which has one slot: all other members answer as without that owner."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_dpicl.local import local_chat_model, local_llm
from langchain_dpicl.private import boundary
from langchain_dpicl.private.boundary import ABSTAIN
from langchain_dpicl.private.copies import TimeLimit
from langchain_dpicl.private.copy import Same
from langchain_dpicl.selection import Examples

pytestmark = [pytest.mark.model, pytest.mark.slow]

LIMIT = 1.5
SLOW = "slow"
"""This owner makes the model read or write for several times the limit; all others' 4 tokens take a tenth of a second.

llama.cpp does not stop reading a prompt when its client hangs up: the slot is free only when it has read it.
"""
LONG = "one two three four " * 250


def chain(form: str) -> Any:
    prompt = PromptTemplate.from_template("{input}")
    if form == "chat":
        model: Any = local_chat_model(max_tokens=4)
        slow: Any = local_chat_model(max_tokens=3000, extra_body={"ignore_eos": True})
    else:
        model = local_llm(max_tokens=4, streaming=form == "streamed")
        slow = local_llm(max_tokens=3000, extra_body={"ignore_eos": True}, streaming=form == "streamed")
    if form == "long":
        slow = RunnableLambda(lambda text: LONG + text.to_string()) | slow
    ordinary, endless = (prompt | each | StrOutputParser() for each in (model, slow))
    return RunnableLambda(lambda values: endless if values["examples"][0]["input"] == SLOW else ordinary)


def requests(owners: list[str]) -> list[boundary.MemberRequest]:
    return [({"input": f"{i} {owner[:3]} two three"}, Examples([{"input": owner}])) for i, owner in enumerate(owners)]


def answers(way: str, member: Any, owners: list[str], at_once: int) -> list[Any]:
    limit = TimeLimit(boundary.seal(member), LIMIT)
    if way == "sync":
        return boundary.run_private(
            Same(limit.prepared), requests(owners), max_concurrency=at_once, timeout=limit.seconds
        )
    return asyncio.run(
        boundary.arun_private(Same(limit.prepared), requests(owners), max_concurrency=at_once, timeout=limit.seconds)
    )


@pytest.mark.parametrize(
    ("way", "form", "at_once"),
    [("sync", "streamed", 2), ("async", "long", 8), ("sync", "chat", 8)],
)
def test_one_slow_owner_leaves_every_other_output_unchanged(way: str, form: str, at_once: int) -> None:
    """Six calls behind the slow one wait longer than the whole limit, and the next release begins at once after it."""
    member = chain(form)
    owners = ["anna", "bert", "carl", "dora", "emil", "fred"]
    alone = answers(way, member, owners, at_once)
    assert all(isinstance(answer, str) and answer for answer in alone)
    beside = answers(way, member, [SLOW, *owners[1:]], at_once)
    assert beside == [ABSTAIN, *alone[1:]]
    assert answers(way, member, owners, at_once) == alone
