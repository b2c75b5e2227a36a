"""Filters of a request and access rules: who takes part, what a call sees, what the ledger takes for equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ears import Ears
from langchain_core.embeddings import DeterministicFakeEmbedding
from moments import eligible, similarities
from ways import WAYS, ask

from langchain_dpicl import (
    CandidateVote,
    Condition,
    DPAggregate,
    ExemplarStore,
    InvalidParameter,
    Keywords,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyWarning,
    PrivateEnsemble,
    acting_for,
)
from langchain_dpicl.store.filters import MetadataFilter

QUERY = {"input": "what does text 3.1 say?"}


def rows_of(owners: int = 12) -> list[dict[str, Any]]:
    """Three exemplars of each owner: of team a (its first owners), of team b (all), and of none."""
    return [
        {"input": f"text {i}.{j}", "output": "x", "owner": f"owner-{i}", "year": 2000 + i, **team}
        for i in range(owners)
        for j, team in enumerate([{"team": "a" if i < 5 else "c"}, {"team": "b"}, {}])
    ]


@pytest.fixture
def store(store_of: Any) -> ExemplarStore:
    return store_of(rows_of())


def one_each(store: ExemplarStore, **options: Any) -> PoissonExampleSelector:
    """A call for every eligible owner: no chance is involved."""
    options = {"calls": 5, "rate": 1.0, "exemplars_per_owner": 9} | options
    if not options.keys().isdisjoint({"filter", "visible_to"}):
        options.setdefault("eligible", 5)
    return PoissonExampleSelector(store, **options)


def drawn(selector: PoissonExampleSelector, values: Any = QUERY, principal: str | None = None) -> list[list[str]]:
    buckets = selector.sample(query=selector.embed_query(values, principal))
    return sorted(sorted(each["input"] for each in bucket) for bucket in buckets)


# -- who takes part, and with what -------------------------------------------------------------------------------------


def test_gate_and_filter_are_for_one_exemplar(store: Any) -> None:
    """An owner whose near exemplar is of another team is not eligible, though it has one of the team."""
    query = store.embed_query(QUERY["input"])
    near = similarities(store, query)
    for threshold in sorted(near.tolist())[::5]:
        selector = one_each(store, threshold=threshold, filter={"team": "b"})
        expected = [i for i in range(12) if near[3 * i + 1] >= threshold]
        assert selector.eligible(selector.embed_query(QUERY)).tolist() == expected
        assert drawn(selector) == sorted([f"text {i}.1"] for i in expected)
        counting = ([f"text {i}.{j}" for j in range(3) if near[3 * i + j] >= threshold] for i in range(12))
        assert drawn(one_each(store, threshold=threshold)) == sorted(filter(None, counting))


def test_without_one_owner_its_call_is_missing_and_nothing_else_differs(store_of: Any) -> None:
    for options in ({}, {"threshold": 0.0}):
        everyone = drawn(one_each(store_of(rows_of()), filter={"team": "b"}, **options))
        for gone in range(12):
            without = store_of([row for row in rows_of() if row["owner"] != f"owner-{gone}"])
            left = drawn(one_each(without, filter={"team": "b"}, **options))
            assert [bucket for bucket in everyone if bucket != [f"text {gone}.1"]] == left


def test_a_function_of_the_request_and_one_of_the_caller_count_together(store: Any) -> None:
    years = {"ann": {"year": Condition({"$lte": 2002})}, "bob": {"year": Condition({"$gt": 2002})}, "eve": "everything"}
    selector = one_each(store, filter=lambda values: values.get("where"), visible_to=years.__getitem__)
    assert [len(drawn(selector, {}, who)) for who in ("ann", "bob", "eve")] == [3, 9, 12]
    asked = {"where": {"team": "a"}}
    assert drawn(selector, asked, "ann") == [[f"text {i}.0"] for i in range(3)]
    assert drawn(selector, asked, "bob") == [[f"text {i}.0"] for i in range(3, 5)]


def test_what_a_store_learns_and_forgets_counts_at_once(store: Any) -> None:
    selector = one_each(store, filter={"team": "a"})
    assert len(drawn(selector)) == 5
    store.add([{"input": "new", "output": "x", "owner": "late", "team": "a"}])
    assert ["new"] in drawn(selector)
    store.forget("owner-2")
    assert len(drawn(selector)) == 5
    assert ["text 2.0"] not in drawn(selector)


def test_callers_who_name_many_keys_do_not_fill_the_memory(store: Any) -> None:
    for i in range(100):
        eligible(store, None, -1.0, MetadataFilter.parse({f"key {i}": 1, "team": "a"}))
    assert len(store._memory.matrix._columns) <= 16
    assert len(eligible(store, None, -1.0, MetadataFilter.parse({"team": "a"}))) == 5


# -- a release ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def release(store: Any, budget_of: Any) -> Callable[..., Any]:
    """release(filter=...): it answers how many calls saw an exemplar; ``seen`` are the exemplars."""

    def make(budget: Any = None, seen: Any = None, **options: Any) -> Any:
        selector = one_each(store, **options)
        seen = Ears() if seen is None else seen

        def member(values: Any) -> str:
            seen.extend(each["input"] for each in values["examples"])
            return "a"

        vote = NoisyVote(["a", "b"], scores=True)
        aggregate = DPAggregate(vote, budget_of() if budget is None else budget, return_receipt=True)
        return PrivateEnsemble(selector, member) | aggregate

    return make


@pytest.mark.parametrize("way", WAYS)
async def test_a_release_counts_those_who_pass(way: str, release: Any) -> None:
    seen: list[str] = Ears()
    answer = await ask(way, release(seen=seen, filter={"team": "a"}), QUERY)
    assert answer["answer"]["a"] == 5
    assert sorted(seen) == [f"text {i}.0" for i in range(5)]


def test_a_server_shows_each_caller_what_is_visible_and_names_a_filter_that_is_refused(
    release: Any, serve: Any
) -> None:
    seen: list[str] = Ears()
    teams = {"ann": {"team": "a"}, "bob": "everything"}
    chain = release(seen=seen, filter=lambda values: values.get("where"), visible_to=teams.__getitem__)
    client = serve(chain)

    def post(who: str, **more: Any) -> Any:
        return client.post("/ask/invoke", json={"input": {**QUERY, **more}}, headers={"x-user": who})

    assert post("ann").status_code == post("bob", where={"team": "b"}).status_code == 200
    assert sorted(seen) == sorted([*(f"text {i}.0" for i in range(5)), *(f"text {i}.1" for i in range(12))])
    for where in ({"team": {"$regex": "a"}}, "team = 'a'", {"owner": "owner-1"}):
        answer = post("ann", where=where)
        assert (answer.status_code, answer.json()["error"]) == (422, "InvalidParameter")
        assert "filter=" in answer.json()["message"]
    assert post("eve").status_code == 500, "the deployer's function fails"
    assert chain.budget.spent() == 2


def test_a_filter_is_part_of_what_the_ledger_takes_for_equal(release: Any, budget_of: Any) -> None:
    budget = budget_of(replay=True)
    given: list[Any] = []
    chain = release(budget, filter=lambda values: given[-1])

    def number(wanted: Any) -> int:
        given.append(wanted)
        found: int = chain.invoke(QUERY)["receipt"]["number"]
        return found

    a, b = {"team": "a"}, {"team": "b"}
    asked = [a, a, b, None, {"team": Condition({"$eq": "a"})}, None, {"team": Condition({"$ne": "a"})}]
    assert [number(wanted) for wanted in asked] == [1, 1, 2, 3, 1, 3, 4]
    assert release(budget, filter=b).invoke(QUERY)["receipt"]["number"] == 2, "a fixed one is the same question"


def test_callers_with_other_rights_never_share_an_answer(release: Any, budget_of: Any) -> None:
    """Even where all callers share one budget and its answers."""
    teams = {"ann": {"team": "a"}, "al": {"team": "a"}, "bob": {"team": "b"}}
    chain = release(budget_of(replay=True), visible_to=teams.__getitem__)
    found = {}
    for who in teams:
        with acting_for(who):
            found[who] = chain.invoke(QUERY)
    assert {who: round(each["answer"]["a"]) for who, each in found.items()} == {"ann": 5, "al": 5, "bob": 12}
    assert {who: each["receipt"]["number"] for who, each in found.items()} == {"ann": 1, "al": 1, "bob": 2}


async def test_equal_requests_of_a_batch_under_one_filter_are_released_once(release: Any, budget_of: Any) -> None:
    chain = release(budget_of(replay=True), filter=lambda values: values["where"])
    asked = [{**QUERY, "where": {"team": team}} for team in "aba"]
    for answers in (chain.batch(asked), await chain.abatch(asked)):
        assert [each["receipt"]["number"] for each in answers] == [1, 2, 1]
        assert [round(each["answer"]["a"]) for each in answers] == [5, 12, 5]


SECRET = "the rule's own secret"
ASKED = {**QUERY, "team": {"$ne": SECRET}}


def garbage(about: Any) -> Any:
    raise ValueError(SECRET)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"filter": garbage}, "filter"),
        ({"filter": lambda values: "team = 'a'"}, "filter"),
        ({"filter": lambda values: {"team": {"$regex": "a"}}}, "filter"),
        ({"filter": lambda values: {"owner": "owner-1"}}, "filter"),
        ({"filter": lambda values: values["where"]}, "filter"),
        ({"filter": lambda values: {"team": values["team"]}}, "filter"),
        ({"filter": lambda values: {"year": Condition({"$gte": values["team"]})}}, "filter"),
        ({"filter": lambda values: Condition({"team": values["team"]})}, "filter"),
        ({"threshold": garbage}, "threshold"),
        ({"threshold": lambda query: 3.0}, "threshold"),
        ({"visible_to": garbage}, "visible_to"),
        ({"visible_to": lambda who: True}, "visible_to"),
        ({"visible_to": {"bob": {"team": "a"}}.get}, "visible_to"),  # nobody has a rule for ann
        ({"visible_to": {"bob": {"team": "a"}}.__getitem__}, "visible_to"),
        ({"visible_to": lambda who: {}}, "visible_to"),
    ],
)
async def test_a_rule_that_fails_or_gives_no_filter_costs_nothing(
    way: str, options: Any, parameter: str, release: Any, canary_free: Any
) -> None:
    chain = release(**options)
    with acting_for("ann"), pytest.raises(InvalidParameter) as caught:
        await ask(way, chain, ASKED)
    assert caught.value.parameter == parameter
    canary_free(caught.value, secret=SECRET)
    assert chain.budget.spent() == 0


def test_a_caller_whom_no_rule_names_sees_nothing_and_one_may_see_everything(release: Any) -> None:
    rules = {"bob": "everything"}
    chain = release(visible_to=rules.get)
    with acting_for("mallory"), pytest.raises(InvalidParameter, match="visible_to='None for this caller'"):
        chain.invoke(QUERY)
    assert chain.budget.spent() == 0
    with acting_for("bob"):
        everybody = chain.invoke(QUERY)["answer"]
    assert everybody["a"] > 5


def test_a_rule_does_not_change_the_request(store: Any) -> None:
    """Its members would miss the key, and abstain after the charge."""
    selector, values = one_each(store, filter=lambda values: {"team": values.pop("team")}), {**QUERY, "team": "a"}
    assert drawn(selector, values) == [[f"text {i}.0"] for i in range(5)]
    assert values == {**QUERY, "team": "a"}


def test_who_pays_and_what_calls_see_are_by_one_threshold(release: Any, budget_of: Any) -> None:
    found: list[float] = [-1.0]
    chain = release(budget_of(tickets=True), threshold=lambda query: found.append(found[-1] + 2.0) or found[-2])
    assert (chain.invoke(QUERY)["answer"]["a"], found) == (12, [-1.0, 1.0])


def test_without_a_caller_an_access_rule_lets_nobody_ask(release: Any) -> None:
    chain = release(visible_to=lambda who: None)
    with pytest.raises(InvalidParameter, match="acting_for"):
        chain.invoke(QUERY)
    assert chain.budget.spent() == 0


def test_with_tickets_those_who_pass_pay_and_no_others(release: Any, budget_of: Any) -> None:
    """A filter alone is a gate: who pays is decided by an owner's own exemplars and public facts."""
    budget = budget_of(releases=2, tickets=True)
    chain = release(budget, filter=lambda values: values.get("where"))

    def votes(**where: Any) -> int:
        return round(chain.invoke({**QUERY, **where})["answer"]["a"])

    a, young = {"where": {"team": "a"}}, {"where": {"year": Condition({"$gte": 2010})}}
    assert [votes(**a), votes(**a), votes(**a)] == [5, 5, 0], "two tickets of each owner"
    assert votes(**young) == 2
    assert votes() == 7, "without a filter all others"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"filter": {"team": {"$regex": "a"}}}, "filter"),
        ({"filter": {}}, "filter"),
        ({"filter": "team"}, "filter"),
        ({"filter": {"owner": "owner-1"}}, "filter"),
        ({"visible_to": {"team": "a"}}, "visible_to"),
        ({"filter": {"team": "a"}, "eligible": None}, "eligible"),
        ({"filter": lambda values: None, "eligible": None, "rate": None}, "eligible"),
        ({"visible_to": lambda who: None, "eligible": None}, "eligible"),
        ({"visible_to": lambda who: None, "threshold": 0.3, "eligible": None}, "eligible"),
        ({"eligible": 5}, "eligible"),
    ],
)
def test_bad_parameters_are_refused(options: Any, parameter: str, store: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        one_each(store, **options)
    assert caught.value.parameter == parameter


def test_a_sample_is_never_drawn_past_a_filter(store: Any) -> None:
    filtered, plain = one_each(store, filter={"team": "a"}), one_each(store)
    for query in (None, np.ones(8, np.float32)):
        with pytest.raises(InvalidParameter, match="embed_query"):
            filtered.sample(query=query)
    with pytest.raises(InvalidParameter, match="embed_query"):
        plain.sample(query=filtered.embed_query(QUERY))
    with pytest.raises(InvalidParameter, match="embed_query"):
        PrivateEnsemble(filtered, lambda values: "a").run(QUERY, 1.0)


def test_a_filter_sizes_the_rate_by_the_eligible(store: Any) -> None:
    assert one_each(store, rate=None, calls=2, eligible=5, filter={"team": "a"}).rate == 0.4


def test_a_share_behind_a_filter_is_taken_as_given(store: Any) -> None:
    """Without a filter it is at least twice the calls, which would promise votes that few callers' owners can give."""
    assert one_each(store, rate=None, calls=2, eligible=0.3, visible_to=lambda who: None).rate == 2 / 4
    assert one_each(store, rate=None, calls=4, eligible=0.3, visible_to=lambda who: None).rate == 1.0
    assert one_each(store, rate=None, calls=4, eligible=0.3, threshold=0.3).rate == 4 / 8


AGGREGATORS: dict[str, Callable[[], Any]] = {
    "vote": lambda: NoisyVote(["a", "b", "c"]),
    "candidates": lambda: CandidateVote(DeterministicFakeEmbedding(size=8), ["one text", "another"]),
    "keywords": lambda: Keywords.joint_em(["some", "words", "here"], 2),
}


@pytest.mark.parametrize("kind", AGGREGATORS)
@pytest.mark.parametrize("owners", [40, 400])
def test_too_few_eligible_owners_are_told_from_public_numbers_alone(
    kind: str, owners: int, store_of: Any, budget_of: Any
) -> None:
    """When the release is made, and in the same words whomever the store holds: nobody counts who passes."""

    def make(eligible: int) -> None:
        selector = PoissonExampleSelector(
            store_of(rows_of(owners)), calls=20, eligible=eligible, visible_to=lambda who: {"team": "b"}
        )
        _ = PrivateEnsemble(selector, str) | DPAggregate(AGGREGATORS[kind](), budget_of(3, releases=20))

    told = "noise takes about .* 6 votes among" if kind != "keywords" else "6 eligible owners are fewer than 20 calls"
    with pytest.warns(PrivacyWarning, match=told):
        make(6)
    make(300)  # no warning, which would be an error here
