"""Label studies in `evaluation.studies`, and passes: what a label pass keeps, and what votes make of it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from evaluation_fakes import FakeLLM, rows
from scipy.stats import binom, chi2

from langchain_dpicl import NoisyVote
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.lab.evaluation import studies as studies_module
from langchain_dpicl.lab.evaluation.passes import EvaluationPlan, Pairs, PassFile, Sampler
from langchain_dpicl.lab.evaluation.scores import Score, Value
from langchain_dpicl.lab.evaluation.studies import LabelStudy, Scores, chain_reader, read_labels
from langchain_dpicl.lab.evaluation.tasks import ClassificationTask, Shape
from langchain_dpicl.members.scoring import LabelScorer
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.privacy.lines import LineRequest
from langchain_dpicl.private.boundary import ABSTAIN

LABELS = ("Red", "Blue", "Green")
TASK = ClassificationTask("colours", LABELS, Shape("Name the colour.", "Thing: {input}\nColour:"))
PLAN = EvaluationPlan(owners=40, members=4, shots=1, releases=20, delta=1e-3, epsilons=(1.0, 4.0), few_shots=2)


def said_of(votes: Sequence[Sequence[int]], *, alone: Sequence[int] = (0, 0), labels: int = 3) -> Scores:
    """Queries by members: members that say these labels (-1 fails), and prompts that say ``alone``."""
    table = np.array([[*row, *alone] for row in votes])
    return np.where(table[:, :, None] == np.arange(labels), 0.9, 0.1) * (table[:, :, None] >= 0)


def study_of(votes: Sequence[Sequence[Sequence[int]]], right: Sequence[int], **settings: Any) -> LabelStudy:
    """Samples by queries by members."""
    said = np.array([said_of(each) for each in votes])
    return LabelStudy(LABELS, right, said, said[:, :0], **{"plan": PLAN, "draws": 5, "mechanism": "vote", **settings})


def answers_of(said: Scores, *, calibrate: bool) -> Any:
    """(queries, prompts) answers of one sample, whose first two texts are neutral."""
    study = LabelStudy(LABELS, [0] * (len(said) - 2), said[None, 2:], said[None, :2], PLAN)
    return study.answers(calibrate=calibrate)[0]


def find(scores: Sequence[Score], method: str, epsilon: float | None = None, **facts: float) -> Score:
    (score,) = [
        s for s in scores if (s.method, s.epsilon) == (method, epsilon) and facts.items() <= dict(s.facts).items()
    ]
    return score


# -- samples -----------------------------------------------------------------------------------------------------------


def test_the_first_members_of_a_sample_are_a_sample_at_their_share_of_the_rate(seeded: Any) -> None:
    """The joint law of all four owners' places, against independent owners at the smaller plan's rate.

    A chi-square test on 81 cells, each expected at least 78 times; false alarm below 1e-7. Members that share the rate
    of the whole ensemble (3/4 instead of 1/2), a sample of fixed size or a rebalanced one fail it.
    """
    plan = EvaluationPlan(owners=4, members=3, shots=1, releases=1, delta=0.1, epsilons=(1.0,))
    smaller = plan.varied(members=2)
    assert (plan.rate, smaller.rate, smaller.shots) == (0.75, 0.5, 1)
    selector = Sampler(rows(4, ["Red"]), (), plan)._selector
    selector._randomness = seeded(11)
    draws, seen = 20_000, Counter[tuple[int, ...]]()
    for _ in range(draws):
        places = [2, 2, 2, 2]  # in none of the first two
        for member, bucket in enumerate(selector.sample()[:2]):
            for exemplar in bucket:
                places[exemplar["row"]] = member
        seen[tuple(places)] += 1
    law = (smaller.rate / 2, smaller.rate / 2, 1 - smaller.rate)
    expected = {cell: draws * math.prod(law[i] for i in cell) for cell in itertools.product(range(3), repeat=4)}
    distance = sum((seen[cell] - n) ** 2 / n for cell, n in expected.items())
    assert min(expected.values()) >= 78
    assert distance < chi2.isf(1e-7, len(expected) - 1)


def test_a_sample_has_members_the_bare_prompt_and_the_examples_to_compare_with(tmp_path: Path) -> None:
    private, public = rows(30, list(LABELS)), rows(5, ["Red"], name="public")
    sampler = Sampler(private, public, replace(PLAN, shots=2, few_shots=3))
    file = PassFile(tmp_path / "labels.jsonl", {})
    prompts = sampler.draw(0, file)
    assert len(prompts) == 4 + 3
    known = {row.input: row.output for row in private}
    drawn = [text for bucket in prompts[:4] for text, _ in bucket]
    assert len(drawn) == len(set(drawn)), "an owner has one member"
    assert all(known[text] == label for bucket in prompts[:4] for text, label in bucket)
    assert list(prompts[4]) == []
    assert len({text for text, _ in prompts[5]} & set(known)) == 3
    assert [text.startswith("public") for text, _ in prompts[6]] == [True] * 3
    assert sampler.draw(0, file) == prompts, "drawn once"
    assert sampler.draw(1, file) != prompts
    file.close()


def test_too_few_rows_for_one_sample_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="at least members \\* shots = 12 records"):
        Sampler(rows(11, ["Red"]), (), replace(PLAN, shots=3))


# -- the pass ----------------------------------------------------------------------------------------------------------

EXAMPLES: list[Pairs] = [[(f"thing {i}", LABELS[i % 3])] for i in range(4)] + [[], [("a", "Red"), ("b", "Blue")]]
QUERIES = [f"query {i}" for i in range(20)]


def read(llm: FakeLLM, path: Path, queries: Sequence[str] = QUERIES) -> Scores:
    """Scores after two neutral texts, then after the queries."""
    with closing(PassFile(path, {})) as file:
        texts = ["N/A", "something", *queries]
        return read_labels(chain_reader(llm, TASK), len(LABELS), EXAMPLES, texts, file, 0, lambda: None)


def scorer(llm: FakeLLM, *, calibrate: bool) -> LabelScorer:
    def prompt(values: dict[str, Any]) -> str:
        pairs = [(each["text"], each["label"]) for each in values["examples"]]
        return TASK.shape.prefix(pairs) + TASK.shape.ask(values["input"])

    return LabelScorer(llm, LABELS, prompt=prompt, calibrate=calibrate, content_free=("N/A", "something"))


def test_every_answer_is_the_one_that_a_label_scorer_gives_with_and_without_calibration(tmp_path: Path) -> None:
    llm = FakeLLM(words=[*LABELS, "The"])
    said = read(llm, tmp_path / "labels.jsonl")
    found = {}
    for calibrate in (True, False):
        member = scorer(llm, calibrate=calibrate)
        for i, pairs in enumerate(EXAMPLES):
            examples = [{"text": text, "label": label} for text, label in pairs]
            wanted = [LABELS.index(member.invoke({"input": query, "examples": examples})) for query in QUERIES]
            got = answers_of(said, calibrate=calibrate)[:, i]
            assert got.tolist() == wanted
            found[calibrate, i] = wanted
    assert all(found[True, i] != found[False, i] for i in range(len(EXAMPLES))), "calibration changes answers here"
    assert len({tuple(found[True, i]) for i in range(len(EXAMPLES))}) == len(EXAMPLES), "and so do examples"


def test_calibrated_scores_are_those_of_a_label_scorer(tmp_path: Path) -> None:
    llm = FakeLLM(words=list(LABELS))
    said = read(llm, tmp_path / "labels.jsonl")
    member = scorer(llm, calibrate=True)
    examples = [{"text": text, "label": label} for text, label in EXAMPLES[2]]
    bias = np.exp(np.log(said[:2, 2]).mean(axis=0))
    for q, query in enumerate(QUERIES):
        values = said[2 + q, 2] / bias
        wanted = list(member.scores({"input": query, "examples": examples}).values())
        assert values / values.sum() == pytest.approx(wanted, rel=5e-5), "five digits are kept"


def test_what_the_file_has_is_not_asked_again(tmp_path: Path) -> None:
    llm = FakeLLM(words=list(LABELS))
    first = read(llm, tmp_path / "labels.jsonl", queries=QUERIES[:5])
    assert len(llm.calls) == (5 + 2) * len(EXAMPLES)
    llm.calls.clear()
    again = read(llm, tmp_path / "labels.jsonl", queries=QUERIES[:5])
    assert llm.calls == []
    assert np.array_equal(again, first)
    more = read(llm, tmp_path / "labels.jsonl", queries=QUERIES[:7])
    assert len(llm.calls) == 2 * len(EXAMPLES), "two more queries cost two"
    assert np.array_equal(more[:7], first)


def test_a_model_that_times_out_for_some_prompts_abstains_there(tmp_path: Path) -> None:
    llm = FakeLLM(words=list(LABELS), fails=lambda prompt: "thing 1" in prompt and "query 3" in prompt)
    said = read(llm, tmp_path / "labels.jsonl")
    votes = answers_of(said, calibrate=True)[:, :4]
    assert np.argwhere(votes < 0).tolist() == [[3, 1]]


def test_a_failure_that_passes_leaves_nothing_behind(tmp_path: Path) -> None:
    failed: list[str] = []

    def fails(prompt: str) -> bool:
        if "thing 1" in prompt and prompt not in failed:
            failed.append(prompt)
            return True
        return False

    said = read(FakeLLM(words=list(LABELS), fails=fails), tmp_path / "labels.jsonl")
    whole = read(FakeLLM(words=list(LABELS)), tmp_path / "whole.jsonl")
    assert len(failed) == len(QUERIES) + 2
    assert np.array_equal(said, whole)


def test_a_prompt_that_fails_after_a_neutral_text_abstains_when_calibrated(tmp_path: Path) -> None:
    llm = FakeLLM(words=list(LABELS), fails=lambda prompt: "thing 1" in prompt and "something" in prompt)
    said = read(llm, tmp_path / "labels.jsonl")
    assert (answers_of(said, calibrate=True)[:, 1] == -1).all(), "as a label scorer, whose call fails"
    assert (answers_of(said, calibrate=False)[:, 1] >= 0).all()
    assert (answers_of(said, calibrate=True)[:, 0] >= 0).all()


def test_a_model_that_is_gone_keeps_what_was_done_and_the_same_call_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    gone: list[int] = []
    llm = FakeLLM(words=list(LABELS), fails=lambda prompt: bool(gone) or len(llm.calls) > 7 * len(EXAMPLES) + 3)
    with pytest.raises(ModelUnavailable, match="the same command resumes") as caught:
        read(llm, path)
    assert str(path) in str(caught.value)
    file = PassFile(path, {})
    assert len(list(file)) == 7, "the query in the middle of which it went is not there: no outage is kept"
    file.close()
    back = FakeLLM(words=list(LABELS))
    said = read(back, path)
    assert len(back.calls) == (len(QUERIES) + 2 - 7) * len(EXAMPLES)
    assert np.array_equal(said, read(FakeLLM(words=list(LABELS)), tmp_path / "whole.jsonl"))


def test_a_server_without_log_probabilities_is_a_model_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="log-probabilities"):
        read(FakeLLM(writes=lambda prompt: " Red"), tmp_path / "labels.jsonl")


def test_each_query_is_read_once_and_not_at_all_where_all_is_known(tmp_path: Path) -> None:
    seen: list[tuple[Sequence[Pairs], str]] = []
    file, heard = PassFile(tmp_path / "labels.jsonl", {}), []

    def reader(examples: Sequence[Pairs], query: str) -> Scores:
        seen.append((examples, query))
        return np.full((len(examples), 3), 0.2)

    for _ in range(2):
        said = read_labels(reader, 3, EXAMPLES, QUERIES, file, 0, lambda: heard.append(1))
        assert said.shape == (20, len(EXAMPLES), 3)
    assert seen == [(EXAMPLES, query) for query in QUERIES]
    assert len(heard) == 40, "progress hears of what was known, too"
    file.close()


# -- votes -------------------------------------------------------------------------------------------------------------


class Silent:
    """No noise; the first of equals."""

    def discrete_gaussian(self, sigma: float, size: int) -> Any:
        return np.zeros(size, np.int64)

    def integers(self, high: int, size: int) -> Any:
        return np.zeros(size, np.int64)


def test_the_plain_majority_is_the_vote_without_noise_for_every_outcome_of_four_members() -> None:
    tables = list(itertools.product((-1, 0, 1, 2), repeat=4))
    plain = study_of([tables], [0] * len(tables)).tally(4)[2][0]
    place = {None: -1} | {label: i for i, label in enumerate(LABELS)}
    for table, found in zip(tables, plain.tolist(), strict=True):
        outputs = [ABSTAIN if i < 0 else i for i in table]
        assert found == place[NoisyVote(LABELS).aggregate(outputs, 0.0, Silent())], table  # type: ignore[arg-type, index]


class Recording(NoisyVote):
    """The product's vote; keeps what it was given. Every ``wrong``-th release is "Green"."""

    given: ClassVar[list[tuple[tuple[object, ...], float]]]
    wrong = 0

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Any) -> Any:
        self.given.append((tuple(outputs), parameter))
        released = super().aggregate(outputs, parameter, randomness)
        if self.wrong:
            return "Green" if len(self.given) % self.wrong == 0 else "Red"
        return released


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    kind = type("Kind", (Recording,), {"given": []})
    monkeypatch.setattr(studies_module, "NoisyVote", kind)
    return kind


