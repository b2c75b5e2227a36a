"""Stores, ledgers and releases are shut while a chain's call runs.

A call of a chain, a member's or a public one, has a mark: on its context, and on every thread that runs its code. What
it starts has the mark, too (see `private.silence`): tasks, threads, the work of pools. So a fresh context changes
nothing. Where the mark is, a store is neither read nor changed, a ledger is not opened, and no release is made. The
library's own work, such as the drawing of buckets, runs outside of the calls, and has no mark.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar, overload

from langchain_dpicl.errors import ShutWithinCall

T = TypeVar("T")

_context: ContextVar[bool] = ContextVar("dpicl_in_call", default=False)
_thread = threading.local()


def in_call() -> bool:
    """True if a chain's call runs here."""
    return _context.get() or getattr(_thread, "marked", False)


def check_open() -> None:
    """Raise `ShutWithinCall` if a chain's call runs here."""
    if _context.get() or getattr(_thread, "marked", False):
        raise ShutWithinCall


def check_records() -> None:
    """The same for private records; and if the garbage collector runs here, which may end objects of a call."""
    if _context.get() or getattr(_thread, "marked", False) or getattr(_thread, "collects", False):
        raise ShutWithinCall


def collects() -> bool:
    """True if the garbage collector runs in this thread."""
    return getattr(_thread, "collects", False)


def note_collector(runs: bool) -> None:
    """The garbage collector begins in this thread, or ends."""
    _thread.collects = runs


def enter() -> None:
    """A call begins in this context."""
    _context.set(True)


def within(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function as a chain's call would: with the store shut."""

    def marked() -> T:
        enter()
        return function(*arguments)

    return copy_context().run(marked)


def mark_thread() -> None:
    """From now on this thread runs the code of calls alone."""
    _thread.marked = True


def marking(function: Callable[..., T]) -> Callable[..., T]:
    """A function that a call hands to another thread: it keeps the mark there. The same function outside of calls."""
    if not in_call():
        return function

    def marked(*arguments: Any, **named: Any) -> T:
        before = getattr(_thread, "marked", False)
        _thread.marked = True
        try:
            return function(*arguments, **named)
        finally:
            _thread.marked = before

    return marked


@contextlib.contextmanager
def for_others() -> Iterator[None]:
    """A thread that starts in this block serves public code, too, and has no mark."""
    _thread.lends = True
    try:
        yield
    finally:
        _thread.lends = False


def lends() -> bool:
    """True if a thread that starts now serves public code, too."""
    return getattr(_thread, "lends", False)


class Shut(Generic[T]):
    """An attribute that no call can read or write."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"{name} of {owner.__name__}"

    @overload
    def __get__(self, holder: None, owner: type) -> Shut[T]: ...

    @overload
    def __get__(self, holder: object, owner: type) -> T: ...

    def __get__(self, holder: Any, owner: type) -> T | Shut[T]:
        if holder is None:
            return self
        check_records()
        found: T = vars(holder)[self._name]
        return found

    def __set__(self, holder: object, value: T) -> None:
        check_records()
        vars(holder)[self._name] = value
