"""The private boundary: run Runnables on private input so that nothing but their return values comes back.

LangChain hands every input and output to callbacks, tracers, streams and caches that it finds in the configuration, in
context variables, in the environment and in globals. Here each call runs

* in an empty ``contextvars.Context`` of its own (no inherited configuration, callbacks, collectors or LangGraph
  stream writers),
* with LangSmith tracing switched off inside that context and an empty callback list,
* on a sealed copy of the chain, whose models have no cache, no verbosity and no callbacks of their own, and whose
  graphs keep no checkpoints (what sealing cannot reach, and would show something, is refused),
* without a word in the logs and no warnings (see `silence`),
* on its own: never through ``batch``, where one member's failing prompt can fail its neighbours, which would make one
  owner move many members' outputs,
* and with every exception turned into `ABSTAIN`, so that neither a message nor a traceback leaves.

What lives in globals cannot be switched off for one call; `check_surroundings` refuses to run instead.

Not closed here, because no library can: whoever runs the process or the model server, a provider's logs, the effect of
a function in the chain that writes somewhere itself, what patches the classes of a model or its client, timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final, Protocol, TypeVar

from langchain_core.callbacks import AsyncCallbackManager, CallbackManager
from langchain_core.globals import get_debug, get_llm_cache, get_verbose
from langchain_core.runnables import Runnable, RunnableConfig

from langchain_dpicl import silence
from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.sealing import check_public as check_public
from langchain_dpicl.sealing import seal as seal

T = TypeVar("T")


class Abstention:
    """What a failed member leaves behind: nothing at all."""

    _only: Abstention | None = None

    def __new__(cls) -> Abstention:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "ABSTAIN"


ABSTAIN: Final = Abstention()

_bucket: contextvars.ContextVar[Sequence[dict[str, Any]] | None] = contextvars.ContextVar("dpicl_bucket", default=None)


def current_bucket() -> Sequence[dict[str, Any]] | None:
    """The exemplars of the member that is running in this context; None outside of the boundary."""
    return _bucket.get()


def check_surroundings() -> None:
    """Refuse to run where globals would carry private text out. Raises `UnsafeConfigurationError`."""
    if get_llm_cache() is not None:
        raise UnsafeConfigurationError(
            "a global LLM cache is set: it would keep private prompts; call set_llm_cache(None)"
        )
    if get_debug():
        raise UnsafeConfigurationError("LangChain's debug mode is on: it prints private prompts; call set_debug(False)")
    if get_verbose():
        raise UnsafeConfigurationError(
            "LangChain's verbose mode is on: it prints private prompts; call set_verbose(False)"
        )
    handlers = None
    with contextlib.suppress(Exception):  # LangChain refuses some variables of the environment by itself
        handlers = in_private(_handlers)
    if handlers is None:
        raise UnsafeConfigurationError("LangChain cannot start a call without callbacks here; nothing was charged")
    if handlers:
        raise UnsafeConfigurationError(
            f"{handlers[0]} is added to every call (by register_configure_hook, a variable of the environment or an "
            "instrumentation of LangChain): it would see private prompts; take it away"
        )
    silence.keep_silent()


def check_loop() -> None:
    """Refuse to run in an event loop whose debug mode is on. Raises `UnsafeConfigurationError`."""
    if asyncio.get_running_loop().get_debug():
        raise UnsafeConfigurationError(
            "asyncio's debug mode is on: it logs slow tasks with their results, which are private; "
            "run without PYTHONASYNCIODEBUG, -X dev and debug=True, or call get_running_loop().set_debug(False)"
        )


def _handlers() -> list[str]:
    """The callback handlers that a call gets although it asks for none."""
    managers = (CallbackManager.configure([]), AsyncCallbackManager.configure([]))
    return [type(handler).__name__ for manager in managers for handler in manager.handlers]


_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _threads() -> ThreadPoolExecutor:
    """The process's threads for members: they start when needed and are reused (starting ten costs milliseconds)."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(512, thread_name_prefix="dpicl-member")
        return _pool


def _forget_threads() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)  # a fork copies no threads


Request = tuple[Mapping[str, Any], Sequence[dict[str, Any]]]


class Reader(Protocol):
    """Reads one member's output within that member's call (see `Aggregator.encode`)."""

    def encode(self, output: object) -> object:
        """What is kept of the output."""

    async def aencode(self, output: object) -> object:
        """The same, asynchronously."""


class _Whole:
    def encode(self, output: object) -> object:
        return output

    async def aencode(self, output: object) -> object:
        return output


WHOLE: Final[Reader] = _Whole()
"""Keeps the output as it is."""


