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
from gated_report import BUCKETS, CALLS, METHODS, NO_NOISE, OWN, PUBLIC, Blocks, Question, Study, Workload
from gated_votes import Reading, Table

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.evaluation.passes import PassFile
from langchain_dpicl.lab.evaluation.report import write_index
from langchain_dpicl.lab.evaluation.rows import Row
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


def table_of(path: Path, reader: CopyingReader) -> Table:
    """Forty owners and eleven public texts along half a circle."""
    rows = [Row(f"text {i}", LABELS[i % 6], (LABELS[i % 6],)) for i in range(40)]
    vectors = circle(np.linspace(0, 3, 40)), circle(np.linspace(0, 3, 11))
    public = [(f"public {label}", label) for label in LABELS]
    file = PassFile(path, {})
    return Table(file, rows, public, lambda: (reader, reader), lambda: vectors, SecureRandomness(), {0.2: 3, 0.5: 5})


def test_a_query_is_read_with_owners_drawn_from_those_behind_each_gate(tmp_path: Path) -> None:
    reader = CopyingReader()
    reading = table_of(tmp_path / "votes.jsonl", reader).reading("last", lambda: circle([3.0])[0])
    assert reading.near.tolist() == list(range(39, 19, -1))  # the wider gate admits half
    assert reading.eligible(0.5).tolist() == reading.near.tolist()
    narrow = reading.eligible(0.2).tolist()
    assert narrow == list(range(39, 39 - len(narrow), -1))
    assert 5 < len(narrow) < 12
    shown = [int(example[0].split()[1]) for example, _ in reader.asked if example]
    assert len(set(shown)) == len(shown)
    even = np.ones(6)
    for share, count in ((0.2, 3), (0.5, 5)):
        drawn, votes = reading.votes(share, even)
        assert len(set(drawn.tolist())) == count
        assert set(drawn.tolist()) <= set(reading.eligible(share).tolist()) & set(shown)
        assert votes.tolist() == [owner % 6 for owner in drawn.tolist()]
    assert [example for example, _ in reader.asked].count(None) == 1


def test_owners_are_drawn_evenly_behind_each_gate_though_both_are_read(tmp_path: Path) -> None:
    """The nearest owner is one of 20 behind the wide gate: it is drawn with 5 in 400 queries with probability 1/4. Had
    the narrow gate's reads been counted too, it would be in more than 40 %. False alarm: below 1e-6 (5 deviations)."""
    table, even = table_of(tmp_path / "votes.jsonl", CopyingReader()), np.ones(6)
    readings = [table.reading(f"text {i}", lambda: circle([3.0])[0]) for i in range(400)]
    found = sum(39 in reading.votes(0.5, even)[0] for reading in readings)
    assert abs(found - 100) < 5 * (400 * 0.25 * 0.75) ** 0.5


def test_an_owner_is_not_asked_about_itself(tmp_path: Path) -> None:
    table = table_of(tmp_path / "votes.jsonl", CopyingReader())
    assert 39 not in table.reading("text 39", lambda: circle([3.0])[0], but=39).near
    assert 39 in table.reading("text 39", lambda: circle([3.0])[0]).near  # the same text as a new query


def test_a_gate_with_a_share_of_one_admits_all_owners_and_a_pool_stands_for_them(tmp_path: Path) -> None:
    rows = [Row(f"text {i}", LABELS[i % 6], (LABELS[i % 6],)) for i in range(40)]
    vectors, reader = (circle(np.linspace(0, 3, 40)), circle([0.0, 0.1])), CopyingReader()
    file = PassFile(tmp_path / "votes.jsonl", {})
    table = Table(file, rows, [], lambda: (reader, reader), lambda: vectors, SecureRandomness(), {1.0: 9}, pool=4)
    drawn = {tuple(sorted(table.reading(f"q {i}", lambda: circle([0.0])[0]).votes(1.0, np.ones(6))[0])) for i in (1, 2)}
    assert len(drawn) == 1
    assert len(drawn.pop()) == 4
    assert len(table.reading("q 1", lambda: circle([0.0])[0]).eligible(1.0)) == 40


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    first, second = CopyingReader(), CopyingReader()
    table = table_of(tmp_path / "votes.jsonl", first)
    kept, leanings = table.reading("first", lambda: circle([0.0])[0]), table.leanings(["one", "two"])
    assert len([query for _, query in first.asked if query == "one"]) == 7
    table._file.close()
    again = table_of(tmp_path / "votes.jsonl", second)
    same = again.reading("first", lambda: pytest.fail("it was read"))
    assert np.array_equal(same.scores, kept.scores)
    assert np.array_equal(same.read, kept.read)
    assert np.array_equal(again.leanings(["one", "two"]).single, leanings.single)
    assert second.asked == []


