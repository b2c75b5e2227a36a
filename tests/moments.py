"""One moment of a store, for tests that ask it one question: each of these is a reading of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl import ExemplarStore
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.filters import MetadataFilter
from langchain_dpicl.store.records import Vectors


def numbers_of(store: ExemplarStore) -> Numbers:
    """The numbers of the owners who are there, ascending, as in ``store.owners``."""
    with store.reading() as view:
        _, position = view.rows_of(view.numbers)
        return view.numbers[np.unique(position)]


def rows_of(store: ExemplarStore) -> Numbers:
    """All rows, ascending: in the order in which they came, unless the caller gave their ids."""
    with store.reading() as view:
        rows, _ = view.rows_of(view.numbers)
        return np.sort(rows)


def exemplars_of(store: ExemplarStore) -> list[dict[str, Any]]:
    """All exemplars, by row."""
    with store.reading() as view:
        return view.read(rows_of(store))


def vectors_of(store: ExemplarStore) -> Vectors:
    """All vectors, by row."""
    with store.reading() as view:
        return view.vectors(rows_of(store))


def marks_of(store: ExemplarStore, key: bytes) -> dict[str, bytes]:
    """Every owner's mark by a key."""
    numbers = numbers_of(store)
    with store.reading() as view:
        return dict(zip(store.owners, view.marks(numbers, key), strict=True))


def similarities(store: ExemplarStore, query: Vectors) -> NDArray[np.float32]:
    """The similarity of every row to a query."""
    with store.reading() as view:
        return view.similarity(rows_of(store), query)


def eligible(
    store: ExemplarStore,
    query: Vectors | None,
    threshold: float,
    wanted: MetadataFilter | None = None,
) -> Numbers:
    """The numbers of the eligible owners."""
    with store.reading() as view:
        return view.eligible(query, threshold, wanted)


def names_of(store: ExemplarStore, numbers: Numbers) -> list[str]:
    """The keys of owners who are there."""
    named = dict(zip(numbers_of(store).tolist(), store.owners, strict=True))
    return [named[number] for number in numbers.tolist()]
