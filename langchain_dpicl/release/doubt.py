"""Doubt about the model, kept for each caller apart.

A caller's next query asks the model a public question first because of that caller's own release, or of the time since
that caller's own last public question. Nobody else's doubt is affected: what a release said to one caller changes
nothing that another one gets, pays or is refused.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

MOST = 10_000
"""How many callers are remembered: those who asked last, whatever they were answered."""


@dataclass(slots=True)
class Doubt:
    """What one caller has seen of the model."""

    suspected: bool = False
    answered_at: float = -math.inf

    @property
    def never_answered(self) -> bool:
        """Whether no public question was answered so far."""
        return self.answered_at == -math.inf

    def is_due(self, seconds: float = math.inf) -> bool:
        """Whether a release or a public question failed, or none was answered for so many seconds."""
        return self.suspected or time.monotonic() - self.answered_at > seconds

    def judge(self, answered: bool) -> None:
        """A public question was answered, or not."""
        self.suspected = not answered
        if answered:
            self.answered_at = time.monotonic()


class Doubts:
    """Every caller's `Doubt`. The caller who has not asked for longest is forgotten first.

    Who is forgotten follows from who asked and when, and never from what came of it: `asked` alone changes the order.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._held: OrderedDict[str, Doubt] = OrderedDict()
        self._lock = threading.Lock()

    def asked(self, caller: str) -> Doubt:
        """A caller's, at the start of each request; "" stands for all callers if they share what they see."""
        with self._lock:
            doubt = self._held.setdefault(caller, Doubt())
            self._held.move_to_end(caller)
            if len(self._held) > self._most:
                self._held.popitem(last=False)
            return doubt

    def of(self, caller: str) -> Doubt:
        """A caller's, later in the same request; a new one, which nobody else sees, if it is forgotten by then."""
        return self._held.get(caller) or Doubt()
