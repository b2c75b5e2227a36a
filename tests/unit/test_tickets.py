"""Releases on a budget with tickets: who pays, who is left out, and that a caller sees nothing of either."""

from __future__ import annotations

import asyncio
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tickets_on_disk as disk
from ears import Ears, Spy
from ticket_worlds import Degrees
from ways import WAYS, ask

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    InvalidParameter,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    ReleaseFailed,
    SealedRelease,
    UnsafeConfigurationError,
    acting_for,
)

OWNERS = {"a": (0, 90), "b": (45,), "c": (100,), "d": (200,)}
"""Where exemplars lie. 0 finds a and b; 95 finds a, b and c; 158 finds c and d; 280 finds nobody."""


def store_of_degrees(owners: dict[str, tuple[int, ...]] = OWNERS) -> ExemplarStore:
    rows = [
        {"input": f"CANARY-{name} {at}", "output": "yes", "owner": name} for name, all_ in owners.items() for at in all_
    ]
    return ExemplarStore.from_records(rows, Degrees(), owner_key="owner", progress=False)


class Member(Spy):
    """Says yes; keeps which owners' examples it was shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.calls = 0
        self.fails: type[BaseException] | None = None

    def __call__(self, values: dict[str, Any]) -> str:
        self.calls += 1
        self.shown += [example["input"].split()[0].removeprefix("CANARY-") for example in values["examples"]]
        if self.fails is not None:
            raise self.fails
        return "yes"

    def taken(self) -> list[str]:
        shown, self.shown = sorted(self.shown), []
        return shown


@pytest.fixture
def member() -> Member:
    return Member()


@pytest.fixture
def seal(member: Member, ledger_url: str) -> Callable[..., SealedRelease]:
    """seal(tickets=2, ...): three members at a rate of 1, so that everybody who pays is shown to one of them.

    Who is shown nobody says the same as the others, and counts: the answer never depends on who pays."""

    def make(tickets: int = 2, store: ExemplarStore | None = None, **options: Any) -> SealedRelease:
        own = {key: options.pop(key) for key in ("return_receipt", "line") if key in options}
        store = store_of_degrees() if store is None else store
        selector = PoissonExampleSelector(store, 3, rate=options.pop("rate", 1.0), max_exemplars=9, threshold=0.5)
        options.setdefault("replay", False)
        budget = options.pop("budget", None) or PrivacyBudget(1000, 1e-5, tickets, ledger_url, tickets=True, **options)
        vote = NoisyVote(["yes", "no"], mechanism="vote")
        return PrivateEnsemble(selector, member, count_empty=True) | DPAggregate(vote, budget, **own)

    return make


def at(angle: int) -> dict[str, str]:
    return {"input": f"? {angle}"}


# -- who pays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_eligible_owners_pay_and_without_tickets_they_are_left_out(
    way: str, seal: Any, member: Member, ledger_url: str
) -> None:
    release = seal()
    seen = []
    for angle in (0, 0, 95, 95, 158, 0, 280):
        assert await ask(way, release, at(angle)) == "yes"
        seen.append(member.taken())
    assert seen == [["a", "b"], ["a", "b"], ["c"], ["c"], ["d"], [], []]
    assert disk.burnt(ledger_url, release.selector.store) == {"a": 2, "b": 2, "c": 2, "d": 1}
    assert member.calls == 7 * 3, "as many calls for everybody as for nobody"
    assert release.budget.spent() == 7
    assert release.budget.remaining() is None


def test_a_ticket_is_burnt_whether_the_coin_says_yes_or_no(seal: Any, member: Member, ledger_url: str) -> None:
    """At a rate of 1e-9 nobody is sampled (false alarm: below 1e-6), and all eligible owners pay."""
    release = seal(rate=1e-9)
    for _ in range(3):
        release.invoke(at(95))
    assert member.taken() == []
    assert disk.burnt(ledger_url, release.selector.store) == {"a": 2, "b": 2, "c": 2, "d": 0}


def test_owners_that_come_later_have_all_their_tickets(seal: Any, member: Member) -> None:
    release = seal(tickets=1)
    release.invoke(at(0))
    release.selector.store.add([{"input": "CANARY-new 0", "output": "yes", "owner": "new"}])
    member.taken()
    release.invoke(at(0))
    assert member.taken() == ["new"]


def test_queries_of_a_batch_burn_in_order_and_equal_ones_once(seal: Any, member: Member, ledger_url: str) -> None:
    release = seal(tickets=2, replay=True)
    release.batch([at(0), at(0), at(95), at(0), at(95)], config={"max_concurrency": 1})
    assert member.taken() == ["a", "a", "b", "b", "c"]
    assert disk.burnt(ledger_url, release.selector.store) == {"a": 2, "b": 2, "c": 1, "d": 0}
    release.batch([at(10), at(100)])
    assert member.taken() == ["c"], "the third query that finds a and b"
    release.batch([at(0), at(95), at(10)])
    assert disk.burnt(ledger_url, release.selector.store) == {"a": 2, "b": 2, "c": 2, "d": 0}, "replayed"
    assert release.budget.spent() == 4


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "abatch"])
async def test_a_replayed_query_burns_nothing(way: str, seal: Any, ledger_url: str) -> None:
    release = seal(replay=True)
    for _ in range(4):
        await ask(way, release, at(95))
    assert disk.burnt(ledger_url, release.selector.store) == {"a": 1, "b": 1, "c": 1, "d": 0}


@pytest.mark.parametrize("way", WAYS)
async def test_a_release_that_fails_keeps_its_tickets_burnt(
    way: str, seal: Any, ledger_url: str, monkeypatch: pytest.MonkeyPatch, canary_free: Any
) -> None:
    release = seal()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CANARY-a")

    monkeypatch.setattr(NoisyVote, "aggregate", broken)
    with pytest.raises(ReleaseFailed) as error:
        await ask(way, release, at(0))
    canary_free(error.value, frames=True, secret="CANARY")
    assert disk.burnt(ledger_url, release.selector.store) == {"a": 1, "b": 1, "c": 0, "d": 0}


async def test_a_release_that_is_cancelled_keeps_its_tickets_burnt(seal: Any, member: Member, ledger_url: str) -> None:
    release = seal()
    running = Ears()

    async def slow(values: dict[str, Any]) -> str:
        running.append("yes")
        await asyncio.sleep(60)
        return "yes"

    vote = NoisyVote(["yes", "no"], mechanism="vote")
    release = PrivateEnsemble(release.selector, slow) | DPAggregate(vote, release.budget)
    task = asyncio.create_task(release.ainvoke(at(0)))
    async with asyncio.timeout(30):
        while not running:
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert disk.burnt(ledger_url, release.selector.store) == {"a": 1, "b": 1, "c": 0, "d": 0}


def test_principals_have_tickets_of_their_own(seal: Any, member: Member, ledger_url: str) -> None:
    release = seal(tickets=1, scope="per_principal")
    seen = []
    for who, angle in (("ann", 0), ("bob", 0), ("ann", 0), ("bob", 95)):
        with acting_for(who):
            release.invoke(at(angle))
        seen.append(member.taken())
    assert seen == [["a", "b"], ["a", "b"], [], ["c"]]
    store = release.selector.store
    assert disk.burnt(ledger_url, store, principal="bob") == {"a": 1, "b": 1, "c": 1, "d": 0}
    assert {who: line["burnt"] for who, line in release.budget.private_ticket_report()["vote"].items()} == {
        "ann": {"1": 2},
        "bob": {"1": 3},
    }


# -- what a caller sees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "astream"])
async def test_a_caller_sees_the_same_whether_everybody_has_tickets_or_nobody(
    way: str, seal: Any, tmp_path: Any
) -> None:
    """Answers, receipts, the budget's numbers, what objects say of themselves, and every line of every logger at DEBUG,
    SQLAlchemy's own included: equal but for times, where members say the same."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    root, engines = logging.getLogger(), logging.getLogger("sqlalchemy")
    levels = root.level, engines.level
    root.addHandler(handler)
    for logger in (root, engines):
        logger.setLevel(logging.DEBUG)
    seen = []
    try:
        for name, spent_before in (("rich", (280, 280)), ("poor", (95, 158))):
            budget = PrivacyBudget(1000, 1e-5, 1, f"sqlite:///{tmp_path}/{name}.db", tickets=True, replay=False)
            release = seal(budget=budget, return_receipt=True)
            for angle in (*spent_before, 280):
                release.invoke(at(angle))
            heard.seek(0)
            heard.truncate()
            answers = [await ask(way, release, at(angle)) for angle in (95, 158, 0)]
            logged = heard.getvalue()
            assert "COMMIT" in logged, "the ledger's engine is heard"
            assert "dpicl_tickets" not in logged
            assert not any(mark.hex() in logged for mark in disk.marks_in(f"sqlite:///{tmp_path}/{name}.db"))
            for answer in answers:
                answer["receipt"] = {k: v for k, v in answer["receipt"].items() if k not in ("time", "query")}
            seen.append(
                (answers, budget.lines(), budget.preview(), budget.epsilon_spent(), repr(budget), repr(release))
            )
    finally:
        root.removeHandler(handler)
        root.setLevel(levels[0])
        engines.setLevel(levels[1])
    assert seen[0] == seen[1]


