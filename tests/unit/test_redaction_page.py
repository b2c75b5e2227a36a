"""docs/tasks/redaction.md: its example, and the figures that it shows."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
from pages import blocks

EXAMPLE = Path(__file__).parents[2] / "examples" / "redact_then_release.py"


def test_the_example_hides_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sampled person adds one vote of weight e^.43 to four labels: an answer is right with a probability of .27, and
    60 of 100 are with one below 1e-9. So are two wrong of four symptoms, with 140 people or more each."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    held, alone, searched, released, symptoms = capsys.readouterr().out.splitlines()
    shown = blocks("tasks/redaction.md", "text", "")[0].splitlines()
    assert [held, alone, searched] == shown[:3]
    pattern = r"the same from the release: (\d+) of 100 \(to name the commonest of four for all: 34\)"
    for line in (released, shown[3]):
        found = re.fullmatch(pattern, line)
        assert found
        assert int(found[1]) < 60
    assert symptoms.endswith((" 4 of 4 right", " 3 of 4 right"))


def test_the_page_shows_the_examples_lines() -> None:
    page = ast.parse(blocks("tasks/redaction.md", "python", "")[0]).body
    example = {ast.unparse(each) for each in ast.parse(EXAMPLE.read_text(encoding="utf-8")).body}
    assert {ast.unparse(each) for each in page} <= example
