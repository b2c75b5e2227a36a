"""`store/store.py` and `store/records.py`: what a store refuses, what it shows, and how it forgets."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from ears import Ears
from langchain_core.embeddings import Embeddings
from langchain_core.load import dumps

from langchain_dpicl import ExemplarStore, InvalidParameter, InvalidRecords, UnknownOwner, UnsafeConfigurationError
from langchain_dpicl.store import Owners
from langchain_dpicl.store.filters import MetadataFilter

LONE_SURROGATE = "half of a pair: \ud83d"


class Fixed(Embeddings):
    """Embeddings that answer what the test says."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def embed_documents(self, texts: list[str]) -> Any:
        return self.answer(texts) if callable(self.answer) else self.answer

    def embed_query(self, text: str) -> list[float]:
        raise NotImplementedError


def snapshot(store: ExemplarStore) -> tuple[Any, ...]:
    """Everything that a store holds, as values."""
    rows = np.arange(len(store), dtype=np.int64)
    return (
        store.read(rows),
        list(store.owners),
        dict(store._owner_slots),
        store._held.ids.tolist(),
        store._held.owner_of.tolist(),
        store._held.next_id,
        store._index.ntotal,
        store._held.vectors.tolist() if len(store) else [],
    )


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
    before = snapshot(store)
    with pytest.raises(InvalidRecords) as caught:
        store.add(bad_records(canary)[kind], owner_key="owner")
    canary_free(caught.value)
    assert snapshot(store) == before


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
        ExemplarStore.from_records(new, Fixed(BAD_VECTORS[kind]), owner_key="owner", **options)
    canary_free(caught.value)

    store = store_of(records(3))
    before = snapshot(store)
    store.embeddings = Fixed(BAD_VECTORS[kind])
    with pytest.raises(InvalidRecords) as caught:
        store.add(new, owner_key="owner", **options)
    canary_free(caught.value)
    assert snapshot(store) == before


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
    before = snapshot(store)
    with pytest.raises(InvalidRecords, match="dimensions, the store has 8"):
        store.add(records(2), owner_key="owner", vectors=vectors)
    assert snapshot(store) == before


def test_an_empty_store_cannot_be_made(embeddings: Embeddings) -> None:
    with pytest.raises(InvalidRecords, match="empty"):
        ExemplarStore.from_records([], embeddings)
    with pytest.raises(InvalidRecords, match="empty"):
        ExemplarStore.from_records(iter(()), embeddings)
    with pytest.raises(InvalidRecords, match="empty"):
        ExemplarStore.from_texts([], embeddings)


def test_adding_nothing_is_nothing(records: Any, store_of: Any) -> None:
    store = store_of(records(2))
    before = snapshot(store)
    assert store.add([]) == []
    assert snapshot(store) == before


@pytest.mark.parametrize(
    "ids", [[4, 4], [0, 9], [9], [9, 10, 11], [-1, 9], [9, 2**62], ["9", 10], [9.0, 10], [None, 9], "ab"]
)
def test_bad_ids_are_refused_and_change_nothing(ids: Any, canary: str, records: Any, store_of: Any) -> None:
    store = store_of(records(2))  # ids 0 and 1
    before = snapshot(store)
    with pytest.raises(InvalidRecords, match="ids") as caught:
        store.add(records(2, secret=canary), owner_key="owner", ids=ids)
    assert canary not in str(caught.value)
    assert snapshot(store) == before


def test_a_repeated_id_is_refused_at_the_start_too(records: Any, store_of: Any) -> None:
    with pytest.raises(InvalidRecords, match="unique"):
        store_of(records(2), ids=[7, 7])


@pytest.mark.parametrize("name", ["input_key", "output_key", "owner_key"])
@pytest.mark.parametrize("value", ["", 3, ("a",)])
def test_a_bad_key_name_is_refused_by_name(name: str, value: Any, records: Any, embeddings: Embeddings) -> None:
    with pytest.raises(InvalidParameter, match=name):
        ExemplarStore.from_records(records(2), embeddings, **{name: value})


@pytest.mark.parametrize("name", ["outputs", "owners"])
def test_lists_beside_the_texts_have_their_length(name: str, embeddings: Embeddings) -> None:
    with pytest.raises(InvalidRecords, match=name):
        ExemplarStore.from_texts(["a", "b"], embeddings, **{name: ["c"]})  # type: ignore[arg-type]


# -- what a store holds and shows --------------------------------------------------------------------------------------


