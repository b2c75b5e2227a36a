"""Forgetting in one process while others answer from the same store: real processes, files, ledgers and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import ExemplarStore, PrivacyBudget, StoreFileChanged, UnknownOwner
from langchain_dpicl.cli import main
from langchain_dpicl.store.base import owner_mark

EMBEDDINGS = DeterministicFakeEmbedding(size=8)
TICKETS = 3
pytestmark = pytest.mark.timeout(60)

WORKER = """
import os, sys, time
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_dpicl import *

store = ExemplarStore.load("store.npz", DeterministicFakeEmbedding(size=8))
budget = PrivacyBudget(1000, 1e-5, 3, "sqlite:///ledger.db", "answers", tickets=True, replay=False)
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
        if line.strip() == "save":
            store.save("store.npz")
        else:
            chain.invoke({"input": line.strip()})
        os.write(1, b"done\\n")
    except DPICLError as error:
        os.write(1, f"done {type(error).__name__}\\n".encode())
"""


class Worker:
    """A process that answers, and tells whose texts its members saw."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", WORKER], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
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
    rows = [{"input": f"text of owner-{i}", "output": "x", "owner": f"owner-{i}"} for i in range(4)]
    ExemplarStore.from_records(rows, EMBEDDINGS, owner_key="owner").save("store.npz")
    return tmp_path


@pytest.fixture
def worker(folder: Path) -> Iterator[Worker]:
    made = Worker(folder)
    yield made
    made.end()


def dpicl_forget(owner: str, *more: str, code: int = 0, capsys: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["forget", "--store", "store.npz", "--owner", owner, "--json", *more]) == code
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_worker_follows_a_forgetting_without_a_restart_and_writes_nobody_back(
    worker: Worker, folder: Path, capsys: Any
) -> None:
    """With tickets: a process that kept the owner would find it without a row, and give it three tickets more, each
    time that it is forgotten (15 times on 3 tickets were seen)."""
    seen = worker.ask()
    assert sorted(seen) == [f"text of owner-{i}" for i in range(4)]

    worker.send("slowly\n")
    under_way = worker.until("under way")
    answer = dpicl_forget("owner-1", capsys=capsys)  # the release under way may end
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
        assert main(["forget", "--store", "store.npz", "--owner", "owner-1", "--json"]) == 1
    assert "text of owner-1" not in after
    assert seen.count("text of owner-1") <= TICKETS
    assert (seen + after).count("text of owner-0") == TICKETS
    worker.ask("save")
    assert b"owner-1" not in Path("store.npz").read_bytes()
    assert worker.ask() == []


def test_who_comes_again_while_a_worker_runs_is_a_new_owner_with_its_own_tickets(worker: Worker, capsys: Any) -> None:
    for _ in range(2):
        worker.ask()
    dpicl_forget("owner-2", capsys=capsys)
    store = ExemplarStore.load("store.npz", EMBEDDINGS)
    store.add([{"input": "second life", "output": "x", "owner": "owner-2"}])
    store.save("store.npz")
    seen = [text for _ in range(5) for text in worker.ask()]
    assert "text of owner-2" not in seen
    assert seen.count("second life") == TICKETS
    assert seen.count("text of owner-0") == 1


def test_nothing_that_follows_from_the_owners_key_stays_in_a_ledger(worker: Worker, capsys: Any) -> None:
    """Nor in SQLite's file or log: their bytes are searched for the mark."""
    worker.ask()
    worker.end()  # a reader of the log would keep it
    (key,) = ExemplarStore.load("store.npz", EMBEDDINGS).mark_keys()
    mark = owner_mark(key, b"owner-1", named=True).hex().encode()
    held = b"".join(Path(name).read_bytes() for name in os.listdir() if name.startswith("ledger"))
    assert mark in held
    dpicl_forget("owner-1", capsys=capsys)
    held = b"".join(Path(name).read_bytes() for name in os.listdir() if name.startswith("ledger"))
    assert mark not in held


KILLED = """
import os, signal, sys
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import ExemplarStore
from langchain_dpicl.store.store import ExemplarStore as Store

store = ExemplarStore.load("store.npz", DeterministicFakeEmbedding(size=8))
if sys.argv[1] == "before the rename":
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
else:
    Store._become = lambda self, rest: os.kill(os.getpid(), signal.SIGKILL)
store.forget("owner-1")
"""


@pytest.mark.parametrize("when", ["before the rename", "after it"])
def test_a_process_killed_while_it_forgets_leaves_a_file_that_others_go_on_with(
    when: str, folder: Path, capsys: Any
) -> None:
    here = ExemplarStore.load("store.npz", EMBEDDINGS)
    killed = subprocess.run([sys.executable, "-c", KILLED, when], check=False, cwd=folder)
    assert killed.returncode == -signal.SIGKILL
    with here.reading() as view:
        assert len(view.numbers) == (4 if when == "before the rename" else 3)
    if when == "before the rename":
        assert dpicl_forget("owner-1", capsys=capsys)["exemplars"] == 1
    else:
        with pytest.raises(UnknownOwner):
            here.forget("owner-1")
        here.forget("owner-0")  # which clears away what a killed process left
    held = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"owner-1" not in held
    assert [path.name for path in folder.iterdir()] == ["store.npz"]


