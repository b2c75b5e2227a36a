"""A collection that was released: answers to public topics, made privately once and searched for ever."""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_dpicl.decoding.synthesis import (
    RECEIPT,
    Demonstrations,
    Made,
    answers,
    job_file,
    settings_of,
    to_line,
    writer_of,
)
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, PrivacyWarning
from langchain_dpicl.once.tables_reading import folded
from langchain_dpicl.release.base import AnyRelease, released_text, releases_in
from langchain_dpicl.release.threshold import public_texts
from langchain_dpicl.release.transaction import acting_principal, checked
from langchain_dpicl.store.records import attempt

AnyVectorStore = TypeVar("AnyVectorStore", bound=VectorStore)

_TOPIC = "topic"
_PASSAGE = "passage"


@overload
def release_collection(
    release: Runnable[Any, Any],
    topics: Sequence[str],
    *,
    embeddings: Embeddings | None = ...,
    into: None = ...,
    output: str | Path | None = ...,
    progress: Callable[[Made], None] | None = ...,
) -> InMemoryVectorStore: ...


@overload
def release_collection(
    release: Runnable[Any, Any],
    topics: Sequence[str],
    *,
    into: AnyVectorStore,
    output: str | Path | None = ...,
    progress: Callable[[Made], None] | None = ...,
) -> AnyVectorStore: ...


def release_collection(
    release: Runnable[Any, Any],
    topics: Sequence[str],
    *,
    embeddings: Embeddings | None = None,
    into: VectorStore | None = None,
    output: str | Path | None = None,
    progress: Callable[[Made], None] | None = None,
) -> VectorStore:
    """Answer each public topic once, as a vector store that anyone may search for ever.

    Each answer is one release, charged as every other; all of them together are (epsilon, delta)-DP by the budget's
    plan, for data sets that differ in one owner. Searches cost nothing: the collection is public, for any retriever,
    app or agent. `InMemoryVectorStore.dump` writes the default one to a file, and ``load`` reads it.

    Parameters
    ----------
    release
        What answers: a release of `wrap_rag`, of a vote, of keywords, of an `EmbeddingMean`, any other sealed release,
        or a `DPSampler` (`DPSampler.over_documents` writes from the documents near to each topic). Or a chain around
        one of these that answers with a text, such as ``keywords.with_receipt() | keywords_to_answer(llm, prompt)``.
    topics
        Public questions or topics, or terms that were released. They must not come from private records, which
        cannot be checked here: a topic that names a patient tells of the patient, whatever the answer says.
    embeddings
        Of documents and questions; default: those of the release's store. They are tried before the first charge.
    into
        The vector store that gets the documents, with its own embeddings, in the place of a new `InMemoryVectorStore`.
        It finds them by topic and answer together, the new one by their topics alone.
        A document's id follows from its topic: where ids are unique, a later call replaces the topic's document. What
        it refuses is raised after the charges; the same call with ``output`` then charges nothing again.
    output
        A file, on a local disk, that gets each answer with its receipt as soon as it is made.
    progress
        Called with each answer as it is made; not with those that were in the file.

    Returns
    -------
    VectorStore
        A document for each answered topic, its text the topic and the answer: a text as it is, keywords as "word,
        word", a pydantic model as JSON. ``metadata`` has the "topic" and the "receipt": a mapping, or in ``into`` a
        JSON text, since many stores keep plain values alone. A chain that gives no receipt has {}. Topics without an
        answer have no document, and a `PrivacyWarning` counts them: those whose release says nothing (the members
        abstained, a threshold was not passed, a model ended at once) were charged, those for which nothing was left
        were not.

    Resuming a job. After any end the same call with the same ``output`` answers only the topics without a line in it;
    topics may be added. A line also keeps that the members abstained. Of an answer that was under way when the process
    was killed the charge is lost, and the topic charged anew: of a `DPSampler` at once, of another release after the
    budget's ``replay_patience``. So one charge is lost for each kill. Recorded answers that did not reach the file are
    replayed at no cost (unless ``replay=False``, or of a `DPSampler` with a file), and so are all of them without
    ``output``, but for those that abstained, which are asked and charged again. The file knows a release by its budget
    and settings, and no chain from another: give each a file of its own.

    A release with ``visible_to`` answers from what its caller may see: show the collection to nobody else.

    Raises
    ------
    InvalidParameter
        No release, or a chain with several, one of which each topic would charge; topics that are no texts, or equal
        without case, accents and punctuation; a topic that the release refuses; an ``output`` that is of another job.
        Nothing was charged.
    ModelUnavailable
        Embeddings that fail, or a release's model: not charged.
    PrivacyBudgetExceeded
        Nothing is left, and no topic has an answer.
    ReleaseFailed, LedgerError
        As for the release. What was made is in the file.
    """
    parts = releases_in(release) if isinstance(release, Runnable) else []
    if len(parts) != 1:
        raise InvalidParameter("release", type(release).__name__, "a sealed release, or a chain with one in it")
    sealed = parts[0]
    wanted = _distinct(public_texts("topics", topics))
    asked = {topic: {sealed.query_key: topic} for topic in wanted}
    collection = _collection(sealed, embeddings, into, wanted[0])
    if sealed is not release and sealed.budget.on_exhausted == "zero_shot":
        raise InvalidParameter(
            "release", "a chain", 'a release itself with on_exhausted="zero_shot": its receipts mark public answers'
        )
    if sealed is release:
        for request in asked.values():
            checked(sealed, request)
    digest = settings_of(sealed, asked=sealed.query_key, output=_PASSAGE)
    with job_file(output, digest, _TOPIC) as file:
        lines = {line.get(_TOPIC): line for line in ([] if file is None else file.answers)}
        sealed.store.remember_release(f"a collection, on the budget {sealed.budget.name!r}")
        missing = {topic: request for topic, request in asked.items() if topic not in lines}
        writer = writer_of(sealed, file) if sealed is release else release
        for topic, answer, receipt in answers(writer, missing):
            lines[topic] = line = _line(topic, answer, {**receipt, "settings": digest})
            if file is not None:
                file.write(to_line(line))
            if progress is not None:
                made = Demonstrations.of([line])
                progress(Made(made[0], made.receipts[0], len(lines.keys() & asked.keys()), len(asked)))
    found = [lines[topic] for topic in wanted if topic in lines]
    if not found:
        sealed.line().check(1, acting_principal())
    documents = [_document(line, plain=into is not None) for line in found if line[_PASSAGE]]
    _warn(len(wanted), len(found), len(documents))
    _add(documents, collection, by_topic=into is None)
    return collection


