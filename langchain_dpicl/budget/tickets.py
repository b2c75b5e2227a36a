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

Rows. The ledger has one row for each counter (a line, and a principal where each has a counter) and each owner that was
ever eligible there: its mark and its used tickets. A charge has locked its counter. For each query it looks up the
owners who have fewer than ``units`` left of T, and updates the rows of all others, ``used + units WHERE used + units <=
T``; they take part, and each has a row that was changed. (Meanwhile tickets may come back, and none is used.) The
statements of a charge's queries follow one another in one transaction, so each sees the tickets of those before it.
``T`` is less by the counter's ``lost`` (`witness`): that many tickets may be missing in this copy of the ledger.

Tokens. On a line of tokens a step of the proof is one token, at which every owner who paid for the answer flips a coin.
An answer uses ``max_tokens`` tickets of every eligible owner who has as many left, and of no other: nobody has a part
in its first tokens alone. Its length decides how many steps ran, and it is in the transcript; the tickets of the others
are given back to every owner who paid, sampled or not, so that each has used one ticket for each step that ran, as step
1 of the proof says. (If they came back only to those whom no coin chose, an owner's tickets would depend on its coins.)
They come back in the transaction that records the answer, or never: if the process ends before, the answer fails or its
reader leaves, they stay used.

Lives. A mark is a keyed hash of the owner's key, or, if each exemplar is its own owner, of its content: exemplars of
equal content are one owner (`store.base`): one row, one coin, forgotten with the last of them. What is protected is an
owner's life in the store, from its first exemplar until it is forgotten.

- An owner who is forgotten and comes again is a new owner: two lives have 2 T together. `OwnerMarks.leave` forgets in
  two transactions around the store's own. The first writes the mark into ``leaving`` with a token of its own. The last
  removes it, if its token still stands there, and with it the mark's rows, and counts a change of the plan. CLAIM: if
  all stores that use the plan follow one another (one file, one database, or one object in memory), no life uses more
  than T tickets of a counter. PROOF. The rows of a mark are removed only by the last transaction of a
  forgetting whose token stands, so after the store's commit of the latest forgetting that has begun. The life that
  this commit ended is over, and a life that began since has used nothing: its mark is in ``leaving``, and a charge
  takes no owner whose mark is there. So a life's row is there from its first ticket until its end. A charge by owners
  who were looked up before is no exception: `find` learns a mark while its owner is in the store and the plan has
  counted c changes, and a charge is made again if the plan has counted more. It holds the plan's row, which the last
  transaction of a forgetting writes, until its COMMIT. Tickets of an answer that ends after its owner came again are
  given back to rows of the same ``life`` alone.                                                                   QED
- A kill between these transactions leaves the mark in ``leaving``: whether the owner went or not, it gets no tickets
  until it is forgotten once more.
- A record that moves to another owner counts for that one from then on. An owner who loses the last of its records by
  that is forgotten by the store, and the ledger keeps its row: if it comes again, it has what it had left.
- Two stores over the same people have one row for a person if they make marks by the same key, and by different keys
  the plan refuses the second store. A person who has another key or content in the second store is another owner.
- A store in memory is one process's own. An owner's life is then over when the last process has forgotten it: until
  then each forgetting gives it T tickets anew in the others. Forget in every process, or use a file or a database.

Answers in parallel are one run: each uses its tickets in a transaction before its members are called, transactions have
an order, and an answer is one step, whose query was chosen before it. A crash gives no ticket back. Owners that come
later have all their tickets. A line's tickets are its own. Under ``per_principal`` each principal has a set of them,
and colluding principals see the sum.

Nobody may see which owners are eligible, how many are, which have tickets left, or how many were used. A caller learns
that a charge took place, as everywhere. The ledger's rows say which owner was near to queries how often, by keyed
hashes; the key stands elsewhere (`owner_keys`). Keep both from callers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from langchain_dpicl.budget.schema import Charge, counters, leaving, plans, tickets
from langchain_dpicl.budget.terms import WARNING, LineTickets
from langchain_dpicl.errors import LedgerError, UnsafeConfigurationError
from langchain_dpicl.sql import OwnLock, TryAgain, direct
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import MARK, MarkOf, Numbers

if TYPE_CHECKING:
    from langchain_dpicl.budget.stored import StoredLedger

Marks = NDArray[np.bytes_]
"""Marks of owners, each in hexadecimal."""
_WRITTEN = f"S{2 * MARK}"

_LEAVING = """SELECT dpicl_plans.changes, dpicl_leaving.mark FROM dpicl_plans
    LEFT JOIN dpicl_leaving ON dpicl_leaving.plan_id = dpicl_plans.id WHERE dpicl_plans.id = :plan_id"""
_LISTED = {
    "sqlite": "json_each(:marks) AS listed",
    "postgresql": "json_array_elements_text(CAST(:marks AS json)) AS listed(value)",
}
_WITHOUT = """SELECT mark FROM dpicl_tickets WHERE counter_id = :counter_id AND used + :units > :most
    AND mark IN (SELECT listed.value FROM {})"""
_USE = """INSERT INTO dpicl_tickets (counter_id, mark, used, life)
    SELECT :counter_id, listed.value, :units, :life FROM {} WHERE :units <= :most
    ON CONFLICT (counter_id, mark) DO UPDATE SET used = dpicl_tickets.used + :units
    WHERE dpicl_tickets.used + :units <= :most"""  # RETURNING would take as long as both statements
_GIVE_BACK = """UPDATE dpicl_tickets SET used = used - :units WHERE counter_id = :counter_id AND life <= :life
    AND used >= :units AND mark IN (SELECT listed.value FROM {})"""


class KeyMissing(LedgerError):
    """The key of a plan's owners is not at hand, so an owner who is forgotten cannot be found in it."""

    def __init__(self, plan: str) -> None:
        super().__init__(
            f"the budget {plan!r} knows its owners by a key that is not at hand, so the owner's mark stays in its "
            "ledger: put the key file back, and run `dpicl forget` for this owner"
        )


@dataclass(frozen=True)
class EligibleOwners:
    """The owners who are eligible for one query, by their numbers in the store and by their marks. Private.

    ``changes``: the number of forgettings that the plan had counted before these owners were found in the store.
    """

    store: ExemplarStore = field(repr=False)
    owners: Numbers = field(repr=False)
    marks: Marks = field(repr=False)
    changes: int = field(default=0, repr=False)


class Participants:
    """The owners who may flip a coin in a release. Private: it shows nothing, and gives them once.

    Tickets may be given back to their marks, in rows whose ``life`` is at most this.
    """

    __slots__ = ("_marks", "_owners", "life")

    def __init__(self, owners: Numbers, marks: Marks, life: int) -> None:
        self._owners: Numbers | None = owners
        self._marks = marks
        self.life = life

    def take(self) -> Numbers:
        """The owners' numbers. They are not kept."""
        owners = self._owners
        self._owners = None
        if owners is None:
            raise UnsafeConfigurationError("the owners of a release were taken already")
        return owners

    def listed(self) -> str:
        """The owners' marks for a statement."""
        return _listed(self._marks)

    def __repr__(self) -> str:
        return "<owners who pay for a release>"

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("owners who pay for a release are not pickled or copied")


class OwnerMarks:
    """The marks by which a plan whose owners pay knows them."""

    def __init__(self, ledger: StoredLedger, plan_id: int) -> None:
        self._ledger = ledger
        self._plan_id = plan_id
        self._keys: WeakKeyDictionary[ExemplarStore, bytes] = WeakKeyDictionary()
        self._lock = OwnLock()  # never held while waiting for a store or for a database
        self._learn(None)

    def _learn(self, changes: int | None) -> None:
        """Forget all marks. Those that are learnt from now on are of owners who are there after so many changes."""
        self._changes = changes
        self._by_number: WeakKeyDictionary[ExemplarStore, dict[int, bytes]] = WeakKeyDictionary()

    def find(self, store: ExemplarStore, owners: Numbers) -> EligibleOwners:
        """Look up a query's eligible owners; those who were forgotten just now are left out. Private."""
        if self._changes is None:
            changes = self._ledger.run(self._read_changes, "read")
            with self._lock:
                if self._changes is None:
                    self._learn(changes)
        with self._lock:
            since = self._changes or 0
            known = self._by_number.setdefault(store, {})  # a store never gives a number again
            marks = np.array([known.get(number, b"") for number in owners.tolist()], _WRITTEN)
        unknown = np.flatnonzero(marks == b"")
        if len(unknown):
            key = self.key_for(store)
            with store.reading() as view:
                marks[unknown] = [mark.hex().encode() for mark in view.marks(owners[unknown], key)]
            with self._lock:  # if all marks were forgotten meanwhile, nobody reads these
                known.update(zip(owners[unknown].tolist(), marks[unknown].tolist(), strict=True))
        there = marks != b""
        return EligibleOwners(store, owners[there], marks[there], since)

    def find_again(self, eligible: EligibleOwners, changes: int) -> EligibleOwners:
        """Look up owners after the plan has counted so many changes."""
        with self._lock:
            if self._changes != changes:
                self._learn(changes)
        return self.find(eligible.store, eligible.owners)

    def key_for(self, store: ExemplarStore) -> bytes:
        """The key of this store's owners in this plan. `LedgerError` if it is not at hand, and nothing is charged."""
        if (known := self._keys.get(store)) is not None:
            return known
        found = self._ledger.owner_key(self._plan_id, store.mark_keys(), make=True)
        if found is None:
            raise LedgerError(
                "the owners of this plan are known by another key than this store's, and the key file "
                f"{str(self._ledger.key_file.path or '')!r} does not hold it either: nothing was charged; use "
                "the store that the plan was made with, or put its key file back"
            )
        self._keys[store] = found
        return found

    def _read_changes(self, connection: Connection) -> int:
        return int(connection.scalar(sa.select(plans.c.changes).where(plans.c.id == self._plan_id)) or 0)

    def hold(self, connection: Connection) -> tuple[int, Marks]:
        """The plan's number of changes, and the marks of owners who are being forgotten.

        Nobody ends a forgetting until the caller's transaction ends.
        """
        share = " FOR SHARE OF dpicl_plans" if connection.dialect.name == "postgresql" else ""
        rows = direct(connection, _LEAVING + share, {"plan_id": self._plan_id}).fetchall()
        if not rows:
            raise LedgerError("the ledger has lost this plan: nothing was charged")
        return rows[0][0], np.array([mark for _, mark in rows if mark], _WRITTEN)

    # -- forgetting ----------------------------------------------------------------------------------------------------

    def leave(self, keys: Sequence[bytes], mark_of: MarkOf) -> Callable[[], object] | None:
        """Let an owner use no more tickets, before its store lets it go. None if the plan's key is not at hand.

        ``keys``: the store's own. Call the answer when no store holds the owner any more.
        """
        key = self._ledger.owner_key(self._plan_id, keys)
        if key is None:
            return None if self._ledger.has_key(self._plan_id) else lambda: None
        mark = mark_of(key).hex()
        token = secrets.token_hex(8)
        self._ledger.run(partial(self._begin, mark=mark, token=token))
        return partial(self._ledger.run, partial(self._end, mark=mark, token=token))

    def _begin(self, connection: Connection, mark: str, token: str) -> None:
        here = {"plan_id": self._plan_id, "mark": mark}
        connection.execute(sa.select(plans.c.id).where(plans.c.id == self._plan_id).with_for_update())
        connection.execute(sa.delete(leaving).filter_by(**here))
        connection.execute(sa.insert(leaving).values(**here, token=token))

    def _end(self, connection: Connection, mark: str, token: str) -> None:
        counted = sa.update(plans).where(plans.c.id == self._plan_id).values(changes=plans.c.changes + 1)
        connection.execute(counted)  # first: no charge is under way
        mine = sa.delete(leaving).filter_by(plan_id=self._plan_id, mark=mark, token=token)
        if connection.execute(mine).rowcount == 1:
            of_plan = sa.select(counters.c.id).where(counters.c.plan_id == self._plan_id)
            connection.execute(sa.delete(tickets).where(tickets.c.mark == mark, tickets.c.counter_id.in_(of_plan)))


class TicketLine:
    """The tickets of one line: every owner has ``count``, and so for each principal if each has a counter."""

    def __init__(self, marks: OwnerMarks, count: int) -> None:
        self.marks = marks
        self.count = count

    def use(
        self,
        connection: Connection,
        charges: Sequence[Charge],
        eligible: Sequence[EligibleOwners],
        lost: int,
    ) -> list[Charge]:
        """Use tickets of every eligible owner of each charge, within its transaction; who takes part stands in it.

        Each pays the charge's ``units``. An owner who has fewer left is left out. Owners who share a mark (exemplars of
        equal content, each its own owner) are one owner: the first of them takes part.

        Raises `OwnersChanged`.
        """
        changes, gone = self.marks.hold(connection)
        if any(query.changes != changes for query in eligible):
            raise OwnersChanged(changes)
        completed = []
        for charge, query in zip(charges, eligible, strict=True):
            distinct, first_of = np.unique(query.marks, return_index=True)
            stays = ~np.isin(distinct, gone)
            distinct = distinct[stays]
            values = {
                "counter_id": charge.counter_id,
                "marks": _listed(distinct),
                "units": charge.units,
                "most": self.count - lost,
                "life": changes,
            }
            without = direct(connection, _for(connection, _WITHOUT), values).fetchall()
            pays = np.full(len(distinct), charge.units <= self.count - lost)
            pays[np.searchsorted(distinct, np.array([mark for (mark,) in without], _WRITTEN))] = False
            paid = distinct[pays]
            if len(paid) < len(distinct):
                values["marks"] = _listed(paid)
            if direct(connection, _for(connection, _USE), values).rowcount != len(paid):
                raise TryAgain
            owners = np.sort(query.owners[first_of[stays][pays]])
            completed.append(replace(charge, participants=Participants(owners, paid, changes)))
        return completed

    def give_back(self, connection: Connection, charge: Charge, units: int) -> None:
        """Give ``units`` of a charge back to all who paid it, in the transaction that records its answer."""
        if charge.participants is not None:
            values = {
                "counter_id": charge.counter_id,
                "marks": charge.participants.listed(),
                "units": units,
                "life": charge.participants.life,
            }
            direct(connection, _for(connection, _GIVE_BACK), values)

    def report(self, connection: Connection, counter_id: int) -> LineTickets:
        """The numbers of owners by their used tickets of a counter. PRIVATE."""
        lost = connection.scalar(sa.select(counters.c.lost).where(counters.c.id == counter_id)) or 0
        query = (
            sa.select(tickets.c.used, sa.func.count())
            .where(tickets.c.counter_id == counter_id)
            .group_by(tickets.c.used)
            .order_by(tickets.c.used)
        )
        burnt = {int(used): int(owners) for used, owners in connection.execute(query)}
        owners = sum(burnt.values())
        without = sum(number for used, number in burnt.items() if used >= self.count - lost)
        return {
            "private": WARNING,
            "tickets": self.count,
            "owners": owners,
            "without": without,
            "burnt": {str(used): number for used, number in burnt.items()},
            "share_with_tickets": 1.0 - without / owners if owners else None,
        }


class OwnersChanged(Exception):
    """An owner was forgotten after a query's owners were looked up. The argument: the plan's changes by now."""


class TicketPayment:
    """The tickets of one charge: every eligible owner of each query pays one for each unit."""

    def __init__(self, line: TicketLine, eligible: Sequence[EligibleOwners | None]) -> None:
        self._line = line
        self._eligible = eligible

    def __call__(
        self,
        connection: Connection,
        charges: Sequence[Charge],
        places: Sequence[int],
        lost: int,
    ) -> list[Charge]:
        """Use the tickets of these charges, each at its place in the request."""
        eligible = [each for place in places if (each := self._eligible[place]) is not None]
        if len(eligible) < len(places):  # it was answered when we looked, and is not any more
            raise LedgerError("an answer that could be replayed is gone from the ledger: nothing was charged")
        try:
            return self._line.use(connection, charges, eligible, lost)
        except OwnersChanged as changed:
            again = partial(self._find_again, changed.args[0])
        raise TryAgain("its owners are forgotten, again and again", again)

    def _find_again(self, changes: int) -> None:
        self._eligible = [each and self._line.marks.find_again(each, changes) for each in self._eligible]


def _listed(marks: Marks) -> str:
    """Marks as a list in JSON, by which one statement gets them all."""
    joined = b'","'.join(marks.tolist()).decode()
    return f'["{joined}"]' if joined else "[]"


def _for(connection: Connection, statement: str) -> str:
    return statement.format(_LISTED[connection.dialect.name])
