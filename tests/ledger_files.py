"""Ledgers as files, for tests that move them or write old ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from langchain_dpicl.budget.recovery import recover


def copy_ledger(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """A closed ledger with its witness, as a whole folder is put back: nobody can tell."""
    shutil.copy(source, target)
    if Path(f"{os.fspath(source)}.witness").exists():
        shutil.copy(f"{os.fspath(source)}.witness", f"{os.fspath(target)}.witness")


def adopt(url: str) -> str:
    """Give a ledger that an older release wrote its witness, believing its counts; its address."""
    recover(url, keep_count=True)
    return url
