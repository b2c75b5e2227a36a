"""The budget: a frozen plan and the durable ledger that counts its releases."""

from langchain_dpicl.budget.budget import PrivacyBudget
from langchain_dpicl.budget.line import BudgetLine
from langchain_dpicl.budget.schema import Charge
from langchain_dpicl.budget.terms import Receipt, Replayed

__all__ = ["BudgetLine", "Charge", "PrivacyBudget", "Receipt", "Replayed"]
