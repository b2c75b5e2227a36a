"""The servers under load: ``dpicl serve`` from a configuration file, killed and started again on the same port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
from http_server import Served, configured, free_port
from invariants import Answer, Book, Broken
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import PostgresExemplarStore
from langchain_dpicl.serving.guards import hash_of, new_key

ROOT = Path(__file__).parents[2]
RELEASES = 300
LABELS = ["Flask", "Porch"]
PATH = "/ask"
WITHIN = 60.0
"""Seconds within which a server answers again, or ends."""
LIMIT = 3
"""Seconds that a call of the model, or a request's head or body, may take."""
CHAIN = f"""
import os

from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI

from langchain_dpicl import (
    DPAggregate, NoisyVote, PoissonExampleSelector, PostgresExemplarStore, PrivacyBudget, PrivateEnsemble
)


def chain():
    store = PostgresExemplarStore.open(os.environ["STORE_URL"], DeterministicFakeEmbedding(size=8), name="notes")
    selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=8)
    budget = PrivacyBudget(
        1000, 1e-6, {RELEASES}, os.environ["LEDGER_URL"], "notes", scope="per_principal", replay_patience={LIMIT}
    )
    model = ChatOpenAI(model="m", base_url=os.environ["MODEL_URL"], api_key="none", temperature=0)
    member = RunnableLambda(lambda values: f"{{values['examples']}} {{values['input']}}") | model | StrOutputParser()
    ensemble = PrivateEnsemble(selector, member, timeout={LIMIT})
    return ensemble | DPAggregate(NoisyVote({LABELS}), budget, return_receipt=True)
"""
"""At epsilon 1000 for 300 releases noise moves a count with a probability below 1e-16."""


def fill(store: str) -> None:
    """Make the collection that all servers answer from."""
    rows = [{"input": f"a note about box {i}", "output": LABELS[i % 2], "owner": f"p{i}"} for i in range(40)]
    embeddings = DeterministicFakeEmbedding(size=8)
    PostgresExemplarStore.from_records(rows, embeddings, store, name="notes", owner_key="owner", progress=False).close()


class Service:
    """One server with its callers, each of whom has a budget of its own, and what was asked and answered."""

    def __init__(self, name: str, folder: Path, workers: int, callers: int, **addresses: str) -> None:
        self.name, self.folder, self.ledger, self.book = name, folder, addresses["LEDGER_URL"], Book()
        self.keys = {f"caller-{i}": new_key() for i in range(callers)}
        self.spent: set[str] = set()  # callers who were told so
        self.memory: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self.workers = workers
        folder.mkdir()
        (folder / "soak_chain.py").write_text(CHAIN)
        settings = {
            "chain": "soak_chain:chain",
            "keys": {name: hash_of(key) for name, key in self.keys.items()},
            "server": {
                "workers": workers,
                "path": PATH,
                "header_seconds": LIMIT,
                "body_seconds": LIMIT,
                "grace_seconds": 10,
            },
        }
        (folder / "server.yaml").write_text(json.dumps(settings))
        self._port, self._around = free_port(), {**addresses, "PYTHONPATH": str(ROOT)}
        self._stack = contextlib.ExitStack()
        self.client = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
        self.changing = threading.Lock()  # held while it is killed and started
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        running = configured(self.folder, self._port, PATH, self.keys, **self._around)
        try:
            self.served: Served = self._stack.enter_context(running)
        except AssertionError as error:
            log = (self.folder / "log").read_text(errors="replace")[-2000:]
            raise Broken(f"{self.name}: {error}: {log}") from None

    def kill(self) -> None:
        """kill -9 of the server with all of its workers, if it runs."""
        process = self.served.process
        if process.poll() is None:
            process.send_signal(signal.SIGSTOP)  # it starts no others
            for each in [*self.served.workers(), process.pid]:
                os.kill(each, signal.SIGKILL)
            process.wait()
        self._stack.close()

    def close(self) -> None:
        """End it in good order. Raises `Broken` if it does not end."""
        self.served.process.terminate()
        try:
            self.served.process.wait(WITHIN)
        except subprocess.TimeoutExpired:
            raise Broken(f"{self.name} does not end within {WITHIN:g} s") from None
        self._stack.close()

    @property
    def running(self) -> list[int]:
        """The processes that answer, the oldest first; the server itself, if it has one worker."""
        if self.workers == 1:
            return [self.served.process.pid]
        return sorted(self.served.workers(), key=lambda pid: self.memory[pid][0] if self.memory[pid] else (1e12, pid))

    @property
    def caller(self) -> str:
        """Who asks next: budgets are used up one after the other. Raises `StopIteration` if all are."""
        return next(name for name in self.keys if name not in self.spent)

    def request(self, caller: str, text: str) -> httpx.Response:
        """One request on a connection of its own."""
        headers = self.served.headers(caller)
        return self.client.post(f"{self.served.url}/invoke", json={"input": {"input": text}}, headers=headers)

    def ask(self, caller: str, text: str) -> Answer | str:
        """A question that may be charged: what the client got, or the kind of its failure."""
        self.book.tries(caller)
        return self._told(caller, text)

    def again(self, known: Answer) -> Answer | str:
        """A question that was answered: a charge for it would be one too many."""
        return self._told(*known.question)

    def _told(self, caller: str, text: str) -> Answer | str:
        try:
            response = self.request(caller, text)
        except httpx.TransportError as error:
            return type(error).__name__
        if response.status_code != 200:
            return f"{response.status_code} {response.json()['error']}"
        output = response.json()["output"]
        answer = Answer((caller, text), output["receipt"]["number"], output["answer"], time.monotonic())
        self.book.got(answer)
        return answer

    def sample(self) -> None:
        """Keep the memory of every process that answers, in bytes."""
        for pid in self.running:
            with contextlib.suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self.memory[pid].append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))

    def lives(self, seconds: float) -> Iterator[tuple[int, list[int]]]:
        """The samples of each process that lived for so long."""
        for pid, samples in self.memory.items():
            if samples and samples[-1][0] - samples[0][0] >= seconds:
                yield pid, [size for _, size in samples]
