"""The surroundings of private calls: a context without tracers, and silence in it.

`in_private` runs a function in a clean context. Log records, warnings and unraisable errors that arise there are
dropped. The code that this package calls writes private text into them: a client logs whole requests at DEBUG, a retry
logs what the server said about a prompt, pydantic's warnings quote the value that they complain of. Whether such a line
is written at all can depend on private data too (a status, a retry), so it is dropped and not only emptied.

Whether a call is private is a context variable, which threads and tasks that LangChain starts inherit. Not stopped here
(each has a test that shows it): what writes to a file, to standard output, or by a handler's ``emit`` itself; a thread
that a member starts without copying the context; and the ``__del__`` of an object that outlives the call, if the
garbage collector finds it later.

What lives in globals cannot be switched off for one call. `check_surroundings` refuses to run instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

from langchain_core.callbacks import AsyncCallbackManager, CallbackManager
from langchain_core.globals import get_debug, get_llm_cache, get_verbose

from langchain_dpicl.errors import UnsafeConfigurationError

T = TypeVar("T")

private: contextvars.ContextVar[bool] = contextvars.ContextVar("dpicl_private", default=False)


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


class _Nothing(logging.LogRecord):
    """A record below the level of every handler, so that none takes it. What ``extra=`` would add is lost."""

    def __init__(self) -> None:
        super().__init__("", logging.NOTSET, "", 0, "", (), None)
        self.levelno = -1

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {}


class _Unless:
    """Stands before a function that shows something, or makes a log record, and is called instead of it.

    In private calls it gives ``nothing()``.
    """

    def __init__(self, before: Callable[..., Any], nothing: Callable[[], object] = lambda: None) -> None:
        self.before, self.nothing = before, nothing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.nothing() if private.get() else self.before(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a method, if it stands in a class."""
        return self if instance is None else MethodType(self, instance)


_SHOW: tuple[tuple[Any, str], ...] = (
    (warnings, "showwarning"),
    (warnings, "_showwarnmsg"),
    (sys, "unraisablehook"),
    (logging.Logger, "handle"),
    (logging.Logger, "callHandlers"),
    (logging.Handler, "handle"),
)
"""What shows a warning, what a ``__del__`` raised, and a record that a logger of one's own class made by itself."""


def keep_silent() -> None:
    """Put them in place, unless they are. Called for every release, as a later hook may undo them.

    ``catch_warnings`` puts back the ``showwarning`` that it found, perhaps while a private call still runs. What calls
    ``showwarning`` it leaves alone, so the silence begins there too. Public calls log and warn as before.
    """
    if not isinstance(records := logging.getLogRecordFactory(), _Unless):
        logging.setLogRecordFactory(_Unless(records, _Nothing))
    for place, name in _SHOW:
        shown = vars(place).get(name)
        if shown is not None and not isinstance(shown, _Unless):
            setattr(place, name, _Unless(shown))


def check_surroundings() -> None:
    """Refuse to run if globals would carry private text out. Raises `UnsafeConfigurationError`."""
    if get_llm_cache() is not None:
        raise UnsafeConfigurationError(
            "a global LLM cache is set: it would keep private prompts; call set_llm_cache(None)"
        )
    for is_on, mode in ((get_debug(), "debug"), (get_verbose(), "verbose")):
        if is_on:
            raise UnsafeConfigurationError(
                f"LangChain's {mode} mode is on: it prints private prompts; call set_{mode}(False)"
            )

    def added() -> list[str]:
        managers = (CallbackManager.configure([]), AsyncCallbackManager.configure([]))
        return [type(handler).__name__ for manager in managers for handler in manager.handlers]

    handlers = None
    with contextlib.suppress(Exception):  # LangChain refuses some variables of the environment by itself
        handlers = in_private(added)
    if handlers is None:
        raise UnsafeConfigurationError("LangChain cannot start a call without callbacks here; nothing was charged")
    if handlers:
        raise UnsafeConfigurationError(
            f"{handlers[0]} is added to every call (by register_configure_hook, a variable of the environment or an "
            "instrumentation of LangChain): it would see private prompts; take it away"
        )
    keep_silent()


def check_loop() -> None:
    """Refuse to run in an event loop whose debug mode is on. Raises `UnsafeConfigurationError`."""
    if asyncio.get_running_loop().get_debug():
        raise UnsafeConfigurationError(
            "asyncio's debug mode is on: it logs slow tasks with their results, which are private; "
            "run without PYTHONASYNCIODEBUG, -X dev and debug=True, or call get_running_loop().set_debug(False)"
        )
