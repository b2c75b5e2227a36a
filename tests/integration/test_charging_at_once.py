"""Threads that charge, or record, at once, on SQLite and on PostgreSQL: each as if it had come alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import by_hand  # noqa: F401 - adds `charge` to `BudgetLine`
import pytest
import sqlalchemy as sa

from langchain_dpicl import LedgerError, PrivacyBudget
from langchain_dpicl.budget.schema import Charge, Claim


class Crowd:
    """A line, and threads that begin together."""

    def __init__(self, url: str, releases: int = 1000, mechanism: Any = "vote", **options: Any) -> None:
        self.budget = PrivacyBudget(1000.0, 1e-5, releases, url, **options)
        self.line: Any = self.budget.line(mechanism, 0.5)
        self.ledger = self.budget._ledger
        self.commits = 0
        sa.event.listen(self.ledger._engine, "commit", self._count)
        self._counting = threading.Lock()

    def _count(self, _: Any) -> None:
        with self._counting:
            self.commits += 1

    def at_once(self, actions: list[Callable[[], Any]]) -> list[Any]:
        """What they return or raise."""
        found: dict[int, Any] = {}
        barrier, before = threading.Barrier(len(actions)), self.commits

        def run(number: int) -> None:
            barrier.wait(20)
            try:
                found[number] = actions[number]()
            except Exception as error:
                found[number] = error

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(actions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        self.commits -= before
        return [found[number] for number in range(len(actions))]

    def charge_at_once(self, queries: list[list[str | None]]) -> list[Any]:
        return self.at_once([lambda names=names: self.line.charge(queries=names) for names in queries])

    def rows(self, statement: str) -> list[Any]:
        with self.ledger._engine.connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(statement)]


def test_each_of_eight_threads_charges_in_a_commit_of_its_own(any_url: str) -> None:
    crowd = Crowd(any_url)
    names = [crowd.line.query_id({"input": number}) for number in range(8)]
    found = crowd.charge_at_once([[name, None] for name in names])
    assert crowd.commits == 8
    assert sorted(entry.number for entries in found for entry in entries) == list(range(1, 17))
    assert [entries[0].query for entries in found] == names
    assert crowd.budget.spent() == 16
    assert crowd.rows("SELECT count(*) FROM dpicl_queries") == [(8,)]


def test_all_that_fits_is_charged_and_not_one_more(any_url: str) -> None:
    crowd = Crowd(any_url, releases=5)
    found = crowd.charge_at_once([[None] * 2, [None] * 2, [None] * 2, [None]])
    charged = [len(each) for each in found if isinstance(each, list)]
    assert {type(each).__name__ for each in found} == {"list", "PrivacyBudgetExceeded"}
    assert [len(each) for each in found[:3] if isinstance(each, list)] == [2, 2]
    assert sum(charged) == 5
    assert crowd.budget.spent() == 5
    assert crowd.rows("SELECT count(*) FROM dpicl_charges") == [(5,)]


def test_equal_queries_are_answered_by_one_charge(any_url: str) -> None:
    """The others wait for the first's answer, and have it as a replay."""
    crowd = Crowd(any_url)
    name = crowd.line.query_id({"input": "x"})

    def ask() -> Any:
        (entry,) = crowd.line.charge(queries=[name])
        if isinstance(entry, Charge):
            crowd.line.record(entry, answer='"yes"')
        return entry

    found = crowd.at_once([ask, ask, ask])
    assert sum(isinstance(each, Charge) for each in found) == 1
    assert [each.answer for each in found if not isinstance(each, Charge)] == ['"yes"'] * 2
    assert crowd.budget.spent() == 1


def test_a_commit_without_an_answer_is_the_error_of_its_caller_alone_and_counts_once(
    postgres_url: str, lose_a_commit: Callable[[], list[bool]], tmp_path: Any
) -> None:
    crowd = Crowd(postgres_url, witness=tmp_path / "witness")
    crowd.line.charge()
    lose_a_commit()
    found = crowd.charge_at_once([[None], [None], [None]])
    (lost,) = (each for each in found if not isinstance(each, list))
    assert isinstance(lost, LedgerError)
    assert "if so, it counts" in str(lost)
    assert crowd.budget.spent() == 4
    assert [entry.number for entry in crowd.line.charge()] == [5]


def test_a_wrong_receipt_is_its_callers(any_url: str) -> None:
    """Tokens come back with all but the one that was given up before."""
    crowd = Crowd(any_url, releases=100, mechanism="tokens")
    charges = [crowd.line.charge(units=20)[0] for _ in range(5)]
    crowd.line.give_up(charges[2])
    actions = [
        lambda charge=charge, unused=unused: crowd.line.record(charge, unused=unused)
        for unused, charge in zip((1, 5, 19, 7, 10), charges, strict=True)
    ]
    found = crowd.at_once(actions)
    assert crowd.commits == 4
    assert [isinstance(each, LedgerError) for each in found] == [False, False, True, False, False]
    assert "was answered or given up before" in str(found[2])
    assert [each["tokens"] for each in found if isinstance(each, dict)] == [19, 15, 13, 10]
    assert crowd.budget.spent() == 77
    assert len(crowd.line.charge(units=23)) == 1, "what came back may be charged"
    assert crowd.budget.spent() == 100


def test_a_claim_that_is_waited_for_no_longer_is_taken_over_beside_others(any_url: str) -> None:
    crowd = Crowd(any_url, replay_patience=0.2)
    name = crowd.line.query_id({"input": "x"})
    (gone,) = crowd.line.charge(queries=[name])  # its process was killed
    answered = crowd.line.query_id({"input": "y"})
    crowd.line.record(crowd.line.charge(queries=[answered])[0], answer="2")
    found = crowd.charge_at_once([[name], [None], [answered]])
    assert [entry.number for (entry,) in found[:2]] == [4, 3]
    assert found[2][0].answer == "2"
    assert gone.number == 1
    assert isinstance(crowd.ledger.claims(crowd.line._account(None), [name])[0][name], Claim)
    assert crowd.ledger.claims(crowd.line._account(None), [name])[0][name].number == 4


@pytest.mark.parametrize("refused", ["half a pair: \ud800", "a NUL: \x00"])
def test_an_answer_that_cannot_be_stored_is_its_own_callers_fault(postgres_url: str, refused: str) -> None:
    crowd = Crowd(postgres_url, mechanism="tokens")
    charges = [crowd.line.charge(units=2)[0] for _ in range(3)]
    answers = ['"a"', refused, '"c"']
    found = crowd.at_once(
        [
            lambda charge=charge, answer=answer: crowd.line.record(charge, answer=answer, unused=1)
            for charge, answer in zip(charges, answers, strict=True)
        ]
    )
    assert [isinstance(each, Exception) for each in found] == [False, True, False]
    assert crowd.rows("SELECT answer FROM dpicl_charges ORDER BY number") == [('"a"',), (None,), ('"c"',)]
