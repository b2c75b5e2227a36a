"""The study of RAG by released terms: what stands beside a term, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import rag_terms

from langchain_dpicl import PrivateTable


def record(i: int) -> dict[str, str]:
    name, place, kind = (("Alpha", "Harbour", "pub"), ("Beta", "Castle", "restaurant"))[i % 2]
    return {"input": f"name[{name}], near[{place}]", "output": f"{name} {kind} {place}"}


def test_a_passage_names_what_stands_beside_a_term_more_often_than_expected() -> None:
    """Every name stands beside "food", hardly more than is expected; beside its own place it does."""
    terms = ("alpha", "beta", "castle", "food", "harbour")
    counts = np.zeros((5, 5))
    for one, other, count in ((0, 4, 60), (1, 2, 60), (0, 3, 40), (1, 3, 40), (2, 3, 40), (4, 3, 40)):
        counts[one, other] = counts[other, one] = count
    receipt: Any = {"id": "test"}
    beside = rag_terms.Beside(PrivateTable(counts, terms, {"value": terms}, 5.0, receipt))
    assert beside.passage("Is Alpha near?") == "alpha: harbour."
    assert beside.passage("Is Gamma near?") == ""


def test_released_terms_answer_for_a_crowd_and_not_at_all_within_noise(tmp_path: Path) -> None:
    """At epsilon 100 the noise is a tenth of a count; at .001 no term of two hundred owners is released (1e-9)."""
    data, settings = tmp_path / "data.jsonl", tmp_path / "settings.json"
    data.write_text("".join(json.dumps(record(i)) + "\n" for i in range(410)))
    chosen = {"epsilons": [0.001, 100], "terms": 4, "phrases": 1, "pairs": 16, "tables": 1}
    settings.write_text(json.dumps({"owners": 400, "public": 10, "least": 20, "delta": 1e-5, "terms": chosen}))
    given = ["--data", str(data), "--settings", str(settings), "--output", str(tmp_path / "out")]
    assert rag_terms.main(given) == 0
    few, many = json.loads((tmp_path / "out" / "terms.json").read_text())["methods"]
    assert (few["terms"], few["right"]) == (0, 0)
    assert (many["terms"], many["right"]) == (6, 100)
    assert rag_terms.main(["--data", str(tmp_path / "none"), *given[2:]]) == 1