def test_who_paid_is_given_once_and_shown_nowhere(seal: Any) -> None:
    release = seal()
    line = release.line()
    asked = line.ask(release.selector.store, np.arange(4))
    (charge,) = line.charge(owners=[asked])
    assert "participants" not in repr(charge)
    assert "4" not in repr(charge.participants)
    with pytest.raises(UnsafeConfigurationError):
        pickle.dumps(charge.participants)
    assert charge.participants.take().tolist() == [0, 1, 2, 3]
    with pytest.raises(UnsafeConfigurationError, match="taken already"):
        charge.participants.take()


def test_a_fault_of_the_tickets_is_a_ledger_error_without_owners(seal: Any, ledger_url: str, canary_free: Any) -> None:
    from langchain_dpicl import LedgerError

    release = seal()
    release.invoke(at(0))
    (mark, *_) = disk.marks_in(ledger_url)
    disk.run(ledger_url, "DROP TABLE dpicl_tickets")
    with pytest.raises(LedgerError) as error:
        release.invoke(at(95))
    for secret in ("CANARY", mark.hex()):
        canary_free(error.value, frames=True, secret=secret)
    assert "array" not in repr([frame for frame in error.traceback[-1].locals.items() if "owner" in frame[0]])
    assert release.budget.spent() == 1


