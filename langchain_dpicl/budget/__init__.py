"""The budget: a frozen plan and the durable ledger that counts its releases."""

from langchain_dpicl.budget.budget import BudgetLine, PrivacyBudget
from langchain_dpicl.budget.receipt import Receipt

__all__ = ["BudgetLine", "PrivacyBudget", "Receipt"]
