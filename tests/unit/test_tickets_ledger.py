"""Tickets on disk: what fails uses none, and whatever owners and processes do, a dictionary of counts says the same."""

from __future__ import annotations

from typing import Any

import by_hand  # noqa: F401
import numpy as np
import pytest
import tickets_on_disk as disk
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from langchain_core.embeddings import DeterministicFakeEmbedding
from moments import numbers_of

from langchain_dpicl import ExemplarStore, LedgerError, PrivacyBudget
from langchain_dpicl.budget.witness import Witness

TICKETS = 3
NAMES = [f"owner-{i}" for i in range(6)]


def store_with(names: list[str]) -> ExemplarStore:
    rows = [{"input": f"text of {name}", "output": "x", "owner": name} for name in names]
    return ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=8), owner_key="owner", progress=False)


def opened(url: str) -> PrivacyBudget:
    return PrivacyBudget(1000, 1e-5, TICKETS, url, tickets=True, replay=False)


def charge(budget: PrivacyBudget, store: ExemplarStore, *owners: str) -> list[str]:
    """Charge a query that finds these owners; who pays."""
    line = budget.line("vote", 0.5)
    budget.watch(store)
    names = list(store.owners)
    numbers = numbers_of(store)
    asked = line.ask(store, np.array([n for n, name in zip(numbers, names, strict=True) if name in owners], np.int64))
    (entry,) = line.charge(owners=[asked])
    paid = entry.participants.take().tolist()  # type: ignore[union-attr]
    return [name for name, number in zip(names, numbers.tolist(), strict=True) if number in paid]


def test_a_charge_that_fails_after_its_tickets_were_used_uses_none(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction rolls back as a whole, new owners' rows too."""
    store = store_with(NAMES)
    budget = opened(ledger_url)
    charge(budget, store, "owner-0")
    with monkeypatch.context() as patch:
        patch.setattr(Witness, "follow", lambda *_: (_ for _ in ()).throw(LedgerError("the disk is full")))
        with pytest.raises(LedgerError, match="full"):
            charge(budget, store, *NAMES)
    assert budget.spent() == 1
    assert disk.run(ledger_url, "SELECT used FROM dpicl_tickets") == [(1,)]
    assert disk.burnt(ledger_url, store) == {name: int(name == "owner-0") for name in NAMES}
    for expected in (NAMES, NAMES, NAMES[1:], []):
        assert charge(budget, store, *NAMES) == expected


# -- against a model --------------------------------------------------------------------------------------------------


class TicketMachine(RuleBasedStateMachine):
    """The model: a dictionary of what every owner has burnt. Charges by two processes that take turns, new owners,
    owners who are forgotten and come again, processes that start anew, stores that are built again."""

    @initialize()
    def make(self) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.url = f"sqlite:///{self.folder.name}/ledger.db"
        self.used = dict.fromkeys(NAMES[:3], 0)
        self.store = store_with(NAMES[:3])
        self.budgets = [opened(self.url), opened(self.url)]
        self.next = 3

    @rule(which=st.integers(0, 1), data=st.data())
    def charge(self, which: int, data: Any) -> None:
        owners = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True)) if self.used else []
        expected = {name for name in owners if self.used[name] < TICKETS}
        assert set(charge(self.budgets[which], self.store, *owners)) == expected
        for name in expected:
            self.used[name] += 1

    @rule()
    def enrol(self) -> None:
        name, self.next = f"owner-{self.next}", self.next + 1
        self.store.add([{"input": name, "output": "x", "owner": name}])
        self.used[name] = 0

    @rule(data=st.data(), again=st.booleans())
    def forget(self, data: Any, again: bool) -> None:
        if len(self.used) < 2:
            return
        for budget in self.budgets:  # whoever forgets has met the store
            budget.watch(self.store)
        name = data.draw(st.sampled_from(sorted(self.used)))
        self.store.forget(name)
        del self.used[name]
        if again:
            self.store.add([{"input": name, "output": "x", "owner": name}])
            self.used[name] = 0

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.budgets[which]._ledger._engine.dispose(close=False)
        self.budgets[which] = opened(self.url)

    @rule()
    def rebuild(self) -> None:
        self.store = store_with(sorted(self.used, reverse=True))

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "store"):
            assert disk.burnt(self.url, self.store) == self.used
            assert max(self.used.values()) <= TICKETS

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for budget in self.budgets:
                budget.close()
            self.folder.cleanup()


TestTicketMachine = pytest.mark.slow(TicketMachine.TestCase)
TestTicketMachine.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