def test_records_come_back_whole_and_in_order(embeddings: Embeddings) -> None:
    rows = [
        {"text": "naïve ☃ 漢字 \u202e right to left", "label": "ünïcode", "who": "Ωwner", "ward": ["ü", 3]},
        {"text": LONE_SURROGATE, "label": "a\x00b", "who": "x\ud800"},
        {"text": 'quotes " and \\ and \n', "label": "l", "who": 17},
    ]
    store = ExemplarStore.from_records(
        rows, embeddings, input_key="text", output_key="label", owner_key="who", vectors=np.ones((3, 2), np.float32)
    )
    assert store.read(np.arange(3)) == [{key: r[key] for key in r if key != "who"} for r in rows]
    assert list(store.owners) == ["Ωwner", "x\ud800", "17"]


def test_from_texts_with_and_without_companions(embeddings: Embeddings) -> None:
    bare = ExemplarStore.from_texts(["a", "b"], embeddings)
    assert bare.read(np.arange(2)) == [{"input": "a"}, {"input": "b"}]
    assert len(bare.owners) == 2
    full = ExemplarStore.from_texts(["a", "b", "c"], embeddings, outputs=["x", "y", "z"], owners=["p", "q", "p"])
    assert full.read(np.arange(3))[2] == {"input": "c", "output": "z"}
    assert list(full.owners) == ["p", "q"]


def test_without_an_owner_key_every_record_is_its_own_owner(records: Any, store_of: Any) -> None:
    store = store_of(records(2, 3), owner_key=None)
    assert len(store.owners) == 6
    store.add([{"input": "a", "output": "b"}])
    assert len(store.owners) == store.owner_count == 7


def test_an_owner_that_exists_grows(records: Any, store_of: Any) -> None:
    store = store_of(records(3))
    store.add([{"input": "more", "output": "b", "owner": "owner-1"}], owner_key="owner")
    assert len(store) == 4
    assert len(store.owners) == 3
    rows, position = store.rows_of(np.array([1, 2]))
    assert rows.tolist() == [1, 3, 2]
    assert position.tolist() == [0, 0, 1]


def test_a_later_addition_keeps_to_the_stores_owners(records: Any, store_of: Any) -> None:
    """A store made with an owner key must not take one person's later records for so many strangers: each would then
    flip a coin of its own, and the person would sit in several members."""
    store = store_of(records(3))
    more = [{"input": f"more {i}", "output": "b", "owner": "owner-1"} for i in range(5)]
    try:
        store.add(more)
    except (InvalidRecords, InvalidParameter):
        return
    assert store.owner_count == 3


def test_a_failing_embedding_model_does_not_carry_texts_out(
    canary: str, records: Any, store_of: Any, canary_free: Callable[..., None]
) -> None:
    def fail(texts: list[str]) -> Any:
        raise RuntimeError(f"400 Bad Request: input too long: {texts[0]}")

    store = store_of(records(3))
    before = snapshot(store)
    store.embeddings = Fixed(fail)
    with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever is raised must be clean)
        store.add(records(2, secret=canary), owner_key="owner")
    assert snapshot(store) == before
    canary_free(caught.value)


def test_vectors_are_scaled_to_norm_one_and_a_zero_vector_stays_zero(records: Any, store_of: Any) -> None:
    vectors = np.array([[3.0, 4.0], [0.0, 0.0], [1e-20, 0.0], [3e38, 3e38]], np.float32)
    given = vectors.copy()
    store = store_of(records(4), vectors=vectors)
    stored = store._held.vectors
    assert np.allclose(stored, [[0.6, 0.8], [0, 0], [1, 0], [0.5**0.5, 0.5**0.5]], atol=1e-6)
    assert (vectors == given).all(), "the caller's array is the caller's"


def test_the_index_searches_by_inner_product_under_the_records_ids(records: Any, store_of: Any) -> None:
    store = store_of(records(3), ids=[30, 10, 20], vectors=np.eye(3, dtype=np.float32))
    scores, rows = store._index.search(np.array([[0.1, 0.9, 0.2]], np.float32), 3)
    assert [store.ids_of(found) for found in rows] == [[10, 20, 30]]
    assert np.allclose(scores, [[0.9, 0.2, 0.1]])
    assert isinstance(store._index, faiss.IndexFlatIP)


def test_ids_are_given_kept_and_never_used_again(records: Any, store_of: Any) -> None:
    store = store_of(records(3), ids=[5, 90, 7])
    assert store.add([{"input": "a", "output": "b", "owner": "z"}], owner_key="owner") == [91]
    store.forget("z")
    assert store.add([{"input": "a", "output": "b", "owner": "z"}], owner_key="owner") == [92]
    assert store._held.ids.tolist() == [5, 90, 7, 92]


def test_what_a_store_shows_is_counts(canary: str, records: Any, store_of: Any) -> None:
    store = store_of(records(4, 2, secret=canary))
    shown = [repr(store), str(store), f"{store}", repr(store.owners), str(store.owners), dumps(store, pretty=True)]
    assert repr(store) == "ExemplarStore(8 dimensions)"
    assert repr(store.owners) == "<4 owners>"
    assert not [text for text in shown if canary in text or "owner-" in text]


