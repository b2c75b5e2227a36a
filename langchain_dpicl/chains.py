"""Walk through a chain: find what is in it, or copy it with some of its parts changed."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from langchain_core.runnables import Runnable
from pydantic import BaseModel

_FRAMEWORKS = ("langchain_core.", "langgraph.")


def rebuilt(value: Any, finish: Callable[[Any], Any]) -> Any:
    """A copy of a chain in which ``finish`` has been applied to every Runnable, the innermost first.

    ``finish`` gets a Runnable whose own parts are finished, and returns it or another. Follows the fields of Runnables,
    their lists and mappings; it does not look into functions (`parts` does). What nothing changed stays the same
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


def parts(value: Any) -> Iterator[Runnable[Any, Any]]:
    """Every Runnable of a chain, itself included, each once: also those that a function in it refers to.

    A function refers to what it names: variables around it, and the attributes of the objects among these. Functions
    also come as bound methods, partial functions and objects that can be called, which have attributes of their own.
    """
    yield from _parts(value, set())


def _parts(value: Any, seen: set[int]) -> Iterator[Runnable[Any, Any]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, Runnable):
        yield value
        inner = [*_held(value).values(), *(getattr(value, "__pydantic_private__", None) or {}).values()]
    elif type(value) in (list, tuple):
        inner = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    elif inspect.ismethod(value):
        inner = [value.__self__, value.__func__, *_attributes(value.__self__)]
    elif inspect.isfunction(value):
        inner = _referred(value)
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif type(value).__module__.startswith(_FRAMEWORKS) and hasattr(value, "__dict__"):
        inner = list(vars(value).values())  # what holds a graph's steps is no Runnable itself
    elif callable(value) and not inspect.isclass(value):
        inner = [type(value).__call__, *_attributes(value)]
    for part in inner:
        yield from _parts(part, seen)


def _referred(function: Any) -> list[Any]:
    """What a user's own function names, as far as it can be run."""
    if (function.__module__ or "").startswith(_FRAMEWORKS):
        return []
    try:
        known = inspect.getclosurevars(function)
    except ValueError:  # it names a variable that has no value yet
        return []
    around = [item for value in known.nonlocals.values() for item in (value, *_attributes(value))]
    return [item for item in [*around, *known.globals.values()] if _runs(item)]


def _attributes(value: object) -> list[Any]:
    """The Runnables among a plain object's attributes."""
    if isinstance(value, (Runnable, ModuleType)) or inspect.isroutine(value) or inspect.isclass(value):
        return []
    return [item for item in getattr(value, "__dict__", {}).values() if isinstance(item, Runnable)]


def _runs(value: object) -> bool:
    return isinstance(value, (Runnable, functools.partial)) or inspect.isfunction(value) or inspect.ismethod(value)
