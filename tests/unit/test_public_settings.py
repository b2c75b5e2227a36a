"""What acts on more than one owner is a function of arguments and the frozen plan, never of the store as it stands.

Every public class with its defaults, over numbers of owners among which are those at which a float steps: with
n = 147, 281 and 294 owners ``(40 / n) * n / 10`` is 4.000000000000001.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.load import dumps
from langchain_core.runnables import RunnableLambda
from table_model import TableModel

from langchain_dpicl import (
    DPAggregate,
    DPRetriever,
    DPSampler,
    EmbeddingMean,
    ExemplarStore,
    InvalidParameter,
    InvalidRecords,
    Keywords,
    NoisyVote,
    PlanMismatch,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivacyWarning,
    PrivateEnsemble,
    wrap_rag,
)
from langchain_dpicl.cli.session import open_budget
from langchain_dpicl.decoding.exemplars import slots_for
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.serving.app import plans

# Each kind of release has a budget of its own on the same owners, which warns.
pytestmark = pytest.mark.filterwarnings("ignore:the budget .* is used with data on which other budgets were opened")

COUNTS = (40, 146, 147, 280, 281, 293, 294, 1600)
MEMBERS, SHOTS = 10, 4
EMBEDDINGS = DeterministicFakeEmbedding(size=2)
LABELS = ["yes", "no"]

Build = Callable[[ExemplarStore, PrivacyBudget], AnyRelease]


def store_with(owners: int) -> ExemplarStore:
    """So many owners of one exemplar each; none is a store whose owners have gone."""
    names = [f"owner-{i}" for i in range(max(1, owners))]
    vectors = np.ones((len(names), 2), np.float32)
    store = ExemplarStore.from_texts(
        [f"text {i}" for i in range(len(names))],
        EMBEDDINGS,
        outputs=names,
        owners=names,
        vectors=vectors,
        progress=False,
    )
    if not owners:
        store.forget("owner-0")
    return store


stores = lru_cache(maxsize=None)(store_with)
"""For tests that change none."""


def member(values: Any) -> str:
    return "yes"


def ensemble(store: ExemplarStore, **options: Any) -> PrivateEnsemble:
    selector = PoissonExampleSelector(store, MEMBERS, **({"shots": SHOTS} | options))
    return PrivateEnsemble(selector, member)


def sampler(store: ExemplarStore, budget: PrivacyBudget) -> DPSampler:
    model = TableModel(lambda demonstration, released: [0.0, 1.0, 2.0], ["a", "b", "."], frozenset({2}))
    return DPSampler(model, PoissonExampleSelector(store, 4, shots=1), budget, top_k=3)


def rag(store: ExemplarStore, budget: PrivacyBudget, **options: Any) -> AnyRelease:
    chain = RunnableLambda(lambda values: "yes")
    return wrap_rag(chain, store, NoisyVote(LABELS), budget, documents_key="context", **options)


BUILDS: dict[str, Build] = {
    "vote": lambda store, budget: ensemble(store) | DPAggregate(NoisyVote(LABELS), budget),
    "scores": lambda store, budget: ensemble(store) | DPAggregate(NoisyVote(LABELS, scores=True), budget),
    "embedding": lambda store, budget: (
        ensemble(store) | DPAggregate(EmbeddingMean(EMBEDDINGS, candidates=["a", "b"]), budget)
    ),
    "joint em": lambda store, budget: (
        ensemble(store) | DPAggregate(Keywords.joint_em(domain=["red", "green", "blue"], k=2), budget)
    ),
    "ptr": lambda store, budget: ensemble(store) | DPAggregate(Keywords.ptr(k=(1, 3)), budget),
    "several exemplars of an owner": lambda store, budget: (
        ensemble(store, exemplars_per_owner=3) | DPAggregate(NoisyVote(LABELS), budget)
    ),
    "a gate": lambda store, budget: (
        ensemble(store, threshold=0.3, eligible=147) | DPAggregate(NoisyVote(LABELS), budget)
    ),
    "a gate with a rate": lambda store, budget: (
        ensemble(store, shots=None, rate=40 / 147, threshold=0.3, eligible=147) | DPAggregate(NoisyVote(LABELS), budget)
    ),
    "a rate": lambda store, budget: (
        ensemble(store, shots=None, rate=0.05, max_exemplars=8) | DPAggregate(NoisyVote(LABELS), budget)
    ),
    "sampler": sampler,
    "wrap_rag": rag,
    "wrap_rag without a gate": lambda store, budget: rag(store, budget, threshold=None),
    "wrap_rag with an estimate": lambda store, budget: rag(store, budget, eligible=147),
}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[str], PrivacyBudget]]:
    """opened(name): the budget of this name, opened anew each time, as after a restart."""
    made: list[PrivacyBudget] = []

    def make(name: str = "plan", delta: float = 1e-6, **options: Any) -> PrivacyBudget:
        made.append(PrivacyBudget(30.0, delta, 100, f"sqlite:///{tmp_path}/budget.db", name, **options))
        return made[-1]

    yield make
    for budget in made:
        budget.close()


def settings(release: AnyRelease) -> dict[str, Any]:
    """Everything of a release that acts on more than one owner, or that shows."""
    line, selector = release.line(), release.selector
    found = {
        "plan": line.plan_line,
        "members": selector.members,
        "cap": selector.max_exemplars,
        "exemplars_per_owner": selector.exemplars_per_owner,
        "threshold": selector.threshold,
        "shown": [repr(release), dumps(release), repr(selector), release._variant],
        "kappa": None,
    }
    if isinstance(release, DPSampler):
        found |= {"kappa": release.settings, "slots": release.slots_of(line)}
    return found


# -- the grid ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BUILDS)
def test_public_settings_are_the_same_with_an_owner_more_or_less_and_after_a_restart(
    kind: str, opened: Callable[[str], PrivacyBudget]
) -> None:
    for count in COUNTS if kind == "vote" else (146, 1600):
        frozen = settings(BUILDS[kind](stores(count), opened(str(count))))
        for later in (count + 1, count - 1, 3 * count):
            assert settings(BUILDS[kind](stores(later), opened(str(count)))) == frozen, (count, later)


def test_a_retriever_shows_what_its_release_shows(opened: Any) -> None:
    shown = []
    for count in (146, 147):
        words = Keywords.joint_em(domain=["red", "green"], k=1)
        release = ensemble(store_with(count), nearest_to="input", max_exemplars=8) | DPAggregate(words, opened())
        release.line()
        retriever = DPRetriever(release=release)
        shown.append(repr(retriever) + dumps(retriever))
    assert shown[0] == shown[1]


class Claiming(ExemplarStore):
    """A store that says how many owners it has, for a sweep over thousands of numbers."""

    said = 0

    @property
    def owner_count(self) -> int:
        return self.said


def test_the_cap_is_one_number_for_every_number_of_owners() -> None:
    """Over all of 40..10,000, where the float of the old formula stepped at 201 numbers."""
    store = store_with(1)
    store.__class__ = Claiming
    caps, stepped = set(), 0
    for store.said in range(40, 10_001):
        caps.add(PoissonExampleSelector(store, MEMBERS, shots=SHOTS).max_exemplars)
        expected = (40 / store.said) * store.said * 1 / MEMBERS
        stepped += math.ceil(max(2 * expected, expected + 4)) != 8
    assert caps == {8}
    assert stepped > 150, "else the grid shows nothing"


@pytest.mark.parametrize(
    ("options", "cap"),
    [
        ({"shots": 1}, 5),
        ({"shots": 4}, 8),
        ({"shots": 5, "exemplars_per_owner": 3}, 30),
        ({"shots": 2, "threshold": 0.3, "eligible": 40}, 6),
        ({"shots": 9, "threshold": 0.3, "eligible": 41}, 9),  # all 41 in ten buckets: ceil(4.1) + 4
        ({"rate": 0.05, "threshold": 0.3, "eligible": 800}, 8),  # exactly 4, though .05 is above 1/20 as a float
        ({"rate": 0.05, "threshold": 0.3, "eligible": 801}, 9),
    ],
)
def test_the_default_cap_is_exact(options: dict[str, Any], cap: int) -> None:
    assert PoissonExampleSelector(store_with(50), MEMBERS, **options).max_exemplars == cap


def test_a_rate_alone_needs_a_cap() -> None:
    with pytest.raises(InvalidParameter, match="max_exemplars"):
        PoissonExampleSelector(store_with(50), MEMBERS, rate=0.05)


# -- an owner more or less moves one member ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [146, 1600])
def test_under_one_plan_an_owner_more_changes_one_member_at_most(count: int, opened: Any, owner_keyed: Any) -> None:
    """The default cap binds, and with the same coins of all others the two worlds differ in one bucket at most. No
    chance is involved, so no false alarm."""
    bound = changed = 0
    for salt in range(30):
        buckets = []
        for owners in (count, count + 1):
            selector = PoissonExampleSelector(stores(owners), 20, shots=SHOTS)
            release = PrivateEnsemble(selector, member) | DPAggregate(NoisyVote(LABELS), opened(str(count)))
            selector._randomness = owner_keyed(selector.store, salt)
            buckets.append([[row["input"] for row in bucket] for bucket in selector.sample(release.line().rate)])
        bound += any(len(bucket) == 8 for bucket in buckets[0])
        differ = sum(one != other for one, other in zip(*buckets, strict=True))
        changed += differ
        assert differ <= 1
    assert bound > 5, "the cap is met"
    if count == 146:
        assert changed > 0, "the owner takes part now and then"


# -- restarts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("later", [39, 1, 0])
def test_a_frozen_plan_goes_on_though_owners_have_gone(kind: str, later: int, opened: Any) -> None:
    """Before the plan there are 40; then fewer than members * shots, and nobody."""
    frozen = settings(BUILDS[kind](stores(40), opened()))
    release = BUILDS[kind](stores(later), opened(replay=False))
    assert settings(release) == frozen
    release.invoke("which?" if isinstance(release, DPSampler) or kind.startswith("wrap") else {"input": "which?"})
    assert release.budget.spent() > 0


@pytest.mark.parametrize("kind", ["vote", "sampler"])
def test_before_there_is_a_plan_too_few_owners_are_refused(kind: str, opened: Any) -> None:
    with pytest.raises(InvalidRecords, match="empty"):
        BUILDS[kind](stores(0), opened())
    with pytest.raises(InvalidParameter, match="shots"):
        BUILDS[kind](stores(3), opened())
    assert not opened().is_frozen


def test_slots_come_from_the_frozen_line_and_cover_a_sample(opened: Any) -> None:
    """Also where kappa is chosen by hand: the sample is of the plan's owners, not of kappa / rate many."""
    first = sampler(store_with(400), opened())
    line = first.line()
    assert (line.rate, line.plan_line.owners) == (0.01, 400)
    assert first.slots_of(line) == slots_for(4.0, 0.01, 400) == slots_for(4.0, 0.01)
    low = DPSampler(first.model, first.selector, first.budget, top_k=3, shots=1.5)
    assert low.slots_of(line) == first.slots_of(line)
    by_rate = PoissonExampleSelector(store_with(400), 4, rate=0.01, max_exemplars=8)
    assert DPSampler(first.model, by_rate, opened("rate"), top_k=3, shots=4).slots_of(line) == first.slots_of(line)


