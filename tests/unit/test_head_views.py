"""A head's views: each record's vectors are its own, what fails adds nothing, and the file keeps what it needs."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_fakes import FakeLLM, unit
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.language_models import FakeListLLM
from langchain_core.tracers.context import collect_runs
from numpy.typing import NDArray

from langchain_dpicl import (
    ExemplarStore,
    LabelScores,
    PrivacyBudget,
    PrivateHead,
    View,
    few_shot_chain,
    label_public,
    opening,
    whole,
)
from langchain_dpicl.errors import InvalidParameter, ModelLost, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.once import fitting, probing, sums
from langchain_dpicl.once.fitting import FitReport
from langchain_dpicl.once.steps import LATTICE, FeatureMap, OwnedRecords, clipped_sum
from langchain_dpicl.once.views import JoinedViews, Opening, views_named

LABELS = ["person", "place"]
DIMENSION = 8
EMBEDDINGS = DeterministicFakeEmbedding(size=DIMENSION)
ASKED = {"person": "Who was", "place": "Where is"}
PUBLIC = [f"{ASKED[LABELS[i % 2]]} public {i}" for i in range(20)]
VIEWS = [whole, opening(2)]


def text_of(number: int) -> str:
    return f"{ASKED[LABELS[number % 2]]} number {number}"


def store_of(owners: int = 200, without: tuple[int, ...] = ()) -> ExemplarStore:
    """Texts whose vectors are hashes: only those of their first two words say something."""
    rows = [{"input": text_of(i), "output": LABELS[i % 2], "owner": f"o{i}"} for i in range(owners) if i not in without]
    return ExemplarStore.from_records(rows, EMBEDDINGS, owner_key="owner", progress=False)


@pytest.fixture
def budgets(tmp_path: Path) -> Iterator[Any]:
    opened: list[PrivacyBudget] = []

    def make(epsilon: float = 8.0) -> PrivacyBudget:
        url = f"sqlite:///{tmp_path}/{len(opened)}.db"
        opened.append(PrivacyBudget(epsilon, 1e-5, {"head": 1}, ledger=url))
        return opened[-1]

    yield make
    for budget in opened:
        budget.close()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise for every fit."""

    class Noise:
        def __init__(self) -> None:
            self.generator = np.random.default_rng(0)

        def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
            return np.rint(self.generator.normal(0.0, sigma, size)).astype(np.int64)

    monkeypatch.setattr(sums, "SecureRandomness", Noise)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[OwnedRecords]:
    """The records of every step of every fit."""
    found: list[OwnedRecords] = []
    real = fitting.clipped_sum
    monkeypatch.setattr(
        fitting, "clipped_sum", lambda records, weights: found.append(records) or real(records, weights)
    )
    return found


def fitted(budget: PrivacyBudget, store: ExemplarStore | None = None, **how: Any) -> PrivateHead:
    settings = {"public": PUBLIC, "views": VIEWS, "owners": 200, "progress": False, **how}
    return PrivateHead.fit(store or store_of(), LABELS, budget, **settings)


class Fragile(Embeddings):
    """Fails on texts with ``word``, and then, for ``down`` calls, on all texts (or answers as for another text)."""

    model = "fragile"
    state: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, word: str = "never", down: int = 0, otherwise: bool = False) -> None:
        self.word, self.down, self.otherwise = word, down, otherwise

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        left = self.state.get("left", 0)
        self.state["left"] = left - 1
        if left > 0 and not self.otherwise:
            raise TimeoutError("the private text is " + texts[0])
        if any(self.word in text for text in texts):
            self.state["left"] = self.down
            raise RuntimeError("the private text is " + texts[0])
        return EMBEDDINGS.embed_documents(["other"] * len(texts) if left > 0 else texts)

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


# -- vectors -----------------------------------------------------------------------------------------------------------


