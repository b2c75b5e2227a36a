"""The servers of one model: which of them a call asks, in which slot, and what follows if one dies.

A `Servers` stands behind a client's transport (`transport.install`). All requests of one call share a `Route`:

* The call draws an order of the servers by itself, from the operating system's generator. The first is a server with
  probability proportional to its slots, a public number. How many calls wait there does not count: that follows from
  how long others take, which is private.
* It waits for a slot off its own clock, as for a model that has only one.
* If a server cannot be reached, or answers 503 (it is starting), the call goes on to the next of its order.
* If a server dies over a request (the connection breaks, or any other status from 500 on), the request is repeated on
  the next server, ALONE: once no other call has a slot there. The call's clock starts anew. A second death is the
  call's end: the error reaches the member, which abstains.

No server is remembered as dead: such a mark would carry what one call met to others. Who looks after the servers asks
them in public (`ModelServers.health`).

**What a call's output depends on.** Let each server answer a request by the same function of that request alone. If
servers die for reasons that no prompt has a part in, a call that finds one that lives has the output of an undisturbed
run, and one call's content decides nothing about another's: the orders are independent draws, and waiting takes no
one's time. Now let one call's prompt kill every server that reads it. It reads two at most: its second request is
alone, so it interrupts nobody, and the third is never made. So any other call is interrupted once at most, by the
first death, and a server that is gone by then only moves it on. With three servers or more, and deaths that take
the listening socket with them, every other output is unchanged. With two servers nothing is left after such a call, and
the others abstain; so they do, as with one server, if a dying server still takes requests and answers 500.

This holds within one process. Calls of other processes on the same servers see the deaths too.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from langchain_dpicl.calls import running
from langchain_dpicl.calls.running import Call
from langchain_dpicl.privacy.noise import SecureRandomness

_UNREACHED = {"ConnectError", "ConnectTimeout"}
_BROKEN = {"ReadError", "WriteError", "CloseError", "RemoteProtocolError"}
"""The errors of httpx and httpx2, by name."""


@dataclass
class _Held:
    slots: int
    requests: int = 0
    clean: bool = True  # whether the server has finished the call's other requests


class SlotGate:
    """The slots of a model, or of one of its servers. Private calls get them in the order in which they ask.

    Parameters
    ----------
    settle
        Returns when a slot is free at the model itself. It is asked after a request whose answer was not read to its
        end. None: the slot is free when the connection is closed.
    slots
        How many calls there are at once.
    """

    _all: ClassVar[weakref.WeakSet[SlotGate]] = weakref.WeakSet()

    def __init__(self, settle: Callable[[], object] | None = None, slots: int = 1) -> None:
        self._settle = settle
        self.slots = slots
        self._all.add(self)
        self.reset()

    def reset(self) -> None:
        """Nobody has a slot, and nobody waits: this is so in a process that was just forked."""
        self._lock = threading.Lock()
        self._line: deque[tuple[Call, int, Future[None]]] = deque()
        self._free = self.slots
        self._holders: dict[Call, _Held] = {}

    async def enter(self, call: Call, in_loop: bool, alone: bool = False) -> None:
        """A request of a call begins once the call has a slot: its further requests then queue as its work.

        It waits off the call's clock, and suspends only if ``in_loop``. ``alone``: the call takes all slots.
        """
        ticket: Future[None] = Future()
        needs = self.slots if alone else 1
        with self._lock:
            if call in self._holders or (not self._line and needs <= self._free):
                self._take(call, needs)
                return
            self._line.append((call, needs, ticket))
        with call.waits():
            try:
                await asyncio.wrap_future(ticket) if in_loop else ticket.result()
            except BaseException:  # the request will not be made
                if not ticket.cancel():
                    self.leave(call, clean=True)
                raise

    def leave(self, call: Call, *, clean: bool) -> None:
        """A request is over; ``clean`` if the server has finished it. After a call's last, the next has the slot."""
        with self._lock:
            held = self._holders.get(call)
            if held is None:  # `reset` after a fork
                return
            held.requests -= 1
            held.clean = held.clean and clean
            if held.requests:
                return
            del self._holders[call]
        pass_on = functools.partial(self._pass_on, held)
        if held.clean or self._settle is None or not running.start(pass_on):
            pass_on()

    def _pass_on(self, held: _Held) -> None:
        try:
            if not held.clean and self._settle is not None:
                self._settle()
        finally:
            with self._lock:
                self._free += held.slots
                while self._line:
                    call, needs, ticket = self._line[0]
                    if not ticket.cancelled() and call not in self._holders and needs > self._free:
                        break
                    self._line.popleft()
                    if ticket.set_running_or_notify_cancel():
                        self._take(call, needs)
                        ticket.set_result(None)

    def _take(self, call: Call, needs: int) -> None:
        if call not in self._holders:
            self._holders[call] = _Held(needs)
            self._free -= needs
        self._holders[call].requests += 1


def _reset_all() -> None:
    for gate in SlotGate._all:
        gate.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)


class Route:
    """One call's way through the servers: the order that it drew, and what it has met."""

    def __init__(self, order: list[str]) -> None:
        self._order = order
        self._lock = threading.Lock()  # a member's requests may come from several threads
        self.alone = False
        """Whether a server has died over the call."""

    @property
    def address(self) -> str:
        """The server that the call's next request goes to."""
        return self._order[0]

    def moves_on(self, address: str, outcome: Any) -> bool:
        """Whether a request that ended so at this server, by an error or a response, is made again at the next one."""
        if isinstance(outcome, BaseException):
            name = type(outcome).__name__
            broken, lost = name in _BROKEN, name in _BROKEN | _UNREACHED
        else:
            broken, lost = outcome.status_code != 503, outcome.status_code >= 500
        if not lost:
            return False
        with self._lock:
            if address == self._order[0]:  # else another of the call's requests has found it out
                if (broken and self.alone) or len(self._order) == 1:
                    del self._order[1:]
                    return False
                self.alone = self.alone or broken
                del self._order[0]
            return True


class Servers:
    """The servers of one model, by their addresses, and the slots of each. The client has the first one's address."""

    def __init__(self, gates: Mapping[str, SlotGate]) -> None:
        self._gates = dict(gates)
        self.first = next(iter(gates))
        """The client's address."""

    def route(self, call: Call | None) -> Route:
        """The route of a call, which draws its order at its first request; without a call, of one request."""
        if call is not None and self in call.routes:
            found: Route = call.routes[self]
            return found
        waits = -np.log(SecureRandomness().uniforms(len(self._gates)))  # exponential: the least, by slots, is first
        drawn = {address: wait / self._gates[address].slots for address, wait in zip(self._gates, waits, strict=True)}
        route = Route(sorted(drawn, key=drawn.__getitem__))
        return route if call is None else call.routes.setdefault(self, route)

    def gate(self, address: str) -> SlotGate:
        """The slots of one server."""
        return self._gates[address]

    def path(self, request: Any) -> str:
        """What a request asks for, below the address."""
        return str(request.url).removeprefix(self.first)

    def replace(self, address: str, gate: SlotGate) -> None:
        """Let all requests go to one other server from now on. Its clients keep the first address."""
        self._gates = {address: gate}

    def aim(self, request: Any, address: str, path: str) -> None:
        """Let a request go to one of the servers."""
        if self._gates.keys() != {self.first}:
            request.url = type(request.url)(address + path)
            request.headers["host"] = request.url.netloc.decode("ascii")
