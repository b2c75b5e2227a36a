"""`DPRetriever`: a retriever whose documents are releases."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool

from langchain_dpicl.aggregators.reading import text_of
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import Released
from langchain_dpicl.release.base import SAID, AnyRelease, NeverHidden, releases_in, said


class DPRetriever(NeverHidden, Released, BaseRetriever):
    """A retriever whose documents are releases: put it in the place of a chain's retriever, and the chain is private.

    Parameters
    ----------
    release
        A sealed release, a `DPSampler`, or a chain with one in it that answers with a text, such as
        ``keywords.with_receipt() | keywords_to_answer(llm, prompt)``, which writes a passage from released keywords.
    input_key
        The request's key for the query. Default: the ``nearest_to`` of the release's selector, else "input"; of a
        sampler its store's ``input_key``. A release of `wrap_rag` asks its chain in the form that the chain takes.
    k
        At most this many documents; may also be given to `invoke`.
    on_exhausted
        What happens if the budget is spent, the model is down or the members abstain: "raise" the error, or give it as
        a "message", a document that says so, with the error's name in its metadata. "auto" (default): a message within
        an agent's tool, which reads it and goes on, else an error. A tool that searches in tasks or threads of its own
        (``gather``, ``batch``, a `MultiQueryRetriever` around this one) is not recognised: say "message" there.

    In a release of `wrap_rag` only documents near to the query take part (its ``threshold``), and in another release if
    its selector has a threshold.

    Each query is one release, charged like any other. It gives one document: a label, a sentence, a passage, noisy
    scores as "label: count, ...", keywords as "word, word, ...". With ``k``, the first k keywords give one document
    each; whatever k is, the release is the same and is charged once. If nothing is released, as when
    propose-test-release fails, there is no document. ``metadata["receipt"]`` is the receipt, if the chain gives one.

    Raises the release's errors, above all `PrivacyBudgetExceeded`, and `InvalidParameter` for a query that is no text,
    which costs nothing. Callbacks see the query and the released documents.
    """

    release: Runnable[Any, Any]
    input_key: str
    k: int | None = None
    on_exhausted: str = "auto"

    def __init__(
        self,
        release: Runnable[Any, Any],
        *,
        input_key: str | None = None,
        k: int | None = None,
        on_exhausted: Literal["auto", "raise", "message"] = "auto",
        **options: Any,
    ) -> None:
        found = releases_in(release)
        if not isinstance(release, Runnable) or not found:
            raise InvalidParameter("release", type(release).__name__, "a release, or a chain with one in it")
        if input_key is None:
            input_key = found[0].query_key
        if not isinstance(input_key, str) or not input_key:
            raise InvalidParameter("input_key", input_key, "a non-empty string")
        if isinstance(release, AnyRelease):
            release = release.with_receipt()
        k = None if k is None else checks.whole("k", k)
        if on_exhausted not in ("auto", "raise", "message"):
            raise InvalidParameter("on_exhausted", on_exhausted, '"auto", "raise" or "message"')
        fields: dict[str, Any] = {
            "release": release,
            "input_key": input_key,
            "k": k,
            "on_exhausted": on_exhausted,
            **options,
        }
        super().__init__(**fields)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
    ) -> list[Document]:
        request, k = self._checked(query, k)
        try:
            return _documents(self.release.invoke(request, _config(run_manager)), k)
        except tuple(SAID) as error:
            return self._told(error)

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        k: int | None = None,
    ) -> list[Document]:
        request, k = self._checked(query, k)
        try:
            return _documents(await self.release.ainvoke(request, _config(run_manager)), k)
        except tuple(SAID) as error:
            return self._told(error)

    def _told(self, error: Exception) -> list[Document]:
        """The error as a document, or the error."""
        if self.on_exhausted == "raise" or (self.on_exhausted == "auto" and not _within_tool()):
            raise error
        return [Document(said(error), metadata={"error": type(error).__name__})]

    def _checked(self, query: str, k: int | None) -> tuple[dict[str, str], int | None]:
        if not isinstance(query, str):
            raise InvalidParameter("query", type(query).__name__, "a text")
        k = self.k if k is None else checks.whole("k", k)
        return {self.input_key: query}, k


def _config(
    run: AsyncCallbackManagerForRetrieverRun | CallbackManagerForRetrieverRun,
) -> RunnableConfig:
    """Of the release: with the metadata, by which it knows requests that LangServe's own routes let in."""
    return {"callbacks": run.get_child(), "metadata": dict(run.inheritable_metadata)}


def _within_tool() -> bool:
    """Return whether a LangChain tool runs this, as far as the stack shows it."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), BaseTool):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _documents(answer: Any, k: int | None) -> list[Document]:
    """The release as documents. Post-processing: it sees nothing else."""
    metadata: dict[str, Any] = {}
    if isinstance(answer, Mapping) and set(answer) == {"answer", "receipt"}:
        metadata = {"receipt": dict(answer["receipt"])}
        answer = answer["answer"]
    if answer is None:
        texts = []
    elif isinstance(answer, (list, tuple)):
        words = [str(word) for word in answer]
        texts = [", ".join(words)] if k is None else words[:k]
    elif isinstance(answer, Mapping):
        texts = [", ".join(f"{label}: {value}" for label, value in answer.items())]
    else:
        text = text_of(answer)
        texts = [str(answer) if text is None else text]
    return [Document(page_content=text, metadata=dict(metadata)) for text in texts if text.strip()]
