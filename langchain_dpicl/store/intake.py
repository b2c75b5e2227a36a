"""Records on their way into a store: checked, packed, embedded.

Every refusal names a position and a key, nothing else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter, InvalidRecords, StoreError
from langchain_dpicl.store.owners import decoded, encoded

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

Vectors = NDArray[np.float32]

NOT_UNIQUE = "ids must be unique: one occurs twice, or is in the store already"

_EMBED_BATCH = 512
_DEEPEST = 64  # levels of metadata: JSON that is written near to Python's recursion limit cannot be read further down


class RecordKeys(NamedTuple):
    """The keys of a record under which its input, its output and its owner stand."""

    input_key: str
    output_key: str | None
    owner_key: str | None


@dataclass(frozen=True, repr=False)
class Batch:
    """Records that `check` has accepted: ``texts`` to embed, and with each what a store keeps of it. Private.

    ``contents`` are JSON of everything but the owner (input, output, metadata). ``owners`` are the owners' keys, None
    if each record is its own owner. ``ids`` are those that the caller chose.
    """

    texts: list[str]
    contents: list[bytes]
    owners: list[str] | None
    ids: NDArray[np.int64] | None

    def names(self, ids: NDArray[np.int64]) -> list[str]:
        """What a store calls the owner of each record, under these ids."""
        return [f"#{i}" for i in ids.tolist()] if self.owners is None else self.owners

    def embed(self, embeddings: Embeddings, vectors: Vectors | None, dimension: int | None, progress: bool) -> Vectors:
        """The texts' embeddings, or these vectors in their place: rows of float32 of norm 1."""
        matrix = embed(embeddings, self.texts, progress) if vectors is None else _as_matrix(vectors, len(self.texts))
        if dimension is not None and matrix.shape[1] != dimension:
            raise InvalidRecords(f"embeddings have {matrix.shape[1]} dimensions, the store has {dimension}")
        return matrix


def check(
    records: Iterable[Mapping[str, Any]], keys: RecordKeys, ids: Sequence[int] | None, *, may_be_empty: bool = True
) -> Batch:
    """Check and pack records. Raises `InvalidRecords`, and `InvalidParameter` for a key that is no name."""
    for name, key in keys._asdict().items():
        if key is not None and (not isinstance(key, str) or not key):
            raise InvalidParameter(name, key, "a non-empty string")
    texts: list[str] = []
    contents: list[bytes] = []
    owners: list[str] = []
    for i, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise InvalidRecords(f"record {i} is not a mapping but {type(record).__name__}")
        for key in filter(None, keys[:2]):
            if key not in record:
                raise InvalidRecords(f"record {i} has no key {key!r}")
            if not isinstance(record[key], str) or not record[key].strip():
                raise InvalidRecords(f"record {i} has no text under {key!r}: a non-empty string is needed")
        if keys.owner_key is not None:
            owner = record.get(keys.owner_key)
            # The text of anything else (a list, a number with a fraction) would make several of one owner.
            is_owner = isinstance(owner, (str, int, np.integer)) and not isinstance(owner, bool)
            if not is_owner or not str(owner).strip():
                raise InvalidRecords(
                    f"record {i} has no owner under {keys.owner_key!r}: it needs one owner: a text or a whole number"
                )
            owners.append(str(owner))
        fields = {key: value for key, value in record.items() if key != keys.owner_key}
        packed = None
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            if not _is_deeper(fields, _DEEPEST):
                packed = encoded(json.dumps(fields, ensure_ascii=False, separators=(",", ":")))
        if packed is None:
            raise InvalidRecords(
                f"record {i} holds metadata that JSON cannot represent, or deeper than {_DEEPEST} levels"
            )
        texts.append(record[keys.input_key])
        contents.append(packed)
    if not texts and not may_be_empty:
        raise InvalidRecords("the store would be empty: at least one record is needed")
    if ids is not None:
        if len(ids) != len(texts):
            raise InvalidRecords(f"ids has {len(ids)} entries for {len(texts)} records")
        if not all(isinstance(i, (int, np.integer)) and 0 <= int(i) < 2**62 for i in ids):
            raise InvalidRecords("ids must be integers from 0 to 2**62 - 1")
        if len(set(ids)) != len(texts):
            raise InvalidRecords(NOT_UNIQUE)
    chosen = None if ids is None else np.asarray(ids, np.int64)
    return Batch(texts, contents, None if keys.owner_key is None else owners, chosen)


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, (dict, list, tuple)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)


def unpack(content: bytes) -> dict[str, Any]:
    """A packed record. Empty if it cannot be read: a bucket is read as a whole, and one owner's record must not fail
    the others'."""
    with contextlib.suppress(Exception):
        fields = json.loads(decoded(content))
        return fields if isinstance(fields, dict) else {}
    return {}


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What a function answers, or the name of the exception that it raised: its message may quote a text."""
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
        parts.append(_as_matrix(answer, len(chunk), start))
    if len({part.shape[1] for part in parts}) != 1:
        raise InvalidRecords("the embeddings have different dimensions")
    return np.concatenate(parts)


def _as_matrix(vectors: Any, count: int, first: int = 0) -> Vectors:
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
