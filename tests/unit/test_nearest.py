"""`nearest_to`: near to the query within a bucket, and nothing moves from one bucket to another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from ways import WAYS, ask

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    InvalidParameter,
    ModelUnavailable,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudgetExceeded,
    PrivateEnsemble,
    StoreError,
)
from langchain_dpicl.cli.session import compare
from langchain_dpicl.selection import Examples
from langchain_dpicl.store.view import StoreView

QUERY = {"question": "what does text 3.1 say?"}
DIMENSION = 8


def texts(buckets: list[Examples]) -> list[list[str]]:
    return [[exemplar["input"] for exemplar in bucket] for bucket in buckets]


def nearest(store: ExemplarStore, members: int = 3, **options: Any) -> PoissonExampleSelector:
    options = {"rate": 1.0, "max_exemplars": 3, "nearest_to": "question"} | options
    return PoissonExampleSelector(store, members, **options)


def draw(selector: PoissonExampleSelector, rate: float | None = None) -> list[list[str]]:
    return texts(selector.sample(rate, selector.embed_query(QUERY)))


def cosine(text: str) -> float:
    """The similarity of a text to the query, in double precision and from scratch."""
    model = DeterministicFakeEmbedding(size=DIMENSION)
    one, other = np.array(model.embed_query(text)), np.array(model.embed_query(QUERY["question"]))
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


# -- what is near ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_owner", [1, 4])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_a_bucket_keeps_the_nearest_of_what_it_drew_by_brute_force(
    per_owner: int, rate: float, store_of: Any, records: Any, owner_keyed: Any
) -> None:
    store = store_of(records(30, per_owner))
    near = nearest(store, rate=rate, exemplars_per_owner=4)
    everything = PoissonExampleSelector(store, 3, rate=rate, exemplars_per_owner=4, max_exemplars=200)
    for salt in range(5):
        near._randomness, everything._randomness = owner_keyed(store, salt), owner_keyed(store, salt)
        drawn = texts(everything.sample())
        assert draw(near) == [sorted(bucket, key=cosine, reverse=True)[:3] for bucket in drawn]


def test_of_a_sampled_owner_the_own_nearest_enter(store_of: Any, records: Any, owner_keyed: Any) -> None:
    store = store_of(records(9, 6))
    selector = nearest(store, exemplars_per_owner=2, max_exemplars=100)
    selector._randomness = owner_keyed(store, 1)
    seen = [text for bucket in draw(selector) for text in bucket]
    expected = [
        text
        for owner in range(9)
        for text in sorted((f"text {owner}.{j}" for j in range(6)), key=cosine, reverse=True)[:2]
    ]
    assert sorted(seen) == sorted(expected)


def test_at_rate_one_all_owners_are_split_among_the_members(store_of: Any, records: Any, seeded: Any) -> None:
    selector = nearest(store_of(records(20)), max_exemplars=20)
    selector._randomness = seeded(1)
    assert sorted(text for bucket in draw(selector) for text in bucket) == sorted(f"text {i}.0" for i in range(20))


def test_equal_nearness_is_decided_by_the_owners_own_order(records: Any, seeded: Any) -> None:
    """Among equal vectors every exemplar is kept alike: with 400 draws of 1 in 8, a count outside of 15..95 has a
    probability below 1e-7 for each of them (binomial tails)."""
    rows = records(8)
    store = ExemplarStore.from_records(
        rows, DeterministicFakeEmbedding(size=DIMENSION), owner_key="owner", vectors=np.ones((8, DIMENSION))
    )
    selector = nearest(store, members=2, max_exemplars=1)
    selector._randomness = seeded(3)
    first = [draw(selector)[0] for _ in range(400)]
    counts = [sum(bucket == [row["input"]] for bucket in first) for row in rows]
    assert all(15 <= count <= 95 for count in counts), counts


def test_only_what_is_kept_is_read(store_of: Any, records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(records(60))
    read: list[int] = []
    whole = StoreView.read
    monkeypatch.setattr(StoreView, "read", lambda view, rows: (read.append(len(rows)), whole(view, rows))[1])
    draw(nearest(store, max_exemplars=2))
    assert read == [6]


def test_a_similarity_does_not_depend_on_the_rows_around_it() -> None:
    """To the last bit: or one owner's presence could change who is nearest in another member's bucket. A matrix product
    fails this."""
    rng = np.random.default_rng(5)
    vectors = rng.normal(size=(3001, 384)).astype(np.float32)
    store = ExemplarStore.from_records(
        [{"input": f"text {i}"} for i in range(3001)],
        DeterministicFakeEmbedding(size=384),
        output_key=None,
        vectors=vectors,
    )
    query = store.embed_query("q")
    parts = (rng.permutation(3001), np.arange(1, 3001), np.arange(7, 12), np.array([2999]), np.arange(0, 3001, 3))
    with store.reading() as view:
        alone = view.similarity(np.arange(3001), query)
        for rows in parts:
            assert (view.similarity(rows, query) == alone[rows]).all()
        assert np.allclose(alone, view.vectors(np.arange(3001)) @ query, atol=1e-6)
        assert view.matrix() is not None
        for rows in parts:
            assert (view.similarity(rows, query) == alone[rows]).all(), "from memory as from the database"


# -- the coupling ------------------------------------------------------------------------------------------------------


class GlobalTopFirst(PoissonExampleSelector):
    """The tempting mistake: search the whole store, then split what was found."""

    def sample(self, rate: float | None = None, query: Any = None) -> list[Examples]:
        coins: Any = self._randomness
        chosen = coins.coin_positions(self.store.owner_count, self.rate)
        member_of = coins.integers(self.members, len(chosen))
        buckets = [Examples() for _ in range(self.members)]
        with self.store.reading() as view:
            rows, position = view.rows_of(chosen)
            order = np.argsort(-view.similarity(rows, query.vector), kind="stable")
            found = order[: self.members * self.max_exemplars]
            for exemplar, owner in zip(view.read(rows[found]), position[found], strict=True):
                buckets[member_of[owner]].append(exemplar)
        return buckets


SHAPES = {
    "one exemplar each": {"per_owner": [1] * 14, "exemplars_per_owner": 1, "max_exemplars": 2},
    "the nearest of each": {"per_owner": [4] * 14, "exemplars_per_owner": 1, "max_exemplars": 2},
    "several enter": {"per_owner": [1, 5, 3, 2, 4, 1, 6, 2, 3, 1, 4, 2], "exemplars_per_owner": 3, "max_exemplars": 3},
    "all may enter": {"per_owner": [1, 5, 3, 2, 4, 1, 6, 2, 3, 1, 4, 2], "exemplars_per_owner": 9, "max_exemplars": 1},
}


def changed_buckets(
    kind: type[PoissonExampleSelector],
    shape: dict[str, Any],
    rate: float,
    store_of: Any,
    owner_keyed: Callable[..., Any],
) -> list[int]:
    """For every salt and owner: how many buckets differ between the store with and the store without this owner, under
    the same coins of all the others."""
    rows = [
        {"input": f"text {i}.{j}", "output": "Positive", "owner": f"owner-{i}"}
        for i, count in enumerate(shape["per_owner"])
        for j in range(count)
    ]
    np.random.default_rng(0).shuffle(rows)
    options = {key: shape[key] for key in ("exemplars_per_owner", "max_exemplars")} | {"rate": rate}

    def buckets(store: ExemplarStore, salt: int) -> list[list[str]]:
        selector = kind(store, 3, nearest_to="question", **options)
        selector._randomness = owner_keyed(store, salt)
        return draw(selector)

    everyone = store_of(rows)
    answers = []
    for left_out in sorted({row["owner"] for row in rows}):
        without = store_of([row for row in rows if row["owner"] != left_out])
        for salt in range(5):
            pairs = zip(buckets(everyone, salt), buckets(without, salt), strict=True)
            answers.append(sum(one != other for one, other in pairs))
    return answers


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rate", [0.4, 1.0])
def test_without_one_owner_at_most_one_bucket_differs(shape: str, rate: float, store_of: Any, owner_keyed: Any) -> None:
    """The coupling that the guarantee rests on, for every owner: no chance is involved, so no false alarm."""
    changed = changed_buckets(PoissonExampleSelector, SHAPES[shape], rate, store_of, owner_keyed)
    assert max(changed) == 1
    assert min(changed) == 0, "an owner who is not near, or not sampled, changes nothing"


@pytest.mark.parametrize("shape", SHAPES)
def test_searching_the_whole_store_before_splitting_breaks_the_coupling(
    shape: str, store_of: Any, owner_keyed: Any
) -> None:
    assert max(changed_buckets(GlobalTopFirst, SHAPES[shape], 1.0, store_of, owner_keyed)) > 1


# -- the query, before the charge --------------------------------------------------------------------------------------


class Model(Embeddings):
    """Embeds documents well and queries as told; counts."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer = answer
        self.queries: list[str] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return DeterministicFakeEmbedding(size=DIMENSION).embed_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        self.queries.append(text)
        return self.answer(text)

    async def aembed_query(self, text: str) -> list[float]:
        self.queries.append(f"async {text}")
        return self.answer(text)


