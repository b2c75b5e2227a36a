"""State that a chain's calls could share: what in it can be written, and whether two calls wrote it.

A `Snapshot` covers what the user's own functions and objects can get at: closures, defaults, attributes, the globals
that code names, and the containers and objects in these. If code assigns to a variable, a module or an attribute, that
counts as well. Objects of libraries, models, embeddings, stores and releases are not looked into.

What differs between two snapshots was written in between, and would carry what one member was given to another.
"""

from __future__ import annotations

import array
import contextlib
import enum
import gc
import hashlib
import io
import itertools
import operator
import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinMethodType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import BaseModel

from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.private import reach
from langchain_dpicl.private.copies import LOCKS, copied

_VALUES = (str, bytes, int, float, complex, bool, type(None))
_CLOSED = (*reach.CLOSED, BaseLanguageModel, RunnableBindingBase, ModuleType)
_SHAREABLE = ("logging.Logger", "logging.Manager", "random.Random")
"""By name: logs of private calls are dropped, and what a generator draws is chance."""

_FIXED = (tuple, frozenset, partial, MethodType, BuiltinMethodType, staticmethod, classmethod, property)
_BUFFERS = (bytearray, memoryview, np.ndarray, array.array, io.StringIO, io.BytesIO)
_PLAIN = frozenset({"builtins", "collections", "functools", "itertools"})
_WRITES = {"setattr", "delattr", "vars", "__dict__", "__setattr__", "__setstate__"}
"""Names by which code writes attributes that it does not name."""

_MADE_UP = "a made-up "
"""How the texts of an example begin that no record has a part in."""

_OTHER_WORDS = " (in other words, "
"""How they go on, if they begin with a question's own words."""

_TELLING = 12
"""A question's shorter texts may lie in any other text by chance."""


@dataclass(frozen=True)
class SharedPlace:
    """Something that can be written. ``found``: the function or class that reaches it."""

    found: str
    name: str
    kind: str
    values: list[Any] = field(repr=False)
    """What it refers to. Keeps these objects alive, so that no id is used twice."""
    mark: tuple[int, ...]
    """Of each value: a text's or number's hash, or which object it is."""


