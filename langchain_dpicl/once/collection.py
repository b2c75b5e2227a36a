"""A collection that was released: passages on public topics, written privately once and searched for ever."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_dpicl.decoding.sampler import DPSampler
from langchain_dpicl.decoding.synthesis import Made, synthesize_demonstrations
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, PrivacyWarning
from langchain_dpicl.release.threshold import public_texts
from langchain_dpicl.store.records import attempt


def release_collection(
    sampler: DPSampler,
    topics: Sequence[str],
    *,
    embeddings: Embeddings | None = None,
    output: str | Path | None = None,
    progress: Callable[[Made], None] | None = None,
) -> InMemoryVectorStore:
    """Write a passage for each topic from the documents near to it, as a vector store that anyone may search for ever.

    Each passage is one private answer of the sampler, charged as every answer; all of them together are (epsilon,
    delta)-DP by the budget's plan, for data sets that differ in one owner. Searches cost nothing: the collection is
    public, for any retriever, app or agent. `dump` writes it to a file, and `InMemoryVectorStore.load` reads it.

    Parameters
    ----------
    sampler
        `DPSampler.over_documents` writes from the documents near to each topic.
    topics
        Public questions or topics, or keywords that were released once. They must not come from private records, which
        cannot be checked here: a topic that names a patient tells of the patient, whatever the passage says.
    embeddings
        Of passages and questions; default: those of the sampler's store. They are tried on a topic before the charge.
    output, progress
        As for `synthesize_demonstrations`: a file from which an interrupted call resumes.

    Returns
    -------
    InMemoryVectorStore
        A document for each topic, its text the topic and the passage; ``metadata`` has the "topic" and the "receipt".
        Topics without a passage (the budget is spent, or the model ended at once) have no document, and a
        `PrivacyWarning` counts them.

    Raises what `synthesize_demonstrations` does, `InvalidParameter` for topics that are no distinct texts, and
    `ModelUnavailable` for embeddings that fail; all before the charge.
    """
    if not isinstance(sampler, DPSampler):
        raise InvalidParameter("sampler", type(sampler).__name__, "a DPSampler")
    if len(names := sampler.template.query_keys) != 1:
        raise InvalidParameter("sampler", sorted(names), "a sampler whose template asks with one text")
    wanted = public_texts("topics", topics)
    if len(set(wanted)) < len(wanted):
        raise InvalidParameter("topics", f"{len(wanted)} texts", "distinct texts")
    reader = sampler.store.embeddings if embeddings is None else embeddings
    if not isinstance(reader, Embeddings):
        raise InvalidParameter("embeddings", type(reader).__name__, "LangChain embeddings")
    _, fault = attempt(reader.embed_documents, wanted[:1])
    if fault:
        raise ModelUnavailable(f"the embedding model fails on a topic ({fault}); nothing was charged")
    made = synthesize_demonstrations(sampler, wanted, output=output, progress=progress)
    key = names[0]
    passage = sampler.store.output_key or "output"
    documents = [
        Document(
            f"{pair[key]}\n{pair[passage]}",
            metadata={"topic": pair[key], "receipt": dict(receipt)},
        )
        for pair, receipt in zip(made, made.receipts, strict=True)
        if pair[passage]
    ]
    if empty := len(made) - len(documents):
        warnings.warn(
            f"the model ended at once on {empty} of {len(wanted)} topics, which were charged and have no document",
            PrivacyWarning,
            stacklevel=2,
        )
    collection = InMemoryVectorStore(reader)
    collection.add_documents(documents)
    return collection
