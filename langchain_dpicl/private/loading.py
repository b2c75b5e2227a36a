"""The making of a copy of a chain from its pickle: the functions that stand there in the place of objects (`pickling`).

No code of the user's classes runs for it: no metaclass, hook, ``__init__`` or ``__setattr__``.
"""

from __future__ import annotations

import contextvars
import functools
import pickle
import types
import typing
import weakref
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from cloudpickle import cloudpickle as reducers

from langchain_dpicl.private.origins import Origins

_HOOKS = frozenset({"__init_subclass__", "__pydantic_init_subclass__"})


class Own:
    """In a pickle: the copy that is being made."""


OWN = Own()


class Unpickler(pickle.Unpickler):
    """Loads one copy. ``known`` are the classes and functions that other copies of the same pickle have found."""

    def __init__(
        self,
        file: Any,
        copy: Any,
        origins: Origins,
        known: dict[tuple[str, str], Any],
    ) -> None:
        super().__init__(file)
        self._copy = copy
        self._origins = origins
        self._known = known

    def find_class(self, module: str, name: str, /) -> Any:
        """Return what a pickle takes by its name, as a user's ``__reduce__`` may say: nothing of the user's own."""
        found = self._known.get((module, name))
        if found is None:
            if not self._origins.by_reference(module):
                raise pickle.UnpicklingError(f"{module}.{name} would be shared by all copies")
            found = self._known[module, name] = super().find_class(module, name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        """Return a shared object, by its index, or what the copy has by itself."""
        return self._copy.shared[pid] if type(pid) is int else self._copy.own(pid)


def made_space(copy: Any, name: str, package: str | None, file: str | None) -> ModuleType:
    made: ModuleType = copy.module(name, package, file)
    return made


def made_class(copy: Any, index: int, maker: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    if maker is skeleton:
        arguments = (copy, *arguments)
    made: type = copy.adopt(maker(*arguments), index)
    return made


def skeleton(
    copy: Any,
    metaclass: Any,
    name: str,
    bases: tuple[Any, ...],
    given: dict[str, Any],
    *_: None,
) -> type:
    """A class without its attributes. No metaclass of the user's own is asked."""
    resolved = types.resolve_bases(bases)
    namespace = given if resolved is bases else {**given, "__orig_bases__": bases}
    maker = next(kind for kind in metaclass.__mro__ if not copy.has_made(kind))
    made: type = maker.__new__(metaclass, name, resolved, namespace)
    return made


def fill_class(made: type, state: Any) -> None:
    copy, (attributes, slots) = state
    for name in _HOOKS & attributes.keys():
        copy.late.append((made, name, attributes.pop(name)))
    reducers._class_setstate(made, (attributes, slots))


def fill(made: Any, held: dict[str, Any]) -> None:
    """Give a module, a class or a function what follows it in a pickle."""
    if isinstance(made, ModuleType):
        vars(made).update(held)
        return
    put = type.__setattr__ if isinstance(made, type) else object.__setattr__
    for name, value in held.items():
        put(made, name, value)


def made_function(code: CodeType, around: ModuleType, name: str, cells: int) -> FunctionType:
    return FunctionType(code, vars(around), name, None, tuple(CellType() for _ in range(cells)) or None)


def fill_enum(made: Any, state: Any) -> None:
    attributes, own = state
    reducers._class_setstate(made, attributes)
    for name, held in own.items():
        vars(made._member_map_[name]).update(held)


def fill_function(function: FunctionType, state: Any) -> None:
    attributes, own, cells = state
    vars(function).update(own)
    for cell, value in zip(function.__closure__ or (), cells, strict=True):
        if value is not reducers._empty_cell_value:
            cell.cell_contents = value
    for name, value in attributes.items():
        setattr(function, name, value)


def fill_object(made: Any, state: Any) -> None:
    """Give an object its fields. None of its class's methods is asked."""
    attributes, slots = state if type(state) is tuple else (state, None)
    for name, value in {**(attributes or {}), **(slots or {})}.items():
        object.__setattr__(made, name, value)


def made_descriptor(kind: type[property], accessors: tuple[Any, ...]) -> property:
    made = kind.__new__(kind)
    property.__init__(made, *accessors)
    return made


def made_schema(classes: list[type], made: Any, schema: Any, settings: list[Any]) -> Any:
    return made(schema, *settings)


def same(item: Any) -> Any:
    return item


def made_stand_in(copy: Any, kind: Any) -> Any:
    """Make an object that gives the exemplars of a call's own bucket, with the bucket that this copy's call has."""
    made: Any = object.__new__(kind)
    made.own_bucket = copy.bucket
    return made


def made_reference(item: Any) -> Any:
    return weakref.ref(item if item is not None else Own())


def made_cached(parameters: dict[str, Any], wrapped: Any) -> Any:
    return functools.lru_cache(**parameters)(wrapped)


def made_constant(value: Any) -> Any:
    """Make a cached function without arguments, which gives this value."""
    constant = functools.cache(lambda: value)
    constant()
    return constant


def made_property(function: Any, name: str | None) -> Any:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def made_type(name: str, module: str, of: Any) -> Any:
    new: Any = typing.NewType
    made = new(name, of)
    made.__module__ = module
    return made


def made_type_variable(name: str, constraints: tuple[Any, ...], how: dict[str, Any]) -> Any:
    return typing.TypeVar(name, *constraints, **how)


def made_variable(name: str, default: tuple[Any, ...]) -> contextvars.ContextVar[Any]:
    return contextvars.ContextVar(name, default=default[0]) if default else contextvars.ContextVar(name)
