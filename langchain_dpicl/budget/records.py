"""The base of a ledger and of its witness."""

from __future__ import annotations

from langchain_dpicl.budget.schema import ADVICE, SQLITE_APPLICATION_ID
from langchain_dpicl.calls import shut
from langchain_dpicl.private import Accounting
from langchain_dpicl.sql import Database


class Records(Database, Accounting):
    """A database that knows what was charged: no chain's call runs a transaction on it."""

    application_id = SQLITE_APPLICATION_ID
    advice = ADVICE

    _check = staticmethod(shut.check_open)
