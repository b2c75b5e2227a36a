"""Tickets: each owner pays for the queries that it was eligible for, and the number of queries has no end.

A plan of T releases, whose owners pay with tickets, gives every owner T of them. At each query (of one line, at the
plan's rate q and noise) a public threshold decides from an owner's own exemplars and the query whether it is eligible.
Before any member is called, one ticket of every eligible owner who has one left is burnt, in the transaction of the
charge. Of these owners, and of nobody else, each flips a coin of rate q and falls into a member's bucket.

THEOREM. Let one release with rate q be dominated by the pair (P, Q) when an owner who flips a coin in it is added or
removed: whatever the others are, its profile is at most that of (P, Q). (That is what a plan accounts for.) Then for
every store, every owner o, and every adversary who chooses each query from all answers so far and never stops, all
answers together with and without o are dominated by the T-fold composition of (P, Q). For lines with T_1, ..., T_m
tickets and pairs (P_j, Q_j) it is the composition of T_j times (P_j, Q_j) over all j: the plan's (epsilon, delta).

PROOF. Run the same adversary on the store with o and on the store without. Its state after some queries is the
transcript: the queries and their answers.

1. Given a transcript, every ticket is determined. An owner's eligibility at each of its queries is a function of the
   owner's own exemplars and of that query, and so is the number of tickets that it has burnt, which is the number of
   those queries, at most T. No coin, no answer beyond the transcript and no other owner enters (this is why a ticket is
   burnt whether the coin says yes or no, and why an approximate index or a top-k may not decide). So in both worlds
   every other owner has the same tickets at every step.
2. At a query at which o is not eligible, or has no ticket, the two worlds flip the same others' coins into the same
   buckets: given the transcript, the answers have the same law. The loss of this step is 0.
3. At any other query the worlds differ by one owner who flips a coin: given the transcript, the step is dominated by
   (P, Q), and o has one ticket less. There are at most T such steps.
4. Induction over the tickets left, for runs of n queries. Let D(t) be the t-fold composition, and assume that any
   adversary of n - 1 queries against an o of t tickets is dominated by D(t). The first of n queries is fixed by the
   adversary. If it is one of kind 2, what follows is a mixture, with equal weights in both worlds, of pairs dominated
   by D(t), and mixtures with equal weights keep a bound that holds for each of the pairs (their profiles are averaged).
   If it is of kind 3, it is dominated by (P, Q) and what follows, for each answer, by D(t - 1): by the adaptive
   composition of dominating pairs (Zhu, Dong and Wang 2022, theorem 10) both together by D(t). With t = 0 only kind 2
   is left. D(t) is dominated by D(T), as answers that cannot be used can be left out. Several lines: the same with one
   t for each line, and a product that does not depend on the order of its factors.
5. No n entered the bound, so it holds for runs of any length: an event of an endless run is a limit of events of its
   beginnings.                                                                                                     QED

What follows. Answers in parallel are one run: each burns its tickets in a transaction before its members are called,
transactions have an order, and an answer is one step, whose query was chosen before it. A crash burns tickets for
nothing and gives nothing back. Owners that come later have all their tickets; what is protected is an owner's life in
the store, so one who is forgotten, and with it its row, and comes again is a new owner: two lives have 2 T together.
Where each exemplar is its own owner, exemplars of equal content are one owner (`store.marks`): one row, one coin, and
it is forgotten when the last of them is. Forget in every process that has a copy of the store.
A line's tickets are its own; under ``per_principal`` each principal has a set of them, and what colluding principals
see together is the sum.

What nobody may see: who is eligible, how many are, who has tickets left, how many were burnt. A caller learns that a
charge took place, as everywhere. What the ledger holds about tickets says which owner was near to which query, though
by keyed hashes, and it also holds the key: keep it where the store is kept.

ON DISK. A charge appends one row, the seats that burn a ticket (`owner_index`): a few bytes for each, however many
owners there are. Rows are numbered without a gap, and from time to time they are added up into pages of counts. So a
row that is lost is missed at once: the numbers have a gap, a page is too short, or the sum of all tickets is wrong,
and then nothing is charged and nothing answered (`LedgerError`). The same where rows are older or newer than the
others: hashes bind the burns, the pages, the seats and the counter to each other, and to the witness (`witness`,
BINDING).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.budget.owner_index import LOST, PAGE, EligibleOwners, OwnerIndex, hashed_marks, written
from langchain_dpicl.budget.schema import burns, counters, hashed, pages, stub_digest, stubs
from langchain_dpicl.errors import LedgerError, UnsafeConfigurationError
from langchain_dpicl.store.base import Numbers, PrivateStore

FOLD_AFTER = 512
"""So many burns are added up into the pages at a time."""


class Participants:
    """The owners who may flip a coin in a release. Private: it shows nothing, and is empty once they are taken."""

    __slots__ = ("_owners",)

    def __init__(self, owners: Numbers) -> None:
        self._owners: Numbers | None = owners

    def take(self) -> Numbers:
        """The owners' numbers. They are not kept."""
        owners, self._owners = self._owners, None
        if owners is None:
            raise UnsafeConfigurationError("the owners of a release were taken already")
        return owners

    def __repr__(self) -> str:
        return "<owners who pay for a release>"

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("who pays for a release is not pickled or copied")


