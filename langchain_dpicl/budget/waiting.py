"""Waiting for a query that another caller has charged and not answered yet."""

from __future__ import annotations

import time
from collections.abc import Mapping

from langchain_dpicl.budget.claims import Claim

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25


class Waiting:
    """How long the claims of others were waited for, by the monotonic clock of this process alone."""

    def __init__(self, patience: float) -> None:
        self.overdue: dict[str, int] = {}
        self._patience = patience
        self._seen: dict[str, tuple[int, float]] = {}
        self._pause = _FIRST_PAUSE

    def still(self, claims: Mapping[str, Claim]) -> dict[str, Claim]:
        """Those that are pending and not waited for long enough. A claim that another caller took over starts anew."""
        now = time.monotonic()
        for query, claim in claims.items():
            if query not in self._seen or self._seen[query][0] != claim.number:
                self._seen[query] = (claim.number, now)
            if now - self._seen[query][1] >= self._patience:
                self.overdue[query] = claim.number
        return {q: claim for q, claim in claims.items() if claim.pending and self.overdue.get(q) != claim.number}

    def pause(self) -> float:
        """Seconds until the next look: a little longer each time."""
        pause, self._pause = self._pause, min(1.5 * self._pause, _LONGEST_PAUSE)
        return pause
