"""Silence in private calls: log records and warnings that arise in them are dropped.

Not this package, but what it calls, writes private text there: a client logs whole requests at DEBUG, a retry logs what
the server said about a prompt, pydantic's warnings quote the value that they complain of. That such a line was written
at all can depend on private data too (a status, a retry), so it is dropped and not only emptied.

Whether a call is private is a context variable, which threads and tasks that LangChain starts inherit. What writes to
a file or to standard output itself is not stopped here.
"""

from __future__ import annotations

import contextvars
import logging
import warnings
from collections.abc import Callable
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


class _Warnings:
    """A ``warnings.showwarning``, or what calls it, that stands before another."""

    def __init__(self, before: Callable[..., None]) -> None:
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not private.get():
            self.before(*args, **kwargs)


def keep_silent() -> None:
    """Put them in place, unless they are. Called for every release, as a later hook may undo them.

    ``catch_warnings`` puts back the ``showwarning`` that it found, perhaps while a private call still runs. What calls
    ``showwarning`` it leaves alone, so the silence begins there too. Public calls log and warn as before.
    """
    if not isinstance(records := logging.getLogRecordFactory(), _Records):
        logging.setLogRecordFactory(_Records(records))
    for name in ("showwarning", "_showwarnmsg"):
        shown = getattr(warnings, name, None)
        if shown is not None and not isinstance(shown, _Warnings):
            setattr(warnings, name, _Warnings(shown))
