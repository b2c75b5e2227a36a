"""Copy a chain with some of its parts changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from langchain_core.runnables import Runnable
from pydantic import BaseModel


def rebuilt(value: Any, finish: Callable[[Any], Any]) -> Any:
    """A copy of a chain in which ``finish`` has been applied to every Runnable, the innermost first.

    ``finish`` gets a Runnable whose own parts are finished, and returns it or another. Follows the fields of Runnables,
    their lists and mappings; it does not look into functions (`reach` does). What nothing changed stays the same
    object, and the caller's chain stays as it was.
    """
    return _rebuilt(value, finish, {})


def _rebuilt(value: Any, finish: Callable[[Any], Any], seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, Runnable):
        seen[id(value)] = value  # a chain may refer to itself
        seen[id(value)] = finish(_with_parts(value, finish, seen))
        return seen[id(value)]
    if type(value) in (list, tuple):
        items = type(value)(_rebuilt(item, finish, seen) for item in value)
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if type(value) is dict:
        entries = {key: _rebuilt(item, finish, seen) for key, item in value.items()}
        return entries if any(entries[key] is not value[key] for key in value) else value
    return value


def _with_parts(value: Runnable[Any, Any], finish: Callable[[Any], Any], seen: dict[int, Any]) -> Runnable[Any, Any]:
    held = _held(value)
    new = {name: _rebuilt(old, finish, seen) for name, old in held.items()}
    changes = {name: part for name, part in new.items() if part is not held[name]}
    if not changes:
        return value
    if isinstance(value, BaseModel):
        return value.model_copy(update=changes)
    copied = copy.copy(value)
    vars(copied).update(changes)
    seen[id(value)] = copied
    return copied


def _held(value: Any) -> dict[str, Any]:
    """What a Runnable holds, by name."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    return dict(getattr(value, "__dict__", {}))
