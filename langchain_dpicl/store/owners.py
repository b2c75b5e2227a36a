"""Owners' keys, which may be names: lists and mappings that do not show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from langchain_dpicl.errors import UnsafeConfigurationError


class _Hidden:
    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} owners>"  # type: ignore[arg-type]

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("owners' keys are not pickled or copied")


class Owners(_Hidden, Sequence[str]):
    """The owners' keys, in order of first appearance. Private: its ``repr`` shows their number alone."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        return self._keys[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)


class OwnerKeys(_Hidden, list[str]):
    """The keys by slot, as the store keeps them."""


class OwnerSlots(_Hidden, dict[str, int]):
    """The slot of each key."""


def encoded(text: str) -> bytes:
    """UTF-8 of any text, halves of surrogate pairs included."""
    return text.encode("utf-8", "surrogatepass")


def decoded(content: bytes) -> str:
    """The text that `encoded` turned into bytes."""
    return content.decode("utf-8", "surrogatepass")
