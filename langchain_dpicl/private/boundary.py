"""The private boundary: run Runnables on private input so that nothing but their return values comes back.

LangChain hands every input and output to callbacks, tracers, streams and caches that it finds in the configuration, in
context variables, in the environment and in globals. Here each call runs

* in an empty ``contextvars.Context`` of its own (no inherited configuration, callbacks, collectors or LangGraph
  stream writers),
* with LangSmith tracing switched off inside that context and an empty callback list,
* on a sealed copy of the chain, whose models have no cache, no verbosity and no callbacks of their own, and whose
  graphs keep no checkpoints (what sealing cannot reach, and would show something, is refused),
* without a word in the logs and no warnings (see `silence`),
* for a limited time, if there is a limit, which others' calls do not shorten (see `calls`),
* on its own, never through ``batch``: there, one member's failing prompt can fail its neighbours, so that one owner
  would move many members' outputs,
* and with every exception turned into `ABSTAIN`, so that neither a message nor a traceback leaves.

No library can close the rest: the operators of the process and of the model server, a provider's logs, a function in
the chain that writes somewhere itself, patches of the classes of a model or its client, timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from langchain_core.runnables import Runnable, RunnableConfig

from langchain_dpicl.calls import threads
from langchain_dpicl.calls.clock import Call, Calls, current
from langchain_dpicl.private import silence
from langchain_dpicl.private.sealing import check_public as check_public
from langchain_dpicl.private.sealing import seal as seal
from langchain_dpicl.private.silence import ain_private as ain_private
from langchain_dpicl.private.silence import check_loop as check_loop
from langchain_dpicl.private.silence import check_surroundings as check_surroundings
from langchain_dpicl.private.silence import in_private as in_private

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


Request = tuple[Mapping[str, Any], Sequence[dict[str, Any]]]


class Reader(Protocol):
    """Reads one member's output within that member's call (see `Aggregator.encode`)."""

    def encode(self, output: object) -> object:
        """What is kept of the output."""
        return output

    async def aencode(self, output: object) -> object:
        """The same, asynchronously."""
        return self.encode(output)


class _Whole(Reader):
    """Keeps the output as it is."""


WHOLE: Final[Reader] = _Whole()

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
    under_way: dict[int, Call] = {}  # its worker or `wait` takes a call out of it, and has its place then
    ended: SimpleQueue[None] = SimpleQueue()

    def work() -> None:
        while True:
            try:
                i = waiting.popleft()
            except IndexError:
                break
            call = under_way[i] = Call(calls)
            found = silence.clean_context().copy().run(_call, call, member, requests[i], reader, failed)
            if under_way.pop(i, None) is None:  # another worker has its place
                return
            outputs[i] = found
            del found
        ended.put(None)

    at_once = min(max_concurrency, len(requests))
    workers, starved = 0, math.inf

    def wait() -> None:
        """Wait until all is done. Close each call that is overdue, and replace its worker if possible."""
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
    if calls.gave_up:
        _log.warning(REFUSED)
    return outputs


def _until_next(under_way: dict[int, Call], calls: Calls) -> float | None:
    """Seconds until a call may be overdue; None if there is no limit."""
    if calls.seconds == math.inf and calls.outer is None:
        return None
    left = min((call.left() for call in under_way.copy().values()), default=1.0)
    return min(max(left, 0.01), 1.0, calls.seconds)


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
        values = _entered(call, requests[i])
        wait: float | None = 0.0
        found: object = ABSTAIN
        while wait is not None:
            try:
                if wait:
                    await call.apause(wait)
                    call.restart()
                output = await member.ainvoke(values(), _config())
                call.answered()
                found = await reader.aencode(output)
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

    tasks = [asyncio.create_task(one(i), context=silence.clean_context().copy()) for i in range(len(requests))]
    pending = set(tasks)
    try:
        while pending:  # unlike awaiting a task, this ends at once when the caller is cancelled
            _, pending = await asyncio.wait(pending, timeout=_until_next(under_way, calls))
            for i, call in under_way.copy().items():
                if call.overdue():
                    pending -= _end(tasks[i], call)
                    if tasks[i] not in pending:
                        leave(i)
        if calls.gave_up:
            _log.warning(REFUSED)
        return outputs
    finally:
        calls.stopped.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


_left_behind: set[asyncio.Task[None]] = set()  # keeps them alive until they end


def _end(task: asyncio.Task[None], call: Call) -> set[asyncio.Task[None]]:
    """Cancel a task that is overdue. Returns it if it ignores this for too long: then it is left behind."""
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


def _call(
    call: Call, member: Runnable[Any, Any], request: Request, reader: Reader, failed: Failed
) -> object | Abstention:
    """One call in a worker thread; what it raises dies here, with its traceback and everything that it refers to."""
    values = _entered(call, request)
    wait: float | None = 0.0
    found: object = ABSTAIN
    while wait is not None and not call.overdue():
        try:
            if wait:
                call.pause(wait)
                call.restart()
            output = member.invoke(values(), _config())
            call.answered()
            found = reader.encode(output)
            wait = None
        except BaseException as error:  # no interrupt is delivered to a worker thread: it is the member's own
            wait = call.wait_after_error(error)
            found = failed(error)
    late = call.overdue()
    call.close()
    return ABSTAIN if late else found


def _entered(call: Call, request: Request) -> Callable[[], dict[str, Any]]:
    """Enter a call in this context. Returns what makes its input: a copy, which no other member has written into."""
    values, bucket = request
    _bucket.set(bucket)
    current.set(call)
    return lambda: {**copy.deepcopy(dict(values)), "examples": bucket}


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Checked(Reader):
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
    found: Any = run_private(member, [request], max_concurrency=1, reader=_Checked(check), timeout=timeout, failed=type)
    failure: type[BaseException] | None = TimeoutError if found[0] is ABSTAIN else found[0]
    return failure


async def aprobe(
    member: Runnable[Any, Any], request: Request, check: Callable[[object], None], timeout: float | None = None
) -> type[BaseException] | None:
    """`probe` with the member's ``ainvoke``."""
    found: Any = await arun_private(
        member, [request], max_concurrency=1, reader=_Checked(check), timeout=timeout, failed=type
    )
    failure: type[BaseException] | None = TimeoutError if found[0] is ABSTAIN else found[0]
    return failure
