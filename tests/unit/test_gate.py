"""The relevance gate: who is eligible for a query is a matter between an owner, the query and a public threshold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ears import Ears
from exact import WAYS_TO_SAMPLE, check_seen
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from moments import eligible, names_of, numbers_of, similarities
from ticket_worlds import Degrees
from ways import WAYS, ask

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    InvalidParameter,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
    ShareThreshold,
)
from langchain_dpicl.selection import Examples
from langchain_dpicl.store.matrix import inner_products, rounding

QUERY = {"input": "what does text 3.1 say?"}
DIMENSION = 8
PER_OWNER = [1, 5, 3, 2, 4, 1, 6, 2, 3, 1, 4, 2, 1, 1, 1, 1, 2, 2]


def rows_of(counts: list[int]) -> list[dict[str, str]]:
    rows = [
        {"input": f"text {i}.{j}", "output": "Positive", "owner": f"owner-{i}"}
        for i, count in enumerate(counts)
        for j in range(count)
    ]
    np.random.default_rng(0).shuffle(rows)  # type: ignore[arg-type]
    return rows


def gated(store: ExemplarStore, members: int = 3, **options: Any) -> PoissonExampleSelector:
    options = {"rate": 1.0, "max_exemplars": 3, "threshold": 0.3} | options
    return PoissonExampleSelector(store, members, **options)


def draw(selector: PoissonExampleSelector) -> list[list[str]]:
    return [[each["input"] for each in bucket] for bucket in selector.sample(query=selector.embed_query(QUERY))]


def cosine(text: str) -> float:
    """The similarity of a text to the query, in double precision and from scratch."""
    model = DeterministicFakeEmbedding(size=DIMENSION)
    one, other = np.array(model.embed_query(text)), np.array(model.embed_query(QUERY["input"]))
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


# -- who is eligible ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [-1.0, -0.3, 0.0, 0.3, 0.6, 1.0])
def test_an_owner_is_eligible_whose_best_exemplar_reaches_the_threshold(threshold: float, store_of: Any) -> None:
    rows = rows_of(PER_OWNER)
    store = store_of(rows)
    best: dict[str, float] = {}
    for row in rows:
        best[row["owner"]] = max(best.get(row["owner"], -1.0), cosine(row["input"]))
    assert all(abs(value - threshold) > 1e-4 for value in best.values()), "no rounding decides here"
    found = eligible(store, store.embed_query(QUERY["input"]), threshold)
    assert set(names_of(store, found)) == {owner for owner, value in best.items() if value >= threshold}
    assert (np.diff(found) > 0).all()


def test_a_range_search_and_the_rounding_lose_and_add_nobody() -> None:
    """At each exemplar's own similarity as the threshold, to the last digit: the owner itself is eligible, and so is
    exactly everybody whose number is at least that."""
    vectors = np.random.default_rng(5).standard_normal((400, 384)).astype(np.float32)
    vectors[200:] = vectors[:200] + 1e-6 * vectors[200:]  # near ties
    texts = [f"t{i}" for i in range(400)]
    store = ExemplarStore.from_texts(texts, DeterministicFakeEmbedding(size=384), vectors=vectors, progress=False)
    query = store.embed_query("q")
    near = similarities(store, query)
    for row in range(0, 400, 7):
        found = eligible(store, query, float(near[row]))
        assert found.tolist() == np.flatnonzero(near >= near[row]).tolist()
        assert row in found


def test_two_ways_of_computing_a_similarity_differ_by_less_than_the_slack() -> None:
    """The slack of the search is a proved bound; here is how far from it real vectors are."""
    generator = np.random.default_rng(3)
    for dimension in (8, 384, 1536):
        vectors = generator.standard_normal((300, dimension)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        exact = vectors.astype(np.float64) @ vectors[0].astype(np.float64)
        ours = inner_products(vectors, np.arange(300), vectors[0])
        assert np.abs(ours - exact).max() < rounding(dimension) / 4
        assert rounding(dimension) < 1e-3


def test_eligibility_is_the_owners_own(store_of: Any) -> None:
    """Whoever else is in the store, and in whatever order: equal to the last digit."""
    rows = rows_of(PER_OWNER)
    everyone = store_of(rows)
    query = everyone.embed_query(QUERY["input"])
    for threshold in similarities(everyone, query).tolist():
        names = set(names_of(everyone, eligible(everyone, query, threshold)))
        for owner in sorted({row["owner"] for row in rows}):
            alone = store_of([row for row in rows if row["owner"] == owner])
            assert (len(eligible(alone, query, threshold)) == 1) == (owner in names)


def test_owners_numbers_stay_when_others_are_forgotten(store_of: Any) -> None:
    rows = rows_of([2, 2, 2, 2])
    store = store_of(rows)
    query = store.embed_query("q")
    numbers = dict(zip(store.owners, eligible(store, query, -1.0).tolist(), strict=True))
    store.forget("owner-1")
    after = dict(zip(store.owners, eligible(store, query, -1.0).tolist(), strict=True))
    assert after == {name: number for name, number in numbers.items() if name != "owner-1"}
    store.add([{"input": "again", "output": "x", "owner": "owner-1"}])
    assert int(eligible(store, query, -1.0)[-1]) == max(numbers.values()) + 1, "a number is never given again"
    gone = np.array([numbers["owner-1"], numbers["owner-2"]])
    selector = gated(store, members=2, max_exemplars=9, exemplars_per_owner=9, threshold=-1.0)
    buckets = selector.sample(query=selector.embed_query(QUERY), among=gone)
    texts = sorted(each["input"] for bucket in buckets for each in bucket)
    assert texts == ["text 2.0", "text 2.1"], "who was forgotten in between has no part"


# -- the coupling ------------------------------------------------------------------------------------------------------


class EligibleCoins:
    """Coins that belong to owners, for a selector that flips them among the eligible alone: what an owner draws depends
    on its key alone, as in the proof."""

    def __init__(self, inner: Any, store: ExemplarStore, numbers: Callable[[], Any]) -> None:
        self.inner, self.store, self.numbers = inner, store, numbers
        self._among: list[int] = []

    def coin_positions(self, n: int, probability: float) -> Any:
        self._among = [int(number) for number in self.numbers()]
        assert n == len(self._among), "one coin for each eligible owner"
        inside = set(self.inner.coin_positions(len(numbers_of(self.store)), probability).tolist())
        heads = [position for position, number in enumerate(self._among) if number in inside]
        self.inner._chosen = np.array([self._among[position] for position in heads], np.int64)
        return np.array(heads, np.int64)

    def integers(self, high: int, size: int) -> Any:
        return self.inner.integers(high, size)

    def uniforms(self, size: int) -> Any:
        return self.inner.uniforms(size)


class Nearest(PoissonExampleSelector):
    """The tempting mistake: let the k nearest owners of the store through, instead of all that are near enough."""

    def eligible(self, query: Any) -> Any:
        with self.store.reading() as view:
            rows, owner_of = view.rows_of(view.numbers)
            near = view.similarity(rows, query.vector)
        order = owner_of[np.argsort(-near, kind="stable")]
        return np.sort(np.array(list(dict.fromkeys(order.tolist()))[:6], np.int64))

    def sample(self, rate: float | None = None, query: Any = None, among: Any = None) -> list[Examples]:
        return super().sample(rate, query, self.eligible(query))


def changed(kind: type[PoissonExampleSelector], rate: float, store_of: Any, owner_keyed: Any) -> list[int]:
    rows = rows_of(PER_OWNER)

    def buckets(store: ExemplarStore, salt: int) -> list[list[str]]:
        selector = kind(store, 3, rate=rate, max_exemplars=2, exemplars_per_owner=2, threshold=0.2)
        query = selector.embed_query(QUERY)
        coins: Any = EligibleCoins(owner_keyed(store, salt), store, lambda: selector.eligible(query))
        coins.inner.rows_of = query.rows
        selector._randomness = coins
        return draw(selector)

    everyone, answers = store_of(rows), []
    for left_out in sorted({row["owner"] for row in rows}):
        without = store_of([row for row in rows if row["owner"] != left_out])
        for salt in range(6):
            pairs = zip(buckets(everyone, salt), buckets(without, salt), strict=True)
            answers.append(sum(one != other for one, other in pairs))
    return answers


@pytest.mark.parametrize("rate", [0.4, 1.0])
def test_without_one_owner_at_most_one_bucket_differs(rate: float, store_of: Any, owner_keyed: Any) -> None:
    """For every owner, under the same coins of all the others: no chance is involved, so no false alarm."""
    found = changed(PoissonExampleSelector, rate, store_of, owner_keyed)
    assert max(found) == 1
    assert min(found) == 0, "an owner who is not eligible changes nothing"


def test_letting_the_nearest_through_breaks_the_coupling(store_of: Any, owner_keyed: Any) -> None:
    assert max(changed(Nearest, 1.0, store_of, owner_keyed)) > 1


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_the_most_similar_come_first_in_a_bucket_and_of_an_owner(store_of: Any) -> None:
    store = store_of(rows_of(PER_OWNER))
    selector = gated(store, members=2, exemplars_per_owner=2, max_exemplars=50, threshold=0.1)
    for bucket in draw(selector):
        near = [cosine(text) for text in bucket]
        assert near == sorted(near, reverse=True)
        owners = [text.split()[1].split(".")[0] for text in bucket]
        for owner in set(owners):
            own = [cosine(f"text {owner}.{j}") for j in range(PER_OWNER[int(owner)])]
            mine = sorted((value for value in own if value >= 0.1), reverse=True)[:2]
            shown = [value for value, of in zip(near, owners, strict=True) if of == owner]
            assert np.allclose(shown, mine)


@pytest.mark.parametrize("how", WAYS_TO_SAMPLE)
def test_a_record_that_does_not_count_changes_no_call(how: Any) -> None:
    options: dict[str, Any] = {"output_key": None, "owner_key": "owner", "progress": False}
    check_seen(lambda records: ExemplarStore.from_records(records, Degrees(), **options), how)


# -- a threshold for each query ----------------------------------------------------------------------------------------


def test_a_threshold_of_its_own_for_each_query_lets_in_the_share_of_public_texts(store_of: Any) -> None:
    texts = [f"public {i}" for i in range(50)]
    embeddings = DeterministicFakeEmbedding(size=DIMENSION)
    store = store_of(rows_of(PER_OWNER))
    for share, count in ((0.1, 5), (0.11, 6), (1.0, 50), (1e-9, 1)):
        gate = ShareThreshold(embeddings, texts, share)
        selector = gated(store, threshold=gate)
        for words in ("one query", "another"):
            query = store.embed_query(words)
            shown = ExemplarStore.from_texts(texts, embeddings, progress=False)
            near = similarities(shown, query)
            assert (near >= gate(query)).sum() == count
            assert selector.eligible(query).tolist() == eligible(store, query, gate(query)).tolist()
    assert repr(ShareThreshold(embeddings, texts, 0.1)) == repr(ShareThreshold(embeddings, texts, 0.1))
    assert repr(ShareThreshold(embeddings, texts, 0.1)) != repr(ShareThreshold(embeddings, texts[:-1], 0.1))
    for bad, name in (
        ((embeddings, [], 0.1), "texts"),
        ((embeddings, texts, 0.0), "share"),
        ((embeddings, texts, 2), "share"),
    ):
        with pytest.raises(InvalidParameter, match=name):
            ShareThreshold(*bad)


# -- what is public ----------------------------------------------------------------------------------------------------


def test_the_rate_is_sized_by_the_expected_eligible(store_of: Any, records: Any) -> None:
    store = store_of(records(100))
    selector = PoissonExampleSelector(store, 10, shots=2, threshold=0.35, eligible=40)
    assert (selector.rate, selector.expected_owners, selector.nearest_to) == (0.5, 20, "input")
    assert selector.max_exemplars == math.ceil(max(2 * 0.5 * 40 / 10, 0.5 * 40 / 10 + 4))
    assert PoissonExampleSelector(store, 10, shots=9, threshold=0.35, eligible=40).rate == 1.0
    assert not selector.rate_is_explicit
    assert "threshold=0.35" in repr(selector)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"threshold": 1.0001}, "threshold"),
        ({"threshold": -1.5}, "threshold"),
        ({"threshold": math.nan}, "threshold"),
        ({"threshold": "0.3"}, "threshold"),
        ({"threshold": True}, "threshold"),
        ({"threshold": 0.3, "rate": None, "shots": 1}, "eligible"),
        ({"threshold": 0.3, "eligible": 0}, "eligible"),
        ({"threshold": 0.3, "eligible": 2.5}, "eligible"),
        ({"threshold": None, "eligible": 5}, "eligible"),
        ({"threshold": 0.3, "max_exemplars": None}, "max_exemplars"),
        ({"threshold": 0.3, "nearest_to": ""}, "nearest_to"),
    ],
)
def test_bad_parameters_are_refused(options: dict[str, Any], name: str, store_of: Any, records: Any) -> None:
    with pytest.raises(InvalidParameter, match=name):
        gated(store_of(records(20)), **options)


class Counted(Embeddings):
    """Reads three words."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return DeterministicFakeEmbedding(size=DIMENSION).embed_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        return DeterministicFakeEmbedding(size=DIMENSION).embed_query(text)

    def query_length(self, text: str) -> tuple[int, int]:
        return len(text.split()), 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"input": ""}, "0 characters.*not empty"),
        ({"input": " \n"}, "not empty"),
        ({"input": 5}, "a text under 'input'"),
        ({}, "a text under 'input'"),
        ({"input": "secret words, four of"}, "4 tokens.*at most 3 tokens"),
    ],
)
async def test_a_query_that_cannot_be_embedded_costs_nothing(
    way: str, request_: dict[str, Any], message: str, budget_of: Any, records: Any
) -> None:
    store = ExemplarStore.from_records(records(20), Counted(), owner_key="owner", progress=False)
    release = PrivateEnsemble(gated(store), lambda values: "a") | DPAggregate(NoisyVote(["a", "b"]), budget_of())
    assert await ask(way, release, {"input": "three short words"}) in ("a", "b")
    with pytest.raises(InvalidParameter, match=message) as error:
        await ask(way, release, request_)
    assert "secret" not in str(error.value)
    assert release.budget.spent() == 1


