"""Keyed hashes by which a ledger recognises an owner, in every process and after every restart, without a name.

An owner with a key is recognised by its key. If each exemplar is its own owner, it is recognised by its content, so
exemplars of equal content have one mark: whatever counts by marks takes them for one owner.
"""

from __future__ import annotations

import hashlib
import hmac

SKETCH = 128
"""Hashes in a fingerprint."""

MARK = 16
"""Bytes of a mark. Two of a million owners share one with probability 1.5e-27."""


def owner_mark(key: bytes, content: bytes, *, named: bool) -> bytes:
    """BLAKE2b of an owner's key or of an exemplar's content, keyed, and for one purpose."""
    person = b"dpicl owner" if named else b"dpicl exemplar"
    return hashlib.blake2b(content, digest_size=MARK, key=key, person=person).digest()


def sketch_hash(key: bytes, content: bytes) -> str:
    """One hash of a fingerprint: the first 128 bits of HMAC-SHA256."""
    return hmac.digest(key, content, hashlib.sha256).hex()[:32]
