"""What stands before the HTTP transport of a model's client: it ends a private call's requests with the call.

Outside of private calls requests pass unchanged. Within one, a request

* waits, off the call's clock, for the slot of a model that has only one (`Gate`),
* is ended when the call's time is over: its connection is closed (see `wires`), and the server cancels it,
* is repeated, off the clock, where the server refuses it with the status 429.

`install` puts it in place. It works for clients of ``httpx`` and of ``httpx2``, which the OpenAI SDK uses from version
3 on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

from langchain_dpicl.calls import wires
from langchain_dpicl.calls.clock import Call, Overdue, current
from langchain_dpicl.calls.gate import Gate

_LIBRARIES = ("httpx", "httpx2")
_NEVER = 1e6  # seconds: a socket takes no time limit of any length


class Flight:
    """One request under way, from its first byte until its answer is read or given up."""

    def __init__(self, call: Call, gate: Gate | None) -> None:
        self.call = call
        self._gate = gate
        self._wire: Any = None
        self._ended = threading.Lock()  # who takes it ends the flight: its reader, or who closes the call
        self.timeouts: dict[str, float | None] = {}
        try:
            call.begin(self)
        except Overdue:
            self.end(clean=True)
            raise

    @property
    def over(self) -> bool:
        """Whether it has ended. Nothing more may be read of it then."""
        return self._ended.locked()

    def limit(self, request: Any, given: dict[str, float | None]) -> None:
        """No step of the request outlasts the call."""
        left = max(self.call.left(), 0.001)
        if left > _NEVER:
            return
        self.timeouts = {
            step: left if (own := given.get(step)) is None else min(own, left)
            for step in ("connect", "read", "write", "pool")
        }
        request.extensions["timeout"] = self.timeouts

    def answered(self, response: Any) -> None:
        """The head of the answer is here."""
        if self._wire is None:
            self._wire = response.extensions.get("network_stream")
        if self.timeouts:
            self.timeouts["read"] = max(min(self.timeouts["read"] or 0.0, self.call.left()), 0.001)

    def carry(self, wire: Any) -> None:
        """It goes over this connection."""
        self._wire = wire
        if self.over:  # closed while it connected
            raise Overdue

    def abort(self) -> None:
        """Close the connection under the reader's hands, and end the flight."""
        self.end(clean=False)
        if self._wire is not None:
            wires.shut(self._wire)

    def end(self, *, clean: bool) -> None:
        """It is over; ``clean`` where the server has finished it."""
        if not self._ended.acquire(blocking=False):
            return
        self.call.end(self)
        if self._gate is not None:
            self.call.leaves(self._gate, clean)


def _exchange(call: Call, gate: Gate | None, request: Any) -> Generator[tuple[str, Any], Any, tuple[Flight, Any]]:
    """The steps of one request, which the two transports take: each is named, with what it needs."""
    given = dict(request.extensions.get("timeout") or {})
    while True:
        if gate is not None and not call.joins(gate):
            ticket = gate.ticket()
            if not ticket.done():
                with call.waits():
                    try:
                        yield "wait", ticket
                    except BaseException:
                        gate.give_back(ticket)
                        raise
            call.holds(gate)
        flight = Flight(call, gate)
        flight.limit(request, given)
        try:
            response = yield "send", (flight, request)
        except Exception:
            flight.end(clean=False)
            if not call.overdue():
                raise
            response = None
        except BaseException:
            flight.end(clean=False)
            raise
        if response is None:
            raise Overdue
        flight.answered(response)
        if response.status_code != 429:
            return flight, response
        seconds = call.wait_after(response.headers) if _repeats(request) else None
        if seconds is None:
            response.headers["x-should-retry"] = "false"  # for SDKs made by Stainless: the waiting is done
            return flight, response
        yield "close", response
        flight.end(clean=True)
        yield "sleep", seconds


def _repeats(request: Any) -> bool:
    """Whether the request's body can be sent again."""
    return type(request.stream).__name__ == "ByteStream"


