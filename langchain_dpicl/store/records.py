"""Records on their way in: mappings and LangChain documents; checked, packed and embedded.

Every refusal names a position and a key, nothing else. Queries, which are public, are embedded here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
import itertools
import json
import uuid
from collections.abc import (
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import (
    InvalidParameter,
    InvalidRecords,
    LocalModelError,
    MissingExtra,
    ModelUnavailable,
    StoreError,
    UnsafeConfigurationError,
)

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings

Vectors = NDArray[np.float32]

NOT_UNIQUE = "ids must be unique: one occurs twice, or is in the store already"

_EMBED_BATCH = 512
_END: Any = object()
_DEEPEST = 64  # levels of metadata: JSON that is written near to Python's recursion limit cannot be read further down


class RecordKeys(NamedTuple):
    """The keys of a record under which its input, its output and its owner stand."""

    input_key: str
    output_key: str | None
    owner_key: str | None


class Owners(Sequence[str]):
    """The owners' keys, which may be names, in order of first appearance. Private.

    No tuple: serialisers write those out. Their ``repr`` is their number, and they are not pickled or copied.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        return self._keys[index]

    def __repr__(self) -> str:
        return f"<{len(self)} owners>"

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("owners' keys are not pickled or copied")


@dataclass(frozen=True, repr=False)
class Batch:
    """Records that `check_records` has accepted: ``texts`` to embed, and the contents that a store keeps. Private.

    ``contents`` are JSON of everything but the owner (input, output, metadata). ``owners`` are the owners' keys, None
    if each record is its own owner. ``ids`` are those that the caller chose.
    """

    texts: list[str]
    contents: list[bytes]
    owners: list[str] | None
    ids: NDArray[np.int64] | None

    def names(self, ids: NDArray[np.int64]) -> list[str]:
        """The name of each record's owner in a store that gives it this id."""
        return [f"#{i}" for i in ids.tolist()] if self.owners is None else self.owners

    def embed(
        self,
        embeddings: Embeddings,
        vectors: Vectors | None,
        dimension: int | None,
        *,
        progress: bool = False,
        batch: bool = False,
    ) -> Vectors:
        """The texts' embeddings, or these vectors in their place: rows of float32 of norm 1."""
        if vectors is None:
            matrix = embed(embeddings, self.texts, progress, batch=batch)
        else:
            matrix = as_matrix(vectors, len(self.texts))
        if dimension is not None and matrix.shape[1] != dimension:
            raise InvalidRecords(f"embeddings have {matrix.shape[1]} dimensions, the store has {dimension}")
        return matrix


def check_records(
    records: Iterable[Mapping[str, Any]],
    keys: RecordKeys,
    ids: Sequence[int] | None,
    *,
    may_be_empty: bool = True,
) -> Batch:
    """Check and pack records. Raises `InvalidRecords`, and `InvalidParameter` for a key that is no name."""
    for name, key in keys._asdict().items():
        if key is not None and (not isinstance(key, str) or not key):
            raise InvalidParameter(name, key, "a non-empty string")
    accepted: list[tuple[str, bytes, str]] = []
    for i, given in enumerate(read_each(records, "record")):
        found, fault = attempt(_checked, given, keys)
        text, content, owner, problem = found or ("", b"", "", f"cannot be read ({fault})")
        if problem:
            raise InvalidRecords(f"record {i} {problem}")
        accepted.append((text, content, owner))
    if not accepted and not may_be_empty:
        raise InvalidRecords("the store would be empty: at least one record is needed")
    chosen: NDArray[np.int64] | None = None
    if ids is not None:
        ids = list(read_each(ids, "id", _whole))
        if len(ids) != len(accepted):
            raise InvalidRecords(f"ids has {len(ids)} entries for {len(accepted)} records")
        if not all(0 <= i < 2**62 for i in ids):
            raise InvalidRecords("ids must be integers from 0 to 2**62 - 1")
        if len(set(ids)) != len(accepted):
            raise InvalidRecords(NOT_UNIQUE)
        chosen = np.asarray(ids, np.int64)
    return Batch(
        [text for text, _, _ in accepted],
        [content for _, content, _ in accepted],
        None if keys.owner_key is None else [owner for _, _, owner in accepted],
        chosen,
    )


