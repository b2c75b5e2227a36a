"""The owner index: the position of each owner in a plan whose owners pay with tickets.

An owner gets the next position at the first query that it is eligible for, and keeps it until it is forgotten. The
ledger holds a mark at each position, the owner's keyed hash (`ExemplarStore.marks`). Zeros replace the mark of a
forgotten owner, and no position is given again. A process remembers only what it has read from committed rows.

**Forgetting** is two transactions here around the store's own (`OwnerIndex.leave`). The first puts zeros for the mark
and appends its hold, the mark's complement: while the index has it, nobody gets a position by this mark. Then the store
commits. The last puts zeros for the hold. So an owner who is still in the store gets no second position, and one who
comes again none before the ledger has let go of the first: one position for each life, in whatever order processes see
the commits. A lookup that saw the owner before the store's commit is made again, since both transactions count a
change. A hold's position is its forgetting's own: if the owner is forgotten again meanwhile, the hold moves, and the
last transaction of the first finds nothing. If a process dies in between, the hold stays, and the owner gets no tickets
until it is forgotten once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from langchain_dpicl.budget.schema import ADVICE, counters, owner_index, owner_marks, usage
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.errors import LedgerError
from langchain_dpicl.sql import OwnLock
from langchain_dpicl.store.base import MARK, MarkOf, Numbers, PrivateStore

UNKNOWN = -1
LOST = f"the ledger's tables of tickets have lost rows: nothing was charged; {ADVICE}"
_NOBODY = bytes(MARK)
_COMPLEMENT = bytes(range(255, -1, -1))


class KeyMissing(LedgerError):
    """The key of a plan's owners is not at hand, so an owner who is forgotten cannot be found in it."""

    def __init__(self, plan: str) -> None:
        super().__init__(
            f"the budget {plan!r} knows its owners by a key that is not at hand, so the owner's mark stays in its "
            "ledger: put the key file (or the notes beside the data) back, and run `dpicl forget` for this owner"
        )


class OwnersChanged(Exception):
    """An owner was forgotten after a query's owners were looked up: look them up again."""


@dataclass(frozen=True)
class EligibleOwners:
    """The owners who are eligible for one query. Private: ``repr`` shows nothing.

    ``owners`` are their numbers in the store, ``positions`` those in the index. ``new`` holds the marks of owners whose
    position this process does not know, by their place in ``owners``. ``changes`` and ``epoch`` are the index's state
    at that time.
    """

    store: PrivateStore = field(repr=False)
    owners: Numbers = field(repr=False)
    positions: NDArray[np.int64] = field(repr=False)
    new: Mapping[int, bytes] = field(repr=False)
    changes: int = field(default=0, repr=False)
    epoch: int = field(default=0, repr=False)


