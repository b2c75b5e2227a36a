"""The one slot of a model: private calls take it in turn, before their clocks run."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import ClassVar

from langchain_dpicl.calls import threads
from langchain_dpicl.calls.clock import Call


class Gate:
    """The slot of a model that serves this process alone. Private calls get it in the order in which they ask.

    Parameters
    ----------
    settle
        Returns when the slot is free at the model itself. It is asked after a request whose answer was not read to its
        end.
    """

    _all: ClassVar[weakref.WeakSet[Gate]] = weakref.WeakSet()

    def __init__(self, settle: Callable[[], object]) -> None:
        self._settle = settle
        self._all.add(self)
        self.reset()

    def reset(self) -> None:
        """Nobody has the slot, and nobody waits: this is so in a process that was just forked."""
        self._lock = threading.Lock()
        self._taken = False
        self._line: deque[Future[None]] = deque()
        self._held: dict[Call, list[int]] = {}
        """Of the calls that have the slot: their requests under way, and those that the server has not finished."""

    def joins(self, call: Call) -> bool:
        """Whether a call has the slot already. Its further requests then queue as its own work."""
        with self._lock:
            if call in self._held:
                self._held[call][0] += 1
                return True
            return False

    def holds(self, call: Call) -> None:
        """A call has got the slot."""
        with self._lock:
            self._held.setdefault(call, [0, 0])[0] += 1

    def leaves(self, call: Call, *, clean: bool) -> None:
        """One of a call's requests is over; ``clean`` if the server has finished it."""
        with self._lock:
            held = self._held.get(call)
            if held is None:  # `reset` after a fork
                return
            held[0] -= 1
            held[1] += not clean
            if held[0]:
                return
            del self._held[call]
        self.release(clean=not held[1])

    def ticket(self) -> Future[None]:
        """Done once the slot is the caller's."""
        ticket: Future[None] = Future()
        with self._lock:
            if self._taken:
                self._line.append(ticket)
                return ticket
            self._taken = True
        ticket.set_running_or_notify_cancel()
        ticket.set_result(None)
        return ticket

    def give_back(self, ticket: Future[None]) -> None:
        """The caller no longer waits, whether it has got the slot or not."""
        if not ticket.cancel():
            self.release(clean=True)

    def release(self, *, clean: bool) -> None:
        """The caller's requests are over. The next caller gets the slot once it is free."""
        if clean:
            self._pass_on()
        elif not threads.start(self._settle_and_pass_on):
            self._settle_and_pass_on()

    def _settle_and_pass_on(self) -> None:
        try:
            self._settle()
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        with self._lock:
            while self._line:
                ticket = self._line.popleft()
                if ticket.set_running_or_notify_cancel():
                    break
            else:
                self._taken = False
                return
        ticket.set_result(None)


def _reset_all() -> None:
    for gate in Gate._all:
        gate.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
