"""`evaluation.heads`: heads by the product's own fit, on embeddings that the folder keeps; when to prefer one."""

from __future__ import annotations

import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_fakes import WordEmbeddings
from numpy.typing import NDArray

from langchain_dpicl import local
from langchain_dpicl.lab.evaluation.evaluate import Evaluation, Model
from langchain_dpicl.lab.evaluation.findings import advice, choices, findings
from langchain_dpicl.lab.evaluation.heads import HeadStudy, fit_head, head_without_noise, kept_vectors
from langchain_dpicl.lab.evaluation.labels import label_votes
from langchain_dpicl.lab.evaluation.passes import EvaluationPlan
from langchain_dpicl.lab.evaluation.report import write_report
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.scores import HEAD, HEAD_PUBLIC, Score, Value, share_error
from langchain_dpicl.lab.evaluation.tasks import TASKS, ClassificationTask, Shape
from langchain_dpicl.once import sums
from langchain_dpicl.once.head import PrivateHead
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.privacy.lines import LineRequest

LABELS = ("Cat", "Dog")
EMBEDDINGS = WordEmbeddings("cat dog owl fox")
ANIMALS = ClassificationTask("animals", LABELS, Shape("", "Text: {input}\nAnimal:"))
PLAN = EvaluationPlan(owners=120, members=4, shots=1, releases=50, delta=1e-5, epsilons=(1.0, 8.0), few_shots=2)


def told(count: int, name: str) -> list[Row]:
    """Texts with their label's word, and in part another's."""
    words = [f"{label.lower()} {'owl' if i % 3 else 'fox'} {name} {i}" for i in range(count) for label in LABELS]
    return [Row(text, LABELS[i % 2], (LABELS[i % 2],)) for i, text in enumerate(words)]


ROWS, QUERIES, PUBLIC = told(60, "row"), told(6, "query"), told(8, "public")


def vectors_of(some: list[Row]) -> NDArray[np.float32]:
    return np.array(EMBEDDINGS.embed_documents([row.input for row in some]), np.float32)


def study(private: list[Row] = ROWS, **more: Any) -> HeadStudy:
    held = [row.input for row in private], [row.output for row in private], vectors_of(private)
    right, plan = [row.output for row in QUERIES], more.pop("plan", PLAN)
    public = vectors_of(PUBLIC)
    return HeadStudy(LABELS, held, vectors_of(QUERIES), right, public, EMBEDDINGS, plan, **{"heads": 2, **more})


# -- fits --------------------------------------------------------------------------------------------------------------


def test_a_head_stands_in_the_table_without_noise_and_at_each_epsilon() -> None:
    heard: list[int] = []
    found = study(progress=lambda: heard.append(1)).scores()
    assert [(s.method, s.epsilon, s.runs) for s in found] == [
        (method, epsilon, 1 if epsilon is None else 2)
        for method in (HEAD, HEAD_PUBLIC)
        for epsilon in (None, *PLAN.epsilons)
    ]
    assert len(heard) == 8
    assert {s.queries for s in found} == {len(QUERIES)}
    assert found[0].mean("accuracy") == 100.0, "the words tell the labels apart"
    sigmas = {s.epsilon: s.facts["sigma"] for s in found if s.epsilon is not None}
    assert sigmas[1.0] > 3 * sigmas[8.0]
    assert {s.facts["owners"] for s in found if s.epsilon is not None} == {120.0}
    assert [s.facts.get("public texts") for s in found] == [None] * 3 + [16.0] * 3


def test_several_fits_in_one_plan_have_more_noise_each() -> None:
    one, ten, *more = study(heads=1, plan=EvaluationPlan(120, 4, 1, 50, 1e-5, (1.0,))).fits([1, 10])
    assert [s.method for s in (one, ten, *more)] == [HEAD, HEAD, HEAD_PUBLIC, HEAD_PUBLIC]
    assert (one.study, one.facts["fits"], ten.facts["fits"]) == ("fits", 1.0, 10.0)
    assert ten.facts["sigma"] == pytest.approx(math.sqrt(10) * one.facts["sigma"], rel=0.2)


def test_without_noise_a_head_has_the_weights_of_a_fit_whose_noise_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
            return np.zeros(size, np.int64)

    monkeypatch.setattr(sums, "SecureRandomness", Silent)
    asked = study()
    for features in asked.maps.values():
        fitted, sigma = fit_head(asked.private, EMBEDDINGS, LABELS, 1.0, 1e-5, features)
        plain = head_without_noise(asked.private, EMBEDDINGS, LABELS, features, sigma=sigma)
        np.testing.assert_array_equal(plain.weights, fitted.weights)


def test_the_directions_come_from_public_texts_alone() -> None:
    mine, others = (study(private).maps[HEAD_PUBLIC].arrays for private in (ROWS, ROWS[:1]))
    assert mine.keys() == {"mean", "projection"}
    for name, array in mine.items():
        np.testing.assert_array_equal(array, others[name])


