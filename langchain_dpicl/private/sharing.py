"""State that a chain's calls could share: what in it can be written, and whether two calls wrote it.

Looked at is what the user's own functions and objects can get at: closures, defaults, attributes, the globals that code
names, and whatever containers and objects lie in these. Of a variable, a module or an attribute that code assigns to,
the assignment counts as well. Objects of libraries, models, embeddings, stores and releases are not looked into.

A `Snapshot` says of each of these what it refers to; texts and numbers are in it as hashes alone. What differs between
two snapshots was written in between, and would carry what one member was given to another.
"""

from __future__ import annotations

import array
import contextlib
import enum
import functools
import gc
import hashlib
import io
import itertools
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import BuiltinMethodType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.vectorstores import VectorStore
from pydantic import BaseModel

from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.private.copies import LOCKS, copied
from langchain_dpicl.private.markers import Closed
from langchain_dpicl.private.reach import (
    is_cached,
    is_library,
    is_named,
    is_one,
    modules_in,
    named_in,
    reachable,
    takes_nothing,
    unloaded_in,
)

_VALUES = (str, bytes, int, float, complex, bool, type(None))
_CLOSED = (Closed, BaseLanguageModel, Embeddings, VectorStore, RunnableBindingBase, ModuleType, enum.Enum)
_SHAREABLE = ("logging.Logger", "logging.Manager", "random.Random")
"""By name: logs of private calls are dropped, and what a generator draws is chance."""

_FIXED = (tuple, frozenset, functools.partial, MethodType, BuiltinMethodType, staticmethod, classmethod, property)
_BUFFERS = (bytearray, memoryview, np.ndarray, array.array, io.StringIO, io.BytesIO)
_PLAIN = frozenset({"builtins", "collections", "functools", "itertools"})
_WRITES = {"setattr", "delattr", "vars", "__dict__", "__setattr__", "__setstate__"}
"""Names by which code writes attributes that it does not name."""


@dataclass(frozen=True)
class Place:
    """Something that can be written: where it was found, and how to read what it refers to."""

    found: str
    """The function or class that reaches it."""
    name: str
    kind: str
    read: Callable[[], list[Any]]


Places = dict[tuple[int, str], Place]


@dataclass(frozen=True)
class Snapshot:
    """What every place refers to, at one moment."""

    places: Places
    marks: dict[tuple[int, str], tuple[int, ...]]
    alive: list[Any]
    """Keeps what the marks stand for, so that no id is used twice."""


def snapshot(chain: Any, allowed: Sequence[object] = ()) -> Snapshot:
    """What a chain's calls could write, and what it refers to now."""
    places, alive = _Search(allowed).places(chain)
    read = {key: place.read() for key, place in places.items()}
    return Snapshot(places, {key: tuple(map(_mark, values)) for key, values in read.items()}, [alive, read])


def refuse_changes(before: Snapshot, after: Snapshot) -> None:
    """Raises `UnsafeConfigurationError` where something was written between two snapshots of one chain."""
    for key, mark in before.marks.items():
        if after.marks.get(key, mark) != mark:
            place = before.places[key]
            raise UnsafeConfigurationError(
                f"{place.found} changes {place.name} ({place.kind}) from one call to the next: members would read "
                "there what other members wrote. Keep it within the call. If it holds nothing of questions, examples "
                f"and answers, as a rate limiter does, allow it: allow_state=[{place.name!r}]"
            )


def refuse_kept(before: Snapshot, after: Snapshot, given: Any) -> None:
    """Raises `UnsafeConfigurationError` where what was written between two snapshots holds texts that a call was given.

    So a first call may set up a model, and may not keep a prompt that it built of its examples.
    """
    marks = [mark.casefold() for mark in [_MADE_UP, *_texts(given)] if len(mark) >= _TELLING or mark is _MADE_UP]
    for key, mark in after.marks.items():
        if before.marks.get(key) != mark and _holds(after.places[key].read(), marks):
            place = after.places[key]
            raise UnsafeConfigurationError(
                f"{place.found} changes {place.name} ({place.kind}) in its first call, and keeps there what "
                "that call was given: every later member would read it. Build it within each call, or before "
                f"sealing. If no question, example or answer is in it, allow it: allow_state=[{place.name!r}]"
            )


