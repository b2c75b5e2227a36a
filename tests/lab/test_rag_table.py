"""The study of RAG by a released table: what it asks, and that its report says what the documents say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import rag_table

PLACES = {"Alpha": "Harbour", "Beta": "Castle"}


def record(i: int) -> dict[str, str]:
    name = ("Alpha", "Beta")[i % 2]
    kind = "pub" if name == "Alpha" else "coffee shop"
    return {"input": f"name[{name}], near[{PLACES[name]}]", "output": f"{name} is a {kind} near {PLACES[name]}, {i}"}


@pytest.mark.parametrize("epsilon", [50, 0.01])
def test_a_table_answers_the_questions_of_the_study_as_far_as_noise_lets_it(epsilon: float, tmp_path: Path) -> None:
    """Two hundred owners agree on each fact: all is right and known at epsilon 50, and next to nothing at .01."""
    data, settings = tmp_path / "data.jsonl", tmp_path / "settings.json"
    data.write_text("".join(json.dumps(record(i)) + "\n" for i in range(420)))
    chosen: dict[str, Any] = {"owners": 400, "public": 20, "least": 20, "delta": 1e-5}
    settings.write_text(json.dumps({**chosen, "table": {"epsilons": [epsilon], "tables": 2}}))
    given = ["--data", str(data), "--settings", str(settings), "--output", str(tmp_path / "out")]
    assert rag_table.main(given) == 0
    results = json.loads((tmp_path / "out" / "once.json").read_text())
    assert results["measured"].startswith("8 questions, 400 owners")
    (row,) = results["methods"]
    if epsilon == 50:
        assert (row["right"], row["known"], row["wrong and known"], row["error"]) == (100, 100, 0, 0)
    else:
        assert row["sigma"] > 100
        assert row["known"] <= 50  # five of eight rankings that noise calls known: below 2e-8
    assert rag_table.main([*given[:-2], "--output", str(tmp_path / "out"), "--data", str(tmp_path / "none")]) == 1
