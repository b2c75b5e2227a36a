"""A task's rows from the Hugging Face library itself, over files on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from langchain_dpicl import InvalidParameter
from langchain_dpicl.lab.evaluation.rows import load_rows
from langchain_dpicl.lab.evaluation.tasks import task

pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    found = tmp_path / "data"
    found.mkdir()
    for split, text in (("train", "a good film"), ("test", "a bad film")):
        rows = [{"text": f"{text}, number {i}", "label": "Positive" if i % 2 else "negative"} for i in range(3)]
        (found / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return found


def test_a_folder_that_the_library_reads_becomes_rows(folder: Path) -> None:
    rows = load_rows(task("sst2"), f"hf:{folder}", split="test")
    assert [row.input for row in rows] == [f"a bad film, number {i}" for i in range(3)]
    assert [row.output for row in rows] == ["Negative", "Positive", "Negative"]


def test_a_split_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(InvalidParameter, match="no split dev"):
        load_rows(task("sst2"), f"hf:{folder}", split="dev")
