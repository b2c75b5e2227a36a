"""Ledgers as files, for tests that move them, and after a kill."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

AFTER_A_KILL = "ignore:.*not closed by every process:langchain_dpicl.PrivacyWarning"
"""A filter for tests that open a ledger after a process was killed, or its connection cut, perhaps between its grant
and its charge: what was granted counts as spent, and whoever opens the ledger alone is warned."""


def copy_ledger(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """A closed ledger with its witness, as a whole folder is put back: nobody can tell."""
    shutil.copy(source, target)
    if Path(f"{os.fspath(source)}.witness").exists():
        shutil.copy(f"{os.fspath(source)}.witness", f"{os.fspath(target)}.witness")
