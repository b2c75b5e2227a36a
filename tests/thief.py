"""State machines over all copies of a ledger at once, against the claim of `langchain_dpicl.budget.witness`.

Two places hold copies of one ledger beside one witness. Processes charge both of them; anybody copies, puts back and
deletes them as a whole, and kills. Only the witness is left alone.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sqlite3
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from langchain_core.embeddings import DeterministicFakeEmbedding
from moments import numbers_of

from langchain_dpicl import ExemplarStore, LedgerError, PrivacyWarning
from langchain_dpicl.budget import schema
from langchain_dpicl.budget.ledger import ChargeRequest, Ledger
from langchain_dpicl.budget.schema import UNLIMITED, Account, Charge
from langchain_dpicl.budget.tickets import OwnerMarks, TicketLine, TicketPayment
from langchain_dpicl.budget.upkeep import recover
from langchain_dpicl.sql import database
from langchain_dpicl.store.base import owner_mark

SETTINGS = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
COUNTER = """SELECT spent, returned, lost FROM dpicl_counters JOIN dpicl_plans ON plan_id = dpicl_plans.id
    WHERE name = 'n' AND principal = '{}'"""
USED = """SELECT mark, used FROM dpicl_tickets JOIN dpicl_counters ON counter_id = dpicl_counters.id
    JOIN dpicl_plans ON plan_id = dpicl_plans.id WHERE name = 'n'"""
RESERVED = "SELECT reserved FROM dpicl_marks WHERE principal = '{}'"


def read(path: Path, query: str) -> list[Any]:
    """Rows of a database in a file."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def back_up(path: Path, to: Path) -> None:
    """Copy a database by SQLite's own means."""
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(to)) as target:
        source.backup(target)


class Files:
    """Two places for a ledger in a file."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.witness = f"sqlite:///{self.folder}/witness"
        self.key_file = f"{self.folder}/key"

    def url(self, place: int) -> str:
        return f"sqlite:///{self.folder}/{place}.db"

    def copied(self, place: int) -> Any:
        """A whole copy of what is there."""
        copy = self.folder / f"{next(self.numbers)}.copy"
        back_up(self.folder / f"{place}.db", copy)
        return copy

    def put(self, place: int, copy: Any, in_place: bool = False) -> None:
        """New files in place of the old ones; or other contents for them, under whoever uses them."""
        path = self.folder / f"{place}.db"
        for end in () if in_place else ("", "-wal", "-shm"):
            Path(f"{path}{end}").unlink(missing_ok=True)
        back_up(copy, path)

    def read(self, place: int, query: str) -> list[Any]:
        """Rows of the ledger that is there."""
        return read(self.folder / f"{place}.db", query)

    def remove(self) -> None:
        shutil.rmtree(self.folder)


class Databases(Files):
    """Two databases of a PostgreSQL server, whose rows are put back under whoever uses them."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__()
        self.engines = [sa.create_engine(url) for url in urls]
        for engine in self.engines:
            schema.metadata.drop_all(engine)

    def url(self, place: int) -> str:
        return self.engines[place].url.render_as_string(hide_password=False)

    def copied(self, place: int) -> Any:
        with self.engines[place].connect() as connection:
            return [(table, connection.execute(table.select()).all()) for table in schema.metadata.sorted_tables]

    def put(self, place: int, copy: Any, in_place: bool = True) -> None:
        with self.engines[place].begin() as connection:
            schema.metadata.create_all(connection)
            connection.exec_driver_sql(f"TRUNCATE {', '.join(schema.metadata.tables)}")
            for table, rows in copy:
                if rows:
                    connection.execute(table.insert(), [row._asdict() for row in rows])

    def read(self, place: int, query: str) -> list[Any]:
        with self.engines[place].connect() as connection:
            return [*connection.exec_driver_sql(query)]

    def remove(self) -> None:
        super().remove()
        for engine in self.engines:
            engine.dispose()


class Killed(BaseException):
    """The process ends here."""