# -- the plan's number of owners ---------------------------------------------------------------------------------------


def test_the_plan_keeps_the_number_of_owners_and_says_it(opened: Any) -> None:
    for kind, owners in (("vote", 146), ("a rate", None), ("a gate", None), ("wrap_rag", 146)):
        plan = PrivacyPlan.from_json(frozen_json(BUILDS[kind], 146, opened(kind)))
        (line,) = plan.lines.values()
        assert line.owners == owners
        assert ("chosen for 146 owners." in plan.explain()) == (owners is not None)
    large = PrivacyPlan.solve(epsilon=3.0, delta=0.01, lines={"v": LineRequest("vote", 0.4, 10, owners=100)})
    assert "chosen for 100 owners; delta is not below 1/owners = 0.01." in large.explain()


def frozen_json(build: Build, count: int, budget: PrivacyBudget) -> str:
    build(store_with(count), budget).line()
    assert budget.plan is not None
    return budget.plan.to_json()


def test_the_noise_does_not_depend_on_the_number_of_owners() -> None:
    def ask(owners: int | None) -> PrivacyPlan:
        lines = {"v": LineRequest("vote", 0.05, 100, owners=owners)}
        return PrivacyPlan.solve(epsilon=3.0, delta=1e-5, lines=lines)

    plans = [ask(owners) for owners in (800, 801, None, 800)]
    assert [plan.lines["v"].owners for plan in plans] == [800, 801, None, 800]
    assert len({plan.lines["v"].parameter for plan in plans}) == 1
    assert len({plan.digest for plan in plans}) == 3
    assert "owners" not in json.loads(plans[2].to_json())["lines"]["v"], "a plan of an explicit rate reads as ever"
    for bad in (0, -1, 2.5, True, "800"):
        with pytest.raises(InvalidParameter, match="owners"):
            LineRequest("vote", 0.05, 100, owners=bad)  # type: ignore[arg-type]


