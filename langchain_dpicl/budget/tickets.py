"""Tickets: each owner pays for the queries that it is eligible for, and the number of queries has no end.

A ticket is one participation of one owner.

A plan of T releases, whose owners pay with tickets, gives every owner T of them. At each query (of one line, at the
plan's rate q and noise) a public threshold decides from an owner's own exemplars and the query whether it is eligible.
Before any member is called, one ticket of every eligible owner who has one left is used, in the transaction of the
charge. Of these owners, and of nobody else, each flips a coin of rate q and falls into a member's bucket.

THEOREM. Let one release with rate q be dominated by the pair (P, Q) when an owner who flips a coin in it is added or
removed: whatever the others are, its profile is at most that of (P, Q). (That is what a plan accounts for.) Then for
every store, every owner o, and every adversary who chooses each query from all answers so far and never stops, all
answers together with and without o are dominated by the T-fold composition of (P, Q). For lines with T_1, ..., T_m
tickets and pairs (P_j, Q_j) it is the composition of T_j times (P_j, Q_j) over all j: the plan's (epsilon, delta).

PROOF. Run the same adversary on the store with o and on the store without. Its state after some queries is the
transcript: the queries and their answers.

1. Given a transcript, every ticket is determined. An owner's eligibility at each of its queries is a function of the
   owner's own exemplars and of that query, and so is the number of tickets that it has used, which is the number of
   those queries, at most T. No coin, no answer beyond the transcript and no other owner enters (this is why a ticket is
   used whether the coin says yes or no, and why an approximate index or a top-k may not decide). So in both worlds
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
   t for each line, and a product that does not depend on the order of its factors. A line of bounded ranges may have
   the pair of its T releases in place of the T-fold composition: `privacy.adaptive` does this induction for it.
5. No n entered the bound, so it holds for runs of any length: an event of an endless run is a limit of events of its
   beginnings.                                                                                                     QED

Tokens. On a line of tokens a step of the proof is one token, at which every owner who paid for the answer flips a coin.
An answer uses ``max_tokens`` tickets of every eligible owner who has as many left, and of no other: nobody has a part
in its first tokens alone. Its length decides how many steps ran, and it is in the transcript; the tickets of the others
are given back to every owner who paid, sampled or not, so that each has used one ticket for each step that ran, as step
1 of the proof says. (If they came back only to those whom no coin chose, an owner's tickets would depend on its coins.)
They are given back with the next charge of the process that made the answer, and in memory until then: if it ends
before, or closes the budget, they stay used. So do those of an answer that failed, or whose reader left.

What follows. Answers in parallel are one run: each uses its tickets in a transaction before its members are called,
transactions have an order, and an answer is one step, whose query was chosen before it. A crash gives no ticket back.
Owners that come later have all their tickets. An owner's life in the store is protected: an owner who is forgotten, and
with it its row, and comes again is a new owner, and two lives have 2 T together. While it is being forgotten it has no
second position (`owner_index`). If each exemplar is its own owner, exemplars of equal content are one owner
(`store.base`): one row, one coin, forgotten with the last of them. Forget in every process that has a copy of the
store. A line's tickets are its own. Under ``per_principal`` each principal has a set of them, and colluding principals
see the sum.

Nobody may see which owners are eligible, how many are, which have tickets left, or how many were used. A caller learns
that a charge took place, as everywhere. The ledger's rows say which owner was near to which query, by keyed hashes;
the key stands elsewhere (`owner_keys`). Keep both from callers. `Usage` describes these rows. Hashes bind the usage,
the owner index and the counter to each other and to the witness (`witness`, BINDING): rows that are older or newer than
the others are refused like lost ones.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from langchain_dpicl.budget.owner_index import (
    EMPTY,
    LOST,
    UNKNOWN,
    EligibleOwners,
    OwnerIndex,
    OwnersChanged,
    stored_bytes,
)
from langchain_dpicl.budget.schema import Charge, counters, hashed, usage, usage_counts, usage_digest, usage_rows
from langchain_dpicl.budget.terms import WARNING, LineTickets
from langchain_dpicl.errors import LedgerError, UnsafeConfigurationError
from langchain_dpicl.sql import TryAgain
from langchain_dpicl.store.base import Numbers


class Participants:
    """The owners who may flip a coin in a release. Private: it shows nothing, and gives them once.

    So it does with ``positions``, their places in the owner index, for what is given back.
    """

    __slots__ = ("_owners", "_positions")

    def __init__(self, owners: Numbers, positions: Numbers) -> None:
        self._owners: Numbers | None = owners
        self._positions: Numbers | None = positions

    def take(self) -> Numbers:
        """The owners' numbers. They are not kept."""
        owners = self._owners
        self._owners = None
        if owners is None:
            raise UnsafeConfigurationError("the owners of a release were taken already")
        return owners

    def take_positions(self) -> Numbers | None:
        """The owners' positions, the first time; None from then on."""
        positions = self._positions
        self._positions = None
        return positions

    def __repr__(self) -> str:
        return "<owners who pay for a release>"

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("owners who pay for a release are not pickled or copied")


