"""The example that answers a file of questions in several processes: all of them are killed, and it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from http_server import until

from langchain_dpicl import PrivacyBudget

SCRIPT = Path(__file__).parents[2] / "examples" / "offline.py"
QUESTIONS, VOTES, PROCESSES = 500, 400, 2


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_every_question_is_answered_once_and_paid_once_though_all_processes_are_killed(tmp_path: Path) -> None:
    questions = [f"Could you renew prescription {i}, please?" for i in range(QUESTIONS)]
    (tmp_path / "questions.txt").write_text("\n\n".join(questions))
    folder = tmp_path / "answers"
    command = [sys.executable, str(SCRIPT), str(folder), str(tmp_path / "questions.txt")]
    command += ["--votes", str(VOTES), "--processes", str(PROCESSES)]
    environment = {**os.environ, "DPICL_DEMO_CUSTOMERS": "150", "HF_HUB_OFFLINE": "1"}

    def kept() -> int:
        return sum(file.read_bytes().count(b"\n") for file in folder.glob("votes-*.jsonl"))

    first = subprocess.Popen(command, env=environment, start_new_session=True)
    until(lambda: first.poll() is not None or kept() > 0, 300)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL, "it was killed before its end"
    before = kept()
    with (folder / "votes-0-of-2.jsonl").open("ab") as torn:
        torn.write(b'["half a li')
    assert 0 < before < VOTES
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for name, count in (("head", QUESTIONS), ("votes", VOTES)):
        pairs = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        assert [asked for asked, _ in pairs] == questions[:count]
        assert {answer for _, answer in pairs} <= {"Flask", "Ledger", "Porch", "Compass", None}
    budget = PrivacyBudget.open("offline", f"sqlite:///{folder}/budget.db")
    rows, count = budget.latest(last=10**6)
    released = [row for row in rows if row.line == "vote" and row.receipt]
    assert len(released) == VOTES, "each question is paid once"
    assert budget.spent("head") == 1
    assert VOTES <= budget.spent("vote") <= VOTES + VOTES // 20 + 100, "the rest died with the processes"
    budget.close()
