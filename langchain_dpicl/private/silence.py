"""Silence in private calls: log records, warnings and unraisable errors that arise in them are dropped.

Not this package, but what it calls, writes private text there: a client logs whole requests at DEBUG, a retry logs what
the server said about a prompt, pydantic's warnings quote the value that they complain of. That such a line was written
at all can depend on private data too (a status, a retry), so it is dropped and not only emptied.

Whether a call is private is a context variable, which threads and tasks that LangChain starts inherit. Not stopped here
(each has a test that shows it): what writes to a file, to standard output, or by a handler's ``emit`` itself; a thread
that a member starts without copying the context; and the ``__del__`` of an object that outlives the call, where the
garbage collector finds it later.
"""

from __future__ import annotations

import contextvars
import logging
import sys
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

private: contextvars.ContextVar[bool] = contextvars.ContextVar("dpicl_private", default=False)


class _Nothing(logging.LogRecord):
    """A record below the level of every handler, so that none takes it. What ``extra=`` would add is lost."""

    def __init__(self) -> None:
        super().__init__("", logging.NOTSET, "", 0, "", (), None)
        self.levelno = -1

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {}


class _Records:
    """A log record factory that stands before another."""

    def __init__(self, before: Callable[..., logging.LogRecord]) -> None:
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        if not private.get():
            return self.before(*args, **kwargs)
        return _Nothing()


class _Unless:
    """A function that shows something, such as ``warnings.showwarning``: it stands before another."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if private.get() else self.before(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a method, where it stands in a class."""
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
    if not isinstance(records := logging.getLogRecordFactory(), _Records):
        logging.setLogRecordFactory(_Records(records))
    for place, name in _SHOW:
        shown = vars(place).get(name)
        if shown is not None and not isinstance(shown, _Unless):
            setattr(place, name, _Unless(shown))
