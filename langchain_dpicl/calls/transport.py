"""What stands before the HTTP transport of a model's client: it ends a private call's requests with the call.

Outside of private calls requests pass unchanged. Within one, a request

* waits, off the call's clock, for the slot of a model that has only one (`SlotGate`),
* is ended when the call's time is over: its connection is closed, and the server cancels it,
* is repeated, off the clock, if the server refuses it with the status 429.

A client's time limit counts anew with each byte, and a server may send header lines for ever. So the closing of a call
shuts the socket down itself: the network backend of the client's ``httpcore`` connection pool is watched, too, to know
which connection a request uses before its answer begins.

`install` puts this in place. It works for clients of ``httpx`` and of ``httpx2``, which the OpenAI SDK uses from
version 3 on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

from langchain_dpicl.calls import running
from langchain_dpicl.calls.flow import immediate
from langchain_dpicl.calls.running import Call, Flight, Overdue, current

_LIBRARIES = ("httpx", "httpx2")
_NEVER = 1e6  # seconds: a socket takes no time limit of any length


class SlotGate:
    """The slot of a model that serves this process alone. Private calls get it in the order in which they ask.

    Parameters
    ----------
    settle
        Returns when the slot is free at the model itself. It is asked after a request whose answer was not read to its
        end.
    """

    _all: ClassVar[weakref.WeakSet[SlotGate]] = weakref.WeakSet()

    def __init__(self, settle: Callable[[], object]) -> None:
        self._settle = settle
        self._all.add(self)
        self.reset()

    def reset(self) -> None:
        """Nobody has the slot, and nobody waits: this is so in a process that was just forked."""
        self._lock = threading.Lock()
        self._line: deque[tuple[Call, Future[None]]] = deque()
        self._taken = False
        self._holder: Call | None = None
        self._requests = 0  # of the holder, under way
        self._clean = True  # whether the server has finished the holder's other requests

    async def enter(self, call: Call, in_loop: bool) -> None:
        """A request of a call begins once the call has the slot: its further requests then queue as its work.

        It waits off the call's clock, and suspends only if ``in_loop``.
        """
        ticket: Future[None] = Future()
        with self._lock:
            if not self._taken or call is self._holder:
                self._take(call)
                return
            self._line.append((call, ticket))
        with call.waits():
            try:
                await asyncio.wrap_future(ticket) if in_loop else ticket.result()
            except BaseException:  # the request will not be made
                if not ticket.cancel():
                    self.leave(call, clean=True)
                raise

    def leave(self, call: Call, *, clean: bool) -> None:
        """A request is over; ``clean`` if the server has finished it. After a call's last, the next has the slot."""
        with self._lock:
            if call is not self._holder:  # `reset` after a fork
                return
            self._requests -= 1
            self._clean = self._clean and clean
            if self._requests:
                return
            self._holder, clean, self._clean = None, self._clean, True
        pass_on = functools.partial(self._pass_on, clean)
        if clean or not running.start(pass_on):
            pass_on()

    def _pass_on(self, clean: bool) -> None:
        try:
            if not clean:
                self._settle()
        finally:
            with self._lock:
                self._taken = False
                while self._line and not self._taken:
                    call, ticket = self._line.popleft()
                    if ticket.set_running_or_notify_cancel():
                        self._take(call)
                        ticket.set_result(None)

    def _take(self, call: Call) -> None:
        self._taken, self._holder = True, call
        self._requests += 1


def _reset_all() -> None:
    for gate in SlotGate._all:
        gate.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)


_sent: contextvars.ContextVar[Flight | None] = contextvars.ContextVar("dpicl_sent", default=None)
"""The request that is being sent in this context."""


