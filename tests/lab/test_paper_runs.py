"""The runs of the papers' settings: commands that `dpicl` takes, on files that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paper_runs
import pytest
from paper_runs import RUNS, arguments

from langchain_dpicl.cli import parser_of


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("e2e", "trec", "agnews", "sst2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("train.jsonl.gz" if name == "agnews" else "train.jsonl")).touch()
    return tmp_path


@pytest.mark.parametrize("name", [*RUNS])
def test_a_run_is_a_command_of_dpicl(name: str, data: Path) -> None:
    given = arguments(name, data, data / "out", larger=data / "larger.gguf")
    options = parser_of(given).parse_args(given)
    assert Path(options.data).exists()
    assert options.output == data / "out" / name
    assert options.in_batches
    is_larger = name.endswith("-larger")
    assert options.model == (str(data / "larger.gguf") if is_larger else "smollm2-135m-instruct")
    assert options.queries == ((200 if is_larger else 500) if name.startswith("votes") else 100)
    assert options.delta == (1e-4 if name.startswith("votes") else 5e-5 if name.startswith("ksa") else None)
    assert bool(options.public) == ("offline" in options.method)


def test_a_trial_has_fewer_queries_and_a_failure_is_told(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[list[str]] = []

    def call(given: list[str]) -> Any:
        heard.append(given)
        return len(heard) - 1

    monkeypatch.setattr(paper_runs.subprocess, "call", call)
    common = ["--data", str(data), "--output", str(data / "out"), "--queries", "20", "--only"]
    assert paper_runs.main([*common, "ksa"]) == 0
    assert paper_runs.main([*common, "ksa", "votes-trec"]) == 1
    assert [given[given.index("--queries") + 1] for given in heard] == ["20"] * 3
    assert paper_runs.main([*common, "ksa-larger"]) == 0, "there is no larger model"
    assert len(heard) == 3
