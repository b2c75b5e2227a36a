"""Vectors of norm 1: of private records on their way in, of public queries, and their inner products."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter, InvalidRecords, ModelUnavailable, StoreError

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

Vectors = NDArray[np.float32]

_EMBED_BATCH = 512
_BLOCK = 1024  # rows at a time: they stay in the processor's cache between the product and the sum


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """A function's answer, or the name of the exception that it raised, without its message, which may quote a text."""
    try:
        return function(*arguments), ""
    except Exception as error:
        return None, f"{type(error).__module__}.{type(error).__qualname__}"


def embed(embeddings: Embeddings, texts: Sequence[str], progress: bool) -> Vectors:
    """Embeddings of the texts, in batches: rows of norm 1. Raises `StoreError` if the model fails."""
    from tqdm import tqdm

    parts: list[Vectors] = []
    starts = range(0, len(texts), _EMBED_BATCH)
    for start in tqdm(starts, desc="embedding", unit="batch", disable=None if progress and len(starts) > 1 else True):
        chunk = list(texts[start : start + _EMBED_BATCH])
        answer, fault = attempt(embeddings.embed_documents, chunk)
        if fault:
            raise StoreError(f"the embedding model failed ({fault}); nothing was added")
        parts.append(as_matrix(answer, len(chunk), start))
    if len({part.shape[1] for part in parts}) != 1:
        raise InvalidRecords("the embeddings have different dimensions")
    return np.concatenate(parts)


def as_matrix(vectors: Any, count: int, first: int = 0) -> Vectors:
    """Rows as float32 of norm 1; refuses other shapes and values that are not numbers."""
    matrix: Vectors | None = None
    with contextlib.suppress(TypeError, ValueError):
        matrix = np.array(vectors, dtype=np.float32, order="C")
    if matrix is None or matrix.ndim != 2 or matrix.shape[1] == 0:
        raise InvalidRecords("the embeddings are not rows of numbers of one dimension")
    if matrix.shape[0] != count:
        raise InvalidRecords(f"{matrix.shape[0]} embeddings for {count} records")
    norms = np.linalg.norm(matrix.astype(np.float64), axis=1)
    bad = np.flatnonzero(~np.isfinite(norms))
    if len(bad):
        raise InvalidRecords(f"the embedding of record {first + int(bad[0])} is not finite")
    matrix /= np.where(norms > 0, norms, 1.0).astype(np.float32)[:, None]
    return matrix


def embed_query(embeddings: Embeddings, text: str, dimension: int) -> Vectors:
    """The query's embedding, scaled to norm 1 as a store's vectors are; a zero vector stays zero.

    Private records play no part. Raises `ModelUnavailable` if the model fails or answers with something other than
    finite numbers, `StoreError` if its dimension is not the store's, `InvalidParameter` if the model would not read the
    whole query.
    """
    _check_length(embeddings, text)
    return _unit(*attempt(embeddings.embed_query, text), dimension)


async def aembed_query(embeddings: Embeddings, text: str, dimension: int) -> Vectors:
    """`embed_query` with the model's ``aembed_query``."""
    await asyncio.to_thread(_check_length, embeddings, text)
    answer, fault = None, ""
    try:
        answer = await embeddings.aembed_query(text)
    except Exception as error:
        fault = f"{type(error).__module__}.{type(error).__qualname__}"
    return _unit(answer, fault, dimension)


def _check_length(embeddings: Any, text: str) -> None:
    """`InvalidParameter` for a query of which the model would read the beginning alone, as far as it says so.

    A sentence-transformers model cuts without a word. Others refuse by themselves.
    """
    length, limit = 0, 0
    with contextlib.suppress(Exception):  # a model that cannot say how long is asked for the embedding itself
        if hasattr(embeddings, "query_length"):
            length, limit = embeddings.query_length(text)
        else:
            model = embeddings._client  # of langchain-huggingface
            if isinstance(model.max_seq_length, int):
                limit = model.max_seq_length
                length = len(model.tokenizer(text, verbose=False)["input_ids"])
    if length > limit:
        bound = f"a query of at most {limit} tokens, as many as the embedding model reads; nothing was charged"
        raise InvalidParameter("input", f"{length} tokens", bound)


def _unit(answer: Any, fault: str, dimension: int) -> Vectors:
    if fault:
        raise ModelUnavailable(f"the embedding model fails on the query ({fault}); nothing was charged")
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
        vector = vector / largest  # no square overflows, or vanishes
        vector = vector / np.linalg.norm(vector)
    return vector.astype(np.float32)


def rounding(dimension: int) -> float:
    """A bound on the difference of two ways to compute the inner product of two vectors of norm 1 in single precision.

    Each is within n u / (1 - n u) of the exact one, with n operations on the way and u = 2^-24, whatever the order of
    its sum (Higham 2002, section 3.1); norms are 1 up to rounding. Twice as much again covers that.
    """
    return 4.0 * (dimension + 4) * 2.0**-24


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
