"""The pickle of a chain, of which its copies are made: reducers beside cloudpickle's.

What a pickle shares by identity it has as an index into a list (`Pickler.shared`); `copy` says what that is, and why.

No call may reach private records, a ledger, a release, a collection that nobody calls public, or what would show or
keep text. The pickler meets every object and every class that a copy holds, at any depth, and refuses these by name. A
selector is exchanged for what gives the call's own bucket.
"""

from __future__ import annotations
import __future__

import builtins
import contextlib
import contextvars
import dataclasses
import enum
import functools
import gc
import importlib
import io
import operator
import pickle
import re
import sys
import threading
import types
import typing
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from importlib.util import resolve_name
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as reducers
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStore

from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.private import Closed, OwnBucket, PrivateRecords, Withheld
from langchain_dpicl.private.loading import (
    OWN,
    Own,
    fill_class,
    fill_enum,
    fill_function,
    fill_object,
    made_cached,
    made_class,
    made_constant,
    made_descriptor,
    made_function,
    made_property,
    made_reference,
    made_schema,
    made_space,
    made_stand_in,
    made_type,
    made_type_variable,
    made_variable,
    same,
    skeleton,
)
from langchain_dpicl.private.origins import SHARED_NAMES, Origins, home, top
from langchain_dpicl.private.reach import fields_of, held_by, is_named, is_one, names_in, reachable, takes_nothing
from langchain_dpicl.private.sealing import check_part
from langchain_dpicl.private.sources import AROUND, COLLECTIONS, instead_of, is_collection, is_of, parts_of

_LONG = 65_536
"""From this size on texts are shared. No bytes and no arrays: numpy writes into the bytes of a pickle."""

_ATOMS = frozenset({int, float, complex, bool, type(None), type(...), str, bytes})
_PLAIN = frozenset({int, float, complex, bool, type(None), tuple, list, dict, set, frozenset})
_DESCRIPTIONS = frozenset({"__annotations__", "__dataclass_fields__"})
"""Attributes in which classes and functions name classes, and which no object needs in order to be made. They follow
after all else, lest the stack grow with a chain of classes that name each other."""
_STATELESS = ("random.SystemRandom", "pydantic._internal._namespace_utils.NsResolver")
"""A copy has a new one. The second one would hold all variables of the function around a decorated one."""
_SCHEMAS = ("pydantic_core._pydantic_core.SchemaValidator", "pydantic_core._pydantic_core.SchemaSerializer")
_LOGGERS = ("logging.Logger", "logging.Manager", "logging.LoggerAdapter")
_TEMPLATES = ("jinja2.environment.Template",)
_OF_MEMBERS = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"})
_OF_MODULES = frozenset({"__builtins__", "__spec__", "__loader__", "__name__", "__package__", "__file__", "__cached__"})
TYPES = (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple)
_HEAP = 1 << 9
"""Of a class: made by a ``class`` statement, so that it can be written."""
_CACHED = type(functools.cache(lambda: None))

_TYPED = getattr(typing, "_TypedDictMeta", None)
_SLOTTED = getattr(dataclasses, "_dataclass_setstate", object())
"""How a frozen data class with slots takes its state."""

_KEEPERS = (
    threading.local,
    weakref.ref,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    contextvars.ContextVar,
)


