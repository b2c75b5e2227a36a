"""The order of a release exists once: who charges, what a cancelled release leaves, and where exceptions end."""

from __future__ import annotations

import ast
import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import langchain_dpicl
from langchain_dpicl import PrivacyBudget, PrivacyBudgetExceeded, UnsafeConfigurationError
from langchain_dpicl.calls.flow import Chunk, Either, arun, astream, run, stream, together
from langchain_dpicl.private.boundary import Failed, guarded

ROOT = Path(langchain_dpicl.__file__).parent
TRANSACTION = ROOT / "release" / "transaction.py"


# -- who charges -------------------------------------------------------------------------------------------------------


def charges_in(source: str) -> list[int]:
    """The lines that name a line's charge, or the permission for it."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in ("charging", "_claim"))
        or (isinstance(node, ast.Name) and node.id == "IN_TRANSACTION")
        or (isinstance(node, ast.ImportFrom) and any(alias.name == "IN_TRANSACTION" for alias in node.names))
    ]


def test_nothing_but_the_transaction_charges_a_line() -> None:
    found = {path for path in ROOT.rglob("*.py") if charges_in(path.read_text())}
    assert found == {TRANSACTION, ROOT / "budget" / "line.py"}


@pytest.mark.parametrize(
    "mutant",
    [
        "def hurry(line):\n    run(line.charging(None))",
        "from langchain_dpicl.budget.line import IN_TRANSACTION",
        "line._claim(request, {}, None)",
    ],
)
def test_a_charge_elsewhere_would_be_found(mutant: str) -> None:
    assert charges_in(mutant)


def test_a_charge_outside_of_a_transaction_raises(budget_of: Any) -> None:
    line = budget_of().line("vote", 0.5)
    for permission in (None, True, object()):
        with pytest.raises(UnsafeConfigurationError, match="within its transaction"):
            run(line.charging(permission, [None]))
    assert line.spent() == 0


def test_exceptions_end_in_one_place() -> None:
    """A handler of every exception that makes a `Failed`, or keeps an interrupt's type, is `guarded`'s."""
    makers = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and any(isinstance(part, ast.Name) and part.id == "Failed" for part in ast.walk(node))
    }
    assert makers == {"private/boundary.py"}


@pytest.mark.parametrize("replay", [True, False])
def test_a_look_ahead_is_one_reading_of_the_ledger(
    sealed_of: Any, budget_of: Any, monkeypatch: pytest.MonkeyPatch, replay: bool
) -> None:
    budget = budget_of(replay=replay, releases=2)
    sealed = sealed_of(lambda _: "Positive", budget=budget)
    line = sealed.line()
    sealed.invoke({"input": "the first one reads the key of queries, too"})
    monkeypatch.setattr(type(sealed), "calls_public", lambda self, request: True)
    ledger, kinds = budget._ledger, []
    real = ledger.run

    def counted(work: Any, kind: Any = "charge", **more: Any) -> Any:
        kinds.append(kind)
        return real(work, kind, **more)

    monkeypatch.setattr(ledger, "run", counted)
    assert sealed.invoke({"input": "q"}) == "Positive"
    assert kinds == ["read", "charge", "note"]
    asked: list[Any] = []
    monkeypatch.setattr(type(sealed), "prepare", lambda self, request: asked.append(request))
    kinds.clear()
    if replay:
        assert sealed.invoke({"input": "q"}) == "Positive"
        assert kinds == ["read"], "there is nothing to charge"
    with pytest.raises(PrivacyBudgetExceeded):
        sealed.invoke({"input": "another"})
    assert not asked, "no public work for an answer that is known, or cannot be paid"
    assert line.spent() == 2


# -- what a cancelled release leaves -----------------------------------------------------------------------------------


async def cancelled_at(sealed: Any, budget: PrivacyBudget, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Cancel a release in the middle of a step of its ledger; the same question is then answered at once."""
    ledger, entered, leave = budget._ledger, threading.Event(), threading.Event()
    real = getattr(ledger, name)

    def slow(*given: Any, **options: Any) -> Any:
        found = real(*given, **options)
        entered.set()
        leave.wait(10)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ledger, name, slow)
        task = asyncio.create_task(sealed.ainvoke({"input": "q"}))
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    leave.set()
    assert await asyncio.wait_for(sealed.ainvoke({"input": "q"}), 20) == "Positive"


@pytest.mark.parametrize(
    ("step", "spent"),
    [
        ("charge", 2),  # the cancelled charge stands
        ("record", 1),  # its answer is replayed
    ],
)
async def test_a_release_cancelled_at_a_step_keeps_its_charge_and_holds_up_nobody(
    sealed_of: Any, budget_of: Any, monkeypatch: pytest.MonkeyPatch, step: str, spent: int
) -> None:
    budget = budget_of(replay=True, replay_patience=300.0)
    sealed = sealed_of(lambda _: "Positive", budget=budget)
    sealed.line()
    await cancelled_at(sealed, budget, monkeypatch, step)
    assert budget.spent() == spent


# -- flows -------------------------------------------------------------------------------------------------------------


def both(flow: Any) -> list[Any]:
    """What the two drivers make of a flow: its result, or its error's type."""
    found: list[Any] = []
    for drive in (lambda: run(flow()), lambda: asyncio.run(arun(flow()))):
        try:
            found.append(drive())
        except BaseException as error:
            found.append(type(error))
    return found


async def later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def test_both_drivers_give_results_and_errors_back() -> None:
    def flow() -> Any:
        one = yield lambda: 1
        two = yield Either(lambda: 2, lambda: later(2))
        yield Chunk("passed over")
        with pytest.raises(ZeroDivisionError):
            yield lambda: 1 / 0
        several = yield together([inner(3), inner(4)])
        return one, two, several

    def inner(value: int) -> Any:
        return (yield lambda: value)

    assert both(flow) == [(1, 2, [3, 4])] * 2


def test_chunks_are_handed_out_and_a_reader_who_stops_ends_the_flow() -> None:
    ended: list[str] = []

    def flow() -> Any:
        try:
            for letter in "abc":
                yield Chunk(letter)
        except BaseException:
            yield lambda: ended.append("told")
            raise

    async def aside(most: int) -> list[str]:
        chunks, found = astream(flow()), []
        async for chunk in chunks:
            found.append(chunk)
            if len(found) == most:
                break
        await chunks.aclose()
        return found

    assert list(stream(flow())) == asyncio.run(aside(9)) == ["a", "b", "c"]
    assert ended == []
    some = stream(flow())
    assert next(some) == "a"
    some.close()
    assert asyncio.run(aside(1)) == ["a"]
    assert ended == ["told", "told"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_every_exception_of_a_private_flow_ends_in_guarded(error: type[BaseException]) -> None:
    """Also a ``GeneratorExit``, which ``yield from`` treats in its own way."""

    def fails() -> None:
        raise error("private")

    def flow(raises: bool) -> Any:
        yield fails if raises else (lambda: None)
        return "released"

    def outer(raises: bool) -> Any:
        return (yield from guarded(flow(raises)))

    for drive in (run, lambda each: asyncio.run(arun(each))):
        assert drive(outer(False)) == "released"
        found = drive(outer(True))
        assert isinstance(found, Failed)
        assert found.known is None
        assert (found.interrupt is None) == issubclass(error, Exception)
        assert "private" not in found.error().args
