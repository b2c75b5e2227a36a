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
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from langchain_dpicl.calls import shut
from langchain_dpicl.calls.running import Threads
from langchain_dpicl.private.silence import in_private, keep_silent, private

_guard = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []  # at most one


def _own_loop() -> asyncio.AbstractEventLoop:
    with _guard:
        if not _loops:
            keep_silent()
            loop: asyncio.AbstractEventLoop = in_private(asyncio.new_event_loop)
            loop.set_debug(False)
            loop.set_default_executor(Threads())
            thread = threading.Thread(target=in_private, args=(_run, loop), name="dpicl-loop", daemon=True)
            contextvars.Context().run(thread.start)  # not in the context of the call that happens to be the first
            _loops.append(loop)
        return _loops[0]


def _run(loop: asyncio.AbstractEventLoop) -> None:
    shut.mark_thread()
    while True:
        with contextlib.suppress(BaseException):
            loop.run_forever()


def separate_pools() -> None:
    """Give this loop connections of its own: another pool in the place of an asynchronous client's.

    For clients of ``httpx`` and of ``httpx2``, on which most model SDKs stand.
    """
    for name in ("httpcore", "httpcore2"):
        kind: Any = getattr(sys.modules.get(name), "AsyncConnectionPool", None)
        if kind is not None and not hasattr(kind, "dpicl_twins"):
            kind.dpicl_twins = weakref.WeakKeyDictionary()
            kind.handle_async_request = _by_loop(kind.handle_async_request, kind.dpicl_twins)


def _by_loop(before: Any, twins: Any) -> Any:
    @functools.wraps(before)
    async def handle_async_request(pool: Any, request: Any) -> Any:
        if private.get():
            of_loops = twins.setdefault(pool, weakref.WeakKeyDictionary())
            loop = asyncio.get_running_loop()
            if loop not in of_loops:
                of_loops[loop] = twin = copy.copy(pool)
                twin._connections, twin._requests = [], []
            pool = of_loops[loop]
        return await before(pool, request)

    return handle_async_request


async def on_own_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine on the loop of private calls and wait for its end. If this task is cancelled, so is that one.

    No future holds what the coroutine raises: this raises it.
    """
    separate_pools()
    loop, here = _own_loop(), asyncio.get_running_loop()
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
    if raised:
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