def test_an_opening_is_the_first_words_of_a_text() -> None:
    said = opening(2).said_of
    assert [said(text) for text in ("Who  was\n there?", " Who", "", "a b")] == ["Who was", "Who", "", "a b"]
    assert opening(3).name == "opening:3"
    assert views_named("whole, opening:12") == [whole, opening(12)]
    assert whole.said_of("a text") == "a text"


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.001), (1000.0, 0.5)])
@pytest.mark.parametrize("kind", ["joined", "principal"])
def test_joined_features_have_norm_at_most_1_and_are_their_rows_own(weights: tuple[float, float], kind: str) -> None:
    """In whole numbers, with no rounding; other records, or a part that is missing, change no bit of a row."""
    draw = np.random.default_rng(0)
    views = JoinedViews((View("whole", weight=weights[0]), opening(2, weight=weights[1])), (DIMENSION, 5))
    vectors = [draw.normal(size=(300, size)) for size in views.dimensions]
    vectors = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in vectors]
    parts: list[Any] = [vectors[0].astype(np.float32), [[row.astype(np.float32).tobytes()] for row in vectors[1]]]
    joined = views.joined(parts, None)
    assert np.abs(np.linalg.norm(joined, axis=1) - 1).max() < 1e-6
    features = FeatureMap(13) if kind == "joined" else FeatureMap.of(joined, 6)
    found = views._features(features, parts)
    assert max(sum(int(number) ** 2 for number in row) for row in found) <= FeatureMap.unit**2
    for some in (slice(0, 1), slice(3, 10), slice(100, 300)):
        assert (views._features(features, [part[some] for part in parts]) == found[some]).all()
    parts[1][7], parts[1][9] = TimeoutError, []
    changed = views._features(features, parts)
    kept = [i for i in range(300) if i not in (7, 9)]
    assert (changed[kept] == found[kept]).all()
    assert (changed[[7, 9]] != found[[7, 9]]).any() or weights != (1.0, 1.0)


def test_a_part_that_is_missing_adds_nothing() -> None:
    """With a mean, the features are those of the other views alone."""
    draw = np.random.default_rng(1)
    views = JoinedViews((whole, opening(2)), (DIMENSION, 5))
    mean = draw.normal(size=13) / 5
    apart = np.eye(13)
    features = FeatureMap(13, mean, apart)
    (found,) = views._features(features, [np.eye(1, DIMENSION, dtype=np.float32), [ValueError]])
    assert (found[DIMENSION:13] == 0).all()
    assert (found[:DIMENSION] != 0).any()
    (found,) = views._features(FeatureMap(13), [np.eye(1, DIMENSION, dtype=np.float32), [[]]])
    assert (found[DIMENSION:13] == 0).all()


