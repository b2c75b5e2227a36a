"""A copy of a chain for each call: nothing that one call writes can be read by another.

A chain is pickled once, by cloudpickle with reducers of our own, and each call, private or public, loads a copy. A copy
has its own objects, functions, closures, defaults, classes and modules of the user's code (see `origins`), and its own
``builtins``. So what a call writes into any of them ends with it: there is no form to look for.

Shared by all copies, and that is all (`Pristine.shared` lists it):

* what cannot be written: code, long texts, ``object()``;
* models and embeddings whose class comes from an installed library, weights, HTTP clients, compiled templates, loggers,
  unless they hold functions or objects of the user's own, however deep: then these have a copy, too, or are refused;
* public collections, and what ``share`` names;
* installed libraries' modules, with their classes, functions and type variables and what code finds through them (by
  ``sys.modules``, ``typing.get_type_hints``, ``copyreg``), and what C extensions and the system keep.

Refused, with the part's name: what cannot be pickled (locks, files, sockets, generators, connections), code of an
installed distribution that the user has neither shared nor isolated, and what no call may reach (see `pickling`). What
a chain finds by ways that a copy does not exchange is shut while a call runs (see `calls.shut`).

cloudpickle itself keeps the classes that it loads by value, so that two loads of one pickle, and the original, share a
class and what is written on it. Here every copy makes its own. What leaves a call is made anew with the caller's
classes, none of whose code runs for that (`Copy.returned`).
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import io
import operator
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import resolve_name
from itertools import chain as chain_of
from types import CodeType, FunctionType, ModuleType, UnionType
from typing import Any, Literal, get_args, get_origin

from langchain_core.runnables import Runnable
from pydantic import BaseModel

from langchain_dpicl.calls import shut
from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.private.loading import Unpickler, fill
from langchain_dpicl.private.origins import Origins, home, top
from langchain_dpicl.private.pickling import TYPES, Pickler, is_nameless, name_of
from langchain_dpicl.private.reach import reachable

_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})
_CONTAINERS = frozenset({list, tuple, set, frozenset, deque, dict, OrderedDict})
_LARGE = 1 << 22
"""From this size of a pickle on a warning says that each call copies so much, in bytes."""


class Copy:
    """One call's copy of a chain."""

    def __init__(self, pristine: Pristine, bucket: Sequence[dict[str, Any]]) -> None:
        self.chain: Any = None
        self.bucket = bucket
        """What the chain's stand-ins for private collections and selectors give."""
        self.shared = pristine.items
        self._pristine = pristine
        self._origins = pristine.origins
        self._originals = pristine.classes
        self._original: dict[type, type] = {}
        self._modules: dict[str, ModuleType] = {}
        self._exchanged = 0
        self.late: list[tuple[type, str, Any]] = []
        """Hooks of the user's classes, which are set when all classes are made: none of them runs for a copy."""
        self._builtins = ModuleType("builtins", builtins.__doc__)
        vars(self._builtins).update(vars(builtins), __import__=_importing(self._modules, self._builtins, self._origins))

    def module(self, name: str, package: str | None, file: str | None) -> ModuleType:
        """This copy's module of that name, with its own builtins."""
        made = ModuleType(name)
        vars(made).update(__builtins__=vars(self._builtins), __package__=package, __file__=file)
        self._modules.setdefault(name, made)
        return made

    def adopt(self, made: type, index: int) -> type:
        """Keep in mind which class a class of this copy stands for."""
        self._original[made] = self._originals[index]
        return made

    def has_made(self, kind: type) -> bool:
        """Return whether a class is one of this copy's own."""
        return kind in self._original

    def own(self, name: str) -> Any:
        """This copy itself, or its builtins."""
        return self if name == "copy" else self._builtins

    def given(self, value: Any) -> Any:
        """Return an input of a call, with this copy's classes in the place of the caller's."""
        return self._mapped(value, dict(zip(self._original.values(), self._original, strict=True)))

    def returned(self, value: Any) -> Any:
        """Return an output of a call, made anew with the caller's classes. Raises `TypeError` if it cannot be."""
        return self._mapped(value, self._original)

    def _mapped(self, value: Any, to: dict[type, type]) -> Any:
        """The same with other classes, none of whose code runs. A library's object that holds none stays as it is."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind in _CONTAINERS:
            return self._container(value, kind, to)
        is_model = BaseModel in kind.__mro__
        if kind in to:
            return self._made(value, to[kind], to)
        if is_model and (exchanged := _exchanged(kind, to)) is not kind:
            return self._made(value, exchanged, to)
        if to is self._original:
            if kind.__module__ in self._modules:
                raise TypeError("an object of a class that was made within the call")
        elif self._is_own(kind.__module__) or is_nameless(kind):  # else all calls would share its class
            if any(base in to for base in kind.__mro__):
                raise TypeError("an object of a class made from one of the chain's: name its class in the chain, too")
            self._add(self._pristine.of_class(kind).copy(), to)
            return self._made(value, to[kind], to)
        if tuple in kind.__mro__:
            return tuple.__new__(kind, [self._mapped(each, to) for each in value])
        if is_model:  # a library's: a message, a document
            before = self._exchanged
            made = self._model(kind, value, to)
            return value if self._exchanged == before else made
        if to is not self._original and any(map(self._is_own, _homes(value))):
            raise TypeError(f"a {kind.__name__} that holds an object of the caller's own")
        return value

    def _container(self, value: Any, kind: Any, to: dict[type, type]) -> Any:
        made: list[Any] = []
        if kind is dict or kind is OrderedDict:
            for key, each in value.items():
                made.append((self._mapped(key, to), self._mapped(each, to)))
            return kind(made)
        for each in value:
            made.append(self._mapped(each, to))
        return deque(made, value.maxlen) if kind is deque else kind(made)

    def _is_own(self, module: object) -> bool:
        return self._origins.by_reference(module) is False

    def _add(self, other: Copy, to: dict[type, type]) -> None:
        """Have the classes of another copy, too: the chain does not name them."""
        self._original.update(other._original)
        to.update({original: made for made, original in other._original.items() if original not in to})

    def _made(self, value: Any, kind: Any, to: dict[type, type]) -> Any:
        self._exchanged += 1
        if isinstance(value, enum.Enum):
            if value.name not in kind._member_map_:
                raise TypeError("a combination of flags")
            return kind._member_map_[value.name]
        if isinstance(value, tuple):
            return tuple.__new__(kind, [self._mapped(each, to) for each in value])
        if isinstance(value, BaseModel):
            return self._model(kind, value, to)
        made: Any = object.__new__(kind)
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                object.__setattr__(made, field.name, self._mapped(getattr(value, field.name), to))
        else:
            raise TypeError("an object of a class of the chain's own")
        return made

    def _model(self, kind: type, value: BaseModel, to: dict[type, type]) -> Any:
        made: Any = object.__new__(kind)
        for name in ("__dict__", "__pydantic_extra__", "__pydantic_private__"):
            object.__setattr__(made, name, self._mapped(getattr(value, name), to))
        object.__setattr__(made, "__pydantic_fields_set__", set(value.__pydantic_fields_set__))
        return made


def _homes(value: Any) -> Iterator[object]:
    """The modules of the classes and functions that a library's object, or a function, reaches."""
    if top(type(value).__module__) == "langchain_dpicl":
        return
    for each in chain_of([value], reachable(value)):
        if isinstance(each, ModuleType):
            yield each.__name__
        elif isinstance(each, FunctionType):
            yield home(each)
        else:
            yield (each if isinstance(each, type) else type(each)).__module__


