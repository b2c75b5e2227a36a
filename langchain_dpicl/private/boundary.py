"""The private boundary: run Runnables on private input so that nothing but their return values comes back.

LangChain hands every input and output to callbacks, tracers, streams and caches that it finds in the configuration, in
context variables, in the environment and in globals. Here each call runs

* in an empty ``contextvars.Context`` of its own (no inherited configuration, callbacks, collectors or LangGraph
  stream writers),
* with LangSmith tracing switched off inside that context and an empty callback list,
* on a sealed copy of the chain, whose models have no cache, no verbosity and no callbacks of their own, and whose
  graphs keep no checkpoints (what sealing cannot reach, and would show something, is refused),
* without a word in the logs and no warnings (see `silence`),
* on an event loop that no public code uses, if it is asynchronous (see `own_loop`),
* for a limited time, if there is a limit, which others' calls do not shorten (see `calls`),
* on its own, never through ``batch``: there, one member's failing prompt can fail its neighbours, so that one owner
  would move many members' outputs,
* and with every exception turned into `ABSTAIN`, so that neither a message nor a traceback leaves.

`guarded` does the last for the flow around the calls: sampling, aggregation, noise. What lives in globals cannot be
switched off for one call: `check_surroundings` refuses to run instead.

No library can close the rest: the operators of the process and of the model server, a provider's logs, a function in
the chain that writes somewhere itself, patches of the classes of a model or its client, timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, Final, Protocol, TypeVar

from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, CallbackManager
from langchain_core.globals import get_debug, get_llm_cache, get_verbose
from langchain_core.runnables import RunnableConfig

from langchain_dpicl.calls import running, shut
from langchain_dpicl.calls.flow import Either, Flow, immediate
from langchain_dpicl.calls.running import Call
from langchain_dpicl.errors import DPICLError, ReleaseFailed, UnsafeConfigurationError
from langchain_dpicl.private import notes
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.private.own_loop import on_own_loop, separate_pools
from langchain_dpicl.private.sealing import seal as seal
from langchain_dpicl.private.silence import clean_context, keep_silent
from langchain_dpicl.private.silence import in_private as in_private
from langchain_dpicl.private.sources import check_public as check_public

T = TypeVar("T")

_GRACE = 5.0  # seconds for a coroutine to end once it is cancelled
REFUSED: Final = (
    "the model went on refusing calls (HTTP status 429: a rate limit, or a quota that is used up), for longer than "
    "the members' patience: these members abstain"
)


class Abstention:
    """The output of a failed member: nothing at all."""

    _only: Abstention | None = None

    def __new__(cls) -> Abstention:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "ABSTAIN"


ABSTAIN: Final = Abstention()

MemberRequest = tuple[Mapping[str, Any], Sequence[dict[str, Any]]]
"""A member's input and its bucket."""


class OutputReader(Protocol):
    """Reads one member's output within that member's call (see `Aggregator.encode`)."""

    def encode(self, output: object) -> object:
        """Return the part of the output that is kept."""

    async def aencode(self, output: object) -> object:
        """The same, asynchronously."""


# -- the surroundings --------------------------------------------------------------------------------------------------


def check_surroundings() -> None:
    """Refuse to run if globals would carry private text out. Raises `UnsafeConfigurationError`."""
    if get_llm_cache() is not None:
        raise UnsafeConfigurationError(
            "a global LLM cache is set: it would keep private prompts; call set_llm_cache(None)"
        )
    for is_on, mode in ((get_debug(), "debug"), (get_verbose(), "verbose")):
        if is_on:
            raise UnsafeConfigurationError(
                f"LangChain's {mode} mode is on: it prints private prompts; call set_{mode}(False)"
            )

    handlers: list[BaseCallbackHandler] | None = None
    with contextlib.suppress(Exception):  # LangChain refuses some variables of the environment by itself
        context = clean_context().copy()
        handlers = context.run(CallbackManager.configure, []).handlers
        handlers = handlers + context.run(AsyncCallbackManager.configure, []).handlers
    if handlers is None:
        raise UnsafeConfigurationError("LangChain cannot start a call without callbacks here; nothing was charged")
    if handlers:
        raise UnsafeConfigurationError(
            f"{type(handlers[0]).__name__} is added to every call (by register_configure_hook, a variable of the "
            "environment or an instrumentation of LangChain): it would see private prompts; take it away"
        )
    keep_silent()


def check_loop() -> None:
    """Refuse to run in an event loop whose debug mode is on. Raises `UnsafeConfigurationError`."""
    if asyncio.get_running_loop().get_debug():
        raise UnsafeConfigurationError(
            "asyncio's debug mode is on: it logs slow tasks with their results, which are private; "
            "run without PYTHONASYNCIODEBUG, -X dev and debug=True, or call get_running_loop().set_debug(False)"
        )


# -- the calls of one release ------------------------------------------------------------------------------------------


