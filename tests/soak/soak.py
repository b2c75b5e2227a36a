"""Load and faults: servers on PostgreSQL and on SQLite, whose parts are killed, filled up, slowed and hung up on.

Starts a PostgreSQL with pgvector of its own; on it a collection that all servers answer from, and the ledger of the
first server (several workers). A second server has its ledger on SQLite. Members ask a model over HTTP. Clients ask
both servers, each caller until its budget is spent. At random times, in random order:

- kill -9 of a worker, and of a whole server, which is started again
- a restart of PostgreSQL: fast, and immediate, which is a crash to it
- a full disk under the second server: no file of its process may grow (RLIMIT_FSIZE)
- a model whose calls take longer, some longer than their limit
- clients that hang up in the middle, politely and rudely, and connections that stop in the middle of a request

Checked every few seconds and at the end, see `invariants`: each answer has its charge and its receipt, once; no charge
is lost, none is without a request, no budget is overspent; a question that is asked again has the same answer at no
charge. After each fault its server answers a new question within a minute. Connections that stop are closed. The
memory of each process that lives for a third of the time is flat: the median of its last fifth is at most 5 % over
that of its second. So the oldest worker is never killed, and whole servers only in the first third of the time.

One exception is documented and checked for: a receipt is not forced to the disk, so PostgreSQL's crash may take those
of the seconds before it. Their charges stand.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / each) for each in ("", "unit", "soak"))]

from chat_server import Reply, chat_server  # noqa: E402
from http_server import asked, hang_up, until  # noqa: E402
from invariants import Answer, Broken, accounts, broken, growth, without_receipt  # noqa: E402
from pgvector_server import Cluster, ask  # noqa: E402
from service import LABELS, LIMIT, PATH, WITHIN, Service, fill  # noqa: E402

from langchain_dpicl.budget.opening import LOST  # noqa: E402

CLIENTS = {"postgresql": 5, "sqlite": 2}
FLAT = 0.05
"""How much the memory of a process may grow that lives for a third of the time."""
draw = random.SystemRandom()


class Soak:
    """One run."""

    def __init__(
        self, minutes: float, cluster: Cluster, services: dict[str, Service], slow: threading.Event, told: TextIO
    ) -> None:
        self.began = time.monotonic()
        self.ends = self.began + 60 * minutes
        self.cluster, self.services, self.slow, self.told = cluster, services, slow, told
        self.over = threading.Event()
        self.failures: Counter[str] = Counter()
        self.times: dict[str, list[float]] = defaultdict(list)
        self.crashes: list[tuple[float, float]] = []
        self.away = threading.Lock()  # held while PostgreSQL is away
        self.failure: str | None = None
        self._questions = iter(range(10**9))

    # -- load ----------------------------------------------------------------------------------------------------------

    def question(self) -> str:
        """One that nobody has asked."""
        return f"which box, for time {next(self._questions)}?"

    def client(self, service: Service) -> None:
        """Ask until the end: new questions, the last one once more if it failed, and known ones."""
        failed: tuple[str, str] | None = None
        while not self.over.is_set():
            time.sleep(draw.uniform(0.05, 0.3))
            known = service.book.answers
            if known and draw.random() < 0.2:
                found = service.again(draw.choice(known))
                self.failures.update([found] if isinstance(found, str) else [])
                continue
            caller, text = failed or (service.caller, self.question())
            found = service.ask(caller, text)
            failed = None
            if isinstance(found, str) and found.startswith("429"):
                service.spent.add(caller)
            elif isinstance(found, str):
                self.failures[found] += 1
                failed = (caller, text) if draw.random() < 0.7 else None

    # -- faults --------------------------------------------------------------------------------------------------------

    def kill_worker(self) -> Service:
        """Not the oldest one, whose memory is looked at."""
        service = self.services["postgresql"]
        try:
            until(lambda: len(service.running) > 1, WITHIN)
        except AssertionError:
            raise Broken(f"workers that were killed are not replaced within {WITHIN:g} s") from None
        os.kill(draw.choice(service.running[1:]), signal.SIGKILL)
        return service

    def kill_server(self) -> Service:
        service = self.services[draw.choice(list(self.services))]
        with service.changing:
            service.kill()
            service.start()
        return service

    def restart(self, how: signal.Signals) -> Service:
        with self.away:
            began = time.monotonic()
            self.cluster.stop(how)
            time.sleep(draw.uniform(0, 3))
            self.cluster.start()
            if how == signal.SIGQUIT:
                self.crashes.append((began, time.monotonic()))
        return self.services["postgresql"]

    def fill_disk(self) -> Service:
        """From an offset on, which is before or after the end of the ledger's files, nothing can be written."""
        service = self.services["sqlite"]
        process = service.served.process.pid
        sizes = [file.stat().st_size for file in service.folder.glob("budget.db*")]
        resource.prlimit(process, resource.RLIMIT_FSIZE, (draw.choice([1, *sizes]), resource.RLIM_INFINITY))
        time.sleep(draw.uniform(1, 5))
        resource.prlimit(process, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return service

    def slow_model(self) -> Service:
        self.slow.set()
        time.sleep(draw.uniform(3, 8))
        self.slow.clear()
        return self.services[draw.choice(list(self.services))]

    def hang_up(self) -> Service:
        service = self.services[draw.choice(list(self.services))]
        for _ in range(10):
            caller = service.caller
            service.book.tries(caller)
            with contextlib.suppress(OSError):
                question, path = {"input": self.question()}, draw.choice(["stream", "invoke"])
                connection = asked(service.served, caller, question, path)
                time.sleep(draw.uniform(0, 0.2))
                hang_up(connection, rudely=draw.random() < 0.5)
        return service

    def stop_in_the_middle(self) -> Service:
        """Connections on which half of a request comes. They are closed, and others are answered meanwhile."""
        service = self.services[draw.choice(list(self.services))]
        head = f"POST {PATH}/invoke HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.keys[service.caller]}\r\n"
        whole = f"{head}Content-Type: application/json\r\nContent-Length: 20\r\n\r\n{{".encode()
        connections = []
        for _ in range(10):
            connection = socket.create_connection(("127.0.0.1", service.served.port), timeout=WITHIN)
            connection.sendall(whole[: draw.choice([draw.randrange(1, len(whole)), len(whole)])])
            connections.append(connection)
        self.answers_again(service)
        for connection in connections:
            with connection, contextlib.suppress(ConnectionError):
                try:
                    while connection.recv(4096):
                        pass
                except TimeoutError:
                    raise Broken(f"{service.name}: half a request is waited for longer than {WITHIN:g} s") from None
        return service

    def answers_again(self, service: Service) -> float:
        """Seconds until a new question is answered."""
        began = time.monotonic()
        while (found := service.ask(service.caller, self.question())) and not isinstance(found, Answer):
            if found.startswith("429"):
                service.spent.add(service.caller)
            if time.monotonic() > began + WITHIN:
                raise Broken(f"{service.name} does not answer within {WITHIN:g} s: {found}")
            time.sleep(0.05)
        return time.monotonic() - began

    def faults(self) -> None:
        """All kinds in random order, again and again."""
        kinds: dict[str, Callable[[], Service]] = {
            "kill -9 of a worker": self.kill_worker,
            "kill -9 of a server": self.kill_server,
            "PostgreSQL restarted, fast": lambda: self.restart(signal.SIGINT),
            "PostgreSQL restarted, immediate": lambda: self.restart(signal.SIGQUIT),
            "full disk (SQLite)": self.fill_disk,
            "slow model": self.slow_model,
            "10 clients hang up": self.hang_up,
            "10 connections stop halfway": self.stop_in_the_middle,
        }
        last = self.began + (self.ends - self.began) / 3
        first = True
        while True:
            for name in ["kill -9 of a server"] * first + draw.sample(sorted(kinds), len(kinds)):
                if self.over.wait(draw.uniform(0.5, 5)) or time.monotonic() > self.ends:
                    return
                if name == "kill -9 of a server" and time.monotonic() > last:
                    continue
                at = time.monotonic() - self.began
                service = kinds[name]()
                self.times[name].append(self.answers_again(service))
                words = f"{at:7.1f} s  {name}: {service.name} answers {self.times[name][-1]:.2f} s later"
                print(words, file=self.told, flush=True)
            first = False

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self, still: bool = False) -> None:
        """Raise `Broken` if an invariant does not hold."""
        for service in self.services.values():
            with self.away, service.changing:
                answers = service.book.answers
                ledger = accounts(service.ledger)
                wrong = broken(answers, ledger, service.book.tried, self.crashes, still=still)
            if wrong:
                raise Broken(f"{service.name}: {wrong}")

    def watch(self) -> None:
        """Samples of memory, and the checks."""
        turn = 0
        while not self.over.wait(1):
            for service in self.services.values():
                with service.changing:
                    service.sample()
            turn += 1
            if turn % 10 == 0:
                self.check()

    def run(self) -> None:
        """Raises `Broken`."""

        def kept(work: Callable[..., None], *arguments: Any) -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self.failure = self.failure or (str(error) if isinstance(error, Broken) else repr(error))
                self.over.set()

        works: list[tuple[Any, ...]] = [(self.watch,)]
        for name, service in self.services.items():
            works += [(self.client, service)] * CLIENTS[name]
        threads = [threading.Thread(target=kept, args=work) for work in works]
        for thread in threads:
            thread.start()
        kept(self.faults)
        self.over.set()
        for thread in threads:
            thread.join()
        if self.failure:
            raise Broken(self.failure)

    # -- figures -------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Counts of everything, by name. Raises `Broken` if memory grew."""
        found: dict[str, float] = {}
        for name, times in self.times.items():
            found[f"{name}, times"] = len(times)
            found[f"{name}, most seconds until an answer"] = max(times)
        for kind, count in sorted(self.failures.items()):
            found[f"failed: {kind}"] = count
        for name, service in self.services.items():
            answers, ledger = service.book.answers, accounts(service.ledger)
            released = {(each.question[0], each.number) for each in answers}
            rows = [row for account in ledger.values() for row in account.rows.values()]
            lost = sum(account.lost for account in ledger.values())
            found |= {
                f"{name}, answers": len(answers),
                f"{name}, answers with a number of their own": len(released),
                f"{name}, requests that might charge": service.book.tried.total(),
                f"{name}, spent": sum(account.spent for account in ledger.values()),
                f"{name}, charged, and no client got the answer": sum(row.outcome != LOST for row in rows)
                - len(released),
                f"{name}, counted as spent after a kill": lost,
                f"{name}, receipts lost in a crash of PostgreSQL": without_receipt(answers, ledger),
                f"{name}, callers who spent their budgets": len(service.spent),
            }
            for pid, sizes in service.lives((self.ends - self.began) / 3):
                found[f"{name}, memory of process {pid}, MB"] = statistics.median(sizes) / 1e6
                found[f"{name}, memory of process {pid}, growth"] = growth(sizes)
                if growth(sizes) > FLAT:
                    raise Broken(f"{name}: the memory of process {pid} grew by {growth(sizes):.1%}")
        return found


