"""A store follows collections of Chroma, Qdrant and pgvector, and of LangChain in memory."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from pgvector_server import ask
from stores.places import Place, marks, place_at, texts

from langchain_dpicl import ExemplarStore, StoreError


class Counted(DeterministicFakeEmbedding):
    """Counts what it embeds."""

    embedded: int = 0

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.embedded += len(texts)
        return super().embed_documents(texts)


@pytest.fixture
def place() -> Iterator[Place]:
    with place_at(None) as made:
        yield made


def note(text: str, owner: str, source: str) -> Document:
    return Document(page_content=text, metadata={"patient": owner, "source": source})


def chroma(model: Any, request: pytest.FixtureRequest) -> VectorStore:
    made: VectorStore = pytest.importorskip("langchain_chroma").Chroma(f"notes-{uuid.uuid4().hex}", model)
    return made


def qdrant(model: Any, request: pytest.FixtureRequest) -> VectorStore:
    library, models = pytest.importorskip("langchain_qdrant"), pytest.importorskip("qdrant_client.models")
    client = pytest.importorskip("qdrant_client").QdrantClient(":memory:")
    client.create_collection("notes", models.VectorParams(size=6, distance=models.Distance.COSINE))
    request.addfinalizer(client.close)
    made: VectorStore = library.QdrantVectorStore(client, "notes", model)
    return made


def pgvector(model: Any, request: pytest.FixtureRequest) -> VectorStore:
    url = request.getfixturevalue("pgvector_url")
    made: Any = pytest.importorskip("langchain_postgres").PGVector(
        model, connection=url, collection_name="notes", use_jsonb=True, create_extension=True
    )
    request.addfinalizer(made._engine.dispose)
    other = type(made)(model, connection=url, collection_name="others", use_jsonb=True)
    request.addfinalizer(other._engine.dispose)
    other.add_documents([note("of another collection", "eve", "e")])
    collection: VectorStore = made
    return collection


def in_memory(model: Any, request: pytest.FixtureRequest) -> VectorStore:
    return InMemoryVectorStore(model)


SOURCES = {"Chroma": chroma, "Qdrant": qdrant, "PGVector": pgvector, "InMemoryVectorStore": in_memory}
IDS = [str(uuid.UUID(int=i + 1)) for i in range(6)]


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> VectorStore:
    made = SOURCES[request.param](Counted(size=6), request)
    made.add_documents([note(f"note {i}", f"p{i % 2}", "s") for i in range(5)], ids=IDS[:5])
    return made


@pytest.mark.filterwarnings("ignore")
def test_a_collection_is_copied_and_nothing_is_embedded_again(source: VectorStore) -> None:
    model: Any = source.embeddings
    embedded = model.embedded
    store = ExemplarStore.from_vectorstore(source, owner_key="patient")
    assert store.embeddings is model
    assert model.embedded == embedded
    found = {each.id: (each.page_content, each.metadata) for each in store.maintenance().get_by_ids(IDS)}
    assert found == {IDS[i]: (f"note {i}", {"patient": f"p{i % 2}", "source": "s"}) for i in range(5)}
    for i in range(5):
        with store.reading() as view:
            (row,) = view.rows_with([IDS[i]])
            vector = view.vectors(np.array([row]))[0]
        expected = np.asarray(model.embed_query(f"note {i}"))
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_store_follows_a_collection(place: Place, source: VectorStore) -> None:
    """What is new is added, what changed replaced, what is gone removed; the rest is left, and records without an id
    stay."""
    store = place.empty(Counted(size=6), owner_key="patient")
    model: Any = store.embeddings
    store.add([{"text": "plain", "patient": "ann"}])
    embedded = model.embedded
    counts = {"num_added": 5, "num_updated": 0, "num_skipped": 0, "num_deleted": 0}
    assert store.sync_from(source) == counts
    assert store.sync_from(source) == {**counts, "num_added": 0, "num_skipped": 5}
    before = marks(store)
    source.delete([IDS[0]])
    source.delete([IDS[1]])
    source.add_documents([note("note 1, corrected", "p1", "s"), note("note 5", "p5", "s")], ids=[IDS[1], IDS[5]])
    assert store.sync_from(source) == {"num_added": 1, "num_updated": 1, "num_skipped": 3, "num_deleted": 1}
    assert texts(store) == ["note 1, corrected", "note 2", "note 3", "note 4", "note 5", "plain"]
    assert {name: mark for name, mark in marks(store).items() if name != "p5"} == before
    assert model.embedded == embedded
    source.delete(IDS[1:])
    with pytest.raises(StoreError, match="empty"):
        store.sync_from(source)
    assert len(store) == 6


@pytest.mark.filterwarnings("ignore")
def test_what_has_not_changed_is_left_whatever_order_a_collection_gives_its_metadata_in(
    source: VectorStore, place: Place
) -> None:
    """Chroma gives them in another order every time. Without an owner key a document is known by its content: as
    another owner it would have new tickets."""
    metadata = {"zone": "x", "age": 3, "mid": True, "team": "a", "year": 2020, "kind": "k"}
    source.add_documents([Document(page_content=f"n {i}", metadata=metadata) for i in range(5)], ids=IDS[:5])
    store = place.empty(Counted(size=6), owner_key=None)
    store.sync_from(source)
    before = marks(store)
    for _ in range(3):
        assert store.sync_from(source) == {"num_added": 0, "num_updated": 0, "num_skipped": 5, "num_deleted": 0}
    assert sorted(marks(ExemplarStore.from_vectorstore(source)).values()) == sorted(before.values())


@pytest.mark.filterwarnings("ignore")
def test_no_document_that_stays_is_passed_over_if_another_is_deleted_while_a_collection_is_read(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages by number would begin behind it, and the store would take it for gone."""
    source: Any = chroma(Counted(size=6), request)
    source.add_documents([note(f"note {i}", "ann", "s") for i in range(6)], ids=IDS)
    store = ExemplarStore.from_vectorstore(source)
    get, pages = source.get, []

    def meanwhile(*given: Any, **options: Any) -> Any:
        found = get(*given, **options)
        pages.append(found)
        if "documents" in options["include"] and IDS[0] in get(include=[])["ids"]:
            source.delete([IDS[0]])
        return found

    monkeypatch.setattr("langchain_dpicl.store.sources._PAGE", 2)
    monkeypatch.setattr(source, "get", meanwhile)
    store.sync_from(source)
    assert len(pages) > 3
    assert set(texts(store)) >= {f"note {i}" for i in range(1, 6)}


