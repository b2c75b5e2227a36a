"""docs/threats.md: the items of OWASP's lists, and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from pages import DOCS

TESTS = Path(__file__).parents[1]
PAGE = (DOCS / "threats.md").read_text(encoding="utf-8")
ITEMS = dict(re.findall(r"^### (.+?)\n\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL))
TOP_TEN = (
    "Prompt injection",
    "Sensitive information disclosure",
    "Supply chain",
    "Data and model poisoning",
    "Improper output handling",
    "Excessive agency",
    "System prompt leakage",
    "Vector and embedding weaknesses",
    "Misinformation",
    "Unbounded consumption",
)
CHEAT_SHEET = (
    "Document poisoning",
    "Embedding manipulation",
    "Context window attacks",
    "Access control inheritance",
    "Source attribution and provenance",
    "Chunk isolation",
    "Index integrity",
    "Query injection via retrieval",
    "Output validation and enforcement",
    "Tool invocation and agent safety",
    "Caching risks",
    "Monitoring and incident response",
    "Supply chain risk in ingestion",
    "Fail-closed design",
)


def test_every_item_of_both_lists_is_there_in_its_order() -> None:
    wanted = [f"LLM{number:02} {name}" for number, name in enumerate(TOP_TEN, 1)]
    wanted += [f"{number} {name}" for number, name in enumerate(CHEAT_SHEET, 1)]
    assert list(ITEMS) == wanted


@pytest.mark.parametrize("item", ITEMS)
def test_an_item_says_what_is_done_and_what_is_not_and_names_tests_that_exist(item: str) -> None:
    assert re.findall(r"^\*\*(.+?)\.\*\* ", ITEMS[item], re.MULTILINE) == ["Does", "Leaves to you", "Shown by"]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", ITEMS[item].partition("**Shown by.**")[2])
    assert named
    for file, function in named:
        defined = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
        assert function in {each.name for each in defined if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
