"""One call under way: its clock and its thread.

A call has a thread, or a task on the event loop of private calls, and a clock from its own start. If its time is over,
it abstains: nothing else waits for it, and what hangs keeps its thread. No call waits for a thread that another holds.

A server that refuses a call (HTTP status 429) is asked again after as long as it asks for. The clock of the call then
begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import email.utils
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from langchain_dpicl.calls import shut

T = TypeVar("T")
Work = Callable[[], object]

PATIENCE = 600.0
"""Seconds that one call waits in all for servers that refuse it with the status 429."""

READING = 30.0
"""Seconds that the reading of one answer has at least. All answers are read at once, and may wait for each other if an
embedding model in this process takes one text at a time. So this is generous."""

STARVED = 30.0
"""Seconds to wait for a thread while the process can start none."""

_LONGEST_WAIT = 60.0
_KEPT = 512
_NAME = "dpicl-member"


class Call:
    """One call under way, whose clock runs: ``seconds`` for its own work (None: no limit), later for its reading.

    It waits ``patience`` seconds in all for servers that refuse it; `PATIENCE` unless given.
    """

    def __init__(self, seconds: float | None, patience: float | None = None) -> None:
        self._seconds = math.inf if seconds is None else seconds
        self._patience = PATIENCE if patience is None else patience
        self._tries = 0
        self.gave_up = False
        """True if a server has refused it for longer than that."""
        self._deadline = time.monotonic() + self._seconds

    def left(self) -> float:
        """Seconds until it is overdue."""
        return self._deadline - time.monotonic()

    def overdue(self) -> bool:
        """True if its time is over."""
        return time.monotonic() >= self._deadline

    def answered(self) -> None:
        """The member has answered. Its answer is read on a clock of its own, if it came in time."""
        now = time.monotonic()
        if now < self._deadline:
            self._deadline = now + max(self._seconds, READING)

    def close(self) -> None:
        """End its time."""
        self._deadline = -math.inf

    async def pause(self, seconds: float, stopped: threading.Event, in_loop: bool) -> None:
        """Sleep, and begin anew; ``stopped`` ends the sleep. It suspends only if ``in_loop``."""
        self._deadline = math.inf
        if in_loop:
            await asyncio.sleep(seconds)
        else:
            stopped.wait(seconds)
        self._deadline = time.monotonic() + self._seconds

    def wait_after_error(self, error: BaseException) -> float | None:
        """Seconds to wait after a refusal that a client raised; None for another error, and if the patience is over."""
        cause: BaseException | None = error
        with contextlib.suppress(BaseException):  # reading an error's attributes may raise anything
            for _ in range(4):  # an integration wraps its SDK's error
                if not isinstance(cause, Exception):
                    break
                response = getattr(cause, "response", None)
                for raised in (cause, response):
                    named = (getattr(raised, name, None) for name in ("status_code", "code", "status"))  # by SDKs
                    if next((status for status in named if isinstance(status, int)), None) == 429:
                        refusal = cause if response is None else response
                        return self._wait_after(getattr(refusal, "headers", None))
                cause = cause.__cause__
        return None

    def _wait_after(self, headers: Any) -> float | None:
        """The seconds that a refusal's headers ask for, or ever more."""
        seconds = 0.0
        with contextlib.suppress(Exception):  # headers that nobody can read ask for nothing
            if (milliseconds := headers.get("retry-after-ms")) is not None:
                seconds = float(milliseconds) / 1000
            elif (text := str(headers.get("retry-after"))).replace(".", "", 1).isdigit():
                seconds = float(text)
            else:
                seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        if not 0 < seconds < math.inf:
            seconds = min(2.0**self._tries, _LONGEST_WAIT)
        self._tries += 1
        if seconds > self._patience:
            self.gave_up = True
            return None
        self._patience -= seconds
        return seconds


# -- its thread --------------------------------------------------------------------------------------------------------


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
            thread = threading.Thread(target=_serve, args=(inbox,), name=_NAME, daemon=True)
            contextvars.Context().run(thread.start)  # it serves others, too
        except (RuntimeError, MemoryError):
            return False
    inbox.put(work)
    return True


def renewer() -> Callable[[], None]:
    """Return the function that makes this thread as good as new for the next call.

    It undoes the settings of a call: the thread's object, with all that is written there, its event loop, and its
    profiler and tracer.
    """
    profiler = sys.getprofile()
    tracer = sys.gettrace()

    def renew() -> None:
        threading._DummyThread().name = _NAME  # it becomes the thread's object
        asyncio.set_event_loop(None)
        sys.setprofile(profiler)
        sys.settrace(tracer)

    return renew


def _serve(inbox: SimpleQueue[Work]) -> None:
    shut.mark_thread()
    renew = renewer()
    while True:
        work = inbox.get()
        with contextlib.suppress(BaseException):  # `threading.excepthook` must not see it
            work()
        del work
        renew()
        if len(_idle) >= _KEPT:
            return
        _idle.append(inbox)


class Threads(ThreadPoolExecutor):
    """The default executor of the event loop of private calls: all work has a thread at once, whatever others hold.

    LangChain runs there what has no asynchronous call of its own, and ``asyncio.to_thread`` what it is given.
    """

    def submit(self, function: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """Call a function in a thread of `start`, in a copy of this context. Raises RuntimeError if none can start."""
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a fork copies no threads
