"""What must hold of a ledger and of the answers that clients got from it, whatever happened to whom."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from langchain_dpicl.budget.opening import LOST
from langchain_dpicl.budget.schema import charges, counters

Question = tuple[str, str]
"""A caller and its text."""
UNFLUSHED = 5.0
"""Seconds before PostgreSQL's crash from which receipts may be missing: they are notes (see `sql.database`), and
its writer takes them to the disk within three times ``wal_writer_delay``, .6 s, on a machine that is not busy."""


class Broken(Exception):
    """An invariant does not hold."""


class Answer(NamedTuple):
    """What a client got, and when."""

    question: Question
    number: int
    answer: Any
    at: float


class Row(NamedTuple):
    """A charge of the ledger."""

    units: int
    outcome: str | None
    receipt: str | None
    answer: str | None


@dataclass
class Account:
    """A caller's counter, with its charges by number."""

    spent: int
    allowed: int
    rows: dict[int, Row]

    @property
    def lost(self) -> int:
        """The units that count as spent without a charge."""
        return sum(row.units for row in self.rows.values() if row.outcome == LOST)


class Book:
    """What clients asked and got, kept by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._tries: Counter[str] = Counter()

    def tries(self, caller: str) -> None:
        """Called before a request that may charge."""
        with self._lock:
            self._tries[caller] += 1

    def got(self, answer: Answer) -> None:
        """Keep an answer."""
        with self._lock:
            self._answers.append(answer)

    @property
    def answers(self) -> list[Answer]:
        """All of them until now."""
        with self._lock:
            return list(self._answers)

    @property
    def tried(self) -> Counter[str]:
        """The requests of each caller that may have charged."""
        with self._lock:
            return Counter(self._tries)


def accounts(url: str) -> dict[str, Account]:
    """A ledger's counters, by caller."""
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            found = connection.execute(sa.select(counters).where(counters.c.principal != "")).all()
            rows = connection.execute(sa.select(charges)).all()  # later: whatever a counter counted is there
    finally:
        engine.dispose()
    by_counter: dict[int, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        by_counter[row.counter_id][row.number] = Row(row.units, row.outcome, row.receipt, row.answer)
    return {each.principal: Account(each.spent, each.allowed, by_counter[each.id]) for each in found}


def broken(
    answers: Sequence[Answer],
    ledger: dict[str, Account],
    tried: Counter[str],
    crashes: Sequence[tuple[float, float]] = (),
    *,
    still: bool = True,
) -> str | None:
    """The first invariant that does not hold, in words; None if all hold.

    Take ``answers`` before the ledger is read, and ``tried`` after it. ``crashes``: when PostgreSQL crashed and was
    back. ``still``: nobody charges while the ledger is read, so that the counters and the charges must agree.
    """
    for caller, account in ledger.items():
        numbers = sorted(n for last, row in account.rows.items() for n in range(last - row.units + 1, last + 1))
        if numbers[: account.spent] != list(range(1, account.spent + 1)) or (still and len(numbers) != account.spent):
            return f"{caller}: {account.spent} spent, but the charges are {numbers}"
        if account.spent > account.allowed:
            return f"{caller}: {account.spent} spent of {account.allowed}"
        charged = sum(row.outcome != LOST for row in account.rows.values())
        if charged > tried[caller]:
            return f"{caller}: {charged} charges for {tried[caller]} requests"
    numbers_of: dict[Question, set[int]] = defaultdict(set)
    question_of: dict[tuple[str, int], Question] = {}
    unflushed = {each.question for each in answers if _unflushed(each, crashes)}
    for each in answers:
        caller, text = each.question
        known = ledger.get(caller)
        row = known.rows.get(each.number) if known else None
        about = f"{caller}, {text!r}, number {each.number}"
        if row is None or row.outcome == LOST:
            return f"{about}: an answer without its charge"
        if question_of.setdefault((caller, each.number), each.question) != each.question:
            return f"{about}: a charge that answers {question_of[caller, each.number][1]!r}, too"
        numbers_of[each.question].add(each.number)
        if each.question in unflushed:
            continue
        if row.receipt is None or row.outcome != "released":
            return f"{about}: an answer without its receipt ({row.outcome})"
        if json.loads(row.receipt)["number"] != each.number or json.loads(str(row.answer)) != each.answer:
            return f"{about}: {each.answer!r} was answered, and the ledger has {row.answer} with {row.receipt}"
        if len(numbers_of[each.question]) > 1:
            return f"{about}: the question was charged as {sorted(numbers_of[each.question])}"
    return None


def without_receipt(answers: Sequence[Answer], ledger: dict[str, Account]) -> int:
    """How many answers lost their receipts in crashes of PostgreSQL."""
    numbers = {(each.question[0], each.number) for each in answers}
    return sum(ledger[caller].rows[number].receipt is None for caller, number in numbers)


def _unflushed(answer: Answer, crashes: Sequence[tuple[float, float]]) -> bool:
    return any(crash - UNFLUSHED <= answer.at <= back + UNFLUSHED for crash, back in crashes)


def growth(samples: Sequence[int]) -> float:
    """The median of the last fifth over that of the second, less 1."""
    fifth = len(samples) // 5
    early, late = sorted(samples[fifth : 2 * fifth]), sorted(samples[-fifth:])
    return late[fifth // 2] / early[fifth // 2] - 1
