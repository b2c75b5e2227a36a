"""What one request may take: bytes, seconds to send them, depth of its JSON, and releases under way at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_dpicl.privacy import checks
from langchain_dpicl.serving.failures import BUSY, Failure, Refused, invalid

if TYPE_CHECKING:
    from starlette.requests import Request

T = TypeVar("T")

MAX_DEPTH = 32
"""Levels of JSON within JSON. Deeper ones could exhaust a recursion somewhere after the charge."""

_PATIENCE_SECONDS = 1.0
_CLOSE = {"Connection": "close"}


@dataclass(frozen=True)
class Limits:
    """Bounds of one path; `InvalidParameter` for values that cannot work together.

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
    """The whole body, or `Refused`: 413 as soon as it is too long, 408 where it comes too slowly."""
    from starlette.requests import ClientDisconnect

    message = f"the body is longer than {limits.max_body_bytes} bytes"
    too_large = Failure(413, "TooLarge", message, _CLOSE)  # nobody will read the rest
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limits.max_body_bytes:
        raise Refused(too_large)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.max_body_bytes:
                    raise Refused(too_large)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_seconds:g} seconds"
        raise Refused(Failure(408, "SlowRequest", message, _CLOSE)) from None
    except ClientDisconnect:
        raise Refused(Failure(400, "Disconnected", "the client left before its request was whole")) from None
    return bytes(body)


def read_json(body: bytes) -> Any:
    """The value of a body; `Refused` (422) for what is not JSON in Unicode, or lies too deep."""
    import orjson  # strict where the standard library is not: no NaN, no half of a surrogate pair

    try:
        value = orjson.loads(body)
    except ValueError:
        raise invalid("the body is not JSON in UTF-8") from None
    if _is_deeper(value, MAX_DEPTH):
        raise invalid(f"the body has more than {MAX_DEPTH} levels")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)


class Slots:
    """Releases under way in this process: so many at once, as many again waiting a second, the rest refused.

    What has begun is carried to its end, whatever becomes of the client: it is charged, and its receipt is due.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[[], Awaitable[T]], slots: int) -> T:
        """What ``work`` gives, which takes so many slots. `Refused` (503) where they do not come free in time."""
        return await asyncio.shield(await self.start(work, slots))

    async def start(self, work: Callable[[], Awaitable[T]], slots: int) -> asyncio.Task[T]:
        """Begin ``work`` as `run` does, and do not wait for its end."""
        await self._take(slots)

        async def carry_out() -> T:
            return await work()

        task = asyncio.create_task(carry_out())
        self._running.add(task)  # the event loop itself keeps only a weak reference

        def ended(task: asyncio.Task[T]) -> None:
            self._running.discard(task)
            self._give(slots)
            if not task.cancelled():
                task.exception()  # looked at, or asyncio would log it with its traceback where the client has left

        task.add_done_callback(ended)
        return task

    async def _take(self, slots: int) -> None:
        if self._free >= slots and not self._waiting:
            self._free -= slots
            return
        if len(self._waiting) >= self._size:
            raise Refused(BUSY)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((slots, turn))
        try:
            await asyncio.wait_for(turn, _PATIENCE_SECONDS)
        except TimeoutError:
            raise Refused(BUSY) from None
        except BaseException:
            if turn.done() and not turn.cancelled():  # it came, and nobody takes it
                self._give(slots)
            raise
        finally:
            if (slots, turn) in self._waiting:
                self._waiting.remove((slots, turn))
                self._give(0)

    def _give(self, slots: int) -> None:
        self._free += slots
        while self._waiting and self._free >= self._waiting[0][0]:
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= wanted
                turn.set_result(None)
