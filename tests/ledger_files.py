"""Ledgers as files, for tests that move them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def copy_ledger(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """A closed ledger with its witness, as a whole folder is put back: nobody can tell."""
    shutil.copy(source, target)
    if Path(f"{os.fspath(source)}.witness").exists():
        shutil.copy(f"{os.fspath(source)}.witness", f"{os.fspath(target)}.witness")