def test_a_line_that_was_asked_for_with_a_number_of_owners_keeps_to_it(tmp_path: Path) -> None:
    def budget(owners: int | None) -> PrivacyBudget:
        lines = {"v": LineRequest("vote", 0.05, 100, owners=owners)}
        return PrivacyBudget(3.0, 1e-5, lines, f"sqlite:///{tmp_path}/b.db")

    first = budget(800)
    first.line("vote", 0.05, name="v")
    assert first.public_owners == 800
    first.close()
    budget(None).close()
    with pytest.raises(PlanMismatch, match="owners 800"):
        budget(801)


def test_delta_is_judged_by_the_plans_number_of_owners(opened: Any) -> None:
    def warned(count: int, name: str, kind: str = "vote", delta: float = 0.01) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            BUILDS[kind](stores(count), opened(name, delta=delta)).line()
        return any(issubclass(w.category, PrivacyWarning) and "1/owners=" in str(w.message) for w in caught)

    for kind in ("vote", "sampler"):
        assert [warned(count, f"large {kind}", kind) for count in (100, 99, 101)] == [True] * 3
        assert [warned(count, f"small {kind}", kind) for count in (99, 100, 400)] == [False] * 3
    assert warned(100, "rate", "a rate"), "before the plan is frozen its deployer is told in any case"
    assert not warned(400, "rate", "a rate"), "afterwards no number of owners is public"


