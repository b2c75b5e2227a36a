"""The one slot of a model: private calls take it in turn, before their clocks run."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import ClassVar

from langchain_dpicl.calls import threads
from langchain_dpicl.calls.clock import Call


class SlotGate:
    """The slot of a model that serves this process alone. Private calls get it in the order in which they ask.

    Parameters
    ----------
    settle
        Returns when the slot is free at the model itself. It is asked after a request whose answer was not read to its
        end.
    """

    _all: ClassVar[weakref.WeakSet[SlotGate]] = weakref.WeakSet()

    def __init__(self, settle: Callable[[], object]) -> None:
        self._settle = settle
        self._all.add(self)
        self.reset()

    def reset(self) -> None:
        """Nobody has the slot, and nobody waits: this is so in a process that was just forked."""
        self._lock = threading.Lock()
        self._line: deque[tuple[Call, Future[None]]] = deque()
        self._taken = False
        self._holder: Call | None = None
        self._requests = 0  # of the holder, under way
        self._clean = True  # whether the server has finished the holder's other requests

    def join(self, call: Call) -> Future[None]:
        """A request of a call begins. Done once the call has the slot: its further requests then queue as its work."""
        ticket: Future[None] = Future()
        with self._lock:
            if self._taken and call is not self._holder:
                self._line.append((call, ticket))
                return ticket
            self._take(call)
        ticket.set_result(None)
        return ticket

    def give_back(self, call: Call, ticket: Future[None]) -> None:
        """The request will not be made, whether the call has got the slot or not."""
        if not ticket.cancel():
            self.leave(call, clean=True)

    def leave(self, call: Call, *, clean: bool) -> None:
        """A request is over; ``clean`` if the server has finished it. After a call's last, the next has the slot."""
        with self._lock:
            if call is not self._holder:  # `reset` after a fork
                return
            self._requests -= 1
            self._clean = self._clean and clean
            if self._requests:
                return
            self._holder, clean, self._clean = None, self._clean, True
        pass_on = functools.partial(self._pass_on, clean)
        if clean or not threads.start(pass_on):
            pass_on()

    def _pass_on(self, clean: bool) -> None:
        try:
            if not clean:
                self._settle()
        finally:
            with self._lock:
                self._taken = False
                while self._line and not self._taken:
                    call, ticket = self._line.popleft()
                    if ticket.set_running_or_notify_cancel():
                        self._take(call)
                        ticket.set_result(None)

    def _take(self, call: Call) -> None:
        self._taken, self._holder = True, call
        self._requests += 1


def _reset_all() -> None:
    for gate in SlotGate._all:
        gate.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
