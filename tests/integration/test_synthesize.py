"""``dpicl synthesize`` on a real model, killed in the middle of an answer and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from langchain_dpicl import Demonstrations, PrivacyBudget

pytest.importorskip("transformers")

MODEL = "smollm2-135m-instruct"
COMMAND = (
    "-m langchain_dpicl synthesize --data notes.jsonl --inputs topics.txt --output out.jsonl --epsilon 8 --shots 2 "
    f"--max-tokens 6 --min-tokens 6 --model {MODEL} --tokens 200"
)


def job(folder: Path) -> subprocess.Popen[str]:
    """The command, in a process of its own, with one thread: others may be at work here."""
    command, settings = [sys.executable, *COMMAND.split()], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings
    )


def journaled(part: Path) -> list[int]:
    """The tokens that were handed out of the answer under way."""
    tokens: list[int] = []
    lines = part.read_bytes().split(b"\n")[:-1] if part.exists() else []
    for entry in map(json.loads, lines):
        tokens = [*tokens, entry["token"]] if "token" in entry else []
    return tokens


def wait_for(process: subprocess.Popen[str], part: Path, least: int) -> list[int]:
    """The tokens of the answer under way, as soon as there are so many."""
    while len(tokens := journaled(part)) < least:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    return tokens


@pytest.mark.model
@pytest.mark.slow
def test_kill_9_in_the_middle_of_an_answer_loses_no_token_and_pays_for_none_twice(tmp_path: Path) -> None:
    secret = "CANARY-mrs-alder"
    notes = [{"input": f"a note on {i} {secret}", "output": f"It is about {i}."} for i in range(6)]
    (tmp_path / "notes.jsonl").write_text("\n".join(map(json.dumps, notes)))
    (tmp_path / "topics.txt").write_text("tea\ncoffee\n")
    part = tmp_path / "out.jsonl.part"
    with job(tmp_path) as first:
        try:
            wait_for(first, part, 2)
        finally:
            first.kill()
    assert first.returncode == -signal.SIGKILL
    kept = journaled(part)
    assert 2 <= len(kept) < 6, "it was killed within the first answer"
    budget = PrivacyBudget.open("notes", f"sqlite:///{tmp_path / 'dpicl-budget.db'}")
    assert budget.spent() == 6, "the first answer's charge is open"
    with job(tmp_path) as second:
        try:
            assert wait_for(second, part, len(kept) + 1)[: len(kept)] == kept
            out, err = second.communicate(timeout=120)
        finally:
            second.kill()
    assert second.returncode == 0, err
    made = Demonstrations.load(tmp_path / "out.jsonl")
    assert [pair["input"] for pair in made] == ["tea", "coffee"]
    assert budget.spent() == sum(receipt["tokens"] or 0 for receipt in made.receipts)
    assert budget.latest()[1] == 2, "one charge for each answer"
    budget.close()
    assert not part.exists()
    assert secret not in out + err + (tmp_path / "out.jsonl").read_text()