def test_what_a_server_says_before_the_plan_is_frozen_is_what_it_freezes(opened: Any) -> None:
    release = BUILDS["vote"](store_with(146), opened())
    (before,) = plans(release)
    assert not release.budget.is_frozen
    release.line()
    assert plans(release)[0]["lines"] == before["lines"]


def test_the_command_lines_delta_is_the_frozen_plans(tmp_path: Path) -> None:
    given = argparse.Namespace(
        name="notes", ledger=f"sqlite:///{tmp_path}/b.db", witness=None, epsilon=3.0, delta=None, data="notes.jsonl"
    )

    def before(plan: PrivacyPlan | None) -> int:
        assert plan is None
        assert not list(tmp_path.iterdir()), "nothing is made"
        return 10

    budget = open_budget(given, store_with(40), before)
    delta = budget.delta
    assert Fraction(delta).limit_denominator(10_000) == Fraction(1, 400)
    BUILDS["vote"](store_with(40), budget).line()
    budget.close()
    frozen: list[PrivacyPlan | None] = []
    again = open_budget(given, store_with(41), lambda plan: frozen.append(plan) or 10)  # type: ignore[func-returns-value]
    assert again.delta == delta
    assert again.plan == frozen[0]
    again.close()
    with pytest.raises(PlanMismatch, match="1e-07"):
        open_budget(argparse.Namespace(**{**vars(given), "delta": 1e-7}), store_with(41), lambda plan: 10)
