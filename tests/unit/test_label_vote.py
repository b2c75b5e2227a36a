"""`LabelVote`: owners' own labels, counted without a model."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import pytest
from exact import Branching, law

from langchain_dpicl import (
    DPAggregate,
    InvalidParameter,
    LabelVote,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
)

LABELS = ["Positive", "Negative"]


def records_of(*labels: object) -> list[dict[str, Any]]:
    """A record for each label, of owners 0, 1, ..."""
    return [{"input": f"text {i}", "output": label, "owner": str(i)} for i, label in enumerate(labels)]


@pytest.mark.parametrize("shape", [{"calls": 6}, {"members": 40}])
async def test_at_a_rate_of_one_the_counts_are_those_of_the_labels(
    shape: dict[str, int], store_of: Any, budget_of: Any
) -> None:
    """A plan whose noise is 0 but for less than 1e-9 of all runs. With shared buckets two owners may share a vote."""
    store = store_of(records_of("Positive", "negative!", "Positive", "Neutral", " positive", "Negative"))
    selector = PoissonExampleSelector(store, rate=1.0, max_exemplars=9, **shape)  # type: ignore[arg-type]
    budget = budget_of(300.0, releases=2)
    chain = PrivateEnsemble(selector) | DPAggregate(LabelVote(LABELS, details=True), budget)
    for found in (chain.invoke({"input": "q"}), await chain.ainvoke({"input": "q"})):
        most = (3, 2)
        counts = tuple(found["counts"][label] for label in LABELS)
        assert counts == most if "calls" in shape else all(0 < n <= top for n, top in zip(counts, most, strict=True))
    assert budget.spent() == 2


def test_calls_as_many_as_owners_are_a_rate_of_one(store_of: Any, records: Any, budget_of: Any) -> None:
    selector = PoissonExampleSelector(store_of(records(30)), calls=30)
    budget = budget_of(3.0)
    chain = PrivateEnsemble(selector) | DPAggregate(LabelVote(LABELS, prior={"Positive": 0.8}), budget)
    assert chain.invoke({"input": "q"}) in LABELS
    (line,) = budget.plan.lines.values()
    assert (line.rate, dict(line.options)) == (1.0, {"own_calls": 1.0})


@pytest.mark.parametrize("exemplars_per_owner", [1, 2])
def test_an_owner_of_several_records_has_one_vote(exemplars_per_owner: int, store_of: Any) -> None:
    """The exact law: ann's one vote is each of her labels with the same probability, and bob's is his."""
    rows = [("ann", "Positive"), ("ann", "Negative"), ("bob", "Negative")]
    store = store_of([{"input": f"t {i}", "output": out, "owner": who} for i, (who, out) in enumerate(rows)])
    selector = PoissonExampleSelector(store, calls=2, rate=0.25, exemplars_per_owner=exemplars_per_owner)
    ensemble, vote = PrivateEnsemble(selector), LabelVote(LABELS)

    def run(randomness: Branching) -> tuple[int, ...]:
        selector._randomness = randomness
        return tuple(vote.counts(ensemble.run({"input": "q"}, 0.25, vote)).tolist())

    expected: dict[Hashable, float] = {(0, 0, 0): 0.75 * 0.75, (1, 0, 0): 0.25 * 0.75 / 2}
    expected |= {(0, 1, 0): 0.25 * 0.75 * 1.5, (1, 1, 0): 0.25**2 / 2, (0, 2, 0): 0.25**2 / 2}
    assert law(run) == pytest.approx(expected, rel=1e-12)


def test_what_is_no_label_abstains(store_of: Any) -> None:
    selector = PoissonExampleSelector(store_of(records_of("Positive", "other", "7")), calls=3, rate=1.0)
    vote = LabelVote(LABELS)
    assert vote.counts(PrivateEnsemble(selector).run({"input": "q"}, 1.0, vote)).tolist() == [1, 0, 2]


def test_the_nearest_record_votes_and_its_owner_alone_pays(store_of: Any, budget_of: Any) -> None:
    """ann's text is the query itself; her other record has another label, and bob's is far: by a threshold of nearly 1
    she alone is eligible. She has two tickets, and is silently left out of the third answer."""
    rows = [("ann", "the query", "Negative"), ("ann", "something else", "Positive"), ("bob", "far away", "Positive")]
    store = store_of([{"input": text, "output": out, "owner": who} for who, text, out in rows])
    selector = PoissonExampleSelector(store, calls=1, rate=1.0, threshold=0.99, eligible=1)
    budget = budget_of(1000.0, releases=2, tickets=True, accept_noise=True)
    chain = PrivateEnsemble(selector) | DPAggregate(LabelVote(LABELS, details=True), budget)
    found = [chain.invoke({"input": text})["counts"] for text in ["the query"] * 3 + ["nobody's text"]]
    assert found == [{"Positive": 0, "Negative": 1}] * 2 + [{"Positive": 0, "Negative": 0}] * 2
    assert budget.remaining() is None


def test_what_does_not_go_without_a_member_is_refused(store_of: Any, records: Any, budget_of: Any) -> None:
    store = store_of(records(20))
    selector = PoissonExampleSelector(store, calls=5)
    for ensemble, vote, name in [
        (PrivateEnsemble(selector), NoisyVote(LABELS), "aggregator"),
        (PrivateEnsemble(selector, lambda given: "Positive"), LabelVote(LABELS), "aggregator"),
    ]:
        with pytest.raises(InvalidParameter) as caught:
            _ = ensemble | DPAggregate(vote, budget_of())
        assert caught.value.parameter == name
    with pytest.raises(InvalidParameter, match="None, a chain, or a mapping"):
        LabelVote(LABELS, prior="zero_shot")
    budget = budget_of(on_exhausted="zero_shot")
    with pytest.raises(InvalidParameter) as caught:
        _ = PrivateEnsemble(selector) | DPAggregate(LabelVote(LABELS), budget, return_receipt=True)
    assert caught.value.parameter == "on_exhausted"
    unlabelled = PoissonExampleSelector(store_of(records(20), output_key=None), calls=5)
    for how, name in (({}, "member"), ({"count_empty": True}, "count_empty")):
        with pytest.raises(InvalidParameter) as caught:
            PrivateEnsemble(unlabelled, **how)  # type: ignore[arg-type]
        assert caught.value.parameter == name


def test_a_chain_may_be_the_prior_of_a_vote_without_a_member(store_of: Any, records: Any, budget_of: Any) -> None:
    """No owner is near enough, so the prior decides, but for less than 1e-9 of all runs."""
    for label, way in itertools.product(LABELS, (str, dict)):
        answer: Any = label if way is str else {label: 1.0}
        selector = PoissonExampleSelector(store_of(records(40)), calls=10, threshold=1.0, eligible=40)
        vote = LabelVote(LABELS, prior=lambda given, answer=answer: answer, mechanism="vote")  # type: ignore[misc]
        chain = PrivateEnsemble(selector) | DPAggregate(vote, budget_of(200.0, releases=1))
        assert chain.invoke({"input": "q"}) == label
