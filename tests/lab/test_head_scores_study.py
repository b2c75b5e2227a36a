"""The study of label scores: one tiny run of the command, with a model and embeddings that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import head_scores
import head_study
import numpy as np
from evaluation_fakes import FakeLLM


class Deaf:
    """Embeddings that say nothing of a text."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return np.random.default_rng(len(texts)).normal(size=(len(texts), 8)).tolist()  # type: ignore[no-any-return]


def test_a_tiny_study_finds_what_the_scores_add(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """At epsilon 8: by the scores alone. A second run scores nothing again."""
    weight = lambda prompt, word: 4.0 if word in prompt.splitlines()[-2] else 1.0  # noqa: E731
    model = FakeLLM(words=["negative", "positive"], weight=weight)
    monkeypatch.setattr(head_study, "local_embeddings", Deaf)
    monkeypatch.setattr(head_scores, "local_llm", lambda name: model)
    monkeypatch.setattr(head_scores, "EPSILONS", (8.0,))
    monkeypatch.setattr(head_scores, "FITS", 2)
    files = []
    for name, count in (("train", 300), ("test", 40)):
        rows = [{"text": f"{name} {i} {model.words[i % 2]}", "label": model.words[i % 2]} for i in range(count)]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("\n".join(map(json.dumps, rows)))
    options = ["--task", f"sst2={files[0]}:{files[1]}", "--cache", str(tmp_path / "cache"), "--output", str(tmp_path)]
    assert head_scores.main(options) == 0
    without, with_scores = json.loads((tmp_path / "scores.json").read_text())
    assert (without["owners"], without["scores"], with_scores["scores"]) == (270, False, True)
    assert without["accuracy"] < 0.8 < 0.95 < with_scores["accuracy"]
    assert "| sst2 | 270 | embedding and label scores | " in (tmp_path / "scores.md").read_text()
    asked = len(model.calls)
    assert asked == 340
    assert head_scores.main(options) == 0
    assert len(model.calls) == asked
