"""`store/postgres.py` without a server: what is refused before anything is connected to, and what importing it loads.

With one: ``tests/integration/test_postgres_*.py``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any, NoReturn

import numpy as np
import pytest

from langchain_dpicl import InvalidParameter, InvalidRecords, PostgresExemplarStore, StoreError

URL = "postgresql://someone:hunter2@127.0.0.1:1/nowhere"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("something was connected to")

    monkeypatch.setattr("psycopg.connect", refuse)
    monkeypatch.setattr("psycopg.Connection.connect", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def build(records: list[dict[str, Any]], embeddings: Any, url: Any = URL, **options: Any) -> PostgresExemplarStore:
    return PostgresExemplarStore.from_records(records, embeddings, url, **options)


@pytest.mark.parametrize("url", ["sqlite:///x.db", "postgresql+psycopg2://u:hunter2@h/d", "mysql://u:hunter2@h/d"])
def test_another_kind_of_database_is_refused(url: str, records: Any, embeddings: Any) -> None:
    for call in (
        lambda: build(records(2), embeddings, url),
        lambda: PostgresExemplarStore.open(url, embeddings),
    ):
        with pytest.raises(StoreError, match=r"a shared store is on postgresql\+psycopg://") as caught:
            call()
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", [None, 5, "", "hunter2", "postgresql://u:hunter2@h:port/d", b"postgresql://h"])
def test_what_is_no_address_is_refused_without_being_shown(url: Any, records: Any, embeddings: Any) -> None:
    for call in (
        lambda: build(records(2), embeddings, url),
        lambda: PostgresExemplarStore.open(url, embeddings),
    ):
        with pytest.raises(InvalidParameter, match="url=") as caught:
            call()
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize("name", ["", "1a", "A", "a-b", "a b", "a" * 41, 'a"; DROP', "a\n", None, 5])
def test_a_bad_name_is_refused(name: Any, records: Any, embeddings: Any) -> None:
    for call in (
        lambda: build(records(2), embeddings, name=name),
        lambda: PostgresExemplarStore.open(URL, embeddings, name=name),
    ):
        with pytest.raises(InvalidParameter, match="name="):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": [1, 1]}, "unique"),
        ({"ids": [1]}, "1 entries for 2 records"),
        ({"ids": [0, 2**62]}, "integers"),
        ({"ids": [0, 1.0]}, "integers"),
        ({"ids": [0, -1]}, "integers"),
        ({"owner_key": "nobody"}, "record 0 has no owner"),
        ({"input_key": "nothing"}, "record 0 has no key"),
    ],
)
def test_bad_records_are_refused_before_anything_is_connected_to(
    options: dict[str, Any], message: str, records: Any, embeddings: Any
) -> None:
    with pytest.raises(InvalidRecords, match=message):
        build(records(2), embeddings, **options)
    with pytest.raises(InvalidRecords, match="empty"):
        build([], embeddings, vectors=np.ones((0, 2)))


def test_importing_it_loads_no_database_and_no_index() -> None:
    code = "import sys; from langchain_dpicl import PostgresExemplarStore; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert {"psycopg", "sqlalchemy", "faiss", "torch"}.isdisjoint(done.stdout.split())
