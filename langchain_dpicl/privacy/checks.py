"""Checks of numbers: one message, which names parameter, value and bound."""

from __future__ import annotations

import math
import numbers

from langchain_dpicl.errors import InvalidParameter


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
    limits = {">": above, ">=": at_least, "<": below, "<=": at_most}
    bound = "a finite number" + "".join(f" {sign} {limit:g}" for sign, limit in limits.items() if limit is not None)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidParameter(name, value, f"{bound}, not {type(value).__name__}")
    try:
        number = float(value)
    except (OverflowError, ValueError):
        raise InvalidParameter(name, value, bound) from None
    if (
        not math.isfinite(number)
        or (above is not None and number <= above)
        or (at_least is not None and number < at_least)
        or (below is not None and number >= below)
        or (at_most is not None and number > at_most)
    ):
        raise InvalidParameter(name, value, bound)
    return number


def whole(name: str, value: object, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return `value` as an int inside the bounds, or raise `InvalidParameter`. 3.0 and True are not whole numbers."""
    bound = f"a whole number >= {at_least}" + ("" if at_most is None else f" and <= {at_most}")
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
