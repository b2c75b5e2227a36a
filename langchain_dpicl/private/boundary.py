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

`guarded` does the last for the flow around the calls: sampling, aggregation, noise.

No library can close the rest: the operators of the process and of the model server, a provider's logs, a function in
the chain that writes somewhere itself, patches of the classes of a model or its client, timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
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

from langchain_core.runnables import RunnableConfig

from langchain_dpicl.calls import running
from langchain_dpicl.calls.flow import Either, Flow, immediate
from langchain_dpicl.calls.running import Call, Calls, current
from langchain_dpicl.errors import DPICLError, ReleaseFailed
from langchain_dpicl.private import notes
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.private.own_loop import on_own_loop
from langchain_dpicl.private.sealing import check_loop as check_loop
from langchain_dpicl.private.sealing import check_surroundings as check_surroundings
from langchain_dpicl.private.sealing import seal as seal
from langchain_dpicl.private.silence import clean_context, keep_silent
from langchain_dpicl.private.silence import in_private as in_private
from langchain_dpicl.private.sources import check_public as check_public
from langchain_dpicl.private.sources import searches as searches

T = TypeVar("T")

_GRACE = 5.0  # seconds for a coroutine to end once it is cancelled
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


MemberRequest = tuple[Mapping[str, Any], Sequence[dict[str, Any]]]
"""A member's input and its bucket."""


class OutputReader(Protocol):
    """Reads one member's output within that member's call (see `Aggregator.encode`)."""

    def encode(self, output: object) -> object:
        """What is kept of the output."""

    async def aencode(self, output: object) -> object:
        """The same, asynchronously."""


# -- the calls of one release ------------------------------------------------------------------------------------------


def run_private(member: Pristine, requests: Sequence[MemberRequest], **how: Any) -> list[object | Abstention]:
    """Call a copy of a sealed member per request, in parallel threads, and read each output in its own call.

    ``how`` are the further fields of `_Round`. Failures become `ABSTAIN`, and so does a call whose own work takes more
    than ``timeout`` seconds. What hangs is left behind in its thread. If the caller is interrupted, no further call
    begins, and those under way are waited for.
    """
    calls = _Round(member, requests, in_loop=False, **how)
    immediate(calls.run())
    return calls.result()


async def arun_private(member: Pristine, requests: Sequence[MemberRequest], **how: Any) -> list[object | Abstention]:
    """The same with the member's ``ainvoke``, on an event loop of private calls alone (`own_loop`).

    If the caller is cancelled, every call is cancelled and awaited. No call begins in the place of another before that
    one has ended, or has ignored its cancellation for `_GRACE` seconds.
    """
    calls = _Round(member, requests, in_loop=True, **how)
    await on_own_loop(calls.run)
    return calls.result()


def private_calls(member: Pristine, requests: Sequence[MemberRequest], **how: Any) -> Either:
    """`run_private` and `arun_private` as a flow's effect."""
    return Either(partial(run_private, member, requests, **how), partial(arun_private, member, requests, **how))


def probe(
    member: Pristine,
    request: MemberRequest,
    timeout: float | None = None,
    check: Callable[[object], None] = lambda output: None,
) -> Flow[type[BaseException] | None]:
    """One call on PUBLIC input, and a check of its answer. Returns the class of what either raised, or None.

    The call itself runs as a private one. One that takes too long gives `TimeoutError`.
    """
    reader = SimpleNamespace(encode=check, aencode=partial(running.in_thread, check))
    (found,) = yield private_calls(member, [request], max_concurrency=1, reader=reader, timeout=timeout, failed=type)
    failure: type[BaseException] | None = TimeoutError if found is ABSTAIN else found
    return failure


_left_behind: set[asyncio.Task[None]] = set()  # keeps them alive until they end


def _forget(task: asyncio.Task[None]) -> None:
    """Take note of how a task ended: what nobody took note of, asyncio writes into the log."""
    _left_behind.discard(task)
    _ = task.cancelled() or task.exception()


