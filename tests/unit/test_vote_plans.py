"""What votes ask of a plan: noise for their own kind of outputs, a rate of its own, and no setting that is ignored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from langchain_dpicl import (
    DPAggregate,
    InvalidParameter,
    NoisyVote,
    PlanMismatch,
    PoissonExampleSelector,
    PrivateEnsemble,
    SealedRelease,
)
from langchain_dpicl.privacy import LineRequest

OWN, SHARED, CAPPED = {"calls": 20}, {"members": 20, "shots": 2}, {"calls": 20, "max_calls": 20}
REQUESTED = LineRequest("vote", 0.2, 10, options={"own_calls": 1.0})

Chain = Callable[..., SealedRelease]


@pytest.fixture
def chain(store_of: Any, records: Any, labels: list[str]) -> Chain:
    """chain(budget, calls=20): a vote of the Gaussian mechanism, on a store of 100 owners for each budget."""
    stores: dict[int, Any] = {}

    def build(budget: Any, vote: Any = None, line: str | None = None, **how: Any) -> SealedRelease:
        vote = NoisyVote(labels, mechanism="vote") if vote is None else vote
        selector = PoissonExampleSelector(stores.setdefault(id(budget), store_of(records(100))), **how)
        return PrivateEnsemble(selector, lambda _: labels[0]) | DPAggregate(vote, budget, line=line)

    return build


@pytest.mark.parametrize(("first", "then"), [(OWN, SHARED), (OWN, CAPPED), (SHARED, OWN), (CAPPED, OWN)])
@pytest.mark.parametrize("frozen", [True, False])
def test_noise_for_outputs_of_one_owner_serves_no_other_outputs(
    first: dict[str, Any], then: dict[str, Any], frozen: bool, chain: Chain, budget_of: Any
) -> None:
    """One count moves in the one, two in the other: a sigma that is too small by a factor of sqrt(2)."""
    budget = budget_of(releases={"votes": 10})
    earlier = chain(budget, line="votes", **first)
    if frozen:
        earlier.invoke({"input": "one"})
    with pytest.raises(PlanMismatch, match="own_calls"):
        chain(budget, line="votes", **then)
    assert budget.spent() == frozen
    assert earlier.line().plan_line.own_calls == (first is OWN)


def test_a_requested_line_of_own_calls_is_for_them_alone(chain: Chain, budget_of: Any) -> None:
    budget = budget_of(releases={"votes": REQUESTED})
    with pytest.raises(PlanMismatch, match="own_calls"):
        budget.line("vote", 0.2, name="votes")
    with pytest.raises(PlanMismatch, match="own_calls"):
        chain(budget, line="votes", members=20, rate=0.2, max_exemplars=4)
    assert budget.plan is None
    chain(budget, line="votes", calls=20).invoke({"input": "one"})


def test_a_line_without_a_word_on_calls_takes_the_first_chains(chain: Chain, budget_of: Any) -> None:
    budget = budget_of(releases={"votes": LineRequest("vote", 0.2, 10)})
    own = chain(budget, line="votes", **OWN)
    with pytest.raises(PlanMismatch, match="own_calls"):
        chain(budget, line="votes", **SHARED)
    assert own.line().plan_line.own_calls


def test_a_look_at_another_budget_leaves_the_plan_its_choice(chain: Chain, budget_of: Any) -> None:
    """A rate for much noise is another one than for little."""
    alone = chain(budget_of(), members=20).line().rate
    release = chain(budget_of(), members=20)
    tried = release.tried_on(budget_of(0.1, releases=1000, accept_noise=True)).tried_line().rate
    assert tried != alone == release.line().rate


def test_a_line_that_is_named_after_a_mechanism_has_it(chain: Chain, budget_of: Any, labels: list[str]) -> None:
    for name in ("vote", "vote-em"):
        assert chain(budget_of(releases={name: 10}), NoisyVote(labels), line=name, **OWN).line().mechanism == name
        assert chain(budget_of(), NoisyVote(labels), line=name, **OWN).line().mechanism == name


def test_equal_questions_are_not_answered_from_another_prior(chain: Chain, budget_of: Any, labels: list[str]) -> None:
    """Functions of the same name and text, whose answers differ. Under so much noise the prior decides."""

    class Always:
        def __init__(self, answer: str) -> None:
            self.answer = answer

        def __call__(self, given: Any) -> str:
            return self.answer

    def said(given: Any, answer: str) -> str:
        return answer

    makers: list[Callable[[str], Any]] = [
        lambda answer: lambda given: answer,
        Always,
        lambda answer: Always(answer).__call__,
        lambda answer: partial(said, answer=answer),
    ]
    for make in makers:
        budget, how = budget_of(0.001, accept_noise=True, replay=True), {"calls": 20, "rate": 1.0}
        chains = [chain(budget, NoisyVote(labels, prior=make(label), mechanism="vote"), **how) for label in labels]
        assert [each.invoke({"input": "one"}) for each in chains] == labels
        assert budget.spent() == 2
        assert chains[0].invoke({"input": "one"}) == labels[0]
        assert budget.spent() == 2


def test_what_would_be_ignored_is_refused(store_of: Any, records: Any, labels: list[str]) -> None:
    selector = PoissonExampleSelector(store_of(records(40)), calls=10)
    for name, build in (
        ("prior", lambda: NoisyVote(labels, scores=True, prior={labels[0]: 1.0})),
        ("prior", lambda: NoisyVote(labels, prior=["zero_shot"])),  # type: ignore[arg-type]
        ("timeout", lambda: PrivateEnsemble(selector, timeout=5.0)),
        ("timeout", lambda: PrivateEnsemble(selector, timeout="soon")),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidParameter) as caught:
            build()
        assert caught.value.parameter == name