def test_the_store_alone_has_the_features_it_had() -> None:
    vectors = np.random.default_rng(2).normal(size=(50, DIMENSION)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    features = FeatureMap(DIMENSION)
    assert (JoinedViews.of_whole(DIMENSION)._features(features, [vectors]) == features.features(vectors)).all()


# -- fitting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("public", [PUBLIC, None])
def test_a_head_learns_from_a_view_what_the_store_does_not_show(public: Any, quiet: None, budgets: Any) -> None:
    head = fitted(budgets(), public=public)
    questions = [f"{ASKED[LABELS[i % 2]]} question {i}" for i in range(40)]
    right = [LABELS[i % 2] for i in range(40)]
    assert [answer["label"] for answer in head.batch(questions)] == right
    blind = fitted(budgets(), views=None)
    assert sum(a["label"] == b for a, b in zip(blind.batch(questions), right, strict=True)) < 35
    shown = label_public(head, questions)
    assert [pair["output"] for pair in shown] == right
    chain = few_shot_chain(shown, FakeListLLM(responses=["an answer"]), head, k=2)
    assert chain.invoke({"input": "Who was it?"}) == "an answer"


def test_label_scores_stand_beside_views(quiet: None, budgets: Any, seen: list[OwnedRecords], tmp_path: Path) -> None:
    llm = FakeLLM(words=["he", "it", "so"], weight=lambda prompt, word: 0.5 + unit(prompt, word))
    head = fitted(budgets(), store_of(40), scores=LabelScores(llm, ["he", "it"]))
    assert seen[0].features.shape == (40, head.features.size + 2)
    assert ((seen[0].features.astype(np.float64) ** 2).sum(axis=1) <= float(FeatureMap.unit) ** 2).all()
    assert head.fit_report == FitReport(records=40, unknown_labels=0)
    head.save(tmp_path / "head.npz")
    assert PrivateHead.load(tmp_path / "head.npz", EMBEDDINGS, llm=llm).batch(PUBLIC) == head.batch(PUBLIC)


def test_each_private_text_is_a_call_of_its_own_and_whole_texts_are_not_embedded_again(
    quiet: None, budgets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = store_of(120), list[list[str]]()
    real = DeterministicFakeEmbedding.embed_documents
    monkeypatch.setattr(
        DeterministicFakeEmbedding, "embed_documents", lambda self, texts: asked.append(texts) or real(self, texts)
    )
    fitted(budgets(), store)
    openings = [" ".join(text.split()[:2]) for text in PUBLIC]
    private = [" ".join(text_of(i).split()[:2]) for i in range(120)]
    probe = openings[0]
    texts = [*openings, *openings[:8][::-1], *(each for text in private for each in (text, probe))]
    assert [some for some in asked if some != PUBLIC] == [[text] for text in texts]


@pytest.mark.parametrize("public", [PUBLIC, None])
def test_an_owner_moves_the_sum_by_at_most_1_and_no_other_record(
    public: Any, quiet: None, budgets: Any, seen: list[OwnedRecords]
) -> None:
    """Neighbouring stores through the whole fit: the others' features to the last bit, and the first step's sum."""
    for without in ((), (17,)):
        fitted(budgets(), store_of(60, without), public=public)
    with_owner, left = seen[0], seen[20]
    kept = [i for i in range(60) if i != 17]
    assert (with_owner.features[kept] == left.features).all()
    weights = np.random.default_rng(3).normal(size=(2, with_owner.features.shape[1]))
    moved = clipped_sum(with_owner, weights) - clipped_sum(left, weights)
    squares = sum(int(number) ** 2 for number in moved.ravel())
    assert 0 < squares <= LATTICE**2


@pytest.mark.parametrize("otherwise", [False, True])
def test_a_view_that_fails_on_a_record_adds_nothing_and_changes_no_other(
    otherwise: bool, quiet: None, budgets: Any, seen: list[OwnedRecords], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is down, or answers otherwise, after one owner's text is waited for before the next one's."""
    monkeypatch.setattr(probing, "pause", lambda seconds: lambda: None)
    Fragile.state.clear()
    fitted(budgets(), store_of(60), views=[whole, View("mine", embeddings=Fragile())])
    broken = fitted(
        budgets(), store_of(60), views=[whole, View("mine", embeddings=Fragile("number 17", 5, otherwise=otherwise))]
    )
    kept = [i for i in range(60) if i != 17]
    assert (seen[20].features[kept] == seen[0].features[kept]).all()
    assert (seen[20].features[17] != seen[0].features[17]).any()
    assert broken.fit_report == FitReport(records=60, unknown_labels=0, lost_views=1)


def test_a_model_of_a_view_that_stays_away_ends_the_fit_which_goes_on(
    quiet: None, budgets: Any, seen: list[OwnedRecords], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "PATIENCE", 0.0)
    Fragile.state.clear()
    budget, output, store = budgets(), tmp_path / "head.npz", store_of(60)
    views = [whole, View("mine", embeddings=Fragile("number 17", 10**6))]
    with pytest.raises(ModelLost) as caught:
        fitted(budget, store, views=views, output=output)
    assert caught.value.__context__ is caught.value.__cause__ is None
    assert "number" not in f"{caught.value} {caught.value.args}"
    Fragile.state.clear()
    monkeypatch.setattr(Fragile, "embed_documents", lambda self, texts: EMBEDDINGS.embed_documents(texts))
    head = fitted(budget, store, views=views, output=output)
    assert budget.spent() == 1
    assert head.fit_report == FitReport(records=60, unknown_labels=0)


def test_a_fit_goes_on_with_the_same_views_alone(
    quiet: None, budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, output, store = budgets(), tmp_path / "head.npz", store_of(60)
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "clipped_sum", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fitted(budget, store, output=output)
    for other in (None, [whole, opening(3)], [whole, opening(2, weight=0.5)], [opening(2), whole]):
        with pytest.raises(InvalidParameter, match="same settings"):
            fitted(budget, store, output=output, views=other)
    assert fitted(budget, store, output=output).fit_report == FitReport(records=60, unknown_labels=0)


def test_nothing_private_leaves_a_view(
    quiet: None, budgets: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A view that prints nothing itself, and fails with the text in its error: no log, trace, stream or file has it."""

    def last_word(text: str) -> str:
        if "number 17" in text:
            raise ValueError(text)
        return text.split()[-1]

    with caplog.at_level(logging.DEBUG), collect_runs() as runs:
        head = fitted(budgets(), store_of(60), views=[whole, View("last", last_word)])
        head.invoke("Who was it?")
    said = capfd.readouterr()
    told = [record.getMessage() for record in caplog.records] + [said.out, said.err]
    told += [json.dumps([run.inputs, run.outputs], default=repr) for run in runs.traced_runs]
    assert [text for text in told if "number" in text] == []
    assert runs.traced_runs
    assert head.fit_report == FitReport(records=60, unknown_labels=0, lost_views=1)


def test_what_a_view_keeps_ends_with_its_call(quiet: None, budgets: Any, seen: list[OwnedRecords]) -> None:
    """A function that counts its calls gives each text what a first call gives."""
    met: list[str] = []

    def counting(text: str) -> str:
        met.append(text)
        return f"{text} {len(met)}"

    head = fitted(budgets(), store_of(40), views=[View("count", counting)], public=None)
    vectors = np.array(EMBEDDINGS.embed_documents([f"{text_of(i)} 1" for i in range(40)]))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.abs(seen[0].features - head.features.features(vectors)).max() <= 1
    assert met == []


# -- answers and the file ----------------------------------------------------------------------------------------------


def test_every_way_to_ask_gives_the_same_answer_and_vectors_alone_none(quiet: None, budgets: Any) -> None:
    head = fitted(budgets())
    questions = ["Who was it?", {"input": "Where is it?"}]

    async def asked() -> list[Any]:
        return [await head.ainvoke(question) for question in questions] + await head.abatch(questions)

    answers = [*map(head.invoke, questions), *head.batch(questions), *asyncio.run(asked())]
    assert [answer["label"] for answer in answers] == ["person", "place"] * 4
    for i, answer in enumerate(answers):
        assert answer["scores"] == pytest.approx(answers[i % 2]["scores"])
    with pytest.raises(InvalidParameter, match="vectors"):
        head.answers(np.eye(DIMENSION, dtype=np.float32))


def test_a_question_that_a_view_fails_on_fails_alone_and_an_empty_view_does_not(quiet: None, budgets: Any) -> None:
    def after_colon(text: str) -> str:
        return {"none": 3}.get(text, text.partition(":")[2])  # type: ignore[return-value]

    public = [f"{text}: {text}" for text in PUBLIC]
    head = fitted(budgets(), store_of(40), public=public, views=[whole, View("after", after_colon)])
    found = head.batch(["Who: was", "none", "Who was"], return_exceptions=True)
    assert isinstance(found[1], ModelUnavailable)
    assert "TypeError" in str(found[1])
    assert {found[0]["label"], found[2]["label"]} <= {*LABELS}
    assert head.fit_report == FitReport(records=40, unknown_labels=0)


def test_a_saved_head_has_its_views(quiet: None, budgets: Any, tmp_path: Path) -> None:
    head, path = fitted(budgets(), views=[whole, opening(2, weight=0.7)]), tmp_path / "head.npz"
    head.save(path)
    pickled = pickle.loads(pickle.dumps(head))  # noqa: S301 - our own bytes
    for same in (PrivateHead.load(path, EMBEDDINGS), pickled, copy.copy(head)):
        assert same.batch(PUBLIC) == head.batch(PUBLIC)
    loaded = PrivateHead.load(path, EMBEDDINGS)
    assert (loaded.views.views, loaded.views.dimensions) == (head.views.views, (DIMENSION, DIMENSION))
    with pytest.raises(InvalidParameter, match="views"):
        PrivateHead.load(path, EMBEDDINGS, views=[View("mine", str.upper)])


def test_a_saved_head_needs_the_views_of_ones_own(quiet: None, budgets: Any, tmp_path: Path) -> None:
    class Other(Fragile):
        pass

    own = View("mine", str.lower, Fragile(), weight=2.0)
    head, path = fitted(budgets(), store_of(40), views=[whole, own]), tmp_path / "head.npz"
    head.save(path)
    loaded = PrivateHead.load(path, EMBEDDINGS, views=[View("mine", str.lower, Fragile())])
    assert loaded.batch(PUBLIC) == head.batch(PUBLIC)
    for given, named in (
        ([], "'mine'"),
        ([View("other", str.lower)], "'mine'"),
        ([View("mine", str.lower)], "Fragile"),
    ):
        with pytest.raises(InvalidParameter, match=f"(?s)views.*{named}"):
            PrivateHead.load(path, EMBEDDINGS, views=given)
    with pytest.raises(InvalidParameter, match="fragile"):
        PrivateHead.load(path, EMBEDDINGS, views=[View("mine", str.lower, Other())])


def test_a_file_with_other_facts_about_its_views_is_refused(quiet: None, budgets: Any, tmp_path: Path) -> None:
    path = tmp_path / "head.npz"
    fitted(budgets(), store_of(40)).save(path)
    with np.load(path) as file:
        good = dict(file)
    about = json.loads(str(good["about"]))
    changes: list[Any] = [
        {"weight": 0.0},
        {"weight": math.nan},
        {"dimension": 3},
        {"dimension": "8"},
        {"model": 3},
        {"more": 1},
        {"name": 3},
    ]
    for facts in [[], 3, *([about["views"][0], {**about["views"][1], **change}] for change in changes)]:
        np.savez(path, **{**good, "about": np.array(json.dumps({**about, "views": facts}))})
        with pytest.raises(InvalidParameter, match="path"):
            PrivateHead.load(path, EMBEDDINGS)


def test_a_head_says_none_of_these_below_a_public_confidence(quiet: None, budgets: Any, tmp_path: Path) -> None:
    head = fitted(budgets())
    plain = head.batch(PUBLIC)
    below = sorted(answer["confidence"] for answer in plain)[7]
    strict = head.with_none(below)
    for found in (strict, PrivateHead.load(saved(strict, tmp_path), EMBEDDINGS), strict.with_none(below)):
        for answer, before in zip(found.batch(PUBLIC), plain, strict=True):
            expected = before["label"] if before["confidence"] >= below else "none of these"
            assert answer == {**before, "label": expected}
    assert sum(answer["label"] == "none of these" for answer in strict.batch(PUBLIC)) == 7
    assert head.with_none(1.0, "other").invoke(PUBLIC[0])["label"] == "other"
    assert head.batch(PUBLIC) == plain
    for settings, named in (((2.0,), "below"), (("a",), "below"), ((0.5, " "), "label"), ((0.5, None), "label")):
        with pytest.raises(InvalidParameter, match=named):
            head.with_none(*settings)


def saved(head: PrivateHead, folder: Path) -> Path:
    head.save(folder / "none.npz")
    return folder / "none.npz"


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: View(""), "name"),
        (lambda: View("a,b", str.lower), "name"),
        (lambda: View(3, str.lower), "name"),  # type: ignore[arg-type]
        (lambda: View("mine"), "text_of"),
        (lambda: View("mine", "lower"), "text_of"),  # type: ignore[arg-type]
        (lambda: View("mine", None, "a model"), "embeddings"),  # type: ignore[arg-type]
        (lambda: View("mine", str.lower, weight=0.0), "weight"),
        (lambda: View("mine", str.lower, weight=math.nan), "weight"),
        (lambda: opening(0), "words"),
        (lambda: opening(2.0), "words"),  # type: ignore[arg-type]
        (lambda: opening(2, weight=-1), "weight"),
        (lambda: views_named("whole,ending:2"), "views"),
        (lambda: views_named(""), "views"),
        (lambda: views_named("whole,whole"), "views"),
    ],
)
def test_bad_views_are_refused(make: Any, named: str) -> None:
    with pytest.raises(InvalidParameter, match=named):
        make()


