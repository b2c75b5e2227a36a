"""Forgetting in one process while others answer from the same store, on a SQLite file and on PostgreSQL: real
processes, ledgers and signals."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from moments import eligible

from langchain_dpicl import ExemplarStore, PrivacyBudget
from langchain_dpicl.cli import main
from langchain_dpicl.store.base import owner_mark

EMBEDDINGS = DeterministicFakeEmbedding(size=8)
TICKETS = 3
FILE = "store.db"
pytestmark = pytest.mark.timeout(120)

WORKER = """
import os, sys, time
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_dpicl import *

store = ExemplarStore.open(sys.argv[1], DeterministicFakeEmbedding(size=8))
budget = PrivacyBudget(1000, 1e-5, int(sys.argv[2]), "sqlite:///ledger.db", "answers", tickets=True, replay=False)
selector = PoissonExampleSelector(store, 2, rate=1.0, threshold=-1.0, max_exemplars=50)

def member(values):
    shown = [each["input"] for each in values["examples"] if "in other words" not in each["input"]]
    for text in shown:
        os.write(1, (text + "\\n").encode())
    while shown and values["input"] == "slowly" and not os.path.exists("go"):
        if not os.path.exists("waits"):
            open("waits", "w").close()
            os.write(1, b"under way\\n")
        time.sleep(0.01)
    return "a"

ensemble = PrivateEnsemble(selector, RunnableLambda(member), max_concurrency=1)
chain = ensemble | DPAggregate(NoisyVote(["a", "b"]), budget)
os.write(1, b"ready\\n")
for line in iter(sys.stdin.readline, ""):
    try:
        chain.invoke({"input": line.strip()})
        os.write(1, b"done\\n")
    except DPICLError as error:
        os.write(1, f"done {type(error).__name__}\\n".encode())
"""


class Worker:
    """A process that answers, and tells whose texts its members saw."""

    def __init__(self, where: str, tickets: int = TICKETS) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", WORKER, where, str(tickets)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.until("ready")

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode())

    def until(self, end: str) -> list[str]:
        assert self.process.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith(end):
            line = self.process.stdout.readline().decode()
            assert line, "the worker ended"
            lines.append(line.strip())
        return lines

    def ask(self, line: str = "question") -> list[str]:
        self.send(line + "\n")
        *seen, end = self.until("done")
        assert end == "done", end
        return seen

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["file", "postgresql"])
def where(request: pytest.FixtureRequest, folder: Path) -> str:
    """The address of a store of four owners."""
    url = f"sqlite:///{folder}/{FILE}"
    if request.param == "postgresql":
        url = request.getfixturevalue("pgvector_url")
    rows = [{"input": f"text of owner-{i}", "output": "x", "owner": f"owner-{i}"} for i in range(4)]
    ExemplarStore.from_records(rows, EMBEDDINGS, url, owner_key="owner").close()
    return url


def opened(where: str) -> ExemplarStore:
    return ExemplarStore.open(where, EMBEDDINGS)


def bytes_of(start: str) -> bytes:
    """All that files with such names hold, in the working folder."""
    return b"".join(Path(name).read_bytes() for name in os.listdir() if name.startswith(start))


@pytest.fixture
def worker(where: str) -> Iterator[Worker]:
    made = Worker(where)
    yield made
    made.end()


def dpicl_forget(where: str, owner: str, *more: str, code: int = 0, capsys: Any) -> dict[str, Any]:
    place = where.removeprefix("sqlite:///")
    capsys.readouterr()
    assert main(["forget", "--store", place, "--owner", owner, "--json", *more]) == code
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_worker_follows_a_forgetting_without_a_restart_and_writes_nobody_back(
    worker: Worker, where: str, folder: Path, capsys: Any
) -> None:
    """With tickets: a process that kept the owner would find it without a row, and give it three tickets more, each
    time that it is forgotten (15 times on 3 tickets were seen)."""
    seen = worker.ask()
    assert sorted(seen) == [f"text of owner-{i}" for i in range(4)]

    worker.send("slowly\n")
    under_way = worker.until("under way")
    answer = dpicl_forget(where, "owner-1", capsys=capsys)  # the release under way may end
    assert answer == {
        "exemplars": 1,
        "owners_left": 3,
        "ledgers": [f"sqlite:///{folder}/ledger.db"],
        "not_reached": [],
        "released_once": [],
    }
    Path("go").touch()
    seen += under_way + worker.until("done")

    after: list[str] = []
    for _ in range(5):
        after += worker.ask()
        assert dpicl_forget(where, "owner-1", code=1, capsys=capsys)["error"] == "UnknownOwner"
    assert "text of owner-1" not in after
    assert seen.count("text of owner-1") <= TICKETS
    assert (seen + after).count("text of owner-0") == TICKETS
    assert worker.ask() == []
    assert b"owner-1" not in bytes_of(FILE)


def test_who_comes_again_while_a_worker_runs_is_a_new_owner_with_its_own_tickets(
    worker: Worker, where: str, capsys: Any
) -> None:
    for _ in range(2):
        worker.ask()
    dpicl_forget(where, "owner-2", capsys=capsys)
    opened(where).add([{"input": "second life", "output": "x", "owner": "owner-2"}])
    seen = [text for _ in range(5) for text in worker.ask()]
    assert "text of owner-2" not in seen
    assert seen.count("second life") == TICKETS
    assert seen.count("text of owner-0") == 1


def test_nothing_that_follows_from_the_owners_key_stays_in_a_ledger(worker: Worker, where: str, capsys: Any) -> None:
    """Nor in SQLite's file or log: their bytes are searched for the mark."""
    worker.ask()
    worker.end()  # a reader of the log would keep it
    (key,) = opened(where).mark_keys()
    mark = owner_mark(key, b"owner-1", named=True).hex().encode()
    assert mark in bytes_of("ledger")
    dpicl_forget(where, "owner-1", capsys=capsys)
    assert mark not in bytes_of("ledger")