@pytest.mark.parametrize("way", WAYS)
async def test_where_none_is_eligible_all_members_are_asked_without_examples(
    way: str, budget_of: Any, store_of: Any, records: Any
) -> None:
    shown: list[int] = Ears()
    member = PrivateEnsemble(
        gated(store_of(records(20)), members=5, threshold=1.0), lambda v: shown.append(len(v["examples"])) or "a"
    )
    release = member | DPAggregate(NoisyVote(["a", "b"]), budget_of(epsilon=1000.0), return_receipt=True)
    answer = await ask(way, release, QUERY)
    assert answer["answer"] in ("a", "b")
    assert shown == [0] * 5
    assert answer["receipt"]["number"] == release.budget.spent() == 1


def test_another_threshold_is_another_question_for_the_ledger(budget_of: Any, store_of: Any, records: Any) -> None:
    store, budget = store_of(records(20)), budget_of(releases=5, replay=True)

    def number(threshold: float | None) -> int:
        selector = gated(store, threshold=threshold, nearest_to="input")
        release = PrivateEnsemble(selector, lambda v: "a") | DPAggregate(
            NoisyVote(["a", "b"]), budget, return_receipt=True
        )
        found: int = release.invoke(QUERY)["receipt"]["number"]
        return found

    assert [number(0.3), number(0.3), number(0.4), number(None), number(0.4)] == [1, 1, 2, 3, 2]
