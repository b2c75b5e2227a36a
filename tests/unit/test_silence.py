"""`silence.py`: what shows private text by itself, and what no stand-in reaches."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import gc
import io
import logging
import logging.config
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from chat_server import chat_server
from ears import Same
from langchain_core.runnables import RunnableLambda

from langchain_dpicl.private import boundary, silence


class OwnRecords(logging.Logger):
    """Makes its records itself, past the factory."""

    def makeRecord(self, name: str, level: int, fn: str, lno: int, msg: Any, args: Any, *_: Any, **__: Any) -> Any:
        return logging.LogRecord(name, level, fn, lno, msg, args, None)


class OwnHandling(OwnRecords):
    """Hands its records on itself too."""

    def handle(self, record: logging.LogRecord) -> None:
        self.callHandlers(record)


class OwnCalls(OwnHandling):
    """And calls its handlers itself."""

    def callHandlers(self, record: logging.LogRecord) -> None:
        for handler in self.handlers:
            handler.handle(record)


class Fails:
    """Raises when it is dropped."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __del__(self) -> None:
        raise ValueError(self.text)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hooks that were there before show."""
    seen: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value)))
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: seen.append(str(message)))
    silence.keep_silent()
    return seen


@pytest.mark.parametrize("kind", [logging.Logger, OwnRecords, OwnHandling, OwnCalls])
def test_a_logger_of_ones_own_says_nothing_in_a_private_call(kind: type[logging.Logger], canary: str) -> None:
    silence.keep_silent()
    buffer = io.StringIO()
    logger = kind("own", logging.DEBUG)
    logger.addHandler(logging.StreamHandler(buffer))
    boundary.in_private(logger.error, "says %s", canary)
    assert buffer.getvalue() == ""
    logger.error("a public call says %s", "this")
    assert buffer.getvalue() == "a public call says this\n"


def test_a_record_made_by_hand_says_nothing_either(canary: str) -> None:
    silence.keep_silent()
    buffer = io.StringIO()
    handler = logging.StreamHandler(buffer)
    record = logging.LogRecord("own", logging.ERROR, "", 1, canary, (), None)
    boundary.in_private(handler.handle, record)
    boundary.in_private(logging.getLogger("own").handle, record)
    assert buffer.getvalue() == ""
    assert handler.handle(record), "a public call hands on what the handler says"


def test_what_a_destructor_raises_is_not_shown_in_a_private_call(shown: list[str], canary: str) -> None:
    boundary.in_private(lambda: Fails(canary) and None)
    assert shown == []
    Fails("public")
    assert shown == ["public"]


def test_it_is_put_in_place_once_and_again_after_somebody_else(shown: list[str]) -> None:
    before = [vars(place)[name] for place, name, _ in silence._PLACES]
    silence.keep_silent()
    assert [vars(place)[name] for place, name, _ in silence._PLACES] == before
    sys.unraisablehook = lambda unraisable: shown.append("replaced")
    silence.keep_silent()
    boundary.in_private(lambda: Fails("private") and None)
    assert shown == []
    Fails("public")
    assert shown == ["replaced"]


# -- what is not stopped: each is named in the module's docstring ------------------------------------------------------


def _emit(canary: str, buffer: io.StringIO) -> None:
    handler = logging.StreamHandler(buffer)
    handler.emit(logging.LogRecord("own", logging.ERROR, "", 1, canary, (), None))


def _print(canary: str, buffer: io.StringIO) -> None:
    print(canary, file=buffer)


@pytest.mark.parametrize("way", [_emit, _print])
def test_what_writes_itself_is_not_stopped(way: Callable[[str, io.StringIO], None], canary: str) -> None:
    silence.keep_silent()
    buffer = io.StringIO()
    boundary.in_private(way, canary, buffer)
    assert canary in buffer.getvalue()


# -- what private code starts ------------------------------------------------------------------------------------------


def in_a_circle(thing: object) -> None:
    """Leave it to the garbage collector, which runs later, in any thread and context."""
    box = [thing]
    box.append(box)


_POOL = ThreadPoolExecutor(1)  # its thread is nobody's
_POOL.submit(int)


async def forget(text: str) -> None:
    """Every kind of failure on the running event loop that nobody awaits."""

    def fail(*_: object) -> None:
        raise ValueError(text)

    async def afail() -> None:
        fail()

    async def stream() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            logging.getLogger("a stream").error("left early: %s", text)
            fail()

    loop = asyncio.get_running_loop()
    loop.call_soon(fail)
    loop.call_later(0, fail)
    loop.call_soon(fail, context=contextvars.Context())
    for keep in (in_a_circle, id):
        plain, made, done, streamed = asyncio.Future(), loop.create_future(), loop.create_future(), stream()
        for future in (plain, made):
            future.set_exception(ValueError(text))
        done.add_done_callback(fail)
        done.set_result(None)
        await anext(streamed)
        for left in (plain, made, streamed, asyncio.gather(afail(), afail()), loop.run_in_executor(_POOL, fail)):
            keep(left)
        keep(asyncio.ensure_future(asyncio.to_thread(fail)))
        keep(asyncio.create_task(asyncio.sleep(3600)))
    _POOL.submit(logging.getLogger("a pool").error, text).add_done_callback(fail)
    threading.Thread(target=fail).start()
    in_a_circle(Fails(text))
    del plain, made, done, streamed, future, left
    await asyncio.sleep(0.05)


def in_loops_of_its_own(text: str, factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(forget(text))
    never_run = factory()
    future = never_run.create_future()
    future.set_exception(ValueError(text))
    in_a_circle(future)
    never_run.close()


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_nothing_that_a_member_leaves_behind_is_reported(
    loops: str, when: str, shown: list[str], canary: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """Whichever handler the caller's loop or the member's has. The same from public code is reported, as before."""
    factory = asyncio.new_event_loop if loops == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    threads: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: threads.append(str(told.exc_value)))

    def hear(loop: Any, told: dict[str, Any]) -> None:
        shown.append(f"{told}")

    async def member(values: Any) -> str:
        if when == "within":
            asyncio.get_running_loop().set_exception_handler(hear)
        await forget(values["input"])
        await asyncio.to_thread(in_loops_of_its_own, values["input"], factory)
        return "answer"

    async def ask() -> None:
        if when == "before":
            asyncio.get_running_loop().set_exception_handler(hear)
        requests: Any = [({"input": canary}, [])]
        assert await boundary.arun_private(Same(RunnableLambda(member)), requests, max_concurrency=1) == ["answer"]
        gc.collect()
        await asyncio.sleep(0.05)
        assert canary not in f"{shown} {threads} {caplog.text}"
        await forget("public")
        gc.collect()
        await asyncio.sleep(0.05)

    with caplog.at_level(logging.DEBUG), asyncio.Runner(loop_factory=factory) as runner:
        runner.run(ask())
    assert f"{shown} {caplog.text}".count("never retrieved") >= 12
    assert threads == ["public"]


async def test_a_client_of_httpx_serves_private_calls_and_public_code_at_once() -> None:
    """Its connections belong to one event loop each, and those of private calls to another."""
    with chat_server(lambda text: (200, {}, "fine")) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:

            async def status(_: Any) -> int:
                return (await client.get("/models")).status_code

            for _ in range(3):
                private = boundary.arun_private(
                    Same(RunnableLambda(status)), [({}, [])] * 3, max_concurrency=3, timeout=5.0
                )
                found, *public = await asyncio.gather(private, *(status(None) for _ in range(3)))
                assert [*found, *public] == [200] * 6


# -- warnings ----------------------------------------------------------------------------------------------------------


def _in_python(text: str, registry: dict[Any, Any]) -> None:
    warnings.warn_explicit(text, UserWarning, "a file", 1, registry=registry)


def _in_c(text: str, registry: dict[Any, Any]) -> None:
    ctypes.pythonapi.PyErr_WarnExplicit(
        *(ctypes.py_object(UserWarning), text.encode(), b"a file", 1, b"a module", ctypes.py_object(registry))
    )


@pytest.mark.parametrize("warn", [_in_python, _in_c])
@pytest.mark.parametrize("action", ["default", "module", "once"])
@pytest.mark.parametrize("filtered", ["before", "after"])
def test_a_private_warning_leaves_no_trace(
    warn: Callable[[str, dict[Any, Any]], None], action: Any, filtered: str, shown: list[str]
) -> None:
    """A later public warning is shown although a private one said the same before, and is shown once."""
    text, registry = f"{warn} {action} {filtered}", dict[Any, Any]()
    with warnings.catch_warnings():
        if filtered == "before":
            warnings.simplefilter(action)
        silence.keep_silent()
        if filtered != "before":
            warnings.resetwarnings()
            warnings.simplefilter(action)
        boundary.in_private(warn, text, registry)
        assert shown == []
        for _ in range(2):
            warn(text, registry)
            boundary.in_private(_catches)
    assert shown == [text]


def _catches() -> None:
    """Asks for other filters, as libraries do. They are the process's, and changing them makes Python forget."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("nobody hears this", stacklevel=1)
    assert caught == []
    warnings.resetwarnings()
