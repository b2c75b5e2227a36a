"""`gated_votes`, `gated_report` and the command `gated_study`: what is read, kept, and made of it.

The end-to-end tests run the whole command; only the model and the embeddings are made up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gated_study
import numpy as np
import pytest
from evaluation_fakes import unit
from gated_pictures import draw_stream
from gated_report import Comparison, Plans, Workload
from gated_stream import Question
from gated_votes import Leanings, Reading, Table

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.evaluation.passes import PassFile, Row
from langchain_dpicl.evaluation.report import write_index
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.privacy.mechanisms import LineRequest
from langchain_dpicl.privacy.noise import SecureRandomness

LABELS = ("Number", "Location", "Person", "Description", "Entity", "Abbreviation")


class CopyingReader:
    """Says its example's label, else what ``empty`` says; ``asked`` has all prompts."""

    def __init__(self, empty: int = 0) -> None:
        self.empty = empty
        self.asked: list[tuple[tuple[str, str] | None, str]] = []

    def scores(self, examples: Sequence[tuple[str, str] | None], query: str) -> np.ndarray[Any, Any]:
        self.asked += [(example, query) for example in examples]
        places = [self.empty if example is None else LABELS.index(example[1]) for example in examples]
        return np.where(np.arange(6) == np.array(places)[:, None], 0.6, 0.08)


def circle(angles: Sequence[float]) -> np.ndarray[Any, Any]:
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


# -- reading -----------------------------------------------------------------------------------------------------------


def table_of(path: Path, reader: CopyingReader, **settings: int) -> Table:
    rows = [Row(f"text {i}", LABELS[i % 6], (LABELS[i % 6],)) for i in range(40)]
    vectors = circle(np.linspace(0, 3, 40)), circle([0.0, 3.0]), circle(np.linspace(0, 3, 11))
    sizes = {"pool": 12, "nearest": 3, "reach": 30, "blind": 5} | settings
    public = [(f"public {label}", label) for label in LABELS]
    file = PassFile(path, sizes)
    return Table(
        file, rows, public, lambda: (reader, reader), lambda: vectors, SecureRandomness(), shares=[0.5], **sizes
    )


def test_a_query_is_read_with_its_nearest_owners_and_those_of_the_pool(tmp_path: Path) -> None:
    reader = CopyingReader()
    table = table_of(tmp_path / "votes.jsonl", reader)
    reading = table.reading(1, "second")
    assert reading.near[:5].tolist() == [39, 38, 37, 36, 35]
    assert len(reading.near) == 30
    assert reading.bar[0.5] == pytest.approx(np.cos(1.5), abs=1e-4)  # the middle one of the public texts
    inside = np.flatnonzero(reading.similarity >= reading.bar[0.5])
    assert len(inside) == 20
    pool = set(table._pool.tolist())
    assert len(pool) == 12
    assert reading.read.tolist() == [i for i in inside.tolist() if i < 3 or reading.near[i] in pool]
    assert len(reading.blind) == 5
    shown = [example for example, _ in reader.asked]
    assert shown.count(None) == 1
    blind = shown[len(reading.read) : -1]
    assert {int(example[0].split()[1]) for example in blind if example} <= pool


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    first, second = CopyingReader(), CopyingReader()
    table = table_of(tmp_path / "votes.jsonl", first)
    kept, leanings = table.reading(0, "first"), table.leanings(["one", "two"])
    assert len([query for _, query in first.asked if query == "one"]) == 7
    table._file.close()
    again = table_of(tmp_path / "votes.jsonl", second)
    same = again.reading(0, "first")
    assert np.array_equal(same.scores, kept.scores)
    assert np.array_equal(same.read, kept.read)
    assert np.array_equal(again.leanings(["one", "two"]).single, leanings.single)
    assert second.asked == []


def test_leanings_are_geometric_means_of_what_public_prompts_say(tmp_path: Path) -> None:
    found = table_of(tmp_path / "votes.jsonl", CopyingReader(empty=2)).leanings(["one", "two"])
    assert found.single == pytest.approx(np.full(6, 0.6 ** (1 / 6) * 0.08 ** (5 / 6)))
    assert found.public == pytest.approx([0.08, 0.08, 0.6, 0.08, 0.08, 0.08])