def test_an_interrupted_forgetting_is_ended_in_the_ledger_by_the_same_command(folder: Path, capsys: Any) -> None:
    """The file is written first. Killed after it, the ledger holds the row until somebody forgets again by name."""
    store = ExemplarStore.load("store.npz", EMBEDDINGS)
    budget = PrivacyBudget(1000, 1e-5, 2, "sqlite:///ledger.db", tickets=True, replay=False)
    line = budget.line("vote", 0.5)
    line.charge(owners=[line.ask(store, np.arange(4))])
    assert budget.private_ticket_report()["vote"][""]["owners"] == 4
    ExemplarStore.load("store.npz", EMBEDDINGS).forget("owner-1")
    assert budget.private_ticket_report()["vote"][""]["owners"] == 4
    found = dpicl_forget("owner-1", "--ledger", "sqlite:///ledger.db", code=1, capsys=capsys)
    assert found["error"] == "UnknownOwner"
    assert budget.private_ticket_report()["vote"][""]["owners"] == 3
    assert dpicl_forget("owner-0", "--ledger", "sqlite:///ledger.db", capsys=capsys)["exemplars"] == 1
    assert budget.private_ticket_report()["vote"][""]["owners"] == 2


SAVER = """
import sys
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import ExemplarStore, StoreFileChanged

store = ExemplarStore.load("store.npz", DeterministicFakeEmbedding(size=8))
store.add([{"input": "text of " + sys.argv[1], "output": "x", "owner": sys.argv[1]}])
print("ready", flush=True)
sys.stdin.read(1)
try:
    store.save("store.npz")
    print("saved")
except StoreFileChanged:
    print("refused")
"""


def test_of_two_processes_that_save_at_once_one_is_refused(folder: Path) -> None:
    savers = {
        name: subprocess.Popen(
            [sys.executable, "-c", SAVER, name], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("one", "other")
    }
    for saver in savers.values():
        assert saver.stdout is not None
        assert saver.stdout.readline() == "ready\n"
    for saver in savers.values():
        assert saver.stdin is not None
        saver.stdin.write("x")
        saver.stdin.flush()
    answers = {name: saver.communicate()[0].strip() for name, saver in savers.items()}
    assert sorted(answers.values()) == ["refused", "saved"]
    (winner,) = [name for name, answer in answers.items() if answer == "saved"]
    assert list(ExemplarStore.load("store.npz", EMBEDDINGS).owners)[4:] == [winner]


def test_a_ledger_that_is_gone_is_named_and_the_owner_goes_all_the_same(
    folder: Path, worker: Worker, capsys: Any
) -> None:
    worker.ask()
    worker.end()
    for path in folder.glob("ledger*"):
        path.unlink()
    found = dpicl_forget("owner-1", code=1, capsys=capsys)
    assert found["not_reached"] == [f"sqlite:///{folder}/ledger.db"]
    assert found["exemplars"] == 1
    assert "owner-1" not in ExemplarStore.load("store.npz", EMBEDDINGS).owners


def test_the_owner_may_come_on_standard_input(folder: Path) -> None:
    """Where a command line is seen by others."""
    command = [sys.executable, "-m", "langchain_dpicl", "forget", "--store", "store.npz", "--owner", "-"]
    done = subprocess.run(command, cwd=folder, input="owner-3\n", capture_output=True, text=True, check=True)
    assert done.stdout == "1 exemplars went, 3 owners are left; ledgers: none\n"
    stale = ExemplarStore.load("store.npz", EMBEDDINGS)
    stale.forget("owner-2")
    with pytest.raises(StoreFileChanged):
        ExemplarStore.from_records([{"input": "a"}], EMBEDDINGS, output_key=None).save("store.npz")


SEARCHER = """
import gc, re
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import ExemplarStore

SEEN = bytearray(1 << 22)  # wiped after each look: what is read here must not be found as a further copy

def copies():
    found, step = 0, len(SEEN) - 64
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            start, end, access = re.match(r"([0-9a-f]+)-([0-9a-f]+) (.)", line).groups()
            for at in range(int(start, 16), int(end, 16), step) if access == "r" and "[v" not in line else ():
                memory.seek(at)
                memory.readinto(memoryview(SEEN)[: int(end, 16) - at])
                matches = re.finditer(rb"text of owner[-]1[^-0-9a-z]", SEEN)
                found += sum(match.start() < step for match in matches)
                SEEN[:] = bytes(len(SEEN))
    return found

store = ExemplarStore.load("store.npz", DeterministicFakeEmbedding(size=8))
gc.collect()
loaded = copies()
store.forget("owner-1")
gc.collect()
print(loaded, copies())
"""


def test_a_process_that_loaded_a_store_holds_a_text_once_and_after_forgetting_not_at_all(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SEARCHER], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]
