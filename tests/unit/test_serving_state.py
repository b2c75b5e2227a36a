"""`serving/state.py`: what a served chain says of its budget, to whom, and what it never says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda, RunnableSequence

from langchain_dpicl import InvalidParameter, NoisyVote, PoissonExampleSelector, PrivacyBudget, PrivateEnsemble
from langchain_dpicl.release.base import releases_in
from langchain_dpicl.release.sealed import DPAggregate
from langchain_dpicl.release.transaction import acting_for
from langchain_dpicl.serving.state import budget_state, release_history

Make = Callable[..., Any]

MEMBER = RunnableLambda(lambda values: "Positive")


def asked(chain: Any, times: int, principal: str | None = None) -> None:
    for i in range(times):
        if principal is None:
            chain.invoke({"input": f"question {i}"})
        else:
            with acting_for(principal):
                chain.invoke({"input": f"question {i}"})


# -- the budget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", ["vote", "vote-em"])
def test_before_the_first_release_nothing_is_spent_and_nothing_is_frozen(sealed_of: Make, chosen: str) -> None:
    """The Gaussian is asked for; at an epsilon of 20 and seven releases of four votes the plan chooses the other."""
    vote = NoisyVote(["Positive", "Negative"], mechanism=chosen if chosen == "vote" else None)
    chain = sealed_of(MEMBER, releases=7, epsilon=20.0, rate=0.5, vote=vote, accept_noise=True)
    state = budget_state([chain], None)
    assert state["lines"] == {chosen: {"unit": "releases", "count": 7, "spent": 0, "remaining": 7, "mechanism": None}}
    assert (state["epsilon_spent"], state["share_spent"], state["exhausted"]) == (0.0, 0.0, False)
    assert release_history([chain], None) == {"releases": [], "total": 0}
    assert chain.budget.plan is None, "reading a budget does not freeze its plan"
    asked(chain, 1)
    assert set(budget_state([chain], None)["lines"]) == set(state["lines"]), "the line keeps its name"


def test_the_state_is_what_the_budget_says(sealed_of: Make) -> None:
    chain = sealed_of(MEMBER, epsilon=30.0, releases=4, rate=0.5)  # so little noise that no vote abstains
    asked(chain, 3)
    budget: PrivacyBudget = chain.budget
    state = budget_state([chain], None)
    assert json.loads(json.dumps(state)) == state
    promised = (state["name"], state["epsilon"], state["delta"], state["scope"])
    assert promised == ("default", 30.0, 1e-5, "shared")
    assert (state["on_exhausted"], state["replay"]) == ("raise", False)
    assert "all callers may collude" in state["assumption"]
    assert state["owner"] == "owner"
    assert state["epsilon_spent"] == budget.epsilon_spent()
    assert state["share_spent"] == state["epsilon_spent"] / 30.0
    line = state["lines"]["vote"]
    assert (line["count"], line["spent"], line["remaining"]) == (4, 3, 1)
    assert "discrete Gaussian noise of sigma" in str(line["mechanism"])
    assert not state["exhausted"]
    asked(chain, 1)
    assert budget_state([chain], None)["exhausted"]
    assert budget_state([chain], None)["share_spent"] == 1.0


def test_where_callers_share_a_counter_each_sees_the_same(sealed_of: Make) -> None:
    chain = sealed_of(MEMBER)
    asked(chain, 2, "alice")
    assert budget_state([chain], "bob") == budget_state([chain], None) == budget_state([chain], "alice")
    assert release_history([chain], "bob")["total"] == 2


def test_where_each_has_a_counter_nobody_sees_anothers(sealed_of: Make) -> None:
    chain = sealed_of(MEMBER, releases=3, scope="per_principal")
    assert budget_state([chain], "alice")["lines"]["vote"]["remaining"] == 3
    asked(chain, 3, "alice")
    asked(chain, 1, "bob")
    alice, bob, new = (budget_state([chain], who) for who in ("alice", "bob", "new"))
    assert [each["lines"]["vote"]["spent"] for each in (alice, bob, new)] == [3, 1, 0]
    assert [each["exhausted"] for each in (alice, bob, new)] == [True, False, False]
    assert bob["epsilon_spent"] == chain.budget.epsilon_spent("bob")
    assert "callers do not collude" in bob["assumption"]
    history = release_history([chain], "bob")
    assert (len(history["releases"]), history["total"]) == (1, 1)
    assert "alice" not in json.dumps([bob, history])
    assert release_history([chain], "new") == {"releases": [], "total": 0}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("read", [budget_state, release_history])
def test_where_each_has_a_counter_nobody_is_refused(sealed_of: Make, read: Any, used: bool) -> None:
    chain = sealed_of(MEMBER, scope="per_principal")
    if used:
        asked(chain, 1, "alice")
    for nobody in (None, ""):
        with pytest.raises(InvalidParameter) as caught:
            read([chain], nobody)
        assert caught.value.parameter == "principal"


def test_every_line_is_shown_and_all_must_be_empty_to_be_exhausted(sealed_of: Make, budget_of: Make) -> None:
    budget = budget_of(releases={"a": 1, "b": 2})
    ensemble, vote = sealed_of(MEMBER).ensemble, NoisyVote(["Positive", "Negative"])
    chains = [ensemble | DPAggregate(vote, budget, line=line) for line in ("a", "b")]
    assert {name: line["count"] for name, line in budget_state(chains, None)["lines"].items()} == {"a": 1, "b": 2}
    asked(chains[0], 1)
    state = budget_state(chains[:1], None)
    assert {name: line["remaining"] for name, line in state["lines"].items()} == {"a": 0, "b": 2}
    assert not state["exhausted"]
    asked(chains[1], 2)
    state = budget_state(chains, None)
    assert state["exhausted"]
    assert state["others"] == [], "one budget, though two releases"
    history = release_history(chains, None)
    assert [(past["line"], past["number"]) for past in history["releases"]] == [("a", 1), ("b", 1), ("b", 2)]
    epsilons = [past["epsilon_spent"] for past in history["releases"]]
    assert epsilons == sorted(epsilons, key=float)
    assert epsilons[-1] == state["epsilon_spent"]


def test_a_chain_of_two_budgets_shows_the_first_and_the_other(sealed_of: Make) -> None:
    first, second = sealed_of(MEMBER, name="first"), sealed_of(MEMBER, name="second", releases=3)
    chain = RunnableSequence(first, lambda label: {"input": label}, second)
    asked(chain, 2)
    state = budget_state(releases_in(chain), None)
    assert (state["name"], [other["name"] for other in state["others"]]) == ("first", ["second"])
    assert state["others"][0]["lines"]["vote"]["remaining"] == 1
    assert release_history(releases_in(chain), None)["total"] == 2


# -- where owners pay with tickets -------------------------------------------------------------------------------------


@pytest.fixture
def endless_of(budget_of: Make, store_of: Make) -> Make:
    """endless_of(["question 0"]): a chain whose store holds these texts, on a budget of two tickets an owner.

    The fake model embeds equal texts equally and others anywhere: an owner is eligible for its own text alone.
    """

    def make(texts: list[str], **options: Any) -> Any:
        records = [{"input": text, "output": "Positive", "owner": f"owner-{i}"} for i, text in enumerate(texts)]
        selector = PoissonExampleSelector(store_of(records), 4, rate=0.5, threshold=0.999, eligible=4)
        budget = budget_of(**{"epsilon": 30.0, "releases": 2, "tickets": True, "name": "near", **options})
        vote = NoisyVote(["Positive", "Negative"], mechanism="vote")
        return PrivateEnsemble(selector, MEMBER) | DPAggregate(vote, budget, return_receipt=True)

    return make


def test_a_ticket_budget_has_no_end_and_its_loss_stays_at_the_plans(endless_of: Make) -> None:
    chain = endless_of(["question 0", "question 1"])
    before = budget_state([chain], None)
    counted = {"unit": "releases", "count": None, "spent": 0, "remaining": None, "mechanism": None, "tickets": 2}
    assert before["lines"] == {"vote": counted}
    assert chain.budget.plan is None, "reading a budget does not freeze its plan"
    for asked_for in (1, 2, 5):
        asked(chain, asked_for)
        state = budget_state([chain], None)
        line = state["lines"]["vote"]
        assert json.loads(json.dumps(state)) == state
        assert (line["count"], line["remaining"], line["tickets"]) == (None, None, 2)
        assert line["spent"] == chain.budget.spent()
        assert state["epsilon_spent"] == chain.budget.epsilon_spent() <= 30.0
        assert not state["exhausted"]
    assert (line["spent"], state["epsilon_spent"], state["share_spent"]) == (8, 30.0, 1.0)
    history = release_history([chain], None)
    assert [past["epsilon_spent"] for past in history["releases"]][1:] == [30.0] * 7


def test_a_question_changes_the_number_of_questions_and_what_follows_from_it(endless_of: Make) -> None:
    chain = endless_of(["question 0"] * 6)
    chain.line()
    states = [budget_state([chain], None)]
    for _ in range(5):
        asked(chain, 1)
        states.append(budget_state([chain], None))
    for number, state in enumerate(states):
        loss = chain.budget.plan.spent({"vote": min(number, 2)})
        line = {**states[0]["lines"]["vote"], "spent": number}
        assert state == {
            **states[0],
            "epsilon_spent": loss,
            "share_spent": loss / 30.0,
            "lines": {"vote": line},
        }


@pytest.mark.parametrize("scope", ["shared", "per_principal"])
def test_a_caller_sees_the_same_whoever_is_eligible_and_whoever_has_tickets(endless_of: Make, scope: str) -> None:
    seen: list[list[Any]] = []
    for texts in (["question 0"] * 8, ["question 0"] * 4 + ["elsewhere"] * 4, ["elsewhere"] * 8):
        chain = endless_of(texts, scope=scope)
        shown: list[Any] = [budget_state([chain], "alice")]
        for _ in range(4):  # after two, nobody who is near has a ticket
            with acting_for("alice"):
                receipt = chain.invoke({"input": "question 0"})["receipt"]
            history = release_history([chain], "alice")
            shown += [budget_state([chain], "alice"), budget_state([chain], "bob"), history["total"]]
            shown += [{**past, "time": "", "outcome": ""} for past in history["releases"]]  # of the answer's own noise
            shown.append({**receipt, "id": "", "time": "", "outcome": ""})  # its id is random
        report = chain.budget.private_ticket_report()["vote"]
        shown.append(sorted(report))
        assert sum(each["owners"] for each in report.values()) == texts.count("question 0"), "the stores do differ"
        seen.append(shown)
    assert seen[0] == seen[1] == seen[2]


# -- the history -------------------------------------------------------------------------------------------------------


def test_history_says_when_and_what_came_of_it_and_nothing_else(sealed_of: Make) -> None:
    chain = sealed_of(MEMBER, keep_queries=True, name="secret-name")
    chain.invoke({"input": "QUESTION-4711"})
    line = chain.line()
    line.charge()
    line.give_up(line.charge()[0])
    line.record(line.charge()[0], outcome="members abstained")
    history = release_history([chain], None)
    assert json.loads(json.dumps(history)) == history
    assert [past["outcome"] for past in history["releases"]] == [
        "released",
        "charged, not answered",
        "given up",
        "members abstained",
    ]
    assert [past["epsilon_spent"] is None for past in history["releases"]] == [False, True, True, False]
    for past in history["releases"]:
        assert set(past) == {"number", "line", "time", "epsilon_spent", "outcome"}
    assert [past["number"] for past in history["releases"]] == [1, 2, 3, 4]
    assert "QUESTION" not in json.dumps(history)
    assert "secret-name" not in json.dumps(history), "no id of a receipt"


def test_history_gives_the_latest_the_oldest_of_them_first(sealed_of: Make) -> None:
    chain = sealed_of(MEMBER)
    asked(chain, 6)
    history = release_history([chain], None, last=4)
    assert [past["number"] for past in history["releases"]] == [3, 4, 5, 6]
    assert history["total"] == 6
    assert [past["time"] for past in history["releases"]] == sorted(past["time"] for past in history["releases"])
    assert release_history([chain], None, last=1000)["total"] == len(release_history([chain], None)["releases"]) == 6


@pytest.mark.parametrize("last", [0, -1, 1001, 2.0, True, "5", None])
def test_a_number_out_of_bounds_is_refused(sealed_of: Make, last: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        release_history([sealed_of(MEMBER)], None, last=last)
    assert caught.value.parameter == "last"
    assert "1000" in caught.value.bound


@pytest.mark.parametrize("read", [budget_state, release_history])
def test_a_chain_without_a_release_has_no_budget(read: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read([], None)
    assert caught.value.parameter == "releases"
