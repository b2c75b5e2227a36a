"""Readers of a package page and users of a wheel have no other file of the repository: no text sends them to one."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")

[PACKAGE] = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
ABSENT = re.compile(r"(?<!--output )\b(?:docs|examples|results|tests)/[\w.*-][\w./*-]*|\bMakefile\b|constraints\.txt")


def texts(file: Path) -> Iterator[str]:
    """Yield what users may read of a file: its strings, or all of it."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        yield text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_text_of_a_wheel_names_a_file_that_it_lacks_and_not_where_that_is() -> None:
    held = [file for file in (ROOT / PACKAGE).rglob("*") if file.suffix in (".py", ".html")]
    assert len(held) > 100
    named = [
        (file.relative_to(ROOT).as_posix(), found[0])
        for file in held
        for text in texts(file)
        if "source archive" not in text
        for found in ABSENT.finditer(text)
    ]
    assert not named


def test_a_package_page_has_no_link_that_leads_nowhere() -> None:
    page = README
    for each in SETTINGS["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(each["pattern"], each["replacement"], page)
    assert len(LINK.findall(README)) > 20
    assert LINK.findall(page) == []
    assert "Quickstart (`docs/quickstart.md`)" in page


def test_the_source_archive_holds_what_the_readme_links_to() -> None:
    patterns = SETTINGS["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    held = {file for pattern in patterns for file in ROOT.glob(pattern.lstrip("/"))}
    for link in LINK.findall(README):
        target = ROOT / link
        assert target.exists(), link
        assert held & {target, *target.parents}, link


def test_the_readme_takes_two_screens_to_its_first_list_of_links_and_begins_with_the_installation() -> None:
    lines = README.partition("## Where to go on")[0].splitlines()
    assert len(lines) <= 106
    assert max(map(len, lines)) <= 120
    first = next(at for at, line in enumerate(lines) if line.startswith("```"))
    assert 'pip install "langchain-dpicl[local]"' in lines[first + 1]


def test_the_readmes_accuracies_are_measured_ones() -> None:
    measured = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "results").glob("*/table.md"))
    section = README.partition("## What it costs")[2].partition("\n## ")[0]
    shown = re.findall(r"(\d+\.\d) \((\d\.\d)\)", section)
    assert len(shown) >= 10
    for value, error in shown:
        assert f"{value} ({error})" in measured or f"{value} ± {error}" in measured