def test_the_private_vote_is_the_products_with_the_plans_noise(recording: type[Recording]) -> None:
    votes = [[[0, 0, 1, -1], [2, 2, 2, 2]], [[0, 0, 0, 0], [-1, 1, 1, 2]]]
    study = study_of(votes, [0, 2], draws=3)
    _, score = study.votes([replace(PLAN, epsilons=(1.0,))])
    line = LineRequest("vote", rate=4 / 40, count=20)
    plan = PrivacyPlan.solve(epsilon=1.0, delta=1e-3, lines={"vote": line})
    assert {sigma for _, sigma in recording.given} == {plan.lines["vote"].parameter} == {score.facts["sigma"]}
    asked = [tuple(ABSTAIN if i < 0 else i for i in query) for sample in votes for _ in range(3) for query in sample]
    assert [outputs for outputs, _ in recording.given] == asked
    assert (score.runs, score.queries) == (6, 2)


@pytest.fixture
def no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A noise that says for which plan it is, instead of solving one."""
    monkeypatch.setattr(
        EvaluationPlan, "parameter", lambda self, epsilon, mechanism: self.rate * self.releases / epsilon
    )


@pytest.mark.usefixtures("no_plan")
def test_how_often_noise_flips_the_vote_is_its_probability(seeded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 votes against 1 at sigma 2; 4000 draws against the exact law; false alarm below 1e-8."""
    monkeypatch.setattr(studies_module, "SecureRandomness", lambda: seeded(5))
    labels = ("Red", "Blue")
    said = said_of([[0, 0, 0, 1]], labels=2)[None]
    plan = replace(PLAN, epsilons=(1.0,))
    _, score = LabelStudy(labels, [0], said, said[:, :0], plan, draws=4000, mechanism="vote").votes([plan])
    noise = np.arange(-30, 31)
    law = np.exp(-(noise**2) / (2 * score.facts["sigma"] ** 2))
    law /= law.sum()
    red, blue, nobody = np.meshgrid(noise + 3, noise + 1, noise, indexing="ij")
    chance = law[:, None, None] * law[:, None] * law
    is_down = (nobody > np.maximum(red, blue)) & (nobody >= 2 * score.facts["sigma"])
    stays = float((chance * ~is_down * ((red > blue) + (red == blue) / 2)).sum())
    flips = round(score.facts["flipped"] / 100 * 4000)
    assert score.facts["sigma"] == 2.0
    assert binom.ppf(5e-9, 4000, 1 - stays) <= flips <= binom.isf(5e-9, 4000, 1 - stays)
    assert score.values["accuracy"].mean == pytest.approx(100 - score.facts["flipped"])


