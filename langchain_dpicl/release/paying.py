"""Charges where owners pay with tickets: who is eligible is found, and pays, on the private side of the boundary.

What comes out are charges that show nothing of it, or an error that is the ledger's or the store's own, without the
frames in which it arose: these refer to the owners.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from langchain_dpicl.budget import BudgetLine, Charge, Replayed
from langchain_dpicl.budget.line import IN_TRANSACTION
from langchain_dpicl.budget.owner_index import EligibleOwners
from langchain_dpicl.calls.flow import arun, run
from langchain_dpicl.errors import DPICLError, LedgerError
from langchain_dpicl.private import boundary
from langchain_dpicl.store.base import Numbers, PrivateStore

Entries = list[Charge | Replayed]


@dataclass(frozen=True)
class Payment:
    """What is charged: queries of one line by one principal, and what finds each one's eligible owners in the store
    (None for a query that is answered already)."""

    line: BudgetLine
    store: PrivateStore
    eligible: Sequence[Callable[[], Numbers] | None]
    principal: str | None
    queries: Sequence[str | None]
    texts: Sequence[str]

    def asked(self) -> list[EligibleOwners | None]:
        """Each query's eligible owners. Private."""
        return [None if find is None else self.line.ask(self.store, find()) for find in self.eligible]


@dataclass(frozen=True)
class _Fault:
    error: BaseException


def pay(payment: Payment) -> Entries:
    """Charge all of them, or none. Raises what `BudgetLine.charge` and the store raise."""
    return _opened(_attempt(payment))


async def apay(payment: Payment) -> Entries:
    """`pay`, without blocking the event loop."""
    return _opened(await _aattempt(payment))


def _attempt(payment: Payment) -> Entries | _Fault:
    try:
        return boundary.in_private(_charge, payment)
    except BaseException as error:
        return _fault(error)


async def _aattempt(payment: Payment) -> Entries | _Fault:
    try:
        return await boundary.ain_private(_acharge(payment))
    except BaseException as error:
        return _fault(error)


def _charge(payment: Payment) -> Entries:
    owners = payment.asked()
    return run(
        payment.line.charging(
            IN_TRANSACTION, len(payment.queries), payment.principal, payment.queries, texts=payment.texts, owners=owners
        )
    )


async def _acharge(payment: Payment) -> Entries:
    owners = await asyncio.to_thread(payment.asked)
    return await arun(
        payment.line.charging(
            IN_TRANSACTION, len(payment.queries), payment.principal, payment.queries, texts=payment.texts, owners=owners
        )
    )


def _fault(error: BaseException) -> _Fault:
    """The error alone. One that is not the package's own might show what it failed on: a constant one stands for it."""
    if isinstance(error, DPICLError):
        error.__cause__ = error.__context__ = None
        return _Fault(error.with_traceback(None))
    if isinstance(error, Exception):
        return _Fault(LedgerError("the owners of a query could not be charged: nothing was released"))
    return _Fault(type(error)())


def _opened(found: Entries | _Fault) -> Entries:
    if isinstance(found, _Fault):
        raise found.error
    return found
