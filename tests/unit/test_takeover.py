"""`store/records.py`: what exists already becomes a store, with nothing lost and nothing embedded again."""

from __future__ import annotations

import asyncio
import datetime
import enum
import uuid
from collections import UserDict
from collections.abc import Callable
from decimal import Decimal
from itertools import islice
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from moments import exemplars_of, rows_of, vectors_of

from langchain_dpicl import ExemplarStore, InvalidParameter, InvalidRecords, StoreError, split_with_parents
from langchain_dpicl.store.records import as_matrix

DIMENSION = 6


class Counted(Embeddings):
    """Counts what it embeds; its vectors have different lengths."""

    def __init__(self) -> None:
        self.embedded = 0

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.embedded += len(texts)
        return [[len(text) * x for x in DeterministicFakeEmbedding(size=DIMENSION).embed_query(text)] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def collection(count: int = 9) -> list[Document]:
    return [
        Document(
            page_content=f"note {i}" + "!" * i,
            metadata={"patient": f"patient-{i % 4}", "page": i, "tags": ["a", {"b": None}], "desk": f"desk {i % 2}"},
        )
        for i in range(count)
    ]


def held(store: ExemplarStore) -> list[dict[str, Any]]:
    return exemplars_of(store)


# -- documents ---------------------------------------------------------------------------------------------------------


def test_a_document_becomes_text_with_its_metadata_beside_it_and_the_owner_apart() -> None:
    store = ExemplarStore.from_documents(collection(), Counted(), owner_key="patient", output_key="desk")
    assert held(store) == [
        {"text": f"note {i}" + "!" * i, "page": i, "tags": ["a", {"b": None}], "desk": f"desk {i % 2}"}
        for i in range(9)
    ]
    assert list(store.owners) == [f"patient-{i}" for i in range(4)]
    assert (store.input_key, store.output_key, store.owner_key) == ("text", "desk", "patient")


def test_given_vectors_are_taken_in_place_of_embedding() -> None:
    model = Counted()
    store = ExemplarStore.from_documents(collection(), model, vectors=np.eye(9, DIMENSION, dtype=np.float32) * 3)
    assert model.embedded == 0
    assert np.array_equal(vectors_of(store)[:DIMENSION], np.eye(DIMENSION))


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({}, "record 1 has no owner under 'patient'"),
        ({"patient": 10**5000}, "record 1 cannot be read"),
        ({"patient": " "}, "record 1 has no owner under 'patient'"),
        (
            {"patient": ["p", "q"]},
            "record 1 has no owner under 'patient': it needs one owner: a text or a whole number",
        ),
        ({"patient": datetime.date(2026, 1, 1)}, "record 1 has no owner under 'patient'"),
        ({"patient": "p", "seen": datetime.timedelta(1)}, "record 1 holds metadata .* under 'seen'"),
        ({"patient": "p", "seen": {1, b"x"}}, "record 1 holds metadata .* under 'seen'"),
        ({"patient": "p", "seen": np.timedelta64(1, "ns")}, "record 1 holds metadata .* under 'seen'"),
        ({"patient": "p", "seen": {1: "x", "1": "y"}}, "record 1 holds metadata .* JSON cannot represent.* 'seen'"),
        ({"patient": "p", 7: "x"}, "record 1 holds metadata .* under 7"),
        ({"patient": "p", "text": "x"}, "document 1 has metadata under 'text'"),
    ],
)
def test_metadata_that_cannot_be_kept_is_refused_by_position_and_key(
    metadata: dict[Any, Any], problem: str, canary: str, canary_free: Callable[..., None]
) -> None:
    documents = [*collection(1), Document(page_content=f"about {canary}")]
    documents[1].metadata = {**metadata, "name": canary}
    with pytest.raises(InvalidRecords, match=problem) as caught:
        ExemplarStore.from_documents(documents, Counted(), owner_key="patient")
    canary_free(caught.value)


class Ward(enum.Enum):
    NORTH = "north"


