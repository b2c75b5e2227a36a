"""A state machine over charge, answer, crash, reopen and replay, against a model in memory."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from langchain_dpicl import PrivacyBudget, PrivacyBudgetExceeded
from langchain_dpicl.budget import Charge, Replayed

QUERIES = st.lists(st.sampled_from(["x", "y", "z", None]), min_size=1, max_size=4)
LIMIT = 10


class LedgerMachine(RuleBasedStateMachine):
    """The model: how many were charged, which charges are open, and the answer that each query has."""

    @initialize()
    def make(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.url = f"sqlite:///{self.folder}/ledger.db"
        self.spent = 0
        self.answers: dict[str, str] = {}
        self.open: list[Charge] = []
        self.recorded: dict[str, dict[str, Any]] = {}
        self.start()

    def start(self) -> None:
        self.budget = PrivacyBudget(3.0, 1e-5, LIMIT, self.url, "reviews:2025", replay_patience=0.0)
        self.line = self.budget.line("vote", 0.2)

    @rule(queries=QUERIES)
    def charge(self, queries: list[str | None]) -> None:
        names = list(dict.fromkeys(q for q in queries if q is not None))
        needed = sum(q not in self.answers for q in names) + queries.count(None)
        hashes = [None if q is None else self.line.query_id({"input": q}) for q in queries]
        try:
            entries = self.line.charge(queries=hashes)
        except PrivacyBudgetExceeded:
            assert self.spent + needed > LIMIT
            return
        assert self.spent + needed <= LIMIT
        for query, entry in zip(queries, entries, strict=True):
            if isinstance(entry, Replayed):
                assert entry.answer == self.answers[query or ""]
                assert entry.receipt["replayed"]
            else:
                assert query is None or query not in self.answers
        new = {entry.number: entry for entry in entries if isinstance(entry, Charge)}
        assert sorted(new) == list(range(self.spent + 1, self.spent + needed + 1))
        self.spent += needed
        for query, entry in zip(queries, entries, strict=True):
            if isinstance(entry, Charge) and new.pop(entry.number, None) is not None:
                self.open.append(entry)
                if query is not None:
                    self.latest = getattr(self, "latest", {}) | {query: entry.number}

    @precondition(lambda self: self.open)
    @rule(data=st.data(), answer=st.text(max_size=5))
    def record(self, data: Any, answer: str) -> None:
        charge = data.draw(st.sampled_from(self.open))
        self.open.remove(charge)
        receipt = self.line.record(charge, answer=answer)
        self.recorded[receipt["id"]] = dict(receipt)
        for query, number in getattr(self, "latest", {}).items():
            if number == charge.number:
                self.answers[query] = answer

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        charge = data.draw(st.sampled_from(self.open))
        self.open.remove(charge)
        self.line.give_up(charge)

    @rule()
    def crash(self) -> None:
        """The process dies: its connections are dropped, and what it had charged is never answered."""
        self.budget._ledger._engine.dispose(close=False)
        self.open = []
        self.start()

    @rule()
    def reopen(self) -> None:
        self.budget.close()
        self.budget = PrivacyBudget.open("reviews:2025", self.url, replay_patience=0.0)
        self.line = self.budget.line("vote", 0.2)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "budget"):
            return
        assert self.budget.spent() == self.spent <= LIMIT
        assert self.budget.remaining() == LIMIT - self.spent
        for name, receipt in self.recorded.items():
            assert self.budget.receipt(name) == receipt
        with contextlib.closing(sqlite3.connect(f"{self.folder}/ledger.db")) as connection:
            numbers = connection.execute(
                "SELECT number FROM dpicl_charges JOIN dpicl_counters c ON c.id = counter_id "
                "JOIN dpicl_plans p ON p.id = c.plan_id WHERE p.name = 'reviews:2025' ORDER BY number"
            ).fetchall()
        assert [number for (number,) in numbers] == list(range(1, self.spent + 1))

    def teardown(self) -> None:
        if hasattr(self, "budget"):
            self.budget.close()
            shutil.rmtree(self.folder)


TestLedger = pytest.mark.slow(LedgerMachine.TestCase)
TestLedger.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