def test_the_standard_error_is_that_of_questions_and_of_noise() -> None:
    """On 4,000 evaluations of five fits each, drawn from a fixed seed: their means vary as the error says."""
    draw = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(4000):
        shares = draw.binomial(200, np.clip(0.7 + 0.05 * draw.normal(size=5), 0, 1)) / 200
        shared = draw.binomial(200, 0.7) / 200 - 0.7  # what the questions have in common
        means.append(float(np.mean(shares)) + shared)
        errors.append(share_error(list(shares), 200))
    assert np.std(means) == pytest.approx(np.mean(errors), rel=0.1)
    assert share_error([0.5], 100) == pytest.approx(0.05)
    value = Value.of_shares([0.5, 0.7], 100)
    assert (value.mean, value.deviation) == pytest.approx((60.0, 14.142136))
    assert value.error == pytest.approx(100 * math.hypot(math.sqrt(0.24 / 100), 0.1))


# -- the owners' own labels --------------------------------------------------------------------------------------------


def test_owners_near_to_a_query_vote_with_their_own_labels() -> None:
    """40 owners near to each query of a label, all with that label; the tenth of public texts is nearer than others."""
    held, asked = (vectors_of(some) for some in (ROWS, QUERIES))
    outputs, right = [row.output for row in ROWS], [row.output for row in QUERIES]
    plain, *private = label_votes(LABELS, (held, outputs), (asked, right), vectors_of(PUBLIC), PLAN, 50)
    assert [(s.method, s.epsilon, s.runs) for s in (plain, *private)] == [
        ("label vote", None, 1),
        ("label vote", 1.0, 50),
        ("label vote", 8.0, 50),
    ]
    assert (plain.mean("accuracy"), plain.facts) == (100.0, {"eligible": 12.0})
    for epsilon, score, mechanism, name in (
        (1.0, private[0], "vote-em", "eps0"),
        (8.0, private[1], "vote-bit", "sigma"),
    ):
        request = LineRequest(mechanism, 1.0, 50, options={"own_calls": 1.0})
        lines = PrivacyPlan.solve(epsilon=epsilon, delta=1e-5, lines={"one": request}).lines
        assert score.facts[name] == lines["one"].parameter
    assert (private[0].facts["tickets"], private[0].facts["rate"]) == (50.0, 1.0)
    assert private[0].mean("accuracy") < private[1].mean("accuracy") == 100.0 - private[1].facts["flipped"]


# -- the folder --------------------------------------------------------------------------------------------------------


def test_the_folder_keeps_embeddings_for_its_owner_alone(tmp_path: Path) -> None:
    path, model = tmp_path / "new" / "vectors.npz", WordEmbeddings("cat dog owl fox")
    first = kept_vectors(path, model, {"rows": ROWS, "queries": QUERIES})
    assert model.calls == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = kept_vectors(path, model, {"rows": ROWS, "queries": QUERIES})
    assert model.calls == 2
    np.testing.assert_array_equal(first["rows"], again["rows"])
    other = kept_vectors(path, model, {"rows": ROWS, "queries": QUERIES[:3]})
    assert (model.calls, len(other["queries"])) == (3, 3)
    path.write_bytes(path.read_bytes()[:100])
    kept_vectors(path, model, {"rows": ROWS})
    assert model.calls == 4, "a damaged file is made anew"


