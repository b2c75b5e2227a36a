"""Solved plans on disk, found by the content of what was asked.

A cached file is only a hint: it must ask for the same, and its noise is certified again before it is used. So a
foreign, torn or altered file costs a new search and nothing else. Writers replace files atomically and never wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

_LONGEST = 1 << 20


@dataclass(frozen=True)
class PlanCache:
    """A folder of solved plans. None: `$XDG_CACHE_HOME/langchain_dpicl/plans`, below `~/.cache` by default.

    It holds public numbers only (targets, rates, counts, noise), nothing of any data set.
    """

    directory: Path | None = None

    def path(self, request: str) -> Path:
        """Where the plan for this request (its canonical text) is kept."""
        folder = self.directory
        if folder is None:
            root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
            folder = Path(root) / "langchain_dpicl" / "plans"
        return Path(folder) / f"{hashlib.sha256(request.encode()).hexdigest()}.json"

    def load(self, request: str) -> str | None:
        """The text stored for this request, or None; an unreadable file is no file."""
        try:
            with open(self.path(request), encoding="utf-8") as file:
                return file.read(_LONGEST)
        except (OSError, ValueError):
            return None

    def store(self, request: str, text: str) -> None:
        """Keep the text. A full, read-only or missing disk is no error: the cache only saves time."""
        path = self.path(request)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".plan-", suffix=".tmp")
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(name, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
