"""What serving a release costs, against the same LangServe application without privacy.

Real uvicorn servers with 1 and 2 workers; 20 clients that each ask a question of their own as soon as the last is
answered; SQLite.

- requests a second with an instant model: a release of 10 member calls, and LangServe's ``add_routes`` with one call
- the same, for LangServe with the same 10 calls: at 2 workers the release has at least .8 of its requests
- a release's own time (from before its charge to its answer, less the model's) where the model takes half a second
  or so, as models do: 95 % under 10 ms; and with an instant model, where 20 clients queue for the processor
- where that time goes
- answers, charges and receipts are equally many, and none beyond the budget
- requests a second of a head with the embedded model, and of bare ``embed_documents`` with the same model behind the
  same server, taking turns; the time of an answer, as its client sees it
- seconds from the start of ``dpicl serve`` until ``/ready`` says so: a head under 8; a saved store whose members ask
  the embedded model, and whose gate the embedding model, under 12. Beside it the seconds that it had a processor for
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from figures import show
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnableParallel

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    PrivateHead,
)
from langchain_dpicl.local import local_embeddings

LABELS = ["red", "blue"]
MEMBERS, CLIENTS, RELEASES, OWNERS = 10, 20, 100_000, 10_000
TARGET_MS = 10.0
AT_TWO = 0.8
READY_S = {"head": 8.0, "embedded model": 12.0}
ONCE = ("head", "embed_documents")  # what they run needs no ledger
ROUNDS = 3
NAMES = {"check": "check", "charge": "charge", "sample": "sample", "aggregate": "count and noise", "record": "receipt"}
STEPS = tuple(NAMES)


# -- the servers, in processes of their own ----------------------------------------------------------------------------


class Model(Runnable[Any, str]):
    """Takes as long as the question says, and nothing else: not even what a chain of LangChain's would add."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """Not used by a server."""
        raise NotImplementedError

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """The answer, after a while."""
        if input["seconds"]:
            await asyncio.sleep(input["seconds"])
        return "red"


def ledger_of(folder: Path) -> str:
    """Where the ledger is: the folder may say so."""
    said = folder / "ledger"
    return said.read_text() if said.exists() else f"sqlite:///{folder}/budget.db"


def release_of(folder: Path) -> Any:
    """The usual chain, without noise's rarest whim: at this epsilon no answer is "the members abstain"."""
    rows = [{"input": f"a ticket, {i}", "output": LABELS[i % 2]} for i in range(OWNERS)]
    store = ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=16), progress=False)
    budget = PrivacyBudget(30.0, 1e-7, RELEASES, ledger_of(folder))
    ensemble = PrivateEnsemble(PoissonExampleSelector(store, MEMBERS, shots=4), Model())
    return ensemble | DPAggregate(NoisyVote(LABELS), budget, return_receipt=True)


def head_of(folder: Path) -> PrivateHead:
    """A head on the embedded model, from its file. That is made at first use, of vectors without a meaning, with the
    file of its store beside it."""
    file = folder / "head.npz"
    if not file.exists():
        vectors = np.eye(384, dtype=np.float32)
        outputs = [LABELS[i % 2] for i in range(384)]
        texts = [f"a ticket, {i}" for i in range(384)]
        store = ExemplarStore.from_texts(texts, local_embeddings(), outputs=outputs, vectors=vectors, progress=False)
        store.save(folder / "store.db")
        with contextlib.closing(PrivacyBudget(8.0, 1e-5, {"head": 1}, f"sqlite:///{folder}/heads.db")) as budget:
            PrivateHead.fit(store, LABELS, budget, progress=False).save(file)
    return PrivateHead.load(file, local_embeddings())


def timed(method: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """The method, whose seconds are kept, less those that the model was told to take."""

    def keep(started: float, first: Any) -> None:
        if isinstance(first, dict) and first["input"].startswith("before"):
            return  # the load that warms up
        model = first.get("seconds", 0.0) if isinstance(first, dict) else 0.0
        times.append(time.perf_counter() - started - (0.0 if method.__name__ == "check" else model))

    if asyncio.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return await method(*args, **options)
            finally:
                keep(started, args[0])

        return awaited

    @functools.wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args, **options)
        finally:
            keep(started, args[0])

    return called


