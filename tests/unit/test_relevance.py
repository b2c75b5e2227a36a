"""The threshold of the relevance gate: suggested from public texts, or drawn from the store by the exponential
mechanism, whose law is enumerated here for every neighbour of small stores.

A text of these tests is an angle in degrees, and its embedding the point of the unit circle there: the similarity of
two texts is the cosine of the difference of their angles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from scipy import stats

from langchain_dpicl import (
    ExemplarStore,
    InvalidParameter,
    LineRequest,
    ModelUnavailable,
    PlanMismatch,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivacyBudgetExceeded,
    ReleaseFailed,
    release_threshold,
    suggest_threshold,
)
from langchain_dpicl.calls.flow import run
from langchain_dpicl.privacy import MECHANISMS, BoundedRange, Line, PLDAccountant, PrivacyPlan, SecureRandomness
from langchain_dpicl.release import threshold as release
from langchain_dpicl.release.transaction import Charged, checked
from langchain_dpicl.store.records import Vectors

FALSE_ALARM = 1e-8
EPS0 = 1.5
GRID = (0.0, 0.3, 0.6, 0.9)
QUERIES = ("0", "50")

Owner = tuple[int, ...]
"""The angles of an owner's exemplars."""


class Angles(Embeddings):
    """Points of the unit circle. A text that is no angle raises."""

    def embed_query(self, text: str) -> list[float]:
        angle = math.radians(float(text))
        return [math.cos(angle), math.sin(angle)]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


def store_at(owners: Sequence[Owner]) -> ExemplarStore:
    """A store of these owners; one of none is made by forgetting."""
    records = [
        {"input": str(angle), "output": "x", "owner": f"owner-{i}"}
        for i, angles in enumerate(owners or [(0,)])
        for angle in angles
    ]
    store = ExemplarStore.from_records(records, Angles(), owner_key="owner")
    if not owners:
        store.forget("owner-0")
    return store


small_store = lru_cache(maxsize=None)(store_at)
"""For tests that change none."""


def cosine(one: float, other: float) -> float:
    return math.cos(math.radians(one - other))


def utility(owners: Sequence[Owner], queries: Sequence[str], threshold: float, wanted: int) -> float:
    """-|mean number of owners that a query finds eligible - wanted|, by counting."""
    counts = [
        sum(max(cosine(float(query), angle) for angle in angles) >= threshold for angles in owners) for query in queries
    ]
    return -abs(sum(counts) / len(counts) - wanted)


def closed_form(owners: Sequence[Owner], wanted: int, eps0: float) -> list[float]:
    weights = [math.exp(eps0 * utility(owners, QUERIES, step, wanted) / 2) for step in GRID]
    return [weight / sum(weights) for weight in weights]


def law(owners: Sequence[Owner], wanted: int, eps0: float) -> list[float]:
    """The law of the code: of the multiplicities, losses and rate that it asks the exact sampler for."""
    asked: list[tuple[Sequence[int], Sequence[int], float]] = []

    def choose(numbers: Sequence[int], losses: Sequence[int], rate: float, _: object) -> int:
        asked.append((list(numbers), list(losses), rate))
        return 0

    store = small_store(tuple(owners))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "choose_exponential", choose)
        release._choose(store, [store.embed_query(q) for q in QUERIES], GRID, wanted, eps0, SecureRandomness())
    ((numbers, losses, rate),) = asked
    assert all(type(loss) is int for loss in losses), "the exact sampler needs whole numbers"
    weights = [n * math.exp(-rate * loss) for n, loss in zip(numbers, losses, strict=True)]
    return [weight / sum(weights) for weight in weights]


KINDS: list[Owner] = [(0,), (40,), (80,), (130,), (0, 5, 10), (-60, 40), (50, 180)]
CROWDS = [list(crowd) for size in (1, 2, 3) for crowd in itertools.combinations_with_replacement(KINDS, size)]


# -- the law of a release ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [1, 2])
def test_the_law_is_the_exponential_mechanism_s(wanted: int) -> None:
    for owners in CROWDS:
        assert law(owners, wanted, EPS0) == pytest.approx(closed_form(owners, wanted, EPS0), rel=1e-12)