@pytest.mark.filterwarnings("ignore")
def test_a_changed_owner_and_a_changed_vector_are_changes() -> None:
    model = Counted(size=6)
    source = InMemoryVectorStore(model)
    source.add_documents([note("one", "ann", "a"), note("two", "ann", "a")], ids=["1", "2"])
    store = ExemplarStore.from_vectorstore(source, owner_key="patient")
    source.store["1"]["metadata"]["patient"] = "bob"
    source.store["2"]["vector"] = [1.0, 0, 0, 0, 0, 0]
    assert store.sync_from(source)["num_updated"] == 2
    assert sorted(store.owners) == ["ann", "bob"]
    assert store.sync_from(source)["num_updated"] == 0


@pytest.mark.filterwarnings("ignore")
def test_dates_in_metadata_come_along() -> None:
    source = InMemoryVectorStore(Counted(size=6))
    source.add_documents([Document(page_content="x", metadata={"day": datetime.date(2026, 1, 2)})], ids=["1"])
    store = ExemplarStore.from_vectorstore(source)
    assert store.maintenance().get_by_ids(["1"])[0].metadata == {"day": "2026-01-02"}
    assert store.sync_from(source)["num_skipped"] == 1


def test_metadata_that_is_no_mapping_is_refused_and_not_quoted(
    request: pytest.FixtureRequest, canary: str, canary_free: Callable[..., None]
) -> None:
    """Other tools write texts there."""
    qdrants, postgres = (make(Counted(size=6), request) for make in (qdrant, pgvector))
    qdrants.add_documents([note("one", "ann", "a")], ids=IDS[:1])
    qdrants.client.set_payload("notes", {"metadata": canary}, IDS[:1])  # type: ignore[attr-defined]
    postgres.add_documents([note("one", "ann", "a")], ids=IDS[:1])
    url = request.getfixturevalue("pgvector_url")
    ask(url, f"UPDATE langchain_pg_embedding SET cmetadata = to_jsonb('{canary}'::text) WHERE id = '{IDS[0]}'")
    for source in (qdrants, postgres):
        with pytest.raises(StoreError, match="metadata that is no mapping") as caught:
            ExemplarStore.from_vectorstore(source)
        canary_free(caught.value)


@pytest.mark.parametrize("datatype", ["float16", "uint8", "float32"])
def test_a_qdrant_collection_of_rounded_vectors_is_refused(datatype: str) -> None:
    models = pytest.importorskip("qdrant_client.models")
    client = pytest.importorskip("qdrant_client").QdrantClient(":memory:")
    about = models.VectorParams(size=6, distance=models.Distance.DOT, datatype=datatype)
    client.create_collection("notes", about)
    made = pytest.importorskip("langchain_qdrant").QdrantVectorStore(
        client, "notes", Counted(size=6), distance=models.Distance.DOT
    )
    made.add_documents([note("one", "ann", "a")])
    if datatype == "float32":
        assert len(ExemplarStore.from_vectorstore(made)) == 1
    else:
        with pytest.raises(StoreError, match=f"vectors as {datatype}"):
            ExemplarStore.from_vectorstore(made)
    client.close()


def test_a_qdrant_collection_without_vectors_of_texts_is_refused() -> None:
    models = pytest.importorskip("qdrant_client.models")
    client = pytest.importorskip("qdrant_client").QdrantClient(":memory:")
    client.create_collection("notes", {"other": models.VectorParams(size=6, distance=models.Distance.COSINE)})
    client.upsert("notes", [models.PointStruct(id=1, vector={"other": [1.0] * 6}, payload={"page_content": "x"})])
    made = pytest.importorskip("langchain_qdrant").QdrantVectorStore(
        client, "notes", Counted(size=6), validate_collection_config=False
    )
    with pytest.raises(StoreError, match="without a vector"):
        ExemplarStore.from_vectorstore(made)
    client.close()