def good(text: str) -> list[float]:
    return DeterministicFakeEmbedding(size=DIMENSION).embed_query(text)


@pytest.fixture
def released(budget_of: Any, records: Any) -> Callable[..., Any]:
    def make(model: Embeddings, **options: Any) -> Any:
        store = ExemplarStore.from_records(records(12), model, owner_key="owner")
        member = lambda values: "Positive" if len(values["examples"]) == 2 else "Negative"  # noqa: E731
        ensemble = PrivateEnsemble(nearest(store, max_exemplars=2), member)
        return ensemble | DPAggregate(NoisyVote(["Positive", "Negative"]), budget_of(**options))

    return make


@pytest.mark.parametrize("way", WAYS)
async def test_a_query_is_embedded_once_before_the_charge(way: str, released: Any) -> None:
    model = Model(good)
    release = released(model)
    assert await ask(way, release, QUERY) == "Positive"
    assert model.queries == [("async " if way.startswith("a") else "") + QUERY["question"]]
    assert release.budget.spent() == 1


async def test_a_replayed_answer_is_not_embedded_again(released: Any) -> None:
    model = Model(good)
    release = released(model, replay=True)
    answers = [release.invoke(QUERY), release.invoke(QUERY), await release.ainvoke(QUERY)]
    assert answers == ["Positive"] * 3
    assert len(model.queries) == 1
    assert release.budget.spent() == 1