def watched(release: Any, times: dict[str, list[float]]) -> Any:
    """Keep the time of every step, and of the whole."""
    ledger = release.budget._ledger
    holders = {"check": release, "charge": ledger, "sample": release.selector, "aggregate": release.aggregator}
    for name in STEPS:
        holder = holders.get(name, ledger)
        setattr(holder, name, timed(getattr(holder, name), times.setdefault(name, [])))
    release._arelease = timed(release._arelease, times.setdefault("whole", []))
    return release


def idle(release: Any) -> Any:
    """The same release, which does nothing."""

    async def nothing(*_: Any, **__: Any) -> Any:
        return {"answer": "red", "receipt": {}}

    release._arelease = nothing
    return release


def make_app() -> Any:
    """A worker's application, as the environment says: private, a private release that does nothing, a head, LangServe
    alone with one call or ten, or a bare embedding."""
    from fastapi import FastAPI, Request
    from langserve import add_routes

    from langchain_dpicl.serving import add_dp_routes
    from langchain_dpicl.serving.app import warm

    kind, folder = json.loads(os.environ["DPICL_BENCH"])
    times: dict[str, list[float]] = {}

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        Path(folder, f"times-{os.getpid()}.json").write_text(json.dumps(times))

    app = FastAPI(lifespan=life)
    if kind in ("private", "nothing"):
        release = release_of(Path(folder))
        warm(release)
        release = watched(release, times) if kind == "private" else idle(release)
        add_dp_routes(app, release, "/ask", principal_from=lambda _: "bench")
    elif kind == "head":
        head = head_of(Path(folder))
        head.invoke("ready?")
        add_dp_routes(app, head, "/ask", principal_from=lambda _: "bench")
    elif kind == "embed_documents":
        model = local_embeddings()
        model.embed_documents(["ready?"])

        async def embed(request: Request) -> dict[str, float]:
            rows = await asyncio.to_thread(model.embed_documents, [(await request.json())["input"]])
            return {"output": rows[0][0]}

        embed.__annotations__["request"] = Request
        app.post("/ask/invoke")(embed)
    else:
        steps: Any = {f"member_{i}": Model() for i in range(MEMBERS)}
        chain: Any = Model() if kind == "one call" else RunnableParallel(steps) | RunnableLambda(lambda _: "red")
        add_routes(app, chain.with_types(input_type=dict[str, Any], output_type=str), path="/ask")
    return app


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(kind: str, folder: Path, workers: int) -> Iterator[int]:
    """A server's port; it has ended afterwards."""
    port = free_port()
    if kind in ("private", "nothing"):
        release_of(folder).line()  # the plan is frozen before workers start
    elif kind == "head":
        head_of(folder)
    command = [sys.executable, __file__, "--serve", json.dumps([kind, str(folder)])]
    process = subprocess.Popen([*command, "--port", str(port), "--workers", str(workers)])
    try:
        until_ready(port, workers)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()


def serve(what: str, port: int, workers: int) -> None:
    """Run a server until it is told to stop."""
    import uvicorn

    os.environ["DPICL_BENCH"] = what
    sys.path.insert(0, str(Path(__file__).parent))
    options: dict[str, Any] = {"port": port, "http": "h11", "ws": "none", "log_level": "warning"}
    options["timeout_worker_healthcheck"] = 60  # of a worker that loads a model
    uvicorn.run("bench_serving:make_app", factory=True, workers=workers, access_log=False, **options)


# -- the clients -------------------------------------------------------------------------------------------------------


def request(question: Any) -> bytes:
    """An invoke by hand: a client library would take more of the processor than the server."""
    body = json.dumps({"input": question})
    head = "POST /ask/invoke HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: Any) -> int:
    """The status of one answer."""
    writer.write(request(question))
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length"))
    await reader.readexactly(length)
    return int(head.split(" ", 2)[1])


async def client(
    port: int, which: str, until: float, latency: float | None, statuses: Counter[int], times: list[float]
) -> None:
    """Ask until the time is over; the model takes from half of its latency to half as much again, or, without a
    latency, reads a text."""
    # People do not all begin at once; and a worker that is idle takes the next connection, or all that come at once.
    await asyncio.sleep(random.uniform(0, max(0.4, 2 * (latency or 0.0))))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    number = 0
    while time.monotonic() < until:
        question: Any = f"Could you send me number {number} of {which} again, please? It did not arrive."
        if latency is not None:
            question = {"input": f"{which} asks {number}", "seconds": latency * random.uniform(0.5, 1.5)}
        started = time.perf_counter()
        statuses[await ask(reader, writer, question)] += 1
        times.append(time.perf_counter() - started)
        number += 1
    writer.close()


