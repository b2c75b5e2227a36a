"""The tables of `tests/README.md`: every mistake, every test of this folder, and no test that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (\d+) \| (.*) \|$", (TESTS / "README.md").read_text(), re.MULTILINE)
MODULES = sorted((TESTS / "mutations").glob("test_mutation_[0-9][0-9]_*.py"))
NUMBERS = [int(module.name.split("_")[2]) for module in MODULES]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def named_in(path: Path) -> set[str]:
    """The names of a module's tests."""
    functions = (
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {function.name for function in functions if function.name.startswith("test_")}


def test_every_mistake_has_a_row_in_both_tables_and_a_module() -> None:
    assert [int(number) for number, _ in ROWS] == NUMBERS + NUMBERS
    assert set(range(1, 19)) <= set(NUMBERS)
    for module, (_, row) in zip(MODULES, ROWS[len(NUMBERS) :], strict=True):
        named = {f"{path}::{name}" for path, name in NAMED.findall(row)}
        assert {f"mutations/{module.name}::{name}" for name in named_in(module)} <= named


def test_every_test_that_the_readme_names_is_there() -> None:
    named = NAMED.findall((TESTS / "README.md").read_text())
    assert len(named) > 50
    assert [f"{path}::{name}" for path, name in named if name not in named_in(TESTS / path)] == []
