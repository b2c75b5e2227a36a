"""Mistake 21: a ledger that is restored from a copy starts again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
import thief
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from langchain_dpicl.budget import ledger, opening, witness
from langchain_dpicl.budget.schema import Account, counters
from langchain_dpicl.budget.tickets import TicketLine
from langchain_dpicl.budget.witness import CounterKey, Witness

Patch = pytest.MonkeyPatch


def witness_that_nobody_asks(patch: Patch) -> None:
    """The mutant: a ledger that looks right when it is opened is believed from then on."""
    patch.setattr(Witness, "follow", lambda *_: None)


def marks_that_follow_the_ledger(patch: Patch) -> None:
    """The mutant: what the ledger says stands, and its witness is corrected."""
    patch.setattr(witness, "_MOVE", witness._MOVE.replace(" AND reserved <= :spent", ""))


def marks_that_do_not_say_what_was_reached(patch: Patch) -> None:
    """The mutant: an older copy is opened, and says that less was spent."""
    patch.setattr(witness, "_MOVE", witness._MOVE.replace("low = :spent, ", ""))


def withdrawn_whatever_followed(patch: Patch) -> None:
    """The mutant: a charge that was rolled back takes the charges of others along."""

    def withdraw(self: Witness, key: CounterKey, before: int, after: int) -> None:
        back = sa.update(witness.marks).filter_by(**key._asdict()).values(reserved=before)
        self.run(lambda connection: connection.execute(back))

    patch.setattr(Witness, "withdraw", withdraw)


def lost_units_that_count_nothing(patch: Patch) -> None:
    """The mutant: an older copy counts as far as the witness, and what it lacks costs nobody anything."""
    real = opening.lose

    def lose(connection: Any, count: opening.CounterRow, units: int) -> None:
        real(connection, count, units)
        counter = Account(count.plan_id, count.key.line, count.key.principal).counter
        free = {"lost": counters.c.lost - units, "returned": counters.c.returned + units}
        connection.execute(sa.update(counters).where(counter).values(free))

    patch.setattr(opening, "lose", lose)


def tickets_whatever_was_lost(patch: Patch) -> None:
    """The mutant: an owner has all the tickets that it has not used on this copy."""
    real = TicketLine.use
    patch.setattr(
        TicketLine, "use", lambda self, connection, made, eligible, _: real(self, connection, made, eligible, 0)
    )


def units_that_come_back_again(patch: Patch) -> None:
    """The mutant: the same record, written twice, gives back twice."""
    patch.setattr(ledger, "_RECORD", ledger._RECORD.partition("AND units")[0])


@pytest.mark.parametrize(
    ("mutant", "machine"),
    [
        (witness_that_nobody_asks, thief.Thief),
        (witness_that_nobody_asks, thief.TicketThief),
        (marks_that_follow_the_ledger, thief.PrincipalThief),
        (marks_that_follow_the_ledger, thief.TicketThief),
        (marks_that_do_not_say_what_was_reached, thief.Thief),
        (withdrawn_whatever_followed, thief.PrincipalThief),
        (withdrawn_whatever_followed, thief.TicketThief),
        (lost_units_that_count_nothing, thief.Thief),
        (lost_units_that_count_nothing, thief.TicketThief),
        (tickets_whatever_was_lost, thief.TicketThief),
        (units_that_come_back_again, thief.Thief),
    ],
)
def test_21_a_ledger_that_starts_again_from_a_copy_is_caught(
    mutant: Callable[[Patch], None], machine: type[thief.Thief], monkeypatch: Patch
) -> None:
    """By the state machine that `unit/test_witness.py` runs on the right code."""
    mutant(monkeypatch)
    same = settings(
        thief.SETTINGS, max_examples=300, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(
        AssertionError, match=r"more than the plan|counts too little|more was surely reached|do not add up"
    ):
        run_state_machine_as_test(machine, settings=same)
