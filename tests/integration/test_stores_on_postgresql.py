"""The contract of all stores (`tests/stores`) on PostgreSQL: with the vectors in memory, and on the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pgvector_server import database
from stores.places import Place, place_at
from stores.test_changes import *  # noqa: F403
from stores.test_construction import *  # noqa: F403
from stores.test_following import *  # noqa: F403
from stores.test_readings import *  # noqa: F403


@pytest.fixture(scope="module")
def contract_url(pgvector: str) -> Iterator[str]:
    with database(pgvector) as url:
        yield url


@pytest.fixture(params=[True, False], ids=["in memory", "on the server"])
def place(request: pytest.FixtureRequest, contract_url: str) -> Iterator[Place]:
    with place_at(contract_url, vectors_in_memory=request.param) as made:
        yield made


@pytest.fixture
def shared(place: Place) -> Place:
    return place
