"""Small parts that all of the store shares: names, marks and records on their way.

Owners have numbers: whole numbers that a store gives out in ascending order and never gives again. Exemplars have ids,
which are numbers too.

A ledger recognises an owner by a keyed hash, in every process and after every restart, without a name. An owner with a
key is recognised by its key. If each exemplar is its own owner, it is recognised by its content, so exemplars of equal
content have one mark, and a ledger takes them for one owner.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.store.records import Batch, Vectors

Numbers = NDArray[np.int64]

Watcher = Callable[[Sequence[int]], None]
MarkOf = Callable[[bytes], bytes]
"""An owner's mark by a key."""
OwnerWatcher = Callable[[Sequence[bytes], MarkOf], Callable[[], object]]
"""Gets a store's own keys (see `ExemplarStore.mark_keys`), and an owner's mark by a key."""

MARK = 16
"""Bytes of a mark. Two of a million owners share one with probability 1.5e-27."""


def owner_mark(key: bytes, content: bytes, *, named: bool) -> bytes:
    """BLAKE2b of an owner's key or of an exemplar's content, keyed, and for one purpose."""
    person = b"dpicl owner" if named else b"dpicl exemplar"
    return hashlib.blake2b(content, digest_size=MARK, key=key, person=person).digest()


def embedder_of(embeddings: object) -> str:
    """The name of an embedding model: its class, and the model that it names."""
    named = (getattr(embeddings, name, None) for name in ("model", "model_name", "deployment", "path"))
    model = next(
        (str(found) for found in named if isinstance(found, (str, os.PathLike)) and str(found)),
        "",
    )
    return f"{type(embeddings).__name__}({model})"


@dataclass(frozen=True, repr=False)
class Held:
    """A record as a store holds it. Private: its id as a document, its packed content, and its owner's key.

    The id is the one that it came with, or ``#`` and its number if it came without.
    """

    document: str
    content: bytes
    owner: str


@dataclass(frozen=True, repr=False)
class Arrival:
    """Checked records, each with its vector and its id as a document, empty for one that has none. Private."""

    batch: Batch
    matrix: Vectors
    documents: Sequence[str]


class Identity(NamedTuple):
    """The facts by which ledgers know an owner: its key, or the content of the exemplar that it is. Private."""

    content: bytes
    is_named: bool
