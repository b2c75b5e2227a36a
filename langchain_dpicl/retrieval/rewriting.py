"""A chain's own rewriting of its question, for the gate to look at the same."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableBranch,
    RunnableParallel,
    RunnablePassthrough,
    RunnableSequence,
)
from langchain_core.runnables.base import RunnableBindingBase

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.private.reach import is_named, is_one, reachable

_CONVERSATIONS = ("langchain_classic.chains.conversational_retrieval.base.BaseConversationalRetrievalChain",)


def rewriting_of(chain: Any) -> Runnable[Any, Any] | None:
    """The part of a chain that makes the text for its retriever, if a model or a branch has a part in it.

    Such as in `create_history_aware_retriever`, or ``prompt | model | parser | retriever``. None without one. Raises
    `InvalidParameter` if the chain rewrites where that cannot be found.
    """
    found = _found(chain)
    if found is None and any(_rewrites(part) for part in reachable(chain)):
        raise InvalidParameter(
            "search_query",
            None,
            "given, since the chain rewrites its question where it cannot be found: a Runnable or a function of the "
            "request that gives the text to search for, such as prompt | model | StrOutputParser()",
        )
    return found


def _rewrites(part: Any) -> bool:
    is_step = is_one(part, RunnableBranch) or is_one(part, RunnableSequence)
    return is_named(part, _CONVERSATIONS) or (is_step and _found(part) is not None)


def _is_rewriting(maker: Runnable[Any, Any]) -> bool:
    return isinstance(maker, RunnableBranch) or any(is_one(part, BaseLanguageModel) for part in reachable(maker))


def _cut(part: Any) -> Runnable[Any, Any] | None:
    """A part that ends in a retriever, without it; None for another."""
    if isinstance(part, RunnableBindingBase):
        return _cut(part.bound)
    if isinstance(part, BaseRetriever):
        return RunnablePassthrough()
    if isinstance(part, RunnableSequence):
        end = _cut(part.last)
        return None if end is None else _sequence([part.first, *part.middle], end)
    if isinstance(part, RunnableBranch):
        made = [_cut(branch) for _, branch in part.branches]
        default = _cut(part.default)
        if default is None or None in made:
            return None
        branches: list[Any] = [(condition, cut) for (condition, _), cut in zip(part.branches, made, strict=True)]
        return RunnableBranch(*branches, default)
    return None


def _sequence(before: list[Any], end: Runnable[Any, Any]) -> Runnable[Any, Any]:
    if not isinstance(end, RunnablePassthrough):
        before = [*before, end]
    return before[0] if len(before) == 1 else RunnableSequence(*before)


def _found(part: Any) -> Runnable[Any, Any] | None:
    """The one rewriting in what a part does with its own input."""
    maker = _cut(part)
    if maker is not None and _is_rewriting(maker):
        return maker
    if isinstance(part, RunnableBindingBase):
        return _found(part.bound)
    if isinstance(part, RunnableAssign):
        return _found(part.mapper)
    if isinstance(part, RunnableParallel):
        found = [maker for step in part.steps__.values() if (maker := _found(step)) is not None]
        return found[0] if len(found) == 1 else None
    if isinstance(part, RunnableSequence):
        for i, step in enumerate(part.steps):
            maker = _found(step) or _cut(step)
            if maker is not None and i:
                maker = _sequence(part.steps[:i], maker)
            if maker is not None and _is_rewriting(maker):
                return maker
            if any(is_one(held, BaseRetriever) for held in reachable(step)):
                return None
    return None
