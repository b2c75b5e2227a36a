"""Whole copies of a ledger that are put back, or used beside it, while answers are under way: one witness, one plan."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import LedgerError, PrivacyBudget, PrivacyBudgetExceeded, PrivacyWarning
from langchain_dpicl.budget.upkeep import recover
from langchain_dpicl.budget.witness import Mark, Witness

Open = Callable[..., PrivacyBudget]


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """opened(releases): a budget of the ledger ``l``, or of another copy, whose witness is elsewhere."""
    made: list[PrivacyBudget] = []

    def make(releases: int, name: str = "p", *, of: str = "l", epsilon: float = 1000, **options: Any) -> PrivacyBudget:
        url = f"sqlite:///{tmp_path / of}.db"
        made.append(PrivacyBudget(epsilon, 1e-5, releases, url, name, witness=tmp_path / "elsewhere", **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str, str], None]:
    """copy(one, other): one ledger in another's place by SQLite's own backup: the file and its log stay the same."""

    def put(one: str, other: str) -> None:
        with (
            contextlib.closing(sqlite3.connect(tmp_path / f"{one}.db")) as source,
            contextlib.closing(sqlite3.connect(tmp_path / f"{other}.db")) as target,
        ):
            source.backup(target)

    return put


def all_left(line: Any, **options: Any) -> int:
    """Charge one unit after the other until the plan is spent; how many there were."""
    units = 0
    while True:
        try:
            line.charge(**options)
        except PrivacyBudgetExceeded:
            return units
        units += 1


@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
def test_an_answer_is_recorded_on_no_other_charge_of_an_older_copy(opened: Open, copy: Any) -> None:
    """A principal's counter that the copy lacks: another principal's gets another id."""
    opened(20, scope="per_principal").line("tokens", 0.2)
    copy("l", "old")
    other = opened(20, scope="per_principal").line("tokens", 0.2)
    own = opened(20, scope="per_principal").line("tokens", 0.2)
    (alice,) = own.charge(queries=["a"], principal="alice", units=10)  # type: ignore[attr-defined]
    copy("old", "l")
    (bob,) = other.charge(queries=["b"], principal="bob", units=10)  # type: ignore[attr-defined]
    with pytest.raises(LedgerError, match="lost this charge"):
        own.record(alice, answer='"alice"', unused=9)
    own.give_up(alice)
    assert other.replayed(["b"], "bob") == [None]
    other.record(bob, answer='"bob"')
    assert all_left(other, principal="bob") == 10


def test_a_plan_is_charged_on_no_copy_that_lacks_it(opened: Open, copy: Any) -> None:
    """Another plan that was frozen there since has another id."""
    opened(5, "first").line("vote", 0.2)
    copy("l", "old")
    loud = opened(3, "X").line("vote", 0.2)
    copy("old", "l")
    quiet = opened(1000, "Y", epsilon=1)
    quiet.line("vote", 0.2)
    with pytest.raises(LedgerError):
        loud.charge()  # type: ignore[attr-defined]
    assert quiet.spent() == 0


@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
def test_tokens_come_back_once_over_all_copies(opened: Open, copy: Any) -> None:
    """On the copy the same record is written again, as after a COMMIT whose answer was lost."""
    line = opened(40).line("tokens", 0.2)
    (first,) = line.charge(queries=["q"], units=20)  # type: ignore[attr-defined]
    copy("l", "old")
    line.record(first, answer='"a"', unused=19)
    (second,) = line.charge(units=20)  # type: ignore[attr-defined]
    line.record(second)
    copy("old", "l")
    again = opened(40).line("tokens", 0.2)
    line.record(first, answer='"a"', unused=19)
    sampled = 1 + 20
    assert sampled + all_left(again, units=1) <= 40


@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
def test_recovering_a_copy_puts_no_mark_back(
    opened: Open, copy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another copy is charged between its reading of the marks and its writing."""
    line = opened(10).line("vote", 0.2)
    line.charge()  # type: ignore[attr-defined]
    copy("l", "b")
    real = Witness.marks

    def marks(witness: Witness) -> list[Mark]:
        found = real(witness)
        monkeypatch.setattr(Witness, "marks", real)
        line.charge(9)  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(Witness, "marks", marks)
    recover(f"sqlite:///{tmp_path}/b.db", tmp_path / "elsewhere")
    assert all_left(opened(10, of="b").line("vote", 0.2)) == 0


def test_steps_that_a_copy_lacks_are_not_released_again(opened: Open, copy: Any) -> None:
    line = opened(10).line("vote", 0.2)
    line.charge(queries=["job"])  # type: ignore[attr-defined]
    copy("l", "old")
    charge = line.reopen("job")
    assert charge is not None
    assert [line.keep_step(charge, step, f"sum {step}") for step in range(2)] == ["sum 0", "sum 1"]
    copy("old", "l")
    again = opened(10).line("vote", 0.2)
    with pytest.warns(PrivacyWarning, match="charged anew"):
        assert again.reopen("job") is None


@pytest.mark.parametrize("is_counted", [True, False])
def test_two_copies_that_are_taken_up_at_once_make_one_release(is_counted: bool, opened: Open, copy: Any) -> None:
    """The first process may be killed before the witness has its step, and go on when the other copy has made it."""
    line = opened(10).line("vote", 0.2)
    line.charge(queries=["job"])  # type: ignore[attr-defined]
    copy("l", "b")
    others: Any = opened(10, of="b").line("vote", 0.2)
    one, other = line.reopen("job"), others.reopen("job")
    assert one is not None
    if is_counted:
        assert line.keep_step(one, 0, "a") == "a"
    else:
        line._ledger._keep_step(one, 0, "a")
        assert others.keep_step(other, 0, "b") == "b"
        line, others, other = others, line, one
    with pytest.raises(LedgerError, match="another copy of this ledger has made this step"):
        others.keep_step(other, 0, "c")
    with pytest.warns(PrivacyWarning, match="charged anew"):
        assert others.reopen("job") is None
    assert line.reopen("job") is not None


def test_another_plan_under_a_lost_plans_name_stops_no_other_budget(opened: Open, copy: Any, tmp_path: Path) -> None:
    opened(10, "other").line("vote", 0.2)
    copy("l", "old")
    opened(10, scope="per_principal").line("vote", 0.2).charge(principal="alice")  # type: ignore[attr-defined]
    copy("old", "l")
    with pytest.raises(LedgerError, match="rolled back"):
        opened(10, "other")
    assert recover(f"sqlite:///{tmp_path}/l.db", tmp_path / "elsewhere")["missing"] == ["p"]
    opened(5, scope="per_principal").line("vote", 0.2).charge(principal="bob")  # type: ignore[attr-defined]
    assert opened(10, "other").remaining() == 10
    assert opened(5, scope="per_principal").spent(principal="bob") == 1
