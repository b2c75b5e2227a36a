"""What a chain can get at, beyond what LCEL shows of it.

`chains.rebuilt` changes what lies in the fields of a chain's steps. A retriever in a function's closure, in a tool or
in an object of the user's own is out of its reach, but not out of the member's: `reachable` finds it, so that such a
chain can be refused. It follows whatever an object refers to (fields, slots, containers, closures, default arguments,
bound objects, caches, iterators, weak references), and of functions and classes that are no known library's also the
globals and the modules' attributes that they name, through submodules.

Of models only the Runnables in their fields are looked at. It does not look into embeddings, vector stores, exemplar
stores, sealed releases and libraries' cached functions. A cached function of the user's own that takes no argument is
called once, if it has no value yet: what it gives is part of what the chain can get at. It cannot see what another
function computes when it runs, looks up by a string, or imports for the first time (`sharing` looks again after a
call).
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import importlib.util
import inspect
import logging
import sys
import typing
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStore

from langchain_dpicl.private.markers import Closed

_ATOMS = frozenset({str, bytes, bytearray, int, float, complex, bool, type(None), ModuleType, CodeType, FrameType})
_PLAIN = (np.ndarray, np.generic, logging.Logger, ModuleType)
_SEVERAL = (list, tuple, dict)
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
_CLOSED = (Embeddings, VectorStore, Closed)
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
"""Top-level packages whose own globals hold nothing of the user's. All other code is read like the user's own."""


def reachable(chain: Any) -> Iterator[Any]:
    """Every object that a chain can get at, itself included, each once; numbers, texts and arrays left out."""
    seen: dict[int, Any] = {}  # keeps what it has seen alive, so that no id is used twice
    waiting = deque([chain])
    while waiting:
        item = waiting.popleft()
        kind = type(item)
        if kind in _ATOMS or id(item) in seen or issubclass(kind, _PLAIN):
            continue
        seen[id(item)] = item
        yield item
        if kind in _CONTAINERS or not is_one(item, _CLOSED):
            waiting += _inside(item)


def is_library(module: object) -> bool:
    """Whether a module of this name belongs to Python or to a known library, whose own globals are not followed."""
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def is_cached(item: Any) -> bool:
    """Whether an object is ``functools.lru_cache`` or ``functools.cache`` around anything but a library's function."""
    if type(item) is not _CACHED:
        return False
    inner = item.__wrapped__
    return not (type(inner) is FunctionType and is_library(inner.__globals__.get("__name__")))


def takes_nothing(cached: Any) -> bool:
    """Whether a cached function takes no argument, so that it keeps one value, which no call decides."""
    try:
        return not inspect.signature(cached).parameters
    except (TypeError, ValueError):
        return False


def is_one(item: Any, kinds: type | tuple[type, ...]) -> bool:
    """``isinstance`` for any object: a proxy without its object raises where it is asked for its class."""
    try:
        return isinstance(item, kinds)
    except Exception:
        return False


def is_named(item: Any, names: Iterable[str]) -> bool:
    """Whether one of the classes of an object has one of these full names. Imports nothing."""
    return not set(names).isdisjoint(f"{kind.__module__}.{kind.__qualname__}" for kind in type(item).__mro__)


def _inside(item: Any) -> list[Any]:
    if issubclass(type(item), type):
        return _of_class(item)
    if type(item) is FunctionType:
        return _named_by(item)
    if type(item) is _CACHED:
        return _cached_by(item)
    if is_one(item, BaseLanguageModel):
        return _of_model(item)
    if issubclass(type(item), weakref.ref):
        return [weakref.ref.__call__(item), *gc.get_referents(item)]
    return gc.get_referents(item)  # runs no code of the object's, whatever it is; its class is among them


def _cached_by(function: Any) -> list[Any]:
    if not is_cached(function):
        return []
    if takes_nothing(function) and not function.cache_info().currsize:
        with contextlib.suppress(Exception):  # `sealing` refuses one that stays empty
            function()
    return gc.get_referents(function)


def _of_model(model: Any) -> list[Any]:
    """The Runnables that a model holds, as one that stands before another does; the rest of it is the model's own."""
    held = vars(model) | (getattr(model, "__pydantic_private__", None) or {})
    lists = (item if type(item) in (list, tuple) else item.values() for item in held.values() if type(item) in _SEVERAL)
    return [item for item in (*held.values(), *(each for some in lists for each in some)) if is_one(item, Runnable)]


