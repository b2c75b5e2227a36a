"""``dpicl plan``: see `langchain_dpicl.cli.planning`."""

from langchain_dpicl.cli.planning import add_plan_parser as add_parser

__all__ = ["add_parser"]
