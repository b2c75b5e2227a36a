"""Usage: how many tickets each owner of a plan has used on one counter, by its position in the owner index.

A charge appends one usage row, the positions that use a ticket: a few bytes for each, however many owners there are.
Rows are numbered without a gap. Now and then a charge adds up all earlier rows into counts by position. One summary row
says what all of this must be, so a lost row is missed at once: the numbers have a gap, the counts are too short, or a
hash or the sum of all tickets is wrong. Then nothing is charged and nothing answered (`LedgerError`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from langchain_dpicl.budget.owner_index import EMPTY, LOST, EligibleOwners, OwnerIndex, stored_bytes
from langchain_dpicl.budget.schema import counters, hashed, usage, usage_counts, usage_digest, usage_rows
from langchain_dpicl.errors import LedgerError
from langchain_dpicl.store.base import Numbers

SUM_AFTER = 512
"""So many usage rows are added up at a time."""


class Usage:
    """The tickets that were used on one counter, as far as this process knows: committed rows alone.

    Every owner of ``index`` has ``tickets``, less what the counter has ``lost``.
    """

    def __init__(self, index: OwnerIndex, tickets: int, counter_id: int) -> None:
        self._index = index
        self._tickets = tickets
        self._counter_id = counter_id
        self._forget_all()

    def _forget_all(self) -> None:
        self.used: NDArray[np.int64] = np.zeros(0, np.int64)
        self._row_count = 0
        self._chain = ""

    def read(self, connection: Connection) -> Any:
        """Learn which tickets were used since; the summary row, or None if nothing was ever charged.

        `LedgerError` if rows are lost, or if they are not the ones that the summary was written with.
        """
        query = sa.select(usage).where(usage.c.counter_id == self._counter_id)
        row = connection.execute(query.with_for_update()).one_or_none()
        try:
            is_whole = self._row_count == 0 if row is None else self._learn(connection, row)
        except LedgerError:
            is_whole = False
        if not is_whole:
            self._forget_all()
            raise LedgerError(LOST)
        return row

    def _learn(self, connection: Connection, row: Any) -> bool:
        """Read the rows that this process does not know; whether they are those that the summary was written with."""
        digest = usage_digest(row.chain, row.row_count, row.tickets, row.spent, row.lost, row.owners)
        if row.digest != digest or row.row_count < self._row_count:
            return False
        if self._row_count < row.summed:
            found = sa.select(usage_counts.c.counts).where(usage_counts.c.counter_id == self._counter_id)
            counts = stored_bytes(connection.scalar(found))
            if hashed(counts) != row.sums:
                return False
            self.used, self._row_count, self._chain = _numbers(counts), row.summed, row.base
        if self._row_count < row.row_count:
            since = sa.and_(usage_rows.c.counter_id == self._counter_id, usage_rows.c.number > self._row_count)
            for each in connection.execute(sa.select(usage_rows).where(since).order_by(usage_rows.c.number)).all():
                if each.number != self._row_count + 1:
                    return False
                packed = stored_bytes(each.positions)
                positions = _numbers(packed)
                self.used = grown(self.used, int(positions.max(initial=-1)) + 1)
                self.used[positions] += each.units
                self._chain = _chained(self._chain, each.number, each.units, packed)
                self._row_count = each.number
        return (self._row_count, self._chain, int(self.used.sum())) == (row.row_count, row.chain, row.tickets)

    def use(
        self, connection: Connection, eligible: Sequence[EligibleOwners], units: int, spent: int
    ) -> tuple[list[Numbers], str, str]:
        """Within a charge's transaction: use ``units`` tickets of every eligible owner who has as many left.

        Owners who share a position (exemplars of equal content, each its own owner) are one owner: the first of them
        takes part. ``spent`` is the counter's number before this charge.

        Returns the owners who take part in each query, and the summary's digests before and after the charge. Raises
        `owner_index.OwnersChanged`.
        """
        lost = connection.scalar(sa.select(counters.c.lost).where(counters.c.id == self._counter_id)) or 0
        row = self.read(connection)
        if (spent, lost) != ((row.spent, row.lost) if row is not None else (lost, lost)):
            raise LedgerError(LOST)
        if row is not None and self._row_count - row.summed >= SUM_AFTER:
            self._sum(connection)
        size, marks = (0, EMPTY) if row is None else (row.owners, row.marks)
        found, size, marks = self._index.positions(connection, eligible, size, marks, first=row is None)
        used, number, chain, total = self.used, self._row_count, self._chain, int(self.used.sum())
        participants: list[Numbers] = []
        rows: list[dict[str, object]] = []
        for query, positions in zip(eligible, found, strict=True):
            distinct, first_of = np.unique(positions, return_index=True)
            used = grown(used, int(distinct.max(initial=-1)) + 1)
            pays = used[distinct] + units <= self._tickets - lost
            if len(eligible) > 1:  # the next query of this charge sees them used
                used = used.copy()
                used[distinct[pays]] += units
            total += units * int(pays.sum())
            number += 1
            packed = distinct[pays].astype("<u4").tobytes()
            chain = _chained(chain, number, units, packed)
            participants.append(np.sort(query.owners[first_of[pays]]))
            rows.append({"counter_id": self._counter_id, "number": number, "units": units, "positions": packed})
        connection.execute(sa.insert(usage_rows), rows)
        before = row.digest if row is not None else usage_digest(spent=spent, lost=lost)
        sums = {"row_count": number, "tickets": total, "spent": spent + units * len(rows), "lost": lost, "owners": size}
        values = {**sums, "chain": chain, "marks": marks, "before": before, "digest": usage_digest(chain, **sums)}
        write_summary(connection, self._counter_id, row is None, values)
        return participants, before, str(values["digest"])

    def _sum(self, connection: Connection) -> None:
        """Write the sums of all rows so far, in place of the rows."""
        counts = self.used.astype("<u4").tobytes()
        for table in (usage_counts, usage_rows):  # no row is beyond those that this process has just read
            connection.execute(sa.delete(table).where(table.c.counter_id == self._counter_id))
        connection.execute(sa.insert(usage_counts).values(counter_id=self._counter_id, counts=counts))
        values = {"summed": self._row_count, "base": self._chain, "sums": hashed(counts)}
        write_summary(connection, self._counter_id, False, values)


def write_summary(connection: Connection, counter_id: int, first: bool, values: Mapping[str, object]) -> None:
    """Write some columns of a counter's summary, or its ``first`` one."""
    if first:
        new = {"counter_id": counter_id, "summed": 0, "base": "", "sums": "", **values}
        connection.execute(sa.insert(usage).values(new))
    else:
        connection.execute(sa.update(usage).where(usage.c.counter_id == counter_id).values(values))