class OwnerIndex:
    """The owner index of one plan, as far as this process knows it."""

    def __init__(self, ledger: StoredLedger, plan_id: int) -> None:
        self._ledger = ledger
        self._plan_id = plan_id
        self._here = owner_index.c.plan_id == plan_id
        self._pieces = owner_marks.c.plan_id == plan_id
        self._keys: WeakKeyDictionary[PrivateStore, bytes] = WeakKeyDictionary()
        self._epoch = 0  # how often everything was forgotten
        # Held for a moment, also within a transaction; never while waiting for a store or for a database's lock.
        self._lock = OwnLock()
        self._forget_all()

    def _forget_all(self) -> None:
        self._epoch += 1
        self._changes = 0
        self._by_number: WeakKeyDictionary[PrivateStore, NDArray[np.int64]] = WeakKeyDictionary()
        self._reset()

    def _reset(self) -> None:
        """Read everything again next time. The positions of a store's owners stay: some were forgotten elsewhere."""
        self._marks = b""
        self._hashes: dict[int, str] = {}  # of so many first marks
        self._position_of: dict[bytes, int] = {}

    # -- before a charge ----------------------------------------------------------------------------------------------

    def find(self, store: PrivateStore, owners: Numbers) -> EligibleOwners:
        """Look up a query's eligible owners. Private."""
        with self._lock:
            epoch = self._epoch
            positions = self._numbered(store, int(owners.max(initial=-1)) + 1)[owners]
        unknown = np.flatnonzero(positions == UNKNOWN)
        if not len(unknown):
            return EligibleOwners(store, owners, positions, {}, epoch=epoch)
        changes = self._ledger.run(self._header, "read").changes  # first: a later forgetting is then noticed
        key = self.key_for(store)
        with store.reading() as view:
            marks = view.marks(owners[unknown], key)
        stays = np.ones(len(owners), np.bool_)
        stays[unknown] = [bool(mark) for mark in marks]  # the others were forgotten just now
        place = np.cumsum(stays) - 1
        new = {int(place[at]): mark for at, mark in zip(unknown, marks, strict=True) if mark}
        return EligibleOwners(store, owners[stays], positions[stays], new, changes, epoch)

    def key_for(self, store: PrivateStore) -> bytes:
        """The key of this store's owners in this plan. `LedgerError` if it is not at hand, and nothing is charged."""
        if (known := self._keys.get(store)) is not None:
            return known
        found = self._ledger.owner_key(self._plan_id, store.mark_keys(make=True), make=True)
        if found is None:
            raise LedgerError(
                "the owners of this plan are known by another key than this store's, and the key file "
                f"{str(self._ledger.key_file.path or '')!r} does not hold it either: nothing was charged; use "
                "the store that the plan was made with (or its data file, with the .dpicl beside it), or put its key "
                "file back"
            )
        self._keys[store] = found
        return found

    def _numbered(self, store: PrivateStore, count: int) -> NDArray[np.int64]:
        """The positions by the owners' numbers in a store, for numbers below ``count`` at least."""
        known = self._by_number.get(store, np.empty(0, np.int64))
        if len(known) < count or store not in self._by_number:
            size = max(count, 2 * len(known))
            known = np.concatenate([known, np.full(size - len(known), UNKNOWN, np.int64)])
            self._by_number[store] = known
        return known

    # -- within a charge's transaction --------------------------------------------------------------------------------

    def positions(
        self,
        connection: Connection,
        eligible: Sequence[EligibleOwners],
        size: int,
        marks: str,
        *,
        first: bool,
    ) -> tuple[list[NDArray[np.int64]], int, str]:
        """The positions of every query's owners; an owner without one gets the next, with all its tickets.

        While an owner is being forgotten it gets none, `UNKNOWN`.

        Once in a transaction, for all its queries: new positions are written after the last reading, so the process
        remembers none that may yet be rolled back.

        Parameters
        ----------
        size, marks
            The index as the counter's usage row describes it: so many entries, and the hash of their marks.
            `LedgerError` if the index is another one now.
        first
            The counter has no usage row yet: let nobody else change the index until the transaction ends.

        Returns the positions, and the new size and hash. Raises `OwnersChanged`.
        """
        wanted = list(dict.fromkeys(mark for query in eligible for mark in query.new.values()))
        if wanted or first:
            self._hold(connection)
        with self._lock:
            # What this process knows beyond the counter's entries may have been overwritten meanwhile.
            if wanted or first or size * MARK < len(self._marks) or self._hash_of_first(size) != marks:
                self._read(connection, size, marks)
            if any(q.epoch != self._epoch or (q.new and q.changes != self._changes) for q in eligible):
                raise OwnersChanged
            known = len(self._marks) // MARK
            fresh = [mark for mark in wanted if self._position_of.keys().isdisjoint((mark, _hold_of(mark)))]
            given = {mark: known + i for i, mark in enumerate(fresh)}
            added = b"".join(fresh)
            if fresh:
                connection.execute(sa.insert(owner_marks).values(plan_id=self._plan_id, start=known, marks=added))
                connection.execute(sa.update(owner_index).where(self._here).values(size=known + len(fresh)))
            after = _hash(self._marks + added) if fresh else str(self._hash_of_first(known))
            found = []
            for query in eligible:
                positions = query.positions.copy()
                by_number = self._numbered(query.store, 0)
                for place, mark in query.new.items():
                    positions[place] = self._position_of.get(mark, given.get(mark, UNKNOWN))
                    if mark in self._position_of:
                        by_number[query.owners[place]] = positions[place]
                found.append(positions)
        return found, known + len(fresh), after

    def _hold(self, connection: Connection) -> None:
        """Let no other transaction change the index until this one ends. Waits, so the lock must be free."""
        connection.execute(sa.select(owner_index.c.size).where(self._here).with_for_update())

    def _header(self, connection: Connection) -> Any:
        """The numbers of entries (``size``) and of owners who were forgotten (``changes``)."""
        row = connection.execute(sa.select(owner_index.c.size, owner_index.c.changes).where(self._here)).one_or_none()
        if row is None:
            raise LedgerError(LOST)
        return row

    def _hash_of_first(self, size: int) -> str | None:
        """The hash of the first marks; None if this process knows fewer."""
        if size * MARK > len(self._marks):
            return None
        if size not in self._hashes:
            self._hashes[size] = _hash(self._marks[: size * MARK])
        return self._hashes[size]

    def _read(self, connection: Connection, size: int = 0, marks: str | None = None) -> None:
        """Learn what was written. Call it with the lock held.

        `LedgerError` if rows are lost, or if the first ``size`` marks have another hash than ``marks``.
        """
        header = self._header(connection)
        before = self._marks
        if header.changes == self._changes and self._learn(connection, header, size, marks):
            return
        is_older = header.size * MARK < len(before) or header.changes < self._changes
        self._reset()  # owners were forgotten, or it knew a copy that is gone
        if is_older or not self._learn(connection, header, size, marks):
            self._forget_all()
            raise LedgerError(LOST)
        old = np.frombuffer(before, np.uint8).reshape(-1, MARK)
        new = np.frombuffer(self._marks, np.uint8)[: len(before)].reshape(-1, MARK)
        if new[(old != new).any(axis=1)].any():  # owners have other positions than this process knows
            self._by_number.clear()
            self._epoch += 1

    def _learn(self, connection: Connection, header: Any, size: int, marks: str | None) -> bool:
        """Read the marks behind those that this process knows. True if all are there, each once."""
        known = len(self._marks) // MARK
        self._changes = header.changes
        if header.size > known:
            pieces = [self._marks]
            query = (
                sa.select(owner_marks.c.start, owner_marks.c.marks)
                .where(self._pieces, owner_marks.c.start >= known)
                .order_by(owner_marks.c.start)
            )
            for start, found in connection.execute(query).all():
                piece = stored_bytes(found)
                if start != known or not piece or len(piece) % MARK:
                    return False
                for at in range(0, len(piece), MARK):
                    mark = piece[at : at + MARK]
                    if mark != _NOBODY and self._position_of.setdefault(mark, known) != known:
                        return False
                    known += 1
                pieces.append(piece)
            self._marks = b"".join(pieces)
            self._hashes.clear()
        return known == header.size and (marks is None or self._hash_of_first(size) == marks)

    # -- forgetting, and looking --------------------------------------------------------------------------------------

    def leave(self, mark: bytes) -> Callable[[], object]:
        """Overwrite an owner's mark, for good, and hold it back, before a store lets the owner go.

        Call the answer when no store holds the owner any more. Every process reads the index again when it next meets
        an owner whom it does not know.
        """
        hold = _hold_of(mark)
        place = self._ledger.run(partial(self._replace, marks=(mark, hold), new=hold))
        return partial(self._ledger.run, partial(self._replace, marks=(hold,), at=place))

    def _replace(
        self,
        connection: Connection,
        marks: tuple[bytes, ...],
        new: bytes = b"",
        at: int | None = None,
    ) -> int:
        """Overwrite these marks, as far as they are there (``at`` this position), and append a new one: its position.

        Counts a change.
        """
        rows = (
            sa.select(usage.c.counter_id, usage.c.owners, usage.c.marks)
            .where(usage.c.counter_id.in_(sa.select(counters.c.id).where(counters.c.plan_id == self._plan_id)))
            .order_by(usage.c.counter_id)
            .with_for_update()
        )
        connection.execute(rows).all()  # first, as a charge does; again below, for counters that came meanwhile
        self._hold(connection)
        with self._lock:
            self._read(connection)
            places = [self._position_of[mark] for mark in marks if mark in self._position_of]
            old = self._marks
            size = len(old) // MARK
            for position in [place for place in places if at in (None, place)]:
                self._reset()
                self._read(connection)
                if self._marks != old:
                    self._forget_all()
                    raise LedgerError(LOST)
                self._overwrite(connection, rows, old, position)
        if new:
            connection.execute(sa.insert(owner_marks).values(plan_id=self._plan_id, start=size, marks=new))
        connection.execute(
            sa.update(owner_index)
            .where(self._here)
            .values(changes=owner_index.c.changes + 1, size=size + len(new) // MARK)
        )
        return size

    def _overwrite(
        self,
        connection: Connection,
        rows: sa.Select[Any],
        old: bytes,
        position: int,
    ) -> None:
        """Put zeros at a position of the ``old`` marks, and write the counters' hashes (``rows``) anew."""
        new = old[: position * MARK] + _NOBODY + old[(position + 1) * MARK :]
        start = owner_marks.c.start
        last = sa.select(sa.func.max(start)).where(self._pieces, start <= position).scalar_subquery()
        row = connection.execute(sa.select(start, owner_marks.c.marks).where(self._pieces, start == last)).one()
        piece = new[row.start * MARK :][: len(row.marks)]
        connection.execute(sa.update(owner_marks).where(self._pieces, start == row.start).values(marks=piece))
        for counter_id, owners, marks in connection.execute(rows).all():
            if owners > position and _hash(old[: owners * MARK]) == marks:  # else it was wrong before
                connection.execute(
                    sa.update(usage).where(usage.c.counter_id == counter_id).values(marks=_hash(new[: owners * MARK]))
                )

    def mend(self, connection: Connection) -> None:
        """Empty an index that cannot be read: for `upkeep.recover`, which then takes away all tickets."""
        try:
            self.taken(connection)
        except LedgerError:
            connection.execute(sa.delete(owner_marks).where(self._pieces))
            connection.execute(sa.delete(owner_index).where(self._here))
            connection.execute(sa.insert(owner_index).values(plan_id=self._plan_id, size=0))

    def taken(
        self,
        connection: Connection,
        size: int = 0,
        marks: str | None = None,
    ) -> NDArray[np.int64]:
        """The positions of owners who are not forgotten. `LedgerError` if the first marks are others. Private."""
        with self._lock:
            self._read(connection, size, marks)
            return np.sort(np.fromiter(self._position_of.values(), np.int64, len(self._position_of)))


def leaving(
    ledger: StoredLedger,
    index: OwnerIndex,
    plan_id: int,
    keys: Sequence[bytes],
    mark_of: MarkOf,
) -> Callable[[], object] | None:
    """Let an owner leave a plan: `OwnerIndex.leave` of its mark. None if the plan's key is not at hand."""
    key = ledger.owner_key(plan_id, keys)
    if key is not None:
        return index.leave(mark_of(key))
    return None if ledger.has_key(plan_id) else lambda: None


def _hold_of(mark: bytes) -> bytes:
    """The complement of a mark, which is in its place while its owner is being forgotten."""
    return mark.translate(_COMPLEMENT)


def _hash(marks: bytes) -> str:
    return hashlib.blake2b(marks, digest_size=16).hexdigest()


EMPTY = _hash(b"")  # of no marks


def stored_bytes(found: object) -> bytes:
    """Bytes as they were written. `LedgerError` for anything else."""
    if not isinstance(found, (bytes, bytearray, memoryview)):
        raise LedgerError(LOST)
    return bytes(found)
