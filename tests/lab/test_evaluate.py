"""`evaluation.evaluate` and `tokens`: one pass of the model, whatever is asked of it afterwards."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_fakes import FakeLLM, WordEmbeddings, rows, unit

from langchain_dpicl import local
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.lab.evaluation import batches, evaluate
from langchain_dpicl.lab.evaluation.evaluate import Evaluation, Model, some
from langchain_dpicl.lab.evaluation.passes import EvaluationPlan, PassFile
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.scores import Score
from langchain_dpicl.lab.evaluation.tasks import ClassificationTask, GenerationTask, Shape

COLOURS = ClassificationTask("colours", ("Red", "Blue"), Shape("", "Thing: {input}\nColour:"))
NOTES = GenerationTask("notes", Shape("", "Note: {input}\nTitle:"), max_tokens=8, keywords=(2, 3), k=2)
PLAN = EvaluationPlan(owners=40, members=4, shots=1, releases=20, delta=1e-3, epsilons=(1.0,), few_shots=2)
LABEL_ROWS = rows(40, ["Red", "Blue"])
LABEL_QUERIES = rows(6, ["Blue", "Red"], name="query")
TEXT_ROWS = rows(40, ["cat dog", "owl"])
TEXT_QUERIES = rows(3, ["cat dog", "owl"], name="fox")


@pytest.fixture(autouse=True)
def without_plans_and_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A noise that says for which plan it is, and embeddings that count words."""

    def noise(self: EvaluationPlan, epsilon: float, mechanism: str, options: Any = None, rate: Any = None) -> float:
        return self.rate * self.releases / epsilon

    monkeypatch.setattr(EvaluationPlan, "parameter", noise)
    monkeypatch.setattr(local, "local_embeddings", lambda: WordEmbeddings("cat dog owl fox"))


def labels(folder: Path, llm: FakeLLM | None = None, **more: Any) -> Evaluation:
    model = FakeLLM(words=["Red", "Blue"]) if llm is None else llm
    given: dict[str, Any] = {"task": COLOURS, "rows": LABEL_ROWS, "queries": LABEL_QUERIES, "public": []}
    given |= {"model": Model("a fake", lambda **_: model), "plan": PLAN, "folder": folder, "draws": 2, "heads": 1}
    return Evaluation(**{**given, **more})


def texts(folder: Path, llm: FakeLLM | None = None, **more: Any) -> Evaluation:
    model = FakeLLM(writes=written) if llm is None else llm
    settings = {"task": NOTES, "rows": TEXT_ROWS, "queries": TEXT_QUERIES, "candidates": 3}
    return labels(folder, model, **{**settings, **more})


def written(prompt: str) -> str:
    """One of four texts, by the prompt."""
    return " " + ["cat dog", "owl fox", "cat", "dog owl"][int(4 * unit(prompt))]


def plain(scores: Sequence[Score]) -> list[Any]:
    """What no draw of noise moves."""
    return [(s.method, s.study, s.values) for s in scores if s.epsilon is None]


# -- one pass ----------------------------------------------------------------------------------------------------------


def test_a_table_costs_one_pass_and_everything_after_it_none(tmp_path: Path) -> None:
    llm = FakeLLM(words=["Red", "Blue"])
    asked = {"samples": 2, "vary": {"members": [2, 4], "releases": [10, 20]}}
    first = labels(tmp_path, llm, **asked).run()
    # 6 queries and one neutral text, to 4 members, the bare and the few-shot prompt, for 2 samples
    assert len(llm.calls) == (6 + 1) * (4 + 2) * 2
    llm.calls.clear()
    again = labels(tmp_path, llm, **asked).run()
    assert llm.calls == []
    assert plain(again) == plain(first)
    others = replace(PLAN, epsilons=(0.5, 2.0, 8.0), releases=1000, delta=1e-4)
    scores = labels(tmp_path, llm, **{**asked, "plan": others, "draws": 5, "vary": {}}).run()
    assert llm.calls == [], "other epsilons, deltas, releases and draws cost nothing"
    assert [s.epsilon for s in scores if s.method == "vote"] == [None, 0.5, 2.0, 8.0]
    labels(tmp_path, llm, samples=3).run()
    assert len(llm.calls) == 7 * 6, "one more sample costs its own prompts"