def run_private(member: Pristine, requests: Sequence[MemberRequest], **how: Any) -> list[object | Abstention]:
    """Call a copy of a sealed member per request, in parallel threads, and read each output in its own call.

    ``how`` are the further fields of `_Round`. Failures become `ABSTAIN`, and so does a call that takes more than
    ``timeout`` seconds from its own start. What hangs is left behind in its thread. If the caller is interrupted, no
    further call begins, and those under way are waited for.
    """
    separate_pools()
    calls = _Round(member, requests, **how)
    calls.run()
    return calls.result()


async def arun_private(member: Pristine, requests: Sequence[MemberRequest], **how: Any) -> list[object | Abstention]:
    """The same with the member's ``ainvoke``, on an event loop of private calls alone (`own_loop`).

    If the caller is cancelled, every call is cancelled and awaited. No call begins in the place of another before that
    one has ended, or has ignored its cancellation for `_GRACE` seconds.
    """
    calls = _Round(member, requests, **how)
    await on_own_loop(calls.arun)
    return calls.result()


def private_calls(member: Pristine, requests: Sequence[MemberRequest], **how: Any) -> Either:
    """`run_private` and `arun_private` as a flow's effect."""
    return Either(
        partial(
            run_private,
            member,
            requests,
            **how,
        ),
        partial(arun_private, member, requests, **how),
    )


def probe(
    member: Pristine,
    request: MemberRequest,
    timeout: float | None = None,
    check: Callable[[object], None] = lambda output: None,
) -> Flow[type[BaseException] | None]:
    """One call on PUBLIC input, and a check of its answer. Returns the class of what either raised, or None.

    The call itself runs as a private one. One that takes too long gives `TimeoutError`.
    """
    reader = SimpleNamespace(encode=check, aencode=lambda output: asyncio.to_thread(check, output))
    (found,) = yield private_calls(
        member,
        [request],
        max_concurrency=1,
        reader=reader,
        timeout=timeout,
        failed=type,
    )
    failure: type[BaseException] | None = TimeoutError if found is ABSTAIN else found
    return failure


_left_behind: set[asyncio.Task[None]] = set()  # keeps them alive until they end


def _forget(task: asyncio.Task[None]) -> None:
    """Take note of how a task ended: what nobody took note of, asyncio writes into the log."""
    _left_behind.discard(task)
    _ = task.cancelled() or task.exception()


