"""One owner per call: who is called, what padding does, and what a plan knows of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import pytest
from ears import Ears
from exact import Branching, law
from numpy.typing import NDArray
from scipy import stats

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    InvalidParameter,
    Keywords,
    NoisyVote,
    PlanMismatch,
    PoissonExampleSelector,
    PrivateEnsemble,
)
from langchain_dpicl.privacy import MECHANISMS
from langchain_dpicl.privacy.choice import Crowd, usual_most

RATE = 0.4
NAMES = ("ann", "bob", "cec", "dan")


def stored(store_of: Callable[..., ExemplarStore], names: tuple[str, ...], of_ann: int = 1) -> ExemplarStore:
    """Owners of one record each, but for ann."""
    return store_of(
        [
            {"input": f"{name} {i}", "output": "Positive", "owner": name}
            for name in names
            for i in range(of_ann if name == "ann" else 1)
        ]
    )


def says_who(given: Mapping[str, Any]) -> str:
    """A member that names the owners whose records it sees."""
    return " and ".join(sorted({example["input"].split()[0] for example in given["examples"]})) or "nobody"


def votes_law(store: ExemplarStore, **how: Any) -> dict[Hashable, float]:
    """The exact law of who votes how often, in the order of NAMES, and abstentions last: the code's own."""
    vote, selector = NoisyVote(NAMES), PoissonExampleSelector(store, rate=RATE, **how)
    ensemble = PrivateEnsemble(selector, says_who)

    def run(randomness: Branching) -> tuple[int, ...]:
        selector._randomness = randomness
        return tuple(vote.counts(ensemble.run({"input": "q"}, RATE, vote)).tolist())

    return law(run)


@pytest.mark.parametrize("of_ann", [1, 2])
@pytest.mark.parametrize("names", [("ann",), ("ann", "bob"), ("ann", "bob", "cec")])
def test_every_owner_adds_one_output_by_its_own_coin_and_nothing_else_counts(
    names: tuple[str, ...], of_ann: int, store_of: Any
) -> None:
    """The exact law of all outputs is a product: one output of each owner, whatever it holds, with its rate. So an
    owner more adds exactly one output, and changes no other's law."""
    found = votes_law(stored(store_of, names, of_ann), calls=2, pad_to=1, exemplars_per_owner=of_ann)
    for coins in itertools.product((0, 1), repeat=len(names)):
        expected = math.prod(RATE if coin else 1 - RATE for coin in coins)
        assert found.pop((*coins, *[0] * (5 - len(coins)))) == pytest.approx(expected, rel=1e-12)
    assert not found, "no output of padding, none twice, none of two owners"


def test_with_a_cap_every_pair_of_the_sampled_is_called_alike(store_of: Any) -> None:
    """The exact law: of k sampled owners the first two by their priorities, each pair with the same probability."""
    found = votes_law(stored(store_of, NAMES[:3]), calls=2, max_calls=2)
    one, pair = RATE * (1 - RATE) ** 2, RATE**2 * (1 - RATE) + RATE**3 / 3
    for coins in itertools.product((0, 1), repeat=3):
        if sum(coins) < 3:
            expected = ((1 - RATE) ** 3, one, pair)[sum(coins)]
            assert found.pop((*coins, 0, 0)) == pytest.approx(expected, rel=1e-12)
    assert not found


class OfOwners:
    """Coins and priorities that belong to owners."""

    def __init__(self, coins: Mapping[str, bool], priorities: Mapping[str, float]) -> None:
        self.coins, self.priorities = coins, priorities
        self.names: list[str] = []
        self.waiting: list[str] = []

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        heads = [i for i in range(n) if self.coins[self.names[i]]]
        self.waiting = [self.names[i] for i in heads]
        return np.array(heads, np.int64)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        asked, self.waiting = self.waiting, []  # priorities first, then orders of exemplars
        return np.array([self.priorities[name] for name in asked] if asked else np.zeros(size))


def called(store: ExemplarStore, randomness: OfOwners, **how: Any) -> list[str]:
    """Who is called."""
    selector: Any = PoissonExampleSelector(store, calls=2, rate=RATE, **how)
    randomness.names = list(store.owners)
    selector._randomness = randomness
    return [example["input"].split()[0] for bucket in selector.sample() for example in bucket]


