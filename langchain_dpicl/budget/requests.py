"""The request of a line to its ledger."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy.engine import Connection

from langchain_dpicl.budget.schema import Account, Charge, Claim

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
        return [query if query is not None and self.replay else place for place, query in enumerate(self.queries)]

    @property
    def names(self) -> set[str]:
        """The queries that may be replayed."""
        return {key for key in self.keys if isinstance(key, str)}


ChargeOutcome = list[Charge | Claim] | dict[str, Claim] | None
"""Of a charge: its entries; the claims of other callers, on queries that they have not answered yet; or None, because
fewer units are left."""
