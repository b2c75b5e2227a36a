"""Every example of the API reference, run as it stands there: each public name has one on its page."""

from __future__ import annotations

import doctest
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from test_logits_models import write_tiny_llama

import langchain_dpicl

PAGES = sorted((Path(__file__).parents[2] / "docs" / "reference").glob("*.md"))
SECTION = re.compile(r"^## (\w+)\n(.*?)^::: langchain_dpicl\.\1$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
PARSER = doctest.DocTestParser()

pytestmark = pytest.mark.model


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_as_they_stand(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    given: dict[str, Any] = {"__name__": "__main__"}
    if page.stem == "stores":
        given["url"] = request.getfixturevalue("pgvector_url")
    if page.stem == "tokens":
        given["weights"] = tmp_path / "weights.gguf"
        write_tiny_llama(given["weights"])
    test = PARSER.get_doctest("\n".join(re.findall(r"```pycon\n(.*?)```", text, re.DOTALL)), given, page.stem, None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        runner.run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_of_a_page_has_an_example_that_uses_it_and_members_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = SECTION.findall(text)
    assert len(found) == text.count("\n:::")
    for name, before, after in found:
        shown = getattr(langchain_dpicl, name)
        source = "".join(example.source for example in PARSER.get_examples(before))
        assert re.search(rf"\b{name}\b", source), f"{name} has no example that uses it"
        members = re.search(r"members: \[(.*?)\]", after)
        for member in members[1].split(", ") if members and members[1] else []:
            assert hasattr(shown, member), f"{name}.{member}"