def test_an_empty_store_has_a_law_too() -> None:
    assert law([], 2, EPS0) == pytest.approx([0.25] * 4)


def pairs(wanted: int) -> Iterator[tuple[list[float], list[float]]]:
    """The laws of every store of up to three owners, and of the same without one of them."""
    known: dict[tuple[Owner, ...], list[float]] = {}

    def law_of(owners: Sequence[Owner]) -> list[float]:
        return known.setdefault(tuple(owners), law(owners, wanted, EPS0))

    for owners in CROWDS:
        for gone in range(len(owners)):
            yield law_of(owners), law_of(owners[:gone] + owners[gone + 1 :])


def check_privacy() -> float:
    """AssertionError where a neighbour tells more than eps0-bounded range. The widest interval of losses."""
    profile = MECHANISMS["threshold"].profile(EPS0)
    assert profile == BoundedRange(EPS0)
    epsilons = np.linspace(-EPS0, EPS0, 13)
    allowed = profile.delta(epsilons)
    widest = 0.0
    for wanted in (1, 2):
        for with_owner, without in pairs(wanted):
            losses = [math.log(p / q) for p, q in zip(with_owner, without, strict=True)]
            widest = max(widest, max(losses) - min(losses))
            assert widest <= EPS0 + 1e-9, f"losses span {widest:.4g}, and {EPS0} is claimed"
            for p, q in ((with_owner, without), (without, with_owner)):
                true = np.maximum(np.array(p) - np.exp(epsilons)[:, None] * np.array(q), 0.0).sum(axis=1)
                assert np.all(true <= allowed + 1e-9), "delta is more than claimed"
    return widest


def test_one_owner_more_or_less_tells_no_more_than_bounded_range_says() -> None:
    """Both directions. The interval is as long as eps0 for some pair, so no smaller one could be claimed."""
    assert check_privacy() == pytest.approx(EPS0)


def count_exemplars(store: ExemplarStore, vectors: Sequence[Vectors], steps: Sequence[float], _: Any) -> list[int]:
    """The mutant: an owner of many exemplars counts for as many."""
    rows = np.arange(len(store))
    return [sum(int((store.similarity(rows, query) >= step).sum()) for query in vectors) for step in steps]


def add_up(eps0: float, queries: int) -> float:
    """The mutant: the sum over the queries, where the mean is claimed to move by 1."""
    return eps0 / 2


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("_rate", lambda eps0, queries: eps0 / queries),  # weights exp(eps0 u): half of the sensitivity
        ("_rate", add_up),
        ("_found", count_exemplars),
    ],
    ids=["half the sensitivity", "a sum for a mean", "exemplars for owners"],
)
def test_the_check_sees_a_sensitivity_that_is_wrong(name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, name, mutant)
    with pytest.raises(AssertionError, match="is claimed"):
        check_privacy()


def test_the_rate_is_rounded_towards_less_leakage() -> None:
    plain = 0
    for queries in range(1, 400):
        for eps0 in (0.1, 1.0, 1.234567):
            assert Fraction(release._rate(eps0, queries)) * 2 * queries <= Fraction(eps0)
            assert release._rate(eps0, queries) == pytest.approx(eps0 / (2 * queries), rel=1e-15)
            plain += Fraction(eps0 / (2 * queries)) * 2 * queries > Fraction(eps0)
    assert plain > 50, "a plain quotient would often be too large"


def test_what_is_drawn_has_this_law(seeded: Callable[[int], Any]) -> None:
    """Chi-square of 3000 draws. False alarms: 1e-8; weights exp(eps0 u) would fail for certain."""
    owners, wanted, runs = [(0,), (0,), (0,), (20, 40), (130,)], 2, 3000
    store, randomness = store_at(owners), seeded(20)
    vectors = [store.embed_query(query) for query in QUERIES]
    drawn = [release._choose(store, vectors, GRID, wanted, EPS0, randomness) for _ in range(runs)]
    seen = np.bincount(drawn, minlength=len(GRID))
    assert stats.chisquare(seen, runs * np.array(closed_form(owners, wanted, EPS0))).pvalue > FALSE_ALARM
    assert stats.chisquare(seen, runs * np.array(closed_form(owners, wanted, 2 * EPS0))).pvalue < FALSE_ALARM


