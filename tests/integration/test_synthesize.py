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

from langchain_dpicl import Demonstrations, DPICLError, PrivacyBudget

pytest.importorskip("transformers")

MODEL = "smollm2-135m-instruct"
COMMAND = (
    "-m langchain_dpicl synthesize --data notes.jsonl --inputs topics.txt --output out.jsonl --epsilon 8 --shots 2 "
    f"--max-tokens 12 --min-tokens 12 --model {MODEL} --tokens 200"
)


def job(folder: Path) -> subprocess.Popen[str]:
    """The command, in a process of its own, with one thread: others may be at work here."""
    command, settings = [sys.executable, *COMMAND.split()], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings
    )


def wait_for(process: subprocess.Popen[str], ledger: str, charges: int) -> PrivacyBudget:
    """The budget, as soon as it has so many charges."""
    while True:
        assert process.poll() is None, process.communicate()[1]
        try:
            budget = PrivacyBudget.open("notes", ledger)
        except DPICLError:  # it is not there yet
            time.sleep(0.05)
            continue
        if budget.latest()[1] >= charges:
            return budget
        budget.close()
        time.sleep(0.02)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill_9_in_the_middle_of_an_answer_keeps_the_finished_one_and_charges_the_other_anew(tmp_path: Path) -> None:
    secret = "CANARY-mrs-alder"
    notes = [{"input": f"a note on {i} {secret}", "output": f"It is about {i}."} for i in range(6)]
    (tmp_path / "notes.jsonl").write_text("\n".join(map(json.dumps, notes)))
    (tmp_path / "topics.txt").write_text("tea\ncoffee\n")
    output, ledger = tmp_path / "out.jsonl", f"sqlite:///{tmp_path / 'dpicl-budget.db'}"
    with job(tmp_path) as first:
        try:
            budget = wait_for(first, ledger, 2)
        finally:
            first.kill()
    assert first.returncode == -signal.SIGKILL
    assert budget.spent() == 24, "the second answer's charge is open"
    (kept,) = output.read_bytes().splitlines()
    with job(tmp_path) as second:
        try:
            out, err = second.communicate(timeout=600)
        finally:
            second.kill()
    assert second.returncode == 0, err
    assert output.read_bytes().splitlines()[0] == kept
    made = Demonstrations.load(output)
    assert [pair["input"] for pair in made] == ["tea", "coffee"]
    assert [receipt["number"] for receipt in made.receipts] == [12, 36]
    assert budget.spent() == 36
    assert [release.outcome for release in budget.latest()[0]] == ["released", None, "released"]
    budget.close()
    assert secret not in out + err + output.read_text()
