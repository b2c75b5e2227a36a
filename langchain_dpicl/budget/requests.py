"""What a line asks of its ledger, and how requests that meet become one transaction."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy.engine import Connection

from langchain_dpicl.budget.schema import Account, Charge, Claim
from langchain_dpicl.errors import LedgerError

ChargeRule = Callable[[Connection, Sequence[Charge], Sequence[int]], tuple[list[Charge], str, str]]
"""The cost of a charge beside its counter: the tickets of owners.

It is spent in the charge's transaction. The arguments end with the charges and their places in the request. Returns the
completed charges, and for the witness the counter's state before and after. The transaction may run again after a
rollback, so keep nothing of it.
"""


class DoesNotFit(Exception):
    """Raised in a charge's transaction: fewer units are left. It rolls back, and nothing is charged."""


@dataclass(frozen=True)
class ChargeRequest:
    """A line's request to its ledger: charge all of it durably, or nothing.

    Parameters
    ----------
    queries
        One entry for each release: the query's keyed hash, or None if the release is never replayed. Equal queries
        share one charge. An answered query comes back as its `Claim`, uncharged.
    units
        The units of each new charge.
    replay
        False: charge every entry, and leave claims alone.
    others
        Each charge names the units that the plan's other lines have spent. The charges of a plan then wait for each
        other, so no two of them miss one another.
    rule
        The cost beside the counter.
    overdue
        Claims (query to number) that are waited for no longer: a charge of one's own takes them over.
    """

    account: Account
    queries: Sequence[str | None]
    units: int = 1
    replay: bool = True
    others: bool = False
    rule: ChargeRule | None = None
    overdue: Mapping[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> list[Hashable]:
        """The key of each entry: the query, or its place if it is never replayed. Equal keys share a charge."""
        return [place if query is None or not self.replay else query for place, query in enumerate(self.queries)]

    @property
    def alike(self) -> Hashable:
        """Requests that differ in their queries alone have this in common."""
        return self.account, self.units, self.replay, self.others

    @property
    def names(self) -> set[str]:
        """The queries that may be replayed."""
        return {key for key in self.keys if isinstance(key, str)}


ChargeOutcome = list[Charge | Claim] | dict[str, Claim] | None
"""Of a charge: its entries; the claims of other callers, on queries that they have not answered yet; or None, because
fewer units are left."""


def charge_all(
    once: Callable[[ChargeRequest], ChargeOutcome | LedgerError], asked: Sequence[ChargeRequest]
) -> list[ChargeOutcome | LedgerError]:
    """The outcomes of requests that are alike, each as if it was made by itself, in few transactions.

    ``once`` charges one request in a transaction of its own. Two callers never share a charge: where they ask the same
    query, the later one waits for the other's answer, as it would if the other process had asked. After a fault nothing
    is tried any more, since each try may wait long for a server that is gone.
    """
    found: dict[int, ChargeOutcome | LedgerError] = {}
    fault: LedgerError | None = None

    def unless_faulty(request: ChargeRequest) -> ChargeOutcome | LedgerError:
        nonlocal fault
        if fault is None:
            try:
                return once(request)
            except LedgerError as error:
                fault = error
        return fault

    while rest := [place for place in range(len(asked)) if place not in found]:
        group: dict[int, ChargeRequest] = {}
        names: set[str] = set()
        for place in rest:
            if names.isdisjoint(asked[place].names):
                group[place] = asked[place]
                names |= asked[place].names
        found |= _charge_group(unless_faulty, group)
    return [found[place] for place in range(len(asked))]


def _charge_group(
    once: Callable[[ChargeRequest], ChargeOutcome | LedgerError], asked: Mapping[int, ChargeRequest]
) -> dict[int, ChargeOutcome | LedgerError]:
    """Requests without a query in common: all; or only those that wait for others' answers, if there are any."""
    queries = [query for each in asked.values() for query in each.queries]
    overdue = {query: number for each in asked.values() for query, number in each.overdue.items()}
    entries = once(replace(next(iter(asked.values())), queries=queries, overdue=overdue))
    if isinstance(entries, LedgerError):
        return {place: copy.copy(entries) for place in asked}
    if isinstance(entries, dict):
        waiting = {place: {q: entries[q] for q in each.names & entries.keys()} for place, each in asked.items()}
        return {place: claims for place, claims in waiting.items() if claims}
    if entries is None and len(asked) > 1:  # together they do not fit: the first to come are served
        return {place: charge_all(once, [each])[0] for place, each in asked.items()}
    if entries is None:
        return dict.fromkeys(asked)
    rest = iter(entries)
    return {place: [next(rest) for _ in each.queries] for place, each in asked.items()}
