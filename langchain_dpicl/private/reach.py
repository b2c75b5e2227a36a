"""The objects that a chain shows: in its fields, and in what its own functions hold and name.

For what is read of a chain, such as the searches in it, its releases or the names in its prompts. No safety rests on
it: what a call may reach is decided when the chain is copied (`pickling`). So it follows what is easy to follow: what
objects refer to, what functions close over, and the globals and modules' attributes that the user's own functions name.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import logging
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from importlib.util import resolve_name
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStore

from langchain_dpicl.private import Closed
from langchain_dpicl.private.origins import Origins, home

_ATOMS = frozenset({str, bytes, bytearray, int, float, complex, bool, type(None), ModuleType, CodeType, FrameType})
_PLAIN = (np.generic, logging.Logger, ModuleType)
_CLOSED = (Closed, Embeddings, VectorStore)

_ORIGINS = Origins()


def is_users(module: object) -> bool:
    """Return whether a module of this name is the user's own, and no installed library's."""
    return _ORIGINS.by_reference(module) is False


def reachable(chain: Any, closed: type | tuple[type, ...] = ()) -> Iterator[Any]:
    """Every object that a chain shows, itself included, each once; numbers and texts left out.

    Does not look into embeddings, vector stores, what is marked `Closed`, and objects of the ``closed`` classes; of
    models only into the Runnables in their fields.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used twice
    waiting = deque([chain])
    while waiting:
        item = waiting.popleft()
        kind = type(item)
        if kind in _ATOMS or id(item) in seen or issubclass(kind, _PLAIN):
            continue
        seen[id(item)] = item
        yield item
        if not is_one(item, _CLOSED) and not is_one(item, closed):
            waiting += _inside(item)


def fields_of(model: Any) -> list[Any]:
    """List what a model's fields hold, and what lists and mappings in them do."""
    held = [*getattr(model, "__dict__", {}).values(), *(getattr(model, "__pydantic_private__", None) or {}).values()]
    held += [each for some in held if type(some) in (list, tuple) for each in some]
    held += [each for some in held if type(some) is dict for each in some.values()]
    return held


def _inside(item: Any) -> list[Any]:
    """The objects that one object refers to. Of libraries' classes none."""
    if issubclass(type(item), type):
        return [*vars(item).values(), *item.__mro__[1:], type(item)] if is_users(item.__module__) else []
    if type(item) is FunctionType:
        return held_by(item)
    if is_one(item, BaseLanguageModel):
        return [each for each in fields_of(item) if is_one(each, Runnable)]
    if issubclass(type(item), np.ndarray):
        return list(item.flat) if item.dtype.hasobject else []
    if issubclass(type(item), weakref.ref):
        return [weakref.ref.__call__(item)]
    return gc.get_referents(item)  # runs no code of the object's, whatever it is; its class is among them


def held_by(function: FunctionType) -> list[Any]:
    """List what a function holds: defaults, attributes, variables around it; and what one of the user's own names."""
    held = [function.__defaults__, function.__kwdefaults__, *vars(function).values()]
    held += [value for cell in function.__closure__ or () for value in gc.get_referents(cell)]
    if not is_users(home(function)):
        return held
    names = names_in(function.__code__)
    around = function.__globals__
    held += [around[name] for name in names.globals & around.keys()]
    imported = {_resolved(path, str(around.get("__package__") or "")) for path in names.modules}
    imported |= {name.partition(".")[0] for name in imported}
    waiting = [each for each in held if is_one(each, ModuleType)]
    waiting += [sys.modules[name] for name in imported & sys.modules.keys()]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found = [vars(module)[name] for name in names.attributes & vars(module).keys()]
        waiting += [each for each in found if type(each) is ModuleType]
        held += found
    return held


def _resolved(path: str, package: str) -> str:
    try:
        return resolve_name(path, package)
    except ImportError:  # beyond the outermost package
        return ""


def takes_nothing(cached: Any) -> bool:
    """Return whether a cached function takes no argument, so that it keeps one value, which no call decides."""
    try:
        return not inspect.signature(cached).parameters
    except (TypeError, ValueError):
        return False


def is_one(item: Any, kinds: type | tuple[type, ...]) -> bool:
    """``isinstance`` for any object: a proxy without its object raises if it is asked for its class."""
    try:
        return isinstance(item, kinds)
    except Exception:
        return False


def is_named(item: Any, names: Iterable[str]) -> bool:
    """Return whether one of an object's classes has one of these full names: for libraries that may be absent."""
    return not set(names).isdisjoint(f"{kind.__module__}.{kind.__qualname__}" for kind in type(item).__mro__)


class Names(NamedTuple):
    """The names in a function's code, also in the functions written within it."""

    globals: set[str]
    modules: set[str]
    """Modules that it imports, as it writes them: a relative path begins with dots."""
    attributes: set[str]


@functools.lru_cache(maxsize=1024)
def names_in(code: CodeType) -> Names:
    """Return the names in a function's code. Shared by all who ask: not to be changed."""
    found = Names(set(), set(), set())
    before: tuple[Any, Any] = (0, ())  # what the last two steps load: an import's level, and the names from there
    for step in dis.get_instructions(code):
        name = step.argval
        if step.opname == "IMPORT_NAME":
            path = "." * before[0] + name
            stem = path if path.endswith(".") else f"{path}."
            found.modules.update([path, *(f"{stem}{part}" for part in before[1] or ())])
        elif step.opcode in dis.hasname:
            is_global = step.opname.endswith(("_GLOBAL", "LOAD_NAME"))
            (found.globals if is_global else found.attributes).add(name)
        before = before[1], name
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for names, inner in zip(found, names_in(constant), strict=True):
                names |= inner
    return found
