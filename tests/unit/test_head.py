"""A head: its steps' sensitivity to the last bit, its price, its journal, its file, and what it answers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from numpy.typing import NDArray

from langchain_dpicl import ExemplarStore, LineRequest, PrivacyBudget, cli
from langchain_dpicl.errors import (
    InvalidParameter,
    ModelUnavailable,
    PlanMismatch,
    PrivacyBudgetExceeded,
    PrivacyWarning,
    ReleaseFailed,
)
from langchain_dpicl.once import fitting, sums
from langchain_dpicl.once.fitting import FitReport, descend, expected_accuracy
from langchain_dpicl.once.head import PrivateHead
from langchain_dpicl.once.steps import LATTICE, FeatureMap, OwnedRecords, clipped_sum, probabilities
from langchain_dpicl.privacy import MECHANISMS, PrivacyPlan
from langchain_dpicl.privacy.profile import Gaussian

LABELS = ["red", "green", "blue"]
DIMENSION = 12
EMBEDDINGS = DeterministicFakeEmbedding(size=DIMENSION)


class Noise:
    """Draws like those of a fit, from a seed; ``asked`` keeps each sigma and size. Stops before draw ``stop``."""

    def __init__(self, seed: int = 0, stop: int | None = None) -> None:
        self.generator = np.random.default_rng(seed)
        self.asked: list[tuple[float, int]] = []
        self.stop = stop

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        if len(self.asked) == self.stop:
            raise KeyboardInterrupt
        self.asked.append((sigma, size))
        return np.rint(self.generator.normal(0.0, sigma, size)).astype(np.int64)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Noise:
    source = Noise()
    monkeypatch.setattr(sums, "SecureRandomness", lambda: source)
    return source


def records_of(owners: int, each: int, seed: int = 0, size: int = DIMENSION, labels: int = 3) -> OwnedRecords:
    """Owners with one to ``each`` records, with features of random directions."""
    draw = np.random.default_rng(seed)
    owner_of = np.repeat(np.arange(owners), draw.integers(1, each + 1, owners))
    vectors = draw.normal(size=(len(owner_of), size))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    features = FeatureMap(size).features(vectors).astype(np.float32)
    return OwnedRecords(features, draw.integers(0, labels, len(owner_of)), owner_of)


def only(records: OwnedRecords, kept: NDArray[np.bool_]) -> OwnedRecords:
    return OwnedRecords(records.features[kept], records.labels[kept], records.owners[kept])


def store_of(owners: int = 300, seed: int = 0) -> ExemplarStore:
    """Texts whose vectors point to their label, one owner each."""
    draw = np.random.default_rng(seed)
    kinds = draw.integers(0, 3, owners)
    vectors = (np.eye(3, DIMENSION)[kinds] * 3 + draw.normal(size=(owners, DIMENSION)) * 0.5).astype(np.float32)
    rows = [{"input": f"text {i}", "output": LABELS[kind], "owner": f"o{i}"} for i, kind in enumerate(kinds)]
    return ExemplarStore.from_records(rows, EMBEDDINGS, owner_key="owner", vectors=vectors, progress=False)


@pytest.fixture
def budgets(tmp_path: Path) -> Iterator[Any]:
    opened: list[PrivacyBudget] = []

    def make(epsilon: float = 8.0, count: int = 1, **how: Any) -> PrivacyBudget:
        url = f"sqlite:///{tmp_path}/{how.pop('file', len(opened))}.db"
        opened.append(PrivacyBudget(epsilon, 1e-5, {"head": count}, ledger=url, **how))
        return opened[-1]

    yield make
    for budget in opened:
        budget.close()


# -- a step ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [1, 2, 7])
@pytest.mark.parametrize("spread", [0.0, 0.3, 30.0, 1e6])
def test_a_sum_is_the_sum_of_its_owners_parts_to_the_last_bit(each: int, spread: float) -> None:
    """No owner changes another's part: not in one lattice step of 2^-36, however the others are blocked."""
    records = records_of(40, each, seed=each)
    weights = np.random.default_rng(1).normal(size=(3, DIMENSION + 1)) * spread
    parts = [clipped_sum(only(records, records.owners == owner), weights) for owner in range(40)]
    assert (clipped_sum(records, weights) == sum(parts)).all()
    for owner in range(0, 40, 7):
        assert (clipped_sum(only(records, records.owners != owner), weights) == sum(parts) - parts[owner]).all()


@pytest.mark.parametrize("each", [1, 3, 50, 1500])
@pytest.mark.parametrize("spread", [0.0, 1.0, 1e6])
def test_no_owner_moves_a_sum_by_more_than_1(each: int, spread: float) -> None:
    """In whole numbers, with no rounding; and owners of large gradients use nearly all of it."""
    records = records_of(6 if each > 100 else 30, each, seed=each)
    weights = np.random.default_rng(2).normal(size=(3, DIMENSION + 1)) * spread
    squares = []
    for owner in np.unique(records.owners):
        part = clipped_sum(only(records, records.owners == owner), weights)
        squares.append(sum(int(number) ** 2 for number in part.ravel()))
    assert max(squares) <= LATTICE**2
    assert spread == 0.0 or max(squares) > 0.9 * LATTICE**2


