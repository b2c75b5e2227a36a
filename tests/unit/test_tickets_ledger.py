"""Tickets on disk: rows that are lost are missed, and nobody's tickets are ever filled up again; burns are folded."""

from __future__ import annotations

import multiprocessing
from typing import Any

import by_hand  # noqa: F401
import numpy as np
import pytest
import tickets_on_disk as disk
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from langchain_core.embeddings import DeterministicFakeEmbedding
from ledger_files import copy_ledger

from langchain_dpicl import ExemplarStore, LedgerError, PrivacyBudget
from langchain_dpicl.budget import tickets

TICKETS = 3
NAMES = [f"owner-{i}" for i in range(6)]


def store_with(names: list[str]) -> ExemplarStore:
    rows = [{"input": f"text of {name}", "output": "x", "owner": name} for name in names]
    return ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=8), owner_key="owner", progress=False)


def opened(url: str, count: int = TICKETS) -> PrivacyBudget:
    return PrivacyBudget(1000, 1e-5, count, url, tickets=True, replay=False)


def charge(budget: PrivacyBudget, store: ExemplarStore, *owners: str) -> list[str]:
    """Charge a query that finds these owners; who pays."""
    line = budget.line("vote", 0.5)
    budget.watch(store)
    names = list(store.owners)
    numbers = store.numbers
    asked = line.ask(store, np.array([n for n, name in zip(numbers, names, strict=True) if name in owners], np.int64))
    (entry,) = line.charge(owners=[asked])
    paid = entry.participants.take().tolist()  # type: ignore[union-attr]
    return [name for name, number in zip(names, numbers.tolist(), strict=True) if number in paid]


USED = {"owner-0": 3, "owner-1": 2, "owner-2": 2, "owner-3": 2, "owner-4": 1, "owner-5": 3}
"""What `history` leaves."""


