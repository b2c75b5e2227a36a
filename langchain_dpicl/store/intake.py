"""Records on their way into a store: checked, embedded, packed.

Every refusal names a position and a key, nothing else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter, InvalidRecords, StoreError

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

Vectors = NDArray[np.float32]

_EMBED_BATCH = 512

_DEEPEST = 64
"""Levels of a record's metadata. JSON that is written near to Python's recursion limit cannot be read further down."""


def check_records(
    rows: Sequence[Mapping[str, Any]], input_key: str, output_key: str | None, owner_key: str | None
) -> tuple[list[str], list[str] | None]:
    """Texts to embed, and owners' keys where ``owner_key`` is given. Raises `InvalidRecords`."""
    for name, key in (("input_key", input_key), ("output_key", output_key), ("owner_key", owner_key)):
        if key is not None and (not isinstance(key, str) or not key):
            raise InvalidParameter(name, key, "a non-empty string")
    texts: list[str] = []
    owners: list[str] = []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidRecords(f"record {i} is not a mapping but {type(row).__name__}")
        for key in (input_key, output_key):
            if key is None:
                continue
            if key not in row:
                raise InvalidRecords(f"record {i} has no key {key!r}")
            if not isinstance(row[key], str) or not row[key].strip():
                raise InvalidRecords(f"record {i} has no text under {key!r}: a non-empty string is needed")
        texts.append(row[input_key])
        if owner_key is not None:
            owner = row.get(owner_key)
            # The text of anything else (a list, a number with a fraction) would make several of one owner.
            is_owner = isinstance(owner, (str, int, np.integer)) and not isinstance(owner, bool)
            if not is_owner or not str(owner).strip():
                raise InvalidRecords(
                    f"record {i} has no owner under {owner_key!r}: it needs one owner: a text or a whole number"
                )
            owners.append(str(owner))
    return texts, owners if owner_key is not None else None


def pack(rows: Sequence[Mapping[str, Any]], owner_key: str | None) -> list[bytes]:
    """The records as the arena holds them: JSON of everything but the owner (input, output, metadata)."""
    packed: list[bytes] = []
    for i, row in enumerate(rows):
        text: str | None = None
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            fields = {key: value for key, value in row.items() if key != owner_key}
            if _is_deeper(fields, _DEEPEST):
                raise RecursionError
            text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        if text is None:
            raise InvalidRecords(
                f"record {i} holds metadata that JSON cannot represent, or deeper than {_DEEPEST} levels"
            )
        packed.append(text.encode("utf-8", "surrogatepass"))
    return packed


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, (dict, list, tuple)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)


def unpack(content: bytes) -> dict[str, Any]:
    """A record that `pack` made. Empty if it cannot be read: a bucket is read as a whole, and one owner's record must
    not fail the others'."""
    with contextlib.suppress(Exception):
        fields = json.loads(content.decode("utf-8", "surrogatepass"))
        return fields if isinstance(fields, dict) else {}
    return {}


def embed(embeddings: Embeddings, texts: Sequence[str], progress: bool) -> Vectors:
    """Embed in batches, with progress on a terminal."""
    from tqdm import tqdm

    parts: list[Vectors] = []
    starts = range(0, len(texts), _EMBED_BATCH)
    for start in tqdm(starts, desc="embedding", unit="batch", disable=None if progress and len(starts) > 1 else True):
        chunk = list(texts[start : start + _EMBED_BATCH])
        parts.append(as_matrix(_call(embeddings, chunk), len(chunk), None, start))
    if len({part.shape[1] for part in parts}) != 1:
        raise InvalidRecords("the embeddings have different dimensions")
    return np.concatenate(parts)


def _call(embeddings: Embeddings, texts: list[str]) -> Any:
    """The model's answer; its own error may quote a text, so it does not get out."""
    failure: type[Exception] | None = None
    try:
        return embeddings.embed_documents(texts)
    except Exception as error:
        failure = type(error)
    raise StoreError(f"the embedding model failed ({failure.__module__}.{failure.__qualname__}); nothing was added")


def as_matrix(vectors: Any, count: int, dimension: int | None, first: int = 0) -> Vectors:
    """Rows as float32 of norm 1; refuses other shapes and values that are not numbers."""
    matrix: Vectors | None = None
    with contextlib.suppress(TypeError, ValueError):
        matrix = np.array(vectors, dtype=np.float32, order="C")
    if matrix is None or matrix.ndim != 2 or matrix.shape[1] == 0:
        raise InvalidRecords("the embeddings are not rows of numbers of one dimension")
    if matrix.shape[0] != count:
        raise InvalidRecords(f"{matrix.shape[0]} embeddings for {count} records")
    if dimension is not None and matrix.shape[1] != dimension:
        raise InvalidRecords(f"embeddings have {matrix.shape[1]} dimensions, the store has {dimension}")
    norms = np.linalg.norm(matrix.astype(np.float64), axis=1)
    bad = np.flatnonzero(~np.isfinite(norms))
    if len(bad):
        raise InvalidRecords(f"the embedding of record {first + int(bad[0])} is not finite")
    matrix /= np.where(norms > 0, norms, 1.0).astype(np.float32)[:, None]
    return matrix