@pytest.mark.usefixtures("no_plan")
def test_flips_are_the_per_cent_of_releases_that_differ_from_the_plain_majority(recording: type[Recording]) -> None:
    recording.wrong = 4
    study = study_of([[[0, 0, 0, 0]] * 5, [[2, 2, 2, 0]] * 5], [0] * 5, draws=8)
    _, score = study.votes([replace(PLAN, epsilons=(1.0,))])
    # 80 releases, a quarter of them Green: wrong where the majority is Red, right where it is Green.
    assert score.facts["flipped"] == pytest.approx(100 * (10 + 30) / 80)
    assert score.values["accuracy"].mean == pytest.approx(75.0)


@pytest.mark.usefixtures("no_plan")
def test_the_main_table_has_each_method_with_its_runs() -> None:
    votes = [[[0, 0, 1, 2], [1, 1, 1, 1]], [[0, 0, 0, 0], [1, 2, 2, 2]]]
    scores = study_of(votes, [0, 1]).scores()
    assert [(s.method, s.epsilon, s.runs) for s in scores] == [
        ("zero-shot", None, 2),
        ("zero-shot calibrated", None, 2),
        ("2-shot", None, 2),
        ("member", None, 8),
        ("vote", None, 2),
        ("vote", 1.0, 10),
        ("vote", 4.0, 10),
        ("vote, prior", 1.0, 10),
        ("vote, prior", 4.0, 10),
    ]
    assert find(scores, "zero-shot").values["accuracy"] == Value(50.0, 0.0, 50.0)
    member = find(scores, "member").values["accuracy"]
    by_member = 50 * np.array([2, 2, 1, 1, 2, 1, 1, 1])
    assert (member.mean, member.deviation) == pytest.approx((by_member.mean(), by_member.std(ddof=1)))
    assert find(scores, "vote").values["accuracy"].mean == pytest.approx(75.0)