def test_leanings_are_geometric_means_of_what_public_prompts_say(tmp_path: Path) -> None:
    found = table_of(tmp_path / "votes.jsonl", CopyingReader(empty=2)).leanings(["one", "two"])
    assert found.single == pytest.approx(np.full(6, 0.6 ** (1 / 6) * 0.08 ** (5 / 6)))
    assert found.public == pytest.approx([0.08, 0.08, 0.6, 0.08, 0.08, 0.08])


def test_a_vote_is_the_largest_score_divided_by_what_prompts_lean_to() -> None:
    scores = np.array([[0.5, 0.3], [0.2, 0.6]])
    reading = Reading(np.array([7, 9]), np.ones(2), {0.1: 0.5}, {0.1: 2}, np.array([1, 0]), scores, np.ones(2))
    assert [each.tolist() for each in reading.votes(0.1, np.array([1.0, 1.0]))] == [[9, 7], [0, 1]]
    assert reading.votes(0.1, np.array([2.0, 1.0]))[1].tolist() == [1, 1]


# -- votes and scores --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a:0.1:1", "0:0.1:1", "10:0:1", "10:1.5:1", "10:0.1:0", "10", "10:0.1:1:1"])
def test_workloads_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match="workload"):
        Workload.of(text)


def question_of(owners: int, vote: int, public: int, right: int) -> Question:
    everyone = np.arange(owners)
    return Question(everyone, everyone[:10], np.full(10, vote), np.where(np.arange(6) == public, 0.5, 0.1), right)


def study_of(randomness: Any, label: int = 3, owners: int = 60) -> Study:
    return Study(LABELS, np.full(owners, label), calls=8, delta=1e-4, randomness=randomness)


def test_scores_are_right_where_nothing_is_left_to_chance(seeded: Any) -> None:
    """At epsilon 1000 noise moves nothing (e^-60 or less). Calls are right on the first question, the public prompt on
    the second, owners' labels on the third."""
    asked = [question_of(60, vote=0, public=1, right=right) for right in (0, 1, 3)]
    found = study_of(seeded(1)).scores(asked, Workload(30, 1.0, 30), [1000.0])
    assert {score.study for score in found} == {"30 questions, 30 tickets"}
    mean = {(score.method, score.epsilon): score.mean("accuracy") for score in found}
    third = pytest.approx(100 / 3)
    assert mean[PUBLIC, None] == mean[f"{CALLS}, {NO_NOISE}", None] == mean[f"{OWN}, {NO_NOISE}", None] == third
    assert {method.name for method in METHODS} == {name for name, epsilon in mean if epsilon}
    assert mean["label vote", 1000.0] == mean["exponential", 1000.0] == mean["Gaussian", 1000.0] == third
    score = next(score for score in found if score.method == "exponential, prior")
    assert score.facts["lead"] == pytest.approx(0.0)
    assert score.values["accuracy"].error == pytest.approx(100 / 3)
    assert score.facts["q"] == pytest.approx(8 / 60)


def test_an_owner_without_tickets_takes_no_part(seeded: Any) -> None:
    """Every owner is eligible for all queries: with 3 tickets each the first three queries use them up."""
    study = study_of(seeded(2))
    ((asked, counts),) = study.streams([question_of(60, 0, 1, 0)], Workload(20, 1.0, 3))
    assert asked.tolist() == [0] * 20
    assert counts[OWN][:, 3].tolist() == [60] * 3 + [0] * 17
    assert counts[CALLS][3:].sum() == 0
    assert counts[CALLS][:3, 0].sum() > 0
    assert counts[BUCKETS][3:, 1].tolist() == [8] * 17  # empty buckets give the public answer
    assert counts[BUCKETS].sum(axis=1).tolist() == [8] * 20


def test_blocks_hand_out_every_number_once(seeded: Any) -> None:
    blocks, plain = Blocks(seeded(4)), seeded(4).discrete_gaussian(3.0, 4096)
    found = [blocks.discrete_gaussian(3.0, size) for size in (5, 4000, 91)]
    assert np.concatenate(found).tolist() == plain.tolist()
    assert len(blocks.discrete_gaussian(3.0, 9000)) == 9000
    assert abs(blocks.discrete_gaussian(0.1, 50)).max() <= 1  # another scale: e^-200 beyond