def fail(text: str) -> Any:
    raise ConnectionError(f"no server for {text}")


UNUSABLE: list[tuple[Callable[[str], Any], type[Exception]]] = [
    (fail, ModelUnavailable),
    (lambda _: [float("nan")] * DIMENSION, ModelUnavailable),
    (lambda _: [float("inf")] + [0.0] * (DIMENSION - 1), ModelUnavailable),
    (lambda _: "text", ModelUnavailable),
    (lambda _: None, ModelUnavailable),
    (lambda _: [[1.0] * DIMENSION], ModelUnavailable),
    (lambda _: [1.0] * (DIMENSION + 1), StoreError),
    (lambda _: [], StoreError),
]


@pytest.mark.parametrize(("answer", "error"), UNUSABLE)
async def test_a_query_that_cannot_be_embedded_costs_nothing(
    answer: Any, error: type[Exception], released: Any, canary_free: Any
) -> None:
    release = released(Model(answer))
    for way in WAYS:
        with pytest.raises(error) as caught:
            await ask(way, release, QUERY)
        canary_free(caught.value, secret="no server for")
    assert release.budget.spent() == 0


@pytest.mark.parametrize("values", [{}, {"input": "q"}, {"question": 3}, {"question": None}, {"question": ["q"]}])
async def test_a_request_without_a_text_to_be_near_to_costs_nothing(values: Any, released: Any) -> None:
    model = Model(good)
    release = released(model)
    for way in WAYS:
        with pytest.raises(InvalidParameter, match="'question'"):
            await ask(way, release, values)
    assert release.budget.spent() == 0
    assert model.queries == []


def test_a_spent_budget_embeds_nothing(released: Any) -> None:
    model = Model(good)
    release = released(model, releases=1)
    release.invoke(QUERY)
    with pytest.raises(PrivacyBudgetExceeded):
        release.invoke({"question": "another"})
    assert len(model.queries) == 1


@pytest.mark.parametrize("scale", [1e-300, 1e-3, 1e300])
def test_a_querys_length_plays_no_part(scale: float, released: Any, records: Any) -> None:
    store = ExemplarStore.from_records(
        records(4), Model(lambda text: [scale * x for x in good(text)]), owner_key="owner"
    )
    unit = np.array(good("q"))
    assert np.allclose(store.embed_query("q"), unit / np.linalg.norm(unit), atol=1e-6)
    assert np.array_equal(asyncio.run(store.aembed_query("q")), store.embed_query("q"))


def test_a_zero_query_is_near_to_nobody_and_draws_at_random(released: Any) -> None:
    assert released(Model(lambda _: [0.0] * DIMENSION)).invoke(QUERY) == "Positive"


def test_a_comparison_embeds_the_query_too(released: Any) -> None:
    release = released(Model(good))
    assert compare(release, QUERY)["ensemble_not_private"] == "Positive"


def test_within_a_prompt_template_and_outside_of_a_release(store_of: Any, records: Any) -> None:
    selector = nearest(store_of(records(12)))
    with pytest.warns(UserWarning, match="outside of a sealed release"):
        found = selector.select_examples(QUERY)
    assert [e["input"] for e in found] == sorted((e["input"] for e in found), key=cosine, reverse=True)


@pytest.mark.filterwarnings("ignore")
def test_bad_parameters_are_refused(store_of: Any, records: Any) -> None:
    store = store_of(records(12))
    with pytest.raises(InvalidParameter, match="max_exemplars"):
        PoissonExampleSelector(store, 3, rate=1.0, nearest_to="question")
    for name in ("", "examples", 3):
        with pytest.raises(InvalidParameter, match="nearest_to"):
            nearest(store, nearest_to=name)
    with pytest.raises(InvalidParameter, match="query"):
        nearest(store).sample()
    with pytest.raises(InvalidParameter, match="query"):
        PoissonExampleSelector(store, 3, rate=1.0, max_exemplars=8).sample(query=np.ones(DIMENSION, np.float32))
    with pytest.raises(InvalidParameter, match="'question'"):
        nearest(store).select_examples({"input": "q"})