def test_members_without_examples_have_no_vote_and_padding_has_none(recording: type[Recording]) -> None:
    """Two sampled owners in a sample padded to four calls: no other answer reaches the aggregator."""
    votes = [[[0, 1, 2, 2], [-1, 1, 2, 2]]]
    own = replace(PLAN, calls=2, epsilons=(1.0,))
    study = study_of(votes, [0, 1], plan=own, filled=np.array([[True, True, False, False]]), draws=1)
    plain, score = study.votes([own])
    assert [outputs for outputs, _ in recording.given] == [(0, 1), (ABSTAIN, 1)]
    assert plain.values["accuracy"].mean == pytest.approx(75.0), "a tie of two, and one vote against an abstention"
    assert (own.rate, own.crowd.own_calls, own.crowd.expected) == (2 / 40, True, 2)
    line = LineRequest("vote", rate=2 / 40, count=20, options={"own_calls": 1.0})
    plan = PrivacyPlan.solve(epsilon=1.0, delta=1e-3, lines={"vote": line})
    assert score.facts["sigma"] == plan.lines["vote"].parameter < own.parameter(1.0, "vote", {})
    assert (score.facts["calls"], "shots" in score.facts) == (2, False)
    (member,) = [s for s in study.scores() if s.method == "member"]
    assert member.runs == 2


