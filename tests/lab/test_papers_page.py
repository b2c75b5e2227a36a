"""The page of the three papers: its places exist, its numbers are those of the code and of the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from langchain_dpicl import DPSampler, EmbeddingMean, Keywords, NoisyVote
from langchain_dpicl.lab.evaluation.tasks import TASKS, PaperFigure
from langchain_dpicl.privacy import BoundedRange, Line, PLDAccountant

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/papers.md").read_text("utf-8")
METHODS = {"RNM": NoisyVote, "ESA": EmbeddingMean, "KSA": Keywords, "DPS-MOZO": DPSampler}


def rows() -> list[list[str]]:
    """The cells of all tables, without heads and rules."""
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    return [row for row in found if not row[0].startswith("---") and row[0] not in ("", "in the paper")]


def test_every_named_file_exists() -> None:
    named = set(re.findall(r"`((?:tests|examples)/[\w/-]+\.py)", PAGE))
    assert len(named) > 12
    for name in named | set(re.findall(r"\]\(\.\./([\w/.-]+)", PAGE)):
        assert (ROOT / name).is_file(), name


def test_every_table_has_the_same_columns_and_every_mistake_its_test() -> None:
    claims = [row for row in rows() if len(row) == 6]
    assert len(claims) > 15
    assert all(len(row) in (4, 6) for row in rows())
    for place, *_, wrong, _ in claims:
        assert not wrong or wrong == "as A.4" or "tests/" in wrong or "noise is for" in wrong, place


def test_every_number_of_ours_has_its_results() -> None:
    for name in set(re.findall(r"results/README\.md#([\w-]+)", PAGE)):
        assert (ROOT / "results" / name / "results.json").is_file(), name


@pytest.mark.parametrize(
    "figure", [f for task in TASKS.values() for f in task.paper], ids=lambda f: f"{f.method}-{f.value}"
)
def test_every_published_figure_stands_on_the_page(figure: PaperFigure) -> None:
    assert re.search(rf"(?<![\d.]){abs(figure.value):g}0?(?!\d)".replace("0.3", "0?.3"), PAGE)


@pytest.mark.parametrize("name", METHODS)
def test_the_papers_name_of_a_method_leads_to_ours(name: str) -> None:
    glossary = (ROOT / "docs/glossary.md").read_text("utf-8")
    (line,) = (line for line in glossary.splitlines() if line.startswith(f"| **{name}** |"))
    assert METHODS[name].__name__ in line
    assert re.search(rf"Source: .*{name}", METHODS[name].__doc__ or "")


def told() -> list[list[float]]:
    """Our numbers in the table of the three improvements."""
    return [[float(each) for each in row[2].split(" / ")] for row in rows() if len(row) == 4]


def test_the_block_of_the_three_improvements_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The block as it stands, but for the larger epsilons of its first two loops, which take long: see below."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    short = block.replace("(1, 3, 8):\n    words", "(1,):\n    words").replace("(1, 2, 4)", "(1,)")
    exec(compile(short, "papers.md", "exec"), {})
    printed = [float(number) for number in re.findall(r"(?:eps0|B|gap of) ([\d.]+)", capsys.readouterr().out)]
    words, tokens, gaps = told()
    assert printed == [words[0], tokens[0], *gaps]
    assert (words, tokens, gaps) == ([1.76, 3.25, 4.86], [6.4, 7.5, 8.6], [14.8, 9.8, 7.4])


@pytest.mark.parametrize("place", [1, 2])
def test_the_larger_epsilons_allow_the_ranges_of_the_table(place: int) -> None:
    words, tokens, _ = told()
    accountant = PLDAccountant()
    line = Line(BoundedRange(words[place] - 0.01), 400 / 14732, 100)
    assert accountant.epsilon([line], 5e-5) <= (1, 3, 8)[place]
    line = Line(BoundedRange(tokens[place] - 0.05), 4 / 14732, 5000)
    assert accountant.epsilon([line], 1 / 14732) <= (1, 2, 4)[place]