class _Space:
    """In a pickle: the globals of the user's functions, by their own dictionary."""

    def __init__(self, around: dict[str, Any]) -> None:
        self.around = around


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # without types
    """The pickle of one chain.

    ``instead`` are pairs: an object, and what copies have in its place. With ``found`` other collections are not
    refused, but listed there.
    """

    def __init__(
        self,
        origins: Origins,
        share: Sequence[object],
        public: Sequence[object],
        instead: Sequence[tuple[object, object]],
        attributes: set[str],
        found: list[Any] | None = None,
    ) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self._origins = origins
        self._given = share, public, instead
        self._found = found
        self._instead = {id(part): made for part, made in instead}
        self._user = {id(each) for each in (*share, *public)}
        self._user |= {id(kind) for each in share for kind in type(each).__mro__}  # else it would be no instance of it
        self._public = {id(each): each for each in parts_of(public)}
        self._met: dict[int, Any] = {}
        self._harmless: set[type] = set()
        self._fine: set[type] = set()
        self._named: set[int] = set()  # what code names, so that it may make objects of these classes
        self._of_parts: set[type] = set()
        self._replaces = False
        self.models: list[Any] = []
        self.searches = False
        """Whether a vector store is met that searches the member's own bucket."""
        self._wanted = attributes
        self.attributes: set[str] = set()
        """Names that functions in the pickle ask modules for."""
        self.imports: set[str] = set()
        self.modules: set[str] = set()
        self.shared: list[Any] = []
        self.classes: list[type] = []
        self._index: dict[int, int] = {}
        self._spaces: dict[int, _Space] = {}
        self._kept: list[Any] = []
        self._schemas: dict[int, tuple[Any, Any]] = {}
        self._last: Any = None
        self._held: set[tuple[int, str]] = set()
        self._waiting: deque[tuple[Any, dict[str, Any]]] = deque()
        self.records = 0
        """How many pickles follow the first: of what modules hold, one after another, lest the stack grow with them."""
        self._nowhere = ModuleType("nowhere")

    def of(self, item: Any) -> bytes:
        """The pickle. Raises `UnsafeConfigurationError`, which names the part that cannot be in it."""
        try:
            self.dump(item)
            while self._waiting:
                self.dump(self._waiting.popleft())
                self.records += 1
            self._check_classes()
        except UnsafeConfigurationError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            return self._file.getvalue()
        raise UnsafeConfigurationError(self._refusal(reason))

    def _refusal(self, reason: str) -> str:
        failed = self._last
        holder = next((each for each in reversed(self._kept) if each is not failed and _holds(each, failed)), None)
        where = "" if holder is None else f" of {getattr(holder, '__qualname__', None) or name_of(holder)}"
        return (
            f"the chain reaches a {name_of(failed)}{where}, of which no call can have a copy of its own ({reason}). "
            "Make it within the call, put a model's client into a LangChain model, or, if it holds nothing of "
            "questions, examples and answers, let all calls share it: share=[...]"
        )

    # -- by identity ---------------------------------------------------------------------------------------------------

    def persistent_id(self, obj: Any) -> Any:
        """An index into what is shared, the name of what a copy has by itself, or None."""
        kind = type(obj)
        if kind in _PLAIN:
            return self._put(obj) if id(obj) in self._user else None
        if id(obj) in self._instead:
            self._replaces = True
            return None
        self._meet(obj, kind)
        if kind is str:
            return self._put(obj) if len(obj) > _LONG else None
        if id(obj) in self._index:
            return self._index[id(obj)]
        if obj is builtins:
            return "builtins"
        if kind is Own:
            return "copy"
        if kind is type and not obj.__flags__ & _HEAP:
            return None if reducers._lookup_module_and_qualname(obj) else self._put(obj)
        if issubclass(kind, type) or kind is FunctionType or kind is ModuleType:
            return self._put(obj) if id(obj) in self._user else None
        if issubclass(kind, OwnBucket):
            return None
        return self._put(obj) if id(obj) in self._user or self._is_shared(obj, kind) else None

    def _put(self, obj: Any) -> int:
        found = self._index.get(id(obj))
        if found is None:
            found = self._index[id(obj)] = len(self.shared)
            self.shared.append(obj)
        return found

    def _is_shared(self, obj: Any, kind: type) -> bool:
        if kind is CodeType:
            return _is_plain(obj)
        if kind is object:
            return True
        if issubclass(kind, TYPES) or kind is _CACHED:
            return self._by_name(obj)
        if issubclass(kind, Closed):
            return True
        if not (self._origins.by_reference(kind.__module__) and self._by_name(kind)) or self._holds_own(obj):
            return False
        if is_one(obj, (BaseLanguageModel, Embeddings)) or is_named(obj, SHARED_NAMES) or _is_mark(obj, kind):
            return True
        return id(obj) in self._public and not is_named(obj, AROUND)

    def _holds_own(self, obj: Any) -> bool:
        """Return whether a library's object has the user's own code in its fields.

        It would run on what all calls share.
        """
        held = fields_of(obj)
        functions = [getattr(each, "__func__", each) for each in held]
        homes = {home(each) for each in functions if isinstance(each, FunctionType)}
        if is_named(obj, _TEMPLATES):
            homes.discard("")  # what a template is compiled to
        if any(map(self.is_own, homes)):
            return True
        if any(is_one(each, Runnable) and self.is_own(type(each).__module__) for each in held):
            return True
        return not is_one(obj, COLLECTIONS) and not is_named(obj, (*_TEMPLATES, *_LOGGERS)) and self._reaches_own(obj)

    def _reaches_own(self, obj: Any) -> bool:
        """The same, however deep: in partials, callable objects, hooks of a client."""
        waiting = gc.get_referents(obj)
        seen = {id(obj): obj}
        while waiting:
            each = waiting.pop()
            kind = type(each)
            if id(each) in seen or kind in _ATOMS or id(each) in self._user or is_named(each, _LOGGERS):
                continue
            seen[id(each)] = each
            if kind is CodeType:
                continue
            if issubclass(kind, (type, ModuleType)):
                if self._origins.by_reference(each.__module__ if issubclass(kind, type) else each.__name__) is False:
                    return True
                continue
            if self._origins.by_reference(home(each) if kind is FunctionType else kind.__module__) is False:
                return True
            if kind is FunctionType:
                waiting += (each.__closure__, each.__defaults__, each.__kwdefaults__, vars(each))
            else:
                waiting += gc.get_referents(each)
        return False

    # -- what no call may reach ----------------------------------------------------------------------------------------

    def _meet(self, obj: Any, kind: type) -> None:
        """Raise `UnsafeConfigurationError` for what no call may reach."""
        if kind in self._harmless or id(obj) in self._met:
            return
        self._met[id(obj)] = obj
        if issubclass(kind, Withheld):
            article = "an" if kind.__name__[0] in "AEIOU" else "a"
            raise UnsafeConfigurationError(f"the chain reaches {article} {kind.__name__}: {obj.withheld}")
        if issubclass(kind, OwnBucket):
            self.searches |= issubclass(kind, VectorStore)
            held = [each for each in vars(obj).values() if is_one(each, Embeddings)]
            self._met.update((id(each), each) for each in held)  # the store's model, which may keep records' vectors
            self._of_parts.update(kind.__mro__)
            return
        check_part(obj)
        if issubclass(kind, type):
            return  # of collections and stores when all is met: see `_check_classes`
        if is_collection(obj):
            if id(obj) not in self._public and not is_named(obj, AROUND) and not self._searches_bucket(obj, kind):
                if self._found is None:
                    raise UnsafeConfigurationError(other_collection(obj))
                self._found.append(obj)
                self._put(obj)
                return
            self._fine.update(kind.__mro__)
        elif issubclass(kind, BaseLanguageModel):
            self.models.append(obj)
            for each in fields_of(obj):
                if is_one(each, Runnable):
                    self._meet(each, type(each))
        elif not issubclass(kind, Runnable):
            self._harmless.add(kind)

    def _searches_bucket(self, obj: Any, kind: type) -> bool:
        """Return whether a retriever of the user's own searches the member's bucket, and so no other collection."""
        if not issubclass(kind, BaseRetriever) or not self.is_own(kind.__module__):
            return False
        inner = Pickler(self._origins, *self._given, self._wanted, None if self._found is None else [])
        inner._met[id(obj)] = obj
        inner._of_parts.update(kind.__mro__)
        inner.of(obj)
        is_own = any(is_one(each, OwnBucket) for each in inner._met.values())
        return is_own or inner._replaces or bool(inner._found)

    def _check_classes(self) -> None:
        """Raise `UnsafeConfigurationError` for a class by which a call would make a collection, or open a store."""
        for each in self._met.values():
            if not is_one(each, type) or each in self._of_parts:
                continue
            if each not in self._fine or id(each) in self._named:
                if is_of(each, (PrivateRecords,)):
                    raise UnsafeConfigurationError(f"the chain reaches the class {each.__name__}: {each.withheld}")
                if is_collection(each) and not is_of(each, (), AROUND):
                    raise UnsafeConfigurationError(other_collection(each))

    def _excuse(self, annotations: Iterable[Any]) -> None:
        """Classes that stand in annotations are not made."""
        waiting = list(annotations)
        while waiting:
            each = waiting.pop()
            if is_one(each, type):
                self._fine.update(getattr(each, "__mro__", ()))
            waiting += typing.get_args(each)

    # -- by value ------------------------------------------------------------------------------------------------------

    def is_own(self, module: object) -> bool:
        """Return whether a copy has its own of a module's code. Raises for code that is neither shared nor isolated."""
        found = self._origins.by_reference(module)
        if found is None:
            package = top(module)
            raise UnsafeConfigurationError(
                f"the chain uses {package}, an installed package. Say whether calls may share what it keeps in its "
                f'modules and classes, share=["{package}"], or have their own of it, isolate=["{package}"]'
            )
        return not found

    def reducer_override(self, obj: Any) -> Any:
        """Describe the making of a copy of an object."""
        kind = type(obj)
        self._last = obj
        self._kept.append(obj)
        if id(obj) in self._instead:
            return same, (self._instead[id(obj)],)
        if issubclass(kind, type):
            return self._class(obj)
        if kind is FunctionType:
            return self._function(obj)
        if kind is _Space:
            return self._space(obj)
        if kind is ModuleType or issubclass(kind, ModuleType):
            return self._module(obj)
        if kind is _CACHED:
            return self._cached(obj)
        if issubclass(kind, _KEEPERS):
            return self._keeper(obj, kind)
        if issubclass(kind, OwnBucket):
            made = obj.in_call()
            return made_stand_in, (OWN, type(made)), vars(made) or None
        if kind is functools.cached_property:
            return made_property, (obj.func, obj.attrname)
        if kind is typing.NewType:
            return made_type, (obj.__name__, obj.__module__, obj.__supertype__)
        if issubclass(kind, TYPES):
            return self._variable(obj, kind)
        if is_named(obj, _STATELESS):
            return kind, ()
        if is_named(obj, _SCHEMAS):
            made, (schema, *settings) = obj.__reduce__()
            return made_schema, (_classes_in(schema), made, self._of_schemas(schema), settings)
        if issubclass(kind, contextlib._GeneratorContextManagerBase) and "args" in vars(obj):  # it was never entered
            return kind, (obj.func, obj.args, obj.kwds)
        if issubclass(kind, property):
            arguments = (kind, (obj.fget, obj.fset, obj.fdel, obj.__doc__))
            return made_descriptor, arguments, getattr(obj, "__dict__", None)
        if getattr(kind, "__setstate__", None) is _SLOTTED:  # which asks a class of the copy
            state = {each.name: getattr(obj, each.name) for each in dataclasses.fields(obj)}
            return object.__new__, (kind,), (None, state), None, None, fill_object
        if _has_fallback(kind):
            return *obj.__reduce_ex__(4), fill_object
        if issubclass(kind, (MethodType, BuiltinMethodType)) and (found := self._library_method(obj)) is not None:
            return getattr, found
        if issubclass(kind, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr, sys.stdin):
            raise TypeError("an open file")
        return NotImplemented

    def _class(self, obj: Any) -> Any:
        if obj in reducers._BUILTIN_TYPE_NAMES or obj in (type(None), type(...), type(NotImplemented)):
            return reducers._class_reduce(obj)
        generic = vars(obj).get("__pydantic_generic_metadata__")
        if generic and generic["origin"] is not None:  # pydantic keeps one class for the same arguments
            return operator.getitem, (generic["origin"], generic["args"])
        if not self.is_own(obj.__module__):
            if self._by_name(obj):
                return NotImplemented
        else:
            self.modules.add(str(obj.__module__))
        self._excuse(vars(obj).get("__annotations__", {}).values())
        self._excuse(field.annotation for field in getattr(obj, "__pydantic_fields__", {}).values())
        maker, arguments, state, _, _, setter = reducers._dynamic_class_reduce(obj)
        arguments = (*arguments[:-2], None, None)  # no class of another copy, and none that cloudpickle keeps
        if maker is reducers._make_skeleton_class:
            self._put_off(obj, state[0])
            maker = skeleton
            arguments = _with_slots(arguments, state[0])
            state = (OWN, state)
            setter = fill_class
        self.classes.append(obj)
        if issubclass(obj, enum.Enum):  # with aliases, and with what members have beside their values
            arguments = (*arguments[:3], {name: each.value for name, each in obj.__members__.items()}, *arguments[4:])
            for name in obj.__members__:
                state[0].pop(name, None)
            own = {
                name: {k: v for k, v in vars(each).items() if k not in _OF_MEMBERS}
                for name, each in obj.__members__.items()
            }
            state = (state, own)
            setter = fill_enum
        return made_class, (OWN, len(self.classes) - 1, maker, arguments), state, None, None, setter

    def _function(self, obj: FunctionType) -> Any:
        around = vars(sys.modules.get(home(obj), self._nowhere))
        is_own = obj.__globals__ is not around or self.is_own(home(obj))
        if not is_own and self._by_name(obj):
            return NotImplemented
        state = {
            "__name__": obj.__name__,
            "__qualname__": obj.__qualname__,
            "__module__": obj.__module__,
            "__doc__": obj.__doc__,
            "__defaults__": obj.__defaults__,
            "__kwdefaults__": obj.__kwdefaults__,
            "__annotations__": obj.__annotations__,
        }
        if is_own:
            names = names_in(obj.__code__)
            annotated = _annotated(obj)
            self._excuse(obj.__globals__.get(name) for name in annotated - names.globals)
            self._excuse(obj.__annotations__.values())
            self._named |= {id(obj.__globals__[name]) for name in names.globals & obj.__globals__.keys()}
            self._hold(obj.__globals__, names.globals | annotated)
            self.attributes |= names.attributes
            package = obj.__globals__.get("__package__") or ""
            for path in names.modules:
                self._imported(path, package)
        self._put_off(obj, state)
        space = self._space_of(obj.__globals__) if is_own else sys.modules[home(obj)]
        arguments = (obj.__code__, space, obj.__name__, len(obj.__closure__ or ()))
        cells = [reducers._get_cell_contents(cell) for cell in obj.__closure__ or ()]
        return made_function, arguments, (state, dict(vars(obj)), cells), None, None, fill_function

    def _of_schemas(self, schema: Any) -> Any:
        """A validator's schema, of which nothing but validators has a part: what else has one holds classes."""
        kind = type(schema)
        if kind not in (dict, list, tuple):
            return schema
        if id(schema) not in self._schemas:
            if kind is dict:
                made = {key: self._of_schemas(each) for key, each in schema.items()}
            else:
                made = kind(map(self._of_schemas, schema))
            self._schemas[id(schema)] = schema, made
        return self._schemas[id(schema)][1]

    def _put_off(self, obj: Any, attributes: dict[str, Any]) -> None:
        """Take these of a class's or a function's attributes out, and have them in a pickle that follows."""
        if late := {name: attributes.pop(name) for name in sorted(_DESCRIPTIONS & attributes.keys())}:
            self._waiting.append((obj, late))

    def _by_name(self, obj: Any) -> bool:
        """Return whether an object is found by its name in a module that copies share."""
        found = reducers._lookup_module_and_qualname(obj)
        return found is not None and self._origins.by_reference(found[0].__name__) is True

    def _imported(self, path: str, package: str) -> None:
        try:
            name = resolve_name(path, package)
        except ImportError:
            return
        if self._origins.by_reference(name):
            return
        with contextlib.suppress(Exception):  # a name of a module, not a module; or one that is not there
            importlib.import_module(name)
        while name:
            if isinstance(sys.modules.get(name), ModuleType):
                self.imports.add(name)
            name = name.rpartition(".")[0]

    def module(self, name: str) -> ModuleType:
        """A module that the chain's functions import."""
        return sys.modules[name]

    def _hold(self, around: dict[str, Any], names: Iterable[str]) -> None:
        """Have these names of a module's in the copy."""
        fresh = [name for name in sorted(names) if name in around and (id(around), name) not in self._held]
        self._held |= {(id(around), name) for name in fresh}
        if held := {name: around[name] for name in fresh if name != "__builtins__"}:
            self._waiting.append((self._space_of(around), held))

    def _space_of(self, around: dict[str, Any]) -> _Space:
        if id(around) not in self._spaces:
            self._spaces[id(around)] = _Space(around)
        return self._spaces[id(around)]

    def _space(self, obj: _Space) -> Any:
        name = str(obj.around.get("__name__") or "")
        self.modules.add(name)
        return made_space, (OWN, name, obj.around.get("__package__"), obj.around.get("__file__"))

    def _module(self, obj: ModuleType) -> Any:
        if sys.modules.get(obj.__name__) is obj and not self.is_own(obj.__name__):
            return reducers.subimport, (obj.__name__,)
        around = vars(obj)
        wanted = (self._wanted | {"__getattr__"}) & around.keys() - _OF_MODULES
        self._hold(around, wanted)
        return same, (self._space_of(around),)

    def _cached(self, obj: Any) -> Any:
        """A cached function without arguments is its value, unless records or a bucket may have a part in it."""
        if takes_nothing(obj) and not any(is_one(each, (Withheld, OwnBucket)) for each in reachable(obj.__wrapped__)):
            with contextlib.suppress(Exception):  # else each call asks anew
                return made_constant, (obj(),)
        return made_cached, (obj.cache_parameters(), obj.__wrapped__)

    def _variable(self, obj: Any, kind: type) -> Any:
        if kind is not typing.TypeVar:
            return kind, (obj.__name__,)
        how = {"covariant": obj.__covariant__, "contravariant": obj.__contravariant__, "bound": obj.__bound__}
        return made_type_variable, (obj.__name__, obj.__constraints__, how)

    def _library_method(self, obj: Any) -> tuple[ModuleType, str] | None:
        """A method of an object that a library keeps, as ``random.random``: its module and name there."""
        home = str(type(obj.__self__).__module__)
        if isinstance(obj.__self__, (ModuleType, type)) or home not in sys.modules or self.is_own(home):
            return None
        module = sys.modules[home]
        name = str(obj.__name__)
        return (module, name) if vars(module).get(name) is obj else None

    def _keeper(self, obj: Any, kind: type) -> Any:
        if kind is threading.local:
            return threading.local, ()
        if kind is contextvars.ContextVar:
            return made_variable, (obj.name, contextvars.Context().run(_default, obj))
        if kind is weakref.ref:
            return made_reference, (obj(),)
        if kind in (weakref.WeakKeyDictionary, weakref.WeakValueDictionary):
            return kind, (dict(obj),)
        return NotImplemented


