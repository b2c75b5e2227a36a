"""Real servers in processes of their own, on 127.0.0.1 and a free port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from langchain_dpicl.serving.guards import hash_of, new_key

CHAIN = """
import time
from pathlib import Path

from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import (
    DPAggregate, ExemplarStore, NoisyVote, PoissonExampleSelector, PrivacyBudget, PrivateEnsemble
)


def member(values):
    time.sleep(0.4 if values["input"].startswith("slow") else 0)
    return "Positive"


def chain():
    records = [{{"input": f"text {{i}}", "output": "Positive", "owner": f"p{{i}}"}} for i in range(8)]
    store = ExemplarStore.from_records(
        records, DeterministicFakeEmbedding(size=8), owner_key="owner", progress=False
    )
    selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=8)
    ledger = f"sqlite:///{{Path(__file__).with_name('budget.db')}}"
    budget = PrivacyBudget(1000, 1e-5, {releases}, ledger, "served", scope="{scope}")
    return PrivateEnsemble(selector, RunnableLambda(member)) | DPAggregate(
        NoisyVote(["Positive", "Negative"]), budget, return_receipt=True
    )
"""
"""At epsilon 1000 and 40 releases sigma is 0.2, and 4 votes stand against none: noise hides that once in 1e40."""


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    keys: dict[str, str]
    folder: Path

    @property
    def ledger(self) -> str:
        return f"sqlite:///{self.folder / 'budget.db'}"

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].split("/")[0])

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}

    def workers(self) -> list[int]:
        """The processes that serve, by the parent's children in /proc."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and b"spawn_main" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(url: str, process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    """Until the server answers at all."""
    deadline = time.monotonic() + seconds
    with httpx.Client(
        timeout=5
    ) as client:  # one: each reads the system's certificates, which takes time of a processor
        while time.monotonic() < deadline:
            assert process.poll() is None, "the server ended"
            with contextlib.suppress(httpx.TransportError):
                client.get(url)
                return
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


def asked(served: Served, name: str, question: Any, path: str = "stream") -> socket.socket:
    """A connection on which the question was sent."""
    body = json.dumps({"input": question}).encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    connection.sendall(
        f"POST /ask/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {served.keys[name]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return connection


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found:
        piece = connection.recv(65536)
        assert piece, found
        found += piece
    return found


def hang_up(connection: socket.socket, *, rudely: bool) -> None:
    if rudely:  # a reset, and not an orderly end
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stop(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(20)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def dpicl_serve(
    folder: Path,
    *,
    names: tuple[str, ...],
    releases: int = 40,
    scope: str = "per_principal",
    chain: str | None = None,
    more: dict[str, Any] | None = None,
    **server: Any,
) -> Iterator[Served]:
    """``dpicl serve`` in this folder, with a key for each name. ``chain``: the module's source, with what tests share;
    default: a vote. ``more``: further sections of the configuration."""
    keys = {name: new_key() for name in names}
    port = free_port()
    (folder / "served_chain.py").write_text(chain or CHAIN.format(releases=releases, scope=scope))
    settings = {
        "chain": "served_chain:chain",
        "keys": {name: hash_of(key) for name, key in keys.items()},
        "server": {"port": port, "path": "/ask", **server},
        **(more or {}),
    }
    (folder / "server.yaml").write_text(json.dumps(settings))
    with configured(folder, port, "/ask", keys) as served:
        yield served


@contextlib.contextmanager
def configured(folder: Path, port: int, path: str, keys: dict[str, str], **environment: str) -> Iterator[Served]:
    """``dpicl serve`` with the folder's ``server.yaml``."""
    tests = str(Path(__file__).parent)
    command = [sys.executable, "-m", "langchain_dpicl", "serve", "--config", str(folder / "server.yaml")]
    around = {**os.environ, "PYTHONPATH": tests, **environment}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log, env=around
        )
        try:
            wait_until(f"http://127.0.0.1:{port}/openapi.json", process)
            yield Served(process, f"http://127.0.0.1:{port}{path}", keys, folder)
        finally:
            stop(process)
