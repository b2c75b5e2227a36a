"""A sampler's interface to a language model: next-token logits for many (demonstration, shared text) prompts at once.

The shared text is public, the demonstrations are private. A demonstration comes first in its prompt, so that a model's
state of it serves every later query.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import UnsafeConfigurationError

T = TypeVar("T")
Logits = NDArray[np.float32]


@dataclass(frozen=True, repr=False)
class Demonstration:
    """One rendered exemplar. Private: ``repr`` and ``str`` show nothing of it.

    ``key`` identifies the exemplar in a store, for the states that a model keeps between answers; the model reads
    ``text``.
    """

    key: Hashable
    text: str


class NotCopied:
    """Base of objects that hold private states or a key: they are not pickled or copied."""

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError(f"a {type(self).__name__.strip('_')} is not pickled or copied")


class LogitsSession(Protocol):
    """One answer: a public shared text, and the demonstrations that its steps will need."""

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Logits:
        """(1 + len(rows), vocabulary) natural-log scores of the next token, normalised or not.

        Row 0 is zero-shot (the shared text alone); row 1 + j belongs to ``demonstrations[rows[j]]`` followed by the
        shared text. Each prompt ends with the ``released`` tokens, which only grow from call to call, or stay. A row
        may be asked for twice, in one call or in several.

        A row must not depend, to the last bit, on which other rows are asked for or were, nor on whether they fail: the
        others are what an owner's absence changes, and the proof charges an owner for its own term alone.

        A row whose prompt the model cannot answer is all NaN, and counts nothing. Only row 0 may raise.
        """

    def close(self) -> None:
        """Drop this answer's own state."""


@runtime_checkable
class LogitsModel(Protocol):
    """A language model that shows its whole next-token distribution."""

    @property
    def name(self) -> str:
        """Public: part of the identity of an answer."""

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer."""

    def fits(self, demonstration: str, shared: str, tokens: int) -> bool:
        """Whether demonstration, shared text and that many tokens fit the context. Depends on nothing else."""

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without the end tokens."""

    def session(self, shared: str, demonstrations: Sequence[Demonstration], *, steps: int) -> LogitsSession:
        """Open an answer of at most ``steps`` tokens."""

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop every private state kept for these demonstrations."""


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