def _checked(given: Any, keys: RecordKeys) -> tuple[str, bytes, str, str]:
    """A record's text, its content, its owner if there is a key of owners, and its problem. Types and texts of users'
    own run their code here, so call it with `attempt`."""
    if not isinstance(given, Mapping):
        return "", b"", "", f"is not a mapping but {type(given).__name__}"
    record = _with_plain_keys(given)
    for key in filter(None, keys[:2]):
        if key not in record:
            return "", b"", "", f"has no key {key!r}"
        record[key] = plain(record[key])
        if not isinstance(record[key], str) or not record[key].strip():
            return "", b"", "", f"has no text under {key!r}: a non-empty string is needed"
    owner = ""
    if keys.owner_key is not None:
        found = plain(record.get(keys.owner_key))
        # The text of anything else (a list, a number with a fraction) would make several of one owner.
        if isinstance(found, (str, int, np.integer, uuid.UUID)) and not isinstance(found, bool):
            owner = plain(str(found))
        if not owner.strip():
            return "", b"", "", f"has no owner under {keys.owner_key!r}: it needs one owner: a text or a whole number"
    content, problem = pack(record, keys)
    return record[keys.input_key], content, owner, problem and f"holds {problem}"


def plain(value: Any) -> Any:
    """A text of a type of its own, such as an enumeration's member, as the text that it holds; all else as it is."""
    return str.__str__(value) if isinstance(value, str) else value


def _with_plain_keys(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy. `ValueError` for two keys that are one text."""
    record = dict(given)
    found = {plain(key): value for key, value in record.items()}
    if len(found) < len(record):
        raise ValueError
    return found


def _whole(number: Any) -> int:
    """A whole number as Python's, -1 for anything else."""
    return int(number) if isinstance(number, (int, np.integer)) else -1


def pack(record: Mapping[str, Any], keys: RecordKeys) -> tuple[bytes, str]:
    """JSON of a record without its owner; or the problem, by its key, of a record that cannot be kept."""
    kept = {key: value for key, value in record.items() if key != keys.owner_key}
    content, fault = attempt(_json_of, kept, keys)
    if not fault:
        return content, ""
    key = next(
        (key for key, value in kept.items() if attempt(_json_of, {key: value}, keys)[1]),
        None,
    )
    return b"", f"metadata that JSON cannot represent, or deeper than {_DEEPEST} levels, under {key!r}"


def _json_of(record: dict[str, Any], keys: RecordKeys) -> bytes:
    fields: Any = _ordered(record, _DEEPEST)
    fields = {key: fields[key] for key in keys[:2] if key in fields} | fields
    return encoded(json.dumps(fields, ensure_ascii=False, separators=(",", ":"), default=as_json))


def _ordered(value: object, levels: int) -> object:
    """A value with its mappings in the order of their keys: some sources have none, and equal exemplars, which are
    known by their content, must have equal JSON. `ValueError` for deeper levels, and for keys that JSON would change,
    so that one could replace another."""
    if not isinstance(value, (dict, list, tuple, set, frozenset)):
        return value
    if levels == 0 or (isinstance(value, dict) and not all(isinstance(key, str) for key in value)):
        raise ValueError
    if isinstance(value, dict):
        return {key: _ordered(value[key], levels - 1) for key in sorted(value)}
    inner = [_ordered(each, levels - 1) for each in value]
    return inner if isinstance(value, (list, tuple)) else value  # `as_json` sorts a set


def as_json(value: object) -> object:
    """A common value of metadata as JSON has it, for ``json.dumps(default=)``. `TypeError` for any other.

    A date or time, NumPy's too, as its ISO text, and None for one that is none (NaT); a UUID, a path or a decimal
    number as its text; a number of NumPy's as Python's; an enumeration's member as its value; a set as the list of its
    elements in the order of their JSON, since an exemplar without an owner is known by its content.
    """
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat() if value == value else None  # of pandas
    if isinstance(value, np.datetime64):  # as an item it may be a date, or a number
        return None if np.isnat(value) else str(value)
    if isinstance(value, (uuid.UUID, PurePath, Decimal)):
        return str(value)
    if isinstance(value, np.generic) and not isinstance(value, np.timedelta64):
        return value.item()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=lambda each: json.dumps(each, default=as_json))
    raise TypeError