def test_counts_are_what_the_gate_finds(store_of: Callable[..., ExemplarStore], records: Callable[..., Any]) -> None:
    """At every threshold, the number of owners that the store itself finds eligible."""
    store = store_of(records(60, 3))
    store.forget("owner-7")
    vectors = [store.embed_query(text) for text in ("a", "b", "c")]
    found = release._found(store, vectors, release.GRID)
    with store.reading() as view:
        assert found == [sum(len(view.eligible(query, step)) for query in vectors) for step in release.GRID]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


# -- the accountant ----------------------------------------------------------------------------------------------------


def test_at_a_rate_of_one_the_line_costs_what_bounded_range_says() -> None:
    profile = BoundedRange(EPS0)
    whole = profile.subsample(1.0)
    epsilons = np.linspace(-2.0, 2.0, 41)
    for direction in ("remove", "add"):
        assert np.array_equal(
            whole.direction_delta(epsilons, direction),
            profile.direction_delta(epsilons, direction),
        )
    true = float(profile.delta(0.7))
    assert true <= PLDAccountant().delta([Line(profile, 1.0, 1)], 0.7) <= true * 1.001


def test_a_plan_of_one_threshold_keeps_its_target() -> None:
    plan = PrivacyPlan.solve(epsilon=0.5, delta=1e-6, lines={"t": LineRequest("threshold", 1.0, 1)})
    eps0 = plan.lines["t"].parameter
    assert float(BoundedRange(eps0).delta(0.5)) <= 1e-6
    assert 0.5 <= eps0 < 0.51
    assert "a threshold of a public grid" in plan.lines["t"].describe()


# -- one release, in its order -----------------------------------------------------------------------------------------


OWNERS: list[Owner] = [(0,), (10,), (20,), (70, 90), (180,)]


@pytest.fixture
def budget(budget_of: Callable[..., PrivacyBudget]) -> PrivacyBudget:
    return budget_of(epsilon=1.0, releases=1, replay=True)


def ask(store: ExemplarStore, budget: PrivacyBudget, **options: Any) -> release.ReleasedThreshold:
    return release_threshold(store, QUERIES, budget, **{"eligible": 2, "grid": GRID, **options})


def test_a_release_is_a_threshold_of_the_grid_with_its_receipt(budget: PrivacyBudget) -> None:
    found = ask(store_at(OWNERS), budget)
    assert found.threshold in GRID
    assert found.eligible == 2
    assert found.receipt["line"] == "threshold"
    assert found.receipt["remaining"] == 0
    assert found.receipt["epsilon_spent"] == 1.0
    assert "exp(1.0" in found.receipt["mechanism"] or "exp(0.99" in found.receipt["mechanism"]


def test_with_much_epsilon_it_is_the_best_of_the_grid(budget_of: Callable[..., PrivacyBudget]) -> None:
    """At eps0 = 100 the second best, 5 owners off over 20 copies, is drawn with a probability below 1e-50."""
    owners = [angles for angles in OWNERS for _ in range(20)]
    found = ask(store_at(owners), budget_of(epsilon=100.0, releases=1), eligible=50)
    assert found.threshold == max(GRID, key=lambda step: utility(owners, QUERIES, step, 50))


def test_an_equal_request_is_answered_again_for_nothing(budget: PrivacyBudget) -> None:
    store = store_at(OWNERS)
    first = ask(store, budget)
    again = ask(store, budget, grid=GRID[::-1])
    assert (again.threshold, again.receipt["id"]) == (first.threshold, first.receipt["id"])
    assert again.receipt["replayed"]
    with pytest.raises(PrivacyBudgetExceeded):
        ask(store, budget, eligible=3)
    assert budget.spent() == 1