def test_more_queries_go_on_with_the_same_ones(tmp_path: Path) -> None:
    llm = FakeLLM(words=["Red", "Blue"])
    pool = rows(30, ["Red", "Blue"], name="query")
    labels(tmp_path, llm, queries=some(pool, 5)).run()
    llm.calls.clear()
    labels(tmp_path, llm, queries=some(pool[::-1], 9)).run()
    assert len(llm.calls) == 4 * 6
    assert len(some([*pool, *pool], 100)) == 30, "distinct"


def test_other_shots_have_a_pass_of_their_own(tmp_path: Path) -> None:
    llm = FakeLLM(words=["Red", "Blue"])
    scores = labels(tmp_path, llm, vary={"shots": [1, 2]}).run()
    assert len(llm.calls) == 2 * 7 * 6
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["labels-4x1.jsonl", "labels-4x2.jsonl"]
    varied = {(s.facts["shots"], s.facts["rate"], s.epsilon) for s in scores if s.study == "shots"}
    assert varied == {(1, 0.1, None), (1, 0.1, 1.0), (2, 0.2, None), (2, 0.2, 1.0)}


def test_neutral_texts_are_the_tasks_or_those_that_are_given(tmp_path: Path) -> None:
    llm = FakeLLM(words=["Red", "Blue"])
    labels(tmp_path / "own", llm).run()
    assert any("Thing: N/A\n" in prompt for prompt in llm.calls)
    llm.calls.clear()
    labels(tmp_path / "given", llm, neutral=["a", "b"]).run()
    assert len(llm.calls) == (6 + 2) * 6
    assert not any("N/A" in prompt for prompt in llm.calls)


def test_another_data_set_model_or_wording_needs_another_folder(tmp_path: Path) -> None:
    labels(tmp_path).run()
    shape = replace(COLOURS.shape, instruction="Name it.")
    changes: dict[str, dict[str, Any]] = {
        "data": {"rows": LABEL_ROWS[::-1]},
        "model": {"model": Model("another", lambda **_: FakeLLM(words=["Red", "Blue"]))},
        "instruction": {"task": replace(COLOURS, shape=shape)},
        "few_shots": {"plan": replace(PLAN, few_shots=3)},
        "public": {"public": rows(3, ["Red"], name="public")},
    }
    for name, change in changes.items():
        with pytest.raises(InvalidParameter, match="or another output folder") as caught:
            labels(tmp_path, **change).run()
        assert caught.value.parameter == name


def test_a_model_that_is_gone_in_the_middle_keeps_the_first_half(tmp_path: Path) -> None:
    llm = FakeLLM(words=["Red", "Blue"], fails=lambda prompt: len(llm.calls) > 4 * 6)
    with pytest.raises(ModelUnavailable, match="the same command resumes"):
        labels(tmp_path, llm).run()
    back = FakeLLM(words=["Red", "Blue"])
    labels(tmp_path, back).run()
    assert len(back.calls) == 3 * 6, "four of seven texts were kept, and the file was let go"


def test_a_right_model_is_right(tmp_path: Path) -> None:
    """Red for even queries: what is measured is the model's own accuracy."""
    right = {row.input: row.output for row in LABEL_QUERIES}

    def weight(prompt: str, word: str) -> float:
        asked = prompt.rsplit("Thing: ", 1)[1].split("\n")[0]
        return 9.0 if word == right.get(asked, word) else 1.0

    # At 4 members nobody is sampled in 1.5 % of the runs, and then a vote is a coin; here in .25^40.
    plan = replace(PLAN, members=30)
    scores = labels(tmp_path, FakeLLM(words=["Red", "Blue"], weight=weight), plan=plan, methods=["vote"]).run()
    assert {s.values["accuracy"].mean for s in scores if s.epsilon is None} == {100.0}


