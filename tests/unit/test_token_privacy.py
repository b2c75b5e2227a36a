"""The privacy of whole answers, exhaustively: every coin and every output of two neighbouring stores.

`law` runs the sampler's own private side (draws, model, answer) once for every branch of every coin, choice of exemplar
and token, so that it gives the exact probability of every output. The true delta(eps) of two stores, one of which
lacks an owner, must not exceed what the accountant says of that many tokens; and every mistake of a list must.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import table_model
from branching import Coins, Tree
from numpy.typing import NDArray
from profiles import repeated_delta
from table_model import TableModel

from langchain_dpicl import DPSampler, ExemplarStore, PoissonExampleSelector, PrivacyBudget
from langchain_dpicl.calls.flow import run
from langchain_dpicl.decoding import DemonstrationTemplate, answer, exemplars
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.profile import Subsampled
from langchain_dpicl.release.transaction import Request

EPSILONS = [-0.5, 0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
RATE, BOUND = 0.3, 1.25


def softmax(scores: NDArray[np.int64]) -> NDArray[np.float64]:
    weights = np.exp((scores - scores.max()) * answer.STEP)
    return np.asarray(weights / weights.sum(), np.float64)


def law(sampler: DPSampler, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The exact probability of every text, its end marked with a full stop."""
    tree, outputs = Tree(), defaultdict[str, float](float)
    sampler._randomness = Coins(tree)  # type: ignore[assignment]
    with monkeypatch.context() as patch:
        patch.setattr(answer, "draw", lambda scores, _: tree.choose(softmax(scores).tolist()))
        while True:
            text = one_answer(sampler)
            outputs[text] += tree.weight
            if not tree.next():
                break
    assert math.isclose(sum(outputs.values()), 1.0, rel_tol=1e-9)
    return outputs


def one_answer(sampler: DPSampler) -> str:
    request = Request("?", sampler.line(), None, None, "")
    written = sampler._written(request, sampler.settings.max_tokens, request.line.rate)
    return " ".join(map(str, run(written).tokens))


# -- the cases ---------------------------------------------------------------------------------------------------------


def loud(demonstration: str, released: str) -> list[float]:
    """Zero-shot indifferent; A shouts the first token down, B shouts it up, as loudly as a float can."""
    public = [0.0, 0.1, 0.0, 0.0]
    return {"": public, "A": [-1e30, 0.1, 0.0, 0.0], "B": [1e30, 0.0, -5.0, 2.0], "C": [0.0, 1.0, -1.0, 0.5]}[
        demonstration
    ]


def quiet(demonstration: str, released: str) -> list[float]:
    """Ranges about the bound, and an opinion that depends on what was released."""
    if not demonstration:
        return [0.3, -0.4, 0.2, -1.0] if released.endswith("a") else [0.0, 0.5, -0.3, 0.4]
    seed = sum(map(ord, demonstration + released))
    return (np.sin(np.arange(1, 5) * seed) * (4.0 if demonstration == "A" else 1.2)).tolist()


def adaptive(demonstration: str, released: str) -> list[float]:
    """A shouts for the token that would betray it: the other one after each step."""
    push = 40.0 if len(released) % 2 else -40.0
    return {"": [0.0, 0.0, -3.0, -3.0], "A": [push, 0.0, 0.0, -push]}.get(demonstration, [0.5, 0.0, 0.2, 0.0])


def steep(demonstration: str, released: str) -> list[float]:
    """A public opinion that A shares."""
    return [50.0, 0.0, 0.0, 0.0] if demonstration == "A" else [1.0, 0.0, 0.0, 0.0]


def rare(demonstration: str, released: str) -> list[float]:
    """A shouts for one token, that the public finds unlikely."""
    return [30.0, 0.0, -30.0, -30.0] if demonstration == "A" else [-1.0, 0.0, -30.0, -30.0]


