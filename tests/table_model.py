"""A language model of a few characters whose logits a test writes down."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from langchain_dpicl.decoding import Demonstration

Table = Callable[[str, str], ArrayLike]
"""(demonstration, "" for zero-shot; the text released so far) -> one row of logits."""


@dataclass
class TableModel:
    """Token i is the i-th of ``alphabet``; the prompt's logits are what ``table`` says."""

    table: Table
    alphabet: Sequence[str]
    end_tokens: frozenset[int] = frozenset()
    name: str = "table"
    context: int = 10_000
    calls: list[int] = field(default_factory=list)  # rows of every call
    opened: list[list[str]] = field(default_factory=list)
    closed: int = 0
    forgotten: list[Hashable] = field(default_factory=list)

    @property
    def vocabulary(self) -> int:
        return len(self.alphabet)

    def fits(self, demonstration: str, shared: str, tokens: int) -> bool:
        return len(demonstration) + len(shared) + tokens <= self.context

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(self.alphabet[token] for token in tokens if token not in self.end_tokens)

    def session(self, shared: str, demonstrations: Sequence[Demonstration], *, steps: int) -> TableSession:
        self.opened.append([each.text for each in demonstrations])
        return TableSession(self, shared, list(demonstrations))

    def forget(self, keys: Iterable[Hashable]) -> None:
        self.forgotten.extend(keys)


@dataclass
class TableSession:
    model: TableModel
    shared: str
    demonstrations: list[Demonstration]

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> NDArray[np.float32]:
        self.model.calls.append(len(rows))
        shown = ["", *(self.demonstrations[row].text for row in rows)]
        so_far = "".join(self.model.alphabet[token] for token in released)
        return np.array([self.model.table(text, so_far) for text in shown], np.float32)

    def close(self) -> None:
        self.model.closed += 1