def _default(variable: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    try:
        return (variable.get(),)
    except LookupError:
        return ()


def is_nameless(kind: type) -> bool:
    """Return whether a class was made by code and does not stand under its name in the module that it names."""
    return bool(kind.__flags__ & _HEAP) and reducers._lookup_module_and_qualname(kind) is None


def name_of(item: Any) -> str:
    """The full name of an object's class."""
    return f"{type(item).__module__}.{type(item).__qualname__}"


def other_collection(part: Any) -> str:
    """Why no call may reach a collection, and what helps."""
    name = part.__name__ if is_one(part, type) else type(part).__name__
    return (
        f"the chain reaches a {name}: every member would search the same documents there, so that one owner would "
        f"reach every answer. If nobody's private text is in it, name it: public=[...]. {instead_of(part)}"
    )


def _is_mark(obj: Any, kind: type) -> bool:
    """Return whether an object is a mark of its library's, which holds nothing and is compared by identity."""
    if getattr(obj, "__dict__", None) or getattr(kind, "__slots__", None):
        return False
    return any(each is obj for each in vars(sys.modules.get(kind.__module__, builtins)).values())


def _with_slots(arguments: tuple[Any, ...], attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Of a class: what its skeleton is made from. With its slots, whose descriptors Python makes."""
    for name in [name for name, each in attributes.items() if type(each) is types.MemberDescriptorType]:
        del attributes[name]
    if attributes.get("__pydantic_complete__"):
        attributes.pop("__pydantic_parent_namespace__", None)  # all variables of a function
    metaclass, name, bases, given, *none = arguments
    if metaclass is _TYPED and bases == (dict,):  # made by a call of TypedDict, not by a class statement
        bases = ()
    if attributes.get("__slots__"):
        given = {**given, "__slots__": attributes.pop("__slots__")}
    return metaclass, name, bases, given, *none


def _classes_in(schema: Any) -> list[type]:
    """The classes that a schema names. They are in a pickle before it: a validator reads it whole when it is made."""
    waiting = [schema]
    found: list[type] = []
    while waiting:
        each = waiting.pop()
        if type(each) in (dict, list, tuple):
            waiting += each.values() if type(each) is dict else each
        elif isinstance(each, type):
            found.append(each)
    return found


def _has_fallback(kind: Any) -> bool:
    """Return whether a class gives attributes that are not there, as a wrapper does: one without fields asks itself."""
    plain = all(getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__"))
    return plain and hasattr(kind, "__getattr__") and not hasattr(kind, "__setstate__")


def _annotated(function: FunctionType) -> set[str]:
    """The names in annotations that are texts: a function's own, and those of what is written within it."""
    texts = [each for each in function.__annotations__.values() if isinstance(each, str)]
    if function.__code__.co_flags & __future__.annotations.compiler_flag:
        waiting: list[Any] = [*function.__code__.co_consts]
        while waiting:
            each = waiting.pop()
            if type(each) is tuple:
                waiting += each
            elif type(each) is CodeType:
                waiting += each.co_consts
            elif type(each) is str:
                texts.append(each)
    return {name for text in texts for name in re.findall(r"[A-Za-z_]\w*", text)}


def _holds(holder: Any, item: Any) -> bool:
    held = [*gc.get_referents(holder), *getattr(holder, "__dict__", {}).values()]
    if isinstance(holder, FunctionType):
        held += held_by(holder)
    return any(each is item for each in held)


def _is_plain(code: CodeType) -> bool:
    """Return whether nothing can be written through a code's constants."""
    waiting: list[Any] = [*code.co_consts]
    while waiting:
        each = waiting.pop()
        if type(each) in (tuple, frozenset):
            waiting += each
        elif type(each) is CodeType:
            waiting += each.co_consts
        elif type(each) not in _ATOMS:
            return False
    return True
