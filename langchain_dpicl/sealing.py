"""Sealing a member: a copy of the chain without anything of its own that would show what it is given."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable
from pydantic import BaseModel

from langchain_dpicl.chains import parts, rebuilt
from langchain_dpicl.errors import UnsafeConfigurationError


def seal(member: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """A copy of the chain whose parts have no cache, verbosity, checkpoints, callbacks or listeners of their own.

    Follows the fields of Runnables, their lists and mappings. What a function or the node of a graph refers to cannot
    be exchanged: raises `UnsafeConfigurationError` where such a part has any of these.
    """
    sealed: Runnable[Any, Any] = rebuilt(member, _sealed)
    for part in parts(sealed):
        if openings := sorted(name for name in _openings(part) if getattr(part, name) is not None):
            raise UnsafeConfigurationError(
                f"a {type(part).__name__} that a function or a graph of the member refers to would show private text "
                f"by its {', '.join(openings)}: set it up without"
            )
    return sealed


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
