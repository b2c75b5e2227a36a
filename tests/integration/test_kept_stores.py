"""The store beside a data file, when workers of a server and commands start at once, and when one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import ExemplarStore

OWNERS = 30

WORKER = """
import os, sys, time
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import local
from langchain_dpicl.cli import main
from langchain_dpicl.serving.config import read

class Slow(DeterministicFakeEmbedding):
    def embed_documents(self, texts):
        for text in texts:
            with open("embedded", "a") as log:
                log.write(f"{os.getpid()} {text}\\n")
            time.sleep(60 if text == sys.argv[1] else 0.01)
        return super().embed_documents(texts)

local.local_embeddings = lambda: Slow(size=8)
settings = read("server.yaml")
print("starts", flush=True)
if sys.argv[2:]:
    sys.exit(main(sys.argv[2:]))
settings.build()
"""
"""Opens the chain of a configuration, or runs a command, and hangs when it embeds the text that is its argument."""

ANSWER = "answer --data desk.jsonl --owner-key who --mode label-vote --labels a,b --epsilon 3 --releases 30".split()
ANSWER += "--threshold 0.1 --eligible 9 --question text --ledger sqlite:///command.db".split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration with a data file alone."""
    rows = [{"text": f"text {i}", "label": "ab"[i % 2], "who": f"p{i}"} for i in range(OWNERS)]
    (tmp_path / "desk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "store": {"data": "desk.jsonl", "owner_key": "who"},
        "release": {"kind": "label-vote", "labels": ["a", "b"]},
        "budget": {"epsilon": 3, "delta": 1e-5, "releases": 30, "ledger": "sqlite:///budget.db", "name": "desk"},
        "server": {"anonymous": True},
    }
    (tmp_path / "server.yaml").write_text(json.dumps(settings))
    return tmp_path


def worker(folder: Path, hangs_at: str = "", *given: str) -> subprocess.Popen[str]:
    """A process that opens the chain, or runs a command."""
    command = [sys.executable, "-c", WORKER, hangs_at, *given]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)


def embedded(folder: Path) -> dict[int, Counter[str]]:
    """The texts that each process has embedded."""
    found: dict[int, Counter[str]] = {}
    if (folder / "embedded").exists():
        for line in (folder / "embedded").read_text().splitlines():
            process, _, text = line.partition(" ")
            found.setdefault(int(process), Counter())[text] += text.startswith("text")
    return found


def wait_for(folder: Path, process: subprocess.Popen[str], text: str) -> None:
    """Wait until a process embeds a text."""
    deadline = time.monotonic() + 60
    while text not in embedded(folder).get(process.pid, ()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_workers_and_a_command_that_start_at_once_embed_a_data_file_once(folder: Path) -> None:
    workers = [worker(folder), worker(folder), worker(folder, "", *ANSWER)]
    assert [process.wait(120) for process in workers] == [0, 0, 0]
    counts = sorted(texts.total() for texts in embedded(folder).values())
    assert counts == [1, 1, OWNERS], "the others embed one text, which shows that the model is the same"
    store = ExemplarStore.load(folder / "desk.jsonl.store", DeterministicFakeEmbedding(size=8))
    assert (len(store), store.owner_count) == (OWNERS, OWNERS)
    assert [each.name for each in store.budgets] == ["desk"], "the command's, which a server's budget will hear of"
    store.close()


def test_if_the_worker_that_embeds_is_killed_another_goes_on(folder: Path) -> None:
    first = worker(folder, "text 9")
    wait_for(folder, first, "text 9")
    second = worker(folder)
    assert second.stdout is not None
    assert second.stdout.readline() == "starts\n"
    time.sleep(1)
    assert second.poll() is None
    assert embedded(folder).keys() == {first.pid}, "it waits"
    os.kill(first.pid, signal.SIGKILL)
    assert second.wait(60) == 0
    assert embedded(folder)[second.pid].total() == OWNERS
    first.wait()
    store = ExemplarStore.load(folder / "desk.jsonl.store", DeterministicFakeEmbedding(size=8))
    assert len(store) == OWNERS
    store.close()
