"""Keyed hashes of queries: what replay compares, and what a receipt holds instead of the query's text.

Two requests have the same hash if and only if they are equal in value AND type (1, "1", True and 1.0 differ), on the
same plan, line and variant. The key is random, made once with the ledger: whoever sees receipts alone cannot try
guesses.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping


class _NotSerialisable(Exception):
    """A value whose content cannot be told for certain."""


def query_id(key: bytes, where: tuple[str, ...], request: Mapping[str, object], variant: str) -> str | None:
    """The hash as 64 hex digits; None for a request that cannot be serialised, which is then never replayed."""
    try:
        content = _encode(where) + _encode(variant) + _encode(dict(request))
    except (_NotSerialisable, RecursionError):
        return None
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _encode(value: object) -> bytes:
    """A serialisation that no two different values share: a tag, the length, the content."""
    kind = type(value)
    if value is None:
        return _part(b"n", b"")
    if kind is bool:
        return _part(b"b", b"1" if value else b"0")
    if isinstance(value, int) and kind is int:
        return _part(b"i", b"%x" % value)
    if isinstance(value, float) and kind is float:
        return _part(b"f", value.hex().encode())
    if isinstance(value, str) and kind is str:
        return _part(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes) and kind is bytes:
        return _part(b"y", value)
    if isinstance(value, (list, tuple)) and kind in (list, tuple):
        return _part(b"l" if kind is list else b"t", b"".join(map(_encode, value)))
    if isinstance(value, (set, frozenset)) and kind in (set, frozenset):
        return _part(b"e" if kind is set else b"z", b"".join(sorted(map(_encode, value))))
    if isinstance(value, dict) and kind is dict:
        return _part(b"d", b"".join(sorted(_encode(name) + _encode(item) for name, item in value.items())))
    return _part(b"m", _model(value))


def _model(value: object) -> bytes:
    """LangChain's messages, documents and prompt values are pydantic models: their class and their fields."""
    kind = type(value)
    dump = getattr(value, "model_dump", None)
    if not callable(dump) or not isinstance(getattr(kind, "model_fields", None), dict):
        raise _NotSerialisable
    fields: object = None
    try:
        fields = dump()
    except Exception:
        fields = None
    if type(fields) is not dict:
        raise _NotSerialisable
    return _encode(f"{kind.__module__}.{kind.__qualname__}") + _encode(fields)


def _part(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "big") + content
