"""Threads for members: a call never waits for one, and a thread that hangs takes none from later calls."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Work = Callable[[], object]

_KEPT = 512
_idle: deque[SimpleQueue[Work]] = deque()


def start(work: Work) -> None:
    """Run ``work`` at once, in a thread of its own: one that is idle, or a new one. ``work`` must not raise.

    The threads are daemons: a call that hangs does not keep the process alive.
    """
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), name="dpicl-member", daemon=True).start()
    inbox.put(work)


def _serve(inbox: SimpleQueue[Work]) -> None:
    while True:
        work = inbox.get()
        with contextlib.suppress(BaseException):  # `threading.excepthook` must not see it
            work()
        del work
        if len(_idle) >= _KEPT:
            return
        _idle.append(inbox)


async def in_thread(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """`asyncio.to_thread` with a thread of `start`.

    The event loop's own threads are few and everybody's: a call would wait there for other calls.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():  # whoever waited was cancelled
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = context.run(function, *arguments, **named)
        except StopIteration:  # a future cannot hold it
            failure = RuntimeError("StopIteration")
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)
        del result, failure

    start(work)
    return await done


def _forget() -> None:
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # a fork copies no threads
