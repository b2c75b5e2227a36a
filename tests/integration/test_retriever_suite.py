"""langchain_tests' retriever suite on `DPRetriever`: every test of it applies, the number of documents included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_tests.integration_tests import RetrieversIntegrationTests

from langchain_dpicl import (
    DPAggregate,
    DPRetriever,
    ExemplarStore,
    Keywords,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    wrap_rag,
)

WORDS = "pharmacy billing porch ledger flask appointment".split()
QUERY = "which desk renews a prescription?"


@pytest.fixture
def store() -> ExemplarStore:
    records = [{"text": f"the {WORDS[i % 6]} answers", "owner": f"owner-{i}"} for i in range(24)]
    return ExemplarStore.from_records(
        records, DeterministicFakeEmbedding(size=8), input_key="text", output_key=None, owner_key="owner"
    )


@pytest.fixture
def budget(tmp_path: Path) -> Any:
    budget = PrivacyBudget(8, 1e-5, 20, ledger=f"sqlite:///{tmp_path / 'ledger.db'}", replay=False)
    yield budget
    budget.close()


class Suite(RetrieversIntegrationTests):
    """The suite builds retrievers itself: each test's release is made before it."""

    release: Any

    @property
    def retriever_constructor(self) -> type[DPRetriever]:
        return DPRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"release": self.release}

    @property
    def retriever_query_example(self) -> str:
        return QUERY


class TestKeywords(Suite):
    """Ranked keywords of an ordinary ensemble."""

    @pytest.fixture(autouse=True)
    def _make(self, store: ExemplarStore, budget: PrivacyBudget) -> None:
        selector = PoissonExampleSelector(store, 6, rate=0.5, max_exemplars=8)
        member = RunnableLambda(lambda values: f"{values['examples']:s}")
        self.release = PrivateEnsemble(selector, member) | DPAggregate(Keywords.joint_em(WORDS, k=4), budget)


class TestWrappedChain(Suite):
    """Ranked keywords of a retrieval chain that `wrap_rag` made private."""

    @pytest.fixture(autouse=True)
    def _make(self, store: ExemplarStore, budget: PrivacyBudget) -> None:
        chain = RunnableLambda(lambda values: "\n".join(document.page_content for document in values["context"]))
        self.release = wrap_rag(
            chain, store, Keywords.joint_em(WORDS, k=4), budget, members=6, rate=0.5, documents_key="context"
        )