def _distinct(topics: list[str]) -> list[str]:
    """The topics. Raises `InvalidParameter` for two that are equal without case, accents and punctuation."""
    first: dict[tuple[str, ...], int] = {}
    for place, topic in enumerate(topics):
        try:
            to_line({_TOPIC: topic})
        except ValueError:
            raise InvalidParameter(f"topics[{place}]", "(not shown)", "a text that JSON can hold") from None
        words = folded(topic) or (topic,)
        if (same := first.setdefault(words, place)) != place:
            raise InvalidParameter(f"topics[{place}]", topic, f"another topic than topics[{same}], {topics[same]!r}")
    return topics


def _collection(
    release: AnyRelease[Any], embeddings: Embeddings | None, into: VectorStore | None, topic: str
) -> VectorStore:
    """The vector store of the documents. Its embeddings are tried on a topic."""
    if into is None:
        reader = release.store.embeddings if embeddings is None else embeddings
        _try(reader, topic)
        return InMemoryVectorStore(reader)
    if not isinstance(into, VectorStore):
        raise InvalidParameter("into", type(into).__name__, "a LangChain vector store")
    if embeddings is not None:
        raise InvalidParameter("embeddings", type(embeddings).__name__, "left out with into, which has its own")
    if into.embeddings is not None:
        _try(into.embeddings, topic)
    return into


def _try(reader: Embeddings, topic: str) -> None:
    """Embed a topic. Raises `InvalidParameter` and `ModelUnavailable`."""
    if not isinstance(reader, Embeddings):
        raise InvalidParameter("embeddings", type(reader).__name__, "LangChain embeddings")
    _, fault = attempt(reader.embed_documents, [topic])
    if fault:
        raise ModelUnavailable(f"the embedding model fails on a topic ({fault}); nothing was charged")


def _line(topic: str, answer: Any, receipt: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the file. Its passage is None if the release says nothing."""
    text = None
    if answer is not None:
        text = released_text(answer).strip().encode(errors="replace").decode()
    return {_TOPIC: topic, _PASSAGE: text, RECEIPT: receipt}


def _document(line: Mapping[str, Any], plain: bool) -> Document:
    """A line as a document. ``plain``: with a receipt in JSON."""
    topic = line[_TOPIC]
    receipt: Any = dict(line[RECEIPT])
    if plain:
        receipt = json.dumps(receipt)
    name = str(uuid.uuid5(uuid.NAMESPACE_OID, topic))
    return Document(f"{topic}\n{line[_PASSAGE]}", id=name, metadata={"topic": topic, "receipt": receipt})


def _add(documents: list[Document], collection: VectorStore, *, by_topic: bool) -> None:
    """Add the documents. ``by_topic``: with the vectors of their topics alone, which questions resemble."""
    if not by_topic:
        collection.add_documents(documents)
        return
    assert isinstance(collection, InMemoryVectorStore)
    vectors = collection.embedding.embed_documents([document.metadata["topic"] for document in documents])
    for document, vector in zip(documents, vectors, strict=True):
        collection.store[str(document.id)] = {
            "id": document.id,
            "vector": vector,
            "text": document.page_content,
            "metadata": document.metadata,
        }


def _warn(wanted: int, answered: int, documents: int) -> None:
    """Warn of topics without a document."""
    said = []
    if silent := answered - documents:
        said.append(
            f"the release says nothing on {silent} of {wanted} topics, which were charged and have no document "
            "(members abstained, a threshold was not passed, or a model ended at once)"
        )
    if left := wanted - answered:
        said.append(f"the budget is spent: {left} of {wanted} topics have no answer, and were not charged")
    for text in said:
        warnings.warn(text, PrivacyWarning, stacklevel=3)