def drawn_first(
    store: ExemplarStore, queries: Sequence[str], budget: PrivacyBudget, *, eligible: int, grid: Any
) -> Any:
    """The mutant: counts and draws, then charges."""
    draw = release._Draw(store, budget, None)
    request = checked(draw, (list(queries), eligible, tuple(sorted(grid))))
    unpaid: Any = None
    drawn = run(draw.work(Charged(request, run(draw.prepare(request)), unpaid)))
    (charge,) = request.line.charge(1)
    return release.ReleasedThreshold(drawn, eligible, request.line.record(charge))


def check_order(asked: Callable[..., Any], budget_of: Callable[..., PrivacyBudget]) -> None:
    """AssertionError where owners are counted before the ledger says that it is paid, or beyond the budget."""
    store, budget = store_at(OWNERS), budget_of(epsilon=1.0, releases=1)
    spent: list[int] = []

    def counting(*given: Any) -> list[int]:
        spent.append(budget.spent())
        return found(*given)

    found = release._found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "_found", counting)
        asked(store, QUERIES, budget, eligible=2, grid=GRID)
        assert spent == [1], f"owners are counted with {spent} charged"
        with pytest.raises(PrivacyBudgetExceeded):
            asked(store, QUERIES, budget, eligible=2, grid=GRID)
        assert spent == [1], "owners are counted beyond the budget"


def test_it_is_charged_before_anybody_is_counted(budget_of: Callable[..., PrivacyBudget]) -> None:
    check_order(release_threshold, budget_of)
    with pytest.raises(AssertionError, match="counted with"):
        check_order(drawn_first, budget_of)


def grid_of_the_data(self: Any, charged: Charged) -> Any:
    """The mutant: the similarities that occur are the grid."""
    store, vectors, (queries, wanted, steps) = self.store, charged.ready, charged.request.asked
    held = np.unique(store.similarity(np.arange(len(store)), vectors[0]).astype(float).clip(-1.0, 1.0))
    request = replace(charged.request, asked=(queries, wanted, held.tolist() or steps))
    return WORK(self, replace(charged, request=request))


WORK = release._Draw.work


def check_support(budget_of: Callable[..., PrivacyBudget]) -> None:
    """AssertionError unless what may be drawn is the given grid, whatever the store holds."""
    for owners in ([], [(0,)], OWNERS):
        found = []
        for i in range(len(GRID)):
            store = store_at(owners)  # a store remembers its budgets
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(release, "choose_exponential", lambda numbers, *_, i=i: i if i < len(numbers) else 0)
                found.append(ask(store, budget_of(epsilon=1.0, releases=1), grid=(0.6, 0.0, 0.9, 0.3)).threshold)
        assert found == list(GRID), f"a store of {len(owners)} owners has a grid of its own"