def encoded(text: str) -> bytes:
    """UTF-8 of any text, halves of surrogate pairs included."""
    return text.encode("utf-8", "surrogatepass")


def decoded(content: bytes) -> str:
    """The text that `encoded` turned into bytes."""
    return content.decode("utf-8", "surrogatepass")


def unpack(content: bytes) -> dict[str, Any]:
    """A packed record. Empty if it cannot be read: a bucket is read as a whole, and one owner's record must not fail
    the others'."""
    with contextlib.suppress(Exception):
        fields = json.loads(content.decode("utf-8", "surrogatepass"))
        if isinstance(fields, dict):
            return fields
    return {}


def records_of(documents: Iterable[Document], input_key: str) -> list[dict[str, Any]]:
    """Each document as a record: its text under ``input_key``, its metadata beside it. Raises `InvalidRecords`."""
    records: list[dict[str, Any]] = []
    for i, document in enumerate(read_each(documents, "document", _parts)):
        if not isinstance(document, tuple):
            raise InvalidRecords(f"document {i} is not a Document but {document}")
        text, metadata = document
        if not text.strip():
            raise InvalidRecords(f"document {i} has no text")
        if input_key in metadata:
            raise InvalidRecords(
                f"document {i} has metadata under {input_key!r}, where its text goes: name another input_key"
            )
        records.append({input_key: text, **metadata})
    return records


def _parts(document: Any) -> tuple[str, dict[str, Any]] | str:
    """A document's text and metadata, or the name of another type."""
    from langchain_core.documents import Document

    return text_and_metadata(document) if isinstance(document, Document) else type(document).__name__


def text_and_metadata(document: Document) -> tuple[str, dict[str, Any]]:
    """A document's parts. `TypeError` for other types, which can have been assigned.

    The metadata are a copy of all levels: a loader may go on filling a list, then with what belongs to others.
    """
    text = plain(document.page_content)
    metadata = document.metadata
    if not isinstance(text, str) or not isinstance(metadata, Mapping):
        raise TypeError
    return text, copy.deepcopy(_with_plain_keys(metadata))


# -- what others' code does --------------------------------------------------------------------------------------------


_INTERRUPTS = (KeyboardInterrupt, SystemExit, asyncio.CancelledError)


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """A function's answer, or the name of the exception that it raised, without its message, which may quote a text.

    Also of one that is no `Exception`. An interrupt passes, without what came with it.
    """
    try:
        return function(*arguments), ""
    except BaseException as error:
        kind = type(error)
        fault = _fault(error)
    _pass_on(kind, _INTERRUPTS)
    return None, fault


async def aattempt(function: Callable[..., Awaitable[Any]], *arguments: Any) -> tuple[Any, str]:
    """The same for a function whose answer is awaited. The end of the coroutine that waits passes, too."""
    try:
        return await function(*arguments), ""
    except BaseException as error:
        kind = type(error)
        fault = _fault(error)
    _pass_on(kind, (*_INTERRUPTS, GeneratorExit))
    return None, fault


def _pass_on(kind: type[BaseException], passing: Iterable[type[BaseException]]) -> None:
    for each in passing:
        if issubclass(kind, each):
            raise each