Case = dict[str, Any]
CASES: dict[str, Case] = {
    "shouting": {"table": loud, "owners": {"a": "A", "b": "B"}, "max_tokens": 2},
    "about the bound": {"table": quiet, "owners": {"a": "A", "b": "B", "c": "C"}, "max_tokens": 2, "top_k": 3},
    "three tokens": {"table": adaptive, "owners": {"a": "A", "b": "B"}, "max_tokens": 3, "top_k": 2},
    "cold": {"table": loud, "owners": {"a": "A", "b": "C"}, "max_tokens": 2, "temperature": 0.5, "shots": 0.6},
    "two exemplars": {"table": loud, "owners": {"a": "AA", "b": "C"}, "max_tokens": 2},
    "steep": {"table": steep, "owners": {"a": "A", "b": "B"}, "max_tokens": 1, "top_k": 4},
    "a rare token": {"table": rare, "owners": {"a": "A", "b": "B"}, "max_tokens": 3, "top_k": 2},
    "an end": {"table": quiet, "owners": {"a": "A", "b": "B"}, "max_tokens": 2, "min_tokens": 1, "end": {0}},
}


@pytest.fixture
def sampler_of(
    budget_of: Callable[..., PrivacyBudget], store_of: Callable[..., ExemplarStore]
) -> Callable[..., DPSampler]:
    """sampler_of(case, without=owner): a sampler over the case's store, less one owner, at rate and bound as above."""

    def make(case: Case, without: str | None = None) -> DPSampler:
        records = [
            {"input": text, "output": "x", "owner": owner}
            for owner, texts in case["owners"].items()
            if owner != without
            for text in texts
        ]
        model = TableModel(case["table"], "abcd", frozenset(case.get("end", ())))
        options = {key: case[key] for key in ("max_tokens", "min_tokens", "top_k", "temperature") if key in case}
        selector = PoissonExampleSelector(store_of(records), 2, rate=RATE, max_exemplars=8)
        budget = budget_of(400.0, 0.05, 10_000)
        sampler = DPSampler(
            model,
            selector,
            budget,
            template=DemonstrationTemplate("{input}", "?"),
            shots=case.get("shots", 1.0),
            pad=False,
            **{"top_k": 4, **options},
        )
        sampler.line().parameter = BOUND
        return sampler

    return make


def excess(case: Case, sampler_of: Callable[..., DPSampler], monkeypatch: pytest.MonkeyPatch) -> float:
    """By how much the true delta exceeds the accountant's, at its worst.

    Each owner is left out in turn, in both directions.
    """
    base = Subsampled(MECHANISMS["tokens"]().profile(BOUND), RATE)
    whole = law(sampler_of(case), monkeypatch)
    worst = -math.inf
    for owner in case["owners"]:
        less = law(sampler_of(case, without=owner), monkeypatch)
        for direction, p, q in (("remove", whole, less), ("add", less, whole)):
            allowed = repeated_delta(base, case["max_tokens"], np.array(EPSILONS), direction)  # type: ignore[arg-type]
            for epsilon, bound in zip(EPSILONS, allowed, strict=True):
                true = sum(max(0.0, p.get(y, 0.0) - math.exp(epsilon) * q.get(y, 0.0)) for y in {*p, *q})
                worst = max(worst, true - bound)
    return worst