def _of_class(kind: type) -> list[Any]:
    """What the user's own class holds and inherits, its annotations and other descriptions of itself left out."""
    if is_library(kind.__module__):
        return []
    held = [
        value
        for name, value in vars(kind).items()
        if isinstance(value, (FunctionType, staticmethod, classmethod)) or not name.startswith(("__", "_abc_"))
    ]  # an abstract class's _abc_impl remembers classes that it was compared with, which are none of its business
    for field in vars(kind).get("__pydantic_fields__", {}).values():
        held += [field.default_factory, *field.metadata, *_validators(field.annotation)]
    return [*held, *kind.__mro__[1:], type(kind)]


def _validators(annotation: Any) -> list[Any]:
    """What an annotation runs: the validators in it."""
    inner = [each for part in typing.get_args(annotation) for each in _validators(part)]
    return [*getattr(annotation, "__metadata__", ()), *inner]


def _named_by(function: FunctionType) -> list[Any]:
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
    around = function.__globals__
    if is_library(around.get("__name__")):
        return held
    names = named_in(function)
    held += [around[name] for name in names["global"] if name in around]
    return [*held, *_attributes(_modules(function, held, names["module"]), names["attribute"])]


def _modules(function: FunctionType, held: list[Any], imported: set[str]) -> list[ModuleType]:
    """The modules that a function holds or imports."""
    modules = [item for item in held if type(item) is ModuleType or is_one(item, ModuleType)]
    for name in _paths(function, imported):
        modules += [sys.modules[path] for path in {name, name.partition(".")[0]} if path in sys.modules]
    return modules


def _paths(function: FunctionType, imported: Iterable[str]) -> set[str]:
    """The full names of modules that a function imports, perhaps from a package around it."""
    around = function.__globals__
    name = str(around.get("__name__"))
    package = around.get("__package__") or (name if "__path__" in around else name.rpartition(".")[0])
    found = set()
    for path in imported:
        with contextlib.suppress(ImportError):  # beyond the outermost package
            found.add(importlib.util.resolve_name(path, package))
    return found


def unloaded_in(function: FunctionType) -> set[str]:
    """The modules that a function would import for the first time, known libraries' left out."""
    found = set()
    for name in _paths(function, named_in(function)["module"]):
        around, _, last = name.rpartition(".")
        held = around in sys.modules and hasattr(sys.modules[around], last)
        if name not in sys.modules and not is_library(name) and not held:
            found.add(name)
    return found


def named_in(function: FunctionType) -> dict[str, set[str]]:
    """What a function's code names: globals, modules that it imports, attributes.

    Beside these, as "assigned" the variables around it, and as "stored" the attributes, that it assigns to.
    """
    names: dict[str, set[str]] = {how: set() for how in ("global", "module", "attribute", "assigned", "stored")}
    for how, name in _names(function.__code__):
        names[how].add(name)
    return names


def modules_in(function: FunctionType) -> list[ModuleType]:
    """The modules that a function names or imports, and the submodules of these that it names."""
    names = named_in(function)
    named = [function.__globals__[name] for name in names["global"] if name in function.__globals__]
    found: list[ModuleType] = []
    waiting = _modules(function, named, names["module"])
    while waiting:
        module = waiting.pop()
        if any(module is each for each in found):
            continue
        found.append(module)
        inner = (vars(module)[name] for name in names["attribute"] & vars(module).keys())
        waiting += [each for each in inner if type(each) is ModuleType]
    return found


def _names(code: CodeType) -> Iterator[tuple[str, str]]:
    """What a function's code names, and how; also in the functions written within it."""
    before: tuple[Any, Any] = (0, ())  # what the last two steps name: an import's level, and the names from there
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            level, names = before
            path = "." * level + step.argval
            yield "module", path
            yield from (("module", f"{path}{'' if path.endswith('.') else '.'}{name}") for name in names or ())
        elif step.opcode in dis.hasname:
            how = "attribute"
            if step.opname.endswith(("_GLOBAL", "LOAD_NAME")):
                how = "global"
            yield how, step.argval
        if step.opname.startswith(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")):
            yield "assigned", step.argval
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield "stored", step.argval
        before = before[1], step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _attributes(modules: list[ModuleType], names: set[str]) -> list[Any]:
    """The attributes of these names in modules, and in the submodules among them."""
    found: list[Any] = []
    seen: set[int] = set()
    while modules:
        module = modules.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name in names & vars(module).keys():
            value = vars(module)[name]
            (modules if type(value) is ModuleType else found).append(value)
    return found
