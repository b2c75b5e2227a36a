"""The private boundary: run Runnables on private input so that nothing but their return values comes back.

LangChain hands every input and output to callbacks, tracers, streams and caches that it finds in the configuration, in
context variables, in the environment and in globals. Here each call runs

* in an empty ``contextvars.Context`` of its own (no inherited configuration, callbacks, collectors or LangGraph
  stream writers),
* with LangSmith tracing switched off inside that context and an empty callback list,
* on a sealed copy of the chain, whose models have no cache, no verbosity and no callbacks of their own, and whose
  graphs keep no checkpoints (what sealing cannot reach, and would show something, is refused),
* without a word in the logs and no warnings (see `silence`),
* for a limited time, where there is a limit, which others' calls do not shorten (see `calls`),
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
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeVar

from langchain_core.callbacks import AsyncCallbackManager, CallbackManager
from langchain_core.globals import get_debug, get_llm_cache, get_verbose
from langchain_core.runnables import Runnable, RunnableConfig

from langchain_dpicl.calls import threads
from langchain_dpicl.calls.clock import Call, Calls, current
from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.private import silence
from langchain_dpicl.private.sealing import check_public as check_public
from langchain_dpicl.private.sealing import seal as seal

T = TypeVar("T")

_GRACE = 5.0  # seconds for a coroutine to end once it is cancelled
_log = logging.getLogger("langchain_dpicl")
REFUSED: Final = (
    "the model went on refusing calls (HTTP status 429: a rate limit, or a quota that is used up), for longer than "
    "the members' patience: these members abstain"
)


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


Failed = Callable[[BaseException], object]
"""What stands in the outputs for a call that raised."""


def _abstains(error: BaseException) -> Abstention:
    return ABSTAIN


def run_private(
    member: Runnable[Any, Any],
    requests: Sequence[Request],
    *,
    max_concurrency: int,
    reader: Reader = WHOLE,
    timeout: float | None = None,
    failed: Failed = _abstains,
) -> list[object | Abstention]:
    """Call a sealed member once per request (input, its bucket), in parallel, and read each output in its own call.

    Failures become `ABSTAIN`, and so does a call whose own work takes longer than ``timeout`` seconds. No other call
    begins in its place before its request has ended at the model; what hangs elsewhere is left behind in its thread. If
    the caller is interrupted, no further call begins, and those under way are waited for.
    """
    outputs: list[object | Abstention] = [ABSTAIN] * len(requests)
    waiting = deque(range(len(requests)))  # taking from it is atomic: each index goes to one worker
    calls = Calls(timeout, current.get())
    under_way: dict[int, Call] = {}  # who takes a call out of it, its worker or `_wait`, decides what becomes of it
    ended: SimpleQueue[None] = SimpleQueue()

    def work() -> None:
        while True:
            try:
                i = waiting.popleft()
            except IndexError:
                break
            call = under_way[i] = Call(calls)
            found = _clean_context().copy().run(_call, call, member, requests[i], reader, failed)
            if under_way.pop(i, None) is None:  # another worker has its place
                return
            outputs[i] = found
            del found
        ended.put(None)

    at_once = min(max_concurrency, len(requests))
    workers, starved = 0, math.inf

    def wait() -> None:
        """Until all has been done. Each call that is overdue is closed, and its worker replaced, if one can be."""
        nonlocal workers, starved
        while workers or waiting:
            while workers < at_once and waiting and threads.start(work):
                workers += 1
            scarce = workers < at_once and bool(waiting)
            starved = math.inf if workers else min(starved, time.monotonic() + threads.STARVED)
            if time.monotonic() > starved:
                waiting.clear()  # they abstain
            with contextlib.suppress(Empty):
                ended.get(timeout=0.05 if scarce else _until_next(under_way, calls))
                workers -= 1
                continue
            for i, call in under_way.copy().items():
                if call.overdue():
                    call.close()
                    if under_way.pop(i, None) is not None:
                        workers -= 1

    try:
        wait()
    finally:
        calls.stopped.set()
        waiting.clear()
        wait()
    _say(calls)
    return outputs


def _until_next(under_way: dict[int, Call], calls: Calls) -> float | None:
    """Seconds until a call may be overdue; None where none ever is."""
    if calls.seconds == math.inf and calls.outer is None:
        return None
    left = min((call.left() for call in under_way.copy().values()), default=1.0)
    return min(max(left, 0.01), 1.0, calls.seconds)


def _say(calls: Calls) -> None:
    """Tell the operator, by a line that is always the same, that calls abstain for want of a model's permission."""
    if calls.gave_up:
        _log.warning(REFUSED)