# -- texts -------------------------------------------------------------------------------------------------------------


def test_texts_cost_one_pass_and_one_text_for_each_new_set_of_words(tmp_path: Path) -> None:
    llm = FakeLLM(writes=written)
    vary = {"candidates": [1, 3], "members": [2], "releases": [10, 1000]}
    first = texts(tmp_path, llm, vary=vary, shown=2).run()
    methods = [(s.method, s.epsilon) for s in first if not s.study]
    pairs = itertools.product(("embedding", "candidate-vote", "joint-em", "ptr"), (None, 1.0))
    assert methods == [("zero-shot", None), ("2-shot", None), ("member", None), *pairs]
    assert {s.study for s in first} == {"", "candidates", "members", "releases"}
    varied = {(s.method, s.study, s.facts.get(s.study)) for s in first if s.study != "candidates"}
    for method in ("embedding", "candidate-vote", "joint-em", "ptr"):
        assert varied >= {(method, "members", 2), (method, "releases", 10), (method, "releases", 1000)}
    assert {len(s.texts) for s in first} == {2}, "as many texts as queries are shown"
    asked = [prompt for prompt in llm.calls if not prompt.startswith("Complete")]
    assert len(asked) == 3 * (4 + 2) + 3 * 3
    llm.calls.clear()
    again = texts(tmp_path, llm, vary=vary).run()
    assert all(prompt.startswith("Complete") for prompt in llm.calls), "only for words that noise brought now"
    assert plain(again) == plain(first)


def test_an_instance_whose_embeddings_are_not_needed_writes_no_candidates(tmp_path: Path) -> None:
    llm = FakeLLM(writes=written)
    scores = texts(tmp_path, llm, methods=["joint-em"]).run()
    assert {s.method for s in scores} == {"zero-shot", "2-shot", "member", "joint-em"}
    assert len([prompt for prompt in llm.calls if not prompt.startswith("Complete")]) == 3 * 6


# -- decoding ----------------------------------------------------------------------------------------------------------


class StubDecoder(batches.Decoder):
    """Counts the texts that are decoded, by name, bound, top_k and delta."""

    decoded: list[tuple[Any, ...]]

    def texts(
        self, name: str, inputs: Sequence[str], bounds: Any, least: Any = (), top_k: Sequence[int] = ()
    ) -> list[list[str]]:
        numbers = zip(bounds, top_k or [self.settings.top_k for _ in bounds], strict=True)
        self.decoded += [(name, bound, n, self.delta) for bound, n in numbers]
        right = {row.input: row.output for row in TEXT_QUERIES}
        return [["owl" if bound and bound < 1e6 else right.get(text, "cat") for text in inputs] for bound in bounds]

    def prompted(self, name: str, inputs: Sequence[str], pairs: Any) -> list[str]:
        return self.texts(name, inputs, [None])[0]

    def demonstrations(self, name: str, inputs: Sequence[str], bounds: Any) -> list[list[dict[str, Any]]]:
        return [[{"input": text, "output": "a text"} for text in inputs] for _ in bounds]

    def bound(self, epsilon: float, answers: int) -> float:
        return answers / 4


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    heard: list[tuple[Any, ...]] = []
    monkeypatch.setattr(batches, "Decoder", type("Stub", (StubDecoder,), {"decoded": heard}))
    return heard


EMBEDDED = Model("smollm2", lambda **_: FakeLLM(writes=written), embedded="smollm2")


def decoding(folder: Path, **more: Any) -> Evaluation:
    public = rows(2, ["owl"], name="public")
    return texts(folder, **{"model": EMBEDDED, "methods": ["online", "offline"], "public": public, **more})