def history(budget: PrivacyBudget, store: ExemplarStore) -> None:
    """Five burns that are folded, and two that are not."""
    for owners in ([0, 1], [0, 2, 5], [3, 5], [2, 4]):
        charge(budget, store, *(f"owner-{i}" for i in owners))
    for owners in ([0, 3], [1], [5]):
        charge(budget, store, *(f"owner-{i}" for i in owners))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ledger with the plan and nothing else, which every test gets a copy of: solving it takes longest."""
    path = tmp_path_factory.mktemp("frozen") / "ledger.db"
    for count in (TICKETS, 20):
        budget = opened(f"sqlite:///{path}-{count}", count)
        budget.line("vote", 0.5)
        budget.close()
    return str(path)


@pytest.fixture(autouse=True)
def copied(frozen: str, ledger_url: str, request: pytest.FixtureRequest) -> None:
    count = 20 if request.node.name.startswith("test_folding_changes") else TICKETS
    copy_ledger(f"{frozen}-{count}", disk.path_of(ledger_url))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "SUM_AFTER", 5)


# -- lost rows --------------------------------------------------------------------------------------------------------

LOSSES = {
    "the index": "DELETE FROM dpicl_owner_index",
    "an index that counts fewer owners": "UPDATE dpicl_owner_index SET size = size - 1",
    "an index that counts no owners": "UPDATE dpicl_owner_index SET size = 0",
    "an index that counts more owners": "UPDATE dpicl_owner_index SET size = size + 1",
    "all marks": "DELETE FROM dpicl_owner_marks",
    "the first marks": "DELETE FROM dpicl_owner_marks WHERE start = 0",
    "the last marks": "DELETE FROM dpicl_owner_marks WHERE start = (SELECT max(start) FROM dpicl_owner_marks)",
    "marks that start elsewhere": "UPDATE dpicl_owner_marks SET start = start + 100 WHERE start > 1",
    "marks cut short": "UPDATE dpicl_owner_marks SET marks = substr(marks, 1, 16) WHERE length(marks) > 16",
    "no marks in a row": "UPDATE dpicl_owner_marks SET marks = x'' WHERE start = 1",
    "marks cut within a mark": "UPDATE dpicl_owner_marks SET marks = substr(marks, 1, 30) WHERE length(marks) > 16",
    "all summaries": "DELETE FROM dpicl_usage",
    "a summary that counts fewer rows": "UPDATE dpicl_usage SET row_count = row_count - 1",
    "a summary that counts more rows": "UPDATE dpicl_usage SET row_count = row_count + 1",
    "a summary that counts fewer tickets": "UPDATE dpicl_usage SET tickets = tickets - 1",
    "a summary that forgets the sums": "UPDATE dpicl_usage SET summed = 0",
    "all rows": "DELETE FROM dpicl_usage_rows",
    "the first row": "DELETE FROM dpicl_usage_rows WHERE number = (SELECT min(number) FROM dpicl_usage_rows)",
    "a row in the middle": "DELETE FROM dpicl_usage_rows WHERE number = (SELECT min(number) + 1 FROM dpicl_usage_rows)",
    "the last row": "DELETE FROM dpicl_usage_rows WHERE number = (SELECT max(number) FROM dpicl_usage_rows)",
    "a row of fewer owners": "UPDATE dpicl_usage_rows SET positions = substr(positions, 1, 4) WHERE number = 6",
    "a row of no owners": "UPDATE dpicl_usage_rows SET positions = x'' WHERE number = 7",
    "a row of half an owner": "UPDATE dpicl_usage_rows SET positions = substr(positions, 1, 2) WHERE number = 7",
    "a row of no units": "UPDATE dpicl_usage_rows SET units = 0 WHERE number = 8",
    "the sums": "DELETE FROM dpicl_usage_counts",
    "sums cut short": "UPDATE dpicl_usage_counts SET counts = substr(counts, 1, 8)",
    "sums cut within a number": "UPDATE dpicl_usage_counts SET counts = substr(counts, 1, 10)",
    "smaller sums": "UPDATE dpicl_usage_counts SET counts = CAST(x'01000000' || substr(counts, 5) AS BLOB)",
    "sums of zero": "UPDATE dpicl_usage_counts SET counts = zeroblob(length(counts))",
    "rows and sums": "DELETE FROM dpicl_usage_rows; DELETE FROM dpicl_usage_counts",
    "summaries, rows and sums": "DELETE FROM dpicl_usage_rows; DELETE FROM dpicl_usage_counts; DELETE FROM dpicl_usage",
    "everything about tickets": "DELETE FROM dpicl_usage_rows; DELETE FROM dpicl_usage_counts; "
    "DELETE FROM dpicl_usage; DELETE FROM dpicl_owner_marks; DELETE FROM dpicl_owner_index",
}


@pytest.fixture(scope="module")
def written(frozen: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two files of one ledger: after its first charge, and after all eight, of which five are folded."""
    folder = tmp_path_factory.mktemp("written")
    copy_ledger(f"{frozen}-{TICKETS}", folder / "ledger.db")
    store, url = store_with(NAMES), f"sqlite:///{folder}/ledger.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tickets, "SUM_AFTER", 5)
        for i, owners in enumerate(([0], [1], [0, 2, 5], [3, 5], [2, 4], [0, 3], [1], [5])):
            budget = opened(url)
            charge(budget, store, *(f"owner-{i}" for i in owners))
            budget.close()
            if i == 0:
                copy_ledger(folder / "ledger.db", folder / "first.db")
    return str(folder / "first.db"), str(folder / "ledger.db")


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("process", ["a new one", "one that has seen the rows", "one that is behind"])
@pytest.mark.parametrize("loss", LOSSES)
def test_lost_rows_never_fill_up_tickets(loss: str, process: str, ledger_url: str, written: tuple[str, str]) -> None:
    """A process that comes later refuses, with nothing charged; one that runs may go on if it counts right."""
    store = store_with(NAMES)
    before, whole = written
    copy_ledger(before if "behind" in process else whole, disk.path_of(ledger_url))
    budget = opened(ledger_url)
    if process != "a new one":
        assert sum(int(n) * many for n, many in budget.private_ticket_report()["vote"][""]["burnt"].items()) in (1, 13)
        budget.close()
        copy_ledger(whole, disk.path_of(ledger_url))
    assert disk.burnt(ledger_url, store) == USED
    assert disk.run(ledger_url, "SELECT count(*) FROM dpicl_usage_rows") == [(3,)]
    for statement in LOSSES[loss].split(";"):
        disk.run(ledger_url, statement)
    spent, damaged = budget.spent(), disk.run(ledger_url, "SELECT * FROM dpicl_usage")
    try:
        paid = charge(budget, store, *NAMES)
    except LedgerError:
        assert budget.spent() == spent
        assert disk.run(ledger_url, "SELECT * FROM dpicl_usage") == damaged
    else:
        assert process != "a new one"
        assert paid == [name for name in NAMES if USED[name] < TICKETS]


