"""The example scripts, as they stand, with the real models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from langchain_dpicl.demo.inbox import DEMO_LABELS
from langchain_dpicl.demo.replies import PUBLIC_REPLIES, PUBLIC_WORDS
from langchain_dpicl.release.tool import SPENT

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


def run(name: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_the_embedding_mean_answers_with_a_public_sentence(tmp_path: Path) -> None:
    answer, receipt = run("reply_by_embedding.py", tmp_path)
    assert answer in PUBLIC_REPLIES
    assert receipt.startswith("embedding:embedding:1: epsilon ")
    assert "spent=1" in receipt


def test_joint_em_answers_with_ranked_public_words_and_a_text(tmp_path: Path) -> None:
    words, *_, budget = run("reply_by_joint_em.py", tmp_path)
    released = [word.strip("'[]") for word in words.split(", ")]
    assert len(set(released)) == 4
    assert set(released) <= set(PUBLIC_WORDS)
    assert "spent=1" in budget, "the second question is the first again: it is replayed"


def test_propose_test_release_answers_with_words_or_says_that_it_does_not(tmp_path: Path) -> None:
    first, *text, budget = run("reply_by_ptr.py", tmp_path)
    assert first.endswith("] released") or first == "[] zero-shot fallback"
    assert "".join(text).strip()
    assert "spent=1" in budget


def test_a_batch_is_charged_together_and_then_the_budget_says_no(tmp_path: Path) -> None:
    *answers, again, refusal = run("classify.py", tmp_path)
    labels = [line.split()[0] for line in answers[::2]]
    assert len(labels) == 3
    assert set(labels) <= set(DEMO_LABELS)
    assert [line.rsplit(", ")[-1] for line in answers[1::2]] == ["2 left", "1 left", "0 left"]
    assert again.split() == [labels[0], "(replayed:", "True)"]
    assert "0 of 3 releases left" in refusal


def test_an_agent_reads_an_answer_and_then_that_the_budget_is_spent(tmp_path: Path) -> None:
    spoken = [line.split(maxsplit=1) for line in run("agent.py", tmp_path)]
    assert [who for who, _ in spoken] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert spoken[2][1] in DEMO_LABELS
    assert spoken[4][1] == SPENT


def test_a_server_answers_its_client_and_nobody_without_a_key(tmp_path: Path) -> None:
    answered, refused = run("serve.py", tmp_path)
    assert answered.split()[0] in DEMO_LABELS
    assert answered.endswith("for front-desk with 99 left")
    assert "Unauthorized" in refused


def test_a_reply_is_written_token_by_token_and_its_demonstrations_fit_a_prompt(tmp_path: Path) -> None:
    reply, budget, *prompt, spent = run("write.py", tmp_path)
    assert reply.strip()
    assert "releases=100" in budget
    assert prompt[0].startswith("Patient: ")
    assert prompt[-2:] == ["Patient: My tablets are nearly empty.", "Clinic:"]
    assert spent.endswith("the prompt may be shown to any model, for ever")
    lines = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert not (tmp_path / "demonstrations.jsonl.part").exists()