def test_decoding_is_done_once_and_says_what_its_plan_counts(tmp_path: Path, decoded: list[Any]) -> None:
    first = decoding(tmp_path).run()
    assert [(s.method, s.epsilon) for s in first] == [
        ("zero-shot decoding", None),
        ("online", None),
        ("online", 1.0),
        ("offline", None),
        ("offline", 1.0),
    ]
    online, offline = first[2], first[4]
    assert online.facts == {"B": 0.75, "top_k": 100, "rate": 0.1, "shots": 4.0, "releases": 3}
    assert offline.facts == {"B": 0.5, "top_k": 100, "rate": 0.1, "shots": 4.0, "releases": 2}
    assert first[0].values["rouge1"].mean == 100.0
    assert len(decoded) == 5
    assert repr(decoding(tmp_path).run()) == repr(first)
    assert len(decoded) == 5, "decoded once"


def test_each_run_decodes_anew_and_the_least_weights_are_their_mean(
    tmp_path: Path, decoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [[0.5, 0.25], [0.25, math.nan, 0.75], [0.75, math.nan, math.nan, math.nan]]
    kept = iter([weights for weights in told for _ in (None, 1.0)])
    monkeypatch.setattr(batches, "least_weights", lambda least: next(kept))
    first = decoding(tmp_path, samples=3, methods=["online"]).run()
    names = [("zero-shot decoding", None), ("online", batches.NO_BOUND), ("online", 0.75)]
    assert [each[:2] for each in decoded] == names[:1] * 3 + names[1:] * 3
    assert [(s.method, s.epsilon, s.runs) for s in first] == [
        ("zero-shot decoding", None, 3),
        ("online", None, 3),
        ("online", 1.0, 3),
    ]
    assert repr([list(s.least_weights) for s in first]) == repr([[], *[[0.5, 0.25, 0.75, math.nan]] * 2])
    alone = decoding(tmp_path, methods=["online"]).run()
    assert {s.runs for s in alone} == {1}
    assert len(decoded) == 9, "the first run stands"


def test_other_queries_or_another_delta_are_decoded_anew(tmp_path: Path, decoded: list[Any]) -> None:
    decoding(tmp_path).run()
    decoded.clear()
    decoding(tmp_path, plan=replace(PLAN, delta=1e-4)).run()
    assert [(name, delta) for name, *_, delta in decoded] == [("online", 1e-4), ("offline, epsilon 1", 1e-4)]
    decoded.clear()
    decoding(tmp_path, queries=rows(3, ["cat dog", "owl"], name="dog")).run()
    assert len(decoded) == 5, "as many queries, but others"


def test_the_ablation_of_top_k_decodes_online_alone(tmp_path: Path, decoded: list[Any]) -> None:
    found = decoding(tmp_path, vary={"top_k": [10, 100]}).run()
    assert [(s.method, s.epsilon, s.facts["top_k"]) for s in found if s.study == "top_k"] == [
        ("online", None, 10),
        ("online", 1.0, 10),
        ("online", None, 100),
        ("online", 1.0, 100),
    ]
    assert len([s for s in found if not s.study]) == 5
    assert [each[:2] for each in decoded if each[2] == 10] == [("online", batches.NO_BOUND), ("online", 0.75)]


def test_numbers_that_move_no_prompt_are_decoded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[tuple[Any, ...]]] = []

    def answers(self: Any, method: str, versions: Sequence[batches.Version], *_: Any) -> list[dict[str, Any]]:
        asked.append([(each.top_k, each.shots, each.epsilon, each.epsilon and each.releases) for each in versions])
        assert self.shots == versions[0].shots, "the samples' owners"
        assert self.settings.shots == 0.75 * self.shots, "the weight of the public logits"
        return [{"texts": ["cat" for _ in TEXT_QUERIES], "facts": {}} for _ in versions]

    monkeypatch.setattr(batches.Decoder, "answers", answers)
    decoding(tmp_path, methods=["online"], vary={"top_k": [10], "releases": [3, 40], "shots": [4, 8]}).run()
    usual = [(100, 4, None, None), (100, 4, 1.0, 3)]
    assert asked[1:] == [
        [*usual, (10, 4, None, None), (10, 4, 1.0, 3), (100, 4, 1.0, 40)],
        [(100, 8, None, None), (100, 8, 1.0, 3)],
    ]


