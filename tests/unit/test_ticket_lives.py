"""The claim about lives in `budget/tickets.py`: all interleavings of two or three forgettings, lookups and charges.

`World` moves one owner of a real store and of a real ledger in memory, one transaction at a time. A process that is
killed takes no further step, so a kill at any moment is among the interleavings. Each state is gone on from once, since
all that may follow depends on it alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import ExemplarStore
from langchain_dpicl.budget import tickets
from langchain_dpicl.budget.ledger import ChargeRequest, Ledger
from langchain_dpicl.budget.schema import UNLIMITED, Account
from langchain_dpicl.budget.tickets import OwnerMarks, TicketLine, TicketPayment
from langchain_dpicl.store.base import owner_mark

TICKETS, LIVES = 1, 3
pytestmark = pytest.mark.filterwarnings("ignore:this ledger lives in memory")
TABLES = ("dpicl_plans", "dpicl_counters", "dpicl_charges", "dpicl_tickets", "dpicl_leaving")
Step = tuple[str, int]


def store_after(life: int, there: bool) -> ExemplarStore:
    """A store of Ann in her first life (0) or a later one, or just after it. Her number is the life's."""
    row, vector = {"input": "text", "output": "x", "owner": "ann"}, np.ones((1, 1), np.float32)
    store = ExemplarStore.from_records([row], None, vectors=vector, owner_key="owner")  # type: ignore[arg-type]
    for _ in range(life):
        store.forget("ann")
        store.add([row], vectors=vector)
    if not there:
        store.forget("ann")
    return store


STORES = {(life, there): store_after(life, there) for life in range(LIVES) for there in (True, False)}


class World:
    """Ann in a store and on a ledger. Processes forget her, one that runs charges, and others that start just then."""

    def __init__(self, ledger: Ledger, forgettings: int) -> None:
        plan = ledger.store_plan("plan", "", "", {"vote": UNLIMITED}, tickets=True).id
        ledger.owner_key(plan, make=True)
        self.ledger, self.account = ledger, Account(plan, "vote")
        self.file: Any = ledger._engine.raw_connection().driver_connection
        self.life, self.there = 0, True
        self.used = (0,) * LIVES  # by each life: its tickets, less those that came back
        begun = (0, None, None)  # a forgetting's steps so far, what it met at its first, and its last one
        self.phases: tuple[Any, ...] = (begun,) * forgettings
        self.asked: Any = None  # whether by the running process, and the owners
        self.paid: tuple[Any, ...] = ()  # charges whose answers have not ended, each with the life that paid
        self.running = self.new_line()

    # -- as a store, at any moment -------------------------------------------------------------------------------------

    def reading(self) -> Any:
        return STORES[self.life, self.there].reading()

    def mark_keys(self, *, make: bool = False) -> tuple[bytes, ...]:
        return ()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def new_line(self) -> TicketLine:
        return TicketLine(OwnerMarks(self.ledger, self.account.plan_id), TICKETS)

    def next_steps(self) -> Iterator[Step]:
        if self.there:
            yield from (("look_up", 0), ("look_up", 1))
        elif self.life + 1 < LIVES:
            yield "come_again", 0
        if self.asked:
            yield "charge", 0
        yield from (("give_back", which) for which in range(len(self.paid)))
        yield from (("forget", which) for which, (steps, *_) in enumerate(self.phases) if steps < 3)

    def look_up(self, running: int) -> None:
        line = self.running if running else self.new_line()
        self.asked = running, line.marks.find(self, np.array([self.life]))

    def charge(self, _: int) -> None:
        running, owners = self.asked
        line = self.running if running else self.new_line()
        payment = TicketPayment(line, [owners])
        (charge,) = self.ledger.charge(ChargeRequest(self.account, [None], tickets=payment))
        for life in charge.participants.take().tolist():
            self.count(life, 1)
            self.paid = *self.paid, (charge, life)
        self.asked = None

    def give_back(self, which: int) -> None:
        charge, life = self.paid[which]
        self.ledger.record(charge, "{}", unused=1, tickets=self.running)
        self.count(life, -1)
        self.paid = self.paid[:which] + self.paid[which + 1 :]

    def count(self, life: int, units: int) -> None:
        self.used = tuple(used + units * (i == life) for i, used in enumerate(self.used))

    def come_again(self, _: int) -> None:
        self.life, self.there = self.life + 1, True

    def forget(self, which: int) -> None:
        """As a store does it: the ledger hears, the store commits, the ledger ends it.

        A store that has changed before the commit begins again, unless another process has removed her.
        """
        steps, met, end = self.phases[which]
        now = self.life, self.there
        if steps == 2:
            end()
        elif steps == 1 and (not self.there or met == now):
            self.there = False
        else:
            steps, met = 0, now
            end = self.new_line().marks.leave((), partial(owner_mark, content=b"ann", named=True))
        self.phases = tuple((steps + 1, met, end) if i == which else each for i, each in enumerate(self.phases))

    # -- states --------------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        marks = self.running.marks
        python = {name: getattr(self, name) for name in ("life", "there", "used", "phases", "asked", "paid")}
        rows = {table: self.file.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES}
        return {**python, "rows": rows, "known": (marks._changes, dict(marks._by_number.get(self, {})))}

    def restore(self, state: dict[str, Any]) -> None:
        for name in ("life", "there", "used", "phases", "asked", "paid"):
            setattr(self, name, state[name])
        for table in reversed(TABLES):
            self.file.execute(f"DELETE FROM {table}")
        for table in TABLES:
            for row in state["rows"][table]:
                self.file.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        self.ledger._reached.clear()
        self.running = self.new_line()
        changes, known = state["known"]
        self.running.marks._learn(changes)
        self.running.marks._by_number[self] = dict(known)

    def rows(self) -> Any:
        return self.file.execute("SELECT used, life FROM dpicl_tickets").fetchall()

    def changes(self) -> tuple[int, str | None]:
        """The plan's changes, and the token of the forgetting that stands."""
        statement = "SELECT changes, token FROM dpicl_plans LEFT JOIN dpicl_leaving ON plan_id = id"
        ((changes, token),) = self.file.execute(statement)
        return changes, token

    def key(self) -> str:
        """All on which what follows depends. One forgetting is like another."""
        changes, token = self.changes()
        forgettings = sorted(
            (steps, steps == 1 and met != (self.life, self.there), bool(end) and end.args[0].keywords["token"] == token)
            for steps, met, end in self.phases
        )
        asked = self.asked and (self.asked[0], self.asked[1].owners.tolist(), self.asked[1].changes)
        paid = sorted((charge.participants.life, life) for charge, life in self.paid)
        marks = self.running.marks
        known = marks._changes, sorted(marks._by_number.get(self, {}))
        state = self.life, self.there, self.used, changes, token is None, forgettings, asked, paid, known
        return repr((*state, self.rows()))

    def fault(self) -> str:
        """What is wrong, if anything is."""
        if max(self.used) > TICKETS:
            return "a life has used more tickets than it has"
        if {steps for steps, *_ in self.phases} <= {0, 3}:
            used = self.used[self.life] if self.there else 0
            if self.changes()[1] is not None or sum(used for used, _ in self.rows()) != used:
                return "a row of a life that is over is left"
        return ""


