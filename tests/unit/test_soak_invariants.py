"""The checks of ``make soak`` hold for an honest ledger, and fail for each way to lose, forge or double a charge."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from langchain_dpicl import PrivacyBudget
from langchain_dpicl.budget import Charge
from langchain_dpicl.budget.opening import LOST

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))
from invariants import Account, Answer, accounts, broken, growth

ASKED = 5
World = tuple[list[Answer], dict[str, Account], Counter[str]]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Answers of a real ledger, each a second after the last."""
    url = f"sqlite:///{tmp_path}/budget.db"
    budget = PrivacyBudget(1000.0, 1e-5, 10, url, scope="per_principal")
    line = budget.line("vote", 0.5)
    answers = []
    for i in range(ASKED):
        (charge,) = line.charge(principal="alice", queries=[line.query_id({"input": i})])
        assert isinstance(charge, Charge)
        line.record(charge, answer='"Flask"')
        answers.append(Answer(("alice", f"question {i}"), charge.number, "Flask", float(i)))
    budget.close()
    return answers, accounts(url), Counter(alice=ASKED)


def test_an_honest_ledger_breaks_nothing(world: World) -> None:
    answers, ledger, tried = world
    assert broken(answers, ledger, tried) is None
    assert broken([*answers, answers[2]], ledger, tried) is None, "a replay"
    ledger["alice"].spent += 2
    ledger["alice"].rows[7] = ledger["alice"].rows[5]._replace(units=2, outcome=LOST, receipt=None, answer=None)
    assert broken(answers, ledger, tried) is None, "a charge that a killed worker was making"
    assert ledger["alice"].lost == 2


def claim(answers: list[Answer], ledger: Account, tried: Counter[str]) -> None:
    answers.append(Answer(("alice", "invented"), ASKED + 1, "Flask", 0.0))


def forget_charge(answers: list[Answer], ledger: Account, tried: Counter[str]) -> None:
    del ledger.rows[ASKED]
    ledger.spent -= 1


def forget_count(answers: list[Answer], ledger: Account, tried: Counter[str]) -> None:
    ledger.spent -= 1


def lose_row(answers: list[Answer], ledger: Account, tried: Counter[str]) -> None:
    del ledger.rows[2]


def lose_receipt(answers: list[Answer], ledger: Account, tried: Counter[str]) -> None:
    ledger.rows[2] = ledger.rows[2]._replace(receipt=None, outcome=None)


def other_answer(answers: list[Answer], ledger: Account, tried: Counter[str]) -> None:
    answers.append(answers[1]._replace(answer="Porch"))


def charge_again(answers: list[Answer], ledger: Account, tried: Counter[str]) -> None:
    receipt = str(ledger.rows[1].receipt).replace('"number": 1,', f'"number": {ASKED + 1},')
    ledger.rows[ASKED + 1] = ledger.rows[1]._replace(receipt=receipt)
    ledger.spent += 1
    tried["alice"] += 1
    answers.append(answers[0]._replace(number=ASKED + 1))


def charge_unasked(answers: list[Answer], ledger: Account, tried: Counter[str]) -> None:
    ledger.rows[ASKED + 1] = ledger.rows[1]
    ledger.spent += 1


def answer_two_for_one(answers: list[Answer], ledger: Account, tried: Counter[str]) -> None:
    answers.append(answers[0]._replace(question=("alice", "another")))


def overspend(answers: list[Answer], ledger: Account, tried: Counter[str]) -> None:
    ledger.allowed = ASKED - 1


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (claim, "without its charge"),
        (forget_charge, "without its charge"),
        (forget_count, "4 spent, but"),
        (lose_row, "5 spent, but"),
        (lose_receipt, "without its receipt"),
        (other_answer, "'Porch' was answered"),
        (charge_again, r"charged as \[1, 6\]"),
        (charge_unasked, "6 charges for 5 requests"),
        (answer_two_for_one, "a charge that answers"),
        (overspend, "5 spent of 4"),
    ],
)
def test_every_fault_is_found(fault: Callable[..., None], says: str, world: World) -> None:
    answers, ledger, tried = world
    fault(answers, ledger["alice"], tried)
    assert re.search(says, broken(answers, ledger, tried) or "")


def test_a_crash_excuses_the_receipts_of_the_seconds_before_it_and_no_charge(world: World) -> None:
    answers, ledger, tried = world
    lose_receipt(answers, ledger["alice"], tried)
    assert broken(answers, ledger, tried, [(answers[1].at + 4.9, 10.0)]) is None
    assert "without its receipt" in str(broken(answers, ledger, tried, [(answers[1].at + 5.1, 10.0)]))
    forget_charge(answers, ledger["alice"], tried)
    assert "without its charge" in str(broken(answers, ledger, tried, [(0.0, 10.0)]))


def test_memory_that_is_flat_after_a_start_has_no_growth() -> None:
    assert growth([1, 50, *[100] * 48]) == 0
    assert growth([100 + i for i in range(50)]) == pytest.approx(30 / 115, abs=0.01)
