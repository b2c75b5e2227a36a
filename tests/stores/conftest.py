"""A store in memory and in a file; `integration/test_stores_on_postgresql.py` has the same tests on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stores.places import Place, file_url, place_at


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place of each kind."""
    url = file_url(tmp_path) if request.param == "file" else None
    with place_at(url) as made:
        yield made


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Place]:
    """A place where several processes may open one collection."""
    with place_at(file_url(tmp_path)) as made:
        yield made
