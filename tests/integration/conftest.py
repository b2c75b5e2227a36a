"""Ledgers on both databases. PostgreSQL is the server at ``DPICL_TEST_POSTGRES``: a database of its own per test.
Exemplars on PostgreSQL need pgvector: see `pgvector_server`.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pgvector_server
import pytest
import sqlalchemy as sa
from langchain_core.embeddings import Embeddings

from langchain_dpicl import PostgresExemplarStore

SERVER = os.environ.get("DPICL_TEST_POSTGRES", "postgresql+psycopg://postgres@127.0.0.1:5432/test")


def on_server(*statements: str) -> list[Any]:
    """Run statements on the server itself, outside of any transaction; what the last one gives."""
    return pgvector_server.ask(SERVER, *statements)


@pytest.fixture(scope="session")
def postgres_server() -> str:
    try:
        on_server("SELECT 1")
    except (sa.exc.SQLAlchemyError, ImportError) as error:
        reason = type(error).__name__
        address = sa.make_url(SERVER).render_as_string()
        pytest.skip(f"want of a PostgreSQL server at {address} ({reason}; DPICL_TEST_POSTGRES names another)")
    return SERVER


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    name = f"dpicl_test_{uuid.uuid4().hex[:12]}"
    on_server(f"CREATE DATABASE {name}")
    yield sa.make_url(postgres_server).set(database=name).render_as_string(hide_password=False)
    on_server(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new ledger's address, once on each database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def lose_a_commit(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[bool]]:
    """Let the server commit, and the connection die before it says so: once, and again after the list is cleared."""
    import psycopg

    def lose() -> list[bool]:
        real, lost = psycopg.Connection.commit, list[bool]()

        def commit(self: Any) -> None:
            real(self)
            if not lost:
                lost.append(True)
                self.close()
                raise psycopg.OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(psycopg.Connection, "commit", commit)
        return lost

    return lose


@pytest.fixture
def terminate(postgres_server: str) -> Any:
    """terminate(url): end every connection to that database, as a server that restarts does; how many there were."""

    def end(url: str) -> int:
        name = sa.make_url(url).database
        return len(on_server(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"))

    return end


@pytest.fixture(scope="session")
def pgvector() -> Iterator[str]:
    """The address of a server with pgvector."""
    with contextlib.ExitStack() as stack:
        try:
            url = stack.enter_context(pgvector_server.server())
        except pgvector_server.NoServer as error:
            pytest.skip(str(error))
        yield url


@pytest.fixture
def pgvector_url(pgvector: str) -> Iterator[str]:
    """A database of its own on it."""
    with pgvector_server.database(pgvector) as url:
        yield url


@pytest.fixture
def shared_store(pgvector_url: str, embeddings: Embeddings) -> Iterator[Callable[..., PostgresExemplarStore]]:
    """shared_store(records): a collection with owners, in a database of its own."""
    made: list[PostgresExemplarStore] = []

    def build(records: list[dict[str, Any]], **options: Any) -> PostgresExemplarStore:
        options = {"owner_key": "owner"} | options
        made.append(PostgresExemplarStore.from_records(records, embeddings, pgvector_url, **options))
        return made[-1]

    yield build
    for store in made:
        store.close()


@pytest.fixture
def worker(pgvector_url: str, embeddings: Embeddings) -> Iterator[Callable[..., PostgresExemplarStore]]:
    """worker(): the collection as another worker opens it."""
    opened: list[PostgresExemplarStore] = []

    def build(**options: Any) -> PostgresExemplarStore:
        opened.append(PostgresExemplarStore.open(pgvector_url, embeddings, **options))
        return opened[-1]

    yield build
    for store in opened:
        store.close()