def _exchanged(kind: Any, to: dict[type, type]) -> Any:
    """A class, or a description of values as ``list[Tree]``, with other classes."""
    generic = getattr(kind, "__pydantic_generic_metadata__", {})
    origin = generic.get("origin") or get_origin(kind)
    arguments = generic.get("args") or get_args(kind)
    if not origin or origin is Literal:
        return to.get(kind, kind) if isinstance(kind, type) else kind
    found = tuple(_exchanged(each, to) for each in arguments)
    if origin not in to and all(map(operator.is_, found, arguments)):
        return kind
    if origin is UnionType:
        return functools.reduce(operator.or_, found)
    return operator.getitem(to.get(origin, origin), found)


def _importing(modules: dict[str, ModuleType], own: ModuleType, origins: Origins) -> Callable[..., Any]:
    """``import`` in a copy's code: the user's own modules are this copy's, or are not there."""

    def import_(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        path = resolve_name("." * level + name, (globals or {}).get("__package__") or "") if level else name
        if path == "builtins":
            return own
        if path in modules:
            for each in fromlist or ():
                inner = modules.get(f"{path}.{each}")
                if inner is not None:
                    vars(modules[path]).setdefault(each, inner)
                elif not hasattr(modules[path], each):
                    raise ImportError(f"{path}.{each} is not in this call's copy of the chain")
            return modules[path if fromlist else top(path)]
        if not origins.by_reference(path):
            raise ImportError(f"{path} is not in this call's copy of the chain: import it where the chain is made")
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    return import_


class Pristine:
    """A chain as it was when it was given, of which every call has a copy.

    Parameters
    ----------
    chain
        A Runnable, or a tuple of objects that belong together.
    share
        Objects that all copies share, and names of installed packages whose code they share.
    public
        The collections that it may search. All copies share them.
    instead
        Pairs: an object, wherever the chain has it, and what copies have in its place.
    isolate
        Names of installed packages whose code every copy has of its own.
    found
        A list that gets the other collections that the chain searches. They are then not refused.

    Raises `UnsafeConfigurationError` for what cannot be copied, and for what no call may reach (see `pickling`).
    """

    __slots__ = (
        "_data",
        "_known",
        "_modules",
        "_of_classes",
        "_records",
        "_share",
        "chain",
        "classes",
        "items",
        "models",
        "origins",
        "searches",
    )

    def __init__(
        self,
        chain: Any,
        *,
        share: Iterable[object] = (),
        public: Sequence[object] = (),
        instead: Sequence[tuple[object, object]] = (),
        isolate: Iterable[str] = (),
        found: list[Any] | None = None,
    ) -> None:
        share = tuple(share)
        names = [each for each in share if isinstance(each, str)]
        self.origins = Origins(names, isolate, _own_modules(chain))
        self._share = [each for each in share if not isinstance(each, str)]
        self._pickle(chain, public, instead, found)

    def _pickle(
        self,
        chain: Any,
        public: Sequence[object] = (),
        instead: Sequence[tuple[object, object]] = (),
        found: list[Any] | None = None,
    ) -> None:
        self._of_classes: dict[type, Pristine] = {}
        self._known: dict[tuple[str, str], Any] = {}
        attributes: set[str] = set()
        imports: set[str] = set()
        while True:  # until no more names of modules' attributes are found in functions that are in the copy
            listed = None if found is None else list[Any]()
            pickler = Pickler(self.origins, self._share, public, instead, attributes, listed)
            held = chain, [pickler.module(name) for name in sorted(imports) if pickler.is_own(name)]
            data = shut.within(pickler.of, held)  # which runs code of the user's: reducers, cached functions
            if pickler.attributes <= attributes and pickler.imports <= imports:
                break
            attributes |= pickler.attributes
            imports |= pickler.imports
        if found is not None:
            found += listed or ()
        self.chain = chain
        """As it was given. Nothing calls it."""
        self._data = data
        self.items = pickler.shared
        self.classes = pickler.classes
        self._modules = sorted(pickler.modules)
        self._records = pickler.records
        self.models = pickler.models
        """The chain's models, those included of which each call has a copy."""
        self.searches = pickler.searches
        """Whether the chain searches the member's own bucket."""
        if len(data) > _LARGE:
            warnings.warn(
                f"each call has its own copy of the chain, and of {len(data) >> 20} MB that it holds: large tables "
                "that no call writes into can be shared, share=[table]",
                stacklevel=2,
            )
        try:
            shut.within(self.copy)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            return
        raise UnsafeConfigurationError(f"no call can have a copy of the chain of its own: loading one raises {reason}")

    def copy(self, bucket: Sequence[dict[str, Any]] = ()) -> Copy:
        """A copy for a call with this bucket. It shares nothing with another but what `shared` lists."""
        made = Copy(self, bucket)
        unpickler = Unpickler(io.BytesIO(self._data), made, self.origins, self._known)
        made.chain, _ = unpickler.load()
        for _ in range(self._records):
            fill(*unpickler.load())
        for kind, name, hook in made.late:
            type.__setattr__(kind, name, hook)
        return made

    def of_class(self, kind: type) -> Pristine:
        """A class that calls are given objects of, to be copied as this chain is."""
        if kind not in self._of_classes:
            made = object.__new__(Pristine)
            made.origins = self.origins
            made._share = self._share
            made._pickle(kind)
            self._of_classes[kind] = made
        return self._of_classes[kind]

    @property
    def size(self) -> int:
        """Of the pickle, in bytes."""
        return len(self._data)

    def shared(self) -> Isolation:
        """Report what copies share, and of what code they have their own."""
        marks = (CodeType, str, bytes, type, *TYPES)
        objects = {name_of(each) for each in self.items if type(each) is not object and not isinstance(each, marks)}
        return Isolation(tuple(self._modules), tuple(sorted(objects)), tuple(self.origins.shared))


@dataclasses.dataclass(frozen=True)
class Isolation:
    """A report of what copies of a chain have of their own, and what they share. ``print`` it.

    Attributes
    ----------
    copied
        The modules of whose code every call has its own, as far as the chain names it.
    objects
        The classes of the objects that all calls share: models, embeddings, clients, public collections, what
        ``share`` names.
    packages
        The installed packages whose modules and classes all calls share.
    """

    copied: tuple[str, ...]
    objects: tuple[str, ...]
    packages: tuple[str, ...]

    def __str__(self) -> str:
        rows = (
            ("every call has its own", self.copied),
            ("all calls share", self.objects),
            ("all calls share what these keep in modules and classes", self.packages),
        )
        return "\n".join(f"{title}: {', '.join(names) or 'nothing'}" for title, names in rows)


def _own_modules(chain: Any) -> Iterator[str]:
    """The modules in which a chain's own functions and classes are defined: those in its fields, not deeper."""
    waiting = [chain]
    seen: dict[int, Any] = {}
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, FunctionType):
            yield home(item)
        elif isinstance(item, functools.partial):
            waiting += [item.func, *item.args, *item.keywords.values()]
        elif hasattr(item, "__func__"):
            waiting += [item.__func__, item.__self__]
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif type(item) is dict:
            waiting += item.values()
        elif isinstance(item, (Runnable, BaseModel)):
            yield type(item).__module__
            waiting += vars(item).values()
        elif not isinstance(item, type):
            yield type(item).__module__