def is_whole(connection: Connection, counter_id: int, index: OwnerIndex) -> bool:
    """Whether all that a ledger says of a counter's tickets was written together: rows of one and the same copy."""
    query = sa.select(counters.c.spent, counters.c.lost).where(counters.c.id == counter_id)
    spent, lost = connection.execute(query).one()
    try:
        row = Usage(index, 0, counter_id).read(connection)
        if row is None:
            return bool(spent == lost)
        index.taken(connection, row.owners, row.marks)
    except LedgerError:
        return False
    return bool((spent, lost) == (row.spent, row.lost))


def begin_anew(connection: Connection, counter_id: int) -> None:
    """Remove all usage of a counter on which nobody has a ticket left."""
    query = sa.select(counters.c.spent, counters.c.lost).where(counters.c.id == counter_id)
    spent, lost = connection.execute(query).one()
    for table in (usage_rows, usage_counts, usage):
        connection.execute(sa.delete(table).where(table.c.counter_id == counter_id))
    digest = usage_digest(spent=spent, lost=lost)
    values = {"row_count": 0, "tickets": 0, "spent": spent, "lost": lost, "owners": 0, "chain": "", "marks": EMPTY}
    write_summary(connection, counter_id, True, {**values, "before": digest, "digest": digest})


def _chained(chain: str, number: int, units: int, positions: bytes) -> str:
    return hashed(chain.encode(), str(number).encode(), str(units).encode(), positions)


def _numbers(packed: bytes) -> NDArray[np.int64]:
    if len(packed) % 4:
        raise LedgerError(LOST)
    return np.frombuffer(packed, "<u4").astype(np.int64)


def grown(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return counts if len(counts) >= size else np.concatenate([counts, np.zeros(size - len(counts), np.int64)])
