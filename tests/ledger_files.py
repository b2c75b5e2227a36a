"""Ledgers as files, for tests that move them, and after a kill."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

AFTER_A_KILL = "ignore:a process was killed while it charged:langchain_dpicl.PrivacyWarning"
"""A filter for tests that use a ledger after a process was killed, or its connection cut, perhaps between the witness's
commit and the ledger's: that charge counts as spent, and whoever meets it is warned."""


def copy_ledger(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """A closed ledger with its witness and its key, as a whole folder is put back: nobody can tell."""
    shutil.copy(source, target)
    for beside in (".witness", ".key"):
        if Path(f"{os.fspath(source)}{beside}").exists():
            shutil.copy(f"{os.fspath(source)}{beside}", f"{os.fspath(target)}{beside}")


def key_file_of(url: str) -> str | None:
    """Where stores in memory keep the key of a ledger that is no file. One place for all processes of a test."""
    if url.startswith("sqlite:"):
        return None
    return os.path.join(tempfile.gettempdir(), f"dpicl-{hashlib.sha256(url.encode()).hexdigest()[:16]}.key")