@dataclass(eq=False, repr=False)
class _Round:
    """The calls of one release, ``max_concurrency`` at once, of ``timeout`` seconds each, with a clock for each.

    Without a ``reader`` outputs stay whole. ``failed`` gives what stands in the place of an output if its call raised.
    """

    member: Pristine
    requests: Sequence[MemberRequest]
    max_concurrency: int
    reader: OutputReader | None = None
    timeout: float | None = None
    failed: Callable[[BaseException], object] = lambda error: ABSTAIN
    patience: float | None = None

    def __post_init__(self) -> None:
        self.outputs: list[object | Abstention] = [ABSTAIN] * len(self.requests)
        self.gave_up = False
        self.stopped = threading.Event()  # no call begins any more
        self.waiting = deque(range(len(self.requests)))
        self.under_way: dict[int, Call] = {}
        self.found: dict[int, object] = {}  # what calls gave that have ended: a task would show its result
        self.places = min(self.max_concurrency, len(self.requests))  # for threads that may start
        self.lock = threading.Lock()
        self.bell: SimpleQueue[None] = SimpleQueue()  # rings when all calls have ended

    def result(self) -> list[object | Abstention]:
        """All outputs, in the order of the requests. Logs if a member's patience was over."""
        if self.gave_up:
            notes.log.warning(REFUSED)
        return self.outputs

    # -- in threads ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Make all calls, each in a thread."""
        try:
            self._finish()
        finally:
            self.stopped.set()
            self.waiting.clear()
            if self.under_way:
                self._finish()

    def _finish(self) -> None:
        """Begin what waits, and wait for what is under way. A call that is late abstains."""
        starved = math.inf
        while self.waiting or self.under_way:
            lacks_thread = not self._start()
            starved = min(starved, time.monotonic() + running.STARVED) if lacks_thread else math.inf
            if time.monotonic() > starved and not self.under_way:
                return  # those that wait abstain
            with contextlib.suppress(Empty):
                self.bell.get(timeout=0.05 if lacks_thread else self._seconds_left())
            with self.lock:
                for i, call in list(self.under_way.items()):
                    if call.overdue():
                        del self.under_way[i]
                        self.places += 1

    def _start(self) -> bool:
        """Begin as many calls as may run. False if a thread is lacking."""
        while True:
            with self.lock:
                if self.stopped.is_set() or not self.waiting or self.places < 1:
                    return True
                self.places -= 1
            if not running.start(self._work):
                with self.lock:
                    self.places += 1
                return False

    def _seconds_left(self) -> float | None:
        """Seconds until the next call may be late; None without a limit."""
        if self.timeout is None:
            return None
        with self.lock:
            left = self.timeout  # at most: a pause stops the clock
            for call in self.under_way.values():
                left = min(left, call.left())
        return min(max(left, 0.001), threading.TIMEOUT_MAX)

    def _work(self) -> None:
        """In a thread: one call after another, as long as some wait. Each has the thread as if it were new."""
        taken = self._take()
        renew = running.renewer()
        while taken is not None:
            i, call = taken
            with contextlib.suppress(BaseException):  # no memory for a context: nothing else comes out of a call
                clean_context().copy().run(immediate, self._call(i, call, False))
            taken = self._take(i)
            if taken is not None:
                renew()

    def _take(self, ended: int | None = None) -> tuple[int, Call] | None:
        """Note how a call of this thread has ended, and begin the next. None if it was late: its place is another's."""
        with self.lock:
            if ended is not None and self.under_way.pop(ended, None) is None:
                return None
            if ended is not None:
                self.outputs[ended] = self.found.pop(ended, ABSTAIN)
            if not self.waiting:
                if not self.under_way:
                    self.bell.put(None)
                return None
            i = self.waiting.popleft()
            call = self.under_way[i] = Call(self.timeout, self.patience)
            return i, call

    # -- on an event loop ----------------------------------------------------------------------------------------------

    async def arun(self) -> None:
        """Make all calls, each in a task."""
        gate = asyncio.Semaphore(self.max_concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                for i in range(len(self.requests)):
                    group.create_task(self._in_task(i, gate))
        finally:
            self.stopped.set()

    async def _in_task(self, i: int, gate: asyncio.Semaphore) -> None:
        """Make one call. If it is late, cancel it, and let no other begin in its place for `_GRACE` seconds."""
        async with gate:
            call = Call(self.timeout, self.patience)
            task = asyncio.create_task(self._call(i, call, True), context=clean_context().copy())
            _left_behind.add(task)
            task.add_done_callback(_forget)
            try:
                while not (task.done() or call.overdue()):
                    left = None if self.timeout is None else min(call.left(), self.timeout)  # a pause stops the clock
                    await asyncio.wait([task], timeout=left)
            finally:
                if not task.done():
                    call.close()
                    task.cancel()
                    await asyncio.wait([task], timeout=_GRACE)
            if task.done():
                self.outputs[i] = self.found.pop(i, ABSTAIN)

    # -- a call --------------------------------------------------------------------------------------------------------

    async def _call(self, i: int, call: Call, in_loop: bool) -> None:
        """One call, in a context of its own. It suspends only if ``in_loop``.

        What the call raises dies here, with its traceback and everything that it refers to. This is the outermost
        coroutine of its task: a GeneratorExit reaches only that one.
        """
        keep_silent()
        shut.enter()
        values, bucket = self.requests[i]
        config: RunnableConfig = {"callbacks": [], "tags": [], "metadata": {}}
        reader = self.reader
        found: object = ABSTAIN
        wait: float | None = 0.0
        while not (call.overdue() or self.stopped.is_set()):
            try:
                copy = self.member.copy(bucket)
                chain = copy.chain
                given = {**copy.given(deepcopy(dict(values))), "examples": bucket}  # nothing others write into
                output = await chain.ainvoke(given, config) if in_loop else chain.invoke(given, config)
                call.answered()
                output = copy.returned(output)
                if reader is not None:
                    output = await reader.aencode(output) if in_loop else reader.encode(output)
                found = output
                wait = None
            except BaseException as error:  # no interrupt is delivered to a worker thread: it is the member's own
                found = self.failed(error)
                wait = call.wait_after_error(error)
            if wait is None or call.overdue():
                break
            await call.pause(wait, self.stopped, in_loop)
        self.gave_up = self.gave_up or call.gave_up
        self.found[i] = ABSTAIN if call.overdue() else found  # a member may swallow its cancellation


# -- the flow around them ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failed:
    """A private flow raised. Holds an interrupt's type, or an error that shows nothing private, or nothing."""

    interrupt: type[BaseException] | None = None
    known: DPICLError | None = None

    def error(self, otherwise: Callable[[], DPICLError] = ReleaseFailed) -> BaseException:
        """A constant error, to be raised outside of every ``except`` block."""
        if self.known is not None:
            return self.known
        if self.interrupt is not None:
            return self.interrupt()
        return otherwise()


def guarded(work: Flow[T], shown: tuple[type[DPICLError], ...] = ()) -> Flow[T | Failed]:
    """Run a flow on the private side. Every exception ends here, so that no traceback refers to what is private.

    The flow's functions are called here, in a clean context as by `in_private`: a cancellation comes before or after
    them, and in place of other effects. ``shown`` are the package's own errors that may surface, because their messages
    hold nothing private: they lose traceback, cause and context.
    """
    held: list[Any] = [None]
    resume: Callable[[Any], Any] = work.send
    try:
        while True:
            held.append(resume(held.pop()))
            resume = work.send
            try:
                effect = held.pop()
                if callable(effect):
                    held.append(clean_context().copy().run(effect))
                else:
                    held.append((yield effect))
            except BaseException as error:
                held[:] = [error]
                resume = work.throw
    except StopIteration as end:
        result: T = end.value
        return result
    except shown as error:
        error.__cause__ = error.__context__ = None
        return Failed(known=error.with_traceback(None))
    except Exception:
        return Failed()
    except BaseException as interrupt:
        return Failed(type(interrupt))
