"""The retrieval example, as it stands, with the real models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from langchain_dpicl.demo.inbox import DEMO_LABELS

EXAMPLE = Path(__file__).parents[2] / "examples" / "rag.py"

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


def test_both_private_variants_answer_with_a_desk_and_its_receipt(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    naive, wrapped, retrieved, budget = done.stdout.splitlines()
    assert naive.startswith("not private: ")
    name, desk, receipt = wrapped.split()
    assert name == "wrap_rag:"
    assert desk in DEMO_LABELS
    assert receipt == "rag:vote:1"
    assert retrieved == f"DPRetriever: {desk} rag:vote:1", "the question is replayed: its document is the same release"
    assert "spent=1" in budget
