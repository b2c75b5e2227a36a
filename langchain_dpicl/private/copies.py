"""The copy of a chain in which an object has another in its place.

`copied` exchanges an object. `copy.deepcopy` leaves functions as they are, and with them their closures, defaults and
globals. `copied` copies these too: a function of the user's own gets new cells and new globals, in which every object
that code names is a copy. Models, embeddings, clients of model servers, public collections, releases, selectors and
stores stay the same objects, and so do classes with their attributes and methods.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import gc
import threading
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from types import CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from pydantic import BaseModel

from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.private import reach
from langchain_dpicl.private.reach import is_named, is_one
from langchain_dpicl.private.sources import COLLECTIONS, searches_others

SHARED_NAMES = (
    "anthropic._base_client.BaseClient",
    "google.genai.client.Client",
    "httpx._client.BaseClient",
    "jinja2.environment.Template",
    "llama_cpp.llama.Llama",
    "logging.Logger",
    "openai._base_client.BaseClient",
    "requests.sessions.Session",
    "spacy.language.Language",
    "tokenizers.Tokenizer",
    "torch.nn.modules.module.Module",
    "transformers.tokenization_utils_base.PreTrainedTokenizerBase",
    "xllamacpp.Server",
)
"""Libraries' models and compiled templates, and clients of model servers, by name. A name that becomes outdated fails
closed: such an object is copied, or refused if it cannot be."""


# -- for a chain over a collection, which has another object in its place (`retrieval.searches` alone) -----------------

_ATOMS = (
    str, bytes, int, float, complex, bool, type(None), type(...), type(NotImplemented), range, slice, type, CodeType,
    weakref.ref, property, staticmethod, classmethod, MappingProxyType, ContextVar,
)  # fmt: skip
_DESCRIPTIONS = {"typing", "typing_extensions", "pydantic", "pydantic_core", "annotated_types", "inspect", "re", "abc"}
"""Packages whose objects describe types and patterns."""

_LOCKS: dict[type, Any] = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}
_EMPTY = object.__reduce_ex__(object(), 4)[0]
"""What makes an object that holds nothing again, from its class: `copyreg.__newobj__`."""

_SHARED = (*reach.CLOSED, BaseLanguageModel)


def copied(chain: Any, instead: Iterable[tuple[object, object]] = ()) -> Any:
    """A copy of a chain, or of a tuple of objects that belong together; of each pair the one in place of the other.

    Raises `UnsafeConfigurationError`, which names the object, for what cannot be copied.
    """
    copier = _Copier()
    for item, made in instead:
        copier.put(item, made)
        if made is not item:
            copier.replaced.add(id(item))
    made = copier.of(chain)
    filled = -1
    while filled != len(copier.done):  # what modules hold under names that functions ask for
        filled = len(copier.done)
        for around, module in list(copier.modules.values()):
            copier.fill(around, module, copier.named)
    return made


class _Copier:
    def __init__(self) -> None:
        self._kept: list[Any] = []  # alive, so that no id is used twice
        self._made: dict[int, Any] = {}
        self.replaced: set[int] = set()
        """The ids of the objects that have another in their place."""
        self.modules: dict[int, tuple[dict[str, Any], ModuleType]] = {}
        """By a module's globals: these, and the copy of the module."""
        self.done: set[tuple[int, str]] = set()
        self.named: set[str] = set()
        """The attributes that copied functions name."""

    def of(self, item: Any) -> Any:
        """The copy of an object; itself if nobody writes there, or if all copies share it."""
        kind = type(item)
        if issubclass(kind, _ATOMS) and (issubclass(kind, type) or not getattr(item, "__dict__", None)):
            return item
        if id(item) in self._made:
            return self._made[id(item)]
        described = kind.__module__.partition(".")[0] in _DESCRIPTIONS
        if described or is_one(item, _SHARED) or is_named(item, SHARED_NAMES):
            return item
        if is_one(item, COLLECTIONS) and not searches_others(item) and not self._leads(item):
            return item
        try:
            return self.put(item, self._copy(item))
        except Exception as error:
            if isinstance(error, UnsafeConfigurationError):
                raise
        raise UnsafeConfigurationError(
            f"the chain reaches a {kind.__module__}.{kind.__qualname__} that cannot be copied, so that its collection "
            "cannot be exchanged for a member's own bucket: make it within the call, or put a model's client into a "
            "LangChain model"
        )

    def _leads(self, item: Any) -> bool:
        """Whether an object that is replaced can be reached from this one."""
        return bool(self.replaced) and any(id(part) in self.replaced for part in reach.reachable(item))

    def fill(self, around: dict[str, Any], module: ModuleType, names: Iterable[str]) -> None:
        """Copy what a module's globals hold under these names."""
        for name in around.keys() & set(names):
            if (id(around), name) not in self.done:
                self.done.add((id(around), name))
                vars(module)[name] = self.of(around[name])

    def put(self, item: Any, made: Any) -> Any:
        self._kept.append(item)
        self._made[id(item)] = made
        return made

    def _copy(self, item: Any) -> Any:
        kind = type(item)
        if kind in (tuple, frozenset):
            several = [self.of(each) for each in item]
            return item if all(a is b for a, b in zip(several, item, strict=True)) else kind(several)
        if kind in _LOCKS:
            return _LOCKS[kind]()
        if kind is FunctionType:
            return self._function(item)
        if kind is MethodType:
            owner = self.of(item.__self__)
            if id(item.__self__) in self.replaced:
                return getattr(owner, item.__name__)
            return MethodType(self.of(item.__func__), owner)
        if kind is CellType:
            made = self.put(item, CellType())
            for value in gc.get_referents(item):  # none, if it has no value yet
                made.cell_contents = self.of(value)
            return made
        if reach.is_cached(item):
            value = item.__wrapped__
            with contextlib.suppress(Exception):  # one that raises is asked again
                value = item() if reach.takes_nothing(item) else value
            if value is item.__wrapped__:
                return functools.lru_cache(**item.cache_parameters())(self.of(value))
            kept = self.of(value)
            code, closure = (get := lambda: kept).__code__, get.__closure__
            return functools.cache(FunctionType(code, {"__name__": str(item.__module__)}, item.__name__, None, closure))
        if isinstance(item, ModuleType):
            return item if reach.is_library(item.__name__) else self._module(vars(item))
        if isinstance(item, BaseModel):  # a user's `__reduce__` must not decide what is shared
            made = self.put(item, object.__new__(kind))
            for name in ("__dict__", "__pydantic_extra__", "__pydantic_fields_set__", "__pydantic_private__"):
                object.__setattr__(made, name, self.of(getattr(item, name, None)))
            return made
        return self._instance(item)

    def _function(self, item: FunctionType) -> Any:
        around, closure = item.__globals__, item.__closure__ or ()
        if reach.is_users(item):
            space = vars(self._module(around))
        else:
            space = around
            given = (item.__defaults__, *(item.__kwdefaults__ or {}).values(), *vars(item).values())
            if not closure and all(self.of(each) is each for each in given):
                return item
        cells = tuple(self.of(cell) for cell in closure)
        if id(item) in self._made:  # it lies in its own closure
            return self._made[id(item)]
        made = self.put(item, FunctionType(item.__code__, space, item.__name__, None, cells or None))
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(made, name, getattr(item, name))
        made.__defaults__ = self.of(item.__defaults__)
        made.__kwdefaults__ = self.of(item.__kwdefaults__)
        vars(made).update({name: self.of(value) for name, value in vars(item).items()})
        if space is not around:
            names = reach.names_in(item.__code__)
            self.named |= names.attributes
            self.fill(around, self._module(around), names.globals)
        return made

    def _module(self, around: dict[str, Any]) -> ModuleType:
        """The module whose globals functions of the copy see."""
        if id(around) not in self.modules:
            module = ModuleType(str(around.get("__name__")))
            vars(module).update(around)
            self.modules[id(around)] = around, module
        return self.modules[id(around)][1]

    def _instance(self, item: Any) -> Any:
        """As `copy.deepcopy`, but with `of` for what the object, a container for instance, holds."""
        kind = type(item)
        if hasattr(kind, "__deepcopy__"):
            return item.__deepcopy__(self._made)
        reduce = copyreg.dispatch_table.get(kind)
        reduced = item.__reduce_ex__(4) if reduce is None else reduce(item)
        if isinstance(reduced, str):
            return item
        make, arguments, state, items, entries = (*reduced, None, None, None)[:5]
        is_empty = make is _EMPTY and len(arguments) == 1 and state is items is entries is None
        if is_empty and (reach.is_library(kind.__module__) or not hasattr(item, "__dict__")):
            return item  # it holds nothing: what makes it known is which object it is
        arguments = [self.of(each) for each in arguments]
        if id(item) in self._made:  # it lies in its own arguments
            return self._made[id(item)]
        made = self.put(item, make(*arguments))
        state = self.of(state)
        if hasattr(made, "__setstate__") and state is not None:
            made.__setstate__(state)
        elif state is not None:
            fields, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
            if fields:
                made.__dict__.update(fields)
            for name, value in (slots or {}).items():
                object.__setattr__(made, name, value)
        for each in list(items or ()):
            made.append(self.of(each))
        for key, value in list(entries or ()):
            made[self.of(key)] = self.of(value)
        return made
