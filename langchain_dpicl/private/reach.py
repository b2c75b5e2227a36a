"""What a chain can get at, beyond what LCEL shows of it.

`sealing.rebuilt` changes what lies in the fields of a chain's steps. It cannot change a retriever in a function's
closure, in a tool or in an object of the user's own, but a member can use it there: `reachable` finds it, so that such
a chain can be refused. It follows whatever an object refers to (fields, slots, containers, closures, default arguments,
bound objects, caches, iterators, weak references). Of functions and classes that are no known library's it also follows
the globals and the modules' attributes that they name, through submodules.

Of models it follows only the Runnables in their fields. It does not look into embeddings, vector stores, objects that
are marked `Closed`, and libraries' cached functions. It calls a cached function of the user's own once if that takes no
argument and has no value yet, because the chain can get at the value. It cannot see what another function computes when
it runs, looks up by a string, or imports for the first time.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import importlib.util
import inspect
import itertools
import logging
import sys
import typing
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStore

from langchain_dpicl.private import Closed

_ATOMS = frozenset({str, bytes, bytearray, int, float, complex, bool, type(None), ModuleType, CodeType, FrameType})
_PLAIN = (np.ndarray, np.generic, logging.Logger, ModuleType)
CLOSED = (Closed, Embeddings, VectorStore)
_CACHED = type(functools.cache(lambda: None))

_LIBRARIES = sys.stdlib_module_names | frozenset(
    """
    langchain langchain_classic langchain_community langchain_core langchain_dpicl langchain_experimental
    langchain_text_splitters langchain_anthropic langchain_aws langchain_chroma langchain_cohere langchain_deepseek
    langchain_fireworks langchain_google_genai langchain_google_vertexai langchain_groq langchain_huggingface
    langchain_mistralai langchain_ollama langchain_openai langchain_pinecone langchain_postgres langchain_protocol
    langchain_qdrant langchain_xai langgraph langgraph_sdk langserve langsmith
    _pytest aiohttp annotated_types anthropic anyio boto3 botocore certifi dill faiss fastapi google grpc h11
    httpcore httpx huggingface_hub hypothesis jinja2 joblib jsonpatch jsonpointer llama_cpp matplotlib nltk numpy
    openai opentelemetry orjson ormsgpack packaging pandas PIL pluggy psycopg pydantic pydantic_core
    pydantic_settings pytest regex requests safetensors scipy sentence_transformers sklearn sniffio spacy sqlalchemy
    starlette tenacity tiktoken tokenizers torch tqdm transformers typing_extensions typing_inspection urllib3
    uuid_utils werkzeug xllamacpp xxhash yaml zstandard
    """.split()
)
"""Top-level packages whose own globals hold nothing of the user's. All other code is read like the user's own.

The list becomes outdated as libraries are renamed and new ones appear. This fails closed: the code of a library that is
missing here is read too, so more is found, and a chain may be refused that could run.
"""


def reachable(chain: Any, closed: type | tuple[type, ...] = ()) -> Iterator[Any]:
    """Every object that a chain can get at, itself included, each once; numbers, texts and arrays left out.

    Does not look into objects of the ``closed`` classes.
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
        if not is_one(item, CLOSED) and not is_one(item, closed):
            waiting += _inside(item)


def is_library(module: object) -> bool:
    """Whether a module of this name belongs to Python or to a known library, whose own globals are not followed."""
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def is_users(function: FunctionType) -> bool:
    """Whether a function is the user's. Code without a module, as templates compile to, is read like the user's."""
    return not is_library(function.__globals__.get("__name__"))


def is_cached(item: Any) -> bool:
    """Whether an object is ``functools.lru_cache`` or ``functools.cache`` around anything but a library's function."""
    if type(item) is not _CACHED:
        return False
    return type(item.__wrapped__) is not FunctionType or is_users(item.__wrapped__)


def takes_nothing(cached: Any) -> bool:
    """Whether a cached function takes no argument, so that it keeps one value, which no call decides."""
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
    """Whether one of an object's classes has one of these full names: for libraries that need not be installed."""
    return not set(names).isdisjoint(f"{kind.__module__}.{kind.__qualname__}" for kind in type(item).__mro__)