@dataclass(eq=False, repr=False)
class _Round:
    """The calls of one release, ``max_concurrency`` at once, of ``timeout`` seconds each.

    Each call has a thread or, if ``in_loop``, a task. A thread whose call has ended takes the next one itself: no
    thread has to wake for that. Without a ``reader`` outputs stay whole. ``failed`` gives what stands in the place of
    an output if its call raised.
    """

    member: Pristine
    requests: Sequence[MemberRequest]
    in_loop: bool
    max_concurrency: int
    reader: OutputReader | None = None
    timeout: float | None = None
    failed: Callable[[BaseException], object] = lambda error: ABSTAIN
    patience: float | None = None

    def __post_init__(self) -> None:
        self.calls = Calls(self.timeout, current.get(), self.patience)
        self.outputs: list[object | Abstention] = [ABSTAIN] * len(self.requests)
        self.waiting = deque(range(len(self.requests)))
        self.under_way: dict[int, Call] = {}
        self.found: dict[int, object] = {}  # what calls gave that have ended
        self.lock = threading.Lock()  # held while a call takes the place of another
        self.ended: set[int] = set()  # calls in threads
        self.bell: SimpleQueue[None] = SimpleQueue()  # rings when a thread has no call any more
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Make all calls. It suspends only if ``in_loop``."""
        try:
            await self._finish()
        finally:
            self.calls.stopped.set()
            self.waiting.clear()
            await self._finish()

    def result(self) -> list[object | Abstention]:
        """All outputs, in the order of the requests. Logs if a member's patience was over."""
        if self.calls.gave_up:
            notes.log.warning(REFUSED)
        return self.outputs

    async def _finish(self) -> None:
        """Begin what waits and wait for all that is under way. End each call that is overdue."""
        starved, look_at = math.inf, 0.0
        limited = self.calls.seconds < math.inf or self.calls.outer is not None
        while self.waiting or self.under_way:
            while self.waiting and len(self.under_way) < self.max_concurrency and self._start():
                pass
            starved = math.inf if self.under_way else min(starved, time.monotonic() + running.STARVED)
            now = time.monotonic()
            if now > starved:
                return  # those that wait abstain
            if limited and now >= look_at and self.under_way:
                left = min(call.left() for call in list(self.under_way.values()))
                look_at = now + min(max(left, 0.01), 1.0, self.calls.seconds)
            seconds = look_at - now if limited else None
            if self.waiting and len(self.under_way) < self.max_concurrency:
                seconds = 0.05
            for i in await self._wait(seconds):
                if self.under_way.pop(i, None) is not None:  # not too late
                    self.outputs[i] = self.found.pop(i, ABSTAIN)
            if not limited or time.monotonic() < look_at:
                continue
            for i, call in list(self.under_way.items()):
                if call.overdue() and i not in self.found and self._end(i, call):  # one that has ended is closed, too
                    with self.lock:
                        self.under_way.pop(i, None)

    def _next(self, before: int | None = None) -> tuple[int, Call] | None:
        """Take a call that waits, unless ``before``, in whose place it begins, was ended. None if there is none."""
        with self.lock:
            if not self.waiting or not (before is None or before in self.under_way):
                return None
            i, call = self.waiting.popleft(), Call(self.calls)
            self.under_way[i] = call
            return i, call

    def _start(self) -> bool:
        """Begin the next call. False if no thread can start now, or none waits any more."""
        taken = self._next()
        if taken is None:
            return False
        i, call = taken
        if self.in_loop:
            self.tasks[i] = asyncio.create_task(self._call(i, call), context=clean_context().copy())
        elif not running.start(partial(self._work, taken)):
            with self.lock:
                del self.under_way[i]
                self.waiting.appendleft(i)
            return False
        return True

    def _work(self, taken: tuple[int, Call] | None) -> None:
        """In a thread: this call, then others that wait."""
        while taken is not None:
            i, call = taken
            with contextlib.suppress(BaseException):  # no memory for a context: nothing else comes out of a call
                clean_context().copy().run(immediate, self._call(i, call))
            taken = self._next(i)  # before this one has ended: never more calls at once
            self.ended.add(i)
        self.bell.put(None)

    async def _wait(self, seconds: float | None) -> list[int]:
        """Wait until a call has ended, but no longer than this. Returns all that have."""
        if not self.in_loop:
            if self.ended.isdisjoint(self.under_way):  # an interrupt may have come after the bell
                with contextlib.suppress(Empty):
                    self.bell.get(timeout=seconds)
            return [i for i in list(self.under_way) if i in self.ended]
        tasks = {self.tasks[i]: i for i in self.under_way}
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        for task in done:
            _forget(task)
        return [tasks[task] for task in done]

    def _end(self, i: int, call: Call) -> bool:
        """End a call that is overdue. Returns whether another one may begin in its place."""
        if not self.in_loop:
            call.close()  # its requests at the model have ended now
            return True
        if math.isinf(call.closed_at):
            call.close()
            self.tasks[i].cancel()
        elif time.monotonic() - call.closed_at > _GRACE and not self.tasks[i].done():
            _left_behind.add(self.tasks[i])
            self.tasks[i].add_done_callback(_forget)
            return True
        return False

    async def _call(self, i: int, call: Call) -> None:
        """One call, in a context of its own. It suspends only if ``in_loop``.

        What the call raises dies here, with its traceback and everything that it refers to. This is the outermost
        coroutine of its task: a GeneratorExit reaches only that one.
        """
        keep_silent()
        values, bucket = self.requests[i]
        _bucket.set(bucket)
        current.set(call)
        config: RunnableConfig = {"callbacks": [], "tags": [], "metadata": {}}
        reader, in_loop = self.reader, self.in_loop
        wait: float | None = 0.0
        found: object = ABSTAIN
        while wait is not None and not call.overdue() and not self.calls.stopped.is_set():
            try:
                if wait:
                    await call.pause(wait, in_loop)
                    call.restart()
                copy = self.member.copy()
                chain = copy.chain
                given = {**copy.given(deepcopy(dict(values))), "examples": bucket}  # nothing others write into
                output = await chain.ainvoke(given, config) if in_loop else chain.invoke(given, config)
                call.answered()
                output = copy.returned(output)
                if reader is not None:
                    output = await reader.aencode(output) if in_loop else reader.encode(output)
                found, wait = output, None
            except BaseException as error:  # no interrupt is delivered to a worker thread: it is the member's own
                wait = call.wait_after_error(error)
                found = self.failed(error)
        self.found[i] = ABSTAIN if call.overdue() else found  # a member may swallow its cancellation
        call.close()


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
        return otherwise() if self.interrupt is None else self.interrupt()


def guarded(work: Flow[T], shown: tuple[type[DPICLError], ...] = ()) -> Flow[T | Failed]:
    """Run a flow on the private side. Every exception ends here, so that no traceback refers to what is private.

    The flow's functions run in a clean context (`in_private`). ``shown`` are the package's own errors that may surface,
    because their messages hold nothing private: they lose traceback, cause and context.
    """
    held: list[Any] = [None]
    resume: Callable[[Any], Any] = work.send
    try:
        while True:
            held.append(resume(held.pop()))
            resume = work.send
            try:
                effect = held.pop()
                held.append((yield partial(in_private, effect) if callable(effect) else effect))
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
