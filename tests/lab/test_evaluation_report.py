"""`evaluation.report`: strict numbers, tables and sentences that follow from them, pictures that show each number."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.errors import InvalidParameter, MissingExtra
from langchain_dpicl.lab.evaluation.evaluate import CostPoint, cost_curve
from langchain_dpicl.lab.evaluation.findings import findings
from langchain_dpicl.lab.evaluation.passes import EvaluationPlan
from langchain_dpicl.lab.evaluation.pictures import pictures
from langchain_dpicl.lab.evaluation.report import main_table, papers_table, write_index, write_report
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.scores import Score, Value
from langchain_dpicl.lab.evaluation.tasks import TASKS
from langchain_dpicl.lab.plots import figure_of

PLAN: dict[str, Any] = {"members": 10, "shots": 4, "rate": 0.01, "releases": 10_000, "delta": 1e-5}
SETTINGS: dict[str, Any] = {"model": "a model", **PLAN, "command": "dpicl evaluate trec --data trec"}
PNG = b"\x89PNG\r\n\x1a\n"


def score(
    method: str, epsilon: float | None, mean: float, *, deviation: float = 1.0, error: float = 0.1, **more: Any
) -> Score:
    """An accuracy of 4 runs over 300 queries."""
    study = more.pop("study", "")
    return Score(method, epsilon, {"accuracy": Value(mean, deviation, error)}, 4, 300, more, study)


def main_scores() -> list[Score]:
    return [
        score("vote", 3.0, 45.5, flipped=4.0, sigma=1.5, **PLAN),
        score("vote", 1.0, 44.25, flipped=9.0, sigma=3.58, **PLAN),
        score("vote", None, 46.0, **PLAN),
        score("zero-shot", None, 31.0, deviation=math.nan),
        score("zero-shot calibrated", None, 33.0, deviation=math.nan),
        score("4-shot", None, 38.0),
        score("public 4-shot", None, 37.0),
    ]


def study_scores(name: str, values: Sequence[float]) -> list[Score]:
    return [
        score("vote", epsilon, 40.0 + place, study=name, **{**PLAN, name: value})
        for place, value in enumerate(values)
        for epsilon in (None, 1.0)
    ]


def costs(price: float = 3.0) -> list[CostPoint]:
    plan = EvaluationPlan(owners=4000, members=10, shots=4, releases=10, delta=1e-5, epsilons=(8.0,))
    return cost_curve((30.0, 30.0, 2.0), plan, price_in=price, price_out=5 * price)


def strict(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text("utf-8"), parse_constant=refuse)


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]


def drawn(file: str, scores: Sequence[Score], points: Sequence[CostPoint] = ()) -> Any:
    charts, title = pictures("trec", scores, points)[file]
    return figure_of(charts, file, title)


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


# -- files -------------------------------------------------------------------------------------------------------------


def test_everything_is_written_and_every_picture_is_one(tmp_path: Path) -> None:
    everything = [*main_scores(), *study_scores("members", [5, 10, 40]), *study_scores("releases", [10, 1000])]
    results = write_report(tmp_path / "new" / "trec", TASKS["trec"], everything, SETTINGS, costs())
    assert results["pictures"] == ["accuracy.png", "members.png", "releases.png", "flips.png", "cost.png"]
    for name in results["pictures"]:
        content = (tmp_path / "new" / "trec" / name).read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 5000
    assert strict(tmp_path / "new" / "trec" / "results.json") == results
    assert len(results["scores"]) == len(everything)
    assert len(results["costs"]) == 10


def test_json_is_strict_whatever_the_settings_and_facts_hold(tmp_path: Path) -> None:
    odd = {"nothing": math.nan, "all": math.inf, "file": Path("a.jsonl"), "n": np.int64(3), "x": np.float64(0.5)}
    odd |= {"grid": np.array([1.0, math.nan]), "epsilon": (1.0, 3.0), "yes": True, "model": None}
    found = [score("vote", 1.0, 40.0, deviation=math.nan, error=math.nan, sigma=math.inf)]
    write_report(tmp_path, TASKS["trec"], found, odd)
    held = strict(tmp_path / "results.json")
    assert held["settings"] == {
        "nothing": None,
        "all": None,
        "file": "a.jsonl",
        "n": 3,
        "x": 0.5,
        "grid": [1.0, None],
        "epsilon": [1.0, 3.0],
        "yes": True,
        "model": None,
    }
    assert held["scores"][0]["facts"] == {"sigma": None}
    assert held["scores"][0]["values"]["accuracy"] == {"mean": 40.0, "deviation": None, "error": None}


def test_without_matplotlib_numbers_and_table_are_kept_and_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"pip install \"langchain-dpicl\[eval\]\""):
        write_report(tmp_path, TASKS["trec"], main_scores(), SETTINGS)
    assert strict(tmp_path / "results.json")["finding"]
    assert "| vote | 1 | 44.2 ± 1.0 |" in (tmp_path / "table.md").read_text("utf-8")
    assert not list(tmp_path.glob("*.png"))


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(InvalidParameter, match=r"folder=.*taken.*can be written"):
        write_report(tmp_path / "taken", TASKS["trec"], main_scores(), SETTINGS)


# -- tables and sentences ----------------------------------------------------------------------------------------------


def test_the_table_says_what_was_measured_and_each_method_beside_its_own_reference(tmp_path: Path) -> None:
    results = write_report(tmp_path, TASKS["trec"], main_scores(), SETTINGS)
    assert results["measured"] == (
        "trec with a model: 300 queries, 4 runs, 10 members, 4 shots each, sampling rate 0.01, 10,000 releases, "
        "delta 1e-05."
    )
    assert rows(results["table"]) == [
        ["method", "epsilon", "accuracy", "against no noise", "changed by noise", "public numbers"],
        ["---"] * 6,
        ["zero-shot", "public", "31.0", "", "", ""],
        ["zero-shot calibrated", "public", "33.0", "", "", ""],
        ["4-shot", "not private", "38.0 ± 1.0", "", "", ""],
        ["public 4-shot", "public", "37.0 ± 1.0", "", "", ""],
        ["vote", "not private", "46.0 ± 1.0", "", "", ""],
        ["vote", "1", "44.2 ± 1.0", "-1.8", "9.0 %", "sigma 3.58"],
        ["vote", "3", "45.5 ± 1.0", "-0.5", "4.0 %", "sigma 1.5"],
    ]
    text = (tmp_path / "table.md").read_text("utf-8")
    assert text.endswith("```\ndpicl evaluate trec --data trec\n```\n")


def test_a_table_has_the_measures_of_its_scores_in_their_order() -> None:
    held = [Score("mine", 1.0, {"meaning": Value(4.0), "bleu": Value(3.0)}, 1, 1, PLAN)]
    table = rows(main_table(held, "bleu", {}))
    assert table[0][:4] == ["method", "epsilon", "BLEU", "meaning"]
    assert table[2][:4] == ["mine", "1", "3.0", "4.0"]


def test_a_single_query_and_run_are_counted_in_the_singular(tmp_path: Path) -> None:
    held = [Score("mine", 1.0, {"rougeL": Value(3.0)}, 1, 1, PLAN)]
    found = write_report(tmp_path, TASKS["e2e"], held, PLAN)
    assert found["measured"].startswith("e2e: 1 query, 1 run, 10 members, ")
    assert "against no noise" not in found["table"]
    assert found["pictures"] == ["rougeL.png"]


def test_an_ablation_is_a_row_for_each_value_and_a_column_for_each_epsilon(tmp_path: Path) -> None:
    write_report(tmp_path, TASKS["trec"], [*main_scores(), *study_scores("top_k", [100, 5, 20])], SETTINGS)
    _, text = (tmp_path / "table.md").read_text("utf-8").split("## accuracy against top k")
    assert rows(text.split("**Published")[0]) == [
        ["top k", "vote, not private", "vote, epsilon 1"],
        ["---"] * 3,
        ["5", "41.0 ± 1.0", "41.0 ± 1.0"],
        ["20", "42.0 ± 1.0", "42.0 ± 1.0"],
        ["100", "40.0 ± 1.0", "40.0 ± 1.0"],
    ]


def test_shown_texts_stand_below_their_query_beside_the_right_answer(tmp_path: Path) -> None:
    values = {"rougeL": Value(3.0)}
    held = [
        Score("zero-shot", None, values, 1, 2, texts=["a pub", "an inn"]),
        Score("online", 1.0, values, 1, 2, texts=["a\nbar", ""], least_weights=[0.5, math.nan, 0.25]),
    ]
    shown = [Row("name[Blue]", "a blue pub", ()), Row("name[Red]", "a red inn", ())]
    results = write_report(tmp_path, TASKS["e2e"], held, PLAN, shown=shown)
    _, text = (tmp_path / "table.md").read_text("utf-8").split("## Some texts")
    assert [part for part in text.splitlines() if part.startswith("*")] == ["*name[Blue]*", "*name[Red]*"]
    head, private = ["method", "epsilon", "text"], ["---"] * 3
    assert rows(text) == [
        *(head, private, ["right", "", "a blue pub"], ["zero-shot", "public", "a pub"], ["online", "1", "a bar"]),
        *(head, private, ["right", "", "a red inn"], ["zero-shot", "public", "an inn"], ["online", "1", ""]),
    ]
    assert "least_weights.png" in results["pictures"]
    assert results["scores"][1]["least_weights"] == [0.5, None, 0.25]
    (curve,) = drawn("least_weights.png", held).axes[0].lines
    assert curve.get_xydata()[[0, 2]].tolist() == [[1.0, 0.5], [3.0, 0.25]]


def test_a_bar_in_a_name_stays_in_its_cell() -> None:
    assert "| a\\|b | 1 |" in main_table([score("a|b", 1.0, 40.0)], "accuracy", {})


def test_the_finding_is_the_best_method_at_the_least_epsilon_against_its_own_reference() -> None:
    held = [*main_scores(), score("scores", None, 50.0), score("scores", 1.0, 44.0)]
    assert findings(held, "accuracy") == [
        "At epsilon 1 the best private method, vote, has accuracy 44.2, 1.8 points below itself without noise "
        "(46.0) and 11.2 points above zero-shot calibrated (33.0)."
    ]
    alone = [score("other", 2.0, 44.0), score("zero-shot", None, 44.01)]
    assert findings(alone, "accuracy") == [
        "At epsilon 2 the best private method, other, has accuracy 44.0, level with zero-shot (44.0)."
    ]


def test_an_ensemble_that_is_not_above_zero_shot_is_said_to_learn_nothing() -> None:
    held = [score("vote", None, 33.0), score("vote", 1.0, 32.0), score("zero-shot", None, 20.0)]
    calibrated = score("zero-shot calibrated", None, 33.0)
    nothing = "learns nothing from the examples: without noise vote has 33.0, zero-shot calibrated 33.0"
    assert findings([*held, calibrated], "accuracy")[1:] == [f"Here the model {nothing}."]
    few = [*held, calibrated, score("4-shot", None, 39.0)]
    assert findings(few, "accuracy")[1:] == [f"Here the ensemble {nothing}, though one 4-shot prompt has 39.0."]
    other = [score("scores", None, 40.0), score("scores", 1.0, 39.0)]
    assert findings([*held, calibrated, *other], "accuracy")[1:] == [f"With vote, the model {nothing}."]
    assert len(findings(held, "accuracy")) == 1  # 13 points above zero-shot alone


def test_a_gain_within_two_standard_errors_is_said_to_be_perhaps_chance() -> None:
    def told(gain: float) -> list[str]:
        held = [score("zero-shot", None, 30.0, error=3.0), score("vote", None, 30.0 + gain, error=4.0)]
        return findings([*held, score("vote", 1.0, 30.0 + gain)], "accuracy")[1:]

    assert len(told(9.9)) == 1
    assert "vote 9.9 (5.0)" in told(9.9)[0]
    assert told(10.1) == []


def test_noise_that_takes_all_that_examples_bring_is_said() -> None:
    held = [score("zero-shot", None, 30.0), score("vote", None, 40.0)]
    held += [score("vote", epsilon, 20.0 + 5 * epsilon) for epsilon in (1.0, 2.0, 3.0)]
    assert findings(held, "accuracy")[1:] == [
        "Noise takes all that the examples bring, and zero-shot is as good: vote at epsilon 1 and 2."
    ]


# -- the papers --------------------------------------------------------------------------------------------------------


def summaries() -> list[Score]:
    def told(method: str, epsilon: float | None, level: float) -> Score:
        values = {"rouge1": Value(level + 5), "rouge2": Value(level - 10), "rougeL": Value(level)}
        return Score(method, epsilon, values, 1, 100)

    return [
        told("4-shot", None, 26.0),
        told("embedding", None, 25.0),
        told("embedding", 1.0, 22.5),
        told("embedding", 2.0, 23.0),
        told("online", 2.0, 25.5),
        told("online", 3.0, 25.6),
    ]


def beside(method: str, epsilon: str, model: str = "") -> list[list[str]]:
    """What stands of a method: measure, published, lost, here, lost here."""
    found = rows(papers_table(TASKS["samsum"], summaries()))
    return [row[3:8] for row in found if row[0] == method and row[2] == epsilon and model in row[1]]


def test_published_figures_are_named_as_other_models_numbers() -> None:
    found = papers_table(TASKS["samsum"], summaries())
    assert found.startswith("**Published figures are other models' numbers**")
    assert len(rows(found)) == 2 + len(TASKS["samsum"].paper)
    for place, source in enumerate(dict.fromkeys(figure.source for figure in TASKS["samsum"].paper), 1):
        assert found.count(f"\n{place}. {source}.") == 1
    assert papers_table(TASKS["agnews"], main_scores()) == "", "no figure was read for it"


def test_ours_stands_beside_theirs_of_the_same_method_and_epsilon_only() -> None:
    assert beside("ESA", "1") == [
        ["ROUGE-1", "38.2", "", "27.5", "-2.5"],
        ["ROUGE-2", "14.6", "", "12.5", "-2.5"],
        ["ROUGE-L", "29.9", "", "22.5", "-2.5"],
    ]
    assert beside("ESA", "3")[2] == ["ROUGE-L", "30.7", "-1.6", "", ""]
    assert beside("ESA without noise", "no noise")[2] == ["ROUGE-L", "32.3", "", "25.0", ""]
    assert beside("4-shot", "no noise")[2] == ["ROUGE-L", "34.8", "", "26.0", ""]
    assert beside("DPS-MOZO", "2") == [["ROUGE-L", "", "-0.3 to few-shot", "25.5", "-0.5 to few-shot"]]
    assert beside("DP-ICL", "8", "davinci")[0] == ["ROUGE-1", "41.2", "", "", ""]


def test_a_vote_of_ours_stands_beside_their_noisy_max() -> None:
    scores = [score("vote", None, 46.0), score("vote", 8.0, 45.5)]
    found = rows(papers_table(TASKS["trec"], scores))
    assert [row[4:7] for row in found[2:]] == [["26.3", "45.5", "-0.5"], ["16.2", "45.5", "-0.5"]]


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_the_main_picture_has_a_curve_a_reference_and_lines_from_high_to_low() -> None:
    figure = drawn("accuracy.png", main_scores())
    (axes,) = figure.axes
    assert legend(figure) == [
        "vote",
        "vote, not private: 46.0",
        "4-shot, not private: 38.0",
        "public 4-shot: 37.0",
        "zero-shot calibrated: 33.0",
        "zero-shot: 31.0",
    ]
    curve, reference = axes.lines[0], next(line for line in axes.lines if "not private" in line.get_label())
    assert curve.get_xydata().tolist() == pytest.approx(np.array([[1.0, 44.25], [3.0, 45.5]]))
    assert curve.get_color() == reference.get_color()
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "3"]
    assert "bars: deviation over runs" in axes.get_ylabel()


def test_one_epsilon_and_no_deviation_make_a_point_without_bars() -> None:
    held = [score("vote", 1.0, 40.0, deviation=math.nan)]
    figure = drawn("accuracy.png", held)
    (axes,) = figure.axes
    assert legend(figure) == ["vote"]
    assert not axes.containers
    low, high = axes.get_xlim()
    assert (low, high) == pytest.approx((0.5, 2.0))


def test_curves_of_several_methods_stand_aside_by_less_than_a_marker_tells() -> None:
    held = [score(method, epsilon, 40.0) for method in ("vote", "mine", "yours") for epsilon in (1.0, 8.0)]
    curves = [
        line for line in drawn("accuracy.png", held).axes[0].lines if line.get_label() in ("vote", "mine", "yours")
    ]
    firsts = [float(line.get_xdata()[0]) for line in curves]
    assert len({line.get_color() for line in curves}) == len(set(firsts)) == 3
    assert all(abs(math.log(first)) < 0.02 * math.log(8.0) for first in firsts)


@pytest.mark.parametrize(("values", "scale"), [([5, 10, 50], "linear"), ([5, 10, 51], "log"), ([0, 4], "linear")])
def test_an_ablation_has_a_curve_for_each_epsilon_and_a_log_axis_beyond_tenfold(
    values: list[float], scale: str
) -> None:
    figure = drawn("shots.png", study_scores("shots", values))
    assert legend(figure) == ["vote, not private", "vote, epsilon 1"]
    assert figure.axes[0].get_xscale() == scale
    assert figure.axes[0].get_title() == "trec: accuracy against shots"


def test_ticks_that_have_no_room_are_left_out() -> None:
    figure = drawn("shots.png", study_scores("shots", list(range(1, 101))))
    assert 5 <= len(figure.axes[0].get_xticks()) <= 11


def test_flips_are_drawn_in_per_cent_where_they_are_known() -> None:
    (curve,) = drawn("flips.png", main_scores()).axes[0].lines
    assert curve.get_xydata().tolist() == [[1.0, 9.0], [3.0, 4.0]]
    assert "flips.png" not in pictures("trec", [score("vote", 1.0, 40.0)], ())


def test_the_cost_picture_has_a_price_only_where_there_is_one() -> None:
    def labels(price: float) -> list[str]:
        return [axes.get_ylabel() for axes in drawn("cost.png", main_scores(), costs(price)).axes]

    assert labels(0.0) == ["tokens per 100 queries"]
    assert labels(3.0) == ["tokens per 100 queries", "price per 100 queries"]


def test_cost_against_accuracy_stands_at_the_cost_of_the_members_and_the_rate() -> None:
    held = [score("vote", 1.0, 40.0 + n, study="members", members=n, shots=4, rate=4 * n / 4000) for n in (7, 20)]
    figure = drawn("cost.png", held, costs())
    (curve, *_) = figure.axes[2].lines
    tokens = {n: 100 * (n * 30.0 + 4 * n * 30.0) for n in (7, 20)}
    prices = [(3.0 * tokens[n] + 15.0 * 100 * n * 2.0) / 1e6 for n in (7, 20)]
    assert curve.get_xdata().tolist() == pytest.approx(prices)
    assert [tick.get_text().split("\n")[1] for tick in figure.axes[2].get_xticklabels()] == ["(7)", "(20)"]


# -- the index ---------------------------------------------------------------------------------------------------------


def test_the_index_holds_every_folder_its_pictures_and_what_was_written_by_hand(tmp_path: Path) -> None:
    write_report(tmp_path / "trec", TASKS["trec"], [*main_scores(), *study_scores("members", [5, 10])], SETTINGS)
    (tmp_path / "trec" / "notes.md").write_text("By hand.\n", encoding="utf-8")
    (tmp_path / "trec" / "old.png").write_bytes(PNG)
    (tmp_path / "trec" / "flips.png").unlink()
    (tmp_path / "unfinished").mkdir()
    path = write_index(tmp_path)
    first = path.read_text("utf-8")
    order = ["- [trec](#trec)", "## trec", "trec with a model: 300", "At epsilon 1", "| vote | 1 |", "By hand."]
    order += ["(trec/accuracy.png)", "(trec/members.png)", "```\ndpicl evaluate trec", "[table.md](trec/table.md)"]
    places = [first.find(each) for each in order]
    assert -1 not in places
    assert places == sorted(places)
    assert "old.png" not in first  # of another run
    assert "flips.png" not in first  # not there
    assert "unfinished" not in first
    assert write_index(tmp_path).read_text("utf-8") == first


def test_the_index_takes_a_study_of_decoding_with_its_own_table_and_pictures(tmp_path: Path) -> None:
    (tmp_path / "decoding").mkdir()
    results = {"settings": {"model": "small", "epsilon": [1.0, 2.0], "delta": None}, "methods": [], "table": "| a |"}
    (tmp_path / "decoding" / "results.json").write_text(json.dumps(results))
    for name in ("weights.png", "rouge.png"):
        (tmp_path / "decoding" / name).write_bytes(PNG)
    text = write_index(tmp_path).read_text("utf-8")
    for each in ("model small; epsilon 1, 2\n", "| a |", "(decoding/rouge.png)", "(decoding/weights.png)"):
        assert each in text
    assert "delta" not in text


def test_the_index_links_a_page_that_was_written_by_hand(tmp_path: Path) -> None:
    write_report(tmp_path / "trec", TASKS["trec"], main_scores(), SETTINGS)
    for name in ("audit", "trec"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "README.md").write_text("# By hand\n", encoding="utf-8")
    text = write_index(tmp_path).read_text("utf-8")
    assert "- [audit](audit/README.md)\n- [trec](#trec)\n" in text
    assert "trec/README.md" not in text


@pytest.mark.parametrize("content", ["{", "[]", '{"settings": 3}', "\udcff"])
def test_the_index_refuses_what_no_evaluation_wrote_and_names_the_folder(tmp_path: Path, content: str) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "results.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidParameter, match=r"folder=.*odd.*results"):
        write_index(tmp_path)


def test_an_index_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="sub-folders that hold a results"):
        write_index(tmp_path)
