"""The sizes of a head's steps: what they make of the noise, what the plan keeps of them, and earlier plans' rule."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from numpy.typing import NDArray

from langchain_dpicl import ExemplarStore, LineRequest, PrivacyBudget
from langchain_dpicl.once import fitting
from langchain_dpicl.once.fitting import Rate, descend
from langchain_dpicl.once.head import PrivateHead
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.privacy.advice import head_steps

DIMENSION = 4
EMBEDDINGS = DeterministicFakeEmbedding(size=DIMENSION)
FEW, MANY = ["red", "green", "blue"], [f"label {number}" for number in range(11)]


def factors(owners: int, sigma: float, steps: int, labels: int, *, even: bool = True) -> NDArray[np.float64]:
    """How much each sum counts in the head: one unit of it at a time."""
    found = []
    for place in range(steps):
        sums = [np.full((labels, 1), LATTICE * (number == place), np.int64) for number in range(steps)]
        found.append(-descend(sums, owners, sigma, steps, (labels, 1), even=even)[1][0, 0])
    return np.array(found)


def efficiency(factors: NDArray[np.float64]) -> float:
    """The variance of a mean of noises that weigh the same, over that of this one."""
    return float(factors.sum() ** 2 / len(factors) / (factors**2).sum())


# -- the noise ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [2, 6, 10, 11, 60])
def test_while_noise_is_much_all_sums_count_the_same_and_move_a_score_by_what_the_rule_says(labels: int) -> None:
    """One step of the whole length has the same noise, so nothing is lost by more steps."""
    steps, owners, sigma = head_steps(labels), 500, 60.0
    rate = Rate.of(owners, sigma, steps, labels)
    found = factors(owners, sigma, steps, labels)
    np.testing.assert_allclose(found, found[0], rtol=1e-9)
    moved = math.sqrt(float((found**2).sum())) * sigma
    assert moved == pytest.approx(rate.scale * min(labels / 12, 0.9), rel=1e-9)


def test_noise_is_never_weighed_as_unevenly_as_before() -> None:
    """The earlier rule counts as if sigma were 1.19 times as large. With less noise than now some evenness is given."""
    assert efficiency(factors(500, 60.0, 20, 6, even=False)) == pytest.approx(0.709, abs=1e-3)
    least: dict[float, float] = {}
    for labels in (2, 6, 10, 50):
        for owners in (100, 1000, 3000, 10_000, 10**6):
            steps = head_steps(labels)
            momentum = Rate.of(owners, 16.7, steps, labels).momentum
            found = efficiency(factors(owners, 16.7, steps, labels))
            least[momentum] = min(found, least.get(momentum, 1.0))
    assert least[0.0] == pytest.approx(1.0)
    assert least[0.7] > 0.95
    assert least[0.9] > 0.85


def test_the_reach_grows_with_owners_and_with_labels_and_falls_with_noise() -> None:
    def reach(owners: int, sigma: float, labels: int) -> float:
        return owners * float(factors(owners, sigma, 20, labels).sum()) / Rate.of(owners, sigma, 20, labels).scale

    assert reach(1000, 16.7, 6) == pytest.approx(0.5 * 1000 * math.sqrt(20) / 16.7)
    assert reach(2000, 16.7, 6) == pytest.approx(2 * reach(1000, 16.7, 6))
    assert reach(1000, 33.4, 6) == pytest.approx(reach(1000, 16.7, 6) / 2)
    assert reach(1000, 16.7, 3) == pytest.approx(reach(1000, 16.7, 6) / 2)
    assert reach(10**6, 16.7, 6) == pytest.approx(reach(10**8, 16.7, 6)) == pytest.approx(2068, abs=1)


# -- the steps ---------------------------------------------------------------------------------------------------------


def on_a_quadratic(owners: int, sigma: float, labels: int, curvature: float) -> float:
    """The share of the way from 0 to the minimum that is left, with gradients owners * curvature * (W - 1)."""
    sums: list[NDArray[np.int64]] = []
    steps, shape = head_steps(labels), (labels, 1)
    for _ in range(steps):
        weights, _ = descend(sums, owners, sigma, steps, shape)
        sums.append(np.rint(owners * curvature * (weights - 1.0) * LATTICE).astype(np.int64))
    return float(1.0 - descend(sums, owners, sigma, steps, shape)[0][0, 0])


def test_steps_without_momentum_are_plain_gradient_descent() -> None:
    """Closed form: (1 - step * curvature)^steps is left of the way."""
    rate = Rate.of(500, 60.0, 20, 6)
    assert rate.momentum == 0.0
    assert on_a_quadratic(500, 60.0, 6, 0.05) == pytest.approx((1.0 - rate.step * 0.05) ** 20, abs=1e-9)


@pytest.mark.parametrize("labels", [2, 3, 6, 10, 11, 60])
@pytest.mark.parametrize("owners", [100, 1000, 3000, 10_000, 100_000])
def test_the_longest_steps_stay_stable(labels: int, owners: int) -> None:
    """Up to the curvature at the start, 1 / labels, that all features have if they are one vector of norm 1."""
    for curvature in (0.01, 0.1, 0.5, 1.0):
        assert abs(on_a_quadratic(owners, 16.7, labels, curvature / labels)) <= 1.0


def test_confidences_are_scaled_and_answers_are_not() -> None:
    sums = [np.random.default_rng(0).integers(-LATTICE, LATTICE, (4, 5)) for _ in range(20)]
    for owners, scale in ((500, 2.0), (100_000, 1.0)):
        last, head = descend(sums, owners, 16.7, 20, (4, 5))
        assert Rate.of(owners, 16.7, 20, 4).scale == scale
        np.testing.assert_allclose(head, scale * last, rtol=1e-12)


# -- what a plan keeps -------------------------------------------------------------------------------------------------


class Noise:
    """Draws from a seed, that are kept. Stops before draw ``stop``."""

    def __init__(self, stop: int | None = None) -> None:
        self.generator, self.drawn, self.stop = np.random.default_rng(0), 0, stop

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        if self.drawn == self.stop:
            raise KeyboardInterrupt
        self.drawn += 1
        return np.rint(self.generator.normal(0.0, sigma, size)).astype(np.int64)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Noise:
    source = Noise()
    monkeypatch.setattr("langchain_dpicl.once.sums.SecureRandomness", lambda: source)
    return source


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    found: list[PrivacyBudget] = []

    def make(releases: Any, name: str = "default") -> PrivacyBudget:
        found.append(PrivacyBudget(8.0, 1e-5, releases, f"sqlite:///{tmp_path}/budget.db", name))
        return found[-1]

    yield make
    for budget in found:
        budget.close()


def store_of(owners: int = 200) -> ExemplarStore:
    vectors = np.random.default_rng(0).normal(size=(owners, DIMENSION)).astype(np.float32)
    rows = [{"input": f"text {i}", "output": FEW[i % 3], "owner": f"o{i}"} for i in range(owners)]
    return ExemplarStore.from_records(rows, EMBEDDINGS, owner_key="owner", vectors=vectors, progress=False)


def plan_of(budget: PrivacyBudget) -> dict[str, float]:
    assert budget.plan is not None
    return dict(budget.plan.lines["head"].options)


@pytest.mark.parametrize(("first", "then", "steps"), [(FEW, MANY, 20), (MANY, FEW, 40)])
def test_the_plan_has_the_steps_of_the_first_fit_and_a_refit_keeps_them(
    first: list[str], then: list[str], steps: int, noise: Noise, opened: Any
) -> None:
    PrivateHead.fit(store_of(), first, opened({"head": 2}), progress=False)
    assert noise.drawn == steps
    again = opened({"head": 2})
    PrivateHead.fit(store_of(180), then, again, progress=False)
    assert noise.drawn == 2 * steps
    assert plan_of(again) == {"step": 2.0**-36, "steps": steps, "even": 1.0}


def test_steps_that_somebody_chose_stand(noise: Noise, opened: Any) -> None:
    budget = opened({"head": LineRequest("head", 1.0, 1, owners=200, options={"steps": 7})})
    PrivateHead.fit(store_of(), MANY, budget, progress=False)
    assert noise.drawn == plan_of(budget)["steps"] == 7
    assert plan_of(budget)["even"] == 1.0


def test_a_line_that_another_line_freezes_has_the_rule_of_today(noise: Noise, opened: Any) -> None:
    budget = opened({"head": 1, "vote": LineRequest("vote", 0.1, 5)})
    budget.declare("head", "head", 1.0, rate_is_explicit=True, owners=200)
    budget.line("vote", 0.1, name="vote")
    assert plan_of(budget)["even"] == 1.0
    PrivateHead.fit(store_of(), FEW, budget, line="head", progress=False)


def earlier(budget: PrivacyBudget) -> PrivacyBudget:
    """The budget, frozen as an earlier release froze it: without a word on the rule."""
    budget.line("head", 1.0, owners=200, rate_is_explicit=True, options={"step": 1.0 / LATTICE})
    assert budget.plan is not None
    assert set(json.loads(budget.plan.to_json())["lines"]["head"]["options"]) == {"step", "steps"}
    return budget


@pytest.mark.parametrize("stop", [None, 0, 13])
@pytest.mark.parametrize("labels", [FEW, MANY])
def test_a_plan_of_an_earlier_release_keeps_its_rule_also_when_a_killed_fit_goes_on(
    labels: list[str], stop: int | None, noise: Noise, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[NDArray[np.int64]] = []
    store, real = store_of(), fitting.descend

    def kept(seen: Any, *arguments: Any, **options: Any) -> Any:
        sums[:] = seen
        return real(seen, *arguments, **options)

    monkeypatch.setattr(fitting, "descend", kept)
    output, noise.stop = tmp_path / "head.npz", stop
    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            PrivateHead.fit(store, labels, earlier(opened({"head": 1})), output=output, progress=False)
        noise.stop = None
    budget = opened({"head": 1}) if stop is not None else earlier(opened({"head": 1}))
    head = PrivateHead.fit(store, labels, budget, output=output, progress=False)
    sigma = budget.plan.lines["head"].parameter  # type: ignore[union-attr]
    assert noise.drawn == len(sums) == 20
    shape = (len(labels), DIMENSION + 1)
    assert (head.weights == real(sums, 200, sigma, 20, shape, even=False)[1]).all()
    assert (head.weights != real(sums, 200, sigma, 20, shape)[1]).any()
