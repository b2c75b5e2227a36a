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
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from langchain_dpicl.budget.database import TryAgain
from langchain_dpicl.budget.owner_index import EMPTY, LOST, EligibleOwners, OwnerIndex, OwnersChanged, stored_bytes
from langchain_dpicl.budget.schema import Charge, counters, hashed, usage, usage_counts, usage_digest, usage_rows
from langchain_dpicl.budget.terms import WARNING, LineTickets
from langchain_dpicl.errors import LedgerError, UnsafeConfigurationError
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
        owners, self._owners = self._owners, None
        if owners is None:
            raise UnsafeConfigurationError("the owners of a release were taken already")
        return owners

    def take_positions(self) -> Numbers | None:
        """The owners' positions, the first time; None from then on."""
        positions, self._positions = self._positions, None
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
        """What this process knows of one counter. Use it with the lock held."""
        return self._of_counter.setdefault(counter_id, Usage(self.index, self.tickets, counter_id))

    def give_back(self, charge: Charge, units: int) -> None:
        """Give ``units`` of a charge back, once, to all who paid it, at this process's next charge: see "Tokens"."""
        positions = charge.participants.take_positions() if units and charge.participants is not None else None
        if positions is not None:
            with self.lock:
                self.of(charge.counter_id).unused.append(Unused(positions, units, charge.number))

    def close(self) -> None:
        """Give nothing back any more: what is opened next in the ledger's place may be a copy without the charges."""
        with self.lock:
            self._of_counter.clear()

    def report(self, connection: Connection, counter_id: int) -> LineTickets:
        """How many owners have used how many tickets of a counter. PRIVATE."""
        with self.lock:
            usage = self.of(counter_id)
            usage.read(connection)
            positions = self.index.taken(connection)
            used = grown(usage.used, int(positions.max(initial=-1)) + 1)[positions]
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
        self._usage, self._eligible = usage, eligible

    def __call__(
        self, connection: Connection, charges: Sequence[Charge], places: Sequence[int]
    ) -> tuple[list[Charge], str, str]:
        """Use the tickets, and say in each charge who takes part."""
        eligible = [each for place in places if (each := self._eligible[place]) is not None]
        if len(eligible) < len(places):  # it was answered when we looked, and is not any more
            raise LedgerError("an answer that could be replayed is gone from the ledger: nothing was charged")
        usage, counter, units = self._usage, charges[0].counter_id, charges[0].units
        spent = charges[0].number - units
        try:
            with usage.lock:
                paid, before, after = usage.of(counter).use(connection, eligible, units, spent)
        except OwnersChanged:
            raise TryAgain("its owners are forgotten, again and again", self._find_again) from None
        pairs = zip(charges, paid, strict=True)
        return [replace(charge, participants=Participants(*who)) for charge, who in pairs], before, after

    def _find_again(self) -> None:
        index = self._usage.index
        self._eligible = [None if each is None else index.find(each.store, each.owners) for each in self._eligible]


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

    @property
    def number(self) -> int:
        """Of its row; 0 before the first try."""
        return self.row[0]


SUM_AFTER = 512
"""So many usage rows are added up at a time."""

CHARGE = 8
"""So many bytes of a row that gives back are the number of its charge; the positions follow."""


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
        self.used: NDArray[np.int64] = np.zeros(0, np.int64)
        self._row_count = 0
        self._chain = ""
        self.unused: list[Unused] = []
        """What this process gives back with its next charge."""

    def read(self, connection: Connection) -> Any:
        """Learn which tickets were used since; the summary row, or None if nothing was ever charged.

        `LedgerError` if rows are lost, or if they are not the ones that the summary was written with.
        """
        query = sa.select(usage).where(usage.c.counter_id == self._counter_id)
        row = connection.execute(query.with_for_update()).one_or_none()
        try:
            if not (self._row_count == 0 if row is None else self._learn(connection, row)):
                raise LedgerError(LOST)
        except LedgerError:
            self._forget_all()
            raise
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
            self.unused = [each for each in self.unused if not 0 < each.number <= row.summed]
        if self._row_count < row.row_count:
            since = sa.and_(usage_rows.c.counter_id == self._counter_id, usage_rows.c.number > self._row_count)
            for each in connection.execute(sa.select(usage_rows).where(since).order_by(usage_rows.c.number)).all():
                if each.number != self._row_count + 1:
                    return False
                packed = stored_bytes(each.positions)
                positions = _numbers(packed[CHARGE:] if each.units < 0 else packed)
                self.used = grown(self.used, int(positions.max(initial=-1)) + 1)
                self.used[positions] += each.units
                self.unused = [back for back in self.unused if back.row != (each.number, each.units, packed)]
                self._chain = _chained(self._chain, each.number, each.units, packed)
                self._row_count = each.number
        return (self._row_count, self._chain, int(self.used.sum())) == (row.row_count, row.chain, row.tickets)

    def use(
        self, connection: Connection, eligible: Sequence[EligibleOwners], units: int, spent: int
    ) -> tuple[list[tuple[Numbers, Numbers]], str, str]:
        """Within a charge's transaction: give back what is `unused`, and use ``units`` tickets of every eligible owner
        who has as many left.

        Owners who share a position (exemplars of equal content, each its own owner) are one owner: the first of them
        takes part. ``spent`` is the counter's number before this charge.

        Returns the owners who take part in each query, with their positions, and the summary's digests before and
        after the charge. Raises `OwnersChanged`.
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
        participants: list[tuple[Numbers, Numbers]] = []
        rows: list[dict[str, object]] = []

        def append(positions: Numbers, units: int, charge: bytes = b"") -> bytes:
            nonlocal number, chain, total
            packed = charge + positions.astype("<u4").tobytes()
            total, number = total + units * len(positions), number + 1
            chain = _chained(chain, number, units, packed)
            rows.append({"counter_id": self._counter_id, "number": number, "units": units, "positions": packed})
            return packed

        for back in self.unused if row is not None else ():
            used = grown(used.copy(), int(back.positions.max(initial=-1)) + 1)
            known = back.positions[used[back.positions] >= back.units]  # of others this copy of the ledger says "lost"
            used[known] -= back.units
            back.row = (number + 1, -back.units, append(known, -back.units, back.charge.to_bytes(CHARGE, "little")))
        for query, positions in zip(eligible, found, strict=True):
            distinct, first_of = np.unique(positions, return_index=True)
            distinct, first_of = (each[distinct >= 0] for each in (distinct, first_of))  # -1: it is being forgotten
            used = grown(used, int(distinct.max(initial=-1)) + 1)
            pays = used[distinct] + units <= self._tickets - lost
            if len(eligible) > 1:  # the next query of this charge sees them used
                used = used.copy()
                used[distinct[pays]] += units
            append(distinct[pays], units)
            participants.append((np.sort(query.owners[first_of[pays]]), distinct[pays]))
        connection.execute(sa.insert(usage_rows), rows)
        before = row.digest if row is not None else usage_digest(spent=spent, lost=lost)
        sums = {
            "row_count": number,
            "tickets": total,
            "spent": spent + units * len(found),
            "lost": lost,
            "owners": size,
        }
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
