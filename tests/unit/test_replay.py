"""`budget/receipt.py` and the claims of `budget/line.py`: an equal query costs nothing twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage

from langchain_dpicl import PrivacyBudget, PrivacyBudgetExceeded
from langchain_dpicl.budget import BudgetLine, Charge, Replayed
from langchain_dpicl.budget.line import query_id

Make = Callable[..., PrivacyBudget]
ANSWER = '{"b": 1, "a": "\\u00e9 \U0001f600"}'


@pytest.fixture
def budget_of(budget_of: Callable[..., PrivacyBudget]) -> Callable[..., PrivacyBudget]:
    """Budgets that replay, as they do unless told otherwise."""
    return lambda *target, **options: budget_of(*target, **{"replay": True, **options})


@pytest.fixture
def line(budget_of: Make) -> BudgetLine:
    return budget_of(3.0, releases=10).line("vote", 0.2)


# -- which queries are equal -------------------------------------------------------------------------------------------

DIFFERENT: list[Any] = [
    1, "1", True, 1.0, None, "", b"1", [], [1], (1,), [[1]], ["1"], [1, 2], [2, 1], {}, {"a": 1}, {"a": 1.0}, {1: "a"},
    {"1": "a"}, {"a": {"b": 1}}, {"a": {"b": "1"}}, {1}, frozenset({1}), 0, -0.0, 0.0, False, "a\x00", "a", "ab",
    ["a", "b"], ["ab"], ["a", ["b"]], 10**30, -1, float("inf"), float("nan"), "\ud800", HumanMessage("1"),
    AIMessage("1"),
    HumanMessage("1", name="x"), [HumanMessage("1")], Document("1"), Document("1", metadata={"a": 1}),
    HumanMessage([{"type": "text", "text": "1"}]),
]  # fmt: skip


def test_requests_that_differ_in_value_or_type_anywhere_have_different_hashes() -> None:
    hashes = [query_id(b"k" * 32, ("plan", "line"), {"input": value}, "") for value in DIFFERENT]
    assert None not in hashes
    assert len(set(hashes)) == len(DIFFERENT)


@pytest.mark.parametrize("value", DIFFERENT, ids=lambda value: repr(value)[:30])
def test_equal_requests_have_equal_hashes(value: Any) -> None:
    import copy

    one = query_id(b"k" * 32, ("plan", "line"), {"input": value, "other": 1}, "")
    assert one == query_id(b"k" * 32, ("plan", "line"), {"other": 1, "input": copy.deepcopy(value)}, "")


def test_key_plan_line_and_variant_are_part_of_the_hash() -> None:
    base = (b"k" * 32, ("plan", "line"), {"input": 1}, "")
    changed = [
        (b"l" * 32, *base[1:]),
        (base[0], ("plan", "other"), *base[2:]),
        (base[0], ("planline",), *base[2:]),
        (*base[:3], "scores"),
    ]
    assert len({query_id(*each) for each in [base, *changed]}) == 5  # type: ignore[arg-type]


class Odd:
    pass


class OddText(str):
    __slots__ = ()


def test_what_cannot_be_told_for_certain_has_no_hash(line: BudgetLine) -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    circle: list[Any] = []
    circle.append(circle)
    for value in (Odd(), [Odd()], {"a": Odd()}, OddText("a"), lambda: 1, deep, circle, Odd, 1j, Document):
        assert line.query_id({"input": value}) is None
    first, second = line.charge(queries=[None, None])
    assert isinstance(first, Charge)
    assert isinstance(second, Charge)
    assert first.number != second.number, "what has no hash is never taken for equal"


def test_the_key_is_the_ledger_s_own(budget_of: Make, ledger_url: str) -> None:
    one = PrivacyBudget(3.0, 1e-5, 10, ledger_url).line("vote", 0.2)
    same = PrivacyBudget(3.0, 1e-5, 10, ledger_url).line("vote", 0.2)
    other = budget_of(3.0).line("vote", 0.2)
    assert one.query_id({"input": "x"}) == same.query_id({"input": "x"}) != other.query_id({"input": "x"})


# -- replay ------------------------------------------------------------------------------------------------------------


def ask(line: BudgetLine, *values: Any, **options: Any) -> list[Charge | Replayed]:
    return line.charge(queries=[line.query_id({"input": value}) for value in values], **options)


def numbers(entries: list[Charge | Replayed]) -> list[int]:
    return [entry.number for entry in entries if isinstance(entry, Charge)]


def test_other_processes_and_later_ones_replay_too(ledger_url: str) -> None:
    first = PrivacyBudget(3.0, 1e-5, 10, ledger_url)
    line = first.line("vote", 0.2)
    line.record(ask(line, "x")[0], answer=ANSWER)  # type: ignore[arg-type]
    first.close()
    (again,) = ask(PrivacyBudget.open(ledger=ledger_url).line("vote", 0.2), "x")
    assert isinstance(again, Replayed)
    assert again.answer == ANSWER


def test_new_ones_are_charged_together_or_not_at_all(budget_of: Make) -> None:
    line = budget_of(3.0, releases=3).line("vote", 0.2)
    line.record(ask(line, "a")[0], answer="1")  # type: ignore[arg-type]
    with pytest.raises(PrivacyBudgetExceeded, match="2 of 3 releases left, and 3 are needed"):
        ask(line, "a", "b", "c", "d", "b")
    assert line.spent() == 1
    entries = ask(line, "b", "a", "c", "b")
    assert [type(entry) for entry in entries] == [Charge, Replayed, Charge, Charge]
    assert numbers(entries) == [2, 3, 2]


@pytest.mark.parametrize("how", ["given up", "no answer"])
def test_a_query_without_an_answer_is_charged_again(how: str, line: BudgetLine) -> None:
    (charge,) = ask(line, "x")
    assert isinstance(charge, Charge)
    line.give_up(charge) if how == "given up" else line.record(charge, outcome="members abstained")
    assert numbers(ask(line, "x")) == [2]


def test_giving_up_does_not_undo_an_answer(line: BudgetLine) -> None:
    (charge,) = ask(line, "x")
    line.record(charge, answer=ANSWER)  # type: ignore[arg-type]
    line.give_up(charge)  # type: ignore[arg-type]
    assert isinstance(ask(line, "x")[0], Replayed)


def test_without_replay_every_query_is_charged_and_its_hash_kept(budget_of: Make) -> None:
    line = budget_of(3.0, replay=False).line("vote", 0.2)
    first, second = ask(line, "x", "x")
    assert numbers([first, second]) == [1, 2]
    receipt = line.record(first, answer=ANSWER)  # type: ignore[arg-type]
    assert receipt["query"] == line.query_id({"input": "x"})
    assert numbers(ask(line, "x")) == [3]


def test_lines_and_principals_do_not_see_each_other_s_answers(budget_of: Make) -> None:
    budget = budget_of(3.0, releases={"a": 5, "b": 5}, scope="per_principal")
    budget.declare("b", "vote", 0.1)
    a, b = budget.line("vote", 0.2, name="a"), budget.line("vote", 0.1, name="b")
    a.record(ask(a, "x", principal="alice")[0], answer=ANSWER)  # type: ignore[arg-type]
    assert isinstance(ask(a, "x", principal="alice")[0], Replayed)
    assert numbers(ask(a, "x", principal="bob")) == [1]
    assert numbers(ask(b, "x", principal="alice")) == [1]
    same = a.query_id({"input": "x"})
    assert isinstance(b.charge(queries=[same], principal="alice")[0], Charge), "the counter decides, not the hash alone"


# -- equal queries at once ---------------------------------------------------------------------------------------------


def in_threads(count: int, work: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [future.result(30) for future in [pool.submit(work) for _ in range(count)]]


def test_who_waits_goes_on_when_the_other_gives_up(line: BudgetLine) -> None:
    (charge,) = ask(line, "x")
    timer = threading.Timer(0.1, line.give_up, (charge,))
    timer.start()
    assert numbers(ask(line, "x")) == [2]
    timer.join()


def test_who_waits_charges_nothing_until_all_queries_are_decided(line: BudgetLine) -> None:
    (charge,) = ask(line, "x")
    assert isinstance(charge, Charge)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, line, "x", "y")
        time.sleep(0.1)
        assert line.spent() == 1
        line.record(charge, answer=ANSWER)
        assert [type(entry) for entry in waiting.result(30)] == [Replayed, Charge]
    assert line.spent() == 2


def test_after_the_patience_a_query_is_charged_anew_and_the_new_charge_is_waited_for(ledger_url: str) -> None:
    dead = PrivacyBudget(3.0, 1e-5, 10, ledger_url, replay_patience=0.2).line("vote", 0.2)
    ask(dead, "x")  # and its process dies here
    barrier = threading.Barrier(4)

    def one() -> Charge | Replayed:
        line = PrivacyBudget(3.0, 1e-5, 10, ledger_url, replay_patience=0.2).line("vote", 0.2)
        barrier.wait()
        (entry,) = ask(line, "x")
        if isinstance(entry, Charge):
            line.record(entry, answer=ANSWER)
        return entry

    entries = in_threads(4, one)
    assert dead.spent() == 1 + len(numbers(entries)) <= 3, "one takes over, the others wait for it"
    assert {entry.answer for entry in entries if isinstance(entry, Replayed)} <= {ANSWER}


def test_no_patience_means_no_waiting(budget_of: Make) -> None:
    line = budget_of(3.0, replay_patience=0.0).line("vote", 0.2)
    ask(line, "x")
    assert numbers(ask(line, "x")) == [2]


def test_a_late_answer_of_the_first_charge_does_not_replace_the_one_in_use(budget_of: Make) -> None:
    line = budget_of(3.0, replay_patience=0.0).line("vote", 0.2)
    (late,) = ask(line, "x")
    (second,) = ask(line, "x")
    line.record(second, answer='"second"')  # type: ignore[arg-type]
    line.record(late, answer='"late"')  # type: ignore[arg-type]
    (again,) = ask(line, "x")
    assert isinstance(again, Replayed)
    assert again.answer == '"second"'


async def test_a_cancelled_task_stops_waiting_and_leaves_no_claim(line: BudgetLine) -> None:
    (charge,) = ask(line, "x")
    task = asyncio.create_task(line.acharge(queries=[line.query_id({"input": name}) for name in "xy"]))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    line.give_up(charge)  # type: ignore[arg-type]
    assert numbers(await line.acharge(queries=[line.query_id({"input": "y"})])) == [2]
    assert line.spent() == 2


def test_no_query_and_no_answer_lies_in_the_ledger_unless_asked(budget_of: Make, tmp_path: Path) -> None:
    budget = budget_of(3.0, ledger=f"sqlite:///{tmp_path / 'quiet.db'}")
    line = budget.line("vote", 0.2)
    receipt = line.record(ask(line, "QUERY-TEXT")[0], text="QUERY-TEXT")  # type: ignore[arg-type]
    assert receipt["query"] == line.query_id({"input": "QUERY-TEXT"})
    budget.close()
    assert b"QUERY-TEXT" not in b"".join(path.read_bytes() for path in tmp_path.glob("quiet.db*"))
    kept = budget_of(3.0, keep_queries=True).line("vote", 0.2)
    assert kept.record(ask(kept, "q")[0], text="QUERY-TEXT")["query"] == "QUERY-TEXT"  # type: ignore[arg-type]
