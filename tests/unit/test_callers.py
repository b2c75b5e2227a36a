"""What one caller sees of another: nothing of the outcomes of its releases, and of its questions what was chosen."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ears import Spy
from langchain_core.runnables import RunnableLambda
from table_model import TableModel
from ways import WAYS, ask

from langchain_dpicl import (
    DPAggregate,
    DPICLError,
    DPSampler,
    InvalidParameter,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    acting_for,
)
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.release import base
from langchain_dpicl.release.base import Doubts

LABELS = ["Positive", "Negative"]
BROKEN = "a question on which the model fails, with examples and without"


class Silent(NoisyVote):
    """A vote that never says that the members abstain loudly enough to count."""

    def tells(self, members: int, parameter: float) -> bool:
        return False


class Quiet(SecureRandomness):
    """No noise, so that two worlds differ in what the members said alone."""

    def discrete_gaussian(self, sigma: float, size: int) -> Any:
        return np.zeros(size, np.int64)


class World(Spy):
    """A chain over a store, and how often its model is asked without an example (by chance: below 1e-13 a release).

    ``bad``: whether the members fail on Alice's questions, where they see the private examples.
    """

    def __init__(self, store: Any, budget: PrivacyBudget, vote: type[NoisyVote]) -> None:
        self.bad = False
        self.public = 0
        selector = PoissonExampleSelector(store, 8, rate=1.0, max_exemplars=8)
        ensemble = PrivateEnsemble(selector, RunnableLambda(self.member))
        self.chain = ensemble | DPAggregate(vote(LABELS, mechanism="vote"), budget, return_receipt=True)
        self.chain._randomness = Quiet()

    def member(self, values: dict[str, Any]) -> str:
        examples = values["examples"]
        self.public += not examples and "bob" in values["input"]
        if values["input"].startswith(BROKEN) or (self.bad and "alice" in values["input"] and examples):
            raise ConnectionError
        return "Positive"

    def ask(self, caller: str, question: str) -> Any:
        """What a caller gets, as far as it is about that caller alone."""
        self.public = 0
        with acting_for(caller):
            try:
                answered = self.chain.invoke({"input": question})
            except DPICLError as error:
                return type(error).__name__, self.public
        receipt = answered["receipt"]
        return answered["answer"], receipt["number"], receipt["remaining"], receipt["replayed"], self.public


@pytest.fixture
def world(store_of: Any, records: Any, budget_of: Any) -> Callable[..., World]:
    def make(vote: type[NoisyVote] = NoisyVote, **options: Any) -> World:
        options = {"scope": "per_principal", "replay": True, "releases": 60, **options}
        return World(store_of(records(250)), budget_of(**options), vote)

    return make


# -- the outcomes of one caller's releases, for another ----------------------------------------------------------------


def test_alices_failed_release_does_not_change_what_bob_pays(world: Any) -> None:
    """The attack: one bit of Alice's for each failing question of Bob's, read from whether he was charged."""
    seen = []
    for bad in (False, True):
        here = world()
        here.bad = bad
        outcome = here.ask("alice", "alice asks")
        assert (outcome[0] == "MembersAbstained") is bad
        seen.append((here.ask("bob", f"{BROKEN} bob"), here.chain.budget.spent(principal="bob")))
    assert seen[0] == seen[1] == (("MembersAbstained", 0), 1)


@pytest.mark.parametrize("vote", [NoisyVote, Silent], ids=["tells", "tells nothing"])
def test_bob_gets_the_same_in_two_worlds_that_differ_in_alices_outcomes(
    vote: type[NoisyVote], world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ask by turns, old questions and new ones, some failing, while the clock goes on: every answer, error,
    charge and public call of Bob's is the same, whatever came of Alice's releases."""
    now = 0.0
    monkeypatch.setattr(base.time, "monotonic", lambda: now)
    turns = random.Random(5)
    script = [
        (turns.choice(["alice", "bob"]), turns.choice(["", BROKEN]), turns.randrange(6), turns.choice([1, 40, 61]))
        for _ in range(60)
    ]
    transcripts = []
    for fails in (lambda _: False, lambda _: True, lambda step: step % 3 == 0):
        here, transcript, now = world(vote), [], 0.0
        for step, (caller, kind, number, seconds) in enumerate(script):
            now += seconds
            here.bad = fails(step)
            got = here.ask(caller, f"{kind} {caller} {number}")
            if caller == "bob":
                transcript.append(got)
        transcripts.append(transcript)
    assert transcripts[0] == transcripts[1] == transcripts[2]
    assert len({entry[0] for entry in transcripts[0]}) >= 2