class Snapshot:
    """What a chain's calls could write (``places``), and what it refers to now.

    ``allowed`` are objects, and names of places, that are left out.
    """

    def __init__(self, chain: Any, allowed: Sequence[object] = ()) -> None:
        self.places: dict[tuple[int, str], SharedPlace] = {}
        self._seen: dict[int, Any] = {}
        self._names = {name for name in allowed if isinstance(name, str)}
        self._allowed = {id(item) for item in allowed if not isinstance(item, str)}
        self._waiting: deque[tuple[Any, str, str]] = deque()
        parts = list(reach.reachable(chain))
        functions = [part for part in parts if type(part) is FunctionType and reach.is_users(part)]
        named = [reach.names_in(function.__code__) for function in functions]
        self._stored = {name for names in named for name in names.stored}
        self._named = {name for names in named for name in names.attributes} - {"__wrapped__"}
        self._writes = self._stored or any(_WRITES & (names.globals | names.attributes) for names in named)
        bindings = [part for part in parts if reach.is_one(part, RunnableBindingBase)] if functions else []
        for part in bindings:
            if not reach.is_one(part.bound, BaseLanguageModel):
                for name, value in part.kwargs.items():
                    self._add([value], "a function with bound arguments", name)
        begins = [part for part in parts if _begins(part)]
        for part in sorted(begins, key=lambda part: type(part) is not FunctionType):  # these know their objects' names
            label = getattr(part, "__qualname__", None) or type(part).__qualname__
            self._add([part], label, label)
            while self._waiting:
                self._look(*self._waiting.popleft())

    def _add(self, items: Iterable[Any], found: str, name: str) -> None:
        for item in items:
            if issubclass(type(item), _VALUES) and not getattr(item, "__dict__", None):
                continue
            if name in self._names:
                self._allowed.add(id(item))
            if id(item) in self._seen or id(item) in self._allowed:
                continue
            if not (reach.is_one(item, _CLOSED) or reach.is_named(item, _SHAREABLE) or type(item) in LOCKS):
                self._seen[id(item)] = item
                self._waiting.append((item, found, name))

    def _place(self, item: Any, slot: str, found: str, name: str, kind: str, values: list[Any]) -> None:
        if name not in self._names:
            mark = tuple(hash((type(each), each)) if type(each) in _VALUES else id(each) for each in values)
            self.places[id(item), slot] = SharedPlace(found, name, kind, values, mark)

    def _look(self, item: Any, found: str, name: str) -> None:
        kind = type(item)
        package = str(kind.__module__).partition(".")[0]
        if kind is FunctionType:
            self._function(item)
        elif issubclass(kind, type):
            self._class(item)
        elif reach.is_cached(item):
            self._add([item.__wrapped__], found, name)
            with contextlib.suppress(Exception):
                self._add([item() if reach.takes_nothing(item) else None], found, name)
        elif issubclass(kind, _FIXED):
            self._add(gc.get_referents(item), found, name)
        elif issubclass(kind, _BUFFERS) or not reach.is_library(package) or package in sys.stdlib_module_names:
            self._object(item, found, name)

    def _object(self, item: Any, found: str, name: str) -> None:
        """A container, or an object with attributes."""
        kind = type(item)
        attributes: Any = None
        with contextlib.suppress(AttributeError):
            attributes = object.__getattribute__(item, "__dict__")
        has_attributes = isinstance(attributes, dict)
        if not has_attributes or kind.__module__ in _PLAIN or issubclass(kind, (dict, list, set, deque, *_BUFFERS)):
            held = _held(item)
            self._place(item, "", found, name, f"a {kind.__name__}", held)
            self._add(held, found, name)
        if has_attributes:
            slots = gc.get_referents(item)  # beside the dictionary
            if self._writes:
                self._place(item, "*", found, f"{kind.__name__}.*", "its attributes", [*_pairs(attributes), *slots])
            self._add(slots, found, name)
            for attribute, value in list(attributes.items()):
                self._add([value], found, f"{kind.__name__}.{attribute}")

    def _class(self, kind: type) -> None:
        if reach.is_library(kind.__module__):
            return
        label = kind.__qualname__
        self._add([*kind.__mro__[1:], type(kind)], label, label)
        described: tuple[str, ...] = ("__", "_abc_", "model_") if issubclass(kind, BaseModel) else ("__", "_abc_")
        described += ("_",) if issubclass(kind, enum.Enum) else ()  # its own tables grow as flags are combined
        own = {
            name: value
            for name, value in vars(kind).items()
            if not name.startswith(described) and type(value) is not FunctionType
        }
        if self._stored & set(dir(kind)) or (self._writes and not self._stored):
            self._place(kind, "", label, label, "its attributes", _pairs(own))
        for name, value in own.items():
            self._add([value], label, f"{label}.{name}")

    def _function(self, function: FunctionType) -> None:
        label, is_own, scope = function.__qualname__, reach.is_users(function), reach.FunctionScope(function)
        around, attributes, assigned = function.__globals__, vars(function), scope.names.assigned
        for name, value in scope.held:
            self._add([value], label, name)
        for module, name, value in scope.attributes:
            if not reach.is_library(module.__name__):
                self._add([value], label, f"{module.__name__}.{name}")
                if name in scope.names.stored:
                    self._place(module, name, label, f"{module.__name__}.{name}", "a variable", [value])
        if not (is_own and attributes.keys() - {"__wrapped__"}):  # a library's wrapper
            attributes = {name: value for name, value in attributes.items() if name in self._named}
        if attributes:
            self._place(function, "*", label, f"{label}.*", "its attributes", _pairs(attributes))
            self._add(attributes.values(), label, f"{label}.*")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name in assigned:
                self._place(cell, "", label, name, "a variable", gc.get_referents(cell))
        if is_own:
            for name in assigned & scope.names.globals:
                self._place(around, name, label, name, "a variable", [around[name]] if name in around else [])
        for name in scope.unloaded:  # a first call loads it
            self._place(function, name, label, name, "a module", [])


def _begins(part: Any) -> bool:
    """Whether an object is the user's own: a function, an object or a class of theirs, or what holds state for one."""
    kind = type(part)
    if kind is FunctionType:
        return reach.is_users(part)
    if kind in (MethodType, BuiltinMethodType):
        owner = part.__self__
        return type(owner) in (list, dict, set, deque) or _begins(owner) or _begins(getattr(part, "__func__", None))
    if issubclass(kind, partial):
        return any(_begins(each) for each in (part.func, *part.args, *part.keywords.values()))
    return not reach.is_library(kind.__module__) and not issubclass(kind, type)


def _pairs(named: dict[str, Any]) -> list[Any]:
    return [each for pair in list(named.items()) for each in pair]


