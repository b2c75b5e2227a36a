"""The notebooks, run as they stand, with the embedded embedding model. Their pages show an earlier run's outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from notebooks import run

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_where_its_page_shows_outputs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shown = json.loads(path.read_text(encoding="utf-8"))["cells"]
    made = run(path)["cells"]
    assert [bool(cell.get("outputs")) for cell in made] == [bool(cell.get("outputs")) for cell in shown]
    assert sum(bool(cell.get("outputs")) for cell in made) >= 5
