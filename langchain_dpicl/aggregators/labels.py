"""Labels: how they are compared, and the check of a list of them. Numbers are checked by `privacy.checks`."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_dpicl.errors import InvalidParameter

_EDGES = " \t\r\n.,;:!?\"'`*()[]{}<>"


def normal(text: str) -> str:
    """As labels are compared: no case, no punctuation or space around, single spaces within."""
    return " ".join(text.strip(_EDGES).casefold().split())


def check_labels(name: str, value: object) -> tuple[str, ...]:
    """At least two strings that differ in more than case, spaces and the punctuation around them."""
    bound = "a list of at least two strings, each with a letter or digit"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) < 2:
        raise InvalidParameter(name, value, bound)
    if not all(isinstance(label, str) and normal(label) for label in value):
        raise InvalidParameter(name, value, bound)
    if len({normal(label) for label in value}) != len(value):
        raise InvalidParameter(name, value, "labels that differ in more than case, spaces and punctuation around them")
    return tuple(value)
