"""Copy a chain with some of its parts changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from langchain_core.runnables import Runnable
from pydantic import BaseModel


def changed(part: Any, changes: dict[str, Any]) -> Any:
    """A copy of a Runnable with some of its fields changed; the same object if there are no changes."""
    if not changes:
        return part
    if isinstance(part, BaseModel):
        return part.model_copy(update=changes)
    copied = copy.copy(part)
    vars(copied).update(changes)
    return copied


def rebuilt(value: Any, finish: Callable[[Any], Any]) -> Any:
    """A copy of a chain in which ``finish`` has been applied to every Runnable, the innermost first.

    ``finish`` gets a Runnable whose own parts are finished, and returns it or another. Follows the fields of Runnables,
    their lists and mappings; it does not look into functions (`reach` does). What nothing changed stays the same
    object, and the caller's chain stays as it was.
    """
    seen: dict[int, Any] = {}

    def of(value: Any) -> Any:
        if id(value) in seen:
            return seen[id(value)]
        if isinstance(value, Runnable):
            seen[id(value)] = value  # a chain may refer to itself
            fields = type(value).model_fields if isinstance(value, BaseModel) else getattr(value, "__dict__", {})
            held = {name: getattr(value, name) for name in list(fields)}
            made = {name: of(part) for name, part in held.items()}
            seen[id(value)] = copied = changed(
                value, {name: made[name] for name in held if made[name] is not held[name]}
            )
            seen[id(value)] = finish(copied)
            return seen[id(value)]
        if type(value) in (list, tuple):
            items = type(value)(map(of, value))
            return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
        if type(value) is dict:
            entries = {key: of(item) for key, item in value.items()}
            return entries if any(entries[key] is not value[key] for key in value) else value
        return value

    return of(value)
