"""Sealing a member: a copy of the chain without anything of its own that would show what it is given."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStore
from pydantic import BaseModel

from langchain_dpicl.chains import parts, rebuilt
from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.reach import is_named, is_one, reachable

_MEMORIES = (
    "langchain_classic.base_memory.BaseMemory",
    "langchain_core.memory.BaseMemory",  # where it was before langchain-core 1
    "langchain_core.chat_history.BaseChatMessageHistory",
    "langchain_core.runnables.history.RunnableWithMessageHistory",
    "langgraph.store.base.BaseStore",
)
"""What outlives a call, by name: not all of it need be installed."""

_STORE = "langchain_dpicl.store.base.PrivateStore"
_PRIVATE = (_STORE, "langchain_dpicl.selection.PoissonExampleSelector")
_RELEASED = ("langchain_dpicl.retrieval.retriever.DPRetriever",)


def seal(member: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """A copy of the chain whose parts have no cache, verbosity, checkpoints, callbacks or listeners of their own.

    Follows the fields of Runnables, their lists and mappings. What a function or the node of a graph refers to cannot
    be exchanged: raises `UnsafeConfigurationError` where such a part has any of these.

    Raises it too where the chain reaches what would carry one member's private text to another: a memory, a chat
    history or a graph's store, which outlive a call, and an `ExemplarStore`, which shows every member the same owners.
    A retriever or a vector store may be public, and stays.
    """
    sealed: Runnable[Any, Any] = rebuilt(member, _sealed)
    for part in parts(sealed):
        if openings := sorted(name for name in _openings(part) if getattr(part, name) is not None):
            raise UnsafeConfigurationError(
                f"a {type(part).__name__} that a function or a graph of the member refers to would show private text "
                f"by its {', '.join(openings)}: set it up without"
            )
    for reached in reachable(sealed):
        if is_named(reached, _MEMORIES):
            raise UnsafeConfigurationError(
                f"the chain reaches a {type(reached).__name__}: members would read there what other members wrote, and "
                "it would keep private text: set the chain up without, and pass a conversation in as part of the input"
            )
        if is_named(reached, (_STORE,)):
            raise UnsafeConfigurationError(
                "the chain reaches an ExemplarStore: every member would read the same owners' exemplars there; a "
                "member gets its own as `examples`"
            )
    return sealed


def seal_public(chain: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """`seal` for a chain whose answers are taken for public text. Raises where it reaches a collection of documents.

    Nobody can tell whether a retriever's or a vector store's documents are public, so that none may be there. A
    `DPRetriever`, whose documents are releases, may, and so may a selector in a prompt, which selects nothing there.
    """
    found = list(reachable(chain))
    in_prompts = {id(vars(part).get("example_selector")) for part in found if is_one(part, BaseModel)}
    for part in found:
        collection = is_one(part, (BaseRetriever, VectorStore)) or is_named(part, _PRIVATE)
        if collection and not is_named(part, _RELEASED) and id(part) not in in_prompts:
            raise UnsafeConfigurationError(
                f"candidates must come from public text alone, and their chain reaches a {type(part).__name__}: what "
                "it finds would be published without noise; write them without documents"
            )
    return seal(chain)


def _sealed(part: Runnable[Any, Any]) -> Runnable[Any, Any]:
    openings = _openings(part)
    if not openings:
        return part
    if isinstance(part, BaseModel):
        return part.model_copy(update=openings)
    copied = copy.copy(part)
    vars(copied).update(openings)
    return copied


def _openings(part: Any) -> dict[str, Any]:
    """The fields by which a part would show what it is given, each with what closes it."""
    off: dict[str, Any]
    if isinstance(part, BaseModel):
        names = set(type(part).model_fields)
        off = {"callbacks": None, "verbose": False, "config_factories": []}
    elif _is_graph(part):
        names = set(vars(part))
        off = {"checkpointer": None, "cache": None, "debug": False}
    else:
        return {}
    found: dict[str, Any] = {name: to for name, to in off.items() if name in names and getattr(part, name)}
    if isinstance(part, BaseLanguageModel):
        if part.cache is not False:  # None stands for the global cache
            found["cache"] = False
    elif "config" in names and isinstance(config := part.config, Mapping) and config.get("callbacks"):
        found["config"] = {key: item for key, item in config.items() if key != "callbacks"}
    return found


def _is_graph(part: object) -> bool:
    return any(kind.__module__.startswith("langgraph.pregel") for kind in type(part).__mro__)
