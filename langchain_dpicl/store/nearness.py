"""Nearness to a query: the query's embedding, which is public, and its inner products with private vectors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import ModelUnavailable, StoreError
from langchain_dpicl.store.intake import Vectors

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

_BLOCK = 1024
"""Rows at a time: they stay in the processor's cache between the product and the sum."""


def embed_query(embeddings: Embeddings, text: str, dimension: int) -> Vectors:
    """The query's embedding, scaled to norm 1 as a store's vectors are; a zero vector stays zero.

    Raises `ModelUnavailable` where the model fails or answers with something other than finite numbers, `StoreError`
    where it has another dimension than the store. Private records play no part.
    """
    failure: type[Exception] | None = None
    answer: Any = None
    try:
        answer = embeddings.embed_query(text)
    except Exception as error:
        failure = type(error)
    return _unit(answer, failure, dimension)


async def aembed_query(embeddings: Embeddings, text: str, dimension: int) -> Vectors:
    """`embed_query` with the model's ``aembed_query``."""
    failure: type[Exception] | None = None
    answer: Any = None
    try:
        answer = await embeddings.aembed_query(text)
    except Exception as error:
        failure = type(error)
    return _unit(answer, failure, dimension)


def _unit(answer: Any, failure: type[Exception] | None, dimension: int) -> Vectors:
    if failure is not None:
        raise ModelUnavailable(
            f"the embedding model fails on the query ({failure.__module__}.{failure.__qualname__}); nothing was charged"
        )
    vector: NDArray[np.float64] | None = None
    with contextlib.suppress(TypeError, ValueError):
        vector = np.array(answer, dtype=np.float64)
    if vector is None or vector.ndim != 1 or not np.isfinite(vector).all():
        raise ModelUnavailable("the query's embedding is not a row of finite numbers; nothing was charged")
    if len(vector) != dimension:
        raise StoreError(
            f"the query's embedding has {len(vector)} dimensions, the store has {dimension}: "
            "give the store the model that embedded its records; nothing was charged"
        )
    largest = np.abs(vector).max()
    if largest > 0:
        vector = vector / largest  # so that no square overflows, or vanishes
        vector = vector / np.linalg.norm(vector)
    return vector.astype(np.float32)


def inner_products(vectors: Vectors, rows: NDArray[np.int64], query: Vectors) -> NDArray[np.float32]:
    """The inner product of each of these rows with the query.

    Each is computed from its own row alone, by the same operations in the same order wherever it lies. A matrix product
    would not do: it treats rows in groups, so the presence of one owner could change the last digit for another, and
    with it who is nearer in a bucket that is not the first owner's.
    """
    found = np.empty(len(rows), np.float32)
    for start in range(0, len(rows), _BLOCK):
        block = vectors[rows[start : start + _BLOCK]]
        block *= query
        block.sum(axis=1, out=found[start : start + _BLOCK])
    return found
