"""`release.py`: what a sealed release does with its budget: replay, principals, a spent budget, faults at each step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ways
from ears import Spy
from langchain_core.runnables import RunnableLambda
from ways import WAYS

from langchain_dpicl import (
    DPAggregate,
    InvalidParameter,
    Keywords,
    LedgerError,
    MembersAbstained,
    ModelUnavailable,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    ReleaseFailed,
    SealedRelease,
    acting_for,
)

LABELS = ["Positive", "Negative"]
Seal = Callable[..., SealedRelease]


class Member(Spy):
    """Answers "Positive", counts its calls, and fails where a test wants it to."""

    def __init__(self) -> None:
        self.calls = 0
        self.lock = threading.Lock()
        self.answer: Callable[[dict[str, Any]], str] = lambda _: "Positive"

    def __call__(self, values: dict[str, Any]) -> str:
        with self.lock:
            self.calls += 1
        return self.answer(values)


@pytest.fixture
def member() -> Member:
    return Member()


@pytest.fixture
def seal(member: Member, store_of: Any, records: Any, budget_of: Any) -> Seal:
    """seal(aggregator=..., return_receipt=..., **budget options): four members, every owner takes part; none of the
    buckets is empty, but for a probability of 1e-8."""

    def make(aggregator: Any = None, budget: PrivacyBudget | None = None, **options: Any) -> SealedRelease:
        own = {key: options.pop(key) for key in ("line", "return_receipt") if key in options}
        selector = PoissonExampleSelector(store_of(records(80)), 4, rate=1.0, max_exemplars=80)
        budget = budget or budget_of(**{"replay": True, **options})
        aggregator = aggregator or NoisyVote(LABELS)
        return PrivateEnsemble(selector, RunnableLambda(member)) | DPAggregate(aggregator, budget, **own)

    return make


async def ask(way: str, sealed: SealedRelease, question: Any) -> Any:
    return await ways.ask(way, sealed, {"input": question})


# -- replay ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_an_equal_query_costs_nothing_and_calls_nobody(way: str, seal: Seal, member: Member) -> None:
    sealed = seal(return_receipt=True)
    first = await ask("invoke", sealed, "q")
    calls = member.calls
    again = await ask(way, sealed, "q")
    assert member.calls == calls
    assert sealed.budget.spent() == 1
    assert again["answer"] == first["answer"]
    assert again["receipt"] == {**first["receipt"], "replayed": True}
    assert (await ask(way, sealed, "another"))["receipt"]["number"] == 2


async def test_replay_can_be_switched_off(seal: Seal) -> None:
    sealed = seal(replay=False)
    for way in WAYS:
        await ask(way, sealed, "q")
    assert sealed.budget.spent() == len(WAYS)


@pytest.mark.parametrize("aggregator", [NoisyVote(LABELS, scores=True), Keywords.joint_em(["alpha", "beta"], 2)])
def test_every_kind_of_release_is_replayed_as_it_was(aggregator: Any, seal: Seal) -> None:
    sealed = seal(aggregator)
    first, again = sealed.invoke({"input": "q"}), sealed.invoke({"input": "q"})
    assert sealed.budget.spent() == 1
    assert again == first
    assert type(again) is type(first)
    assert vars(again) == vars(first) if hasattr(first, "__dict__") else list(again) == list(first)


def test_other_labels_or_members_do_not_replay_each_other(seal: Seal) -> None:
    sealed = seal()
    sealed.invoke({"input": "q"})
    seal(NoisyVote(["Positive", "Neutral"]), sealed.budget).invoke({"input": "q"})
    assert sealed.budget.spent() == 2
    seal(NoisyVote(LABELS), sealed.budget).invoke({"input": "q"})
    assert sealed.budget.spent() == 2


@pytest.mark.parametrize("way", ["batch", "abatch"])
async def test_equal_inputs_of_a_batch_are_released_once(way: str, seal: Seal, member: Member) -> None:
    sealed = seal(return_receipt=True, releases=2)
    inputs: list[dict[str, Any]] = [{"input": "a"}, {"input": "b"}, {"input": "a"}]
    answers = await sealed.abatch(inputs) if way == "abatch" else sealed.batch(inputs)
    assert member.calls == 2 * 4
    assert [answer["receipt"]["number"] for answer in answers] == [1, 2, 1]
    assert [answer["receipt"]["replayed"] for answer in answers] == [False, False, True]
    assert sealed.budget.remaining() == 0
    known = await sealed.abatch(inputs) if way == "abatch" else sealed.batch(inputs)
    assert all(answer["receipt"]["replayed"] for answer in known), "a spent budget still answers what it has answered"


async def test_equal_questions_at_once_are_charged_once(seal: Seal, member: Member) -> None:
    sealed = seal(releases=3)
    sealed.line()
    assert await asyncio.gather(*(sealed.ainvoke({"input": "q"}) for _ in range(12))) == ["Positive"] * 12
    assert (sealed.budget.spent(), member.calls) == (1, 4)
    threads = [threading.Thread(target=sealed.invoke, args=({"input": "r"},)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sealed.budget.spent(), member.calls) == (2, 8)


def test_abstention_is_not_replayed(seal: Seal, member: Member) -> None:
    sealed = seal()
    member.answer = lambda _: "nothing like a label"
    with pytest.raises(MembersAbstained):
        sealed.invoke({"input": "q"})
    member.answer = lambda _: "Positive"
    assert sealed.invoke({"input": "q"}) == "Positive"
    assert sealed.budget.spent() == 2


def test_a_known_answer_needs_no_model(seal: Seal, member: Member) -> None:
    """The member is down and known to be: what the ledger has is still answered, the rest is refused at no cost."""
    sealed = seal()
    assert sealed.invoke({"input": "q"}) == "Positive"

    def fail(_: Any) -> str:
        raise ConnectionError

    member.answer = fail
    sealed.ensemble.doubts.of("").suspected = True
    assert sealed.invoke({"input": "q"}) == "Positive"
    with pytest.raises(ModelUnavailable):
        sealed.invoke({"input": "other"})
    assert sealed.budget.spent() == 1


def test_a_request_that_cannot_be_serialised_is_charged_each_time(seal: Seal) -> None:
    sealed = seal()
    for _ in range(2):
        sealed.invoke({"input": "q", "handle": object()})
    assert sealed.budget.spent() == 2


def test_receipts_hold_no_query_unless_the_deployer_asks(seal: Seal) -> None:
    question = {"input": "did Mrs. Alder call?"}
    quiet = seal(return_receipt=True).invoke(question)["receipt"]
    assert "Alder" not in str(quiet)
    kept = seal(return_receipt=True, keep_queries=True).invoke(question)["receipt"]
    assert "Alder" in kept["query"]


# -- principals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_each_principal_has_a_counter_and_replays_of_its_own(way: str, seal: Seal) -> None:
    sealed = seal(return_receipt=True, scope="per_principal", releases=2)
    with acting_for("alice"):
        first = await ask(way, sealed, "q")
        assert (await ask(way, sealed, "q"))["receipt"]["replayed"]
    with acting_for("bob"):
        assert not (await ask(way, sealed, "q"))["receipt"]["replayed"], "what alice asked is not bob's to see"
    assert sealed.budget.spent(principal="alice") == sealed.budget.spent(principal="bob") == 1
    assert first["receipt"]["principal"] == "alice"
    assert "collude" in first["receipt"]["assumption"]


@pytest.mark.parametrize("way", WAYS)
async def test_without_a_principal_the_answer_is_no(way: str, seal: Seal, member: Member) -> None:
    sealed = seal(scope="per_principal")
    with pytest.raises(InvalidParameter, match="principal"):
        await ask(way, sealed, "q")
    assert member.calls == 0
    assert sealed.budget.principals() == {}


def test_a_principal_reaches_the_steps_of_a_chain_and_no_further(seal: Seal) -> None:
    sealed = seal(scope="per_principal")
    chain = RunnableLambda(lambda question: {"input": question}) | sealed | str.upper
    with acting_for("alice"):
        assert chain.batch(["a", "b"]) == ["POSITIVE", "POSITIVE"]
    assert sealed.budget.spent(principal="alice") == 2
    with pytest.raises(InvalidParameter, match="principal"):
        chain.invoke("c")


def test_a_request_or_its_configuration_cannot_name_the_principal(seal: Seal) -> None:
    sealed = seal(scope="per_principal")
    config: Any = {"configurable": {"principal": "mallory"}, "metadata": {"principal": "mallory"}}
    with pytest.raises(InvalidParameter, match="principal"):
        sealed.invoke({"input": "q", "principal": "mallory"}, config)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_principal_is_a_name(name: Any) -> None:
    with pytest.raises(InvalidParameter, match="principal"), acting_for(name):
        pass


# -- a spent budget ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_a_spent_budget_may_answer_zero_shot_and_says_so(way: str, seal: Seal, member: Member) -> None:
    sealed = seal(return_receipt=True, releases=1, on_exhausted="zero_shot")
    assert (await ask(way, sealed, "q"))["receipt"]["outcome"] == "released"
    seen: list[int] = []
    member.answer = lambda values: seen.append(len(values["examples"])) or "Negative"  # type: ignore[func-returns-value]
    answer = await ask(way, sealed, "other")
    assert answer["answer"] == "Negative"
    assert seen == [0], "one public call without examples"
    receipt = answer["receipt"]
    assert receipt["outcome"].startswith("zero-shot")
    assert (receipt["id"], receipt["number"], receipt["remaining"]) == ("", 0, 0)
    assert sealed.budget.spent() == 1


def test_a_batch_that_does_not_fit_is_answered_as_far_as_the_budget_goes(seal: Seal) -> None:
    sealed = seal(return_receipt=True, releases=2, on_exhausted="zero_shot")
    answers = sealed.batch([{"input": str(i)} for i in range(4)])
    outcomes = [answer["receipt"]["outcome"] for answer in answers]
    assert outcomes.count("released") == 2
    assert sum(outcome.startswith("zero-shot") for outcome in outcomes) == 2


def test_zero_shot_answers_need_the_receipt_that_marks_them(seal: Seal) -> None:
    with pytest.raises(InvalidParameter, match="return_receipt"):
        seal(on_exhausted="zero_shot")


def test_zero_shot_that_is_not_usable_is_an_error_and_not_an_answer(seal: Seal, member: Member) -> None:
    sealed = seal(return_receipt=True, releases=1, on_exhausted="zero_shot")
    sealed.invoke({"input": "q"})
    member.answer = lambda _: "neither"
    with pytest.raises(ModelUnavailable):
        sealed.invoke({"input": "other"})


# -- faults ------------------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """An interrupt that no handler of exceptions swallows."""


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "abatch"])
@pytest.mark.parametrize("step", ["sample", "aggregate"])
@pytest.mark.parametrize("error", [RuntimeError, Stop])
async def test_a_fault_on_the_private_side_keeps_its_charge_and_frees_the_query(
    way: str,
    step: str,
    error: type[BaseException],
    seal: Seal,
    monkeypatch: pytest.MonkeyPatch,
    canary: str,
    canary_free: Callable[..., None],
) -> None:
    sealed = seal(replay_patience=600.0)
    sealed.line()

    def fail(*_: Any, **__: Any) -> Any:
        raise error(canary)

    target = sealed.ensemble.selector if step == "sample" else type(sealed.aggregator)
    with monkeypatch.context() as patch:
        patch.setattr(target, step, fail)
        with pytest.raises(ReleaseFailed if error is RuntimeError else Stop) as caught:
            await ask(way, sealed, "q")
        canary_free(caught.value, frames=True)
    assert sealed.budget.spent() == 1
    assert await ask(way, sealed, "q") == "Positive", "the same query need not wait for the one that failed"
    assert sealed.budget.spent() == 2


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "abatch"])
async def test_a_receipt_that_cannot_be_written_keeps_the_charge_and_shows_no_answer(
    way: str, seal: Seal, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = seal()
    sealed.line()

    def fail(*_: Any, **__: Any) -> None:
        raise LedgerError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(sealed.budget._ledger, "record", fail)
        with pytest.raises(LedgerError):
            await ask(way, sealed, "q")
    assert sealed.budget.spent() == 1


async def test_a_cancelled_question_keeps_its_charge_and_frees_the_query(seal: Seal, member: Member) -> None:
    sealed = seal(replay_patience=600.0)
    started, hold = threading.Event(), threading.Event()

    def slow(_: Any) -> str:
        started.set()
        hold.wait(20)
        return "Positive"

    member.answer = slow
    task = asyncio.create_task(sealed.ainvoke({"input": "q"}))
    await asyncio.to_thread(started.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    hold.set()
    assert sealed.budget.spent() == 1
    assert await asyncio.wait_for(sealed.ainvoke({"input": "q"}), 60) == "Positive"
    assert sealed.budget.spent() == 2