def test_an_owner_that_was_not_read_says_what_the_nearest_one_of_its_label_says() -> None:
    scores = np.eye(6)[[3, 4, 5]] + 0.01
    reading = Reading(
        near=np.array([5, 0, 6, 1, 7]),
        similarity=np.array([0.9, 0.8, 0.5, 0.4, 0.1]),
        bar={0.1: 0.3, 0.2: 0.0},
        read=np.array([0, 1, 3]),
        scores=scores,
        blind=np.eye(6)[[1, 2]] + 0.01,
        empty=np.eye(6)[0] + 0.01,
    )
    label_of = np.array([1, 0, 0, 0, 0, 0, 0, 2])  # 5: label 0, 0: label 1, 6: label 0, 1: label 0, 7: label 2
    even = Leanings(np.ones(6), np.ones(6))
    asked = reading.question(0.2, label_of, even, right=3)
    assert asked.eligible.tolist() == [5, 0, 6, 1, 7]
    assert asked.votes.tolist() == [
        3,
        4,
        5,
        5,
        5,
    ]  # 6 like 1, which is nearer than 5; 7 like 1, the nearest of any label
    assert reading.question(0.1, label_of, even, right=3).votes.tolist() == [3, 4, 5, 5]
    assert (asked.empty, asked.blind.tolist(), asked.right) == (0, [1, 2], 3)
    leaning = Leanings(np.array([1, 1, 1, 1, 1e9, 1.0]), np.array([1e9, 1, 1, 1, 1, 1.0]))
    changed = reading.question(0.1, label_of, leaning, right=3)
    assert changed.votes[1] != 4
    assert changed.empty != 0


# -- plans and scores --------------------------------------------------------------------------------------------------


def test_both_plans_are_solved_for_the_same_epsilon_and_delta() -> None:
    plans = Plans(owners=1000, members=10, delta=1e-5)
    gated, blind = plans.gated(Workload(500, 0.05, 2.0, 1.5), 3.0), plans.blind(500, 3.0)
    assert (gated.members, gated.rate, gated.releases) == (10, 0.4, 38)
    assert (blind.members, blind.rate, blind.releases) == (10, 0.01, 500)
    for side in (gated, blind):
        request = LineRequest("vote", side.rate, side.releases)
        plan = PrivacyPlan.solve(epsilon=3.0, delta=1e-5, lines={"vote": request})
        assert side.sigma == plan.lines["vote"].parameter
        assert plan.certified_epsilon <= 3.0


@pytest.mark.parametrize(
    "text", ["", "a:0.1:1:1", "0:0.1:1:1", "10:0:1:1", "10:1.5:1:1", "10:0.1:0:1", "10:0.1:1:0", "10"]
)
def test_workloads_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match="workload"):
        Workload.of(text)


def test_scores_are_right_where_nothing_is_left_to_chance(seeded: Any) -> None:
    """Three questions at epsilon 1000, so that noise (sigma .2) moves nothing: near owners are right, blind ones are
    not; of the third question neither."""
    everyone = np.arange(200)
    asked = [Question(everyone, np.full(200, right), np.array([5]), 5, right) for right in (0, 1)]
    asked.append(Question(everyone[:0], everyone[:0], np.array([5]), 5, 2))
    plans = Plans(owners=200, members=4, delta=1e-4)
    compared = Comparison(asked, 6, plans, seeded(1), samples=2, draws=2)
    scores = {(s.method, s.epsilon): s for s in compared.workload(Workload(30, 1.0, 12.0, 2.0), [1000.0])}
    assert scores["gated", 1000.0].values["accuracy"].mean == pytest.approx(200 / 3, abs=0.5)
    assert scores["blind", 1000.0].values["accuracy"].mean == 0.0
    assert scores["gated", None].values["accuracy"].mean == pytest.approx(200 / 3)
    assert (scores["gated", 1000.0].runs, scores["gated", 1000.0].queries) == (4, 3)
    stream = compared.stream(400, 1.0, 1000.0, {"gated": plans.gated(Workload(400, 1.0), 1000.0)}, 2)
    assert len(stream["queries"]) == len(stream["public"]) == 20
    short = {"blind, T 100": plans.blind(100, 1000.0)}
    curve = compared.stream(400, 1.0, 1000.0, short, 2)["sides"]["blind, T 100"]["accuracy"]
    assert curve == [0.0] * 5 + [None] * 15


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """120 records and 130 queries of 6 kinds; a text's kind is its first letter."""

    def write(name: str, count: int, words: str) -> str:
        records = [{"text": f"{'abcdef'[i % 6]} {words} {i}", "label": LABELS[i % 6]} for i in range(count)]
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(tmp_path / name)

    options = ["--task", "trec", "--data", write("train.jsonl", 120, "r"), "--test", write("test.jsonl", 130, "q")]
    options += ["--public", write("public.jsonl", 6, "p"), "--output", str(tmp_path / "study" / "gated-trec")]
    options += [
        "--queries",
        "12",
        "--pool",
        "60",
        "--members",
        "4",
        "--public-texts",
        "110",
        "--share",
        "0.15",
        "--workload",
        "40:0.15:2:2",
    ]
    return [*options, "20:0.15:2:1.5", "--stream", "200:0.15:1:1", "--streams", "2", "--samples", "2", "--epsilon", "3"]


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> CopyingReader:
    made = CopyingReader(empty=5)

    def vectors(texts: Sequence[str]) -> np.ndarray[Any, Any]:
        return circle(["abcdef".index(text[0]) + 0.3 * unit(text) for text in texts])

    monkeypatch.setattr(gated_study, "_readers", lambda *_: (made, made))
    monkeypatch.setattr(gated_study, "_embedded", lambda _, texts: vectors(texts))
    return made


