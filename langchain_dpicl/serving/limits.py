"""The limits of one request: bytes, seconds to send them, depth of its JSON, and releases under way at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_dpicl.privacy import checks
from langchain_dpicl.serving.failures import Failure

if TYPE_CHECKING:
    from starlette.requests import Request

T = TypeVar("T")

MAX_DEPTH = 32
"""Levels of JSON within JSON. Deeper ones could exhaust a recursion somewhere after the charge."""

_PATIENCE_SECONDS = 1.0
_CLOSE = {"Connection": "close"}


@dataclass(frozen=True)
class Limits:
    """Bounds of one path. Raises `InvalidParameter` for values that cannot work together.

    Parameters
    ----------
    max_body_bytes
        Of a request's body.
    max_batch
        Inputs of one batch.
    max_concurrency
        Releases under way at once in this process; a batch of n counts n.
    body_seconds
        From the first look at a body to its last byte.
    """

    max_body_bytes: int = 64 * 1024
    max_batch: int = 16
    max_concurrency: int = 32
    body_seconds: float = 10.0

    def __post_init__(self) -> None:
        checks.whole("max_body_bytes", self.max_body_bytes)
        checks.whole("max_concurrency", self.max_concurrency)
        checks.whole("max_batch", self.max_batch, at_most=self.max_concurrency)
        checks.positive("body_seconds", self.body_seconds)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the whole body. Raises `Failure`: 413 as soon as it is too long, 408 if it comes too slowly."""
    from starlette.requests import ClientDisconnect

    long, most = f"the body is longer than {limits.max_body_bytes} bytes", limits.max_body_bytes
    announced, body = request.headers.get("content-length", ""), bytearray()
    if announced.isdecimal() and int(announced[:20]) > most:
        raise Failure(413, "TooLarge", long, _CLOSE)  # the rest stays unread
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise Failure(413, "TooLarge", long, _CLOSE)
    except TimeoutError:
        slow = f"the body did not arrive within {limits.body_seconds:g} seconds"
        raise Failure(408, "SlowRequest", slow, _CLOSE) from None
    except ClientDisconnect:
        raise Failure(400, "Disconnected", "the client left before its request was whole") from None
    return bytes(body)


def read_json(body: bytes) -> Any:
    """Return the value of a body. Raises `Failure` (422) for a body that is not JSON in Unicode, or lies too deep."""
    import orjson  # strict where the standard library is not: no NaN, no half of a surrogate pair

    try:
        value = orjson.loads(body)
    except ValueError:
        raise Failure(422, "InvalidInput", "the body is not JSON in UTF-8") from None
    if _is_deeper(value, MAX_DEPTH):
        raise Failure(422, "InvalidInput", f"the body has more than {MAX_DEPTH} levels")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)


class Slots:
    """Releases under way in this process: at most ``size`` at once, as many again wait a second, the rest are refused.

    Every release that has begun runs to its end even if the client leaves: it is charged, and its receipt is due.
    """

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._waiting = 0
        self._first_in_line = asyncio.Lock()  # first come, first served, so that a large batch is not overtaken
        self._freed = asyncio.Event()
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]], slots: int) -> T:
        """Return the result of ``work``, which takes ``slots``. Raises `Failure` (503) if they do not come free."""
        return await asyncio.shield(await self.start(work, slots))

    async def start(self, work: Callable[[], Coroutine[Any, Any, T]], slots: int) -> asyncio.Task[T]:
        """Begin ``work`` as `run` does, and do not wait for its end."""
        if self._free < slots or self._waiting:
            message = "too many releases are under way; nothing was charged, ask again"
            busy = Failure(503, "Busy", message, {"Retry-After": "1"})
            if self._waiting >= self._size:
                raise busy
            self._waiting += 1
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS), self._first_in_line:
                    while self._free < slots:
                        self._freed.clear()
                        await self._freed.wait()
            except TimeoutError:
                raise busy from None
            finally:
                self._waiting -= 1
        self._free -= slots
        task = asyncio.create_task(work())
        self._running.add(task)  # the event loop itself keeps only a weak reference

        def ended(task: asyncio.Task[T]) -> None:
            self._running.discard(task)
            self._free += slots
            self._freed.set()
            if not task.cancelled():
                task.exception()  # without this look, asyncio logs it with its traceback after the client has left

        task.add_done_callback(ended)
        return task