class TicketUsage:
    """The tickets of one line: every owner has ``tickets``, and so for each principal if each has a counter."""

    def __init__(self, index: OwnerIndex, tickets: int) -> None:
        self.index = index
        self.tickets = tickets
        self.lock = threading.Lock()
        self._of_counter: dict[int, Usage] = {}

    def of(self, counter_id: int) -> Usage:
        """The usage of one counter, as far as this process knows it. Use it with the lock held."""
        return self._of_counter.setdefault(counter_id, Usage(self.index, self.tickets, counter_id))

    def give_back(self, charge: Charge, units: int) -> None:
        """Give ``units`` of a charge back, once, to all who paid it, at this process's next charge: see "Tokens"."""
        if not units or charge.participants is None:
            return
        positions = charge.participants.take_positions()
        if positions is not None:
            with self.lock:
                self.of(charge.counter_id).unused.append(Unused(positions, units, charge.number))

    def close(self) -> None:
        """Give nothing back any more: what is opened next in the ledger's place may be a copy without the charges."""
        with self.lock:
            self._of_counter.clear()

    def report(self, connection: Connection, counter_id: int) -> LineTickets:
        """The numbers of owners by their used tickets of a counter. PRIVATE."""
        with self.lock:
            usage = self.of(counter_id)
            usage.read(connection)
            used = usage.sums.at(self.index.taken(connection))
        numbers, owners = np.unique(used, return_counts=True)
        without = int((used >= self.tickets).sum())
        return {
            "private": WARNING,
            "tickets": self.tickets,
            "owners": len(used),
            "without": without,
            "burnt": {str(number): int(many) for number, many in zip(numbers, owners, strict=True)},
            "share_with_tickets": 1.0 - without / len(used) if len(used) else None,
        }


class TicketRule:
    """A `ChargeRule`, the tickets of one charge: every eligible owner of each query pays one for each unit."""

    def __init__(self, usage: TicketUsage, eligible: Sequence[EligibleOwners | None]) -> None:
        self._usage = usage
        self._eligible = eligible

    def __call__(
        self,
        connection: Connection,
        charges: Sequence[Charge],
        places: Sequence[int],
    ) -> tuple[list[Charge], str, str]:
        """Use the tickets, and say in each charge who takes part."""
        eligible = [each for place in places if (each := self._eligible[place]) is not None]
        if len(eligible) < len(places):  # it was answered when we looked, and is not any more
            raise LedgerError("an answer that could be replayed is gone from the ledger: nothing was charged")
        first = charges[0]
        try:
            with self._usage.lock:
                usage = self._usage.of(first.counter_id)
                paid, before, after = usage.use(connection, eligible, first.units, first.number - first.units)
        except OwnersChanged:
            raise TryAgain("its owners are forgotten, again and again", self._find_again) from None
        completed = [
            replace(charge, participants=Participants(*owners)) for charge, owners in zip(charges, paid, strict=True)
        ]
        return completed, before, after

    def _find_again(self) -> None:
        self._eligible = [each and self._usage.index.find(each.store, each.owners) for each in self._eligible]


@dataclass(eq=False)
class Unused:
    """Tickets to give back: so many ``units`` at each of these positions, of this ``charge``. Private.

    ``row`` is the usage row of the latest transaction that tried to (number, units, content). If a reader finds it
    there, or summed with others, it is done. The content begins with the charge's number, which makes it unique:
    another process's equal row, in the place of one that was rolled back, would be taken for it or not as other owners
    are eligible or not.
    """

    positions: Numbers
    units: int
    charge: int
    row: tuple[int, int, bytes] = (0, 0, b"")


SUM_AFTER = 512  # so many usage rows are added up at a time
CHARGE = 8  # so many bytes of a row that gives back are the number of its charge; the positions follow


