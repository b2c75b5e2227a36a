"""`calls/batching.py` and `budget/requests.py`: what threads ask for at once, each as if it had asked alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from langchain_dpicl.budget.requests import ChargeOutcome, ChargeRequest, charge_all
from langchain_dpicl.budget.schema import Account, Charge, Claim
from langchain_dpicl.calls.batching import Together
from langchain_dpicl.errors import LedgerError

HERE = Account(1, "vote")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Held:
    """Callers of a `Together` whose first go is held until as many others wait."""

    def __init__(self) -> None:
        self.together: Together[Any, Any] = Together(partial(LedgerError, "interrupted"))
        self.groups: list[list[Any]] = []
        self.outcomes: dict[Any, Any] = {}
        self.go_on = threading.Event()

    def work(self, items: Sequence[Any]) -> list[Any]:
        self.groups.append([*items])
        if len(self.groups) == 1:
            self.go_on.wait(10)
        return [10 * item for item in items]

    def ask(self, item: Any, alike: str = "", work: Any = None) -> None:
        try:
            self.outcomes[item] = self.together(alike, item, work or self.work)
        except BaseException as error:
            self.outcomes[item] = error

    def run(self, items: Sequence[Any], work: Any = None) -> None:
        """The first item by `work` of this class, the others while it is held, in order."""
        threads = []
        for number, item in enumerate(items):
            threads.append(threading.Thread(target=self.ask, args=(item, "", work if number else None)))
            threads[-1].start()
            until(lambda: self.groups and self.waiting() == len(threads) - 1)
        self.go_on.set()
        for thread in threads:
            thread.join(10)

    def waiting(self) -> int:
        return sum(len(line.waiting) for line in self.together._lines.values())


def test_who_waits_is_served_in_one_go_and_in_order() -> None:
    held = Held()
    held.run([1, 2, 3, 4])
    assert held.groups == [[1], [2, 3, 4]]
    assert held.outcomes == {1: 10, 2: 20, 3: 30, 4: 40}
    assert held.together._lines == {}, "nothing stays"


def test_others_that_are_not_alike_wait_for_nobody() -> None:
    held = Held()
    first = threading.Thread(target=held.ask, args=(1, "a"))
    first.start()
    until(lambda: held.groups == [[1]])
    held.ask(2, "b")
    assert held.outcomes == {2: 20}
    held.go_on.set()
    first.join(10)
    assert held.outcomes == {1: 10, 2: 20}


def test_an_error_among_outcomes_is_one_callers_and_a_raised_one_everybodys() -> None:
    held = Held()
    held.run([1, 2, 3], lambda items: [LedgerError("two") if item == 2 else item for item in items])
    assert held.outcomes[3] == 3
    assert str(held.outcomes[2]) == "two"

    def fail(items: Sequence[Any]) -> list[Any]:
        raise LedgerError(f"all of {items}")

    held = Held()
    held.run([1, 2, 3], fail)
    assert held.outcomes[1] == 10
    assert [str(held.outcomes[item]) for item in (2, 3)] == ["all of [2, 3]"] * 2
    assert held.outcomes[2] is not held.outcomes[3], "each caller's error has its own traceback"


def test_who_waits_for_an_interrupted_thread_gets_a_ledgers_error() -> None:
    def interrupt(items: Sequence[Any]) -> list[Any]:
        raise KeyboardInterrupt

    held = Held()
    held.run([1, 2, 3], interrupt)
    kinds = sorted(type(held.outcomes[item]).__name__ for item in (2, 3))
    assert kinds == ["KeyboardInterrupt", "LedgerError"]
    assert held.together._lines == {}
    held.ask(4)
    assert held.outcomes[4] == 40


def test_who_comes_after_an_interrupted_thread_is_served() -> None:
    """A thread was interrupted after it had taken [2, 3]: 3 must not take 4, who waits, along."""
    held = Held()
    real = held.together._do
    taken: list[Any] = []

    def do(line: Any, mine: Any, work: Any) -> None:
        if len(line.waiting) == 2:
            taken[:], line.waiting = line.waiting, []
            until(lambda: len(line.waiting) == 1)
            raise KeyboardInterrupt
        real(line, mine, work)

    held.together._do = do  # type: ignore[method-assign]

    def come_later() -> None:
        until(lambda: bool(taken))
        held.ask(4)

    later = threading.Thread(target=come_later)
    later.start()
    held.run([1, 2, 3])
    later.join(10)
    assert sorted(type(held.outcomes[item]).__name__ for item in (2, 3)) == ["KeyboardInterrupt", "LedgerError"]
    assert held.outcomes[4] == 40
    assert held.together._lines == {}


class Uncopied(Exception):
    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


def test_an_error_that_cannot_be_copied_is_told_as_an_interrupt() -> None:
    def fail(items: Sequence[Any]) -> list[Any]:
        raise Uncopied(reason="none")

    held = Held()
    held.run([1, 2, 3], fail)
    assert [str(held.outcomes[item]) for item in (2, 3)] == ["interrupted"] * 2


def test_no_frame_of_an_error_shows_what_others_asked_for() -> None:
    """As a tool would show it that prints the variables of a traceback."""

    def fail(items: Sequence[Any]) -> list[Any]:
        raise LedgerError("no")

    held = Held()
    held.run(["one", "two", "three"], fail)
    for name, other in (("two", "three"), ("three", "two")):
        error = held.outcomes[name]
        assert str(error) == "no"
        frame = error.__traceback__.tb_next  # the first is this test's own
        shown: list[str] = []
        while frame is not None:
            shown.append(repr(frame.tb_frame.f_locals))
            frame = frame.tb_next
        assert shown
        assert not any(other in each for each in shown)


# -- charges -----------------------------------------------------------------------------------------------------------


class Counter:
    """One counter, and what the ledger knows of queries: a charge in a few lines, one request after another."""

    def __init__(self, left: int, claims: dict[str, Claim], faults: Callable[[], bool] = lambda: False) -> None:
        self.left, self.claims, self.faults = left, dict(claims), faults
        self.number = 0

    def once(self, request: ChargeRequest) -> ChargeOutcome:
        if self.faults():
            raise LedgerError("no answer")
        known = {name: self.claims[name] for name in request.names if name in self.claims}
        pending = {q: claim for q, claim in known.items() if claim.pending and request.overdue.get(q) != claim.number}
        if pending:
            return pending
        new = [key for key in dict.fromkeys(request.keys) if not (key in known and known[str(key)].answer is not None)]
        if len(new) > self.left:
            return None
        self.left -= len(new)
        made: dict[Any, Charge] = {}
        for key in new:
            self.number += 1
            query = key if isinstance(key, str) else None
            made[key] = Charge(1, "vote", self.number, "", query=query)
            if query is not None:
                self.claims[query] = Claim(self.number, None, None, None)
        return [made[key] if key in made else known[str(key)] for key in request.keys]


def some_request(draw: random.Random, claims: dict[str, Claim]) -> ChargeRequest:
    names: list[Any] = [None, *"abcdef"]
    queries = [draw.choice(names) for _ in range(draw.randint(1, 3))]
    overdue = {q: claims[q].number for q in set(queries) & claims.keys() if draw.random() < 0.5}
    return ChargeRequest(HERE, queries, overdue=overdue)


def shown(outcome: Any) -> Any:
    """An outcome without the numbers of its charges, which follow an order that nobody was promised."""
    if not isinstance(outcome, list):
        return outcome and {q: (claim.outcome, claim.receipt) for q, claim in outcome.items()}
    numbers = [entry.number for entry in outcome]
    return [(type(e).__name__, getattr(e, "query", e.number), numbers.index(e.number)) for e in outcome]


def test_requests_together_have_the_outcomes_of_some_order_one_by_one() -> None:
    """3,000 random groups of requests, on counters with room for all, some or none of them."""
    draw = random.Random(5)
    for _ in range(3000):
        answered = {q: Claim(-i, "released", "{}", "1") for i, q in enumerate("ab", 1) if draw.random() < 0.5}
        pending = {q: Claim(-9, None, None, None) for q in "c" if draw.random() < 0.5}
        claims = answered | pending
        asked = [some_request(draw, claims) for _ in range(draw.randint(1, 5))]
        left = draw.choice([0, 1, 3, 6, 50])
        together = Counter(left, claims)
        outcomes = charge_all(together.once, asked)
        charges = [e for o in outcomes if isinstance(o, list) for e in o if isinstance(e, Charge)]
        owners = [{e.number for e in o if isinstance(e, Charge)} for o in outcomes if isinstance(o, list)]
        assert sum(map(len, owners)) == len(set().union(*owners)), "no two callers share a charge"
        assert len({charge.number for charge in charges}) == left - together.left
        if left >= 50:  # then the order matters only where two ask the same
            for number, request in enumerate(asked):
                others: set[str] = set().union(*(each.names for each in asked[:number] + asked[number + 1 :]))
                if not request.names & others:
                    assert shown(outcomes[number]) == shown(Counter(left, claims).once(request))
        singly = Counter(left, claims)
        assert all(isinstance(o, dict) or singly.once(r) is not None for o, r in zip(outcomes, asked, strict=True) if o)


def test_a_request_that_did_not_fit_with_others_is_charged_by_itself() -> None:
    counter = Counter(3, {})
    outcomes = charge_all(counter.once, [ChargeRequest(HERE, [None] * count) for count in (2, 2, 1)])
    assert [outcome and len(outcome) for outcome in outcomes] == [2, None, 1]
    assert counter.left == 0


@pytest.mark.parametrize("left", [9, 2])
def test_a_fault_is_told_to_all_and_nothing_is_tried_again(left: int) -> None:
    """Also not for who asks the same, or where the requests do not fit together and go one by one."""
    calls: list[int] = []
    faulty = 1 if left == 9 else 2
    counter = Counter(left, {}, lambda: bool(calls.append(1)) or len(calls) >= faulty)  # type: ignore[func-returns-value]
    asked = [ChargeRequest(HERE, names) for names in (["a"], ["a"], [None], [None, None])]
    outcomes = charge_all(counter.once, asked)
    assert [type(each) for each in outcomes] == [LedgerError] * 4
    assert len({id(each) for each in outcomes}) == 4
    assert (len(calls), counter.left) == (faulty, left)


@pytest.mark.parametrize("replay", [True, False])
def test_the_same_query_of_two_callers_is_charged_once_unless_nothing_is_replayed(replay: bool) -> None:
    counter = Counter(9, {})
    first, second = charge_all(counter.once, [ChargeRequest(HERE, ["a"], replay=replay) for _ in range(2)])
    assert isinstance(first, list)
    assert isinstance(second, dict if replay else list)
    assert counter.left == (8 if replay else 7)