FORGETTER = """
import os, signal, sys, time
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import ExemplarStore

def forget(where, owner):
    store = ExemplarStore.open(where, DeterministicFakeEmbedding(size=8))
    os.write(end, b"x")
    start = time.monotonic()
    store.forget(owner)
    os.write(1, f"{time.monotonic() - start}\\n".encode())

os.write(1, b"ready\\n")
for line in iter(sys.stdin.readline, ""):
    where, owner, wait = line.split()
    begin, end = os.pipe()
    if (child := os.fork()) == 0:
        try:
            forget(where, owner)
        finally:
            os._exit(0)
    os.close(end)
    os.read(begin, 1)
    if wait != "no":
        time.sleep(float(wait))
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(begin)
    os.write(1, b"ended\\n")
"""
VICTIMS, RECORDS = 25, 40


class Forgetter:
    """A process whose children forget, each in a store that it opens for itself."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", FORGETTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, owner: str, wait: float | None) -> float | None:
        """Forget an owner in a child, which is killed after so many seconds; how long it took if it ended before."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{self.where} {owner} {'no' if wait is None else wait}\n")
        self.process.stdin.flush()
        took = None
        while (line := self._line()) != "ended":
            took = float(line)
        return took

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def victims(where: str, folder: Path) -> list[str]:
    """Owners of many records each, in the store."""
    names = [f"victim-{i:02}" for i in range(VICTIMS)]
    rows = [{"input": f"text {i} of {name}", "output": "x", "owner": name} for name in names for i in range(RECORDS)]
    with_them = opened(where)
    with_them.add(rows)
    with_them.close()
    return names