@dataclass(eq=False)
class UsageSums:
    """The first ``number`` usage rows of a counter, added up: the used tickets by position, and the chained hash."""

    used: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    number: int = 0
    chain: str = ""

    @property
    def tickets(self) -> int:
        """The used tickets of all positions."""
        return int(self.used.sum())

    def at(self, positions: Numbers) -> NDArray[np.int64]:
        """The used tickets at each of these positions."""
        return _grown(self.used, positions)[positions]

    def add(self, units: int, packed: bytes) -> None:
        """Add the next row."""
        positions = _numbers(packed[CHARGE:] if units < 0 else packed)
        self.used = _grown(self.used, positions)
        self.used[positions] += units
        self.number += 1
        self.chain = hashed(self.chain.encode(), str(self.number).encode(), str(units).encode(), packed)


class Usage:
    """The tickets that each owner used on one counter, by its position in the owner index. Committed rows alone.

    A charge appends one usage row, the positions that use a ticket: a few bytes for each, however many owners there
    are. Rows are numbered without a gap. Now and then a charge adds up all earlier rows into counts by position. One
    summary row says what all of this must be, so a lost row is missed at once: the numbers have a gap, the counts are
    too short, or a hash or the sum of all tickets is wrong. Then nothing is charged and nothing answered
    (`LedgerError`). Every owner of ``index`` has ``tickets``, less what the counter has ``lost``.
    """

    def __init__(self, index: OwnerIndex, tickets: int, counter_id: int) -> None:
        self._index = index
        self._tickets = tickets
        self._counter_id = counter_id
        self._forget_all()

    def _forget_all(self) -> None:
        self.sums = UsageSums()
        self.unused: list[Unused] = []  # this process gives them back with its next charge

    def read(self, connection: Connection) -> Any:
        """Learn which tickets were used since; the summary row, or None if nothing was ever charged.

        `LedgerError` if rows are lost, or if they are not the ones that the summary was written with.
        """
        query = sa.select(usage).where(usage.c.counter_id == self._counter_id).with_for_update()
        row = connection.execute(query).one_or_none()
        try:
            if not self._learn(connection, row):
                raise LedgerError(LOST)
        except LedgerError:
            self._forget_all()
            raise
        return row

    def _learn(self, connection: Connection, row: Any) -> bool:
        """Read the rows that this process does not know. True if the summary was written with just these rows."""
        if row is None:
            return self.sums.number == 0
        digest = usage_digest(row.chain, row.row_count, row.tickets, row.spent, row.lost, row.owners)
        if row.digest != digest or row.row_count < self.sums.number:
            return False
        if self.sums.number < row.summed:
            counts = stored_bytes(
                connection.scalar(
                    sa.select(usage_counts.c.counts).where(usage_counts.c.counter_id == self._counter_id),
                )
            )
            if hashed(counts) != row.sums:
                return False
            self.sums = UsageSums(_numbers(counts), row.summed, row.base)
            self.unused = [back for back in self.unused if not 0 < back.row[0] <= row.summed]
        if self.sums.number < row.row_count:
            query = (
                sa.select(usage_rows)
                .where(usage_rows.c.counter_id == self._counter_id, usage_rows.c.number > self.sums.number)
                .order_by(usage_rows.c.number)
            )
            for each in connection.execute(query).all():
                if each.number != self.sums.number + 1:
                    return False
                packed = stored_bytes(each.positions)
                self.sums.add(each.units, packed)
                self.unused = [back for back in self.unused if back.row != (each.number, each.units, packed)]
        return (self.sums.number, self.sums.chain, self.sums.tickets) == (row.row_count, row.chain, row.tickets)

    def use(
        self,
        connection: Connection,
        eligible: Sequence[EligibleOwners],
        units: int,
        spent: int,
    ) -> tuple[list[tuple[Numbers, Numbers]], str, str]:
        """Within a charge's transaction: give back the `unused`, and use ``units`` tickets of every eligible owner.

        An owner who has fewer left is left out. Owners who share a position (exemplars of equal content, each its own
        owner) are one owner: the first of them takes part. ``spent`` is the counter's number before this charge.

        Returns the owners who take part in each query, with their positions, and the summary's digests before and
        after the charge. Raises `OwnersChanged`.
        """
        lost = connection.scalar(sa.select(counters.c.lost).where(counters.c.id == self._counter_id)) or 0
        row = self.read(connection)
        last = row or SimpleNamespace(**_first_summary(lost, lost))
        if (spent, lost) != (last.spent, last.lost):
            raise LedgerError(LOST)
        if self.sums.number - last.summed >= SUM_AFTER:
            self._sum(connection)
        found, size, marks = self._index.positions(connection, eligible, last.owners, last.marks, first=row is None)
        sums = replace(self.sums, used=self.sums.used.copy())
        rows: list[dict[str, object]] = []

        def append(units: int, packed: bytes) -> tuple[int, int, bytes]:
            sums.add(units, packed)
            rows.append(
                {
                    "counter_id": self._counter_id,
                    "number": sums.number,
                    "units": units,
                    "positions": packed,
                }
            )
            return sums.number, units, packed

        for back in self.unused if row is not None else ():
            # An owner with fewer used tickets did not pay on this copy of the ledger, which says "lost".
            paid = back.positions[sums.at(back.positions) >= back.units]
            back.row = append(-back.units, back.charge.to_bytes(CHARGE, "little") + _packed(paid))
        participants: list[tuple[Numbers, Numbers]] = []
        for query, positions in zip(eligible, found, strict=True):
            known = np.flatnonzero(positions != UNKNOWN)  # the others are being forgotten
            distinct, first_of = np.unique(positions[known], return_index=True)
            pays = sums.at(distinct) + units <= self._tickets - lost
            append(units, _packed(distinct[pays]))
            participants.append((np.sort(query.owners[known[first_of[pays]]]), distinct[pays]))
        connection.execute(sa.insert(usage_rows), rows)
        numbers = {
            "row_count": sums.number,
            "tickets": sums.tickets,
            "spent": spent + units * len(found),
            "lost": lost,
            "owners": size,
        }
        digest = usage_digest(sums.chain, **numbers)
        values = {
            **numbers,
            "chain": sums.chain,
            "marks": marks,
            "before": last.digest,
            "digest": digest,
        }
        write_summary(connection, self._counter_id, row is None, values)
        return participants, last.digest, digest

    def _sum(self, connection: Connection) -> None:
        """Write the sums of all rows so far, in place of the rows."""
        counts = _packed(self.sums.used)
        for table in (usage_counts, usage_rows):  # no row is beyond those that this process has just read
            connection.execute(sa.delete(table).where(table.c.counter_id == self._counter_id))
        connection.execute(sa.insert(usage_counts).values(counter_id=self._counter_id, counts=counts))
        write_summary(
            connection,
            self._counter_id,
            False,
            {"summed": self.sums.number, "base": self.sums.chain, "sums": hashed(counts)},
        )