@pytest.mark.parametrize("how", [{}, {"max_calls": 2}], ids=["no cap", "a cap"])
def test_with_a_cap_an_owner_more_replaces_one_output_at_most(how: dict[str, Any], store_of: Any) -> None:
    """All coins and all orders of priorities of four owners, each with and without each of them. Without a cap the
    others' calls are the same; with one an owner more may displace one other, and never two."""
    everyone = stored(store_of, NAMES)
    without = {name: stored(store_of, tuple(other for other in NAMES if other != name)) for name in NAMES}
    displaced = 0
    for coins, order in itertools.product(itertools.product((False, True), repeat=4), itertools.permutations(range(4))):
        randomness = OfOwners(dict(zip(NAMES, coins, strict=True)), dict(zip(NAMES, map(float, order), strict=True)))
        all_called = called(everyone, randomness, **how)
        assert len(set(all_called)) == len(all_called) == (min(sum(coins), 2) if how else sum(coins))
        for name in NAMES:
            others = set(called(without[name], randomness, **how))
            assert set(all_called) - others <= {name}
            lost = others - set(all_called)
            assert len(lost) <= (1 if how and name in all_called else 0)
            displaced += len(lost)
    assert (displaced > 0) == bool(how)


# -- padding -----------------------------------------------------------------------------------------------------------


def asked_and_counted(store: ExemplarStore, heads: int, **how: Any) -> tuple[list[Any], list[object]]:
    """What the members were asked if the first so many owners are sampled, and the outputs that count."""
    heard = Ears()

    def member(given: Mapping[str, Any], config: Any) -> str:
        heard.append((dict(given), {key: config.get(key) for key in ("tags", "metadata", "configurable")}))
        return "ann"

    selector: Any = PoissonExampleSelector(store, calls=2, rate=RATE, **how)
    coins = {name: i < heads for i, name in enumerate(store.owners)}
    selector._randomness = OfOwners(coins, {name: float(i) for i, name in enumerate(store.owners)})
    selector._randomness.names = list(store.owners)
    return heard, PrivateEnsemble(selector, member).run({"input": "q"}, RATE, NoisyVote(NAMES))


@pytest.mark.parametrize("heads", range(5))
def test_padding_never_reaches_the_aggregator(heads: int, store_of: Any) -> None:
    """As many calls as are padded to, or as owners are sampled, and as many outputs as owners."""
    store = stored(store_of, NAMES)
    heard, outputs = asked_and_counted(store, heads, pad_to=3)
    assert (len(heard), outputs) == (max(3, heads), [0] * heads)
    heard, outputs = asked_and_counted(store, heads, max_calls=2)
    assert (len(heard), outputs) == (2, [0] * min(2, heads))
    heard, outputs = asked_and_counted(store, heads)
    assert (len(heard), outputs) == (usual_most(2), [0] * heads)


def test_a_call_does_not_see_its_place_nor_the_other_calls(store_of: Any) -> None:
    """What ann's call sees is the same whoever else is called, and padding sees what the public prompt does."""
    store = stored(store_of, NAMES)
    seen = [asked_and_counted(store, heads, pad_to=6)[0] for heads in range(1, 5)]
    anns = [each for calls in seen for each in calls if "ann" in str(list(each[0]["examples"]))]
    assert len(anns) == 4
    assert all(each == anns[0] for each in anns)
    assert set(anns[0][0]) == {"input", "examples"}
    padding = [each for calls in seen for each in calls if not each[0]["examples"]]
    assert len(padding) == 5 + 4 + 3 + 2
    assert all(each == ({"input": "q", "examples": []}, padding[0][1]) for each in padding)
    assert all(each[1] == padding[0][1] for each in anns)


@pytest.mark.parametrize("calls", [1.0, 2.5, 20.0, 75.0, 1000.0])
def test_padding_is_the_quantile_of_a_poisson_number(calls: float) -> None:
    assert usual_most(calls) == max(2, int(stats.poisson.isf(1e-3, calls)))


@pytest.mark.parametrize("pad_to", [1, 40])
def test_padding_caps_nothing_that_is_expected(pad_to: int, store_of: Any, records: Any) -> None:
    """Little padding is no cap: as many outputs are expected, and count, as with much."""
    selector = PoissonExampleSelector(store_of(records(100)), calls=20, pad_to=pad_to)
    assert selector.crowd(0.2, 100) == Crowd(max(pad_to, 35), 20.0, own_calls=True)
    capped = PoissonExampleSelector(store_of(records(100)), calls=20, max_calls=22)
    assert capped.crowd(0.5, 100) == Crowd(22, 22)


# -- plans -------------------------------------------------------------------------------------------------------------


def chain_of(selector: PoissonExampleSelector, budget: Any, vote: Any = None, **how: Any) -> Any:
    vote = NoisyVote(["Positive", "Negative"], mechanism="vote") if vote is None else vote
    return PrivateEnsemble(selector, lambda given: "Positive") | DPAggregate(vote, budget, **how)


