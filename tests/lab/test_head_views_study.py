"""The study of a head's views: one tiny run of the command, and its vectors beside those of a fit with views."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import head_study
import head_views
import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import ExemplarStore, opening, whole
from langchain_dpicl.calls.flow import run
from langchain_dpicl.once.steps import FeatureMap, OwnedRecords
from langchain_dpicl.once.views import JoinedViews
from langchain_dpicl.store.records import as_matrix

LABELS = ("person", "place")
OPENINGS = ("Who was", "Where is")


class Model(DeterministicFakeEmbedding):
    """Hashes: alike only for equal texts."""

    size: int = 8
    model: str = "hash"


def rows_of(name: str, count: int) -> list[dict[str, str]]:
    return [{"text": f"{OPENINGS[i % 2]} {name} {i}", "label": LABELS[i % 2]} for i in range(count)]


def write(path: Path, count: int) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows_of(path.stem, count)))
    return str(path)


def test_a_tiny_study_learns_from_the_second_view_and_makes_its_page(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(head_study, "local_embeddings", Model)
    monkeypatch.setattr(head_views, "EPSILONS", (8.0,))
    monkeypatch.setattr(head_views, "FITS", 1)
    files = [write(tmp_path / f"{name}.jsonl", count) for name, count in (("train", 240), ("test", 60), ("public", 40))]
    folder = tmp_path / "results"
    options = ["--task", f"one={':'.join(files)}", "--output", str(folder), "--owners", "120"]
    assert head_views.main(options) == 0
    found = json.loads((folder / "results.json").read_text())
    by = {(row["views"], row["owners"], row["epsilon"]): row["accuracy"] for row in found["rows"]}
    assert len(by) == 8
    assert min(by["whole,opening:2", owners, None] for owners in (120, 240)) == 1.0
    assert by["whole,opening:2", 240, 8.0] > 0.9 > by["whole", 240, 8.0]
    assert found["table"].count("| one | whole") == 4


def test_the_studys_vectors_are_those_of_a_fit(tmp_path: Path, monkeypatch: Any) -> None:
    """But for roundings of float32: a lattice step of 2^-16."""
    monkeypatch.setattr(head_study, "local_embeddings", Model)
    write(tmp_path / "train.jsonl", 30)
    files = [str(tmp_path / "train.jsonl")] * 3
    known = head_study.Known(None)
    data = head_study.load("one", files, [], known)
    views = [whole, opening(2)]
    study = head_views.joined("one", data, views, known)
    store = ExemplarStore.from_texts(data.private.texts, Model(), outputs=data.private.labels, progress=False)
    made, public = JoinedViews.of(views, store, data.public.texts, LABELS, False)
    assert public is not None
    assert np.abs(public - study.public.vectors).max() < 1e-6
    features = FeatureMap.of(public, 6)
    held = OwnedRecords(as_matrix(data.private.vectors, 30), np.zeros(30, np.int64), np.arange(30))
    seen, lost = run(made.seen(held, data.private.texts, features, store, False))
    assert lost == 0
    assert np.abs(seen.features - features.features(study.private.vectors)).max() <= 2