class _Sync:
    def __init__(self, inner: Any, gate: Gate | None) -> None:
        self.inner, self.gate = inner, gate

    def handle_request(self, request: Any) -> Any:
        call = current.get()
        if call is None:
            return self.inner.handle_request(request)
        steps = _exchange(call, self.gate, request)
        try:
            step, value = next(steps)
            while True:
                try:
                    found = self._take(call, step, value)
                except BaseException as error:
                    step, value = steps.throw(error)
                else:
                    step, value = steps.send(found)
        except StopIteration as done:
            flight, response = done.value
        response.stream = _sync_stream(_base_of(response.stream, "SyncByteStream"))(response.stream, flight)
        return response

    def _take(self, call: Call, step: str, value: Any) -> Any:
        match step:
            case "wait":
                value.result()
            case "send":
                flight, request = value
                mark = wires.using.set(flight)
                try:
                    return self.inner.handle_request(request)
                finally:
                    wires.using.reset(mark)
            case "close":
                value.close()
            case "sleep":
                call.pause(value)
        return None

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> _Sync:
        self.inner.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self.inner.__exit__(*failure)


class _Async:
    def __init__(self, inner: Any, gate: Gate | None) -> None:
        self.inner, self.gate = inner, gate

    async def handle_async_request(self, request: Any) -> Any:
        call = current.get()
        if call is None:
            return await self.inner.handle_async_request(request)
        steps = _exchange(call, self.gate, request)
        try:
            step, value = next(steps)
            while True:
                try:
                    found = await self._take(call, step, value)
                except BaseException as error:
                    step, value = steps.throw(error)
                else:
                    step, value = steps.send(found)
        except StopIteration as done:
            flight, response = done.value
        response.stream = _async_stream(_base_of(response.stream, "AsyncByteStream"))(response.stream, flight)
        return response

    async def _take(self, call: Call, step: str, value: Any) -> Any:
        match step:
            case "wait":
                await asyncio.wrap_future(value)
            case "send":
                flight, request = value
                mark = wires.using.set(flight)
                try:
                    return await self.inner.handle_async_request(request)
                finally:
                    wires.using.reset(mark)
            case "close":
                await value.aclose()
            case "sleep":
                with call.waits():
                    await asyncio.sleep(value)
        return None

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def __aenter__(self) -> _Async:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self.inner.__aexit__(*failure)


def _base_of(stream: Any, name: str) -> Any:
    """The class of streams in the library that this one comes from."""
    return next(kind for kind in type(stream).__mro__ if kind.__name__ == name)


class _Answer:
    """An answer's body on a call's clock: what the streams of both transports do."""

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

    def _timed(self, chunk: bytes) -> bytes:
        if self._flight.call.overdue():
            raise Overdue
        return chunk


@functools.cache
def _sync_stream(base: type[Any]) -> type[Any]:
    class Timed(_Answer, base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            with self._reading():
                for chunk in self._inner:
                    yield self._timed(chunk)

        def close(self) -> None:
            try:
                self._inner.close()
            finally:
                self._flight.end(clean=self._whole)

    return Timed


@functools.cache
def _async_stream(base: type[Any]) -> type[Any]:
    class Timed(_Answer, base):  # type: ignore[misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            with self._reading():
                async for chunk in self._inner:
                    yield self._timed(chunk)

        async def aclose(self) -> None:
            try:
                await self._inner.aclose()
            finally:
                self._flight.end(clean=self._whole)

    return Timed


def is_client(client: Any) -> bool:
    """Whether this is a client of httpx or httpx2 whose transport can be reached, and whose connections carry one
    request at a time: with HTTP/2, ending one request would end the others on its connection."""
    known = any(f"{name}.{kind}" in _names(client) for name in _LIBRARIES for kind in ("Client", "AsyncClient"))
    if not known or not hasattr(client, "_transport") or not isinstance(getattr(client, "_mounts", None), dict):
        return False
    return not any(_speaks_http2(transport) for transport in (client._transport, *client._mounts.values()))


def _speaks_http2(transport: Any) -> bool:
    pool = getattr(getattr(transport, "inner", transport), "_pool", None)
    return bool(getattr(pool, "_http2", False))


def _names(value: Any) -> set[str]:
    return {f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" for kind in type(value).__mro__}


def install(client: Any, gate: Gate | None = None) -> None:
    """Put it before every transport of a client, once. The client stays as it was for all but private calls."""
    kind = _Async if any(name.endswith(".AsyncClient") for name in _names(client)) else _Sync

    def before(transport: Any) -> Any:
        if transport is None or isinstance(transport, kind):
            return transport
        wires.watch(transport, is_async=kind is _Async)
        return kind(transport, gate)

    client._transport = before(client._transport)
    for pattern, transport in client._mounts.items():
        client._mounts[pattern] = before(transport)