def test_a_process_killed_at_any_moment_of_a_forgetting_leaves_the_owner_whole_or_gone(
    where: str, victims: list[str]
) -> None:
    """For readers that have the vectors in memory, for those that have just come, and for a worker's next release."""
    follower = opened(where)
    follower.load_vectors()
    query = follower.embed_query("a question")
    gone: list[int] = []
    follower.on_forget(gone.extend)
    forgetter = Forgetter(where)
    worker = Worker(where, 1000)
    chance = random.Random(7)
    left = set(victims)
    try:
        first, *others, last = victims
        took = forgetter.run(first, None)
        assert took is not None
        left.remove(first)
        for name in [*others, last]:
            wait = 0.0 if name == last else chance.uniform(0.0, 1.2 * took)
            forgetter.run(name, wait)
            with follower.reading() as view:
                rows, position = view.rows_of(view.numbers)
                found = [held.owner for held in view.records(rows)]
                everybody = np.unique(position)
                near = view.eligible(query, -1.0)
            assert near.tolist() == everybody.tolist(), "in memory as in the database"
            assert found.count(name) in (0, RECORDS), "half of an owner"
            assert (name in follower.owners) == (name in found)
            if name not in found:
                left.remove(name)
            assert len(gone) == RECORDS * (VICTIMS - len(left)), "the watchers heard of all who went"
            fresh = opened(where)
            assert eligible(fresh, query, -1.0).tolist() == near.tolist()
            fresh.close()
        shown = {text.rsplit(" ", 1)[1] for text in worker.ask()}
        assert shown == left | {f"owner-{i}" for i in range(4)}
        for name in left:
            assert forgetter.run(name, None) is not None, "the next one ends it"
        assert {text.rsplit(" ", 1)[1] for text in worker.ask()} == {f"owner-{i}" for i in range(4)}
    finally:
        worker.end()
        forgetter.end()
    assert b"victim" not in bytes_of(FILE)


def test_an_interrupted_forgetting_is_ended_in_the_ledger_by_the_same_command(where: str, capsys: Any) -> None:
    """The store is written first. Killed after it, the ledger holds the row until somebody forgets again by name."""
    store = opened(where)
    budget = PrivacyBudget(1000, 1e-5, 2, "sqlite:///ledger.db", tickets=True, replay=False)
    line = budget.line("vote", 0.5)
    line.charge(owners=[line.ask(store, np.arange(4))])
    assert budget.private_ticket_report()["vote"][""]["owners"] == 4
    opened(where).forget("owner-1")
    assert budget.private_ticket_report()["vote"][""]["owners"] == 4
    found = dpicl_forget(where, "owner-1", "--ledger", "sqlite:///ledger.db", code=1, capsys=capsys)
    assert found["error"] == "UnknownOwner"
    assert budget.private_ticket_report()["vote"][""]["owners"] == 3
    assert dpicl_forget(where, "owner-0", "--ledger", "sqlite:///ledger.db", capsys=capsys)["exemplars"] == 1
    assert budget.private_ticket_report()["vote"][""]["owners"] == 2


ADDER = """
import sys
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import ExemplarStore

store = ExemplarStore.open(sys.argv[1], DeterministicFakeEmbedding(size=8))
print("ready", flush=True)
sys.stdin.read(1)
for i in range(20):
    store.add([{"input": f"text {i} of " + sys.argv[2], "output": "x", "owner": f"both-{i}"}])
"""


def test_of_two_processes_that_add_at_once_each_owner_has_both_records(where: str) -> None:
    adders = [
        subprocess.Popen(
            [sys.executable, "-c", ADDER, where, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("one", "other")
    ]
    for adder in adders:
        assert adder.stdout is not None
        assert adder.stdout.readline() == "ready\n"
    for adder in adders:
        assert adder.stdin is not None
        adder.stdin.write("x")
        adder.stdin.flush()
    for adder in adders:
        adder.communicate()
        assert adder.returncode == 0
    store = opened(where)
    assert (store.owner_count, len(store)) == (24, 44)
    assert store.forget("both-7") == 2


def test_a_ledger_that_is_gone_is_named_and_the_owner_goes_all_the_same(
    where: str, folder: Path, worker: Worker, capsys: Any
) -> None:
    worker.ask()
    worker.end()
    for path in folder.glob("ledger*"):
        path.unlink()
    found = dpicl_forget(where, "owner-1", code=1, capsys=capsys)
    assert found["not_reached"] == [f"sqlite:///{folder}/ledger.db"]
    assert found["exemplars"] == 1
    assert "owner-1" not in opened(where).owners


def test_the_owner_may_come_on_standard_input(where: str) -> None:
    """Where a command line is seen by others."""
    command = [sys.executable, "-m", "langchain_dpicl", "forget", "--store", where, "--owner", "-"]
    done = subprocess.run(command, input="owner-3\n", capture_output=True, text=True, check=True)
    assert done.stdout == "1 exemplars went, 3 owners are left; ledgers: none\n"
