"""Which seat each owner has in a plan whose owners pay with tickets: a row of its own, from the first query that it is
eligible for until it is forgotten.

On disk a seat holds a mark, the owner's keyed hash (`ExemplarStore.marks`): in pages of `PAGE` seats, all full but the
last. Marks of forgotten owners are overwritten with zeros, and a seat is never given again. A process keeps what it has
read; what is written it learns by reading it again, once it is committed.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.budget.schema import ADVICE, books, counters, stubs
from langchain_dpicl.budget.schema import seats as seat_pages
from langchain_dpicl.errors import LedgerError
from langchain_dpicl.store.base import Numbers, PrivateStore
from langchain_dpicl.store.marks import MARK

PAGE = 4096
"""Entries in a page."""

UNKNOWN = -1
_NOBODY = bytes(MARK)
_KEPT = 64
LOST = f"the ledger's tables of tickets have lost rows: nothing was charged; {ADVICE}"


class Stale(Exception):
    """Somebody was forgotten since the owners of a query were asked for: ask again."""


@dataclass
class EligibleOwners:
    """The owners who are eligible for one query: their numbers, their seats, and by position the marks of those whose
    seat this process does not know, from a moment when so many ``changes`` had been made. Private: ``repr`` shows
    nothing."""

    store: PrivateStore = field(repr=False)
    owners: Numbers = field(repr=False)
    seats: NDArray[np.int64] = field(repr=False)
    new: dict[int, bytes] = field(repr=False)
    changes: int = field(default=0, repr=False)
    turn: int = field(default=0, repr=False)


class OwnerIndex:
    """The seats of one plan, as far as this process knows them."""

    def __init__(self, ledger: Ledger, plan_id: int) -> None:
        self._ledger = ledger
        self._plan_id = plan_id
        self._count = 0
        self._changes = 0
        self._of: dict[bytes, int] = {}
        self._hash = _hash_of(b"")  # of the marks that it has read
        self._at = {0: hashed_marks()}  # the hash of the first so many
        self._turn = 0  # how often it had to learn everything anew
        self._by_number: WeakKeyDictionary[PrivateStore, NDArray[np.int64]] = WeakKeyDictionary()
        self._key: bytes | None = None
        # Held for a moment, by whoever is in a transaction too; never while waiting for a store or a database.
        self._lock = threading.Lock()

    # -- before a charge ----------------------------------------------------------------------------------------------

    def ask(self, store: PrivateStore, owners: Numbers) -> EligibleOwners:
        """What a charge needs to know of a query's eligible owners. Private."""
        with self._lock:
            turn = self._turn
            seats = self._numbered(store, int(owners.max(initial=-1)) + 1)[owners]
        at = np.flatnonzero(seats == UNKNOWN)
        if not len(at):
            return EligibleOwners(store, owners, seats, {}, turn=turn)
        changes = self._ledger.run(self._book, "read").changes  # first: who is forgotten after this is noticed
        with store.reading() as view:
            marks = view.marks(owners[at], self._mark_key())
        asked = EligibleOwners(store, owners, seats, dict(zip(at.tolist(), marks, strict=True)), changes, turn)
        gone = [position for position, mark in asked.new.items() if not mark]  # forgotten just now
        return _without(asked, gone) if gone else asked

    def _mark_key(self) -> bytes:
        if self._key is None:
            self._key = self._ledger.key("fingerprint_key")
        return self._key

    def _numbered(self, store: PrivateStore, count: int) -> NDArray[np.int64]:
        """The seats by owners' numbers, for numbers below ``count`` at least."""
        known = self._by_number.get(store, np.empty(0, np.int64))
        if len(known) < count or store not in self._by_number:
            more = max(count, 2 * len(known)) - len(known)
            known = np.concatenate([known, np.full(more, UNKNOWN, np.int64)])
            self._by_number[store] = known
        return known

    # -- within a charge's transaction --------------------------------------------------------------------------------

    def take(self, connection: Connection, asked: Sequence[EligibleOwners]) -> list[NDArray[np.int64]]:
        """`take_after`, for a counter on which nothing was ever burnt."""
        return self.take_after(connection, asked, 0, hashed_marks())[0]

    def take_after(
        self, connection: Connection, asked: Sequence[EligibleOwners], count: int, marks: str, *, first: bool = False
    ) -> tuple[list[NDArray[np.int64]], tuple[int, str]]:
        """A seat for every owner of every query: those that have none get the next ones, with all their tickets.

        Once in a transaction, for all its queries: what it gives is written after the last reading, so that nothing is
        remembered that may yet be rolled back. ``count`` and ``marks`` is what its counter's latest charge saw: so many
        seats, and the hash of their marks. Also returns what this one has seen. `LedgerError` where these seats are
        others now. Raises `Stale`. With ``first``, nobody else gives or takes seats until the transaction ends.
        """
        wanted = list(dict.fromkeys(mark for query in asked for mark in query.new.values()))
        with self._lock:
            if wanted or self._at.get(count) != marks:
                self._read(connection, count, marks)
            has_new = not all(mark in self._of for mark in wanted)
        if has_new or first:
            self._hold(connection)
        with self._lock:
            if wanted or first:
                self._read(connection, count, marks)
            if any(query.turn != self._turn or (query.new and query.changes != self._changes) for query in asked):
                raise Stale
            fresh = [mark for mark in wanted if mark not in self._of]
            given = {mark: self._count + i for i, mark in enumerate(fresh)}
            if given:
                self._append(connection, self._count, fresh)
            after = self._hash.copy()
            after.update(b"".join(fresh))
            return [self._seated(query, given) for query in asked], (self._count + len(fresh), after.hexdigest())

    def _seated(self, query: EligibleOwners, given: Mapping[bytes, int]) -> NDArray[np.int64]:
        """The seats of one query's owners; those that are committed are remembered."""
        seats, known = query.seats.copy(), self._numbered(query.store, 0)
        for position, mark in query.new.items():
            seats[position] = seat = self._of[mark] if mark in self._of else given[mark]
            if mark in self._of:
                known[query.owners[position]] = seat
        return seats

    def _hold(self, connection: Connection) -> None:
        """Let no other transaction give or take seats until this one ends. Waits, so it is called without the lock."""
        connection.execute(sa.select(books.c.seats).where(books.c.plan_id == self._plan_id).with_for_update())

    def check(self, connection: Connection, count: int, marks: str) -> None:
        """`LedgerError` where the first seats are not those that a counter's latest charge saw."""
        with self._lock:
            self._read(connection, count, marks)

    def _read(self, connection: Connection, seen: int = 0, marks: str = "") -> int:
        """Learn what was written; how many seats there are. `LedgerError` where pages are lost, or are others than a
        counter has ``seen``."""
        row = self._book(connection)
        if row.seats < self._count or row.changes < self._changes:
            self._forget_all()
            raise LedgerError(LOST)
        known = row.changes == self._changes
        if known and marks and seen < self._count and seen not in self._at:
            pieces = self._whole(connection, row.seats)
            known = _hash_of(pieces[: self._count * MARK]).hexdigest() == self._hash.hexdigest()
            self._at[seen] = _hash_of(pieces[: seen * MARK]).hexdigest()
        if known and marks and self._at.get(seen, marks) != marks:
            known = False
        if not known or row.seats > self._count:
            self._learn(connection, row, self._count if known else 0, seen)
            if known and marks and self._at.get(seen) != marks:
                self._learn(connection, row, 0, seen)
        if marks and self._at.get(seen) != marks:
            self._forget_all()
            raise LedgerError(LOST)
        return self._count

    def mend(self, connection: Connection) -> None:
        """Where the seats cannot be read, nobody has one: for `recovery`, which then takes away all tickets."""
        with self._lock:
            try:
                self._read(connection)
            except LedgerError:
                connection.execute(sa.delete(seat_pages).where(seat_pages.c.plan_id == self._plan_id))
                connection.execute(sa.delete(books).where(books.c.plan_id == self._plan_id))
                connection.execute(sa.insert(books).values(plan_id=self._plan_id, seats=0))

    def _learn(self, connection: Connection, row: Any, start: int, seen: int) -> None:
        """Read the pages from a seat on."""
        first = start // PAGE
        marks = self._whole(connection, row.seats, first)
        base = first * PAGE
        of = self._of if start else {}
        found = self._hash.copy() if start else _hash_of(b"")
        at = dict(list(self._at.items())[-_KEPT:]) if start else {0: hashed_marks()}
        if start < seen <= row.seats:
            found.update(marks[(start - base) * MARK : (seen - base) * MARK])
            at[seen] = found.hexdigest()
            found.update(marks[(seen - base) * MARK :])
        else:
            found.update(marks[(start - base) * MARK :])
        at[row.seats] = found.hexdigest()
        moved = False
        for seat in range(start, row.seats):
            here = (seat - base) * MARK
            if (mark := marks[here : here + MARK]) != _NOBODY:
                if of.setdefault(mark, seat) != seat:
                    self._forget_all()
                    raise LedgerError(LOST)
                moved = moved or (start == 0 and seat < self._count and self._of.get(mark) != seat)
        if moved:  # a process that ran on a copy which is gone: what it knows of its queries' owners is wrong
            self._by_number.clear()
            self._turn += 1
        self._of, self._count, self._changes, self._hash, self._at = of, row.seats, row.changes, found, at

    def _forget_all(self) -> None:
        self._of, self._count, self._changes, self._hash = {}, 0, 0, _hash_of(b"")
        self._at = {0: hashed_marks()}
        self._by_number.clear()
        self._turn += 1

    def _whole(self, connection: Connection, count: int, first: int = 0) -> bytes:
        """The marks of all pages from one on."""
        found = self._pages(connection, first)
        marks = b"".join(map(written, found))
        if len(found) != -(-count // PAGE) - first or len(marks) != (count - first * PAGE) * MARK:
            self._forget_all()
            raise LedgerError(LOST)
        return marks

    def _book(self, connection: Connection) -> Any:
        """How many seats there are, and how many changes were made to them."""
        query = sa.select(books.c.seats, books.c.changes).where(books.c.plan_id == self._plan_id)
        row = connection.execute(query).one_or_none()
        if row is None:
            raise LedgerError(LOST)
        return row

    def _pages(self, connection: Connection, first: int) -> list[bytes]:
        query = sa.select(seat_pages.c.marks).where(seat_pages.c.plan_id == self._plan_id, seat_pages.c.page >= first)
        return list(connection.scalars(query.order_by(seat_pages.c.page)))

    def _append(self, connection: Connection, count: int, marks: Sequence[bytes]) -> None:
        last, full = divmod(count, PAGE)
        waiting = b"".join(marks)
        if full:
            found = self._page(connection, last)
            if len(found) != full * MARK:
                raise LedgerError(LOST)
            size = (PAGE - full) * MARK
            self._write(connection, last, found + waiting[:size])
            waiting, last = waiting[size:], last + 1
        rows = [
            {"plan_id": self._plan_id, "page": last + i, "marks": waiting[start : start + PAGE * MARK]}
            for i, start in enumerate(range(0, len(waiting), PAGE * MARK))
        ]
        if rows:
            connection.execute(sa.insert(seat_pages), rows)
        book = sa.update(books).where(books.c.plan_id == self._plan_id)
        connection.execute(book.values(seats=count + len(marks)))

    def _write(self, connection: Connection, page: int, marks: bytes) -> None:
        where = sa.and_(seat_pages.c.plan_id == self._plan_id, seat_pages.c.page == page)
        if connection.execute(sa.update(seat_pages).where(where).values(marks=marks)).rowcount != 1:
            raise LedgerError(LOST)

    # -- forgetting, and looking --------------------------------------------------------------------------------------

    def forget(self, mark: bytes) -> None:
        """Remove an owner's row, for good: its mark is overwritten. Forgetting twice is forgetting once.

        Every process reads the seats again when it next meets an owner whom it does not know.
        """
        self._ledger.run(lambda connection: self._remove(connection, mark))

    def _remove(self, connection: Connection, mark: bytes) -> None:
        mine = sa.select(counters.c.id).where(counters.c.plan_id == self._plan_id)
        of_plan = sa.select(stubs.c.counter_id, stubs.c.seats, stubs.c.marks).where(stubs.c.counter_id.in_(mine))
        of_plan = of_plan.order_by(stubs.c.counter_id).with_for_update()
        connection.execute(of_plan).all()  # first, as a charge does; again below, for counters that came meanwhile
        self._hold(connection)
        with self._lock:
            self._read(connection)
            seat = self._of.get(mark)
            if seat is not None:
                old = self._whole(connection, self._count)
                page, start = seat // PAGE, seat * MARK
                new = old[:start] + _NOBODY + old[start + MARK :]
                if old[start : start + MARK] != mark:
                    self._forget_all()
                    raise LedgerError(LOST)
                self._write(connection, page, new[page * PAGE * MARK : (page + 1) * PAGE * MARK])
                for counter_id, seen, marks in connection.execute(of_plan).all():
                    if seen > seat and _hash_of(old[: seen * MARK]).hexdigest() == marks:  # else it was wrong before
                        stub = sa.update(stubs).where(stubs.c.counter_id == counter_id)
                        connection.execute(stub.values(marks=_hash_of(new[: seen * MARK]).hexdigest()))
        book = sa.update(books).where(books.c.plan_id == self._plan_id)
        connection.execute(book.values(changes=books.c.changes + 1))

    def _page(self, connection: Connection, page: int) -> bytes:
        where = sa.and_(seat_pages.c.plan_id == self._plan_id, seat_pages.c.page == page)
        found = connection.scalar(sa.select(seat_pages.c.marks).where(where))
        return written(found)

    def taken(self, connection: Connection) -> NDArray[np.int64]:
        """The seats of owners who are not forgotten. Private."""
        with self._lock:
            self._read(connection)
            return np.sort(np.fromiter(self._of.values(), np.int64, len(self._of)))


def _hash_of(marks: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(marks, digest_size=16)


def hashed_marks(marks: bytes = b"") -> str:
    """The hash of the marks of a plan's first seats."""
    return _hash_of(marks).hexdigest()


def written(found: object) -> bytes:
    """A page as it was written. `LedgerError` for what is none."""
    if not isinstance(found, (bytes, bytearray, memoryview)):
        raise LedgerError(LOST)
    return bytes(found)


def _without(asked: EligibleOwners, gone: Sequence[int]) -> EligibleOwners:
    """Without the owners at these positions."""
    stays = np.ones(len(asked.owners), np.bool_)
    stays[list(gone)] = False
    place = np.cumsum(stays) - 1
    new = {int(place[position]): mark for position, mark in asked.new.items() if stays[position]}
    return EligibleOwners(asked.store, asked.owners[stays], asked.seats[stays], new, asked.changes, asked.turn)