def _inside(item: Any) -> list[Any]:
    """The objects that one object refers to. Of libraries' classes and cached functions none."""
    if issubclass(type(item), type):
        if is_library(item.__module__):
            return []
        held = [
            value
            for name, value in vars(item).items()  # its annotations and other descriptions of itself are left out
            if isinstance(value, (FunctionType, staticmethod, classmethod)) or not name.startswith(("__", "_abc_"))
        ]
        for field in vars(item).get("__pydantic_fields__", {}).values():
            held += [field.default_factory, *field.metadata, *_validators(field.annotation)]
        return [*held, *item.__mro__[1:], type(item)]
    if type(item) is FunctionType:
        scope = FunctionScope(item)
        return [*(value for *_, value in (*scope.held, *scope.attributes)), *vars(item).values()]
    if type(item) is _CACHED:
        if not is_cached(item):
            return []
        if takes_nothing(item) and not item.cache_info().currsize:
            with contextlib.suppress(Exception):  # `sealing` refuses one that stays empty
                item()
    elif is_one(item, BaseLanguageModel):  # the rest of it is the model's own
        held = [*vars(item).values(), *(getattr(item, "__pydantic_private__", None) or {}).values()]
        held += [each for some in held if type(some) in (list, tuple) for each in some]
        held += [each for some in held if type(some) is dict for each in some.values()]
        return [each for each in held if is_one(each, Runnable)]
    elif issubclass(type(item), weakref.ref):
        return [weakref.ref.__call__(item), *gc.get_referents(item)]
    return gc.get_referents(item)  # runs no code of the object's, whatever it is; its class is among them


def _validators(annotation: Any) -> list[Any]:
    inner = [each for part in typing.get_args(annotation) for each in _validators(part)]
    return [*getattr(annotation, "__metadata__", ()), *inner]


class Names(NamedTuple):
    """What a function's code names, also in the functions written within it."""

    globals: set[str]
    modules: set[str]
    """Modules that it imports, as it writes them: a relative path begins with dots."""
    attributes: set[str]


@functools.lru_cache(maxsize=1024)
def names_in(code: CodeType) -> Names:
    """What a function's code names. Shared by all who ask: not to be changed."""
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


class FunctionScope:
    """What a function can get at: ``names`` in its code, and what they stand for now.

    Attributes
    ----------
    held
        With their names: its defaults, the variables around it, and, of the user's own function, the globals.
    attributes
        With module and name: the attributes of modules that the user's own function holds or imports, submodules
        included.
    """

    def __init__(self, function: FunctionType) -> None:
        code, around = function.__code__, function.__globals__
        self.names = names_in(code)
        arguments, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
        self.held: list[tuple[str, Any]] = [*(function.__kwdefaults__ or {}).items()]
        self.held += itertools.zip_longest(reversed(arguments), reversed(defaults), fillvalue="")
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.held += [(name, value) for value in gc.get_referents(cell)]  # none, if it has no value yet
        self.attributes: list[tuple[ModuleType, str, Any]] = []
        if not is_users(function):
            return
        self.held += [(name, around[name]) for name in self.names.globals & around.keys()]
        waiting: list[ModuleType] = [value for _, value in self.held if is_one(value, ModuleType)]
        own = str(around.get("__name__"))
        package = around.get("__package__") or (own if "__path__" in around else own.rpartition(".")[0])
        for path in self.names.modules:
            try:
                name = importlib.util.resolve_name(path, package)
            except ImportError:  # beyond the outermost package
                continue
            waiting += [sys.modules[each] for each in {name, name.partition(".")[0]} if each in sys.modules]
        seen: set[int] = set()
        while waiting:
            module = waiting.pop()
            if id(module) not in seen:
                seen.add(id(module))
                for name in self.names.attributes & vars(module).keys():
                    value = vars(module)[name]
                    self.attributes.append((module, name, value))
                    if type(value) is ModuleType:
                        waiting.append(value)
