"""The events of releases that a server may count and time for its requests: public ones alone.

`observing` names the observer of what runs within a block, in a context variable. Private work runs in clean contexts
(`private.sealing.clean_context`), which have none: nothing that a member, an aggregator or a charge by owners' tickets
does reaches an observer, whatever that code calls.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

Step = Literal["check", "charge", "receipt"]


class Observer(Protocol):
    """Hears of releases, in the threads that make them."""

    def took(self, step: Step, seconds: float) -> None:
        """A step without private work ended so long after it began. ``charge`` is one transaction of the ledger."""

    def charged(self, budget: str, line: str, charges: int, replays: int) -> None:
        """A request was charged so often, and answered so often from the ledger."""

    def queue(self, waiting: int, running: int) -> None:
        """So many requests wait for a slot now, and so many slots are taken."""


_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("dpicl_observer", default=None)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` of the releases that are made within this block, threads and tasks of theirs included."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


observer: Callable[[], Observer | None] = _observer.get
"""Return the observer of this context; None in private work, and if nobody has named one."""