def soaked(minutes: float, workers: int, told: TextIO) -> dict[str, float]:
    """The figures of one run. Raises `Broken`."""
    slow = threading.Event()

    def reply(prompt: str) -> Reply:
        """The model. At its slowest, a quarter of its calls take longer than they may."""
        if slow.is_set():
            time.sleep(draw.uniform(0, LIMIT * 4 / 3))
        return 200, {}, LABELS[0]

    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(contextlib.closing(Cluster("max_connections=100")))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd())))  # not /tmp: maybe memory
        model = stack.enter_context(chat_server(reply))
        ask(cluster.url, "CREATE EXTENSION IF NOT EXISTS vector")
        fill(cluster.url)
        services = {}
        for name, count in (("postgresql", workers), ("sqlite", 1)):
            ledger = cluster.url if name == "postgresql" else f"sqlite:///{folder}/{name}/budget.db"
            addresses = {"STORE_URL": cluster.url, "LEDGER_URL": ledger, "MODEL_URL": model.url}
            services[name] = Service(name, folder / name, count, 10 + int(10 * minutes), **addresses)
            stack.callback(services[name].kill)
        soak = Soak(minutes, cluster, services, slow, told)
        soak.run()
        for service in services.values():
            service.close()
        soak.check(still=True)
        return soak.figures()


def main(argv: list[str] | None = None) -> int:
    """Run it. Prints a table; exits with 1 and the first invariant that is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default 20)")
    parser.add_argument("--workers", type=int, default=3, help="of the server on PostgreSQL (default 3)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON; what happens goes to stderr")
    args = parser.parse_args(argv)
    try:
        figures = soaked(args.minutes, args.workers, sys.stderr if args.json else sys.stdout)
    except Broken as error:
        print(f"broken: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        width = max(map(len, figures))
        shown = {name: value if isinstance(value, int) else f"{value:.4g}" for name, value in figures.items()}
        print(*(f"{name:<{width}}  {value}" for name, value in shown.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
