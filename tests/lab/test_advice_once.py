"""``dpicl advise --topics``: its rules beside what tables and votes of documents measured, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.cli import main
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.advice_once import (
    FAQ,
    TABLE,
    VOTES,
    Forecast,
    Inquiry,
    forecasts,
    table_bars,
    table_left,
    taken,
    usual_epsilon,
)
from langchain_dpicl.privacy.advice import vote_left
from langchain_dpicl.privacy.votes import VoteNoise

RESULTS = Path(__file__).parents[2] / "results" / "rag"
STUDY = Inquiry(4000, 34, (19, 3), 1000, 1e-5, near=1 / 34, calls=8)


def expected(left: float, without: float, values: float) -> float:
    return 100 * (1 / values + (without - 1 / values) * left)


@pytest.mark.parametrize(("epsilon", "most"), [(0.3, 7.0), (1.0, 2.0), (3.0, 2.0)])
def test_what_noise_leaves_of_a_table_is_near_to_what_the_study_measured(epsilon: float, most: float) -> None:
    """The noise is the study's. Without noise the right value is first for 53 of 54 facts: epsilon 3 measured that."""
    rows = {row["epsilon"]: row for row in json.loads((RESULTS / "once.json").read_text())["methods"]}
    sigma = table_bars(STUDY, epsilon).sigma
    assert sigma == pytest.approx(rows[epsilon]["sigma"], rel=1e-3)
    found = expected(table_left(STUDY, sigma), 53 / 54, 2 / (1 / 19 + 1 / 3))
    assert -2.0 <= found - rows[epsilon]["right"] <= most


def test_a_value_is_known_from_the_margin_that_the_page_names() -> None:
    """748 cells: 20 owners at epsilon 1, 8 at 3, of owners who give one pair; here each gives two."""
    for epsilon, owners in ((1.0, 20), (3.0, 8)):
        assert round(table_bars(replace(STUDY, values=(22,)), epsilon).known_from) == owners
        assert table_bars(STUDY, epsilon).known_from == pytest.approx(owners * 2**0.5, rel=0.07)


def test_votes_of_documents_lose_at_most_11_points_more_than_the_rule_says() -> None:
    """`wrap_rag` of the study: 8 calls, 22 candidates, epsilon 3, with plans for 20, 200 and 1,000 questions."""
    for eps0, measured in ((2.18, 45.4), (0.948, 33.5), (0.445, 17.0)):
        left = vote_left(VoteNoise("vote-em", eps0, own_calls=True), 8.0, 22)
        lost = (measured / 100 - 1 / 22) / (0.492 - 1 / 22)
        assert 0.0 <= left - lost <= 0.11


@pytest.mark.parametrize(("eps0", "measured", "most"), [(0.534, 23.8, 0.34), (1.32, 38.4, 0.11), (2.61, 41.4, 0.05)])
def test_a_faq_loses_more_than_the_rule_says_most_at_a_small_epsilon(eps0: float, measured: float, most: float) -> None:
    """68 topics answered by 20 calls among 22 candidates, 43.2 % right without noise, at epsilon .3, 1 and 3."""
    left = vote_left(VoteNoise("vote-em", eps0, own_calls=True), 20.0, 22)
    lost = (measured / 100 - 1 / 22) / (0.432 - 1 / 22)
    assert 0.0 <= left - lost <= most


def test_the_order_of_preference_and_what_is_poor() -> None:
    def found(*left: float) -> list[Forecast]:
        return [Forecast(name, each, True, 0, 1.0) for name, each in zip((TABLE, FAQ, VOTES), left, strict=True)]

    def best(*left: float, epsilon: float = 1.0) -> str | None:
        way = taken(found(*left), epsilon)
        return None if way is None else way.method

    assert best(0.8, 0.99, 0.99) == TABLE
    assert best(0.7, 0.8, 0.99) == FAQ
    assert best(0.7, 0.7, 0.8) == VOTES
    assert best(0.7, 0.7, 0.7) is None
    assert best(1.0, 1.0, 1.0, epsilon=8.0) is None
    assert taken([Forecast(TABLE, 0.9, False, 0, 1.0)], 1.0) is None


def test_more_owners_leave_more_and_need_less_epsilon() -> None:
    few, many = (replace(STUDY, owners=owners) for owners in (400, 40_000))
    for one, other in zip(forecasts(few, 1.0), forecasts(many, 1.0), strict=True):
        assert one.left <= other.left
    assert usual_epsilon(few) >= usual_epsilon(many) == 1.0
    table, faq, votes = forecasts(STUDY, 1.0)
    assert table.left > votes.left < faq.left
    assert table.model_calls == 0 < faq.model_calls < votes.model_calls


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def found(*arguments: object) -> tuple[int, str, str]:
        code = main(["advise", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return found


ASKED = ("--topics", 34, "--values", "19,3", "--questions", 1000)


def test_a_table_is_taken_for_the_study_and_its_numbers_are_told(run: Any) -> None:
    code, out, _ = run("--owners", 4000, *ASKED, "--epsilon", 1, "--delta", 1e-5)
    assert code == 0
    assert out.startswith("Take: a table, at epsilon 1 and delta 1e-05.")
    assert 'release_table(store, topics, values, PrivacyBudget(1, 1e-05, {"sum": 1}))' in out
    said = " ".join(out.split())
    assert "about 118 owners" in said
    assert "standard deviation of 3.7 owners" in said
    assert "over all 748 cells, from about 28 owners" in said
    assert max(map(len, out.splitlines())) <= 120
    code, out, _ = run("--owners", 4000, *ASKED, "--epsilon", 1, "--delta", 1e-5, "--json")
    found = json.loads(out)
    assert found["recommended"] == "table"
    assert found["table_known_from"] == pytest.approx(28.5, abs=0.5)
    assert [each["method"] for each in found["methods"]] == ["table", "FAQ", "votes"]


def test_the_owners_of_a_file_count_and_nothing_else_of_it(run: Any, tmp_path: Path) -> None:
    data = tmp_path / "notes.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"canary {i}", "who": f"p{i // 2}"}) for i in range(800)))
    code, out, _ = run("--data", data, "--owner-key", "who", *ASKED)
    assert code == 0
    assert "400 owners" in out
    assert "canary" not in out


def test_nothing_is_taken_if_noise_would_decide_or_epsilon_hardly_bounds_anything(run: Any) -> None:
    assert run("--owners", 30, *ASKED, "--epsilon", 1)[1].startswith("Nothing fits at epsilon 1")
    assert run("--owners", 4000, *ASKED, "--epsilon", 8)[1].startswith("Nothing is recommended at epsilon 8")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--topics", 34, "--questions", 9), "--values"),
        (("--topics", 34, "--values", "many", "--questions", 9), "--values"),
        (("--topics", 34, "--values", "", "--questions", 9), "--values"),
        (("--topics", 34, "--values", "1", "--questions", 9), "values"),
        (("--topics", 0, "--values", "9", "--questions", 9), "topics"),
        (("--topics", 34, "--values", "9", "--questions", 0), "questions"),
        ((*ASKED, "--near", 2), "near"),
        ((*ASKED, "--fits", 2), "--fits"),
        ((*ASKED, "--write", "server.yaml"), "--write"),
        (("--labels", 3, "--values", "9", "--questions", 9), "--values"),
    ],
)
def test_bad_input_is_refused_by_name(more: Any, said: str, run: Any) -> None:
    code, _, err = run("--owners", 800, *more)
    assert code == 1
    assert said in err


def test_an_inquiry_without_values_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="values"):
        replace(STUDY, values=())
