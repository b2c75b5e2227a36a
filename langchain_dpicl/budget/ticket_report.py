"""How many owners have used how many tickets. PRIVATE, for the deployer alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from typing_extensions import TypedDict

from langchain_dpicl.store.base import Numbers

WARNING = "PRIVATE: for the deployer alone. Nothing of it may be shown, published, or used to choose public numbers"


class LineTickets(TypedDict):
    """The tickets of one line, and principal if each has a counter. PRIVATE."""

    private: str
    tickets: int
    """The tickets of every owner."""
    owners: int
    """Owners who were ever eligible for a query, and are not forgotten. All others have all their tickets."""
    without: int
    """Of these, how many have none left: they are left out."""
    burnt: dict[str, int]
    """How many of these have used how many tickets: by number, ascending."""


TicketReport = dict[str, dict[str, LineTickets]]
"""By line, and by principal ("" if all share one counter)."""


def line_tickets(used: Numbers, count: int) -> LineTickets:
    """The report on a line, from the used tickets of each owner and the tickets that every owner has. PRIVATE."""
    numbers, owners = np.unique(used, return_counts=True)
    return {
        "private": WARNING,
        "tickets": count,
        "owners": len(used),
        "without": int((used >= count).sum()),
        "burnt": {str(number): int(many) for number, many in zip(numbers, owners, strict=True)},
    }


def ticket_bins(burnt: Mapping[str, int], tickets: int, most: int) -> list[tuple[int, int, int]]:
    """Owners by their used tickets: from, to, and how many owners. Private.

    At most ``most`` bins of one width for owners who have some left, and a last one for owners who have none.
    """
    width = -(-tickets // most)
    used = [(int(number), owners) for number, owners in burnt.items()]
    bins = []
    for low in range(0, tickets, width):
        high = min(low + width, tickets) - 1
        bins.append((low, high, sum(owners for number, owners in used if low <= number <= high)))
    return [*bins, (tickets, tickets, sum(owners for number, owners in used if number >= tickets))]
