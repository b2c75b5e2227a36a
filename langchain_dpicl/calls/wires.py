"""The connections beneath a client: whose request uses each, so that it can be closed before an answer begins.

A client's time limit counts anew with each byte, and a server may send header lines for ever. So the closing of a call
shuts the socket down itself. `watch` stands before the network backend of an ``httpcore`` connection pool; clients of
``httpx`` and ``httpx2`` have one for each transport.
"""

from __future__ import annotations

import contextlib
import contextvars
import socket
from typing import Any, Protocol


class Carried(Protocol):
    """What uses a connection."""

    def carry(self, wire: Any) -> None:
        """It uses this one now. May raise."""


using: contextvars.ContextVar[Carried | None] = contextvars.ContextVar("dpicl_wire", default=None)
"""What is being sent in this context."""


def shut(wire: Any) -> None:
    """Close a connection under its reader's hands."""
    with contextlib.suppress(Exception):
        wire.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def _used(wire: Any) -> None:
    carried = using.get()
    if carried is not None:
        carried.carry(wire)


class _Around:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Wire(_Around):
    """A connection. A request writes before it reads, on a connection that was kept open, too."""

    def write(self, *arguments: Any, **named: Any) -> Any:
        _used(self._inner)
        return self._inner.write(*arguments, **named)

    def start_tls(self, *arguments: Any, **named: Any) -> Any:
        _used(self._inner)
        return _Wire(self._inner.start_tls(*arguments, **named))


class _AsyncWire(_Wire):
    async def start_tls(self, *arguments: Any, **named: Any) -> Any:
        _used(self._inner)
        return _AsyncWire(await self._inner.start_tls(*arguments, **named))


class _Backend(_Around):
    def connect_tcp(self, *arguments: Any, **named: Any) -> Any:
        return _Wire(self._inner.connect_tcp(*arguments, **named))

    def connect_unix_socket(self, *arguments: Any, **named: Any) -> Any:
        return _Wire(self._inner.connect_unix_socket(*arguments, **named))


class _AsyncBackend(_Around):
    async def connect_tcp(self, *arguments: Any, **named: Any) -> Any:
        return _AsyncWire(await self._inner.connect_tcp(*arguments, **named))

    async def connect_unix_socket(self, *arguments: Any, **named: Any) -> Any:
        return _AsyncWire(await self._inner.connect_unix_socket(*arguments, **named))


def watch(transport: Any, *, is_async: bool) -> None:
    """Know the connections of a transport, if it has a pool of them; those already open stay unknown."""
    pool: Any = getattr(transport, "_pool", None)
    backend = getattr(pool, "_network_backend", None)
    if backend is not None and not isinstance(backend, _Around):
        pool._network_backend = (_AsyncBackend if is_async else _Backend)(backend)