async def test_tasks_of_two_callers_are_apart_too(world: Any) -> None:
    here = world()
    here.bad = True

    async def one(caller: str, question: str) -> str:
        with acting_for(caller):
            try:
                await here.chain.ainvoke({"input": question})
            except DPICLError as error:
                return type(error).__name__
        return "answered"

    assert await one("alice", "alice asks") == "MembersAbstained"
    assert await one("bob", f"{BROKEN} bob") == "MembersAbstained"
    assert await asyncio.gather(one("alice", f"{BROKEN} alice"), one("bob", f"{BROKEN} bob 2")) == [
        "ModelUnavailable",
        "ModelUnavailable",
    ]


def test_a_callers_own_doubt_still_saves_that_callers_charges(world: Any) -> None:
    here = world()
    assert here.ask("bob", f"{BROKEN} bob") == ("MembersAbstained", 0)
    for number in range(3):
        assert here.ask("bob", f"{BROKEN} bob {number}") == ("ModelUnavailable", 1)
    assert here.ask("bob", "bob asks")[-1] == 1, "it answered a public question: no more doubt"
    assert here.ask("bob", "bob asks on")[-1] == 0
    assert here.chain.budget.spent(principal="bob") == 3


def test_callers_who_share_a_counter_and_their_answers_share_the_doubt(world: Any) -> None:
    here = world(scope="shared")
    assert here.ask("alice", f"{BROKEN} alice")[0] == "MembersAbstained"
    assert here.ask("bob", f"{BROKEN} bob")[0] == "ModelUnavailable"
    apart = world(scope="shared", replay="principal")
    assert apart.ask("alice", f"{BROKEN} alice")[0] == "MembersAbstained"
    assert apart.ask("bob", f"{BROKEN} bob")[0] == "MembersAbstained"


def test_a_samplers_failure_is_its_callers_alone(budget_of: Any, store_of: Any, records: Any) -> None:
    """A private step fails for Alice: Bob's model is asked as often as it would be, and his charge is the same."""

    class Faulty(SecureRandomness):
        fails = False

        def uniforms(self, size: int) -> Any:
            if self.fails:
                raise ArithmeticError
            return super().uniforms(size)

    transcripts = []
    for fails in (False, True):
        model = TableModel(lambda _, released: [0.0 if released else 9.0, 100.0 if released else 0.0], ["a", "."], {1})
        selector = PoissonExampleSelector(store_of(records(8)), 2, rate=0.5, max_exemplars=8)
        budget = budget_of(releases=400, scope="per_principal")
        sampler = DPSampler(model, selector, budget, shots=4, top_k=2, max_tokens=4)
        sampler._randomness = Faulty()
        transcript = []
        for number in range(3):
            for caller in ("alice", "bob"):
                sampler._randomness.fails = fails and caller == "alice"
                opened = len(model.opened)
                with acting_for(caller):
                    try:
                        got = sampler.invoke(f"{caller} {number}")
                    except DPICLError as error:
                        got = type(error).__name__
                if caller == "bob":
                    transcript.append((got, len(model.opened) - opened, budget.spent(principal="bob")))
                else:
                    assert (got == "ReleaseFailed") is fails
        transcripts.append(transcript)
    assert transcripts[0] == transcripts[1]


def test_a_server_tells_bob_nothing_of_alices_outcomes(world: Any, serve: Any) -> None:
    """Statuses, bodies (but times and run ids), the budget and the history."""
    transcripts = []
    for bad in (False, True):
        here = world()
        here.bad = bad
        client, transcript = serve(here.chain), []
        for number in range(3):
            for caller in ("alice", "bob"):
                for kind in (BROKEN, ""):
                    body = {"input": {"input": f"{kind} {caller} {number}"}}
                    got = client.post("/ask/invoke", json=body, headers={"x-user": caller})
                    if caller == "bob":
                        answer = got.json().get("output", {}).get("answer")
                        transcript.append((got.status_code, got.json().get("error"), answer))
        state = client.get("/ask/budget", headers={"x-user": "bob"}).json()
        history = client.get("/ask/history", headers={"x-user": "bob"}).json()
        transcripts.append((transcript, state, [{**each, "time": ""} for each in history["releases"]]))
    assert transcripts[0] == transcripts[1]


def test_whom_it_forgets_follows_from_who_asked_and_not_from_outcomes() -> None:
    for outcome in (True, False):
        doubts = Doubts(most=3)
        for name in ("bob", "a", "b"):
            doubts.asked(name)
        doubts.of("bob").suspected = True
        if outcome:
            doubts.of("a").suspected = True
        doubts.asked("bob")
        doubts.asked("c")  # "a" goes, with its doubt
        assert doubts.of("bob").suspected
        assert not doubts.of("a").suspected
        for name in ("d", "e", "f"):
            doubts.asked(name)
        assert not doubts.of("bob").suspected, "three others asked since"