def _holds(values: list[Any], marks: list[str]) -> bool:
    """Whether texts in these values, or in what they refer to, hold one of these marks."""
    for part in itertools.chain([values], reachable(list(values))):
        if is_one(part, BaseLanguageModel):
            continue
        held = gc.get_referents(part) if type(part) is not FunctionType else []
        for each in [*held, _raw(part) if issubclass(type(part), _BUFFERS) else None]:
            found = bytes(each).decode(errors="replace") if type(each) in (bytes, bytearray) else each
            if isinstance(found, str) and any(mark in found.casefold() for mark in marks):
                return True
    return False


def _texts(values: Any) -> list[str]:
    if isinstance(values, str):
        return [values]
    several = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    return [text for each in several for text in _texts(each)]


class _Search:
    """Finds the places of one chain."""

    def __init__(self, allowed: Sequence[object]) -> None:
        self._names = {name for name in allowed if isinstance(name, str)}
        self._allowed = {id(item) for item in allowed if not isinstance(item, str)}
        self._seen: dict[int, Any] = {}
        self._found: Places = {}
        self._waiting: deque[tuple[Any, str, str]] = deque()
        self._stored: set[str] = set()
        self._named: set[str] = set()

    def places(self, chain: Any) -> tuple[Places, list[Any]]:
        parts = list(reachable(chain))
        functions = [part for part in parts if type(part) is FunctionType and _is_users_code(part)]
        named = [named_in(function) for function in functions]
        self._stored = {name for names in named for name in names["stored"]}
        self._named = {name for names in named for name in names["attribute"]}
        self._writes = self._stored or any(_WRITES & set(function.__code__.co_names) for function in functions)
        for part in parts:
            if functions and is_one(part, RunnableBindingBase) and not is_one(part.bound, BaseLanguageModel):
                for name, value in part.kwargs.items():
                    self._add(value, "a function with bound arguments", name)
        begins = [part for part in parts if _begins(part)]
        for part in sorted(begins, key=lambda part: type(part) is not FunctionType):  # these know their objects' names
            self._add(part, _label(part), _label(part))
            while self._waiting:
                self._look(*self._waiting.popleft())
        return self._found, list(self._seen.values())

    def _add(self, item: Any, found: str, name: str) -> None:
        closed = issubclass(type(item), _VALUES) and not getattr(item, "__dict__", None)
        if not closed and name in self._names:
            self._allowed.add(id(item))
        if closed or id(item) in self._seen or id(item) in self._allowed:
            return
        if is_one(item, _CLOSED) or is_named(item, _SHAREABLE) or type(item) in LOCKS:
            return
        self._seen[id(item)] = item
        self._waiting.append((item, found, name))

    def _look(self, item: Any, found: str, name: str) -> None:
        kind = type(item)
        if kind is FunctionType:
            self._function(item)
        elif issubclass(kind, type):
            self._class(item)
        elif is_cached(item):
            self._add_all([item.__wrapped__, item() if takes_nothing(item) else None], found, name)
        elif issubclass(kind, _FIXED):
            self._add_all(gc.get_referents(item), found, name)
        elif issubclass(kind, _BUFFERS) or kind.__module__ in _PLAIN or _is_looked_into(kind.__module__):
            self._object(item, found, name)

    def _add_all(self, items: Iterable[Any], found: str, name: str) -> None:
        for item in items:
            self._add(item, found, name)

    def _place(self, item: Any, slot: str, place: Place) -> None:
        if place.name not in self._names:
            self._found[id(item), slot] = place

    def _object(self, item: Any, found: str, name: str) -> None:
        """A container, or an object with attributes."""
        kind = type(item)
        attributes = _attributes(item)
        if attributes is None or kind.__module__ in _PLAIN or issubclass(kind, (dict, list, set, deque, *_BUFFERS)):
            self._place(item, "", Place(found, name, f"a {kind.__name__}", lambda: _held(item)))
            self._add_all(_held(item), found, name)
        if attributes is not None:
            if self._writes:
                words = Place(found, f"{kind.__name__}.*", "its attributes", lambda: _pairs(attributes) + _slots(item))
                self._place(item, "*", words)
            self._add_all(gc.get_referents(item), found, name)
            for attribute, value in list(attributes.items()):
                self._add(value, found, f"{kind.__name__}.{attribute}")

    def _class(self, kind: type) -> None:
        if not _is_users(kind.__module__) or issubclass(kind, enum.Enum):
            return
        label = kind.__qualname__
        self._add_all([*kind.__mro__[1:], type(kind)], label, label)

        def own() -> dict[str, Any]:
            return {name: value for name, value in vars(kind).items() if _is_state(kind, name, value)}

        if self._stored & set(dir(kind)) or (self._writes and not self._stored):
            self._place(kind, "", Place(label, label, "its attributes", lambda: _pairs(own())))
        for name, value in own().items():
            self._add(value, label, f"{label}.{name}")

    def _function(self, function: FunctionType) -> None:
        label = function.__qualname__
        around = function.__globals__
        for name, value in (function.__kwdefaults__ or {}).items():
            self._add(value, label, name)
        for name, value in zip(_arguments(function), function.__defaults__ or (), strict=False):
            self._add(value, label, name)
        kept = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
        if kept and _is_users_code(function):
            self._add(vars(function), label, f"{label}.*")
        elif kept := {name: value for name, value in kept.items() if name in self._named}:  # of a library's wrapper
            keeping = functools.partial(_chosen, vars(function), self._named)
            self._place(function, "*", Place(label, f"{label}.*", "its attributes", keeping))
            self._add_all(kept.values(), label, f"{label}.*")
        names = named_in(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add_all(_contents(cell), label, name)
            if name in names["assigned"]:
                self._place(cell, "", Place(label, name, "a variable", functools.partial(_contents, cell)))
        if is_library(around.get("__name__")):
            return
        for name in names["global"] & around.keys():
            self._add(around[name], label, name)
        for name in names["assigned"] & names["global"]:
            self._place(around, name, Place(label, name, "a variable", functools.partial(_value, around, name)))
        for name in unloaded_in(function):  # a first call loads it
            self._place(function, name, Place(label, name, "a module", list))
        for module in modules_in(function):
            if not is_library(module.__name__):
                for name in names["attribute"] & vars(module).keys():
                    self._add(vars(module)[name], label, f"{module.__name__}.{name}")
                for name in names["stored"] & vars(module).keys():
                    reading = functools.partial(_value, vars(module), name)
                    self._place(module, name, Place(label, f"{module.__name__}.{name}", "a variable", reading))


def _begins(part: Any) -> bool:
    """Whether an object is the user's own: a function, an object or a class of theirs, or what holds state for one."""
    kind = type(part)
    if kind is FunctionType:
        return _is_users_code(part)
    if kind is MethodType:
        return _begins_with(part.__self__) or _begins(part.__func__)
    if kind is BuiltinMethodType:
        return _begins_with(part.__self__)
    if issubclass(kind, functools.partial):
        return any(_begins(each) for each in (part.func, *part.args, *part.keywords.values()))
    return _is_users(kind.__module__) and not issubclass(kind, type)


def _begins_with(item: Any) -> bool:
    return type(item) in (list, dict, set, deque) or _begins(item)


def _is_users(module: object) -> bool:
    return isinstance(module, str) and not is_library(module)


def _is_users_code(function: FunctionType) -> bool:
    """Code without a module, as templates compile to, is read like the user's."""
    return not is_library(function.__globals__.get("__name__"))


def _is_looked_into(module: object) -> bool:
    return _is_users(module) or _is_standard(str(module))


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _label(part: Any) -> str:
    return getattr(part, "__qualname__", None) or type(part).__qualname__


def _arguments(function: FunctionType) -> Sequence[str]:
    """The names of the arguments that have defaults."""
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    return positional[len(positional) - len(function.__defaults__ or ()) :]


def _contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a variable that has no value yet
        return []


def _value(around: dict[str, Any], name: str) -> list[Any]:
    return [around[name]] if name in around else []


def _attributes(item: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _pairs(named: dict[str, Any]) -> list[Any]:
    return [each for pair in list(named.items()) for each in pair]


def _chosen(named: dict[str, Any], names: set[str]) -> list[Any]:
    return _pairs({name: value for name, value in named.items() if name in names})


def _slots(item: Any) -> list[Any]:
    """What lies in the slots of an object that has a dictionary too."""
    found = []
    for kind in type(item).__mro__:
        for each in vars(kind).values() if "__slots__" in vars(kind) else ():
            if type(each) is MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # it has no value yet
                    found.append(each.__get__(item))
    return found


def _raw(item: Any) -> bytes:
    """A buffer's content, and of a stream where it stands."""
    if not isinstance(item, (io.StringIO, io.BytesIO)):
        return item.tobytes() if hasattr(item, "tobytes") else bytes(item)
    if item.closed:
        return b""
    content = item.getvalue()
    return (content.encode(errors="replace") if isinstance(content, str) else content) + str(item.tell()).encode()


def _is_state(kind: type, name: str, value: Any) -> bool:
    described = issubclass(kind, BaseModel) and name.startswith("model_")
    return not (described or name.startswith("__") or name.startswith("_abc_") or type(value) is FunctionType)


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


def _mark(value: Any) -> int:
    """Stands for a value: a text's or number's hash, or which object it is."""
    return hash((type(value), value)) if type(value) in _VALUES else id(value)


_MADE_UP = "a made-up "
"""How the texts of an example begin that no record has a part in."""

_TELLING = 12
"""A question's shorter texts may lie in any other text by chance."""


class MadeUp(dict[str, Any]):
    """An example that no record has a part in: whatever key it is asked for, it has a text there."""

    def __missing__(self, key: str) -> str:
        return f"{_MADE_UP}{key}"


def other_words(values: Any) -> Any:
    """A request's values with every text in them made another, which no earlier call was asked."""
    if isinstance(values, str):
        return f"{values} (in other words, {os.urandom(4).hex()})"
    if type(values) is dict:
        return {key: other_words(value) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(map(other_words, values))
    return values


def public_copy(chain: Any, allow_state: Sequence[object] = ()) -> tuple[Any, Sequence[object]]:
    """A copy of a sealed chain for public calls, and what of ``allow_state`` is in it.

    A chain that holds nothing of the user's own that can be written may be the same one, if it cannot be copied.
    Raises `UnsafeConfigurationError` where something else cannot be copied, or stays what private calls may write.
    """
    try:
        copy, allowed = copied((chain, tuple(allow_state)))
    except UnsafeConfigurationError:
        if _Search(()).places(chain)[0]:
            raise
        return chain, allow_state
    if allow_state:
        may = _Search(()).places(chain)[0].keys() - _Search(allow_state).places(chain)[0].keys()
        for key, place in _Search(()).places(copy)[0].items():
            if key in may:
                raise UnsafeConfigurationError(
                    f"members may write {place.name} ({place.kind}, allow_state), and public calls would read it "
                    f"there: a class, and what its methods name, cannot be copied. Give it to {place.found} as an "
                    "attribute or a closure"
                )
    return copy, allowed
