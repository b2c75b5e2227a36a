"""What stands before the HTTP transport of a model's client: it ends a private call's requests with the call.

Outside of private calls requests pass unchanged, but for a model on several servers: there the first that answers
does. Within one, a request

* waits, off the call's clock, for a slot of a model that counts them (`servers`), and asks another of its servers if
  one is gone,
* is ended when the call's time is over: its connection is closed, and the server cancels it,
* is repeated, off the clock, if the server refuses it with the status 429.

A client's time limit counts anew with each byte, and a server may send header lines for ever. So the closing of a call
shuts the socket down itself: the network backend of the client's ``httpcore`` connection pool is watched, too, to know
which connection a request uses before its answer begins.

`install` puts this in place. It works for clients of ``httpx`` and of ``httpx2``, which the OpenAI SDK uses from
version 3 on.

A connection belongs to the event loop that opened it, and private calls have a loop of their own. `separate_pools` lets
any client of these libraries serve them and public code at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import functools
import inspect
import sys
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_dpicl.calls.flow import immediate
from langchain_dpicl.calls.running import Call, Flight, Overdue, current
from langchain_dpicl.calls.servers import Servers

_LIBRARIES = ("httpx", "httpx2")
_NEVER = 1e6  # seconds: a socket takes no time limit of any length


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

    def __init__(self, inner: Any, servers: Servers | None) -> None:
        super().__init__(inner)
        self._servers = servers

    def handle_request(self, request: Any) -> Any:
        call = current.get()
        if call is None and self._servers is None:
            return self._inner.handle_request(request)
        return immediate(self._ask(request, False) if call is None else self._answer(call, request, False))

    async def handle_async_request(self, request: Any) -> Any:
        call = current.get()
        if call is None and self._servers is None:
            return await self._inner.handle_async_request(request)
        return await (self._ask(request, True) if call is None else self._answer(call, request, True))

    async def _send(self, request: Any, in_loop: bool) -> Any:
        inner = self._inner
        return await inner.handle_async_request(request) if in_loop else inner.handle_request(request)

    async def _ask(self, request: Any, in_loop: bool) -> Any:
        """Make a request that no private call makes, at the first server that answers."""
        assert self._servers is not None
        route, path = self._servers.route(None), self._servers.path(request)
        while True:
            self._servers.aim(request, address := route.address, path)
            try:
                response = await self._send(request, in_loop)
            except Exception as error:
                if not (_is_whole(request) and route.moves_on(address, error)):
                    raise
                continue
            if not (_is_whole(request) and route.moves_on(address, response)):
                return response
            await response.aclose() if in_loop else response.close()

    async def _answer(self, call: Call, request: Any, in_loop: bool) -> Any:
        """Make one request, and repeat it while a server refuses it or is gone. It suspends only if ``in_loop``."""
        given = dict(request.extensions.get("timeout") or {})
        servers, leave, address = self._servers, None, ""
        route = None if servers is None else servers.route(call)
        path = "" if servers is None else servers.path(request)
        while True:
            if servers is not None and route is not None:
                servers.aim(request, address := route.address, path)
                gate = servers.gate(address)
                leave = gate.leave
                await gate.enter(call, in_loop, route.alone)
            flight = Flight(call, leave)
            limits: dict[str, float] = {}  # no step of the request outlasts the call
            if (left := max(call.left(), 0.001)) <= _NEVER:
                for step in ("connect", "read", "write", "pool"):
                    limits[step] = left if (own := given.get(step)) is None else min(own, left)
                request.extensions["timeout"] = limits
            repeats = route is not None and _is_whole(request)
            mark = _sent.set(flight)
            response, lost = None, False
            try:
                response = await self._send(request, in_loop)
                if flight.wire is None:
                    flight.wire = response.extensions.get("network_stream")
                if limits:
                    limits["read"] = max(min(limits["read"], call.left()), 0.001)
                base = "AsyncByteStream" if in_loop else "SyncByteStream"
                kind = next(kind for kind in type(response.stream).__mro__ if kind.__name__ == base)
                response.stream = _timed(kind)(response.stream, flight)
                if route is not None and repeats:  # an answer that breaks off can be asked for elsewhere
                    response.stream = type(request.stream)(await _read(response.stream, in_loop))
                    lost = route.moves_on(address, response)
            except BaseException as error:
                flight.end(clean=False)
                if not isinstance(error, Exception):
                    raise
                if call.overdue():
                    response = None
                else:
                    lost = route is not None and repeats and route.moves_on(address, error)
                    if not lost:
                        raise
            finally:
                _sent.reset(mark)
            if lost:
                call.restart()
                continue
            if response is None:
                raise Overdue
            wait = None
            if response.status_code == 429:
                if _is_whole(request):
                    wait = call.wait_after(response.headers)
                if wait is None:
                    response.headers["x-should-retry"] = "false"  # for SDKs made by Stainless: the waiting is done
            if wait is None:
                return response
            await response.aclose() if in_loop else response.close()
            flight.end(clean=True)
            await call.pause(wait, in_loop)


def _is_whole(request: Any) -> bool:
    """Whether a request's body can be sent again."""
    return type(request.stream).__name__ == "ByteStream"


async def _read(body: Any, in_loop: bool) -> bytes:
    """The whole of an answer's body, which is closed then."""
    try:
        return b"".join([chunk async for chunk in body] if in_loop else list(body))
    finally:
        await body.aclose() if in_loop else body.close()


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


def install(client: Any, servers: Servers | None = None) -> None:
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
        return _Before(transport, servers)

    client._transport = before(client._transport)
    for pattern, transport in client._mounts.items():
        client._mounts[pattern] = before(transport)


def separate_pools() -> None:
    """Give private calls connections of their own: a pool for each event loop in place of an asynchronous client's."""
    for name in ("httpcore", "httpcore2"):
        kind: Any = getattr(sys.modules.get(name), "AsyncConnectionPool", None)
        if kind is not None and not hasattr(kind, "dpicl_twins"):
            kind.dpicl_twins = weakref.WeakKeyDictionary()
            kind.handle_async_request = _by_loop(kind.handle_async_request, kind.dpicl_twins)


def _by_loop(before: Any, twins: Any) -> Any:
    @functools.wraps(before)
    async def handle_async_request(pool: Any, request: Any) -> Any:
        if current.get() is not None:
            of_loops = twins.setdefault(pool, weakref.WeakKeyDictionary())
            loop = asyncio.get_running_loop()
            if loop not in of_loops:
                of_loops[loop] = twin = copy.copy(pool)
                twin._connections, twin._requests = [], []
            pool = of_loops[loop]
        return await before(pool, request)

    return handle_async_request


def clients(servers: Servers, seconds: float, connect: float) -> dict[str, Any]:
    """What an OpenAI model takes for its clients, on these servers.

    They ignore proxy variables, and keep no idle connection: it would be tied to one event loop, and a server that
    closes it would seem to have died.
    """
    import httpx

    timeout, limits = httpx.Timeout(seconds, connect=connect), httpx.Limits(max_keepalive_connections=0)
    given: dict[str, Any] = {"trust_env": False, "limits": limits, "timeout": timeout}
    found = {"http_client": httpx.Client(**given), "http_async_client": httpx.AsyncClient(**given)}
    for client in found.values():
        install(client, servers)
    return {**found, "max_retries": 0, "timeout": timeout}
