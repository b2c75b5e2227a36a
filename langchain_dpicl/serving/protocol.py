"""HTTP/1.1 with a clock for the head of a request: uvicorn's own has none.

uvicorn ends a connection that is idle between two requests. The first byte of a request stops that clock, and nothing
starts another: a client that sends half a request line holds its connection for ever, and enough of them take all that
``limit_concurrency`` allows.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):
    """Closes a connection whose next request has no whole head within ``header_seconds``.

    The clock starts when the connection is made, and again when an answer is sent; a whole head stops it, and no byte
    before does. The unread rest of a refused request's body counts as part of the next head. A body that is read has
    `Limits.body_seconds`.
    """

    def __init__(self, *args: Any, header_seconds: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_seconds = header_seconds
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stop the clock if the head is whole: a cycle of request and answer has begun."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Start the clock for the next head, unless that has come already."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._clock is None:
            self._clock = self.loop.call_later(self._header_seconds, self._expire)

    def _expire(self) -> None:
        """Close once the answer is sent; if the client does not take that either, close at once."""
        self._clock = self.loop.call_later(self._header_seconds, self.transport.abort)
        self.transport.close()

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
