"""What a chain can get at, beyond what LCEL shows of it.

`chains.rebuilt` changes what lies in the fields of a chain's steps. A retriever in a function's closure, in a tool or
in an object of the user's own is out of its reach, but not out of the member's: `reachable` finds it, so that such a
chain can be refused. It follows whatever an object refers to (fields, slots, containers, closures, default arguments,
bound objects, caches, iterators, weak references), and of functions and classes that are no known library's also the
globals and the modules' attributes that they name, through submodules.

It does not look into models, embeddings, vector stores, exemplar stores and sealed releases. It cannot see what a
function computes when it runs, looks up by a string, or imports for the first time.
"""

from __future__ import annotations

import dis
import gc
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.vectorstores import VectorStore

_ATOMS = frozenset({str, bytes, bytearray, int, float, complex, bool, type(None), ModuleType, CodeType, FrameType})
_PLAIN = (np.ndarray, np.generic, logging.Logger, ModuleType)
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
_CLOSED = (BaseLanguageModel, Embeddings, VectorStore)
_OWN_CLOSED = frozenset(
    {
        "langchain_dpicl.store.base.PrivateStore",
        "langchain_dpicl.selection.PoissonExampleSelector",
        "langchain_dpicl.budget.budget.PrivacyBudget",
        "langchain_dpicl.ensemble.PrivateEnsemble",
        "langchain_dpicl.release.AnyRelease",
        "langchain_dpicl.retrieval.retriever.DPRetriever",
    }
)
"""By name: these classes live on floors above this one."""

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
    waiting = [chain]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind in _ATOMS or id(item) in seen or issubclass(kind, _PLAIN):
            continue
        seen[id(item)] = item
        yield item
        if kind in _CONTAINERS or not (is_one(item, _CLOSED) or is_named(item, _OWN_CLOSED)):
            waiting += _inside(item)


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
    if issubclass(type(item), weakref.ref):
        return [weakref.ref.__call__(item), *gc.get_referents(item)]
    return gc.get_referents(item)  # runs no code of the object's, whatever it is; its class is among them


def _of_class(kind: type) -> list[Any]:
    """What the user's own class holds and inherits, its annotations and other descriptions of itself left out."""
    if _is_library(kind.__module__):
        return []
    held = [
        value
        for name, value in vars(kind).items()
        if isinstance(value, (FunctionType, staticmethod, classmethod)) or not name.startswith("__")
    ]
    return [*held, *kind.__mro__[1:], type(kind)]


def _named_by(function: FunctionType) -> list[Any]:
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
    around = function.__globals__
    if _is_library(around.get("__name__")):
        return held
    names: dict[str, set[str]] = {"global": set(), "module": set(), "attribute": set()}
    for how, name in _names(function.__code__):
        names[how].add(name)
    held += [around[name] for name in names["global"] if name in around]
    modules = [item for item in held if type(item) is ModuleType or is_one(item, ModuleType)]
    for name in names["module"]:
        imported = {name, name.partition(".")[0], f"{around.get('__package__')}.{name}"}
        modules += [sys.modules[found] for found in imported if found in sys.modules]
    return [*held, *_attributes(modules, names["attribute"])]


def _names(code: CodeType) -> Iterator[tuple[str, str]]:
    """What a function's code names, and how; also in the functions written within it."""
    for step in dis.get_instructions(code):
        if step.opcode in dis.hasname:
            how = {"IMPORT_NAME": "module", "LOAD_GLOBAL": "global", "LOAD_NAME": "global"}.get(
                step.opname, "attribute"
            )
            yield how, step.argval
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


def _is_library(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES
