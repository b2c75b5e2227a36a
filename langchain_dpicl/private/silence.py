"""Silence: what private code logs, warns of, or raises where nobody catches it, is dropped.

The code that this package calls writes private text into all of these: a client logs whole requests at DEBUG, a retry
logs what the server said about a prompt, pydantic's warnings quote the value that they complain of. Whether such a line
is written at all can depend on private data too (a status, a retry), so it is dropped and not only emptied.

Whether code is private is a context variable. Private code hands it on to all that it starts:

* Tasks and callbacks of event loops copy the context by themselves. Threads, the work of thread pools and the
  callbacks of their futures do so here, and what they raise ends there.
* An event loop that is made in private code reports nothing, whatever handler it is given: so no future, task, handle
  or asynchronous generator of it can, whenever and in whatever thread it ends. What is called there from elsewhere runs
  as private code.
* Objects that the garbage collector finds may be anybody's. What is logged, warned of or raised while it runs is
  dropped, but for what event loops of public code report.

What a server gives private code as a cookie is dropped, too: a client that all calls share keeps none for the next.

Warnings are dropped by a filter, before Python notes in a module that one was shown. It stands before all other
filters, and private code cannot change these: they are the whole process's.

Not stopped here: what writes to a file, to standard output, or by a handler's ``emit`` itself; a thread that is
started by ``_thread`` or by a C library; a ``sys.unraisablehook`` that is set while a private call runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from http.cookiejar import CookieJar
from types import MethodType
from typing import Any, TypeVar

from langchain_dpicl.calls import shut

T = TypeVar("T")

private: contextvars.ContextVar[bool] = contextvars.ContextVar("dpicl_private", default=False)


def is_private() -> bool:
    """Return whether this is private code. Where a chain's call runs it is, whatever its context says."""
    return private.get() or shut.in_call()


def silent() -> bool:
    """Return whether this is private code, or might be: a destructor that the garbage collector calls."""
    return is_private() or shut.collects()


@functools.cache
def clean_context() -> contextvars.Context:
    """A context that holds nothing but "private" and "LangSmith tracing is off". Each call runs in its own copy."""
    from langsmith.run_helpers import tracing_context

    def make() -> contextvars.Context:
        private.set(True)
        with tracing_context(enabled=False):
            return contextvars.copy_context()

    return contextvars.Context().run(make)


def in_private(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function on private values in a clean context: what it calls cannot find a tracer there."""
    return clean_context().copy().run(function, *arguments)


# -- logs, warnings, errors that nobody catches ------------------------------------------------------------------------


class _Nothing(logging.LogRecord):
    """A record below the level of every handler, so that none takes it. What ``extra=`` would add is lost."""

    def __init__(self) -> None:
        super().__init__("", logging.NOTSET, "", 0, "", (), None)
        self.levelno = -1

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {}


class _Around:
    """Stands in the place of a function. As a method, if it stands in a class."""

    __call__: Callable[..., Any]

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)


class _Unless(_Around):
    """For a function that shows something, or makes a log record: gives ``nothing()`` where all is silent."""

    def __init__(self, before: Callable[..., Any], nothing: Callable[[], object] = lambda: None) -> None:
        super().__init__(before)
        self.nothing = nothing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.nothing() if silent() else self.before(*args, **kwargs)


class _Matches:
    """The pattern of a filter of `warnings`: the first filter of all drops what is silent."""

    def match(self, text: str) -> bool:
        return silent()


_FILTER: Any = ("ignore", _Matches(), Warning, None, 0)


def _stand_first() -> None:
    filters: Any = warnings.filters
    if filters[:1] != [_FILTER]:
        filters.insert(0, _FILTER)
    if _FILTER in filters[1:]:
        del filters[filters.index(_FILTER, 1)]


class _Changed(_Around):
    """`warnings` calls it whenever somebody has changed its filters."""

    def __call__(self) -> None:
        _stand_first()
        self.before()


class _Leave(_Around):
    """The end of a ``catch_warnings`` block, unless private code has entered it: then it changed nothing."""

    def __call__(self, block: Any, *raised: Any) -> None:
        if block._entered:
            self.before(block, *raised)


def _collecting(phase: str, info: object) -> None:
    if phase == "start":
        _cover(sys, "unraisablehook", _Unless)
    shut.note_collector(phase == "start")


# -- what private code starts ------------------------------------------------------------------------------------------


def _quietly(context: contextvars.Context, function: Callable[..., Any], *arguments: Any) -> None:
    with contextlib.suppress(BaseException):
        context.run(function, *arguments)


class _Start(_Around):
    """`Thread.start`."""

    def __call__(self, thread: threading.Thread) -> None:
        if is_private() and not shut.lends():
            run = partial(_quietly, contextvars.copy_context(), thread.run)
            mark = shut.mark_thread if shut.in_call() else lambda: None

            def quiet() -> None:
                private.set(True)  # for what ends with the thread: its own values
                mark()
                run()
                del thread.run  # it leads back to the thread

            thread.run = quiet  # type: ignore[method-assign]
        self.before(thread)


class _MakePool(_Around):
    """The constructor of `ThreadPoolExecutor`: a pool that private code has made serves nobody else."""

    def __call__(self, pool: Any, *args: Any, **kwargs: Any) -> None:
        self.before(pool, *args, **kwargs)
        pool._dpicl_private = is_private()


class _Submit(_Around):
    """`ThreadPoolExecutor.submit`. The threads of public code's pools may serve others later, so they do not start in
    this context."""

    def __call__(self, pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not is_private():
            return self.before(pool, function, *args, **kwargs)
        function = shut.marking(partial(contextvars.copy_context().run, function))
        if getattr(pool, "_dpicl_private", False):
            return self.before(pool, function, *args, **kwargs)
        with shut.for_others():
            return contextvars.Context().run(partial(self.before, pool, function, *args, **kwargs))


class _CallBack(_Around):
    """`Future.add_done_callback` of `concurrent.futures`."""

    def __call__(self, future: Any, function: Callable[[Any], Any]) -> None:
        if is_private():
            function = partial(_quietly, contextvars.copy_context(), shut.marking(function))
        self.before(future, function)


class _MakeLoop(_Around):
    """The constructor of event loops of a class."""

    def __call__(self, loop: Any, *args: Any, **kwargs: Any) -> None:
        self.before(loop, *args, **kwargs)
        if not is_private():
            return
        call = loop.call_soon_threadsafe

        def from_elsewhere(*args: Any, **kwargs: Any) -> Any:
            """Call it so that the context that it copies is private."""
            return call(*args, **kwargs) if private.get() else in_private(partial(call, *args, **kwargs))

        loop.call_soon_threadsafe = from_elsewhere
        loop.call_exception_handler = lambda context: None


class _Report(_Around):
    """The reports of public code's event loops, which the garbage collector may cause, too."""

    def __call__(self, loop: Any, context: dict[str, Any]) -> None:
        collects = shut.collects()
        shut.note_collector(False)
        try:
            self.before(loop, context)
        finally:
            shut.note_collector(collects)


# -- in place ----------------------------------------------------------------------------------------------------------

_PLACES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (sys, "unraisablehook", _Unless),
    (logging.Logger, "handle", _Unless),  # a record that a logger of one's own class made by itself
    (logging.Logger, "callHandlers", _Unless),
    (logging.Handler, "handle", _Unless),
    (warnings, "_filters_mutated", _Changed),
    (warnings, "_add_filter", _Unless),
    (warnings, "resetwarnings", _Unless),
    (warnings.catch_warnings, "__enter__", partial(_Unless, nothing=list)),
    (warnings.catch_warnings, "__exit__", _Leave),
    (threading.Thread, "start", _Start),
    (ThreadPoolExecutor, "__init__", _MakePool),
    (ThreadPoolExecutor, "submit", _Submit),
    (Future, "add_done_callback", _CallBack),
    (CookieJar, "extract_cookies", _Unless),  # a client would send with one call what another was given
)
_OF_LOOPS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("__init__", _MakeLoop),
    ("call_exception_handler", _Report),
)


def _cover(place: Any, name: str, make: Callable[[Any], Any]) -> None:
    found = getattr(place, name, None)
    if found is not None and not isinstance(found, _Around):
        setattr(place, name, make(found))


def keep_silent() -> None:
    """Put all of this in place, unless it is. Called for every release and call: what others set may undo it.

    Public code logs, warns and reports as before.
    """
    if not isinstance(records := logging.getLogRecordFactory(), _Around):
        logging.setLogRecordFactory(_Unless(records, _Nothing))
    for place, name, make in _PLACES:
        if not isinstance(place.__dict__.get(name), _Around):
            _cover(place, name, make)
    for loops in asyncio.AbstractEventLoop.__subclasses__():
        for name, make in _OF_LOOPS:
            if not isinstance(loops.__dict__.get(name), _Around):
                _cover(loops, name, make)
    if _collecting not in gc.callbacks:
        gc.callbacks.append(_collecting)
    if warnings.filters[:1] != [_FILTER] or _FILTER in warnings.filters[1:]:
        _stand_first()
