"""The event loop on which asynchronous private calls run: one for the process, in a thread of its own.

It is made in private code, so it reports nothing (see `silence`). On the caller's loop a member's forgotten task or
future would be reported to the caller's handler, and nothing about a future tells who made it.

A member's task that raises SystemExit ends no loop but this one, which goes on.

A connection belongs to the event loop that opened it. So the asynchronous HTTP clients of the models, which public code
may use on its own loop, have other connections here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from langchain_dpicl.calls import shut
from langchain_dpicl.calls.running import Threads
from langchain_dpicl.private.silence import in_private, keep_silent, private

_FIRST = os.getpid()
_guard = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []  # at most one


def _own_loop() -> asyncio.AbstractEventLoop:
    with _guard:
        if not _loops:
            keep_silent()
            loop: asyncio.AbstractEventLoop = in_private(asyncio.new_event_loop)
            loop.set_debug(False)
            loop.set_default_executor(Threads())
            vars(loop).update(set_default_executor=lambda executor: None, shutdown_default_executor=_nothing)
            thread = threading.Thread(
                target=in_private,
                args=(_run, loop),
                name="dpicl-loop",
                daemon=True,
            )
            contextvars.Context().run(thread.start)  # not in the context of the call that happens to be the first
            _loops.append(loop)
        return _loops[0]


async def _nothing(timeout: float | None = None) -> None:
    """For what a call would do to the executor of all."""


def _run(loop: asyncio.AbstractEventLoop) -> None:
    shut.mark_thread()
    while True:
        with contextlib.suppress(BaseException):
            loop.run_forever()


def separate_pools() -> None:
    """Give private calls connections of their own loop, and of their own process: another pool for each.

    For clients of ``httpx`` and of ``httpx2``, on which most model SDKs stand. A forked child has its parent's sockets:
    it would read the parent's answers.
    """
    for name in ("httpcore", "httpcore2"):
        library = sys.modules.get(name)
        for kind in (getattr(library, "AsyncConnectionPool", None), getattr(library, "ConnectionPool", None)):
            if kind is not None and not hasattr(kind, "dpicl_twins"):
                kind.dpicl_twins = weakref.WeakKeyDictionary()
                method = "handle_async_request" if hasattr(kind, "handle_async_request") else "handle_request"
                setattr(kind, method, _with_twins(getattr(kind, method), kind.dpicl_twins))


def _with_twins(before: Any, twins: Any) -> Any:
    """A pool's method that answers each request by the pool's twin; it may return an awaitable."""
    is_coroutine = inspect.iscoroutinefunction(before)

    @functools.wraps(before)
    def handle(pool: Any, request: Any) -> Any:
        place: Any = os.getpid()
        if is_coroutine:
            place = asyncio.get_running_loop()
        elif place == _FIRST:
            return before(pool, request)
        if not private.get():
            return before(pool, request)
        known = twins.setdefault(pool, {})
        for each in [each for each in known if isinstance(each, asyncio.AbstractEventLoop) and each.is_closed()]:
            del known[each]
        if place not in known:
            known[place] = twin = copy.copy(pool)
            twin._connections = []
            twin._requests = []
            twin._optional_thread_lock = type(pool._optional_thread_lock)()
        return before(known[place], request)

    return handle


async def on_own_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine on the loop of private calls and wait for its end. If this task is cancelled, so is that one.

    No future holds what the coroutine raises: this raises it.
    """
    separate_pools()
    loop = _own_loop()
    here = asyncio.get_running_loop()
    over = asyncio.Event()
    raised: list[BaseException] = []
    tasks: list[asyncio.Task[None]] = []

    async def run() -> None:
        try:
            await work()
        except BaseException as error:
            raised[:] = [error]

    def end(task: asyncio.Task[None]) -> None:
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            here.call_soon_threadsafe(over.set)

    def begin() -> None:
        tasks.append(loop.create_task(run()))
        tasks[0].add_done_callback(end)

    loop.call_soon_threadsafe(begin)
    cancelled = False
    while not over.is_set():
        try:
            await over.wait()
        except asyncio.CancelledError:
            cancelled = True
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())
    if cancelled:
        raise asyncio.CancelledError
    if raised and not isinstance(raised[0], asyncio.CancelledError):  # else a call has cancelled what it has found
        try:
            raise raised[0]
        finally:
            raised.clear()


def _forget() -> None:
    """A fork copies no threads."""
    global _guard
    _guard = threading.Lock()
    _loops.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
