"""Mistakes in a description: of each its place, as a reader finds it in the file, and words that show no value."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from langchain_dpicl.errors import InvalidParameter

ValuePath = tuple[str | int, ...]
"""The names and numbers that lead to a value."""
Mistake = tuple[ValuePath, str]

_KNOWN = "mistake"
"""The type of an error whose place and words stand already."""


def told(error: ValueError, given: Any) -> list[tuple[str, str]]:
    """Return the place of each mistake in what was ``given``, such as "release.labels[2]", and words."""
    return [
        ("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip("."), words)
        for place, words in mistakes_of(error, given)
    ]


def together(mistakes: Sequence[Mistake]) -> ValidationError:
    """Return one error that tells all these mistakes."""
    lines = [
        InitErrorDetails(type=PydanticCustomError(_KNOWN, "{words}", {"words": words}), loc=place, input=None)
        for place, words in mistakes
    ]
    return ValidationError.from_exception_data("a description", lines, hide_input=True)


def mistakes_of(error: ValueError, given: Any) -> list[Mistake]:
    """Return the mistakes that an error tells.

    Alternatives for one value are one mistake. If one of them goes deeper, the value was meant for it.
    """
    if not isinstance(error, ValidationError):
        return [_raised(error, ())]
    faults = error.errors(include_input=False, include_url=False)
    known = {fault["loc"] for fault in faults if fault["type"] == _KNOWN}
    found: dict[ValuePath, list[str]] = {}
    for place, words in (_mistake(fault, given) for fault in faults):
        others = found.setdefault(place, [])
        others.append(words.removeprefix("Input should be ") if others else words)
    return [
        (place, ", or ".join(dict.fromkeys(words)))
        for place, words in found.items()
        if place in known or not any(place == each[: len(place)] for each in found if each != place)
    ]


def _mistake(fault: Any, given: Any) -> Mistake:
    """Return one of pydantic's errors as a mistake: its own names of types are in no file, so in no place either."""
    if fault["type"] == _KNOWN:
        return fault["loc"], fault["msg"]
    place: ValuePath = ()
    for part in fault["loc"]:
        with contextlib.suppress(KeyError, IndexError, TypeError):
            given = given[part]
            place += (part,)
    if fault["type"] == "missing":
        place += fault["loc"][-1:]
    if given is None:
        return place, "null is no value here; without this line the default holds, if there is one"
    cause = fault.get("ctx", {}).get("error")
    return _raised(cause, place) if isinstance(cause, ValueError) else (place, fault["msg"])


def _raised(error: ValueError, place: ValuePath) -> Mistake:
    """Return an error as a mistake: of an `InvalidParameter` what is allowed, and no value."""
    if not isinstance(error, InvalidParameter):
        return place, str(error)
    is_own = place[-1:] == (error.parameter,)
    return place if is_own else (*place, error.parameter), error.bound
