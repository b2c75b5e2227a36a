"""The example scripts with the real models; two more are in `integration/test_examples.py`, the quickstart in
`test_demo.py`. They run in this process, which loads each model once and embeds each text once.
"""

from __future__ import annotations

import ast
import re
import runpy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from replies import PUBLIC_REPLIES, PUBLIC_WORDS

from langchain_dpicl.demo.inbox import DEMO_LABELS
from langchain_dpicl.local import LocalEmbeddings
from langchain_dpicl.release.base import SPENT

ROOT = Path(__file__).parents[2]
Run = Callable[..., list[str]]
CUSTOMERS = "150"
"""Of the examples' inbox: embedding all 800 of them takes longer than anything else here."""

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asks_first]


@pytest.fixture(scope="module")
def embedded_once() -> Iterator[None]:
    """Keep every text's vector: all examples embed the same inbox."""
    vectors: dict[str, list[float]] = {}
    real = LocalEmbeddings.embed_documents

    def embed(self: LocalEmbeddings, texts: list[str]) -> list[list[float]]:
        fresh = list(dict.fromkeys(text for text in texts if text not in vectors))
        vectors.update(zip(fresh, real(self, fresh), strict=True))
        return [list(vectors[text]) for text in texts]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalEmbeddings, "embed_documents", embed)
        yield


@pytest.fixture
def run(
    embedded_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """run("extract.py") runs an example. The lines that it prints."""

    def ran(name: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("DPICL_DEMO_CUSTOMERS", CUSTOMERS)
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return ran


def test_a_head_is_released_once_and_answers_without_a_charge(run: Run) -> None:
    answer, score, *pairs = run("release_once.py")
    assert ast.literal_eval(answer)["label"] in DEMO_LABELS
    assert re.fullmatch(r"\d+ of 60 questions right; spent: 1 of 1 release, once", score)
    assert len(pairs) == 3
    assert all(any(f"'output': '{label}'" in pair for label in DEMO_LABELS) for pair in pairs)


def test_the_embedding_mean_answers_with_a_public_sentence(run: Run) -> None:
    answer, receipt = run("reply_by_embedding.py")
    assert answer in PUBLIC_REPLIES
    assert receipt.startswith("embedding:embedding:1: epsilon ")
    assert "spent=1" in receipt


def test_a_ticket_is_filled_in_as_an_instance_of_its_model_for_one_charge(run: Run) -> None:
    ticket, receipt = run("extract.py")
    found = re.fullmatch(r"Ticket\(desk='(\w+)', visit=(True|False), days=(\d+)\)", ticket)
    assert found is not None
    assert found[1] in DEMO_LABELS
    assert 0 <= int(found[3]) <= 30
    assert receipt.startswith("tickets:structured:1 ")
    assert "spent=1" in receipt


def test_joint_em_answers_with_ranked_public_words_and_a_text(run: Run) -> None:
    words, *_, budget = run("reply_by_joint_em.py")
    released = [word.strip("'[]") for word in words.split(", ")]
    assert len(set(released)) == 4
    assert set(released) <= set(PUBLIC_WORDS)
    assert "spent=1" in budget, "the second question is the first again: it is replayed"


def test_propose_test_release_answers_with_words_or_says_that_it_does_not(run: Run) -> None:
    first, *text, budget = run("reply_by_ptr.py")
    assert first.endswith("] released") or first == "[] zero-shot fallback"
    assert "".join(text).strip()
    assert "spent=1" in budget


def test_an_agent_reads_an_answer_and_then_that_the_budget_is_spent(run: Run) -> None:
    spoken = [line.split(maxsplit=1) for line in run("agent.py")]
    assert [who for who, _ in spoken] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert spoken[2][1] in DEMO_LABELS
    assert spoken[4][1] == SPENT


def test_a_server_answers_its_client_and_nobody_without_a_key(run: Run) -> None:
    answered, refused = run("serve.py")
    assert answered.split()[0] in DEMO_LABELS
    assert answered.endswith("for front-desk with 99 left")
    assert "Unauthorized" in refused


def test_a_reply_is_written_token_by_token_and_its_demonstrations_fit_a_prompt(run: Run, tmp_path: Path) -> None:
    reply, budget, *prompt, spent = run("write.py")
    assert reply.strip()
    assert "releases=100" in budget
    assert prompt[0].startswith("Patient: ")
    assert prompt[-2:] == ["Patient: My tablets are nearly empty.", "Clinic:"]
    assert spent.endswith("the prompt may be shown to any model, for ever")
    lines = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    assert len(lines) == 2


def test_a_graph_searches_one_patients_messages_in_each_call(run: Run) -> None:
    naive, rehearsed, private, budget = run("graph_rag.py")
    assert naive.startswith("not private: ")
    assert rehearsed == "rehearsal passed: True"
    assert private in [f"private: {label}" for label in DEMO_LABELS]
    assert "spent=1" in budget


def test_an_agent_is_rehearsed_on_public_messages_and_searches_with_its_tool(run: Run) -> None:
    first, *rehearsed, answered, budget = run("agent_rag.py")
    assert first == "rehearsal passed; nothing was charged, no private record was read"
    assert any("I lost my glasses." in line for line in rehearsed)
    label, truth = answered.split(" is right: ")
    assert {label, truth} <= set(DEMO_LABELS)
    assert "spent=1" in budget


def test_a_store_follows_a_collection_in_chroma(run: Run) -> None:
    before, changes, after, budget = run("sync_chroma.py")
    count, owners = (int(word) for word in before.split() if word.isdigit())
    changed = ast.literal_eval(changes)
    assert (changed["num_added"], changed["num_updated"]) == (1, 1)
    assert changed["num_deleted"] >= 1
    assert changed["num_skipped"] == count - changed["num_deleted"] - 1
    assert [int(word) for word in after.split() if word.isdigit()] == [count + 1 - changed["num_deleted"], owners]
    assert {before.rsplit(maxsplit=1)[1], after.rsplit(maxsplit=1)[1]} <= set(DEMO_LABELS)
    assert "spent=2" in budget
