"""LangChain's own suite for vector stores, on both stores' maintenance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from langchain_dpicl import ExemplarStore, PostgresExemplarStore


class TestMaintenanceInMemory(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return ExemplarStore.empty(self.get_embeddings()).maintenance()


class TestMaintenanceOnPostgres(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, pgvector_url: str) -> Iterator[VectorStore]:
        store = PostgresExemplarStore.empty(self.get_embeddings(), pgvector_url)
        yield store.maintenance()
        store.close()
