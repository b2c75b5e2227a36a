"""`store/records.py`: the records, vectors, ids and keys that every store refuses, by position, without their text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from stores.places import everything

from langchain_dpicl import ExemplarStore, InvalidParameter, InvalidRecords


class Fixed(Embeddings):
    """Embeddings that answer what the test says."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def embed_documents(self, texts: list[str]) -> Any:
        return self.answer(texts) if callable(self.answer) else self.answer

    def embed_query(self, text: str) -> list[float]:
        raise NotImplementedError


# -- records that cannot become exemplars ------------------------------------------------------------------------------


def bad_records(secret: str) -> dict[str, list[Any]]:
    good = {"input": f"fine {secret}", "output": f"yes {secret}", "owner": f"o {secret}"}
    return {
        "missing input": [good, {"output": secret, "owner": secret}],
        "missing output": [good, {"input": secret, "owner": secret}],
        "missing owner": [good, {"input": secret, "output": secret}],
        "owner None": [good, {"input": secret, "output": secret, "owner": None}],
        "owner empty": [good, {"input": secret, "output": secret, "owner": " "}],
        "owner a float": [good, {"input": secret, "output": secret, "owner": float("nan")}],
        "owner a list": [good, {"input": secret, "output": secret, "owner": [secret, "another"]}],
        "owner a mapping": [good, {"input": secret, "output": secret, "owner": {"id": secret}}],
        "owner a truth value": [good, {"input": secret, "output": secret, "owner": True}],
        "empty text": [good, {"input": " \n", "output": secret, "owner": secret}],
        "empty output": [good, {"input": secret, "output": "", "owner": secret}],
        "text not a string": [good, {"input": [secret], "output": secret, "owner": secret}],
        "bytes": [good, {"input": secret.encode(), "output": secret, "owner": secret}],
        "not a mapping": [good, secret],
        "a list": [good, [secret]],
        "None": [good, None],
        "metadata that is an object": [good, good | {"meta": object()}],
        "metadata that is bytes": [good, good | {"meta": secret.encode()}],
        "metadata of too many levels": [good, good | {"meta": nested(64)}],
    }


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else "deep"


BAD = list(bad_records(""))


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_record_is_refused_by_position_without_its_text(
    kind: str, canary: str, embeddings: Embeddings, canary_free: Callable[..., None]
) -> None:
    with pytest.raises(InvalidRecords, match="record 1") as caught:
        ExemplarStore.from_records(bad_records(canary)[kind], embeddings, owner_key="owner")
    canary_free(caught.value)


@pytest.mark.parametrize("kind", BAD)
def test_a_refused_addition_changes_nothing(
    kind: str, canary: str, records: Any, store_of: Any, canary_free: Callable[..., None]
) -> None:
    store = store_of(records(3, 2))
    before = everything(store)
    with pytest.raises(InvalidRecords) as caught:
        store.add(bad_records(canary)[kind], owner_key="owner")
    canary_free(caught.value)
    assert everything(store) == before


BAD_VECTORS: dict[str, Any] = {
    "NaN": [[1.0] * 8, [float("nan")] * 8],
    "infinite": [[1.0] * 8, [float("inf")] + [0.0] * 7],
    "minus infinite": [[1.0] * 8, [-float("inf")] + [0.0] * 7],
    "too large for float32": [[1.0] * 8, [1e39] + [0.0] * 7],
    "ragged": [[1.0] * 8, [1.0] * 7],
    "too few": [[1.0] * 8],
    "too many": [[1.0] * 8] * 3,
    "flat": [1.0, 2.0],
    "no columns": [[], []],
    "texts": [["a"] * 8, ["b"] * 8],
    "None": None,
    "nested too deep": [[[1.0]], [[1.0]]],
}


@pytest.mark.parametrize("kind", BAD_VECTORS)
@pytest.mark.parametrize("given_as", ["embeddings", "vectors"])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_bad_vectors_are_refused_and_change_nothing(
    kind: str, given_as: str, canary: str, records: Any, store_of: Any, canary_free: Callable[..., None]
) -> None:
    if kind == "None" and given_as == "vectors":
        return  # no vectors given means that they are computed
    new = records(2, secret=canary)
    options: dict[str, Any] = {"vectors": BAD_VECTORS[kind]} if given_as == "vectors" else {}
    with pytest.raises(InvalidRecords) as caught:
        ExemplarStore.from_records(new, Fixed(BAD_VECTORS[kind]), owner_key="owner", batch=True, **options)
    canary_free(caught.value)

    store = store_of(records(3), batch=True)
    before = everything(store)
    store.embeddings = Fixed(BAD_VECTORS[kind])
    with pytest.raises(InvalidRecords) as caught:
        store.add(new, owner_key="owner", **options)
    canary_free(caught.value)
    assert everything(store) == before