def test_one_owner_in_each_call_is_drawn_and_padded(tmp_path: Path) -> None:
    with closing(PassFile(tmp_path / "labels.jsonl", {})) as file:
        sampler = Sampler(rows(40, ["Red"]), (), replace(PLAN, members=30, calls=12))
        for number in range(5):
            prompts, filled = sampler.draw(number, file), sampler.filled(number, file)
            assert (len(prompts), len(filled)) == (30 + 2, 30)
            assert [len(bucket) for bucket in prompts[:30]] == [int(each) for each in filled]
        with pytest.raises(InvalidParameter, match="at least calls = 12 records"):
            Sampler(rows(11, ["Red"]), (), replace(PLAN, members=30, calls=12))


def test_the_answer_without_examples_is_the_prior_of_the_second_vote() -> None:
    """At epsilon 1 with 1e6 releases the votes are all noise, and the prior decides.

    Without it four votes against the right label at r below .005 leave it a probability between .495 and .5; of 2,000
    draws fewer than 43 or more than 57 in 100 are right with a probability below 1e-8.
    """
    plan = replace(PLAN, releases=1_000_000, epsilons=(1.0,))
    said = said_of([[1, 1, 1, 1]], alone=(0, 0), labels=2)[None]
    scores = LabelStudy(("Red", "Blue"), [0], said, said[:, :0], plan, draws=2000, mechanism="vote-em").scores()
    assert find(scores, "vote, prior", 1.0).facts["eps0"] < 0.01
    assert find(scores, "vote, prior", 1.0).values["accuracy"].mean > 99.0
    assert 43.0 < find(scores, "vote", 1.0).values["accuracy"].mean < 57.0