def test_common_metadata_is_kept_as_its_text() -> None:
    """Dates and the like, also within containers; a set by its elements, whatever their order in it."""
    name, day = uuid.uuid4(), datetime.date(2026, 1, 2)
    given = {
        "day": day,
        "time": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC),
        "id": name,
        "file": PurePosixPath("a/b.txt"),
        "price": Decimal("1.10"),
        "count": np.int64(3),
        "share": np.float32(0.5),
        "at": np.datetime64("2026-01-02T03:04:05", "ns"),  # as NumPy's item it is a number
        "on": np.datetime64("2026-01-02"),
        "never": np.datetime64("NaT"),
        "is_new": np.bool_(True),
        "ward": Ward.NORTH,
        "tags": {"b", "a", "c"},
        "days": [(day, frozenset({day}))],
    }
    store = ExemplarStore.from_documents([Document(page_content="note", metadata=given)], Counted())
    assert held(store) == [
        {
            "text": "note",
            "day": "2026-01-02",
            "time": "2026-01-02T03:04:00+00:00",
            "id": str(name),
            "file": "a/b.txt",
            "price": "1.10",
            "count": 3,
            "share": 0.5,
            "at": "2026-01-02T03:04:05.000000000",
            "on": "2026-01-02",
            "never": None,
            "is_new": True,
            "ward": "north",
            "tags": ["a", "b", "c"],
            "days": [["2026-01-02", ["2026-01-02"]]],
        }
    ]


def test_records_that_differ_in_the_order_of_their_keys_are_equal() -> None:
    """An exemplar without an owner is known by its content, and some sources have no order."""
    one = {"input": "x", "output": "y", "b": {"d": 1, "c": [{"f": 2, "e": 3}]}, "a": 4}
    other = {"a": 4, "b": {"c": [{"e": 3, "f": 2}], "d": 1}, "output": "y", "input": "x"}
    store = ExemplarStore.from_records([one, other], Counted())
    with store.reading() as view:
        kept = view.records(rows_of(store))
    assert kept[0].content == kept[1].content
    assert list(held(store)[1]) == ["input", "output", "a", "b"]


def test_owners_are_texts_or_whole_numbers_numpys_too() -> None:
    documents = [Document(page_content="note", metadata={"patient": owner}) for owner in ("7", 7, np.int64(7), 8)]
    store = ExemplarStore.from_documents(documents, Counted(), owner_key="patient")
    assert list(store.owners) == ["7", "8"]


def test_what_is_no_document_and_what_has_no_text_is_refused() -> None:
    with pytest.raises(InvalidRecords, match="document 0 is not a Document but dict"):
        ExemplarStore.from_documents([{"page_content": "x"}], Counted())  # type: ignore[list-item]
    with pytest.raises(InvalidRecords, match="document 1 has no text"):
        ExemplarStore.from_documents([*collection(1), Document(page_content=" ")], Counted())
    with pytest.raises(InvalidRecords, match="would be empty"):
        ExemplarStore.from_documents([], Counted())


def test_another_input_key_makes_room_for_metadata_called_text() -> None:
    document = Document(page_content="the note", metadata={"text": "its title"})
    store = ExemplarStore.from_documents([document], Counted(), input_key="content")
    assert held(store) == [{"content": "the note", "text": "its title"}]


# -- collections -------------------------------------------------------------------------------------------------------


def in_memory(model: Embeddings) -> VectorStore:
    return InMemoryVectorStore.from_documents(collection(), model)


def faiss_of(strategy: str, **options: Any) -> Callable[[Embeddings], VectorStore]:
    def make(model: Embeddings) -> VectorStore:
        pytest.importorskip("langchain_community")
        import faiss
        from langchain_community.docstore.in_memory import InMemoryDocstore
        from langchain_community.vectorstores import FAISS
        from langchain_community.vectorstores.utils import DistanceStrategy

        store = FAISS(
            model,
            faiss.IndexFlatIP(DIMENSION) if strategy == "ip" else faiss.IndexFlatL2(DIMENSION),
            InMemoryDocstore(),
            {},
            distance_strategy=(
                DistanceStrategy.MAX_INNER_PRODUCT if strategy == "ip" else DistanceStrategy.EUCLIDEAN_DISTANCE
            ),
            **options,
        )
        store.add_documents(collection())
        return store

    return make


def sklearn(model: Embeddings) -> VectorStore:
    pytest.importorskip("langchain_community")
    from langchain_community.vectorstores import SKLearnVectorStore

    store = SKLearnVectorStore(model)
    store.add_documents(collection())
    return store


COLLECTIONS = {
    "InMemoryVectorStore": in_memory,
    "FAISS, Euclidean": faiss_of("l2"),
    "FAISS, inner product": faiss_of("ip"),
    "FAISS, normalised": faiss_of("l2", normalize_L2=True),
    "SKLearnVectorStore": sklearn,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COLLECTIONS)