class _Around:
    _inner: Any = None

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Before(_Around):
    """A transport that stands before another, of the same client. Each client calls it in one of its two ways."""

    def __init__(self, inner: Any, gate: SlotGate | None) -> None:
        super().__init__(inner)
        self._gate = gate

    def handle_request(self, request: Any) -> Any:
        call = current.get()
        return self._inner.handle_request(request) if call is None else immediate(self._answer(call, request, False))

    async def handle_async_request(self, request: Any) -> Any:
        call = current.get()
        return await (self._inner.handle_async_request(request) if call is None else self._answer(call, request, True))

    async def _answer(self, call: Call, request: Any, in_loop: bool) -> Any:
        """Make one request, and repeat it while the server refuses it. It suspends only if ``in_loop``."""
        given = dict(request.extensions.get("timeout") or {})
        while True:
            if self._gate is not None:
                await self._gate.enter(call, in_loop)
            flight = Flight(call, None if self._gate is None else self._gate.leave)
            limits: dict[str, float] = {}  # no step of the request outlasts the call
            if (left := max(call.left(), 0.001)) <= _NEVER:
                for step in ("connect", "read", "write", "pool"):
                    limits[step] = left if (own := given.get(step)) is None else min(own, left)
                request.extensions["timeout"] = limits
            mark = _sent.set(flight)
            response = None
            try:
                inner = self._inner
                response = await inner.handle_async_request(request) if in_loop else inner.handle_request(request)
            except BaseException as error:
                flight.end(clean=False)
                if not isinstance(error, Exception) or not call.overdue():
                    raise
            finally:
                _sent.reset(mark)
            if response is None:
                raise Overdue
            if flight.wire is None:
                flight.wire = response.extensions.get("network_stream")
            if limits:
                limits["read"] = max(min(limits["read"], call.left()), 0.001)
            wait = None
            if response.status_code == 429:
                if type(request.stream).__name__ == "ByteStream":  # its body can be sent again
                    wait = call.wait_after(response.headers)
                if wait is None:
                    response.headers["x-should-retry"] = "false"  # for SDKs made by Stainless: the waiting is done
            if wait is None:
                base = "AsyncByteStream" if in_loop else "SyncByteStream"
                kind = next(kind for kind in type(response.stream).__mro__ if kind.__name__ == base)
                response.stream = _timed(kind)(response.stream, flight)
                return response
            await response.aclose() if in_loop else response.close()
            flight.end(clean=True)
            await call.pause(wait, in_loop)


@functools.cache
def _timed(base: type[Any]) -> type[Any]:
    """An answer's body on a call's clock, for a library's class of streams."""

    class Timed(base):  # type: ignore[misc]
        def __init__(self, inner: Any, flight: Flight) -> None:
            self._inner, self._flight, self._whole = inner, flight, False

        @contextlib.contextmanager
        def _reading(self) -> Iterator[None]:
            """Around the whole body. Raises `Overdue` for whatever the connection's end at the deadline does to it."""
            try:
                yield
                self._whole = not self._flight.call.overdue()
            except Exception:
                if not self._flight.call.overdue():
                    raise
            if not self._whole:
                raise Overdue

        def __iter__(self) -> Iterator[bytes]:
            with self._reading():
                for chunk in self._inner:
                    self._flight.check()
                    yield chunk

        async def __aiter__(self) -> AsyncIterator[bytes]:
            with self._reading():
                async for chunk in self._inner:
                    self._flight.check()
                    yield chunk

        def close(self) -> None:
            try:
                self._inner.close()
            finally:
                self._flight.end(clean=self._whole)

        async def aclose(self) -> None:
            try:
                await self._inner.aclose()
            finally:
                self._flight.end(clean=self._whole)

    return Timed


class _Watched(_Around):
    """A network backend, or a connection of it: the request that is being sent knows which connection it uses.

    A request writes before it reads, on a connection that was kept open, too.
    """

    def connect_tcp(self, *arguments: Any, **named: Any) -> Any:
        return _watched(self._inner.connect_tcp(*arguments, **named))

    def connect_unix_socket(self, *arguments: Any, **named: Any) -> Any:
        return _watched(self._inner.connect_unix_socket(*arguments, **named))

    def start_tls(self, *arguments: Any, **named: Any) -> Any:
        return _watched(self._used().start_tls(*arguments, **named))

    def write(self, *arguments: Any, **named: Any) -> Any:
        return self._used().write(*arguments, **named)

    def _used(self) -> Any:
        if (flight := _sent.get()) is not None:
            flight.wire = self._inner
            if flight.over:  # the call was closed while it connected
                raise Overdue
        return self._inner


def _watched(wire: Any) -> Any:
    async def awaited() -> _Watched:
        return _Watched(await wire)

    return awaited() if inspect.isawaitable(wire) else _Watched(wire)


def is_client(client: Any) -> bool:
    """Whether this is a client of httpx or httpx2 whose transport can be reached, and whose connections carry one
    request at a time: with HTTP/2, ending one request would end the others on its connection."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" for kind in type(client).__mro__}
    known = any(f"{name}.{kind}" in names for name in _LIBRARIES for kind in ("Client", "AsyncClient"))
    if not known or not hasattr(client, "_transport") or not isinstance(getattr(client, "_mounts", None), dict):
        return False
    transports = (client._transport, *client._mounts.values())
    return not any(getattr(getattr(transport, "_pool", None), "_http2", False) for transport in transports)


def install(client: Any, gate: SlotGate | None = None) -> None:
    """Put it before every transport of a client, once. The client stays as it was for all but private calls.

    Connections that are open already stay unknown.
    """

    def before(transport: Any) -> Any:
        if transport is None or isinstance(transport, _Before):
            return transport
        pool: Any = getattr(transport, "_pool", None)
        backend = getattr(pool, "_network_backend", None)
        if backend is not None and not isinstance(backend, _Watched):
            pool._network_backend = _Watched(backend)
        return _Before(transport, gate)

    client._transport = before(client._transport)
    for pattern, transport in client._mounts.items():
        client._mounts[pattern] = before(transport)