async def load(port: int, seconds: float, name: str, latency: float | None) -> tuple[Counter[int], float, list[float]]:
    """Statuses of all answers, answers a second, and each answer's time."""
    statuses: Counter[int] = Counter()
    times: list[float] = []
    started = time.monotonic()
    tasks = [client(port, f"{name} {i}", started + seconds, latency, statuses, times) for i in range(CLIENTS)]
    await asyncio.wait_for(asyncio.gather(*tasks), seconds + 60)
    return statuses, statuses.total() / (time.monotonic() - started), times


def until_ready(port: int, workers: int) -> None:
    """Wait until every worker answers: several connections in a row go to whoever listens."""
    deadline = time.monotonic() + 300
    good = 0
    while good < 5 * workers:
        if time.monotonic() > deadline:
            raise RuntimeError("the server does not answer")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                good += connection.recv(100).startswith(b"HTTP/1.1 200")
        except OSError:
            time.sleep(0.2)
    time.sleep(3.0 * (workers - 1))  # a listening socket does not show which of the workers are still starting


# -- the figures -------------------------------------------------------------------------------------------------------


def measured(kind: str, workers: int, seconds: float, latency: float) -> tuple[float, dict[str, Any], int]:
    """Answers a second; the steps' times; how many answers. Checks that nothing is lost."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:  # not /tmp, which may be memory
        folder = Path(name)
        with served(kind, folder, workers) as port:
            asyncio.run(load(port, 1.0, "before", latency))  # not counted, but charged
            before = spent(folder) if kind == "private" else 0
            statuses, rate, _ = asyncio.run(load(port, seconds, "measured", latency))
        if set(statuses) != {200}:
            raise RuntimeError(f"{kind}: statuses {dict(statuses)}")
        if kind != "private":
            return rate, {}, statuses.total()
        if not spent(folder) - before == released(folder) - before == statuses.total():
            raise RuntimeError(f"{statuses.total()} answers, {spent(folder)} charges, {released(folder)} receipts")
        return rate, all_times(folder), statuses.total()


def measured_once(workers: int, seconds: float) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Median answers a second and all answers' times, of a head and of bare embeddings, which take turns."""
    rates: dict[str, list[float]] = {kind: [] for kind in ONCE}
    times: dict[str, list[float]] = {kind: [] for kind in ONCE}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, contextlib.ExitStack() as servers:
        ports = {kind: servers.enter_context(served(kind, Path(name), workers)) for kind in ONCE}
        for port in ports.values():
            asyncio.run(load(port, 1.0, "before", None))
        for _ in range(ROUNDS):
            for kind, port in ports.items():
                statuses, rate, took = asyncio.run(load(port, seconds, "measured", None))
                if set(statuses) != {200}:
                    raise RuntimeError(f"{kind}: statuses {dict(statuses)}")
                rates[kind].append(rate)
                times[kind] += took
    return {kind: statistics.median(found) for kind, found in rates.items()}, times


def from_ledger(folder: Path, query: str) -> int:
    """One number of the ledger."""
    engine = sa.create_engine(ledger_of(folder))
    with engine.connect() as ledger:
        found = int(ledger.exec_driver_sql(query).scalar_one())
    engine.dispose()
    return found


def spent(folder: Path) -> int:
    """What the counter says."""
    return from_ledger(folder, "SELECT spent FROM dpicl_counters")


def released(folder: Path) -> int:
    """Charges with a receipt of a release."""
    query = "SELECT count(*) FROM dpicl_charges WHERE outcome = 'released' AND receipt IS NOT NULL"
    return from_ledger(folder, query)


def all_times(folder: Path) -> dict[str, list[float]]:
    """Every worker's."""
    found: dict[str, list[float]] = {}
    for file in folder.glob("times-*.json"):
        for name, times in json.loads(file.read_text()).items():
            found.setdefault(name, []).extend(times)
    return found


def share(times: list[float], part: float) -> float:
    """A quantile in milliseconds."""
    return 1e3 * sorted(times)[min(int(part * len(times)), len(times) - 1)]


