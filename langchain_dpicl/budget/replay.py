"""Replay: the keyed hash by which an equal query is known again, and the wait for one that is being answered.

Two requests have the same hash if and only if they are equal in value AND type (1, "1", True and 1.0 differ), on the
same plan, line and variant. The key is random, made once with the ledger: a reader of receipts alone cannot try
guesses.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from typing import Any

from langchain_dpicl.budget.claims import Claim

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25


class _NotSerialisable(Exception):
    """A value whose content cannot be told for certain."""


def query_id(key: bytes, where: tuple[str, ...], request: Mapping[str, object], variant: str) -> str | None:
    """The hash as 64 hex digits; None for a request that cannot be serialised, which is then never replayed."""
    try:
        content = _encode(where) + _encode(variant) + _encode(dict(request))
    except (_NotSerialisable, RecursionError):
        return None
    return hmac.new(key, content, hashlib.sha256).hexdigest()


_PLAIN: dict[type, tuple[bytes, Callable[[Any], bytes]]] = {
    type(None): (b"n", lambda _: b""),
    bool: (b"b", lambda value: b"1" if value else b"0"),
    int: (b"i", lambda value: b"%x" % value),
    float: (b"f", lambda value: value.hex().encode()),
    str: (b"s", lambda value: value.encode("utf-8", "surrogatepass")),
    bytes: (b"y", lambda value: value),
    list: (b"l", lambda value: b"".join(map(_encode, value))),
    tuple: (b"t", lambda value: b"".join(map(_encode, value))),
    set: (b"e", lambda value: b"".join(sorted(map(_encode, value)))),
    frozenset: (b"z", lambda value: b"".join(sorted(map(_encode, value)))),
    dict: (b"d", lambda value: b"".join(sorted(_encode(key) + _encode(item) for key, item in value.items()))),
}
"""By exact type, subclasses excluded: a tag, and the content."""


def _encode(value: object) -> bytes:
    """A serialisation that no two different values share: a tag, the length, the content."""
    tag, content = _PLAIN.get(type(value), (b"m", _model))
    found = content(value)
    return tag + len(found).to_bytes(8, "big") + found


def _model(value: object) -> bytes:
    """LangChain's messages, documents and prompt values are pydantic models: their class and their fields."""
    kind = type(value)
    dump = getattr(value, "model_dump", None)
    if not callable(dump) or not isinstance(getattr(kind, "model_fields", None), dict):
        raise _NotSerialisable
    fields: object = None
    with contextlib.suppress(Exception):
        fields = dump()
    if type(fields) is not dict:
        raise _NotSerialisable
    return _encode(f"{kind.__module__}.{kind.__qualname__}") + _encode(fields)


class Waiting:
    """How long the claims of others were waited for, by the monotonic clock of this process alone."""

    def __init__(self, patience: float) -> None:
        self.overdue: dict[str, int] = {}
        self._patience = patience
        self._seen: dict[str, tuple[int, float]] = {}
        self._pause = _FIRST_PAUSE

    def still(self, claims: Mapping[str, Claim]) -> dict[str, Claim]:
        """Those that are pending and not waited for long enough. A claim that another caller took over starts anew."""
        now = time.monotonic()
        for query, claim in claims.items():
            if query not in self._seen or self._seen[query][0] != claim.number:
                self._seen[query] = (claim.number, now)
            if now - self._seen[query][1] >= self._patience:
                self.overdue[query] = claim.number
        return {q: claim for q, claim in claims.items() if claim.pending and self.overdue.get(q) != claim.number}

    def pause(self) -> float:
        """Seconds until the next look: a little longer each time."""
        pause, self._pause = self._pause, min(1.5 * self._pause, _LONGEST_PAUSE)
        return pause