class Process(NamedTuple):
    """A ledger that is open at a place, and its plan."""

    ledger: Ledger
    plan: int
    place: int
    tickets: TicketLine | None = None

    def drop(self) -> None:
        """What `kill -9` leaves."""
        self.ledger._engine.dispose()
        if self.ledger._witness is not None:
            self.ledger._witness._engine.dispose()


class Thief(RuleBasedStateMachine):
    """``begun`` counts the units of all answers ever begun, by principal, and ``low`` what was surely reached."""

    releases = 30
    principals: tuple[str, ...] = ("",)
    make_places: Callable[[], Files] = Files

    @initialize()
    def make(self) -> None:
        self.at = self.make_places()
        self.open: list[Process] = []
        self.charges: list[list[Any]] = []  # process, charge, its unused units once they are known
        self.begun: Counter[Any] = Counter()
        self.low: Counter[str] = Counter()
        self.exits = ExitStack()
        self.exits.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", PrivacyWarning)
        patch = self.exits.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(database, "_SYNCHRONOUS", {"charge": "OFF", "note": "OFF"})  # nobody cuts the power here
        self.prepare()
        Ledger(self.at.url(0), witness=self.at.witness).close()
        self.saved = [self.at.copied(0)]  # before the plan was frozen
        self.start(0)
        self.at.put(1, self.at.copied(0))

    def prepare(self) -> None:
        """What else a kind of thief needs."""

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """A refusal is safe. That rows do not add up is none: a whole copy's do."""
        refusal = ""
        try:
            yield
        except LedgerError as error:
            refusal = str(error)
        assert "add up" not in refusal, refusal

    def a_process(self, data: Any) -> Process:
        """One that is open, or one that opens what is somewhere, after a recovery if need be."""
        place = data.draw(st.integers(0, 1))
        if not self.open:
            self.start(place)
        if not self.open:
            self.recover(place)
        return cast("Process", data.draw(st.sampled_from(self.open)))

    def counter(self, place: int, who: str) -> tuple[int, int, int]:
        """What it has spent, returned and lost there."""
        found = self.at.read(place, COUNTER.format(who))
        return found[0] if found else (0, 0, 0)

    def at_the_mark(self, place: int, who: str) -> bool:
        """True for a copy that may be charged: it has counted as far as the witness."""
        ((reserved,),) = read(self.at.folder / "witness", RESERVED.format(who)) or [(0,)]
        return self.counter(place, who)[0] >= reserved

    # -- what the kinds do differently ---------------------------------------------------------------------------------

    def process(self, place: int) -> Process:
        ledger = Ledger(self.at.url(place), witness=self.at.witness)
        scope = "shared" if self.principals == ("",) else "per_principal"
        return Process(ledger, ledger.store_plan("n", "{}", "0" * 64, {"vote": self.releases}, scope=scope).id, place)

    def payment(self, process: Process) -> TicketPayment | None:
        return None

    def begins(self, charge: Charge, units: int) -> None:
        """An answer begins, or so many of its units will never be sampled."""
        self.begun[charge.principal] += units

    # -- processes -----------------------------------------------------------------------------------------------------

    def start(self, place: int) -> None:
        is_old = any(self.counter(place, who)[0] < self.low[who] for who in self.principals)
        with self.refusing():
            self.open.append(self.process(place))
            assert not is_old, "opened, though more was surely reached"
            if len(self.open) > 3:
                self.open.pop(0).ledger.close()

    def ask(self, process: Process, who: str, units: int, meanwhile: Callable[[ExitStack], None] | None = None) -> None:
        """Charge an answer, and do something between the witness's commit and the ledger's."""
        ledger = process.ledger

        def _charge(connection: Any, request: Any, undo: Any) -> Any:
            found = Ledger._charge(ledger, connection, request, undo)
            if isinstance(found, list):
                self.low[who] = found[0].number - request.units
                if meanwhile is not None:
                    meanwhile(undo)
            return found

        ledger._charge = _charge  # type: ignore[method-assign]
        account = Account(process.plan, "vote", who)
        with self.refusing():
            found = ledger.charge(ChargeRequest(account, [None], units, tickets=self.payment(process)))
            assert not isinstance(found, dict)
            for charge in found or []:
                assert isinstance(charge, Charge)
                self.begins(charge, units)
                self.charges.append([process, charge, None])

    @rule(data=st.data(), units=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def charge(self, data: Any, units: list[int]) -> None:
        """Others may act between the witness's commit and the ledger's, and before the witness hears of a rollback."""
        for each in units:
            who = data.draw(st.sampled_from(self.principals))
            process = self.a_process(data)
            end = data.draw(st.sampled_from(["", "committed", "rolled back", "killed"]))
            others = partial(self.others, data, process.place, who)
            try:
                self.ask(process, who, each, partial(self.meanwhile, end, others) if end else None)
            except Killed:
                self.kill(process)

    def meanwhile(self, end: str, others: Callable[[], None], undo: ExitStack) -> None:
        others()
        if end == "killed":
            raise Killed
        if end == "rolled back":
            undo.callback(others)
            raise LedgerError("the disk is full")

    def others(self, data: Any, place: int, who: str) -> None:
        """Charge at the other place, perhaps on a copy of this one."""
        if data.draw(st.booleans()):
            self.put(data, 1 - place, self.at.copied(place))
        if beside := [each for each in self.open if each.place != place]:
            self.ask(data.draw(st.sampled_from(beside)), who, data.draw(st.integers(1, 4)))

    @precondition(lambda self: self.charges)
    @rule(data=st.data())
    def record(self, data: Any) -> None:
        """An answer that ended early gives back its last tokens; perhaps again, when its ledger is another copy."""
        entry = data.draw(st.sampled_from(self.charges))
        if entry[2] is None:
            entry[2] = data.draw(st.integers(0, entry[1].units - 1))
            self.begins(entry[1], -entry[2])
        self.write(*entry)

    def write(self, process: Process, charge: Charge, unused: int) -> None:
        with self.refusing():
            process.ledger.record(charge, "{}", unused=unused, tickets=process.tickets)

    @rule(data=st.data(), is_killed=st.booleans())
    def end(self, data: Any, is_killed: bool) -> None:
        process = self.a_process(data)
        if is_killed:
            self.kill(process)
        else:
            process.ledger.close()
            self.open.remove(process)

    def kill(self, process: Process) -> None:
        self.open = [each for each in self.open if each is not process]
        self.charges = [entry for entry in self.charges if entry[0] is not process]
        process.drop()

    # -- copies --------------------------------------------------------------------------------------------------------

    def put(self, data: Any, place: int, copy: Any) -> None:
        """Put a copy in its place, under those who use it or not, and open it."""
        how = data.draw(st.sampled_from(["under them", "closed", "new files"]))
        for process in [each for each in self.open if each.place == place]:
            if how == "closed":
                process.ledger.close()  # and it is used again
            elif how == "new files":
                self.open.remove(process)
        self.at.put(place, copy, how == "under them")
        self.start(place)

    @rule(data=st.data(), place=st.integers(0, 1))
    def put_back(self, data: Any, place: int) -> None:
        """An older copy, or that of the other place."""
        self.saved.append(self.at.copied(1 - place))
        self.put(data, place, self.saved[-1 - data.draw(st.integers(0, len(self.saved) - 1))])

    @rule(data=st.data(), steps=st.lists(st.sampled_from(["charge", "record"]), min_size=1, max_size=3))
    def set_back(self, data: Any, steps: list[str]) -> None:
        """To where it was some steps ago; and records are repeated, as after a COMMIT whose answer was lost."""
        place = self.a_process(data).place
        copy = self.at.copied(place)
        self.saved.append(copy)
        for step in steps:
            if step == "charge":
                self.charge(data, [3])
            elif self.charges:
                self.record(data)
        self.put(data, place, copy)
        self.charge(data, [1])
        for entry in self.charges:
            if entry[2] is not None:
                self.write(*entry)

    @rule(place=st.integers(0, 1))
    def recover(self, place: int) -> None:
        with self.refusing():
            found = recover(self.at.url(place), self.at.witness)
            for who in self.principals:
                self.low[who] = 0 if "n" in found["missing"] else self.counter(place, who)[0]
        self.start(place)

    @invariant()
    def no_more_than_the_plan(self) -> None:
        assert all(count <= self.releases for count in getattr(self, "begun", {}).values()), "more than the plan"

    @invariant()
    def whoever_may_be_charged_is_complete(self) -> None:
        """The proof's own invariant: such a copy counts at least all answers that were ever begun anywhere."""
        if hasattr(self, "at"):
            for place, who in itertools.product((0, 1), self.principals):
                assert not self.at_the_mark(place, who) or self.counts(place, who), "a copy counts too little"

    def counts(self, place: int, who: str) -> bool:
        spent, returned, _ = self.counter(place, who)
        return spent - returned >= self.begun[who]

    def teardown(self) -> None:
        if hasattr(self, "at"):
            for process in {entry[0].ledger: entry[0] for entry in self.charges}.values():
                process.drop()
            for process in self.open:
                process.drop()
            self.at.remove()
            self.exits.close()


class PrincipalThief(Thief):
    """Each principal has a counter of its own."""

    releases = 12
    principals = ("ann", "bob")


class TicketThief(Thief):
    """Owners pay. ``begun`` counts the tokens that each owner has had a part in during its life."""

    releases = 6
    owners = ("o1", "o2", "o3")

    def prepare(self) -> None:
        rows = [{"input": f"text of {owner}", "output": "x", "owner": owner} for owner in self.owners]
        model = DeterministicFakeEmbedding(size=4)
        self.store = ExemplarStore.from_records(rows, model, owner_key="owner", progress=False)
        self.paid: dict[int, list[int]] = {}

    def process(self, place: int) -> Process:
        ledger = Ledger(self.at.url(place), witness=self.at.witness, key_file=self.at.key_file)
        content = f'{{"lines": {{"vote": {{"count": {self.releases}}}}}}}'
        plan = ledger.store_plan("n", content, "0" * 64, {"vote": UNLIMITED}, tickets=True).id
        return Process(ledger, plan, place, TicketLine(OwnerMarks(ledger, plan), self.releases))

    def payment(self, process: Process) -> TicketPayment:
        assert process.tickets is not None
        self.turn = getattr(self, "turn", 0) + 1
        numbers = numbers_of(self.store)
        self.key = process.tickets.marks.key_for(self.store)
        eligible = process.tickets.marks.find(self.store, numbers[np.arange(len(numbers)) != self.turn % 4])
        return TicketPayment(process.tickets, [eligible])

    def begins(self, charge: Charge, units: int) -> None:
        """By the numbers of owners, which no later life has."""
        if units > 0:
            self.paid[id(charge)] = charge.participants.take().tolist()
        for owner in self.paid[id(charge)]:
            self.begun[owner] += units

    def counts(self, place: int, who: str) -> bool:
        *_, lost = self.counter(place, who)
        used = dict(self.at.read(place, USED))
        if not self.begun:
            return True
        numbers = numbers_of(self.store)
        with self.store.reading() as view:
            of = zip(numbers.tolist(), view.marks(numbers, self.key), strict=True)
        return all(used.get(mark.hex(), 0) + lost >= self.begun[number] for number, mark in of)

    @rule(data=st.data())
    def forget(self, data: Any) -> None:
        """An owner leaves one copy's plan and the store, and comes again: perhaps before the plan has heard of it."""
        process = self.a_process(data)
        owner = data.draw(st.sampled_from(self.owners))
        assert process.tickets is not None

        with self.refusing():
            marks = process.tickets.marks
            mark_of = partial(owner_mark, content=owner.encode(), named=True)
            end = marks.leave([marks.key_for(self.store)], mark_of)
            assert end is not None
            self.store.forget(owner)
            self.store.maintenance().add_texts([f"text of {owner}"], [{"owner": owner, "output": "x"}])
            if data.draw(st.booleans()):
                self.put_back(data, process.place)
            else:
                self.charge(data, [1])
            end()


for machine in (Thief, PrincipalThief, TicketThief):
    machine.TestCase.settings = SETTINGS