def seconds_until_ready(kind: str, folder: Path) -> tuple[float, float]:
    """From the start of a process to the first answer that all parts are ready; and how long it had a processor."""
    port = free_port()
    path = folder / f"{kind}.json"  # JSON is YAML
    path.write_text(json.dumps({**configured(kind, folder), "server": {"port": port, "anonymous": True}}))
    command = [sys.executable, "-m", "langchain_dpicl", "serve", "--config", str(path)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and time.monotonic() < began + 300:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
                connection.sendall(b"GET /ready HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                if connection.recv(100).startswith(b"HTTP/1.1 200"):
                    return time.monotonic() - began, of_processor(process.pid)
            time.sleep(0.05)
        raise RuntimeError(f"{kind}: not ready, or ended with {process.poll()}")
    finally:
        process.terminate()
        process.wait(60)


def of_processor(process: int) -> float:
    """The seconds that a process has had a processor for. On a busy machine they say more than the clock."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def configured(kind: str, folder: Path) -> dict[str, Any]:
    """The sections of a configuration."""
    head_of(folder)
    if kind == "head":
        return {"head": "head.npz"}
    return {
        "store": {"file": "store.db"},
        "release": {"kind": "vote", "labels": LABELS},
        "selector": {"calls": 20, "threshold": 0.0, "eligible": 300},
        "budget": {"epsilon": 8, "delta": 1e-5, "releases": 100, "ledger": "sqlite:///ready.db", "accept_noise": True},
    }


def measure_ready() -> dict[str, float]:
    """The median of a few starts of each kind."""
    figures = {}
    for kind, most in READY_S.items():
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
            clock, processor = zip(*(seconds_until_ready(kind, Path(name)) for _ in range(ROUNDS)), strict=True)
        about = f"1 worker, {kind}, seconds from its start until it is ready"
        figures[f"{about} (under {most:g})"] = statistics.median(clock)
        figures[f"{about}, of a processor"] = statistics.median(processor)
    return figures


def measure(seconds: float) -> dict[str, float]:
    """Every figure, by name."""
    figures: dict[str, float] = {}
    for workers in (1, 2):
        rates = {}
        for kind in ("one call", "ten calls", "private"):
            rates[kind], times, _ = measured(kind, workers, seconds, 0.0)
            figures[f"{workers} workers, {kind}, answers a second"] = rates[kind]
        figures[f"{workers} workers, private over one call"] = rates["private"] / rates["one call"]
        wanted = f" (at least {AT_TWO:g})" if workers == 2 else ""
        figures[f"{workers} workers, private over ten calls{wanted}"] = rates["private"] / rates["ten calls"]
        figures[f"{workers} workers, instant model, p50 of a release, ms"] = share(times["whole"], 0.5)
        figures[f"{workers} workers, instant model, p95 of a release, ms"] = share(times["whole"], 0.95)
    latency = 0.5
    for workers in (1, 2):
        rate, times, _ = measured("private", workers, 2 * seconds, latency)
        name = f"{workers} workers, model of {latency:g} s"
        own = times["whole"]
        figures[f"{name}, answers a second"] = rate
        figures[f"{name}, p50 of a release's own time, ms"] = share(own, 0.5)
        figures[f"{name}, p95 of a release's own time, ms (under {TARGET_MS:g})"] = share(own, 0.95)
        for step in STEPS:
            figures[f"{name}, median of its {NAMES[step]}, ms"] = share(times[step], 0.5)
    return figures | measure_once(seconds) | measure_ready()


def measure_once(seconds: float) -> dict[str, float]:
    """The figures of a head."""
    figures: dict[str, float] = {}
    for workers in (1, 2):
        rates, times = measured_once(workers, seconds)
        for kind in ONCE:
            figures[f"{workers} workers, {kind}, answers a second"] = rates[kind]
            figures[f"{workers} workers, {kind}, p50 of an answer, ms"] = share(times[kind], 0.5)
            figures[f"{workers} workers, {kind}, p95 of an answer, ms"] = share(times[kind], 0.95)
        figures[f"{workers} workers, head over embed_documents"] = rates["head"] / rates["embed_documents"]
    return figures


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit with 1 if one misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seconds", type=float, default=5.0, help="of every load (default 5)")
    parser.add_argument("--head", action="store_true", help="the head's figures alone")
    parser.add_argument("--ready", action="store_true", help="the seconds until servers are ready alone")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve(args.serve, args.port, args.workers)
        return 0
    figures = measure_ready() if args.ready else measure_once(args.seconds) if args.head else measure(args.seconds)
    show(figures, args.json)
    targets = {name: float(found[1]) for name in figures if (found := re.search(r"\(under ([\d.]+)\)$", name))}
    good = all(figures[name] < target for name, target in targets.items())
    least = {name: float(found[1]) for name in figures if (found := re.search(r"\(at least ([\d.]+)\)$", name))}
    return 0 if good and all(figures[name] >= target for name, target in least.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
