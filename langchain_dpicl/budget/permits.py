"""What one process may charge: permits that its ledger's witness has granted, and the grants of single charges.

`witness` says what they are for, and proves it. This is the side of the process: it has permits in memory alone, and
gives back what it has not used when it ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from langchain_dpicl.budget.witness import Grant, Key, Presence, Witness
from langchain_dpicl.errors import LedgerError


class Left(Exception):
    """The ledger was closed while this charge was under way: roll back, join again, and try again."""


class Permits:
    """Of one open ledger. ``seen`` are the numbers that its counters have surely reached."""

    def __init__(self, witness: Witness, seen: Mapping[Key, int]) -> None:
        self.witness = witness
        self._seen = seen
        self._start()

    def _start(self) -> None:
        self._presence = Presence(self.witness)
        self.joined = False
        self._joining = threading.Lock()
        self._mutex = threading.Lock()  # held while the witness is written or left; never while waiting for a ledger
        self._hand: dict[Key, int] = {}
        self._ahead: dict[Key, int] = {}
        self._charged: dict[Key, int] = {}
        self._at_exit: Any = None

    def join(self, check: Callable[[bool], None]) -> None:
        """Be one of those who have the ledger open. ``check(alone)`` refuses one that was lost or rolled back."""
        if self.joined:
            return
        from multiprocessing.util import Finalize

        with self._joining:
            if self.joined:
                return
            try:
                alone = self._presence.enter()
                check(alone)
                if alone:
                    self._presence.share()
            except BaseException:
                self._presence.leave()
                raise
            self.joined = True
            # A child of `multiprocessing` ends without Python's own exit, and forgets what its parent has registered.
            self._at_exit = Finalize(None, self.leave, exitpriority=0)

    def take(self, key: Key, units: int, spent: int, in_use: int, allowed: int) -> bool:
        """Use up so many permits; False where the witness has no more. So many ahead as were charged before."""
        with self._here():
            hand, charged = self._hand.get(key, 0), self._charged.get(key, 0)
            if hand >= units:
                self._hand[key] = hand - units
            else:
                ahead = self._ahead.get(key, 0)
                extra = self.witness.grant(key, units - hand, ahead, spent, in_use, allowed, most=charged)
                if extra is None:
                    return False
                self._hand[key] = self._ahead[key] = extra
            self._charged[key] = charged + units
            return True

    def put_back(self, key: Key, units: int) -> None:
        """So many were not used after all. What is more than a block goes back to the witness."""
        with self._mutex:
            self._hand[key] = self._hand.get(key, 0) + units
            surplus = self._hand[key] - self._ahead.get(key, 0)
            if surplus > 0:
                self._hand[key] -= surplus
                with contextlib.suppress(LedgerError):  # they then stay reserved
                    self.witness.give_back(key, surplus)

    def swap(self, key: Key, before: str, after: str, allowed: int, counts: tuple[int, int] | None = None) -> Grant:
        """`Witness.swap`, while this process is there."""
        with self._here():
            return self.witness.swap(key, before, after, allowed, counts)

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Keep `leave` waiting. Raises `Left` if it was called: a process that has left is granted nothing."""
        with self._mutex:
            if not self.joined:
                raise Left
            yield

    def withdraw(self, grant: Grant) -> None:
        """The charge of this grant was rolled back for certain."""
        with contextlib.suppress(LedgerError):  # it then counts as spent
            self.witness.withdraw(grant)

    def leave(self) -> None:
        """Give back what was not used, and be gone. The ledger may be used again: it is joined anew."""
        with self._joining, self._mutex:
            if not self.joined:
                return
            self.joined = False
            self._at_exit.cancel()
            self.witness.once()
            hand, self._hand = self._hand, {}
            ahead, self._ahead = self._ahead, {}
            for key, block in ahead.items():
                with contextlib.suppress(LedgerError):
                    self.witness.give_back(key, hand.get(key, 0), block, self._seen.get(key, 0))
            self._presence.leave()

    def after_fork(self) -> None:
        """In a child: its parent's permits and lock are the parent's."""
        self._presence.forget()
        self._start()