def test_a_plan_of_one_kind_of_outputs_is_refused_for_the_other(store_of: Any, records: Any, budget_of: Any) -> None:
    """A sigma for one output more or less is too small if one is replaced. Before the first release, and after."""
    own, capped = {"calls": 20}, {"calls": 20, "max_calls": 30}
    shared = {"members": 20, "rate": 0.2, "max_exemplars": 5}
    for pair in ((own, capped), (own, shared), (capped, own), (shared, own)):
        for frozen in (True, False):
            store, budget = store_of(records(100)), budget_of(3.0, accept_noise=True)
            first, second = (PoissonExampleSelector(store, **how) for how in pair)
            chain = chain_of(first, budget, line="vote")
            if frozen:
                chain.invoke({"input": "q"})
                assert (budget.plan.lines["vote"].options == {"own_calls": 1.0}) == first.own_calls
            with pytest.raises(PlanMismatch, match="own_calls"):
                chain_of(second, budget).invoke({"input": "another"})
            assert budget.spent() == int(frozen)


def test_a_plan_of_own_calls_needs_less_noise_and_says_what_it_accounts_for(
    store_of: Any, records: Any, budget_of: Any
) -> None:
    sigmas = []
    for how in ({}, {"max_calls": 30}):
        budget = budget_of(3.0, accept_noise=True)
        chain_of(PoissonExampleSelector(store_of(records(100)), calls=20, **how), budget).invoke({"input": "q"})
        sigmas.append(budget.plan.lines["vote"].parameter)
    assert sigmas[0] < 0.8 * sigmas[1]
    assert "one output added or removed" in MECHANISMS["vote"].neighbours


@pytest.mark.parametrize("mechanism", ["vote", "vote-em"])
def test_if_nobody_is_sampled_the_prior_answers_and_nothing_says_so(
    mechanism: str, store_of: Any, records: Any, budget_of: Any
) -> None:
    """Nobody, in all but 1e-7 of all runs: the answer, its receipt and what is raised are as ever."""
    labels, receipts = ["Positive", "Negative"], []
    for rate in (1e-9, 1.0):
        prior = {"Positive": 0.05, "Negative": 0.95}
        vote = NoisyVote(labels, prior=prior, mechanism=mechanism)
        selector = PoissonExampleSelector(store_of(records(100)), calls=20, rate=rate)
        found = chain_of(selector, budget_of(60.0, releases=1), vote, return_receipt=True).invoke({"input": "q"})
        assert found["answer"] == ("Negative" if rate < 0.5 else "Positive")
        receipts.append(
            {key: found["receipt"][key] for key in ("outcome", "replayed")} | {"keys": set(found["receipt"])}
        )
    assert receipts[0] == receipts[1]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "members"),
        ({"members": 4, "calls": 4}, "members"),
        ({"members": 4, "pad_to": 4}, "pad_to"),
        ({"members": 4, "max_calls": 4}, "max_calls"),
        ({"calls": 4, "shots": 1}, "shots"),
        ({"calls": 4, "max_calls": 3}, "max_calls"),
        ({"calls": 1, "max_calls": 1}, "max_calls"),
        ({"calls": 4, "max_calls": 4, "pad_to": 4}, "pad_to"),
        ({"calls": 4, "pad_to": 0}, "pad_to"),
        ({"calls": 0.5}, "calls"),
        ({"calls": math.nan}, "calls"),
        ({"calls": "20"}, "calls"),
    ],
)
def test_bad_parameters_are_named(options: dict[str, Any], name: str, store_of: Any, records: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        PoissonExampleSelector(store_of(records(10)), **options)
    assert caught.value.parameter == name


def test_what_would_put_a_public_vote_in_an_owners_place_is_refused(
    store_of: Any, records: Any, budget_of: Any
) -> None:
    """And so is a mechanism whose profile is not proved for an output more or less."""
    store = store_of(records(50))
    for how in ({}, {"max_calls": 8}):
        selector = PoissonExampleSelector(store, calls=4, **how)
        with pytest.raises(InvalidParameter) as caught:
            PrivateEnsemble(selector, lambda given: "Positive", count_empty=True)
        assert caught.value.parameter == "count_empty"
    with pytest.raises(InvalidParameter) as caught:
        chain_of(PoissonExampleSelector(store, calls=4), budget_of(), Keywords.ptr(3))
    assert caught.value.parameter == "calls"
    chain_of(PoissonExampleSelector(store, calls=4, max_calls=8), budget_of(), Keywords.ptr(3))
