"""The study of terms: one tiny run of the command, whose files hold numbers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import head_study
import terms_study
from langchain_core.embeddings import DeterministicFakeEmbedding

SETTINGS = {
    "delta": 1e-5, "epsilons": [3], "releases": 2, "edges": [10, 100], "words": {"at_most": [4]},
    "names": {"owners": 90},
    "head": {"epsilons": [8], "shares": [0.3], "fits": 2, "steps": 5, "delta0": 2.5e-6},
}  # fmt: skip


class Model(DeterministicFakeEmbedding):
    """Hashes: alike only for equal texts."""

    size: int = 8
    model: str = "hash"


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_tiny_study_finds_what_many_use_and_makes_its_page(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(head_study, "local_embeddings", Model)
    (tmp_path / "settings.json").write_text(json.dumps(SETTINGS))
    kinds = ("NUM:when", "LOC:where", "HUM:who")
    words = write(tmp_path / "w.jsonl", [{"title": "harbour", "text": f"seal{i % 9}"} for i in range(180)])
    names = write(tmp_path / "n.jsonl", [{"input": f"name[Mill {i % 3}], area[x]", "output": "o"} for i in range(90)])
    labels = [
        write(
            tmp_path / f"{part}.jsonl", [{"text": f"{part} {i}", "label": "x", "fine_label": kinds[i % 3]} for i in r]
        )
        for part, r in (("train", range(200)), ("test", range(30)))
    ]
    given = ["--words", words, "--names", names, "--labels", *labels, "--output", str(tmp_path / "out")]
    assert terms_study.main([*given, "--settings", str(tmp_path / "settings.json")]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["recall"][-1]["recall"] for row in found["words"]] == [[1.0, 0.0]]
    assert found["names"][0]["recall"][0] == {"from": 10, "to": 100, "terms": 3, "recall": [1.0, 0.0]}
    assert [row["labels"][0] for row in found["labels"]] == [3.0, 3.0]
    page = (tmp_path / "out" / "table.md").read_text()
    assert "180 owners, words:" in page
    assert not [word for word in ("harbour", "mill", "num when") if word in page + json.dumps(found["words"])]
