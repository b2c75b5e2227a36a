"""Spies for tests: every copy of a chain shares them, so that a test hears what a member says to one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from langchain_core.embeddings import Embeddings

from langchain_dpicl.calls import shut
from langchain_dpicl.private import Closed
from langchain_dpicl.private.copy import Pristine


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Within a call, what stands here passes for the test's own: a store and a ledger are open."""
    before, token = getattr(shut._thread, "marked", False), shut._context.set(False)
    shut._thread.marked = False
    try:
        yield
    finally:
        shut._thread.marked = before
        shut._context.reset(token)


class Spy(Closed, Embeddings):
    """An object that passes for a model, which every copy of a chain shares."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        raise NotImplementedError

    def embed_query(self, text: str) -> list[float]:
        raise NotImplementedError


class Turns(Spy):
    """Counts 0, 1, 2, ..., whoever asks."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __iter__(self) -> Turns:
        return self

    def __next__(self) -> int:
        return next(self._count)


class Ears(list[Any], Spy):
    """A list of what was heard."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Same(Pristine):
    """A chain without copies: every call is made on this chain itself."""

    __slots__ = ()

    def __init__(self, chain: Any) -> None:
        self.chain, self.items = chain, []

    def copy(self, bucket: Any = ()) -> Any:
        """The chain itself."""
        return SimpleNamespace(chain=self.chain, given=lambda value: value, returned=lambda value: value)
