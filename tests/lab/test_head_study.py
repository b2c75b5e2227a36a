"""The studies of heads: one tiny run of each command, with embeddings and a model that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import head_few_shot
import head_study
import numpy as np
import pytest
from langchain_core.language_models import LLM

from langchain_dpicl.lab.evaluation.report import write_index

LABELS = ("blue", "green", "red")
WAYS = np.eye(8)[:3]


class Coloured:
    """Embeddings of texts that begin with their label."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        draw = np.random.default_rng(len(texts))
        rows = [WAYS[LABELS.index(text.split()[0])] + 0.1 * draw.normal(size=8) for text in texts]
        return [(row / np.linalg.norm(row)).tolist() for row in rows]


def write(path: Path, count: int, labels: int = 3, **more: str) -> str:
    rows = [
        {"text": f"{LABELS[i % labels]} {path.stem} {i}", "label": LABELS[i % labels], **more} for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_tiny_study_learns_and_makes_its_page(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Heads for 80 and 240 owners at epsilon 8, and without noise; the second run fits nothing again."""
    monkeypatch.setattr(head_study, "local_embeddings", Coloured)
    for name, value in {"EPSILONS": (8.0,), "SIZES": (80, 500), "FITS": 1}.items():
        monkeypatch.setattr(head_study, name, value)
    vote = tmp_path / "vote.json"
    kinds = [("zero-shot", None, 40.0), ("zero-shot calibrated", None, 45.0), ("vote", 1.0, 60.0), ("vote", 3.0, 70.0)]
    scores = [{"method": m, "epsilon": e, "values": {"accuracy": {"mean": x, "error": 5.0}}} for m, e, x in kinds]
    vote.write_text(json.dumps({"scores": scores}))
    train, test = write(tmp_path / "train.jsonl", 300), write(tmp_path / "test.jsonl", 60)
    public = write(tmp_path / "public.jsonl", 40)
    folder = tmp_path / "results" / "head"
    options = ["--task", f"one={train}:{test}", "--task", f"two={train}:{test}:{public}", "--labels", "two=blue,red"]
    options += ["--other", "one=two", "--votes", f"one={vote}", "--output", str(folder)]
    assert head_study.main(options) == 0
    found = json.loads((folder / "results.json").read_text())
    rows = {(row["task"], row["public"], row["epsilon"], row["owners"]): row for row in found["rows"]}
    assert {key[::3] for key in rows} == {("one", 270), ("one", 80), ("two", 200), ("two", 80)}
    for task, owners in (("one", 270), ("two", 200)):
        exact, noisy = (rows[task, "same source", epsilon, owners] for epsilon in (None, 8.0))
        assert exact["accuracy"] == 1.0
        assert 0.8 <= noisy["accuracy"] <= 1.0
        assert noisy["least"] <= noisy["accuracy"] <= noisy["most"]
    assert found["beside"]["one"]["most common label"] == pytest.approx(100 / 3)
    assert (found["beside"]["one"]["public prompt"], found["beside"]["one"]["private vote, epsilon 1"]) == (45.0, 60.0)
    assert found["beside"]["two"] == {"most common label": 50.0}
    assert "| one | 270 | another source |" in found["table"]
    assert (folder / "owners.png").stat().st_size > 10_000
    assert "## head" in write_index(folder.parent).read_text()

    monkeypatch.setattr(head_study, "fitted", None)  # a second fit would raise
    monkeypatch.setattr(head_study, "head_without_noise", None)
    assert head_study.main(options) == 0
    assert json.loads((folder / "results.json").read_text())["rows"] == found["rows"]


class Copier(LLM):
    """Says what the last example says, and nothing without one."""

    @property
    def _llm_type(self) -> str:
        return "copier"

    def _call(self, prompt: str, *args: Any, **kwargs: Any) -> str:
        said = [line.split(":")[1] for line in prompt.splitlines() if line.startswith("Output: ")]
        return said[-1].upper() if said else " "


def test_a_model_is_shown_public_texts_that_a_head_has_labelled(tmp_path: Path, monkeypatch: Any) -> None:
    """A model that copies its nearest example is as good as the head; the second run asks nothing again."""
    monkeypatch.setattr(head_study, "local_embeddings", Coloured)
    monkeypatch.setattr(head_few_shot, "EPSILON", 100.0)
    monkeypatch.setattr(head_few_shot, "local_llm", lambda *_, **__: Copier())
    train, test = write(tmp_path / "train.jsonl", 300), write(tmp_path / "test.jsonl", 20)
    folder = tmp_path / "few"
    options = ["--task", f"one={train}:{test}", "--questions", "12", "--output", str(folder)]
    assert head_few_shot.main(options) == 0
    few, zero, alone = json.loads((folder / "results.json").read_text())["rows"]
    assert (few["accuracy"], few["no_label"], few["labelled_right"]) == (1.0, 0, 1.0)
    assert (zero["accuracy"], zero["no_label"]) == (0.0, 12)
    assert alone["accuracy"] == 1.0
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 24

    monkeypatch.setattr(head_few_shot, "local_llm", lambda *_, **__: None)
    monkeypatch.setattr(head_few_shot, "few_shot_chain", lambda *_, **__: None)
    assert head_few_shot.main(options) == 0
    assert json.loads((folder / "results.json").read_text())["rows"] == [few, zero, alone]