def _raw(item: Any) -> bytes:
    """A buffer's content, and of a stream where it stands."""
    if not isinstance(item, (io.StringIO, io.BytesIO)):
        return item.tobytes() if hasattr(item, "tobytes") else bytes(item)
    if item.closed:
        return b""
    content = item.getvalue()
    return (content.encode(errors="replace") if isinstance(content, str) else content) + str(item.tell()).encode()


def _held(item: Any) -> list[Any]:
    """What a container or an iterator holds, and where it stands."""
    kind = type(item)
    if issubclass(kind, _BUFFERS):
        inner = list(item.flat) if isinstance(item, np.ndarray) and item.dtype.hasobject else []
        return [hashlib.blake2b(_raw(item)).digest(), *inner]
    held = gc.get_referents(item)
    if kind is itertools.count:
        held.append(repr(item))
    elif kind is GeneratorType:
        held.append(-1 if item.gi_frame is None else item.gi_frame.f_lasti)
    elif kind.__name__.endswith("iterator") and kind.__module__ == "builtins":
        held.append(operator.length_hint(item, -1))
    return held


# -- the trial: what it asks, of which copy, and what it refuses -------------------------------------------------------


class MadeUp(dict[str, Any]):
    """An example that no record has a part in: it has a text under every key, with ``marks`` at its end."""

    def __init__(self, items: dict[str, Any], marks: str = "") -> None:
        super().__init__(items)
        self._marks = marks

    def __missing__(self, key: str) -> str:
        return f"{_MADE_UP}{key}{self._marks}"

    def __copy__(self) -> MadeUp:
        return MadeUp(dict(self), self._marks)


def other_words(values: Any) -> Any:
    """A request's values with every text in them made another, which no earlier call was asked."""
    if isinstance(values, str):
        return f"{values}{_OTHER_WORDS}{os.urandom(4).hex()})"
    if type(values) is dict:
        return {key: other_words(value) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(map(other_words, values))
    return values


def public_copy(chain: Any, share: Sequence[object] = (), instead: Sequence[tuple[object, object]] = ()) -> Any:
    """A copy of a sealed chain, to be called in public. The objects in ``share`` stay the same.

    ``instead`` are pairs: an object of the chain, and what the copy has in its place.
    If a chain cannot be copied and holds nothing of the user's own that can be written, it may be the same one. Raises
    `UnsafeConfigurationError` if something else cannot be copied.
    """
    same = [(each, each) for each in share if not isinstance(each, str)]
    try:
        return copied(chain, [*same, *instead])
    except UnsafeConfigurationError:
        if Snapshot(chain, share).places:
            raise
        return chain


def refuse_changes(before: Snapshot, after: Snapshot) -> None:
    """Raises `UnsafeConfigurationError` if something was written between two snapshots of one chain."""
    for key, place in before.places.items():
        if after.places.get(key, place).mark != place.mark:
            raise UnsafeConfigurationError(
                f"{place.found} changes {place.name} ({place.kind}) from one call to the next: members would read "
                "there what other members wrote. Keep it within the call. If it holds nothing of questions, examples "
                "and answers, as a rate limiter does, name the object in share=[...]"
            )


def refuse_kept(before: Snapshot, after: Snapshot, given: Any) -> None:
    """Raises `UnsafeConfigurationError` if what was written between two snapshots holds texts that a call was given.

    So a first call may set up a model, and may not keep a prompt that it built of its examples.
    """
    signs = [_MADE_UP, _OTHER_WORDS, *(text.casefold() for text in _texts(given) if len(text) >= _TELLING)]
    for key, place in after.places.items():
        known = before.places.get(key)
        if (known is None or known.mark != place.mark) and _holds(place.values, signs):
            raise UnsafeConfigurationError(
                f"{place.found} changes {place.name} ({place.kind}) in its first call, and keeps there what "
                "that call was given: every later member would read it. Build it within each call, or before "
                "sealing. If no question, example or answer is in it, name the object in share=[...]"
            )


def _holds(values: list[Any], signs: list[str]) -> bool:
    """Whether texts in these values, or in what they refer to, hold one of these signs."""
    for part in reach.reachable(values):
        if reach.is_one(part, BaseLanguageModel):
            continue
        held = gc.get_referents(part) if type(part) is not FunctionType else []
        for each in [*held, _raw(part) if issubclass(type(part), _BUFFERS) else None]:
            found = bytes(each).decode(errors="replace") if type(each) in (bytes, bytearray) else each
            if isinstance(found, str) and any(sign in found.casefold() for sign in signs):
                return True
    return False


def _texts(values: Any) -> list[str]:
    if isinstance(values, str):
        return [values]
    several = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    return [text for each in several for text in _texts(each)]