@pytest.mark.parametrize("name", CASES)
def test_no_output_of_two_neighbouring_stores_tells_more_than_the_plan_says(
    name: str, sampler_of: Callable[..., DPSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert excess(CASES[name], sampler_of, monkeypatch) <= 1e-12


def test_the_bound_is_nearly_reached(sampler_of: Callable[..., DPSampler], monkeypatch: pytest.MonkeyPatch) -> None:
    """One token and one owner whose demonstration pulls two tokens apart: nine tenths of what is accounted for."""
    case = {
        "table": lambda shown, _: [9.0, 0.0, -20.0, -20.0] if shown == "A" else [-0.6, 0.0, -20.0, -20.0],
        "max_tokens": 1,
    }
    whole = law(sampler_of({**case, "owners": {"a": "A", "b": "B"}}), monkeypatch)
    less = law(sampler_of({**case, "owners": {"b": "B"}}), monkeypatch)
    allowed = Subsampled(MECHANISMS["tokens"]().profile(BOUND), RATE).direction_delta(np.array([0.0]), "remove")[0]
    assert 0.9 * allowed < sum(max(0.0, whole[y] - less[y]) for y in whole) <= allowed


# -- mistakes: each of them must break the bound -----------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def no_clipping(patch: Patch) -> None:
    def terms(one_shot: Any, zero_shot: Any, *, bound: float, temperature: float, cap: float) -> NDArray[np.int64]:
        return np.asarray(np.clip((one_shot - zero_shot) / temperature, -100, 100) / answer.STEP, np.int64)

    patch.setattr(answer, "clipped_terms", terms)


def clipping_to_the_bound_on_both_sides(patch: Patch) -> None:
    def terms(one_shot: Any, zero_shot: Any, *, bound: float, temperature: float, cap: float) -> NDArray[np.int64]:
        return np.asarray(np.clip((one_shot - zero_shot) / temperature, -bound, bound) / answer.STEP, np.int64)

    patch.setattr(answer, "clipped_terms", terms)


def a_weight_above_the_bound_over_the_range(patch: Patch) -> None:
    real = answer.clipped_terms
    patch.setattr(
        answer, "clipped_terms", lambda one, zero, *, bound, **rest: real(one, zero, bound=1.5 * bound, **rest)
    )


def the_temperature_after_the_clipping(patch: Patch) -> None:
    real = answer.clipped_terms

    def terms(one_shot: Any, zero_shot: Any, *, bound: float, temperature: float, cap: float) -> NDArray[np.int64]:
        after = real(one_shot, zero_shot, bound=bound, temperature=1.0, cap=cap) / temperature
        return np.asarray(after, np.int64)

    patch.setattr(answer, "clipped_terms", terms)


def _seeing_all_rows(patch: Patch) -> list[NDArray[np.float32]]:
    """The last logits, for a mistake that looks at private ones."""
    seen: list[NDArray[np.float32]] = []
    real = table_model.TableSession.logits

    def logits(self: Any, rows: Any, released: Any) -> NDArray[np.float32]:
        seen[:] = [real(self, rows, released)]
        return seen[0]

    patch.setattr(table_model.TableSession, "logits", logits)
    return seen


def candidates_of_the_mixed_logits(patch: Patch) -> None:
    seen, real = _seeing_all_rows(patch), answer.candidates
    patch.setattr(answer, "candidates", lambda _, top_k, barred: real(seen[0].sum(axis=0), top_k, barred))


def end_tokens_barred_by_private_logits(patch: Patch) -> None:
    seen, real = _seeing_all_rows(patch), answer.candidates

    def masked(zero_shot: Any, top_k: int, barred: Any) -> NDArray[np.int64]:
        return real(zero_shot, top_k, {0} if 0 in seen[0][1:].argmax(axis=1) else barred)

    patch.setattr(answer, "candidates", masked)


def shots_counted_in_the_sample(patch: Patch) -> None:
    seen, real = _seeing_all_rows(patch), answer.base_scores
    patch.setattr(answer, "base_scores", lambda zero, _, temperature: real(zero, len(seen[0]), temperature))


def one_sample_for_all_tokens(patch: Patch) -> None:
    real = exemplars.Exemplars.draw

    def once(self: Any, randomness: Any, rate: float | None, shared: str, count: int, **how: Any) -> exemplars.Draw:
        drawn = real(self, randomness, rate, shared, 1, **how)
        return exemplars.Draw(drawn.demonstrations, list(drawn.steps) * count)

    patch.setattr(exemplars.Exemplars, "draw", once)


def every_exemplar_of_an_owner(patch: Patch) -> None:
    def rows(view: Any, among: Any, _: Any, rate: float, randomness: Any) -> NDArray[np.int64]:
        return np.asarray(view.rows_of(among[randomness.coin_positions(len(among), rate)])[0], np.int64)

    patch.setattr(exemplars, "_one_row_each", rows)


MISTAKES = [
    (no_clipping, "shouting"),
    (clipping_to_the_bound_on_both_sides, "shouting"),
    (a_weight_above_the_bound_over_the_range, "shouting"),
    (the_temperature_after_the_clipping, "cold"),
    (candidates_of_the_mixed_logits, "three tokens"),
    (end_tokens_barred_by_private_logits, "an end"),
    (shots_counted_in_the_sample, "steep"),
    (one_sample_for_all_tokens, "a rare token"),
    (every_exemplar_of_an_owner, "two exemplars"),
]


@pytest.mark.parametrize(("mistake", "name"), MISTAKES, ids=[mistake.__name__ for mistake, _ in MISTAKES])
def test_the_bound_fails_with_a_mistake(
    mistake: Callable[[Patch], None], name: str, sampler_of: Callable[..., DPSampler], monkeypatch: Patch
) -> None:
    """What the tests above would say of it: clearly more than rounding."""
    with monkeypatch.context() as patch:
        mistake(patch)
        found = excess(CASES[name], sampler_of, monkeypatch)
    assert found > 1e-3
