"""The clock of `serving.app`, on real sockets: who does not send a request's head is closed, and stops nobody else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn

from langchain_dpicl.serving.app import TimedProtocol

SECONDS, LONG = 0.6, 20.0


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answers without a look at the body; "/slow" takes longer than a head may."""
    import asyncio

    if scope["path"] == "/slow":
        await asyncio.sleep(2 * SECONDS)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., int]]:
    """serve(http): the port of a server that takes 100 connections."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def make(http: Any) -> int:
        config = uvicorn.Config(
            answer, port=0, http=http, lifespan="off", limit_concurrency=100, timeout_keep_alive=60, log_config=None
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        port: int = server.servers[0].sockets[0].getsockname()[1]
        return port

    yield make
    for server, thread in running:
        server.should_exit = server.force_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def port(serve: Callable[..., int]) -> int:
    return serve(partial(TimedProtocol, header_seconds=SECONDS))


def opened(port: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(sent)
    return connection


def closed_after(connection: socket.socket) -> float:
    """Seconds until the server closes it."""
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while connection.recv(1000):
            pass
    return time.monotonic() - started


def status(port: int) -> int:
    with opened(port, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n") as connection:
        return int(connection.recv(100).split()[1])


@pytest.mark.parametrize(("protocol", "frees"), [(partial(TimedProtocol, header_seconds=4), True), ("h11", False)])
def test_two_hundred_clients_that_send_half_a_line_stop_nobody_for_longer_than_the_clock(
    protocol: Any, frees: bool, serve: Callable[..., int]
) -> None:
    """They hold all that the server takes. uvicorn's own protocol keeps them, and refuses everybody, for ever."""
    at = serve(protocol)
    half = [opened(at, b"GET /ans") for _ in range(200)]
    assert status(at) == 503, "all connections are taken"
    deadline = time.monotonic() + (LONG if frees else 6)
    while status(at) == 503 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert status(at) == (200 if frees else 503)
    if frees:
        assert max(map(closed_after, half)) < LONG
    for connection in half:
        connection.close()


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: ", b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /again HT"],
    ids=["nothing", "half a head", "one request and half of the next"],
)
def test_bytes_that_trickle_do_not_stop_the_clock(port: int, sent: bytes) -> None:
    connection = opened(port, sent)
    stopped = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while sent and not stopped.wait(SECONDS / 10):
                connection.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    assert closed_after(connection) < LONG
    stopped.set()
    thread.join()


def test_a_body_that_nobody_reads_does_not_hold_the_connection(port: int) -> None:
    connection = opened(port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\nx")
    received = b""
    while b"ok" not in received:
        received += connection.recv(1000)
    connection.sendall(b"x")
    assert closed_after(connection) < LONG


def test_an_answer_may_take_longer_than_a_head(port: int) -> None:
    assert httpx.get(f"http://127.0.0.1:{port}/slow", timeout=10).text == "ok"


def test_requests_one_after_the_other_share_a_connection(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(4):
            assert client.get("/").text == "ok"
            time.sleep(0.3 * SECONDS)
