"""`store/contents.py`: bytes in one buffer, and no copy of them left behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_dpicl.store.contents import Arena


def filled(*items: bytes) -> Arena:
    arena = Arena()
    arena.extend(items)
    return arena


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def content(arena: Arena) -> list[bytes]:
    return [arena[i] for i in range(len(arena))]


@given(st.lists(st.lists(st.binary(max_size=20), max_size=5), max_size=5))
def test_an_arena_holds_what_was_appended_in_order(batches: list[list[bytes]]) -> None:
    arena = Arena()
    for batch in batches:
        arena.extend(batch)
    assert content(arena) == [item for batch in batches for item in batch]


@given(st.lists(st.binary(max_size=20), max_size=8), st.data())
def test_keeping_rows_keeps_exactly_them(items: list[bytes], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.sampled_from(range(len(items))), unique=True)) if items else []
    arena = filled(*items)
    assert content(arena.keep(rows(*sorted(kept)))) == [items[i] for i in sorted(kept)]
    assert content(arena) == items


def test_growing_overwrites_the_buffer_that_it_leaves() -> None:
    arena = filled(b"secret-one", b"secret-two")
    old = arena._data
    arena.extend([b"three"])
    assert arena._data is not old
    assert old == bytes(len(old))
    assert content(arena) == [b"secret-one", b"secret-two", b"three"]


def test_wiping_overwrites_the_buffer_and_leaves_nothing() -> None:
    arena = filled(b"secret-one", b"two", b"three")
    old = arena._data
    kept = arena.keep(rows(1, 2))
    arena.wipe()
    assert old == bytes(len(old))
    assert content(kept) == [b"two", b"three"]
    assert arena.nbytes == len(arena) == 0


@pytest.mark.parametrize("count", [0, 1])
def test_empty_entries_and_empty_batches_are_entries(count: int) -> None:
    arena = filled(*[b""] * count)
    arena.extend([])
    assert content(arena) == [b""] * count
    assert content(arena.keep(rows(*range(count)))) == [b""] * count


def test_the_buffer_is_a_view_and_its_size_is_exact() -> None:
    arena = filled(b"ab", b"", b"cde")
    data, ends = arena.buffer()
    assert bytes(data) == b"abcde"
    assert ends.tolist() == [2, 2, 5]
    assert arena.nbytes == 5 + 3 * 8
