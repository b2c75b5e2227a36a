"""Values that are checked once: numbers (one message, which names parameter, value and bound) and frozen mappings."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterator, Mapping
from typing import TypeVar

from langchain_dpicl.errors import InvalidParameter

V = TypeVar("V")


def real(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """Return `value` as a finite float inside the bounds, or raise `InvalidParameter`. Booleans are not numbers."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    number = math.nan
    if is_number:
        with contextlib.suppress(OverflowError, ValueError):
            number = float(value)  # type: ignore[arg-type]
    is_inside = (
        math.isfinite(number)
        and (above is None or number > above)
        and (at_least is None or number >= at_least)
        and (below is None or number < below)
        and (at_most is None or number <= at_most)
    )
    if is_inside:
        return number
    bound = "a finite number"
    for sign, limit in ((">", above), (">=", at_least), ("<", below), ("<=", at_most)):
        if limit is not None:
            bound += f" {sign} {limit:g}"
    if not is_number:
        bound += f", not {type(value).__name__}"
    raise InvalidParameter(name, value, bound)


def whole(name: str, value: object, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return `value` as an int inside the bounds, or raise `InvalidParameter`. 3.0 and True are not whole numbers."""
    most = "" if at_most is None else f" and <= {at_most}"
    bound = f"a whole number >= {at_least}{most}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidParameter(name, value, f"{bound}, not {type(value).__name__}")
    number = int(value)
    if number < at_least or (at_most is not None and number > at_most):
        raise InvalidParameter(name, value, bound)
    return number


def positive(name: str, value: object) -> float:
    """A finite number > 0."""
    return real(name, value, above=0.0)


def probability(name: str, value: object) -> float:
    """A sampling probability: in (0, 1]."""
    return real(name, value, above=0.0, at_most=1.0)


def open_unit(name: str, value: object) -> float:
    """A delta: in (0, 1)."""
    return real(name, value, above=0.0, below=1.0)


class FrozenMapping(Mapping[str, V]):
    """A read-only mapping that can be hashed, compared and pickled; keys stay in order."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._items: dict[str, V] = dict(items or {})

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)
