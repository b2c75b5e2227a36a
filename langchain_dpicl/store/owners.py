"""Owners' keys, which may be names: lists and mappings of them that do not show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn, overload

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

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._keys[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)


class OwnerKeys(_Hidden, list[str]):
    """The keys by slot, as the store keeps them."""


class OwnerSlots(_Hidden, dict[str, int]):
    """The slot of each key."""
