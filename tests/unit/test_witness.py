"""`budget/witness.py`: whatever happens to the ledger's files and processes, all copies together give away one plan."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_hand import charged
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import ExemplarStore, InvalidParameter, LedgerError, PrivacyBudget, PrivacyBudgetExceeded
from langchain_dpicl.budget.ledger import UNWATCHED, Ledger
from langchain_dpicl.budget.opening import Left
from langchain_dpicl.budget.owner_index import OwnerIndex
from langchain_dpicl.budget.schema import UNLIMITED, Charge
from langchain_dpicl.budget.stored import Counter
from langchain_dpicl.budget.tickets import TicketRule, TicketUsage
from langchain_dpicl.budget.upkeep import recover
from langchain_dpicl.budget.witness import CounterKey, Witness
from langchain_dpicl.errors import PrivacyWarning
from langchain_dpicl.sql import shown

ENDS = ("", "-wal", "-shm")
KEY = CounterKey("n", "vote", "", "0" * 64)
TABLES = [
    f"dpicl_{name}"
    for name in ("owner_index", "owner_marks", "usage", "usage_rows", "usage_counts", "counters", "charges")
]


def killed(ledger: Ledger) -> None:
    """What `kill -9` leaves: nothing is given back, and the lock is free."""
    permits = ledger._permits
    assert permits is not None
    ledger._charged.clear()
    permits.joined = False
    permits.witness.close()
    ledger._engine.dispose()


# -- everything at once, against the claim -----------------------------------------------------------------------------


class Thief(RuleBasedStateMachine):
    """Two processes at a time; anybody copies and puts back the ledger's files, and kills. Only the witness is left
    alone. ``begun`` counts what was ever granted, and never less."""

    releases = 30

    @initialize()
    def make(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.url = f"sqlite:///{self.folder}/b.db"
        self.open: list[Any] = []
        self.copies: list[Path] = []
        self.recorded: list[tuple[Ledger, Charge]] = []
        self.begun = 0.0
        self.warned = warnings.catch_warnings()
        self.warned.__enter__()
        warnings.simplefilter("ignore", PrivacyWarning)
        self.start()
        self.snapshot()

    def process(self) -> Any:
        ledger = Ledger(self.url)
        try:
            return ledger, ledger.store_plan("n", "{}", "0" * 64, {"vote": self.releases}).id
        except LedgerError:
            ledger.close()
            raise

    def ask(self, process: Any, units: int) -> None:
        ledger, plan = process
        for charge in charged(ledger, plan, units=units):
            self.begun += units
            self.recorded.append((ledger, charge))

    @precondition(lambda self: len(self.open) < 2)
    @rule()
    def start(self) -> None:
        with contextlib.suppress(LedgerError):
            self.open.append(self.process())

    @precondition(lambda self: self.open)
    @rule(data=st.data(), share=st.sampled_from([0.01, 0.02, 0.1, 0.4]), times=st.integers(1, 3))
    def charge(self, data: Any, share: float, times: int) -> None:
        process = data.draw(st.sampled_from(self.open))
        with contextlib.suppress(LedgerError):
            for _ in range(times):
                self.ask(process, max(1, int(share * self.releases)))

    @precondition(lambda self: self.recorded)
    @rule(data=st.data(), twice=st.booleans())
    def record(self, data: Any, twice: bool) -> None:
        """An answer that ended early gives back its last tokens, once."""
        ledger, charge = self.recorded.pop(data.draw(st.integers(0, len(self.recorded) - 1)))
        unused = data.draw(st.integers(0, charge.units - 1))
        self.begun -= unused  # these tokens are never sampled, whatever the ledger says
        for _ in range(1 + twice):
            with contextlib.suppress(LedgerError):
                ledger.record(charge, "{}", unused=unused)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from([killed, Ledger.close]))
    def end(self, data: Any, how: Any) -> None:
        process = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.recorded = [(ledger, charge) for ledger, charge in self.recorded if ledger is not process[0]]
        how(process[0])

    @rule()
    def snapshot(self) -> None:
        copy = Path(tempfile.mkdtemp(dir=self.folder))
        for end in ENDS:
            if Path(f"{self.folder}/b.db{end}").exists():
                shutil.copy(f"{self.folder}/b.db{end}", copy / f"b.db{end}")
        self.copies.append(copy)

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), ends=st.sampled_from([ENDS, ("",)]))
    def put_back(self, data: Any, ends: tuple[str, ...]) -> None:
        copy = data.draw(st.sampled_from(self.copies))
        for end in ENDS:
            Path(f"{self.folder}/b.db{end}").unlink(missing_ok=True)
        for end in ends:
            if (copy / f"b.db{end}").exists():
                shutil.copy(copy / f"b.db{end}", f"{self.folder}/b.db{end}")

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def overwrite(self, data: Any) -> None:
        """In place: no file is another one."""
        copy = data.draw(st.sampled_from(self.copies))
        for end in ("", "-wal"):
            target, source = Path(f"{self.folder}/b.db{end}"), copy / f"b.db{end}"
            if target.exists() and source.exists():
                with target.open("r+b") as file:
                    file.truncate(0)
                    file.write(source.read_bytes())

    @rule(end=st.sampled_from(ENDS))
    def delete(self, end: str) -> None:
        Path(f"{self.folder}/b.db{end}").unlink(missing_ok=True)

    @rule()
    def recover(self) -> None:
        with contextlib.suppress(LedgerError):
            recover(self.url)

    @invariant()
    def no_more_than_the_plan(self) -> None:
        assert getattr(self, "begun", 0) <= self.releases

    def teardown(self) -> None:
        if hasattr(self, "open"):
            for ledger, *_ in self.open:
                killed(ledger)
            self.warned.__exit__(None, None, None)
            shutil.rmtree(self.folder)


class BlockThief(Thief):
    """With permits granted ahead."""

    releases = 700


class TicketThief(Thief):
    """Owners pay. ``used`` is in how many answers each took part."""

    releases = 3
    store = ExemplarStore.from_records(
        [{"input": f"text {i}", "output": "x", "owner": f"o{i}"} for i in range(3)],
        DeterministicFakeEmbedding(size=4),
        owner_key="owner",
        progress=False,
    )

    def process(self) -> Any:
        ledger = Ledger(self.url)
        try:
            content = f'{{"lines": {{"vote": {{"count": {self.releases}}}}}}}'
            plan = ledger.store_plan("n", content, "0" * 64, {"vote": UNLIMITED}, tickets=True).id
        except LedgerError:
            ledger.close()
            raise
        return ledger, plan, TicketUsage(OwnerIndex(ledger, plan), self.releases)

    def ask(self, process: Any, units: int) -> None:
        ledger, plan, tickets = process
        self.used = getattr(self, "used", np.zeros(3, int))
        self.turn = getattr(self, "turn", 0) + 1
        eligible = tickets.index.find(self.store, np.flatnonzero(np.arange(3) != self.turn % 4))
        for charge in charged(ledger, plan, rule=TicketRule(tickets, [eligible])):
            self.used[charge.participants.take()] += 1
            self.begun = int(self.used.max())

    record = None  # type: ignore[assignment]

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), tables=st.sets(st.sampled_from(TABLES), min_size=1))
    def put_tables_back(self, data: Any, tables: set[str]) -> None:
        """Some tables of a copy, the others as they are."""
        copy = data.draw(st.sampled_from(self.copies))
        old = Path(tempfile.mkdtemp(dir=self.folder)) / "b.db"
        shutil.copytree(copy, old.parent, dirs_exist_ok=True)
        if not (self.folder / "b.db").exists():
            return
        connection = sqlite3.connect(self.folder / "b.db", timeout=1)
        with contextlib.closing(connection), contextlib.suppress(sqlite3.Error):
            connection.execute("ATTACH ? AS old", (str(old),))
            with connection:
                for table in tables:
                    connection.execute(f"DELETE FROM {table}")
                    connection.execute(f"INSERT INTO {table} SELECT * FROM old.{table}")

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), kept=st.sets(st.integers(0, 60)))
    def put_pages_back(self, data: Any, kept: set[int]) -> None:
        """The pages of a copy's file, but some; and the log as it is."""
        copy, target = data.draw(st.sampled_from(self.copies)) / "b.db", self.folder / "b.db"
        if target.exists() and copy.exists():
            old, now = copy.read_bytes(), target.read_bytes()
            pages = [now if n in kept and n * 4096 < len(now) else old for n in range(len(old) // 4096)]
            target.write_bytes(b"".join(page[n * 4096 : (n + 1) * 4096] for n, page in enumerate(pages)))


for machine in (Thief, BlockThief, TicketThief):
    case = machine.TestCase
    case.settings = settings(
        max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    globals()[f"Test{machine.__name__}"] = case
del case, machine


# -- a ledger that is closed while it is used --------------------------------------------------------------------------


@pytest.mark.parametrize("releases", [10, 700])
def test_a_charge_that_was_under_way_when_its_ledger_was_closed_joins_again(releases: int, ledger_url: str) -> None:
    """Else a process that opens just now thinks that it is alone."""
    ledger = Ledger(ledger_url)
    plan = ledger.store_plan("n", "{}", "0" * 64, {"vote": releases}).id
    charged(ledger, plan, "vote", 1)
    permits = ledger._permits
    assert permits is not None
    real, joined = permits.take, []

    def take(*given: Any) -> bool:
        if not joined:
            permits.leave()
        joined.append(permits.joined)
        return real(*given)

    permits.take = take  # type: ignore[method-assign]
    assert len(charged(ledger, plan, "vote", 1)) == 1
    assert joined == [False, True]
    permits.leave()
    with pytest.raises(Left):
        permits.take(Counter(KEY, releases, False), 1, 2, 2)
    with pytest.raises(Left):
        permits.swap(KEY, "a", "b", (1, 2))
    ledger.close()


def test_marks_that_are_written_keep_what_was_granted_since_they_were_read(tmp_path: Path) -> None:
    witness = Witness(f"sqlite:///{tmp_path / 'w'}")
    witness.begin()
    witness.grant(KEY, 1, 0, 0, 0, 100, UNLIMITED)
    read = witness.marks()
    witness.grant(KEY, 5, 0, 1, 1, 100, UNLIMITED)
    witness.write(read)
    assert witness.marks()[0].reserved == 6


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_permits_are_granted_ahead_in_shares_of_one_per_cent(tmp_path: Path) -> None:
    witness = Witness(f"sqlite:///{tmp_path / 'w'}")
    witness.begin()
    blocks = [0] * 4
    for turn in range(12):
        i = turn % 4
        extra = witness.grant(KEY, 1, blocks[i], 0, 0, 10_000, UNLIMITED)
        assert extra is not None
        blocks[i] = extra
        assert sum(blocks) <= 100
    assert min(blocks) >= 15
    assert max(blocks) <= 25, "each comes to have about an equal share"
    (mark,) = witness.marks()
    assert mark.reserved <= 10_000


def test_towards_the_end_nothing_is_granted_ahead(tmp_path: Path) -> None:
    witness = Witness(f"sqlite:///{tmp_path / 'w'}")
    witness.begin()
    block, used = 0, 0
    while (extra := witness.grant(KEY, 1, block, used, used, 1000, UNLIMITED)) is not None:
        used += 1 + extra
        block = extra
        assert extra <= max(0, (1000 - used + extra) // 8)
    assert used == 1000
    assert witness.marks()[0].reserved == 1000


@pytest.mark.parametrize(("releases", "writes"), [(100, 100), (10_000, 8)])
def test_few_charges_write_the_witness(releases: int, writes: int, ledger_url: str) -> None:
    ledger = Ledger(ledger_url)
    plan = ledger.store_plan("n", "{}", "0" * 64, {"vote": releases}).id
    witness = ledger._permits.witness  # type: ignore[union-attr]
    seen: list[int] = []
    real = witness.grant
    witness.grant = lambda *given: seen.append(1) or real(*given)  # type: ignore[method-assign,func-returns-value]
    for _ in range(100):
        charged(ledger, plan, "vote", 1)
    assert len(seen) <= writes
    mark = witness.marks()[0]
    assert mark.reserved - ledger.spent(plan)["vote"] <= max(releases // 100, 0)
    ledger.close()
    assert Witness(f"{ledger_url}.witness").marks()[0].reserved == 100, "what was not used is given back"


def test_readers_write_nothing(ledger_url: str) -> None:
    budget = PrivacyBudget(1000.0, 1e-5, 10, ledger_url)
    budget.line("vote", 0.5).charge(2)
    budget.close()
    path = Path(ledger_url.removeprefix("sqlite:///"))
    before = [Path(f"{path}{end}").read_bytes() for end in ("", ".witness")]
    Path(f"{path}.witness").unlink()  # not even needed
    reader = PrivacyBudget.open("default", ledger_url, witness=UNWATCHED)
    assert (reader.spent(), reader.remaining()) == (2, 8)
    with pytest.raises(LedgerError, match="opened to be read"):
        reader.line("vote", 0.5).charge()
    reader.close()
    assert path.read_bytes() == before[0]
    assert not Path(f"{path}.witness").exists()


def test_a_ledger_in_memory_has_no_witness() -> None:
    with pytest.warns(PrivacyWarning, match="memory"), pytest.raises(InvalidParameter, match="witness"):
        PrivacyBudget(1.0, 1e-5, 10, "sqlite://", witness="w")
    with pytest.raises(InvalidParameter, match="witness"):
        PrivacyBudget(1.0, 1e-5, 10, "sqlite:///x.db", witness=3)  # type: ignore[arg-type]


# -- recover -----------------------------------------------------------------------------------------------------------


def test_without_a_witness_the_whole_plan_counts_for_every_principal(ledger_url: str) -> None:
    """Also for a principal whom the copy does not know: it may have spent all of it elsewhere."""
    callers = PrivacyBudget(1000.0, 1e-5, 4, ledger_url, "callers", scope="per_principal")
    callers.line("vote", 0.5).charge(principal="ann")
    callers.close()
    owners = PrivacyBudget(1000.0, 1e-5, 2, ledger_url, "owners", tickets=True)
    owners.line("vote", 0.5)
    owners.close()
    Path(f"{ledger_url.removeprefix('sqlite:///')}.witness").unlink()
    with pytest.raises(LedgerError, match="no witness"):
        PrivacyBudget.open("callers", ledger_url)
    found = recover(ledger_url)
    assert not found["had_witness"]
    line = PrivacyBudget.open("callers", ledger_url).line("vote", 0.5)
    assert [line.remaining(who) for who in ("ann", "bob")] == [0, 0]
    for who in ("ann", "bob"):
        with pytest.raises(PrivacyBudgetExceeded):
            line.charge(principal=who)
    paying = PrivacyBudget.open("owners", ledger_url).line("vote", 0.5)
    (entry,) = paying.charge(owners=[paying.ask(TicketThief.store, np.arange(3))])
    assert isinstance(entry, Charge)
    assert entry.participants.take().size == 0, "nobody has a ticket left"


def test_a_charge_whose_process_was_killed_costs_every_owner_a_ticket(ledger_url: str) -> None:
    """Between the witness's grant and the ledger's commit: nobody can tell whether it was answered."""
    machine = TicketThief()
    machine.url, machine.begun = ledger_url, 0
    first, second = machine.process(), machine.process()
    machine.ask(first, 1)
    witness = first[0]._permits.witness
    witness.swap(KEY, str(witness.marks()[0].state), "never committed", (1, 2))
    killed(first[0])
    for _ in range(4):
        machine.ask(second, 1)  # no restart is needed, and no error comes of it
    with contextlib.closing(sqlite3.connect(ledger_url.removeprefix("sqlite:///"))) as connection:
        assert connection.execute("SELECT spent, lost FROM dpicl_counters").fetchall() == [(6, 1)]
    assert int(machine.used.max()) == 2 == machine.releases - 1


def test_recover_keeps_the_count_of_an_older_release_if_it_is_told_to(ledger_url: str) -> None:
    budget = PrivacyBudget(1000.0, 1e-5, 10, ledger_url)
    budget.line("vote", 0.5).charge(2)
    budget.close()
    with pytest.raises(InvalidParameter, match="keep_count"):
        recover(ledger_url, keep_count=True)
    Path(f"{ledger_url.removeprefix('sqlite:///')}.witness").unlink()
    recover(ledger_url, keep_count=True)
    assert PrivacyBudget.open("default", ledger_url).remaining() == 8


# -- what is shown -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:hunter2@host/db",
        "postgresql://user@host/db?password=hunter2",
        "postgresql+psycopg://host/db?user=u&sslpassword=hunter2&sslmode=require",
        "postgresql://host/db?options=hunter2",
        "sqlite:///x.db?key=hunter2",
        "nosuch://h:hunter2",
    ],
)
def test_no_address_shows_a_password(url: str, tmp_path: Path) -> None:
    assert "hunter2" not in shown(url)
    if url.startswith("sqlite"):
        return
    address = url.replace("host", "127.0.0.1:9")
    for given, witness in ((address, None), (f"sqlite:///{tmp_path}/y.db", address)):
        with pytest.raises((LedgerError, InvalidParameter)) as caught:
            Ledger(given, witness=witness)
        assert "hunter2" not in f"{caught.value!r} {caught.value}"


def test_an_address_keeps_what_is_no_secret() -> None:
    assert shown("sqlite:///file:b.db?mode=ro&uri=true").endswith("?mode=ro&uri=true")
    assert shown("postgresql://user:x@host:5433/db?password=y") == "postgresql://user:***@host:5433/db"
