"""Schemathesis against the application of ``dpicl serve``: all of its checks, the same few examples every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from schemathesis.engine import events, from_schema

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.serving.app import create_app
from langchain_dpicl.serving.config import Configuration
from langchain_dpicl.serving.guards import hash_of, new_key

EXAMPLES = 10


class Quiet:
    """Randomness without noise, so that no answer is "the members abstain"."""

    def discrete_gaussian(self, sigma: float, size: int) -> Any:
        return np.zeros(size, np.int64)

    def integers(self, high: int, size: int) -> Any:
        return np.zeros(size, np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("return_receipt", [True, False])
def test_schemathesis_finds_nothing(return_receipt: bool, tmp_path: Path) -> None:
    rows = [{"input": f"text {i}", "output": "Positive"} for i in range(8)]
    store = ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=8), progress=False)
    selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=8)
    ledger = f"sqlite:///{tmp_path / 'budget.db'}"
    budget = PrivacyBudget(1000, 1e-5, 5000, ledger, replay=False, accept_noise=True)
    ensemble = PrivateEnsemble(selector, RunnableLambda(lambda _: "Positive"))
    labels = NoisyVote(["Positive", "Negative"], scores=not return_receipt)
    release = ensemble | DPAggregate(labels, budget, return_receipt=return_receipt)
    release._randomness = Quiet()  # type: ignore[assignment]
    key = new_key()
    app = create_app(Configuration(chain="its:own", keys={"alice": hash_of(key)}), release)

    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    schema.config.headers = {"Authorization": f"Bearer {key}"}
    schema.config.generation.update(max_examples=EXAMPLES, deterministic=True)
    found, checked = [], 0
    for event in from_schema(schema).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if isinstance(event, events.ScenarioFinished):
            for case, checks in event.recorder.checks.items():
                checked += len(checks)
                asked = event.recorder.interactions[case].request
                failed = [check for check in checks if check.failure_info is not None]
                found += [f"{event.recorder.label} {check.name} {asked.uri} {asked.body!r}" for check in failed]
    assert found == []
    assert checked > 500
    assert budget.spent() > 50, "releases were made"
