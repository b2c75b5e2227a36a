"""Threads for members: a call never waits for one, and a thread that hangs takes none from later calls."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from langchain_dpicl.calls.clock import current

T = TypeVar("T")
Work = Callable[[], object]

_KEPT = 512
STARVED = 30.0
"""Seconds to wait for a thread while the process can start none."""

_idle: deque[SimpleQueue[Work]] = deque()


def start(work: Work) -> bool:
    """Run ``work`` at once, in a thread of its own: one that is idle, or a new one. ``work`` must not raise.

    The threads are daemons: a call that hangs does not keep the process alive. Returns False if none can start.
    """
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = SimpleQueue()
        try:
            threading.Thread(target=_serve, args=(inbox,), name="dpicl-member", daemon=True).start()
        except (RuntimeError, MemoryError):
            return False
    inbox.put(work)
    return True


def _serve(inbox: SimpleQueue[Work]) -> None:
    while True:
        work = inbox.get()
        with contextlib.suppress(BaseException):  # `threading.excepthook` must not see it
            work()
        del work
        if len(_idle) >= _KEPT:
            return
        _idle.append(inbox)


def submit(function: Callable[..., T], *arguments: Any, **named: Any) -> Future[T]:
    """Call a function in a thread of `start`, in a copy of this context. Raises RuntimeError if no thread can start."""
    done: Future[T] = Future()

    def work() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            result = function(*arguments, **named)
        except StopIteration:  # a future of an event loop cannot hold it
            done.set_exception(RuntimeError("StopIteration"))
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    if not start(partial(contextvars.copy_context().run, work)):
        raise RuntimeError("can't start new thread")
    return done


class _Executor(ThreadPoolExecutor):
    """An event loop's default executor that gives the work of private calls a thread at once, whatever others hold.

    LangChain runs tools, parsers and embeddings there that have no asynchronous call of their own. All other
    work goes where it went before. No thread of a private call is waited for when the loop ends.
    """

    def __init__(self, before: Executor | None) -> None:
        super().__init__()
        self._before = before or ThreadPoolExecutor(thread_name_prefix="asyncio")

    def submit(self, function: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        if current.get() is not None:
            return submit(function, *arguments, **named)
        return self._before.submit(function, *arguments, **named)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._before.shutdown(wait, cancel_futures=cancel_futures)
        super().shutdown(wait, cancel_futures=cancel_futures)


def separate(loop: asyncio.AbstractEventLoop) -> None:
    """Keep private calls out of a loop's own threads, if the loop shows which executor it has (uvloop does not)."""
    before: Any = getattr(loop, "_default_executor", loop)
    if before is not loop and not isinstance(before, _Executor):
        loop.set_default_executor(_Executor(before))


async def in_thread(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """`asyncio.to_thread` with a thread of `start`.

    The event loop's own threads are few and everybody's: a call would wait there for other calls.
    """
    until = time.monotonic() + STARVED
    while True:
        try:
            done = submit(function, *arguments, **named)
            break
        except RuntimeError:
            if time.monotonic() > until:
                raise
        call = current.get()
        with contextlib.nullcontext() if call is None else call.waits():
            await asyncio.sleep(0.05)
    return await asyncio.wrap_future(done)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a fork copies no threads