def test_a_collection_is_taken_over_whole_and_nothing_is_embedded_again(name: str) -> None:
    model = Counted()
    made = COLLECTIONS[name](model)
    before = model.embedded
    store = ExemplarStore.from_vectorstore(made, owner_key="patient")
    assert model.embedded == before == 9
    assert store.embeddings is model
    expected = ExemplarStore.from_documents(collection(), Counted(), owner_key="patient")
    assert held(store) == held(expected)
    assert list(store.owners) == list(expected.owners)
    assert np.allclose(vectors_of(store), vectors_of(expected), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_what_was_deleted_does_not_come_along_and_the_rest_keeps_its_vectors() -> None:
    made: Any = faiss_of("l2")(Counted())
    made.delete([made.index_to_docstore_id[i] for i in (0, 4)])
    store = ExemplarStore.from_vectorstore(made)
    left = [document for i, document in enumerate(collection()) if i not in (0, 4)]
    expected = ExemplarStore.from_documents(left, Counted())
    assert [row["text"] for row in held(store)] == [document.page_content for document in left]
    assert np.allclose(vectors_of(store), vectors_of(expected), atol=1e-6)


def test_a_subclass_is_taken_over_like_its_base() -> None:
    mine: Any = type("Mine", (InMemoryVectorStore,), {})
    assert len(ExemplarStore.from_vectorstore(mine.from_documents(collection(), Counted()))) == 9


class Foreign(VectorStore):
    """A collection that nobody knows."""

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return []

    @classmethod
    def from_texts(cls, texts: Any, embedding: Any, metadatas: Any = None, **kwargs: Any) -> Any:
        return cls()


@pytest.mark.filterwarnings("ignore")
def test_any_other_collection_is_refused_with_the_way_out() -> None:
    with pytest.raises(StoreError, match=r"a Foreign cannot be taken over.*from_documents"):
        ExemplarStore.from_vectorstore(Foreign())
    with pytest.raises(InvalidParameter, match="vectorstore"):
        ExemplarStore.from_vectorstore([1, 2])  # type: ignore[arg-type]
    made: Any = sklearn(Counted())
    made._serializer = type("ParquetSerializer", (), {})()  # its columns give one record's metadata the keys of others
    with pytest.raises(StoreError, match="metadata in Parquet"):
        ExemplarStore.from_vectorstore(made)


def test_a_collection_that_cannot_be_read_is_refused_without_its_content(
    canary: str, canary_free: Callable[..., None]
) -> None:
    broken = InMemoryVectorStore(Counted())
    broken.store = {"1": {"id": "1", "text": canary, "vector": [canary], "metadata": {}}}
    with pytest.raises(StoreError, match="cannot be read whole") as caught:
        ExemplarStore.from_vectorstore(broken)
    canary_free(caught.value)


class Lazy(UserDict[str, Any]):
    """A row that is fetched when it is read."""

    def __getitem__(self, key: str) -> Any:
        raise LookupError(f"the row of {self.data} is gone")


def raising(error: BaseException) -> Any:
    try:
        yield {"input": " ", "output": "left early"}
    finally:
        raise error


def raises(*_: Any) -> Any:
    raise ValueError


Odd: Any = type("Odd", (str,), dict.fromkeys(("__str__", "__eq__", "strip"), raises) | {"__hash__": str.__hash__})
OddList: Any = type("OddList", (list,), {"__iter__": raises})
OddDocument: Any = type("OddDocument", (), {"id": property(raises)})


def followed() -> Any:
    return ExemplarStore.empty(Counted()).maintenance()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("read", "problem"),
    [
        (lambda word: ExemplarStore.from_records(islice(raising(BaseException(word)), 1, 2), Counted()), "BaseExcept"),
        (lambda _: followed().add_documents([OddDocument()]), "document 0 cannot be read"),
        (lambda _: followed().add_texts(["a"], OddList([{}])), "metadata 0 cannot be read"),
        (lambda word: ExemplarStore.from_records(map(int, [word]), Counted()), "record 0 cannot be read .builtins.Val"),
        (lambda word: ExemplarStore.from_records([Lazy(input=word)], Counted()), "record 0 cannot be read .*Lookup"),
        (lambda word: ExemplarStore.from_texts(map(int, [word]), Counted()), "input 0 cannot be read"),
        (lambda word: ExemplarStore.from_documents(map(int, [word]), Counted()), "document 0 cannot be read"),
        (
            lambda word: ExemplarStore.from_documents([Document.model_construct(metadata=word)], Counted()),
            "document 0 cannot be read",
        ),
        (
            lambda word: split_with_parents([Document(word)], SimpleNamespace(split_documents=lambda _: [int(word)])),
            "document 0 cannot be split",
        ),
        (lambda word: followed().add_texts(["a"], [word]), "document 0 cannot be read"),
        (lambda word: ExemplarStore.from_records(raising(OSError(word)), Counted()), "record 0 has no text"),
    ],
)
def test_a_loader_that_fails_quotes_no_record(
    read: Callable[[str], Any], problem: str, canary: str, canary_free: Callable[..., None]
) -> None:
    with pytest.raises(InvalidRecords, match=problem) as caught:
        read(canary)
    canary_free(caught.value)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_interrupt_passes_without_what_came_with_it(kind: Any, canary: str, canary_free: Any) -> None:
    with pytest.raises(kind) as caught:
        ExemplarStore.from_records(islice(raising(kind(canary)), 1, 2), Counted())
    canary_free(caught.value)


