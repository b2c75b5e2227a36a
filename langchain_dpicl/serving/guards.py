"""The guards before a release: the caller's key, the limits of one request, and the answer to a refused caller.

A key is 256 random bits, of which the server keeps a hash. SHA-256 is enough for them: a slow hash protects secrets
that can be guessed, and 2^256 keys cannot. A key's name is the principal that its requests are charged to.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field

from langchain_dpicl import errors
from langchain_dpicl.calls.observing import observer
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_DEPTH = 32
"""Levels of JSON within JSON. Deeper ones could exhaust a recursion somewhere after the charge."""

_PATIENCE_SECONDS = 1.0
_MOST_FAULTS = 5
_LONGEST_TEXT = 1000


class ErrorAnswer(BaseModel):
    """The body of every error."""

    error: str = Field(description="A short name that does not change.")
    message: str = Field(description="What happened, for people.")


class Failure(Exception):
    """An answer that is an error. Raised, it refuses a request: nothing was charged."""

    def __init__(self, status: int, error: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.error, self.message, self.headers = status, error, message[:_LONGEST_TEXT], headers

    def response(self) -> Response:
        """Return it as JSON."""
        from starlette.responses import JSONResponse

        return JSONResponse({"error": self.error, "message": self.message}, self.status, self.headers)


def failure_of(error: BaseException, where: str) -> Failure:
    """Return the answer for an error: a status, a short name, a text without anything private. Never a trace.

    An unforeseen error goes to the log, by its class and place alone.
    """
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    match error:
        case Failure():
            return error
        case RequestValidationError():  # where and what, and nothing of the input
            faults = [f"{'.'.join(str(part)[:50] for part in e['loc'])}: {e['msg']}" for e in error.errors()]
            if more := faults[_MOST_FAULTS:]:
                faults[_MOST_FAULTS:] = [f"and {len(more)} more"]
            return Failure(422, "InvalidInput", "; ".join(faults))
        case HTTPException():  # of the framework, or of the deployer's own code
            known = error.status_code in set(HTTPStatus)
            phrase = HTTPStatus(error.status_code).phrase if known else "Error"
            detail = error.detail if isinstance(error.detail, str) and error.detail else phrase
            return Failure(error.status_code, phrase.title().replace(" ", ""), detail, error.headers)
        case InvalidParameter(parameter="input" | "filter"):  # any other parameter is the deployer's
            return Failure(422, "InvalidParameter", str(error))
        case errors.QuotaExceeded():
            return Failure(429, "QuotaExceeded", str(error))
        case errors.PrivacyBudgetExceeded():
            return Failure(429, "PrivacyBudgetExceeded", str(error))
        case errors.MembersAbstained():
            message = "the model gave no usable answer, says a release, which was charged; later requests may succeed"
            return Failure(503, "MembersAbstained", message)
        case errors.ModelUnavailable():
            return Failure(503, "ModelUnavailable", "the model does not answer now; nothing was charged")
        case errors.LedgerError():
            logger.error("%s: the ledger cannot be used: %s", where, error)
            message = "the ledger cannot be used now; without it nothing is released, and what it has charged stands"
            return Failure(503, "LedgerUnavailable", message)
        case errors.StoreError():
            logger.error("%s: the store cannot be used: %s", where, error)
            return Failure(503, "StoreUnavailable", "the records cannot be read now; what was charged stands")
        case errors.ReleaseFailed():
            return Failure(500, "ReleaseFailed", str(error))
    last = traceback.extract_tb(error.__traceback__, limit=-1)
    place = f"{last[0].filename}:{last[0].lineno}" if last else "an unknown place"
    logger.error("%s: %s at %s", where, type(error).__qualname__, place)
    return Failure(500, "InternalError", "the server failed; a charge that was made stands")


def new_key() -> str:
    """Return a fresh key."""
    return "dpicl_" + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """Return the hash that a server keeps of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_name(name: str) -> str:
    """Return a key's name, or raise `InvalidParameter`."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}", name):
        raise InvalidParameter("name", name, "1 to 100 letters, digits and any of _.@-")
    return name


class ApiKeys:
    """Names and hashes of keys; finds the name of the key in a request.

    A name may have several keys: an old one and its successor are the same principal, with the same budget.

    Parameters
    ----------
    hashes
        Each name's hash, or hashes.
    news
        Looked at before each request: new ``hashes`` in the place of the old, or None if nothing has changed. If they
        are not valid, the old ones stay, and the log says so.

    Raises `InvalidParameter`, without showing the value in the place of a hash: it may be a key.
    """

    def __init__(
        self,
        hashes: Mapping[str, str | Sequence[str]] | None = None,
        news: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        self._news = news
        self._hashes = _checked((news() or {}) if hashes is None else hashes)

    @property
    def names(self) -> list[str]:
        """The principals."""
        return list(dict.fromkeys(name for name, _ in self._hashes))

    def _follow(self) -> None:
        try:
            if (news := self._news()) is not None and (found := _checked(news)) != self._hashes:
                self._hashes = found
                logger.warning("the keys were read again: %s", ", ".join(self.names))
        except InvalidParameter as error:
            logger.error("the keys cannot be read again, and those before stay: %s", error)

    def known(self, request: Request) -> str | None:
        """Return the name of the bearer key in a request; None without a known one. Takes equally long for all keys."""
        self._follow()
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given, found = hash_of(key.strip()), None
        for name, digest in self._hashes:
            if hmac.compare_digest(given, digest):
                found = name
        return found if scheme.lower() == "bearer" else None

    def principal(self, request: Request) -> str:
        """Return the name of the bearer key in a request. Raises a 401 without a known one."""
        from starlette.exceptions import HTTPException

        if (found := self.known(request)) is None:
            message = "a known API key is needed: Authorization: Bearer KEY"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})
        return found


def _checked(hashes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every name with each of its hashes."""
    found = [
        (check_name(name), digest)
        for name, given in hashes.items()
        for digest in (given if isinstance(given, list) and given else [given])
    ]
    for name, digest in found:
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise InvalidParameter(f"keys.{name}", "(not shown)", "64 hex digits, as dpicl serve --new-key prints")
    if not found:
        raise InvalidParameter("keys", "none", "at least one name with its hash")
    if len({digest for _, digest in found}) < len(found):
        raise InvalidParameter("keys", "(not shown)", "a key of its own for every name")
    return found


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

    most, body, announced = limits.max_body_bytes, bytearray(), request.headers.get("content-length", "")
    too_large = Failure(413, "TooLarge", f"the body is longer than {most} bytes", {"Connection": "close"})
    if announced.isdecimal() and int(announced[:20]) > most:
        raise too_large  # the rest stays unread
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        slow = f"the body did not arrive within {limits.body_seconds:g} seconds"
        raise Failure(408, "SlowRequest", slow, {"Connection": "close"}) from None
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
            self._tell()
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS), self._first_in_line:
                    while self._free < slots:
                        self._freed.clear()
                        await self._freed.wait()
            except TimeoutError:
                raise busy from None
            finally:
                self._waiting -= 1
                self._tell()
        self._free -= slots
        self._tell()
        task = asyncio.create_task(work())
        self._running.add(task)  # the event loop itself keeps only a weak reference

        def ended(task: asyncio.Task[T]) -> None:
            self._running.discard(task)
            self._free += slots
            self._tell()
            self._freed.set()
            if not task.cancelled():
                task.exception()  # without this look, asyncio logs it with its traceback after the client has left

        task.add_done_callback(ended)
        return task

    async def finished(self) -> None:
        """Wait for the releases under way."""
        await asyncio.gather(*self._running, return_exceptions=True)

    def _tell(self) -> None:
        if (found := observer()) is not None:
            found.queue(self._waiting, self._size - self._free)
