"""A sampler that writes a few letters, for tests of jobs: fast, on a real ledger, over a store full of canaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from table_model import Table, TableModel

from langchain_dpicl import DPSampler, ExemplarStore, PoissonExampleSelector, PrivacyBudget

ALPHABET = ["a", "b", "é", "."]
END = 3
INPUTS = ["one", "two", "three"]


def at_random(demonstration: str, released: str) -> list[float]:
    """An answer of any length: every letter, and the end, may come at any place."""
    return [1.0, 1.0, 1.0, 1.5]


def spelling(word: str) -> Table:
    """A model so sure of the word, and of the end after it, that no draw differs (below 1e-30 a token)."""

    def table(demonstration: str, released: str) -> list[float]:
        wanted = ALPHABET.index(word[len(released)]) if len(released) < len(word) else END
        return [100.0 if token == wanted else 0.0 for token in range(len(ALPHABET))]

    return table


def letters(store: ExemplarStore, budget: PrivacyBudget, table: Table = at_random, **options: Any) -> DPSampler:
    """A sampler over this store, on this budget."""
    model = TableModel(table, ALPHABET, frozenset({END}), context=1000)
    selector = PoissonExampleSelector(store, 2, rate=0.5, max_exemplars=8)
    return DPSampler(model, selector, budget, **{"shots": 4, "top_k": 4, "max_tokens": 6, **options})


def no_more(*_: Any) -> Any:
    """Stands for a model that must not be asked."""
    raise AssertionError("the model was asked")


Letters = Callable[..., DPSampler]