def test_an_owner_of_a_hundred_equal_records_counts_as_one() -> None:
    one = records_of(1, 1)
    many = OwnedRecords(np.repeat(one.features, 100, axis=0), np.repeat(one.labels, 100), np.zeros(100, np.int64))
    part = clipped_sum(many, np.zeros((3, DIMENSION + 1)))
    assert 0.99 * LATTICE**2 < sum(int(number) ** 2 for number in part.ravel()) <= LATTICE**2


def test_a_step_is_the_gradient_of_the_cross_entropy() -> None:
    """Owners of one record, small weights: the clipped sum is the plain gradient, scaled where it is longer than 1."""
    records = records_of(50, 1)
    weights = np.random.default_rng(3).normal(size=(3, DIMENSION + 1)) * 0.2
    x = records.features / FeatureMap.unit
    scores = np.exp(x @ weights.T)
    gaps = scores / scores.sum(axis=1, keepdims=True) - np.eye(3)[records.labels]
    long = np.linalg.norm(gaps, axis=1) * np.linalg.norm(x, axis=1)
    expected = (gaps / np.maximum(long, 1.0)[:, None]).T @ x
    np.testing.assert_allclose(clipped_sum(records, weights) / LATTICE, expected, atol=50 * 1e-3)


def test_probabilities_are_those_of_softmax_nearly() -> None:
    scores = np.random.default_rng(4).normal(size=(200, 5)) * 3
    powers = np.exp(scores)
    np.testing.assert_allclose(probabilities(scores), powers / powers.sum(axis=1, keepdims=True), atol=0.02)
    far = probabilities(np.array([[0.0, -5e3], [1e9, 0.0]]))
    assert (far == [[1.0, 0.0], [1.0, 0.0]]).all()


@pytest.mark.parametrize("kind", ["embeddings", "principal", "long"])
def test_features_have_norm_at_most_1_and_depend_on_their_own_row(kind: str) -> None:
    draw = np.random.default_rng(5)
    vectors = draw.normal(size=(500, DIMENSION))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    public = draw.normal(size=(100, DIMENSION)) + 0.3
    features = {
        "embeddings": FeatureMap(DIMENSION),
        "principal": FeatureMap.of(public / np.linalg.norm(public, axis=1, keepdims=True), 5),
        "long": FeatureMap(DIMENSION, scale=16.0, bias=1.0),
    }[kind]
    found = features.features(vectors)
    assert found.shape == (500, features.size)
    assert ((found**2).sum(axis=1) <= float(features.unit) ** 2).all()
    for rows in (slice(0, 1), slice(3, 10), slice(100, 500)):
        assert (features.features(vectors[rows]) == found[rows]).all()


@pytest.mark.parametrize(
    "change",
    [
        {"scale": float("nan")},
        {"scale": 1e305},
        {"scale": -1.0},
        {"scale": "2"},
        {"bias": float("inf")},
        {"bias": 2.0},
        {"mean": np.full(4, np.nan)},
        {"mean": np.full(4, 2.0)},
        {"mean": np.zeros(3)},
        {"mean": "mean"},
        {"projection": np.full((2, 4), 200.0)},
        {"projection": np.full((2, 4), np.inf)},
        {"projection": np.zeros(4)},
        {"projection": np.zeros((0, 4))},
        {"projection": np.zeros((2**14, 4))},
        {"dimension": 2**14},
        {"dimension": 0},
    ],
)
def test_a_feature_map_beyond_exact_arithmetic_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(change))):
        FeatureMap(**{"dimension": 4, **change})


