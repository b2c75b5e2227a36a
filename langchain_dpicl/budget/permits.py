"""What one process may charge: permits that its ledger's witness has granted, and the grants of single charges.

`witness` says what they are for, and proves it. This is the side of the process: it has permits in memory alone, and
gives back the unused ones when it ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from langchain_dpicl.budget.witness import LOCK, Grant, Key, Witness
from langchain_dpicl.errors import LedgerError

try:
    import fcntl
except ImportError:  # Windows: no process ever knows that it is alone, which costs permits and is safe
    fcntl = None  # type: ignore[assignment]


class Left(Exception):
    """The ledger was closed while this charge was under way: roll back, join again, and try again."""


class Presence:
    """A lock that every open ledger shares while its process lives, and that dies with it."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._file: int | None = None

    def enter(self) -> bool:
        """Enter. True: nobody else is there, and nobody enters before `share` or `leave`."""
        path = self._witness.path
        if path is None:
            ask = sa.select(sa.func.pg_try_advisory_lock(LOCK))
            return bool(self._witness.run(lambda connection: connection.scalar(ask), "read"))
        if fcntl is None:
            return False
        reason = ""
        try:
            self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            fcntl.flock(self._file, fcntl.LOCK_SH)
        except OSError as error:
            reason = error.strerror or type(error).__name__
        if reason:
            self.leave()
            raise LedgerError(f"the witness {self._witness.shown!r} cannot be used: {reason}")
        return False

    def share(self) -> None:
        """Let others enter too."""
        if self._witness.path is None:
            free = sa.select(sa.func.pg_advisory_unlock(LOCK))
            self._witness.run(lambda connection: connection.scalar(free), "read")
        elif self._file is not None and fcntl is not None:
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Be gone."""
        self.forget()
        self._witness.close()

    def forget(self) -> None:
        """Close the lock's file. In the child of a fork, the lock stays its parent's."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


@dataclass
class _Block:
    """The permits of one counter: in hand, granted ahead, charged so far, and the number that was surely reached."""

    hand: int = 0
    ahead: int = 0
    charged: int = 0
    reached: int = 0


class Permits:
    """The permits of one open ledger."""

    def __init__(self, witness: Witness) -> None:
        self.witness = witness
        self._start()

    def _start(self) -> None:
        self._presence = Presence(self.witness)
        self.joined = False
        self._joining = threading.Lock()
        self._mutex = threading.Lock()  # held while the witness is written or left; never while waiting for a ledger
        self._blocks: dict[Key, _Block] = {}
        self._at_exit: Any = None

    def join(self, check: Callable[[bool], None]) -> None:
        """Join the processes that have the ledger open. ``check(alone)`` refuses one that was lost or rolled back."""
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

    def _block(self, key: Key) -> _Block:
        return self._blocks.setdefault(key, _Block())

    def take(self, key: Key, units: int, spent: int, in_use: int, allowed: int) -> bool:
        """Use up so many permits; False if the witness has no more. So many ahead as were charged before."""
        with self._here():
            block = self._block(key)
            if block.hand >= units:
                block.hand -= units
            else:
                need = units - block.hand
                extra = self.witness.grant(key, need, block.ahead, spent, in_use, allowed, most=block.charged)
                if extra is None:
                    return False
                block.hand = block.ahead = extra
            block.charged += units
            return True

    def put_back(self, key: Key, units: int) -> None:
        """So many were not used after all. A surplus over the block goes back to the witness."""
        with self._mutex:
            block = self._block(key)
            surplus = block.hand + units - block.ahead
            block.hand = min(block.hand + units, block.ahead)
            if surplus > 0:
                with contextlib.suppress(LedgerError):  # they then stay reserved
                    self.witness.give_back(key, surplus)

    def reach(self, key: Key, number: int) -> None:
        """The counter has surely reached this number."""
        block = self._block(key)
        block.reached = max(block.reached, number)

    def swap(self, key: Key, before: str, after: str, counts: tuple[int, int] | None = None) -> Grant:
        """`Witness.swap`, while this process is there."""
        with self._here():
            return self.witness.swap(key, before, after, counts)

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
        """Give back the unused permits, and be gone. The ledger may be used again: it is joined anew."""
        with self._joining, self._mutex:
            if not self.joined:
                return
            self.joined = False
            self._at_exit.cancel()
            self.witness.once()
            for key, block in list(self._blocks.items()):
                if block.charged:
                    with contextlib.suppress(LedgerError):
                        self.witness.give_back(key, block.hand, block.ahead, block.reached)
                block.hand = block.ahead = 0
            self._presence.leave()

    def after_fork(self) -> None:
        """In a child: its parent's permits and lock are the parent's."""
        self._presence.forget()
        self._start()
