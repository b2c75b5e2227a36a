"""What a newcomer runs first, with the embedded model: one example of classification and one of RAG, by themselves, and
`dpicl answer` on a file. All the other examples are in `tests/lab`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from langchain_dpicl.cli import main
from langchain_dpicl.demo.inbox import DEMO_LABELS, demo_inbox
from langchain_dpicl.store.datafile import read_records

ROOT = Path(__file__).parents[2]
CUSTOMERS = "150"
"""Of the examples' inbox: embedding all 800 of them takes longer than anything else here."""


def run(name: str, folder: Path) -> list[str]:
    """Run an example in a process of its own. The lines that it prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "DPICL_DEMO_CUSTOMERS": CUSTOMERS},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def statements(code: str) -> list[str]:
    """A program's statements, without its imports, comments and line breaks."""
    return [ast.unparse(each) for each in ast.parse(code).body if not isinstance(each, ast.ImportFrom)]


def test_the_readme_shows_the_quickstart() -> None:
    shown = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    _about, *quickstart = statements((ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8"))
    assert quickstart == statements(shown[1])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_batch_is_charged_together_and_then_the_budget_says_no(tmp_path: Path) -> None:
    *answers, again, refusal = run("classify.py", tmp_path)
    labels = [line.split()[0] for line in answers[::2]]
    assert len(labels) == 2
    assert set(labels) <= set(DEMO_LABELS)
    assert [line.rsplit(", ")[-1] for line in answers[1::2]] == ["1 left", "0 left"]
    assert again.split() == [labels[0], "(replayed:", "True)"]
    assert "0 of 2 releases left" in refusal


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_both_private_variants_of_a_retrieval_chain_answer_with_a_desk_and_its_receipt(tmp_path: Path) -> None:
    naive, rehearsed, wrapped, retrieved, budget = run("rag.py", tmp_path)
    assert naive.startswith("not private: ")
    assert rehearsed == "rehearsal passed: True"
    name, desk, receipt = wrapped.split()
    assert name == "wrap_rag:"
    assert desk in DEMO_LABELS
    assert receipt == "rag:vote-em:1"
    assert retrieved == f"DPRetriever: {desk} rag:vote-em:1", "the question is replayed: one release, one document"
    assert "spent=1" in budget


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.asks_first
def test_the_users_own_csv_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same job on a file, with the model of the demonstration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    private, questions = demo_inbox(customers=120, questions=2)
    rows = ["text,label,customer"]
    rows += [
        ",".join('"' + row[key].replace('"', '""') + '"' for key in ("text", "label", "customer")) for row in private
    ]
    (tmp_path / "inbox.csv").write_text("\n".join(rows), encoding="utf-8")
    assert len(read_records(tmp_path / "inbox.csv")) == len(private)
    command = ["answer", "--data", str(tmp_path / "inbox.csv"), "--labels", ",".join(DEMO_LABELS)]
    command += ["--epsilon", "8", "--releases", "10", "--owner-key", "customer", "--members", "5", "--shots", "3"]
    assert main([*command, "--json", "--question", questions[0]["text"]]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["answers"]
    assert entry["private"] in (*DEMO_LABELS, None)
    assert entry["receipt"]["remaining"] == 9
