"""Which seat each owner has in a plan whose owners pay with tickets: a row of its own, from the first query that it is
eligible for until it is forgotten.

On disk a seat holds a mark, the owner's keyed hash (`ExemplarStore.marks`): in pages of `PAGE` seats, all full but the
last. Marks of forgotten owners are overwritten with zeros, and a seat is never given again. A process keeps what it has
read; what is written it learns by reading it again, once it is committed.
"""

from __future__ import annotations

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
from langchain_dpicl.budget.schema import ADVICE, books
from langchain_dpicl.budget.schema import seats as seat_pages
from langchain_dpicl.errors import LedgerError
from langchain_dpicl.store.base import Numbers, PrivateStore
from langchain_dpicl.store.marks import MARK

PAGE = 4096
"""Seats in a page."""

UNKNOWN = -1
_NOBODY = bytes(MARK)
LOST = f"the ledger's tables of tickets have lost rows: nothing was charged; {ADVICE}"


class Stale(Exception):
    """Somebody was forgotten since the owners of a query were asked for: ask again."""


@dataclass
class Asked:
    """The owners who are eligible for one query: their numbers, their seats, and by position the marks of those whose
    seat this process does not know, from a moment when so many ``changes`` had been made. Private: ``repr`` shows
    nothing."""

    store: PrivateStore = field(repr=False)
    owners: Numbers = field(repr=False)
    seats: NDArray[np.int64] = field(repr=False)
    new: dict[int, bytes] = field(repr=False)
    changes: int = field(default=0, repr=False)


class Seats:
    """The seats of one plan, as far as this process knows them."""

    def __init__(self, ledger: Ledger, plan_id: int) -> None:
        self._ledger = ledger
        self._plan_id = plan_id
        self._count = 0
        self._changes = 0
        self._of: dict[bytes, int] = {}
        self._by_number: WeakKeyDictionary[PrivateStore, NDArray[np.int64]] = WeakKeyDictionary()
        self._key: bytes | None = None
        # Held for a moment, by whoever is in a transaction too; never while waiting for a store or a database.
        self._lock = threading.Lock()

    # -- before a charge ----------------------------------------------------------------------------------------------

    def ask(self, store: PrivateStore, owners: Numbers) -> Asked:
        """What a charge needs to know of a query's eligible owners. Private."""
        with self._lock:
            seats = self._numbered(store, int(owners.max(initial=-1)) + 1)[owners]
        at = np.flatnonzero(seats == UNKNOWN)
        if not len(at):
            return Asked(store, owners, seats, {})
        changes = self._ledger.run(self._book, "read").changes  # first: who is forgotten after this is noticed
        with store.reading() as view:
            marks = view.marks(owners[at], self._mark_key())
        asked = Asked(store, owners, seats, dict(zip(at.tolist(), marks, strict=True)), changes)
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

    def take(self, connection: Connection, asked: Sequence[Asked]) -> list[NDArray[np.int64]]:
        """A seat for every owner of every query: those that have none get the next ones, with all their tickets.

        Once in a transaction, for all its queries: what it gives is written after the last reading, so that nothing is
        remembered that may yet be rolled back. Raises `Stale`.
        """
        wanted = list(dict.fromkeys(mark for query in asked for mark in query.new.values()))
        if not wanted:
            return [query.seats for query in asked]
        with self._lock:
            self._read(connection)
            has_new = not all(mark in self._of for mark in wanted)
        if has_new:
            self._hold(connection)
        with self._lock:
            count = self._read(connection)
            if any(query.new and query.changes != self._changes for query in asked):
                raise Stale
            fresh = [mark for mark in wanted if mark not in self._of]
            given = {mark: count + i for i, mark in enumerate(fresh)}
            if given:
                self._append(connection, count, fresh)
            return [self._seated(query, given) for query in asked]

    def _seated(self, query: Asked, given: Mapping[bytes, int]) -> NDArray[np.int64]:
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

    def _read(self, connection: Connection) -> int:
        """Learn what was written; how many seats there are. `LedgerError` where pages are lost."""
        row = self._book(connection)
        if row.seats < self._count or row.changes < self._changes:
            raise LedgerError(LOST)
        start = self._count if row.changes == self._changes else 0
        if row.seats > start or row.changes != self._changes:
            first = start // PAGE
            found = self._pages(connection, first)
            marks = b"".join(map(written, found))
            if len(found) != -(-row.seats // PAGE) - first or len(marks) != (row.seats - first * PAGE) * MARK:
                raise LedgerError(LOST)
            of = self._of if start else {}
            for seat in range(start, row.seats):
                at = (seat - first * PAGE) * MARK
                if (mark := marks[at : at + MARK]) != _NOBODY:
                    of[mark] = seat
            self._of, self._count, self._changes = of, row.seats, row.changes
        return self._count

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
        self._hold(connection)
        with self._lock:
            self._read(connection)
            seat = self._of.get(mark)
            if seat is not None:
                page, start = seat // PAGE, (seat % PAGE) * MARK
                marks = bytearray(self._page(connection, page))
                marks[start : start + MARK] = _NOBODY
                self._write(connection, page, bytes(marks))
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


def written(found: object) -> bytes:
    """A page as it was written. `LedgerError` for what is none."""
    if not isinstance(found, (bytes, bytearray, memoryview)):
        raise LedgerError(LOST)
    return bytes(found)


def _without(asked: Asked, gone: Sequence[int]) -> Asked:
    """Without the owners at these positions."""
    stays = np.ones(len(asked.owners), np.bool_)
    stays[list(gone)] = False
    place = np.cumsum(stays) - 1
    new = {int(place[position]): mark for position, mark in asked.new.items() if stays[position]}
    return Asked(asked.store, asked.owners[stays], asked.seats[stays], new, asked.changes)
