"""Mistake 35: one bit, accounted for a lead that moves by 1 where owners share calls, or calls have a cap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    LabelVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.privacy import Line, PLDAccountant, Profile
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.votes import BIT, VoteNoise

SIGMA, RATE, EPSILONS = 0.9, 0.4, (0.2, 0.6, 1.0)


def first_wins(lead: int) -> float:
    behind = VoteNoise(BIT, SIGMA).overturned(abs(lead))
    return 1.0 - behind if lead > 0 else behind


def two_releases(moves: int, epsilon: float) -> float:
    """The best adversary of two votes, who chooses the others' lead before each, after the bit before."""
    a = math.exp(epsilon)

    def best(left: int, ratio: float) -> float:
        if not left:
            return max(0.0, ratio - a)
        found = 0.0
        for lead, move in itertools.product(range(-6, 7), (moves, -moves)):
            absent = first_wins(lead)
            present = (1 - RATE) * absent + RATE * first_wins(lead + move)
            more = best(left - 1, ratio * present / absent)
            found = max(found, absent * more + (1 - absent) * best(left - 1, ratio * (1 - present) / (1 - absent)))
        return found

    return best(2, 1.0)


def check(build: Callable[[float], Profile], moves: int) -> None:
    line = Line(build(SIGMA), RATE, 2)
    for epsilon in EPSILONS:
        claimed = PLDAccountant().delta([line], epsilon)
        assert two_releases(moves, epsilon) <= claimed, f"{claimed:.3g} is claimed at epsilon {epsilon}"


def test_35_a_lead_that_moves_by_two_is_caught() -> None:
    shared, own = (partial(MECHANISMS[BIT].of({"own_calls": each}).profile) for each in (0.0, 1.0))
    check(own, 1)
    check(shared, 2)
    with pytest.raises(AssertionError, match="is claimed"):
        check(own, 2)


@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
@pytest.mark.parametrize(
    ("how", "own"), [({"members": 4}, False), ({"calls": 4, "max_calls": 6}, False), ({"calls": 4}, True)]
)
def test_35_a_plan_says_which_it_is(how: dict[str, int], own: bool) -> None:
    """Buckets that owners share, and calls with a cap, are planned as votes that one owner replaces."""
    records = [{"input": f"text {i}", "output": "ab"[i % 2], "owner": str(i)} for i in range(40)]
    store = ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=8), owner_key="owner", progress=False)
    selector = PoissonExampleSelector(store, **how)  # type: ignore[arg-type]
    budget = PrivacyBudget(3.0, 1e-5, 10, "sqlite://", accept_noise=True)
    (PrivateEnsemble(selector) | DPAggregate(LabelVote(["a", "b"], mechanism=BIT), budget)).invoke({"input": "?"})
    assert budget.plan is not None
    (line,) = budget.plan.lines.values()
    assert (line.mechanism, line.own_calls) == (BIT, own)
