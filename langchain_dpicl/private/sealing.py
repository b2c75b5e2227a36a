"""The chain is sealed.

`seal` copies a chain without anything of its own that would show what it is given or carry it to another call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from langchain_core.caches import BaseCache
from langchain_core.callbacks import (
    BaseCallbackHandler,
    BaseCallbackManager,
)  # fmt: skip
from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.language_models import BaseLanguageModel
from langchain_core.prompts import BasePromptTemplate
from langchain_core.prompts.message import BaseMessagePromptTemplate
from langchain_core.runnables import Runnable
from langchain_core.runnables.history import RunnableWithMessageHistory
from pydantic import BaseModel

from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.private.prompts import literal_examples
from langchain_dpicl.private.reach import is_named, is_one
from langchain_dpicl.private.sources import is_of, name_of

_HANDLERS = (BaseCallbackHandler, BaseCallbackManager)
_KEEPERS = (BaseCache, BaseChatMessageHistory, RunnableWithMessageHistory)
_KEEPERS_BY_NAME = (
    "langchain_classic.base_memory.BaseMemory",
    "langchain_core.memory.BaseMemory",  # until langchain-core 1
    "langgraph.store.base.BaseStore",
    "langgraph.checkpoint.base.BaseCheckpointSaver",
    "langgraph.cache.base.BaseCache",
    "langchain_classic.embeddings.cache.CacheBackedEmbeddings",
    "joblib.memory.Memory",
    "joblib.memory.MemorizedFunc",
    "diskcache.core.Cache",
    "shelve.Shelf",
)
"""Classes that keep something between calls, of libraries that need not be installed. If a library moves its class, the
name no longer refuses it: follow the libraries."""

_BREAKERS = ("aiobreaker.circuitbreaker.CircuitBreaker", "circuitbreaker.CircuitBreaker", "pybreaker.CircuitBreaker")
"""By name, too."""


def rebuilt(value: Any, finish: Callable[[Any], Any], keep: Iterable[object] = ()) -> Any:
    """A copy of a chain in which ``finish`` has been applied to every Runnable but these, the innermost first.

    ``finish`` gets a Runnable whose own parts are finished, and returns it or another. Follows the fields of Runnables
    and messages' templates, their lists and mappings; it does not look into functions (`pickling` does). What nothing
    changed stays the same object, and the caller's chain stays as it was.
    """
    seen: dict[int, Any] = {id(each): each for each in keep}

    def changes(held: dict[Any, Any]) -> dict[Any, Any]:
        return {key: made for key, part in held.items() if (made := of(part)) is not part}

    def of(value: Any) -> Any:
        if id(value) in seen:
            return seen[id(value)]
        if isinstance(value, (Runnable, BaseMessagePromptTemplate)):
            seen[id(value)] = value  # a chain may refer to itself
            fields = type(value).model_fields if isinstance(value, BaseModel) else getattr(value, "__dict__", {})
            made = _changed(value, changes({name: getattr(value, name) for name in list(fields)}))
            seen[id(value)] = finish(made) if isinstance(made, Runnable) else made
            return seen[id(value)]
        if type(value) is dict and (changed := changes(value)):
            return {**value, **changed}
        if type(value) in (list, tuple):
            held = dict(enumerate(value))
            if changed := changes(held):
                return type(value)({**held, **changed}.values())
        return value

    return of(value)


def _changed(part: Any, changes: dict[str, Any]) -> Any:
    """A copy of a Runnable with some of its fields changed; the same object if there are no changes."""
    if not changes:
        return part
    if isinstance(part, BaseModel):
        return part.model_copy(update=changes)
    copied = copy.copy(part)
    vars(copied).update(changes)
    return copied


def seal(member: Runnable[Any, Any], keep: Iterable[object] = ()) -> Runnable[Any, Any]:
    """A copy of the chain whose parts have no cache, verbosity, checkpoints, callbacks or listeners of their own.

    Few-shot templates take what examples say for text (`prompts`). Follows the fields of Runnables, their lists and
    mappings. What a function, an object or the node of a graph refers to cannot be exchanged: `check_part` refuses it
    there when the chain is copied. The objects in ``keep`` stay the same: all copies share them.
    """
    sealed: Runnable[Any, Any] = rebuilt(member, _sealed, keep)
    return sealed


def _sealed(part: Any) -> Any:
    made = _changed(part, _openings(part) | literal_examples(part))
    if isinstance(made, BasePromptTemplate):
        if made is part:
            made = copy.copy(part)
        vars(made)["_serialized"] = {}  # a description for tracers: each copy would make it anew
    return made


def check_part(part: Any) -> None:
    """Raise `UnsafeConfigurationError` for a part of a sealed chain that would show private text, or keep it."""
    openings = _openings(part) if is_one(part, Runnable) else {}
    if shown := sorted(name for name in openings if getattr(part, name) is not None):
        raise UnsafeConfigurationError(
            f"a {type(part).__name__} that a function, an object or a graph of the member refers to would show "
            f"private text by its {', '.join(shown)}: set it up without"
        )
    why = ""
    if is_of(part, _HANDLERS):
        why = ", which would see private text: set the chain up without callbacks, and give them to the release"
    elif is_of(part, _KEEPERS, _KEEPERS_BY_NAME):
        why = (
            ": members would read there what other members wrote, and it would keep private text: set the chain up "
            "without, and pass a conversation in as part of the input"
        )
    elif is_named(part, _BREAKERS):
        why = (
            ": one owner's failing calls would open it for all members, and for public calls. Set the chain up without"
        )
    if why:
        raise UnsafeConfigurationError(f"the chain reaches a {name_of(part)}{why}")


def _openings(part: Any) -> dict[str, Any]:
    """The fields by which a part would show what it is given, each with what closes it."""
    off: dict[str, Any]
    if isinstance(part, BaseModel):
        names = set(type(part).model_fields)
        off = {"callbacks": None, "verbose": False, "config_factories": []}
    elif any(kind.__module__.startswith("langgraph.pregel") for kind in type(part).__mro__):  # a graph
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