def test_the_plan_chooses_the_mechanism_of_a_vote() -> None:
    study = study_of([[[0, 0, 0, 0]]], [0], mechanism=None, draws=1)
    _, *private = study.votes([PLAN])
    assert all("eps0" in score.facts for score in private)


@pytest.mark.usefixtures("no_plan")
def test_a_public_prompt_is_scored_where_there_is_one() -> None:
    said = said_of([[0, 0, 0, 0]], alone=(1, 1, 2))[None]
    study = LabelStudy(LABELS, [2], said, said[:, :0], PLAN)
    assert find(study.scores(), "public 2-shot").values["accuracy"].mean == 100.0
    assert find(study.scores(), "2-shot").values["accuracy"].mean == 0.0


def test_a_tie_without_noise_counts_by_the_share_of_its_winners_as_a_release_draws_among_them() -> None:
    tables = [[0, 0, 1, 1], [0, 1, 1, 2], [0, 0, 1, 2], [0, 1, 2, -1]]
    (plain,) = [s for s in study_of([tables], [0, 0, 0, 2]).votes([PLAN]) if s.epsilon is None]
    assert plain.values["accuracy"].mean == pytest.approx(100 * (1 / 2 + 0 + 1 + 1 / 3) / 4)


@pytest.mark.usefixtures("no_plan")
def test_ablations_vary_one_number_and_the_noise_follows() -> None:
    study = study_of([[[0, 0, 1, 1], [1, 0, 1, 0]]], [0, 1])
    members = study.votes([PLAN.varied(members=n) for n in (2, 4)], "members")
    assert {s.study for s in members} == {"members"}
    assert find(members, "vote", None, members=2).values["accuracy"].mean == 75.0
    assert find(members, "vote", 1.0, members=2).facts["sigma"] == pytest.approx(2 / 40 * 20)
    assert find(members, "vote", 1.0, members=4).facts["sigma"] == pytest.approx(4 / 40 * 20)
    releases = study.votes([PLAN.varied(releases=n) for n in (10, 1000)], "releases")
    assert {s.study for s in releases} == {"releases"}
    assert find(releases, "vote", 4.0, releases=1000).facts["sigma"] == pytest.approx(4 / 40 * 1000 / 4)
    assert find(releases, "vote", None, releases=10).values == find(releases, "vote", None, releases=1000).values


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_a_value_has_the_deviation_of_runs_and_the_error_of_queries() -> None:
    table = [[1, 0, 1, 1], [1, 0, 0, 1], [1, 1, 1, 1]]
    value = Value.of(table)
    assert value.mean == pytest.approx(75.0)
    assert value.deviation == pytest.approx(25.0)  # runs at 75, 50 and 100
    by_query = np.array([100, 100 / 3, 200 / 3, 100])
    assert value.error == pytest.approx(by_query.std(ddof=1) / 2, abs=1e-6)
    assert math.isnan(Value.of([[1, 0]]).deviation)
    assert math.isnan(Value.of([[1], [0]]).error)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"owners": 0}, "owners"),
        ({"members": 1}, "members"),
        ({"members": 2.0}, "members"),
        ({"shots": 0}, "shots"),
        ({"shots": 11}, "shots"),
        ({"calls": 41}, "calls"),
        ({"calls": -1}, "calls"),
        ({"releases": 0}, "releases"),
        ({"releases": 10**9}, "releases"),
        ({"few_shots": 41}, "few_shots"),
        ({"delta": 0.0}, "delta"),
        ({"epsilons": ()}, "epsilon"),
        ({"epsilons": (1.0, -1.0)}, "epsilon"),
        ({"epsilons": (math.inf,)}, "epsilon"),
        ({"epsilons": (1001.0,)}, "epsilon"),
    ],
)
def test_a_plan_refuses_what_no_plan_can_be(change: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        EvaluationPlan(**{**vars(PLAN), **change})
    assert caught.value.parameter == name
