"""``dpicl plan``: see `langchain_dpicl.planning`."""

from langchain_dpicl.planning import add_plan_parser as add_parser

__all__ = ["add_parser"]