async def arun_private(
    member: Runnable[Any, Any],
    requests: Sequence[Request],
    *,
    max_concurrency: int,
    reader: Reader = WHOLE,
    timeout: float | None = None,
    failed: Failed = _abstains,
) -> list[object | Abstention]:
    """The same with the member's ``ainvoke``. If the caller is cancelled, every call is cancelled and awaited.

    An async member that raises SystemExit or KeyboardInterrupt ends the event loop, as it would anywhere in asyncio.
    """
    threads.separate(asyncio.get_running_loop())
    outputs: list[object | Abstention] = [ABSTAIN] * len(requests)  # not the tasks' results, which their reprs show
    gate = asyncio.Semaphore(max_concurrency)
    calls = Calls(timeout, current.get())
    under_way: dict[int, Call] = {}

    def leave(i: int) -> None:
        if under_way.pop(i, None) is not None:
            gate.release()

    async def one(i: int) -> None:
        # Here, in the task's own coroutine, and not further in: a GeneratorExit reaches only the outermost one.
        await gate.acquire()
        call = under_way[i] = Call(calls)
        wait: float | None = 0.0
        found: object = ABSTAIN
        while wait is not None:
            try:
                if wait:
                    with call.waits():
                        await asyncio.sleep(wait)
                    call.restart()
                found = await _acall(call, member, requests[i], reader)
                wait = None
            except BaseException as error:
                if _is_cancelled():
                    break
                wait = call.wait_after_error(error)
                found = failed(error)
        if not call.overdue():  # a member may swallow its cancellation
            outputs[i] = found
        call.close()
        leave(i)
        if _is_cancelled():  # the caller's cancellation, or `timeout`: not the member's own failure
            raise asyncio.CancelledError

    tasks = [asyncio.create_task(one(i), context=_clean_context().copy()) for i in range(len(requests))]
    pending = set(tasks)
    try:
        while pending:  # unlike awaiting a task, this ends at once when the caller is cancelled
            _, pending = await asyncio.wait(pending, timeout=_until_next(under_way, calls))
            for i, call in under_way.copy().items():
                if call.overdue():
                    pending -= _end(tasks[i], call)
                    if tasks[i] not in pending:
                        leave(i)
        _say(calls)
        return outputs
    finally:
        calls.stopped.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


_left_behind: set[asyncio.Task[None]] = set()  # keeps them alive until they end


def _end(task: asyncio.Task[None], call: Call) -> set[asyncio.Task[None]]:
    """Cancel a task that is overdue. Returns it once nothing waits for it any more: it does not let itself be ended."""
    if math.isinf(call.closed_at):
        call.close()
        task.cancel()
    elif time.monotonic() - call.closed_at > _GRACE and not task.done():
        _left_behind.add(task)
        task.add_done_callback(_left_behind.discard)
        return {task}
    return set()


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


def _call(
    call: Call, member: Runnable[Any, Any], request: Request, reader: Reader, failed: Failed
) -> object | Abstention:
    """One call in a worker thread; what it raises dies here, with its traceback and everything that it refers to."""
    values, bucket = request
    _bucket.set(bucket)
    current.set(call)
    wait: float | None = 0.0
    found: object = ABSTAIN
    while wait is not None and not call.overdue():
        try:
            if wait:
                call.pause(wait)
                call.restart()
            output = member.invoke(_input(values, bucket), _config())
            call.answered()
            found = reader.encode(output)
            wait = None
        except BaseException as error:  # no interrupt is delivered to a worker thread: it is the member's own
            wait = call.wait_after_error(error)
            found = failed(error)
    late = call.overdue()
    call.close()
    return ABSTAIN if late else found


async def _acall(call: Call, member: Runnable[Any, Any], request: Request, reader: Reader) -> object:
    values, bucket = request
    _bucket.set(bucket)
    current.set(call)
    output = await member.ainvoke(_input(values, bucket), _config())
    call.answered()
    return await reader.aencode(output)


def _input(values: Mapping[str, Any], bucket: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one call gets: the caller's values, copied, so that no member finds there what another has written."""
    return {**copy.deepcopy(dict(values)), "examples": bucket}


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Checked:
    """Reads nothing of an output but whether a check passes."""

    def __init__(self, check: Callable[[object], None]) -> None:
        self._check = check

    def encode(self, output: object) -> None:
        self._check(output)

    async def aencode(self, output: object) -> None:
        await threads.in_thread(self._check, output)


def probe(
    member: Runnable[Any, Any], request: Request, check: Callable[[object], None], timeout: float | None = None
) -> type[BaseException] | None:
    """One call on PUBLIC input, and a check of its answer. Returns the class of what either raised, or None.

    The call itself runs as a private one. One that takes too long gives `TimeoutError`.
    """
    found = run_private(member, [request], max_concurrency=1, reader=_Checked(check), timeout=timeout, failed=_class_of)
    return _failure(found)


async def aprobe(
    member: Runnable[Any, Any], request: Request, check: Callable[[object], None], timeout: float | None = None
) -> type[BaseException] | None:
    """`probe` with the member's ``ainvoke``."""
    found = await arun_private(
        member, [request], max_concurrency=1, reader=_Checked(check), timeout=timeout, failed=_class_of
    )
    return _failure(found)


def _class_of(error: BaseException) -> type[BaseException]:
    return type(error)


def _failure(outputs: list[Any]) -> type[BaseException] | None:
    failure: type[BaseException] | None = TimeoutError if outputs[0] is ABSTAIN else outputs[0]
    return failure