def test_decoding_alone_has_no_plan_of_members(tmp_path: Path, decoded: list[Any]) -> None:
    alone, beside = decoding(tmp_path), decoding(tmp_path, methods=["online", "embedding"])
    assert (alone.asks_model, alone.has_members, alone.costs()) == (True, False, [])
    assert beside.has_members
    assert beside.costs()


def test_the_ablations_of_shots_and_releases_move_the_rate_and_the_plan(tmp_path: Path, decoded: list[Any]) -> None:
    found = decoding(tmp_path, vary={"shots": [4, 8], "releases": [3, 40]}).run()
    shots = [s for s in found if s.study == "shots" and s.epsilon]
    assert [(s.facts["shots"], s.facts["rate"], s.facts["B"]) for s in shots] == [(4, 0.1, 0.75), (8, 0.2, 0.75)]
    releases = [s for s in found if s.study == "releases"]
    assert [(s.epsilon, s.facts["releases"], s.facts.get("B")) for s in releases] == [
        (None, 3, None),
        (1.0, 3, 0.75),
        (None, 40, None),
        (1.0, 40, 10.0),
    ]
    # the five of the table, eight shots with and without epsilon, and 40 releases at epsilon 1
    assert len(decoded) == 5 + 2 + 1, "the usual numbers are decoded once"


def test_the_least_weights_are_those_of_the_owner_heard_least_at_each_place() -> None:
    least: batches.Least = {}
    mix = batches.clipping(1.0, 1.5, least)
    zero_shot = np.zeros(2)
    mix(0, np.array([[0.0, 2.0], [0.0, 8.0]]), zero_shot)
    mix(0, np.array([[0.0, 4.0]]), zero_shot)
    mix(1, np.empty((0, 2)), zero_shot)
    mix(2, np.array([[0.0, 0.1]]), zero_shot)
    # 1/8 and 1/4 at the first token; nobody at the second; the cap at the third
    assert batches.least_weights(least) == pytest.approx([3 / 16, math.nan, 1.5], nan_ok=True)


