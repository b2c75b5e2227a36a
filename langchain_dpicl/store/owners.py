"""Owners' keys, which may be names: how they are hidden, encoded, and hashed for a ledger.

A ledger recognises an owner by a keyed hash, in every process and after every restart, without a name. An owner with a
key is recognised by its key. If each exemplar is its own owner, it is recognised by its content, so exemplars of equal
content have one mark, and a ledger takes them for one owner.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from langchain_dpicl.errors import UnsafeConfigurationError

SKETCH = 128
"""Hashes in a fingerprint."""

MARK = 16
"""Bytes of a mark. Two of a million owners share one with probability 1.5e-27."""


class _Hidden:
    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} owners>"  # type: ignore[arg-type]

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("owners' keys are not pickled or copied")


class Owners(_Hidden, Sequence[str]):
    """The owners' keys, in order of first appearance. Private: its ``repr`` shows their number alone.

    No tuple: serialisers write those out.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        return self._keys[index]


class OwnerKeys(_Hidden, list[str]):
    """The keys by slot, as a store keeps them."""


class OwnerSlots(_Hidden, dict[str, int]):
    """The slot of each key."""


def encoded(text: str) -> bytes:
    """UTF-8 of any text, halves of surrogate pairs included."""
    return text.encode("utf-8", "surrogatepass")


def decoded(content: bytes) -> str:
    """The text that `encoded` turned into bytes."""
    return content.decode("utf-8", "surrogatepass")


def owner_mark(key: bytes, content: bytes, *, named: bool) -> bytes:
    """BLAKE2b of an owner's key or of an exemplar's content, keyed, and for one purpose."""
    person = b"dpicl owner" if named else b"dpicl exemplar"
    return hashlib.blake2b(content, digest_size=MARK, key=key, person=person).digest()


def sketch_hash(key: bytes, content: bytes) -> str:
    """One hash of a fingerprint: the first 128 bits of HMAC-SHA256."""
    return hmac.digest(key, content, hashlib.sha256).hex()[:32]