def test_the_grid_is_the_given_one_whatever_the_store_holds(
    budget_of: Callable[..., PrivacyBudget], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_support(budget_of)
    monkeypatch.setattr(release._Draw, "work", grid_of_the_data)
    with pytest.raises(AssertionError, match="a store of 1 owners has a grid of its own"):
        check_support(budget_of)


def test_a_failure_after_the_charge_is_constant(
    budget: PrivacyBudget, monkeypatch: pytest.MonkeyPatch, canary: str, canary_free: Callable[..., None]
) -> None:
    def broken(*_: Any) -> list[int]:
        private = canary
        raise RuntimeError(private)

    monkeypatch.setattr(release, "_found", broken)
    with pytest.raises(ReleaseFailed) as caught:
        ask(store_at(OWNERS), budget)
    canary_free(caught.value, frames=True)
    assert str(caught.value) == str(ReleaseFailed())
    assert budget.spent() == 1


def test_an_interrupt_goes_on_and_the_charge_stands(budget: PrivacyBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> list[int]:
        raise KeyboardInterrupt("private")

    monkeypatch.setattr(release, "_found", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        ask(store_at(OWNERS), budget)
    assert caught.value.args == ()
    assert budget.spent() == 1


def test_a_model_that_fails_costs_nothing(budget: PrivacyBudget) -> None:
    with pytest.raises(ModelUnavailable):
        release_threshold(store_at(OWNERS), ["no angle"], budget, eligible=2)
    assert budget.spent() == 0


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_line_beside_the_votes(budget_of: Callable[..., PrivacyBudget]) -> None:
    releases = {"gate": LineRequest("threshold", 1.0, 1, weight=0.1), "vote": LineRequest("vote", 0.1, 50)}
    budget = budget_of(epsilon=2.0, releases=releases)
    found = ask(store_at(OWNERS), budget, line="gate")
    assert found.receipt["line"] == "gate"
    assert 0.0 < found.receipt["epsilon_spent"] < 2.0
    assert (budget.remaining("gate"), budget.remaining("vote")) == (0, 50)


def test_a_plan_that_amplifies_the_threshold_is_refused(budget_of: Callable[..., PrivacyBudget]) -> None:
    """All owners take part: a line planned for a sample of them allows too large an eps0."""
    budget = budget_of(epsilon=1.0, releases={"gate": LineRequest("threshold", 0.01, 1)})
    with pytest.raises(PlanMismatch, match="rate"):
        ask(store_at(OWNERS), budget, line="gate")
    assert budget.spent() == 0


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"eligible": 0}, "eligible"),
        ({"eligible": 1.5}, "eligible"),
        ({"grid": [0.5]}, "grid"),
        ({"grid": "0.5"}, "grid"),
        ({"grid": [0.5, 0.5]}, "grid"),
        ({"grid": [0.5, 1.5]}, "grid[1]"),
        ({"grid": [math.nan, 0.5]}, "grid[0]"),
        ({"queries": []}, "queries"),
        ({"queries": "0"}, "queries"),
        ({"queries": ["0", " "]}, "queries[1]"),
        ({"store": "store"}, "store"),
        ({"budget": "budget"}, "budget"),
    ],
)
def test_a_request_that_is_refused_costs_nothing(
    budget: PrivacyBudget, options: dict[str, Any], parameter: str
) -> None:
    given = {"store": store_at(OWNERS), "queries": QUERIES, "budget": budget, "eligible": 2, **options}
    with pytest.raises(InvalidParameter) as caught:
        release_threshold(**given)
    assert caught.value.parameter == parameter
    assert budget.spent() == 0


def test_budgets_that_count_something_else_are_refused(budget_of: Callable[..., PrivacyBudget]) -> None:
    with pytest.raises(InvalidParameter, match="a shared budget"):
        ask(store_at(OWNERS), budget_of(releases=1, scope="per_principal"))