def explore(fault: str = "a", forgettings: int = 2, running: bool = False) -> tuple[list[Step], int]:
    """A shortest way to a fault that begins with these words, if there is one, and the number of states until then."""
    world = World(Ledger("sqlite://"), forgettings)
    known, waiting = {world.key()}, deque([(world.snapshot(), [*world.next_steps()], list[Step]())])
    while waiting:
        state, steps, way = waiting.popleft()
        for step in steps:
            if step == ("look_up", 1) and not running:
                continue
            world.restore(state)
            getattr(world, step[0])(step[1])
            if world.fault().startswith(fault):
                return [*way, step], len(known)
            if (key := world.key()) not in known:
                known.add(key)
                waiting.append((world.snapshot(), [*world.next_steps()], [*way, step]))
    return [], len(known)


@pytest.mark.parametrize(
    ("forgettings", "running", "states"),
    [(2, False, 400), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, True, 3000), (3, False, 2000)])],
)
def test_no_life_uses_more_than_its_tickets_and_no_row_outlives_it(
    forgettings: int, running: bool, states: int
) -> None:
    """With a process that remembers marks from query to query, and without."""
    way, found = explore(forgettings=forgettings, running=running)
    assert way == []
    assert found > states, "or this proves nothing"


def without_a_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tickets.secrets, "token_hex", lambda _: "equal")


def without_leaving(patch: pytest.MonkeyPatch) -> None:
    real = OwnerMarks.hold
    patch.setattr(OwnerMarks, "hold", lambda *given: (real(*given)[0], real(*given)[1][:0]))


def without_counting_a_change(patch: pytest.MonkeyPatch) -> None:
    real = OwnerMarks._end

    def end(self: OwnerMarks, connection: Any, mark: str, token: str) -> None:
        real(self, connection, mark, token)
        connection.exec_driver_sql("UPDATE dpicl_plans SET changes = changes - 1")

    patch.setattr(OwnerMarks, "_end", end)


def without_life(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tickets, "_GIVE_BACK", tickets._GIVE_BACK.replace("AND life <= :life", ""))


@pytest.mark.parametrize(
    ("mistake", "forgettings"),
    [(without_a_token, 3), (without_leaving, 2), (without_counting_a_change, 2), (without_life, 2)],
)
def test_the_claim_fails_with_a_mistake(mistake: Any, forgettings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    way, _ = explore("a life has used more", forgettings)
    assert way