def test_owners_are_a_sequence_and_a_snapshot(records: Any, store_of: Any) -> None:
    store = store_of(records(3))
    owners = store.owners
    assert isinstance(owners, Owners)
    assert owners[0] == "owner-0"
    assert list(owners[1:]) == ["owner-1", "owner-2"]
    assert "owner-2" in owners
    store.forget("owner-2")
    assert len(owners) == 3
    assert len(store.owners) == 2


@pytest.mark.parametrize("way", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_store_is_neither_pickled_nor_copied(way: Callable[[Any], Any], records: Any, store_of: Any) -> None:
    with pytest.raises(UnsafeConfigurationError, match="save"):
        way(store_of(records(2)))


def test_memory_is_near_the_vectors_size(embeddings: Embeddings) -> None:
    rows = [{"input": f"some text of a usual length, number {i}", "output": "label"} for i in range(20_000)]
    store = ExemplarStore.from_records(rows, embeddings, vectors=np.ones((20_000, 384), np.float32))
    store.rows_of(np.arange(3))
    size = store.memory_bytes()
    assert size["vectors"] == 20_000 * 384 * 4
    assert size["other"] < 0.2 * size["vectors"]


# -- forgetting --------------------------------------------------------------------------------------------------------


def everything_reachable(store: ExemplarStore) -> list[Any]:
    """Objects that can be reached from the store's own attributes, without modules, classes and functions."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = [store.__dict__]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type) or type(item).__name__ in ("module", "function"):
            continue
        seen[id(item)] = item
        waiting += gc.get_referents(item)
    return list(seen.values())


def shows(item: Any, secret: bytes) -> bool:
    if isinstance(item, str):
        return secret in item.encode("utf-8", "surrogatepass")
    if isinstance(item, (bytes, bytearray)):
        return secret in item
    return isinstance(item, np.ndarray) and secret in item.tobytes()


def test_forgetting_leaves_no_trace_in_memory(canary: str, records: Any, store_of: Any) -> None:
    store = store_of(records(5, 2))
    secret_rows = [{"input": f"{canary} {i}", "output": canary, "owner": f"{canary}-owner"} for i in range(3)]
    store.add(secret_rows, owner_key="owner")
    store.rows_of(np.arange(6))  # fills the owners' index
    store.passing(np.arange(13), MetadataFilter.parse({"output": canary}))  # and a column
    vectors = store._held.vectors[-3:].copy()
    old_buffer, old_index = store._held.texts._data, store._index
    assert any(shows(item, canary.encode()) for item in everything_reachable(store)), "the search can find it"

    assert store.forget(f"{canary}-owner") == 3

    assert not [item for item in everything_reachable(store) if shows(item, canary.encode())]
    assert old_buffer == bytes(len(old_buffer)), "the old buffer is overwritten, not merely dropped"
    old_rows = faiss.rev_swig_ptr(old_index.get_xb(), 13 * 8).reshape(13, 8)
    assert (old_rows[-3:] == 0).all(), "the old index's rows are overwritten"
    left = store._held.vectors
    assert left.shape == (10, 8)
    for vector in vectors:
        assert (np.abs(left - vector).max(axis=1) > 1e-6).all()
    assert f"{canary}-owner" not in store.owners
    assert len(store) == 10
    assert store.owner_count == 5


def test_forgetting_leaves_the_others_as_they_are(records: Any, store_of: Any) -> None:
    rows = records(6, 3)
    store = store_of(rows, ids=[100 + i for i in range(18)])
    vectors = {int(i): v.copy() for i, v in zip(store._held.ids, store._held.vectors, strict=True)}
    for owner in ("owner-3", "owner-0", "owner-5"):
        store.forget(owner)
    left = [row for row in rows if row["owner"] not in ("owner-3", "owner-0", "owner-5")]
    assert store.read(np.arange(9)) == [{"input": r["input"], "output": r["output"]} for r in left]
    assert list(store.owners) == ["owner-1", "owner-2", "owner-4"]
    assert store._held.ids.tolist() == [100 + i for i, r in enumerate(rows) if r in left]
    for i, vector in zip(store._held.ids, store._held.vectors, strict=True):
        assert (vectors[int(i)] == vector).all()
    for slot, owner in enumerate(store.owners):
        found, _ = store.rows_of(store.numbers[[slot]])
        assert [left[int(row)]["owner"] for row in found] == [owner] * 3


def test_the_last_owner_can_be_forgotten_and_the_store_used_again(records: Any, store_of: Any, tmp_path: Path) -> None:
    store = store_of(records(1, 2))
    store.save(tmp_path / "store.npz")
    assert store.forget("owner-0") == 2
    assert len(store) == store.owner_count == len(store.owners) == 0
    assert store.rows_of(np.array([0]))[0].tolist() == [], "an owner that was eligible just before"
    assert store.marks(np.array([0]), b"key") == [b""]
    assert repr(store) == "ExemplarStore(8 dimensions)"
    reloaded = ExemplarStore.load(tmp_path / "store.npz", store.embeddings)
    assert len(reloaded) == 0
    for each in (store, reloaded):
        assert each.add(records(2), owner_key="owner") == [2, 3]
        assert each.rows_of(each.numbers[:2])[0].tolist() == [0, 1]


@pytest.mark.parametrize("owner", ["nobody", "owner-1 ", "", "OWNER-1"])
def test_an_unknown_owner_is_an_error_that_repeats_no_name(owner: str, records: Any, store_of: Any) -> None:
    store = store_of(records(3))
    before = snapshot(store)
    with pytest.raises(UnknownOwner) as caught:
        store.forget(owner)
    assert str(caught.value) == "the store holds no such owner"
    assert isinstance(caught.value, KeyError)
    assert snapshot(store) == before


def test_an_owner_is_forgotten_once(records: Any, store_of: Any) -> None:
    store = store_of(records(3))
    store.forget("owner-1")
    with pytest.raises(UnknownOwner):
        store.forget("owner-1")


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_that_add_forget_and_read_see_whole_changes_only(records: Any, store_of: Any) -> None:
    store = store_of(records(20, 3))
    faults: list[str] = []
    stop = threading.Event()

    def guarded(body: Callable[[random.Random], None], seed: int) -> threading.Thread:
        def run() -> None:
            generator = random.Random(seed)
            try:
                while not stop.is_set():
                    body(generator)
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error}")

        return threading.Thread(target=run)

    def add(generator: random.Random) -> None:
        owner = f"new-{generator.random()}"
        store.add([{"input": f"{owner} {i}", "output": "x", "owner": owner} for i in range(3)], owner_key="owner")

    def forget(generator: random.Random) -> None:
        owners: Sequence[str] = store.owners
        if len(owners) > 10 and store.forget(generator.choice(owners)) != 3:
            faults.append("an owner's exemplars did not go together")

    def read(_: random.Random) -> None:
        with store.lock:
            slots = np.arange(store.owner_count)
            rows, position = store.rows_of(store.numbers)
            exemplars = store.read(rows)
            if len(exemplars) != 3 * len(slots) or (np.bincount(position) != 3).any():
                faults.append("a reader saw half a change")

    threads = [guarded(add, 1), guarded(add, 2), guarded(forget, 3), guarded(read, 4), guarded(read, 5)]
    for thread in threads:
        thread.start()
    stop.wait(1.0)
    stop.set()
    for thread in threads:
        thread.join()
    # Two threads may pick the same owner to forget: only one forgets here, so nothing at all may go wrong.
    assert faults == []
    assert len(store) == 3 * store.owner_count == store._index.ntotal
    assert sorted(store._held.ids.tolist()) == sorted(set(store._held.ids.tolist()))


# -- one owner's record, and the others' release -----------------------------------------------------------------------


UNREADABLE = {
    "no JSON": b"{",
    "no UTF-8": b'{"input": "\xff"}',
    "no mapping": b"[1]",
    "deeper than Python reads": b"[" * 5000 + b"]" * 5000,
    "a number of too many digits": b'{"input": 1' + b"0" * 5000 + b"}",
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_record_that_cannot_be_read_fails_no_release(kind: str, store_of: Any, records: Any, sealed_of: Any) -> None:
    """It is an empty exemplar: its owner's member may fail on it, and nobody else's."""
    store = store_of(records(8))
    contents = [store._held.texts[i] for i in range(8)]
    store._held.texts.wipe()
    store._held.texts.extend([*contents[:3], UNREADABLE[kind], *contents[4:]])
    assert store.read(np.array([3])) == [{}]
    assert sum(map(bool, store.read(np.arange(8)))) == 7
    failed = Ears()

    def member(values: dict[str, Any]) -> str:
        failed.append(len(values["examples"]))
        [each["input"] for each in values["examples"]]
        failed.pop()
        return "Positive"

    assert sealed_of(member, store=store).invoke({"input": "?"}) == "Positive"
    assert len(failed) == 1


def test_metadata_of_so_many_levels_is_read_from_a_deep_stack(embeddings: Embeddings) -> None:
    store = ExemplarStore.from_records([{"input": "a", "meta": nested(63)}], embeddings, output_key=None)

    def further(frames: int) -> Any:
        return further(frames - 1) if frames else store.read(np.array([0]))

    assert further(sys.getrecursionlimit() - 250) == [{"input": "a", "meta": nested(63)}]