def test_where_owners_pay_everybody_pays_once_and_who_cannot_is_not_counted(
    budget_of: Callable[..., PrivacyBudget], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No chance is involved: the counts that the draw is made from."""
    budget = budget_of(releases=1, tickets=True, replay=True)
    store = ExemplarStore.from_texts(
        [f"text {i}" for i in range(6)],
        DeterministicFakeEmbedding(size=8),
        owners=[f"owner-{i % 3}" for i in range(6)],
        progress=False,
    )
    counted: list[list[int]] = []
    found = release._found

    def keep(*given: Any) -> list[int]:
        counted.append(found(*given))
        return counted[-1]

    monkeypatch.setattr(release, "_found", keep)
    first = release_threshold(store, ["q"], budget, eligible=2, grid=(-1.0, 0.99))
    assert counted == [[3, 0]]
    again = release_threshold(store, ["q"], budget, eligible=2, grid=(-1.0, 0.99))
    assert again.receipt["replayed"]
    assert (again.threshold, len(counted)) == (first.threshold, 1)
    store.add([{"input": "text 7", "owner": "owner-7"}])
    release_threshold(store, ["another"], budget, eligible=2, grid=(-1.0, 0.99))
    assert counted[1] == [1, 0], "the new owner alone has a ticket"
    assert budget.private_ticket_report()["threshold"][""]["burnt"] == {"1": 4}


def test_a_selector_takes_both_numbers(budget: PrivacyBudget) -> None:
    store = store_at(OWNERS)
    drawn = ask(store, budget, eligible=4)
    found = suggest_threshold(Angles(), QUERIES, ["0", "30", "60", "180"], share=0.5, owners=len(OWNERS))
    for known in (drawn, found):
        selector = PoissonExampleSelector(store, 2, shots=1, threshold=known.threshold, eligible=known.eligible)
        assert selector.rate == min(1.0, 2 / known.eligible)


# -- from public texts -------------------------------------------------------------------------------------------------


def test_the_suggested_threshold_finds_the_wanted_share() -> None:
    """At it the mean share is the wanted one at least, and a little above it is less: by counting."""
    queries, texts = ["0", "33", "71"], [str(angle) for angle in range(-180, 180, 7)]
    for share in (0.02, 0.1, 0.5, 1.0):
        found = suggest_threshold(Angles(), queries, texts, share=share, owners=5000)
        cosines = np.array([[cosine(float(q), float(t)) for t in texts] for q in queries])
        assert (cosines >= found.threshold).mean() == pytest.approx(found.share)
        assert found.share >= share - 1e-12
        assert (cosines >= found.threshold + 2e-4).mean() < share
        assert found.eligible == round(5000 * found.share)
        assert found.low <= found.eligible <= found.high


def test_a_number_of_owners_is_a_share_of_all() -> None:
    texts = [str(angle) for angle in range(-180, 180, 7)]
    by_number = suggest_threshold(Angles(), ["0"], texts, eligible=500, owners=5000)
    assert by_number == suggest_threshold(Angles(), ["0"], texts, share=0.1, owners=5000)
    assert 500 <= by_number.eligible <= 600
    assert f"eligible={by_number.eligible}" in repr(by_number)
    assert str(by_number.threshold) in repr(by_number)


def test_an_owner_of_several_texts_counts_once_by_its_best() -> None:
    texts, owners = ["0", "5", "10", "60", "90"], ["a", "a", "a", "b", "c"]
    found = suggest_threshold(Angles(), ["0"], texts, share=2 / 3, owner_of=owners)
    assert found.threshold == pytest.approx(0.5, abs=1e-3)
    assert found.owners == 3
    assert found.eligible == 2
    assert suggest_threshold(Angles(), ["0"], texts, share=2 / 5).threshold == pytest.approx(cosine(0, 5), abs=1e-3)


def test_equally_near_texts_come_together_and_the_answer_says_so() -> None:
    found = suggest_threshold(Angles(), ["0"], ["30"] * 10, share=0.1)
    assert (found.share, found.eligible) == (1.0, 10)


def test_the_spread_over_the_queries_is_told() -> None:
    texts = ["0"] * 90 + ["180"] * 10
    found = suggest_threshold(Angles(), ["0"] * 5 + ["180"] * 5, texts, share=0.5)
    assert (found.low, found.high, found.eligible) == (10, 90, 50)


def test_a_model_that_fails_on_public_texts_is_told_apart() -> None:
    with pytest.raises(ModelUnavailable):
        suggest_threshold(Angles(), ["no angle"], ["0"], share=1.0)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({}, "share"),
        ({"share": 0.5, "eligible": 2, "owners": 10}, "share"),
        ({"share": 0.0}, "share"),
        ({"share": 1.5}, "share"),
        ({"share": 0.01}, "share"),
        ({"eligible": 2}, "owners"),
        ({"eligible": 11, "owners": 10}, "eligible"),
        ({"eligible": 0, "owners": 10}, "eligible"),
        ({"share": 0.5, "owners": 0}, "owners"),
        ({"share": 0.5, "owner_of": ["a"]}, "owner_of"),
        ({"share": 0.5, "owner_of": 3}, "owner_of"),
        ({"share": 0.5, "owner_of": ["a", None, "b"]}, "owner_of[1]"),
        ({"share": 0.5, "queries": []}, "queries"),
        ({"share": 0.5, "texts": "0"}, "texts"),
        ({"share": 0.5, "texts": ["0", ""]}, "texts[1]"),
    ],
)
def test_bad_input_of_a_suggestion_is_named(options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        suggest_threshold(Angles(), **{"queries": ["0", "9"], "texts": ["0", "40", "80"], **options})
    assert caught.value.parameter == parameter