def test_another_kind_among_labels_is_measured_by_its_own_score(tmp_path: Path) -> None:
    # eight samples: in one alone no owner may be drawn (.9^40), or no answer be right
    found = labels(tmp_path, methods=["top-k:k=2", "vote"], samples=8).run()
    kinds = [score for score in found if score.method == "top-k:k=2"]
    votes = [score for score in found if score.method == "vote" and score.epsilon is not None]
    assert [score.epsilon for score in kinds] == [score.epsilon for score in votes]
    for two, one in zip(kinds, votes, strict=True):
        assert two.values["accuracy"].mean > 0.0 < one.values["accuracy"].mean
        assert two.facts["eps0"] > 0.0
    alone = labels(tmp_path, methods=["top-k:k=2"], samples=8).run()
    assert {score.method for score in alone} >= {"top-k:k=2", "zero-shot", "member"}
    assert "vote" not in {score.method for score in alone}


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "change", "name", "words"),
    [
        (labels, {"methods": ["ptr"]}, "methods", "of vote, label-vote, head, top-k for colours"),
        (
            texts,
            {"methods": ["vote"]},
            "methods",
            "of embedding, candidate-vote, joint-em, ptr, online, offline for notes",
        ),
        (labels, {"methods": ["voting"]}, "methods", "of vote, label-vote, head"),
        (labels, {"methods": ["top-k"]}, "methods", "k: Field required"),
        (labels, {"methods": ["top-k:k=9"]}, "methods", "k: a whole number >= 1 and <= "),
        (labels, {"methods": ["top-k:k=true"]}, "methods", "k: Input should be a valid integer"),
        (labels, {"methods": ["top-k:k=2,volume=3"]}, "methods", "volume: Extra inputs"),
        (texts, {"methods": ["online"]}, "methods", "not embedded"),
        (texts, {"methods": ["offline"], "model": EMBEDDED}, "public", "offline demonstrations"),
        (labels, {"vary": {"candidates": [3]}}, "vary", "one of members, releases, shots, fits"),
        (texts, {"vary": {"rate": [3]}, "methods": ["ptr"]}, "vary", "one of members, releases for"),
        (labels, {"vary": {"members": [2]}, "methods": ["label-vote"]}, "vary", "one of none"),
        (texts, {"vary": {"shots": [2]}, "methods": ["ptr"]}, "vary", "one of members, releases for"),
        (texts, {"vary": {"shots": [41]}, "methods": ["online"], "model": EMBEDDED}, "vary['shots']", "<= 40"),
        (texts, {"shown": -1}, "shown", ">= 0"),
        (labels, {"shown": 1}, "shown", "<= 0"),
        (labels, {"vary": {"members": [1]}}, "vary['members']", ">= 2"),
        (labels, {"vary": {"members": [5]}}, "vary['members']", "<= 4"),
        (texts, {"vary": {"candidates": [4]}}, "vary['candidates']", "<= 3"),
        (labels, {"vary": {"releases": [0]}}, "vary['releases']", ">= 1"),
        (labels, {"vary": {"shots": [11]}}, "shots", "at most the number of owners, 40"),
        (labels, {"vary": {"releases": [10**9]}}, "releases", "<= 10000000"),
        (labels, {"samples": 0}, "samples", ">= 1"),
        (labels, {"draws": 0}, "draws", ">= 1"),
        (labels, {"queries": []}, "queries", "at least one row"),
        (labels, {"public": LABEL_ROWS[:1]}, "public", "at least few_shots = 2 rows"),
        (labels, {"in_batches": True}, "in_batches", "an embedded model"),
        (texts, {"neutral": ["a text"]}, "neutral", "no labels"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_model_is_loaded(
    tmp_path: Path, make: Callable[..., Evaluation], change: dict[str, Any], name: str, words: str
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        make(tmp_path, **change)
    assert caught.value.parameter == name
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_two_evaluations_do_not_share_a_folder_at_once(tmp_path: Path) -> None:
    evaluation = labels(tmp_path)
    held = evaluation._file("labels", PLAN)
    with pytest.raises(InvalidParameter, match="no other evaluation is running"):
        labels(tmp_path).run()
    held.close()
    labels(tmp_path).run()


def test_data_are_told_apart_by_what_they_hold() -> None:
    digests = {
        evaluate._digest(found)
        for found in (
            LABEL_ROWS,
            LABEL_ROWS[:-1],
            [*LABEL_ROWS[:-1], Row("row 39", "Red", ("Red",))],
            LABEL_ROWS[::-1],
        )
    }
    assert len(digests) == 4


def test_a_pass_file_of_an_earlier_format_is_still_read(tmp_path: Path) -> None:
    """The head and the keys of a file that exists: results were made from such."""
    evaluation = labels(tmp_path)
    evaluation._file("labels", PLAN).close()
    head = (tmp_path / "labels-4x1.jsonl").read_text()
    assert head == (
        '{"data": "' + evaluate._digest(LABEL_ROWS) + '", "few_shots": 2, "in_batches": false, "instruction": "", '
        '"members": 4, "model": "a fake", "public": null, "query": "Thing: {input}\\nColour:", "shots": 1, '
        '"task": "colours"}\n'
    )
    evaluation.run()
    file = PassFile(tmp_path / "labels-4x1.jsonl", json.loads(head))
    kinds = list(file)
    assert kinds[0] == ("sample", 0)
    assert all(len(str(text)) == 16 and sample == 0 for text, sample in kinds[1:])
    file.close()
