"""One slow owner on the embedded model, whose calls have no clock: all members answer, as without that owner."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import InvalidParameter
from langchain_dpicl.local import local_chat_model, local_llm
from langchain_dpicl.private import boundary
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.private.models import limit
from langchain_dpicl.selection import Examples

pytestmark = [pytest.mark.model, pytest.mark.slow]

SLOW = "slow"
"""This owner makes the model write twenty times as much as the others."""


def chain(form: str) -> Any:
    prompt = PromptTemplate.from_template("{input}")
    more = {"max_tokens": 80, "extra_body": {"ignore_eos": True}}
    if form == "chat":
        model: Any = local_chat_model(max_tokens=4)
        slow: Any = local_chat_model(**more)
    else:
        model, slow = local_llm(max_tokens=4), local_llm(**more)
    ordinary, endless = (prompt | each | StrOutputParser() for each in (model, slow))
    return RunnableLambda(lambda values: endless if values["examples"][0]["input"] == SLOW else ordinary)


def requests(owners: list[str]) -> list[boundary.MemberRequest]:
    return [({"input": f"{i} {owner[:3]} two three"}, Examples([{"input": owner}])) for i, owner in enumerate(owners)]


def answers(way: str, member: Any, owners: list[str], at_once: int) -> list[Any]:
    copies = Pristine(boundary.seal(member))
    seconds = limit(copies, "auto", at_once)
    assert seconds is None
    with pytest.raises(InvalidParameter, match="computes in this process"):
        limit(copies, 60, at_once)
    if way == "sync":
        return boundary.run_private(copies, requests(owners), max_concurrency=at_once, timeout=seconds)
    return asyncio.run(boundary.arun_private(copies, requests(owners), max_concurrency=at_once, timeout=seconds))


@pytest.mark.parametrize(("way", "form", "at_once"), [("sync", "text", 2), ("async", "text", 8), ("sync", "chat", 8)])
def test_one_slow_owner_leaves_every_other_output_unchanged(way: str, form: str, at_once: int) -> None:
    member = chain(form)
    owners = ["anna", "bert", "carl", "dora", "emil", "fred"]
    alone = answers(way, member, owners, at_once)
    assert all(isinstance(answer, str) and answer for answer in alone)
    beside = answers(way, member, [SLOW, *owners[1:]], at_once)
    assert isinstance(beside[0], str)
    assert beside[1:] == alone[1:]
    assert answers(way, member, owners, at_once) == alone
