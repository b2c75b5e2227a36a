"""A chain made ready for private calls: sealed, and with a time limit that can be kept.

`seal` copies it without anything of its own that would show what it is given or carry it to another call. `TimeLimit`
finds what it calls, as far as a call can be ended: the models, and releases within the chain.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, Literal

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, BaseCallbackManager
from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.language_models import LLM, BaseChatModel, BaseLanguageModel, BaseLLM
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.stores import BaseStore
from langchain_core.vectorstores import VectorStore
from pydantic import BaseModel

from langchain_dpicl.calls import threads
from langchain_dpicl.calls.transport import install, is_client
from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import OwnBucket, PrivateRecords, Released
from langchain_dpicl.private.reach import is_cached, is_named, is_one, reachable, takes_nothing

_HANDLERS = (BaseCallbackHandler, BaseCallbackManager)
_KEEPERS = (BaseCache, BaseChatMessageHistory, RunnableWithMessageHistory)
_KEEPERS_BY_NAME = (
    "langchain_classic.base_memory.BaseMemory",
    "langchain_core.memory.BaseMemory",  # until langchain-core 1
    "langgraph.store.base.BaseStore",
    "langgraph.checkpoint.base.BaseCheckpointSaver",
    "langgraph.cache.base.BaseCache",
    "langchain_classic.embeddings.cache.CacheBackedEmbeddings",
    "joblib.memory.Memory",
    "joblib.memory.MemorizedFunc",
    "diskcache.core.Cache",
    "shelve.Shelf",
)
"""Classes that keep something between calls, of libraries that need not be installed. If a library moves its class, the
name no longer refuses it, and only the comparison around the trial calls (`sharing`) is left: follow the libraries."""

_BREAKERS = ("aiobreaker.circuitbreaker.CircuitBreaker", "circuitbreaker.CircuitBreaker", "pybreaker.CircuitBreaker")
"""By name, too. Successful calls do not change them, so no trial call shows that members share them."""

_COLLECTIONS = (BaseRetriever, VectorStore, BaseExampleSelector, BaseStore)
_DOCSTORES = ("langchain_community.docstore.base.Docstore", "langchain_classic.docstore.base.Docstore")

_BASES = (BaseCallbackHandler, AsyncCallbackHandler, BaseCallbackManager)
"""They are not abstract, but code names them only to compare with."""


def rebuilt(value: Any, finish: Callable[[Any], Any]) -> Any:
    """A copy of a chain in which ``finish`` has been applied to every Runnable, the innermost first.

    ``finish`` gets a Runnable whose own parts are finished, and returns it or another. Follows the fields of Runnables,
    their lists and mappings; it does not look into functions (`reach` does). What nothing changed stays the same
    object, and the caller's chain stays as it was.
    """
    seen: dict[int, Any] = {}

    def changes(held: dict[Any, Any]) -> dict[Any, Any]:
        return {key: made for key, part in held.items() if (made := of(part)) is not part}

    def of(value: Any) -> Any:
        if id(value) in seen:
            return seen[id(value)]
        if isinstance(value, Runnable):
            seen[id(value)] = value  # a chain may refer to itself
            fields = type(value).model_fields if isinstance(value, BaseModel) else getattr(value, "__dict__", {})
            seen[id(value)] = finish(_changed(value, changes({name: getattr(value, name) for name in list(fields)})))
            return seen[id(value)]
        if type(value) is dict:
            return {**value, **changed} if (changed := changes(value)) else value
        if type(value) in (list, tuple):
            held = dict(enumerate(value))
            return type(value)({**held, **changed}.values()) if (changed := changes(held)) else value
        return value

    return of(value)


def _changed(part: Any, changes: dict[str, Any]) -> Any:
    """A copy of a Runnable with some of its fields changed; the same object if there are no changes."""
    if not changes:
        return part
    if isinstance(part, BaseModel):
        return part.model_copy(update=changes)
    copied = copy.copy(part)
    vars(copied).update(changes)
    return copied


def seal(
    member: Runnable[Any, Any], *, public: Sequence[object] = (), allow_state: Sequence[object] = ()
) -> Runnable[Any, Any]:
    """A copy of the chain whose parts have no cache, verbosity, checkpoints, callbacks or listeners of their own.

    Follows the fields of Runnables, their lists and mappings. What a function, an object or the node of a graph refers
    to cannot be exchanged: raises `UnsafeConfigurationError` if such a part has any of these.

    Raises it too if the chain reaches (`reach`) what would show private text or carry it to another call: a callback
    handler, a cache, checkpoints, a memory, a chat history, a graph's store, an `ExemplarStore`; a retriever, a vector
    store, an example selector or a document store that ``public`` does not name; a function under
    ``functools.lru_cache`` that takes arguments and that ``allow_state`` does not name; and a class of any of these.
    """
    _check_collections(member, public)
    sealed: Runnable[Any, Any] = rebuilt(member, lambda part: _changed(part, _openings(part)))
    for part in reachable(sealed):
        openings = _openings(part) if is_one(part, Runnable) else {}
        if shown := sorted(name for name in openings if getattr(part, name) is not None):
            raise UnsafeConfigurationError(
                f"a {type(part).__name__} that a function, an object or a graph of the member refers to would show "
                f"private text by its {', '.join(shown)}: set it up without"
            )
        why = ""
        if _is_of(part, _HANDLERS):
            why = ", which would see private text: set the chain up without callbacks, and give them to the release"
        elif _is_of(part, _KEEPERS, _KEEPERS_BY_NAME):
            why = (
                ": members would read there what other members wrote, and it would keep private text: set the chain up "
                "without, and pass a conversation in as part of the input"
            )
        elif is_named(part, _BREAKERS):
            why = (
                ": one owner's failing calls would open it for all members, and for public calls. Set the chain up "
                "without"
            )
        if why:
            raise UnsafeConfigurationError(f"the chain reaches a {_name(part)}{why}")
        if not is_cached(part):
            continue
        name = getattr(part, "__name__", None) or _name(part)
        if not any(allowed is part or allowed == name for allowed in allow_state):
            if not takes_nothing(part):
                raise UnsafeConfigurationError(
                    f"the chain reaches {name}, a cached function with arguments: it keeps for every member what one "
                    f"member asked it. Take functools.cache away, or allow it: allow_state=[{name}]"
                )
            if part.cache_info().maxsize != 0 and not part.cache_info().currsize:
                raise UnsafeConfigurationError(
                    f"the chain reaches {name}, a cached function that raises when it is called: what it would keep "
                    "cannot be looked into"
                )
    return sealed


def seal_public(
    chain: Runnable[Any, Any], *, public: Sequence[object] = (), allow_state: Sequence[object] = ()
) -> Runnable[Any, Any]:
    """`seal` for a chain whose answers are taken for public text: a selector may only be in its prompts.

    There it selects nothing, since a public call has no bucket.
    """
    found = list(reachable(chain))
    in_prompts = {id(vars(part).get("example_selector")) for part in found if is_one(part, BaseModel)}
    for part in found:
        if is_one(part, OwnBucket) and id(part) not in in_prompts:
            raise UnsafeConfigurationError(
                f"candidates must come from public text alone, and their chain reaches a {_name(part)}: what it finds "
                "would be published without noise; write them without private examples"
            )
    return seal(chain, public=public, allow_state=allow_state)


def check_public(public: object) -> tuple[object, ...]:
    """The collections that a user calls public. Raises `InvalidParameter` for what is no collection, or is private."""
    bound = "a list of retrievers, vector stores, example selectors and document stores with public documents alone"
    if not isinstance(public, (list, tuple)):
        raise InvalidParameter("public", type(public).__name__, bound)
    for i, named in enumerate(public):
        if isinstance(named, type) or not _is_collection(named):
            raise InvalidParameter(f"public[{i}]", _name(named), bound)
    return tuple(public)


def _check_collections(chain: object, public: Sequence[object]) -> None:
    """Raises if a chain reaches documents that are not called public, or a class that opens a collection."""
    known = {id(part) for part in reachable(public)}
    found = list(reachable(chain))
    collections = [part for part in found if _is_collection(part)]
    allowed = [
        part
        for part in collections  # langchain_core has its own view of a vector store
        if id(part) in known
        or (type(part).__module__.startswith("langchain_core.") and id(getattr(part, "vectorstore", None)) in known)
    ]
    fine = {id(each) for part in allowed for each in (part, *type(part).__mro__)}
    refused = [part for part in collections if id(part) not in fine]
    if refused:
        raise UnsafeConfigurationError(
            f"the chain reaches a {_name(refused[0])}: every member would search the same documents there, so that one "
            "owner would reach every answer. If nobody's private text is in it, name it: public=[...]. If it holds "
            "the private documents, use wrap_rag, or put them into an ExemplarStore"
        )
    if any(_is_of(part, (PrivateRecords,)) for part in found):
        raise UnsafeConfigurationError(
            "the chain reaches an ExemplarStore: every member would read the same owners' exemplars there; a "
            "member gets its own as `examples`"
        )


def _is_collection(part: Any) -> bool:
    return _is_of(part, _COLLECTIONS, _DOCSTORES) and not _is_of(part, (Released, OwnBucket))


def _is_of(part: Any, kinds: tuple[type, ...], names: Iterable[str] = ()) -> bool:
    """Whether a part is of one of these kinds (or full names), or a class that makes one.

    Code names an abstract class only to compare with it.
    """
    if not is_one(part, type):
        return is_one(part, kinds) or is_named(part, names)
    full_names = (f"{kind.__module__}.{kind.__qualname__}" for kind in part.__mro__)
    found = issubclass(part, kinds) or not set(names).isdisjoint(full_names)
    return found and not inspect.isabstract(part) and part not in _BASES


def _name(part: Any) -> str:
    return part.__name__ if is_one(part, type) else type(part).__name__


def _openings(part: Any) -> dict[str, Any]:
    """The fields by which a part would show what it is given, each with what closes it."""
    off: dict[str, Any]
    if isinstance(part, BaseModel):
        names = set(type(part).model_fields)
        off = {"callbacks": None, "verbose": False, "config_factories": []}
    elif any(kind.__module__.startswith("langgraph.pregel") for kind in type(part).__mro__):  # a graph
        names = set(vars(part))
        off = {"checkpointer": None, "cache": None, "debug": False}
    else:
        return {}
    found: dict[str, Any] = {name: to for name, to in off.items() if name in names and getattr(part, name)}
    if isinstance(part, BaseLanguageModel):
        if part.cache is not False:  # None stands for the global cache
            found["cache"] = False
    elif "config" in names and isinstance(config := part.config, Mapping) and config.get("callbacks"):
        found["config"] = {key: item for key, item in config.items() if key != "callbacks"}
    return found


# -- its time limit ----------------------------------------------------------------------------------------------------


DEFAULT_TIMEOUT = 120.0

Timeout = float | Literal["auto"] | None

_OPENAI = ("langchain_openai.chat_models.base.BaseChatOpenAI", "langchain_openai.llms.base.BaseOpenAI")


class TimeLimit:
    """How long one call of a chain may take, and whether that can be kept.

    Puts the clients of models whose calls can be ended under the clock.

    Parameters
    ----------
    chain
        A sealed chain. Call `prepared` in its place.
    timeout
        Seconds, None for no limit, or "auto": `DEFAULT_TIMEOUT` if it can be kept everywhere, else None.

    Raises `InvalidParameter` if ``timeout`` is given and cannot be kept at all.
    """

    def __init__(self, chain: Runnable[Any, Any], timeout: Timeout) -> None:
        never: list[str] = []  # models whose calls cannot be ended
        in_loop: list[str] = []  # those whose calls can be ended in an event loop alone
        for item in reachable(chain):
            name, is_model = type(item).__name__, is_one(item, BaseLanguageModel)
            if is_model and getattr(item, "rate_limiter", None) is not None:
                never.append(f"a {name} with a rate_limiter (whose waiting is on its clock)")
            elif is_named(item, _OPENAI) and (clients := _clients_of(item)):
                for client in clients:
                    install(client)
            elif is_model and not inspect.isclass(item):
                (in_loop if _is_async(item) else never).append(name)
            elif is_one(item, Released) and not inspect.isclass(item):
                ensemble = getattr(getattr(item, "release", item), "ensemble", None)
                if getattr(ensemble, "timeout", None) is None:
                    never.append(f"a {name} without a timeout")
        self._in_sync = sorted({*never, *in_loop})
        self.seconds: float | None = None
        if timeout == "auto":
            self.seconds = None if self._in_sync else DEFAULT_TIMEOUT
        elif timeout is not None:
            self.seconds = checks.positive("timeout", timeout)
            if never:
                raise _cannot_end(timeout, never[0], "timeout=None, or a model behind a server")
        self.prepared: Runnable[Any, Any] = rebuilt(chain, _in_own_threads)

    def check_sync(self) -> None:
        """Raise `InvalidParameter` if a call can be ended in an event loop alone."""
        if self.seconds is not None and self._in_sync:
            raise _cannot_end(self.seconds, self._in_sync[0], "timeout=None, or ainvoke and abatch")


def _cannot_end(timeout: object, model: str, instead: str) -> InvalidParameter:
    bound = (
        f"a call of {model} cannot be ended at the model, so that the next member's call would wait behind it: "
        f"use {instead}"
    )
    return InvalidParameter("timeout", timeout, bound)


def _clients_of(model: Any) -> list[Any]:
    """The HTTP clients of an OpenAI model; empty if they cannot all be reached."""
    found = [
        getattr(getattr(resource, "_client", None), "_client", None)
        for name in ("client", "async_client")
        if (resource := getattr(model, name, None)) is not None
    ]
    return found if all(map(is_client, found)) else []


def _is_async(model: Any) -> bool:
    """Whether the model has an asynchronous call of its own, and not its synchronous one in a thread."""
    if is_one(model, LLM) and type(model)._agenerate is LLM._agenerate:
        return type(model)._acall is not LLM._acall
    defaults: tuple[Any, ...] = (None, BaseChatModel._agenerate, BaseLLM._agenerate)
    return getattr(type(model), "_agenerate", None) not in defaults


def _in_own_threads(part: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """A part that has no asynchronous call of its own makes it in a thread of `threads`, not in the event loop's."""
    if type(part) is RunnablePassthrough:
        if part.func is None or part.afunc is not None:
            return part
    elif type(part) is RunnableLambda:
        function = getattr(part, "func", None)
        if function is None or hasattr(part, "afunc") or inspect.isgeneratorfunction(function):
            return part
        try:
            if "run_manager" in inspect.signature(function).parameters:
                return part
        except (TypeError, ValueError):  # it has no signature
            pass
    elif type(part) is not RunnableParallel and type(part).ainvoke is not Runnable.ainvoke:
        return part
    copied = copy.copy(part)
    copied.__class__ = _threaded(type(part))  # what a further copy runs is its own, and not this one's
    return copied


@functools.cache
def _threaded(kind: type[Any]) -> Any:
    """The same class, but for its asynchronous call."""

    async def ainvoke(self: Any, input: Any, config: Any = None, **named: Any) -> Any:
        return await threads.in_thread(self.invoke, input, config, **named)

    def afunc(part: Any) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            return await threads.in_thread(part.func, *arguments, **named)

        return functools.update_wrapper(call, part.func)

    def invoke_all(self: Any, input: Any, config: Any = None, **named: Any) -> dict[str, Any]:
        """`RunnableParallel.invoke` without callbacks. Python waits at exit for a pool's threads, and not for these."""
        steps = self.steps__.items()
        futures = {key: threads.submit(step.invoke, input, dict(config or {})) for key, step in steps}
        wait(futures.values())
        return {key: future.result() for key, future in futures.items()}

    own: dict[type, dict[str, Any]] = {
        RunnableLambda: {"afunc": property(afunc)},
        RunnableParallel: {"invoke": invoke_all},
    }
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    make: Any = type(kind)
    return make(kind.__name__, (kind,), names | own.get(kind, {"ainvoke": ainvoke}))
