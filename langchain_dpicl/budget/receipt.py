"""The receipt of a release (its cost, and the releases left), and how the ledger names releases and queries."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from typing_extensions import TypedDict


class Receipt(TypedDict):
    """One release's receipt, kept in the ledger. Public: it holds no answer, and no query unless the deployer asks."""

    id: str
    """``budget:line:number``, or ``budget:line:counter.number`` for one principal's; unique in its ledger."""
    budget: str
    plan: str
    """The first 16 hex digits of the SHA-256 of the plan's content."""
    line: str
    number: int
    """Which release of its line this is, from 1; on a line that counts tokens the last of the numbers it charged."""
    principal: str | None
    """The principal whose releases are counted; None if all callers share one counter."""
    assumption: str
    """What the guarantee assumes of the callers, in words."""
    mechanism: str
    """Mechanism and noise, in words."""
    epsilon_spent: float
    """Upper bound for everything released on this budget so far, on all its lines, at the plan's delta."""
    epsilon: float
    delta: float
    remaining: int | None
    """Releases (tokens) left on this line just after this charge, less the tokens that it never sampled. None if owners
    pay with tickets: such a line has no end."""
    tokens: int | None
    """How many tokens it counts for, on a line that counts them."""
    outcome: str
    """"released", or in words the answer that was given instead."""
    replayed: bool
    """Whether this is an earlier release's receipt, whose answer was given once more at no cost."""
    query: str | None
    """A keyed hash of the query (its text if the deployer keeps queries), if there was one."""
    time: str
    """When it was charged: UTC, ISO 8601, from the machine's clock. Nothing is computed from it."""


@dataclass(frozen=True)
class Replayed:
    """An answer that was released before: given again, byte for byte, at no cost."""

    answer: str
    receipt: Receipt


def release_id(budget: str, line: str, principal: str, counter_id: int, number: int) -> str:
    """The id of a release. It shows a principal's counter instead of its name."""
    return f"{budget}:{line}:{counter_id}.{number}" if principal else f"{budget}:{line}:{number}"


def parse_release_id(text: str) -> tuple[str, str, int | None, int] | None:
    """Budget, line, counter (None: the shared one) and number, from an id that `release_id` made; else None."""
    found = re.fullmatch(r"(.*):([^:]*):(?:([0-9]{1,18})\.)?([0-9]{1,18})", str(text), re.DOTALL)
    if found is None:
        return None
    budget, line, counter, number = found.groups()
    return budget, line, None if counter is None else int(counter), int(number)


def read_receipt(text: str, *, replayed: bool = False) -> Receipt:
    """A receipt as the ledger holds it."""
    return cast("Receipt", {**json.loads(text), "replayed": replayed})


# -- queries -----------------------------------------------------------------------------------------------------------


def query_id(key: bytes, where: tuple[str, ...], request: Mapping[str, object], variant: str) -> str | None:
    """The keyed hash by which an equal query is known again, as 64 hex digits.

    Two requests have the same hash if and only if they are equal in value AND type (1, "1", True and 1.0 differ), on
    the same plan, line and variant. The key is random, made once with the ledger, so a reader of receipts alone cannot
    test guesses. None for a request that cannot be serialised, which is then never replayed.
    """
    try:
        content = _encode(where) + _encode(variant) + _encode(dict(request))
    except (TypeError, RecursionError):
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
    """A serialisation that no two different values share: a tag, the length, the content. Raises `TypeError`."""
    tag, content = _PLAIN.get(type(value), (b"m", _model))
    found = content(value)
    return tag + len(found).to_bytes(8, "big") + found


def _model(value: object) -> bytes:
    """LangChain's messages, documents and prompt values are pydantic models: their class and their fields."""
    kind, fields = type(value), None
    if isinstance(getattr(kind, "model_fields", None), dict):
        with contextlib.suppress(Exception):
            fields = value.model_dump()  # type: ignore[attr-defined]
    if type(fields) is not dict:
        raise TypeError("the value's content is not known for certain")
    return _encode(f"{kind.__module__}.{kind.__qualname__}") + _encode(fields)
