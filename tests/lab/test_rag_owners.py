"""The study of RAG by owners a fact: the documents that are left, their exact sum, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import rag_owners
from rag_questions import KINDS
from rag_table import TableStudy

from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.tables_reading import Domain

PLACES = {"Alpha": "Harbour", "Beta": "Castle"}


def record(i: int) -> dict[str, str]:
    name = ("Alpha", "Beta")[i % 2]
    return {"input": f"name[{name}], near[{PLACES[name]}]", "output": f"{name} is a pub near {PLACES[name]}, {i}"}


RECORDS = [record(i) for i in range(80)]


def test_no_more_owners_say_a_value_than_asked_for() -> None:
    texts, full = rag_owners.fewer(RECORDS, ["Castle", "Harbour"], 5)
    assert texts == [each["output"] for each in RECORDS[:10]]
    assert full == {(name, kind) for name in PLACES for kind in ("near", "kind")}
    assert rag_owners.fewer(RECORDS, ["Castle", "Harbour"], 41)[1] == set()


def test_the_sum_before_noise_is_that_of_a_released_table() -> None:
    """At epsilon 1,000 sigma is .11, so noise is above .8 with probability 1e-11; each of ten cells has 0 or 21."""
    study = TableStudy(RECORDS, {"owners": 60, "public": 20, "least": 20, "delta": 1e-5})
    table = study.table(1000)
    domain = Domain(("Alpha", "Beta"), {"near": ("Castle", "Harbour"), "kind": KINDS})
    total = rag_owners.exact_sum(domain, [each["output"] for each in RECORDS[:60]])
    assert np.abs(table.counts - total / LATTICE).max() < 0.8
    assert rag_owners.sigma_of(1.0, 1e-5) == pytest.approx(study.table(1.0).sigma)


def test_few_owners_are_drowned_by_noise_and_many_are_not(tmp_path: Path) -> None:
    """Twenty who agree are known at epsilon 50, and next to never right and known at .01."""
    data, settings = tmp_path / "data.jsonl", tmp_path / "settings.json"
    data.write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    chosen = {"owners": [20], "epsilons": [0.01, 50], "tables": 4}
    settings.write_text(json.dumps({"owners": 80, "least": 20, "delta": 1e-5, "by_owners": chosen}))
    given = ["--data", str(data), "--settings", str(settings), "--output", str(tmp_path / "out")]
    assert rag_owners.main(given) == 0
    few, many = json.loads((tmp_path / "out" / "owners.json").read_text())["rows"]
    assert (many["right"], many["known"], many["wrong and known"], many["facts"]) == (100, 100, 0, 4)
    assert few["known"] <= 50  # nine of sixteen rankings that noise calls known: below 1e-8
    assert (tmp_path / "out" / "owners.png").exists()
    assert rag_owners.main(["--data", str(tmp_path / "none"), *given[2:]]) == 1