def evaluation(folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Evaluation:
    def load(**_: Any) -> Any:
        raise AssertionError("no model is needed")

    monkeypatch.setattr(local, "local_embeddings", lambda: EMBEDDINGS)
    given: dict[str, Any] = {"task": ANIMALS, "rows": ROWS, "queries": QUERIES, "public": [], "plan": PLAN}
    given |= {"model": Model("none", load), "folder": folder, "heads": 1, "methods": ["head"]}
    return Evaluation(**{**given, **more})


def test_a_head_alone_asks_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = evaluation(tmp_path, monkeypatch, vary={"fits": [3]})
    found = asked.run()
    assert [(s.method, s.study, s.epsilon) for s in found] == [
        (HEAD, "", None), (HEAD, "", 1.0), (HEAD, "", 8.0), (HEAD, "fits", 1.0), (HEAD, "fits", 8.0)
    ]  # fmt: skip
    assert asked.costs() == []
    assert choices(found) == []
    results = write_report(tmp_path, ANIMALS, found, {"owners": 120})
    assert (results["advice"], results["choices"]) == ("", [])
    assert "fits.png" in results["pictures"]


def test_one_public_example_makes_no_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = EvaluationPlan(120, 4, 1, 50, 1e-5, (8.0,), few_shots=1)
    assert {s.method for s in evaluation(tmp_path, monkeypatch, public=PUBLIC[:1], plan=plan).run()} == {HEAD}
    assert HEAD_PUBLIC in {s.method for s in evaluation(tmp_path, monkeypatch, public=PUBLIC, plan=plan).run()}


def test_the_fit_is_the_products_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the plan's epsilon and delta, on all rows."""
    seen: list[tuple[Any, ...]] = []
    real = PrivateHead.fit.__func__  # type: ignore[attr-defined]

    def fit(cls: Any, store: Any, labels: Any, budget: Any, **more: Any) -> PrivateHead:
        seen.append((len(store), budget.epsilon, budget.delta))
        return real(cls, store, labels, budget, **more)

    monkeypatch.setattr(PrivateHead, "fit", classmethod(fit))
    study(heads=1, plan=EvaluationPlan(120, 4, 1, 50, 1e-5, (1.0,))).scores()
    assert len(seen) == 2
    assert set(seen) == {(120, 1.0, 1e-5)}


# -- advice ------------------------------------------------------------------------------------------------------------

FACTS = {"members": 20.0, "releases": 10_000.0}


def score(method: str, epsilon: float | None, mean: float, error: float = 1.0, **facts: Any) -> Score:
    study = facts.pop("study", "")
    return Score(method, epsilon, {"accuracy": Value(mean, 1.0, error)}, 5, 500, facts, study)


def pair(epsilon: float, head: float, vote: float, error: float = 1.0) -> list[Score]:
    return [score("vote", epsilon, vote, error, **FACTS), score(HEAD, epsilon, head, error, owners=5452.0)]


def test_a_head_that_wins_is_advised_for_labels_and_records_that_change_seldom() -> None:
    held = [*pair(1.0, 80.0, 51.0), *pair(3.0, 82.0, 51.5), score(HEAD, None, 83.0), score("zero-shot", None, 50.0)]
    first, second, third = advice(held)
    assert first == (
        "At epsilon 1 (head 80.0, vote 51.0) and 3 (head 82.0, vote 51.5) take the head if only labels are wanted and "
        "the records change seldom. It is charged once and answers any number of questions without a call of the "
        "model. The vote ends after 10,000 answers, of 20 calls of the model each."
    )
    assert second.endswith("each fit takes a share of epsilon. `--vary fits=12,365` measures it.")
    assert third == "5,452 owners are enough at epsilon 1: noise takes 3.0 points of the head's 83.0."
    assert findings(held, "accuracy")[0].startswith(
        "At epsilon 1 the best private method, head, has accuracy 80.0, 3.0 points below itself without noise (83.0)"
    )


def test_a_vote_that_wins_is_advised_up_to_its_number_of_answers() -> None:
    held = [*pair(1.0, 60.0, 70.0), score(HEAD, None, 75.0), score(HEAD, 1.0, 40.0, study="fits", fits=12)]
    first, second, third = advice(held)
    assert first.startswith("At epsilon 1 (head 60.0, vote 70.0) take the vote, for up to 10,000 answers, of 20 calls")
    assert second.endswith("At epsilon 1 the head has 40.0 with 12 fits in one plan.")
    assert third == "5,452 owners are few for a head at epsilon 1: noise takes 15.0 points of the head's 75.0."


@pytest.mark.parametrize(
    ("head", "vote", "error", "prefer"),
    [
        (80.0, 77.0, 1.0, "head"),
        (80.0, 77.5, 1.0, "either"),
        (77.0, 80.0, 1.0, "vote"),
        (77.5, 80.0, 1.0, "either"),
        (80.0, 20.0, math.nan, "either"),
        (50.0, 40.0, 1.0, "neither"),
    ],
)
def test_two_standard_errors_and_public_answers_decide(head: float, vote: float, error: float, prefer: str) -> None:
    held = [*pair(1.0, head, vote, error), score("zero-shot", None, 50.0), score("4-shot", None, 99.0)]
    (choice,) = choices(held)
    assert choice.prefer == prefer
    words = {"head": "take the head", "vote": "take the vote", "either": "neither is surely better"}
    assert words.get(prefer, "take neither: zero-shot has 50.0 without any record.") in advice(held)[0]


def test_each_epsilon_has_its_own_choice_and_the_better_head_is_compared(tmp_path: Path) -> None:
    held = [*pair(8.0, 90.0, 80.0), *pair(1.0, 60.0, 80.0), score(HEAD_PUBLIC, 1.0, 70.0, owners=5452.0)]
    held += [score("vote", None, 81.0, **FACTS), score("zero-shot", None, 50.0)]
    assert [(c.epsilon, c.head.method, c.prefer) for c in choices(held)] == [
        (1.0, HEAD_PUBLIC, "vote"),
        (8.0, HEAD, "head"),
    ]
    results = write_report(tmp_path, TASKS["trec"], held, {**FACTS, "owners": 5452})
    assert [(c["epsilon"], c["prefer"], c["difference"]) for c in results["choices"]] == [
        (1.0, "vote", -10.0),
        (8.0, "head", 10.0),
    ]
    assert results["choices"][0]["standard_error"] == pytest.approx(math.sqrt(2))
    page = (tmp_path / "table.md").read_text("utf-8")
    assert page.index("| head (public texts) | 1 |") < page.index("**Vote or head?**\n\n- At epsilon 1 (head (public")


def test_texts_have_no_choice() -> None:
    values = {"rougeL": Value(3.0)}
    assert advice([Score("embedding", 1.0, values, 1, 9), Score("zero-shot", None, values, 1, 9)]) == []