# -- refused ----------------------------------------------------------------------------------------------------------


def test_what_cannot_have_tickets_is_refused(seal: Any, ledger_url: str, member: Member) -> None:
    release = seal()
    blind = PoissonExampleSelector(release.selector.store, 3, rate=0.5, max_exemplars=8)
    with pytest.raises(InvalidParameter, match="threshold"):
        _ = PrivateEnsemble(blind, member) | DPAggregate(NoisyVote(["yes", "no"]), release.budget)
    line = release.line()
    with pytest.raises(UnsafeConfigurationError, match="eligible"):
        line.charge()
    with pytest.raises(UnsafeConfigurationError, match="eligible"):
        line.charge(2, owners=[line.ask(release.selector.store, np.arange(2))])
    with pytest.raises(InvalidParameter, match="soft_limit"):
        PrivacyBudget(1.0, 1e-5, 3, ledger_url, "soft", tickets=True, soft_limit=0.5)
    with pytest.raises(InvalidParameter, match="tickets"):
        PrivacyBudget(1.0, 1e-5, 3, ledger_url, "bad", tickets=1)  # type: ignore[arg-type]
    assert release.budget.spent() == 0


def test_the_private_report_counts_owners(seal: Any) -> None:
    release = seal(tickets=2)
    assert release.budget.private_ticket_report() == {}
    for angle in (0, 0, 95):
        release.invoke(at(angle))
    found = release.budget.private_ticket_report()["vote"][""]
    assert found["private"].startswith("PRIVATE")
    assert {k: found[k] for k in ("tickets", "owners", "without", "burnt")} == {
        "tickets": 2,
        "owners": 3,
        "without": 2,
        "burnt": {"1": 1, "2": 2},
    }
    release.selector.store.forget("a")
    assert release.budget.private_ticket_report()["vote"][""]["burnt"] == {"1": 1, "2": 1}
