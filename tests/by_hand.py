"""Charges made by hand, outside of any release, for tests of the ledger alone.

Importing this gives every line of a budget `charge` and `acharge`. The package has neither: there, a release is charged
within its transaction.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from langchain_dpicl.budget import Charge
from langchain_dpicl.budget.ledger import ChargeRequest, Ledger
from langchain_dpicl.budget.line import IN_TRANSACTION, BudgetLine
from langchain_dpicl.budget.schema import Account
from langchain_dpicl.budget.tickets import TicketPayment
from langchain_dpicl.calls.flow import arun, run


def charge(line: BudgetLine, count: int = 1, principal: str | None = None, queries: Any = None, **options: Any) -> Any:
    """Charge a line here: so many releases, or one for each query."""
    return run(line.charging(IN_TRANSACTION, [None] * count if queries is None else queries, principal, **options))


async def acharge(line: BudgetLine, count: int = 1, queries: Any = None, **options: Any) -> Any:
    """Charge a line from an event loop."""

    def flow() -> Any:
        wanted = [None] * count if queries is None else queries
        entries = yield from line.charging(IN_TRANSACTION, wanted, **options)
        try:
            yield lambda: None
        except BaseException:
            for charge in {id(entry): entry for entry in entries if isinstance(entry, Charge)}.values():
                yield partial(line.give_up, charge)
            raise
        return entries

    return await arun(flow())


def charged(
    ledger: Ledger,
    plan: int,
    line: str = "vote",
    count: int = 1,
    *,
    units: int = 1,
    tickets: TicketPayment | None = None,
) -> list[Any]:
    """Charge a counter of a ledger itself; nothing if fewer are left."""
    found = ledger.charge(ChargeRequest(Account(plan, line), [None] * count, units, tickets=tickets))
    assert found is None or isinstance(found, list)
    return found or []


BudgetLine.charge = charge  # type: ignore[attr-defined]
BudgetLine.acharge = acharge  # type: ignore[attr-defined]
