"""Real servers in processes of their own, on 127.0.0.1 and a free port."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
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


def wait_until(url: str, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    """Until the server answers at all."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url, timeout=5)
            return
        time.sleep(0.1)
    raise AssertionError("the server does not answer")


def stop(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(20)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def dpicl_serve(
    folder: Path, *, names: tuple[str, ...], releases: int = 40, scope: str = "per_principal", **server: Any
) -> Iterator[Served]:
    """``dpicl serve`` in this folder, with a key for each name."""
    keys = {name: new_key() for name in names}
    port = free_port()
    (folder / "served_chain.py").write_text(CHAIN.format(releases=releases, scope=scope))
    settings = {
        "chain": "served_chain:chain",
        "keys": {name: hash_of(key) for name, key in keys.items()},
        "server": {"port": port, "path": "/ask", **server},
    }
    (folder / "server.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "langchain_dpicl.cli", "serve", "--config", str(folder / "server.yaml")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(f"http://127.0.0.1:{port}/openapi.json", process)
            yield Served(process, f"http://127.0.0.1:{port}/ask", keys, folder)
        finally:
            stop(process)