def _first_summary(spent: int, lost: int) -> dict[str, object]:
    """The summary of a counter on which nobody has used a ticket."""
    digest = usage_digest(spent=spent, lost=lost)
    return {
        "row_count": 0,
        "summed": 0,
        "tickets": 0,
        "spent": spent,
        "lost": lost,
        "owners": 0,
        "chain": "",
        "base": "",
        "sums": "",
        "marks": EMPTY,
        "before": digest,
        "digest": digest,
    }


def write_summary(
    connection: Connection,
    counter_id: int,
    first: bool,
    values: Mapping[str, object],
) -> None:
    """Write some columns of a counter's summary, or its ``first`` one."""
    if first:
        connection.execute(sa.insert(usage).values({**_first_summary(0, 0), **values, "counter_id": counter_id}))
    else:
        connection.execute(sa.update(usage).where(usage.c.counter_id == counter_id).values(values))


def is_whole(connection: Connection, counter_id: int, index: OwnerIndex) -> bool:
    """True if a counter's tickets in the ledger were all written together: rows of one and the same copy."""
    spent, lost = _spent_and_lost(connection, counter_id)
    try:
        row = Usage(index, 0, counter_id).read(connection)
        if row is None:
            return spent == lost
        index.taken(connection, row.owners, row.marks)
    except LedgerError:
        return False
    return (spent, lost) == (row.spent, row.lost)


def begin_anew(connection: Connection, counter_id: int) -> None:
    """Remove all usage of a counter on which nobody has a ticket left."""
    first = _first_summary(*_spent_and_lost(connection, counter_id))
    for table in (usage_rows, usage_counts, usage):
        connection.execute(sa.delete(table).where(table.c.counter_id == counter_id))
    write_summary(connection, counter_id, True, first)


def _spent_and_lost(connection: Connection, counter_id: int) -> tuple[int, int]:
    row = connection.execute(sa.select(counters.c.spent, counters.c.lost).where(counters.c.id == counter_id)).one()
    return row.spent, row.lost


def _packed(numbers: Numbers) -> bytes:
    return numbers.astype("<u4").tobytes()


def _numbers(packed: bytes) -> NDArray[np.int64]:
    if len(packed) % 4:
        raise LedgerError(LOST)
    return np.frombuffer(packed, "<u4").astype(np.int64)


def _grown(counts: NDArray[np.int64], positions: Numbers) -> NDArray[np.int64]:
    """The counts, with zeros after them if these positions lie beyond."""
    missing = int(positions.max(initial=-1)) + 1 - len(counts)
    return counts if missing <= 0 else np.concatenate([counts, np.zeros(missing, np.int64)])