class Stubs:
    """The tickets that each seat has burnt on one counter, as far as this process knows: what is committed."""

    def __init__(self) -> None:
        self.used: NDArray[np.int64] = np.zeros(0, np.int64)
        self.burns = 0
        self.folded = 0
        self.chain = ""

    def read(self, connection: Connection, counter_id: int) -> Any:
        """Learn what was burnt since; the counter's stub, or None where nothing ever was. `LedgerError` where rows are
        lost, or are not the ones that the stub was written with."""
        try:
            return self._read(connection, counter_id)
        except LedgerError:
            self.__init__()  # type: ignore[misc]
            raise

    def _read(self, connection: Connection, counter_id: int) -> Any:
        query = sa.select(stubs).where(stubs.c.counter_id == counter_id)
        row = connection.execute(query.with_for_update()).one_or_none()
        if row is None:
            if self.burns:
                raise LedgerError(LOST)
            return None
        if row.digest != stub_digest(row.chain, row.burns, row.tickets, row.spent, row.lost, row.seats):
            raise LedgerError(LOST)
        if row.burns < self.burns:
            raise LedgerError(LOST)
        self.folded = row.folded
        if self.burns < row.folded:
            of_counter = sa.select(pages.c.page, pages.c.used).where(pages.c.counter_id == counter_id)
            found = connection.execute(of_counter.order_by(pages.c.page)).all()
            whole = [page for page, _ in found] == list(range(len(found)))
            parts = [written(used) for _, used in found]
            if not whole or any(len(part) != 4 * PAGE for part in parts) or hashed(*parts) != row.sums:
                raise LedgerError(LOST)
            self.used = _numbers(b"".join(parts))
            self.burns, self.chain = row.folded, row.base
        if self.burns < row.burns:
            since = sa.and_(burns.c.counter_id == counter_id, burns.c.number > self.burns)
            later = connection.execute(sa.select(burns).where(since).order_by(burns.c.number)).all()
            if [burn.number for burn in later] != list(range(self.burns + 1, row.burns + 1)):
                raise LedgerError(LOST)
            for burn in later:
                seats = written(burn.seats)
                self._add(_numbers(seats), burn.units)
                self.chain = _chained(self.chain, burn.number, burn.units, seats)
            self.burns = row.burns
        if self.chain != row.chain or int(self.used.sum()) != row.tickets:
            raise LedgerError(LOST)
        return row

    def _add(self, seats: NDArray[np.int64], units: int) -> None:
        self.used = _grown(self.used, int(seats.max(initial=-1)) + 1)
        self.used[seats] += units

    def fold(self, connection: Connection, counter_id: int) -> None:
        """Write the sums of all burns so far, in place of the burns."""
        if self.read(connection, counter_id) is None or self.burns == self.folded:
            return
        connection.execute(sa.delete(pages).where(pages.c.counter_id == counter_id))
        counts = _grown(self.used, -(-len(self.used) // PAGE) * PAGE).astype("<u4")
        rows: list[dict[str, Any]] = [
            {"counter_id": counter_id, "page": page, "used": counts[page * PAGE : (page + 1) * PAGE].tobytes()}
            for page in range(len(counts) // PAGE)
        ]
        if rows:
            connection.execute(sa.insert(pages), rows)
        connection.execute(sa.delete(burns).where(burns.c.counter_id == counter_id, burns.c.number <= self.burns))
        sums = hashed(*(bytes(row["used"]) for row in rows))
        folded = {"folded": self.burns, "base": self.chain, "sums": sums}
        connection.execute(sa.update(stubs).where(stubs.c.counter_id == counter_id).values(**folded))


def _chained(chain: str, number: int, units: int, seats: bytes) -> str:
    return hashed(chain.encode(), str(number).encode(), str(units).encode(), seats)


def whole(connection: Connection, counter_id: int, seats: OwnerIndex) -> bool:
    """Whether all that a ledger says of a counter's tickets was written together: rows of one and the same copy."""
    mine = sa.select(counters.c.spent, counters.c.lost).where(counters.c.id == counter_id)
    spent, lost = connection.execute(mine).one()
    try:
        row = Stubs().read(connection, counter_id)
        if row is not None:
            seats.check(connection, row.seats, row.marks)
    except LedgerError:
        return False
    return bool((spent, lost) == ((row.spent, row.lost) if row is not None else (lost, lost)))


def begin_anew(connection: Connection, counter_id: int) -> None:
    """Where nobody has a ticket left: forget what was burnt."""
    spent, lost = connection.execute(
        sa.select(counters.c.spent, counters.c.lost).where(counters.c.id == counter_id)
    ).one()
    for table in (burns, pages, stubs):
        connection.execute(sa.delete(table).where(table.c.counter_id == counter_id))
    row = {"counter_id": counter_id, "burns": 0, "folded": 0, "tickets": 0, "spent": spent, "lost": lost, "seats": 0}
    digest = stub_digest(spent=spent, lost=lost)
    connection.execute(sa.insert(stubs).values(**row, marks=hashed_marks(), before=digest, digest=digest))


class Tickets:
    """The tickets of one line: T for every owner (and principal, where each has a counter)."""

    def __init__(self, ledger: Ledger, seats: OwnerIndex, count: int, watch: Callable[[PrivateStore], None]) -> None:
        self._ledger = ledger
        self._seats = seats
        self._count = count
        self._watch = watch
        self._stubs: dict[int, Stubs] = {}
        self._lock = threading.Lock()
        self._due: set[int] = set()

    def ask(self, store: PrivateStore, owners: Numbers) -> EligibleOwners:
        """What `burn` needs to know of a query's eligible owners. Private."""
        self._watch(store)
        return self._seats.ask(store, owners)

    def burn(
        self, connection: Connection, counter_id: int, asked: Sequence[EligibleOwners], units: int, *, spent: int
    ) -> list[Participants]:
        """Within a charge's transaction: ``units`` tickets of every owner asked who has as many, query by query.

        Owners who share a seat (exemplars of equal content, where each is its own owner) are one owner: the first of
        them pays and takes part. ``spent`` is the counter's number before this charge. Every owner has as many tickets
        fewer as the counter has ``lost``. Returns those who paid. Raises `owner_index.Stale`.
        """
        lost = connection.scalar(sa.select(counters.c.lost).where(counters.c.id == counter_id)) or 0
        with self._lock:
            mine = self._stubs.setdefault(counter_id, Stubs())
            row = mine.read(connection, counter_id)
            if (spent, lost) != ((row.spent, row.lost) if row is not None else (lost, lost)):
                raise LedgerError(LOST)
            used, burnt, chain = mine.used, 0, mine.chain
            seen = (0, hashed_marks()) if row is None else (row.seats, row.marks)
            places, (count, marks) = self._seats.take_after(connection, asked, *seen, first=row is None)
            participants: list[Participants] = []
            rows: list[dict[str, object]] = []
            for query, taken in zip(asked, places, strict=True):
                seats, first_of = np.unique(taken, return_index=True)
                used = _grown(used, int(seats.max(initial=-1)) + 1)
                pays = used[seats] + units <= self._count - lost
                paid = seats[pays]
                if len(asked) > 1:  # the next query of this charge finds them burnt
                    used = used.copy()
                    used[paid] += units
                burnt += units * len(paid)
                participants.append(Participants(np.sort(query.owners[first_of[pays]])))
                number, packed = mine.burns + len(participants), paid.astype("<u4").tobytes()
                rows.append({"number": number, "seats": packed})
                chain = _chained(chain, number, units, packed)
            connection.execute(sa.insert(burns), [{**row, "counter_id": counter_id, "units": units} for row in rows])
            numbers = {"burns": mine.burns + len(rows), "tickets": burnt + (row.tickets if row is not None else 0)}
            numbers |= {"spent": spent + units * len(rows), "lost": lost, "seats": count}
            before = row.digest if row is not None else stub_digest(spent=spent, lost=lost)
            values = {**numbers, "chain": chain, "marks": marks, "before": before}
            values["digest"] = stub_digest(chain, **numbers)
            self._count_on(connection, counter_id, row is None, values)
            if mine.burns + len(rows) - mine.folded >= FOLD_AFTER:
                self._due.add(counter_id)
        return participants

    def _count_on(self, connection: Connection, counter_id: int, first: bool, values: Mapping[str, object]) -> None:
        if first:
            connection.execute(sa.insert(stubs).values(counter_id=counter_id, folded=0, **values))
            return
        connection.execute(sa.update(stubs).where(stubs.c.counter_id == counter_id).values(**values))

    def fold(self) -> None:
        """After a charge: add up burns where there are many. Nothing is decided by it, and it may fail."""
        with self._lock:
            due, self._due = self._due, set()
        for counter_id in due:
            self._ledger.run(lambda connection, counter_id=counter_id: self._fold(connection, counter_id))  # type: ignore[misc]

    def _fold(self, connection: Connection, counter_id: int) -> None:
        with self._lock:
            self._stubs.setdefault(counter_id, Stubs()).fold(connection, counter_id)

    def used(self, counter_id: int) -> NDArray[np.int64]:
        """How many tickets each owner who was ever eligible has burnt; without those who are forgotten. Private."""

        def read(connection: Connection) -> NDArray[np.int64]:
            with self._lock:
                mine = self._stubs.setdefault(counter_id, Stubs())
                mine.read(connection, counter_id)
                taken = self._seats.taken(connection)
                return _grown(mine.used, int(taken.max(initial=-1)) + 1)[taken]

        return self._ledger.run(read, "note")


def _numbers(page: bytes) -> NDArray[np.int64]:
    if len(page) % 4:
        raise LedgerError(LOST)
    return np.frombuffer(page, "<u4").astype(np.int64)


def _grown(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return counts if len(counts) >= size else np.concatenate([counts, np.zeros(size - len(counts), np.int64)])
