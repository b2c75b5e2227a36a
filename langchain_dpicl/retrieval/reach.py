"""What a chain can get at, beyond what LCEL shows of it.

`chains.rebuilt` replaces what lies in the fields of a chain's steps. A retriever in a function's closure, in a tool or
in an object of the user's own is out of its reach, but not out of the member's: `reachable` finds it, so that such a
chain can be refused. It follows fields, slots, containers, closures, default arguments, bound objects and partial
functions everywhere, and of functions and classes that the user wrote also the globals and the modules' attributes that
they name. It does not look into models, and it cannot see what a function imports or computes when it runs.
"""

from __future__ import annotations

import functools
import logging
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel

_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), np.ndarray, ModuleType, logging.Logger)
_CLOSED = (BaseLanguageModel, Embeddings)
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[1])}
)


def reachable(chain: Any) -> Iterator[Any]:
    """Every object that a chain can get at, itself included, each once."""
    seen: dict[int, Any] = {}  # keeps what it has seen alive, so that no id is used twice
    waiting = [chain]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _PLAIN):
            continue
        seen[id(item)] = item
        yield item
        if not isinstance(item, _CLOSED):
            waiting += _inside(item)


def _inside(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return list(item)
    if isinstance(item, type):
        return list(vars(item).values()) if _is_users(item) else []
    if isinstance(item, FunctionType):
        return _named_by(item)
    if isinstance(item, MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, (staticmethod, classmethod)):
        return [item.__func__]
    if isinstance(item, property):
        return [item.fget]
    kinds = type(item).__mro__
    return [*getattr(item, "__dict__", {}).values(), *_slots(item, kinds), *filter(_is_users, kinds)]


def _slots(item: Any, kinds: tuple[type, ...]) -> list[Any]:
    """What lies in an object's slots; pydantic keeps private attributes and extra fields there."""
    names: list[str] = []
    for kind in kinds:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    held = (getattr(item, name, None) for name in names if name not in ("__dict__", "__weakref__"))
    return [part for part in held if part is not None]


def _named_by(function: FunctionType) -> list[Any]:
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
    if _is_library(function.__code__.co_filename):
        return held
    names = set(_names(function.__code__))
    named = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [module for module in [*named, *held] if isinstance(module, ModuleType)]
    return [*held, *named, *(vars(module)[name] for module in modules for name in names if name in vars(module))]


def _names(code: CodeType) -> Iterator[str]:
    """Names in a function's code, and in the functions written within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_users(kind: type) -> bool:
    if kind.__module__ == "builtins":
        return False
    module = sys.modules.get(kind.__module__)
    return not _is_library(getattr(module, "__file__", None) or "") and kind.__module__ not in sys.builtin_module_names


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or path.startswith("<frozen")
