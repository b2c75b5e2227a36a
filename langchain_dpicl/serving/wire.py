"""The two shapes of HTTP that the routes need: a request whose body was read, and a stream that reports a hang-up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class WholeRequest(Request):
    """A request whose body was read and checked before."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._whole = body
        self._value = value

    async def body(self) -> bytes:
        """Return the bytes."""
        return self._whole

    async def json(self) -> Any:
        """Return their value."""
        return self._value


class EventStream(Response):
    """Server-sent events. All are taken even if the client left, so that a server that shuts down waits for the last.

    ``left`` is called when the client hangs up; it may be called after the last event too.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], left: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.events = events
        self.left = left
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left()

        watching = asyncio.create_task(watch())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self.events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # some servers report a hang-up in this way
            self.left()
            async for _ in self.events:
                pass
        finally:
            watching.cancel()


def event(name: str, data: bytes | None = None) -> bytes:
    """Return one event, as LangServe writes it."""
    fields = [b"event: " + name.encode()] + ([] if data is None else [b"data: " + data])
    return b"\r\n".join([*fields, b"", b""])