def test_a_text_of_a_type_of_its_own_is_the_text_that_it_holds() -> None:
    other = enum.Enum("Other", {"a": "a"}, type=str)
    rows = [{Odd("input"): Odd("note"), "who": who} for who in (Odd("a"), "a", other["a"])]
    store = ExemplarStore.from_records(rows, Counted(), output_key=None, owner_key="who")
    assert (list(store.owners), held(store)[0]) == (["a"], {"input": "note"})


def test_what_a_loader_does_later_with_metadata_reaches_no_document_that_it_gave() -> None:
    def load() -> Any:
        seen: list[str] = []
        for word in "ab":
            seen.append(word)
            yield Document(word, metadata={"seen": [seen]})

    split = split_with_parents(load(), SimpleNamespace(split_documents=lambda documents: documents))
    for documents in (load(), split):
        assert held(ExemplarStore.from_documents(documents, Counted()))[0]["seen"] == [["a"]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("index", "refused"),
    [
        ("PQ3x4", "IndexPQ"),
        ("PCA4,Flat", "IndexPreTransform"),
        ("IVF2,PQ3x4", "IndexIVFPQ"),
        ("IVF2,Flat", "IndexIVFFlat"),
        ("SQ8", "IndexScalarQuantizer"),
        ("SQfp16", "IndexScalarQuantizer"),
        ("HNSW8,SQ8", "IndexHNSWSQ"),
        ("Flat", "Centred"),
        ("IDMap2,PQ3x4", "IndexPQ"),
        ("IDMap2,Flat", None),
        ("HNSW8,Flat", None),
    ],
)
def test_an_index_that_may_be_trained_on_all_vectors_is_refused_by_its_class(index: str, refused: str | None) -> None:
    """Otherwise one owner who leaves changes the vectors of all others."""
    import faiss

    made: Any = faiss_of("l2")(Counted())
    vectors = DeterministicFakeEmbedding(size=DIMENSION).embed_documents([str(i) for i in range(50)])
    made.index, documents = faiss.index_factory(DIMENSION, index), 9
    made.index.train(np.array(vectors, np.float32))
    rows = np.array(vectors[:documents], np.float32)
    if index.startswith("IDMap"):
        made.index.add_with_ids(rows, np.arange(documents))
    else:
        made.index.add(rows)
    if refused == "Centred":
        made.index.__class__ = type(refused, (faiss.IndexFlatL2,), {})
    if refused is None:
        assert np.array_equal(vectors_of(ExemplarStore.from_vectorstore(made)), as_matrix(rows, documents))
    else:
        with pytest.raises(StoreError, match=rf"vectors as {refused}, .*from_documents"):
            ExemplarStore.from_vectorstore(made)


@pytest.mark.filterwarnings("ignore")
def test_an_index_apart_from_its_documents_is_refused() -> None:
    made: Any = faiss_of("l2")(Counted())
    made.index.add(np.ones((1, DIMENSION), np.float32))
    with pytest.raises(StoreError, match="cannot be read whole"):
        ExemplarStore.from_vectorstore(made)


@pytest.mark.filterwarnings("ignore")
def test_a_collection_without_a_model_needs_one() -> None:
    made: Any = faiss_of("l2")(Counted())
    made.embedding_function = lambda text: [0.0]
    with pytest.raises(InvalidParameter, match="embeddings"):
        ExemplarStore.from_vectorstore(made)
    model = Counted()
    assert ExemplarStore.from_vectorstore(made, embeddings=model).embeddings is model
