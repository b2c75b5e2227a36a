"""`sealing.py`: what shows private text by itself, and what no stand-in reaches."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl.private import boundary, sealing


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
    sealing.keep_silent()
    return seen


@pytest.mark.parametrize("kind", [logging.Logger, OwnRecords, OwnHandling, OwnCalls])
def test_a_logger_of_ones_own_says_nothing_in_a_private_call(kind: type[logging.Logger], canary: str) -> None:
    sealing.keep_silent()
    buffer = io.StringIO()
    logger = kind("own", logging.DEBUG)
    logger.addHandler(logging.StreamHandler(buffer))
    boundary.in_private(logger.error, "says %s", canary)
    assert buffer.getvalue() == ""
    logger.error("a public call says %s", "this")
    assert buffer.getvalue() == "a public call says this\n"


def test_a_record_made_by_hand_says_nothing_either(canary: str) -> None:
    sealing.keep_silent()
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
    places = [(place, name) for place, name in sealing._SHOW if name in vars(place)]
    before = [vars(place)[name] for place, name in places]
    sealing.keep_silent()
    assert [vars(place)[name] for place, name in places] == before
    sys.unraisablehook = lambda unraisable: shown.append("replaced")
    sealing.keep_silent()
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


def _thread(canary: str, buffer: io.StringIO) -> None:
    logger = logging.Logger("own", logging.DEBUG)
    logger.addHandler(logging.StreamHandler(buffer))
    thread = threading.Thread(target=logger.error, args=(canary,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("way", [_emit, _print, _thread])
def test_what_writes_itself_is_not_stopped(way: Callable[[str, io.StringIO], None], canary: str) -> None:
    sealing.keep_silent()
    buffer = io.StringIO()
    boundary.in_private(way, canary, buffer)
    assert canary in buffer.getvalue()


def test_a_destructor_that_runs_after_the_call_is_not_stopped(shown: list[str], canary: str) -> None:
    def leave() -> None:
        circle: Any = Fails(canary)
        circle.circle = circle

    with contextlib.suppress(Exception):
        boundary.in_private(leave)
    gc.collect()
    assert shown == [canary]
