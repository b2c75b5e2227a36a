"""Mistake 20: a member that searches the whole collection, or shares a cache. One owner then moves many outputs.

A cache is each call's own, since each call runs on a copy of the chain. A search among all is refused by sealing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ears import Same
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_dpicl import PoissonExampleSelector, PrivateEnsemble, UnsafeConfigurationError
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.private.pickling import Pickler

MEMBERS = 20
QUESTION = {"input": "why does she cough?"}
MOVED = "one owner moves {} of 20 outputs"
RARE = {"input": "a rare case", "output": "Negative", "owner": "alder"}


def by_question(records: list[dict[str, str]]) -> Callable[[dict[str, Any]], str]:
    """Never ask the model twice."""
    kept: dict[str, str] = {}

    def member(values: dict[str, Any]) -> str:
        seen = sorted(example["input"] for example in values["examples"])
        return kept.setdefault(values["input"], "Negative" if RARE["input"] in seen else "Positive")

    return member


def whole_collection(records: list[dict[str, str]]) -> Callable[[dict[str, Any]], str]:
    """Search among all patients."""
    texts = [record["input"] for record in records]
    collection = InMemoryVectorStore.from_texts(texts, DeterministicFakeEmbedding(size=8))

    def member(values: dict[str, Any]) -> str:
        found = collection.similarity_search(values["input"], k=len(texts))
        return "Negative" if any(each.page_content == RARE["input"] for each in found) else "Positive"

    return member


def moved(make: Any, store_of: Any, records: Any, owner_keyed: Any, salt: int) -> int:
    """How many outputs the one owner moves; 0 where the ensemble is refused before anything is charged."""
    outputs = []
    for data in ([RARE, *records(9)], records(9)):
        store = store_of(data)
        selector = PoissonExampleSelector(store, MEMBERS, rate=1.0, max_exemplars=10)
        selector._randomness = owner_keyed(store, salt)
        try:
            ensemble = PrivateEnsemble(selector, make(data), count_empty=True, max_concurrency=1)
        except UnsafeConfigurationError:
            return 0
        outputs.append(ensemble.run(QUESTION, 1.0))
    return sum(a != b for a, b in zip(*outputs, strict=True))


def in_the_first(store_of: Any, owner_keyed: Any) -> int:
    """A salt that puts the owner into the first member, which runs first: what it keeps there, all others find."""
    one = store_of([RARE])
    return next(salt for salt in range(10_000) if owner_keyed(one, salt)._unit("alder", "member") < 0.05)


def test_20_state_that_members_share_is_caught(
    store_of: Any, records: Any, owner_keyed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = (by_question, store_of, records, owner_keyed, in_the_first(store_of, owner_keyed))
    found = moved(*world)
    assert found == 1, MOVED.format(found)
    monkeypatch.setattr(Pristine, "copy", lambda self, bucket=(): Same(self.chain).copy())
    assert moved(*world) == MEMBERS, "the mutant's calls run on one chain"


def test_20_a_search_among_all_records_is_caught(
    store_of: Any, records: Any, owner_keyed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = (whole_collection, store_of, records, owner_keyed, in_the_first(store_of, owner_keyed))
    found = moved(*world)
    assert found == 0, MOVED.format(found)
    monkeypatch.setattr(Pickler, "_meet", lambda *_: None)
    assert moved(*world) == MEMBERS, "the mutant's copies share every collection"


def test_20_a_member_of_its_own_moves_with_one_owner_alone(store_of: Any, records: Any, owner_keyed: Any) -> None:
    def own(data: Any) -> Any:
        return RunnableLambda(
            lambda values: "Negative" if any(e["input"] == RARE["input"] for e in values["examples"]) else "Positive"
        )

    assert moved(own, store_of, records, owner_keyed, 1) == 1