def test_a_release_counts_as_asked_once_whatever_came_of_it(world: Any) -> None:
    orders = []
    for bad in (False, True):
        here = world()
        here.bad = bad
        here.chain.ensemble.doubts = Doubts(most=2)
        held = here.chain.ensemble.doubts
        record = here.chain.line().record

        def meanwhile(*args: Any, record: Any = record, held: Any = held, **options: Any) -> Any:
            held.asked("bob")  # between Alice's request and its outcome
            return record(*args, **options)

        here.chain.line().record = meanwhile
        here.ask("alice", "alice asks")
        held.asked("carol")
        orders.append(list(held._held))
    assert orders == [["bob", "carol"]] * 2


# -- replay to the caller who asked ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_is_replayed_to_the_caller_who_asked_for_it(way: str, world: Any) -> None:
    here = world(scope="shared", replay="principal", releases=3)
    question = {"input": "the same"}

    async def one(caller: str) -> Any:
        with acting_for(caller):
            return (await ask(way, here.chain, question))["receipt"]

    alice, bob = await one("alice"), await one("bob")
    assert [alice["number"], bob["number"]] == [1, 2], "a question of his own"
    assert not bob["replayed"]
    assert alice["query"] != bob["query"], "nor do receipts show that both asked the same"
    again = await one("alice")
    assert (again["number"], again["time"], again["replayed"]) == (1, alice["time"], True)
    assert here.chain.budget.spent() == 2


def test_a_spent_budget_answers_known_and_unknown_questions_alike_for_another(world: Any) -> None:
    here = world(scope="shared", replay="principal", releases=1)
    assert here.ask("alice", "alice's question")[0] == "Positive"
    assert here.ask("bob", "alice's question") == here.ask("bob", "unknown") == ("PrivacyBudgetExceeded", 0)
    assert here.ask("alice", "alice's question")[0] == "Positive"
    told = world(scope="shared", replay=True, releases=1)
    assert told.ask("alice", "alice's question")[0] == told.ask("bob", "alice's question")[0] == "Positive"


async def test_nobody_waits_for_another_callers_equal_question(budget_of: Any) -> None:
    """Alice's answer is under way, and stays so: Bob is charged at once; she herself waits."""
    budget = budget_of(replay="principal", replay_patience=0.2)
    line = budget.line("vote", 1.0)
    asked = {name: line.query_id({"input": "q"}, principal=name) for name in ("alice", "bob")}
    (first,) = line.charge(queries=[asked["alice"]])
    waiting = asyncio.create_task(line.acharge(queries=[asked["alice"]]))
    await asyncio.sleep(0.05)
    (other,) = await line.acharge(queries=[asked["bob"]])
    assert (first.number, other.number, waiting.done()) == (1, 2, False)
    assert line.reopen(asked["bob"]).number == 2
    assert line.reopen(asked["alice"]).number == 1
    line.record(first, answer='"Positive"')
    assert (await waiting)[0].answer == '"Positive"'


def test_a_sampler_replays_to_the_caller_who_asked(budget_of: Any, store_of: Any, records: Any) -> None:
    model = TableModel(lambda _, released: [0.0 if released else 99.0, 99.0 if released else 0.0], ["a", "."], {1})
    selector = PoissonExampleSelector(store_of(records(8)), 2, rate=0.5, max_exemplars=8)
    sampler = DPSampler(
        model, selector, budget_of(releases=90, replay="principal"), shots=4, top_k=2, max_tokens=4, return_receipt=True
    )
    seen = []
    for caller in ("alice", "bob", "alice", "bob"):
        with acting_for(caller):
            seen.append(sampler.invoke("the same")["receipt"]["replayed"])
    assert seen == [False, False, True, True]


def test_without_a_caller_the_answer_is_no(world: Any) -> None:
    here = world(scope="shared", replay="principal")
    with pytest.raises(InvalidParameter, match="acting_for") as caught:
        here.chain.invoke({"input": "q"})
    assert caught.value.parameter == "principal"
    assert here.chain.budget.spent() == 0


def test_with_counters_of_their_own_callers_share_no_answers_anyway(world: Any) -> None:
    for replay in (True, "principal"):
        here = world(replay=replay)
        assert [here.ask(caller, "q")[1:4] for caller in ("alice", "bob", "alice")] == [
            (1, 59, False),
            (1, 59, False),
            (1, 59, True),
        ]


def test_a_shared_budget_that_replays_apart_shows_no_receipt_for_a_name(world: Any) -> None:
    """Whose it is was not kept, so it cannot be given to that caller alone."""
    here = world(scope="shared", replay="principal", keep_queries=True)
    assert here.ask("alice", "alice's question")[0] == "Positive"
    budget = here.chain.budget
    assert "alice" in budget.receipt("default:vote:1")["query"]
    with pytest.raises(InvalidParameter, match="principal"):
        budget.receipt("default:vote:1", principal="bob")


@pytest.mark.parametrize("value", ["everybody", None, 1, "True"])
def test_replay_is_one_of_three(value: object, budget_of: Any) -> None:
    with pytest.raises(InvalidParameter, match="replay"):
        budget_of(replay=value)