@pytest.mark.slow
def test_the_command_reads_once_and_writes_what_the_index_shows(
    files: list[str], reader: CopyingReader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gated_study.main([*files, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    folder = tmp_path / "study" / "gated-trec"
    assert json.loads((folder / "results.json").read_text()) == results
    found = {(s["method"], s["epsilon"], s["study"]): s for s in results["scores"]}
    assert found["gated", None, ""]["values"]["accuracy"]["mean"] > 80  # near owners have the query's kind
    assert found["blind", None, ""]["values"]["accuracy"]["mean"] < 60
    assert found["gated", 3.0, ""]["facts"]["tickets"] == 12
    blind = [name for name in results["stream"]["sides"] if name.startswith("blind")]
    assert blind == ["blind, T 30", "blind, T 200"]
    answers = results["stream"]["sides"]["blind, T 30"]["accuracy"]
    assert [answer is None for answer in answers] == [False] * 3 + [True] * 17
    for name in ("accuracy.png", "stream.png", "queries.png", "table.md", "votes.jsonl"):
        assert (folder / name).stat().st_size > 0
    page = write_index(tmp_path / "study").read_text()
    assert "stream.png" in page
    assert "gated selection is" in page
    before = len(reader.asked)
    assert gated_study.main(files) == 0
    assert len(reader.asked) == before
    assert "| gated | 3 |" in capsys.readouterr().out


def test_no_file_of_the_report_shows_an_example(files: list[str], reader: CopyingReader, tmp_path: Path) -> None:
    assert gated_study.main(files) == 0
    for path in (tmp_path / "study" / "gated-trec").iterdir():
        assert b" r 1" not in path.read_bytes()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (["--task", "samsum"], "task"),
        (["--queries", "21"], "queries"),
        (["--public-texts", "19"], "public_texts"),
        (["--share", "0.2"], "share"),
        (["--stream", "x"], "workload"),
    ],
)
def test_bad_options_end_in_one_line(
    files: list[str], reader: CopyingReader, capsys: pytest.CaptureFixture[str], change: list[str], word: str
) -> None:
    assert gated_study.main([*files, *change]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"gated_study: {word}=")
    assert reader.asked == []


@pytest.mark.slow
def test_a_study_may_report_on_what_was_read_so_far(
    files: list[str], reader: CopyingReader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gated_study.main([*files, "--as-read"]) == 1
    assert "gated_study: as_read=True" in capsys.readouterr().err
    assert gated_study.main([*files, "--queries", "5"]) == 0
    before = len(reader.asked)
    capsys.readouterr()
    assert gated_study.main([*files, "--as-read", "--json"]) == 0
    assert len(reader.asked) == before
    results = json.loads(capsys.readouterr().out)
    assert results["settings"]["queries"] == 5


def test_a_stopped_study_does_not_go_on_with_other_settings(
    files: list[str], reader: CopyingReader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gated_study.main(files) == 0
    assert gated_study.main([*files, "--pool", "61"]) == 1
    assert "gated_study: pool=61" in capsys.readouterr().err


def test_sections_of_dialogues_become_words_and_rare_ones_are_left_out(tmp_path: Path) -> None:
    records = [{"input": "Doctor: any\nallergy at all?", "label": "ALLERGY"}, {"input": "x", "label": "LABS"}]
    path = tmp_path / "mts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (row,) = gated_study._known(None, gated_study.TASKS["mts_section"], str(path), 2, "train")
    assert (row.input, row.output) == ("Doctor: any", "Allergies")


def test_a_spent_blind_plan_ends_in_the_picture() -> None:
    ends = list(range(100, 2001, 100))
    plan = {"q": 0.1, "T": 500, "sigma": 1.0}
    curve: dict[str, Any] = {"holding": [50.0] * 20, "taking part": [60.0] * 20, "plan": plan}
    sides = {
        "gated": {"accuracy": [70.0] * 20, **curve},
        "blind, T 500": {"accuracy": [50.0] * 5 + [None] * 15, **curve},
    }
    drawn = draw_stream("x", {"queries": ends, "epsilon": 3.0, "repeats": 2, "public": [40.0] * 20, "sides": sides})
    above, below = drawn.axes
    lengths = {line.get_label(): len(np.asarray(line.get_xdata())) for line in above.lines}
    assert lengths == {"gated": 20, "blind, T 500": 5, "its 500 queries are spent": 2, "public prompt alone": 20}
    assert len(below.lines) == 2