@pytest.mark.usefixtures("small")
def test_new_owners_are_refused_too_where_rows_are_lost(ledger_url: str, frozen: str) -> None:
    """By the process that knows the seats of all others, and would give the next one."""
    for loss in (
        "DELETE FROM dpicl_owner_index",
        "DELETE FROM dpicl_owner_marks WHERE start = 0",
        "UPDATE dpicl_owner_index SET size=5",
    ):
        url = ledger_url.replace(".db", f"-{len(loss)}.db")
        copy_ledger(f"{frozen}-{TICKETS}", disk.path_of(url))
        store = store_with([*NAMES, "new"])
        budget = opened(url)
        charge(budget, store, *NAMES)
        disk.run(url, loss)
        with pytest.raises(LedgerError):
            charge(budget, store, "new")
        assert budget.spent() == 1


# -- folding ----------------------------------------------------------------------------------------------------------


def elsewhere(url: str, owners: list[str], answers: Any) -> None:
    tickets.SUM_AFTER = 5  # as in the program that wrote the ledger
    budget = opened(url)
    answers.put((charge(budget, store_with(NAMES), *owners), budget.private_ticket_report()))


@pytest.mark.usefixtures("small")
def test_folding_changes_no_count(ledger_url: str) -> None:
    """After every one of 14 charges, by three processes in turn, one of them another program's: the same counts."""
    store = store_with(NAMES)
    one, other = opened(ledger_url, 20), opened(ledger_url, 20)
    used = dict.fromkeys(NAMES, 0)
    generator = np.random.default_rng(4)
    folds = set()
    for i in range(14):
        owners = [name for name in NAMES if generator.random() < 0.5]
        assert charge((one, other, opened(ledger_url, 20))[i % 3], store, *owners) == owners
        used |= {name: used[name] + 1 for name in owners}
        assert disk.burnt(ledger_url, store) == used
        ((folded, rows),) = disk.run(
            ledger_url, "SELECT summed, (SELECT count(*) FROM dpicl_usage_rows) FROM dpicl_usage"
        )
        assert int(str(folded)) + int(str(rows)) == i + 1
        folds.add(folded)
        counts = one.private_ticket_report()["vote"][""]["burnt"]
        seen = {name: n for name, n in used.items() if name in owners or n}
        assert {int(k): v for k, v in counts.items() if k != "0"} == {
            n: list(seen.values()).count(n) for n in seen.values()
        }
    assert folds == {0, 5, 10}


def test_another_program_counts_on_after_a_folding(ledger_url: str, small: None) -> None:
    store = store_with(NAMES)
    history(opened(ledger_url), store)
    assert disk.run(ledger_url, "SELECT summed FROM dpicl_usage") == [(5,)]
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    process = spawn.Process(target=elsewhere, args=(ledger_url, NAMES, answers))
    process.start()
    paid, report = answers.get(timeout=60)
    process.join(30)
    assert paid == [name for name in NAMES if USED[name] < TICKETS]
    assert report["vote"][""]["burnt"] == {"2": 1, "3": 5}


def test_a_folding_that_fails_loses_nothing(ledger_url: str, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of writing the sums: its charge takes no ticket, and the next one succeeds."""
    store = store_with(NAMES)
    budget = opened(ledger_url)
    history(budget, store)
    monkeypatch.setattr(tickets, "SUM_AFTER", 2)
    real = tickets.Usage._sum

    def broken(self: Any, connection: Any) -> None:
        real(self, connection)
        raise LedgerError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(tickets.Usage, "_sum", broken)
        with pytest.raises(LedgerError, match="full"):
            charge(budget, store, *NAMES)
    assert disk.run(ledger_url, "SELECT summed FROM dpicl_usage") == [(5,)]
    assert disk.burnt(ledger_url, store) == USED
    assert charge(budget, store, *NAMES) == [name for name in NAMES if USED[name] < TICKETS]
    assert disk.run(ledger_url, "SELECT summed FROM dpicl_usage") == [(7,)]


def test_a_charge_that_fails_after_its_tickets_were_burnt_burns_none(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction rolls back as a whole, and what this process knows with it: new owners' seats too."""
    store = store_with(NAMES)
    budget = opened(ledger_url)
    charge(budget, store, "owner-0")
    real = tickets.write_summary

    def broken(*given: Any, **values: Any) -> None:
        real(*given, **values)
        raise LedgerError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(tickets, "write_summary", broken)
        with pytest.raises(LedgerError):
            charge(budget, store, *NAMES)
    assert budget.spent() == 1
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
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(tickets, "SUM_AFTER", 5)
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
            self.patch.undo()
            self.folder.cleanup()


TestTicketMachine = pytest.mark.slow(TicketMachine.TestCase)
TestTicketMachine.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
