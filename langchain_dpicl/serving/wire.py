"""The two shapes of HTTP that the routes need: a request that was read already, and a stream that nobody cuts off."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class WholeRequest(Request):
    """A request whose body was read, and checked, before."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._whole = body
        self._value = value

    async def body(self) -> bytes:
        """The bytes."""
        return self._whole

    async def json(self) -> Any:
        """Their value."""
        return self._value


class EventStream(Response):
    """Server-sent events, up to the last one even where nobody reads: a server that shuts down then waits for it."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.events = events
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        with contextlib.suppress(OSError):  # how some servers say that the client left; the run goes on by itself
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self.events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(name: str, data: bytes | None = None) -> bytes:
    """One event, as LangServe writes it."""
    fields = [b"event: " + name.encode()] + ([] if data is None else [b"data: " + data])
    return b"\r\n".join([*fields, b"", b""])