def test_views_that_cannot_be_used_cost_nothing(budgets: Any) -> None:
    budget, kind = budgets(), InvalidParameter
    long = View("long", embeddings=DeterministicFakeEmbedding(size=2**14 - DIMENSION))

    class Drifting(Fragile):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            self.state["calls"] = self.state.get("calls", 0) + 1
            return [[1.0, 1e-7 * self.state["calls"]] for _ in texts]

    class Uneven(Fragile):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [[1.0] * (2 + len(text) % 2) for text in texts]

    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"views": "whole"}, kind, "views"),
        ({"views": []}, kind, "views"),
        ({"views": [whole, "opening:2"]}, kind, "views"),
        ({"views": [whole, whole]}, kind, "views"),
        ({"views": [View("whole", str.lower)]}, kind, "views"),
        ({"views": [View("opening:2", Opening(3))]}, kind, "views"),
        ({"views": [whole, long]}, kind, "views.*16384 numbers"),
        ({"views": [whole, View("silent", lambda text: "")]}, kind, "views.*silent"),
        ({"views": [whole, View("uneven", embeddings=Uneven())]}, kind, "views.*uneven"),
        ({"public": FeatureMap(DIMENSION)}, kind, "public.*views"),
        ({"views": [View("mine", embeddings=Fragile("public 3"))]}, ModelUnavailable, "'mine' for public text 3"),
        ({"views": [View("mine", embeddings=Drifting())]}, UnsafeConfigurationError, "after other texts"),
    ]
    for how, error, named in cases:
        with pytest.raises(error, match=named):
            fitted(budget, store_of(40), **how)
    assert budget.spent() == 0
    assert not budget.is_frozen
