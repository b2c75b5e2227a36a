"""The documentation says what is so: every error and every format's version is there."""

from __future__ import annotations

import re
from pathlib import Path

import langchain_dpicl
from langchain_dpicl import errors
from langchain_dpicl.budget import schema
from langchain_dpicl.once import head, table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Warning | Exception) and not name.startswith("_")
}


def sections(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


def test_every_error_is_explained_with_its_cause_and_cure() -> None:
    found = sections(DOCS / "errors.md")
    assert set(found) == ERRORS
    roots = {error.__name__ for error in vars(errors).values() if isinstance(error, type) and error.__subclasses__()}
    bare = {name for name, text in found.items() if not ("**Cause.**" in text and "**Cure.**" in text)}
    assert bare <= roots
    assert bare == {"DPICLError", "PlanError", "BudgetError"}


def test_every_public_name_is_in_the_reference() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")]
    named = re.findall(r"^::: langchain_dpicl\.(\w+)$", "\n".join(pages), re.MULTILINE)
    alias = {"PostgresExemplarStore"}  # another name of a class, which has its entry
    assert sorted(named) == sorted(set(langchain_dpicl.__all__) - ERRORS - alias)


def test_the_page_of_versions_names_the_formats_of_today() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", (DOCS / "compatibility.md").read_text(encoding="utf-8"), re.MULTILINE)
    found = [version for _, version in rows]
    formats = [head._FORMAT, "dpicl-fit-1", table._FORMAT, "dpicl-table-part-1", schema.VERSION]
    assert [version for version in found if version in map(str, formats)] == list(map(str, formats))


def test_a_page_of_the_site_is_in_its_navigation_once() -> None:
    """`make docs` builds the pages that are made, too; this sees what somebody added without it."""
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(named) == len(set(named))
    assert written <= set(named)
