"""One call under way: its clock, its requests at the model, and its thread.

The clock counts the call's own work, and stands still while the call waits for others. A call waits for others while
its next request waits for the model's slot, and after a server has refused it (HTTP status 429), as long as the server
asked for. Its clock stands still only if none of its own requests is under way. A release within a member is work of
that member: its calls have clocks of their own, and the member's stops when they all wait.

A call never waits for a thread, and a thread that hangs takes none from later calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import email.utils
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Work = Callable[[], object]

PATIENCE = 600.0
"""Seconds that one call waits in all for servers that refuse it with the status 429."""

READING = 30.0
"""Seconds that the reading of one answer has at least. All answers are read at once, and may wait for each other if an
embedding model in this process takes one text at a time. No clock stops there, so this one is generous."""

_LONGEST_WAIT = 60.0

_KEPT = 512
STARVED = 30.0
"""Seconds to wait for a thread while the process can start none."""


class Overdue(BaseException):
    """The call's time is over. No `Exception`: a member's retries and fallbacks must not go on with it."""


class Calls:
    """The calls of one release: ``seconds`` of own work each (None: no limit), perhaps within the call ``outer``.

    Each waits ``patience`` seconds for servers that refuse it; `PATIENCE` unless given.
    """

    def __init__(self, seconds: float | None, outer: Call | None, patience: float | None = None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self.patience = PATIENCE if patience is None else patience
        self.outer = outer
        self.stopped = threading.Event()
        self.gave_up = False


class Call:
    """One call under way. Every method may be called from any thread."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._outer = calls, calls.outer
        self._lock = threading.Lock()
        self._left: float | None = None  # what is left while the clock stands still
        self._waiting = 0
        self._patience, self._tries = calls.patience, 0
        self.flights: set[Flight] = set()
        self.routes: dict[Any, Any] = {}  # by the servers of a model: see `servers`
        self.closed_at = math.inf
        self.deadline = time.monotonic() + calls.seconds

    def _line(self) -> Iterator[Call]:
        call: Call | None = self
        while call is not None:
            yield call
            call = call._outer

    def left(self) -> float:
        """Seconds until the first of this call and those around it is overdue."""
        left = min(self.deadline, self.closed_at) - time.monotonic()
        return left if self._outer is None else min(left, self._outer.left())

    def overdue(self) -> bool:
        """Whether its time is over, or that of a call around it."""
        return self.left() <= 0

    def _set_clock(self) -> None:
        stands = self._waiting > 0 and not self.flights
        if stands and self._left is None:
            self._left, self.deadline = self.deadline - time.monotonic(), math.inf
        elif not stands and self._left is not None:
            self.deadline, self._left = time.monotonic() + self._left, None

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """What happens here is no work of the call."""

        def count(more: int) -> None:
            for call in self._line():
                with call._lock:
                    call._waiting += more
                    call._set_clock()

        count(1)
        try:
            yield
        finally:
            count(-1)

    def answered(self) -> None:
        """The member has answered. Its answer is read on a clock of its own, if it came in time."""
        with self._lock:
            if self.deadline > (now := time.monotonic()):
                self.deadline, self._left = now + max(self._calls.seconds, READING), None

    def restart(self) -> None:
        """Begin anew, from zero."""
        with self._lock:
            if self._left is None:
                self.deadline = time.monotonic() + self._calls.seconds
            else:
                self._left = self._calls.seconds

    async def pause(self, seconds: float, in_loop: bool) -> None:
        """Sleep off the clock; it suspends only if ``in_loop``. `Overdue` ends it if the release is stopped."""
        with self.waits():
            if in_loop:
                await asyncio.sleep(seconds)
            elif self._calls.stopped.wait(seconds):
                raise Overdue

    def begin(self, flight: Flight) -> None:
        """A request begins. Raises `Overdue` if the time is over: nothing may begin then."""
        for call in self._line():
            with call._lock:
                late = min(call.deadline, call.closed_at) <= time.monotonic()
                if not late:
                    call.flights.add(flight)
                    call._set_clock()
            if late or flight.over:  # another thread may close the call meanwhile
                flight.end(clean=True)
                self.end(flight)
                raise Overdue

    def end(self, flight: Flight) -> None:
        """A request is over."""
        for call in self._line():
            with call._lock:
                call.flights.discard(flight)
                call._set_clock()

    def close(self) -> None:
        """Let no further request begin, and end those under way, whatever the call's own code does.

        Called at its deadline, and when it has returned: it may have left a stream open, or hang for ever.
        """
        with self._lock:
            self.closed_at = min(self.closed_at, time.monotonic())
            flights = list(self.flights)
        for flight in flights:
            flight.abort()

    def wait_after(self, headers: Any) -> float | None:
        """Seconds to wait after a refusal: what its headers ask for, or ever more. None if the patience is over."""
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
            self._calls.gave_up = True
            return None
        self._patience -= seconds
        return seconds

    def wait_after_error(self, error: BaseException) -> float | None:
        """The same for a refusal that a client raised; None for every other error."""
        cause: BaseException | None = error
        with contextlib.suppress(BaseException):  # reading an error's attributes may raise anything
            for _ in range(4):  # an integration wraps its SDK's error
                if not isinstance(cause, Exception):
                    break
                response = getattr(cause, "response", None)
                for raised in (cause, response):
                    named = (getattr(raised, name, None) for name in ("status_code", "code", "status"))  # by SDKs
                    if next((status for status in named if isinstance(status, int)), None) == 429:
                        return self.wait_after(getattr(response, "headers", None))
                cause = cause.__cause__
        return None


class Flight:
    """One request of a call under way, from its first byte until its answer is read or given up.

    ``leave`` is called once it is over. Making one raises `Overdue` if the call's time is over.
    """

    def __init__(self, call: Call, leave: Callable[..., object] | None) -> None:
        self.call = call
        self._leave = leave
        self.wire: Any = None  # the connection that carries it
        self._ended = threading.Lock()  # its reader, or the thread that closes the call, takes it once
        call.begin(self)

    @property
    def over(self) -> bool:
        """Whether it has ended. Nothing more may be read of it then."""
        return self._ended.locked()

    def check(self) -> None:
        """Raise `Overdue` if the call's time is over."""
        if self.call.overdue():
            raise Overdue

    def abort(self) -> None:
        """Close the connection under the reader's hands, and end the flight."""
        self.end(clean=False)
        with contextlib.suppress(Exception):
            self.wire.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def end(self, *, clean: bool) -> None:
        """It is over; ``clean`` if the server has finished it."""
        if self._ended.acquire(blocking=False):
            self.call.end(self)
            if self._leave is not None:
                self._leave(self.call, clean=clean)


current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("dpicl_call", default=None)
"""The call that is running in this context."""


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
            thread = threading.Thread(target=_serve, args=(inbox,), name="dpicl-member", daemon=True)
            contextvars.Context().run(thread.start)  # it serves others, too
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


class Threads(ThreadPoolExecutor):
    """The default executor of the event loop of private calls: all work has a thread at once, whatever others hold.

    LangChain runs tools, parsers and embeddings there that have no asynchronous call of their own.
    """

    def submit(self, function: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        return submit(function, *arguments, **named)


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