def test_the_position_of_a_bad_embedding_counts_over_batches(records: Any) -> None:
    def embed(texts: list[str]) -> list[list[float]]:
        return [[float("nan") if text.startswith("text 700.") else 1.0] * 2 for text in texts]

    with pytest.raises(InvalidRecords, match="record 700 "):
        ExemplarStore.from_records(records(800), Fixed(embed), owner_key="owner")


def test_batches_of_different_dimensions_are_refused(records: Any) -> None:
    def embed(texts: list[str]) -> list[list[float]]:
        return [[1.0] * (2 if texts[0].startswith("text 0.") else 3)] * len(texts)

    with pytest.raises(InvalidRecords, match="dimension"):
        ExemplarStore.from_records(records(600), Fixed(embed), owner_key="owner")


@pytest.mark.parametrize("vectors", [np.ones((2, 7), np.float32), np.ones((2, 9), np.float32)])
def test_vectors_of_another_dimension_are_refused(vectors: Any, records: Any, store_of: Any) -> None:
    store = store_of(records(3))
    before = everything(store)
    with pytest.raises(InvalidRecords, match="dimensions, the store has 8"):
        store.add(records(2), owner_key="owner", vectors=vectors)
    assert everything(store) == before


def test_an_empty_store_cannot_be_made(embeddings: Embeddings) -> None:
    with pytest.raises(InvalidRecords, match="empty"):
        ExemplarStore.from_records([], embeddings)
    with pytest.raises(InvalidRecords, match="empty"):
        ExemplarStore.from_records(iter(()), embeddings)
    with pytest.raises(InvalidRecords, match="empty"):
        ExemplarStore.from_texts([], embeddings)


@pytest.mark.parametrize(
    "ids", [[4, 4], [0, 9], [9], [9, 10, 11], [-1, 9], [9, 2**62], ["9", 10], [9.0, 10], [None, 9], "ab"]
)
def test_bad_ids_are_refused_and_change_nothing(ids: Any, canary: str, records: Any, store_of: Any) -> None:
    store = store_of(records(2))  # ids 0 and 1
    before = everything(store)
    with pytest.raises(InvalidRecords, match="ids") as caught:
        store.add(records(2, secret=canary), owner_key="owner", ids=ids)
    assert canary not in str(caught.value)
    assert everything(store) == before


@pytest.mark.parametrize("name", ["input_key", "output_key", "owner_key"])
@pytest.mark.parametrize("value", ["", 3, ("a",)])
def test_a_bad_key_name_is_refused_by_name(name: str, value: Any, records: Any, embeddings: Embeddings) -> None:
    with pytest.raises(InvalidParameter, match=name):
        ExemplarStore.from_records(records(2), embeddings, **{name: value})


@pytest.mark.parametrize("name", ["outputs", "owners"])
def test_lists_beside_the_texts_have_their_length(name: str, embeddings: Embeddings) -> None:
    with pytest.raises(InvalidRecords, match=name):
        ExemplarStore.from_texts(["a", "b"], embeddings, **{name: ["c"]})  # type: ignore[arg-type]


# -- additions ---------------------------------------------------------------------------------------------------------


def test_a_later_addition_keeps_to_the_stores_owners(records: Any, store_of: Any) -> None:
    """A store made with an owner key must not take one person's later records for so many strangers: each would then
    flip a coin of its own, and the person would sit in several members."""
    store = store_of(records(3))
    more = [{"input": f"more {i}", "output": "b", "owner": "owner-1"} for i in range(5)]
    store.add(more)
    assert store.owner_count == 3


def test_a_failing_embedding_model_does_not_carry_texts_out(
    canary: str, records: Any, store_of: Any, canary_free: Callable[..., None]
) -> None:
    def fail(texts: list[str]) -> Any:
        raise RuntimeError(f"400 Bad Request: input too long: {texts[0]}")

    store = store_of(records(3))
    before = everything(store)
    store.embeddings = Fixed(fail)
    with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever is raised must be clean)
        store.add(records(2, secret=canary), owner_key="owner")
    assert everything(store) == before
    canary_free(caught.value)


def test_metadata_of_so_many_levels_is_read_from_a_deep_stack(embeddings: Embeddings) -> None:
    store = ExemplarStore.from_records([{"input": "a", "meta": nested(63)}], embeddings, output_key=None)

    def further(frames: int) -> Any:
        return further(frames - 1) if frames else view.read(np.array([0]))

    with store.reading() as view:
        assert further(sys.getrecursionlimit() - 250) == [{"input": "a", "meta": nested(63)}]
