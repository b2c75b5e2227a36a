"""The budget: a frozen plan and the durable ledger that counts its releases."""

from langchain_dpicl.budget.budget import PrivacyBudget
from langchain_dpicl.budget.line import BudgetLine
from langchain_dpicl.budget.receipt import Receipt

__all__ = ["BudgetLine", "PrivacyBudget", "Receipt"]