def run_private(
    member: Runnable[Any, Any], requests: Sequence[Request], *, max_concurrency: int, reader: Reader = WHOLE
) -> list[object | Abstention]:
    """Call a sealed member once per request (input, its bucket), in parallel, and read each output in its own call.

    Failures become `ABSTAIN`. If the caller is interrupted, no further call begins, and those under way are waited for.
    """
    outputs: list[object | Abstention] = [ABSTAIN] * len(requests)
    waiting = iter(range(len(requests)))  # next() on it is atomic: each index goes to one worker

    def work() -> None:
        for i in waiting:
            outputs[i] = _clean_context().copy().run(_call, member, requests[i], reader)

    at_once = min(max_concurrency, len(requests))
    # A release within a member waits in one of the threads that its own members might need: they get others.
    pool = ThreadPoolExecutor(at_once) if silence.private.get() else _threads()
    workers = [pool.submit(work) for _ in range(at_once)]
    try:
        for worker in workers:
            worker.result()
    finally:
        for _ in waiting:
            pass
        wait(workers)
        if pool is not _pool:
            pool.shutdown()
    return outputs


async def arun_private(
    member: Runnable[Any, Any], requests: Sequence[Request], *, max_concurrency: int, reader: Reader = WHOLE
) -> list[object | Abstention]:
    """The same with the member's ``ainvoke``. If the caller is cancelled, every call is cancelled and awaited.

    An async member that raises SystemExit or KeyboardInterrupt ends the event loop, as it would anywhere in asyncio.
    """
    outputs: list[object | Abstention] = [ABSTAIN] * len(requests)  # not the tasks' results, which their reprs show
    gate = asyncio.Semaphore(max_concurrency)

    async def one(i: int) -> None:
        # Here, in the task's own coroutine, and not further in: a GeneratorExit reaches only the outermost one.
        try:
            async with gate:
                outputs[i] = await _acall(member, requests[i], reader)
                return
        except BaseException:
            if not _is_cancelled():  # the member's own failure, and not our caller's cancellation
                return
        raise asyncio.CancelledError

    tasks = [asyncio.create_task(one(i), context=_clean_context().copy()) for i in range(len(requests))]
    try:
        await asyncio.wait(tasks)  # unlike awaiting a task, this ends at once when the caller is cancelled
        return outputs
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _config() -> RunnableConfig:
    return {"callbacks": [], "tags": [], "metadata": {}}


@functools.cache
def _clean_context() -> contextvars.Context:
    """A context that holds nothing but "private" and "LangSmith tracing is off". Each call runs in its own copy."""
    from langsmith.run_helpers import tracing_context

    def make() -> contextvars.Context:
        silence.private.set(True)
        with tracing_context(enabled=False):
            return contextvars.copy_context()

    return contextvars.Context().run(make)


def in_private(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function on private values in a clean context: what it calls cannot find a tracer there."""
    return _clean_context().copy().run(function, *arguments)


async def ain_private(work: Coroutine[Any, Any, T]) -> T:
    """`in_private` for a coroutine. Whoever is cancelled here cancels it."""
    return await asyncio.get_running_loop().create_task(work, context=_clean_context().copy())


def _call(member: Runnable[Any, Any], request: Request, reader: Reader) -> object | Abstention:
    """One call in a worker thread; what it raises dies here, with its traceback and everything that it refers to."""
    values, bucket = request
    _bucket.set(bucket)
    try:
        return reader.encode(member.invoke(_input(values, bucket), _config()))
    except BaseException:  # no interrupt is delivered to a worker thread: it is the member's own
        return ABSTAIN


async def _acall(member: Runnable[Any, Any], request: Request, reader: Reader) -> object:
    values, bucket = request
    _bucket.set(bucket)
    return await reader.aencode(await member.ainvoke(_input(values, bucket), _config()))


def _input(values: Mapping[str, Any], bucket: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one call gets: the caller's values, copied, so that no member finds there what another has written."""
    return {**copy.deepcopy(dict(values)), "examples": bucket}


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def aprobe(
    member: Runnable[Any, Any], request: Request, check: Callable[[object], None]
) -> type[BaseException] | None:
    """`probe` with the member's ``ainvoke``."""

    async def attempt() -> type[BaseException] | None:
        _bucket.set(request[1])
        try:
            answer = await member.ainvoke(_input(*request), _config())
            await asyncio.to_thread(check, answer)
        except BaseException as error:
            if not _is_cancelled():
                return type(error)
            raise
        return None

    return await asyncio.create_task(attempt(), context=_clean_context().copy())


def probe(member: Runnable[Any, Any], request: Request, check: Callable[[object], None]) -> type[BaseException] | None:
    """One call on PUBLIC input, and a check of its answer. Returns the class of what either raised, or None.

    The call itself runs as a private one.
    """

    def attempt() -> type[BaseException] | None:
        _bucket.set(request[1])
        try:
            check(member.invoke(_input(*request), _config()))
        except Exception as error:
            return type(error)
        return None

    return _clean_context().copy().run(attempt)
