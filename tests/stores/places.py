"""The places of a store under test, and an oracle that reads all of it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from numpy.typing import NDArray

from langchain_dpicl import ExemplarStore
from langchain_dpicl.errors import PrivacyWarning
from langchain_dpicl.store.view import StoreView

DIMENSION = 8
EMBEDDINGS = DeterministicFakeEmbedding(size=DIMENSION)
KEY = b"k" * 32
QUERY = np.full(DIMENSION, DIMENSION**-0.5, np.float32)

_numbers = itertools.count()


class Place:
    """A database, with one collection that a test may open again and again, as other processes do.

    Parameters
    ----------
    url
        None for stores in memory, of which each is alone.
    """

    def __init__(self, url: str | None, **options: Any) -> None:
        self.url = url
        self.options = options
        self.name = "exemplars"
        if url is not None and url.startswith("postgresql"):
            self.name = f"c{next(_numbers)}"
        self.made: list[ExemplarStore] = []

    def __call__(self, records: list[dict[str, Any]], **options: Any) -> ExemplarStore:
        """A store with these records, whose owners are under ``owner``."""
        embeddings = options.pop("embeddings", EMBEDDINGS)
        options = {"owner_key": "owner", "name": self.name} | self.options | options
        return self._kept(ExemplarStore.from_records(records, embeddings, self.url, **options))

    def empty(self, embeddings: Embeddings = EMBEDDINGS, **options: Any) -> ExemplarStore:
        """One without content, for documents."""
        options = {"owner_key": "owner", "name": self.name} | self.options | options
        return self._kept(ExemplarStore.empty(embeddings, self.url, **options))

    def open(self, embeddings: Embeddings = EMBEDDINGS, **options: Any) -> ExemplarStore:
        """The collection as another process opens it."""
        assert self.url is not None
        options = {"name": self.name} | self.options | options
        return self._kept(ExemplarStore.open(self.url, embeddings, **options))

    def _kept(self, store: ExemplarStore) -> ExemplarStore:
        self.made.append(store)
        return store


@contextmanager
def place_at(url: str | None, **options: Any) -> Iterator[Place]:
    """A place, whose stores are closed at the end."""
    place = Place(url, **options)
    try:
        yield place
    finally:
        for store in place.made:
            store.close()


def file_url(folder: Path, name: str = "store.db") -> str:
    return f"sqlite:///{folder / name}"


def row(owner: str, text: str = "", **more: Any) -> dict[str, Any]:
    return {"input": text or f"text of {owner}", "output": "x", "owner": owner, **more}


def rows(*owners: str) -> list[dict[str, Any]]:
    return [row(owner) for owner in owners]


def unit_vectors(count: int, seed: int) -> NDArray[np.float32]:
    """Vectors of norm 1, anywhere."""
    vectors = np.random.default_rng(seed).normal(size=(count, DIMENSION))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def texts(store: ExemplarStore) -> list[str]:
    """All inputs, sorted: those that the next release finds."""
    with store.reading() as view:
        found = view.read(view.rows_of(view.numbers)[0])
    return sorted(each[store.input_key] for each in found)


def marks(store: ExemplarStore) -> dict[str, bytes]:
    """The mark of each owner."""
    with store.reading() as view:
        found = [mark for mark in view.marks(view.numbers, KEY) if mark]
    return dict(zip(store.owners, found, strict=True))


def forget_meanwhile(store: ExemplarStore, owner: str) -> int:
    """Forget an owner while somebody reads, so that a file may keep its words in its log for a while."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        return store.forget(owner)


def everything(store: ExemplarStore) -> dict[str, Any]:
    """All that a reading tells. Stores that went through the same changes are equal in it, bit by bit."""
    with store.reading() as view:
        return told_by(view)


def told_by(view: StoreView) -> dict[str, Any]:
    found, position = view.rows_of(view.numbers)
    return {
        "numbers": view.numbers.tolist(),
        "ids": found.tolist(),
        "owner of each": position.tolist(),
        "exemplars": view.read(found),
        "records": [(each.document, each.content, each.owner) for each in view.records(found)],
        "marks": view.marks(view.numbers, KEY),
        "vectors": view.vectors(found).tobytes(),
        "similarity": view.similarity(found, QUERY).tobytes(),
        "eligible": [view.eligible(QUERY, threshold).tolist() for threshold in (-1.0, -0.2, 0.0, 0.3, 0.9)],
    }


def check_against_all_products(view: StoreView) -> None:
    """The gate and the similarities, against inner products in double precision."""
    found, position = view.rows_of(view.numbers)
    products = view.vectors(found).astype(float) @ QUERY.astype(float)
    np.testing.assert_allclose(view.similarity(found, QUERY), products, atol=1e-6)
    levels = np.sort(products)
    between = (levels[1:] + levels[:-1]) / 2
    for threshold in [-1.0, *between[levels[1:] - levels[:-1] > 1e-5]]:
        expected = np.unique(position[products > threshold])
        assert view.eligible(QUERY, threshold).tolist() == view.numbers[expected].tolist()
