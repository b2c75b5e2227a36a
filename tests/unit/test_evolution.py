"""Evolved texts: what an owner moves, whom the votes choose, what the model sees, and a call that is killed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from langchain_classic.embeddings import CacheBackedEmbeddings
from langchain_community.embeddings import (
    DeepInfraEmbeddings,
    JinaEmbeddings,
    SagemakerEndpointEmbeddings,
    YandexGPTEmbeddings,
)
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.runnables import RunnableLambda
from langchain_core.stores import InMemoryByteStore
from langchain_openai import OpenAIEmbeddings
from sum_noise import Noise

from langchain_dpicl import EvolvedTexts, ExemplarStore, PrivacyBudget, evolve_texts
from langchain_dpicl.errors import (
    InvalidParameter,
    ModelUnavailable,
    PrivacyBudgetExceeded,
    UnsafeConfigurationError,
)
from langchain_dpicl.local import local_embeddings
from langchain_dpicl.once import evolution, sums
from langchain_dpicl.once.steps import LATTICE

WORDS = ["billing", "delivery", "login", "refund", "garden", "opera"]
CANARY = "Zebedee Quill"


class ByWord(Embeddings):
    """Vectors that say which of the words a text has, and a little of its length."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A row for each text."""
        return [[*(float(word in text) for word in WORDS), 0.01 * (len(text) % 7 + 1)] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """The same of one text."""
        return self.embed_documents([text])[0]


def store_of(rows: list[tuple[str, str]], embeddings: Embeddings | None = None) -> ExemplarStore:
    """Records of owners and texts."""
    records = [{"input": text, "owner": owner} for owner, text in rows]
    return ExemplarStore.from_records(
        records, embeddings or ByWord(), output_key=None, owner_key="owner", progress=False
    )


def tickets(owners: int = 200) -> ExemplarStore:
    """Owners who ask about a refund, and fewer about a login. Nobody asks about gardens."""
    words = ["refund", "refund", "login"]
    return store_of([(f"o{i}", f"my {words[i % 3]}, said {CANARY} {i}") for i in range(owners)])


def longer(text: str) -> str:
    return f"{text}!"


@pytest.fixture
def budgets(tmp_path: Path) -> Iterator[Callable[..., PrivacyBudget]]:
    opened: list[PrivacyBudget] = []

    def make(count: int = 3, **how: Any) -> PrivacyBudget:
        url = f"sqlite:///{tmp_path}/{len(opened)}.db"
        opened.append(PrivacyBudget(3.0, 1e-5, {"sum": count}, ledger=url, **how))
        return opened[-1]

    yield make
    for budget in opened:
        budget.close()


def test_owners_choose_the_kept_texts_and_the_model_varies_these_alone(budgets: Any) -> None:
    seen: list[str] = []

    def vary(text: str) -> str:
        seen.append(text)
        return longer(text)

    first = [f"a question about {word}" for word in WORDS]
    found = evolve_texts(tickets(), first, RunnableLambda(vary), budgets(), rounds=3, keep=2, candidates=6, local=True)
    assert all("refund" in text for text in found[:1])
    assert {word for text in found for word in WORDS if word in text} == {"refund", "login"}
    assert len(found) == len(found.votes) == 2
    assert found.votes[0] >= found.votes[1] > 5 * found.sigma
    assert [receipt["number"] for receipt in found.receipts] == [1, 2, 3]
    assert not any(CANARY in text for text in [*seen, *found])
    assert not any("garden" in text for text in seen)


def test_an_owner_moves_a_round_by_one_at_most_however_many_records_it_has(budgets: Any, monkeypatch: Any) -> None:
    """The sums are those of the definition, computed here owner by owner."""
    monkeypatch.setattr(sums, "SecureRandomness", lambda: Noise(scale=0.0))
    others = [(f"o{i}", f"about {WORDS[i % 4]}") for i in range(12)]
    one = [("busy", f"about {WORDS[i % 6]}, again and again {'.' * i}") for i in range(40)]
    first = [f"a question about {word}" for word in WORDS]
    release = evolution.NearestVotes(
        store_of(others + one), budgets(), first, np.array(ByWord().embed_documents(first), np.float32), None
    )
    without = evolution.NearestVotes(
        store_of(others), budgets(), first, np.array(ByWord().embed_documents(first), np.float32), None
    )
    move = (release._total(None) - without._total(None))[0]
    votes = np.array([sum(word in text for _, text in one) for word in WORDS], np.float64)
    assert np.abs(move / LATTICE - votes / np.linalg.norm(votes)).max() < 1e-8
    assert sum(int(x) ** 2 for x in move) <= LATTICE**2
    assert math.sqrt(sum(int(x) ** 2 for x in move)) > 0.999 * LATTICE


def test_noise_is_on_every_candidate_also_on_one_without_a_vote(budgets: Any) -> None:
    first = [f"a question about {word}" for word in WORDS]
    found = evolve_texts(tickets(30), first, RunnableLambda(longer), budgets(), rounds=1, keep=6, local=True)
    assert len(found) == 6
    assert (found.votes != 0).all()


def test_a_call_that_is_killed_goes_on_and_each_round_is_charged_once(
    budgets: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """It is killed before each draw, after each draw, and while the model writes."""
    store, budget, folder = tickets(), budgets(), tmp_path / "texts"
    first = [f"a question about {word}" for word in WORDS]
    calls = iter(range(10**6))

    def vary(text: str) -> str:
        return f"{text} {next(calls)}"  # never the same again

    given = store, first, RunnableLambda(vary), budget
    how: Any = {"rounds": 2, "keep": 2, "candidates": 5, "output": folder, "local": True}
    source = Noise(5)
    monkeypatch.setattr(sums, "SecureRandomness", lambda: source)
    for stop in (0, 1):
        source.stop = stop
        with pytest.raises(KeyboardInterrupt):
            evolve_texts(*given, **how)
        assert budget.spent() == stop + 1
        with monkeypatch.context() as patch:
            patch.setattr(EvolvedTexts, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            source.stop = None
            with pytest.raises(KeyboardInterrupt):
                evolve_texts(*given, **how)
        source.stop = stop + 1
    found = evolve_texts(*given, **how)
    assert (budget.spent(), len(source.asked)) == (2, 2)
    again = evolve_texts(*given, **how)
    assert (list(again), again.votes.tolist()) == (list(found), found.votes.tolist())
    assert budget.spent() == 2
    written = b"".join(file.read_bytes() for file in folder.iterdir())
    assert CANARY.encode() not in written
    with pytest.raises(PrivacyBudgetExceeded):  # other settings are another call
        evolve_texts(*given, **{**how, "keep": 1})


def test_too_small_a_budget_is_refused_before_the_first_charge(budgets: Any) -> None:
    budget = budgets(2)
    with pytest.raises(PrivacyBudgetExceeded):
        evolve_texts(tickets(), WORDS, RunnableLambda(longer), budget, rounds=3, local=True)
    assert budget.spent() == 0


class Networked(ByWord):
    """Holds a network of torch's."""

    def __init__(self) -> None:
        self.client = torch.nn.Linear(1, 1)


def hosted(**how: Any) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(api_key="x", check_embedding_ctx_length=False, **how)


@pytest.mark.parametrize(
    ("make", "is_here"),
    [
        (local_embeddings, True),
        (lambda: DeterministicFakeEmbedding(size=4), True),
        (Networked, True),
        (lambda: hosted(base_url="http://127.0.0.1:9/v1"), True),
        (lambda: cached_of(Networked()), True),
        (hosted, False),
        (lambda: cached_of(hosted()), False),
        (lambda: JinaEmbeddings(jina_api_key="x"), False),
        (lambda: DeepInfraEmbeddings(deepinfra_api_token="x"), False),
        (lambda: YandexGPTEmbeddings(iam_token="x", folder_id="x"), False),
        (lambda: SagemakerEndpointEmbeddings.model_construct(endpoint_name="x", region_name="x"), False),
        (ByWord, False),
    ],
)
def test_an_embedding_model_shows_that_it_computes_here(make: Any, is_here: bool) -> None:
    assert evolution.computes_here(make()) == is_here


def cached_of(model: Embeddings) -> Embeddings:
    return CacheBackedEmbeddings.from_bytes_store(model, InMemoryByteStore(), key_encoder="sha256")


def test_a_model_that_does_not_show_where_it_computes_is_refused_until_somebody_vouches_for_it(budgets: Any) -> None:
    budget = budgets()
    with pytest.raises(UnsafeConfigurationError, match="local=True"):
        evolve_texts(tickets(), WORDS, RunnableLambda(longer), budget)
    assert budget.spent() == 0
    assert evolve_texts(tickets(), WORDS, RunnableLambda(longer), budget, rounds=1, local=True)


@pytest.mark.parametrize(
    ("named", "how"),
    [
        ("first", {"first": []}),
        (r"first\[0\]", {"first": [" "]}),
        ("rounds", {"rounds": 0}),
        ("keep", {"keep": 0}),
        ("candidates", {"keep": 5, "candidates": 4}),
        ("store", {"store": [1]}),
        ("local", {"local": "yes"}),
    ],
)
def test_bad_input_costs_nothing(named: str, how: dict[str, Any], budgets: Any) -> None:
    budget = budgets()
    given = {"store": tickets(6), "first": WORDS, "vary": RunnableLambda(longer), "budget": budget, **how}
    with pytest.raises(InvalidParameter, match=named):
        evolve_texts(**given)
    assert budget.spent() == 0


def test_a_model_that_gives_no_text_is_met_before_the_first_charge(budgets: Any) -> None:
    for vary in (RunnableLambda(len), RunnableLambda(lambda text: 1 / 0), RunnableLambda(lambda text: " ")):
        budget = budgets()
        with pytest.raises(ModelUnavailable):
            evolve_texts(tickets(6), WORDS, vary, budget, local=True)
        assert budget.spent() == 0


def test_the_file_is_read_back_and_another_is_refused(budgets: Any, tmp_path: Path) -> None:
    found = evolve_texts(tickets(), ["refund\ud800", "login"], RunnableLambda(longer), budgets(), rounds=1, local=True)
    found.save(tmp_path / "texts.json")
    again = EvolvedTexts.load(tmp_path / "texts.json")
    assert (list(again), again.votes.tolist(), again.receipts) == (list(found), found.votes.tolist(), found.receipts)
    assert [each.page_content for each in again.documents()] == list(found)
    assert again.documents()[0].metadata["receipt"] == found.receipts[-1]
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "none.json"):
        with pytest.raises(InvalidParameter, match="evolved texts"):
            EvolvedTexts.load(tmp_path / name)
