"""Measuring usefulness: private answers beside answers that are not private."""

from langchain_dpicl.evaluation.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
