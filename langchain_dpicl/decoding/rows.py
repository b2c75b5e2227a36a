"""The rows of a private answer, each guarded: what one demonstration does to the model touches that row alone.

A row that the model cannot answer is all NaN, and `mixing.clipped_terms` makes it a term of zeros: its owner adds
nothing to this token, as if its coin had said no. Nothing else moves. If a failed row failed the answer, or emptied the
rows beside it, one owner would decide what all the others add.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from langchain_dpicl.decoding.model import Demonstration, Logits, LogitsModel, LogitsSession

T = TypeVar("T")


def attempt(function: Callable[..., T], *arguments: object) -> T | None:
    """Return what a function returns for one row, or None if it raises.

    Every error ends here, with its traceback, which refers to the row's text: also one that is no ``Exception``, as a
    tokeniser's panic. An interrupt passes, without what came with it; signals bring it to the main thread alone.
    """
    try:
        return function(*arguments)
    except BaseException as error:
        kind = type(error)
    if issubclass(kind, (KeyboardInterrupt, SystemExit)) and threading.current_thread() is threading.main_thread():
        raise kind
    return None


class Rows:
    """A model's session whose rows do not fail one another, whatever the model does. Private: ``repr`` shows nothing.

    All rows are asked for in one call. If it raises, or its answer has another shape, each row is asked for by itself;
    if that fails too, or no session opens on all demonstrations, in a session of its own. The rows have the same bits
    every way (see `LogitsSession.logits`). A session that keeps to that contract never needs it: the further calls show
    in time.
    """

    def __init__(self, model: LogitsModel, shared: str, demonstrations: Sequence[Demonstration], steps: int) -> None:
        self._model, self._shared, self._demonstrations, self._steps = model, shared, demonstrations, steps
        self._whole = attempt(self._opened, demonstrations)
        self._apart: dict[int | None, LogitsSession] = {}  # a session for each row, and None's for the zero-shot one

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Logits:
        """See `LogitsSession.logits`. Raises if the zero-shot row fails, and only then."""
        found = None if self._whole is None else attempt(self._read, self._whole, rows, released)
        if found is not None:
            return found
        zero_shot = self._alone(None, released)
        nothing = np.full_like(zero_shot, np.nan, np.float32)
        some = [attempt(self._alone, row, released) for row in rows]
        stacked: Logits = np.stack([zero_shot, *(nothing if row is None else row for row in some)])
        return stacked

    def close(self) -> None:
        """Drop every session, each whatever becomes of the others."""
        for session in (self._whole, *self._apart.values()):
            if session is not None:
                attempt(session.close)
        self._whole, self._demonstrations = None, ()
        self._apart.clear()

    def _opened(self, demonstrations: Sequence[Demonstration]) -> LogitsSession:
        return self._model.session(self._shared, demonstrations, steps=self._steps)

    def _alone(self, row: int | None, released: Sequence[int]) -> Any:
        """One row, asked for by itself; None is the zero-shot one."""
        found = None
        if self._whole is not None:
            found = attempt(self._read, self._whole, [] if row is None else [row], released)
        if found is None:
            if row not in self._apart:
                self._apart[row] = self._opened([] if row is None else [self._demonstrations[row]])
            found = self._read(self._apart[row], [] if row is None else [0], released)
        return found[-1]

    def _read(self, session: LogitsSession, rows: Sequence[int], released: Sequence[int]) -> Logits:
        found: Any = np.asarray(session.logits(list(rows), list(released)))
        if found.shape != (1 + len(rows), self._model.vocabulary):
            raise ValueError("the model's logits have another shape")
        logits: Logits = found if found.dtype.kind == "f" else found.astype(np.float64)
        return logits

    def __repr__(self) -> str:
        return "<rows of private demonstrations>"
