"""A release as a description: what a file or a command line says, checked as a whole, and made."""

from langchain_dpicl.spec.description import Spec, checked
from langchain_dpicl.spec.releases import SECTIONS

__all__ = ["SECTIONS", "Spec", "checked"]