def _fault(error: BaseException) -> str:
    """The exception's name, with the message where this package wrote it about a model or a part that does not load."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return f"{name}: {error}" if type(error) in (LocalModelError, MissingExtra) else name


def read_each(given: Iterable[Any], what: str, read: Callable[[Any], Any] = plain) -> Iterator[Any]:
    """Read the elements of a user's list, loader or generator with ``read``, each when it comes.

    `InvalidRecords` if one fails: its error may quote a text. A generator that is left early ends here, too.
    """

    def following() -> Any:
        element = next(elements, _END)
        return element if element is _END else read(element)

    elements, fault = attempt(iter, given)
    try:
        for i in itertools.count():
            if not fault:
                element, fault = attempt(following)
            if fault:
                raise InvalidRecords(f"{what} {i} cannot be read ({fault})")
            if element is _END:
                return
            yield element
    finally:
        attempt(lambda: elements.close() if isinstance(elements, Generator) else None)


# -- their vectors, and those of queries -------------------------------------------------------------------------------


def embed(embeddings: Embeddings, texts: Sequence[str], progress: bool = False, *, batch: bool = True) -> Vectors:
    """Embeddings of the texts: rows of norm 1. Raises `StoreError` if the model fails.

    Private texts go to the model one by one, unless their owner chose otherwise: in a ``batch`` one text may move the
    last bits of another's vector.
    """
    from tqdm import tqdm

    parts: list[Vectors] = []
    size = _EMBED_BATCH if batch else 1
    starts = range(0, len(texts), size)
    bar = tqdm(
        starts,
        desc="embedding",
        unit="batch" if batch else "text",
        disable=None if progress and len(texts) > _EMBED_BATCH else True,
    )
    for start in bar:
        chunk = list(texts[start : start + size])
        answer, fault = attempt(embeddings.embed_documents, chunk)
        if fault:
            raise StoreError(f"the embedding model failed ({fault}); nothing was added")
        parts.append(as_matrix(answer, len(chunk), start))
    if len({part.shape[1] for part in parts}) != 1:
        raise InvalidRecords("the embeddings have different dimensions")
    return np.concatenate(parts)


def as_matrix(vectors: Any, count: int, first: int = 0) -> Vectors:
    """Rows as float32 of norm 1; refuses other shapes and values that are not numbers."""
    found, fault = attempt(lambda: np.array(vectors, dtype=np.float32, order="C"))
    matrix: Vectors = found
    if fault or matrix.ndim != 2 or matrix.shape[1] == 0:
        raise InvalidRecords("the embeddings are not rows of numbers of one dimension")
    if matrix.shape[0] != count:
        raise InvalidRecords(f"{matrix.shape[0]} embeddings for {count} records")
    norms = np.linalg.norm(matrix.astype(np.float64), axis=1)
    bad = np.flatnonzero(~np.isfinite(norms))
    if len(bad):
        raise InvalidRecords(f"the embedding of record {first + int(bad[0])} is not finite")
    large = norms > 1e38  # nearly more than float32 holds
    matrix[large] *= 2.0**-64
    norms[large] *= 2.0**-64
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
    return _unit(*await aattempt(embeddings.aembed_query, text), dimension)


def _check_length(embeddings: Any, text: str) -> None:
    """`InvalidParameter` for a query of which the model would read the beginning alone, as far as it says so."""
    length, limit = _length(embeddings, text)
    if length > limit:
        raise InvalidParameter(
            "input",
            f"{length} tokens",
            f"a query of at most {limit} tokens, as many as the embedding model reads; nothing was charged",
        )


def _length(embeddings: Any, text: str) -> tuple[int, int]:
    """A text's tokens, and how many of them the model reads; both 0 if it does not say, or refuses by itself.

    A sentence-transformers model cuts without a word.
    """
    with contextlib.suppress(Exception):  # a model that cannot say how long is asked for the embedding itself
        if hasattr(embeddings, "query_length"):
            length, limit = embeddings.query_length(text)
            return length, limit
        model = embeddings._client  # of langchain-huggingface
        if isinstance(model.max_seq_length, int):
            return len(model.tokenizer(text, verbose=False)["input_ids"]), model.max_seq_length
    return 0, 0


def too_long(embeddings: Any, texts: Sequence[str]) -> list[bool]:
    """Return for each text whether the model reads its beginning alone, as far as it says so."""
    longest = max(texts, key=len, default="")
    _, limit = _length(embeddings, longest[:1])
    if not limit:
        return [False] * len(texts)
    # A token is a character at least, but for the two around a text.
    return [len(text) > limit - 2 and _length(embeddings, text)[0] > limit for text in texts]


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