def test_the_widest_feature_maps_stay_exact() -> None:
    """At the bounds: long rows, a large scale, many features, half precision. Each row by itself, and all together."""
    draw = np.random.default_rng(7)
    rows = draw.normal(size=(300, 64))
    rows *= 255.0 / np.linalg.norm(rows, axis=1, keepdims=True)
    mean = draw.normal(size=64)
    vectors = draw.normal(size=(40, 64))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    mean *= 1.99 / np.linalg.norm(mean)
    for features in (
        FeatureMap(64, mean, rows, scale=1024.0, bias=1.0),
        FeatureMap(64, mean.astype(np.float16), rows.astype(np.float16)),
        FeatureMap(64, projection=draw.normal(size=(2**14 - 1, 64)) * 1e-6),
    ):
        found = features.features(vectors)
        assert ((found**2).sum(axis=1) <= float(features.unit) ** 2).all()
        assert (np.concatenate([features.features(row[None]) for row in vectors]) == found).all()
        records = OwnedRecords(found.astype(np.float32), np.arange(40) % 3, np.arange(40) // 2)
        weights = draw.normal(size=(3, features.size)) * 1e6
        parts = [clipped_sum(only(records, records.owners == owner), weights) for owner in range(20)]
        assert (clipped_sum(records, weights) == sum(parts)).all()
        assert max(sum(int(number) ** 2 for number in part.ravel()) for part in parts) <= LATTICE**2


def test_embeddings_that_are_no_unit_vectors_count_as_zero() -> None:
    strange = np.array([[np.nan, 0.0], [np.inf, 0.0], [3.0, 0.0], [0.6, 0.8]])
    found = FeatureMap(2).features(strange)
    assert (found[:3, :2] == 0.0).all()
    assert found[3, 0] > 0.0


# -- its price ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (20, 1), (20, 12)])
def test_the_plans_noise_is_that_of_so_many_gaussians_together(steps: int, count: int) -> None:
    """Closed form: steps * count Gaussians of multiplier sigma are one of sigma / sqrt(steps * count)."""
    request = LineRequest("head", 1.0, count, options={"steps": steps})
    plan = PrivacyPlan.solve(epsilon=1.0, delta=1e-5, lines={"head": request})
    sigma = plan.lines["head"].parameter
    assert Gaussian(sigma / math.sqrt(steps * count)).delta(1.0) <= 1e-5
    assert Gaussian(0.998 * sigma / math.sqrt(steps * count)).delta(1.0) > 1e-5


def test_the_profile_is_that_of_the_lattice() -> None:
    """At 128 lattice steps of noise the rounding shows; far above them it does not."""
    family = MECHANISMS["head"]
    fine = family.of({"steps": 20.0}).profile(20.0)
    assert fine.delta(1.0) == pytest.approx(Gaussian(20.0 / math.sqrt(20)).delta(1.0), rel=1e-9)
    coarse = family.of({"step": 1 / 64, "steps": 1.0}).profile(2.0)
    assert coarse.delta(1.0) == pytest.approx(Gaussian(math.sqrt(128.0**2 - 4.0) / 64).delta(1.0), rel=1e-9)


def test_every_step_draws_the_plans_noise_on_every_number(noise: Noise, budgets: Any) -> None:
    budget = budgets()
    PrivateHead.fit(store_of(), LABELS, budget, progress=False)
    sigma = budget.plan.lines["head"].parameter
    assert noise.asked == [(sigma * LATTICE, 3 * (DIMENSION + 1))] * 20
    assert budget.spent() == 1


def test_a_line_with_another_rate_is_refused(budgets: Any, tmp_path: Path) -> None:
    releases = {"head": LineRequest("head", 0.1, 1)}
    budget = PrivacyBudget(1.0, 1e-5, releases, ledger=f"sqlite:///{tmp_path}/rate.db")
    with pytest.raises(PlanMismatch, match="rate"):
        PrivateHead.fit(store_of(), LABELS, budget, progress=False)
    budget.close()


def test_a_number_of_owners_that_was_declared_stands(noise: Noise, tmp_path: Path) -> None:
    """Neither the live store nor a later call changes it; and a plan that keeps none asks for one."""
    for name, declared in (("request", True), ("declare", False)):
        releases: Any = {"head": LineRequest("head", 1.0, 2, owners=500) if declared else 2}
        budget = PrivacyBudget(1.0, 1e-5, releases, ledger=f"sqlite:///{tmp_path}/{name}.db")
        if not declared:
            budget.declare("head", "head", 1.0, rate_is_explicit=True, owners=500)
        PrivateHead.fit(store_of(), LABELS, budget, progress=False)
        assert budget.public_owners == 500
        with pytest.raises(PlanMismatch, match="owners"):
            PrivateHead.fit(store_of(), LABELS, budget, owners=400, progress=False)
        PrivateHead.fit(store_of(310), LABELS, budget, owners=500, progress=False)
        budget.close()
    lines = {"head": LineRequest("head", 1.0, 1), "vote": LineRequest("vote", 0.1, 5, owners=300)}
    budget = PrivacyBudget(3.0, 1e-5, lines, ledger=f"sqlite:///{tmp_path}/none.db")
    budget.line("vote", 0.1, name="vote")
    with pytest.raises(InvalidParameter, match="owners"):
        PrivateHead.fit(store_of(), LABELS, budget, line="head", progress=False)
    PrivateHead.fit(store_of(), LABELS, budget, line="head", owners=300, progress=False)
    budget.close()


def test_the_number_of_owners_is_declared_once(noise: Noise, budgets: Any) -> None:
    """A refit after owners have come divides by the same number: a constant that follows the store is private."""
    store, budget = store_of(), budgets(count=3)
    first = PrivateHead.fit(store, LABELS, budget, progress=False)
    store.add([{"input": "one more", "output": "red", "owner": "new"}])
    PrivateHead.fit(store, LABELS, budget, progress=False)
    assert budget.public_owners == 300
    with pytest.raises(PlanMismatch, match="owners"):
        PrivateHead.fit(store, LABELS, budget, owners=301, progress=False)
    assert budget.spent() == 2
    assert first.receipt["remaining"] == 2


def test_a_budget_that_is_spent_says_no(budgets: Any) -> None:
    store, budget = store_of(), budgets()
    PrivateHead.fit(store, LABELS, budget, progress=False)
    with pytest.raises(PrivacyBudgetExceeded):
        PrivateHead.fit(store, LABELS, budget, progress=False)


def test_the_weights_of_an_earlier_plan_are_a_function_of_the_noisy_sums() -> None:
    sums = [np.full((2, 3), number * LATTICE, np.int64) for number in (4, 2)]
    for sigma, rate in ((0.01, 5), (0.1, 5), (0.25, 2), (5, 0.1)):  # 10 / (20 sigma), at most 5
        weights, mean = descend(sums, owners=10, sigma=sigma, steps=2, shape=(2, 3), even=False)
        assert weights == pytest.approx(np.full((2, 3), -rate * (0.4 + 0.9 * 0.4 + 0.2)))
        assert mean == pytest.approx(weights)


# -- what it answers ---------------------------------------------------------------------------------------------------


def test_a_head_with_default_settings_learns_and_answers_without_a_ledger(budgets: Any) -> None:
    """Noise from the operating system at epsilon 8 and 600 owners: at least 85 of 100 points of three clear groups."""
    store, budget = store_of(600), budgets()
    head = PrivateHead.fit(store, LABELS, budget, progress=False)
    budget.close()
    fresh = store_of(300, seed=9)
    with fresh.reading() as view:
        rows, _ = view.rows_of(view.numbers)
        vectors, told = view.vectors(rows), [record["output"] for record in view.read(rows)]
    answers = head.answers(vectors)
    assert np.mean([answer["label"] == label for answer, label in zip(answers, told, strict=True)]) > 0.85
    for answer in answers:
        assert sum(answer["scores"].values()) == pytest.approx(1.0)
        assert answer["confidence"] == max(answer["scores"].values()) == answer["scores"][answer["label"]]


def test_every_way_to_ask_gives_one_answer(noise: Noise, budgets: Any) -> None:
    head = PrivateHead.fit(store_of(), LABELS, budgets(), progress=False)
    asked = ["which?", "what else?"]
    answers = head.batch([{"input": text} for text in asked])
    ways: list[Any] = [
        [head.invoke(text) for text in asked],
        [asyncio.run(head.ainvoke({"input": text})) for text in asked],
        asyncio.run(head.abatch(asked)),
        [next(head.stream(text)) for text in asked],
        (RunnableLambda(lambda text: {"input": text}) | head).batch(asked),
    ]
    for way in ways:
        for found, answer in zip(way, answers, strict=True):
            assert found["label"] == answer["label"]
            assert found["scores"] == pytest.approx(answer["scores"])
    assert head.batch([]) == []
    one, refused = head.batch([asked[0], 3], return_exceptions=True)
    assert (one["label"], refused.parameter) == (answers[0]["label"], "input")
    with pytest.raises(InvalidParameter, match="input"):
        head.batch([asked[0], 3])


def test_a_model_that_fails_on_a_question_is_said_to_be_unavailable(noise: Noise, budgets: Any) -> None:
    class Broken(DeterministicFakeEmbedding):
        rows: Any = None

        def embed_documents(self, texts: list[str]) -> Any:
            if self.rows is None:
                raise RuntimeError("no model")
            return self.rows

    head = PrivateHead.fit(store_of(), LABELS, budgets(), progress=False)
    for rows in (None, [], [[1.0]], [[float("nan")] * DIMENSION], "text"):
        head.embeddings = Broken(size=DIMENSION, rows=rows)
        for ask in (
            lambda: head.invoke("which?"),
            lambda: head.batch(["which?"]),
            lambda: asyncio.run(head.ainvoke("x")),
        ):
            with pytest.raises(ModelUnavailable):
                ask()


def test_records_are_read_in_parts(noise: Noise, budgets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner whose records lie in two parts is one owner."""
    rows = [{"input": f"text {i}", "output": LABELS[i % 3], "owner": f"o{i // 5}"} for i in range(600)]
    vectors = np.random.default_rng(1).normal(size=(600, DIMENSION)).astype(np.float32)
    heads = []
    for read in (10_000, 7):
        monkeypatch.setattr(sums, "_READ", read)
        noise.generator = np.random.default_rng(0)
        store = ExemplarStore.from_records(rows, EMBEDDINGS, owner_key="owner", vectors=vectors, progress=False)
        heads.append(PrivateHead.fit(store, LABELS, budgets(), progress=False))
    assert (heads[0].weights == heads[1].weights).all()


@pytest.mark.parametrize("question", ["", "  ", 3, None, {}, {"input": ""}, {"question": "which?"}])
def test_what_is_no_question_is_refused(question: Any, noise: Noise, budgets: Any) -> None:
    head = PrivateHead.fit(store_of(), LABELS, budgets(), progress=False)
    with pytest.raises(InvalidParameter, match="input"):
        head.invoke(question)


def test_records_without_a_label_of_the_list_count_nothing_and_are_in_the_report_alone(
    noise: Noise, budgets: Any, tmp_path: Path
) -> None:
    store, strange = store_of(), store_of()
    strange.add([{"input": f"odd {i}", "output": "mauve", "owner": f"x{i}"} for i in range(7)])
    head = PrivateHead.fit(store, LABELS, budgets(), owners=300, progress=False)
    noise.generator = np.random.default_rng(0)
    other = PrivateHead.fit(strange, [*LABELS], budgets(), owners=300, progress=False)
    assert (head.weights == other.weights).all()
    assert other.fit_report == FitReport(records=len(store), unknown_labels=7)
    other.save(tmp_path / "head.npz")
    assert b"mauve" not in (tmp_path / "head.npz").read_bytes()
    assert head.receipt["outcome"] == other.receipt["outcome"] == "released"


def test_a_label_that_no_record_has_stays_possible(noise: Noise, budgets: Any) -> None:
    head = PrivateHead.fit(store_of(), [*LABELS, "ultraviolet"], budgets(), progress=False)
    assert 0.0 < head.invoke("which?")["scores"]["ultraviolet"] < 1.0


@pytest.mark.parametrize("key", ["", " ", None, 3])
def test_a_question_has_a_key_that_is_checked_before_the_charge(key: Any, budgets: Any) -> None:
    budget = budgets()
    with pytest.raises(InvalidParameter, match="input_key"):
        PrivateHead.fit(store_of(), LABELS, budget, input_key=key, progress=False)
    assert budget.epsilon_spent() == 0


def test_half_a_character_fails_alone_in_a_batch(noise: Noise, budgets: Any) -> None:
    head = PrivateHead.fit(store_of(), LABELS, budgets(), progress=False)
    good, bad = head.batch(["which?", "\ud800"], return_exceptions=True)
    assert good["label"] in LABELS
    assert isinstance(bad, InvalidParameter)


def test_a_fit_that_cannot_begin_is_not_remembered(budgets: Any, tmp_path: Path) -> None:
    store = store_of()
    with pytest.raises(InvalidParameter, match="output"):
        PrivateHead.fit(store, LABELS, budgets(), output=tmp_path / "missing" / "head.npz", progress=False)
    assert store.released_once == ()


# -- its file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("public", [None, [f"public {i}" for i in range(40)]])
def test_a_saved_head_answers_alike(public: list[str] | None, noise: Noise, budgets: Any, tmp_path: Path) -> None:
    head = PrivateHead.fit(store_of(), LABELS, budgets(), public=public, progress=False)
    head.save(tmp_path / "head.npz")
    loaded = PrivateHead.load(tmp_path / "head.npz", EMBEDDINGS)
    assert loaded.invoke("which?") == head.invoke("which?")
    assert loaded.receipt == head.receipt
    assert loaded.features.size == head.features.size == (DIMENSION + 1)
    assert repr(loaded) == repr(head)


@pytest.mark.parametrize("content", [b"", b"PK", b"no head", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_no_head_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "head.npz").write_bytes(content)
    for path in (tmp_path / "head.npz", tmp_path / "missing.npz", tmp_path):
        with pytest.raises(InvalidParameter, match="path"):
            PrivateHead.load(path, EMBEDDINGS)


def test_a_file_with_a_pickle_or_other_content_is_refused(noise: Noise, budgets: Any, tmp_path: Path) -> None:
    path = tmp_path / "head.npz"
    head = PrivateHead.fit(store_of(), LABELS, budgets(), progress=False)
    head.save(path)
    with np.load(path) as file:
        good = dict(file)
    about = json.loads(str(good["about"]))
    for broken in (
        {**good, "weights": good["weights"][:, 1:]},
        {**good, "weights": np.full_like(good["weights"], np.nan)},
        {**good, "weights": np.array([{}], object)},
        {**good, "about": np.array(json.dumps({**about, "format": "dpicl-head-9"}))},
        {**good, "about": np.array(json.dumps({**about, "labels": ["red"]}))},
        {**good, "more": np.zeros(3)},
        {**good, "about": np.array(json.dumps({**about, "scale": None}))},
        {**good, "about": np.array(json.dumps({**about, "receipt": {}}))},
        {**good, "about": np.array(json.dumps({**about, "receipt": {**about["receipt"], "epsilon": float("nan")}}))},
        {**good, "about": np.array("[" * 100_000)},
        {**good, "mean": np.zeros(3)},
    ):
        np.savez(path, **broken)
        with pytest.raises(InvalidParameter, match="path"):
            PrivateHead.load(path, EMBEDDINGS)


def test_another_embedding_model_is_refused_by_name(noise: Noise, budgets: Any, tmp_path: Path) -> None:
    class Others(DeterministicFakeEmbedding):
        model: str = "small-3"

    PrivateHead.fit(store_of(), LABELS, budgets(), progress=False).save(tmp_path / "head.npz")
    with pytest.raises(InvalidParameter, match="small-3"):
        PrivateHead.load(tmp_path / "head.npz", Others(size=DIMENSION))


# -- interruptions -----------------------------------------------------------------------------------------------------


def interrupted(
    stop: int, monkeypatch: pytest.MonkeyPatch, store: ExemplarStore, budget: PrivacyBudget, output: Path, seed: int = 3
) -> Noise:
    """A fit that is killed before it draws the noise of step ``stop``; its source of noise draws on from there."""
    source = Noise(seed, stop=stop)
    monkeypatch.setattr(sums, "SecureRandomness", lambda: source)
    with pytest.raises(KeyboardInterrupt):
        PrivateHead.fit(store, LABELS, budget, output=output, progress=False)
    source.stop = None
    return source


@pytest.mark.parametrize("after", [0, 1, 13, 19])
def test_an_interrupted_fit_goes_on_and_is_charged_once(
    after: int, budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its noise is drawn 20 times in all, and the head is the one of a fit that nobody interrupted."""
    store, budget, output = store_of(), budgets(), tmp_path / "head.npz"
    first = interrupted(after, monkeypatch, store, budget, output)
    assert not output.exists()
    assert (tmp_path / "head.npz.part").exists()
    head = PrivateHead.fit(store, LABELS, budget, output=output, progress=False)
    assert len(first.asked) == 20
    assert budget.spent() == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("head")] == ["head.npz"]
    whole = Noise(3)
    monkeypatch.setattr(sums, "SecureRandomness", lambda: whole)
    straight = PrivateHead.fit(store_of(), LABELS, budgets(), progress=False)
    assert (straight.weights == head.weights).all()
    assert (PrivateHead.load(output, EMBEDDINGS).weights == head.weights).all()


def test_the_name_of_a_fit_is_on_the_disk_before_it_is_charged_and_the_head_before_the_name_goes(
    noise: Noise, budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut would lose a charge that was paid: nothing else knows which fit has it."""
    output, events, real = tmp_path / "head.npz", [], os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append((name, name.stat().st_size, (tmp_path / "head.npz.part").exists(), output.exists()))

    def charged(fit: Any, request: Any) -> None:
        events.append("charged")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(fitting.Fit, "reopened", charged)  # the last thing before the charge
    PrivateHead.fit(store_of(), LABELS, budgets(), output=output, progress=False)
    first = events.index("charged")
    before = [event for event in events[:first] if event[0] in (tmp_path / "head.npz.part", tmp_path)]
    after = [event for event in events[first + 1 :] if event[0].parent == tmp_path or event[0] == tmp_path]
    assert [(name.name, size > 0) for name, size, *_ in before] == [("head.npz.part", True), (tmp_path.name, True)]
    written, folder = after
    assert written[0].suffix == ".tmp"
    assert written[1] > 0
    assert folder[0] == tmp_path
    assert folder[2:] == (True, True)


def test_copies_of_a_fit_release_the_same_sums(budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FILE.part in five folders, each run to its end: one charge, and the sums that stood in the ledger first."""
    store, budget = store_of(), budgets()
    (tmp_path / "0").mkdir()
    interrupted(1, monkeypatch, store, budget, tmp_path / "0" / "head.npz")
    part = (tmp_path / "0" / "head.npz.part").read_bytes()
    weights = []
    for number in range(1, 4):
        folder = tmp_path / str(number)
        folder.mkdir()
        output = folder / "head.npz"
        moved = json.loads(part)
        (folder / "head.npz.part").write_bytes(json.dumps({**moved, "output": str(output)}).encode() + b"\n")
        source = Noise(number)
        monkeypatch.setattr(sums, "SecureRandomness", lambda source=source: source)
        weights.append(PrivateHead.fit(store, LABELS, budget, output=output, progress=False).weights)
        assert len(source.asked) == (19 if number == 1 else 0)
    assert all((other == weights[0]).all() for other in weights)
    assert budget.spent() == 1


def test_two_processes_that_make_one_step_release_the_first_sum(
    budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another copy of the fit ends while this one is within its first step: this one's own sums are never used."""
    store, budget = store_of(), budgets()
    source = interrupted(0, monkeypatch, store, budget, tmp_path / "head.npz")
    part = json.loads((tmp_path / "head.npz.part").read_bytes())
    other = tmp_path / "other.npz"
    (tmp_path / "other.npz.part").write_text(json.dumps({**part, "output": str(other)}) + "\n")
    real, done = fitting.clipped_sum, []

    def slow(records: OwnedRecords, weights: Any) -> Any:
        if not done:
            done.append(True)
            done.append(PrivateHead.fit(store, LABELS, budget, output=other, progress=False).weights)
        return real(records, weights)

    monkeypatch.setattr(fitting, "clipped_sum", slow)
    head = PrivateHead.fit(store, LABELS, budget, output=tmp_path / "head.npz", progress=False)
    assert (head.weights == done[1]).all()
    assert budget.spent() == 1
    assert len(source.asked) == 40  # of which those of one fit were kept


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_fit_that_is_killed_before_its_file_is_written_finds_its_answer(
    times: int, noise: Noise, budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, budget, output = store_of(), budgets(), tmp_path / "head.npz"
    with monkeypatch.context() as patch:
        patch.setattr(PrivateHead, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        for _ in range(times):
            with pytest.raises(KeyboardInterrupt):
                PrivateHead.fit(store, LABELS, budget, output=output, progress=False)
    again = PrivateHead.fit(store, LABELS, budget, output=output, progress=False)
    assert again.receipt["replayed"]
    assert budget.spent() == 1
    assert len(noise.asked) == 20
    assert (PrivateHead.load(output, EMBEDDINGS).weights == again.weights).all()


def test_a_part_of_another_fit_and_a_head_that_is_there_are_refused(
    budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, budget, output = store_of(), budgets(count=2), tmp_path / "head.npz"
    interrupted(2, monkeypatch, store, budget, output)
    part = tmp_path / "head.npz.part"
    before = part.read_bytes()
    with pytest.raises(InvalidParameter, match="same settings"):
        PrivateHead.fit(store, LABELS[:2], budget, output=output, progress=False)
    assert part.read_bytes() == before
    (tmp_path / "other.npz.part").write_bytes(before)
    with pytest.raises(InvalidParameter, match="move it back"):
        PrivateHead.fit(store, LABELS, budget, output=tmp_path / "other.npz", progress=False)
    for strange in (before.replace(b"dpicl-fit", b"dpicl-fat"), b"my notes", b"my notes\n", b"[1]\n"):
        part.write_bytes(strange)
        with pytest.raises(InvalidParameter, match="of a fit"):
            PrivateHead.fit(store, LABELS, budget, output=output, progress=False)
        assert part.read_bytes() == strange
    part.write_bytes(before)
    PrivateHead.fit(store, LABELS, budget, output=output, progress=False)
    with pytest.raises(InvalidParameter, match="a head is there"):
        PrivateHead.fit(store, LABELS, budget, output=output, progress=False)
    assert budget.spent() == 1
    assert output.exists()


def test_a_fit_goes_on_on_its_own_store(budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known again by its file's lineage, also after somebody was forgotten. What was never saved has no name."""
    path, output = tmp_path / "store.npz", tmp_path / "head.npz"
    store_of().save(path)
    store_of(seed=1).save(tmp_path / "other.npz")
    budget = budgets()
    interrupted(2, monkeypatch, ExemplarStore.load(path, EMBEDDINGS), budget, output)
    part = (tmp_path / "head.npz.part").read_bytes()
    for other in (ExemplarStore.load(tmp_path / "other.npz", EMBEDDINGS), store_of()):
        with pytest.raises(InvalidParameter, match=r"same store; .* delete 'head.npz.part'"):
            PrivateHead.fit(other, LABELS, budget, output=output, progress=False)
        assert (tmp_path / "head.npz.part").read_bytes() == part
    same = ExemplarStore.load(path, EMBEDDINGS)
    with pytest.warns(PrivacyWarning, match="a head"):
        same.forget("o3")
    PrivateHead.fit(same, LABELS, budget, output=output, progress=False)
    assert budget.spent() == 1


def test_a_fit_that_was_refused_leaves_no_part(noise: Noise, budgets: Any, tmp_path: Path) -> None:
    store, budget = store_of(), budgets()
    PrivateHead.fit(store, LABELS, budget, progress=False)
    with pytest.raises(PrivacyBudgetExceeded):
        PrivateHead.fit(store, LABELS, budget, output=tmp_path / "head.npz", progress=False)
    assert not list(tmp_path.glob("head*"))


def test_a_budget_that_does_not_replay_keeps_no_open_charge(
    budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit starts anew, and pays anew, at once."""
    store, budget, output = store_of(), budgets(count=2, replay=False), tmp_path / "head.npz"
    source = interrupted(5, monkeypatch, store, budget, output)
    PrivateHead.fit(store, LABELS, budget, output=output, progress=False)
    assert len(source.asked) == 25
    assert budget.spent() == 2


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_bad_input_costs_nothing(budgets: Any, tmp_path: Path) -> None:
    store, budget = store_of(), budgets()
    no_outputs = ExemplarStore.from_texts(["a", "b"], EMBEDDINGS, progress=False)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"labels": ["red"]}, "labels"),
        ({"labels": "red"}, "labels"),
        ({"labels": ["red", "Red"]}, "labels"),
        ({"store": no_outputs}, "store"),
        ({"store": "a store"}, "store"),
        ({"public": "one text"}, "public"),
        ({"public": ["one text"]}, "public"),
        ({"public": ["one", ""]}, r"public\[1\]"),
        ({"public": FeatureMap(3)}, "public"),
        ({"owners": 0}, "owners"),
        ({"owners": 1.5}, "owners"),
        ({"output": tmp_path, "budget": budgets()}, "output"),
        ({"line": "votes"}, "line"),
    ]
    for change, named in cases:
        given: dict[str, Any] = {"store": store, "labels": LABELS, "budget": budget, "progress": False, **change}
        with pytest.raises(InvalidParameter, match=named):
            PrivateHead.fit(given.pop("store"), given.pop("labels"), given.pop("budget"), **given)
    each = budgets(scope="per_principal")
    with pytest.raises(InvalidParameter, match="scope"):
        PrivateHead.fit(store, LABELS, each, progress=False)
    assert not budget.is_frozen
    assert budget.spent() == 0


def test_a_failure_on_the_private_side_is_constant_and_charged(budgets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("o17 said red")

    monkeypatch.setattr(fitting, "clipped_sum", broken)
    budget = budgets()
    with pytest.raises(ReleaseFailed) as caught:
        PrivateHead.fit(store_of(), LABELS, budget, progress=False)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    assert budget.spent() == 1


def test_a_delta_that_is_too_large_for_the_owners_is_warned_of(noise: Noise, tmp_path: Path) -> None:
    budget = PrivacyBudget(1.0, 0.01, {"head": 1}, ledger=f"sqlite:///{tmp_path}/large.db")
    with pytest.warns(PrivacyWarning, match="1/owners") as warned:
        PrivateHead.fit(store_of(), LABELS, budget, progress=False)
    assert warned[0].filename == __file__
    budget.close()


def test_few_owners_are_warned_of_with_the_accuracy_to_expect(noise: Noise, budgets: Any) -> None:
    """From the declared number, not the store's."""
    for asked, right in ((60, "43%"), (99, "47%")):
        with pytest.warns(PrivacyWarning, match=f"{asked} owners: expect about {right} right .* 3 labels .* in 33%"):
            PrivateHead.fit(store_of(60), LABELS, budgets(epsilon=0.3), owners=asked, progress=False)
    PrivateHead.fit(store_of(60), LABELS, budgets(), owners=100, progress=False)


def test_the_accuracy_to_expect_grows_from_guessing() -> None:
    for shape in ((2, 385), (20, 65)):
        found = [expected_accuracy(owners, 14.0, 20, shape) for owners in (0, 1, 10, 50, 100, 10**6)]
        assert found == sorted(found)
        assert found[0] == 1 / shape[0]
        assert found[-1] == pytest.approx(1 / shape[0] + 0.55 * (1 - 1 / shape[0]))
    assert expected_accuracy(50, 28.0, 20, (2, 385)) < expected_accuracy(50, 14.0, 20, (2, 385))
    assert expected_accuracy(50, 14.0, 20, (2, 385)) < expected_accuracy(50, 14.0, 20, (2, 65))


@pytest.mark.parametrize(
    ("shape", "found"),
    [  # measured at 99 owners and epsilon .5, 1, 4, 16: embeddings as they are, then 64 directions of public texts
        ((6, 385), (0.21, 0.24, 0.37, 0.51)),
        ((2, 385), (0.53, 0.55, 0.60, 0.67)),
        ((4, 385), (0.32, 0.39, 0.63, 0.77)),
        ((10, 385), (0.25, 0.36, 0.52, 0.63)),
        ((6, 65), (0.23, 0.28, 0.46, 0.57)),
        ((2, 65), (0.57, 0.60, 0.67, 0.71)),
        ((4, 65), (0.41, 0.52, 0.75, 0.81)),
        ((10, 65), (0.28, 0.40, 0.59, 0.66)),
    ],
)
def test_the_accuracy_to_expect_is_the_one_that_was_measured(shape: tuple[int, int], found: tuple[float, ...]) -> None:
    for epsilon, right in zip((0.5, 1.0, 4.0, 16.0), found, strict=True):
        plan = PrivacyPlan.solve(epsilon=epsilon, delta=1e-5, lines={"head": LineRequest("head", 1.0, 1)})
        expected = expected_accuracy(99, plan.lines["head"].parameter, 20, shape)
        assert expected == pytest.approx(right, abs=0.17)


def test_fits_for_few_owners_are_about_as_right_as_expected(noise: Noise, budgets: Any) -> None:
    """Three groups that overlap as those of the measured tasks do; noise and groups from a seed."""
    draw, kinds = np.random.default_rng(9), np.arange(660) % 3
    vectors = np.eye(3, DIMENSION)[kinds] * 1.5 + draw.normal(size=(660, DIMENSION))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    tests, kinds = vectors[60:], kinds[60:]
    for epsilon in (0.2, 2.0):
        right = []
        for _ in range(6):
            store = ExemplarStore.from_texts(
                [f"text {i}" for i in range(60)],
                EMBEDDINGS,
                outputs=[LABELS[i % 3] for i in range(60)],
                vectors=vectors[:60].astype(np.float32),
                progress=False,
            )
            with pytest.warns(PrivacyWarning, match="60 owners: expect") as warned:
                head = PrivateHead.fit(store, LABELS, budgets(epsilon=epsilon), progress=False)
            answers = head.answers(tests)
            right.append(np.mean([each["label"] == LABELS[kind] for each, kind in zip(answers, kinds, strict=True)]))
        expected = int(re.findall(r"about (\d+)%", str(warned[0].message))[0]) / 100
        assert abs(float(np.mean(right)) - expected) < 0.17


def test_forgetting_warns_of_heads_in_this_process(noise: Noise, budgets: Any) -> None:
    store, budget = store_of(), budgets(count=2)
    for _ in range(2):
        PrivateHead.fit(store, LABELS, budget, progress=False)
    with pytest.warns(PrivacyWarning, match="not changed by forgetting: a head, on the budget 'default'. If") as warned:
        store.forget("o3")
    assert warned[0].filename == __file__
    store_of().forget("o3")  # of which there is none


def test_forgetting_warns_of_heads_that_another_process_has_fitted(
    noise: Noise, budgets: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store.npz"
    store_of().save(path)
    worker = ExemplarStore.load(path, EMBEDDINGS)
    PrivateHead.fit(ExemplarStore.load(path, EMBEDDINGS), LABELS, budgets(name="monthly"), progress=False)
    with pytest.warns(PrivacyWarning, match="'monthly'"):
        worker.forget("o3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the command names it in its answer
        assert cli.main(["forget", "--store", str(path), "--owner", "o4"]) == 0
    assert "released once, and not changed: a head, on the budget 'monthly'" in capsys.readouterr().out
    assert cli.main(["forget", "--store", str(path), "--owner", "o5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["released_once"] == ["a head, on the budget 'monthly'"]


def test_tickets_pay_for_a_head(noise: Noise, budgets: Any) -> None:
    store, tickets = store_of(), budgets(tickets=True)
    first = PrivateHead.fit(store, LABELS, tickets, progress=False)
    noise.generator = np.random.default_rng(0)
    nobody = PrivateHead.fit(store, LABELS, tickets, progress=False)  # all tickets are spent: noise alone
    assert first.receipt["remaining"] is None
    assert np.abs(nobody.weights).max() < np.abs(first.weights).max()
