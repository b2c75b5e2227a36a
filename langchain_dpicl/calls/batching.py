"""Threads that ask for the same kind of work at once have it done in one go."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, repr=False)  # no frame that an error passes shows what others asked for
class _Asked(Generic[T, R]):
    item: T
    outcome: list[R | BaseException] = field(default_factory=list)  # at most one


@dataclass(eq=False, repr=False)
class _Line(Generic[T, R]):
    turn: threading.Lock = field(default_factory=threading.Lock)  # of whoever works, for all who wait
    waiting: list[_Asked[T, R]] = field(default_factory=list)
    users: int = 0


class Together(Generic[T, R]):
    """Does for all who wait what they ask for, once whoever was at work before them has ended.

    Parameters
    ----------
    interrupted
        What the others get if the thread that works for them is interrupted (an exception that is no `Exception`).
    """

    def __init__(self, interrupted: Callable[[], Exception]) -> None:
        self._interrupted = interrupted
        self._guard = threading.Lock()
        self._lines: dict[Hashable, _Line[T, R]] = {}

    def __call__(self, alike: Hashable, item: T, work: Callable[[list[T]], Sequence[R | Exception]]) -> R:
        """The outcome of an item, which shares a go with others that are ``alike``. It waits for no others.

        ``work`` gets at least one item, in the order in which they came, and returns the outcome of each. An exception
        among the outcomes is raised for that caller alone; one that it raises, for all of them.
        """
        mine: _Asked[T, R] = _Asked(item)
        with self._guard:
            line = self._lines.setdefault(alike, _Line())
            line.waiting.append(mine)
            line.users += 1
        try:
            with line.turn:
                if not mine.outcome:
                    self._do(line, mine, work)
        finally:
            with self._guard:
                if mine in line.waiting:  # it was interrupted: nobody works for it
                    line.waiting.remove(mine)
                line.users -= 1
                if not line.users:
                    del self._lines[alike]
        (outcome,) = mine.outcome
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome, mine
        return outcome

    def _do(self, line: _Line[T, R], mine: _Asked[T, R], work: Callable[[list[T]], Sequence[R | Exception]]) -> None:
        with self._guard:
            if mine not in line.waiting:  # whoever took it was interrupted
                raise self._interrupted()
            group, line.waiting = line.waiting, []
        try:
            outcomes: Sequence[R | BaseException] = work([each.item for each in group])
        except BaseException as error:
            if len(group) == 1:
                raise
            shared = error if isinstance(error, Exception) else self._interrupted()
            # Copies, also for this caller: the frames that the error has passed hold what the others asked for.
            outcomes = [self._copy(error if each is mine else shared) for each in group]
        for each, outcome in zip(group, outcomes, strict=True):
            each.outcome.append(outcome)

    def _copy(self, error: BaseException) -> BaseException:
        try:
            return copy.copy(error)
        except Exception:  # its class cannot be made anew from its arguments
            return self._interrupted()
