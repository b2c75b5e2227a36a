"""Making and opening stores, what they hold, what they refuse and what they show."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ears import Same
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.load import dumps
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import (
    ExemplarStore,
    InvalidParameter,
    InvalidRecords,
    ModelUnavailable,
    ShutWithinCall,
    StoreError,
    UnsafeConfigurationError,
)
from langchain_dpicl.private.boundary import run_private
from stores.places import DIMENSION, EMBEDDINGS, Place, everything, row, rows, texts

NAMES = ["a", "A", "a ", "\u00e4", "a\u0308", "\0", "\udc80", "x" * 5000, "x" * 5001, "1", "'; DROP TABLE x; --"]


# -- what goes in comes back -------------------------------------------------------------------------------------------


def test_texts_and_names_of_any_kind_come_back_as_they_were(place: Place) -> None:
    """Zero characters, halves of surrogate pairs, cases and lengths: no encoding or collation makes two owners one."""
    given = [row(name, f"text {name}", extra={"n": [1, None, "\0\udfff"]}) for name in NAMES]
    store = place(given, vectors=np.ones((len(given), DIMENSION)))
    assert list(store.owners) == NAMES
    held = everything(store)
    assert held["exemplars"] == [{key: each[key] for key in each if key != "owner"} for each in given]
    assert held["ids"] == list(range(len(NAMES)))
    for name in NAMES:
        store.add([row(name, "more")])
    assert list(store.owners) == NAMES, "each has grown by one"
    for name in NAMES:
        assert store.forget(name) == 2
    assert len(store) == store.owner_count == len(store.owners) == 0


def test_vectors_come_in_scaled_and_a_zero_vector_stays_zero(place: Place) -> None:
    vectors = np.random.default_rng(1).normal(size=(6, DIMENSION)) * 10.0 ** np.arange(-3, 3)[:, None]
    vectors[2] = 0
    given = vectors.copy()
    store = place(rows(*"abcdef"), vectors=vectors)
    assert (vectors == given).all(), "the caller's array is the caller's"
    with store.reading() as view:
        units = np.eye(DIMENSION, dtype=np.float32)
        found = np.stack([view.similarity(np.arange(6), unit) for unit in units], axis=1)
        assert (view.vectors(np.array([4, 0, 2])) == found[[4, 0, 2]]).all()
        assert view.vectors(np.zeros(0, np.int64)).shape == (0, DIMENSION)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(found, vectors / np.where(norms > 0, norms, 1), atol=1e-6)
    assert found.dtype == np.float32


@pytest.mark.parametrize("dimension", [1, 1900, 2000, 16_000])
def test_vectors_of_every_size_are_stored_beside_long_texts(dimension: int, place: Place) -> None:
    vectors = np.random.default_rng(2).normal(size=(3, dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    noise = np.random.default_rng(3).bytes(20_000).hex()
    store = place([row(name, noise + name) for name in "abc"], vectors=vectors)
    with store.reading() as view:
        np.testing.assert_allclose(view.similarity(np.arange(3), vectors[1]), vectors @ vectors[1], atol=1e-5)
        assert view.read(np.array([2]))[0]["input"] == noise + "c"


def test_vectors_of_more_dimensions_than_pgvector_holds_are_refused(place: Place) -> None:
    with pytest.raises(InvalidRecords, match="16001 dimensions, a store holds 16000"):
        place(rows("a"), vectors=np.ones((1, 16_001), np.float32))


def test_ids_are_given_kept_and_never_used_again(place: Place) -> None:
    store = place(rows("a", "b", "c"), ids=[5, 90, 7])
    assert store.add(rows("z")) == [91]
    store.forget("z")
    assert store.add(rows("z")) == [92]
    assert store.add(rows("y"), ids=[3]) == [3]
    assert everything(store)["ids"] == [5, 90, 7, 92, 3]
    assert store.add(rows("x")) == [93]


def test_from_texts_with_and_without_companions(place: Place) -> None:
    store = ExemplarStore.from_texts(
        ["a", "b", "c"],
        EMBEDDINGS,
        place.url,
        outputs=["x", "y", "z"],
        owners=["p", "q", "p"],
        name=place.name,
        **place.options,
    )
    assert everything(store)["exemplars"][1] == {"input": "c", "output": "z"}
    assert list(store.owners) == ["p", "q"]
    store.close()


# -- refusals ----------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[list[Any], dict[str, Any]]] = [
    ([{"input": "x", "output": "y"}], {}),
    ([{"input": " ", "output": "y", "owner": "o"}], {}),
    ([row("o", bad=b"x")], {}),
    (rows("o"), {"ids": [2]}),
    (rows("o", "o"), {"ids": [50, 50]}),
    (rows("o", "o"), {"ids": [50]}),
    (rows("o"), {"ids": [-1]}),
    (rows("o"), {"ids": [2**62]}),
    (rows("o"), {"ids": ["1"]}),
    (rows("o"), {"vectors": np.ones((1, DIMENSION + 1))}),
    (rows("o"), {"vectors": np.full((1, DIMENSION), np.nan)}),
]


def test_a_refused_addition_changes_nothing(place: Place) -> None:
    store = place(rows(*"abcd"))
    before = everything(store)
    for more, options in REFUSED:
        good = [] if options else rows("new")
        with pytest.raises(InvalidRecords):
            store.add(good + more, **options)
        assert everything(store) == before
    assert store.add([]) == []
    assert store.add(rows("o")) == [4], "no id was used up"


def test_a_collection_with_content_is_not_made_again(shared: Place) -> None:
    store = shared(rows("a", "b"))
    asked: list[int] = []

    class Counting(DeterministicFakeEmbedding):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            asked.append(len(texts))
            return super().embed_documents(texts)

    for make in (lambda: shared(rows("c"), embeddings=Counting(size=DIMENSION)), shared.empty):
        with pytest.raises(StoreError, match="with content already"):
            make()
    assert asked == [], "nothing was embedded"
    for owner in list(store.owners):
        store.forget(owner)
    with pytest.raises(StoreError, match="other keys"):
        shared(rows("c"), owner_key=None)
    with pytest.raises(StoreError, match="another dimension"):
        shared(rows("c"), vectors=np.ones((1, DIMENSION + 1)))
    again = shared(rows("c", "d"))
    assert len(again) == len(store) == 2
    assert everything(store)["ids"] == [2, 3]


def test_collections_of_one_database_know_nothing_of_one_another(shared: Place) -> None:
    one = shared(rows("a", "b", "c"), name=f"{shared.name}_one")
    two = shared(rows("a", "b"), name=f"{shared.name}_two", owner_key=None)
    one.forget("b")
    assert (len(one), len(two)) == (2, 2)
    assert [shared.open(name=f"{shared.name}_{each}").owner_key for each in ("one", "two")] == ["owner", None]
    assert list(shared.open(name=f"{shared.name}_two").owners) == ["#0", "#1"]


def test_what_is_not_as_the_collection_was_made_is_refused(shared: Place) -> None:
    shared(rows("a", "b"))
    with pytest.raises(StoreError, match="no collection 'other'"):
        shared.open(name="other")
    for key in ("input_key", "output_key", "owner_key"):
        with pytest.raises(StoreError, match=f"was made with {key}="):
            shared.open(**{key: "else"})
    assert shared.open(input_key="input", output_key="output", owner_key="owner").dimension == DIMENSION
    with pytest.raises(StoreError, match="9 dimensions, the store has 8"):
        shared.open(DeterministicFakeEmbedding(size=9))

    class Down(DeterministicFakeEmbedding):
        def embed_query(self, text: str) -> list[float]:
            raise ConnectionError

    with pytest.raises(ModelUnavailable):
        shared.open(Down(size=DIMENSION))


def test_the_class_itself_opens_a_collection_or_makes_one(place: Place) -> None:
    url = place.url or "sqlite://"
    made = ExemplarStore(url, EMBEDDINGS, name=place.name, owner_key="who", **place.options)
    assert (made.input_key, made.output_key, made.owner_key, made.dimension) == ("text", None, "who", DIMENSION)
    made.add([{"text": "one", "who": "a"}])
    if place.url is not None:
        again = ExemplarStore(url, EMBEDDINGS, name=place.name, **place.options)
        assert everything(again) == everything(made)
        again.close()
    made.close()


@pytest.mark.parametrize("name", ["", "1a", "A", "a-b", "a b", "a" * 41, 'a"; DROP', "a\n", None, 5])
def test_a_bad_name_is_refused(name: Any, place: Place) -> None:
    with pytest.raises(InvalidParameter, match="name="):
        place(rows("a"), name=name)
    with pytest.raises(InvalidParameter, match="name="):
        ExemplarStore.open(place.url or "sqlite://", EMBEDDINGS, name=name)


# -- what it shows -----------------------------------------------------------------------------------------------------


def test_it_shows_counts_and_no_more(place: Place, canary: str) -> None:
    store = place([row(f"{canary} {i}", canary) for i in range(4)])
    with store.reading() as view:
        shown = [repr(view), repr(vars(store)), repr(store.maintenance())]
    assert repr(store) == str(store) == "ExemplarStore(8 dimensions)"
    assert repr(store.owners) == str(store.owners) == "<4 owners>"
    shown += [dumps(store, pretty=True), repr(store._database), repr(store._collection)]
    assert not [text for text in shown if canary in text]


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_neither_pickled_nor_copied(way: Callable[[Any], Any], place: Place) -> None:
    store = place(rows("a"))
    for each in (store, store._database, store.owners, store.maintenance()):
        with pytest.raises(UnsafeConfigurationError):
            way(each)


def test_no_call_of_a_chain_reads_it_or_writes_there(place: Place) -> None:
    store = place(rows(*"abcdefgh"))
    store.load_vectors()
    held: list[Any] = []
    store.maintenance()
    attacks: list[Callable[[], Any]] = [
        lambda: everything(store),
        lambda: store.owners,
        lambda: store._memory,
        lambda: len(store),
        lambda: store.load_vectors(),
        lambda: store.add(rows("x")),
        lambda: store.forget("c"),
        lambda: store.budgets,
        lambda: store.maintenance().get_by_ids(["#0"]),
        lambda: ExemplarStore.open(place.url or "sqlite://", EMBEDDINGS, name=place.name),
    ]

    def member(values: dict[str, Any]) -> str:
        for attack in attacks:
            try:
                held.append(attack())
            except ShutWithinCall:
                held.append("shut")
        return "Positive"

    before = everything(store)
    assert run_private(Same(RunnableLambda(member)), [({}, [])], max_concurrency=1) == ["Positive"]
    assert held == ["shut"] * len(attacks)
    assert everything(store) == before


# -- embedding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [False, True])
def test_each_text_is_embedded_alone_unless_batches_are_asked_for(batch: bool, place: Place) -> None:
    asked: list[int] = []

    class Counting(DeterministicFakeEmbedding):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            asked.append(len(texts))
            return super().embed_documents(texts)

    model = Counting(size=DIMENSION)
    store = place(rows("a", "b", "c"), embeddings=model, batch=batch)
    store.add(rows("d", "e"))
    store.maintenance().add_texts(["f", "g"], [{"owner": "f", "output": "x"}] * 2)
    assert asked == ([3, 2, 2] if batch else [1] * 7)
    assert len(texts(store)) == 7