def test_a_question_without_votes_gets_the_public_answer_from_a_prior(seeded: Any) -> None:
    """Weights .99 * .5 + .01 / 6 to about a tenth at epsilon 1000: with a factor e^(r / nats) nothing else is left."""
    empty = Question(np.arange(0), np.arange(0), np.arange(0), np.array([0, 0, 1.0, 0, 0, 0]), 2)
    found = study_of(seeded(3)).scores([empty, empty], Workload(10, 1.0, 10), [1000.0])
    mean = {score.method: score.mean("accuracy") for score in found if score.epsilon}
    assert mean["exponential, prior"] == mean["Gaussian, prior"] == 100.0
    assert mean["exponential"] < 60


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """120 records and 24 queries of 6 kinds; a text's kind is its first letter."""

    def write(name: str, count: int, words: str) -> str:
        records = [{"text": f"{'abcdef'[i % 6]} {words} {i}", "label": LABELS[i % 6]} for i in range(count)]
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(tmp_path / name)

    options = ["--task", "trec", "--data", write("train.jsonl", 120, "r"), "--test", write("test.jsonl", 24, "q")]
    options += ["--public", write("public.jsonl", 6, "p"), "--output", str(tmp_path / "study" / "votes-trec")]
    options += ["--queries", "12", "--public-texts", "30", "--reads", "0.15:6", "--calls", "4", "--epsilon", "3"]
    return [*options, "--workload", "40:0.15:12"]


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
    assert gated_study.main([*files, "20:0.15:20", "--first", "6", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    folder = tmp_path / "study" / "votes-trec"
    assert json.loads((folder / "results.json").read_text()) == results
    found = {(s["method"], s["epsilon"], s["study"]): s for s in results["scores"]}
    main = "40 questions, 12 tickets"
    assert found[f"calls, {NO_NOISE}", None, main]["values"]["accuracy"]["mean"] > 80  # near owners have its kind
    assert found[PUBLIC, None, main]["values"]["accuracy"]["mean"] < 60
    assert found["exponential", 3.0, main]["queries"] == 12
    assert results["settings"]["chosen"] == [{"3.0": "vote-em"}] * 2
    assert results["settings"]["says_its_own_label"] == 100.0
    for name in ("votes.png", "table.md", "votes.jsonl"):
        assert (folder / name).stat().st_size > 0
    page = write_index(tmp_path / "study").read_text()
    assert "votes.png" in page
    assert "| label vote, prior |" in page
    before = len(reader.asked)
    assert gated_study.main(files) == 0
    assert len(reader.asked) == before
    assert "At epsilon 3 the best vote of calls" in capsys.readouterr().out


def test_settings_are_chosen_on_owners_own_questions(
    files: list[str], reader: CopyingReader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gated_study.main([*files, "--on", "train", "--queries", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["on"] == "train"
    asked = [(example[0], query) for example, query in reader.asked if example and query.startswith(("a r", "b r"))]
    assert asked
    assert all(example != query for example, query in asked)


def test_no_file_of_the_report_shows_an_example(files: list[str], reader: CopyingReader, tmp_path: Path) -> None:
    assert gated_study.main(files) == 0
    for path in (tmp_path / "study" / "votes-trec").iterdir():
        assert b" r 1" not in path.read_bytes()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (["--task", "samsum"], "task"),
        (["--queries", "25"], "queries"),
        (["--public-texts", "19"], "public_texts"),
        (["--reads", "0.2:6"], "reads"),
        (["--reads", "x"], "reads"),
        (["--workload", "x"], "workload"),
    ],
)
def test_bad_options_end_in_one_line(
    files: list[str], reader: CopyingReader, capsys: pytest.CaptureFixture[str], change: list[str], word: str
) -> None:
    assert gated_study.main([*files, *change]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"gated_study: {word}=")
    assert reader.asked == []


def test_a_stopped_study_does_not_go_on_with_other_settings(
    files: list[str], reader: CopyingReader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gated_study.main(files) == 0
    assert gated_study.main([*files, "--neutral", "5"]) == 1
    assert "gated_study: neutral=5" in capsys.readouterr().err


def test_sections_of_dialogues_become_words_and_rare_ones_are_left_out(tmp_path: Path) -> None:
    records = [{"input": "Doctor: any\nallergy at all?", "label": "ALLERGY"}, {"input": "x", "label": "LABS"}]
    path = tmp_path / "mts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (row,) = gated_study._known(None, gated_study.TASKS["mts_section"], str(path), 2, "train")
    assert (row.input, row.output) == ("Doctor: any", "Allergies")
